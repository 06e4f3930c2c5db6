"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step08.py                 (about five minutes on two cores)
    python dev/figures/step08.py drawn           (only the pictures)
    python dev/figures/step08.py checkpoint cases    (only these, of PICTURES and TABLES)

The ledger comes from a small real run, the cases from the planner, the published runs from tests/data, the step drawn to scale and
what there is to see in it from the simulator (one minute).
"""
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict

from common import ROOT, paths_of, put_into_pages, torchrun

STEP, FIGURES = paths_of(8)

import matplotlib.pyplot as plt

import lanes
import nanotron_runs
from simulate.gpus import GPUS

USABLE = GPUS["h100"].usable                              # GiB

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


# ------------------------------------------------------------------------------------------ a step drawn to scale
PASSES = {"F": ("#4878a8", "forward"), "B": ("#d9a441", "backward"), "": ("#a9a9a9", "optimizer and the rest"),
          "wait": ("#d9534f", "waits")}
LINKS = {"NVLink": ("#009e73", 1.08), "network": ("#8064a2", 0.68)}                # colour, and the height at which its row lies
MAGNIFIED, SLICE = 0.012, 0.01                            # seconds of a forward pass that are drawn larger; of a slice of the step


def traced(lane):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, ROOT / "tools/simulate", *lane.command.split(), "--trace", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.load(file)["traceEvents"]


class Played:
    """What a lane's rank does in the step, in seconds, read from the simulator's trace."""
    def __init__(self, lane):
        trace = traced(lane)
        self.spans = defaultdict(list)                    # by stream: (start, end, name, place)
        for stream, name, place, start, seconds in lanes.rows(trace, lane.rank):
            self.spans[stream].append((start / 1e6, (start + seconds) / 1e6, name, place))
        self.memory = [(when / 1e6, size) for when, size in lanes.memory(trace, lane.rank)]
        self.seconds = max(event["ts"] + event["dur"] for event in trace if event["ph"] == "X") / 1e6
        self.passes = sorted(self.spans["actions"])
        self.peak = max(size for _, size in self.memory)

    def kind(self, start, end, name):
        if name.startswith("wait for"):
            return "wait"
        return next((action[0] for a, b, action, _ in self.passes if a <= (start + end) / 2 < b), "")

    def layer(self, nth):
        """Return start and end of each layer in the nth forward, as far as its kernels tell: {name: (start, end)}."""
        a, b, *_ = [one for one in self.passes if one[2][0] == "F"][nth]
        found = {}
        for start, end, _, place in self.spans["compute"]:
            if a <= start < b and place.startswith("layer"):
                found[place] = found.get(place, (start,))[0], end
        return found

    def share(self, stream, first=0.0, last=None):
        """Return for how much of the time between first and last a link is busy."""
        last, busy, until = last or self.seconds, 0.0, first
        for start, end, *_ in sorted(self.spans[stream]):
            busy += max(0.0, min(end, last) - max(start, until))
            until = max(until, end)
        return busy / (last - first)

    def waits(self, first=0.0, last=None):
        """Return the waits in that time, each as (seconds, dimension)."""
        return [(end - start, name.removeprefix("wait for ")) for start, end, name, _ in self.spans["compute"]
                if name.startswith("wait for") and first <= start < (last or self.seconds)]


@functools.cache
def played_lanes():
    return {name: Played(lane) for name, lane in lanes.LANES.items()}


def scale_picture():
    """Draw a step of each lane, all on one axis: kernels, both links, memory; on the right, a part of it much larger."""
    played = played_lanes()
    whole, most = max(one.seconds for one in played.values()), max(one.peak for one in played.values())
    size = 9.6, 1.62 * len(played)
    figure, panels = plt.subplots(len(played), 2, figsize=size, width_ratios=(2.1, 1), sharex="col", sharey=True)
    for (name, one), (left, right) in zip(played.items(), panels):
        shares(left, one, whole)
        when, sizes = zip(*one.memory, (one.seconds, one.memory[-1][1]))
        left.fill_between(when, [0.6 * size / most for size in sizes], step="post", color="#b8b8b8", lw=0)
        left.plot([0, whole], [0.6 * USABLE / most] * 2, color="#222222", lw=0.8, ls=(0, (4, 3)))
        waits = sum(seconds for seconds, _ in one.waits()) / one.seconds
        left.set_title(lanes.LANES[name].title, loc="left", fontsize=10.5, weight="bold", pad=4)
        left.set_title(f"{one.seconds:.2f} s, waits {waits:.0%}, at most {one.peak:.0f} GiB", loc="right", fontsize=9.5, pad=4)
        left.set(xlim=(0, whole), ylim=(0, 2.05))
        left.set_yticks([0.3, 0.85, 1.25, 1.75], ["memory", "network", "NVLink", "compute"])
        magnified(right, one)
        for axes in (left, right):
            axes.tick_params(labelsize=8.5, left=False)
            axes.spines[["top", "right", "left"]].set_visible(False)
    panels[0, 1].set_title(f"{1000 * MAGNIFIED:.0f} ms, in its first forward", loc="left", fontsize=9.5, pad=4)
    panels[-1, 0].set_xlabel("seconds, simulated", fontsize=9.5)
    panels[-1, 1].set_xticks([0, 0.004, 0.008, 0.012], ["0", "4 ms", "8 ms", "12 ms"])
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color, *_ in [*PASSES.values(), *LINKS.values(), ("#b8b8b8",)]]
    labels = [*(label for _, label in PASSES.values()), "on NVLink", "on the network", "memory"]
    labels.append(f"what an H100 can use, {USABLE:g} GiB")
    handles.append(plt.Line2D([], [], color="#222222", lw=0.8, ls=(0, (4, 3))))
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(pad=0.4, h_pad=0.6, w_pad=1.2, rect=(0, 0.045, 1, 1))
    figure.savefig(os.path.join(FIGURES, "scale.png"), dpi=150)
    plt.close(figure)


def shares(axes, one, whole):
    """Draw what part of each slice of time the kernels and the links take, as heights. Single ones would be too narrow."""
    edges = [SLICE * i for i in range(int(whole / SLICE) + 2)]

    def heights(spans):
        found = [0.0] * len(edges)
        for start, end, *_ in spans:
            for i in range(int(start / SLICE), int(end / SLICE) + 1):
                found[i] += max(0.0, min(end, edges[i] + SLICE) - max(start, edges[i])) / SLICE
        return found
    floor = [1.47] * len(edges)
    for kind, (color, _) in PASSES.items():
        high = heights(span for span in one.spans["compute"] if one.kind(*span[:3]) == kind)
        axes.bar(edges, [0.58 * part for part in high], SLICE, floor, align="edge", color=color, lw=0)
        floor = [low + 0.58 * part for low, part in zip(floor, high)]
    for link, (color, bottom) in LINKS.items():
        high = [0.34 * part for part in heights(apart(one.spans[link]))]
        axes.bar(edges, high, SLICE, bottom, align="edge", color=color, lw=0)


def apart(spans):
    """Return the spans without what an earlier one covers."""
    until = 0.0
    for start, end, *_ in sorted(spans):
        if end > until:
            yield max(start, until), end
            until = end


def magnified(axes, one):
    """Draw every kernel and transfer in some of the first forward, from the middle layer on, or a stage's first."""
    layers = one.layer(0)
    begin = [start for start, _ in layers.values()][len(layers) // 2 if len(layers) > 8 else 0] - 0.001

    def bars(spans, bottom, height, color):
        spans = [(max(a - begin, 0), min(b - begin, MAGNIFIED)) for a, b, *_ in spans if b > begin and a < begin + MAGNIFIED]
        axes.broken_barh([(a, b - a) for a, b in spans], (bottom, height), color=color, lw=0)
    for kind, (color, _) in PASSES.items():
        bars([span for span in one.spans["compute"] if one.kind(*span[:3]) == kind], 1.47, 0.58, color)
    for link, (color, bottom) in LINKS.items():
        bars(one.spans[link], bottom, 0.34, color)
    for name, (start, end) in layers.items():
        if start >= begin and (start + end) / 2 < begin + MAGNIFIED:
            last = min(end - begin, MAGNIFIED)
            axes.plot([start - begin, start - begin, last], [0.5, 0.43, 0.43], color="#222222", lw=0.8)
            if last == end - begin:
                axes.plot([last, last], [0.43, 0.5], color="#222222", lw=0.8)
            axes.text((start - begin + last) / 2, 0.37, name, ha="center", va="top", fontsize=8)
    axes.set(xlim=(0, MAGNIFIED))


def scale_tables():
    """Return what there is to see in the lanes. Each sentence is checked against what is drawn."""
    played = played_lanes()
    dp, zero1, zero3, tp, cp, pp, ep = (played[name] for name in ("dp", "zero1", "zero3", "tp", "cp", "pp", "ep"))

    def waits(one):
        return sum(seconds for seconds, _ in one.waits()) / one.seconds

    def last_pass(one):                                   # from when to when
        return one.passes[-1][:2]

    def gaps(one, dimension, least=5e-5):                 # of each layer of the first forward but the first and the last
        starts = [start for start, _ in one.layer(0).values()][1:]
        layers = itertools.pairwise(starts)
        return {sum(seconds > least and of == dimension for seconds, of in one.waits(*layer)) for layer in layers}

    def afterwards(one):                                  # computing after the last backward
        return sum(end - start for start, end, *_ in one.spans["compute"] if start >= last_pass(one)[1]) - sum(
            seconds for seconds, _ in one.waits(last_pass(one)[1]))
    assert min(start for start, *_ in dp.spans["network"]) > last_pass(dp)[0] and waits(dp) < 0.001 and dp.peak > USABLE
    burst = [one.share("network", *last_pass(one)) for one in (dp, zero1)]
    assert burst[1] < 0.6 * burst[0] and zero1.share("network", zero1.passes[0][1], zero1.passes[-1][0]) == 0
    assert all(0.25 < zero3.share("network", *one[:2]) < 0.5 for one in zero3.passes)
    assert gaps(tp, "tp") == {4} and gaps(ep, "ep") == {2} and max(gaps(cp, "cp")) == 7
    backward = tp.passes[1][:2]
    assert sum(seconds for seconds, _ in tp.waits(*backward)) < 0.5 * tp.share("NVLink", *backward) * (backward[1] - backward[0])
    assert cp.seconds == max(one.seconds for one in played.values()) and waits(cp) < 0.04
    before, after = pp.passes[0][0], sum(seconds for seconds, _ in pp.waits(last_pass(pp)[1]))
    assert min(before, after) > 0.05 * pp.seconds and ep.share("network", *last_pass(ep)) > 0.85
    seen = [
        f"**dp: one late burst.** Nothing travels before the last backward. There the network is busy for {burst[0]:.0%} of "
        f"the time, and nobody waits. The norm, clipping and AdamW then take {afterwards(dp):.2f} s, because every GPU updates "
        f"all weights. No H100 has the {dp.peak:.0f} GiB; the lane shows what a larger one would do.",
        f"**ZeRO-1: a smaller burst, and a drizzle at the beginning.** The sums keep the network busy for {burst[1]:.0%} of "
        "the last backward, and the new weights arrive during the first forward. Each GPU updates a 64th of the weights, so "
        f"only {afterwards(zero1):.2f} s remain after backward.",
        f"**ZeRO-3: a steady drizzle.** The network is busy for {zero3.share('network'):.0%} of the step, in both "
        f"micro-batches. A rank waits for {waits(zero3):.0%} of it, where a forward begins and where the last backward ends.",
        f"**tp: gaps in every layer**, four of them in forward. A rank waits for {waits(tp):.0%} of the step. NVLink is busy "
        f"for {tp.share('NVLink'):.0%}: in backward, computing hides most of it.",
        "**cp: slivers.** Seven transfers take keys and values round the ring in each layer of forward, and attention hides "
        f"nearly all of them: a rank waits for {waits(cp):.0%}. The step is the longest because a token attends to a sequence "
        "eight times as long.",
        f"**pp: a hole at both ends.** The lane is the last stage. It waits {before:.2f} s for its first micro-batch, and "
        f"{after:.2f} s for the other stages after its last one. Its messages take {pp.share('network'):.0%} of the network's "
        "time.",
        "**ep: two gaps in every layer** of forward, one before the experts and one after them. The waits come to "
        f"{waits(ep):.0%} of the step. Because ep fills the node, a ring of the experts' gradients has one card in each node, "
        f"and that is busy for {ep.share('network', *last_pass(ep)):.0%} of the last backward.",
    ]
    return {"scale": [line for one in seen for line in textwrap.wrap(one, 120, initial_indent="- ", subsequent_indent="  ")]}


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


PICTURES = dict(layouts=layouts_picture, scale=scale_picture, throughput=throughput_picture, checkpoint=checkpoint_picture)
TABLES = dict(ledger=ledger_table, cases=case_tables, published=published_tables, scale=scale_tables)

if __name__ == "__main__":
    asked = sys.argv[1:] or [*PICTURES | TABLES]
    if asked == ["drawn"]:
        asked = [*PICTURES]
    made = {}
    for name in asked:
        if name in PICTURES:
            PICTURES[name]()
        if name in TABLES:
            made |= TABLES[name]()
    put_into_pages(STEP, made)
