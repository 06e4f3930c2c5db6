"""A plain decoder-only transformer. Modules and parameters are named as in the Hugging Face checkpoint.

Nothing here knows how many devices there are. Later steps shard the model from outside, which works because
- a module reads its width from its weights, so with half the weights it computes half the heads,
- positions are passed in with the tokens, so part of a sequence works as well as all of it,
- layers are addressed by their global index, and the embedding, the last norm and the head may be None,
- the input projections of Attention and MLP (`project`) and attention itself can be replaced.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from loss import LMHead
from moe import MoE

# let split-K matrix products in bfloat16 sum in float32
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def rotary_tables(positions, config, dtype):
    """Return cos and sin of position x frequency, [seq, 1, head_dim], in float32 or better."""
    even = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=positions.device)
    frequency = config.rope_theta ** -(even / config.head_dim)                      # [head_dim / 2]
    if config.rope_scaling:
        frequency = llama3_scaling(frequency, **config.rope_scaling)
    angle = positions.double().unsqueeze(-1) * frequency                            # [seq, head_dim / 2]
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(-2)                         # [seq, 1, head_dim]
    dtype = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def llama3_scaling(frequency, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings):
    """Lengthen the context as Llama 3.1 does: divide low frequencies by `factor`, and keep high ones."""
    turns = original_max_position_embeddings * frequency / (2 * math.pi)           # in the original context
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / factor)


def apply_rotary_emb(x, cos, sin):                                             # [batch, seq, heads, head_dim]
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).type_as(x)


def sdpa(q, k, v):                                                             # [batch, seq, heads, head_dim]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.inner_attention = sdpa

    def project(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x, cos, sin):                                                # [batch, seq, hidden]
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.project(x))
        q, k = apply_rotary_emb(self.q_norm(q), cos, sin), apply_rotary_emb(self.k_norm(k), cos, sin)
        out = self.inner_attention(q, k, v)                                    # [batch, seq, heads, head_dim]
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def project(self, x):
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x):
        gate, up = self.project(x)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MoE(config) if config.num_local_experts else MLP(config)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.num_hidden_layers)})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x, positions):                                            # tokens, or a Block's output
        x = x if self.embed_tokens is None else self.embed_tokens(x)
        cos, sin = rotary_tables(positions, self.config, x.dtype)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return x if self.norm is None else self.norm(x)


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)

    def forward(self, x, positions, targets=None):                                 # [batch, seq]
        return self.lm_head(self.model(x, positions), targets)                # the summed loss, or the logits


def use_flash_attention(model):
    """Make every layer compute its inner attention with the package flash-attn."""
    from flash_attn import flash_attn_func
    for layer in model.model.layers.values():
        layer.self_attn.inner_attention = lambda q, k, v: flash_attn_func(q, k, v, causal=True)
