"""What an operation costs a device: the FLOPs of its products, the bytes that it reads and writes. Seen from its arguments."""
from functools import cache

import torch

from simulate.gpus import Kernel

#                         products of [seq, seq]; which argument is q, which says whether it is causal; the first once more
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu": (2, 0, 4),
             "_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1, 7)}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_mm"}
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_local_scalar_dense",
           "lift_fresh", "record_stream", "set_"}
WRITES = {"zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like", "new_ones", "arange", "zero_",
          "fill_", "_foreach_zero_"}                      # and reads nothing
COPIES = {"copy_", "_foreach_copy_"}                      # does not read what it writes to
ROWS = {"embedding", "index_select", "gather", "index", "scatter_add_", "scatter_"}     # reads, or adds to, some of its rows


def tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def size(tensor):
    """Of one that is expanded (its stride is 0 somewhere) what there really is."""
    if 0 in tensor.stride() and tensor.numel():
        return tensor.itemsize * torch.Size(n for n, stride in zip(tensor.shape, tensor.stride()) if stride).numel()
    return tensor.nbytes


def sizes(values):
    return sum(map(size, tensors(values)))


def product(name, args, result):
    a, b = (args[1:3] if name in ("addmm", "baddbmm") else args[:2])
    many = a.shape[0] if a.dim() == 3 else 1
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if name == "_grouped_mm":                             # of experts: as many rows for each
        many = args[2].numel() if len(args) > 2 and args[2] is not None else many
        rows, inner = (rows, inner // many) if a.dim() == b.dim() == 2 else (rows // many, inner)
    kind = str(a.dtype).removeprefix("torch.")
    return Kernel(name, "product", kind, 2 * a.numel() * columns, sizes((a, b, result)), (many, rows, columns, inner))


def attention(name, args, result):                        # of [batch, heads, seq, head_dim]
    products, at, causal = ATTENTION[name]
    q, k = args[at:at + 2]
    flops = products * 2 * q.numel() * k.shape[2] // (2 if True in args[causal:causal + 1] else 1)
    name = "attention backward" if products == 5 else "attention"
    return Kernel(name, "attention", str(q.dtype).removeprefix("torch."), flops, sizes(args) + sizes([result]))


def memory(name, args, result):
    """What a kernel reads and writes that does nothing but move data, and is no slower for what it computes."""
    first, new, given = next(tensors([args, result]), None), sizes([result]), sizes(args)
    moved = given + new
    if name.startswith("_fused_adamw"):                   # weights, gradients, two moments: all but the gradients are written
        moved = sizes(args[:4]) + sizes([args[0], *args[2:4]])
    elif name in ROWS:                                    # of scatter_ those of its indices and values
        moved = 2 * sizes(args[2:]) if name.endswith("_") else 2 * new + sizes(args[1:])
    elif name.endswith("_"):                              # in place
        moved = sizes(args[:1]) + (0 if name in WRITES else sizes(args[1:2]) if name in COPIES else given)
    elif name in WRITES:
        moved = new
    return Kernel(name, "memory", str(getattr(first, "dtype", "")).removeprefix("torch."), 0, moved)


@cache
def cost_of(op):
    """The function that makes an operation's Kernel; None: it takes no time."""
    name = op._opname
    if name in PRODUCTS:
        return product
    if name in ATTENTION:
        return attention
    alias = [returned.alias_info for returned in op._schema.returns]
    view = alias and alias[0] is not None and not alias[0].is_write
    return None if name in NOTHING or view else memory
