"""Fit the constants to your cluster (--fit), from runs that you measured with tools/sweep.py."""
import csv
import json
import math
import statistics
from contextlib import contextmanager
from pathlib import Path

import models
import speed
from costs import Layout
from plan import RECOMPUTE, SCHEDULES, evaluate, impossible, memory
from trainer import fail

# the columns that tools/sweep.py writes, and the constants that a few runs can determine
RESULTS = ("model", "gpus", "dp", "tp", "cp", "pp", "ep", "zero", "schedule", "mbs", "grad_acc", "seq_len",
           "recompute", "status", "tok_s_gpu", "mem_gib")
FITTED = ("product", "attention", "memory", "nvlink", "network", "overlap", "optimizer")


def fit_own(path, cluster):
    rows = read_csv("--fit", path, RESULTS)
    runs = [read_run(row, f"--fit {path}, line {number}") for number, row in enumerate(rows, 2)
            if row["status"] == "ok"]
    if not runs:
        fail(f"--fit {path}: no row has status ok, so there is nothing to fit to")
    time = lowest(dict(speed.USUAL), lambda k: loss(runs, cluster, k))
    slack = statistics.median(measured / sum(memory(c, l).values()) for c, l, _, measured in runs)
    return dict(time=time, slack=slack), len(runs)


def read_run(row, where):
    try:
        degrees = {name: int(row[name]) for name in ("dp", "tp", "cp", "pp", "ep", "zero", "seq_len")}
        l = Layout(**degrees, schedule=row["schedule"], recompute=row["recompute"],
                   micro_batch=int(row["mbs"]), accumulation=int(row["grad_acc"]))
        seen, held = float(row["tok_s_gpu"]), float(row["mem_gib"])
    except ValueError as error:
        fail(f"{where}: every degree, size and result must be a number ({error})")
    if not (0 < seen < math.inf and 0 < held < math.inf and min(l.dp, l.tp, l.cp, l.pp, l.ep, l.seq_len) > 0
            and l.micro_batch > 0 and l.accumulation > 0 and l.zero in range(4)):
        fail(f"{where}: numbers must be positive, and zero from 0 to 3")
    c = models.load(row["model"])
    if l.schedule not in SCHEDULES or l.recompute not in RECOMPUTE:
        fail(f"{where}: schedule {row['schedule']!r} or recompute {row['recompute']!r} is unknown; "
             f"choose from {', '.join(SCHEDULES)}, and {', '.join(RECOMPUTE)}")
    if why := impossible(c, l):
        fail(f"{where}: {why}")
    return c, l, seen, held


def loss(runs, cluster, k):
    """Return the loss of a fit. It draws each constant towards its usual value, so that a few runs cannot move it far."""
    constants = dict(time=k, slack=1)
    errors = [math.log(evaluate(c, l, cluster._replace(gpus=l.gpus), constants).tokens_per_s / seen)
              for c, l, seen, _ in runs]
    drawn = [math.log(k[name] / speed.USUAL[name]) / math.log(3) for name in FITTED]
    return sum(math.log1p((e / 0.1) ** 2) for e in errors) + sum(x**2 for x in drawn)


def lowest(best, loss):
    """Minimize the loss: try each constant a step up and a step down, and halve the steps when that no longer helps."""
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
        return dict(time=speed.USUAL, slack=1.0)
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        time, slack = {**speed.USUAL, **raw["time"]}, float(raw["slack"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"--constants {path}: not a file that --fit wrote ({type(error).__name__}: {error})")
    for name, value in dict(time, slack=slack).items():
        if name != "slack" and name not in speed.USUAL:
            fail(f"--constants {path}: unknown constant {name}; let --fit write this file")
        is_number = type(value) in (int, float) and 0 <= value < math.inf
        if not is_number or value == 0 and name in ("slack", *FITTED):
            fail(f"--constants {path}: {name} {value!r}: must be a positive number")
    return dict(time=time, slack=slack)


@contextmanager
def refusing(what):
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fail(f"{what}: {getattr(error, 'strerror', None) or error}")


def read_csv(flag, path, needed=()):
    with refusing(f"{flag} {path}"), open(path, newline="") as file:
        rows = list(csv.DictReader(file)) or fail(f"{flag} {path}: no rows")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            fail(f"{flag} {path}, line {number}: must have as many values as there are columns")
    need(flag, path, rows, needed)
    return rows


def need(flag, path, rows, needed):
    missing = [name for name in needed if name not in rows[0]]
    if missing:
        fail(f"{flag} {path}: no column {', '.join(missing)}; the columns are {','.join(needed)}")


def write_csv(path, rows, columns):
    with refusing(f"--out {path}"), open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def write_text(flag, path, text):
    with refusing(f"{flag} {path}"):
        Path(path).write_text(text, encoding="utf-8")
