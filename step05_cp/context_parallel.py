"""Context parallelism: shard every sequence over the ranks of cp. Only attention needs other ranks' tokens.

A query needs the keys and values of all earlier tokens, and many of these are on other ranks. --cp_mode
chooses how queries and keys come to the same rank:

    ring        Each rank passes keys and values on to the next rank of a ring. While they travel, the rank
                computes with those that it has (Ring Attention, arXiv 2310.01889).
    zigzag      The same, but each rank has an early and a late chunk of the sequence. Late tokens see more
                keys than early ones, so this gives all ranks equal work (zhuzilin/ring-flash-attention).
    allgather   Ranks have the chunks of zigzag, and one all-gather brings each rank the keys and values of
                all ranks (Llama 3, arXiv 2407.21783).
    ulysses     All-to-alls of q, k and v give each rank the whole sequence, but only some of the heads. After
                attention, one more restores the parts of the sequence (DeepSpeed Ulysses, arXiv 2309.14509).

In the first three modes a rank computes attention block by block. A block is a rank's queries with the keys
of one rank. For each query, a flash kernel returns the output of the block and the log-sum-exp of its scores,
the lse. From these two, a rank computes the softmax over all keys, though it never holds all scores at once:

    total_lse = log(exp(lse) + exp(block_lse))
    out       = exp(lse - total_lse) * out + exp(block_lse - total_lse) * block_out

All ranks of cp hold the same weights, so their gradients are summed over dp and cp together (mesh.data_mesh).
"""
import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from config import at_least, must_be_multiple, must_divide
from messages import fail

aten = torch.ops.aten


def local_positions(mesh: DeviceMesh, args):
    """Return the positions in the sequence of the tokens that this rank has."""
    rank, positions = mesh.get_local_rank("cp"), torch.arange(args.seq_len)
    if args.cp_mode in ("ring", "ulysses"):
        return positions.chunk(args.cp)[rank]
    chunks = positions.chunk(2 * args.cp)
    return torch.cat((chunks[rank], chunks[-1 - rank]))   # one from each end of the sequence


def apply(model, mesh: DeviceMesh, args):
    """Replace the inner attention, which makes the output from q, k and v, in all layers."""
    if args.cp == 1:
        return
    group = mesh.get_group("cp")
    for layer in model.model.layers.values():
        attention = layer.self_attn
        if args.cp_mode == "ulysses":
            inner_attention = ulysses(attention.inner_attention, group)
        else:
            inner_attention = blockwise_attention(args.cp_mode, group)
        # torch.compile skips this function, so each transfer starts exactly where the code below starts it
        attention.inner_attention = torch.compiler.disable(inner_attention)


# ---------------------------------------------------------------------------------- one block: a flash kernel
def flash(q, k, v, causal):                                              # [batch, heads, seq, head_dim]
    """Compute attention. Return the output, and the lse of each query's scores, [batch, heads, seq].

    The kernels are PyTorch's. (--attention flash uses another, from the package flash-attn.)
    """
    if not has_flash_kernel(q):
        return attention_by_formula(q, k, v, causal)
    # F.scaled_dot_product_attention does not return the lse, so this function calls the kernel beneath it
    kernel = aten._scaled_dot_product_flash_attention
    if not q.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, causal)[:2]               # 0.0: no dropout


def flash_backward(grad_out, q, k, v, out, lse, causal):
    """Return the gradients of q, k and v."""
    if not has_flash_kernel(q):
        return attention_by_formula_backward(grad_out, q, k, v, out, lse, causal)
    if not q.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad_out, q, k, v, out, lse, 0.0, causal)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)     # dropout's random state
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused)


def has_flash_kernel(q):
    return not q.is_cuda or q.dtype == torch.bfloat16 and q.shape[-1] % 8 == 0


# The next three functions compute the same from the formula, for a dtype or a head size for which a GPU has
# no flash kernel. They store all scores of a block. With P the probabilities, S the scores and O the output,
# the gradient of softmax is dS = P * (dO V^T - rowsum(dO * O)).
def scores_of(q, k, causal):
    """Return the scores, [batch, kv heads, query heads per kv head, queries, keys]."""
    scores = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf) if causal else scores


def attention_by_formula(q, k, v, causal):
    scores = scores_of(q, k, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2)


