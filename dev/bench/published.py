"""Compare runs that others published with the same runs in tools/simulate.

    python dev/bench/published.py                      # the runs of published_runs.csv beside the simulator
    python dev/bench/published.py --fit                # the constants in tools/simulate/gpus.py
    python dev/bench/published.py --hold_out           # constants and intervals, judged on a source left out of the choice
    python dev/bench/published.py --unseen             # the errors of simulate and plan on published_unseen.csv
    python dev/bench/published.py --of_2026            # the errors of plan on published_2026.csv
    python dev/bench/published.py --write              # all tables, into docs/predictions.md; --write published: that one alone

The runs are in tests/data/published_runs.csv. Of their micro-batches, at most four are simulated. Those of --unseen are in
published_unseen.csv. Of these, two numbers of micro-batches are simulated, and the rest is extrapolated.
"""
import argparse
import itertools
import io
import json
import math
import pickle
import platform
import statistics
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils.checkpoint import CheckpointPolicy

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "step08_5d"), str(ROOT / "tools/plan")]
import planned                                             # noqa: E402
import trainers                                           # noqa: E402
from simulate import gpus                                  # noqa: E402
from simulate.play import Player                          # noqa: E402
from simulate.ranks import Ranks, look, record_all        # noqa: E402
from steps import replace_on_page                          # noqa: E402

GRID = dict(h100=[0.56, 0.58, 0.60, 0.62, 0.64, 0.66, 0.68, 0.70], a100=[0.72, 0.74, 0.76, 0.78, 0.80, 0.82, 0.84, 0.86],
            MEMORY=[0.7, 0.75, 0.8, 0.85, 0.9, 0.95], TAKEN=[0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6])


def model_of(run, folder):
    """Write the config.json of a run's model into the folder."""
    shape = {theirs: int(run[ours]) for ours, theirs in planned.SHAPE.items() if run.get(ours)}
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    kind = "mixtral" if "num_local_experts" in shape else "llama"
    (Path(folder) / "config.json").write_text(json.dumps(dict(shape, model_type=kind, max_position_embeddings=2**20)))


def flags_of(run, folder, accumulation):
    model_of(run, folder)
    batch = int(run.get("dp") or run["gpus"]) * int(run["micro_batch"]) * accumulation
    recompute = run["recompute"].replace("every second", "selective")
    flags = (f"--model {folder} --seq_len {run['seq_len']} --micro_batch_size {run['micro_batch']} --global_batch_size {batch} "
             f"--recompute {recompute} {run.get('flags', '')} {'--compile' * bool(run['compile'])}").split()
    named = dict(run, zero=run.get("fsdp_stage"))
    for name in ("tp", "cp", "pp", "ep", "zero", "zero_shard", "schedule", "stages_per_rank", "cp_mode"):
        flags += [f"--{name}", named[name]] if named.get(name) else []
    return flags, batch


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


def notes_of(run, accumulation, kept):
    """Return what a run's ranks note. Keep it in a folder, since recording takes longest."""
    told = "model", "gpus", "tp", "cp", "pp", "ep", "zero_shard", "seq_len", "micro_batch", "recompute", "compile"
    file = kept / "-".join([*(run.get(name) or "" for name in told), f"{accumulation}.pickle"])
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            flags, batch = flags_of(run, folder, accumulation)
            ranks = Ranks(look(flags, int(run["gpus"]), 0), 0)
            with patch("recompute.save_matmuls_policy", every_second()) if "every second" in file.name else nullcontext():
                file.write_bytes(pickle.dumps((record_all(flags, int(run["gpus"]), ranks.recorded), ranks, batch)))
    return pickle.loads(file.read_bytes())


def simulated(run, kept):
    """Return a run's tokens per second per GPU, as simulated."""
    many, pp = accumulation_of(run), int(run.get("pp") or 1)
    few = [count for count in ((pp, 2 * pp) if pp > 1 else (1, 2)) if count < many] if run.get("id") else [min(4, many)]
    few = few if len(few) == 2 or not run.get("id") else [many]
    seconds = [seconds_of(run, *notes_of(run, count, kept)[:2]) for count in few]
    more = (many - few[-1]) * (seconds[-1] - seconds[0]) / (few[-1] - few[0]) if len(few) == 2 else 0
    batch = (many if run.get("id") else few[0]) * int(run["micro_batch"]) * int(run.get("dp") or run["gpus"])
    return batch * int(run["seq_len"]) / (seconds[-1] + more) / int(run["gpus"])


