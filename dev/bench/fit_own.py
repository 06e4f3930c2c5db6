"""Fit the planner's constants to a cluster, from runs that tools/sweep.py has measured there.

    python tools/sweep.py --out out/results.csv --gpus 8 --tp 1 2 4 --zero 0 1 -- --model llama-1b --seq_len 4096
    python dev/bench/fit_own.py out/results.csv out/mine.json --gpu h100
    python tools/plan --model llama-8b --gpus 64 --constants out/mine.json

Give --gpu, --network and --gpus_per_node of the cluster that made the runs, here and to the planner.
"""
import argparse
import csv
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/plan"))
import models                                              # noqa: E402
import speed                                               # noqa: E402
from costs import Layout                                   # noqa: E402
from plan import evaluate, memory                          # noqa: E402

FITTED = ("product", "attention", "memory", "nvlink", "network", "overlap", "optimizer")       # a few runs can determine these


def read(path):
    """Return (model, layout, tokens/s/GPU, GiB) of each run that succeeded."""
    runs = []
    for row in csv.DictReader(open(path, newline="")):
        if row["status"] == "ok":
            degrees = {name: int(row[name]) for name in ("dp", "tp", "cp", "pp", "ep", "zero", "seq_len")}
            l = Layout(**degrees, schedule=row["schedule"], recompute=row["recompute"], micro_batch=int(row["mbs"]),
                       accumulation=int(row["grad_acc"]))
            runs.append((models.load(row["model"]), l, float(row["tok_s_gpu"]), float(row["mem_gib"])))
    return runs


def loss(runs, cluster, k):
    """Return the loss of a fit. It draws each constant towards its usual value, so that a few runs cannot move it far."""
    errors = [math.log(evaluate(c, l, cluster._replace(gpus=l.gpus), dict(time=k, slack=1)).tokens_per_s / seen)
              for c, l, seen, _ in runs]
    drawn = [math.log(k[name] / speed.USUAL[name]) / math.log(3) for name in FITTED]
    return sum(math.log1p((e / 0.1) ** 2) for e in errors) + sum(x**2 for x in drawn)


def fit(runs, cluster):
    """Minimize the loss: try each constant a step up and a step down, and halve the steps when that no longer helps."""
    best, step = dict(speed.USUAL), 0.5
    least = loss(runs, cluster, best)
    while step > 0.01:
        before = least
        for name in FITTED:
            for factor in (math.exp(step), math.exp(-step)):
                tried = {**best, name: best[name] * factor}
                if (now := loss(runs, cluster, tried)) < least:
                    best, least = tried, now
        step = step if least < before - 1e-3 else step / 2
    return dict(time=best, slack=statistics.median(measured / sum(memory(c, l).values()) for c, l, _, measured in runs))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="the CSV file that tools/sweep.py has written")
    parser.add_argument("constants", help="the file to write")
    parser.add_argument("--gpu", choices=speed.GPUS, default="h100")
    parser.add_argument("--network", type=float, default=speed.NETWORKS["infiniband"], help="bytes per second per GPU")
    parser.add_argument("--gpus_per_node", type=int, default=8)
    args = parser.parse_args()
    runs = read(args.results) or parser.error(f"{args.results}: no row has status ok, so there is nothing to fit to")
    cluster = speed.Cluster(1, speed.GPUS[args.gpu], args.network, args.gpus_per_node)
    Path(args.constants).write_text(json.dumps(fit(runs, cluster), indent=1))
    print(f"fitted to {len(runs)} runs: {args.constants}")


if __name__ == "__main__":
    main()
