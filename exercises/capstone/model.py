"""A small decoder as in Llama, or as in Mixtral if there are experts. It knows nothing of other ranks."""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Config(NamedTuple):
    vocab: int = 64
    hidden: int = 32
    ffn: int = 48
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    experts: int = 0                                      # in each layer; 0: no mixture of experts
    top_k: int = 2                                        # experts for each token


def rotate(x, positions):
    """Apply rotary position embeddings to [batch, heads, seq, head_dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10000 ** (torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.hidden // c.heads
        self.q = nn.Linear(c.hidden, c.hidden, bias=False)
        self.k = nn.Linear(c.hidden, c.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(c.hidden, c.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(c.hidden, c.hidden, bias=False)

    def forward(self, x, positions):
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        return self.o(self.attend(rotate(q, positions), rotate(k, positions), v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate, self.up = (nn.Linear(c.hidden, c.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.top_k, self.router = c.top_k, nn.Linear(c.hidden, c.experts, bias=False)
        self.experts = nn.ModuleList(MLP(c) for _ in range(c.experts))

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.route(tokens)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            row, k = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, row, weights[row, k, None] * expert(tokens[row]))
        return out.view_as(x)

    def route(self, tokens):
        """Return the weights of each token's experts, which add up to 1, and their numbers: [tokens, top_k] each."""
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        return weights / weights.sum(-1, keepdim=True), chosen


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(c.hidden, eps=1e-6), Attention(c)
        self.ffn_norm, self.ffn = nn.RMSNorm(c.hidden, eps=1e-6), MoE(c) if c.experts else MLP(c)

    def forward(self, x, positions):
        x = x + self.attn(self.attn_norm(x), positions)
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm, self.head = nn.RMSNorm(c.hidden, eps=1e-6), nn.Linear(c.hidden, c.vocab, bias=False)

    def forward(self, tokens):
        """Return the logits of [batch, seq] tokens."""
        x, positions = self.embed(tokens), torch.arange(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))
