"""Describe how other trainers differ from this one, as overlays on speed.py's sums. The constants come from the
simulator or a paper, or are our judgement, as the comments say. None was fitted to a run that docs/predictions.md counts as not
fitted.
"""
import json
import math
from pathlib import Path

from speed import GPUS, USUAL
from trainer import fail

COMPILED = dict(memory=0.48, loss=0.61)   # share of llama-8b's bytes that tools/simulate --compile leaves (fuse.py)
# A product in fewer bits takes bfloat16's time at the higher peak, and CASTS of it for scales and casts: by judgement. NVFP4 leaves
# BF16_LAYERS of the layers in bfloat16, as arXiv 2509.25149 does.
PEAKS = dict(float8="float8", mxfp8="float8", nvfp4="float4")
CASTS, BF16_LAYERS = 0.1, 0.15
ASYNC_TP = dict(tp_shown=0.5)     # half of tp's traffic is hidden: by judgement
CUDNN = 0.6                       # of FlashAttention-2's seconds on Hopper: the FlashAttention-3 paper, figure 5
# of ep's traffic, by judgement: Megatron runs one micro-batch's forward and another's backward layer by layer, so that the tokens
# of one travel while the other's attention and experts compute
EP_SHOWN = 0.25
TRAINERS = {
    "this": {},
    # fused kernels; cuDNN's attention; --tp-comm-overlap, which hides most of tp's traffic; schedules that send while
    # they compute; HybridEP; --overlap-moe-expert-parallel-comm, which hides most of ep's traffic
    "megatron": dict(COMPILED, attention=CUDNN, tp_shown=0.35, pp_shown=0.25, shape=0.5, ep_by_node=1.0, ep_shown=EP_SHOWN),
    "torchtitan": dict(gathers_again=0.0)}
ABOUT = dict(this="this trainer", megatron="Megatron-LM with its overlaps", torchtitan="torchtitan")
HOPPER = "h100", "h200", "h800"                           # GPUs on which cuDNN's attention is that much faster


def overlay(trainer, compiled=False, precision="bfloat16", async_tp=False, gpu="h100", base=USUAL):
    found = {**base, **TRAINERS[trainer]}
    if gpu not in HOPPER:
        found["attention"] = base["attention"]
    changes = [dict(product=product_seconds(precision, GPUS[gpu]))]
    if trainer != "megatron":                             # it has these anyway
        changes += [COMPILED] * compiled + [ASYNC_TP] * async_tp
    for change in changes:
        found |= {name: found[name] * share for name, share in change.items()}
    return found


def product_seconds(precision, gpu, kept=BF16_LAYERS):
    """Return the seconds of products in a precision, relative to bfloat16's. With NVFP4, `kept` of the layers stay in bfloat16."""
    if precision not in PEAKS:
        return 1.0
    kept *= precision == "nvfp4"
    return kept + (1 - kept) * (gpu.bfloat16 / getattr(gpu, PEAKS[precision]) + CASTS)


def load_constants(path):
    """Return the constants that dev/bench/fit_own.py has fitted to a cluster, or the usual ones."""
    if path is None:
        return dict(time=USUAL, slack=1.0)
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        known = dict(time={**USUAL, **raw["time"]}, slack=float(raw["slack"]))
        wrong = [name for name, value in dict(known["time"], slack=known["slack"]).items()
                 if name not in {*USUAL, "slack"} or not 0 <= float(value) < math.inf]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"--constants {path}: dev/bench/fit_own.py did not write this file ({type(error).__name__}: {error})")
    return known if not wrong else fail(f"--constants {path}: {wrong[0]} is unknown, or not a number of at least 0")


def constants_of(known, trainer="this", compiled=False, precision="bfloat16", gpu="h100", balance=1.0):
    """Return the constants that answer a question. known are those of --constants, or the usual ones."""
    if precision == "float8" and not GPUS[gpu].float8:
        fail(f"--gpu {gpu}: cannot multiply in 8 bits; leave out --fp8")
    if precision in ("mxfp8", "nvfp4") and not GPUS[gpu].float4:
        able = ", ".join(name for name, one in GPUS.items() if one.float4)
        fail(f"--gpu {gpu}: cannot multiply in {precision}; leave out --{precision}, or choose from {able}")
    time = overlay(trainer, compiled, precision, trainer != "this" and compiled, gpu, known["time"])
    return dict(time=time, slack=known["slack"], trainer=trainer, precision=precision, splits_backward=trainer != "megatron",
                layout=dict(wide=2 if trainer == "megatron" else 3 if compiled else 4, whole_logits=trainer == "torchtitan",
                            balance=balance))
