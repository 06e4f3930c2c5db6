"""What an operation costs a device: the FLOPs of its products, the bytes that it reads and writes. Seen from its arguments."""
from typing import NamedTuple

import torch

#                         products of [seq, seq]; which argument is q, which says whether it is causal; the first once more
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu": (2, 0, 4),
             "_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1, 7)}
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_local_scalar_dense",
           "lift_fresh", "record_stream", "set_"}
WRITES = {"zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like", "new_ones", "arange", "zero_",
          "fill_", "_foreach_zero_"}                      # and reads nothing
COPIES = {"copy_", "_foreach_copy_"}                      # does not read what it writes to
ROWS = {"embedding", "index_select", "gather", "index", "scatter_add_", "scatter_"}     # reads, or adds to, some of its rows


class Kernel(NamedTuple):
    name: str
    kind: str                                             # product, attention or memory
    dtype: str
    flops: int
    bytes: int                                            # read and written
    shape: tuple = ()                                     # of products: how many, and each one's rows, columns, inner


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


def adamw(name, args, result):                            # weights, gradients, two moments: all but the gradients are written
    return memory(name, args, sizes(args[:4]) + sizes((args[0], *args[2:4])))


def memory(name, args, size):
    first = next(tensors(args), None)
    return Kernel(name, "memory", str(first.dtype).removeprefix("torch.") if first is not None else "", 0, size)


def in_place(name, args, result):
    written = sizes(args[:1])
    if name in WRITES:
        return memory(name, args, written)
    if name in COPIES:
        return memory(name, args, written + sizes(args[1:2]))
    return memory(name, args, written + sizes(args))


def rows(name, args, result):
    some = sizes(args[2:]) if name.endswith("_") else sizes([result])              # scatter_'s indices and values
    return memory(name, args, 2 * some + sizes(tensors(args[1:])) * (not name.endswith("_")))


def new(name, args, result):
    return memory(name, args, sizes([result]) + (0 if name in WRITES else sizes(args)))


def chosen(op):
    """The function for an operation; None: it takes no time."""
    name = op._opname
    if name in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm"):
        return product
    if name in ATTENTION:
        return attention
    if name in NOTHING:
        return None
    if name.startswith("_fused_adamw"):
        return adamw
    if name in ROWS:
        return rows
    alias = [returned.alias_info for returned in op._schema.returns]
    if alias and alias[0] is not None:                    # a view, or what is written in place
        return in_place if alias[0].is_write else None
    return in_place if name.endswith("_") else new


CHOSEN = {}


def kernel_of(op, args, result):
    if op not in CHOSEN:
        CHOSEN[op] = chosen(op)
    how = CHOSEN[op]
    return how and how(op._opname, args, result)
