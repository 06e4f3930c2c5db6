"""The exercises can be done: in a step's copy no rung is green before it is written, and every rung is green with our solution."""
import builtins
import re
import signal
import subprocess
import symtable
import sys
import time

import exercise
import pytest
from exercise import LADDER, RED, copy, copy_blank, count, rungs
from harness import JobFailed
from patched import run_tests
from programs import run_program
from steps import NAMES, ROOT, clean_environment, copy_repository, run

LADDERS = range(2, len(NAMES) + 1)
RUNGS = len(rungs(2))                                     # the tests below climb this ladder


@pytest.mark.slow
@pytest.mark.parametrize("number", LADDERS)
def test_rung_by_rung(number, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    ladder = rungs(number)
    for done in range(len(ladder) + 1):
        folder = tmp_path / str(done) / NAMES[number - 1]
        copy(number, folder, done)
        for i in (done - 1, done):
            if 0 <= i < len(ladder):
                verdict = run_tests([f"{LADDER}/test_ladder{number:02d}.py::{ladder[i].__name__}"], (number, folder))
                if i < done:
                    assert verdict.passed and not verdict.failed, f"{ladder[i].__name__}, with all up to it put back: {verdict.why}"
                else:
                    why = f"{ladder[i].__name__} does not need what is to be written"
                    assert verdict.failed and "NotImplementedError" in verdict.text, why


@pytest.mark.slow
def test_as_a_reader_goes_up(tmp_path):
    def make(*words):
        return run([sys.executable, "exercises/exercise.py", "2", *words], tmp_path, timeout=120)
    copy_repository(tmp_path)
    assert make("hint") == (2, "error: exercise/step02 does not exist; run make exercise STEP=2 first\n")
    assert make("solved")[0] == 2
    mine = tmp_path / "exercise/step02/data_parallel.py"
    assert make()[0] == 0 and "NotImplementedError" in mine.read_text() and "do not write the answer" not in make("hint")[1]
    status, output = make("check")
    assert status == RED and f"1 of {RUNGS}  a sum after backward: not yet" in output
    assert re.search(r"came:    data_parallel.py:\d+ in NaiveReducer.finish: NotImplementedError: rung 1", output)
    assert [make("hint")[1].count("\nhint ") for _ in range(4)] == [2, 3, 3, 3]    # the first was given above
    status, output = make("solution")
    assert '-        raise NotImplementedError("rung 1: finish")\n+        for param in self.params:' in output
    assert status == 0 and "Overlap" not in output
    wrong = "print('mine')\n        for param in self.params[1:]:\n            dist.all_reduce(param.main_grad, group=self.group)"
    text = mine.read_text()
    mine.write_text(text.replace('raise NotImplementedError("rung 1: finish")', wrong))
    status, output = make("check")
    assert status == RED and "came:    AssertionError: in step 1 there were all-reduces of [3, 40] numbers" in output, output
    assert "printed: rank 0: mine\n         rank 0: mine\n         rank 1: mine\n         rank 1: mine\n" in output
    right = "[dist.all_reduce(param.main_grad, group=self.group) for param in self.params]"
    mine.write_text(text.replace('raise NotImplementedError("rung 1: finish")', right))
    status, output = make("check")
    assert status == RED and f"1 of {RUNGS}  a sum after backward: green" in output, output
    assert f"2 of {RUNGS}  knowing when" in output
    assert f"rung 2 of {RUNGS}" in make("hint")[1] and "was not changed" in make()[1] and right in mine.read_text()


@pytest.mark.parametrize("number", LADDERS)
def test_what_is_written_for_a_ladder(number):
    ladder = rungs(number)
    named = [(file, name) for test in ladder for file, names in test.rung["write"].items() for name in names]
    assert len(ladder) >= 4 and len(set(named)) == len(named) == sum(map(count, ladder))
    for test in ladder:
        assert len(test.rung["hints"]) == 3 and test.__doc__, test.__name__


@pytest.mark.slow
@pytest.mark.parametrize("number", LADDERS)
def test_a_blank_level_has_what_the_rungs_want(number, tmp_path):
    new = copy_blank(number, tmp_path / "step")
    files = dict.fromkeys(file for test in rungs(number) for file in test.rung["write"])
    assert new == [file for file in files if not (ROOT / NAMES[number - 2] / file).exists()]
    (tmp_path / "step/all.py").write_text("".join(f"import {file.removesuffix('.py')}\n" for file in files))
    status, output = run_program(["all.py"], tmp_path / "step", timeout=120)
    assert status == 0, output
    for test in rungs(number):
        for file, names in test.rung["write"].items():
            assert [name for name in names if exercise.source_of(tmp_path / "step" / file, name)] == names
    for file in new:
        assert not undefined(tmp_path / "step" / file), f"{file} uses names that it does not define"


def undefined(path):
    """Return the global names that a file uses, but neither defines nor imports."""
    tables, used = [symtable.symtable(path.read_text(), str(path), "exec")], set()
    for table in tables:                                  # grows
        tables += table.get_children()
        names = [name for name in table.get_symbols() if name.is_global() or table is tables[0]]
        used |= {name.get_name() for name in names if name.is_referenced()}
    known = {name.get_name() for name in tables[0].get_symbols() if name.is_assigned() or name.is_imported()}
    return used - known - {*dir(builtins)}


# ------------------------------------------------------------------------------------------------ what a red rung says
MINE = """import os
import signal
import torch.distributed as dist

def meet(case):
    dist.init_process_group("gloo")
    print("of", dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 1:
        if case == "raises":
            raise KeyError("mine")
        if case == "refuses":
            print("error: no such folder")
            raise SystemExit(2)
        if case == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "loops":
            while True: pass
        if case == "leaves":
            return
        if case == "returns a function":
            return lambda: 1
    given()

def given():
    dist.barrier()
    raise ValueError(f"[rank{dist.get_rank()}]:[F1126 06:13:04.00{dist.get_rank()} gloo.cpp:1] {object()}")
"""


def meet_job(case):
    import mine
    return mine.meet(case)


@pytest.mark.parametrize("case, reason", [
    ("raises", "rank 1: mine.py:11 in meet: KeyError: 'mine'"),
    ("refuses", "rank 1: error: no such folder"),
    ("dies", "rank 1: the process died, exit code -9"),
    ("fails alike", "mine.py:23 in meet (in mine.py:27, which it calls): ValueError: <object object>"),
    ("returns a function", "rank 1: what it returned cannot be sent to the test: "),
    pytest.param("loops", "ranks wait for something that never comes, or loop for ever (for 20 s):\n"
                          "rank 0 waits: mine.py:23 in meet: given()\nrank 1 waits: mine.py:18 in meet: ", marks=pytest.mark.slow),
    ("leaves", "ranks wait for something that never comes:\nrank 0 waited until another rank ended: mine.py:23 in meet: given()\n"
               "rank 1 had ended")])
def test_what_ranks_have_met_is_said(pool, tmp_path, case, reason):
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(JobFailed):
        pool.call(meet_job, tmp_path, world=2, timeout=20 if case == "loops" else 120, case=case)
    assert exercise.of_ranks(pool.last, tmp_path, {"mine.py": ["meet"]}).startswith(reason)
    assert "rank 0: of 0\nrank 1: of 1" in exercise.what_was_printed(pool.last)


# ------------------------------------------------------------------------------------------------ the way through
@pytest.mark.slow
def test_another_way_through(tmp_path):
    """Start in the middle of the ladder, check single rungs, work in the folder itself, start afresh. make itself must print
    nothing."""
    def make(*words, where="."):
        return run(["make", *words], tmp_path / where, timeout=240)
    copy_repository(tmp_path)
    status, output = make("exercise", "STEP=2", "FROM=3")
    assert status == 0 and "without the bodies of 8 functions" in output
    status, output = make("check", "RUNG=3", where="exercise/step02")
    assert status == 0 and f"3 of {RUNGS}  sending while backward goes on: not yet" in output
    assert "make" not in output.split("make hint")[0] + output.split("make solution")[1]
    assert f"rung 3 of {RUNGS}" in make("hint", "STEP=2")[1]
    status, output = make("check", "STEP=2", "RUNG=2")
    assert status == 0 and re.fullmatch(rf" *2 of {RUNGS}  knowing when a gradient is final: green, [\d.]+ s\n", output)
    assert f"rung 3 of {RUNGS}" in make("hint", "STEP=2")[1]
    mine = tmp_path / "exercise/step02/data_parallel.py"
    mine.write_text("mine\n")
    status, output = make("restart", "STEP=2", "LEVEL=blank")
    assert status == 0 and "exercise/step02 was renamed to exercise/step02.1\n" in output
    assert (tmp_path / "exercise/step02.1/data_parallel.py").read_text() == "mine\n" and "rung 1: finish" in mine.read_text()
    assert "SyntaxError" not in make("check", "STEP=2")[1]


@pytest.mark.parametrize("words, message", [
    ("exercise STEP=2 FROM=8", "FROM=8: must be a rung of step 2, 1 to 7"), ("restart STEP=2", "run make exercise STEP=2 first")])
def test_what_is_refused(tmp_path, words, message):
    copy_repository(tmp_path)
    status, output = run(["make", *words.split()], tmp_path, timeout=120)
    assert status == 2 and output.startswith("error: ") and message in output and "Traceback" not in output, output


@pytest.mark.slow
def test_watching(tmp_path):
    copy_repository(tmp_path)
    run([sys.executable, "exercises/exercise.py", "2"], tmp_path, timeout=120)
    mine, said = tmp_path / "exercise/step02/data_parallel.py", tmp_path / "said"
    with said.open("w") as file:
        command = [sys.executable, "exercises/exercise.py", "2", "watch"]
        child = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=file)
    try:
        wait_for(child, said, "rung 1: finish")
        right = "[dist.all_reduce(param.main_grad, group=self.group) for param in self.params]"
        mine.write_text(mine.read_text().replace('raise NotImplementedError("rung 1: finish")', right))
        wait_for(child, said, f"1 of {RUNGS}  a sum after backward: green")
        wait_for(child, said, "rung 2: __init__")
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130


def wait_for(child, path, text):
    deadline = time.monotonic() + 240
    while text not in path.read_text():
        assert child.poll() is None and time.monotonic() < deadline, path.read_text()
        time.sleep(0.2)
