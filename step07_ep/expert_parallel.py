"""Expert parallelism: each ep rank holds some of every layer's experts, and tokens travel to their experts.

ep is folded into dp x cp, whose ranks compute on different tokens anyway; all other parameters stay as they
are. A rank sorts its tokens by expert, tells every other rank how many to expect, sends them (an all-to-all
with uneven splits), runs its experts on the tokens that it has received, and sends the results back. The idea
comes from GShard (https://arxiv.org/abs/2006.16668), which gives each expert a fixed capacity instead.

The tokens of all ep ranks come to an expert, so its gradient lacks only what the ranks of other ep groups
compute: those of expert_dp, over which it is summed.

Left to itself, a router soon sends most tokens to a few experts. --balance chooses what to do about it:

    bias    add a bias to each expert's score, but use it only to select. After each step, lower the bias of
            experts that had more tokens than the mean; raise the others' (https://arxiv.org/abs/2408.15664)
    aux     add an auxiliary loss that grows with the scores of experts that have many tokens in a sequence
"""
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from config import at_least, must_divide
from mesh import data_mesh
from messages import fail, print0
from moe import MoE
from shards import Shard
from tensor_parallel import enter_region, leave_region, make_comm

BIAS_STEP, AUX_WEIGHT = 0.005, 0.01                       # the paper's bias step is 0.001, for longer runs


def apply(model, config, mesh: DeviceMesh, args):
    """Shard each expert over tp, drop the experts of other ep ranks, and dispatch tokens by expert.

    The model is still on the meta device.
    """
    for moe in moe_layers(model):
        if args.tp > 1:
            shard_over_tp(moe, mesh, args)
    if args.ep == 1:
        return
    sizes = (args.dp * args.cp // args.ep, args.ep)
    ep_mesh = data_mesh(mesh)._unflatten(0, sizes, ("expert_dp", "ep"))
    group = ep_mesh.get_group("ep")
    for moe in moe_layers(model):
        for linear in moe.experts.children():
            shard_weight(linear, Shard(group, 0, args.ep, group.rank()))
            linear.weight.placement.data_mesh = ep_mesh["expert_dp"]
        moe.dispatch = TokenDispatcher(group)


def moe_layers(model):
    return [layer.mlp for layer in model.model.layers.values() if isinstance(layer.mlp, MoE)]


def shard_weight(linear, shard):
    full = linear.weight
    linear.weight = nn.Parameter(full.chunk(shard.num_shards, shard.dim)[0])     # on meta: only a shape
    linear.weight.placement = full.placement
    linear.weight.placement.shards.append(shard)
    linear.weight.placement.num_replicas //= shard.num_shards


def shard_over_tp(moe, mesh: DeviceMesh, args):
    """Shard each expert like the MLP. The router stays whole, so all tp ranks select the same experts."""
    group, comm = mesh.get_group("tp"), make_comm(mesh, args)
    for linear, dim in ((moe.experts.w1, 1), (moe.experts.w3, 1), (moe.experts.w2, 2)):
        shard_weight(linear, Shard(group, dim, args.tp, group.rank()))
    moe.gate.weight.placement.grad_reduce_group = group   # partial, as the experts' outputs are
    forward = moe.forward
    moe.forward = lambda x: leave_region(forward(enter_region(x, comm)), comm)


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


# ----------------------------------------------------------------------------------------- balancing the load
class LoadBalancer:
    """Selects the experts, counts each one's tokens over the global batch, and balances the counts."""

    def __init__(self, model, config, mesh: DeviceMesh, args):
        self.args, self.config, self.layers = args, config, moe_layers(model)
        self.data_group, self.cp_group = data_mesh(mesh).get_group(), mesh.get_group("cp")
        if self.layers and args.save and args.balance == "bias":
            print0("warning: --balance bias: a Hugging Face checkpoint (--save) cannot hold the biases, and "
                   "without them some tokens select other experts; to avoid this, use --balance aux or none")
        size = len(self.layers), config.num_local_experts
        self.tokens_per_expert = torch.zeros(size, dtype=torch.int64, device=args.device)
        self.bias = torch.zeros(size, dtype=torch.float32, device=args.device)
        for i, layer in enumerate(self.layers):
            layer.choose = torch.compiler.disable(functools.partial(self.choose, i))

    def choose(self, i, logits):                                                   # [batch, seq, experts]
        """Return the experts that layer i selects, and the logits, with the auxiliary loss attached."""
        top_k, num_experts = self.config.num_experts_per_tok, self.config.num_local_experts
        scores = logits.softmax(-1)
        selected_experts = (scores.detach() + self.bias[i]).topk(top_k).indices
        chosen = F.one_hot(selected_experts, num_experts).sum((1, 2))              # [batch, experts]
        self.tokens_per_expert[i] += chosen.sum(0)        # recomputation doubles all counts: same ratios
        if self.args.balance == "aux" and logits.requires_grad:
            logits = AddAuxiliaryLoss.apply(logits, self.auxiliary_loss(scores, chosen))
        return selected_experts, logits

    def auxiliary_loss(self, scores, chosen):
        """Return this rank's term of the auxiliary loss.

        For one sequence it is AUX_WEIGHT times the number of experts times the sum, over the experts, of the
        expert's fraction of the choices times its mean score. The loss is the mean over the global batch.
        """
        dist.all_reduce(chosen, group=self.cp_group)      # of the whole sequence; scores: of this rank's part
        top_k, seq_len, num_experts = self.config.num_experts_per_tok, self.args.seq_len, scores.shape[-1]
        fraction = chosen.unsqueeze(1).type_as(scores) / (top_k * seq_len)
        total = num_experts * (fraction * scores).sum() / seq_len
        return AUX_WEIGHT * total / self.args.global_batch_size / self.args.tp     # each tp rank adds a part

    def update(self):
        """Adapt the biases after a step. Return {"balance": the largest load / the mean load} for the log.

        The ratio is averaged over the layers. All ranks must call this.
        """
        if not self.layers:
            return {}
        dist.all_reduce(self.tokens_per_expert, group=self.data_group)
        mean = self.tokens_per_expert.double().mean(1, keepdim=True)
        if self.args.balance == "bias":
            self.bias += BIAS_STEP * (mean - self.tokens_per_expert).sign()
        imbalance = (self.tokens_per_expert.amax(1) / mean.squeeze(1)).sum() / self.config.num_hidden_layers
        self.tokens_per_expert.zero_()
        dist.all_reduce(imbalance)                        # sums over pp; the other dimensions hold the same
        return {"balance": imbalance / (dist.get_world_size() / self.args.pp)}


class AddAuxiliaryLoss(torch.autograd.Function):
    """Returns the logits as they are. Backward gives the auxiliary loss a gradient of 1.

    So the auxiliary loss trains the router as if it were added to the loss, but the logged loss omits it.
    (Megatron's MoEAuxLossAutoScaler does the same.)
    """

    @staticmethod
    def forward(ctx, logits, loss):
        ctx.dtype = loss.dtype
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)


