"""Run the trainer in many layouts, find the fastest, and see why others fail.

    python tools/sweep.py --out results.csv --gpus 8 --tp 1 2 4 --pp 1 2 --zero 0 1 \\
        --micro_batch_size 1 2 -- --model llama-1b --seq_len 4096

The sweep runs every combination of these lists that the trainer accepts, and passes the flags after -- on to it. Each run has its
own processes, its own time limit and its own row in the CSV file. If you start the sweep again, it skips the rows that the file
already has. It ends with status 1 if no run has succeeded. dev/bench/fit_own.py fits the planner's constants to the file.
"""
import argparse
import contextlib
import csv
import io
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from prove.processes import torchrun
from refuse import refuse
from steps import step_dir

sys.path.insert(0, str(step_dir("step08_5d")))
import config
import train

SWEPT = dict(gpus=[1], tp=[1], cp=[1], pp=[1], ep=[1], zero=[0], schedule=["1f1b"], micro_batch_size=[1], recompute=["none"])
COLUMNS = ("model", "gpus", "dp", "tp", "cp", "pp", "ep", "zero", "schedule", "mbs", "grad_acc", "seq_len", "recompute", "status",
           "tok_s_gpu", "mem_gib", "reason")
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|Cannot allocate memory|MemoryError|exitcode: -9")
MARK = "TRAINER_SWEEP"                                    # in the environment of every process that a sweep starts


def combinations(args):
    """Yield (row, flags) for every combination that the trainer would accept."""
    for values in itertools.product(*(getattr(args, name) for name in SWEPT)):
        given = dict(zip(SWEPT, values))
        gpus = given.pop("gpus")
        flags = [*args.trainer_flags, *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
        flags += ["--steps", str(args.steps)]
        world = patch.dict(os.environ, WORLD_SIZE=str(gpus))
        with world, contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            l = config.parse_args(flags, train.TECHNIQUES)
            config.check(l, config.load_config(l), train.TECHNIQUES)
            size = l.micro_batch_size
            yield dict(zip(COLUMNS, map(str, (l.model, gpus, l.dp, l.tp, l.cp, l.pp, l.ep, l.zero, l.schedule, size,
                                              l.global_batch_size // l.dp // size, l.seq_len, l.recompute)))), flags


def run(flags, gpus, args):
    """Run the trainer once; return its status, tokens per second per GPU, memory in GiB, and the reason if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        log, output = Path(folder, "log.jsonl"), Path(folder, "output")
        with open(output, "wb") as file:
            process = subprocess.Popen(torchrun(gpus, args.trainer, *flags, "--log_file", log), stdout=file, stderr=file,
                                       start_new_session=True, env={**os.environ, MARK: os.path.abspath(args.out)})
            try:
                code = process.wait(timeout=args.time_limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                kill_all(args.out)
                process.wait()
        lines = [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []
        said = output.read_text(errors="replace")
    if code == 0 and len(lines) > 2:
        speed = statistics.median(line["tokens_per_s_per_device"] for line in lines[2:])       # the first two warm up
        return dict(status="ok", tok_s_gpu=round(speed, 2), mem_gib=round(max(line["peak_memory_gib"] for line in lines), 3))
    if code is None:
        return dict(status="hang", reason=f"stopped after {args.time_limit} s, with {len(lines)} steps done")
    telling = [line for line in said.splitlines() if "Error" in line or line.startswith("error:")] + said.splitlines()[-1:]
    return dict(status="oom" if OUT_OF_MEMORY.search(said) else "crash", reason=[*telling, f"exit status {code}"][0][:300])


def kill_all(out):
    """Kill every process whose environment has this sweep's mark, whatever session it is in."""
    mark = f"{MARK}={os.path.abspath(out)}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if int(path.parent.name) != os.getpid() and mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def sweep(args):
    """Run what is not in the file yet, and return the rows of all these combinations."""
    kill_all(args.out)                                    # processes left by a sweep that was killed
    try:
        open(args.out, "a").close()                       # refuse before the first run what cannot be written after it
        text = Path(args.out).read_text()
    except (OSError, ValueError) as error:
        refuse(f"--out {args.out}: cannot be written ({error}); choose another name")
    done = {tuple(row.values())[:13]: row for row in csv.DictReader(io.StringIO(text)) if tuple(row) == COLUMNS}
    if text and not done:
        refuse(f"--out {args.out}: already exists and is not a sweep with these columns; choose another name")
    wanted = list(combinations(args)) or refuse("the trainer refuses every one of these combinations; run one of them by itself "
                                                "to see why")
    print(f"{len(wanted)} layouts, of which {sum(tuple(row.values()) in done for row, _ in wanted)} are already done", flush=True)
    rows = []
    for row, flags in wanted:
        key = tuple(row.values())
        if key not in done:
            done[key] = row | run(flags, int(row["gpus"]), args)
            unfinished = f"{args.out}.tmp"                # a kill or a full disk must not cost the rows that exist
            with open(unfinished, "w", newline="") as file:
                csv.DictWriter(file, COLUMNS, restval="").writerows([dict(zip(COLUMNS, COLUMNS)), *done.values()])
            os.replace(unfinished, args.out)
        rows.append(found := done[key])
        speed = f"{float(found['tok_s_gpu']):>12,.0f} tokens/s/GPU" if found["status"] == "ok" else found["reason"][:100]
        print(f"{short(row):<60}{found['status']:<7}{speed}", flush=True)
    return rows


def short(row):
    layout = " ".join(f"{name}{row[name]}" for name in ("dp", "tp", "cp", "pp", "ep", "zero", "mbs"))
    return f"{row['gpus']} GPUs: {layout} {row['schedule']} {row['recompute']}"


def report(rows):
    print(f"\n{'the fastest for each number of GPUs':<60}{'tokens/s/GPU':>14}{'GiB':>9}")
    ran = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: float(row["tok_s_gpu"]))
    for _, row in sorted({int(row["gpus"]): row for row in ran}.items()):
        print(f"{short(row):<60}{float(row['tok_s_gpu']):>14,.0f}{float(row['mem_gib']):>9.2f}")
    failed = [row["status"] for row in rows if row["status"] != "ok"]
    counts = ", ".join(f"{failed.count(status)} {status}" for status in sorted(set(failed)))
    print(f"{len(rows)} runs; failed: {counts or 'none'}")
    return bool(ran)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = refuse
    parser.add_argument("--out", required=True, help="the CSV file to write")
    for name, default in SWEPT.items():
        parser.add_argument(f"--{name}", nargs="+", type=type(default[0]), default=default,
                            help=f"the values of --{name} to try ({default[0]})")
    parser.add_argument("--steps", type=int, default=8, help="training steps per run, of which the first two do not count (8)")
    parser.add_argument("--time_limit", type=float, default=600, help="seconds after which a run is stopped (600)")
    parser.add_argument("--trainer", default=str(step_dir("step08_5d") / "train.py"), help="the train.py to run (step 8's)")
    own = list(itertools.takewhile(lambda word: word != "--", sys.argv[1:]))
    args = parser.parse_args(own)
    args.trainer_flags = sys.argv[len(own) + 2:]
    if args.steps < 3:
        refuse(f"--steps {args.steps}: must be at least 3, because the first two do not count")
    if not Path(args.trainer).is_file():
        refuse(f"--trainer {args.trainer}: no such file; give a step's train.py")
    sys.exit(0 if report(sweep(args)) else 1)


if __name__ == "__main__":
    main()
