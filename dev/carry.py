"""Carry the uncommitted changes of each step into every later step, and into the patches of exercises/extensions.

    python dev/carry.py              # after editing step K, before the commit
    python dev/carry.py --check      # only say what would change, and write nothing
    python dev/carry.py --base REV   # carry what has changed since REV

Step K's changes since HEAD go to step K+1 by `git merge-file`, then step K+1's, which now include them, to step K+2, and so on.
A conflict is written into the later step's file, between markers, and all else is carried: edit it there, and carry again. Then
each extension's patch is merged with the changes in its step. At a conflict, out/carry/NAME gets the step's files in a/, and those
of the extension in b/, with markers: edit them in b/, and carry again. At the end dev/readme.py writes the READMEs' tables.

Nothing is remembered from one carry to the next. So before you edit a line again after carrying it, commit (you can amend it), or
start over: git checkout HEAD -- step0[2-8]* exercises/extensions, and remove out/carry. A conflict that you resolve by keeping the
later step's lines as they are comes back until you commit.

The exit status is 0 if all is well; 1 at a conflict, at a patch that does not apply, or if --check has found something; 2 for
wrong arguments.
"""
import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from steps import ROOT, STEPS, in_diff, step_files

MARKER = re.compile(rb"^(?:<{7} |\|{7} |={7}$|>{7} )", re.MULTILINE)
CONFLICT = re.compile(rb"^<{7} .*?\n(.*?)^\|{7} .*?\n.*?^={7}\n(.*?)^>{7} .*?\n", re.DOTALL | re.MULTILINE)
CONFLICTS = ROOT / "out/carry"
LEFT_OUT = re.compile(rb"^(?:diff|index|new file|deleted file) .*\n|(?<= @@) .*$", re.MULTILINE)      # of what git diff prints


def git(*command, stdin=None, folder=ROOT):
    """Run git in this repository, or in another folder as if there were no repository and no settings."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    alone |= dict(GIT_CEILING_DIRECTORIES=str(Path(folder).resolve().parent), GIT_CONFIG_GLOBAL=os.devnull)
    return subprocess.run(["git", *command], cwd=folder, input=stdin, capture_output=True, env=None if folder == ROOT else alone)


# ------------------------------------------------------------------- files are {path: text}; None, or no entry, is no file
def read(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text) if text is not None else (folder / path).unlink(missing_ok=True)


def at(revision):
    archive = tarfile.open(fileobj=io.BytesIO(git("archive", revision, "--", "step0?_*").stdout))
    return {file.name: archive.extractfile(file).read() for file in archive if file.isfile() and in_diff(file.name)}


def marked(files):
    """List the first conflict marker of each file, as path:line."""
    found = {path: MARKER.search(text or b"") for path, text in sorted(files.items())}
    return [f"{path}:{files[path].count(bytes([10]), 0, marker.start()) + 1}" for path, marker in found.items() if marker]


def merge(ours, base, theirs):
    """Return ours with the changes from base to theirs, conflicts marked; None if one of the three does not exist."""
    if None in (ours, base, theirs):
        return None
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), dict(here=ours, before=base, carried=theirs))
        return git("merge-file", "-p", "--diff3", "here", "before", "carried", folder=folder).stdout


# ---------------------------------------------------------------------------------------------------- from step to step
def keep_resolved(text, committed, fresh):
    """Take the later step's side of each conflict that was resolved there: its lines are no longer the committed ones, with which
    the same change conflicts."""
    known = [conflict[2] for conflict in CONFLICT.finditer(fresh or b"")]
    return CONFLICT.sub(lambda found: found[1] if found[2] in known and found[1] not in committed else found[0], text)


def carry(now, was, revision):
    """Carry what differs from `was` through the steps, in `now`, except conflicts. Return those files, marked."""
    conflicts = {}
    for step, later_step in zip(STEPS, STEPS[1:]):
        for path in sorted(path for path in now.keys() | was.keys() if path.startswith(f"{step}/")):
            name = path.removeprefix(f"{step}/")
            later = f"{later_step}/{name}"
            ours, base, theirs = now.get(later), was.get(path), now.get(path)
            if theirs in (base, ours):
                continue
            text, how = theirs, "deleted" if theirs is None else "the same file"
            if ours != base:
                text, how = merge(ours, base, theirs), "merged"
                if text is None:
                    print(f"{path} -> {later}: left alone, it has its own")
                    continue
                fresh = merge(was.get(later), base, theirs)
                text = keep_resolved(text, was.get(later, b""), fresh)
                if places := marked({later: text}):
                    conflicts[later] = text
                    text, how = CONFLICT.sub(rb"\1", text), f"conflict at {places[0]}"
                    if not marked({later: fresh}):
                        files = [one for one in (f"{step}/{name}" for step in STEPS[STEPS.index(later_step):]) if one in was]
                        how += (f"\n    {later} has changed there since {revision}, by hand or by an earlier carry. "
                                f"To carry afresh: git checkout {revision} -- {' '.join(files)}")
            if text != ours or later in conflicts:
                print(f"{path} -> {later}: {how}", flush=True)
            now[later] = text
    return conflicts


# ----------------------------------------------------------------------------------------------------------- extensions
def patched(patch, files):
    """Return the files after the patch, or None if it does not apply."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), files)
        return read(Path(folder)) if git("apply", "-", stdin=patch, folder=folder).returncode == 0 else None


