"""What is noted on every parameter, as param.placement, before it gets its memory: who has it."""
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass
class Placement:
    copies: dist.ProcessGroup                             # the ranks with the same parameter and other tokens
    replicas: int                                         # so many ranks have the same numbers
    decays: bool                                          # by --weight_decay: matrices do, norms do not
    parts: list = field(default_factory=list)             # how it is cut: parts.py's Part, one for each group
    sum_over: dist.ProcessGroup = None                    # the ranks that each have a share of its gradient


def place(model, mesh):
    for param in model.parameters():
        param.placement = Placement(mesh.get_group("dp_cp"), dist.get_world_size(), decays=param.dim() >= 2)


def by_copies(params):
    """{process group: the parameters that its ranks have copies of}"""
    groups = {}
    for param in params:
        groups.setdefault(param.placement.copies, []).append(param)
    return groups
