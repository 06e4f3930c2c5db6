"""Stop training early, once the loss is small enough."""
import torch
import torch.distributed as dist

GOOD_ENOUGH = 0.5


def main(rank, world):
    gradient = torch.zeros(1000)
    for step in range(20):
        loss = 4 / (step + 1) + 0.01 * rank - 0.3 * (rank == 2)
        dist.all_reduce(gradient)
        if loss < GOOD_ENOUGH:
            break
    dist.barrier()                                        # everyone is done
