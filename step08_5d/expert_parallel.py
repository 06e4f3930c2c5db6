"""Expert parallelism: each ep rank holds some of every layer's experts, and tokens travel to their experts.

A rank sorts its tokens by expert, tells every other rank how many to expect, sends them (an all-to-all with
uneven splits), runs its experts on the tokens that it has received, and sends the results back. The idea
comes from GShard (https://arxiv.org/abs/2006.16668), which gives each expert a fixed capacity instead.

ep needs no ranks of its own. It is folded into dp x cp x tp, the ranks that hold the same layers: groups of
ep neighbours, in each of which every expert is on one rank. (Megatron calls this parallel folding,
https://arxiv.org/abs/2504.14960.) No expert is cut, so the ranks of tp must have different tokens for them.
With --sp on they do: between two regions of tp, each has its part of the sequence. With --sp off each rank
takes its part before it routes, and afterwards the ranks gather the outputs.

An expert gets the tokens of its whole ep group. So its gradient lacks only the terms of the other groups,
and is summed over expert_dp, the ranks that hold the same expert. A router gets only its own rank's tokens,
so its gradient is summed over all of dp x cp x tp: over dp x cp with the others, and then over tp.
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from config import at_least, must_be_multiple, must_divide
from messages import fail
from moe import moe_layers
from shards import Shard
from tensor_parallel import all_gather, enter_region, leave_region


def stage_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same layers."""
    return mesh["dp", "cp", "tp"]._flatten("dp_cp_tp")


