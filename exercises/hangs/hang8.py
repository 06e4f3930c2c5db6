"""One of the disks is old."""
import time

import torch
import torch.distributed as dist


def read(rank):
    time.sleep(1.2 if rank == 3 else 0.01)
    return torch.ones(64)


def main(rank, world):
    for step in range(1000):
        batch = read(rank)
        dist.all_reduce(batch)
