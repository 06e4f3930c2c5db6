"""Compare runs that others published with the same runs in tools/simulate.

    python dev/bench/published.py                      # the table that docs/proof.md sums up
    python dev/bench/published.py --fit                # the constants in tools/simulate/gpus.py

The runs are in tests/data/published_runs.csv. Of their micro-batches, at most four are simulated.
"""
import argparse
import csv
import json
import pickle
import statistics
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from torch.utils.checkpoint import CheckpointPolicy

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "step08_5d")]
from simulate import gpus                                  # noqa: E402
from simulate.play import Player                          # noqa: E402
from simulate.ranks import Ranks, look, record_all        # noqa: E402

GRID = dict(h100=[0.56, 0.58, 0.60, 0.62, 0.64, 0.66], a100=[0.72, 0.74, 0.76, 0.78, 0.80, 0.82, 0.84, 0.86],
            MEMORY=[0.7, 0.75, 0.8, 0.85, 0.9, 0.95], TAKEN=[0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6])


def flags_of(run, folder):
    names = dict(layers="num_hidden_layers", hidden="hidden_size", heads="num_attention_heads", kv_heads="num_key_value_heads",
                 intermediate="intermediate_size", vocab="vocab_size")
    shape = {theirs: int(run[ours]) for ours, theirs in names.items()}
    config = dict(model_type="llama", head_dim=shape["hidden_size"] // shape["num_attention_heads"], max_position_embeddings=131072)
    (Path(folder) / "config.json").write_text(json.dumps({**shape, **config}))
    batch = int(run["gpus"]) * int(run["micro_batch"]) * min(4, int(run["accumulation"]))
    recompute = run["recompute"].replace("every second", "selective")
    return (f"--model {folder} --seq_len {run['seq_len']} --micro_batch_size {run['micro_batch']} --global_batch_size {batch} "
            f"--recompute {recompute} {run['flags']} {'--compile' * bool(run['compile'])}").split(), batch


def every_second():
    """Return torchtitan's policy of selective recomputation, which makes every second product again."""
    made = Counter()

    def keep(hidden, ctx, op, *args, **kwargs):
        product = op.name().removesuffix(".default").endswith("mm")
        made[ctx.is_recompute] += product
        again = product and made[ctx.is_recompute] % 2 == 0
        kept = not again and (product or "attention" in op.name())
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
    return keep


def notes_of(run, kept):
    """Return what a run's ranks note. Keep it in a folder, since recording takes longest."""
    told = "model", "gpus", "seq_len", "micro_batch", "accumulation", "recompute", "compile"
    file = kept / ("-".join(run[name] for name in told) + ".pickle")
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            flags, batch = flags_of(run, folder)
            ranks = Ranks(look(flags, int(run["gpus"]), 0), 0)
            with patch("recompute.save_matmuls_policy", every_second()) if "every second" in file.name else nullcontext():
                file.write_bytes(pickle.dumps((record_all(flags, int(run["gpus"]), ranks.recorded), ranks, batch)))
    return pickle.loads(file.read_bytes())


def simulated(run, kept):
    """Return a run's tokens per second and GPU, as simulated."""
    recordings, ranks, batch = notes_of(run, kept)
    gpu = gpus.GPUS[run["gpu"]]
    if run["watts"]:
        gpu = gpus.at_power(gpu, float(run["watts"]))._replace(hbm=float(run["hbm_tb_s"]) * 1e12)
    cluster = gpus.Cluster(gpu, network=float(run["network_gb_s"]) * 1e9, taken=gpus.TAKEN)
    played = Player(recordings, cluster, ranks.stands_for, ranks.stage_of).play()
    return batch * int(run["seq_len"]) / played.seconds / int(run["gpus"])


def fit(runs, kept):
    """Fit one constant after another, until none improves."""
    def error(values):
        gpus.MEMORY, gpus.TAKEN = values["MEMORY"], values["TAKEN"]
        for name in ("h100", "a100"):
            gpus.GPUS[name] = gpus.GPUS[name]._replace(product=values[name])
        return sum((simulated(run, kept) / float(run["tokens_per_s_per_gpu"]) - 1) ** 2 for run in runs)
    best, before = {name: values[len(values) // 2] for name, values in GRID.items()}, None
    while best != before:
        before = best
        for name, values in GRID.items():
            best = min(({**best, name: value} for value in values), key=error)
    print(best, f"mean square of the error {error(best) / len(runs):.5f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder for the notes of the ranks")
    args = parser.parse_args()
    runs = list(csv.DictReader(open(ROOT / "tests/data/published_runs.csv")))
    with tempfile.TemporaryDirectory() as folder:
        kept = args.keep or Path(folder)
        if args.fit:
            return fit([run for run in runs if run["fitted"]], kept)
        errors = []
        print("| run | published | simulated | |\n|---|---|---|---|")
        for run in runs:
            here, there = simulated(run, kept), float(run["tokens_per_s_per_gpu"])
            error = here / there - 1
            errors += [] if run["fitted"] else [abs(error)]
            more = ", compiled" * bool(run["compile"]) + ", fitted" * bool(run["fitted"])
            name = f"{run['model']}, {run['gpus']} {run['gpu']}, {run['micro_batch']} x {run['seq_len']}, {run['recompute']}"
            print(f"| {name}{more} | {there:,.0f} | {here:,.0f} | {error:+.0%} |", flush=True)
        within = sum(error <= 0.15 for error in errors) / len(errors)
        print(f"\nOf the {len(errors)} that were not fitted the median error is {statistics.median(errors):.1%}, {within:.0%} are "
              f"within 15%, the worst is off by {max(errors):.0%}.")


if __name__ == "__main__":
    main()
