"""Fit the constants of tools/plan/nanotron.py to real runs: python dev/bench/fit_plan.py [--out FILE | --tables | --readme]

The runs are tests/data/ultrascale_benchmarks.csv (its README says whose they are). The program prints the constants, ready to be
copied; then, for each number of nodes, how well constants that were fitted without its runs predict them.

Every constant has a prior: the value that one would give it before any fit, and by how much one would believe it to be off. A fit
weighs both, so a constant that the runs do not determine stays where it was. The loss is robust (Cauchy's), because some runs are
not what they seem.
"""
import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/plan"))
import costs
import explain
import models
import nanotron
import plan
import published
import speed
import trainers
import trust
from measured import write_csv

DATA = ROOT / "tests/data/ultrascale_benchmarks.csv"
PUBLISHED = ROOT / "tests/data/published_speeds.csv"
SIMULATED = ROOT / "tests/data/published_runs.csv"
NODES = (1, 2, 8, 32)

# name: (value, factor by which it may well be off). [P] physics: it is near a known number. [F] fudge: nobody knows why it is so
# large, or it stands for many small things
TIME_PRIORS = dict(                                       # factors on the simulator's physics, and nanotron's own constants
    product=(1, 1.2), head=(0.9, 1.1),                    # [F] a layer's products take longer than simulated, the head's less
    shape=(1, 1.5), memory=(1, 2), loss=(1, 1.6),         # [F] memory: some of its kernels are fused
    launch=(4.4e-3, 1.35),                                # [P] s per layer with tp: Python and launches
    fill_launch=(1 / 3, 1.5),                             # [F] share of it that is left while a pipeline fills
    nvlink=(1.05, 1.1), tp_shown=(0.7, 1.35),             # [P] the switch helps; some of tp hides behind products
    pair=(0.65, 1.35),                                    # [P] NCCL has the switch help groups of more than two
    network=(1.1, 1.2), congestion=(0.2, 1.35), hop=(6e-5, 1.6), gather_hop=(6e-6, 1.5),              # [P]
    overlap=(0.4, 1.35), optimizer=(1.6, 1.2), step=(0.04, 1.6),                                      # [F]
    stall_hop=(3e-4, 1.6), stall_node=(6e-5, 2),          # [F] s per step of a tp ring when pp crosses nodes; if it leaves a node
    stage=(3e-3, 2),                                      # [F] s per micro-batch when pp crosses nodes
    gather_efficiency=(0.25, 1.5),                        # [F] of the network's speed: ZeRO-1 gathers weights tensor by tensor
    unhidden_efficiency=(0.08, 1.5),                      # [F] of the network's speed: for sums after the step, with pp but no ZeRO
    jitter=(0.02, 1.5))                                   # [F] a stall takes so much longer with each doubling of the nodes
MEMORY_PRIORS = dict(
    parameter_bytes=(6, 1.2), bucket_bytes=(2, 1.6),      # [P] weights 2, float32 gradients 4; with dp a bfloat16 copy of those
    optimizer_bytes=(12, 1.1),                            # [P] float32 master and two moments
    hidden_bytes=(34, 1.5),                               # [F] kept per token, layer and hidden: inputs of norms and products
    mlp_bytes=(5, 1.5),                                   # [P] per token, layer and intermediate: gate, up and product
    embedding_bytes=(4, 2.7),                             # [P] per token and hidden on the first stage of several
    logit_bytes=(10, 1.35), old_logit_bytes=(2, 2),       # [P] per token and word; with accumulation also the last micro-batch's
    gathered=(0.8, 1.5),                                  # [P] share of a layer's two gathered inputs that is kept, without pp
    gathered_pp=(0.6, 1.5),                               # [F] the same with pp, for all micro-batches in flight but two
    base=(0.3, 1.6))                                      # [F] GiB
NOISE = 0.07                                              # of a run; a prior's factor is weighed against it


def load(path=DATA):
    """Load the runs, without those of another batch or another shape."""
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["gbs_seqs"] == "256" and "variant" not in row["note"]]


def judged(rows):
    """Return the runs that constants are fitted to: those that succeeded, without the older trainer's, whose pipeline stood still
    between micro-batches."""
    return [row for row in rows if row["status"] == "ok" and row["code"] == "new"]


