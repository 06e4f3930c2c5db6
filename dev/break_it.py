"""Plant each mistake of exercises/mistakes.toml in a copy of its step, and check that the test it names goes red.

    python dev/break_it.py                    # all planted mistakes
    python dev/break_it.py step01_not_causal  # some of them
    python dev/break_it.py --green            # check first that these tests pass without them

One process does it all, so all planted mistakes share the tests' worker processes.
"""
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "exercises")]
from patched import MISTAKES, planted_copy, planted_mistakes, run_tests


def plant(name, test):
    """Plant a mistake in a copy of its step, and run the test on it; return the verdict."""
    with tempfile.TemporaryDirectory() as folder:
        copy = planted_copy(name, folder)
        return run_tests([ROOT / test], (copy.name, copy))


def check_green(tests):
    """Exit if a test fails without the planted mistake: it would prove nothing."""
    for test in sorted(tests):
        verdict = run_tests([ROOT / test])
        if verdict.failed or not verdict.passed:
            sys.exit(f"error: {test} must pass before a mistake is planted: {verdict.why or 'there is no such test'}")


def choose(names):
    """Return {name: test} for these mistakes, or for all."""
    known = {name: mistake["test"] for name, mistake in planted_mistakes().items()}
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        sys.exit(f"error: no planted mistake {' '.join(unknown)} in {MISTAKES.relative_to(ROOT)}; choose from {' '.join(known)}")
    return {name: known[name] for name in names or known}


def main():
    names = [name for name in sys.argv[1:] if name != "--green"]
    chosen, survivors = choose(names), 0
    os.chdir(ROOT / "tests")
    if "--green" in sys.argv:
        check_green({*chosen.values()})
    print("| planted mistake | test | red | how it fails |\n|---|---|---|---|", flush=True)
    for name, test in chosen.items():
        verdict = plant(name, test)
        survivors += not verdict.red
        why = verdict.why or ("" if verdict.passed else "there is no such test")
        print(f"| {name} | {test} | {'yes' if verdict.red else 'NO'} | {why[:150]} |", flush=True)
    sys.exit(f"error: the tests missed {survivors} of {len(chosen)} planted mistakes" if survivors else 0)


if __name__ == "__main__":
    main()
