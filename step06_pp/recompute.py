"""--recompute: keep less of the forward pass, and compute the rest again in backward. And --compile."""
import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def save_matmuls_policy(hidden, ctx, op, *args, **kwargs):
    """selective: what matrix products and attention made is kept; norms, rotary and SwiGLU are cheap to
    repeat.

    A product with a short inner dimension is recomputed too: it saves little work for its memory.
    """
    product = op.name().removesuffix(".default").endswith("mm") and args[0].shape[-1] >= hidden
    expensive = product or "attention" in op.name() or "flash_attn" in op.name()
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


# nothing in a layer is random, so no random state is kept for it
checkpoint_fn = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def recompute(layer, mode):
    if mode == "full":                    # only the layer's input is kept; forward runs again before backward
        layer.forward = functools.partial(checkpoint_fn, layer.forward)
    elif mode == "selective":
        policy = functools.partial(save_matmuls_policy, layer.self_attn.q_proj.in_features)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        layer.forward = functools.partial(checkpoint_fn, layer.forward, context_fn=contexts)


def recompute_and_compile(model, args, breaks_at_collectives):
    for layer in model.model.layers.values():
        if breaks_at_collectives:                         # compiled is what lies between two of them
            layer.self_attn.inner_attention = torch.compiler.disable(layer.self_attn.inner_attention)    # for selective to see
            layer.forward = torch.compile(layer.forward) if args.compile else layer.forward
        recompute(layer, args.recompute)
        if args.compile and not breaks_at_collectives:    # the layer as a whole, what it does again included
            layer.forward = torch.compile(layer.forward)
    if args.compile and model.lm_head:
        model.lm_head.cross_entropy = torch.compile(model.lm_head.cross_entropy)
