"""What is noted on every parameter, as param.placement, before it gets its memory."""
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass
class Placement:
    num_replicas: int                                    # on so many ranks are the numbers that it has here
    decays: bool                                          # by --weight_decay: matrices do, norms do not
    shards: list = field(default_factory=list)             # how it is cut: shards.py's Shard, one for each group
    grad_reduce_group: dist.ProcessGroup = None                    # the ranks that each have a share of its gradient


def init_placements(model):
    for param in model.parameters():
        param.placement = Placement(dist.get_world_size(), decays=param.dim() >= 2)
