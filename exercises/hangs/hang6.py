"""Write a checkpoint after every fifth step."""
import torch
import torch.distributed as dist


def whole(mine, world):
    parts = torch.empty(world * len(mine))
    dist.all_gather_into_tensor(parts, mine)
    return parts


def save(weights, world):
    return whole(weights, world).sum()                    # instead of writing a file


def main(rank, world):
    weights = torch.ones(100)
    for step in range(1, 11):
        dist.all_reduce(torch.ones(100))
        if rank == 0 and step % 5 == 0:
            save(weights, world)
