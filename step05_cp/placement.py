"""What is noted on every parameter, as param.placement, before it gets its memory."""
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass
class Placement:
    times_counted: int                                    # on so many ranks are the numbers that it has here
    decays: bool                                          # by --weight_decay: matrices do, norms do not
    parts: list = field(default_factory=list)             # how it is cut: parts.py's Part, one for each group
    sum_over: dist.ProcessGroup = None                    # the ranks that each have a share of its gradient


def place(model):
    for param in model.parameters():
        param.placement = Placement(dist.get_world_size(), decays=param.dim() >= 2)