def accumulation_of(run):
    if "accumulation" in run:
        return int(run["accumulation"])
    return int(run["sequences_per_step"]) // int(run["dp"]) // int(run["micro_batch"])


class Theirs(gpus.Cluster):
    """A cluster on which recorded work takes as long as the same work of the published trainer, where that is known to differ."""
    def kernel(self, kernel):
        return self.shares.get(kernel.kind, 1) * super().kernel(kernel)

    def transfer(self, operation):
        to_experts, first = operation.what == "all_to_all", operation.ranks[0]
        if to_experts:                                    # where tp cuts the experts, a group of ep takes every tp-th rank
            operation = operation._replace(ranks=tuple(first + self.etp * i for i in range(len(operation.ranks))))
        once, seconds, link = super().transfer(operation)
        if operation.what in ("reduce_scatter", "all_reduce") and operation.dimension not in ("tp", "kv_heads", "world"):
            seconds *= self.gradients
        if operation.dimension in ("expert_dp", "ep_shard", "ep_copies"):
            seconds /= self.etp                           # gradients and weights of the experts
        if to_experts:                                    # a rank of tp sends its part, then tp gathers the rows
            seconds += operation.payload * (self.etp - 1) / (self.gpu.nvlink * gpus.NVLINK)
        return once, seconds, link


def seconds_of(run, recordings, ranks):
    gpu = gpus.GPUS[run["gpu"]]
    if watts := run.get("watts") or run.get("power_w"):
        gpu = gpus.at_power(gpu, float(watts))._replace(hbm=float(run["hbm_tb_s"]) * 1e12)
    cluster = Theirs(gpu, int(run.get("gpus_per_node") or 8), float(run["network_gb_s"]) * 1e9, taken=gpus.TAKEN)
    cluster.shares = dict(product=trainers.product_seconds(run.get("precision"), gpus.GPUS[run["gpu"]]),
                          attention=trainers.CUDNN if run.get("attention") == "cudnn" and run["gpu"] in trainers.HOPPER else 1)
    cluster.gradients = 0.5 if run.get("gradients") == "bfloat16" else 1
    cluster.etp = int(run.get("etp") or 1)
    return Player(recordings, cluster, ranks.stands_for, ranks.stage_of).play().seconds


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


# ------------------------------------------------------------------------------------------- both tools beside unseen runs
KINDS = "FSDP", "tp, pp", "cp", "MoE"
SOURCES = "llm-foundry", "torchtitan", "Megatron-LM", "Llama 3", "dgxc-benchmarking", "fms-fsdp", "2504.14960", "InternEvo"
NO_FLAG = dict.fromkeys(("gradients", "attention", "etp", "dispatcher", "ep_overlap"), "")
WITHOUT = ", with the tools' own flags"
TOO_LARGE = "r04", "r11", "r19", "r21", "r59"             # not simulated: each is like another row, or takes hours