def attention_by_formula_backward(grad_out, q, k, v, out, lse, causal):
    probs = (scores_of(q, k, causal) - lse.unflatten(1, (k.shape[1], -1)).unsqueeze(-1)).exp()
    grad_out, q, out = (t.unflatten(1, (k.shape[1], -1)) for t in (grad_out, q, out))
    grad_scores = probs * (grad_out @ v.unsqueeze(2).mT - (grad_out * out).sum(-1, keepdim=True))
    grad_scores /= math.sqrt(q.shape[-1])
    grad_q = (grad_scores @ k.unsqueeze(2)).flatten(1, 2)
    grad_k, grad_v = grad_scores.mT @ q, probs.mT @ grad_out
    return grad_q, grad_k.sum(2), grad_v.sum(2)           # query heads that share a kv head add up


# ------------------------------------------------------------------------------------ ring, zigzag, allgather
def init_out_and_lse(q):
    """Return the output and the log-sum-exp of no keys: zero, and the logarithm of zero."""
    acc_dtype = torch.promote_types(q.dtype, torch.float32)    # bfloat16 would round after every block
    return torch.zeros_like(q, dtype=acc_dtype), q.new_full(q.shape[:-1], -torch.inf, dtype=acc_dtype)


def update_out_and_lse(out, lse, block_out, block_lse):
    """Extend the softmax in out and lse, in place, by the keys of one more block.

    The new output is the mean of the two outputs, weighted by their sums of exponentials.
    """
    total_lse = torch.logaddexp(lse, block_lse)           # adding exponentials themselves could overflow
    out.mul_((lse - total_lse).exp().unsqueeze(-1))
    out.add_(block_out * (block_lse - total_lse).exp().unsqueeze(-1))
    lse.copy_(total_lse)


def visible(rank, source, mode, length):
    """Return which queries of rank see which keys of source: two slices, and whether the mask is causal.

    Return None if no query sees any key. Both ranks have `length` tokens, in the order of their positions, so
    for a rank's own keys an ordinary causal mask is right, even if its tokens are two chunks.
    """
    everything, early, late = slice(None), slice(0, length // 2), slice(length // 2, None)
    if source == rank:
        return everything, everything, True
    if mode == "ring":
        return (everything, everything, False) if source < rank else None
    # If source < rank, the early chunk of source lies before both chunks of rank, and its late chunk after
    # both. If source > rank, both chunks of source lie between the two chunks of rank.
    return (everything, early, False) if source < rank else (late, everything, False)


def add_block(out, lse, q, kv, block):
    """Compute a block, if `visible` returned one, and add it to out and lse in place."""
    if block:
        queries, keys, causal = block
        block_out, block_lse = flash(q[:, :, queries], *kv[:, :, :, keys], causal)
        update_out_and_lse(out[:, :, queries], lse[:, :, queries], block_out, block_lse)


def block_gradients(grad_out, q, kv, out, lse, block):
    """Return what a block, if there is one, adds to the gradients of q, k and v.

    The kernel computes each probability again, as exp(score - lse), and the backward of softmax needs the sum
    of grad_out * out for each query. Here out and lse are those of all keys, so these numbers are exact, and
    the results of the blocks add up to the gradients.
    """
    if block:
        queries, keys, causal = block
        grad_out, q, out, lse = (t[:, :, queries] for t in (grad_out, q, out, lse))
        # contiguous, because the CUDA kernel ignores the strides that a slice of lse has
        return flash_backward(grad_out, q, *kv[:, :, :, keys], out, lse.contiguous(), causal)


def add_gradients(grad_q, grad_kv, grads, block):
    """Add the result of block_gradients to the elements that the block has used."""
    if block:
        queries, keys, _ = block
        grad_q[:, :, queries] += grads[0]
        grad_kv[:, :, :, keys] += torch.stack(grads[1:])


# ------------------------------------------------------------------------------------------- ring, zigzag
def ring_send_recv(tensor, group: ProcessGroup):
    """Start to send a tensor to the next rank, and to receive the previous rank's.

    Return a function that waits for both and returns the tensor received. All ranks of the group must call
    this.
    """
    rank, size = group.rank(), group.size()
    tensor, recv_buffer = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    # in one batch: otherwise NCCL could run the send first on every rank, and no rank would ever receive
    handles = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, recv_buffer, group=group, group_peer=(rank - 1) % size)])

    def receive():
        for handle in handles:
            handle.wait()
        return recv_buffer
    return receive


