"""A layout in words: the playbook's three questions with its answers, tables, the command to train it."""
import dataclasses

import costs
from costs import Layout
from plan import limit, memory

COLUMNS = ("dp", "tp", "cp", "pp", "ep", "zero", "schedule", "mbs", "acc", "recompute")
FLAGS = ("dp", "tp", "cp", "pp", "ep", "zero", "schedule", "recompute")
WHY = dict(
    tp="tp speaks twice in each half of a layer with nothing to hide behind: the price of the memory that it "
       "cuts.",
    bubble="The bubble is (pp - 1)/m of the work: more micro-batches, fewer stages, or a schedule with a "
           "smaller one.",
    dp="What dp and ZeRO send takes longer than the work that it hides behind: fewer ranks of dp with a part "
       "of the model each (tp, pp), or, below ZeRO-2, more accumulation.",
    launch="The GPU waits for Python: its pieces of work are too small. Larger micro-batches, less tp, or "
           "--compile.",
    pp="Messages between stages: fewer stages.",
    cp="The ring is slower than attention with one block: less cp.",
    ep="Tokens travel to their experts and back: keep tp x ep inside a node.",
    optimizer="Every rank updates much: ZeRO cuts it over dp.",
    other="The step is so short that its fixed costs count.")


# ---------------------------------------------------------------------- why
def reasons(c, best, cluster, sequences, slack=1.0):
    """The three questions, line by line."""
    held, room = sum(best.memory.values()), limit(cluster)
    yield "1. Fit in memory"
    yield f"   {how_it_fits(c, best.layout, held, room, slack)}"
    yield from (f"   Rule: {line}." for line in rules(c, best.layout, cluster, held <= room))
    yield "2. Reach the batch"
    yield f"   {how_the_batch_is_made(best.layout, sequences)}"
    yield f"   {what_twice_the_micro_batch_needs(c, best.layout, room, slack)}"
    yield "3. Be fast"
    yield from (f"   {line}" for line in where_the_time_goes(best.seconds))


