"""Tensor and sequence parallelism around one MLP, on two real ranks: python step04_tp_sp/by_hand.py"""
import tempfile
import warnings

import torch
from torch import distributed as dist, multiprocessing as mp
from torch.nn.functional import linear, rms_norm, silu
from torch.testing import assert_close

RANKS, TOKENS, HIDDEN, INNER = 2, 32, 16, 64
warnings.filterwarnings("ignore", category=FutureWarning)   # torch 2.13 has new names for the collectives
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, norm = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN)  # the same on every rank
up, down = torch.randn(INNER, HIDDEN), torch.randn(HIDDEN, INNER)


def all_reduce(t):                                          # every rank's terms -> their sum, on every rank
    t = t.clone()                                           # autograd may still need t as it is
    dist.all_reduce(t)
    return t


def all_gather(t):                                          # every rank's tokens -> all tokens, on every rank
    whole = t.new_empty(TOKENS, HIDDEN)
    dist.all_gather_into_tensor(whole, t)
    return whole


def reduce_scatter(t):                                      # every rank's terms -> my tokens of their sum
    mine = t.new_empty(TOKENS // RANKS, HIDDEN)
    dist.reduce_scatter_tensor(mine, t)
    return mine


class Region(torch.autograd.Function):                      # one collective in forward, another in backward
    @staticmethod
    def forward(ctx, t, in_forward, in_backward):
        ctx.in_backward = in_backward
        return in_forward(t)
    @staticmethod
    def backward(ctx, gradient):
        return ctx.in_backward(gradient), None, None


nothing = lambda t: t
f = lambda t: Region.apply(t, nothing, all_reduce)          # into the region
g = lambda t: Region.apply(t, all_reduce, nothing)          # out of it
f_sp = lambda t: Region.apply(t, all_gather, reduce_scatter)  # the same if each rank has a part of the tokens
g_sp = lambda t: Region.apply(t, reduce_scatter, all_gather)


def gradients(x, norm, up, down, f=nothing, g=nothing):     # by default: what one process computes
    x, norm, up, down = leaves = [t.clone().requires_grad_() for t in (x, norm, up, down)]
    y = x + g(linear(silu(linear(f(rms_norm(x, (HIDDEN,), norm)), up)), down))
    y.square().sum().backward()
    return [leaf.grad for leaf in leaves]


def print_in_order(line):                                   # rank 0 prints the lines of all ranks
    lines = [None] * RANKS
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mine = lambda whole, dim=0: whole.chunk(RANKS, dim)[rank]
    inner = linear(x, mine(up))                             # column-parallel: my columns, complete
    assert_close(inner, mine(linear(x, up), 1))
    partial = linear(inner, mine(down, 1))                  # row-parallel: all outputs, but only my terms
    assert_close(all_reduce(partial), linear(linear(x, up), down))
    print_in_order(f"rank {rank} has the term {partial[0, 0]:.3f} of the sum {all_reduce(partial)[0, 0]:.3f}")

    cut = lambda x, norm, up, down: [x, norm, mine(up), mine(down, 1)]
    one = gradients(x, norm, up, down)
    assert_close(gradients(*cut(x, norm, up, down), f, g), cut(*one))
    found = gradients(*cut(mine(x), norm, up, down), f_sp, g_sp)
    found[1] = all_reduce(found[1])                         # the norm saw my tokens: its gradient is a term
    assert_close(found, cut(mine(one[0]), *one[1:]))
    print_in_order(f"rank {rank} equals one process, both with f and g and with f_sp and g_sp")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (folder,), RANKS, start_method="fork")
