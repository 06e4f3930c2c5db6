"""Count what kernels load and store, in Triton's interpreter, and what torch's own operations read and write.

    python exercises/kernels/count.py              # prints the table of README.md
"""
import os
from contextlib import contextmanager
from types import SimpleNamespace

os.environ["CUDA_VISIBLE_DEVICES"] = ""                                       # it counts in the interpreter

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from triton.runtime.interpreter import interpreter_builder

WARP, SECTOR = 32, 32                                                         # threads; bytes


@contextmanager
def counted():
    """Count the bytes that programs ask for; the sectors that warps touch, if thread i has element i; and the warps that are partly
    masked."""
    seen = SimpleNamespace(loaded=0, stored=0, sectors=0, mixed=0)
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def count(ptrs, mask, direction):
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        addresses, asked = np.ravel(ptrs.data), np.ravel(np.broadcast_to(mask.data, ptrs.data.shape)).astype(bool)
        setattr(seen, direction, getattr(seen, direction) + size * int(asked.sum()))
        for start in range(0, len(addresses), WARP):
            of_warp = asked[start:start + WARP]
            touched = addresses[start:start + WARP][of_warp]
            seen.sectors += len(np.unique(touched // SECTOR))
            seen.mixed += bool(of_warp.any() and not of_warp.all())

    def counting_load(ptrs, mask, *others):
        count(ptrs, mask, "loaded")
        return load(ptrs, mask, *others)

    def counting_store(ptrs, value, mask, *others):
        count(ptrs, mask, "stored")
        return store(ptrs, value, mask, *others)

    interpreter_builder.create_masked_load, interpreter_builder.create_masked_store = counting_load, counting_store
    try:
        yield seen
    finally:
        del interpreter_builder.create_masked_load, interpreter_builder.create_masked_store


class Eager(TorchDispatchMode):
    """Counts the bytes of the tensors that each torch operation is given and makes. Views move nothing."""
    def __init__(self):
        super().__init__()
        self.kernels, self.moved = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        size = lambda of: sum(min(t.nbytes, t.untyped_storage().nbytes())     # an expanded tensor is read once
                              for t in tree_leaves(of) if isinstance(t, torch.Tensor))
        if not func.is_view:
            self.kernels += 1
            self.moved += size((args, kwargs)) + size(result)
        return result


def eager(function, *inputs):
    with Eager() as seen:
        function(*inputs)
    return seen


def cases():
    """Yield name, a call of the kernel, its twin, the inputs, and the formula: bytes loaded, bytes stored."""
    torch.manual_seed(0)
    random = lambda *shape: torch.randn(shape, device=kernels.DEVICE)
    tokens, hidden, seq, heads, dim, tile = 64, 256, 128, 4, 32, 32
    n, table = tokens * hidden, seq * dim
    blocks, qkv = seq // tile, tuple(random(heads, seq, dim) for _ in range(3))
    yield "copy", kernels.copy, torch.clone, (random(tokens, hidden),), 4 * n, 4 * n
    yield ("copy, strided", lambda x: kernels.copy(x, strided=True), torch.clone, (random(tokens, hidden),), 4 * n, 4 * n)
    yield "softmax", kernels.softmax, kernels.softmax_twin, (random(tokens, hidden),), 4 * n, 4 * n
    for size in 16, 32, 64:
        yield (f"matmul, tiles of {size}", lambda a, b, size=size: kernels.matmul(a, b, size), torch.matmul,
               (random(128, 128), random(128, 128)), 4 * 2 * 128**3 // size, 4 * 128**2)
    yield ("RMSNorm", kernels.rms_norm, kernels.rms_norm_twin, (random(tokens, hidden), random(hidden)),
           4 * 2 * n, 4 * n)
    yield "SwiGLU", kernels.swiglu, kernels.swiglu_twin, (random(tokens, hidden), random(tokens, hidden)), 4 * 2 * n, 4 * n
    yield ("rotary", kernels.rotary, kernels.rotary_twin,
           (random(seq, heads, dim), *tables(seq, dim)), 4 * 2 * seq * heads * dim, 4 * seq * heads * dim)
    # q once, k and v in the blocks up to the diagonal; then out, and a log-sum-exp for each query
    yield ("flash attention", lambda q, k, v: kernels.flash(q, k, v, tile=tile), kernels.attention_twin,
           qkv, 4 * heads * table * (1 + blocks + 1), 4 * heads * (table + seq))
    # in two kernels: two tensors once, two in the blocks up to the diagonal; two numbers for each query that is loaded
    leaves = [tensor.clone().requires_grad_() for tensor in qkv]
    whole, grad = kernels.attention_twin(*leaves)[0], random(heads, seq, dim)
    yield ("its backward", lambda *inputs: kernels.flash_backward(*inputs, tile=tile),
           lambda *_: torch.autograd.grad(whole, leaves, grad, retain_graph=True), (*qkv, *kernels.flash(*qkv), grad),
           4 * heads * (2 * table * (2 + blocks + 1) + seq * (2 + blocks + 1)), 4 * heads * 3 * table)


def tables(seq, dim):
    frequency = 10_000.0 ** -(torch.arange(0, dim, 2, device=kernels.DEVICE) / dim)
    angle = torch.arange(seq, device=kernels.DEVICE)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)[:, None]                            # [seq, 1, head_dim]
    return angle.cos(), angle.sin()


def table():
    """Yield the rows of a Markdown table."""
    yield ("| kernel | loaded, bytes: formula | counted | stored: formula | counted | in whole sectors "
           "| torch, step by step: operations | read and written |")
    yield "|---|---|---|---|---|---|---|---|"
    for name, kernel, twin, inputs, loads, stores in cases():
        with counted() as seen:
            kernel(*inputs)
        own = eager(twin, *inputs)
        yield (f"| {name} | {loads:,} | {seen.loaded:,} | {stores:,} | {seen.stored:,} | {seen.sectors * SECTOR:,} | "
               f"{own.kernels} | {own.moved:,} |")


if __name__ == "__main__":
    print("\n".join(table()))
