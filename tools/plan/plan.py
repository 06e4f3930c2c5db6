"""Find layouts for a model on a cluster: time all of them, and keep the best of those that fit."""
import dataclasses
import math
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

import costs
import speed
import trainer
import trust
from costs import DEFAULT_SCHEDULE, GIB, Layout
from models import Model
from trainer import SCHEDULES, Refused, fail

RECOMPUTE = ("none", "selective", "full")
NAMES = dict(mbs="micro_batch", acc="accumulation", v="virtual")   # short names in --config and in tables
# Peak memory is computed, not measured: in most layouts, costs.py's is below a dry run's by at most this share
MEMORY_ERROR = 0.03


# ---------------------------------------------------------------------- all layouts
def divisors(number, most=math.inf):
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def impossible(c, l, constants=None):
    """Return why the trainer, in its own words, or the planner would refuse a layout; None if neither would."""
    if SCHEDULES[l.schedule].split_backward and constants and not constants.get("splits_backward", True):
        return f"{l.schedule}: Megatron-LM does not have it"
    if l.ep > 1 and not c.num_local_experts:
        return f"ep({l.ep}) shards experts, and the model has none"
    if l.batch >= trainer.TOO_LARGE:
        return f"a batch of {l.batch:,} sequences is too large; the trainer takes fewer than {trainer.TOO_LARGE:,}"
    filled_in = l if l.pp > 1 else l._replace(schedule=DEFAULT_SCHEDULE)   # as the trainer's parse_args does
    args = SimpleNamespace(
        **filled_in._asdict(), global_batch_size=l.batch, stages_per_rank=filled_in.stages_per_rank,
        micro_batch_size=l.micro_batch, sp="on", cp_mode="zigzag" if l.cp > 1 else "ring", device="cuda",
        dtype="bfloat16", attention="sdpa")
    try:
        for check in trainer.CHECKS:
            check(args, c)
    except Refused as refused:
        return str(refused)
    if SCHEDULES[l.schedule].split_backward and l.accumulation < l.pp:
        return (f"{l.schedule} with fewer micro-batches({l.accumulation}) than pp({l.pp}): the planner does "
                f"not know what it keeps; use at least pp micro-batches, or {DEFAULT_SCHEDULE}")