def unseen(kept):
    """Print a row for each run, then the errors by kind of layout and by source; and then those of all runs again,
    predicted with only what the tools' own flags can say."""
    runs = planned.read("published_unseen.csv")
    print("| run | published | simulated | planned | four of five |\n|---|---|---|---|---|")
    for run in runs:
        there = float(run["tokens_per_s_per_gpu"])
        for which, changed in ((WITHOUT, NO_FLAG), ("", {})):
            said = planned.predict(run | changed)
            run["planned" + which] = said["planned"] / there
            run["inside" + which] = said["low"] <= there <= said["high"]
            if which:                                     # tools/simulate has no --trainer, --fp8 and --power, either
                changed = changed | dict(trainer="", precision="", power_w="")
            run["simulated" + which] = None if run["id"] in TOO_LARGE else simulated(run | changed, kept) / there
        cut = "".join(f", {name} {run[name]}" for name in ("tp", "cp", "pp", "ep") if run[name] != "1")
        errors = " | ".join(f"{run[which] - 1:+.0%}" if run[which] else "-" for which in ("simulated", "planned"))
        of_five = f"{said['low']:,.0f} to {said['high']:,.0f}{'' if run['inside'] else ', outside'}"
        print(f"| {run['id']}: {run['model']}, {run['gpus']} {run['gpu']}{cut} | {there:,.0f} | {errors} | {of_five} |", flush=True)
    print("\n| runs | simulated | ratio, median | error, median | within 20% | planned | ratio, median | error, median | inside |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, some, which in [*((name, some, "") for name, some in groups(runs)), ("all" + WITHOUT, runs, WITHOUT)]:
        inside = statistics.fmean(run["inside" + which] for run in some)
        by_plan = errors_of(some, "planned" + which).rpartition(" | ")[0]
        print(f"| {name} | {errors_of(some, 'simulated' + which)} | {by_plan} | {inside:.0%} |")


def of_2026():
    """Print the planner's error on the runs of 2026 that chose no constant, by kind of layout, source, GPU and model of experts."""
    runs = [run for run in planned.read("published_2026.csv") if not run["fitted"]]
    for run in runs:
        there, said = float(run["tokens_per_s_per_gpu"]), planned.predict(run)
        run["planned"], run["inside"] = said["planned"] / there, said["low"] <= there <= said["high"]
    experts = [run for run in runs if run["kind"] == "MoE"]
    far = [run for run in experts if int(run["ep"]) > int(run["gpus_per_node"])]
    waits = [run for run in experts if run["micro_batch"] == "1" and "no CUDA graphs" in run["note"]]
    some = {"dense": [run for run in runs if run not in experts], "MoE, ep in more than one node": far,
            "MoE, micro-batch 1 without CUDA graphs": waits}
    some |= {f"MoE, {one}": [run for run in experts if one in (run["gpu"], run["model"])]
             for one in dict.fromkeys(run[name] for name in ("gpu", "model") for run in experts)}
    print("| runs | planned | ratio, median | error, median | within 20% | inside |\n|---|---|---|---|---|---|")
    for name, group in [*groups(runs), *some.items()]:
        if group:
            print(f"| {name} | {errors_of(group, 'planned')} | {statistics.fmean(run['inside'] for run in group):.0%} |")


def hold_out():
    """Choose constants by all sources but one, and print the planner's error on that one. The constants are the speed of an
    all-to-all, alone and together with a factor on Megatron's products, and the share that even a slow collective takes."""
    runs = planned.read("published_unseen.csv")
    experts = [run for run in runs if run["kind"] == "MoE"]
    megatron = [run for run in runs if run["trainer"] == "megatron" and run["gpu"] == "h100"]
    speeds, floors = (0.5, 0.6, 0.75, 1.0), (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
    held_out("all-to-all, experts", experts, [dict(ALL_TO_ALL=speed) for speed in speeds])
    held_out("all-to-all, products", megatron, [dict(ALL_TO_ALL=speed, product=product) for speed, product in itertools.product(
        speeds, (1.0, 0.96, 0.92, 0.88, 0.84))])
    held_out("floor", runs, [dict(SLOWEST=floor) for floor in floors])


def held_out(what, runs, choices):
    usual, found = {name: getattr(gpus, name, 1.0) for name in choices[0]}, []
    for choice in choices:
        constants = {name: value for name, value in choice.items() if name != "product"}
        with (patch.multiple(gpus, **constants),
              patch.dict(trainers.TRAINERS["megatron"], {name: value for name, value in choice.items() if name == "product"})):
            found.append({run["id"]: abs(planned.predict(run)["planned"] / float(run["tokens_per_s_per_gpu"]) - 1)
                          for run in runs})
    print(f"| {what}: left out | chosen | error there, median | as it is | with 1 |\n|---|---|---|---|---|")
    for name, some in list(groups(runs))[1 + len(KINDS):]:
        here = {run["id"] for run in some}
        best = min(range(len(choices)), key=lambda one: statistics.fmean(min(0.3, off) for run, off in found[one].items()
                                                                         if run not in here))
        shown = best, choices.index(usual), choices.index(dict.fromkeys(usual, 1.0))
        errors = " | ".join(f"{statistics.median(found[one][run] for run in here):.1%}" for one in shown)
        print(f"| {name} | {' '.join(map(str, choices[best].values()))} | {errors} |")
    print()


def intervals():
    """Choose one factor on the widths of the planner's intervals, such that they contain four of five runs of all sources but one.
    Print how many runs of that one they then contain. In the first row, the runs that something was fitted to choose the factor."""
    runs = list(planned.published())
    for run in planned.read("published_unseen.csv"):
        runs.append(dict(source=run["source"], fitted="", published=float(run["tokens_per_s_per_gpu"]), **planned.predict(run)))
    off = []                                              # (source, fitted, how far off, as a share of the interval's width there)
    for run in runs:
        end = run["low"] if run["published"] < run["planned"] else run["high"]
        off.append((next(name for name in SOURCES if name in run["source"]), bool(run["fitted"]),
                    math.log(run["published"] / run["planned"]) / math.log(end / run["planned"])))
    inside = lambda some, factor: f"{statistics.fmean(one <= factor for one in some):.0%}"
    print("| runs | | inside | factor by the others | inside with it |\n|---|---|---|---|---|")
    for name in ("all that were not fitted", *SOURCES):
        here = [one for source, fitted, one in off if not fitted and name in (source, "all that were not fitted")]
        rest = sorted(one for source, fitted, one in off if (source != name and not fitted if name in SOURCES else fitted))
        factor = rest[min(len(rest) - 1, math.ceil(0.8 * (len(rest) + 1)) - 1)]
        print(f"| {name} | {len(here)} | {inside(here, 1)} | {factor:.2f} | {inside(here, factor)} |")


def groups(runs):
    """Yield (name, runs) of all, of each kind of layout, and of each source."""
    source = lambda run: run["source"].split("@")[0].split(" table")[0].removeprefix("github.com/")
    yield "all", runs
    for name in KINDS:
        yield name, [run for run in runs if run["kind"] == name]
    for name in dict.fromkeys(map(source, runs)):
        yield name, [run for run in runs if source(run) == name]


def errors_of(runs, which):
    ratios = [run[which] for run in runs if run[which]]
    off = [abs(one - 1) for one in ratios]
    within = statistics.fmean(one <= 0.2 for one in off)
    return f"{len(ratios)} | {statistics.median(ratios):.2f} | {statistics.median(off):.1%} | {within:.0%}"


def beside(runs, kept):
    """Print a row for each run of published_runs.csv, then the errors of those that no constant was fitted to."""
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


# ------------------------------------------------------------------------------------------- the page of predictions
PAGE, TABLES = ROOT / "docs/predictions.md", ["simulated", "unseen", "of_2026", "published"]


def write(name, command, printer, *args):
    """Put what a function prints into its place on the page, below a line that says how it was made."""
    with redirect_stdout(io.StringIO()) as printed:
        printer(*args)
    made = f"*`{command}`, with torch {torch.__version__} and Python {platform.python_version()} on {platform.machine()}*"
    replace_on_page(PAGE, name, f"{made}\n\n{printed.getvalue()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--of_2026", action="store_true")
    parser.add_argument("--hold_out", action="store_true", help="judge constants on each source, chosen by all the others")
    parser.add_argument("--write", nargs="*", choices=TABLES, help="write these tables, or all, into the page")
    parser.add_argument("--keep", type=Path, help="a folder for the notes of the ranks")
    args = parser.parse_args()
    runs = planned.read("published_runs.csv")
    if args.of_2026:
        return of_2026()
    if args.hold_out:
        hold_out()
        return intervals()
    with tempfile.TemporaryDirectory() as folder:
        kept = args.keep or Path(folder)
        if args.write is not None:
            wanted = args.write or TABLES
            "simulated" in wanted and write("simulated", "python dev/bench/published.py", beside, runs, kept)
            "unseen" in wanted and write("unseen", "python dev/bench/published.py --unseen", unseen, kept)
            "of_2026" in wanted and write("of_2026", "python dev/bench/published.py --of_2026", of_2026)
            "published" in wanted and write("published", "python dev/bench/planned.py", planned.main, [])
            return
        if args.unseen:
            return unseen(kept)
        if args.fit:
            return fit([run for run in runs if run["fitted"]], kept)
        beside(runs, kept)


if __name__ == "__main__":
    main()
