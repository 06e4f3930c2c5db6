"""From a model and a cluster to a layout: fit in memory, reach the batch, be fast.

    python step08_5d/planner --model llama-70b --gpus 512 --gpu h100 --seq_len 4096 --global_batch_tokens 4e6
    python step08_5d/planner --model llama-8b --gpus 64 --config dp=32,tp=2,zero=1,mbs=2          # explains this one
    python step08_5d/planner --fit results.csv --constants mine.json                               # your cluster's constants
    python step08_5d/planner --html plan.html                                                      # the same, as a page with sliders
    python step08_5d/planner --predict runs.csv --out predicted.csv                                # of the benchmarked trainer

What a layout holds and sends is in costs.py, how fast it is in speed.py. Here all layouts are tried, the best are shown, and why.
"""
import argparse
import dataclasses
import json
import math

import costs
import speed
from costs import GIB, Layout
from speed import GPUS, NETWORKS, Cluster
from trainer import PRESETS, least, load_config, refuse

SCHEDULES = ("1f1b", "interleaved", "zerobubble", "dualpipe", "afab")
RECOMPUTE = ("none", "selective", "full")
NAMES = dict(mbs="micro_batch", acc="accumulation")       # short names in --config and in tables


# ------------------------------------------------------------------------------------------- all layouts
def divisors(number, most=None):
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def valid(c, l):
    """As config.py's checks of the degrees."""
    heads = all(size % l.tp == 0 for size in (c.num_attention_heads, c.intermediate_size, c.vocab_size, l.seq_len))
    kv_heads = c.num_key_value_heads % l.tp == 0 or l.tp % c.num_key_value_heads == 0
    chunks = l.cp == 1 or l.seq_len % math.lcm(2 * l.cp, l.cp * l.tp) == 0
    return heads and kv_heads and chunks and l.dp * l.cp % l.ep == 0 and max(1, c.num_local_experts) % l.ep == 0


def meshes(c, cluster, seq_len):
    """Every valid (dp, tp, cp, pp, ep). tp over more than two nodes and parts of a sequence below 1,024 tokens are left out."""
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


def layouts(c, cluster, seq_len, sequences):
    """Every layout of the cluster, as lists that differ in the micro-batch alone, the largest first. The batch is met to a tenth."""
    for mesh in meshes(c, cluster, seq_len):
        per_rank = sequences / mesh.dp
        sizes = [2**i for i in range(int(math.log2(max(1, per_rank))) + 1)]
        batches = [(size, round(per_rank / size)) for size in reversed(sizes) if abs(round(per_rank / size) * size / per_rank - 1) <= 0.1]
        for zero in (0, 1, 2, 3) if mesh.dp * mesh.cp > 1 else (0,):
            for schedule in SCHEDULES if mesh.pp > 1 else ("1f1b",):
                for recompute in RECOMPUTE:
                    row = [dataclasses.replace(mesh, zero=zero, schedule=schedule, recompute=recompute, micro_batch=size, accumulation=m) for size, m in batches]
                    yield [l for l in row if enough(c, l)]


def memory(c, l, slack=1.0, stages=None):
    """GiB by kind, of the rank that needs most; with stages given, of the first two and the last, where that nearly always is."""
    ranks = range(l.pp) if stages is None else {0, 1 % l.pp, l.pp - 1}
    stages = stages or costs.our_stages(c, l)
    worst = max((costs.our_memory(c, l, rank, stages[rank]) for rank in ranks), key=lambda kinds: sum(kinds.values()))
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
    return Candidate(l, speed.step_seconds(c, l, cluster, costs.our_stages(c, l), constants["time"]), memory(c, l, constants["slack"]))


def search(c, cluster, seq_len, sequences, constants):
    """(all candidates that fit, the fastest first, of equal ones the simplest; how many layouts were looked at)"""
    found, looked_at, room = [], 0, limit(cluster)
    for row in layouts(c, cluster, seq_len, sequences):
        looked_at += len(row)
        stages = costs.our_stages(c, row[0]) if row else []
        fits = lambda l: sum(memory(c, l, constants["slack"], stages).values()) <= room
        first, end = 0, len(row)                          # of the micro-batches that fit: where one does, so do all smaller ones
        while first < end:
            middle = (first + end) // 2
            if fits(row[middle]):
                end = middle
            else:
                first = middle + 1
        found += [Candidate(l, speed.step_seconds(c, l, cluster, stages, constants["time"])) for l in row[first:]]
    simple = lambda one: (one.layout.cp, one.layout.zero, one.layout.tp, one.layout.pp)
    return sorted(found, key=lambda one: (-round(one.tokens_per_s, 1), simple(one))), looked_at