def fit(rows, priors, predict, observed, start=None, scale=0.08):
    """Fit the logarithms of the constants, with the Levenberg-Marquardt method."""
    names = list(priors)
    middle, width = np.log([priors[name][0] for name in names]), np.log([priors[name][1] for name in names])
    x, seen = np.log([start[name] for name in names]) if start else middle.copy(), np.log([observed(row) for row in rows])

    def errors(x):
        constants = dict(zip(names, np.exp(x)))
        return np.log([predict(row, constants) for row in rows]) - seen
    for scale in [scale] if start else [0.3, scale]:      # from afar, start with a loss that all rows affect
        def loss(e, x):
            return scale**2 * np.log1p((e / scale) ** 2).sum() + NOISE**2 * (((x - middle) / width) ** 2).sum()
        damping, e = 1e-3, errors(x)
        for _ in range(30):
            slopes = np.stack([(errors(x + 1e-4 * unit) - e) / 1e-4 for unit in np.eye(len(x))], axis=1)
            weight = 1 / (1 + (e / scale) ** 2)
            curvature = slopes.T @ (slopes * weight[:, None]) + np.diag(NOISE**2 / width**2)
            slope = slopes.T @ (weight * e) + NOISE**2 * (x - middle) / width**2
            before = loss(e, x)
            for _ in range(8):
                step = np.clip(-np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), slope), -0.5, 0.5)
                after = errors(x + step)
                if loss(after, x + step) < before:
                    break
                damping *= 4
            else:
                break
            x, e, damping = x + step, after, damping / 3
            if before - loss(e, x) < 3e-4 * before:
                break
    return dict(zip(names, np.exp(x).tolist()))


def fit_all(rows, start=None):
    """Return the constants of time, the constants of memory, and the GiB that can be used."""
    runs = judged(rows)
    prepared = {id(row): nanotron.benchmark_run(row) for row in rows}
    seconds = fit(runs, TIME_PRIORS, lambda row, k: nanotron.benchmark_seconds(prepared[id(row)], k),
                  lambda row: nanotron.BENCHMARK_BATCH * nanotron.BENCHMARK_SEQ / float(row["tok_s_gpu"]) / (8 * int(row["nodes"])),
                  start and start[0])
    memory = fit(runs, MEMORY_PRIORS, lambda row, k: nanotron.benchmark_memory(prepared[id(row)], k, rank=0),
                 lambda row: float(row["mem_gb"]), start and start[1], scale=0.05)
    return seconds, memory, usable(rows, prepared, memory)


def usable(rows, prepared, memory):
    """Return the limit that best tells which runs fail: the median of those that are equally good."""
    failed = {}
    for row in rows:
        failed.setdefault(nanotron.key(row), [row, True])[1] &= row["status"] != "ok"
    needs = [(nanotron.benchmark_memory(prepared[id(row)], memory), bad) for row, bad in failed.values()]
    limits = [limit / 2 for limit in range(120, 160)]
    right = [sum((need > limit) == bad for need, bad in needs) for limit in limits]
    return statistics.median(limit for limit, count in zip(limits, right) if count == max(right))


def predictions(rows, constants):
    return [{**row, **nanotron.predict(row, *constants)} for row in rows]


def rounded(constants):
    return {name: float(f"{value:.3g}") for name, value in constants.items()}


def leave_out(rows, start):
    """Return {number of nodes: constants fitted to the runs on other numbers}."""
    return {nodes: fit_all([row for row in rows if int(row["nodes"]) != nodes], start) for nodes in NODES}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="print the tables of the READMEs that need no fit")
    parser.add_argument("--out", help="write to this CSV file what constants fitted without a run's number of nodes predict for it")
    parser.add_argument("--readme", action="store_true", help="write the tables of the planner's README and docs/predictions.md")
    args = parser.parse_args()
    rows = load()
    if args.readme:
        return write_readme(rows)
    if args.tables:
        return print("\n".join([*best_runs(rows), "", *changes(rows), "", *published_table(), "", *plans()]))
    whole = fit_all(rows)
    time, memory = map(rounded, whole[:2])
    print("gpus.py's USABLE =", whole[2], "/ 80")
    print("nanotron.json:\n" + json.dumps(dict(time=time, memory=memory), indent=1))
    folds = leave_out(rows, whole)
    held_out = [row for nodes in NODES for row in predictions([row for row in rows if int(row["nodes"]) == nodes], folds[nodes])]
    print("\n".join(["", *held_out_table(rows, whole, held_out), "", *published_table()]))
    if args.out:
        write_csv(args.out, held_out, [*nanotron.KEYS, *nanotron.PREDICTED])


# ------------------------------------------------------------------------------------------- the tables of the planner's README
README = ROOT / "tools/plan/README.md"
PROOF = ROOT / "docs/predictions.md"                        # has the table of published runs
FENCED = "```text\n{}\n```"


