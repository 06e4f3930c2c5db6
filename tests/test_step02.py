"""Step 2: every way of summing gradients over any number of ranks trains as one process does."""
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import cases
from harness import JobFailed, Refused, assert_same_run
from steps import step_dir

STEP, BASELINE = "step02_dp", "step01_single_gpu"
MODES = ["naive", "overlap", "bucket --bucket_mb 0.02", "bucket"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return cases.make(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def baseline(pool, flags):
    return pool.train(BASELINE, f"{flags} --micro_batch_size 4 --dtype float64")


@pytest.fixture(scope="module")
def gradients(pool, flags):
    return pool.train(BASELINE, f"{flags} --micro_batch_size 4 --steps 1 --dtype float64", gradients=True)


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("mode", MODES)
def test_trains_as_one_process(pool, flags, baseline, dp, mode):
    run = pool.train(STEP, f"{flags} --micro_batch_size 1 --dtype float64 --dp_mode {mode}", world=dp)
    assert max(run.grad_norms) > 0.5, "the test should clip"
    assert_same_run(run, baseline, 1e-9, f"dp {dp}, {mode}")


@pytest.mark.parametrize("dp, more", [(2, "--micro_batch_size 12"), (2, "--micro_batch_size 3 --recompute full"), (4, "--micro_batch_size 2 --recompute selective")])
@pytest.mark.parametrize("mode", MODES)
def test_with_accumulation_and_recomputation(pool, flags, baseline, dp, more, mode):
    run = pool.train(STEP, f"{flags} {more} --dtype float64 --dp_mode {mode}", world=dp)
    assert_same_run(run, baseline, 1e-9, f"dp {dp}, {mode}, {more}")


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-9), ("float32", 1e-4)])
@pytest.mark.parametrize("mode", MODES)
def test_first_gradients(pool, flags, gradients, mode, dtype, tolerance):
    run = pool.train(STEP, f"{flags} --micro_batch_size 2 --steps 1 --dtype {dtype} --dp_mode {mode}", world=3, gradients=True)
    assert_same_run(run, gradients, tolerance, mode)


def test_bfloat16_sums_in_float32(pool, flags):
    run = pool.train(STEP, f"{flags} --micro_batch_size 1 --dtype bfloat16 --ledger", world=2, weights=False)
    one = pool.train(BASELINE, f"{flags} --micro_batch_size 1 --dtype bfloat16", weights=False)
    assert_same_run(run, one, 2e-2, weights=False)
    assert ledger_rows(pool.train(STEP, f"{flags} --micro_batch_size 1 --dtype bfloat16 --ledger", world=2, weights=False).output)[
        "dp", "all_reduce"][1] == 4 * PARAMETERS + 4


# ------------------------------------------------------------------------------------- what is sent, and when
PARAMETERS = 2 * 61 * 40 + 3 * (2 * 40 * 40 + 2 * 20 * 40 + 3 * 40 * 56 + 2 * 40) + 40


def ledger_rows(output):
    """{(dimension, collective): (calls, payload, formula)} of the table that --ledger prints."""
    rows = re.findall(r"^(\w+) +(\w+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", output, re.M)
    assert rows, output
    return {(dim, collective): tuple(int(n.replace(",", "")) for n in numbers) for dim, collective, *numbers in rows}


@pytest.mark.parametrize("mode, calls", [("naive", 2 + 3 * 9 + 1), ("overlap", 2 + 3 * 9 + 1), ("bucket", 1), ("bucket --bucket_mb 0.02", None)])
def test_ledger(pool, flags, mode, calls):
    run = pool.train(STEP, f"{flags} --micro_batch_size 2 --dp_mode {mode} --ledger", world=4, weights=False)
    rows = ledger_rows(run.output)
    assert rows.keys() == {("dp", "all_reduce")}
    seen_calls, payload, formula, wire = rows["dp", "all_reduce"]
    assert payload == formula == 4 * PARAMETERS + 4                                # every gradient once, and the loss
    assert wire == round(payload * 2 * 3 / 4)
    assert seen_calls == calls + 1 if calls else 4 < seen_calls < 20


