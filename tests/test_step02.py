"""Step 2: every way of summing gradients over any number of ranks trains as one process does."""
import os
import signal
import subprocess
import time

import cases
import layouts
import pytest
from harness import JobFailed
from jobs import assert_refused, ledger_rows, main_job
from observe import check
from programs import run_ranks
from prove.processes import torchrun
from steps import step_dir

STEP = "step02_dp"
MODES = ["naive", "overlap", "bucket --bucket_mb 0.02", "bucket"]
slow = pytest.mark.slow


@pytest.mark.parametrize("layout", layouts.every_layout(2))
def test_layout(pool, layout):
    check(pool, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [
    layouts.Layout(STEP, dp, "dense-3", "adamw", f"--dtype float64 --recompute none --micro_batch_size 1 --dp_mode {mode}")
    for dp in (6, 8) for mode in MODES], ids=str)
def test_more_ranks(pool, layout):
    check(pool, layout)


# ------------------------------------------------------------------------------------- what is sent, and when
@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return cases.make(tmp_path_factory.mktemp("case"))


PARAMETERS = 2 * 61 * 40 + 3 * (2 * 40 * 40 + 2 * 20 * 40 + 3 * 40 * 56 + 2 * 40) + 40


@pytest.mark.parametrize("mode, calls", [("naive", 2 + 3 * 9 + 1), pytest.param("overlap", 2 + 3 * 9 + 1, marks=slow),
                                         pytest.param("bucket", 1, marks=slow), ("bucket --bucket_mb 0.02", None)])
def test_the_ledgers_table(pool, flags, mode, calls):
    printed = pool.train(STEP, f"{flags} --steps 2 --micro_batch_size 2 --dp_mode {mode} --ledger", world=4, weights=False).output
    rows = ledger_rows(printed)
    assert rows.keys() == {("dp", "all_reduce")}
    seen_calls, payload, formula, wire = rows["dp", "all_reduce"]
    assert payload == formula == 4 * PARAMETERS + 4                                # every gradient once, and the loss
    assert wire == round(payload * 2 * 3 / 4)
    assert seen_calls == calls + 1 if calls else 4 < seen_calls < 20


def order_job(argv):
    """Train for one step. Return what happens in all its micro-batches, in order: backward passes of layers, sends, waits."""
    import torch.distributed as dist

    import train
    events, all_reduce, build = [], dist.all_reduce, train.build_model

    class Slow:
        """A handle that notes when its operation is waited for."""
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("wait")
            return self.work.wait()

    def logged(tensor, *args, **kwargs):
        if tensor.numel() > 1:
            events.append("send")
        work = all_reduce(tensor, *args, **kwargs)
        if work is None and tensor.numel() > 1:           # it was waited for at once
            events.append("wait")
        return Slow(work) if work is not None else None

    def watched(config, args):
        model = build(config, args)
        for i, layer in model.model.layers.items():
            layer.register_full_backward_pre_hook(lambda module, grad, i=i: events.append(f"backward {i}"))
        return model
    dist.all_reduce, train.build_model = logged, watched
    try:
        train.main(argv)
    finally:
        dist.all_reduce, train.build_model = all_reduce, build
    return events


@pytest.mark.parametrize("mode", MODES)
def test_sends_are_hidden_behind_backward(pool, flags, mode):
    argv = f"{flags} --steps 1 --micro_batch_size 6 --dp_mode {mode}".split()
    events = pool.call(order_job, STEP, world=2, argv=argv)[0]
    first_send, last_backward = events.index("send"), max(i for i, event in enumerate(events) if event == "backward 0")
    assert events[:first_send].count("backward 0") >= 1, "nothing is sent before the last micro-batch"
    if mode in ("overlap", "bucket --bucket_mb 0.02"):
        assert first_send < last_backward, "sends begin while there is backward left to hide them"
        assert "wait" not in events[:last_backward], "and nothing is waited for before backward is over"
        assert len([e for e in events[first_send:last_backward] if e == "send"]) > 2
    else:
        assert first_send > last_backward


