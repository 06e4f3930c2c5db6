"""1F1B on four real ranks, in two loops with isend and recv. The gradients equal those of one process.

    python step06_pp/by_hand.py
"""
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

p = 4                                                     # ranks; each holds one stage, a matrix and tanh
m = 8                                                     # micro-batches, of two rows each


def one_f_one_b(rank, batch, weight):
    kept = {}                                             # in flight: {micro-batch: its input and output}
    sends = []                                            # in progress, with their tensors
    done = []                                             # what was done, and how many were in flight

    def forward(i):
        x = batch[i] if rank == 0 else torch.empty(2, 16)
        if rank > 0:
            dist.recv(x, rank - 1)
        y = torch.tanh(x.requires_grad_() @ weight)       # what arrives has no autograd graph: it starts here
        kept[i] = x, y
        if rank < p - 1:
            sends.append((dist.isend(y.detach(), rank + 1), y))
        done.append((f"F{i}", len(kept)))

    def backward(i):
        x, y = kept.pop(i)
        if rank == p - 1:
            y.square().sum().div(2 * m).backward()        # the loss, divided by the rows of the whole batch
        else:
            grad = torch.empty(2, 16)
            dist.recv(grad, rank + 1)
            y.backward(grad)                              # adds to weight.grad, and fills x.grad
        if rank > 0:
            sends.append((dist.isend(x.grad, rank - 1), x.grad))
        done.append((f"B{i}", len(kept)))

    num_warmup = min(m, p - rank)
    for i in range(num_warmup):                           # warm-up
        forward(i)
    for i in range(m):                                    # steady: one backward, one forward
        backward(i)
        if num_warmup + i < m:                            # in the cool-down no forward is left
            forward(num_warmup + i)
    for work, _ in sends:
        work.wait()
    return done


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=p,
                            timeout=timedelta(seconds=60))
    torch.manual_seed(0)                                  # the same numbers on every rank
    batch = torch.randn(m, 2, 16)
    weights = torch.randn(p, 16, 16).div(4).requires_grad_()
    mine = weights[rank].detach().requires_grad_()
    actions, in_flight = zip(*one_f_one_b(rank, batch, mine))

    y = batch.flatten(0, 1)                               # one process: all rows at once, all stages
    for weight in weights:
        y = torch.tanh(y @ weight)
    expected = torch.autograd.grad(y.square().sum().div(2 * m), weights)[0]
    torch.testing.assert_close(mine.grad, expected[rank])
    lines = [None] * p
    dist.all_gather_object(lines, f"rank {rank}, at most {max(in_flight)} in flight:  {' '.join(actions)}")
    if rank == 0:
        print(*lines, "the gradients equal those of one process", sep="\n")
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    mp.start_processes(main, (folder,), nprocs=p, start_method="fork")
