"""Carry the uncommitted changes of each step into every later step, and into the patches of exercises/, by three-way merge.

    python dev/carry.py              # after editing step K, before the commit
    python dev/carry.py --check      # only say what would be carried, and write nothing
    python dev/carry.py --base REV   # carry what has changed since REV

Step K's change goes to step K+1, then step K+1's, which now includes it, to step K+2, and so on. A conflict is written into
the later step's file, between markers; edit it there, and carry again. At the end dev/readme.py writes the READMEs' tables.

Changes are counted from the last carry, whose result is kept in refs/worktree/carry, or from HEAD if a commit has changed the
steps since then.
The exit status is 0 if all is well, 1 at a conflict or if --check has found something, 2 for wrong arguments.
"""
import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from steps import ROOT, STEPS, in_diff, step_files
from three_way import lines, marker_line, merge, rebase, write

RECORD = "refs/worktree/carry"                            # a commit on top of HEAD: the steps after the last carry
PATCHES = ("exercises/mistakes", "exercises/extensions")


def git(*command, stdin=b"", **environment):
    done = subprocess.run(["git", *command], cwd=ROOT, input=stdin, capture_output=True, env=os.environ | environment)
    if done.returncode:
        raise ValueError(done.stderr.decode())
    return done.stdout


# ------------------------------------------------------------------------ states of the steps' files: {path: text}
def on_disk():
    return {f"{step}/{name}": (ROOT / step / name).read_bytes() for step in STEPS for name in step_files(ROOT / step)}


def at(revision):
    """Return the files at a revision; none if there is no such revision."""
    try:
        archive = tarfile.open(fileobj=io.BytesIO(git("archive", revision, "--", "step0?_*")))
    except ValueError:
        return {}
    return {file.name: archive.extractfile(file).read() for file in archive if file.isfile() and in_diff(file.name)}


def last_carried(head):
    """Return the files as the last carry left them; as at HEAD if what is committed has changed since."""
    return at(RECORD) if at(f"{RECORD}^") == head else head


def remember(files, head):
    """Keep the files in a commit of their own. The user's index is not touched."""
    prefix = git("rev-parse", "--show-prefix").decode().strip()
    entries = []
    for path in sorted(files.keys() | head.keys()):
        if path not in files:
            entries.append(f"0 {'0' * 40}\t{prefix}{path}\n")
        elif files[path] != head.get(path):
            blob = git("hash-object", "-w", "--stdin", stdin=files[path]).decode().strip()
            entries.append(f"100644 {blob}\t{prefix}{path}\n")
    with tempfile.TemporaryDirectory() as folder:
        index = dict(GIT_INDEX_FILE=str(Path(folder, "index")))
        git("read-tree", "HEAD", **index)
        git("update-index", "--index-info", stdin="".join(entries).encode(), **index)
        tree = git("write-tree", **index).decode().strip()
    who = ("-c", "user.name=make carry", "-c", "user.email=carry@localhost")
    git("update-ref", RECORD, git(*who, "commit-tree", tree, "-p", "HEAD", "-m", "The steps after make carry").decode().strip())


# ---------------------------------------------------------------------------------------------------- from step to step
def combine(path, later, base, theirs, ours):
    """Return the later step's new text, a word on how it came about (None: nothing to do), and the conflicts in it."""
    if theirs in (base, ours):
        return ours, None, []
    if ours == base:
        return theirs, "new" if base is None else "deleted" if theirs is None else "the same file", []
    if None in (base, theirs, ours):
        return ours, "left alone, it has its own", []
    text, conflicts = merge(ours, base, theirs, (later, f"{path} before", path))
    return text, None if text == ours else "merged", conflicts


def carry(now, base, head, check):
    """Carry what differs from base through the steps, in now and on the disk.

    Return the paths that wait for a conflict to be resolved: the file that has it, and the files of that name in later steps.
    """
    waiting = set()
    for step, later_step in zip(STEPS, STEPS[1:]):
        for path in sorted(path for path in (now.keys() | base.keys()) - waiting if path.startswith(f"{step}/")):
            name = path.removeprefix(f"{step}/")
            later = f"{later_step}/{name}"
            ours = now.get(later)
            # the user undid this carry with git checkout: merge from HEAD again
            put_back = ours == head.get(later) and (ours != base.get(later) or now.get(path) == head.get(path))
            before = (head if put_back else base).get(path)
            text, how, conflicts = combine(path, later, before, now.get(path), ours)
            if conflicts:
                waiting |= {f"{behind}/{name}" for behind in STEPS[STEPS.index(later_step):]}
                how = "conflict at " + ", ".join(f"{later}:{lines(conflict, ours if check else text)}" for conflict in conflicts)
            if how:
                print(f"{path} -> {later}: {how}", flush=True)
            if text != ours:
                now[later] = text
                check or write(ROOT / later, text)
            if text is None:
                now.pop(later, None)
    return waiting


def carry_into_patches(now, bases, waiting, check):
    """Rebase the patches; return how many of them change or do not merge, and how many do not merge."""
    changed = failed = 0
    for file in sorted(file for folder in PATCHES for file in (ROOT / folder).glob("*.patch")):
        old = file.read_bytes()
        new, problems = rebase(old, bases, now, waiting)
        for words in [*["merged"] * (new != old), *problems]:
            print(f"{file.relative_to(ROOT)}: {words}", flush=True)
        if new != old and not check:
            file.write_bytes(new)
        changed, failed = changed + bool(new != old or problems), failed + bool(problems)
    return changed, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REV")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        git("rev-parse", "--verify", f"{args.base or 'HEAD'}^{{commit}}")
    except ValueError:
        parser.error(f"--base {args.base or 'HEAD'}: no such commit")
    now = on_disk()
    marked = [f"{path}:{line}" for path, text in now.items() if (line := marker_line(text))]
    if marked:
        sys.exit(f"conflict markers at {', '.join(marked)}: edit these files, then carry again")

    head, before = at("HEAD"), dict(now)
    record = last_carried(head)
    base = at(args.base) if args.base else record
    waiting = carry(now, base, base if args.base else head, args.check)
    changed, failed = carry_into_patches(now, [record, head, base], waiting, args.check)
    if args.check:
        sys.exit(bool(now != before or waiting or changed))
    settled = {path: text for path, text in now.items() if path not in waiting}
    remember(settled | {path: base[path] for path in waiting & base.keys()}, head)
    if waiting:
        sys.exit("edit the places between the markers, then carry again")
    if (ROOT / "dev/readme.py").exists():
        failed += subprocess.run([sys.executable, "dev/readme.py"], cwd=ROOT).returncode
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
