"""How a parameter is sharded: the entries of param.placement.shards, and how loading and saving use them."""
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero import unsharded_param


class Shard(NamedTuple):
    """Shard `index` of the `num_shards` of a parameter, split along dimension `dim` over a group."""
    group: dist.ProcessGroup
    dim: int
    num_shards: int
    index: int


def local_slices(param):
    """Return the slices that select this rank's shard of the whole parameter."""
    slices = [slice(None)] * param.dim()
    for shard in param.placement.shards:
        size = param.shape[shard.dim]
        slices[shard.dim] = slice(shard.index * size, (shard.index + 1) * size)
    return tuple(slices)


def global_shape(param):
    shape = list(param.shape)
    for shard in param.placement.shards:
        shape[shard.dim] *= shard.num_shards
    return shape


def full_tensor(param):
    """Return a parameter's value with all sharding undone, for saving. All ranks must call this."""
    value = unsharded_param(param)
    for shard in param.placement.shards:
        gathered = [torch.empty_like(value) for _ in range(shard.group.size())]
        dist.all_gather(gathered, value.contiguous(), group=shard.group)
        distinct = gathered[::len(gathered) // shard.num_shards]   # neighbouring ranks may hold the same shard
        value = torch.cat(distinct, dim=shard.dim)
    return value
