"""A mixture of experts, as in Mixtral: a block has many experts instead of an MLP, and each token uses a few.

A router, a small linear, computes one logit per expert for each token. It selects the top_k experts with the
largest logits; the softmax over these logits weights their outputs: y = sum(weight * expert(x)). Each
expert is a SwiGLU, like the MLP.
"""
import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    """Experts without a capacity limit: none is ever full, so no token is dropped."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = Experts(config)
        self.choose = lambda logits: (logits.topk(config.num_experts_per_tok).indices, logits)
        self.dispatch = lambda experts, x, tokens_per_expert: experts(x, tokens_per_expert)

    def forward(self, x):                                                          # [batch, seq, hidden]
        logits = self.gate(x).to(torch.promote_types(x.dtype, torch.float32))      # [batch, seq, experts]
        selected_experts, logits = self.choose(logits)           # [batch, seq, top_k], [batch, seq, experts]
        routing_weights = logits.gather(-1, selected_experts).softmax(-1).type_as(x)
        order = selected_experts.flatten().argsort(stable=True)        # sorts (token, choice) by expert
        tokens_per_expert = F.one_hot(selected_experts, logits.shape[-1]).sum((0, 1, 2))
        x = x.flatten(0, 1).index_select(0, order // selected_experts.shape[-1])   # [tokens * top_k, hidden]
        out = self.dispatch(self.experts, x, tokens_per_expert)
        out = out.index_select(0, order.argsort())                     # back in the order of the tokens
        out = out.view(*selected_experts.shape, -1)                    # [batch, seq, top_k, hidden]
        return (out * routing_weights.unsqueeze(-1)).sum(-2)


def moe_layers(model):
    return [layer.mlp for layer in model.model.layers.values() if isinstance(layer.mlp, MoE)]


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        num_experts, hidden = config.num_local_experts, config.hidden_size
        intermediate = config.intermediate_size
        self.gate_proj = GroupedLinear(num_experts, hidden, intermediate)
        self.up_proj = GroupedLinear(num_experts, hidden, intermediate)
        self.down_proj = GroupedLinear(num_experts, intermediate, hidden)

    def forward(self, x, tokens_per_expert):             # rows sorted by expert, and how many each expert has
        gate, up = self.gate_proj(x, tokens_per_expert), self.up_proj(x, tokens_per_expert)
        return self.down_proj(F.silu(gate) * up, tokens_per_expert)


class GroupedLinear(nn.Module):
    """One linear per expert, all weights in one tensor. A Hugging Face checkpoint has a tensor per expert."""

    def __init__(self, num_experts, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def extra_repr(self):
        return "experts={}, out_features={}, in_features={}".format(*self.weight.shape)

    def forward(self, x, tokens_per_expert):
        return grouped_product(x, self.weight, tokens_per_expert)


def supports_grouped_mm(weight):
    """Return whether the grouped kernel accepts a weight: bfloat16, in and out multiples of 16 bytes."""
    return weight.dtype == torch.bfloat16 and all(size % 8 == 0 for size in weight.shape[1:])


def grouped_product(x, weight, tokens_per_expert):                 # [rows, in], [experts, out, in], [experts]
    if supports_grouped_mm(weight):
        if weight.requires_grad:
            weight = weight.view_as(weight)          # a view, so that the hook does not stay on the parameter
            weight.register_hook(lambda grad: zero_where_empty(grad, tokens_per_expert))
        return F.grouped_mm(x, weight.transpose(1, 2), offs=tokens_per_expert.cumsum(0, dtype=torch.int32))
    rows_of = x.split(tokens_per_expert.tolist())
    return torch.cat([F.linear(rows, one) for rows, one in zip(rows_of, weight)])


def zero_where_empty(grad, tokens_per_expert):
    """Zero the gradients of experts without tokens, which the grouped kernel may leave unwritten."""
    return grad.masked_fill((tokens_per_expert == 0).view(-1, 1, 1), 0)


def grouped_weight_grad(grad, x, weight, tokens_per_expert):
    """Return the weight's gradient, where autograd does not compute it (zero_bubble.py)."""
    if not len(x):                                        # no expert of this rank has a token
        return torch.zeros_like(weight)
    if supports_grouped_mm(weight):
        product = F.grouped_mm(grad.T, x, offs=tokens_per_expert.cumsum(0, dtype=torch.int32))
        return zero_where_empty(product, tokens_per_expert)
    rows = zip(grad.split(tokens_per_expert.tolist()), x.split(tokens_per_expert.tolist()))
    return torch.stack([grad.T @ x for grad, x in rows])
