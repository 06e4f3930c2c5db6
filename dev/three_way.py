"""Three-way merges, of texts and of patches, by git in temporary folders. A text is bytes; None stands for no file."""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MARKER = re.compile(rb"^(?:<{7} |\|{7} |={7}$|>{7} )", re.MULTILINE)
CONFLICT = re.compile(rb"^<{7} .*?\n(.*?)^\|{7} .*?\n.*?^={7}\n.*?^>{7} .*?\n", re.DOTALL | re.MULTILINE)
PIECE = re.compile(rb"^(?:diff .*\n(?:(?!--- ).*\n)*)?--- (?:a/)?(\S+).*\n\+\+\+ (?:b/)?(\S+).*\n", re.MULTILINE)
HEADING = re.compile(rb"^(@@ -\S+ \+\S+ @@) .*", re.MULTILINE)         # git names the function or class that a hunk is in


def git(*command, folder, stdin=b""):
    """Run git outside any repository, ignoring user and system settings; return the CompletedProcess."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    alone |= dict(GIT_CEILING_DIRECTORIES=str(Path(folder).resolve().parent), GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")
    return subprocess.run(["git", *command], cwd=folder, input=stdin, capture_output=True, env=alone)


def write(path, text):
    if text is None:
        return path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def merge(ours, base, theirs, labels=("ours", "base", "theirs")):
    """Return the merged text, and a list of the conflicts that are marked in it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in zip(("ours", "base", "theirs"), (ours, base, theirs)):
            write(Path(folder, name), text)
        options = [word for label in labels for word in ("-L", label)]
        done = git("merge-file", "-p", "--diff3", *options, "ours", "base", "theirs", folder=folder)
    if done.returncode > 127:                             # up to 127 it is the number of conflicts
        sys.exit(f"{labels[0]}: {done.stderr.decode().strip()}")
    return done.stdout, list(CONFLICT.finditer(done.stdout)) if done.returncode else []


def marker_line(text):
    """Return the line of the first conflict marker, from 1; 0 if there is none."""
    found = MARKER.search(text)
    return text.count(b"\n", 0, found.start()) + 1 if found else 0


def lines(conflict, text):
    """Return the lines of a conflict as '12' or '12-14', in the marked text or in the text that it was merged into."""
    here = conflict[0] if text is conflict.string else conflict[1]
    here = here or conflict.string[:conflict.start()].splitlines(keepends=True)[-1:][0]     # an empty side: the line before it
    near = conflict.string.count(b"\n", 0, conflict.start())
    starts = [text.count(b"\n", 0, found.start()) for found in re.finditer(b"^" + re.escape(here), text, re.MULTILINE)]
    first = min(starts, key=lambda start: abs(start - near)) + 1
    last = first + here.count(b"\n") - 1
    return str(first) if first >= last else f"{first}-{last}"


def split_patch(patch):
    """Return a patch's header and its pieces, as (path, text), one for each file."""
    found = list(PIECE.finditer(patch))
    pieces = []
    for piece, end in zip(found, [*(following.start() for following in found[1:]), len(patch)]):
        path = piece[1] if piece[2] == b"/dev/null" else piece[2]
        pieces.append((path.decode(), patch[piece.start():end]))
    return patch[:found[0].start()] if found else patch, pieces


def apply_piece(piece, path, text):
    """Return the text after a piece of a patch, and whether all hunks were at their lines; None if it does not apply."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, path)
        write(file, text)
        done = git("apply", "--verbose", "-", folder=folder, stdin=piece)
        if done.returncode:
            return None
        return file.read_bytes() if file.exists() else None, b"(offset " not in done.stderr


def diff(path, old, new):
    """Return the piece of a patch that turns the old text into the new one."""
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for side, text in (("a", old), ("b", new)):
            write(Path(folder, side, path), text)
            names.append("/dev/null" if text is None else f"{side}/{path}")
        text = git("diff", "--no-index", "--no-prefix", "--no-color", *names, folder=folder).stdout
    return text[text.index(b"\n--- ") + 1:]


def rebase_piece(piece, path, bases, now):
    """Return the piece rebased onto the file as it is now, and None; or the piece as it was, and what is wrong.

    The bases are states of the file, each of which the piece may have been made for.
    """
    as_it_is = apply_piece(piece, path, now)
    if as_it_is and as_it_is[1]:
        return piece, None
    for base in bases:
        if applied := apply_piece(piece, path, base):
            theirs = applied[0]
            break
    else:
        return piece, None if as_it_is else f"does not apply to {path}, neither as it is nor as it was"
    if None in (base, theirs, now):
        return piece, f"does not merge: {path} was made or deleted"
    merged, conflicts = merge(now, base, theirs, (path, "base", "patch"))
    if conflicts:
        return piece, "does not merge at " + ", ".join(f"{path}:{lines(conflict, now)}" for conflict in conflicts)
    if merged == now:
        return piece, f"{path} has this change already"
    return diff(path, now, merged), None


def rebase(patch, bases, now, left_out):
    """Return a patch rebased onto the files as they are now, and what is wrong with it. Its pieces for the paths left out stay.

    now and each of the bases are {path: text}.
    """
    header, pieces = split_patch(patch)
    rebased, problems = [header], []
    for path, piece in pieces:
        if path not in left_out and any(base.get(path) != now.get(path) for base in bases):
            new, problem = rebase_piece(piece, path, [base.get(path) for base in bases], now.get(path))
            problems += [problem] if problem else []
            plain = HEADING.sub(rb"\1", new)
            if plain != HEADING.sub(rb"\1", piece):
                piece = new if HEADING.search(patch) else plain
        rebased.append(piece)
    return b"".join(rebased), problems
