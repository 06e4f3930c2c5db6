"""--compile: kernels that only move data become one with their neighbours, as torch.compile makes them.

Of a chain of them in a layer or the head, from one product or attention to the next, is read what was not made in it, and written
what is still there after it. What is kept for backward stays what it is without the compiler.
"""
from simulate.gpus import Kernel


def fuse(notes, kernels, touched, events):
    """touched: {note: (storages that its kernel reads, those that it writes)}, each {storage: bytes}. Returns notes and kernels."""
    ends = {number: when for when, number, size in events if size < 0}
    numbers = {kernel: number for number, kernel in enumerate(kernels)}
    of_kernel, fused, chain, where = [*kernels], [], [], {}

    def close():
        if len(chain) > 1:
            read, written = {}, {}
            for i in chain:
                reads, writes = touched[i]
                read.update({storage: size for storage, size in reads.items() if storage not in written})
                written.update(writes)
            stays = [size for storage, size in written.items() if ends.get(storage, len(notes)) > chain[-1] + 1]
            moved = sum(read.values()) + sum(stays)
            kernel = Kernel("fused", "memory", of_kernel[notes[chain[0]][1]].dtype, 0, moved)
            fused.append(("compute", numbers.setdefault(kernel, len(numbers)), notes[chain[0]][2]))
        else:
            fused.extend(notes[i] for i in chain)
        chain.clear()
    for i, note in enumerate(notes):
        together = i in touched and note[2]               # in a layer or the head
        if not together or chain and notes[chain[0]][2] != note[2]:
            close()
        where[i] = len(fused)
        chain.append(i) if together else fused.append(note)
    close()
    where[len(notes)] = len(fused)
    return fused, [*numbers], [(where[when], *more) for when, *more in events]
