"""Run the trainer in many layouts, find the fastest, and see why others fail.

    python tools/sweep.py --out results.csv --gpus 8 --tp 1 2 4 --pp 1 2 --zero 0 1 \\
        --micro_batch_size 1 2 -- --model llama-1b --seq_len 4096
    python tools/plan --fit results.csv --constants mine.json       # then fit the planner to this cluster

The sweep runs every combination of these lists that the trainer accepts, and passes the flags after -- on to it. Each run has its
own processes, its own time limit and its own row in the CSV file. The sweep kills processes that a run leaves behind, and those
of an earlier sweep that was itself killed. If you start it again, it skips the rows that the file already has.
"""
import argparse
import contextlib
import csv
import io
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile

from ranks import torchrun
from refuse import refuse
from steps import step_dir

sys.path.insert(0, str(step_dir("step08_5d")))
import config

SWEPT = dict(gpus=[1], tp=[1], cp=[1], pp=[1], ep=[1], zero=[0], schedule=["1f1b"], micro_batch_size=[1],
             recompute=["none"])
COLUMNS = ("model", "gpus", "dp", "tp", "cp", "pp", "ep", "zero", "schedule", "mbs", "grad_acc", "seq_len",
           "recompute", "status", "tok_s_gpu", "mem_gib", "reason")
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|Cannot allocate memory|MemoryError|exitcode: -9")
MARK = "TRAINER_SWEEP"                                    # in the environment of every process that a sweep starts


# ----------------------------------------------------------------------------------------- what is to be run
def combinations(args):
    """Yield (row, flags) for every combination that the trainer would accept."""
    for values in itertools.product(*(getattr(args, name) for name in SWEPT)):
        given = dict(zip(SWEPT, values))
        gpus = given.pop("gpus")
        swept = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        flags = [*args.trainer_flags, *swept, "--steps", str(args.steps)]
        taken = as_trainer(flags, gpus)
        if taken:
            micro = taken.micro_batch_size
            grad_acc = taken.global_batch_size // taken.dp // micro
            values = (taken.model, gpus, taken.dp, taken.tp, taken.cp, taken.pp, taken.ep, taken.zero,
                      taken.schedule, micro, grad_acc, taken.seq_len, taken.recompute)
            yield dict(zip(COLUMNS, values)), flags


def as_trainer(flags, gpus):
    """Return the flags as the trainer parses them on that many ranks, or None if it would refuse them."""
    before, os.environ["WORLD_SIZE"] = os.environ.get("WORLD_SIZE"), str(gpus)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            taken = config.parse_args(flags)
            config.check(taken, config.load_config(taken))
        return taken
    except SystemExit:
        return None
    finally:
        os.environ.pop("WORLD_SIZE")
        os.environ.update({} if before is None else dict(WORLD_SIZE=before))


# ------------------------------------------------------------------------------------------- one run
def run(flags, gpus, args):
    """Run the trainer once; return its status, tokens per second per GPU, memory in GiB, and the reason if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        log, output = os.path.join(folder, "log.jsonl"), os.path.join(folder, "output")
        command = torchrun(gpus, args.trainer, *flags, "--log_file", log)
        with open(output, "wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True,
                                       env={**os.environ, MARK: os.path.abspath(args.out)})
            try:
                code = process.wait(timeout=args.time_limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                kill_all(args.out)
                process.wait()
        return judge(code, open(output, errors="replace").read(), read_log(log), args)


def judge(code, output, lines, args):
    if code == 0 and len(lines) > 2:
        speed = statistics.median(line["tokens_per_s_per_device"] for line in lines[2:])  # the first two warm up
        memory = max(line["peak_memory_gib"] for line in lines)
        return dict(status="ok", tok_s_gpu=round(speed, 2), mem_gib=round(memory, 3), reason="")
    if code is None:
        return dict(status="hang", reason=f"stopped after {args.time_limit} s, with {len(lines)} steps done")
    status = "oom" if OUT_OF_MEMORY.search(output) else "crash"
    said = output.splitlines()
    telling = [line for line in said if "Error" in line or line.startswith("error:")]
    return dict(status=status, reason=(telling or said[-1:] or [f"exit status {code}"])[0][:300])


def read_log(path):
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def kill_all(out):
    """Kill every process whose environment has this sweep's mark, whatever session it is in."""
    mark = f"{MARK}={os.path.abspath(out)}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                if int(pid) != os.getpid() and mark in file.read().split(b"\0"):
                    os.kill(int(pid), signal.SIGKILL)


