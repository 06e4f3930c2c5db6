"""Context parallelism: each rank of cp has a part of every sequence, and only attention has to see the other parts.

    ring        keys and values travel round a ring of ranks: while a rank works with those of one, the next are under way
    zigzag      the same; but each rank has an early and a late chunk of the sequence, so all have as much to do
    allgather   zigzag's chunks, and everybody's keys and values are gathered in one go
    ulysses     all-to-all: from a part of the sequence with all heads to the whole sequence with a part of the heads

In the first three nobody computes a whole row of scores at once. What softmax makes of two blocks of keys is merged by
the blocks' log-sum-exp, which a flash kernel returns beside its output.
"""
import math

import torch
import torch.distributed as dist

import tensor_parallel

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
        core = layer.self_attn.core
        layer.self_attn.core = torch.compiler.disable(ulysses(core, group) if args.cp_mode == "ulysses" else in_blocks(args.cp_mode, group))


# ------------------------------------------------------------------------------------------- one block: a flash kernel
def flash(q, k, v, causal):                                                        # [batch, heads, seq, head_dim]
    """Attention, and the log of the sum of the exponentials of each query's scores, [batch, heads, seq]."""
    kernel = aten._scaled_dot_product_flash_attention if q.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, causal)[:2]


def flash_backward(grad_out, q, k, v, out, lse, causal):
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, q, k, v, out, lse, 0.0, causal)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)                   # dropout's random state
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused)