# ------------------------------------- config.py calls flags, defaults, check; ledger.py calls traffic
def flags(add):
    add("--ep", type=at_least(1), default=1,
        help="expert-parallel ranks, taken from dp x cp; each holds some of the experts")
    add("--balance", choices=["none", "bias", "aux"],
        help="how to balance the experts' load (default: bias, or none with --init_from)")


def defaults(args):
    args.balance = args.balance or ("none" if args.init_from else "bias")


def check(args, config):
    experts = config.num_local_experts
    must_divide("ep", args.ep, f"dp {args.dp} x cp {args.cp} =", args.dp * args.cp)
    if args.ep > 1 and not experts:
        fail(f"--ep {args.ep}: --model {args.model} has no experts; use --model tiny-moe")
    if config.num_experts_per_tok > experts:
        fail(f"--model {args.model}: num_experts_per_tok {config.num_experts_per_tok} must be at most "
             f"num_local_experts {experts}")
    must_divide("ep", args.ep, "num_local_experts", experts, also=args.dp * args.cp)


def traffic(model, mesh, args):
    """Return the expected traffic if all experts get equally many tokens: each row goes there and back."""
    layers, config = moe_layers(model), model.model.config
    if not layers:
        return []
    sequences = args.global_batch_size // args.dp
    tokens = sequences * args.seq_len // args.cp
    forwards = 1 if args.recompute == "none" else 2
    count_bytes = len(layers) * config.num_local_experts * torch.int64.itemsize    # a number per expert
    traffic = [(data_mesh(mesh).get_group(), "all_reduce", count_bytes),
               (dist.group.WORLD, "all_reduce", torch.float64.itemsize)]           # `balance`, for the log
    if args.ep > 1:
        group = layers[0].dispatch.group
        rows = len(layers) * tokens * config.num_experts_per_tok
        row_bytes = rows * config.hidden_size * args.dtype.itemsize
        traffic.append((group, "all_to_all", 2 * (forwards + 1) * row_bytes))      # there and back
        traffic.append((group, "all_to_all", forwards * sequences // args.micro_batch_size * count_bytes))
    if args.balance == "aux":
        traffic.append((mesh.get_group("cp"), "all_reduce", forwards * sequences * count_bytes))
    return traffic
