"""Which ranks are recorded, and who stands for whom.

Ranks of tp and dp do the same as their neighbours, with other numbers: one of them is recorded and stands for all. Stages of a
pipeline are recorded each. So are the ranks of cp, which see more or less of the other keys; but if they are many, and the mode is
not `ring`, in which the last has twice the mean to do, the last alone: with zigzag and allgather it merges most.
"""
import contextlib
import io
import os
import pickle
import sys
import tempfile
from itertools import product
from unittest.mock import patch

from simulate.record import record
from simulate.stand_ins import one_rank

NAMES = ["pp", "dp", "cp", "tp"]                          # outermost first
FEW = 16


class Ranks:
    def __init__(self, args, rank):
        """rank: the one that is looked at. Those that are recorded have its places in dp and tp."""
        self.sizes = [getattr(args, name, 1) or 1 for name in NAMES]
        pp, _, cp, _ = self.sizes
        _, self.dp, mine, self.tp = self.place(rank)
        alike = cp == 1 or args.cp_mode == "ulysses"
        every = not alike and (args.cp_mode == "ring" or pp * cp <= FEW)
        self.cp = range(cp) if every else [mine if alike else cp - 1]
        self.recorded = sorted({*(self.number(stage, self.dp, part, self.tp) for stage, part in product(range(pp), self.cp))})

    def place(self, rank):
        places = []
        for size in reversed(self.sizes):
            places.insert(0, rank % size)
            rank //= size
        return places

    def number(self, *places):
        rank = 0
        for size, place in zip(self.sizes, places):
            rank = rank * size + place
        return rank

    def stands_for(self, rank):
        stage, _, part, _ = self.place(rank)
        return self.number(stage, self.dp, part if part in self.cp else self.cp[0], self.tp)

    def stage_of(self, rank):
        return self.place(rank)[0]


def look(argv, ranks, rank):
    """The trainer's flags, as it has read and checked them; it ends where it would begin to work."""
    import train
    read, made = train.prepare, []

    def prepare(argv):
        made.append(read(argv)[0])
        raise SystemExit
    try:
        with one_rank(ranks, rank), patch.object(train, "prepare", prepare):
            train.main(argv)
    except SystemExit:
        if not made:
            raise
    return made[0]


def record_all(argv, ranks, numbers, say=lambda done: None):
    """{rank: what it notes}, each in a process of its own, as many at a time as there are cores. What one refuses ends all."""
    found, running = {}, {}
    waiting = list(numbers)
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                rank = waiting.pop(0)
                running[fork(argv, ranks, rank, os.path.join(folder, str(rank)))] = rank
            process, status = os.waitpid(-1, 0)
            rank = running.pop(process)
            with open(os.path.join(folder, str(rank)), "rb") as file:
                found[rank] = pickle.load(file)
            if isinstance(found[rank], tuple):            # it was refused, or failed
                for other in running:
                    os.kill(other, 9)
                    os.waitpid(other, 0)
                said, status = found[rank]
                print(said, end="", file=sys.stderr)
                raise SystemExit(status)
            say(len(found))
    return found


def fork(argv, ranks, rank, path):
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    said, result = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            result = record(argv, ranks, rank)
    except BaseException as end:
        result = said.getvalue(), end.code if isinstance(end, SystemExit) else 1
    with open(path, "wb") as file:
        pickle.dump(result, file)
    os._exit(0)
