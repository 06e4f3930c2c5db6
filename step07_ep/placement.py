"""param.placement: what the optimizer and checkpoints must know about a parameter that is sharded."""
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Placement:
    num_replicas: int                                     # how many ranks hold the same elements
    decays: bool                                          # whether --weight_decay applies: not to norms
    shards: list = field(default_factory=list)            # how it is sharded: one Shard (shards.py) per group
    grad_reduce_group: dist.ProcessGroup = None         # ranks whose gradients are partial and must be summed
    expert_mesh: DeviceMesh = None                        # for an expert: the dp x cp ranks that hold a copy


def init_placements(model):
    """Attach a Placement to every parameter, before any of them is sharded."""
    for param in model.parameters():
        param.placement = Placement(dist.get_world_size(), decays=param.dim() >= 2)