def fewest_gpus(c, cluster, seq_len, slack):
    """The smallest power of two on which some layout fits, with one sequence at a time."""
    for gpus in (2**i for i in range(17)):
        for mesh in meshes(c, cluster._replace(gpus=gpus), seq_len):
            l = dataclasses.replace(mesh, zero=3 if mesh.dp * mesh.cp > 1 else 0, recompute="full", accumulation=mesh.pp)
            if sum(memory(c, l, slack, costs.our_stages(c, l)).values()) <= limit(cluster):
                return gpus
    return math.inf


# ------------------------------------------------------------------------------------------- in words
def rule(c, l, cluster, fits):
    """The playbook's rules, by scale, and what this layout makes of them."""
    billions, gpus = costs.model_parameters(c) / 1e9, cluster.gpus
    if gpus <= cluster.gpus_per_node:
        said = "one node: every link is fast, so the least that fits; ZeRO first, then tp"
    elif gpus < 128:
        said = "some nodes (16 to 64 GPUs): tp inside a node or ZeRO across nodes, and dp for the rest"
    elif gpus < 1024:
        said = "hundreds of GPUs (128 to 512): dp alone has too few tokens per rank to hide its traffic; dp with tp or pp"
    else:
        said = "1,024 GPUs and more: tp inside a node, pp between nodes, dp with ZeRO-1 or 2 for the rest"
    kept = "GPU-rich: no recomputation is needed" if fits else "GPU-poor: recompute, or cut more"
    rich = kept if l.recompute == "none" else "GPU-poor: recomputation pays for what does not fit"
    lines = [said, f"{rich} ({billions:,.1f}B parameters on {gpus:,} GPUs, {18 * billions / gpus:,.1f} GB of states per GPU if all is cut)"]
    if l.cp > 1:
        lines.append(f"long sequences: cp {l.cp} leaves {l.seq_len // l.cp:,} of {l.seq_len:,} tokens to a rank")
    if l.ep > 1:
        lines.append(f"experts: ep {l.ep} leaves {c.num_local_experts // l.ep} of {c.num_local_experts} to a rank")
    return lines


