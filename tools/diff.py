"""Print what step N changes, in the order to read it: python tools/diff.py 4 [zero.py]

The files come first, with the size of each change: those of the lesson and, below a line, those that only support it
(steps.LESSON and steps.SUPPORT, as in the READMEs' tables). Their diffs follow in the same order, with the same line between them.
It leaves out README.md, by_hand*.py and figures/ (steps.in_diff), and colours its output on a terminal.
"""
import os
import subprocess
import sys

from steps import BORDER, LESSON, NAMES, ROOT, STEPS, SUPPORT, step_files

COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
BOLD, PLAIN = "\033[1m", "\033[0m"
LINE = f"== {BORDER} =="


def refuse(message):
    print(message, file=sys.stderr)
    sys.exit(2)


def steps_of(number):
    """Return the names of the previous step and of this one."""
    names = NAMES[int(number) - 2:int(number)] if number.isdecimal() and int(number) > 1 else []
    if len(names) < 2 or not set(names) <= set(STEPS):
        refuse(f"make diff STEP=N: compares step N with step N-1; choose N from 2 to {len(STEPS)}")
    return names


def changed_files(old, new):
    """Return {name: lines of its diff} for the lesson and for the rest, each in reading order; files in no list come last."""
    names = set(step_files(ROOT / old)) | set(step_files(ROOT / new))
    order = [*LESSON[new], *SUPPORT[new], *sorted(names - {*LESSON[new], *SUPPORT[new]})]
    diffs = {name: lines for name in order if name in names and (lines := file_diff(old, new, name))}
    lesson = {name: diffs.pop(name) for name in LESSON[new] if name in diffs}
    return lesson, diffs


def file_diff(old, new, name):
    command = ["diff", "-uN", "-L", f"{old}/{name}", "-L", f"{new}/{name}", f"{old}/{name}", f"{new}/{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode > 1:
        refuse(f"make diff: {done.stderr.strip()}")
    return done.stdout.splitlines()


def changed(lines):
    """Count the lines added and the lines removed. The first two lines of a diff only name the files."""
    return [sum(line[0] == sign for line in lines[2:]) for sign in "+-"]


def head(old, new, lesson, support):
    """Return the heading: a line that says how much there is to read, and a line for each file."""
    def sizes(diffs):
        for name, (added, removed) in zip(diffs, map(changed, diffs.values())):
            yield f"  {name:<24}" + (f"+{added} -{removed}" if (ROOT / old / name).exists() else f"new, {added} lines")
    of_lesson, of_support = (sum(sum(changed(lines)) for lines in diffs.values()) for diffs in (lesson, support))
    return [f"{old} -> {new}: {of_lesson} changed lines in the lesson, {of_support} in support",
            *sizes(lesson), *([LINE] if support else []), *sizes(support)]


def coloured(lines):
    """Colour a file's diff if the output is a terminal."""
    if not sys.stdout.isatty():
        return lines
    return [f"{BOLD}{line}{PLAIN}" for line in lines[:2]] + [f"{COLOURS.get(line[0], '')}{line}{PLAIN}" for line in lines[2:]]


def main(number="", *wanted):
    old, new = steps_of(number)
    lesson, support = changed_files(old, new)
    diffs = lesson | support
    unknown = [name for name in wanted if name not in diffs]
    if unknown:
        refuse(f"make diff STEP={number} FILE={unknown[0]}: step {number} does not change this file; "
               f"choose from {', '.join(diffs)}")
    parts = [coloured(diffs[name]) for name in wanted or diffs]
    if not wanted:
        parts.insert(len(lesson), [f"{BOLD}{LINE}{PLAIN}" if sys.stdout.isatty() else LINE] if support else [])
        parts = [head(old, new, lesson, support), *filter(None, parts)]
    print("\n\n".join("\n".join(lines) for lines in parts))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:                               # `make diff STEP=3 | head` stops reading early, which is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:                              # a full disk; devnull, so that exit does not try to flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        refuse(f"make diff: {error}")
