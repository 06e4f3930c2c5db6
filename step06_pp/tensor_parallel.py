"""Tensor and sequence parallelism: each rank of tp has a part of every matrix, and does its part of every product.

Attention is cut by heads, the MLP by its inner dimension, embedding and head by the vocabulary. Inside such a region a
rank works alone, on the whole sequence. At its borders the ranks talk, and --sp only changes what they say:

                     entering a region, f                leaving it, g
    --sp off         identity   / all-reduce             all-reduce     / identity          (forward / backward)
    --sp on          all-gather / reduce-scatter         reduce-scatter / all-gather

f and g are conjugate: what the one does forward the other does backward. With --sp on a rank has, outside the regions,
one part of the sequence: [batch, seq/tp, hidden].
"""
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zero


# ------------------------------------------------------------------------------------------- what is said at the borders
# Each starts a collective and returns a function that waits for its result, so `gather(x, group)()` does not overlap with
# anything. What torch.compile compiles begins and ends at these borders: when a collective starts is decided here.

def identity(x, group):
    return lambda: x.view_as(x)


def all_reduce(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(x, group=group, async_op=True)

    def result():
        work.wait()
        return x
    return result


def all_gather(x, group):                                                          # [batch, seq/tp, hidden]
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    work = dist.all_gather_into_tensor(parts, x.contiguous(), group=group, async_op=True)

    def result():
        work.wait()
        return parts.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)           # [batch, seq, hidden]
    return result


def reduce_scatter(x, group):                                                      # [batch, seq, hidden]
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1)       # [tp * batch, seq/tp, hidden]
    mine = torch.empty_like(parts[:len(x)])
    work = dist.reduce_scatter_tensor(mine, parts.contiguous(), group=group, async_op=True)

    def result():
        work.wait()
        return mine                                                                # [batch, seq/tp, hidden]
    return result


class Enter(torch.autograd.Function):
    """f: gather forward, reduce backward"""

    @staticmethod
    def forward(ctx, x, gather, reduce, group):
        ctx.reduce, ctx.group = reduce, group
        return gather(x, group)()

    @staticmethod
    def backward(ctx, grad):
        return ctx.reduce(grad, ctx.group)(), None, None, None


class Leave(torch.autograd.Function):
    """g: reduce forward, gather backward"""

    @staticmethod
    def forward(ctx, x, gather, reduce, group):
        ctx.gather, ctx.group = gather, group
        return reduce(x, group)()

    @staticmethod
    def backward(ctx, grad):
        return ctx.gather(grad, ctx.group)(), None, None, None


class EnterLinears(torch.autograd.Function):
    """f and the products that come first in the region, in one, so as to keep the input as it came and not as gathered.

    Backward gathers it once more, while it computes the input's gradient; and reduces that, while it computes the weights'.
    """

    @staticmethod
    def forward(ctx, x, gather, reduce, group, *weights):
        ctx.gather, ctx.reduce, ctx.group = gather, reduce, group
        ctx.save_for_backward(x, *weights)
        x = gather(x, group)()
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        gathered = ctx.gather(x, ctx.group)
        reduced = ctx.reduce(sum(grad @ weight for grad, weight in zip(grads, weights)), ctx.group)
        x = gathered().flatten(0, 1)                                               # [batch * seq, hidden]
        grad_weights = [grad.flatten(0, 1).T @ x for grad in grads]
        return reduced(), None, None, None, *grad_weights


# ------------------------------------------------------------------------------------------- put around the model
def tensor_parallel(model, config, mesh, args):
    """Cuts a model that is still on the meta device, and puts hooks at the borders of its regions."""
    cut_parameters(model, config, mesh, args)
    if args.tp == 1:
        return
    group, decoder = mesh.get_group("tp"), model.model
    gather, reduce = (all_gather, reduce_scatter) if args.sp == "on" else (identity, all_reduce)
    border = gather, reduce, group

    @torch.compiler.disable
    def leave(module, inputs, output):
        return Leave.apply(output, *border)

    for layer in decoder.layers.values():
        attention, mlp = layer.self_attn, layer.mlp
        enter_linears(attention, (attention.q_proj, attention.k_proj, attention.v_proj), border)
        enter_linears(mlp, (mlp.gate_proj, mlp.up_proj), border)
        attention.register_forward_hook(leave)
        mlp.register_forward_hook(leave)
    decoder.embed_tokens.forward = vocabulary_parallel_embedding(decoder.embed_tokens, group)
    decoder.embed_tokens.register_forward_hook(leave)
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (Enter.apply(inputs[0], *border), *inputs[1:]))
    model.lm_head.cross_entropy = vocabulary_parallel_cross_entropy(group)


def enter_linears(region, linears, border):
    """As the region is entered the products of its first linears are made; each of them then only hands out its own."""
    products, region.border = {}, border
    region.product = lambda x, *weights: EnterLinears.apply(x, *border, *weights)

    @torch.compiler.disable
    def enter(module, inputs):
        weights = [linear.weight for linear in linears]
        products.update(enumerate(region.product(inputs[0], *weights)))
    region.register_forward_pre_hook(enter)
    for i, linear in enumerate(linears):
        linear.forward = lambda x, i=i: products.pop(i)   # of x, the part of the region's input, it is made already