def explain(c, best, cluster, sequences, slack=1.0):
    l, held, room = best.layout, sum(best.memory.values()), limit(cluster)
    whole = Layout(seq_len=l.seq_len)
    alone = sum(memory(c, whole, slack).values())
    batch, seconds = l.dp * l.micro_batch * l.accumulation, best.seconds
    lost = sorted(((s, name) for name, s in seconds.items() if name != "compute" and s > 0), reverse=True)
    cut = [f"{name} {getattr(l, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(l, name) > 1] + [f"ZeRO-{l.zero}"] * (l.zero > 0)
    yield "1. Fit in memory"
    yield f"   One GPU would hold {alone:,.0f} GiB for one sequence and has {room:.0f} to give. " + (
        f"{', '.join(cut) or 'Nothing'} cuts that to {held:.1f}." if held <= room else f"{', '.join(cut) or 'Nothing'} cuts that to {held:.1f}: it DOES NOT FIT.")
    yield from (f"   Rule: {line}." for line in rule(c, l, cluster, held <= room))
    yield "2. Reach the batch"
    yield f"   {sequences:,.0f} sequences wanted: {l.dp} ranks of dp x micro-batches of {l.micro_batch} x {l.accumulation} accumulated = {batch:,} ({batch * l.seq_len:,} tokens)."
    larger = dataclasses.replace(l, micro_batch=2 * l.micro_batch, accumulation=max(1, l.accumulation // 2))
    need = sum(memory(c, larger, slack).values())
    yield f"   Twice the micro-batch would need {need:.1f} GiB" + (": too much." if need > room else f", which fits; but {l.accumulation // 2 or 'no'} micro-batches are fewer to fill a pipeline with or to overlap." if l.accumulation > 1 else ", and there is no accumulation to trade for it.")
    yield "3. Be fast"
    yield f"   {seconds['compute'] / sum(seconds.values()):.0%} of the step is compute; most of the rest: " + ", ".join(f"{name} {s / sum(seconds.values()):.0%}" for s, name in lost[:3]) + "."
    yield f"   {WHY[lost[0][1]]}" if lost and lost[0][0] >= 0.05 * sum(seconds.values()) else "   Nothing else takes a twentieth of it."


WHY = dict(
    tp="tp speaks twice in each half of a layer with nothing to hide behind: the price of the memory that it cuts.",
    bubble="The bubble is (pp - 1)/m of the work: more micro-batches, fewer stages, or a schedule with a smaller one.",
    dp="What dp and ZeRO send takes longer than the work that it hides behind: fewer ranks of dp with a part of the model each (tp, pp), or, below ZeRO-2, more accumulation.",
    launch="The GPU waits for Python: its pieces of work are too small. Larger micro-batches, less tp, or --compile.",
    pp="Messages between stages: fewer stages.", cp="The ring is slower than attention with one block: less cp.",
    ep="Tokens travel to their experts and back: keep tp x ep inside a node.",
    optimizer="Every rank updates much: ZeRO cuts it over dp.", other="The step is so short that its fixed costs count.")


def table(candidates):
    columns = ("dp", "tp", "cp", "pp", "ep", "zero", "schedule", "mbs", "acc", "recompute")
    yield "".join(f"{name:>{12 if len(name) > 5 else 6}}" for name in columns) + f"{'GiB':>8}{'step, s':>9}{'tokens/s/GPU':>14}"
    for one in candidates:
        values = {**one.layout.__dict__, "mbs": one.layout.micro_batch, "acc": one.layout.accumulation}
        values["schedule"] = values["schedule"] if one.layout.pp > 1 else "-"
        yield "".join(f"{values[name]:>{12 if len(name) > 5 else 6}}" for name in columns) + f"{sum(one.memory.values()):>8.1f}{sum(one.seconds.values()):>9.2f}{one.tokens_per_s:>14,.0f}"


def best_per_mesh(c, candidates, cluster, slack, count=10):
    """The fastest of each mesh, looked at again on every rank. Short sequences make cp and dp the same: one of them is shown."""
    best = {}
    for one in candidates:
        mesh = one.layout.tp, one.layout.pp, one.layout.ep
        if mesh not in best and len(best) < count:
            one.memory = memory(c, one.layout, slack)
            if sum(one.memory.values()) <= limit(cluster):
                best[mesh] = one
    return list(best.values())


def details(c, one, cluster):
    l, step = one.layout, sum(one.seconds.values())
    mfu = one.tokens_per_s * costs.flops_per_token(c, l.seq_len) / cluster.gpu.flops
    yield "memory, GiB      " + "  ".join(f"{kind} {size:.1f}" for kind, size in one.memory.items()) + f"  = {sum(one.memory.values()):.1f} of {limit(cluster):.0f}"
    yield f"step, {step:.2f} s".ljust(17) + "  ".join(f"{name} {s:.3f}" for name, s in one.seconds.items() if s > 0.0005)
    sent = costs.sent(c, l)
    yield "sent, GB payload " + ("  ".join(f"{dim} {kind} {size / 1e9:.2f}" for (dim, kind), size in sent.items()) or "nothing")
    yield f"{one.tokens_per_s:,.0f} tokens/s/GPU, MFU {mfu:.1%}"


def command(model, l, cluster):
    """For this repository's trainer."""
    flags = [f"--model {model}", f"--seq_len {l.seq_len}", f"--global_batch_size {l.dp * l.micro_batch * l.accumulation}", f"--micro_batch_size {l.micro_batch}"]
    defaults = Layout()
    flags += [f"--{name} {getattr(l, name)}" for name in ("dp", "tp", "cp", "pp", "ep", "zero", "schedule", "recompute") if getattr(l, name) != getattr(defaults, name)]
    train = f"step08_5d/train.py {' '.join(flags)}"
    if cluster.gpus <= cluster.gpus_per_node:
        return f"torchrun --standalone --nproc_per_node {cluster.gpus} {train}"
    return (f"srun --nodes {cluster.nodes} --ntasks-per-node 1 --gpus-per-node {cluster.gpus_per_node} torchrun --nnodes {cluster.nodes} --nproc_per_node {cluster.gpus_per_node} "
            f"--rdzv_backend c10d --rdzv_endpoint $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500 {train}")


# ------------------------------------------------------------------------------------------- the command line
def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = refuse
    add = parser.add_argument
    add("--model", default="llama-8b", help=f"one of {', '.join(PRESETS)}; or a directory or hub id with a config.json")
    add("--gpus", type=int, default=8)
    add("--gpu", choices=GPUS, default="h100")
    add("--network", default="infiniband", help=f"between nodes: {', '.join(NETWORKS)}, or bytes per second per GPU")
    add("--gpus_per_node", type=int, default=8)
    for name, what in dict(flops="bfloat16 FLOPs per second", hbm="bytes per second of its memory", memory="GiB", nvlink="bytes per second inside a node").items():
        add(f"--{name}", type=float, help=f"{what}, in place of --gpu's")
    add("--seq_len", type=int, default=4096)
    add("--global_batch_tokens", type=float, default=4e6)
    add("--config", help="explain this one: dp=..,tp=..,cp=..,pp=..,ep=..,zero=..,schedule=..,mbs=..,acc=..,recompute=..")
    add("--constants", help="a file that --fit wrote, or is to write")
    add("--fit", help="a CSV file of bench.py: fit the constants to this cluster")
    add("--html", help="write a page to this file that needs no network, and opens at this configuration")
    add("--predict", help="a CSV file of runs of the benchmarked trainer")
    add("--out", help="where --predict writes")
    args = parser.parse_args(argv)
    for name in ("gpus", "gpus_per_node", "seq_len", "global_batch_tokens", "flops", "hbm", "memory", "nvlink"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            refuse(f"--{name} {getattr(args, name)}: must be positive")
    return args


def cluster_of(args):
    own = {name: getattr(args, name) for name in ("flops", "hbm", "memory", "nvlink") if getattr(args, name) is not None}
    try:
        network = NETWORKS.get(args.network) or float(args.network)
        if not 0 < network < math.inf:
            raise ValueError
    except ValueError:
        refuse(f"--network {args.network}: {', '.join(NETWORKS)}, or bytes per second per GPU")
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        refuse(f"--gpus {args.gpus} is not a multiple of gpus_per_node({args.gpus_per_node})")
    return Cluster(args.gpus, GPUS[args.gpu]._replace(**own), network, args.gpus_per_node)


def parse_config(text, c, cluster, seq_len, sequences):
    """One layout. What is not said: dp is what is left of the GPUs, the accumulation what the batch takes."""
    said = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = NAMES.get(name, name)
        if name not in Layout.__dataclass_fields__ or name == "seq_len" or not value:
            refuse(f"--config {part}: dp, tp, cp, pp, ep, zero, schedule, mbs, acc, recompute take =value")
        choices = dict(schedule=SCHEDULES, recompute=RECOMPUTE, zero=tuple("0123")).get(name)
        if choices and value not in choices or not choices and not (value.isdecimal() and int(value) > 0):
            refuse(f"--config {part}: must be {'one of ' + ', '.join(choices) if choices else 'a whole number, at least 1'}")
        said[name] = value if name in ("schedule", "recompute") else int(value)
    used = math.prod(said.get(name, 1) for name in ("tp", "cp", "pp"))
    dp = said.setdefault("dp", max(1, cluster.gpus // used))
    if dp * used != cluster.gpus:
        refuse(f"--config: dp({dp}) x tp x cp x pp({used}) = {dp * used} != gpus({cluster.gpus})")
    said.setdefault("accumulation", max(1, round(sequences / dp / said.get("micro_batch", 1))))
    l = Layout(**said, seq_len=seq_len)
    if not valid(c, l):
        refuse(f"--config {text}: tp must divide heads({c.num_attention_heads}) and suit kv heads({c.num_key_value_heads}), "
               f"ep divide dp x cp({l.dp * l.cp}) and experts({c.num_local_experts}), cp and tp the sequence({seq_len})")
    if not enough(c, l):
        refuse(f"--config {text}: --schedule {l.schedule} with pp({l.pp}) takes more layers than {c.num_hidden_layers} or more micro-batches than {l.accumulation}")
    return l


def main(argv=None):
    import measured                                       # both import this file
    import nanotron
    args = parse_args(argv)
    if args.predict:
        return nanotron.predict_file(args.predict, args.out or refuse("--predict needs --out FILE"))
    cluster = cluster_of(args)
    if args.fit:
        constants, runs = measured.fit_own(args.fit, cluster)
        with open(args.constants or refuse("--fit needs --constants FILE to write to"), "w") as file:
            json.dump(constants, file, indent=1)
        return print(f"fitted to {runs} runs: {args.constants}")
    c, constants = load_config(args), measured.load_constants(args.constants)
    if args.html:
        from plan_page import write
        return write(args.html, args, cluster, constants)
    sequences = max(1, args.global_batch_tokens / args.seq_len)
    if args.config:
        l = parse_config(args.config, c, cluster, args.seq_len, sequences)
        shown = [evaluate(c, l, cluster, constants)]
    else:
        fewest = fewest_gpus(c, cluster, args.seq_len, constants["slack"])
        print(f"{args.model}, {costs.model_parameters(c) / 1e9:.2f}B parameters, on {cluster.gpus:,} x {args.gpu}; the fewest GPUs that hold it: {fewest:,}",
              flush=True)                                 # the search takes seconds
        candidates, looked_at = search(c, cluster, args.seq_len, sequences, constants)
        print(f"{len(candidates):,} of {looked_at:,} layouts fit\n" if candidates else f"none of {looked_at:,} layouts fits and meets the batch\n")
        shown = best_per_mesh(c, candidates, cluster, constants["slack"])
        if not shown:
            return print("more GPUs, a shorter sequence, or another batch")
        print("\n".join(table(shown)), "\n")
    print("\n".join([*details(c, shown[0], cluster), "", *explain(c, shown[0], cluster, sequences, constants["slack"]), "", command(args.model, shown[0].layout, cluster)]))

