"""1F1B on four real ranks, in two loops with isend and recv. The gradients equal those of one process.

    python step06_pp/by_hand.py
"""
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PP = 4                                                    # ranks; each holds one stage, a matrix and tanh
M = 8                                                     # micro-batches
ROWS, HIDDEN = 2, 16                                      # of a micro-batch, and of each message


def one_f_one_b(rank, batch, weight):
    fwd_cache = {}                                        # in flight: {micro-batch: its input and output}
    send_handles = []                                     # (handle, tensor): keeps it alive until it is sent
    done = []                                             # (action, how many are in flight after it)

    def forward(i):
        x = batch[i] if rank == 0 else torch.empty(ROWS, HIDDEN)
        if rank > 0:
            dist.recv(x, rank - 1)
        y = torch.tanh(x.requires_grad_() @ weight)       # what arrives has no autograd graph: it starts here
        fwd_cache[i] = x, y
        if rank < PP - 1:
            send_handles.append((dist.isend(y.detach(), rank + 1), y))
        done.append((f"F{i}", len(fwd_cache)))

    def backward(i):
        x, y = fwd_cache.pop(i)
        if rank == PP - 1:
            y.square().sum().div(M * ROWS).backward()     # the loss, divided by the rows of the whole batch
        else:
            grad = torch.empty(ROWS, HIDDEN)
            dist.recv(grad, rank + 1)
            y.backward(grad)                              # adds to weight.grad, and fills x.grad
        if rank > 0:
            send_handles.append((dist.isend(x.grad, rank - 1), x.grad))
        done.append((f"B{i}", len(fwd_cache)))

    num_warmup = min(M, PP - rank)
    for i in range(num_warmup):                           # warm-up
        forward(i)
    for i in range(M):                                    # steady: one backward, one forward
        backward(i)
        if num_warmup + i < M:                            # in the cool-down no forward is left
            forward(num_warmup + i)
    for handle, _ in send_handles:
        handle.wait()
    return done


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PP,
                            timeout=timedelta(seconds=60))
    torch.manual_seed(0)                                  # the same numbers on every rank
    batch = torch.randn(M, ROWS, HIDDEN)
    weights = torch.randn(PP, HIDDEN, HIDDEN).div(4).requires_grad_()
    mine = weights[rank].detach().requires_grad_()
    actions, in_flight = zip(*one_f_one_b(rank, batch, mine))

    y = batch.flatten(0, 1)                               # one process: all rows at once, all stages
    for weight in weights:
        y = torch.tanh(y @ weight)
    expected = torch.autograd.grad(y.square().sum().div(M * ROWS), weights)[0]
    torch.testing.assert_close(mine.grad, expected[rank])
    lines = [None] * PP
    dist.all_gather_object(lines, f"rank {rank}, at most {max(in_flight)} in flight:  {' '.join(actions)}")
    if rank == 0:
        print(*lines, "the gradients equal those of one process", sep="\n")
    dist.barrier()                                        # no rank exits while others still communicate
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    mp.start_processes(main, (folder,), nprocs=PP, start_method="fork")
