"""Runs that were measured: your own, to which --fit fits the planner; and those of NANOTRON, a production trainer, which --predict predicts.

What NANOTRON holds differs from this trainer's in a few named things. Its constants are fitted by tests/fit_plan.py to the runs in
tests/data.
"""
import csv
import json
import math
import statistics
from collections import defaultdict
from types import SimpleNamespace

import costs
import speed
from costs import BF16, GIB, Layout, Stage
from plan import evaluate, memory
from speed import Cluster
from trainer import load_config, refuse


# ------------------------------------------------------------------------------------------- CSV files
def read_csv(flag, path, needed):
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"{flag} {path}: {error.strerror if isinstance(error, OSError) else 'not a text file'}")
    missing = [name for name in needed if not rows or name not in rows[0]]
    if missing:
        refuse(f"{flag} {path}: no {'column ' + ', '.join(missing) if rows else 'rows'}; the columns are {','.join(needed)}")
    return rows


def write_csv(path, rows, columns):
    try:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        refuse(f"--out {path}: {error.strerror}")


# ------------------------------------------------------------------------------------------- your own cluster
RESULTS = ("model", "gpus", "dp", "tp", "cp", "pp", "ep", "zero", "schedule", "mbs", "grad_acc", "seq_len", "recompute", "status", "tok_s_gpu", "mem_gib")
OWN = ("gemm_efficiency", "elementwise_bytes", "launch", "nvlink_efficiency", "network_efficiency", "overlap", "optimizer_bytes", "step")


def fit_own(path, cluster):
    """Constants that fit a bench's runs; each is drawn towards what it was, so a few runs do not throw it far. A search that halves its steps."""
    runs = []
    for row in read_csv("--fit", path, RESULTS):
        if row["status"] == "ok":
            l = Layout(**{name: int(row[name]) for name in ("dp", "tp", "cp", "pp", "ep", "zero", "seq_len")}, schedule=row["schedule"], recompute=row["recompute"],
                       micro_batch=int(row["mbs"]), accumulation=int(row["grad_acc"]))
            runs.append((load_config(SimpleNamespace(model=row["model"])), l, float(row["tok_s_gpu"]), float(row["mem_gib"])))
    if not runs:
        refuse(f"--fit {path}: no row has status ok")

    def loss(k):
        errors = [math.log(evaluate(c, l, cluster._replace(gpus=l.gpus), dict(time=k, slack=1)).tokens_per_s / seen) for c, l, seen, _ in runs]
        return sum(math.log1p((e / 0.1) ** 2) for e in errors) + sum((math.log(k[name] / speed.TIME[name]) / math.log(3)) ** 2 for name in OWN)
    best, step = dict(speed.TIME), 0.5
    lowest = loss(best)
    while step > 0.01:
        before = lowest
        for name in OWN:
            for factor in (math.exp(step), math.exp(-step)):
                tried = {**best, name: best[name] * factor}
                if loss(tried) < lowest:
                    best, lowest = tried, loss(tried)
        step = step if lowest < before - 1e-3 else step / 2
    slack = statistics.median(measured / sum(memory(c, l).values()) for c, l, _, measured in runs)
    return dict(time=best, slack=slack), len(runs)


