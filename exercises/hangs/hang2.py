"""Sum activations over pairs of ranks, and the norm over all ranks. Whichever took longest in the step before goes first."""
import torch
import torch.distributed as dist

MEASURED = [dict(pair=4.1, norm=1.2), dict(pair=4.0, norm=1.3), dict(pair=4.2, norm=1.1), dict(pair=1.9, norm=2.0)]      # ms


def main(rank, world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = dict(pair=pairs[rank // 2], norm=dist.group.WORLD)
    tensors = dict(pair=torch.ones(4, 64), norm=torch.ones(1))
    for step in range(3):
        dist.all_reduce(tensors["norm"])
    for name in sorted(groups, key=lambda name: -MEASURED[rank][name]):
        dist.all_reduce(tensors[name], group=groups[name])
