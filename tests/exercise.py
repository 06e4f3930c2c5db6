"""Copies step N-1 to exercise/stepN, for the reader to turn into step N.

    python tests/exercise.py 4
"""
import shutil
import sys

from steps import NAMES, ROOT, STEPS


def refuse(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def number_of(text):
    if not text.isdigit() or not 2 <= int(text) <= len(NAMES):
        refuse(f"which step? STEP=N, N from 2 to {len(NAMES)}; step 1 has no step before it")
    if int(text) - 1 > len(STEPS):
        refuse(f"step {int(text) - 1}, which step {text} starts from, is not written yet; there are {len(STEPS)}")
    return int(text)


def main():
    number = number_of(sys.argv[1] if sys.argv[1:] else "")
    folder = f"exercise/step{number:02d}"
    if (ROOT / folder).exists():
        print(f"{folder} is there already and stays as it is")
    else:
        shutil.copytree(ROOT / NAMES[number - 2], ROOT / folder,
                        ignore=shutil.ignore_patterns("__pycache__", "figures", "README.md"))
        print(f"{folder} is a copy of {NAMES[number - 2]}")
    print(f"Turn it into step {number}: edit {folder}/*.py\n"
          f"Then see how far it is:   EXERCISE={number}={folder} make test STEP={number}")


if __name__ == "__main__":
    main()
