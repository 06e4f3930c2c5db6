"""Expert parallelism: each rank of ep has some of the experts of every layer; tokens travel to theirs and
back.

ep is folded into dp x cp: its ranks have different tokens anyway, and all other parameters do not notice. A
rank sorts its tokens by expert, tells the others how many they will get, sends them (all-to-all, as many to
each as there are), computes what it was sent, and sends the results back.

Without a counterweight the router soon sends most tokens to few experts. --balance says what is done about
it:

    bias    for choosing only, a bias is added to each expert's score. After every step it is lowered for
            those that had more tokens than the mean, raised for those that had fewer
    aux     an auxiliary loss: its gradient lowers the scores of experts with many tokens in a sequence
"""
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ledger import formulas
from mesh import data_mesh
from messages import print0
from moe import Experts, MoE
from shards import Shard
from tensor_parallel import make_comm, enter_region, leave_region

BIAS_STEP, AUX_WEIGHT = 0.005, 0.01


def expert_parallel(model, config, mesh, args):
    """Leaves this rank its experts, of a model on the meta device, and sends tokens to where experts are."""
    sizes = (args.dp * args.cp // args.ep, args.ep)
    ep_mesh = data_mesh(mesh)._unflatten(0, sizes, ("expert_dp", "ep"))
    group, expert_mesh = ep_mesh.get_group("ep"), ep_mesh["expert_dp"]
    for layer in model.model.layers.values():
        if isinstance(layer.mlp, MoE):
            if args.tp > 1:
                layer.mlp = TensorParallelMoE(layer.mlp, mesh, args)
            experts = layer.mlp.experts
            for linear in experts.children():
                cut(linear, Shard(group, 0, args.ep, group.rank()))
                linear.weight.placement.expert_mesh = expert_mesh
            if args.ep > 1:
                layer.mlp.experts = ExpertParallel(experts, group)


def cut(linear, part):
    whole = linear.weight
    linear.weight = nn.Parameter(whole.chunk(part.num_shards, part.dim)[0])
    linear.weight.placement = whole.placement
    linear.weight.placement.shards.append(part)
    linear.weight.placement.num_replicas //= part.num_shards


def moe_layers(model):
    return [layer.mlp for layer in model.model.layers.values() if isinstance(layer.mlp, MoE)]


# ------------------------------------------------------------------------------------------ in a region of tp
class TensorParallelMoE(MoE):
    """Every expert is cut as the MLP is. All ranks of tp see the whole sequence, and so choose alike."""

    def __init__(self, whole, mesh, args):
        nn.Module.__init__(self)
        self.gate, self.experts, self.choose = whole.gate, whole.experts, whole.choose
        self.comm = make_comm(mesh, args)
        group = mesh.get_group("tp")
        for linear, dim in ((self.experts.w1, 1), (self.experts.w3, 1), (self.experts.w2, 2)):
            cut(linear, Shard(group, dim, args.tp, group.rank()))
        self.gate.weight.placement.grad_reduce_group = group       # each rank has a part of what every expert makes

    def forward(self, x):
        return leave_region(super().forward(enter_region(x, self.comm)), self.comm)


# --------------------------------------------------------------------------------- tokens to experts and back
class TokenAllToAll(torch.autograd.Function):
    """Sends rows to each rank, as many as `sent` says; backward sends their gradients back."""

    @staticmethod
    def forward(ctx, x, input_splits, output_splits, group):
        ctx.input_splits, ctx.output_splits, ctx.group = input_splits, output_splits, group
        out = x.new_empty(sum(output_splits), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), output_splits, input_splits, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return TokenAllToAll.apply(grad, ctx.output_splits, ctx.input_splits, ctx.group), None, None, None


class ExpertParallel(Experts):
    """Takes rows sorted by expert, and how many each has; has them computed where the experts are."""

    def __init__(self, whole, group):
        nn.Module.__init__(self)
        self.w1, self.w2, self.w3, self.group = whole.w1, whole.w2, whole.w3, group

    @torch.compiler.disable                               # its sizes come out of the data
    def forward(self, x, tokens_per_expert):                                                  # [rows, hidden], [experts]
        group, ranks = self.group, self.group.size()
        recv_counts = torch.empty_like(tokens_per_expert)
        dist.all_to_all_single(recv_counts, tokens_per_expert, group=group)
        recv_counts = recv_counts.view(ranks, -1)                              # [ranks, experts/ep]: what comes to mine
        both = torch.stack((tokens_per_expert.view(ranks, -1), recv_counts)).sum(-1)
        input_splits, output_splits = both.tolist()                    # the host waits for these
        x = TokenAllToAll.apply(x, input_splits, output_splits, group)                          # by rank, and of each by expert
        expert = torch.arange(recv_counts.shape[1], device=x.device).repeat(ranks)
        expert = expert.repeat_interleave(recv_counts.flatten(), output_size=sum(output_splits))        # of each row
        order = expert.argsort(stable=True)
        out = super().forward(x.index_select(0, order), recv_counts.sum(0))
        return TokenAllToAll.apply(out.index_select(0, order.argsort()), output_splits, input_splits, group)


# ------------------------------------------------------------------------------------ as many tokens for each
class LoadBalancer:
    """Chooses the experts, counts the tokens of each over the global batch, and evens them out."""

    def __init__(self, model, config, mesh, args):
        self.args, self.config, self.layers = args, config, moe_layers(model)
        self.data, self.cp = data_mesh(mesh).get_group(), mesh.get_group("cp")
        if self.layers and args.save and args.balance == "bias":
            print0("--balance bias with --save: a Mixtral's checkpoint has no place for the biases; without "
                "them some tokens get other experts; --balance aux or none train a plain Mixtral")
        size = len(self.layers), config.num_local_experts
        self.counts = torch.zeros(size, dtype=torch.int64, device=args.device)
        self.bias = torch.zeros(size, dtype=torch.float32, device=args.device)
        for i, layer in enumerate(self.layers):
            layer.choose = torch.compiler.disable(functools.partial(self.choose, i))

    def choose(self, i, logits):                                                   # [batch, seq, experts]
        top_k, experts = self.config.num_experts_per_tok, self.config.num_local_experts
        scores = logits.detach().softmax(-1)
        expert = (scores + self.bias[i]).topk(top_k).indices
        chosen = F.one_hot(expert, experts).sum((1, 2))                   # [batch, experts]: of each sequence
        self.counts[i] += chosen.sum(0)                # with recomputation twice, which changes no comparison
        if self.args.balance == "aux" and logits.requires_grad:
            dist.all_reduce(chosen, group=self.cp)
            # the loss is the sum over experts of (share of the choices) x (mean score) x experts; each rank
            # of tp adds a part
            tokens = self.args.seq_len * self.args.global_batch_size
            scale = AUX_WEIGHT * experts / (top_k * self.args.seq_len * tokens * self.args.tp)
            of_scores = scale * chosen.unsqueeze(1).type_as(scores)
            through_softmax = of_scores - (scores * of_scores).sum(-1, keepdim=True)
            of_logits = scores * through_softmax
            logits.register_hook(lambda grad: grad + of_logits)
        return expert

    def update(self):
        """After every step. Returns the largest over the mean tokens of an expert, the mean of all layers."""
        if not self.layers:
            return {}
        dist.all_reduce(self.counts, group=self.data)
        mean = self.counts.double().mean(1, keepdim=True)
        if self.args.balance == "bias":
            self.bias += BIAS_STEP * (mean - self.counts).sign()
        largest = (self.counts.amax(1) / mean.squeeze(1)).sum() / self.config.num_hidden_layers
        self.counts.zero_()
        dist.all_reduce(largest)                          # over pp; the others have the same
        return {"balance": largest / (dist.get_world_size() / self.args.pp)}


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes). Back from the experts comes what
    was sent there; a rank sends back what it was sent, which is as much if all experts have as many
    tokens."""
    layers, config = moe_layers(model), model.model.config
    if not layers:
        return []
    sequences = args.global_batch_size // args.dp
    tokens = sequences * args.seq_len // args.cp
    forwards = 1 if args.recompute == "none" else 2
    tokens_per_expert = len(layers) * config.num_local_experts * torch.int64.itemsize
    number = torch.float64.itemsize
    sent = [(data_mesh(mesh).get_group(), "all_reduce", tokens_per_expert), (dist.group.WORLD, "all_reduce", number)]
    if args.ep > 1:
        group = layers[0].experts.group
        rows = len(layers) * tokens * config.num_experts_per_tok * config.hidden_size * args.dtype.itemsize
        sent += [(group, "all_to_all", 2 * (forwards + 1) * rows),      # there and back, forward and backward
                 (group, "all_to_all", forwards * sequences // args.micro_batch_size * tokens_per_expert)]
    if args.balance == "aux":
        sent.append((mesh.get_group("cp"), "all_reduce", forwards * sequences * tokens_per_expert))
    return sent


formulas.append(formula)
