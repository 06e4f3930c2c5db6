"""Carries the uncommitted changes of each step into every later step, by three-way merge; stops at a conflict.

    python dev/carry.py                                  # after editing step K, before the commit
    python dev/carry.py --check                          # only says what is to be carried; exits with 1 if anything is
    python dev/carry.py --base REV                       # what has changed since REV
    python dev/carry.py --merged step03_zero/train.py    # goes on after a conflict that was merged by hand there

Step K's change goes to step K+1, then step K+1's, which now includes it, to step K+2, and so on.
"""
import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from steps import ROOT, STEPS, in_diff, step_files

CONFLICT = re.compile(rb"^<{7} .*?\n(.*?)^\|{7} .*?\n.*?^={7}\n.*?^>{7} .*?\n", re.DOTALL | re.MULTILINE)


def git(*command):
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True)


def names(step, base, carried):
    """The files of a step: at base, now, and those that --check would have carried to it."""
    at_base = git("ls-tree", "-r", "--name-only", base, f"{step}/").stdout.decode().splitlines()
    inside = (path.removeprefix(f"{step}/") for path in [*at_base, *carried] if path.startswith(f"{step}/"))
    return sorted(set(filter(in_diff, inside)) | set(step_files(ROOT / step)))


def committed(path, base):
    shown = git("show", f"{base}:./{path}")
    return None if shown.returncode else shown.stdout


def current(path, carried):
    if path in carried:
        return carried[path]
    return (ROOT / path).read_bytes() if (ROOT / path).is_file() else None


def combine(path, later, base, theirs, ours):
    """The later step's new text (None: no file) and a word on how it came about (None: nothing to do)."""
    if theirs in (base, ours):
        return ours, None
    if ours == base:
        return theirs, "new" if base is None else "deleted" if theirs is None else "the same file"
    if None in (base, theirs, ours):
        return ours, "left alone, it has its own"
    text, conflicts = merge(path, later, base, theirs, ours)
    if conflicts:
        stop(path, later, ours, conflicts)
    return text, None if text == ours else "merged"


def merge(path, later, base, theirs, ours):
    """The merged text, and the conflicts in it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for file, text in zip(files, (ours, base, theirs)):
            file.write_bytes(text)
        result = git("merge-file", "-p", "--diff3", "-L", later, "-L", f"{path} before", "-L", path, *files)
    if result.returncode > 127:
        sys.exit(f"{later}: {result.stderr.decode().strip()}")
    return result.stdout, list(CONFLICT.finditer(result.stdout)) if result.returncode else []


def stop(path, later, ours, conflicts):
    places = ", ".join(place(conflict, ours) for conflict in conflicts)
    print(f"conflict: {path} does not merge into {later}, {places}; {later} is left as it was\n")
    for conflict in conflicts:
        print(conflict[0].decode())
    sys.exit(f"Merge it by hand in {later}, then: python dev/carry.py --merged {later}")


def place(conflict, ours):
    """Its lines in the later step's file; of a conflict over nothing, the line before it."""
    here = conflict[1] or b"".join(conflict.string[:conflict.start()].splitlines(keepends=True)[-1:])
    first = ours[:max(0, ours.find(here))].count(b"\n") + 1
    last = first + max(1, len(here.splitlines())) - 1
    return f"line {first}" if first == last else f"lines {first}-{last}"


def write(path, text):
    if text is None:
        return (ROOT / path).unlink()
    (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / path).write_bytes(text)


def carry(args):
    carried = {}
    for step, later_step in zip(STEPS, STEPS[1:]):
        for name in names(step, args.base, carried):
            path, later = f"{step}/{name}", f"{later_step}/{name}"
            if later in args.merged:
                continue
            ours = current(later, carried)
            text, how = combine(path, later, committed(path, args.base), current(path, carried), ours)
            if how:
                print(f"{path} -> {later}: {how}", flush=True)
            if text != ours:
                carried[later] = text
                args.check or write(later, text)
    return carried


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", metavar="REV")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--merged", nargs="+", default=[], metavar="FILE")
    args = parser.parse_args()
    if git("rev-parse", "--verify", f"{args.base}^{{commit}}").returncode:
        sys.exit(f"--base {args.base}: no such commit")
    if carry(args) and args.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
