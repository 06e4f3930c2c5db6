"""Tensor and sequence parallelism around one MLP, on two real ranks: python step04_tp_sp/by_hand.py"""
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import linear, rms_norm, silu
from torch.testing import assert_close

TP, TOKENS, HIDDEN, INTERMEDIATE = 2, 32, 16, 64
warnings.filterwarnings("ignore", category=FutureWarning)   # torch 2.13 has new names for the collectives
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, norm = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN)  # the same on every rank
up_proj, down_proj = torch.randn(INTERMEDIATE, HIDDEN), torch.randn(HIDDEN, INTERMEDIATE)


def all_reduce(x):                                          # every rank's terms -> their sum, on every rank
    x = x.clone()                                           # autograd may still read x
    dist.all_reduce(x)
    return x


def all_gather(x):                                          # every rank's tokens -> all tokens, on every rank
    gathered = x.new_empty(TOKENS, HIDDEN)
    dist.all_gather_into_tensor(gathered, x)
    return gathered


def reduce_scatter(x):                                      # every rank's terms -> my tokens of their sum
    shard = x.new_empty(TOKENS // TP, HIDDEN)
    dist.reduce_scatter_tensor(shard, x)
    return shard


class Region(torch.autograd.Function):                      # one collective in forward, another in backward
    @staticmethod
    def forward(ctx, x, in_forward, in_backward):
        ctx.in_backward = in_backward
        return in_forward(x)
    @staticmethod
    def backward(ctx, grad):
        return ctx.in_backward(grad), None, None


identity = lambda x: x
enter_region = lambda x, gather, reduce: Region.apply(x, gather, reduce)       # f
leave_region = lambda x, gather, reduce: Region.apply(x, reduce, gather)       # g: the two change places


def gradients(x, norm, up_proj, down_proj, gather=identity, reduce=identity):  # by default: one process
    x, norm, up_proj, down_proj = leaves = [t.clone().requires_grad_() for t in (x, norm, up_proj, down_proj)]
    hidden = enter_region(rms_norm(x, (HIDDEN,), norm), gather, reduce)
    partial = linear(silu(linear(hidden, up_proj)), down_proj)
    y = x + leave_region(partial, gather, reduce)
    y.square().sum().backward()
    return [leaf.grad for leaf in leaves]


def print_in_order(line):                                   # rank 0 prints the lines of all ranks
    lines = [None] * TP
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TP)
    mine = lambda whole, dim=0: whole.chunk(TP, dim)[rank]
    inner = linear(x, mine(up_proj))                        # column-parallel: my columns, complete
    assert_close(inner, mine(linear(x, up_proj), 1))
    partial = linear(inner, mine(down_proj, 1))             # row-parallel: all outputs, but only my terms
    assert_close(all_reduce(partial), linear(linear(x, up_proj), down_proj))
    print_in_order(f"rank {rank} has the term {partial[0, 0]:.3f} of the sum {all_reduce(partial)[0, 0]:.3f}")

    shard = lambda x, norm, up_proj, down_proj: [x, norm, mine(up_proj), mine(down_proj, 1)]
    expected = gradients(x, norm, up_proj, down_proj)
    found = gradients(*shard(x, norm, up_proj, down_proj), identity, all_reduce)                # without SP
    assert_close(found, shard(*expected))
    found = gradients(*shard(mine(x), norm, up_proj, down_proj), all_gather, reduce_scatter)    # with SP
    found[1] = all_reduce(found[1])                         # the norm saw my tokens: its gradient is a term
    assert_close(found, shard(mine(expected[0]), *expected[1:]))
    print_in_order(f"rank {rank} equals one process, without SP and with SP")
    dist.barrier()                                          # no rank exits while others still communicate
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    mp.start_processes(main, (folder,), nprocs=TP, start_method="fork")
