"""Apply each planted mistake of exercises/mistakes to a copy of its step, and check that the test it names goes red.

    python dev/break_it.py                    # all planted mistakes
    python dev/break_it.py step01_not_causal  # some of them
    python dev/break_it.py --green            # check first that these tests pass without them

A planted mistake is a patch. Its header names the test that must go red, one case of one test, and what the loss curve shows:

    test: tests/test_step03.py::test_layout[zero 1]
    loss: nothing to see
    --- a/step03_zero/optimizer.py

One process does it all, so all planted mistakes share the tests' worker processes.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "exercises")]
from patched import MISTAKES, copy_step, planted_mistakes, read_header, run_tests
from steps import full_name


def plant(patch):
    """Plant a mistake in a copy of its step, and run the test that its header names; return the verdict."""
    step = full_name(patch.stem[:6])
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_step(step, folder)
        subprocess.run(["git", "apply", "--unsafe-paths", f"--directory={folder}", patch], cwd=folder, check=True)
        return run_tests([ROOT / read_header(patch)["test"]], (step, copy))


def check_green(chosen):
    """Exit if a test fails without the planted mistake: it would prove nothing."""
    for test in sorted({read_header(patch)["test"] for patch in chosen}):
        verdict = run_tests([ROOT / test])
        if verdict.failed or not verdict.passed:
            sys.exit(f"error: {test} must pass before a mistake is planted: {verdict.why or 'there is no such test'}")


def choose(names):
    known = {patch.stem: patch for patch in planted_mistakes()}
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        sys.exit(f"error: no planted mistake {' '.join(unknown)} in {MISTAKES.relative_to(ROOT)}; choose from {' '.join(known)}")
    return [known[name] for name in names or known]


def main():
    names = [name for name in sys.argv[1:] if name != "--green"]
    chosen, survivors = choose(names), 0
    os.chdir(ROOT / "tests")
    if "--green" in sys.argv:
        check_green(chosen)
    print("| planted mistake | test | red | how it fails |\n|---|---|---|---|", flush=True)
    for patch in chosen:
        verdict = plant(patch)
        survivors += not verdict.red
        why = verdict.why or ("" if verdict.passed else "there is no such test")
        print(f"| {patch.stem} | {read_header(patch)['test']} | {'yes' if verdict.red else 'NO'} | {why[:150]} |", flush=True)
    sys.exit(f"error: the tests missed {survivors} of {len(chosen)} planted mistakes" if survivors else 0)


if __name__ == "__main__":
    main()