def order_job(argv):
    """What happens in the last micro-batch of one training step, in order: gradients, sends, waits."""
    import torch.distributed as dist

    import train
    events, all_reduce, build = [], dist.all_reduce, train.build_model

    class Slow:
        """A work that does nothing before it is waited for: the worst that a slow network can do."""
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("wait")
            return self.work.wait()

    def logged(tensor, *args, **kwargs):
        if tensor.numel() > 1:
            events.append("send")
        work = all_reduce(tensor, *args, **kwargs)
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


def layouts_match_job(argv):
    import torch.distributed as dist

    import ledger
    import train
    calls = []
    original = ledger.Ledger.__torch_dispatch__

    def recording(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            calls.append((op._opname, tuple(getattr(args[0][0] if isinstance(args[0], list) else args[0], "shape", ()))))
        return original(self, op, types, args, kwargs)
    ledger.Ledger.__torch_dispatch__ = recording
    try:
        train.main(argv)
    finally:
        ledger.Ledger.__torch_dispatch__ = original
    return calls


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_issue_the_same_operations_in_the_same_order(pool, flags, mode):
    calls = pool.call(layouts_match_job, STEP, world=4, argv=f"{flags} --ledger --micro_batch_size 3 --steps 2 --dp_mode {mode}".split())
    assert calls[0] and all(other == calls[0] for other in calls)


# ------------------------------------------------------------------------------------- what can go wrong
def refused_job(argv):
    import train
    train.main(argv)


@pytest.mark.parametrize("world, more, message", [
    (2, "--dp 4", "dp(4) != world size (2)"),
    (1, "--dp 2", "dp(2) != world size (1)"),
    (3, "--global_batch_size 16", "global_batch_size 16 is not a multiple of dp(3); it could be 15 or 18"),
    (2, "--global_batch_size 12 --micro_batch_size 4", "12 / dp(2) = 6 is not a multiple of micro_batch_size 4; micro_batch_size could be 1, 2, 3, 6"),
    (2, "--bucket_mb 0", "--bucket_mb 0.0: must be positive"),
    (2, "--dp_mode ring", "invalid choice: 'ring'"),
    (2, "--dataset nowhere.npy", "no such file")])
def test_bad_layouts_are_refused_by_rank_0_alone(pool, world, more, message):
    with pytest.raises(Refused) as refused:
        pool.call(refused_job, STEP, world=world, argv=more.split())
    assert message in str(refused.value) and str(refused.value).count("\n") == 1


@pytest.mark.slow
def test_torchrun_ends_at_once_on_bad_input():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", step_dir(STEP) / "train.py", "--micro_batch_size", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and done.stderr.count("error: global_batch_size") == 1 and "train.py\", line" not in done.stderr
    assert "exitcode  : 2" in done.stderr


def late_job(argv):
    """Rank 1 never comes to the all-reduce."""
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


def test_a_time_out_names_the_rank_and_the_operation(pool):
    with pytest.raises(JobFailed, match=r"rank 0 failed in data_parallel.py:\d+: dist.all_reduce\(param.main_grad"):
        pool.call(late_job, STEP, world=2, timeout=30, argv="--dp_mode naive --steps 1 --seq_len 16".split())


@pytest.mark.slow
def test_a_killed_rank_takes_the_run_down():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", step_dir(STEP) / "train.py", "--steps", "100000"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while " 3/100000" not in run.stdout.readline():
            assert run.poll() is None
        ranks = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        killed = time.monotonic()
        _, errors = run.communicate(timeout=60)
        assert time.monotonic() - killed < 45 and run.returncode != 0
        assert "Signal 9 (SIGKILL)" in errors
    finally:
        run.kill()


@pytest.mark.slow
def test_one_process_without_torchrun_and_copied_alone(tmp_path):
    import shutil
    shutil.copytree(step_dir(STEP), tmp_path / "alone", ignore=shutil.ignore_patterns("__pycache__"))
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "alone/train.py", "--steps", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0 and "step 2/2" in done.stdout, done.stderr
