"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step08.py                 (about three minutes on two cores)
    python dev/figures/step08.py drawn           (only the pictures)
    python dev/figures/step08.py checkpoint cases    (only these, of PICTURES and TABLES)

The ledger comes from a small real run, the cases from the planner, the published runs from tests/data.
"""
import os
import re
import subprocess
import sys

from common import ROOT, paths_of, put_into_pages, torchrun

STEP, FIGURES = paths_of(8)

import matplotlib.pyplot as plt

import nanotron_runs


# ----------------------------------------------------------------------------------------------- the ledger
MAIN = "--model tiny-moe --pp 2 --cp 2 --tp 2 --ep 2 --global_batch_size 16 --micro_batch_size 2 --steps 2 --ledger"


def ledger_table():
    output = torchrun(8, STEP / "train.py", *MAIN.split(), capture_output=True, text=True).stdout
    lines = output[output.index("dimension"):].splitlines()
    return dict(main=["```text", *[line for line in lines if not line.startswith("step")], "```"])


# ------------------------------------------------------------------------------------------ choosing a layout
CASES = {f"case {size}": f"--model llama-{size} --gpus 64 --seq_len 4k --global_batch_tokens 4M" for size in ("8b", "70b")}


def case_tables():
    """Return the planner's best three layouts as tables, with their columns pushed together."""
    tables = {}
    for name, words in CASES.items():
        lines = subprocess.run([sys.executable, ROOT / "tools/plan", *words.split()],
                               check=True, capture_output=True, text=True).stdout.splitlines()
        first = lines.index("") + 1
        table = pushed_together(lines[first:lines.index("", first)])[:4]
        tables[name] = ["```text", *table, "```"]
    return tables


def pushed_together(rows):
    """Narrow the gaps between a table's columns to two spaces."""
    width = max(map(len, rows))
    rows = [row.ljust(width) for row in rows]
    blank = [all(row[i] == " " for row in rows) for i in range(width)] + [False, False]
    keep = [i for i in range(width) if not (blank[i] and blank[i + 1] and blank[i + 2])]
    return ["".join(row[i] for i in keep).rstrip() for row in rows]


GPU, SWITCH, CARD = "#0072b2", "#009e73", 40                       # as in docs/figures/machine.png; GB/s that a card reaches
RINGS = ["#f0b040", "#d55e00", "#cc79a7", "#56b4e9", "#e8e06a", "#8c6bb1", "#a65628", "#999999"]         # each ring of dp
PLACED = [(64, 1), (32, 2), (8, 8)]                                                # dp, tp


def layouts_picture():
    """Draw three layouts of 64 GPUs on the first two nodes and the last one: who is in which group of tp and ring of dp."""
    figure, axes = plt.subplots(len(PLACED), 1, figsize=(9.6, 7.2))
    for axis, (dp, tp) in zip(axes, PLACED):
        def box(x, y, wide, high, color, label="", text="white"):
            axis.add_patch(plt.Rectangle((x, y), wide, high, facecolor=color, edgecolor="#333333", lw=0.8, zorder=2))
            size = 7.5 if label == "card" else 8.5
            axis.text(x + wide / 2, y + high / 2, label, ha="center", va="center", fontsize=size, color=text, zorder=3)

        for place, node in enumerate((0, 1, 7)):
            left = 5.3 * place + 0.4 * (node == 7)
            axis.add_patch(plt.Rectangle((left, 0), 5, 2.75, facecolor="#f6f6f6", edgecolor="#333333", lw=1))
            axis.text(left + 0.1, 2.85, f"node {node}", fontsize=9)
            for gpu in range(8):
                x = left + 0.13 + 0.6 * gpu
                axis.plot([x + 0.27] * 2, [0.9, 1.3], color=RINGS[gpu % tp], lw=2, zorder=1)
                box(x, 1.2, 0.54, 0.6, GPU, str(8 * node + gpu))
                box(x, 0.5, 0.54, 0.4, RINGS[gpu % tp], "card", "black")
                axis.plot([x + 0.27] * 2, [-0.25 - 0.16 * (gpu % tp), 0.5], color=RINGS[gpu % tp], lw=2, zorder=1)
                axis.plot([x + 0.27] * 2, [1.8, 2.0], color=SWITCH, lw=3.4, zorder=1)
            over_nvlink = {1: "the ring inside the node: 360 GB/s", 2: "tp", 8: "tp: 360 GB/s"}[tp]
            wide = tp if tp > 1 else 8
            for first in range(0, 8, wide):
                box(left + 0.13 + 0.6 * first, 2.0, 0.6 * wide - 0.06, 0.45, SWITCH, over_nvlink)
        axis.text(10.65, 1.35, "...", ha="center", fontsize=13)
        for ring in range(tp):
            axis.plot([0.4 + 0.6 * ring, x + 0.27 - 0.6 * (tp - 1 - ring)], [-0.25 - 0.16 * ring] * 2, color=RINGS[ring], lw=2)
        cards = 8 // tp
        what = f"{tp} rings of dp, each with" if tp > 1 else "one ring of dp, with"
        axis.set_title(f"dp {dp}" + f" × tp {tp}" * (tp > 1), loc="left", fontsize=11.5, weight="bold", pad=6)
        axis.set_title(f"{what} {cards} card{'s' * (cards > 1)} per node: {cards * CARD} GB/s", loc="right", fontsize=10.5, pad=6)
        axis.set(xlim=(-0.1, 16.1), ylim=(-1.65 if tp == 8 else -0.7, 3.3))
        axis.axis("off")
    figure.tight_layout(pad=0.5, h_pad=0.9)
    figure.savefig(os.path.join(FIGURES, "layouts.png"), dpi=150)


