"""Decide which ranks to record, and which ranks each of them stands for.

Ranks of tp and dp do the same work on other numbers, so one is recorded and stands for all. Each stage of a pipeline is recorded,
and so is each rank of cp, because they see different amounts of the other ranks' keys. With many ranks only the last rank of cp is
recorded, which in modes zigzag and allgather merges the most. In mode `ring` every rank of cp is recorded, because there the last
has almost twice the mean to do.
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

FEW = 16                                                  # with at most this many ranks, every rank of cp is recorded


class Ranks:
    def __init__(self, args, rank):
        """Choose the ranks to record: those that have the same places in dp and tp as `rank`, the one to report on."""
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
    """Return the trainer's flags, as it has parsed and checked them. Stop it where it would begin to work."""
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
    """Return {rank: its recording}, recorded in as many processes as there are cores. If one rank is refused, exit."""
    found, cores = {}, min(len(numbers), os.cpu_count() or 1)
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        for rank, seen in zip(numbers, pool.imap(functools.partial(record_one, argv, ranks), numbers)):
            if isinstance(seen, tuple):                   # it was refused, or failed
                print(seen[0], end="", file=sys.stderr)
                raise SystemExit(seen[1])
            found[rank] = seen
            if len(numbers) > 2 and sys.stderr.isatty():
                print(f"\r{len(found)} of {len(numbers)} ranks recorded, which stand for all {ranks:,}", end="", file=sys.stderr)
    return found


def record_one(argv, ranks, rank):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            return record(argv, ranks, rank)
    except BaseException as end:
        return said.getvalue(), end.code if isinstance(end, SystemExit) else 1
