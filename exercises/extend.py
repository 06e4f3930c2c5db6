"""Extensions: further techniques, each as a small patch to one step.

    python exercises/extend.py               # list them, and run their tests
    python exercises/extend.py muon          # copy its step to exercise/muon, and apply the patch there

The first lines of exercises/extensions/muon.patch say what it is, how to run it, and what we measured. Its tests are in
exercises/extensions/muon.py. As with planted mistakes, EXERCISE makes the tests use the copy instead of the step.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from patched import copy_step, read_header, run_tests
from steps import ROOT, full_name

FOLDER = ROOT / "exercises/extensions"


def refuse(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def patches():
    """Return {name: patch}, sorted by step."""
    found = sorted(FOLDER.glob("*.patch"), key=lambda patch: (read_header(patch)["step"], patch.stem))
    return {patch.stem: patch for patch in found}


def lines(patch, sign="+"):
    """Return how many lines the patch adds, or with "-" removes, without its header and the names of files."""
    return sum(line[:1] == sign and line[:3] != 3 * sign for line in patch.read_text().splitlines())


def apply(patch, folder):
    """Apply the patch to a copy of its step in the folder. Return the copy's path."""
    copy = copy_step(full_name(read_header(patch)["step"]), folder)
    command = ["git", "apply", "--unsafe-paths", f"--directory={folder}", patch]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        refuse(f"{patch.name} does not fit {copy.name} as it is here; undo your changes to that step (git status shows them): "
               + done.stderr.strip().splitlines()[-1].removeprefix("error: "))
    return copy


def run_its_tests(patch, *options):
    with tempfile.TemporaryDirectory() as folder:
        return run_tests([patch.with_suffix(".py")], (read_header(patch)["step"], apply(patch, folder)), *options)


# ------------------------------------------------------------------------------------------------ the reader's commands
def start(patch):
    target, said = ROOT / "exercise" / patch.stem, read_header(patch)
    step, shown = full_name(said["step"]), target.relative_to(ROOT)
    if target.exists():
        print(f"{shown} already exists, and was not changed")
    else:
        with tempfile.TemporaryDirectory() as folder:
            copy = apply(patch, folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copytree(copy, target)
        print(f"{shown} is {step} with {said['what']}")
    print(f"    diff -u -N -r -x README.md -x 'by_hand*' -x figures -x __pycache__ {step} {shown}\n"
          f"    {said['run'].format(folder=shown)}\n"
          f"    EXERCISE={said['step']}={shown} make test STEP={said['step']}        all tests of the step, on the copy")


def run_all():
    red = 0
    print("| extension | step | lines | its tests | seconds |\n|---|---|---|---|---|", flush=True)
    for name, patch in patches().items():
        begun = time.monotonic()
        verdict = run_its_tests(patch)
        green = verdict.passed and not verdict.failed
        red += not green
        result = f"{verdict.passed} passed" if green else f"RED: {verdict.failed} {verdict.why[:150]}"
        header = read_header(patch)
        print(f"| {name}: {header['what']} | {header['step']} | +{lines(patch)} -{lines(patch, '-')} | {result} "
              f"| {time.monotonic() - begun:.0f} |", flush=True)
    sys.exit(f"error: {red} of {len(patches())} extensions have tests that fail" if red else 0)


def main():
    names, known = sys.argv[1:], patches()
    if unknown := [name for name in names if name not in known]:
        refuse(f"NAME={unknown[0]}: unknown extension; choose from {', '.join(known)}")
    for name in names:
        start(known[name])
    if not names:
        os.chdir(ROOT / "tests")
        run_all()


if __name__ == "__main__":
    try:
        main()
    except OSError as error:                              # no git, or a folder that cannot be written
        refuse(error)
