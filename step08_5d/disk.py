"""Files that must survive a kill, a full disk and another run: checkpoints, --save, the log."""
import contextlib
import fcntl
import hashlib
import json
import os
import re
from pathlib import Path

from safetensors import SafetensorError

from config import check_writable
from messages import fail, print0


def list_checkpoints(args, suffix=""):
    """Return the complete checkpoints, oldest first; with the suffix .tmp, the incomplete ones."""
    return sorted(Path(args.checkpoint).glob("step_" + "[0-9]" * 8 + suffix))


def steps_of(folder):
    return int(folder.stem.removeprefix("step_"))


def join_names(folders):
    """Format the names of folders for a message."""
    return ", ".join(folder.name for folder in folders) or "none"


@contextlib.contextmanager
def fail_on_io_error(folder, args):
    """Fail with one line if the checkpoint cannot be written: a disk may be full."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        fail(f"--checkpoint {args.checkpoint}: {folder.stem} cannot be written ({error}); "
             f"available checkpoints: {join_names(list_checkpoints(args))}")


def lock(file, flag):
    """Lock an open file, or fail if another run has locked it. `flag` names it in the message.

    The lock lasts until the file is closed or the process ends, even if it is killed.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"{flag}: another run is using it; choose another name")
    except OSError as error:
        print0(f"warning: {flag}: this file system does not support locks ({error}); "
               "make sure that no other run uses the same name")


def digest(path):
    """Force a file to disk. Return its SHA-256."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())                           # writes out what the system still has in memory
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_save(args):
    """Fail if, after training, --save could not write its model, or would overwrite something else."""
    save = os.path.realpath(args.save)
    unfinished = save + ".unfinished"                     # at the end, this folder is renamed to DIR
    check_writable("save", os.path.dirname(save))
    if os.path.ismount(save):
        fail(f"--save {args.save}: is a mount point, which no directory can replace; choose a directory "
             "inside it")
    for flag in ("checkpoint", "log_file", "profile"):
        path = vars(args)[flag] and os.path.realpath(vars(args)[flag]) + os.sep
        if path and path.startswith((save + os.sep, unfinished + os.sep)):
            fail(f"--{flag} {vars(args)[flag]}: the folders {save} and {unfinished} are for --save alone; "
                 "choose a path outside them")
    if save.endswith(".unfinished") or os.path.lexists(unfinished) and not only_model_files(unfinished):
        fail(f"--save {args.save}: must not end in .unfinished, and {unfinished} must not exist, unless a "
             "killed run left it; choose another directory")


def only_model_files(folder):
    """Return whether a folder holds only files that --save writes. (safetensors writes .tmp files first.)"""
    ours = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|(generation_)?config\.json|\.tmp\w+")
    return os.path.isdir(folder) and not os.path.islink(folder) and all(
        entry.is_file() and ours.fullmatch(entry.name) for entry in os.scandir(folder))


def index_of(folder):
    """Return the contents of index.json, or None if it is missing or corrupt."""
    path = folder / "index.json"
    with contextlib.suppress(Exception):                  # a corrupt file may raise anything
        index = json.loads(path.read_text()) if path.is_file() else {}             # a pipe would block
        types = [type(index[name]) for name in ("steps", "digests", "run")]
        if types == [int, dict, dict] and index["steps"] == steps_of(folder):
            return index


def find_wrong_file(folder, digests):
    """Return which file is missing from a checkpoint, or does not belong in it; None if all is well."""
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for name in sorted(present ^ digests.keys()):
        return f"{name} is " + ("not a file of this checkpoint" if name in present else "missing")


def find_corruption(folder, index, rank=0, world_size=1):
    """Return what is wrong with a checkpoint, or None if it is intact. Each rank reads some of the files."""
    if index is None or index != index_of(folder):
        return "index.json is missing or corrupt, or differs between ranks"
    problem = find_wrong_file(folder, index["digests"])
    if problem:
        return problem
    for name in sorted(index["digests"])[rank::world_size]:
        if digest(folder / name) != index["digests"][name]:
            return f"{name} has changed since it was written"


def suggest_intact(folder, args):
    """Return what to do about a corrupt checkpoint: resume from the newest intact one before it, if any."""
    for path in reversed(list_checkpoints(args)):
        if path < folder and not find_corruption(path, index_of(path)):
            return f"to continue from {path.name}, which is older and intact, move the newer ones away"
    return "no older checkpoint is intact, so start a new run in another --checkpoint directory"


def log_size_to_keep(name, args):
    """Return how many bytes of a log a resumed run keeps: the lines of the steps already done.

    Warn if these are not one line for each of this run's steps.
    """
    size, kept = 0, []
    with open(name, "rb") as log:
        for number, line in enumerate(log, 1):
            try:
                # a killed run may have left half a line
                entry = json.loads(line) if line.endswith(b"\n") else None
                if entry is None or entry["step"] >= args.first_step:
                    break
                kept.append((entry["step"], entry["tokens"]))
            except (ValueError, LookupError, TypeError):
                fail(f"--log_file {name}: line {number} is not from a training log; remove it, or choose "
                     "another name")
            size += len(line)
    tokens = args.global_batch_size * args.seq_len
    if kept != [(step, (step + 1) * tokens) for step in range(args.first_step)]:
        print0(f"warning: --log_file {name}: is not the log of the {args.first_step} steps that this run has "
               "done (lines are missing, duplicated, or from another run); the run appends to it")
    return size
