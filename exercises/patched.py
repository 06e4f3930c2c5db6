"""What planted mistakes and extensions share: copy a step, change the copy, run tests on it.

A planted mistake (dev/break_it.py, hunt.py, plants.py) is a table of mistakes.toml. An extension (extend.py) is a
patch; the lines before the patch proper are its header, one 'key: value' each. EXERCISE=3=FOLDER makes the tests take FOLDER for
step 3.
"""
import gc
import os
import re
import shutil
import sys
import tomllib
from functools import cache
from pathlib import Path

from steps import full_name

os.environ.setdefault("PATIENCE", "120")                  # seconds before a hung test is stopped

ROOT = Path(__file__).resolve().parents[1]
MISTAKES = ROOT / "exercises/mistakes.toml"
NO_LESSON = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError", "AttributeError")


@cache
def planted_mistakes():
    """Return all planted mistakes, {name: its table}, in the order of mistakes.toml. A text of several lines becomes one line."""
    mistakes = tomllib.loads(MISTAKES.read_text())
    for mistake in mistakes.values():
        mistake.update({key: " ".join(mistake[key].split()) for key in ("what", "loss", "wild") if key in mistake})
    return mistakes


def edits(mistake, step8=False):
    """Return the edits that plant a mistake in its step, or in step 8: file, old, new."""
    own = mistake.get("edits", [mistake])
    return mistake.get("in_step_8", own) if step8 else own


def not_in(what):
    """Return {name: why not} of the mistakes that the hunt does not draw, or that tools/prove is not tried on."""
    return {name: mistake["because"] for name, mistake in planted_mistakes().items() if what in mistake.get("not_in", ())}


def planted_copy(name, folder, step=None):
    """Copy a mistake's step, or step 8, into the folder, and plant the mistake there; return the copy's path."""
    copy = copy_step(step or full_name(name[:6]), folder)
    for edit in edits(planted_mistakes()[name], step8=copy.name.startswith("step08")):
        text = (copy / edit["file"]).read_text()
        assert text.count(edit["old"]) == 1, f"{name}: its old text must occur once in {copy.name}/{edit['file']}"
        (copy / edit["file"]).write_text(text.replace(edit["old"], edit["new"]))
    return copy


def read_header(patch):
    """Return the 'key: value' lines before the patch proper, as a dict."""
    lines = re.split(r"^(?:diff|---) ", patch.read_text(), maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return dict(line.split(": ", 1) for line in lines if line)


def copy_step(step, folder):
    """Copy the code of a step, without its pages and figures, into the folder; return the copy's path."""
    return shutil.copytree(ROOT / step, Path(folder) / step, ignore=shutil.ignore_patterns("__pycache__", "figures", "*.md"))


class Verdict:
    """A pytest plugin that counts the tests that passed and keeps the first failure."""

    def __init__(self):
        self.passed, self.why, self.failed, self.text, self.lesson = 0, "", "", "", False

    def pytest_runtest_logreport(self, report):
        self.passed += report.passed and report.when == "call"
        if report.failed and not self.failed:
            self.failed = report.nodeid
            lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
            self.text = str(report.longrepr)
            self.why = next(iter(lines), str(report.longrepr).splitlines()[-1])
            self.lesson = not any(re.search(rf"\b{name}\b", line) for name in NO_LESSON for line in lines)

    def pytest_collectreport(self, report):
        if report.failed:
            self.why = "pytest could not collect the tests"

    @property
    def red(self):
        """Return whether a test failed on its own assertion, not on a name that the change broke."""
        return bool(self.failed) and self.lesson


def run_tests(tests, exercise=None, *options):
    """Run pytest in this process, with exercise = (step, folder) in place of that step; return the Verdict."""
    import pytest
    verdict, printed = Verdict(), sys.stdout
    gc.freeze()                                           # pytest calls gc.collect() twice, which would traverse all of torch
    os.environ["EXERCISE"] = "" if exercise is None else "{}={}".format(*exercise)
    with open(os.devnull, "w") as sys.stdout:
        try:
            pytest.main([*tests, "-x", "-p", "no:cacheprovider", "-m", "not sweep", *options], plugins=[verdict])
        finally:
            sys.stdout = printed
            del os.environ["EXERCISE"]
    return verdict