def how_it_fits(c, l, held, room, slack):
    alone = sum(memory(c, Layout(seq_len=l.seq_len), slack).values())
    cut = [f"{name} {getattr(l, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(l, name) > 1]
    cut += [f"ZeRO-{l.zero}"] * (l.zero > 0)
    end = "." if held <= room else ": it DOES NOT FIT."
    return (f"One GPU would hold {alone:,.0f} GiB for one sequence and has {room:.0f} to give. "
            f"{', '.join(cut) or 'Nothing'} cuts that to {held:.1f}{end}")


def rules(c, l, cluster, fits):
    """The playbook's rules, by scale, and what this layout makes of them."""
    billions, gpus = costs.model_parameters(c) / 1e9, cluster.gpus
    if gpus <= cluster.gpus_per_node:
        yield "one node: every link is fast, so the least that fits; ZeRO first, then tp"
    elif gpus < 128:
        yield "some nodes (16 to 64 GPUs): tp inside a node or ZeRO across nodes, and dp for the rest"
    elif gpus < 1024:
        yield ("hundreds of GPUs (128 to 512): dp alone has too few tokens per rank to hide its traffic; "
               "dp with tp or pp")
    else:
        yield "1,024 GPUs and more: tp inside a node, pp between nodes, dp with ZeRO-1 or 2 for the rest"
    said = "GPU-rich: no recomputation is needed" if fits else "GPU-poor: recompute, or cut more"
    if l.recompute != "none":
        said = "GPU-poor: recomputation pays for what does not fit"
    yield (f"{said} ({billions:,.1f}B parameters on {gpus:,} GPUs, "
           f"{18 * billions / gpus:,.1f} GB of states per GPU if all is cut)")
    if l.cp > 1:
        left = l.seq_len // l.cp
        yield f"long sequences: cp {l.cp} leaves {left:,} of {l.seq_len:,} tokens to a rank"
    if l.ep > 1:
        left = c.num_local_experts // l.ep
        yield f"experts: ep {l.ep} leaves {left} of {c.num_local_experts} to a rank"


def how_the_batch_is_made(l, sequences):
    batch = l.dp * l.micro_batch * l.accumulation
    return (f"{sequences:,.0f} sequences wanted: {l.dp} ranks of dp x micro-batches of {l.micro_batch} x "
            f"{l.accumulation} accumulated = {batch:,} ({batch * l.seq_len:,} tokens).")


def what_twice_the_micro_batch_needs(c, l, room, slack):
    half = l.accumulation // 2
    larger = dataclasses.replace(l, micro_batch=2 * l.micro_batch, accumulation=max(1, half))
    need = sum(memory(c, larger, slack).values())
    said = f"Twice the micro-batch would need {need:.1f} GiB"
    if need > room:
        return f"{said}: too much."
    if l.accumulation == 1:
        return f"{said}, and there is no accumulation to trade for it."
    return f"{said}, which fits; but {half} micro-batches are fewer to fill a pipeline with or to overlap."


def where_the_time_goes(seconds):
    step = sum(seconds.values())
    lost = sorted(((s, name) for name, s in seconds.items() if name != "compute" and s > 0), reverse=True)
    most = ", ".join(f"{name} {s / step:.0%}" for s, name in lost[:3])
    yield f"{seconds['compute'] / step:.0%} of the step is compute; most of the rest: {most}."
    counts = lost and lost[0][0] >= 0.05 * step
    yield WHY[lost[0][1]] if counts else "Nothing else takes a twentieth of it."


# ---------------------------------------------------------------------- numbers
def cells(values):
    return "".join(f"{value:>{12 if len(name) > 5 else 6}}" for name, value in zip(COLUMNS, values))


def table(candidates):
    yield cells(COLUMNS) + f"{'GiB':>8}{'step, s':>9}{'tokens/s/GPU':>14}"
    for one in candidates:
        l, held, step = one.layout, sum(one.memory.values()), sum(one.seconds.values())
        schedule = l.schedule if l.pp > 1 else "-"
        mesh = (l.dp, l.tp, l.cp, l.pp, l.ep, l.zero, schedule, l.micro_batch, l.accumulation, l.recompute)
        yield cells(mesh) + f"{held:>8.1f}{step:>9.2f}{one.tokens_per_s:>14,.0f}"


def details(c, one, cluster):
    l, held, step = one.layout, sum(one.memory.values()), sum(one.seconds.values())
    mfu = one.tokens_per_s * costs.flops_per_token(c, l.seq_len) / cluster.gpu.flops
    kinds = "  ".join(f"{kind} {size:.1f}" for kind, size in one.memory.items())
    parts = "  ".join(f"{name} {s:.3f}" for name, s in one.seconds.items() if s > 0.0005)
    sent = "  ".join(f"{dim} {kind} {size / 1e9:.2f}" for (dim, kind), size in costs.sent(c, l).items())
    yield f"memory, GiB      {kinds}  = {held:.1f} of {limit(cluster):.0f}"
    yield f"step, {step:.2f} s".ljust(17) + parts
    yield f"sent, GB payload {sent or 'nothing'}"
    yield f"{one.tokens_per_s:,.0f} tokens/s/GPU, MFU {mfu:.1%}"


def command(model, l, cluster):
    """For this repository's trainer."""
    batch, usual = l.dp * l.micro_batch * l.accumulation, Layout()
    flags = [f"--model {model}", f"--seq_len {l.seq_len}"]
    flags += [f"--global_batch_size {batch}", f"--micro_batch_size {l.micro_batch}"]
    flags += [f"--{name} {getattr(l, name)}" for name in FLAGS if getattr(l, name) != getattr(usual, name)]
    train = f"step08_5d/train.py {' '.join(flags)}"
    nodes, each = cluster.nodes, cluster.gpus_per_node
    if cluster.gpus <= each:
        return f"torchrun --standalone --nproc_per_node {cluster.gpus} {train}"
    return (f"srun --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {each} "
            f"torchrun --nnodes {nodes} --nproc_per_node {each} --rdzv_backend c10d "
            f"--rdzv_endpoint $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500 {train}")
