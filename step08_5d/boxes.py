"""Boxes: the rectangular pieces of tensors that make up a checkpoint, each with its offsets in the tensor.

    state = {"model.layers.0.mlp.up_proj.weight[32, 0]": box}        # a view of memory that begins at row 32

tp and ep leave each rank one box of a tensor. ZeRO may then cut that box between any two elements, so a
rank's shard may be several boxes: the rest of a row, whole rows, the beginning of a row.

A checkpoint need not record how many ranks there were. When a rank loads, it looks at every saved box and
copies what overlaps with its own. So neither saving nor loading gathers tensors, and any layout can load what
any other has saved.
"""
import json
import math
from collections import Counter

import torch.distributed as dist
from safetensors import safe_open

from mesh import all_gather_object
from shards import local_slices


def boxes(name, param, start, elements):
    """Return {key: box} for consecutive elements of this rank's part of a parameter, from index `start`."""
    param_offsets = [dim_slice.start or 0 for dim_slice in local_slices(param)]
    rects = rectangles(param.shape, start, start + elements.numel())
    views = elements.view(-1).split([math.prod(sizes) for _, sizes in rects])
    return {f"{name}{[a + b for a, b in zip(param_offsets, rect_offsets)]}": view.view(sizes)
            for (rect_offsets, sizes), view in zip(rects, views)}


def rectangles(shape, start, stop):
    """Cut elements [start, stop) of a tensor into rectangles. Return their [(offsets, sizes)], in order."""
    if start >= stop:
        return []
    row_size = math.prod(shape[1:])
    start_row, stop_row = -(-start // row_size), stop // row_size                  # of the whole rows

    def inside_row(row, start, stop):
        """Return the rectangles of elements [start, stop) of a row."""
        return [((row, *rest), (1, *sizes)) for rest, sizes in rectangles(shape[1:], start, stop)]
    if start_row > stop_row:                              # start and stop are inside the same row
        return inside_row(stop_row, start - stop_row * row_size, stop - stop_row * row_size)
    whole_rows = []
    if start_row < stop_row:
        whole_rows = [((start_row, *[0] * len(shape[1:])), (stop_row - start_row, *shape[1:]))]
    rest_of_row = inside_row(start_row - 1, start - (start_row - 1) * row_size, row_size)
    return rest_of_row + whole_rows + inside_row(stop_row, 0, stop - stop_row * row_size)


def assign_writers(state):
    """Return the keys that this rank writes. All ranks must call this.

    If several ranks hold a box, the one that has the fewest bytes to write so far writes it.
    """
    holders, size, writer, load = {}, {}, {}, Counter()   # the last two: {key: rank}, {rank: bytes to write}
    for rank, sizes in enumerate(all_gather_object({key: box.nbytes for key, box in state.items()})):
        size |= sizes
        for key in sizes:
            holders.setdefault(key, []).append(rank)
    for key, ranks in holders.items():
        writer[key] = min(ranks, key=load.__getitem__)
        load[writer[key]] += size[key]
    return [key for key in state if writer[key] == dist.get_rank()]


def fill(state, paths):
    """Fill the boxes from files. Return the key of a box that the files do not cover, or None."""
    boxes_of = {}                                         # {name of a tensor: [(offsets, box)]}
    for key, box in state.items():
        box.fill_(math.nan)                               # marks missing elements: saved ones are finite
        boxes_of.setdefault(key.split("[")[0], []).append((offsets(key), box))
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():
                for box_offsets, box in boxes_of.get(key.split("[")[0], []):
                    copy_overlap(box, box_offsets, file.get_slice(key), offsets(key))
    return next((key for key, box in state.items() if box.isnan().any()), None)


def offsets(key):
    """Return the offsets in a key: the index, in each dimension, of the box's first element."""
    return json.loads(key[key.index("["):])


def copy_overlap(box, box_offsets, saved, saved_offsets):
    """Copy into a box in memory the elements that it shares with a saved box, if any."""
    start = [max(a, b) for a, b in zip(box_offsets, saved_offsets)]
    stop = [min(a + n, b + m) for a, n, b, m in zip(box_offsets, box.shape, saved_offsets, saved.get_shape())]
    if all(a < b for a, b in zip(start, stop)):
        box_slices = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, box_offsets))
        saved_slices = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, saved_offsets))
        box[box_slices] = saved[saved_slices]             # reads no other elements of the file
