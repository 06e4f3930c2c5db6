"""Runs that you measured with bench.py, one folder up: --fit fits the constants to your cluster."""
import csv
import json
import math
import statistics
from types import SimpleNamespace

import speed
from costs import Layout
from plan import evaluate, memory
from trainer import load_config, refuse

# the columns that bench.py writes, and the constants that a few runs can tell something about
RESULTS = ("model", "gpus", "dp", "tp", "cp", "pp", "ep", "zero", "schedule", "mbs", "grad_acc", "seq_len",
           "recompute", "status", "tok_s_gpu", "mem_gib")
FITTED = ("gemm_efficiency", "elementwise_bytes", "launch", "nvlink_efficiency", "network_efficiency",
          "overlap", "optimizer_bytes", "step")


# ---------------------------------------------------------------------- the fit
def fit_own(path, cluster):
    """(constants, how many runs they were fitted to)"""
    runs = [read_run(row) for row in read_csv("--fit", path, RESULTS) if row["status"] == "ok"]
    if not runs:
        refuse(f"--fit {path}: no row has status ok")
    time = lowest(dict(speed.TIME), lambda k: loss(runs, cluster, k))
    slack = statistics.median(measured / sum(memory(c, l).values()) for c, l, _, measured in runs)
    return dict(time=time, slack=slack), len(runs)


def read_run(row):
    """(model, layout, tokens per second and GPU, GiB)"""
    degrees = {name: int(row[name]) for name in ("dp", "tp", "cp", "pp", "ep", "zero", "seq_len")}
    l = Layout(**degrees, schedule=row["schedule"], recompute=row["recompute"],
               micro_batch=int(row["mbs"]), accumulation=int(row["grad_acc"]))
    return load_config(SimpleNamespace(model=row["model"])), l, float(row["tok_s_gpu"]), float(row["mem_gib"])


def loss(runs, cluster, k):
    """Each constant is drawn towards what it was, so that a few runs do not throw it far."""
    constants = dict(time=k, slack=1)
    errors = [math.log(evaluate(c, l, cluster._replace(gpus=l.gpus), constants).tokens_per_s / seen)
              for c, l, seen, _ in runs]
    drawn = [math.log(k[name] / speed.TIME[name]) / math.log(3) for name in FITTED]
    return sum(math.log1p((e / 0.1) ** 2) for e in errors) + sum(x**2 for x in drawn)


def lowest(best, loss):
    """Tries each constant a step up and a step down, and halves the steps when that no longer helps."""
    step, least = 0.5, loss(best)
    while step > 0.01:
        before = least
        for name in FITTED:
            for factor in (math.exp(step), math.exp(-step)):
                tried = {**best, name: best[name] * factor}
                if loss(tried) < least:
                    best, least = tried, loss(tried)
        step = step if least < before - 1e-3 else step / 2
    return best


def load_constants(path):
    if path is None:
        return dict(time=speed.TIME, slack=1.0)
    try:
        with open(path) as file:
            raw = json.load(file)
        return dict(time={**speed.TIME, **raw["time"]}, slack=float(raw["slack"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        refuse(f"--constants {path}: not what --fit writes ({type(error).__name__}: {error})")


# ---------------------------------------------------------------------- CSV files
def read_csv(flag, path, needed):
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        refuse(f"{flag} {path}: {error.strerror}")
    except UnicodeDecodeError:
        refuse(f"{flag} {path}: not a text file")
    if not rows:
        refuse(f"{flag} {path}: no rows; the columns are {','.join(needed)}")
    missing = [name for name in needed if name not in rows[0]]
    if missing:
        refuse(f"{flag} {path}: no column {', '.join(missing)}; the columns are {','.join(needed)}")
    return rows


def write_csv(path, rows, columns):
    try:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        refuse(f"--out {path}: {error.strerror}")
