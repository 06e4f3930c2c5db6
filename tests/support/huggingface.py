"""The outside reference: transformers' own model, trained in a plain loop."""
import math

import numpy as np
import torch
import transformers
from safetensors.torch import load_file


def load(folder, dtype, exact=True):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")         # the grouped implementation refuses float64
    if exact:
        in_own_precision(model)
    return model.train()


def in_own_precision(model):
    """Make norms, rotary tables and routers compute in the model's dtype. In transformers they always compute in float32."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = lambda x, m=module: m.weight * x * (x.square().mean(-1, keepdim=True) + m.variance_epsilon).rsqrt()
        if kind.endswith("RotaryEmbedding"):
            module.forward = lambda x, position_ids, m=module: exact_tables(m.config, position_ids, x.dtype)
        if kind.endswith("TopKRouter"):
            module.forward = lambda x, m=module: exact_router(m, x.flatten(0, -2))


def exact_router(router, x):
    logits = x @ router.weight.T
    scores, experts = logits.softmax(-1).topk(router.top_k)
    return logits, scores / scores.sum(-1, keepdim=True), experts


def on_disk(model, folder):
    """Return the parameters under the names that a checkpoint has, where every expert has its own tensors."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def exact_tables(config, position_ids, dtype):
    """Compute the rotary tables from their definition, in float64. This code is independent of the trainer's."""
    rope, dim = config.rope_parameters, config.head_dim
    frequencies = []
    for i in range(0, dim, 2):
        frequency = rope["rope_theta"] ** (-i / dim)
        if rope["rope_type"] == "llama3":
            wavelength, context = 2 * math.pi / frequency, rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > context / low:
                frequency /= rope["factor"]
            elif wavelength >= context / high:
                smooth = (context / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        frequencies.append(frequency)
    angle = position_ids[..., None].double() * torch.tensor(frequencies * 2, dtype=torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def batch(tokens, step, sequences, seq_len):
    """Return the inputs and targets of a step. This spells out the trainer's data rule: sequence i is tokens[i*S : i*S+S+1]."""
    whole = (len(tokens) - 1) // seq_len
    rows = [tokens[i % whole * seq_len: i % whole * seq_len + seq_len + 1] for i in range(step * sequences, (step + 1) * sequences)]
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def train(model, tokens, steps, sequences, seq_len, lr, warmup, weight_decay=0.1, grad_clip=1.0):
    """Train with torch's AdamW and clip_grad_norm_, the whole batch at once. Return losses, gradient norms and final weights."""
    groups = [dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=weight_decay),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(steps):
        inputs, targets = batch(tokens, step, sequences, seq_len)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)))
        for group in adamw.param_groups:
            group["lr"] = lr * min(1, (step + 1) / max(1, warmup))
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}
