"""Tensor and sequence parallelism, as in Megatron-LM: each tp rank holds a part of every matrix, and computes
its part of every product.

    in the model                              becomes                 a rank's shard              it computes
    q_proj k_proj v_proj, gate_proj up_proj   ColumnParallelLinear    some rows, dimension 0      some outputs
    o_proj, down_proj                         RowParallelLinear       some columns, dimension 1   partial sums
    embed_tokens                              VocabParallelEmbedding  some rows, dimension 0      some tokens
    lm_head                                   VocabParallelHead       some rows, dimension 0      some logits
    the norms                                 stay as they are        all

(torch stores a linear's weight as [outputs, inputs]; Megatron says "column" because papers write x @ W.)
Attention is split by heads, the MLP by its inner dimension. So from a column-parallel linear to the next
row-parallel one, a rank has all tokens of its tp group and needs nothing from the group. The ranks of tp
communicate only where they enter such a region (Megatron's f) and where they leave it (g). --sp chooses how:

                   entering a region                          leaving it
                   forward       backward                     forward          backward
    --sp off       identity      all-reduce                   all-reduce       identity
    --sp on        all-gather    reduce-scatter               reduce-scatter   all-gather

f and g are conjugate: what one does in forward, the other does in backward. With --sp on, between the regions
each rank holds only a part of the sequence, [batch, seq/tp, hidden], and applies the norms to that part.

Megatron-LM: https://arxiv.org/abs/1909.08053. Sequence parallelism: https://arxiv.org/abs/2205.05198.
"""
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from config import at_least, divisors, must_be_multiple, must_divide
from loss import LMHead
from mesh import data_mesh
from messages import fail
from model import MLP, Attention
from shards import Shard


# --------------------------------------------------------------------- entering and leaving a region: f and g
# Each of these four returns a function that returns the result. All but `identity` start a collective, and
# their function waits for it. So a caller can compute in between; `all_gather(x, group)()` waits at once.
# Collectives split dimension 0, so a sequence in dimension 1 costs a copy. (Megatron's activations are
# [seq, batch, hidden] and need none.)

def identity(x, group: ProcessGroup):
    return lambda: x


def all_reduce(x, group: ProcessGroup):
    x = x.clone(memory_format=torch.contiguous_format)                 # autograd may still read x
    handle = dist.all_reduce(x, group=group, async_op=True)

    def result():
        handle.wait()
        return x
    return result


def all_gather(x, group: ProcessGroup):                                            # [batch, seq/tp, hidden]
    gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    handle = dist.all_gather_into_tensor(gathered, x.contiguous(), group=group, async_op=True)

    def result():
        handle.wait()
        return gathered.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)  # [batch, seq, hidden]
    return result


