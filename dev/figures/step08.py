"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step08.py                 (about a minute on two cores)
    python dev/figures/step08.py drawn           (only the pictures)
    python dev/figures/step08.py choose cases    (only these, of PICTURES and TABLES)

The ledger comes from a small real run.
"""
import os
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
CASES = {"case 8b": "--model llama-8b --gpus 64 --seq_len 4k --global_batch_tokens 4M"}


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


# --------------------------------------------------------------------------------------------- published runs
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


# ---------------------------------------------------------------------------------------------- the two trees
QUESTION, ANSWER, BANDS = "#f6e6c8", "#ffffff", ["#eef3f8", "#f4f4f0", "#eef5ee"]


def choose_picture():
    """Draw the two decision trees, for what fits and for what is fast, with the batch between them."""
    figure, axes = plt.subplots(figsize=(9.4, 10.6))

    def box(x, y, width, height, text, color=ANSWER):
        """Draw a box around its middle."""
        axes.add_patch(plt.Rectangle((x - width / 2, y - height / 2), width, height,
                                     facecolor=color, edgecolor="#444444", lw=1, zorder=2))
        axes.text(x, y, text, ha="center", va="center", fontsize=9.6, linespacing=1.35, zorder=3)

    def arrow(start, end, text="", dx=0.0, dy=0.0):
        """Draw an arrow, and its words at (dx, dy) from its middle."""
        axes.annotate("", end, start, arrowprops=dict(arrowstyle="->", color="#444444", lw=1.3), zorder=1)
        middle = (start[0] + end[0]) / 2 + dx, (start[1] + end[1]) / 2 + dy
        axes.text(*middle, text, fontsize=9.6, style="italic", ha="center", va="center", zorder=4)

    def band(top, bottom, color, title):
        axes.add_patch(plt.Rectangle((0, bottom), 18, top - bottom, facecolor=color, zorder=0))
        axes.text(0.25, top - 0.25, title, fontsize=11, weight="bold", ha="left", va="top")

    band(21.2, 11.8, BANDS[0], "1   Fit: does a training step fit in memory?")
    box(9, 19.4, 8.4, 0.9, "With one sequence: what must be sharded?", QUESTION)
    answers = [(2.25, "optimizer\nstates", -1.15, "dp and ZeRO-1"),
               (6.75, "and\ngradients", -1.15, "ZeRO-2, with few\nmicro-batches"),
               (11.25, "and weights", 1.0,
                "the smallest tp or pp\nthat fits; or ZeRO-3, with\nmany tokens on each rank,\nrecomputed if need be"),
               (15.75, "and more than\na node", 1.6, "add pp, with the fewest\nstages that fit;\nor ZeRO-3 alone")]
    for x, answer, aside, text in answers:
        near = 9 + 0.45 * (x - 9)
        arrow((near, 18.95), (x, 17.75), answer, aside, 0.08)
        box(x, 16.85, 4.1, 1.8, text)
        arrow((x, 15.95), (near, 15.05))
    box(9, 14.6, 7, 0.9, "What else does not fit?", QUESTION)
    rest = [(3.1, "activations of\none sequence", -1.75, "recompute; or tp in\nthe node, then cp"),
            (9, "experts", 0.75, "ep, inside dp x cp x tp"),
            (14.9, "still too much,\nno more GPUs", 1.75, "recompute everything;\nsmaller micro-batch")]
    for x, why, aside, text in rest:
        arrow((9 + 0.45 * (x - 9), 14.15), (x, 12.95), why, aside, 0.12)
        box(x, 12.4, 4.6, 1.1, text)

    band(11.75, 7.1, BANDS[1], "2   Batch: is this the global batch that you want?")
    box(9, 10.2, 8.5, 0.9, "micro-batch x accumulation x dp = ?", QUESTION)
    arrow((6.8, 9.75), (4.6, 8.75), "too small", -1.1, 0.12)
    box(4.6, 8.05, 6.6, 1.4, "accumulate (saves GPU hours)\nor add dp (saves days)")
    arrow((11.2, 9.75), (13.4, 8.75), "too large", 1.1, 0.12)
    box(13.4, 8.05, 6.6, 1.4, "take ranks from dp, and\ngive them to tp, cp or pp")

    band(7.05, -0.45, BANDS[2], "3   Speed: is communication hidden?")
    box(4.2, 4.95, 6.6, 1.4, "Do dp's reductions hide\nbehind one backward?", QUESTION)
    arrow((7.5, 5.15), (11.1, 5.45), "yes", dy=0.3)
    box(13.9, 5.55, 5.6, 0.9, "keep this dp, or more")
    arrow((7.5, 4.75), (11.1, 4.35), "no", dy=-0.34)
    box(13.9, 4.1, 5.6, 1.1, "take ranks from dp; give them\nto tp (in the node) or pp")
    arrow((4.2, 4.25), (4.2, 3.2), "then", dx=0.7)
    box(4.2, 2.5, 6.6, 1.4, "With pp: does the bubble\ncost much?", QUESTION)
    arrow((7.5, 2.5), (11.1, 2.5), "yes", dy=0.28)
    box(13.9, 2.5, 5.6, 1.2, "more micro-batches,\nor another schedule")
    arrow((4.2, 1.8), (4.2, 1.25), "then", dx=0.7)
    box(9, 0.55, 16.2, 1.4, "Finally, with tp, try a larger micro-batch.\n"
                            "Then measure, and change one thing at a time.")
    axes.set(xlim=(0, 18), ylim=(-0.45, 21.2))
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    figure.savefig(os.path.join(FIGURES, "choose.png"), dpi=110)


PICTURES = dict(throughput=throughput_picture, choose=choose_picture)
TABLES = dict(ledger=ledger_table, cases=case_tables)

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
