"""Whose trainer: what others do otherwise, as overlays of speed.py's sums.

Constants are physics, or are taken from the simulator or a paper as their comments say. None was fitted to a run that
docs/proof.md counts as not fitted.
"""
from speed import USUAL

# a chain of passes over memory becomes one or two: what tools/simulate --compile leaves of llama-8b's (fuse.py)
COMPILED = dict(memory=0.48, loss=0.61)
# both products of a pair in 8 bits at twice the peak; scales and casts take some of it back, as torchtitan's 8B shows
FLOAT8 = dict(product=0.6)
TRAINERS = {
    "this": {},
    # fused kernels; attention by cuDNN, on an H100 about 1.7 times FlashAttention-2 (FlashAttention-3's paper, figure 5);
    # --tp-comm-overlap hides most of tp's traffic, and its schedules send while they compute
    "megatron": dict(COMPILED, attention=0.6, tp_shown=0.35, pp_shown=0.25, shape=0.5, waits=0.0),
    "torchtitan": dict(waits=0.0)}
ASYNC_TP = dict(tp_shown=0.5)                             # half of it is hidden: by judgement
GATHERS_AGAIN = ("this", "megatron")                      # what tp gathers is not kept


def overlay(trainer, compiled=False, float8=False, async_tp=False, gpu="h100", base=USUAL):
    found = {**base, **TRAINERS[trainer]}
    if gpu not in ("h100", "h200", "h800"):
        found["attention"] = base["attention"]
    for asked, more in ((compiled and trainer != "megatron", COMPILED), (float8, FLOAT8), (async_tp and trainer == "torchtitan", ASYNC_TP)):
        found |= {name: found[name] * share for name, share in more.items()} if asked else {}
    return found
