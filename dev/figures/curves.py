"""Draw the README's curves.png: one training run, in a layout of every step but step 7.    python dev/figures/curves.py"""
import os
import tempfile

import torch

from common import PICTURES, ROOT, torchrun

from plot import plain, plt, read, stripes

RUNS = {"one process": ("step01_single_gpu", 1, ""), "dp 4": ("step02_dp", 4, ""), "ZeRO-3 over 4": ("step03_zero", 4, "--zero 3"),
        "tp 4": ("step04_tp_sp", 4, "--tp 4"), "cp 4": ("step05_cp", 4, "--cp 4"),
        "pp 4": ("step06_pp", 4, "--pp 4 --schedule zerobubble"),
        "dp 2, tp 2, cp 2, pp 2, ZeRO-1": ("step08_5d", 16, "--tp 2 --cp 2 --pp 2 --zero 1")}
FLAGS = "--dtype float64 --steps 60"


def train(step, world, flags, log):
    torchrun(world, ROOT / step / "train.py", *FLAGS.split(), *flags.split(), "--log_file", log)
    return read(log)


def draw(runs, out):
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    one = runs["one process"]
    for index, lines in enumerate(runs.values()):
        steps = [line["step"] for line in lines]
        for axis, key in zip(axes, ("loss", "grad_norm")):
            stripes(axis, steps, [line[key] for line in lines], index, len(runs))
        if lines is not one:
            plain(axes[2], steps, [difference(*pair) for pair in zip(lines, one)], index, len(runs))
    for dtype in ("float32", "float64"):
        precision = torch.finfo(getattr(torch, dtype)).eps
        axes[2].axhline(precision, color="grey", linestyle=":")
        axes[2].annotate(f"precision of {dtype}", (0.99, precision), xycoords=("axes fraction", "data"), ha="right", va="top",
                         color="grey", zorder=9)
    axes[2].set_yscale("log")
    axes[2].set_ylim(1e-17, 1e-6)
    titles = "loss (striped where curves coincide)", "gradient norm", "how far either is from one process, relative"
    for axis, title in zip(axes, titles):
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(axes[0].lines[::2], runs, loc="outside upper center", ncols=len(runs), frameon=False)
    figure.savefig(out, dpi=120)


def difference(line, one):
    """Return the largest relative difference between two lines, but at least float64's precision."""
    return max(torch.finfo(torch.float64).eps, *(abs(line[key] / one[key] - 1) for key in ("loss", "grad_norm")))


with tempfile.TemporaryDirectory() as folder:
    draw({name: train(*run, os.path.join(folder, f"{name}.jsonl")) for name, run in RUNS.items()}, PICTURES / "curves.png")