# ----------------------------------------------------------------------------- all runs, and what they show
def key(row):
    return tuple(str(row[name]) for name in COLUMNS[:13])


def read_rows(path):
    if not os.path.exists(path):
        return []
    with open(path, newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or COLUMNS) != COLUMNS:
            refuse(f"--out {path}: already exists and is not a sweep with these columns; choose another name")
        return [row for row in reader if None not in row.values()]                 # a torn line's run is repeated


def write_rows(path, rows):
    with open(path + ".part", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path + ".part", path)


def sweep(args):
    from tqdm import tqdm
    kill_all(args.out)                                    # processes left by a sweep that was killed
    rows, wanted = read_rows(args.out), list(combinations(args))
    if not wanted:
        refuse("the trainer refuses every one of these combinations; run one of them by itself to see why")
    done = {key(row) for row in rows}
    todo = [(row, flags) for row, flags in wanted if key(row) not in done]
    print(f"{len(wanted)} layouts, of which {len(wanted) - len(todo)} are already done", flush=True)
    for row, flags in (bar := tqdm(todo, unit="run")):
        result = run(flags, row["gpus"], args)
        rows.append({**row, **result})
        write_rows(args.out, rows)
        ok = result["status"] == "ok"
        what = f"{result['tok_s_gpu']:>12,.0f} tokens/s/GPU" if ok else result["reason"][:100]
        bar.write(f"{short(row):<60}{result['status']:<7}{what}")
    return [row for row in read_rows(args.out) if key(row) in {key(row) for row, _ in wanted}]


def short(row):
    layout = " ".join(f"{name}{row[name]}" for name in ("dp", "tp", "cp", "pp", "ep", "zero", "mbs"))
    return f"{row['gpus']} GPUs: {layout} {row['schedule']} {row['recompute']}"


def best_of(rows):
    """Return {(model, GPUs): its fastest row}."""
    best = {}
    for row in (row for row in rows if row["status"] == "ok"):
        what = row["model"], int(row["gpus"])
        if what not in best or float(row["tok_s_gpu"]) > float(best[what]["tok_s_gpu"]):
            best[what] = row
    return dict(sorted(best.items()))


def print_best(rows):
    print(f"\n{'the fastest for each number of GPUs':<60}{'tokens/s/GPU':>14}{'GiB':>9}")
    for row in best_of(rows).values():
        print(f"{short(row):<60}{float(row['tok_s_gpu']):>14,.0f}{float(row['mem_gib']):>9.2f}")
    failed = [row["status"] for row in rows if row["status"] != "ok"]
    counts = ", ".join(f"{failed.count(status)} {status}" for status in sorted(set(failed)))
    print(f"{len(rows)} runs; failed: {counts or 'none'}")


