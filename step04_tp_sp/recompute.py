"""Activation recomputation: keep less of the forward pass, and compute the rest again in backward."""
import functools

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def keep_products(hidden, ctx, op, *args, **kwargs):
    """selective: what matrix products and attention made is kept; norms, rotary and SwiGLU are cheap to repeat.

    And so is a product that sums over few columns: for as much memory it saves less work.
    """
    product = op.name().removesuffix(".default").endswith("mm") and args[0].shape[-1] >= hidden
    dear = product or "attention" in op.name() or "flash_attn" in op.name()
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(layers, mode):
    """full: of each layer only the input is kept, and its forward runs again just before its backward."""
    for layer in layers if mode != "none" else []:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if mode == "selective":
            keep = functools.partial(keep_products, layer.self_attn.q_proj.in_features)
            layer.forward.keywords["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep)