def reduce_scatter(x, group: ProcessGroup):                                        # [batch, seq, hidden]
    x = x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1)        # [tp * batch, seq/tp, hidden]
    shard = x.new_empty(len(x) // group.size(), *x.shape[1:])
    handle = dist.reduce_scatter_tensor(shard, x.contiguous(), group=group, async_op=True)

    def result():
        handle.wait()
        return shard                                                               # [batch, seq/tp, hidden]
    return result


class EnterRegion(torch.autograd.Function):
    """f: gather in forward, reduce in backward.

    Megatron's CopyToModelParallelRegion; with --sp on, its GatherFromSequenceParallelRegion.
    """

    @staticmethod
    def forward(ctx, x, gather, reduce, group):
        ctx.reduce, ctx.group = reduce, group
        return gather(x, group)()

    @staticmethod
    def backward(ctx, grad):
        return ctx.reduce(grad, ctx.group)(), None, None, None


class LeaveRegion(torch.autograd.Function):
    """g: reduce in forward, gather in backward.

    Megatron's ReduceFromModelParallelRegion; with --sp on, its ReduceScatterToSequenceParallelRegion.
    """

    @staticmethod
    def forward(ctx, x, gather, reduce, group):
        ctx.gather, ctx.group = gather, group
        return reduce(x, group)()

    @staticmethod
    def backward(ctx, grad):
        return ctx.gather(grad, ctx.group)(), None, None, None


# comm is (gather, reduce, group). torch.compile skips these two functions and compiles what lies between.
enter_region = torch.compiler.disable(lambda x, comm: EnterRegion.apply(x, *comm))
leave_region = torch.compiler.disable(lambda x, comm: LeaveRegion.apply(x, *comm))


def make_comm(mesh: DeviceMesh, args):
    gather, reduce = (all_gather, reduce_scatter) if args.sp == "on" else (identity, all_reduce)
    return gather, reduce, mesh.get_group("tp")


# ------------------------------------------------------------------------------------------- the modules
class ColumnParallelLinear(nn.Linear):
    def __init__(self, full, num_shards: int, comm):
        super().__init__(full.in_features, full.out_features // num_shards, bias=False)
        self.comm = comm

    def forward(self, x):     # not called in a block: fuse_column_parallel gathers once for several linears
        return F.linear(enter_region(x, self.comm), self.weight)


class RowParallelLinear(nn.Linear):
    def __init__(self, full, num_shards: int, comm):
        super().__init__(full.in_features // num_shards, full.out_features, bias=False)
        self.comm = comm

    def forward(self, x):
        return leave_region(F.linear(x, self.weight), self.comm)


class VocabParallelEmbedding(nn.Embedding):
    def __init__(self, full, num_shards: int, comm):
        super().__init__(full.num_embeddings // num_shards, full.embedding_dim)
        self.comm = comm

    def forward(self, tokens):
        _, _, group = self.comm
        tokens = tokens - group.rank() * len(self.weight)
        local_mask = (tokens >= 0) & (tokens < len(self.weight))
        vectors = F.embedding(tokens.where(local_mask, 0), self.weight)
        vectors = vectors * local_mask.unsqueeze(-1)      # zero on all ranks but the one with the token's row
        return leave_region(vectors, self.comm)


class VocabParallelHead(LMHead):
    def __init__(self, full, num_shards: int, comm):
        super().__init__(full.in_features, full.out_features // num_shards)
        _, _, group = self.comm = comm
        self.cross_entropy = vocab_parallel_cross_entropy(group)

    def forward(self, hidden, targets=None):
        return super().forward(enter_region(hidden, self.comm), targets)


def vocab_parallel_cross_entropy(group: ProcessGroup):
    def cross_entropy(logits, targets):                                         # [tokens, vocab/tp], [tokens]
        """Compute the same as loss.cross_entropy, but send three numbers per token instead of its logits.

        They are the largest logit, the sum of exponentials, and the target's logit.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target = (targets - group.rank() * logits.shape[1]).unsqueeze(-1)
        local_mask = (target >= 0) & (target < logits.shape[1])
        target = target.where(local_mask, 0)
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits = logits - largest
        sum_exp, target_logit = logits.exp().sum(-1, keepdim=True), logits.gather(-1, target) * local_mask
        sums = torch.cat((sum_exp, target_logit), dim=-1)
        dist.all_reduce(sums, group=group)                                         # [tokens, 2]
        log_sum, target_logit = sums[:, :1].log(), sums[:, 1:]
        gradient = (logits - log_sum).exp_()
        gradient.scatter_add_(-1, target, -local_mask.type_as(gradient))
        return (log_sum - target_logit).sum(), gradient
    return cross_entropy


# ------------------------------------------------------------------------- replacing the modules of a model
PARALLEL = {                                              # {name: (class, dimension to shard)}
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), (ColumnParallelLinear, 0)),
    **dict.fromkeys(("o_proj", "down_proj"), (RowParallelLinear, 1)),
    "embed_tokens": (VocabParallelEmbedding, 0), "lm_head": (VocabParallelHead, 0)}


def apply(model, config, mesh: DeviceMesh, args):
    """Shard a model that is on the meta device; record on each parameter which shard this rank holds."""
    if args.tp == 1:
        return
    group, rank, comm = mesh.get_group("tp"), mesh.get_local_rank("tp"), make_comm(mesh, args)
    kv_shards, kv_group = min(args.tp, config.num_key_value_heads), None
    if kv_shards < args.tp:                               # fewer kv heads than ranks: neighbours share one
        # groups of consecutive ranks, since tp is the innermost dimension of the mesh
        kv_group, _ = dist.new_subgroups(args.tp // kv_shards, group_desc="kv_heads")
    for path, module in list(model.named_modules()):
        name = path.split(".")[-1]
        if name in PARALLEL and isinstance(module, (nn.Linear, nn.Embedding)):
            parallel_class, dim = PARALLEL[name]
            num_shards = kv_shards if name in ("k_proj", "v_proj") else args.tp
            placement = module.weight.placement
            index = rank * num_shards // args.tp          # 4 shards on 8 ranks: 0 0 1 1 2 2 3 3
            placement.shards.append(Shard(group, dim, num_shards, index))
            placement.num_replicas //= num_shards
            if name in ("k_proj", "v_proj"):
                placement.grad_reduce_group = kv_group    # each rank's gradient covers only its queries
            with torch.device("meta"):
                module = parallel_class(module, num_shards, comm)
            module.weight.placement = placement
            model.set_submodule(path, module)
        elif isinstance(module, nn.RMSNorm) and (args.sp == "on" or name in ("q_norm", "k_norm")):
            # each rank's gradient covers only some tokens, or some heads
            module.weight.placement.grad_reduce_group = group
    for module in model.modules():
        if isinstance(module, Attention):
            module.project = fuse_column_parallel([module.q_proj, module.k_proj, module.v_proj])
        if isinstance(module, MLP):
            module.project = fuse_column_parallel([module.gate_proj, module.up_proj])


def all_reduce_partial_grads(params):
    """Sum the gradients that are still partial within a tp group, once per training step.

    They belong to parameters that are whole on every rank and see only some tokens or heads there, as the
    norms do, and to kv heads that several ranks share. (Megatron sends them in one flat buffer.)
    """
    for param in params:
        if param.placement.grad_reduce_group:
            dist.all_reduce(param.main_grad, group=param.placement.grad_reduce_group)


# --------------------------------------------------------------- entering a region once, for several linears
def fuse_column_parallel(linears):
    """Return a function that applies several column-parallel linears, and gathers their common input once."""
    comm = linears[0].comm
    weights = lambda: [linear.weight for linear in linears]
    return torch.compiler.disable(lambda x: ColumnParallelLinears.apply(x, *comm, *weights()))


class ColumnParallelLinears(torch.autograd.Function):
    """f and the products after it in one Function, which saves this rank's part of the input, not all of it.

    Backward gathers the input again while it computes the input's gradient. Then it reduces that gradient
    while it computes the weights'.
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
        grad_x = functools.reduce(torch.Tensor.add_, map(torch.matmul, grads, weights))
        reduced = ctx.reduce(grad_x, ctx.group)
        x = gathered().flatten(0, 1)                                               # [batch * seq, hidden]
        grad_weights = [grad.flatten(0, 1).T @ x for grad in grads]
        return reduced(), None, None, None, *grad_weights


# ------------------------------------- config.py calls flags, defaults, check; ledger.py calls traffic
def flags(add):
    add("--tp", type=at_least(1), default=1, help="tensor-parallel ranks; each holds a part of every matrix")
    add("--sp", choices=["on", "off"], default="on",
        help="sequence parallelism: outside attention and MLP, each tp rank holds a part of the sequence")


def check(args, config):
    tp, kv_heads = args.tp, config.num_key_value_heads
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        must_divide("tp", tp, name, getattr(config, name), also=config.num_attention_heads)
    if kv_heads % tp and tp % kv_heads:
        fail(f"--tp {tp}: must divide num_key_value_heads {kv_heads}, or be a multiple of it; "
             f"choose from {divisors(kv_heads)}")
    if args.sp == "on":
        must_be_multiple("seq_len", args.seq_len, tp, f"tp {tp}", otherwise=", or --sp off")


def traffic(model, mesh, args):
    if args.tp == 1:
        return []
    group, decoder = mesh.get_group("tp"), model.model
    tokens = args.global_batch_size * args.seq_len // data_mesh(mesh).size()       # of this rank
    activation_bytes = tokens * decoder.config.hidden_size * args.dtype.itemsize   # [batch, seq, hidden]
    # Attention and MLP are a region each; embedding and head are half a region each. Forward reduces where it
    # leaves a region, backward where forward entered it. Recomputing repeats one of forward's two reductions
    # in a layer: it stops before the last operation.
    regions = sum(isinstance(module, (Attention, MLP)) for module in decoder.modules())
    ends = (decoder.embed_tokens is not None) + (model.lm_head is not None)
    recomputes = args.recompute != "none"
    reductions = 2 * regions + recomputes * len(decoder.layers) + ends
    traffic = []
    if args.sp == "off":
        traffic.append((group, "all_reduce", reductions * activation_bytes))
    else:                                                 # ColumnParallelLinears gathers again in backward
        gathers = (3 + recomputes) * regions + ends
        traffic.append((group, "reduce_scatter", reductions * activation_bytes))
        traffic.append((group, "all_gather", gathers * activation_bytes))
    if model.lm_head is not None:                         # the cross-entropy's three numbers per token
        dtype = torch.promote_types(args.dtype, torch.float32)
        traffic.append((group, "all_reduce", 3 * tokens * dtype.itemsize))
    params = [param for unit in model.zero_units for param in unit.sharded_params()]
    for param in params or model.parameters():
        if param.placement.grad_reduce_group:
            traffic.append((param.placement.grad_reduce_group, "all_reduce", param.main_grad.nbytes))
    return traffic
