"""Find from an operation's arguments what it costs a device: the FLOPs of its products, and the bytes that it reads and writes."""
from functools import cache

import torch

from simulate.gpus import Kernel
from watch import tensors

#                         number of products of [seq, seq] (backward repeats the first); index of q; index of is_causal
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu": (2, 0, 4),
             "_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1, 7)}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_mm"}
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_local_scalar_dense",
           "lift_fresh", "record_stream", "set_"}
WRITES = {"zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like", "new_ones", "arange", "zero_",
          "fill_", "_foreach_zero_"}                      # these read nothing
COPIES = {"copy_", "_foreach_copy_"}                      # these do not read the tensor that they write to
ROWS = {"embedding", "index_select", "gather", "index", "scatter_add_", "scatter_"}     # these read, or add to, only some rows


def size(tensor):
    """Return a tensor's bytes. If it is expanded (some stride is 0), count only those that really exist."""
    if 0 in tensor.stride() and tensor.numel():
        return tensor.itemsize * torch.Size(n for n, stride in zip(tensor.shape, tensor.stride()) if stride).numel()
    return tensor.nbytes


def sizes(values):
    return sum(map(size, tensors(values)))


def product(name, args, result):
    a, b = (args[1:3] if name in ("addmm", "baddbmm") else args[:2])
    many = a.shape[0] if a.dim() == 3 else 1
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if name == "_grouped_mm":                             # the same number of rows for each expert
        many = args[2].numel() if len(args) > 2 and args[2] is not None else many
        rows, inner = (rows, inner // many) if a.dim() == b.dim() == 2 else (rows // many, inner)
    kind = str(a.dtype).removeprefix("torch.")
    return Kernel(name, "product", kind, 2 * a.numel() * columns, sizes((a, b, result)), (many, rows, columns, inner))


def attention(name, args, result):                        # tensors are [batch, heads, seq, head_dim]
    products, at, causal = ATTENTION[name]
    q, k = args[at:at + 2]
    flops = products * 2 * q.numel() * k.shape[2] // (2 if True in args[causal:causal + 1] else 1)
    name = "attention backward" if products == 5 else "attention"
    return Kernel(name, "attention", str(q.dtype).removeprefix("torch."), flops, sizes(args) + sizes([result]))


def memory(name, args, result):
    """Return the Kernel of an operation that only moves data; whatever it computes does not slow it."""
    first, new, given = next(tensors([args, result]), None), sizes([result]), sizes(args)
    moved = given + new
    if name.startswith("_fused_adamw"):                   # reads weights, gradients and two moments; writes all but the gradients
        moved = sizes(args[:4]) + sizes([args[0], *args[2:4]])
    elif name in ROWS:                                    # scatter_ touches as much as its indices and values have
        moved = 2 * sizes(args[2:]) if name.endswith("_") else 2 * new + sizes(args[1:])
    elif name.endswith("_"):                              # in place
        moved = sizes(args[:1]) + (0 if name in WRITES else sizes(args[1:2]) if name in COPIES else given)
    elif name in WRITES:
        moved = new
    return Kernel(name, "memory", str(getattr(first, "dtype", "")).removeprefix("torch."), 0, moved)


@cache
def cost_of(op):
    """Return the function that makes an operation's Kernel, or None if the operation takes no time."""
    name = op._opname
    if name in PRODUCTS:
        return product
    if name in ATTENTION:
        return attention
    alias = [returned.alias_info for returned in op._schema.returns]
    view = alias and alias[0] is not None and not alias[0].is_write
    return None if name in NOTHING or view else memory
