"""Context parallelism: each rank of cp has a part of every sequence, and only attention has to see the other
parts.

    ring        keys and values travel round a ring of ranks: while a rank uses those of one, the next come
    zigzag      the same; but each rank has an early and a late chunk of the sequence: all have as much to do
    allgather   zigzag's chunks, and everybody's keys and values are gathered in one go
    ulysses     all-to-all: from a part of the sequence with all heads to all of it with a part of the heads

In the first three nobody computes a whole row of scores at once. What softmax makes of two blocks of keys is
merged by the blocks' log-sum-exp, which a flash kernel returns beside its output.
"""
import math

import torch
import torch.distributed as dist

from ledger import formulas

aten = torch.ops.aten


def local_positions(mesh, args):
    """The places in the sequence that are this rank's."""
    rank, every = mesh.get_local_rank("cp"), torch.arange(args.seq_len)
    if args.cp_mode in ("ring", "ulysses"):
        return every.chunk(args.cp)[rank]
    chunks = every.chunk(2 * args.cp)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def context_parallel(model, mesh, args):
    """Replaces the core of attention, q, k, v -> output, in all layers."""
    if args.cp == 1:
        return
    group = mesh.get_group("cp")
    for layer in model.model.layers.values():
        attention = layer.self_attn
        inner_attention = ulysses(attention.inner_attention, group) if args.cp_mode == "ulysses" else in_blocks(args.cp_mode, group)
        attention.inner_attention = torch.compiler.disable(inner_attention)


# ---------------------------------------------------------------------------------- one block: a flash kernel
def flash(q, k, v, causal):                                                    # [batch, heads, seq, head_dim]
    """Attention, and the log of the sum of the exponentials of each query's scores, [batch, heads, seq]."""
    kernel = aten._scaled_dot_product_flash_attention
    if not q.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, causal)[:2]


def flash_backward(grad_out, q, k, v, out, lse, causal):
    if not q.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad_out, q, k, v, out, lse, 0.0, causal)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)                   # dropout's random state
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused)


