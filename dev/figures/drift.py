"""Measure how far the layouts of one run drift apart: the table of docs/rounding.md, and drift.png.    python dev/figures/drift.py

    python dev/figures/drift.py --logs FOLDER        # keeps the runs' logs there, and reuses those already there
"""
import argparse
import json
import os
import subprocess
import tempfile
from itertools import accumulate
from pathlib import Path

from common import PICTURES, ROOT, put_into_pages, torchrun

from patched import planted_copy
from plot import COLORS, plt

PAGE = ROOT / "docs/rounding.md"
DTYPES = {"float64": "o", "float32": "s", "bfloat16": "D"}                       # and their markers
BROKEN = "tp 4, norms not summed"
LAYOUTS = {"one process, micro-batch of 4": (1, "--micro_batch_size 4"), "ZeRO-3 over 4": (4, "--zero 3"), "tp 4": (4, "--tp 4"),
           "cp 4": (4, "--cp 4"), "pp 4": (4, "--pp 4"), BROKEN: (4, "--tp 4")}
STEPS = (0, 3, 19)


def train(trainer, world, flags, log):
    if not Path(log).exists():
        torchrun(world, trainer / "train.py", *flags.split(), "--device", "cpu", "--steps", str(STEPS[-1] + 1),
                 "--log_file", f"{log}.part", stdout=subprocess.DEVNULL)
        os.rename(f"{log}.part", log)
    return [json.loads(line) for line in open(log)]


def measure(logs, folder):
    """Return {dtype: {layout: {number: its largest relative difference from one process, up to each step}}}."""
    trainers = dict.fromkeys(LAYOUTS, ROOT / "step08_5d") | {BROKEN: planted_copy("step04_norms_not_summed", folder)}
    apart = {}
    for dtype in DTYPES:
        one = train(ROOT / "step08_5d", 1, f"--dtype {dtype}", f"{logs}/{dtype}.jsonl")
        apart[dtype] = {}
        for layout, (world, flags) in LAYOUTS.items():
            lines = train(trainers[layout], world, f"--dtype {dtype} {flags}", f"{logs}/{dtype} {layout}.jsonl")
            apart[dtype][layout] = {key: [abs(line[key] / of_one[key] - 1) for line, of_one in zip(lines, one)]
                                    for key in ("loss", "grad_norm")}
            apart[dtype][layout] = {key: list(accumulate(values, max)) for key, values in apart[dtype][layout].items()}
            print(dtype, layout, flush=True)
    return apart


def table(apart):
    heads = [f"{name}, {f'up to step {step}' if step else 'step 0'}" for name in ("loss", "norm") for step in STEPS]
    rows = [f"| dtype | layout | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for dtype, layouts in apart.items():
        for layout, numbers in layouts.items():
            cells = [numbers[key][step] for key in ("loss", "grad_norm") for step in STEPS]
            layout = f"*{layout}*" if layout == BROKEN else layout
            rows.append(f"| {dtype} | {layout} | " + " | ".join(f"{cell:.0e}" if cell else "0" for cell in cells) + " |")
    return rows


def draw(apart, out):
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for dtype, marker in DTYPES.items():
        for layout, color, line in (("tp 4", COLORS[0], "-"), (BROKEN, COLORS[5], "--")):
            values = [value or float("nan") for value in apart[dtype][layout]["grad_norm"]]        # a log scale has no zero
            axis.plot(values, color=color, linestyle=line, marker=marker, markersize=4.5, linewidth=1.4)
            if layout == "tp 4":
                axis.annotate(dtype, (len(values) - 1, values[-1]), (8, 0), textcoords="offset points", va="center", fontsize=10)
    axis.plot([], [], color=COLORS[0], label="tp 4")
    axis.plot([], [], color=COLORS[5], linestyle="--", label="tp 4 with a bug, in all three precisions")
    axis.axhline(1e-9, color="grey", linestyle=":")
    axis.text(0, 1.5e-9, "the limit of the recipe", color="#555555", fontsize=9)
    axis.set_yscale("log")
    axis.set_ylim(3e-17, 1)
    axis.set_xlim(-0.5, len(values) + 1.5)
    axis.set_xticks(range(0, len(values), 5))
    axis.set_xlabel("step", fontsize=10)
    axis.set_ylabel("gradient norm: largest relative\ndifference to one process so far", fontsize=10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="center left", bbox_to_anchor=(0.0, 0.3), frameon=False, fontsize=10)
    figure.savefig(out, dpi=100)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--logs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        apart = measure(args.logs or folder, folder)
    put_into_pages(PAGE.parent, dict(drift=table(apart)))
    draw(apart, PICTURES / "drift.png")


if __name__ == "__main__":
    main()