class RingAttention(torch.autograd.Function):
    """Attention while keys and values go around the ring. In backward their gradients go with them."""

    @staticmethod
    def forward(ctx, q, k, v, mode, group: ProcessGroup):                # [batch, heads, seq/cp, head_dim]
        rank, cp = group.rank(), group.size()
        out, lse = init_out_and_lse(q)
        kv = torch.stack((k, v))                          # one tensor, so that a hop is one transfer
        for hop in range(cp):
            if hop < cp - 1:                              # after the last hop no rank needs kv
                receive_kv = ring_send_recv(kv, group)    # kv travels while this rank computes with it
            source = (rank - hop) % cp                    # the rank whose keys and values are here now
            add_block(out, lse, q, kv, visible(rank, source, mode, q.shape[2]))
            if hop < cp - 1:
                kv = receive_kv()
        out = out.type_as(q)
        ctx.save_for_backward(q, k, v, out, lse)          # own k and v suffice: backward sends kv again
        ctx.mode, ctx.group = mode, group
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        rank, cp = ctx.group.rank(), ctx.group.size()
        kv, grad_q, receive_grad = torch.stack((k, v)), torch.zeros_like(q, dtype=lse.dtype), None
        for hop in range(cp):
            if hop < cp - 1:
                receive_kv = ring_send_recv(kv, ctx.group)
            block = visible(rank, (rank - hop) % cp, ctx.mode, q.shape[2])
            grads = block_gradients(grad_out, q, kv, out, lse, block)
            # Every rank adds to the gradient of kv and passes it on. This rank waits for it only here, so the
            # gradient has traveled while the kernel computed. At hop 0 no rank has added to it yet.
            grad_kv = receive_grad() if receive_grad else torch.zeros_like(kv, dtype=lse.dtype)
            add_gradients(grad_q, grad_kv, grads, block)
            receive_grad = ring_send_recv(grad_kv, ctx.group)
            if hop < cp - 1:
                kv = receive_kv()
        # kv made cp - 1 transfers. The gradient makes one more, which brings it to the rank that owns kv.
        grad_k, grad_v = receive_grad().type_as(k)
        return grad_q.type_as(q), grad_k, grad_v, None, None


# ------------------------------------------------------------------------------------------- allgather
def all_gather_kv(k, v, group: ProcessGroup):
    """Return the keys and values of each rank, in rank order. All ranks of the group must call this."""
    kv = torch.stack((k, v))                                             # [2, batch, heads, seq/cp, head_dim]
    all_kv = kv.new_empty(group.size() * 2, *k.shape)
    dist.all_gather_into_tensor(all_kv, kv, group=group)
    return all_kv.chunk(group.size())


class AllGatherAttention(torch.autograd.Function):
    """Attention with gathered keys and values. Backward reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx, q, k, v, mode, group: ProcessGroup):                # [batch, heads, seq/cp, head_dim]
        out, lse = init_out_and_lse(q)
        for source, kv in enumerate(all_gather_kv(k, v, group)):
            add_block(out, lse, q, kv, visible(group.rank(), source, mode, q.shape[2]))
        out = out.type_as(q)
        ctx.save_for_backward(q, k, v, out, lse)          # own k and v suffice: backward gathers again
        ctx.mode, ctx.group = mode, group
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        cp, grad_q = ctx.group.size(), torch.zeros_like(q, dtype=lse.dtype)
        all_grad_kv = torch.zeros(2 * cp, *k.shape, dtype=lse.dtype, device=k.device)
        gathered = zip(all_gather_kv(k, v, ctx.group), all_grad_kv.chunk(cp))
        for source, (kv, grad_kv) in enumerate(gathered):
            block = visible(ctx.group.rank(), source, ctx.mode, q.shape[2])
            add_gradients(grad_q, grad_kv, block_gradients(grad_out, q, kv, out, lse, block), block)
        local_grad_kv = torch.empty_like(all_grad_kv[:2])
        dist.reduce_scatter_tensor(local_grad_kv, all_grad_kv, group=ctx.group)
        grad_k, grad_v = local_grad_kv.type_as(k)
        return grad_q.type_as(q), grad_k, grad_v, None, None


def blockwise_attention(mode, group: ProcessGroup):
    """Return the inner attention for the modes ring, zigzag and allgather."""
    function = AllGatherAttention if mode == "allgather" else RingAttention

    def inner_attention(q, k, v):                                        # [batch, seq/cp, heads, head_dim]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return function.apply(q, k, v, mode, group).transpose(1, 2)
    return inner_attention


# ------------------------------------------------------------------------------------------- ulysses
class UlyssesAllToAll(torch.autograd.Function):
    """An all-to-all that scatters one dimension over the ranks and gathers another. Backward swaps them."""

    @staticmethod
    def forward(ctx, x, scatter_dim, gather_dim, group: ProcessGroup):
        ctx.scatter_dim, ctx.gather_dim, ctx.group = scatter_dim, gather_dim, group
        send_buffer = torch.stack(x.chunk(group.size(), dim=scatter_dim))     # entry i goes to rank i
        send_buffer = send_buffer.contiguous()            # stack may keep strides that NCCL refuses
        recv_buffer = torch.empty_like(send_buffer)                           # entry i comes from rank i
        dist.all_to_all_single(recv_buffer, send_buffer, group=group)
        return torch.cat(recv_buffer.unbind(), dim=gather_dim)

    @staticmethod
    def backward(ctx, grad):
        return UlyssesAllToAll.apply(grad, ctx.gather_dim, ctx.scatter_dim, ctx.group), None, None, None


def ulysses(inner_attention, group: ProcessGroup):
    """Return an attention that runs `inner_attention` on whole sequences, with this rank's heads."""
    def ulysses_attention(q, k, v):                                      # [batch, seq/cp, heads, head_dim]
        # If the number of kv heads is not a multiple of cp, repeat each until it is.
        repeats = group.size() // math.gcd(k.shape[2], group.size())
        k, v = (t.repeat_interleave(repeats, dim=2) for t in (k, v))
        q, k, v = (UlyssesAllToAll.apply(t, 2, 1, group) for t in (q, k, v))
        out = inner_attention(q, k, v)                                   # [batch, seq, heads/cp, head_dim]
        return UlyssesAllToAll.apply(out, 1, 2, group)
    return ulysses_attention


