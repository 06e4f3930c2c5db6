"""A checkpoint is a list of boxes: rectangles of tensors, each with where it begins in the whole tensor.

    state = {"model.layers.0.mlp.up_proj.weight[32, 0]": the box that begins there, a view of memory}

tp and ep leave a rank one box of a tensor. ZeRO's slice is a run of that box's elements, which is a few boxes
at most: the rest of a row, whole rows, the beginning of a row. How many ranks there were is written nowhere:
whoever reads takes from every box what overlaps with its own. So nothing is gathered, neither to write nor to
read, and any layout reads what any other wrote.
"""
import json
import math
from collections import Counter

import torch.distributed as dist
from safetensors import safe_open

from mesh import all_gather_object
from shards import local_slices


def boxes(name, param, first, run):
    """{key: box} of a run of elements, from the first on, of this rank's part of a parameter."""
    part = [index.start or 0 for index in local_slices(param)]
    found = rectangles(param.shape, first, first + run.numel())
    views = run.view(-1).split([math.prod(shape) for _, shape in found])
    return {f"{name}{[a + b for a, b in zip(part, begin)]}": view.view(shape)
            for (begin, shape), view in zip(found, views)}


def rectangles(shape, start, stop):
    """[(where it begins, its shape)] of the boxes that elements start to stop of a tensor are, in order."""
    if start >= stop:
        return []
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row           # of the whole rows

    def inside(i, start, stop):                           # a part of row i
        return [((i, *begin), (1, *size)) for begin, size in rectangles(shape[1:], start, stop)]
    if first > last:
        return inside(last, start - last * row, stop - last * row)
    rows = [((first, *[0] * len(shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return inside(first - 1, start - (first - 1) * row, row) + rows + inside(last, 0, stop - last * row)


def assign_writers(state):
    """The keys that this rank writes: of those that have a box, the one does with least to write so far."""
    every, writer, load = all_gather_object({key: box.nbytes for key, box in state.items()}), {}, Counter()
    for key, size in {key: size for held in every for key, size in held.items()}.items():
        writer[key] = min((rank for rank, held in enumerate(every) if key in held), key=load.__getitem__)
        load[writer[key]] += size
    return [key for key in state if writer[key] == dist.get_rank()]


def fill(state, paths):
    """Reads the boxes from files. Returns the key of one that is not filled, if there is one."""
    mine = {}                                             # name: [(where it begins, box)]
    for key, box in state.items():
        box.fill_(math.nan)                               # which is never saved
        mine.setdefault(key.split("[")[0], []).append((offsets(key), box))
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():
                for here, box in mine.get(key.split("[")[0], []):
                    copy_overlap(box, here, file.get_slice(key), offsets(key))
    return next((key for key, box in state.items() if box.isnan().any()), None)


def offsets(key):
    return json.loads(key[key.index("["):])


def copy_overlap(box, here, saved, there):
    """Of two boxes, one in memory and one in a file, with where they begin."""
    low = [max(a, b) for a, b in zip(here, there)]
    high = [min(a + n, b + m) for a, n, b, m in zip(here, box.shape, there, saved.get_shape())]
    if all(l < h for l, h in zip(low, high)):
        into, part = (tuple(slice(l - o, h - o) for l, h, o in zip(low, high, at)) for at in (here, there))
        box[into] = saved[part]                           # nothing else of the file is read
