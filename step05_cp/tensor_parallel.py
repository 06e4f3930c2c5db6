"""Tensor and sequence parallelism: each rank of tp has a part of every matrix, and does its part of every
product.

    in the model                              becomes                 of its weight a rank has   and makes
    q_proj k_proj v_proj, gate_proj up_proj   ColumnParallelLinear    some rows, dimension 0     some outputs
    o_proj, down_proj                         RowParallelLinear       some columns, dimension 1  terms of sums
    embed_tokens                              VocabParallelEmbedding  some rows, dimension 0     some tokens
    lm_head                                   VocabParallelHead       some rows, dimension 0     some logits
    the norms                                 stay                    all

(torch keeps the weight of a linear as [outputs, inputs]; the field speaks of columns because on paper it is x
@ W.) Attention is cut by heads, the MLP by its inner dimension. Inside such a region, from a column-parallel
to a row-parallel linear, a rank works alone, on the whole sequence. At its borders the ranks communicate, and
--sp only changes how:

                                      entering a region, f              leaving it, g
    --sp off     identity   / all-reduce           all-reduce     / identity        (forward / backward)
    --sp on      all-gather / reduce-scatter       reduce-scatter / all-gather

f and g are conjugate: what the one does forward the other does backward. With --sp on a rank has, outside the
regions, one part of the sequence: [batch, seq/tp, hidden].
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ledger import formulas
from loss import LMHead
from model import MLP, Attention
from shards import Shard


# ------------------------------------------------------------------------------------ at the borders: f and g
# Each starts a collective and returns a function that waits for its result, so `gather(x, group)()` does not
# overlap with anything. What torch.compile compiles begins and ends at these borders: when a collective
# starts is decided here.

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
        return parts.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)     # [batch, seq, hidden]
    return result


def reduce_scatter(x, group):                                                      # [batch, seq, hidden]
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1)    # [tp * batch, seq/tp, hidden]
    local_mask = torch.empty_like(parts[:len(x)])
    work = dist.reduce_scatter_tensor(local_mask, parts.contiguous(), group=group, async_op=True)

    def result():
        work.wait()
        return local_mask                                                                # [batch, seq/tp, hidden]
    return result


class EnterRegion(torch.autograd.Function):
    """f: gather forward, reduce backward"""

    @staticmethod
    def forward(ctx, x, gather, reduce, group):
        ctx.reduce, ctx.group = reduce, group
        return gather(x, group)()

    @staticmethod
    def backward(ctx, grad):
        return ctx.reduce(grad, ctx.group)(), None, None, None


class LeaveRegion(torch.autograd.Function):
    """g: reduce forward, gather backward"""

    @staticmethod
    def forward(ctx, x, gather, reduce, group):
        ctx.gather, ctx.group = gather, group
        return reduce(x, group)()

    @staticmethod
    def backward(ctx, grad):
        return ctx.gather(grad, ctx.group)(), None, None, None


enter_region = torch.compiler.disable(lambda x, comm: EnterRegion.apply(x, *comm))    # a border: gather, reduce, group
leave_region = torch.compiler.disable(lambda x, comm: LeaveRegion.apply(x, *comm))


# ------------------------------------------------------------------------------------------- the modules
class ColumnParallelLinear(nn.Linear):
    def __init__(self, full, num_shards, comm):
        super().__init__(full.in_features, full.out_features // num_shards, bias=False)
        self.comm = comm

    def forward(self, x):                       # (`project_together` does it for several at once)
        return F.linear(enter_region(x, self.comm), self.weight)


class RowParallelLinear(nn.Linear):
    def __init__(self, full, num_shards, comm):
        super().__init__(full.in_features // num_shards, full.out_features, bias=False)
        self.comm = comm

    def forward(self, x):
        return leave_region(F.linear(x, self.weight), self.comm)


class VocabParallelEmbedding(nn.Embedding):
    def __init__(self, full, num_shards, comm):
        super().__init__(full.num_embeddings // num_shards, full.embedding_dim)
        self.comm = comm

    def forward(self, tokens):
        _, _, group = self.comm
        tokens = tokens - group.rank() * len(self.weight)
        local_mask = (tokens >= 0) & (tokens < len(self.weight))
        vectors = F.embedding(tokens.where(local_mask, 0), self.weight)
        vectors = vectors * local_mask.unsqueeze(-1)            # zero, but for one rank
        return leave_region(vectors, self.comm)


class VocabParallelHead(LMHead):
    def __init__(self, full, num_shards, comm):
        super().__init__(full.in_features, full.out_features // num_shards)
        _, _, group = self.comm = comm
        self.cross_entropy = vocabulary_parallel_cross_entropy(group)

    def forward(self, hidden, targets=None):
        return super().forward(enter_region(hidden, self.comm), targets)


def vocabulary_parallel_cross_entropy(group):
    def cross_entropy(logits, targets):                                         # [tokens, vocab/tp], [tokens]
        """As in loss.py. On the wire, of each token: the largest logit, the sum, and the target's logit."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target = (targets - group.rank() * logits.shape[1]).unsqueeze(-1)
        local_mask = (target >= 0) & (target < logits.shape[1])
        target = target.where(local_mask, 0)
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits = logits - largest
        sums = torch.cat((logits.exp().sum(-1, keepdim=True), logits.gather(-1, target) * local_mask), dim=-1)
        dist.all_reduce(sums, group=group)                                         # [tokens, 2]
        log_sum, target_logit = sums[:, :1].log(), sums[:, 1:]
        gradient = (logits - log_sum).exp_()
        return (log_sum - target_logit).sum(), gradient.scatter_add_(-1, target, -local_mask.type_as(gradient))
    return cross_entropy


