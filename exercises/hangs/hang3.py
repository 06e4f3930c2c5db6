"""Pass each rank's sequences to the next rank. The last batch of a file is short."""
import torch
import torch.distributed as dist

SEQUENCES = [[8, 8, 8], [8, 8, 8], [8, 8, 6], [8, 8, 8]]  # for each rank, in each batch


def main(rank, world):
    for batch in range(3):
        mine = torch.ones(SEQUENCES[rank][batch], 16)
        theirs = torch.empty(SEQUENCES[rank][batch], 16)
        work = dist.irecv(theirs, (rank - 1) % world)
        dist.send(mine, (rank + 1) % world)
        work.wait()
        dist.barrier()
