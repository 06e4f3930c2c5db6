"""Model another trainer, nanotron, of which many runs were published: what it holds and how long it takes, where it
differs from this one. dev/bench/fit_plan.py fits the constants, and says what each means; --predict predicts runs like
those in tests/data.
"""
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import costs
import published
import speed
from costs import BF16, FLOAT32, GIB, Layout, Stage
from measured import need, read_csv, write_csv
from models import Model
from speed import Cluster
from trainer import fail

FITTED = json.loads((Path(__file__).parent / "nanotron.json").read_text())
TIME, MEMORY = FITTED["time"], FITTED["memory"]
OTHERWISE = {**speed.USUAL, "gathers_again": 0.0}         # not fitted
LARGEST_KEPT_TP = 16                                      # groups of 32 did not keep what tp gathers
BENCHMARK_BATCH, BENCHMARK_SEQ = 256, 4096
KEYS = ("model", "nodes", "dp", "tp", "pp", "zero", "mbs", "grad_acc")
PREDICTED = ("pred_mem_gb", "pred_tok_s_gpu", "pred_oom")
MOST = 10**6                                              # for each number in a row
BENCHMARKED = {                                           # layers, hidden, heads, intermediate, tied
    "1B": (16, 2048, 32, 8192, True), "3B": (28, 3072, 32, 8192, True),
    "8B": (32, 4096, 32, 14336, False), "80B": (80, 8192, 64, 28672, False)}


def key(row):
    return row["model"], *(int(row[name]) for name in KEYS[1:])


def stages_of(c, l):
    """Return nanotron's stages: it fills each until the stages so far have more than their share. Of the ends only the
    head counts."""
    blocks = [("layers", costs.layer_width(c))] * c.num_hidden_layers
    blocks += [("norm", 0), ("head", c.vocab_size), ("cast", 0), ("loss", 0)]
    whole = sum(size for _, size in blocks)
    so_far, stages = 0, [defaultdict(int, embedding=1)]
    for name, size in blocks:
        stages[-1][name] += 1
        so_far += size
        if so_far > whole * len(stages) / l.pp and len(stages) < l.pp:
            stages.append(defaultdict(int))
    if len(stages) < l.pp or not stages[-1]:
        return None                                       # the last ranks get nothing
    return [Stage(s["layers"], bool(s["embedding"]), bool(s["head"])) for s in stages]


def parameters(c, l, stage):
    """Return the parameters on a rank. The smaller models use one matrix for both ends."""
    once = stage.embedding and stage.head and c.tied
    return costs.parameters(c, l, stage) - once * c.vocab_size * c.hidden_size // l.tp


def memory_of(c, l, rank, stage, k=MEMORY):
    """Return bytes by kind. Few of its runs repeat to the byte, so the constants include fragmentation."""
    held, flight = parameters(c, l, stage), costs.in_flight(l, rank)
    weights, gradients, states = (l.dp if l.zero >= stage_of_zero else 1 for stage_of_zero in (3, 2, 1))
    layer = flight * (k["hidden_bytes"] * c.hidden_size + k["mlp_bytes"] * c.intermediate_size) / l.tp
    if 1 < l.tp <= LARGEST_KEPT_TP:                       # whole: the number of micro-batches whose gathered inputs are kept
        whole = k["gathered"] if l.pp == 1 else k["gathered_pp"] * max(0, flight - 2)
        layer += 2 * BF16 * whole * c.hidden_size
    logits = k["logit_bytes"] + k["old_logit_bytes"] * (l.accumulation > 1)
    first = k["embedding_bytes"] * stage.embedding * (l.pp > 1)
    grads = k["parameter_bytes"] - BF16 + k["bucket_bytes"] * (l.dp > 1)
    return {
        "parameters": BF16 * held / weights, "gradients": grads * held / gradients,
        "optimizer states": k["optimizer_bytes"] * held / states,
        "activations": stage.layers * l.tokens * layer, "loss": stage.head * logits * l.tokens * c.vocab_size / l.tp,
        "buffers": k["base"] * GIB + first * flight * l.tokens * c.hidden_size / l.tp}


def step_seconds(c, l, cluster, stages, k):
    """Return the seconds of a step, as speed.py's does. But when pp crosses nodes, ranks wait longer than messages take."""
    times = speed.Times(c, l, cluster, k)
    launch, wait = times.launches, 0
    if l.pp > 1 and cluster.nodes > 1:
        nodes = max(0, l.tp / cluster.gpus_per_node - 1)
        stall = 8 * (k["stall_hop"] * (l.tp - 1) + k["stall_node"] * l.tp * nodes)
        launch += stall * (1 + k["jitter"] * math.log2(cluster.nodes))
        wait = k["stage"]
    host = [stage.layers * launch + wait for stage in stages]
    seconds, *windows = speed.pipeline_seconds(c, l, stages, k, times, host)
    return seconds | data_parallel_seconds(c, l, cluster, stages[0], k, *windows)


