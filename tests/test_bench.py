"""tools/sweep.py survives the runs that it measures. And in each dev/bench/bench*.py, every contestant still runs."""
import csv
import os
import sys
import time

import pytest
from bench_parallel import TABLES
from steps import ROOT, run

SWEEP = ROOT / "tools/sweep.py"
# a trainer that fails in different ways; --micro_batch_size chooses which
FAULTY = """
import json, os, subprocess, sys, time
flag = lambda name: sys.argv[sys.argv.index(name) + 1]
kind = {"1": "good", "2": "crash", "4": "hang", "8": "oom"}[flag("--micro_batch_size")]
if kind == "crash":
    raise ValueError("the eighth layer is missing")
if kind == "oom":
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
if kind == "hang":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)      # and a child that hides
    time.sleep(600)
if os.environ["RANK"] == "0":
    with open(flag("--log_file"), "w") as log:
        for step in range(int(flag("--steps"))):
            log.write(json.dumps(dict(tokens_per_s_per_device=[1, 1, 100, 130, 110][step], peak_memory_gib=step / 4)) + "\\n")
"""


def bench(tmp_path, *more, timeout=240):
    return run([sys.executable, SWEEP, "--out", tmp_path / "results.csv", *more], tmp_path, timeout)


def rows_of(tmp_path):
    with open(tmp_path / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def marked(tmp_path):
    """Return the ids of the processes that carry this sweep's mark."""
    found, mark = [], f"TRAINER_SWEEP={tmp_path / 'results.csv'}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found += [int(pid)] if mark in file.read().split(b"\0") else []
        except OSError:
            pass
    return found


def gone(tmp_path, seconds=10):
    end = time.monotonic() + seconds
    while marked(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    return not marked(tmp_path)


@pytest.mark.slow
def test_every_end_is_recorded_and_nothing_is_left(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    flags = ["--trainer", tmp_path / "faulty.py", "--steps", "5", "--gpus", "2", "--time_limit", "40", "--micro_batch_size"]
    status, output = bench(tmp_path, *flags, "1", "2", "4", "8")
    assert status == 0, output
    assert [row["status"] for row in rows_of(tmp_path)] == ["ok", "crash", "hang", "oom"], output
    good, crash, hang, oom = rows_of(tmp_path)
    assert float(good["tok_s_gpu"]) == 110 and float(good["mem_gib"]) == 1
    assert "the eighth layer is missing" in crash["reason"]
    assert "out of memory" in oom["reason"] and "stopped after 40" in hang["reason"]
    assert "4 runs; failed: 1 crash, 1 hang, 1 oom" in output
    assert gone(tmp_path)
    status, output = bench(tmp_path, *flags, "1", "2", "4", "8")
    assert status == 0 and "4 layouts, of which 4 are already done" in output and len(rows_of(tmp_path)) == 4
    status, output = bench(tmp_path, *flags, "2")         # recorded, too; of these runs none has succeeded
    assert status == 1 and "1 runs; failed: 1 crash" in output, output


@pytest.mark.slow
def test_the_real_trainer(tmp_path):
    status, output = bench(tmp_path, "--gpus", "2", "--tp", "2", "3", "--zero", "0", "--micro_batch_size", "4", "--steps", "3",
                           "--", "--model", "tiny", "--seq_len", "32")
    assert status == 0 and "1 layouts" in output, output                           # tp 3 does not fit two GPUs
    rows = rows_of(tmp_path)
    found = [(row["status"], row["dp"], row["tp"], row["grad_acc"]) for row in rows]
    assert found == [("ok", "1", "2", "4")], rows
    assert all(float(row["tok_s_gpu"]) > 0 and float(row["mem_gib"]) > 0.1 for row in rows)


@pytest.mark.slow
def test_layouts_that_the_trainer_refuses(tmp_path):
    status, output = bench(tmp_path, "--tp", "3")
    assert status == 2 and "refuses every one of these combinations" in output and "Traceback" not in output, output


# ------------------------------------------------------------------------------------------- dev/bench/bench*.py
ONE_ROUND = {"bench_step01": ["--rounds 1"], "bench_collectives": ["--sizes 2"],
             "bench_gpu": ["--device cpu --models tiny --seq_len 32 --batch 2 --steps 6"],
             "bench_parallel": [f"--table {table} --short --rounds 1 --steps 1" for table in TABLES]}


def test_every_bench_is_known():
    assert {path.stem for path in (ROOT / "dev/bench").glob("bench*.py")} == set(ONE_ROUND)


@pytest.mark.slow
@pytest.mark.parametrize("bench, flags", [
    pytest.param(bench, flags, marks=pytest.mark.sweep if bench == "bench_gpu" or i > 1 else ())   # bench_gpu compiles six models
    for bench, every in ONE_ROUND.items() for i, flags in enumerate(every)])
def test_every_contestant_runs_a_short_round(tmp_path, bench, flags):
    status, output = run([sys.executable, ROOT / "dev/bench" / f"{bench}.py", *flags.split()], tmp_path, 1800)
    assert status == 0 and "Error" not in output, output[-3000:]
    if bench == "bench_parallel":
        contestants = TABLES[flags.split()[1]][2]
        assert [name for name in contestants if name not in output] == [], output