# ------------------------------------------------------------------------------------- what can go wrong
@pytest.mark.parametrize("world, more, message", [
    (2, "--dp 4", "error: dp 4: must equal the world size, 2; leave --dp out"),
    (1, "--dp 2", "dp 2: must equal the world size, 1"),
    (3, "--global_batch_size 16", "--global_batch_size 16: must be a multiple of dp 3; choose 15 or 18"),
    (2, "--global_batch_size 12 --micro_batch_size 4",
     "--micro_batch_size 4: must divide global_batch_size 12 / dp 2 = 6; choose from 1, 2, 3, 6"),
    (2, "--bucket_mb 0", "argument --bucket_mb: must be at least 0.001 and below 100000000, but is 0"),
    (2, "--dp_mode ring", "invalid choice: 'ring'")])
def test_bad_layouts_are_refused(pool, world, more, message):
    assert_refused(pool, STEP, world, more, message)


@pytest.mark.parametrize("more, message", [
    ("--dp 4", "dp 4: must equal the world size, 2"), ("--dataset nowhere.npy", "No such file")])
def test_rank_0_alone_says_so_and_all_end(pool, more, message):
    assert_refused(pool, STEP, 2, more, message, job=main_job)


@slow
def test_torchrun_ends_at_once_on_bad_input():
    command = torchrun(2, step_dir(STEP) / "train.py", "--micro_batch_size", 3)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and "train.py\", line" not in done.stderr
    assert done.stderr.count("error: --micro_batch_size 3: must divide") == 1
    assert "exitcode  : 2" in done.stderr


def late_job(argv):
    """Train, but let rank 1 never come to the all-reduce."""
    import datetime

    import mesh
    import torch.distributed as dist
    import train
    mesh.TIMEOUT, before, all_reduce = datetime.timedelta(seconds=3), mesh.TIMEOUT, dist.all_reduce
    if os.environ["RANK"] == "1":
        dist.all_reduce = lambda *args, **kwargs: time.sleep(60)
    try:
        train.main(argv)
    finally:
        mesh.TIMEOUT, dist.all_reduce = before, all_reduce


@slow
def test_a_time_out_names_the_rank_and_the_operation(pool):
    with pytest.raises(JobFailed, match=r"error: rank 0, data_parallel.py:\d+: RuntimeError: "):
        pool.call(late_job, STEP, world=2, timeout=30, argv="--dp_mode naive --steps 1 --seq_len 16".split())


@slow
def test_a_killed_rank_takes_the_run_down():
    command = torchrun(2, step_dir(STEP) / "train.py", "--steps", 100000)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while " 3/100000" not in process.stdout.readline():
            assert process.poll() is None
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - killed < 45 and process.returncode != 0
        assert "Signal 9 (SIGKILL)" in errors
    finally:
        process.kill()


THREADS = """
import glob
import sys
sys.path.insert(0, sys.argv.pop(1))
import train
train.main()
names = [open(file).read() for file in glob.glob("/proc/self/task/*/comm")]
sys.exit(f"{names} are left" if any("gloo" in name for name in names) else 0)
"""


@slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="shows the threads of a process on Linux only")
@pytest.mark.parametrize("step, more", [(STEP, "--dp_mode overlap"), ("step04_tp_sp", "--tp 2"), ("step05_cp", "--zero 3"),
                                        ("step08_5d", "--model tiny-moe --ep 2"), ("step08_5d", "--pp 2 --schedule dualpipe")])
def test_no_thread_of_gloo_outlives_main(tmp_path, step, more):
    """A thread that drops its last tensor while the interpreter ends would abort the process."""
    script = tmp_path / "threads.py"
    script.write_text(THREADS)
    ranks = run_ranks(2, [script, step_dir(step), "--steps", 1, "--seq_len", 16, *more.split()], tmp_path, timeout=120)
    assert [status for status, _ in ranks] == [0, 0], ranks
