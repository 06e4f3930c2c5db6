"""Makes, from runs, this README's pictures and the tables between its `<!-- measured: ... -->` marks.

    python tools/figures/step08.py                 (about five minutes on two cores)
    python tools/figures/step08.py drawn           (only the pictures)
    python tools/figures/step08.py choose cases    (only these, of PICTURES and TABLES)

Nearly all of it are dry runs, one after the other in this process; the checkpoints are of real, small runs.
"""
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from unittest.mock import patch

from common import ROOT, paths_of, put_into_page, torchrun

STEP, FIGURES = paths_of(8)

import matplotlib.pyplot as plt

import config
import fit_plan
import ledger
import metrics
import model
import torch
from pipeline_parallel import first_layers
from profiling import KINDS
from simulate.observe import dry_run

GIB, GB = 2**30, 1e9
LLAMA, MIXTRAL = config.PRESETS["llama-8b"], config.PRESETS["mixtral-8x7b"]
RANKS, SEQ, BATCH = 8, 8192, 8
TOKENS = SEQ * BATCH


# ------------------------------------------------------------------------------------------ dry runs, watched
class Timed(ledger.Ledger):
    """Notes when it was sent, too."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.sends = []                                   # (seconds, dimension, collective, wire bytes)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        before = Counter(self.wire)
        result = super().__torch_dispatch__(op, types, args, kwargs)
        for what in self.wire:
            if self.wire[what] != before[what]:
                self.sends.append((time.perf_counter(), *what, self.wire[what] - before[what]))
        return result


def seen_in(flags, ranks, rank):
    """What a rank of a dry run sees, and where in the step it sent what."""
    ledgers = []

    def timed(mesh):
        ledgers.append(Timed(mesh))
        return ledgers[-1]

    def note(seen, model, optimizer, mesh):
        seen.ledger, seen.expected = ledgers[-1], Counter()
        for group, collective, size in formula(model, mesh, seen.args):
            seen.expected[seen.ledger.name(group), collective] += size
        experts = [my_experts(layer.mlp) for layer in model.model.layers.values() if hasattr(layer.mlp, "experts")]
        seen.experts, seen.layers = experts[0] if experts else None, [int(i) for i in model.model.layers]
        seen.ends = [model.model.embed_tokens is not None, model.lm_head is not None]
        seen.by_phase, seen.all_ranks = by_phase(seen.ledger.sends, seen.actions), mesh.mesh.tolist()
    formula = ledger.formula
    with patch("ledger.Ledger", timed):
        return dry_run(flags.split(), ranks, rank, note)


def my_experts(moe):
    weight = moe.experts.w1.weight
    first = sum(part.index * len(weight) for part in weight.placement.parts if part.dim == 0)
    return list(range(first, first + len(weight)))


def by_phase(sends, actions):
    """Bytes on the wire in forward, in backward, and in neither; a message to another stage belongs to what
    came before it."""
    phases = Counter()
    for seconds, dimension, collective, size in sends:
        inside = [action for action in actions if action.start <= seconds <= action.end]
        before = [action for action in actions if action.end <= seconds]
        action = inside[0] if inside else before[-1] if dimension == "pp" and before else None
        phases["step" if action is None else "forward" if action.kind == "F" else "backward"] += size
    return phases


def dry(flags, ranks=RANKS, rank=0, name="llama-8b", seq=SEQ, batch=BATCH):
    return seen_in(f"--model {name} --seq_len {seq} --global_batch_size {batch} --micro_batch_size 1 {flags}", ranks, rank)


def printed(flags):
    done = subprocess.run([sys.executable, ROOT / "tools/simulate", "8", *flags.split()], check=True,
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.stdout.rstrip().splitlines()


# ------------------------------------------------------------------------------------------- 5D in a nutshell
P = metrics.parameter_count(LLAMA)
H, L, V = LLAMA.hidden_size, LLAMA.num_hidden_layers, LLAMA.vocab_size
KV = LLAMA.num_key_value_heads * LLAMA.head_dim
NORMS = (2 * L + 1) * H
LAYER = 2 * H * H + 2 * H * KV + 3 * H * LLAMA.intermediate_size + 2 * H
OF_TP = (P - NORMS) // RANKS + NORMS
STAGES = [*first_layers(LLAMA, RANKS)]
OF_PP = V * H + (STAGES[1] - STAGES[0]) * LAYER
OF_EXPERTS = MIXTRAL.num_hidden_layers * 8 * 3 * MIXTRAL.hidden_size * MIXTRAL.intermediate_size
with torch.device("meta"):
    OF_MIXTRAL = sum(param.numel() for param in model.Llama(MIXTRAL).parameters())
STREAM = 2 * TOKENS * H                                   # bytes of a tensor [batch, seq, hidden], whole step
KEYS = 2 * TOKENS // RANKS * KV * L                       # elements of a rank's keys and values, all layers
ROWS = 2 * TOKENS // RANKS * 2 * H * L                    # bytes of rows sent to experts, all layers, top_k 2
KEPT = V * H + LAYER + V * H + H                          # ZeRO-3: embedding, last layer, head: gathered once
SHARE = (RANKS - 1) / RANKS

#  name, flags, model, parameters of weights / gradients / optimizer states with their formulas,
#  bytes on the wire: forward, backward, step
NUTSHELL = [
    ("DP", "--dp 8", "llama-8b", [(P, "P")] * 3, [0, 2 * SHARE * 4 * P, 0]),
    ("ZeRO-1", "--zero 1", "llama-8b", [(P, "P"), (P, "P"), (P // 8, "P/8")],
     [0, SHARE * 4 * P, SHARE * 2 * P]),
    ("ZeRO-2", "--zero 2", "llama-8b", [(P, "P"), (P // 8, "P/8"), (P // 8, "P/8")],
     [0, SHARE * 4 * P, SHARE * 2 * P]),
    ("ZeRO-3", "--zero 3", "llama-8b", [(P // 8, "P/8")] * 3,
     [SHARE * 2 * P, SHARE * (4 * P + 2 * (P - KEPT)), 0]),
    ("TP", "--tp 8 --sp off", "llama-8b", [(OF_TP, "P/8 + norms")] * 3,
     [2 * SHARE * (2 * L + 1) * STREAM, 2 * SHARE * (2 * L + 1) * STREAM, 0]),
    ("TP+SP", "--tp 8", "llama-8b", [(OF_TP, "P/8 + norms")] * 3,
     [SHARE * (4 * L + 2) * STREAM, SHARE * (6 * L + 2) * STREAM, 0]),
    ("CP", "--cp 8", "llama-8b", [(P, "P")] * 3,
     [7 * 2 * KEYS, 7 * 2 * KEYS + 8 * 4 * KEYS + 2 * SHARE * 4 * P, 0]),
    ("CP, ZeRO-3", "--cp 8 --zero 3", "llama-8b", [(P // 8, "P/8")] * 3, None),
    ("PP", "--pp 8", "llama-8b", [(OF_PP, "stage 0")] * 3, [STREAM, 0, 0]),
    ("DP, experts", "--dp 8", "mixtral-8x7b", [(OF_MIXTRAL, "Q")] * 3, [0, 2 * SHARE * 4 * OF_MIXTRAL, 0]),
    ("EP", "--ep 8", "mixtral-8x7b", [(OF_MIXTRAL - OF_EXPERTS * 7 // 8, "Q - 7E/8")] * 3,
     [2 * SHARE * ROWS, 2 * SHARE * ROWS + 2 * SHARE * 4 * (OF_MIXTRAL - OF_EXPERTS), 0])]


def nutshell_tables():
    memory = ["| strategy | flags | weights, 2 bytes | gradients, 4 bytes | optimizer, 12 bytes "
              "| between steps, GiB: weights, gradients, optimizer | activations at most, GiB "
              "| peak of all, GiB | FLOPs of rank 0 |",
              "|---|---|---|---|---|---|---|---|---|"]
    wire = ["| strategy | in forward, GB | in backward, GB | before and after, GB | collectives |",
            "|---|---|---|---|---|"]
    for name, flags, preset, parameters, sent in NUTSHELL:
        seen = dry(flags, name=preset)
        between = [seen.between[kind] for kind in ("parameters", "gradients", "optimizer states")]
        for measured, (count, _), size in zip(between, parameters, (2, 4, 12)):
            assert abs(measured - size * count) <= 1e-6 * measured, (name, measured, size * count)
        for what in {*seen.ledger.payload, *seen.expected}:
            if seen.ledger.wire[what] > 1e8:
                payload, expected = seen.ledger.payload[what], seen.expected[what]
                assert payload == expected, (name, what, payload, expected)
        phases = [seen.by_phase[phase] for phase in ("forward", "backward", "step")]
        shown = [[f"{n / GB:.3f}" for n in some] for some in (phases, sent or [])]
        print(name, *shown, dict(seen.ledger.wire))
        if sent:
            assert abs(sum(phases) - sum(sent)) < 2e-3 * sum(sent), (name, phases, sent)
        memory.append(f"| {name} | `{flags}` | {' | '.join(text for _, text in parameters)} "
                      f"| {', '.join(f'{n / GIB:.1f}' for n in between)} "
                      f"| {seen.most['activations'] / GIB:.1f} | {sum(seen.peak.values()) / GIB:.1f} "
                      f"| {seen.flops:.2e} |")
        large = [what for what in sorted(seen.ledger.calls) if seen.ledger.wire[what] > 1e8]
        calls = ", ".join(f"{seen.ledger.calls[what]} {what[1]} ({what[0]})" for what in large)
        cells = " | ".join(f"{n / GB:.2f}" if n > 1e6 else "0" for n in phases)
        wire.append(f"| {name} | {cells} | {calls} |")
    return dict(memory=memory, wire=wire)


# --------------------------------------------------------------------------------------------- 8B, 1K to 128K
LENGTHS = [1024, 4096, 16384, 65536, 131072]
WAYS = [("one GPU", "", 1, 1), ("ZeRO-3 on 8", "--zero 3", 8, 8), ("TP 8 (with SP)", "--tp 8", 8, 1),
        ("CP 8, ZeRO-3", "--cp 8 --zero 3", 8, 1), ("TP 2 x CP 4, ZeRO-3", "--tp 2 --cp 4 --zero 3", 8, 1),
        ("TP 4 x PP 2", "--tp 4 --pp 2", 8, 2)]
MOST = 160                                                # GiB that a panel shows


def memory_picture():
    figure, axes = plt.subplots(2, len(WAYS), figsize=(11, 6.4), sharey=True)          # read 900 pixels wide
    for row, recompute in enumerate(("none", "full")):
        for panel, (title, flags, ranks, batch) in zip(axes[row], WAYS):
            for i, seq in enumerate(LENGTHS):
                seen = dry(f"{flags} --recompute {recompute}", ranks=ranks, seq=seq, batch=batch)
                low = 0
                for kind, color in KINDS.items():
                    size = seen.peak[kind] / GIB
                    panel.bar(i, size, 0.78, bottom=low, color=color, label=kind if i == 0 else None)
                    low += size
                panel.text(i, min(low, MOST - 7) + 1.5, f"{low:,.0f}", ha="center", va="bottom", fontsize=8.5,
                           weight="bold" if low <= 80 else None, color="black",
                           bbox=dict(facecolor="white", edgecolor="none", pad=0.6, alpha=0.85))
                print(title, recompute, seq, f"{low:.1f}")
            panel.axhline(80, color="black", ls="--", lw=1)
            panel.set(ylim=(0, MOST), xlim=(-0.6, len(LENGTHS) - 0.4))
            panel.set_xticks(range(len(LENGTHS)), [f"{seq // 1024}" for seq in LENGTHS])
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
            if row == 0:
                panel.set_title(title, fontsize=10)
            else:
                panel.set_xlabel("thousand tokens")
        what = "no recomputation" if recompute == "none" else "full recomputation"
        axes[row][0].set_ylabel(f"GiB at the peak, rank 0\n{what}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend([*handles, plt.Line2D([], [], color="black", ls="--", lw=1)], [*labels, "80 GiB"],
                  loc="lower center", ncol=6, frameon=False)
    figure.tight_layout(rect=(0, 0.045, 1, 1))
    figure.savefig(os.path.join(FIGURES, "memory.png"), dpi=110)


# ------------------------------------------------------------------------------------------------ the mesh
STAGE_COLORS, CHUNKS = ["#dce8f4", "#f6e6c8"], ["chunks 0 and 3", "chunks 1 and 2"]


def mesh_picture():
    """Drawn from what each of the 16 ranks has in a dry run."""
    flags = "--model tiny-moe --seq_len 64 --global_batch_size 8 --micro_batch_size 2"
    layout = "--dp 2 --tp 2 --cp 2 --pp 2 --ep 4"
    ranks = [seen_in(f"{flags} {layout}", 16, rank) for rank in range(16)]
    figure, axes = plt.subplots(figsize=(9.4, 7.0))
    for rank, seen in enumerate(ranks):
        at = {name: index for name, (index, _) in seen.mesh.items()}
        assert seen.all_ranks[at["pp"]][at["dp"]][at["cp"]][at["tp"]] == rank
        x, y = at["pp"] * 7.4 + at["tp"] * 3.1, -(at["dp"] * 4.4 + at["cp"] * 1.9)
        axes.add_patch(plt.Rectangle((x, y), 2.9, 1.6, facecolor=STAGE_COLORS[at["pp"]],
                                     edgecolor="#444444", lw=1))
        axes.text(x + 0.12, y + 1.5, f"{rank}", ha="left", va="top", fontsize=13, weight="bold")
        layers, experts = seen.layers, seen.experts
        lines = [f"layers {layers[0]}-{layers[-1]}{', embed.' * seen.ends[0]}{', head' * seen.ends[1]}",
                 f"{['1st', '2nd'][at['tp']]} half of matrices",
                 f"{['1st', '2nd'][at['dp']]} half of batch", CHUNKS[at['cp']],
                 f"experts {experts[0]} and {experts[-1]}"]
        axes.text(x + 2.82, y + 0.07, "\n".join(lines), ha="right", va="bottom", fontsize=9.2,
                  linespacing=1.25)

    def arrow(start, end, color, bend):
        style = dict(arrowstyle="<->", color=color, lw=1.8, connectionstyle=f"arc3,rad={bend}")
        axes.annotate("", end, start, arrowprops=style)
    arrow((1.45, 1.64), (4.55, 1.64), "#4878a8", -0.18)
    axes.text(3.0, 2.2, "tp", color="#4878a8", ha="center", fontsize=12, weight="bold")
    arrow((-0.1, 0.8), (-0.1, -1.1), "#6aa56e", 0.25)
    axes.text(-0.5, -0.15, "cp", color="#6aa56e", ha="right", va="center", fontsize=12, weight="bold")
    arrow((-0.1, 0.9), (-0.1, -3.6), "#c8605a", 0.62)
    axes.text(-1.62, -1.4, "dp", color="#c8605a", ha="right", va="center", fontsize=12, weight="bold")
    arrow((1.0, 1.64), (8.4, 1.64), "#d9a441", -0.3)
    axes.text(4.7, 3.25, "pp", color="#d9a441", ha="center", fontsize=12, weight="bold")
    axes.text(-1.0, -7.7, "Rank 0 is in four groups: tp with 1, cp with 2, dp with 4, pp with 8. "
              "With --ep 4\nits experts' tokens come from 0, 2, 4, 6: the ranks of dp x cp.",
              fontsize=10.5, ha="left")
    axes.set(xlim=(-2.0, 13.6), ylim=(-7.8, 3.8))
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "mesh.png"), dpi=110)


# ------------------------------------------------------------------------------------------------ 405B
LARGE = "16384 --model llama-405b --pp 16 --tp 8 --zero 1 --micro_batch_size 1"


def large_tables():
    short = printed(f"{LARGE} --seq_len 8192 --global_batch_size 2048")
    rows = ["| flags | activations at most, MiB | peak of all, GiB | FLOPs of a token | cp on the wire, GB |",
            "|---|---|---|---|---|"]
    for more in ("--seq_len 8192 --global_batch_size 2048",
                 "--cp 16 --seq_len 131072 --global_batch_size 128",
                 "--seq_len 8192 --global_batch_size 2048 --recompute selective",
                 "--cp 16 --seq_len 131072 --global_batch_size 128 --recompute selective"):
        text = "\n".join(printed(f"{LARGE} {more}"))
        most = re.search(r"^activations .* ([\d,.]+)$", text, re.M)[1]
        peak = float(re.search(r"^all +\S+ +(\S+)$", text, re.M)[1].replace(",", "")) / 1024
        cp = re.search(r"^cp +send .* (\S+)$", text, re.M)
        flops = re.search(r"(\S+) for each of", text)[1]
        on_wire = float(cp[1].replace(",", "")) / GB if cp else 0
        rows.append(f"| `{more}` | {most} | {peak:.1f} | {flops} | {on_wire:.1f} |")
    return dict(large=["```text", *short, "```"], larger=rows)


# ---------------------------------------------------------------------------------- checkpoints, by real runs
MAIN = ("--model tiny-moe --pp 2 --cp 2 --tp 2 --ep 2 --global_batch_size 16 --micro_batch_size 2 "
        "--steps 2 --ledger")
SAVED = [(1, "--model tiny-moe --global_batch_size 16 --steps 1"),
         (4, "--model tiny-moe --ep 2 --zero 3 --global_batch_size 16 --steps 1"), (8, MAIN)]


def checkpoint_tables():
    with torch.device("meta"):
        tiny = sum(param.numel() for param in model.Llama(config.PRESETS["tiny-moe"]).parameters())
    rows = ["| written by | files | smallest and largest | tensors in them, bytes | 12 bytes x parameters "
            "| headers and index |",
            "|---|---|---|---|---|---|"]
    for ranks, flags in SAVED:
        with tempfile.TemporaryDirectory() as folder:
            output = torchrun(ranks, STEP / "train.py", *flags.split(), "--checkpoint", folder, capture_output=True,
                              text=True).stdout
            saved = os.path.join(folder, max(os.listdir(folder)))
            sizes = {name: os.path.getsize(os.path.join(saved, name)) for name in os.listdir(saved)}
            headers = 0
            for name in sizes:
                if name.endswith(".safetensors"):
                    with open(os.path.join(saved, name), "rb") as file:
                        headers += 8 + int.from_bytes(file.read(8), "little")
            files = sorted(size for name, size in sizes.items() if name != "index.json")
            tensors = sum(files) - headers
            assert tensors == 12 * tiny, (tensors, 12 * tiny)
            layout = " ".join(re.findall(r"--(?:pp|cp|tp|ep|zero) [0-9]+", flags))
            name = "one process" if ranks == 1 else f"{ranks} ranks, `{layout}`"
            rows.append(f"| {name} | {len(files)} | {files[0]:,} and {files[-1]:,} | {tensors:,} "
                        f"| 12 x {tiny:,} = {12 * tiny:,} | {headers + sizes['index.json']:,} |")
    lines = output[output.index("dimension"):].splitlines()
    return dict(checkpoint=rows,
                main=["```text", *[line for line in lines if not line.startswith("step")], "```"])


# ------------------------------------------------------------------------------------------ choosing a layout
def choice_tables():
    """What measured runs say."""
    runs = subprocess.run([sys.executable, ROOT / "tools/bench/fit_plan.py", "--tables"],
                          check=True, capture_output=True, text=True).stdout
    best, changes, *_ = runs.strip().split("\n\n")
    return {"best runs": best.splitlines(), "changes": changes.splitlines()}


CASES = {"case 8b": "--model llama-8b --gpus 64 --seq_len 4k --global_batch_tokens 4M",
         "case 70b": "--model llama-70b --gpus 256 --seq_len 4k --global_batch_tokens 4M"}
SHOWN = ("The second", "The fastest", "The playbook")


def case_tables():
    """The planner's own words: the first lines, the best three, and where others disagree. Columns are pushed
    together and long lines wrapped."""
    tables = {}
    for name, words in CASES.items():
        lines = subprocess.run([sys.executable, ROOT / "planner", *words.split()],
                               check=True, capture_output=True, text=True).stdout.splitlines()
        first = lines.index("") + 1
        table = pushed_together(lines[first:lines.index("", first)])[:4]
        memory = next(i for i, line in enumerate(lines) if line.startswith("memory of the fullest"))
        kept = [lines[memory - 1], lines[memory]]
        kept += [line for line in lines[memory:] if line.startswith(SHOWN)]
        kept = [part for line in kept for part in textwrap.wrap(line, 118, subsequent_indent="    ")]
        tables[name] = ["```text", *lines[:first - 1], "", *table, "...", "", *kept, "```"]
    return tables


def pushed_together(rows):
    """The columns of a table with two spaces between them."""
    width = max(map(len, rows))
    rows = [row.ljust(width) for row in rows]
    blank = [all(row[i] == " " for row in rows) for i in range(width)] + [False, False]
    keep = [i for i in range(width) if not (blank[i] and blank[i + 1] and blank[i + 2])]
    return ["".join(row[i] for i in keep).rstrip() for row in rows]


# --------------------------------------------------------------------------------------------- published runs
LINES = {"1B": ("#222222", "o"), "3B": ("#b5651d", "s"), "8B": ("#4878a8", "^")}       # of a model


def throughput_picture():
    """Read from the runs that others measured: the best of each degree, over ZeRO and the micro-batch."""
    figure, (over_dp, over_tp) = plt.subplots(1, 2, figsize=(10, 4.9), sharey=True)
    for name, (color, mark) in LINES.items():
        tp = 2 if name == "8B" else 1
        label = f"{name}, {'dp alone' if tp == 1 else 'with tp 2'}"
        over_dp.plot(*fastest("dp", model=name, tp=tp, pp=1), color=color, marker=mark, label=label)
        for nodes, dashes, inside in ((8, "-", color), (32, "--", "white")):
            over_tp.plot(*fastest("tp", model=name, nodes=nodes, pp=1), dashes, color=color, marker=mark,
                         markerfacecolor=inside, label=f"{name}, {8 * nodes} GPUs")
    for panel in (over_dp, over_tp):
        panel.set_xscale("log", base=2)
        panel.minorticks_off()
        panel.set_ylim(0, 42500)
        panel.grid(axis="y", color="#dddddd", lw=0.6)
        panel.legend(frameon=False, fontsize=9.8, loc="upper right")
        panel.tick_params(axis="y", labelsize=10)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    degrees = [4, 8, 16, 32, 64, 128, 256]
    over_dp.set_xticks(degrees, [f"{n}\n{2**10 // n}K" for n in degrees], fontsize=10)
    over_dp.set_xlabel("dp; below it the tokens of a step on each of its ranks", fontsize=10.5)
    over_dp.set_ylabel("tokens per second and GPU", fontsize=10.5)
    over_dp.set_title("More dp, same batch of a million tokens", fontsize=11)
    over_tp.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"], fontsize=10)
    over_tp.set_xlabel("tp; dp is what is left of the GPUs", fontsize=10.5)
    over_tp.set_title("More tp, same GPUs, same batch", fontsize=11)
    border = 8 * 2**0.5                                   # between 8 and 16
    over_tp.axvline(border, ymax=0.62, color="#888888", lw=1, ls=":")
    over_tp.text(1.06 * border, 26000, "from here on tp\nleaves the node", fontsize=10, va="top",
                 color="#555555")
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "throughput.png"), dpi=110)


def fastest(degree, **wanted):
    """Degrees, and tokens per second and GPU of the best run of each. The runs are those of `best runs`."""
    found = {}
    for row in fit_plan.load():
        if row["status"] == "ok" and row["code"] != "legacy" \
                and all(row[name] == str(value) for name, value in wanted.items()):
            key = int(row[degree])
            found[key] = max(found.get(key, 0), fit_plan.tokens_per_s(row))
    return zip(*sorted(found.items()))


# ---------------------------------------------------------------------------------------------- the two trees
QUESTION, ANSWER, BANDS = "#f6e6c8", "#ffffff", ["#eef3f8", "#f4f4f0", "#eef5ee"]


def choose_picture():
    """What fits, and what is fast; between the two the batch."""
    figure, axes = plt.subplots(figsize=(9.4, 10.6))

    def box(x, y, width, height, text, color=ANSWER):
        """By its middle."""
        axes.add_patch(plt.Rectangle((x - width / 2, y - height / 2), width, height,
                                     facecolor=color, edgecolor="#444444", lw=1, zorder=2))
        axes.text(x, y, text, ha="center", va="center", fontsize=9.6, linespacing=1.35, zorder=3)

    def arrow(start, end, text="", dx=0.0, dy=0.0):
        """dx, dy: the words beside it, from its middle."""
        axes.annotate("", end, start, arrowprops=dict(arrowstyle="->", color="#444444", lw=1.3), zorder=1)
        middle = (start[0] + end[0]) / 2 + dx, (start[1] + end[1]) / 2 + dy
        axes.text(*middle, text, fontsize=9.6, style="italic", ha="center", va="center", zorder=4)

    def band(top, bottom, color, title):
        axes.add_patch(plt.Rectangle((0, bottom), 18, top - bottom, facecolor=color, zorder=0))
        axes.text(0.25, top - 0.25, title, fontsize=11, weight="bold", ha="left", va="top")

    band(21.2, 11.8, BANDS[0], "1   Fit: does a training step fit in memory?")
    box(9, 19.4, 8, 0.9, "Does one sequence fit, with dp and ZeRO-1?", QUESTION)
    answers = [(3.1, "yes", -1.0, "dp and ZeRO-1,\nnothing else"),
               (9, "no", 0.6, "the smallest tp that fits,\ninside the node"),
               (14.9, "not even with\nthe largest tp", 1.75, "and pp, the fewest\nstages that fit")]
    for x, answer, aside, text in answers:
        near = 9 + 0.45 * (x - 9)
        arrow((near, 18.95), (x, 17.75), answer, aside, 0.08)
        box(x, 16.85, 5.3, 1.8, text)
        arrow((x, 15.95), (near, 15.05))
    box(9, 14.6, 7, 0.9, "What else does not fit?", QUESTION)
    rest = [(3.1, "activations of\none sequence", -1.75, "cp"),
            (9, "experts", 0.75, "ep, inside dp x cp"),
            (14.9, "still too much,\nno more GPUs", 1.75, "recompute;\nsmaller micro-batch")]
    for x, why, aside, text in rest:
        arrow((9 + 0.45 * (x - 9), 14.15), (x, 12.95), why, aside, 0.12)
        box(x, 12.4, 4.6, 1.1, text)

    band(11.75, 7.1, BANDS[1], "2   Batch: is it the global batch that you want?")
    box(9, 10.2, 8.5, 0.9, "micro-batch x accumulation x dp = ?", QUESTION)
    arrow((6.8, 9.75), (4.6, 8.75), "too small", -1.1, 0.12)
    box(4.6, 8.05, 6.6, 1.4, "accumulate (saves GPU hours)\nor add dp (saves days)")
    arrow((11.2, 9.75), (13.4, 8.75), "too large", 1.1, 0.12)
    box(13.4, 8.05, 6.6, 1.4, "less dp: its ranks go to\ntp, cp or pp")

    band(7.05, -0.45, BANDS[2], "3   Speed: is what is sent hidden?")
    box(4.2, 4.95, 6.6, 1.4, "Does dp's sum hide behind\na micro-batch's backward?", QUESTION)
    arrow((7.5, 5.15), (11.1, 5.45), "yes", dy=0.3)
    box(13.9, 5.55, 5.6, 0.9, "leave it, or more dp")
    arrow((7.5, 4.75), (11.1, 4.35), "no", dy=-0.34)
    box(13.9, 4.1, 5.6, 1.1, "some of its ranks to tp\n(in the node) or to pp")
    arrow((4.2, 4.25), (4.2, 3.2), "then", dx=0.7)
    box(4.2, 2.5, 6.6, 1.4, "Is there pp, and\nhas it a bubble?", QUESTION)
    arrow((7.5, 2.5), (11.1, 2.5), "yes", dy=0.28)
    box(13.9, 2.5, 5.6, 1.2, "more micro-batches,\nor another schedule")
    arrow((4.2, 1.8), (4.2, 1.25), "then", dx=0.7)
    box(9, 0.55, 16.2, 1.4, "At last the micro-batch: the largest that fits.\n"
                            "Then measure, and change one thing at a time.")
    axes.set(xlim=(0, 18), ylim=(-0.45, 21.2))
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    figure.savefig(os.path.join(FIGURES, "choose.png"), dpi=110)


PICTURES = dict(mesh=mesh_picture, memory=memory_picture, throughput=throughput_picture,
                choose=choose_picture)
TABLES = dict(nutshell=nutshell_tables, large=large_tables, checkpoint=checkpoint_tables,
              choice=choice_tables, cases=case_tables)

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
    put_into_page(STEP / "README.md", made)
