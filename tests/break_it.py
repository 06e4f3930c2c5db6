"""Applies each break to a copy of the repository and checks that the test which it names goes red.

    python tests/break_it.py                    # all of tests/break_it/*.patch
    python tests/break_it.py step01_no_decay    # some

A break is a patch; lines before it say which test goes red (all its cases are run) and what the loss curve shows:

    test: tests/test_step01.py::test_decay_touches_matrices_only
    loss: nothing to see
    --- a/step01_single_gpu/optimizer.py
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import ROOT, copy_repository, run

FOLDER = ROOT / "tests/break_it"
NO_LESSON = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError")


def patches():
    return sorted(FOLDER.glob("*.patch"))


def head(patch):
    """The 'key: value' lines before the patch proper."""
    lines = re.split(r"^(?:diff|---) ", patch.read_text(), maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return dict(line.split(": ", 1) for line in lines if line)


def pytest(tests, copy):
    return run([sys.executable, "-m", "pytest", *tests, "-x", "-q", "--tb=short", "-p", "no:cacheprovider"], copy, timeout=1800)


def red(status, output):
    """Whether a test failed, which is more than that pytest did: (yes or no, why)."""
    errors = [line[1:].strip() for line in output.splitlines() if line.startswith("E  ")] or output.splitlines()[-1:]
    failed = status == 1 and re.search(r"^\d+ failed", output.splitlines()[-1])
    lesson = not any(re.search(rf"\b{name}\b", line) for name in NO_LESSON for line in errors)
    return bool(failed and lesson), errors[0]


def break_once(patch, copy):
    subprocess.run(["git", "apply", patch], cwd=copy, check=True)
    verdict = red(*pytest([head(patch)["test"]], copy))
    subprocess.run(["git", "apply", "-R", patch], cwd=copy, check=True)
    return verdict


def check_green(chosen, copy):
    """A test that is red anyway shows nothing."""
    status, output = pytest(sorted({head(patch)["test"] for patch in chosen}), copy)
    if status:
        sys.exit(f"{output}\nerror: the tests must pass before anything is broken")


def choose(names):
    known = {patch.stem: patch for patch in patches()}
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        sys.exit(f"error: no break {' '.join(unknown)} in {FOLDER.relative_to(ROOT)}; there are: {' '.join(known)}")
    return [known[name] for name in names or known]


def main():
    chosen, survivors = choose(sys.argv[1:]), 0
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        check_green(chosen, folder)
        print("| break | test | red | how it fails |\n|---|---|---|---|", flush=True)
        for patch in chosen:
            went_red, why = break_once(patch, folder)
            survivors += not went_red
            print(f"| {patch.stem} | {head(patch)['test']} | {'yes' if went_red else 'NO'} | {why[:150]} |", flush=True)
    sys.exit(f"error: {survivors} of {len(chosen)} breaks not seen by their tests" if survivors else 0)


if __name__ == "__main__":
    main()
