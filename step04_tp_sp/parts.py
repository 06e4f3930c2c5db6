"""How a parameter is cut: what param.placement.parts records, and what loading and saving do with it."""
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero import gathered


class Part(NamedTuple):
    """A parameter is part `index` of `parts`, cut along its dimension `dim` over the ranks of a group."""
    over: dist.ProcessGroup
    dim: int
    parts: int
    index: int


def my_part(param):
    """The index of this rank's part in the whole parameter."""
    index = [slice(None)] * param.dim()
    for part in param.placement.parts:
        size = param.shape[part.dim]
        index[part.dim] = slice(part.index * size, (part.index + 1) * size)
    return tuple(index)


def whole_shape(param):
    shape = list(param.shape)
    for part in param.placement.parts:
        shape[part.dim] *= part.parts
    return shape


def uncut(param):
    """A parameter's value, for saving: the opposite of my_part."""
    value = gathered(param)
    for part in param.placement.parts:
        of_ranks = [torch.empty_like(value) for _ in range(part.over.size())]
        dist.all_gather(of_ranks, value.contiguous(), group=part.over)
        different = of_ranks[::len(of_ranks) // part.parts]            # of neighbours with the same part, one
        value = torch.cat(different, dim=part.dim)
    return value