# ------------------------------------- config.py calls flags, defaults, check; ledger.py calls traffic
def flags(add):
    add("--cp", type=at_least(1), default=1,
        help="context-parallel ranks; each gets a part of every sequence")
    add("--cp_mode", choices=["zigzag", "ring", "allgather", "ulysses"], default="zigzag",
        help="how attention reaches the keys and values of the other parts")


def defaults(args):
    args.cp_mode = args.cp_mode if args.cp > 1 else "ring"             # ring needs only one chunk per rank


def check(args, config):
    cp, heads = args.cp, config.num_attention_heads // args.tp
    chunks = cp * (2 if args.cp_mode in ("zigzag", "allgather") else 1)            # an early and a late one
    needed = math.lcm(chunks, cp * args.tp if args.sp == "on" else 1)
    why = f"cp {cp} with --cp_mode {args.cp_mode}" + f" and tp {args.tp} with --sp on" * (needed > chunks)
    must_be_multiple("seq_len", args.seq_len, needed, f"{needed}, because of {why}")
    if args.cp_mode == "ulysses":
        must_divide("cp", cp, "the heads that --cp_mode ulysses splits, "
                f"num_attention_heads {config.num_attention_heads} / tp {args.tp} =", heads)
    elif cp > 1 and args.attention == "flash":
        fail(f"--attention flash: --cp_mode {args.cp_mode} has its own kernels; use --attention sdpa or "
             "--cp_mode ulysses")


def traffic(model, mesh, args):
    if args.cp == 1:
        return []
    group, layers = mesh.get_group("cp"), model.model.layers
    attention = next(iter(layers.values())).self_attn
    # each token of this rank goes through the attention of every layer
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp * len(layers)
    # number of elements in all queries, and in all keys; outputs and values have as many
    q, kv = (tokens * len(proj.weight) for proj in (attention.q_proj, attention.k_proj))
    itemsize = args.dtype.itemsize
    acc_itemsize = torch.promote_types(args.dtype, torch.float32).itemsize     # gradients are summed in this
    num_passes = 2 if args.recompute == "none" else 3     # forward, backward; recomputing runs forward again
    if args.cp_mode == "ulysses":
        # each pass exchanges q, k, v and the output, or their gradients
        kv_heads = len(attention.k_proj.weight) // attention.head_dim
        repeats = args.cp // math.gcd(kv_heads, args.cp)  # each kv head is sent this many times
        return [(group, "all_to_all", num_passes * itemsize * (2 * q + 2 * kv * repeats))]
    if args.cp_mode == "allgather":
        # each pass gathers keys and values; backward also reduce-scatters their gradients
        gathered = num_passes * args.cp * 2 * kv * itemsize
        return [(group, "all_gather", gathered), (group, "reduce_scatter", args.cp * 2 * kv * acc_itemsize)]
    # ring, zigzag: each pass sends keys and values cp - 1 times, and backward sends their gradients cp times
    sent, grads_sent = num_passes * (args.cp - 1) * 2 * kv * itemsize, args.cp * 2 * kv * acc_itemsize
    return [(group, "send", sent + grads_sent)]
