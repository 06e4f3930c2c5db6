"""Draw the --log_file of several runs in one picture, and print how far apart their losses are.

    python tools/plot.py one.jsonl tp2.jsonl cp2.jsonl --out curves.png
"""
import argparse
import contextlib
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
    if not Path(path).is_file():
        refuse(f"{path}: no such file; a trainer writes one with --log_file {path}")
    try:
        *whole, last = Path(path).read_text().split("\n")
        lines = [json.loads(line) for line in whole]
        with contextlib.suppress(ValueError):             # the last line is torn if a run was killed or still runs
            lines += [json.loads(last)]
    except (OSError, ValueError, RecursionError):
        lines = [None]
    if not all(isinstance(line, dict) and all(is_number(line.get(name)) for name in ("step", *PANELS)) for line in lines):
        refuse(f"{path}: is not a training log; give files that --log_file has written")
    return lines or refuse(f"{path}: has no steps; let the run finish at least one")


def is_number(value):
    return isinstance(value, float) or isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300


def check_out(out, logs):
    """Refuse an output path whose file is a log, or is not a picture: the file would be overwritten."""
    path = Path(out)
    if path.exists() and any(path.samefile(log) for log in logs):
        refuse(f"--out {out}: is one of the logs; choose another name")
    try:
        begin = path.read_bytes()[:5] if path.is_file() else b""
    except OSError as error:
        refuse(f"--out {out}: {error}")
    if begin and not begin.startswith(PICTURES):
        refuse(f"--out {out}: already exists and is not a picture; choose another name")


def relative_difference(loss, right):
    if loss == right:
        return 0.0
    difference = abs(loss / right - 1) if right else math.inf
    return math.inf if math.isnan(difference) else difference


def largest_difference(lines, reference):
    """Return the largest relative difference of the losses at the same step, and that step; None if they share no step."""
    losses = {line["step"]: line["loss"] for line in reference}
    shared = [line for line in lines if line["step"] in losses]
    return max(((relative_difference(line["loss"], losses[line["step"]]), line["step"]) for line in shared), default=None)


def report(runs):
    first, *others = runs
    for name in others:
        found = largest_difference(runs[name], runs[first])
        print(f"{name}: largest relative difference from the loss of {first}: {found[0]:.1e} (step {found[1]})" if found
              else f"{name}: no step in common with {first}")


def draw(runs, out):
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axis, (key, title) in zip(axes.flat, PANELS.items()):
        for index, lines in enumerate(runs.values()):
            curve = stripes if key != "tokens_per_s" else plain
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
    figure.savefig(out, dpi=120)


def plain(axis, steps, values, index, count):
    axis.plot(steps, values, color=COLORS[index % len(COLORS)], linewidth=1.8, marker="o" if len(steps) == 1 else None)


def stripes(axis, steps, values, index, count):
    """Draw a thin line, with thick dashes in the gaps of the other curves: curves that coincide show stripes of all colours."""
    color, dash = COLORS[index % len(COLORS)], 2
    pattern = (-index * dash, (dash, dash * (count - 1))) if count > 1 else "-"
    axis.plot(steps, values, color=color, linewidth=1, zorder=2, marker="o" if len(steps) == 1 else None)
    axis.plot(steps, values, color=color, linewidth=4, zorder=3, linestyle=pattern, dash_capstyle="butt")


def names(paths):
    """Return the files' stems, or the whole paths if two stems are the same."""
    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = refuse
    parser.add_argument("logs", nargs="+", metavar="LOG.jsonl", help="what --log_file of a trainer has written")
    parser.add_argument("--out", default="curves.png", help="the picture to draw (curves.png)")
    args = parser.parse_args()
    runs = dict(zip(names(args.logs), map(read, args.logs)))
    check_out(args.out, args.logs)
    report(runs)
    try:
        draw(runs, args.out)
    except (OSError, ValueError) as error:                # the path cannot be written, or its suffix is not an image format
        refuse(f"--out {args.out}: {error}")
    print(f"{args.out}: {len(runs)} run{'s' * (len(runs) > 1)}")


if __name__ == "__main__":
    main()
