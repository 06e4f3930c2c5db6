"""Draw the --log_file of several runs in one picture, and print how far apart their losses are.

    python tools/plot.py one.jsonl tp2.jsonl cp2.jsonl --out curves.png
"""
import argparse
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from refuse import refuse

PANELS = {"loss": "loss (striped where curves coincide)", "grad_norm": "gradient norm", "tokens_per_s": "tokens per second",
          "peak_memory_gib": "peak memory (GiB, largest over ranks)"}
FROM_ZERO = ("tokens_per_s", "peak_memory_gib")
PICTURES = (b"\x89PNG", b"%PDF", b"%!PS", b"<?xml", b"<svg", b"\xff\xd8", b"RIFF")        # how image files begin
COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#f0e442"]   # Okabe and Ito's


def read(path):
    """Return a log's steps. Its last line is torn if the run was killed or still runs."""
    if not Path(path).is_file():
        refuse(f"{path}: no such file; a trainer writes one with --log_file {path}")
    try:
        *whole, _ = Path(path).read_text().split("\n")
        lines = [{name: float(line[name]) for name in ("step", *PANELS)} for line in map(json.loads, whole)]
    except (ValueError, KeyError, TypeError):
        refuse(f"{path}: is not a training log; give files that --log_file has written")
    return lines or refuse(f"{path}: has no steps; let the run finish at least one")


def check_out(out, logs):
    """Refuse an output path whose file is a log, or is not a picture: the file would be overwritten."""
    if Path(out).is_file() and any(Path(out).samefile(log) for log in logs):
        refuse(f"--out {out}: is one of the logs; choose another name")
    if Path(out).is_file() and not Path(out).read_bytes().startswith(PICTURES):
        refuse(f"--out {out}: already exists and is not a picture; choose another name")


def report(runs):
    """Print for each run but the first the largest relative difference of the losses at the same step."""
    first, *others = runs
    for name in others:
        losses = {line["step"]: line["loss"] for line in runs[first]}
        found = [(abs(line["loss"] / losses[line["step"]] - 1), line["step"]) for line in runs[name] if losses.get(line["step"])]
        difference, step = max(found, key=lambda one: (math.isnan(one[0]), one[0]), default=(None, None))
        print(f"{name}: largest relative difference from the loss of {first}: {difference:.1e} (step {step:.0f})" if found
              else f"{name}: no step in common with {first}")


def draw(runs, out):
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axis, (key, title) in zip(axes.flat, PANELS.items()):
        for index, lines in enumerate(runs.values()):
            curve = plain if key == "tokens_per_s" else stripes            # the legend shows the plain lines
            curve(axis, [line["step"] for line in lines], [line[key] for line in lines], index, len(runs))
        if key in FROM_ZERO:
            axis.set_ylim(0, 1.1 * max(line[key] for lines in runs.values() for line in lines))
        axis.set_title(title, loc="left", fontsize=11)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.legend(axes[1, 0].lines, runs, loc="outside upper center", ncols=min(5, len(runs)), frameon=False)
    figure.savefig(out, dpi=120, format=Path(out).suffix[1:])


def plain(axis, steps, values, index, count):
    axis.plot(steps, values, color=COLORS[index % len(COLORS)], linewidth=1.8, marker="o" if len(steps) == 1 else None)


def stripes(axis, steps, values, index, count):
    """Draw a thin line, with thick dashes in the gaps of the other curves: curves that coincide show stripes of all colours."""
    color, dash = COLORS[index % len(COLORS)], 2
    pattern = (-index * dash, (dash, dash * (count - 1))) if count > 1 else "-"
    axis.plot(steps, values, color=color, linewidth=1, zorder=2, marker="o" if len(steps) == 1 else None)
    axis.plot(steps, values, color=color, linewidth=4, zorder=3, linestyle=pattern, dash_capstyle="butt")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = refuse
    parser.add_argument("logs", nargs="+", metavar="LOG.jsonl", help="what --log_file of a trainer has written")
    parser.add_argument("--out", default="curves.png", help="the picture to draw (curves.png)")
    args = parser.parse_args()
    stems = [Path(path).stem for path in args.logs]
    runs = dict(zip(stems if len({*stems}) == len(stems) else args.logs, map(read, args.logs)))
    check_out(args.out, args.logs)
    report(runs)
    try:
        draw(runs, args.out)
    except (OSError, ValueError) as error:                # the path cannot be written, or its suffix is not an image format
        refuse(f"--out {args.out}: {error}")
    print(f"{args.out}: {len(runs)} run{'s' * (len(runs) > 1)}")


if __name__ == "__main__":
    main()
