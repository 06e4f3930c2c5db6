"""Data parallelism by hand, on real processes: a ring that adds, then a model trained on parts of a batch.

    python step02_dp/by_hand.py
"""
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

torch.set_num_threads(1)                                   # a process with a pool of threads must not fork

# ---------------------------------------------------------------------------------- the processes
def run(function, world_size):
    """Start the processes, call function(rank, world_size) in each, and return the list of their results."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder, function, world_size), nprocs=world_size, start_method="fork")
        return [torch.load(f"{folder}/result{rank}") for rank in range(world_size)]


def main(rank, folder, function, world_size):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    result = function(rank, world_size)
    torch.save(result, f"{folder}/result{rank}")           # to a file: a full pipe would block
    dist.barrier()                                         # no rank exits while others still communicate
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------- the sum over ranks
def ring_all_reduce(x):
    """Replace x by the sum of all ranks' x. Each rank sends only to the next one, 1/n of x at a time."""
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = x.tensor_split(n)                              # views: writing to a part writes to x

    def send_recv(send_index, recv_index):
        recv_buffer = torch.empty_like(parts[recv_index % n])
        handle = dist.isend(parts[send_index % n], (rank + 1) % n)    # send would wait for the receiver
        dist.recv(recv_buffer, (rank - 1) % n)
        handle.wait()
        return recv_buffer

    for i in range(n - 1):                                 # reduce-scatter: what arrives is added
        parts[(rank - i - 1) % n].add_(send_recv(rank - i, rank - i - 1))
    for i in range(n - 1):                                 # all-gather: what arrives is a finished sum
        parts[(rank - i) % n].copy_(send_recv(rank - i + 1, rank - i))
    return x


def one_ring(rank, world_size):
    x = torch.tensor([1, 2, 3, 4]) * 10**rank              # on rank 0: 1 2 3 4, on rank 1: 10 20 30 40, ...
    return ring_all_reduce(x).tolist()


# ---------------------------------------------------------------------------------- training
def train(rank, world_size):
    torch.manual_seed(0)                                   # all ranks make the same weights, the same batch
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    params, x = list(model.parameters()), torch.randn(15, 8)
    mine = x.tensor_split(world_size)[rank]                # with four ranks, three get 4 rows and one gets 3
    optimizer = torch.optim.AdamW(params, lr=0.01)
    for _ in range(5):
        loss = (model(mine) - mine.sin()).square().sum() / len(x)   # a sum over my rows, divided by ALL rows
        loss.backward()
        flat_grad = torch.cat([param.grad.flatten() for param in params])
        ring_all_reduce(flat_grad)                         # before: from my rows; after: the batch's gradient
        for param, grad in zip(params, flat_grad.split([param.numel() for param in params])):
            param.grad.copy_(grad.view_as(param))
        optimizer.step()                                   # the same everywhere, so weights need not travel
        optimizer.zero_grad()
    return loss.item(), torch.cat([param.detach().flatten() for param in params]).tolist()


print("four ranks after a ring:", *(sums := run(one_ring, 4)))
assert sums == [[1111, 2222, 3333, 4444]] * 4
[(whole, reference)], (losses, weights) = run(train, 1), zip(*run(train, 4))
print("loss of step 5:", " + ".join(f"{loss:.4f}" for loss in losses), f"= {sum(losses):.4f};",
      f"one process: {whole:.4f}")
assert all(other == weights[0] for other in weights)       # the ranks agree to the last bit
torch.testing.assert_close(torch.tensor(weights[0]), torch.tensor(reference), rtol=0, atol=1e-5)
print(f"all {len(reference)} weights equal those of one process, and no rank has sent a weight")