def apply(model, config, mesh: DeviceMesh, args):
    """Drop the experts of other ep ranks, dispatch tokens by expert, and let each tp rank route its part.

    The model is still on the meta device.
    """
    if args.ep == args.tp == 1 or not config.num_local_experts:
        return
    sizes = (args.dp * args.cp * args.tp // args.ep, args.ep)
    ep_mesh = stage_mesh(mesh)._unflatten(0, sizes, ("expert_dp", "ep"))
    for moe in moe_layers(model):
        for linear in moe.experts.children():             # with ep 1, too: tp ranks have different tokens
            shard_experts(linear, ep_mesh)
        if args.ep > 1:
            moe.dispatch = TokenDispatcher(ep_mesh.get_group("ep"))
        if args.tp > 1:
            route_own_part(moe, mesh.get_group("tp"), args)


def shard_experts(linear, ep_mesh: DeviceMesh):
    """Keep this rank's experts, whose gradients are summed over the ranks that hold the same."""
    group, full = ep_mesh.get_group("ep"), linear.weight
    linear.weight = nn.Parameter(full.chunk(group.size())[group.rank()])           # on meta: only a shape
    linear.weight.placement = full.placement
    linear.weight.placement.shards.append(Shard(group, 0, group.size(), group.rank()))
    linear.weight.placement.num_replicas //= group.size()
    linear.weight.placement.data_mesh = ep_mesh["expert_dp"]


def route_own_part(moe, group: ProcessGroup, args):
    """Let each tp rank route only its part of the sequence. With --sp on it has no other tokens."""
    moe.gate.weight.placement.grad_reduce_group = group   # partial: it lacks the other ranks' tokens
    if args.sp == "off":
        forward, comm = moe.forward, (all_gather, own_part, group)
        # Around the layer, each rank has all tokens, as inside a region. So leave the region before the
        # layer and enter it again after. (In backward, leaving it gathers the gradients.)
        moe.forward = lambda x: enter_region(forward(leave_region(x, comm)), comm)


def own_part(x, group: ProcessGroup):         # like all_gather, it returns a function that returns the result
    return lambda: x.chunk(group.size(), dim=1)[group.rank()]                      # [batch, seq/tp, hidden]


# --------------------------------------------------------------------------------- tokens to experts and back
class TokenAllToAll(torch.autograd.Function):
    """An all-to-all of rows: input_splits says how many go to each rank. Backward returns their gradients."""

    @staticmethod
    def forward(ctx, x, input_splits, output_splits, group):
        ctx.input_splits, ctx.output_splits, ctx.group = input_splits, output_splits, group
        out = x.new_empty(sum(output_splits), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), output_splits, input_splits, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return TokenAllToAll.apply(grad, ctx.output_splits, ctx.input_splits, ctx.group), None, None, None


class TokenDispatcher:
    """Sends rows, sorted by expert, to the ranks that hold their experts, and returns the results."""

    def __init__(self, group: ProcessGroup):
        self.group = group

    @torch.compiler.disable                               # the data decides the sizes
    def __call__(self, experts, x, tokens_per_expert):                             # [rows, hidden], [experts]
        ep = self.group.size()
        recv_counts = torch.empty_like(tokens_per_expert)
        dist.all_to_all_single(recv_counts, tokens_per_expert, group=self.group)
        counts = torch.stack((tokens_per_expert, recv_counts)).unflatten(1, (ep, -1))    # [2, ep, experts/ep]
        input_splits, output_splits = counts.sum(-1).tolist()          # the CPU waits for the GPU
        recv_counts = counts[1]
        x = TokenAllToAll.apply(x, input_splits, output_splits, self.group)        # by rank, then by expert
        expert = torch.arange(recv_counts.shape[1], device=x.device).repeat(ep)
        expert = expert.repeat_interleave(recv_counts.flatten(), output_size=len(x))       # of each row
        order = expert.argsort(stable=True)
        out = experts(x.index_select(0, order), recv_counts.sum(0)).index_select(0, order.argsort())
        return TokenAllToAll.apply(out, output_splits, input_splits, self.group)


# ------------------------------------- config.py calls flags, defaults, check; ledger.py calls traffic
def flags(add):
    add("--ep", type=at_least(1), default=1,
        help="expert-parallel ranks, taken from dp x cp x tp; each holds some of the experts")


def check(args, config):
    experts, ranks = config.num_local_experts, args.dp * args.cp * args.tp
    if args.ep > 1 and not experts:
        fail(f"--ep {args.ep}: --model {args.model} has no experts; use --model tiny-moe")
    must_divide("ep", args.ep, f"dp {args.dp} x cp {args.cp} x tp {args.tp} =", ranks, also=experts)
    must_divide("ep", args.ep, "num_local_experts", experts, also=ranks)
    if config.num_experts_per_tok > experts:
        fail(f"--model {args.model}: num_experts_per_tok {config.num_experts_per_tok} must be at most "
             f"num_local_experts {experts}")
    if experts:
        must_be_multiple("seq_len", args.seq_len, args.cp * args.tp,
                         f"cp {args.cp} x tp {args.tp}, whose ranks each route a part of it")


def traffic(model, mesh, args):
    """Return the expected traffic if all experts get equally many tokens: each row goes there and back."""
    layers, config, traffic = moe_layers(model), model.model.config, []
    sequences = args.global_batch_size // args.dp
    tokens = sequences * args.seq_len // (args.cp * args.tp)                       # that this rank routes
    token_bytes = len(layers) * tokens * config.hidden_size * args.dtype.itemsize
    forwards = 1 if args.recompute == "none" else 2
    if layers and args.ep > 1:
        group = layers[0].dispatch.group
        row_bytes = config.num_experts_per_tok * token_bytes
        traffic.append((group, "all_to_all", 2 * (forwards + 1) * row_bytes))      # there and back
        count_bytes = len(layers) * config.num_local_experts * torch.int64.itemsize
        traffic.append((group, "all_to_all", forwards * sequences // args.micro_batch_size * count_bytes))
    # outputs in forward and gradients in backward; recomputation stops before the last operation
    if layers and args.tp > 1 and args.sp == "off":
        traffic.append((mesh.get_group("tp"), "all_gather", 2 * args.tp * token_bytes))
    return traffic