def meshes(c, cluster, seq_len, **theirs):
    """Yield every valid mesh (dp, tp, cp, pp, ep) with tp over at most two nodes and at least 1,024 tokens after cp."""
    for tp in divisors(cluster.gpus, 2 * cluster.gpus_per_node):
        for cp in divisors(cluster.gpus // tp, max(1, seq_len // 1024)):
            for pp in divisors(cluster.gpus // tp // cp, c.num_hidden_layers):
                dp = cluster.gpus // tp // cp // pp
                for ep in divisors(math.gcd(dp * cp * tp, max(1, c.num_local_experts))):
                    l = Layout(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, seq_len=seq_len, **theirs)
                    if not impossible(c, l):
                        yield l


def zero_stages(c, mesh):
    """Return the stages to try: 0 alone if no other rank holds the same parameters."""
    copies = mesh.dp * mesh.cp, mesh.expert_ranks if c.num_local_experts else 1
    return (0, 1, 2, 3) if max(copies) > 1 else (0,)


def batch_near(wanted, gpus):
    """Return the batch, within a tenth of the one wanted, that the most degrees of dp and micro-batches divide: a multiple of
    the odd part of the GPUs, and of a large power of two."""
    odd = gpus // (gpus & -gpus)
    unit = 2 ** max(0, int(math.log2(wanted)) - 11)       # with very many sequences, do not try every number
    first, last = max(1, math.ceil(0.9 * wanted / unit)), max(1, math.floor(1.1 * wanted / unit))
    near = [unit * i for i in range(first, last + 1)]
    return max(near, key=lambda batch: (math.gcd(batch, odd), batch & -batch, -abs(batch - wanted)))


def schedules(c, pp, constants=None):
    """Return (schedule, virtual) of each of the trainer's schedules to time. If a rank has one layer, that is the default alone."""
    most = c.num_hidden_layers // pp
    if pp == 1 or most < 2:
        return [(DEFAULT_SCHEDULE, 2)]
    found = [Layout(schedule=name, virtual=v) for name in worth_timing() for v in stages_to_choose(name)
             if (constants or {}).get("splits_backward", True) or not SCHEDULES[name].split_backward]
    return [(l.schedule, l.virtual) for l in found if l.stages_per_rank <= most]


def stages_to_choose(name):
    """Return the values of virtual to try. If a schedule has a fixed number of stages, virtual means nothing."""
    row = SCHEDULES[name]
    return [times * row.stages_per_rank for times in (1, 2, 4)] if row.or_more else [2]


@lru_cache
def worth_timing(p=4):
    """Return the names of the default schedule and of those that idle less or keep less."""
    def idle_and_kept(name):
        row = SCHEDULES[name]
        v = row.stages_per_rank
        lists = trainer.make(name, p, max(2 * p, row.min_micro_batches(p)), v)
        idle = trainer.bubble(trainer.simulate(lists))
        return max(idle) / v, max(map(trainer.max_in_flight, lists)) / v
    found = {name: idle_and_kept(name) for name in SCHEDULES}
    idle, kept = found[DEFAULT_SCHEDULE]
    return [DEFAULT_SCHEDULE, *(name for name, less in found.items() if less[0] < idle or less[1] < kept)]


def fewest_micro_batches(l):
    """Return the fewest micro-batches to time. Where W is delayed to fill the end, fewer than the ranks cannot fill it."""
    row = SCHEDULES[l.schedule]
    return max(row.min_micro_batches(l.pp), l.pp * row.split_backward)


def parse_config(text, c, cluster, seq_len, batch, **theirs):
    said = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = NAMES.get(name, name)
        if name not in Layout._fields or name in ("seq_len", "wide", "whole_logits", "balance") or not value:
            fail(f"--config {part}: is not NAME=VALUE with a known name; the names are dp, tp, cp, pp, ep, zero, "
                 "schedule, v, mbs, acc, recompute")
        choices = dict(schedule=[*SCHEDULES], recompute=RECOMPUTE, zero=tuple("0123")).get(name)
        if choices and value not in choices:
            fail(f"--config {part}: must be one of {', '.join(choices)}")
        if not choices and not (value.isdecimal() and len(value) < 10 and int(value) > 0):
            fail(f"--config {part}: must be a whole number of at least 1")
        if name in said:
            fail(f"--config {part}: {name} is given twice; give it once")
        said[name] = value if name in ("schedule", "recompute") else int(value)
    used = math.prod(said.get(name, 1) for name in ("tp", "cp", "pp"))
    dp = said.setdefault("dp", max(1, cluster.gpus // used))
    if dp * used != cluster.gpus:
        fail(f"--config: dp({dp}) x tp x cp x pp({used}) = {dp * used} != gpus({cluster.gpus})")
    said.setdefault("accumulation", max(1, round(batch / dp / said.get("micro_batch", 1))))
    l = Layout(**said, seq_len=seq_len, **theirs)
    layers, most = c.num_hidden_layers, c.num_hidden_layers // l.pp
    if SCHEDULES[l.schedule].or_more and l.pp > 1 and l.virtual > most:
        instead = f"v={most}" if most > 1 else f"pp={layers // 2}"
        fail(f"--config v={l.virtual}: pp({l.pp}) x v({l.virtual}) = {l.pp * l.virtual} stages, but only {layers} layers; "
             f"use {instead} or less")
    if why := impossible(c, l):
        fail(f"--config {text}: {why}")
    return l


def changed_to(l, gpus, batch, **changed):
    """Return the layout with these changes, this batch, and the rest of the GPUs in dp; or why there is no such layout."""
    l = l._replace(**changed)
    used = l.tp * l.cp * l.pp
    if gpus % used:
        return f"{gpus:,} GPUs are not a multiple of tp x cp x pp = {used}"
    dp = gpus // used
    if batch % (dp * l.micro_batch):
        return f"{batch:,} sequences are not a multiple of dp({dp}) x micro-batch({l.micro_batch})"
    return l._replace(dp=dp, accumulation=batch // dp // l.micro_batch)


# ---------------------------------------------------------------------- one layout
def memory(c, l, slack=1.0, rank=None):
    """Return GiB by kind, for a rank of pp, or for the one that needs most."""
    rank = fullest(c, l) if rank is None else rank
    held = costs.our_memory(c, l, rank, costs.our_stages(c, l)[rank])
    return {kind: slack * size / GIB for kind, size in held.items()}


def fullest(c, l):
    """Return the rank of pp that needs the most memory.

    Among ranks with the same stages, the first keeps the most. Where W is delayed, memory may instead grow from one rank
    to the next, except at the very last, which keeps all micro-batches but one for W alone.
    """
    stages = costs.our_stages(c, l)
    ranks = {stages.index(stage) for stage in stages}
    if l.schedule not in costs.FORMULAS:
        ranks = range(l.pp)
    elif SCHEDULES[l.schedule].split_backward:
        ranks |= {max(0, l.pp - 2), *(l.pp - 1 - stages[::-1].index(stage) for stage in stages)}
    return max(sorted(ranks), key=lambda rank: sum(costs.our_memory(c, l, rank, stages[rank]).values()))


def limit(cluster):
    """Return the GiB that a layout may use on a GPU."""
    return cluster.gpu.usable


def fits(held, cluster):
    return held * (1 + MEMORY_ERROR) <= limit(cluster)


def may_fit(c, l, cluster, slack):
    """Return whether both ends of the pipeline have room for the persistent state."""
    stages = costs.our_stages(c, l)
    held = (slack * sum(costs.persistent(c, l, stages[rank]).values()) / GIB for rank in (0, -1))
    return all(fits(one, cluster) for one in held)


@dataclasses.dataclass
class Candidate:
    layout: Layout
    seconds: dict
    held_back: float = 0.0                                # tokens per second per GPU, by which it is ranked
    memory: dict = None                                   # of the fullest rank, once computed

    @property
    def step(self):
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self):
        return self.layout.batch * self.layout.seq_len / self.step / self.layout.gpus

    @property
    def held(self):
        return sum(self.memory.values())


def evaluate(c, l, cluster, constants):
    seconds = speed.step_seconds(c, l, cluster, costs.our_stages(c, l), constants["time"])
    one = Candidate(l, seconds, memory=memory(c, l, constants["slack"]))
    one.held_back = trust.held_back(c, l, cluster, one.tokens_per_s)
    return one


# ---------------------------------------------------------------------- the best
def timed(c, cluster, seq_len, batch, constants):
    """Yield every layout of the cluster that meets the batch, with its time."""
    k, known = constants["time"], {}                      # known: times of layers, the same for every dp
    for mesh in meshes(c, cluster, seq_len, **constants.get("layout", {})):
        if batch % mesh.dp:
            continue
        stages_of_zero = [zero for zero in zero_stages(c, mesh)
                          if may_fit(c, mesh._replace(zero=zero), cluster, constants["slack"])]
        ways = [(schedule, v, costs.our_stages(c, mesh._replace(schedule=schedule, virtual=v)))
                for schedule, v in schedules(c, mesh.pp, constants)]
        for recompute in RECOMPUTE:
            each = batch // mesh.dp
            for size in (2**i for i in range(int(math.log2(each)) + 1) if each % 2**i == 0):
                m = each // size
                l = mesh._replace(recompute=recompute, micro_batch=size, accumulation=m)
                alike = l.tp, l.cp, l.ep, recompute, size
                times = known[alike] = known.get(alike) or speed.Times(c, l, cluster, k)
                for schedule, v, stages in ways:
                    l = l._replace(schedule=schedule, virtual=v)
                    if m < fewest_micro_batches(l):
                        continue
                    seconds, windows = speed.of_micro_batches(c, l, cluster, stages, k, times)
                    for zero in stages_of_zero:
                        one = l._replace(zero=zero)
                        of_dp = speed.data_parallel_seconds(c, one, cluster, stages[0], k, *windows)
                        yield Candidate(one, seconds | of_dp)


class Search:
    """All layouts of a cluster, best first, and of equal ones the simplest first. Whether one fits is computed only when
    needed: if a micro-batch is too large, so are all larger ones."""
    def __init__(self, c, cluster, seq_len, batch, constants):
        self.c, self.cluster, self.slack, self.too_large = c, cluster, constants["slack"], {}
        found, known = list(timed(c, cluster, seq_len, batch, constants)), {}
        for one in found:
            one.held_back = trust.held_back(c, one.layout, cluster, one.tokens_per_s, known)
        simple = lambda l: (l.cp, l.zero, l.tp, l.pp, l.recompute != "none", l.schedule != DEFAULT_SCHEDULE,
                            l.virtual)
        self.ordered = sorted(found, key=lambda one: (-float(f"{one.held_back:.4g}"), *simple(one.layout)))

    def fits(self, one):
        l = one.layout
        but_size = l._replace(micro_batch=0, accumulation=0)
        if l.micro_batch >= self.too_large.get(but_size, math.inf):
            return False
        if one.memory is None:
            one.memory = memory(self.c, l, self.slack)
        if fits(one.held, self.cluster):
            return True
        self.too_large[but_size] = l.micro_batch
        return False

    def first(self, wanted):
        """Return the best layout that fits and is wanted, or None."""
        return next((one for one in self.ordered if wanted(one.layout) and self.fits(one)), None)

    def fastest(self):
        """Return the layout that fits and is fastest by estimate alone, or None."""
        by_speed = sorted(self.ordered, key=lambda one: -one.tokens_per_s)
        return next((one for one in by_speed if self.fits(one)), None)

    def best(self, count=8):
        """Return the best layouts, one for each tp, pp and ep. cp does not count: with short sequences it is much like dp."""
        best = {}
        for one in self.ordered:
            mesh = one.layout.tp, one.layout.pp, one.layout.ep
            if mesh not in best and self.fits(one):
                best[mesh] = one
            if len(best) == count:
                break
        return list(best.values())


def fewest_gpus(c, cluster, seq_len, constants):
    """Return the smallest power of two of GPUs on which some layout fits, with one sequence at a time."""
    for gpus in (2**i for i in range(17)):
        found = nearest(c, cluster._replace(gpus=gpus), seq_len, constants)
        if found and fits(found[0], cluster):
            return gpus
    return math.inf


def nearest(c, cluster, seq_len, constants):
    """Return (GiB, layout) of the layout that holds least: ZeRO-3, full recompute, one sequence at a time. Or None."""
    least = [mesh._replace(zero=zero_stages(c, mesh)[-1], recompute="full", accumulation=mesh.pp)
             for mesh in meshes(c, cluster, seq_len, **constants.get("layout", {}))]
    held = [(sum(memory(c, l, constants["slack"]).values()), l) for l in least]
    return min(held, key=lambda one: one[0], default=None)


# ---------------------------------------------------------------------- a question
class Question(NamedTuple):
    model: str
    c: Model
    gpu: str
    cluster: speed.Cluster
    seq_len: int
    sequences: float
    constants: dict
    training: tuple = (0, 0)                              # tokens, dollars a GPU-hour

    @property
    def batch(self):
        """Return the number of sequences in a step, for every layout but --config's."""
        return batch_near(self.sequences, self.cluster.gpus)

    def search(self):
        return Search(self.c, self.cluster, self.seq_len, self.batch, self.constants)

    def timed(self, l):
        return evaluate(self.c, l, self.cluster, self.constants)

    def evaluate(self, config):
        return self.timed(parse_config(config, self.c, self.cluster, self.seq_len, self.batch, **self.constants["layout"]))
