"""Extensions: further techniques, each as a small patch to one step.

    python exercises/extend.py               # list them; say when you would want each, and what it did
    python exercises/extend.py muon          # copy its step to exercise/muon, and apply the patch there

The first lines of exercises/extensions/muon.patch say what it is, when you would want it, how to run it, and what we measured. Its
tests are in exercises/extensions/muon.py. As with planted mistakes, EXERCISE makes the tests use the copy instead of the step.
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from patched import copy_step, read_header, run_tests
from refuse import refuse, run_and_exit
from steps import ROOT, full_name

FOLDER = ROOT / "exercises/extensions"


def patches():
    """Return {name: patch}, sorted by step."""
    found = sorted(FOLDER.glob("*.patch"), key=lambda patch: (read_header(patch)["step"], patch.stem))
    return {patch.stem: patch for patch in found}


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
    print(f"    diff -u -N -r -x '*.md' -x 'by_hand*' -x figures -x __pycache__ {step} {shown}\n"
          f"    {said['run'].format(folder=shown)}\n"
          f"    EXERCISE={said['step']}={shown} make test STEP={said['step']}        its tests, except the long ones, on the copy")


def show_list():
    for name, patch in patches().items():
        header = read_header(patch)
        print(f"{name:<18}step {header['step']}  {header['what']}\n{'':<26}if {header['when']}\n"
              f"{'':<26}{header['effect']}")
    print("\nmake extend NAME=muon copies a step with that patch to exercise/muon")


def main():
    names, known = sys.argv[1:], patches()
    if unknown := [name for name in names if name not in known]:
        refuse(f"NAME={unknown[0]}: unknown extension; choose from {', '.join(known)}")
    for name in names:
        start(known[name])
    if not names:
        show_list()


if __name__ == "__main__":
    run_and_exit(main)
