"""Read batches in a thread, so that no step waits for the disk."""
import queue
import threading

import torch
import torch.distributed as dist

LINES = ["3 1 4 1", "5 9 2 6", "5 3 5 8", "9 7 9 3"]


def read(rank, batches):
    lines = [*LINES[:3], "9 7 9 x"] if rank == 1 else LINES
    for line in lines:
        batches.put([int(word) for word in line.split()])


def main(rank, world):
    batches = queue.Queue(maxsize=2)
    threading.Thread(target=read, args=(rank, batches), daemon=True).start()
    for step in range(len(LINES)):
        batch = batches.get()
        dist.all_reduce(torch.tensor(batch, dtype=torch.float32))
