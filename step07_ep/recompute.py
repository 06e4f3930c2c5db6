"""--recompute (activation checkpointing): keep fewer activations, compute the rest again. Also --compile."""
import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from schedules import SCHEDULES


def save_matmuls_policy(hidden, ctx, op, *args, **kwargs):
    """Tell --recompute selective which results to save: those of matrix products and of attention.

    torchtitan's "selective" is similar. Megatron's is the opposite: it recomputes only attention.

    Norms, rotary embeddings and SwiGLU are cheap to repeat. So is a product with a short inner dimension:
    storing its result would take much memory and avoid little work.
    """
    product = op.name().endswith("mm") and args[0].shape[-1] >= hidden
    expensive = product or "attention" in op.name() or "flash_attn" in op.name()
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


# nothing in a layer is random, so there is no random state to save
checkpoint_fn = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def recompute(layer, mode):
    if mode == "full":                    # save only the layer's input; run forward again before backward
        layer.forward = functools.partial(checkpoint_fn, layer.forward)
    elif mode == "selective":
        policy = functools.partial(save_matmuls_policy, layer.self_attn.q_proj.in_features)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        layer.forward = functools.partial(checkpoint_fn, layer.forward, context_fn=contexts)


def has_graph_breaks(model, args):
    """Tell whether a layer calls functions that torch.compile skips."""
    return (args.tp * args.cp > 1 or SCHEDULES[args.schedule].split_backward
            or model.model.config.num_local_experts > 0)   # routing is not compiled


def recompute_and_compile(model, args):
    breaks = has_graph_breaks(model, args)
    for layer in model.model.layers.values():
        if breaks:                                   # compile what lies between two breaks
            attention = layer.self_attn
            # not compiled, so that --recompute selective sees the attention operation
            attention.inner_attention = torch.compiler.disable(attention.inner_attention)
            layer.forward = torch.compile(layer.forward) if args.compile else layer.forward
        recompute(layer, args.recompute)
        if args.compile and not breaks:              # the whole layer, recomputation included
            layer.forward = torch.compile(layer.forward)
    if args.compile and model.lm_head:
        model.lm_head.cross_entropy = torch.compile(model.lm_head.cross_entropy)