def readme_tables(rows, which=("query", "published", "held out", "plans")):
    """Return {name of a marked place: the text that belongs there}."""
    found = {}
    if "query" in which:
        words = re.search(r"^python tools/plan (.*)$", README.read_text(), re.M)[1]
        printed = subprocess.run([sys.executable, README.parent, *words.split()], capture_output=True, text=True, check=True).stdout
        found["query"] = FENCED.format("\n".join(line.rstrip() for line in printed.splitlines()))
    if "published" in which:
        found["published"] = "\n".join(published_table())
    if "held out" in which:
        whole = fit_all(rows, start=(nanotron.TIME, nanotron.MEMORY))
        folds = leave_out(rows, whole)
        held_out = [row for nodes in NODES
                    for row in predictions([row for row in rows if int(row["nodes"]) == nodes], folds[nodes])]
        found["held out"] = "\n".join(held_out_table(rows, whole, held_out))
    if "plans" in which:
        found["plans"] = "\n".join(plans())
    return found


def between(text, name):
    return re.search(place(name), text, re.S)[2]


def place(name):
    return rf"(<!-- measured: {name} -->\n)(.*?)(<!-- end -->)"


def write_readme(rows):
    tables = readme_tables(rows)
    for path in (README, PROOF):
        text = path.read_text()
        for name, content in tables.items():
            text = re.sub(place(name), lambda found: f"{found[1]}{content}\n{found[3]}", text, flags=re.S)
        path.write_text(text)


def held_out_table(rows, whole, held_out):
    yield ("| | runs | memory, median | mean | out of memory told right | throughput, median | mean | rank correlation "
           "| loss of its choice, mean | worst |")
    yield "|---|---|---|---|---|---|---|---|---|---|"
    clear = [row for row in held_out if row["code"] == "new" or row["status"] != "ok"]
    for name, some in [("fitted to all, judged on all", predictions(rows, whole)),
                       *((f"without {nodes} nodes, judged on them", [row for row in held_out if int(row["nodes"]) == nodes])
                         for nodes in NODES),
                       ("the four together", held_out), ("of clear age alone", clear),
                       ("without the run that was disturbed", undisturbed(held_out))]:
        result = score(some)
        yield f"| {name} | {result['runs']} | " + " | ".join(f"{result[column]:.1%}" for column in COLUMNS) + " |"


def undisturbed(rows):
    """Leave out one run that is half as fast as the same with ZeRO-1; the next worst of 104 such pairs is at 0.78. It takes part in
    the fit, and in all other rows of the table."""
    return [row for row in rows if nanotron.key(row) != ("1B", 8, 64, 1, 1, 0, 2, 2)]


def planned():
    """Yield every published run with its measured speed, the planner's prediction and its interval."""
    simulated = [of_a_simulated_run(row) for row in csv.DictReader(open(SIMULATED))]
    others = [row for row in load_published() if "table 1" not in row["source"]]   # table 1 is among the simulated
    for row in simulated + others:
        said = published.predict(row)
        yield dict(row, published=measured_speed(row), planned=said["pred_tok_s_gpu"], low=said["pred_low"],
                   high=said["pred_high"], assumed=said["assumed"])