# --------------------------------------------------------------------------------------------- published runs
def published_tables():
    rows = nanotron_runs.load()
    return {"best runs": nanotron_runs.best_runs(rows), "one change": nanotron_runs.changes(rows)}


LINES = {"1B": ("#222222", "o"), "3B": ("#b5651d", "s"), "8B": ("#4878a8", "^")}       # each model's colour and marker


ONLY_MICRO_BATCH_1 = "8B", "32"                            # this model and tp ran only so; larger ones are much faster


def throughput_picture():
    """Plot runs that others measured: each degree's best over ZeRO and the micro-batch, as a share of its line's best."""
    figure, (over_dp, over_tp) = plt.subplots(1, 2, figsize=(10, 4.6), sharey=True)

    def line(panel, degree, label, look, **wanted):
        degrees, speeds = fastest(degree, **wanted)
        panel.plot(degrees, [100 * speed / max(speeds) for speed in speeds], label=label, **look)
    for name, (color, mark) in LINES.items():
        tp = 2 if name == "8B" else 1
        line(over_dp, "dp", f"{name}, {'dp alone' if tp == 1 else 'with tp 2'}", dict(color=color, marker=mark),
             model=name, tp=tp, pp=1)
        for nodes, dashes, inside in ((8, "-", color), (32, "--", "white")):
            look = dict(color=color, marker=mark, ls=dashes, markerfacecolor=inside)
            line(over_tp, "tp", f"{name}, {8 * nodes} GPUs", look, model=name, nodes=nodes, pp=1)
    for panel in (over_dp, over_tp):
        panel.set_xscale("log", base=2)
        panel.minorticks_off()
        panel.set_ylim(0, 105)
        panel.grid(axis="y", color="#dddddd", lw=0.6)
        panel.legend(frameon=False, fontsize=9.8, loc="lower left")
        panel.tick_params(axis="y", labelsize=10)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    degrees = [4, 8, 16, 32, 64, 128, 256]
    over_dp.set_xticks(degrees, [f"{n}\n{2**10 // n}K" for n in degrees], fontsize=10)
    over_dp.set_xlabel("dp; below it the tokens of a step on each of its ranks", fontsize=10.5)
    over_dp.set_ylabel("tokens per second and GPU, % of the line's best", fontsize=10.5)
    over_dp.set_title("More dp, same batch of a million tokens", fontsize=11)
    over_tp.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"], fontsize=10)
    over_tp.set_xlabel("tp; dp is what is left of the GPUs", fontsize=10.5)
    over_tp.set_title("More tp, same GPUs, same batch", fontsize=11)
    border = 8 * 2**0.5                                   # between 8 and 16
    over_tp.axvline(border, color="#888888", lw=1, ls=":")
    over_tp.text(1.06 * border, 103, "from here on tp\nleaves the node", fontsize=10, va="top", color="#555555")
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "throughput.png"), dpi=110)