def data_parallel_seconds(c, l, cluster, stage, k, each, last):
    """Return the seconds of data parallelism, as speed.data_parallel_seconds does.

    For ZeRO-2 and 3, which nanotron lacks, that function is called. nanotron gathers weights tensor by tensor and hides none
    of that; and without ZeRO, if dp crosses nodes and there is a pipeline, it sums gradients at the very end.
    """
    if l.zero > 1:
        return speed.data_parallel_seconds(c, l, cluster, stage, k, each, last)
    held = parameters(c, l, stage)
    updated = held / (l.dp if l.zero else 1)
    optimizer, = speed.moved([50 * updated], cluster, k["optimizer"])
    seconds = dict(dp=0.0, optimizer=optimizer, other=k["step"])
    if l.dp == 1:
        return seconds
    network, leaves = k["network"] * speed.gpus.NETWORK, speed.span(cluster, l.dp, l.tp)[1] > 1
    byte = speed.ring_seconds(cluster, k, held, l.dp, l.tp)
    if l.zero == 0 and l.pp > 1 and leaves:
        seconds["dp"] += FLOAT32 * byte * network / k["unhidden_efficiency"]
    seconds["dp"] += speed.exposed(FLOAT32 * byte * (1 if l.zero else 2), k["overlap"] * last)
    if l.zero:
        slow = k["gather_efficiency"] / network if leaves else 1
        seconds["dp"] += BF16 * byte / slow + k["gather_hop"] * l.dp * (6 * stage.layers + 2)
    return seconds


def benchmark_run(row):
    layers, hidden, heads, intermediate, tied = BENCHMARKED[row["model"]]
    c = Model(131072, hidden, intermediate, layers, heads, heads, hidden // heads, tied=tied)
    dp, tp, pp, zero, mbs, acc = (int(row[name]) for name in KEYS[2:])
    l = Layout(dp=dp, tp=tp, pp=pp, zero=zero, micro_batch=mbs, accumulation=acc, seq_len=BENCHMARK_SEQ)
    return c, l, Cluster(8 * int(row["nodes"])), stages_of(c, l)


def benchmark_seconds(run, constants=TIME):
    c, l, cluster, stages = run
    return sum(step_seconds(c, l, cluster, stages or costs.our_stages(c, l), OTHERWISE | constants).values())


def benchmark_memory(run, constants=MEMORY, rank=None):
    """Return the GiB of a rank, or of the one that needs most; infinity if a stage would be empty."""
    c, l, _, stages = run
    if not stages:
        return math.inf
    ranks = range(l.pp) if rank is None else [rank]
    return max(sum(memory_of(c, l, r, stages[r], constants).values()) for r in ranks) / GIB


def predict(row, time=TIME, memory=MEMORY, usable=speed.USABLE):
    run = c, l, cluster, stages = benchmark_run(row)
    first = run if stages else (c, l, cluster, costs.our_stages(c, l))
    return dict(pred_mem_gb=round(benchmark_memory(first, memory, rank=0), 3),
                pred_tok_s_gpu=round(l.batch * l.seq_len / benchmark_seconds(run, time) / cluster.gpus, 3),
                pred_oom=int(benchmark_memory(run, memory) > usable))


def predict_file(path, out):
    """Predict a file of the benchmark's runs, or of published ones (published.py). The columns tell which it is."""
    rows = read_csv("--predict", path)
    whose = published if "fsdp_stage" in rows[0] else sys.modules[__name__]
    need("--predict", path, rows, whose.KEYS)
    for number, row in enumerate(rows, 2):
        whose.check(row, f"--predict {path}, line {number}")
        row.update(whose.predict(row))
    write_csv(out, rows, list(rows[0]))


def check(row, where):
    try:
        _, nodes, dp, tp, pp, zero, *batch = key(row)
    except ValueError:
        fail(f"{where}: {', '.join(KEYS[1:])} must be whole numbers")
    if row["model"] not in BENCHMARKED or zero not in range(4):
        fail(f"{where}: model must be one of {', '.join(BENCHMARKED)}, and zero from 0 to 3")
    if not all(1 <= number <= MOST for number in (nodes, dp, tp, pp, *batch)):
        fail(f"{where}: {', '.join(KEYS[1:5] + KEYS[6:])} must be from 1 to {MOST:,}")
    if dp * tp * pp != 8 * nodes:
        fail(f"{where}: dp({dp}) x tp({tp}) x pp({pp}) = {dp * tp * pp} != 8 x nodes({nodes})")
