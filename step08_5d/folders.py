"""--checkpoint DIR on the disk: whose it is, which folders in it are checkpoints, whether one is undamaged.

Own names are `step_` and eight digits, that with `.tmp` while it is not whole, and `lock.tmp`. Nothing else
is touched or read. The digest of a file is taken while it is written; to check it, each file is read through
once, by one of the ranks.
"""
import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import weakref
from pathlib import Path

from config import refuse


def own(folder, ending=""):
    """The paths of this trainer's checkpoints, oldest first; or, with an ending, of those not whole yet."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in names if re.fullmatch("step_[0-9]{8}" + ending, name)]
    for path in paths:
        if os.path.islink(path) or not os.path.isdir(path):
            refuse(f"--checkpoint {folder}: {os.path.basename(path)} has the name of a checkpoint and is no "
                   "folder; move it away")
    return paths


def newest(args):
    there = own(args.checkpoint) if args.checkpoint else []
    return f"; the newest checkpoint is {there[-1]}" if there else ""


def lock(folder, owner):
    """Of two runs in a directory the second is refused. The system lets go of the lock when its process ends,
    however it ends. So do NFS and Lustre (mounted with its option flock) between machines, some time after
    one of them is gone."""
    path = os.path.join(folder, "lock.tmp")
    file = open(path, "a+", errors="replace", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = not os.path.samestat(os.fstat(file.fileno()), os.stat(path))       # a run removed it, ending
    except (BlockingIOError, FileNotFoundError):
        taken = True
    except OSError as error:
        print(f"--checkpoint {folder}: this file system has no locks ({error}): "
              "nobody sees that two runs use it", flush=True)
        taken = False
    file.seek(0)
    whose = file.read()
    if taken or not "process 1 on".startswith(whose[:8]):
        refuse(f"--checkpoint {folder}: {whose or 'another run'} is training there, says {path}; "
               "take another directory")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    weakref.finalize(owner, Path(path).unlink, missing_ok=True)
    return file


# ------------------------------------------------------------------------------------------- writing
class Output:
    """A file that knows its digest."""

    def __init__(self, file):
        self.file, self.digest, self.finite = file, hashlib.sha256(), True

    def write(self, data):
        self.digest.update(data)
        self.file.write(data)


@contextlib.contextmanager
def create(folder, name):
    """A file that is on the disk when it is closed."""
    try:
        with open(os.path.join(folder, name), "wb") as file:
            yield Output(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        there = own(os.path.dirname(folder))
        refuse(f"--checkpoint: {os.path.join(folder, name)} cannot be written ({error}); "
               f"older checkpoints that are still there: {', '.join(map(os.path.basename, there)) or 'none'}")


def file_of(rank):
    return f"rank_{rank:05d}.safetensors"


# ------------------------------------------------------------------------------------------- reading
def read_index(folder):
    """The index, or what is wrong with it."""
    try:
        with open(os.path.join(folder, "index.json")) as file:
            index = json.load(file)
        files = {file for boxes in index["boxes"].values() for file, _ in boxes} | set(index["digests"])
        for file in files:                                # none is outside of the folder
            assert re.fullmatch(r"rank_[0-9]{5}\.safetensors", file), f"file {file}"
            assert file in index["digests"], f"file {file}"
        assert index["steps"] == int(folder[-8:]), f"it is of step {index['steps']}"
        assert type(index["facts"]) is dict and index["shapes"]
        assert type(index["biases"]) is list
        return index, None
    except Exception as error:                            # a file may hold anything
        return None, f"index.json ({type(error).__name__}: {error})"


def damage(folder, index, rank=0, ranks=1):
    """What is wrong with this rank's share of the files, each of which is read once; None if nothing is."""
    for name in sorted(index["digests"])[rank::ranks]:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != index["digests"][name]:
                    return f"{name} is not as it was written"
        except OSError as error:
            return f"{name}: {error.strerror}"


def older(folder):
    """Which checkpoint is to be had in place of a damaged one."""
    for path in reversed([path for path in own(os.path.dirname(folder)) if path < folder]):
        index, problem = read_index(path)
        if not problem and not damage(path, index):
            return f"--resume {os.path.basename(path)} takes an older one, which is whole"
    return "there is no older one that is whole"


def open_log(name, first, args):
    """Of a broken run, without the steps that are done again. If no checkpoint of it is left, all stays."""
    if not args.resume or not os.path.isfile(name):
        return open(name, "wb", buffering=0)
    kept = 0
    with open(name, "r+b") as file:                       # cut in place: its disk may be full
        try:
            for line in file:
                if not line.endswith(b"\n") or first and json.loads(line)["step"] >= first:
                    break
                kept += len(line)
        except (ValueError, TypeError, LookupError) as error:
            refuse(f"--log_file {name}: damaged, take another name ({error})")
        file.truncate(kept)
    return open(name, "ab", buffering=0)
