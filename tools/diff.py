"""What step N changes, in the order to read it: python tools/diff.py 4 [zero.py]

First the files, with how much of them changes. Then the diff: of train.py, of the other files that were there before, of
new ones last. README.md and figures/ are no part of it (steps.in_diff). On a terminal it is coloured.
"""
import os
import subprocess
import sys

from steps import CHANGES, NAMES, ROOT, STEPS, step_files

COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
BOLD, PLAIN = "\033[1m", "\033[0m"


def refuse(message):
    print(message, file=sys.stderr)
    sys.exit(2)


def steps_of(number):
    """The names of a step and of the one before it."""
    names = NAMES[int(number) - 2:int(number)] if number.isdecimal() and int(number) > 1 else []
    if len(names) < 2 or not set(names) <= set(STEPS):
        refuse(f"make diff STEP=N: needs steps N-1 and N; there are {' '.join(STEPS)}")
    return names


def changed_files(old, new):
    """{name: lines of its diff}, in the order to read them."""
    before, after = set(step_files(ROOT / old)), set(step_files(ROOT / new))
    diffs = {name: file_diff(old, new, name) for name in before | after}
    def place(name):
        return CHANGES[new].index(name) if name in CHANGES[new] else len(CHANGES[new]), name not in before, name
    return {name: diffs[name] for name in sorted(diffs, key=place) if diffs[name]}


def file_diff(old, new, name):
    command = ["diff", "-uN", "-L", f"{old}/{name}", "-L", f"{new}/{name}", f"{old}/{name}", f"{new}/{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode > 1:
        refuse(f"make diff: {done.stderr.strip()}")
    return done.stdout.splitlines()


def size(lines, is_new):
    """The first two lines name the files."""
    added, removed = (sum(line[0] == sign for line in lines[2:]) for sign in "+-")
    return f"new, {added} lines" if is_new else f"+{added} -{removed}"


def head(old, new, diffs):
    """A line for each file."""
    sizes = {name: size(lines, is_new=not (ROOT / old / name).exists()) for name, lines in diffs.items()}
    return [f"{old} -> {new}", *(f"  {name:<24}{said}" for name, said in sizes.items())]


def coloured(lines):
    """A file's diff as a terminal shows it."""
    if not sys.stdout.isatty():
        return lines
    return [f"{BOLD}{line}{PLAIN}" for line in lines[:2]] + [f"{COLOURS.get(line[0], '')}{line}{PLAIN}" for line in lines[2:]]


def main(number="", *wanted):
    old, new = steps_of(number)
    diffs = changed_files(old, new)
    unknown = [name for name in wanted if name not in diffs]
    if unknown:
        refuse(f"make diff STEP={number} FILE={unknown[0]}: step {number} changes {', '.join(diffs)}")
    parts = [coloured(diffs[name]) for name in wanted or diffs]
    if not wanted:
        parts.insert(0, head(old, new, diffs))
    print("\n\n".join("\n".join(lines) for lines in parts))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:                               # make diff STEP=3 | head has read enough, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
