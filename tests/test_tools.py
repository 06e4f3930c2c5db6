"""The tools behind the make targets. Each runs in a small repository of its own or on files made here."""
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import JobFailed
from operations import assert_none_waits_for_ever
from programs import run_ranks
from prove.processes import new_store
from readme import real_diff
from steps import CHANGES, NAMES, ROOT, clean_environment, pairs, run
from prove.unforgiving import unforgiving


@pytest.fixture
def small_repository(tmp_path):
    """Make a repository with two steps of one line each, a test for the second, and the real tools."""
    folder = tmp_path / "repository"
    for name in ("tests", "tools", "dev", "exercises/ladder"):
        (folder / name).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "tools/steps.py", "tools/diff.py", "tools/refuse.py", "tools/prove/__init__.py",
                 "tools/prove/processes.py", "exercises/exercise.py", "exercises/patched.py", "dev/break_it.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for step, line in zip(NAMES, ("answer = 41\n", "answer = 42\n")):
        (folder / step).mkdir()
        (folder / step / "train.py").write_text(line)
        (folder / step / "README.md").write_text(f"of {step}\n")
    (folder / "tests/test_step02.py").write_text(
        "import pytest, steps\n"
        "def test_answer():\n"
        "    assert 'answer = 42' in (steps.step_dir(2) / 'train.py').read_text(), 'no answer'\n"
        "def test_anything(): pass\n"
        "def test_import(): exec((steps.step_dir(2) / 'train.py').read_text())\n"
        "@pytest.mark.sweep\n"
        "def test_long(): assert False\n")
    return folder