def update_out_and_lse(out, lse, block_out, block_lse):
    """softmax over two blocks of keys from that over each: a mean, weighted by their sums of exponentials."""
    both = torch.logaddexp(lse, block_lse)
    out.mul_((lse - both).exp().unsqueeze(-1)).add_(block_out * (block_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)


# ------------------------------------------------------------------------------------ ring, zigzag, allgather
def visible(rank, source, mode, length):
    """Which queries of rank see which keys of source, two slices; whether up to the diagonal. Or None."""
    every, early, late = slice(None), slice(0, length // 2), slice(length // 2, None)
    if source == rank:
        return every, every, True
    if mode == "ring":
        return (every, every, False) if source < rank else None
    return (every, early, False) if source < rank else (late, every, False)


def add_block(out, lse, q, kv, block):
    if block:
        rows, columns, causal = block
        update_out_and_lse(out[:, :, rows], lse[:, :, rows], *flash(q[:, :, rows], *kv[:, :, :, columns], causal))


def block_gradients(grad_out, q, kv, out, lse, block):
    """Given the final output and log-sum-exp, a kernel's gradients of its block are terms of exact sums."""
    if block:
        rows, columns, causal = block
        grad_out, q, out, lse = (t[:, :, rows] for t in (grad_out, q, out, lse))
        return flash_backward(grad_out, q, *kv[:, :, :, columns], out, lse.contiguous(), causal)


def add_gradients(grad_q, grad_kv, grads, block):
    if block:
        rows, columns, _ = block
        grad_q[:, :, rows] += grads[0]
        grad_kv[:, :, :, columns] += torch.stack(grads[1:])


def init_out_and_lse(q):
    """Before the first block, in float32 or better: no output, and the log-sum-exp of no keys."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:-1], -torch.inf, dtype=wide)


# ------------------------------------------------------------------------------------------- ring, zigzag
def ring_send_recv(tensor, group):
    """Starts sending to the next rank; returns a function that waits for what the previous one sends."""
    rank, size = group.rank(), group.size()
    tensor, recv_buffer = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    handles = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, recv_buffer, group=group, group_peer=(rank - 1) % size)])

    def receive():
        for work in handles:
            work.wait()
        return recv_buffer
    return receive


class RingAttention(torch.autograd.Function):
    """Keys and values go round, from rank to rank. In backward their gradients follow, and come home."""

    @staticmethod
    def forward(ctx, q, k, v, mode, group):                                 # [batch, heads, seq/cp, head_dim]
        rank, cp = group.rank(), group.size()
        out, lse = init_out_and_lse(q)
        kv = torch.stack((k, v))
        for hop in range(cp):
            if hop < cp - 1:
                receive = ring_send_recv(kv, group)              # while this rank works with kv
            add_block(out, lse, q, kv, visible(rank, (rank - hop) % cp, mode, q.shape[2]))
            if hop < cp - 1:
                kv = receive()
        out = out.type_as(q)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mode, ctx.group = mode, group
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        rank, cp = ctx.group.rank(), ctx.group.size()
        kv, grad_q = torch.stack((k, v)), torch.zeros_like(q, dtype=lse.dtype)
        receive_grad = lambda: torch.zeros_like(kv, dtype=lse.dtype)               # nobody has added to it
        for hop in range(cp):
            if hop < cp - 1:
                receive = ring_send_recv(kv, ctx.group)
            block = visible(rank, (rank - hop) % cp, ctx.mode, q.shape[2])
            grads = block_gradients(grad_out, q, kv, out, lse, block)
            grad_kv = receive_grad()                      # what ranks before added; it came during the kernel
            add_gradients(grad_q, grad_kv, grads, block)
            receive_grad = ring_send_recv(grad_kv, ctx.group)
            if hop < cp - 1:
                kv = receive()
        grad_k, grad_v = receive_grad().type_as(k)        # once round
        return grad_q.type_as(q), grad_k, grad_v, None, None


# ------------------------------------------------------------------------------------------- allgather
class AllGatherAttention(torch.autograd.Function):
    """Everybody's keys and values at once; in backward their gradients are reduce-scattered."""

    @staticmethod
    def forward(ctx, q, k, v, mode, group):                                 # [batch, heads, seq/cp, head_dim]
        out, lse = init_out_and_lse(q)
        for source, kv in enumerate(gather(k, v, group)):
            add_block(out, lse, q, kv, visible(group.rank(), source, mode, q.shape[2]))
        out = out.type_as(q)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mode, ctx.group = mode, group
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        cp, grad_q = ctx.group.size(), torch.zeros_like(q, dtype=lse.dtype)
        grads = torch.zeros(2 * cp, *k.shape, dtype=lse.dtype, device=k.device)
        for source, (kv, grad_kv) in enumerate(zip(gather(k, v, ctx.group), grads.chunk(cp))):
            block = visible(ctx.group.rank(), source, ctx.mode, q.shape[2])
            add_gradients(grad_q, grad_kv, block_gradients(grad_out, q, kv, out, lse, block), block)
        mine = torch.empty_like(grads[:2])
        dist.reduce_scatter_tensor(mine, grads, group=ctx.group)
        grad_k, grad_v = mine.type_as(k)
        return grad_q.type_as(q), grad_k, grad_v, None, None


def gather(k, v, group):                                    # [2, batch, heads, seq/cp, head_dim] of each rank
    kv = torch.stack((k, v))
    every = kv.new_empty(group.size() * 2, *k.shape)
    dist.all_gather_into_tensor(every, kv, group=group)
    return every.chunk(group.size())


def in_blocks(mode, group):
    attention = AllGatherAttention if mode == "allgather" else RingAttention

    def inner_attention(q, k, v):                                                      # [batch, seq/cp, heads, head_dim]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attention.apply(q, k, v, mode, group).transpose(1, 2)
    return inner_attention


# ------------------------------------------------------------------------------------------- ulysses
class UlyssesAllToAll(torch.autograd.Function):
    """Cuts dimension `cut` over the ranks, joins what comes along `join`; backward the other way."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.cut, ctx.join, ctx.group = cut, join, group
        parts = torch.stack(x.chunk(group.size(), dim=cut))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx, grad):
        return UlyssesAllToAll.apply(grad, ctx.join, ctx.cut, ctx.group), None, None, None


def ulysses(inner_attention, group):
    def whole_sequence(q, k, v):                                            # [batch, seq/cp, heads, head_dim]
        repeats = group.size() // math.gcd(k.shape[2], group.size())               # fewer kv heads than ranks
        k, v = (t.repeat_interleave(repeats, dim=2) for t in (k, v))
        q, k, v = (UlyssesAllToAll.apply(t, 2, 1, group) for t in (q, k, v))       # [batch, seq, heads/cp, head_dim]
        return UlyssesAllToAll.apply(inner_attention(q, k, v), 1, 2, group)
    return whole_sequence


# ------------------------------------------------------------------------------------------- what it sends
def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    if args.cp == 1:
        return []
    group, layers = mesh.get_group("cp"), model.model.layers
    attention = next(iter(layers.values())).self_attn
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp * len(layers)     # through attention
    q, kv = (tokens * len(proj.weight) for proj in (attention.q_proj, attention.k_proj))            # elements
    number, wide = args.dtype.itemsize, torch.promote_types(args.dtype, torch.float32).itemsize
    times = 2 if args.recompute == "none" else 3          # forward and backward, and forward once more
    if args.cp_mode == "ulysses":                         # q, k, v and the output
        kv_heads = len(attention.k_proj.weight) // attention.head_dim
        repeats = args.cp // math.gcd(kv_heads, args.cp)
        return [(group, "all_to_all", times * number * (2 * q + 2 * kv * repeats))]
    if args.cp_mode == "allgather":
        gathered = times * args.cp * 2 * kv * number
        return [(group, "all_gather", gathered), (group, "reduce_scatter", args.cp * 2 * kv * wide)]
    return [(group, "send", times * (args.cp - 1) * 2 * kv * number + args.cp * 2 * kv * wide)]


formulas.append(formula)
