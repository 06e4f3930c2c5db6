"""Applies each break to a copy of the step that it is a break of and checks that the test which it names goes red.

    python tools/break_it.py                    # all of exercises/mistakes/*.patch
    python tools/break_it.py step01_not_causal  # some
    python tools/break_it.py --green            # first that all these tests pass (make test and make rest show that)

A break is a patch; lines before it say which test goes red, one case of one test, and what the loss curve shows:

    test: tests/test_step03.py::test_layout[zero 1]
    loss: nothing to see
    --- a/step03_zero/optimizer.py

All is done in one process, by the same workers: EXERCISE, which puts a reader's folder in the place of a step, puts the copy there.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("PATIENCE", "120")                  # of the tests with a job: some breaks make it hang

from steps import ROOT, full_name

FOLDER = ROOT / "exercises/mistakes"
SETTINGS = ["-c", str(ROOT / "tests/pytest.ini"), "--rootdir", str(ROOT)]
NO_LESSON = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError", "AttributeError")


def patches():
    return sorted(FOLDER.glob("*.patch"))


def head(patch):
    """The 'key: value' lines before the patch proper."""
    lines = re.split(r"^(?:diff|---) ", patch.read_text(), maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return dict(line.split(": ", 1) for line in lines if line)


class Verdict:
    """What pytest says while it runs: how many tests passed, and how the first failed."""

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
            self.why = "cannot be collected"

    @property
    def red(self):
        """A test failed, which is more than that pytest did."""
        return bool(self.failed) and self.lesson


def run_tests(tests, exercise=None, *options):
    """pytest in this process, with a folder in the place of a step."""
    import pytest
    verdict, printed = Verdict(), sys.stdout
    os.environ["EXERCISE"] = "" if exercise is None else "{}={}".format(*exercise)
    with open(os.devnull, "w") as sys.stdout:
        try:
            pytest.main([*SETTINGS, *tests, "-x", "-q", "-p", "no:cacheprovider", "-m", "not sweep", *options], plugins=[verdict])
        finally:
            sys.stdout = printed
            del os.environ["EXERCISE"]
    return verdict


def copy_of(step, folder):
    """The step alone, without what is no code, in the folder."""
    return shutil.copytree(ROOT / step, Path(folder) / step, ignore=shutil.ignore_patterns("__pycache__", "figures", "README.md"))


def break_once(patch):
    step = full_name(patch.stem[:6])
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(step, folder)
        subprocess.run(["git", "apply", "--unsafe-paths", f"--directory={folder}", patch], cwd=folder, check=True)
        return run_tests([ROOT / head(patch)["test"]], (step, copy))


def check_green(chosen):
    """A test that is red anyway shows nothing."""
    for test in sorted({head(patch)["test"] for patch in chosen}):
        verdict = run_tests([ROOT / test])
        if verdict.failed or not verdict.passed:
            sys.exit(f"error: {test} must pass before anything is broken: {verdict.why or 'there is no such test'}")


def choose(names):
    known = {patch.stem: patch for patch in patches()}
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        sys.exit(f"error: no break {' '.join(unknown)} in {FOLDER.relative_to(ROOT)}; there are: {' '.join(known)}")
    return [known[name] for name in names or known]


def main():
    names = [name for name in sys.argv[1:] if name != "--green"]
    chosen, survivors = choose(names), 0
    os.chdir(ROOT / "tests")
    if "--green" in sys.argv:
        check_green(chosen)
    print("| break | test | red | how it fails |\n|---|---|---|---|", flush=True)
    for patch in chosen:
        verdict = break_once(patch)
        survivors += not verdict.red
        why = verdict.why or ("" if verdict.passed else "there is no such test")
        print(f"| {patch.stem} | {head(patch)['test']} | {'yes' if verdict.red else 'NO'} | {why[:150]} |", flush=True)
    sys.exit(f"error: {survivors} of {len(chosen)} breaks not seen by their tests" if survivors else 0)


if __name__ == "__main__":
    main()
