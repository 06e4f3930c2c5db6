"""Balance the load: left to itself, a router soon sends most tokens to a few experts. --balance says how:

    bias    add a bias to each expert's score, but use it only to select. After each step, lower the bias of
            experts that had more tokens than the mean; raise the others' (https://arxiv.org/abs/2408.15664)
    aux     add an auxiliary loss that grows with the scores of experts that have many tokens in a sequence
"""
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from expert_parallel import stage_mesh
from messages import print0
from moe import moe_layers

BIAS_STEP, AUX_WEIGHT = 0.005, 0.01                       # the paper's bias step is 0.001, for longer runs


class LoadBalancer:
    """Selects the experts, counts each one's tokens over the global batch, and balances the counts."""

    def __init__(self, model, config, mesh: DeviceMesh, args):
        self.args, self.config, self.layers = args, config, moe_layers(model)
        if self.layers:
            self.stage_group, self.sequence_group = stage_mesh(mesh).get_group(), sequence_group(mesh)
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
        # of the whole sequence; the scores are those of this rank's part
        dist.all_reduce(chosen, group=self.sequence_group)
        top_k, seq_len, num_experts = self.config.num_experts_per_tok, self.args.seq_len, scores.shape[-1]
        fraction = chosen.unsqueeze(1).type_as(scores) / (top_k * seq_len)
        total = num_experts * (fraction * scores).sum() / seq_len
        return AUX_WEIGHT * total / self.args.global_batch_size

    def update(self):
        """Adapt the biases after a step. Return {"balance": the largest load / the mean load} for the log.

        The ratio is averaged over the layers. All ranks must call this.
        """
        if not self.layers:
            return {}
        dist.all_reduce(self.tokens_per_expert, group=self.stage_group)
        mean = self.tokens_per_expert.double().mean(1, keepdim=True)
        if self.args.balance == "bias":
            self.bias += BIAS_STEP * (mean - self.tokens_per_expert).sign()
        imbalance = (self.tokens_per_expert.amax(1) / mean.squeeze(1)).sum() / self.config.num_hidden_layers
        self.tokens_per_expert.zero_()
        dist.all_reduce(imbalance)                        # sums over pp; the other dimensions hold the same
        return {"balance": imbalance / (dist.get_world_size() / self.args.pp)}


def sequence_group(mesh: DeviceMesh):
    """Return the group of the ranks that route the tokens of the same sequences."""
    return mesh["cp", "tp"]._flatten("cp_tp").get_group()


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
    add("--balance", choices=["none", "bias", "aux"],
        help="how to balance the experts' load (default: bias, or none with --init_from)")


def defaults(args):
    args.balance = args.balance or ("none" if args.init_from else "bias")


def check(args, config):
    if config.num_local_experts and args.save and args.balance == "bias":
        print0("warning: --balance bias: a Hugging Face checkpoint (--save) cannot hold the biases, and "
               "without them some tokens select different experts; to avoid this, use --balance aux or none")


def traffic(model, mesh, args):
    """Return the traffic of the counts: of a step, and for the auxiliary loss of each sequence."""
    layers = moe_layers(model)
    if not layers:
        return []
    count_bytes = len(layers) * layers[0].gate.out_features * torch.int64.itemsize       # a number per expert
    traffic = [(stage_mesh(mesh).get_group(), "all_reduce", count_bytes),
               (dist.group.WORLD, "all_reduce", torch.float64.itemsize)]           # `balance`, for the log
    if args.balance == "aux":
        sequences, forwards = args.global_batch_size // args.dp, 1 if args.recompute == "none" else 2
        traffic.append((sequence_group(mesh), "all_reduce", forwards * sequences * count_bytes))
    return traffic