def fastest(degree, **wanted):
    """Return the degrees, and the tokens per second per GPU of each one's best run. Nanotron's older code is left out."""
    found = {}
    for row in nanotron_runs.load():
        if row["status"] == "ok" and row["code"] != "legacy" and (row["model"], row["tp"]) != ONLY_MICRO_BATCH_1 \
                and all(row[name] == str(value) for name, value in wanted.items()):
            key = int(row[degree])
            found[key] = max(found.get(key, 0), nanotron_runs.tokens_per_s(row))
    return zip(*sorted(found.items()))


# ------------------------------------------------------------------------------------------------- a checkpoint
RANK_COLORS = ["#f3c98b", "#a9cbe8", "#b9dcae", "#d9b8e0"]                         # of the rank that saved an element
PRINTED = re.compile(r"tp (\d) x dp (\d), rank (\d): (\d) x (\d) at \[(\d), (\d)\]")


def checkpoint_picture():
    """Draw the boxes that by_hand_checkpoint.py prints: who saves which, and which of them each reader copies from."""
    output = subprocess.run([sys.executable, STEP / "by_hand_checkpoint.py"], check=True, capture_output=True, text=True).stdout
    boxes = {}                                            # {(tp, dp): {(rank, rows, columns, row, column)}}
    for tp, dp, *box in (map(int, found) for found in PRINTED.findall(output)):
        boxes.setdefault((tp, dp), set()).add(tuple(box))
    rows, cols = next((box[1], box[2]) for box in boxes[1, 1])                     # the one process has the whole matrix
    saved_by = {(row + i, col + j): rank for rank, high, wide, row, col in boxes[2, 2] for i in range(high) for j in range(wide)}
    assert len(saved_by) == rows * cols

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.05), width_ratios=[cols + 1.6, cols + 2.1, cols + 0.7])
    titles = ["saved under tp 2 x dp 2 with ZeRO", "read under tp 4", "read by one process"]
    for axes, layout, title, gap in zip(panels, [(2, 2), (4, 1), (1, 1)], titles, [1.0, 0.5, 0]):
        shards = layout[0]                                # tp's shards are drawn apart
        right = [gap * (col * shards // cols) for col in range(cols)]
        offsets = {}
        for rank, high, wide, row, col in sorted(boxes[layout], key=lambda box: box[3:]):
            offsets.setdefault(rank, []).append(f"[{row}, {col}]")
            for i in range(row, row + high):
                for j in range(col, col + wide):
                    axes.add_patch(plt.Rectangle((j + right[j], i), 1, 1, facecolor=RANK_COLORS[saved_by[i, j]],
                                                 edgecolor="white", lw=1))
                    axes.text(j + right[j] + 0.5, i + 0.52, saved_by[i, j], ha="center", va="center", fontsize=11.5)
            axes.add_patch(plt.Rectangle((col + right[col], row), wide, high, fill=False, edgecolor="#222222", lw=2.2, zorder=3))
        for rank, places in offsets.items():
            middle = (rank % shards + 0.5) * cols / shards + gap * (rank % shards)
            line = ("\n" if shards == 4 else ": ").join([f"rank {rank}", ", ".join(places)]) if shards > 1 else places[0]
            axes.text(middle, rows + 0.2 + 0.75 * (rank // shards), line, ha="center", va="top", fontsize=10.5, linespacing=1.3)
        for i in range(rows):
            axes.text(-0.4, i + 0.52, i, ha="center", va="center", fontsize=10, color="#777777")
        for j in range(cols):
            axes.text(j + right[j] + 0.5, -0.32, j, ha="center", va="center", fontsize=10, color="#777777")
        axes.set(xlim=(-0.75, cols + right[-1] + 0.1), ylim=(rows + 1.5, -0.7), aspect="equal")
        axes.axis("off")
        axes.set_title(title, fontsize=12.5, pad=3)
    figure.tight_layout(pad=0.3, w_pad=2)
    figure.savefig(os.path.join(FIGURES, "checkpoint.png"), dpi=160)


PICTURES = dict(layouts=layouts_picture, throughput=throughput_picture, checkpoint=checkpoint_picture)
TABLES = dict(ledger=ledger_table, cases=case_tables, published=published_tables)

if __name__ == "__main__":
    asked = sys.argv[1:] or [*PICTURES, *TABLES]
    if asked == ["drawn"]:
        asked = [*PICTURES]
    made = {}
    for name in asked:
        if name in PICTURES:
            PICTURES[name]()
        else:
            made |= TABLES[name]()
    put_into_pages(STEP, made)
