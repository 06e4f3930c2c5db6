"""The exercises can be done: in a step's copy no rung is green before it is written, and each is when ours is put back."""
import ast
import re
import sys

import pytest
from break_it import run_tests
from exercise import LADDER, copy, count, find, rungs, take_out
from layouts import every_other
from steps import NAMES, ROOT, copy_repository, run

LADDERS = [number for number in range(2, len(NAMES) + 1) if (LADDER / f"test_ladder{number:02d}.py").exists()]


def test_every_step_with_a_technique_has_a_ladder():
    assert LADDERS == list(range(2, len(NAMES) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("number", every_other(LADDERS))
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
        return run([sys.executable, "tools/exercise.py", "2", *words], tmp_path, timeout=120)
    copy_repository(tmp_path)
    assert make("hint") == (2, "error: no exercise/step02: make exercise STEP=2 makes it\n")
    assert make("solved")[0] == 2
    mine = tmp_path / "exercise/step02/data_parallel.py"
    assert make()[0] == 0 and "NotImplementedError" in mine.read_text() and "do not write the answer" not in make("hint")[1]
    status, output = make("check")
    assert status == 1 and "1 of 7  a sum after backward: not yet" in output
    assert re.search(r"data_parallel.py:\d+: NotImplementedError: rung 1", output)
    assert [make("hint")[1].count("\nhint ") for _ in range(4)] == [2, 3, 3, 3]    # the first was given above
    status, output = make("solution")
    assert '-    raise NotImplementedError("rung 1: naive")\n+    def sum_gradients():' in output
    assert status == 0 and "overlap" not in output
    wrong = "    for param in params:\n        dist.all_reduce(param.main_grad)\n    return lambda: None"
    text = mine.read_text()
    mine.write_text(text.replace('    raise NotImplementedError("rung 1: naive")', wrong))
    status, output = make("check")
    assert status == 1 and "came:    AssertionError: 3 all-reduces were started before the last micro-batch" in output, output
    right = "    return lambda: [dist.all_reduce(param.main_grad) for param in params]"
    mine.write_text(text.replace('    raise NotImplementedError("rung 1: naive")', right))
    status, output = make("check")
    assert status == 1 and "1 of 7  a sum after backward: green" in output and "2 of 7  knowing when" in output, output
    assert "rung 2 of 7" in make("hint")[1] and "stays as it is" in make()[1] and right in mine.read_text()


@pytest.mark.parametrize("number", LADDERS)
def test_what_is_written_for_a_ladder(number):
    ladder = rungs(number)
    named = [(file, name) for test in ladder for file, names in test.rung["write"].items() for name in names]
    assert len(ladder) >= 4 and len(set(named)) == len(named) == sum(map(count, ladder))
    for test in ladder:
        assert len(test.rung["hints"]) == 3 and test.__doc__, test.__name__
        assert all(hint[-1] in ".?)" for hint in test.rung["hints"]), test.__name__


SOURCE = '''import os


class Box:
    def size(self, x):                                    # a comment
        # how
        return x + 1

    def named(self):
        """Says what."""
        return 1


def last(a,
         b=2):                                            # [batch]
    def inner():
        return a
    return inner
'''


def test_taking_out():
    assert take_out(SOURCE, ["Box.size", "Box.named", "last"], 3) == '''import os


class Box:
    def size(self, x):                                    # a comment
        raise NotImplementedError("rung 3: size")

    def named(self):
        """Says what."""
        raise NotImplementedError("rung 3: named")


def last(a,
         b=2):                                            # [batch]
    raise NotImplementedError("rung 3: last")
'''


def test_what_every_body_says_compiles():
    for number in LADDERS:
        for test in rungs(number):
            for file, names in test.rung["write"].items():
                source = (ROOT / NAMES[number - 1] / file).read_text()
                compile(take_out(source, names, 1), file, "exec")
                assert all(re.match(r"\s*def ", source.splitlines()[find(ast.parse(source), name).lineno - 1]) for name in names)