def draw(rows, path):
    """Draw a heat map for each number of GPUs. Each cell shows the fastest layout with its tp and pp."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    sizes, tps, pps = (sorted({int(row[name]) for row in rows}) for name in ("gpus", "tp", "pp"))
    size = 1.5 + 1.7 * len(tps) * len(sizes), 1.6 + 1.1 * len(pps)
    figure, axes = plt.subplots(1, len(sizes), figsize=size, squeeze=False)
    most = max((float(row["tok_s_gpu"]) for row in rows if row["status"] == "ok"), default=1)
    for ax, gpus in zip(axes[0], sizes):
        speeds = [[float("nan")] * len(tps) for _ in pps]
        for (y, pp), (x, tp) in itertools.product(enumerate(pps), enumerate(tps)):
            place = gpus, tp, pp
            here = [row for row in rows if (int(row["gpus"]), int(row["tp"]), int(row["pp"])) == place]
            for row in best_of(here).values():
                before = 0 if math.isnan(speeds[y][x]) else speeds[y][x]
                speeds[y][x] = max(float(row["tok_s_gpu"]), before)
                text = f"{speeds[y][x]:,.0f}\ndp{row['dp']} zero{row['zero']}\nmbs{row['mbs']}"
                ax.text(x, y, text, ha="center", va="center", fontsize=8,
                        color="white" if speeds[y][x] < 0.6 * most else "black")
            if here and not best_of(here):
                text = ", ".join(sorted({row["status"] for row in here}))
                ax.text(x, y, text, ha="center", va="center", fontsize=8, color="#a33")
        ax.imshow(speeds, cmap="viridis", vmin=0, vmax=most, aspect="auto")
        ax.set(title=f"{gpus} GPUs", xlabel="tp", ylabel="pp", xticks=range(len(tps)), yticks=range(len(pps)),
               xticklabels=tps, yticklabels=pps)
    figure.suptitle("tokens per second per GPU, the fastest of each tp and pp", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = refuse
    parser.add_argument("--out", required=True, help="the CSV file to write; a heat map with the same name goes beside it")
    for name, default in SWEPT.items():
        parser.add_argument(f"--{name}", nargs="+", type=type(default[0]), default=default,
                            help=f"the values of --{name} to try ({default[0]})")
    parser.add_argument("--steps", type=int, default=8, help="training steps per run, of which the first two do not count (8)")
    parser.add_argument("--time_limit", type=float, default=600, help="seconds after which a run is stopped (600)")
    parser.add_argument("--trainer", default=str(step_dir("step08_5d") / "train.py"), help="the train.py to run (step 8's)")
    argv = sys.argv[1:] if argv is None else argv
    own = list(itertools.takewhile(lambda word: word != "--", argv))
    args = parser.parse_args(own)
    args.trainer_flags = argv[len(own) + 1:]
    check_places(args)
    for name, least in (("gpus", 1), ("micro_batch_size", 1), ("tp", 1), ("cp", 1), ("pp", 1), ("ep", 1)):
        if min(getattr(args, name)) < least:
            refuse(f"--{name} {min(getattr(args, name))}: must be at least {least}")
    if not 0 < args.time_limit < math.inf:                # nan fails this, too
        refuse(f"--time_limit {args.time_limit:g}: must be a positive number of seconds")
    if args.steps < 3:
        refuse(f"--steps {args.steps}: must be at least 3, because the first two do not count")
    try:
        rows = sweep(args)
        print_best(rows)
        draw(rows, heat_map(args.out))
    except OSError as error:                              # the folder cannot be written, or the disk is full
        refuse(error)


def heat_map(out):
    return os.path.splitext(out)[0] + ".png"


def check_places(args):
    """Refuse paths with which the sweep would fail midway, or overwrite something else."""
    folder = os.path.dirname(args.out) or "."
    if not os.path.isdir(folder) or os.path.isdir(args.out):
        why = "is a folder; give a file" if os.path.isdir(args.out) else f"there is no folder {folder}; create it first"
        refuse(f"--out {args.out}: {why}")
    if not args.out.endswith(".csv"):
        refuse(f"--out {args.out}: must end in .csv; the heat map gets the same name with .png")
    if os.path.exists(heat_map(args.out)) and not os.path.exists(args.out):
        refuse(f"--out {args.out}: {heat_map(args.out)} already exists and belongs to something else; choose another name")
    if not os.path.isfile(args.trainer):
        refuse(f"--trainer {args.trainer}: no such file")


if __name__ == "__main__":
    main()