def of_a_simulated_run(run):
    """Turn a row of published_runs.csv, all of which are ZeRO-3 alone, into one of published_speeds.csv."""
    batch = int(run["gpus"]) * int(run["micro_batch"]) * int(run["accumulation"])
    return dict(run, dp=run["gpus"], tp="", cp="", pp="", fsdp_stage="3", schedule="", sequences_per_step=str(batch),
                power_w=run["watts"], precision="bfloat16", head_dim=str(int(run["hidden"]) // int(run["heads"])),
                trainer="torchtitan" if "torchtitan" in run["source"] else "this", tflops_per_gpu="")


def measured_speed(row):
    """Return the tokens per second per GPU, as published or computed from the FLOPs, which count half of attention."""
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"])
    flops = costs.flops_per_token(published.model_of(row), int(row["seq_len"]), causal=True)
    return float(row["tflops_per_gpu"]) * 1e12 / flops


def published_table():
    yield "| run | published | planned | | four of five |"
    yield "|---|---|---|---|---|"
    runs = list(planned())
    for run in runs[len(runs) - len(load_published()) + 2:]:
        cut = "".join(f", {name} {run[name]}" for name in ("tp", "pp") if run[name] not in ("", "1"))
        more = ", " + run["schedule"] if run["schedule"] else ""
        more += ", compiled" * (run["compile"] == "yes") + ", float8" * (run["precision"] == "float8")
        more += ", asynchronous tp" * (run["async_tp"] == "yes" and run["trainer"] == "torchtitan")
        more += ", fitted" * bool(run["fitted"])
        yield (f"| {run['trainer']}: {run['model']}, {int(run['gpus']):,} {run['gpu']}{cut}{more} | {run['published']:,.0f} | "
               f"{run['planned']:,.0f} | {run['planned'] / run['published'] - 1:+.0%} | {run['low']:,.0f} to {run['high']:,.0f} |")
    yield ""
    judged = [run for run in runs if not run["fitted"]]
    kinds = {"all": lambda run: True, "A100": lambda run: run["gpu"].lower() == "a100",
             "Megatron's GPTs": lambda run: "gpt-" in run["model"],
             "ZeRO-3 alone, H100": lambda run: run["gpu"].lower() == "h100" and run["tp"] in ("", "1") and run["pp"] in ("", "1")}
    yield "| not fitted | runs | planned / published, median | error, median | inside the interval |"
    yield "|---|---|---|---|---|"
    for kind, is_one in kinds.items():
        some = [run for run in judged if is_one(run)]
        ratios = [run["planned"] / run["published"] for run in some]
        inside = statistics.fmean(run["low"] <= run["published"] <= run["high"] for run in some)
        error = statistics.median(abs(one - 1) for one in ratios)
        yield f"| {kind} | {len(some)} | {statistics.median(ratios):.2f} | {error:.0%} | {inside:.0%} |"


def plans():
    """Yield a table of the planner's recommendations on H100, for a batch of 1,024 sequences of 4,096 tokens."""
    sizes = (8, 64, 512, 2048)
    yield "| model | " + " | ".join(f"{gpus:,} GPUs" for gpus in sizes) + " |"
    yield "|---|" + "---|" * len(sizes)
    constants = trainers.constants_of(dict(time=speed.USUAL, slack=1.0))
    for model in ("llama-1b", "llama-8b", "llama-70b", "llama-405b", "mixtral-8x7b"):
        c = models.PRESETS[model]
        yield f"| `{model}` | " + " | ".join(recommended(c, speed.Cluster(gpus), constants) for gpus in sizes) + " |"


def recommended(c, cluster, constants):
    best = plan.Search(c, cluster, 4096, 1024, constants).best(1)
    if not best:
        return f"none: at least {plan.fewest_gpus(c, cluster, 4096, constants)} GPUs"
    mfu = next(iter(explain.mfus(c, best[0], cluster).values()))
    return f"{explain.name_of(best[0].layout)}: {mfu:.0%}, {best[0].held:.1f} GiB, {trust.provenance(c, best[0].layout, cluster)}"


# ------------------------------------------------------------------------------------------- how far off a prediction is
def load_published():
    with open(PUBLISHED) as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------- what the runs say themselves
KINDS = {                                                 # kinds of layouts: (tp, pp) -> whether a layout is one
    "dp alone": lambda tp, pp: tp == pp == 1, "tp to 8": lambda tp, pp: 1 < tp <= 8 and pp == 1, "pp": lambda tp, pp: tp == 1 < pp,
    "tp to 8, pp": lambda tp, pp: 1 < tp <= 8 and pp > 1, "tp 16, 32": lambda tp, pp: tp > 8}


def best_runs(rows):
    """Yield a Markdown table: for each model and number of nodes, the best run, and the best of each kind of layout as a share of
    it."""
    cells = {}
    for row in rows:
        if row["status"] == "ok" and row["code"] != "legacy":
            cells.setdefault((row["model"], int(row["nodes"])), []).append(row)
    yield "| model | GPUs | the best run | MFU | GiB | " + " | ".join(KINDS) + " |"
    yield "|---|---|---|---|---|" + "---|" * len(KINDS)
    for (model, nodes), runs in sorted(cells.items()):
        best = max(runs, key=tokens_per_s)
        layout = ", ".join(f"{name} {best[name]}" for name in ("dp", "tp", "pp") if best[name] != "1")
        layout += f", ZeRO-{best['zero']}, {best['mbs']} x {best['grad_acc']}"
        shares = []
        for is_one in KINDS.values():
            of_kind = [tokens_per_s(row) for row in runs if is_one(int(row["tp"]), int(row["pp"]))]
            shares.append(f"{max(of_kind) / tokens_per_s(best):.0%}" if of_kind else "-")
        yield (f"| {model} | {8 * nodes} | {layout} | {float(best['mfu_pct']):.0f}% | {float(best['mem_gb']):.0f} | "
               + " | ".join(shares) + " |")


def tokens_per_s(row):
    return float(row["tok_s_gpu"])


def paired(rows, before, after):
    """Compare the runs that `before` selects with the same runs changed as `after` says. Return the number of such pairs, and the
    median ratios of their speed and memory."""
    rows = {nanotron.key(row): row for row in rows if row["status"] == "ok" and row["code"] == "new"}
    pairs = [(row, rows[nanotron.key({**row, **after(row)})]) for row in rows.values()
             if before(row) and nanotron.key({**row, **after(row)}) in rows]
    return len(pairs), *(statistics.median(float(b[name]) / float(a[name]) for a, b in pairs) for name in ("tok_s_gpu", "mem_gb"))


def changes(rows):
    """Yield a table of what one change does, all else being equal."""
    number = lambda row, name: int(row[name])
    single = lambda row: number(row, "tp") == number(row, "pp") == 1
    cut = lambda row: 1 < number(row, "tp") <= 8
    twice = lambda row: dict(mbs=2 * number(row, "mbs"), grad_acc=number(row, "grad_acc") // 2)
    yield "| change | where | pairs | speed | memory |"
    yield "|---|---|---|---|---|"
    for what, where, before, after in [
            *(("ZeRO-0 to ZeRO-1", f"{8 * nodes} GPUs, dp above 1",
               lambda row, nodes=nodes: number(row, "nodes") == nodes and row["zero"] == "0" and number(row, "dp") > 1,
               lambda row: dict(zero=1)) for nodes in NODES),
            ("micro-batch 1 to 2", "dp alone", lambda row: single(row) and row["mbs"] == "1", twice),
            ("micro-batch 1 to 2", "tp 2 to 8, no pp", lambda row: cut(row) and row["pp"] == "1" and row["mbs"] == "1", twice),
            ("micro-batch 4 to 8", "tp 2 to 8, no pp", lambda row: cut(row) and row["pp"] == "1" and row["mbs"] == "4", twice),
            ("micro-batch 1 to 2", "pp, no tp", lambda row: row["tp"] == "1" and row["pp"] != "1" and row["mbs"] == "1", twice),
            ("micro-batch 1 to 2", "pp and tp 2 to 8", lambda row: cut(row) and row["pp"] != "1" and row["mbs"] == "1", twice)]:
        pairs, faster, larger = paired(rows, before, after)
        yield f"| {what} | {where} | {pairs} | x {faster:.2f} | x {larger:.2f} |"


# ------------------------------------------------------------------------------------------- how good a prediction is
COLUMNS = ("mem median", "mem mean", "oom", "tok median", "tok mean", "rank corr", "regret", "worst")


def score(rows):
    """Score predictions: the errors of runs that succeeded; how many failures are predicted; and for each (model, nodes), the
    order, and how much slower the run that looks best is than the best."""
    configurations = {}
    for row in rows:
        configurations.setdefault(nanotron.key(row), []).append(row)
    memory, speed, told, cells = [], [], [], {}
    for (model, nodes, *_), tries in configurations.items():
        ran = [row for row in tries if row["status"] == "ok"]
        told.append((tries[0]["pred_oom"] == 1) == (not ran))
        runs = [row for row in ran if row["code"] != "legacy"]
        memory += [abs(row["pred_mem_gb"] / float(row["mem_gb"]) - 1) for row in runs]
        speed += [abs(row["pred_tok_s_gpu"] / float(row["tok_s_gpu"]) - 1) for row in runs]
        if runs:
            fastest = max(float(row["tok_s_gpu"]) for row in runs)
            cells.setdefault((model, nodes), []).append((runs[0]["pred_tok_s_gpu"], fastest, runs[0]["pred_oom"]))
    regret = [1 - min(cell, key=lambda run: (run[2], -run[0], run[1]))[1] / max(run[1] for run in cell) for cell in cells.values()]
    order = [correlation([run[0] for run in cell], [run[1] for run in cell]) for cell in cells.values() if len(cell) >= 5]
    found = (statistics.median(memory), statistics.fmean(memory), statistics.fmean(told), statistics.median(speed),
             statistics.fmean(speed), statistics.fmean(order), statistics.fmean(regret), max(regret))
    return dict(zip(COLUMNS, found), runs=len(speed))


def correlation(a, b):
    """Return Spearman's correlation, which is that of the ranks; ties share theirs."""
    ranks = [[statistics.fmean([i for i, other in enumerate(sorted(values)) if other == value]) for value in values]
             for values in (a, b)]
    return statistics.correlation(*ranks)


if __name__ == "__main__":
    main()
