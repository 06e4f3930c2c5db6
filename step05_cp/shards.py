"""How a parameter is cut: what param.placement.parts records, and what loading and saving do with it."""
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero import unsharded_param


class Shard(NamedTuple):
    """A parameter is part `index` of `parts`, cut along its dimension `dim` over the ranks of a group."""
    group: dist.ProcessGroup
    dim: int
    parts: int
    index: int


def local_slices(param):
    """The index of this rank's part in the whole parameter."""
    index = [slice(None)] * param.dim()
    for part in param.placement.shards:
        size = param.shape[part.dim]
        index[part.dim] = slice(part.index * size, (part.index + 1) * size)
    return tuple(index)


def global_shape(param):
    shape = list(param.shape)
    for part in param.placement.shards:
        shape[part.dim] *= part.num_shards
    return shape


def full_tensor(param):
    """A parameter's value, for saving: the opposite of my_part."""
    value = unsharded_param(param)
    for part in param.placement.shards:
        of_ranks = [torch.empty_like(value) for _ in range(part.group.size())]
        dist.all_gather(of_ranks, value.contiguous(), group=part.group)
        different = of_ranks[::len(of_ranks) // part.num_shards]            # of neighbours with the same part, one
        value = torch.cat(different, dim=part.dim)
    return value