def diff(old, new):
    with tempfile.TemporaryDirectory() as folder:
        for side, files in (("a", old), ("b", new)):
            write(Path(folder, side), files)
        return LEFT_OUT.sub(b"", git("diff", "--no-index", "--no-prefix", "--no-color", "a", "b", folder=folder).stdout)


def step_of(file):
    return re.search(r"^(?:---|\+\+\+) [ab]/(.*?/)", file.read_text(), re.MULTILINE)[1]


def rebase(file, was, now, revision, check):
    """Return the patch made for its step as it is now, and what is wrong with it. Write a conflict to out/carry."""
    patch, step = file.read_bytes(), step_of(file)
    was, now = ({path: text for path, text in files.items() if path.startswith(step) and text is not None} for files in (was, now))
    work = CONFLICTS / file.stem
    if work.exists():
        tries = [(read(work / "a"), read(work / "b"))]
        if places := marked(tries[0][1]):
            return patch, f"edit {shown(work)}/b/{places[0]}, then carry again"
    else:
        tries = [(base, theirs) for base in (was, now) if (theirs := patched(patch, base))]
    problem = (f"does not apply to {step}. Carry with BASE=REV, a commit that it applied to; or, if a carry has changed it, "
               f"git checkout {revision} -- {shown(file)} and carry again; or edit it by hand")
    for base, theirs in tries:
        touched = [path for path in base.keys() | theirs.keys() if base.get(path) != theirs.get(path)]
        new = {path: theirs.get(path) if now.get(path) == base.get(path) else merge(now.get(path), base.get(path), theirs.get(path))
               for path in touched}
        old = {path: now.get(path) for path in touched}
        if places := marked(new):
            problem = f"conflict at {shown(work)}/b/{places[0]}; edit it there, then carry again"
            if not check:
                write(work / "a", old)
                write(work / "b", new)
        elif new == old:
            problem = f"{step} has this change already"
        elif lost := [path for path in touched if new[path] is None and theirs.get(path) is not None]:
            problem = f"{lost[0]} was made or deleted in the step; edit the patch by hand"
        else:
            check or shutil.rmtree(work, ignore_errors=True)
            return patch[:re.search(rb"^(?:diff|---) ", patch, re.MULTILINE).start()] + diff(old, new), None
    return patch, problem


def shown(path):
    return path.relative_to(ROOT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REV", default="HEAD")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if git("rev-parse", "--verify", f"{args.base}^{{commit}}").returncode:
        parser.error(f"--base {args.base}: no such commit")
    was = at(args.base)
    now = {f"{step}/{name}": (ROOT / step / name).read_bytes() for step in STEPS for name in step_files(ROOT / step)}
    if places := marked(now):
        sys.exit(f"conflict markers at {', '.join(places)}: edit these files, then carry again")

    before = dict(now)
    conflicts = carry(now, was, args.base)
    changed = {path: text for path, text in (now | conflicts).items() if text != before.get(path)}
    args.check or write(ROOT, changed)
    found, failed = bool(changed), bool(conflicts)
    for file in sorted((ROOT / "exercises/extensions").glob("*.patch")):
        if any(path.startswith(step_of(file)) for path in conflicts):
            continue
        new, problem = rebase(file, was, now, args.base, args.check)
        if problem or new != file.read_bytes():
            print(f"{shown(file)}: {problem or 'merged'}", flush=True)
            found, failed = True, failed or bool(problem)
            args.check or file.write_bytes(new)
    if args.check:
        sys.exit(found)
    if not conflicts and (ROOT / "dev/readme.py").exists():
        failed |= bool(subprocess.run([sys.executable, "dev/readme.py"], cwd=ROOT).returncode)
    sys.exit(failed)


if __name__ == "__main__":
    main()
