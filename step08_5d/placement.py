"""param.placement: what the optimizer and checkpoints must know about a parameter that is sharded."""
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mesh import data_mesh


@dataclass
class Placement:
    num_replicas: int                                     # how many ranks hold the same elements
    decays: bool                                          # whether --weight_decay applies: not to norms
    data_mesh: DeviceMesh                                 # the data-parallel ranks that sum its gradient
    shards: list = field(default_factory=list)            # how it is sharded: one Shard (shards.py) per group
    grad_reduce_group: dist.ProcessGroup = None         # ranks whose gradients are partial and must be summed


def init_placements(model, mesh: DeviceMesh):
    """Attach a Placement to every parameter, before any of them is sharded."""
    for param in model.parameters():
        param.placement = Placement(dist.get_world_size(), param.dim() >= 2, data_mesh(mesh))


def group_by_mesh(params):
    """Return a list of (mesh, the parameters that its ranks share). Experts have a mesh of their own."""
    params_of = {}
    for param in params:
        params_of.setdefault(param.placement.data_mesh, []).append(param)
    return list(params_of.items())