def load_constants(path):
    if path is None:
        return dict(time=speed.TIME, slack=1.0)
    try:
        with open(path) as file:
            raw = json.load(file)
        return dict(time={**speed.TIME, **raw["time"]}, slack=float(raw["slack"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        refuse(f"--constants {path}: not what --fit writes ({type(error).__name__}: {error})")


# ------------------------------------------------------------------------------------------- the benchmarked trainer
# [P] physics, [F] fudge, as in speed.py
MEMORY = dict(
    parameter_bytes=5.73,                                 # [P] weights 2, float32 gradients 4
    bucket_bytes=1.63,                                    # [P] with dp: a bfloat16 copy of the gradients, 2
    optimizer_bytes=12.6,                                 # [P] float32 master and two moments, 12
    hidden_bytes=31.9,                                    # [F] kept per token, layer and hidden: inputs of norms, products, attention, in part in float32
    mlp_bytes=5.77,                                       # [P] per token, layer and intermediate: gate, up and product, 6
    embedding_bytes=1.9,                                  # [P] per token and hidden on the first stage of several
    logit_bytes=8.98,                                     # [P] per token and word: bfloat16 and float32 logits and a gradient, 10
    old_logit_bytes=3.02,                                 # [P] with accumulation: the logits of the micro-batch before are still there, 2
    gathered=0.831,                                       # [P] of the two inputs per layer that tp gathers, kept whole when pp is 1; 1 is all
    gathered_pp=0.891,                                    # [F] the same in a pipeline, of all micro-batches in flight but two
    base=0.23)                                            # [F] GiB
LARGEST_KEPT_TP = 16                                      # [F] in groups of 32 nobody was seen to keep what tp gathers
BENCHMARK_BATCH, BENCHMARK_SEQ = 256, 4096
KEYS, PREDICTED = ("model", "nodes", "dp", "tp", "pp", "zero", "mbs", "grad_acc"), ("pred_mem_gb", "pred_tok_s_gpu", "pred_oom")
BENCHMARKED = {                                           # layers, hidden, heads, intermediate, one matrix for both ends
    "1B": (16, 2048, 32, 8192, True), "3B": (28, 3072, 32, 8192, True), "8B": (32, 4096, 32, 14336, False), "80B": (80, 8192, 64, 28672, False)}


def key(row):
    return row["model"], *(int(row[name]) for name in KEYS[1:])


def nanotron_stages(c, l):
    """It gives blocks to a stage until that has more than its share. Of the ends only the head counts, so the last ranks may get nothing."""
    cost = costs.layer_width(c)
    blocks = [("layers", cost)] * c.num_hidden_layers + [("norm", 0), ("head", c.vocab_size), ("cast", 0), ("loss", 0)]
    whole, so_far, stages = sum(size for _, size in blocks), 0, [defaultdict(int, embedding=1)]
    for name, size in blocks:
        stages[-1][name] += 1
        so_far += size
        if so_far > whole * len(stages) / l.pp and len(stages) < l.pp:
            stages.append(defaultdict(int))
    if len(stages) < l.pp or not stages[-1]:
        return None
    return [Stage(s["layers"], bool(s["embedding"]), bool(s["head"]), bool(s["loss"])) for s in stages]


def nanotron_memory(c, l, rank, stage, k=MEMORY):
    """Bytes by kind. Few of its runs are alike to the byte: its allocator's holes are in the fitted constants."""
    held, copies = costs.parameters(c, l, stage), l.dp if l.zero else 1
    flight = costs.in_flight(l, rank)
    gathered = 0 if not 1 < l.tp <= LARGEST_KEPT_TP else k["gathered"] if l.pp == 1 else k["gathered_pp"] * max(0, flight - 2)
    layer = flight * (k["hidden_bytes"] * c.hidden_size + k["mlp_bytes"] * c.intermediate_size) / l.tp + 2 * BF16 * gathered * c.hidden_size
    return dict(weights=BF16 * held, gradients=(k["parameter_bytes"] - BF16 + k["bucket_bytes"] * (l.dp > 1)) * held,
                optimizer=k["optimizer_bytes"] * held / copies, activations=stage.layers * l.tokens * layer,
                loss=stage.head * (k["logit_bytes"] + k["old_logit_bytes"] * (l.accumulation > 1)) * l.tokens * c.vocab_size / l.tp,
                buffers=k["base"] * GIB + k["embedding_bytes"] * stage.embedding * (l.pp > 1) * flight * l.tokens * c.hidden_size / l.tp)


def benchmark_run(row):
    """(model, layout, cluster, stages or None) of a row of the file."""
    layers, hidden, heads, intermediate, tied = BENCHMARKED[row["model"]]
    c = SimpleNamespace(vocab_size=131072, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
                        num_key_value_heads=heads, head_dim=hidden // heads, num_local_experts=0, num_experts_per_tok=0, tied=tied)
    dp, tp, pp, zero, mbs, acc = (int(row[name]) for name in KEYS[2:])
    l = Layout(dp=dp, tp=tp, pp=pp, zero=zero, micro_batch=mbs, accumulation=acc, seq_len=BENCHMARK_SEQ)
    return c, l, Cluster(8 * int(row["nodes"])), nanotron_stages(c, l)


def benchmark_seconds(run, constants=speed.TIME):
    c, l, cluster, stages = run
    return sum(speed.step_seconds(c, l, cluster, stages or costs.our_stages(c, l), constants, nanotron=True).values())


def benchmark_memory(run, constants=MEMORY, rank=None):
    """GiB of a rank, or of the one that needs most; infinite where a stage would be empty."""
    c, l, _, stages = run
    ranks = range(l.pp) if rank is None else [rank]
    return max(sum(nanotron_memory(c, l, r, stages[r], constants).values()) for r in ranks) / GIB if stages else math.inf


def predict(row, time=speed.TIME, memory=MEMORY, usable=speed.USABLE):
    run = c, l, cluster, stages = benchmark_run(row)
    tokens = l.dp * l.micro_batch * l.accumulation * l.seq_len
    first = run if stages else (c, l, cluster, costs.our_stages(c, l))
    return dict(pred_mem_gb=round(benchmark_memory(first, memory, rank=0), 3), pred_tok_s_gpu=round(tokens / benchmark_seconds(run, time) / cluster.gpus, 3),
                pred_oom=int(benchmark_memory(run, memory) > usable))


def predict_file(path, out):
    rows = read_csv("--predict", path, KEYS)
    for number, row in enumerate(rows, 2):
        try:
            positive = row["model"] in BENCHMARKED and min(key(row)[1:5] + key(row)[6:]) >= 1
            gpus = int(row["dp"]) * int(row["tp"]) * int(row["pp"])
        except ValueError:
            refuse(f"--predict {path}, line {number}: {', '.join(KEYS[1:])} must be whole numbers")
        if not positive:
            refuse(f"--predict {path}, line {number}: model must be one of {', '.join(BENCHMARKED)}, and all numbers at least 1 (zero: 0)")
        if gpus != 8 * int(row["nodes"]):
            refuse(f"--predict {path}, line {number}: dp({row['dp']}) x tp({row['tp']}) x pp({row['pp']}) = {gpus} != 8 x nodes({row['nodes']})")
        row.update(predict(row))
    write_csv(out, rows, list(rows[0]))
