"""The mixture of experts of Mixtral: in place of a block's MLP many, of which each token meets a few.

A router, a small linear, makes a logit of each expert for a token. The top_k largest are its own; their
softmax says with what share each counts: y = sum of share x expert(x). An expert is a SwiGLU as the MLP is.
"""
import dataclasses
import functools
import itertools

import torch
import torch.nn.functional as F
from torch import nn

from config import FAMILIES
from mesh import data_mesh


class MoE(nn.Module):
    """No expert is ever full, no token dropped."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = Experts(config)
        self.choose = lambda logits: logits.topk(config.num_experts_per_tok).indices

    def forward(self, x):                                                          # [batch, seq, hidden]
        logits = self.gate(x).to(torch.promote_types(x.dtype, torch.float32))      # [batch, seq, experts]
        expert = self.choose(logits)                                               # [batch, seq, top_k]
        routing_weights = logits.gather(-1, expert).softmax(-1).type_as(x)
        order = expert.flatten().argsort(stable=True)                          # of (token, choice), by expert
        tokens_per_expert = F.one_hot(expert, logits.shape[-1]).sum((0, 1, 2))                # of each expert
        x = x.flatten(0, 1).index_select(0, order // expert.shape[-1])             # [tokens * top_k, hidden]
        out = self.experts(x, tokens_per_expert).index_select(0, order.argsort())             # back to the tokens' order
        out = out.view(*expert.shape, -1)                                        # [batch, seq, top_k, hidden]
        return (out * routing_weights.unsqueeze(-1)).sum(-2)


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        experts, hidden, intermediate = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.w1 = GroupedLinear(experts, hidden, intermediate)
        self.w2 = GroupedLinear(experts, intermediate, hidden)
        self.w3 = GroupedLinear(experts, hidden, intermediate)

    def forward(self, x, tokens_per_expert):                         # rows sorted by expert, and how many each has
        return self.w2(F.silu(self.w1(x, tokens_per_expert)) * self.w3(x, tokens_per_expert), tokens_per_expert)


class GroupedLinear(nn.Module):
    """One linear per expert, with their weights in one tensor; in a checkpoint each expert has its own."""

    def __init__(self, experts, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))

    def extra_repr(self):
        return "experts={}, out_features={}, in_features={}".format(*self.weight.shape)

    def forward(self, x, tokens_per_expert):
        return grouped_product(x, self.weight, tokens_per_expert)


def supports_grouped_mm(weight):                                                          # rows of 16 bytes
    return weight.dtype == torch.bfloat16 and all(width % 8 == 0 for width in weight.shape[1:])


def grouped_product(x, weight, tokens_per_expert):                            # [rows, in], [experts, out, in], [experts]
    if supports_grouped_mm(weight):
        if weight.requires_grad:                          # where there are no rows the kernel may write none
            weight = weight.view_as(weight)
            weight.register_hook(lambda grad: zero_where_empty(grad, tokens_per_expert))
        return F.grouped_mm(x, weight.transpose(1, 2), offs=tokens_per_expert.cumsum(0, dtype=torch.int32))
    return torch.cat([F.linear(rows, one) for rows, one in zip(x.split(tokens_per_expert.tolist()), weight)])


def zero_where_empty(grad, tokens_per_expert):
    return grad.masked_fill((tokens_per_expert == 0).view(-1, 1, 1), 0)


def grouped_gradient(grad, x, weight, tokens_per_expert):
    """Return the weight's gradient, where autograd does not compute it (step 6's W)."""
    if not len(x):                                        # this rank's experts have no tokens: ask no kernel
        return torch.zeros_like(weight)
    if supports_grouped_mm(weight):
        product = F.grouped_mm(grad.T, x, offs=tokens_per_expert.cumsum(0, dtype=torch.int32))
        return zero_where_empty(product, tokens_per_expert)
    rows = zip(grad.split(tokens_per_expert.tolist()), x.split(tokens_per_expert.tolist()))
    return torch.stack([grad.T @ x for grad, x in rows])


# --------------------------------------------------------------------------- where other files meet experts
def mesh_of(param, mesh):
    """The ranks that have the same parameter and other tokens: of an expert they are fewer."""
    return param.placement.expert_mesh or data_mesh(mesh)


def group_by_mesh(params, mesh):
    """[(those ranks, the parameters that they share)]"""
    found = {}
    for param in params:
        found.setdefault(mesh_of(param, mesh), []).append(param)
    return list(found.items())


class Block:
    """ZeRO's units of the same modules, gathered and released together: a layer's experts and the rest."""

    def __init__(self, units):
        self.units, self.modules, self.keep = units, units[0].modules, units[0].keep

    def unshard(self):
        for unit in self.units:
            unit.unshard()

    def wait_for_all_gather(self):
        for unit in self.units:
            unit.wait_for_all_gather()

    def reshard(self):
        for unit in self.units:
            unit.reshard()


def blocks_of(units):
    return [Block(list(block)) for _, block in itertools.groupby(units, key=lambda unit: unit.modules)]


def split_grouped(linear, queue, queue_weight_gradient):
    """What pipeline_parallel.split is to a linear: the weights' gradients, all experts', are left to W."""
    def product(x, tokens_per_expert):
        grads = {}
        gradient = lambda grad, x: grouped_gradient(grad, x, linear.weight, tokens_per_expert)
        x = queue_weight_gradient.apply(x, grads, None, gradient, queue)
        y = grouped_product(x, linear.weight.detach(), tokens_per_expert)
        y.register_hook(functools.partial(grads.__setitem__, linear))
        return y
    return torch.compiler.disable(product)


# ------------------------------------------------------------------------------------------- in a checkpoint
def to_hf_tensors(name, param, config):
    """What a parameter is in a checkpoint: (name, tensor), one for each expert that it has."""
    for ours, theirs in FAMILIES[config.family].renamed.items():
        name = name.replace(ours, theirs)
    if ".experts." not in name:
        return [(name, param)]
    placement = getattr(param, "placement", None)         # the model as it is on the disk has none
    parts = placement.shards if placement else []
    first = sum(part.index * len(param) for part in parts if part.dim == 0)
    experts = []
    for i, one in enumerate(param.unbind(), start=first):
        if placement:
            of_one = [part._replace(dim=part.dim - 1) for part in parts if part.dim > 0]
            one.placement = dataclasses.replace(placement, shards=of_one)
        experts.append((name.replace(".experts.", f".experts.{i}."), one))
    return experts
