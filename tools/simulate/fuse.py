"""Fuse kernels as --compile does: in a layer or the head, those between two products or attentions, which only move data.

The fused kernel reads only what none of them made, and writes only what outlives them. What is kept for backward does not change.
"""
from itertools import groupby

from simulate.gpus import Kernel


def fuse(notes, kernels, touched, events):
    """Fuse chains of kernels that only move data. Return notes, kernels and memory events, with the notes renumbered.

    touched is {note: (storages that its kernel reads, those that it writes)}, each {storage: bytes}.
    """
    ends = {number: when for when, number, size in events if size < 0}
    numbers, of_kernel = {kernel: number for number, kernel in enumerate(kernels)}, [*kernels]
    fused, where = [], {}
    for _, chain in groupby(range(len(notes)), lambda i: notes[i][2] if i in touched and notes[i][2] else i):
        first, *others = chain = [*chain]
        where.update(dict.fromkeys(chain, len(fused)))
        note, read, written = notes[first], {}, {}
        for i in chain if others else ():
            reads, writes = touched[i]
            read.update({storage: size for storage, size in reads.items() if storage not in written})
            written.update(writes)
        if others:
            stays = [size for storage, size in written.items() if ends.get(storage, len(notes)) > others[-1] + 1]
            kernel = Kernel("fused", "memory", of_kernel[note[1]].dtype, 0, sum(read.values()) + sum(stays))
            note = "compute", numbers.setdefault(kernel, len(numbers)), note[2]
        fused.append(note)
    where[len(notes)] = len(fused)
    return fused, [*numbers], [(where[when], *more) for when, *more in events]
