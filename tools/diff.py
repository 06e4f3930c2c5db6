"""Print what step N changes, in the order to read it: python tools/diff.py 4 [zero.py]

The files come first, with the size of each change: those of the lesson and, below a line, those that only support it
(steps.LESSON and steps.SUPPORT, as in the READMEs' tables). Their diffs follow in the same order, with the same line between them.
It leaves out the pages, by_hand*.py and figures/ (steps.NOT_IN_DIFF), and colours its output on a terminal.
"""
import os
import re
import shutil
import signal
import subprocess
import sys

from refuse import refuse
from steps import BORDER, LESSON, NAMES, ROOT, STEPS, SUPPORT, step_files

LINE = f"== {BORDER} =="


def changed_files(old, new):
    """Return {name: (lines added, lines removed)} for the lesson and for the rest, in reading order; files in no list come last."""
    names = {*step_files(ROOT / old), *step_files(ROOT / new)}
    order = [*LESSON[new], *SUPPORT[new], *sorted(names - {*LESSON[new], *SUPPORT[new]})]
    said = {name: diff(old, new, name, "--numstat") for name in order if name in names}
    sizes = {name: tuple(map(int, counts.split()[:2])) for name, counts in said.items() if counts}
    lesson = {name: sizes.pop(name) for name in LESSON[new] if name in sizes}
    return lesson, sizes


def diff(old, new, name, *flags):
    """Return git's diff of one file, without what only git needs."""
    sides = [f"{step}/{name}" if (ROOT / step / name).exists() else "/dev/null" for step in (old, new)]
    command = ["git", "diff", "--no-index", "--no-prefix", "--diff-algorithm=myers", *flags, "--", *sides]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    text = text.replace("--- /dev/null", f"--- {old}/{name}", 1).replace("+++ /dev/null", f"+++ {new}/{name}", 1)
    text = re.sub(r"^(\S*@@ .*? @@(?:\x1b\[m)?).*", r"\1", text, flags=re.M)        # git adds the function's name
    return text.rstrip("\n") if "--numstat" in flags else re.sub(r"\A(?:.*\n)*?(?=\S*--- )", "", text).rstrip("\n")


def head(old, new, lesson, support):
    """Return the heading: a line that says how much there is to read, and a line for each file."""
    def sizes(files):
        for name, (added, removed) in files.items():
            yield f"  {name:<24}" + (f"+{added} -{removed}" if (ROOT / old / name).exists() else f"new, {added} lines")
    of_lesson, of_support = (sum(map(sum, files.values())) for files in (lesson, support))
    return "\n".join([f"{old} -> {new}: {of_lesson} changed lines in the lesson, {of_support} in support",
                      *sizes(lesson), *([LINE] if support else []), *sizes(support)])


def main(number="", *wanted):
    names = NAMES[int(number) - 2:int(number)] if number.isdecimal() and int(number) > 1 else []
    if len(names) < 2 or not set(names) <= set(STEPS):
        refuse(f"make diff STEP=N: compares step N with step N-1; choose N from 2 to {len(STEPS)}")
    lesson, support = changed_files(*names)
    for name in wanted:
        if name not in lesson | support:
            refuse(f"make diff STEP={number} FILE={name}: step {number} does not change this file; "
                   f"choose from {', '.join(lesson | support)}")
    colour = f"--color={'always' if sys.stdout.isatty() else 'never'}"
    parts = [diff(*names, name, colour) for name in wanted or [*lesson, *support]]
    if not wanted:
        parts = [head(*names, lesson, support), *parts[:len(lesson)], *[LINE] * bool(support), *parts[len(lesson):]]
    show("\n\n".join(parts))


def show(text):
    """Print it; on a terminal through a pager, as git does."""
    pager = os.environ.get("PAGER") or shutil.which("less")
    if not pager or not sys.stdout.isatty():
        return print(text)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)         # the reader may leave before the end
    subprocess.run(pager, shell=True, input=text + "\n", text=True, env={"LESS": "FRX", **os.environ})


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)         # make diff STEP=3 | head
    main(*sys.argv[1:])