def make(folder, *arguments, **environment):
    done = subprocess.run(["make", *arguments], cwd=folder, env=clean_environment() | environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


# --------------------------------------------------------------------------------------------------- make targets
@pytest.fixture
def two_steps(small_repository):
    """Add a file of each kind: changed, unchanged, new, and no part of a step's diff."""
    old, new = (small_repository / name for name in NAMES[:2])
    for step in (old, new):
        (step / "data.py").write_text(f"first = {step is new}\nsecond = 2\n")
        (step / "model.py").write_text("layers = 8\n")
        (step / "figures").mkdir()
        (step / "figures/fits.png").write_text(f"of {step.name}\n")
    (new / "ledger.py").write_text("calls = 0\nbytes = 0\n")
    (new / "extra.py").write_text("in_no = True\nlist = True\n")
    return small_repository


DIFF = """\
step01_single_gpu -> step02_dp: 4 changed lines in the lesson, 4 in support
  train.py                +1 -1
  data.py                 +1 -1
== support, for a second reading ==
  ledger.py               new, 2 lines
  extra.py                new, 2 lines

--- step01_single_gpu/train.py
+++ step02_dp/train.py
@@ -1 +1 @@
-answer = 41
+answer = 42

--- step01_single_gpu/data.py
+++ step02_dp/data.py
@@ -1,2 +1,2 @@
-first = False
+first = True
 second = 2

== support, for a second reading ==

--- step01_single_gpu/ledger.py
+++ step02_dp/ledger.py
@@ -0,0 +1,2 @@
+calls = 0
+bytes = 0

--- step01_single_gpu/extra.py
+++ step02_dp/extra.py
@@ -0,0 +1,2 @@
+in_no = True
+list = True
"""


def test_make_diff(two_steps):
    assert make(two_steps, "diff", "STEP=2") == (0, DIFF)
    assert make(two_steps, "diff", "STEP=2", "FILE=data.py") == (0, DIFF.split("\n\n")[2] + "\n")


@pytest.mark.parametrize("words, message", [
    ("STEP=1", "compares step N with step N-1; choose N from 2 to 2"),
    ("STEP=2 FILE=model.py", "step 2 does not change this file; choose from train.py, data.py, ledger.py, extra.py")])
def test_make_diff_refuses(two_steps, words, message):
    status, output = make(two_steps, "diff", *words.split())
    assert status == 2 and message in output and "Traceback" not in output, output


def test_make_diff_of_every_step_is_what_diff_says():
    def hunks(text):
        return sorted(line for line in text if re.match(r"[-+@ ]", line) and not re.match(r"---|\+\+\+|  \w", line))
    for old, new in pairs():
        status, output = run([sys.executable, ROOT / "tools/diff.py", new.name[4:6]], ROOT, timeout=60)
        assert status == 0 and hunks(output.splitlines()) == hunks(real_diff(old, new))
        assert re.findall(r"^\+\+\+ \S+?/(\S+)$", output, re.M) == CHANGES[new.name]


def test_make_exercise(small_repository):
    status, output = make(small_repository, "exercise", "STEP=2")
    assert status == 0 and "EXERCISE=2=exercise/step02 make test STEP=2" in output, output
    exercise = small_repository / "exercise/step02"
    assert sorted(os.listdir(exercise)) == ["AGENTS.md", "Makefile", "train.py"]
    assert (exercise / "train.py").read_text() == "answer = 41\n"
    status, output = make(small_repository, "test", "STEP=2", EXERCISE="2=exercise/step02")
    assert status == 2 and "no answer" in output and "1 failed" in output
    (exercise / "train.py").write_text("answer = 42  # mine\n")
    status, output = make(small_repository, "test", "STEP=2", EXERCISE="2=exercise/step02")
    assert status == 0 and "3 passed, 1 deselected" in output, output
    status, output = make(small_repository, "exercise", "STEP=2")
    assert status == 0 and "was not changed" in output and "mine" in (exercise / "train.py").read_text()


# ------------------------------------------------------------------------------------------------------- dev/break_it.py
MISTAKE = '[step02_answer]\ntest = "tests/test_step02.py::{test}"\nfile = "train.py"\nold = "answer = 42"\nnew = "{line}"\n'


def break_it(folder, test, line, *names):
    (folder / "exercises/mistakes.toml").write_text(MISTAKE.format(test=test, line=line))
    return run([sys.executable, "dev/break_it.py", *names], folder, timeout=120)


def test_a_planted_mistake_that_goes_red(small_repository):
    status, output = break_it(small_repository, "test_answer", "answer = 40")
    assert status == 0 and "| yes | AssertionError: no answer |" in output, output
    assert (small_repository / "step02_dp/train.py").read_text() == "answer = 42\n"


@pytest.mark.slow
@pytest.mark.parametrize("test, line, message", [
    ("test_anything", "answer = 40", "| NO |"),                                    # stays green
    ("test_import", "import nowhere", "| NO | ModuleNotFoundError"),               # red, but it teaches nothing
    ("test_gone", "answer = 40", "| NO | there is no such test"),
    ("test_long", "answer = 40", "| NO | there is no such test")])                 # a test that is not run
def test_a_planted_mistake_that_shows_nothing_is_seen(small_repository, test, line, message):
    status, output = break_it(small_repository, test, line)
    assert status == 1 and message in output, output


@pytest.mark.slow
def test_what_is_red_anyway_shows_nothing(small_repository):
    (small_repository / "step02_dp/train.py").write_text("answer = 41\n")
    mistake = MISTAKE.format(test="test_answer", line="answer = 40").replace("answer = 42", "answer = 41")
    (small_repository / "exercises/mistakes.toml").write_text(mistake)
    status, output = run([sys.executable, "dev/break_it.py", "--green"], small_repository, timeout=120)
    assert status == 1 and "must pass before a mistake is planted: AssertionError: no answer" in output, output


# ----------------------------------------------------------------------------------------------------------- plot
def write_log(path, losses, first=0):
    lines = [dict(step=first + i, loss=loss, grad_norm=1.0, tokens_per_s=100.0, peak_memory_gib=0.5)
             for i, loss in enumerate(losses)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def draw(tmp_path, *logs):
    return run([sys.executable, ROOT / "tools/plot.py", *logs, "--out", "curves.png"], tmp_path, timeout=120)


def test_plot(tmp_path):
    logs = [write_log(tmp_path / "one.jsonl", [5, 4, 2]), write_log(tmp_path / "tp2.jsonl", [5, 4, 2.02]),
            write_log(tmp_path / "later.jsonl", [2, 3], first=2), write_log(tmp_path / "apart.jsonl", [1], first=9)]
    status, output = draw(tmp_path, *logs)
    assert status == 0 and (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG"), output
    assert output.splitlines() == ["tp2: largest relative difference from the loss of one: 1.0e-02 (step 2)",
                                   "later: largest relative difference from the loss of one: 0.0e+00 (step 2)",
                                   "apart: no step in common with one", "curves.png: 4 runs"]


def test_plot_replaces_nothing_but_a_picture(tmp_path):
    log = write_log(tmp_path / "a.jsonl", [5, 4])
    write_log(tmp_path / "other.png", [3, 2])
    os.link(log, tmp_path / "hard.png")
    for out, message in (("hard.png", "is one of the logs"), ("other.png", "already exists and is not a picture")):
        before = (tmp_path / out).read_bytes()
        status, output = run([sys.executable, ROOT / "tools/plot.py", log, "--out", out], tmp_path, timeout=120)
        assert status == 2 and message in output and (tmp_path / out).read_bytes() == before


# ------------------------------------------------------------------------------------------------- tools/memory.py
TINY = 427_072                                            # parameters


def both_job(argv):
    """Follow the storages of the second training step, and also count all of them again after each operation. Return for both ways
    the bytes of the kinds that persist, at the end, and the peak of all."""
    import contextlib
    import weakref
    from collections import Counter

    import train
    from watch import PERSISTENT, Storages, Watch, replaced_profiler, tensors
    live, kinds, counted, found = Storages(given=True), weakref.WeakKeyDictionary(), [], []

    def count(op, args, kwargs, result):
        for tensor in tensors((args, result)):
            kinds.setdefault(tensor.untyped_storage(), "other")
        counted.append(Counter())
        for storage, kind in kinds.items():
            counted[-1][kind] += storage.nbytes()

    @contextlib.contextmanager
    def watch(step, model, optimizer, args):
        live.tag_state(model, optimizer)
        states = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
        tagged = [*model.parameters(), *optimizer.params], [*states, *optimizer.masters], optimizer.grads
        for kind, of_kind in reversed([*zip(PERSISTENT, tagged)]):                 # in float32, a master is a parameter, too
            kinds.update((tensor.untyped_storage(), kind) for tensor in of_kind)
        if step == 0:
            yield
            return
        with live, Watch(after=count):
            yield
        rows = [row[1:] for row in live.timeline()]
        found.append((rows[-1][:3], max(map(sum, rows))))
        found.append((tuple(counted[-1][kind] for kind in PERSISTENT), max(map(Counter.total, counted))))
    with replaced_profiler(watch):
        train.main(argv)
    return found


@pytest.mark.parametrize("flags", ["--zero 2", "--zero 3 --recompute full"])
def test_memory_is_what_counting_again_finds(pool, flags):
    """Check watch.Storages, which learns from weak references when a storage is freed."""
    argv = f"{flags} --dtype bfloat16 --steps 2 --seq_len 64 --global_batch_size 4 --micro_batch_size 1".split()
    for (last, peak), (other_last, other_peak) in pool.call(both_job, NAMES[2], world=2, argv=argv):
        assert last == other_last and min(last) > 0
        assert sum(last) < 0.9 * peak and peak == pytest.approx(other_peak, rel=0.02)


@pytest.mark.parametrize("step, ranks, flags", [
    pytest.param(NAMES[2], 2, "--zero 3", marks=pytest.mark.slow),
    pytest.param(NAMES[7], 4, "--tp 2 --pp 2", marks=pytest.mark.slow)])
def test_memory_is_drawn(tmp_path, step, ranks, flags):
    out = tmp_path / "new/folder"
    flags += " --dtype float32 --steps 5 --seq_len 32 --global_batch_size 4"
    found = run_ranks(ranks, ["tools/memory.py", f"{step}/train.py", "--out", out, *flags.split()], ROOT, timeout=300)
    assert [status for status, _ in found] == [0] * ranks, found
    output = found[0][1]
    line = r"^step 3/5 .*\nmemory of a rank: ([\d.]+) MiB between steps, ([\d.]+) MiB at the peak\nstep 4/5 "
    (between, peak), = re.findall(line, output, re.M)
    if step != NAMES[7]:                                  # weights, gradients, and two moments
        assert between == f"{4 * 4 * TINY / ranks / 2**20:.1f}"
    assert float(peak) > float(between)
    pictures = sorted(out.iterdir())
    assert [picture.name for picture in pictures] == [f"memory_rank{rank}.png" for rank in range(ranks)]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


# ------------------------------------------------------------------------------------ what the ranks say to each other
ALL_REDUCE, PAIR, OTHERS = ("allreduce_", ((4,),), None, None), ("pair", (0, 1)), ("others", (0, 1))


def message(what, peer, batch=None):
    return (*PAIR, what, ((4,),), peer, batch)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux lists its open ports there")
def test_nobody_else_reaches_the_store_of_the_ranks():
    """Check it because ranks unpickle what they find there."""
    store = new_store()
    listening = [line.split()[1] for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]
                 if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]


@pytest.mark.parametrize("ranks, meets", [
    ([[message("send", 1), message("recv_", 1)], [message("recv_", 0), message("send", 0)]], True),
    ([[message("send", 1), message("recv_", 1)], [message("send", 0), message("recv_", 0)]], False),            # both send first
    ([[message("send", 1, 0), message("recv_", 1, 0)], [message("send", 0, 0), message("recv_", 0, 0)]], True),   # but at once
    ([[(*PAIR, *ALL_REDUCE), (*OTHERS, *ALL_REDUCE)]] * 2, True),
    ([[(*PAIR, *ALL_REDUCE), (*OTHERS, *ALL_REDUCE)], [(*OTHERS, *ALL_REDUCE), (*PAIR, *ALL_REDUCE)]], False),
    ([[message("send", 1), (*OTHERS, *ALL_REDUCE)], [(*OTHERS, *ALL_REDUCE), message("recv_", 0)]], False),
    ([[(*PAIR, *ALL_REDUCE)], []], False)])
def test_operations_meet_one_after_the_other(ranks, meets):
    if meets:
        assert_none_waits_for_ever(ranks)
    else:
        with pytest.raises(AssertionError, match="all wait"):
            assert_none_waits_for_ever(ranks)


def misdeed(name):
    """Do one thing that gloo forgives. Two ranks run this."""
    dist.init_process_group("gloo")
    mine, sums, peer = torch.full((4,), dist.get_rank() + 1.), torch.zeros(8), 1 - dist.get_rank()
    with unforgiving():
        if name == "tensors have names":
            work = dist.all_gather_into_tensor(output_tensor=sums, input_tensor=mine, async_op=True)
        else:
            work = dist.all_gather_into_tensor(sums, mine, async_op=True)
        early = float(sums.sum())
        if name == "writes what is read":
            mine += 1
        if name == "writes where it comes":
            sums.zero_()
        if name == "gives memory back":
            mine.untyped_storage().resize_(0)
        if name != "forgets":
            work.wait()
        if name == "forgets a message":
            dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, sums[:4], peer)])[1].wait()
        dist.barrier()
    return early, float(sums.sum())


@pytest.mark.parametrize("name", ["", "tensors have names"])
def test_unforgiving_gives_nothing_too_early(pool, name):
    for early, then in pool.call(misdeed, 2, world=2, name=name):
        assert math.isnan(early) and then == 12


@pytest.mark.parametrize("name, message", [
    ("writes what is read", r"is written to before wait\(\) of all_gather_into_tensor, started in test_tools.py"),
    ("writes where it comes", "is written to before wait"), ("gives memory back", "memory given back before wait"),
    ("forgets", "not waited for: all_gather_into_tensor"), ("forgets a message", "not waited for: isend")])
def test_unforgiving_sees(pool, name, message):
    with pytest.raises(JobFailed, match=message):
        pool.call(misdeed, 2, world=2, name=name)
