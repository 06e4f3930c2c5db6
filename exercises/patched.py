"""What planted mistakes and extensions share: copy a step, read a patch's header, run tests on the copy.

Planted mistakes (dev/break_it.py, hunt.py) and extensions (extend.py) are patches. The lines before the patch proper are its
header, one 'key: value' each. EXERCISE=3=FOLDER makes the tests take FOLDER for step 3.
"""
import os
import re
import shutil
import sys
from pathlib import Path

os.environ.setdefault("PATIENCE", "120")                  # seconds before a hung test is stopped

ROOT = Path(__file__).resolve().parents[1]
MISTAKES = ROOT / "exercises/mistakes"
NO_LESSON = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError", "AttributeError")


def planted_mistakes():
    """Return the patches of all planted mistakes, sorted by name."""
    return sorted(MISTAKES.glob("*.patch"))


def read_header(patch):
    """Return the 'key: value' lines before the patch proper, as a dict."""
    lines = re.split(r"^(?:diff|---) ", patch.read_text(), maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return dict(line.split(": ", 1) for line in lines if line)


def copy_step(step, folder):
    """Copy the code of a step, without its README and figures, into the folder; return the copy's path."""
    return shutil.copytree(ROOT / step, Path(folder) / step, ignore=shutil.ignore_patterns("__pycache__", "figures", "README.md"))


class Verdict:
    """A pytest plugin that counts the tests that passed and keeps the first failure."""

    def __init__(self):
        self.passed, self.why, self.failed, self.text = 0, "", "", ""

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
        """Return whether a test failed on its own assertion, not on a name that the patch broke."""
        return bool(self.failed) and self.lesson


def run_tests(tests, exercise=None, *options):
    """Run pytest in this process, with exercise = (step, folder) in place of that step; return the Verdict."""
    import pytest
    verdict, printed = Verdict(), sys.stdout
    os.environ["EXERCISE"] = "" if exercise is None else "{}={}".format(*exercise)
    with open(os.devnull, "w") as sys.stdout:
        try:
            pytest.main([*tests, "-x", "-p", "no:cacheprovider", "-m", "not sweep", *options], plugins=[verdict])
        finally:
            sys.stdout = printed
            del os.environ["EXERCISE"]
    return verdict