# --------------------------------------------------------------------------- exchanged for those of the model
PARALLEL = {                                              # and the dimension along which the weight is cut
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), (ColumnParallelLinear, 0)),
    **dict.fromkeys(("o_proj", "down_proj"), (RowParallelLinear, 1)),
    "embed_tokens": (VocabParallelEmbedding, 0), "lm_head": (VocabParallelHead, 0)}


def tensor_parallel(model, config, mesh, args):
    """Cuts a model that is still on the meta device, and notes on every parameter which part a rank has."""
    if args.tp == 1:
        return
    group, rank, comm = mesh.get_group("tp"), mesh.get_local_rank("tp"), make_comm(mesh, args)
    kv_parts, kv_group = min(args.tp, config.num_key_value_heads), None
    if kv_parts < args.tp:                                # fewer heads than ranks: neighbours share one
        kv_group, _ = dist.new_subgroups(args.tp // kv_parts, group_desc="kv_heads")
    for name, module in list(model.named_modules()):
        kind = name.split(".")[-1]
        if kind in PARALLEL:
            parallel, dim = PARALLEL[kind]
            num_shards = kv_parts if kind in ("k_proj", "v_proj") else args.tp
            placement = module.weight.placement
            part = rank * num_shards // args.tp                # 4 parts on 8 ranks: 0 0 1 1 2 2 3 3
            placement.shards.append(Shard(group, dim, num_shards, part))
            placement.num_replicas //= num_shards
            if kind in ("k_proj", "v_proj"):
                placement.grad_reduce_group = kv_group             # each rank's queries add to the gradient
            with torch.device("meta"):
                module = parallel(module, num_shards, comm)
            module.weight.placement = placement
            model.set_submodule(name, module)
        elif isinstance(module, nn.RMSNorm) and (args.sp == "on" or kind in ("q_norm", "k_norm")):
            module.weight.placement.grad_reduce_group = group      # each rank saw some of the tokens, or of the heads
    for module in model.modules():
        if isinstance(module, Attention):
            module.project = fuse_column_parallel([module.q_proj, module.k_proj, module.v_proj])
        if isinstance(module, MLP):
            module.project = fuse_column_parallel([module.gate_proj, module.up_proj])


def make_comm(mesh, args):
    gather, reduce = (all_gather, reduce_scatter) if args.sp == "on" else (identity, all_reduce)
    return gather, reduce, mesh.get_group("tp")


# ------------------------------------------------------------------- second layer: f once for several linears
def fuse_column_parallel(linears):
    """The linears that a region begins with have the same input: it is gathered once for all of them."""
    comm = linears[0].comm
    weights = lambda: [linear.weight for linear in linears]
    return torch.compiler.disable(lambda x: ColumnParallelLinears.apply(x, *comm, *weights()))


class ColumnParallelLinears(torch.autograd.Function):
    """f and the products that come first in the region, in one, so as to keep the input as it came and not as
    gathered.

    Backward gathers it once more, while it computes the input's gradient; and reduces that, while it computes
    the weights'.
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


# ------------------------------------------------------------------------------------------- the parameters
def all_reduce_partial_grads(params):
    """Sum, once a step, what each rank of tp has a part of: the gradient of a norm, which saw some tokens or
    some heads only, and of a shared key-value head, which saw one rank's queries."""
    for param in params:
        if param.placement.grad_reduce_group:
            dist.all_reduce(param.main_grad, group=param.placement.grad_reduce_group)


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    if args.tp == 1:
        return []
    group, decoder = mesh.get_group("tp"), model.model
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp
    stream = tokens * decoder.config.hidden_size * args.dtype.itemsize             # [batch, seq, hidden]
    ends = (decoder.embed_tokens is not None) + (model.lm_head is not None)        # one border each
    again = args.recompute != "none"                      # forward, but for the layer's end
    borders = (4 + again) * len(decoder.layers) + ends    # of a layer two regions, in and out, there and back
    sent = []
    if args.sp == "off":
        sent.append((group, "all_reduce", borders * stream))
    else:
        gathered_again = sum(isinstance(module, (Attention, MLP)) for module in decoder.modules())
        sent.append((group, "reduce_scatter", borders * stream))
        sent.append((group, "all_gather", (borders + gathered_again + again * len(decoder.layers)) * stream))
    if model.lm_head is not None:                         # the cross-entropy's three numbers
        wide = torch.promote_types(args.dtype, torch.float32)
        sent.append((group, "all_reduce", 3 * tokens * wide.itemsize))
    held = list(model.parameters())
    if args.zero:
        held = [piece for unit in dict.fromkeys(param.unit for param in held) for piece in unit.sharded_params()]
    sent += [(p.placement.grad_reduce_group, "all_reduce", p.main_grad.nbytes) for p in held if p.placement.grad_reduce_group]
    return sent


formulas.append(formula)
