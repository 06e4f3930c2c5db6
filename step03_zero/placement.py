"""What is noted on every parameter, as param.placement, before it gets its memory."""
from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Placement:
    num_replicas: int                                    # on so many ranks are the numbers that it has here
    decays: bool                                          # by --weight_decay: matrices do, norms do not


def init_placements(model):
    for param in model.parameters():
        param.placement = Placement(dist.get_world_size(), decays=param.dim() >= 2)