def merge(out, lse, block_out, block_lse):
    """softmax over two blocks of keys from that over each: a mean, weighted by their sums of exponentials."""
    both = torch.logaddexp(lse, block_lse)
    out.mul_((lse - both).exp().unsqueeze(-1)).add_(block_out * (block_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)


# ------------------------------------------------------------------------------------------- ring, zigzag, allgather
def visible(rank, source, mode, length):
    """Which queries of rank see which keys of source, as two slices, and whether only up to the diagonal; or None."""
    every, early, late = slice(None), slice(0, length // 2), slice(length // 2, None)
    if source == rank:
        return every, every, True
    if mode == "ring":
        return (every, every, False) if source < rank else None
    return (every, early, False) if source < rank else (late, every, False)


class BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mode, group):                                        # [batch, heads, seq/cp, head_dim]
        wide = torch.promote_types(q.dtype, torch.float32)                         # blocks are added up in float32 or better
        out, lse = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        travel = Gather(group) if mode == "allgather" else Ring(group)
        for source, kv in travel.keys_and_values(torch.stack((k, v))):
            block = visible(group.rank(), source, mode, q.shape[2])
            if block:
                rows, columns, causal = block
                merge(out[:, :, rows], lse[:, :, rows], *flash(q[:, :, rows], *kv[:, :, :, columns], causal))
        out = out.type_as(q)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mode, ctx.group = mode, group
        return out

    @staticmethod
    def backward(ctx, grad_out):
        """Given the final output and log-sum-exp, a kernel's gradients of its block are exact; they only have to be added."""
        q, k, v, out, lse = ctx.saved_tensors
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        travel = Gather(ctx.group) if ctx.mode == "allgather" else Ring(ctx.group)
        for source, kv in travel.keys_and_values(torch.stack((k, v))):
            block = visible(ctx.group.rank(), source, ctx.mode, q.shape[2])
            if block:
                rows, columns, causal = block
                grads = flash_backward(grad_out[:, :, rows], q[:, :, rows], *kv[:, :, :, columns], out[:, :, rows],
                                       lse[:, :, rows].contiguous(), causal)
                grad_q[:, :, rows] += grads[0]
            grad_kv = travel.gradient_of(source, kv, lse.dtype)                    # after the kernel: it was under way meanwhile
            if block:
                grad_kv[:, :, :, columns] += torch.stack(grads[1:])
            travel.added(grad_kv)
        grad_k, grad_v = travel.home().type_as(k)
        return grad_q.type_as(q), grad_k, grad_v, None, None


class Ring:
    """Keys and values go round, from each rank to the next; in backward their gradients follow, and end up at home."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def pass_on(self, tensor):
        """Starts sending to the next rank; returns a function that waits for what the previous one sends."""
        tensor, coming = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        under_way = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.size),
            dist.P2POp(dist.irecv, coming, group=self.group, group_peer=(self.rank - 1) % self.size)])

        def receive():
            for work in under_way:
                work.wait()
            return coming
        return receive

    def keys_and_values(self, kv):
        for hop in range(self.size - 1):
            receive = self.pass_on(kv)
            yield (self.rank - hop) % self.size, kv       # and when the next is asked for:
            kv = receive()
        yield (self.rank + 1) % self.size, kv

    def gradient_of(self, source, kv, dtype):
        """What the ranks before this one have added to it."""
        return torch.zeros_like(kv, dtype=dtype) if source == self.rank else self.coming()

    def added(self, grad_kv):
        self.coming = self.pass_on(grad_kv)

    def home(self):
        return self.coming()


class Gather:
    """Everybody's keys and values at once; in backward their gradients are reduce-scattered."""

    def __init__(self, group):
        self.group, self.grads = group, None

    def keys_and_values(self, kv):                                                 # [2, batch, heads, seq/cp, head_dim]
        every = kv.new_empty(self.group.size() * 2, *kv.shape[1:])
        dist.all_gather_into_tensor(every, kv, group=self.group)
        yield from enumerate(every.chunk(self.group.size()))

    def gradient_of(self, source, kv, dtype):
        if self.grads is None:
            self.grads = kv.new_zeros(self.group.size() * 2, *kv.shape[1:], dtype=dtype)
        return self.grads[2 * source:2 * source + 2]

    def added(self, grad_kv):
        pass

    def home(self):
        mine = torch.empty_like(self.grads[:2])
        dist.reduce_scatter_tensor(mine, self.grads, group=self.group)
        return mine


def in_blocks(mode, group):
    def core(q, k, v):                                                             # [batch, seq/cp, heads, head_dim]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return BlockAttention.apply(q, k, v, mode, group).transpose(1, 2)
    return core


# ------------------------------------------------------------------------------------------- ulysses
class AllToAll(torch.autograd.Function):
    """Cuts dimension `cut` over the ranks and joins what they send along dimension `join`; backward is the way back."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.cut, ctx.join, ctx.group = cut, join, group
        parts = torch.stack(x.chunk(group.size(), dim=cut))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.join, ctx.cut, ctx.group), None, None, None


def ulysses(core, group):
    def whole_sequence(q, k, v):                                                   # [batch, seq/cp, heads, head_dim]
        repeats = group.size() // math.gcd(k.shape[2], group.size())               # fewer kv heads than ranks
        k, v = (t.repeat_interleave(repeats, dim=2) for t in (k, v))
        q, k, v = (AllToAll.apply(t, 2, 1, group) for t in (q, k, v))              # [batch, seq, heads/cp, head_dim]
        return AllToAll.apply(core(q, k, v), 1, 2, group)
    return whole_sequence


# ------------------------------------------------------------------------------------------- what it sends
def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    sent, group = tensor_parallel.formula(model, mesh, args), mesh.get_group("cp")
    attention = next(iter(model.model.layers.values())).self_attn
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp * len(model.model.layers)     # through attention
    q, kv = (tokens * len(proj.weight) for proj in (attention.q_proj, attention.k_proj))               # elements
    number, wide = args.dtype.itemsize, torch.promote_types(args.dtype, torch.float32).itemsize
    times = 2 if args.recompute == "none" else 3          # forward and backward, and forward once more
    if args.cp == 1:
        return sent
    if args.cp_mode == "ulysses":                         # q, k, v and the output
        kv_heads = len(attention.k_proj.weight) // attention.head_dim
        return sent + [(group, "all_to_all", times * number * (2 * q + 2 * kv * (args.cp // math.gcd(kv_heads, args.cp))))]
    if args.cp_mode == "allgather":
        return sent + [(group, "all_gather", times * args.cp * 2 * kv * number), (group, "reduce_scatter", args.cp * 2 * kv * wide)]
    return sent + [(group, "send", times * (args.cp - 1) * 2 * kv * number + args.cp * 2 * kv * wide)]