def vocabulary_parallel_embedding(embedding, group):
    def forward(tokens):
        tokens = tokens - group.rank() * len(embedding.weight)
        mine = (tokens >= 0) & (tokens < len(embedding.weight))
        return F.embedding(tokens.where(mine, 0), embedding.weight) * mine.unsqueeze(-1)      # zero, but for one rank
    return forward


def vocabulary_parallel_cross_entropy(group):
    def cross_entropy(logits, targets):                                            # [tokens, vocab/tp], [tokens]
        """As in loss.py. On the wire are three numbers per token: the largest logit, the sum, and the target's logit."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target = (targets - group.rank() * logits.shape[1]).unsqueeze(-1)
        mine = (target >= 0) & (target < logits.shape[1])
        target = target.where(mine, 0)
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits = logits - largest
        sums = torch.cat((logits.exp().sum(-1, keepdim=True), logits.gather(-1, target) * mine), dim=-1)
        dist.all_reduce(sums, group=group)                                         # [tokens, 2]
        log_sum, target_logit = sums[:, :1].log(), sums[:, 1:]
        gradient = (logits - log_sum).exp_()
        return (log_sum - target_logit).sum(), gradient.scatter_add_(-1, target, -mine.type_as(gradient))
    return cross_entropy


# ------------------------------------------------------------------------------------------- the parameters
class Shard(NamedTuple):
    """A parameter is part `index` of `parts`, cut along its dimension `dim` over the ranks of a group."""
    over: dist.ProcessGroup
    dim: int
    parts: int
    index: int


def cut_parameters(model, config, mesh, args):
    """Leaves each rank its part, and notes on it what loading, saving and the gradient norm have to know."""
    kv_parts = min(args.tp, config.num_key_value_heads)   # fewer heads than ranks: neighbours have the same one
    kv_group = dist.new_subgroups(args.tp // kv_parts, group_desc="kv_heads")[0] if kv_parts < args.tp else None
    rank, group = mesh.get_local_rank("tp"), mesh.get_group("tp")
    for name, param in list(model.named_parameters()):
        module, leaf = name.rsplit(".", 1)
        kind, dim, parts, sum_over = module.split(".")[-1], 0, args.tp, None       # column-parallel, if none of the below
        if kind in ("o_proj", "down_proj"):
            dim = 1                                       # row-parallel
        elif kind in ("k_proj", "v_proj"):
            parts, sum_over = kv_parts, kv_group
        elif kind.endswith("norm"):
            parts, sum_over = 1, group if args.sp == "on" and args.tp > 1 else None
        param = nn.Parameter(param.chunk(parts, dim)[0])
        param.shards = [Shard(group, dim, parts, rank * parts // args.tp)]          # 4 parts on 8 ranks: 0 0 1 1 2 2 3 3
        param.replicas = dist.get_world_size() // parts
        param.sum_over = sum_over                         # these ranks have a share of the gradient each
        setattr(model.get_submodule(module), leaf, param)


def sum_replicas(params):
    """Once a step: a norm saw its rank's part of the sequence only, a shared key-value head its rank's queries."""
    for param in params:
        if param.sum_over:
            dist.all_reduce(param.main_grad, group=param.sum_over)


def my_part(param):
    """The index of this rank's part in the whole parameter."""
    index = [slice(None)] * param.dim()
    for shard in param.shards:
        size = param.shape[shard.dim]
        index[shard.dim] = slice(shard.index * size, (shard.index + 1) * size)
    return tuple(index)


def whole_shape(param):
    shape = list(param.shape)
    for shard in param.shards:
        shape[shard.dim] *= shard.parts
    return shape


def whole(param):
    """A parameter's value, for saving: the opposite of my_part."""
    value = zero.whole(param)
    for shard in param.shards:
        parts = [torch.empty_like(value) for _ in range(shard.over.size())]
        dist.all_gather(parts, value.contiguous(), group=shard.over)
        value = torch.cat(parts[::len(parts) // shard.parts], dim=shard.dim)       # of neighbours with the same part, one
    return value


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    sent, group = zero.formula(model, mesh, args), mesh.get_group("tp")
    if args.tp == 1:
        return sent
    layers, tokens = len(model.model.layers), args.global_batch_size // args.dp * args.seq_len // args.cp
    stream = tokens * model.model.config.hidden_size * args.dtype.itemsize               # [batch, seq, hidden]
    first, last = model.model.embed_tokens is not None, model.lm_head is not None
    sent.append((group, "all_reduce", 3 * last * tokens * torch.promote_types(args.dtype, torch.float32).itemsize))
    again = args.recompute != "none"                      # forward, but for the layer's end
    if args.sp == "off":
        sent.append((group, "all_reduce", ((4 + again) * layers + first + last) * stream))
    else:                                                 # a layer's 2 regions: enter, leave, twice each, and gather again
        sent.append((group, "all_gather", ((6 + 2 * again) * layers + first + last) * stream))
        sent.append((group, "reduce_scatter", ((4 + again) * layers + first + last) * stream))
    held = list(model.parameters())
    if args.zero:
        held = [piece for unit in dict.fromkeys(param.unit for param in held) for piece in unit.pieces()]
    sent += [(param.sum_over, "all_reduce", param.main_grad.nbytes) for param in held if param.sum_over]
    return sent
