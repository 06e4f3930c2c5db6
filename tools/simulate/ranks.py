"""Which ranks are recorded, and who stands for whom.

Of ranks of tp and dp, which do the same with other numbers, one is recorded and stands for all; of stages of a pipeline each. So is
each rank of cp, which sees more or less of the other keys; but where they are many, and the mode is not `ring`, in which the last
has twice the mean to do, the last alone: with zigzag and allgather it merges most.
"""
import contextlib
import functools
import io
import multiprocessing
import os
import sys
from itertools import product
from unittest.mock import patch

import numpy as np

from simulate.record import record
from simulate.stand_ins import one_rank

FEW = 16                                                  # ranks, that are all recorded


class Ranks:
    def __init__(self, args, rank):
        """rank: the one that is looked at. Those that are recorded have its places in dp and tp."""
        self.sizes = [getattr(args, name, 1) or 1 for name in ("pp", "dp", "cp", "tp")]        # outermost first
        pp, _, cp, _ = self.sizes
        _, self.dp, mine, self.tp = self.place(rank)
        alike = cp == 1 or args.cp_mode == "ulysses"
        every = not alike and (args.cp_mode == "ring" or pp * cp <= FEW)
        self.cp = range(cp) if every else [mine if alike else cp - 1]
        self.recorded = sorted({*(self.number(stage, self.dp, part, self.tp) for stage, part in product(range(pp), self.cp))})

    def place(self, rank):
        return [int(place) for place in np.unravel_index(rank, self.sizes)]

    def number(self, *places):
        return int(np.ravel_multi_index(places, self.sizes))

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


def record_all(argv, ranks, numbers):
    """{rank: what it notes}, as many at a time as there are cores. What one refuses ends all."""
    found, cores = {}, min(len(numbers), os.cpu_count() or 1)
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        for rank, seen in zip(numbers, pool.imap(functools.partial(record_one, argv, ranks), numbers)):
            if isinstance(seen, tuple):                   # it was refused, or failed
                print(seen[0], end="", file=sys.stderr)
                raise SystemExit(seen[1])
            found[rank] = seen
            if len(numbers) > 2 and sys.stderr.isatty():
                print(f"\r{len(found)} of {len(numbers)} ranks are recorded, which stand for {ranks:,}", end="", file=sys.stderr)
    return found


def record_one(argv, ranks, rank):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            return record(argv, ranks, rank)
    except BaseException as end:
        return said.getvalue(), end.code if isinstance(end, SystemExit) else 1
