"""From a model and a cluster to a layout: all of them are tried, and the fastest of those that fit are kept.

What a layout holds and sends is in costs.py, how fast it is in speed.py, the words about it in explain.py.
"""
import dataclasses
import math

import costs
import speed
from costs import GIB, Layout
from speed import GPUS
from trainer import least, refuse

SCHEDULES = ("1f1b", "interleaved", "zerobubble", "dualpipe", "afab")
RECOMPUTE = ("none", "selective", "full")
NAMES = dict(mbs="micro_batch", acc="accumulation")       # short names in --config and in tables


# ---------------------------------------------------------------------- all layouts
def divisors(number, most=None):
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def valid(c, l):
    """As config.py's checks of the degrees."""
    cut = (c.num_attention_heads, c.intermediate_size, c.vocab_size, l.seq_len)
    heads = all(size % l.tp == 0 for size in cut)
    kv_heads = c.num_key_value_heads % l.tp == 0 or l.tp % c.num_key_value_heads == 0
    chunks = l.cp == 1 or l.seq_len % math.lcm(2 * l.cp, l.cp * l.tp) == 0
    experts = l.dp * l.cp % l.ep == 0 and max(1, c.num_local_experts) % l.ep == 0
    return heads and kv_heads and chunks and experts


def meshes(c, cluster, seq_len):
    """Every valid (dp, tp, cp, pp, ep). tp over more than two nodes and parts of a sequence below 1,024
    tokens are left out."""
    for tp in divisors(cluster.gpus, 2 * cluster.gpus_per_node):
        for cp in divisors(cluster.gpus // tp, max(1, seq_len // 1024)):
            for pp in divisors(cluster.gpus // tp // cp, c.num_hidden_layers):
                dp = cluster.gpus // tp // cp // pp
                for ep in divisors(math.gcd(dp * cp, max(1, c.num_local_experts))):
                    l = Layout(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, seq_len=seq_len)
                    if valid(c, l):
                        yield l


def enough(c, l):
    """Whether the schedule has the layers and the micro-batches that it needs."""
    return l.accumulation >= least(l.schedule, l.pp) and c.num_hidden_layers >= l.pp * l.stages_per_rank


def batches(per_rank):
    """(micro-batch, accumulation), the largest micro-batch first, that make a rank's sequences, to a
    tenth."""
    sizes = [2**i for i in range(int(math.log2(max(1, per_rank))) + 1)]
    pairs = [(size, round(per_rank / size)) for size in reversed(sizes)]
    return [(size, m) for size, m in pairs if abs(m * size / per_rank - 1) <= 0.1]


def layouts(c, cluster, seq_len, sequences):
    """Every layout of the cluster, as lists that differ in the micro-batch alone, the largest first."""
    for mesh in meshes(c, cluster, seq_len):
        pairs = batches(sequences / mesh.dp)
        for zero in (0, 1, 2, 3) if mesh.dp * mesh.cp > 1 else (0,):
            for schedule in SCHEDULES if mesh.pp > 1 else ("1f1b",):
                for recompute in RECOMPUTE:
                    l = dataclasses.replace(mesh, zero=zero, schedule=schedule, recompute=recompute)
                    row = [dataclasses.replace(l, micro_batch=size, accumulation=m) for size, m in pairs]
                    yield [l for l in row if enough(c, l)]


def parse_config(text, c, cluster, seq_len, sequences):
    """One layout. What is not said: dp is what is left of the GPUs, the accumulation what the batch takes."""
    said = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = NAMES.get(name, name)
        if name not in Layout.__dataclass_fields__ or name == "seq_len" or not value:
            refuse(f"--config {part}: dp, tp, cp, pp, ep, zero, schedule, mbs, acc, recompute take =value")
        choices = dict(schedule=SCHEDULES, recompute=RECOMPUTE, zero=tuple("0123")).get(name)
        if choices and value not in choices:
            refuse(f"--config {part}: must be one of {', '.join(choices)}")
        if not choices and not (value.isdecimal() and int(value) > 0):
            refuse(f"--config {part}: must be a whole number, at least 1")
        said[name] = value if name in ("schedule", "recompute") else int(value)
    used = math.prod(said.get(name, 1) for name in ("tp", "cp", "pp"))
    dp = said.setdefault("dp", max(1, cluster.gpus // used))
    if dp * used != cluster.gpus:
        refuse(f"--config: dp({dp}) x tp x cp x pp({used}) = {dp * used} != gpus({cluster.gpus})")
    said.setdefault("accumulation", max(1, round(sequences / dp / said.get("micro_batch", 1))))
    l = Layout(**said, seq_len=seq_len)
    if not valid(c, l):
        refuse(f"--config {text}: tp must divide heads({c.num_attention_heads}) and suit kv "
               f"heads({c.num_key_value_heads}), ep divide dp x cp({l.dp * l.cp}) and "
               f"experts({c.num_local_experts}), cp and tp the sequence({seq_len})")
    if not enough(c, l):
        refuse(f"--config {text}: --schedule {l.schedule} with pp({l.pp}) takes more layers than "
               f"{c.num_hidden_layers} or more micro-batches than {l.accumulation}")
    return l


# ---------------------------------------------------------------------- one layout
def memory(c, l, slack=1.0, stages=None):
    """GiB by kind, of the rank that needs most; with stages given, of the first two and the last, where that
    nearly always is."""
    ranks = range(l.pp) if stages is None else {0, 1 % l.pp, l.pp - 1}
    stages = stages or costs.our_stages(c, l)
    each = [costs.our_memory(c, l, rank, stages[rank]) for rank in ranks]
    worst = max(each, key=lambda kinds: sum(kinds.values()))
    return {kind: slack * size / GIB for kind, size in worst.items()}


def limit(cluster):
    """GiB that may be asked for: of 80 about 70 can be used, as runs that failed show."""
    return cluster.gpu.memory * speed.USABLE / GPUS["h100"].memory


@dataclasses.dataclass
class Candidate:
    layout: Layout
    seconds: dict
    memory: dict = None                                   # looked up when it is shown

    @property
    def tokens_per_s(self):
        l = self.layout
        return l.dp * l.micro_batch * l.accumulation * l.seq_len / sum(self.seconds.values()) / l.gpus


def evaluate(c, l, cluster, constants):
    seconds = speed.step_seconds(c, l, cluster, costs.our_stages(c, l), constants["time"])
    return Candidate(l, seconds, memory(c, l, constants["slack"]))


# ---------------------------------------------------------------------- the best
def search(c, cluster, seq_len, sequences, constants):
    """(all candidates that fit, the fastest first, of equal ones the simplest; how many layouts were looked
    at)"""
    found, looked_at, room = [], 0, limit(cluster)
    for row in layouts(c, cluster, seq_len, sequences):
        looked_at += len(row)
        stages = costs.our_stages(c, row[0]) if row else []
        fits = lambda l: sum(memory(c, l, constants["slack"], stages).values()) <= room
        first, end = 0, len(row)                          # where one micro-batch fits, so do all smaller ones
        while first < end:
            middle = (first + end) // 2
            if fits(row[middle]):
                end = middle
            else:
                first = middle + 1
        for l in row[first:]:
            found.append(Candidate(l, speed.step_seconds(c, l, cluster, stages, constants["time"])))
    simple = lambda one: (one.layout.cp, one.layout.zero, one.layout.tp, one.layout.pp)
    return sorted(found, key=lambda one: (-round(one.tokens_per_s, 1), simple(one))), looked_at


def best_per_mesh(c, candidates, cluster, slack, count=10):
    """The fastest of each mesh, looked at again on every rank. Short sequences make cp and dp the same: one
    of them is shown."""
    best = {}
    for one in candidates:
        mesh = one.layout.tp, one.layout.pp, one.layout.ep
        if mesh not in best and len(best) < count:
            one.memory = memory(c, one.layout, slack)
            if sum(one.memory.values()) <= limit(cluster):
                best[mesh] = one
    return list(best.values())


def fewest_gpus(c, cluster, seq_len, slack):
    """The smallest power of two on which some layout fits, with one sequence at a time."""
    for gpus in (2**i for i in range(17)):
        for mesh in meshes(c, cluster._replace(gpus=gpus), seq_len):
            zero = 3 if mesh.dp * mesh.cp > 1 else 0
            l = dataclasses.replace(mesh, zero=zero, recompute="full", accumulation=mesh.pp)
            if sum(memory(c, l, slack, costs.our_stages(c, l)).values()) <= limit(cluster):
                return gpus
    return math.inf
