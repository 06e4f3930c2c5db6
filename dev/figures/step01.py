"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step01.py                    everything (about three minutes on two cores)
    python dev/figures/step01.py attention fits     only these pictures, and no table
"""
import contextlib
import os
import sys
from dataclasses import replace

from common import bytes_of, paths_of, put_into_pages

STEP, FIGURES = paths_of(1)

import matplotlib.pyplot as plt
import torch

from torch._subclasses.fake_tensor import FakeTensorMode

import config
import metrics
import model as llama
import train
from watch import KINDS as COLORS, Storages, replaced_profiler

H100, USABLE = 79, 70.5                                   # GiB: what torch sees, and what tools/simulate counts on
MODES = ["none", "selective", "full"]


def run(flags, keep):
    """Run the trainer; return the rows of its memory picture, and what `keep` returns for its model and optimizer."""
    kept, live = {}, Storages(given=True)

    @contextlib.contextmanager
    def watch(step, model, optimizer, args):
        kept.update(model=model, optimizer=optimizer)
        live.tag_state(model, optimizer)
        with live:
            yield
    with replaced_profiler(watch):
        train.main(flags.split())
    return live.timeline(), keep(**kept)


def alive(live, *kinds):
    """Return the bytes of these kinds that are alive now."""
    return sum(size for _, number, size in live.events if live.kinds[number] in kinds)


def persistent(model, optimizer):
    """Return the bytes that persist between two steps, by kind, each storage counted once."""
    params = list(model.parameters())
    own = [master for master in optimizer.masters if master.dtype != params[0].dtype]
    states = [t for state in optimizer.adamw.state.values() for t in state.values() if t.dim()]
    return [bytes_of(params), bytes_of([p.main_grad for p in params]), bytes_of(own), bytes_of(states)]


def persistent_table():
    rows = ["| precision | weights | gradients | master weights | Adam | in all "
            "| formula, bytes per parameter |",
            "|---|---|---|---|---|---|---|"]
    for dtype, formula in (("float32", "4 + 4 + 0 + 8 = 16"), ("bfloat16", "2 + 4 + 4 + 8 = 18")):
        measured = run(f"--steps 2 --dtype {dtype}", persistent)[1]
        P = metrics.parameter_count(config.PRESETS["tiny"])
        rows.append(f"| {dtype} | " + " | ".join(f"{b / P:g} P" for b in measured)
                    + f" | {sum(measured) / P:g} P | {formula} |")
    return rows


def kept_by_a_layer(dtype, mode, seq_len=128, batch=2):
    """Return the bytes per token that one more layer keeps from forward to backward."""
    shape, kept = replace(config.PRESETS["tiny"], hidden_size=128, head_dim=16), []
    for layers in (2, 4):
        args = config.parse_args(["--dtype", dtype, "--recompute", mode], train.TECHNIQUES)
        model = train.build_model(replace(shape, num_hidden_layers=layers), args)
        live = Storages(given=True)
        live.note_all([*model.parameters()], "parameters")
        with live:
            out = model.model(torch.zeros(batch, seq_len, dtype=torch.long), torch.arange(seq_len))
        kept.append(alive(live, "activations"))
        del out
    return (kept[1] - kept[0]) / 2 / (batch * seq_len)


def activation_table():
    h, kv, i = 128, 64, 192
    formulas = {
        "none": ("16 h + e (4 h + 2 kv + 4 i)", lambda e: 16 * h + e * (4 * h + 2 * kv + 4 * i)),
        "selective": ("e (5 h + 2 kv + 2 i)", lambda e: e * (5 * h + 2 * kv + 2 * i)),
        "full": ("e h", lambda e: e * h)}
    rows = ["| `--recompute` | formula | float32 (e = 4): formula | measured | bfloat16 (e = 2): formula "
            "| measured |",
            "|---|---|---|---|---|---|"]
    for mode, (text, formula) in formulas.items():
        cells = [f"{formula(e):,} | {kept_by_a_layer(dtype, mode):,.0f}"
                 for dtype, e in (("float32", 4), ("bfloat16", 2))]
        rows.append(f"| {mode} | {text} | " + " | ".join(cells) + " |")
    return rows


def memory_picture():
    """Draw four steps of each recomputation mode's memory profile, all on one scale."""
    figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.6), sharey=True)
    for mode, axes in zip(MODES, panels):
        rows = run(f"--steps 4 --seq_len 256 --global_batch_size 6 --recompute {mode}", lambda **_: None)[0]
        seconds, *kinds = zip(*rows)
        axes.stackplot(range(len(rows)), [[b / 2**20 for b in kind] for kind in kinds], labels=COLORS,
                       colors=COLORS.values(), step="post")
        total = [sum(row[1:]) / 2**20 for row in rows]
        peak = max(range(len(rows)), key=total.__getitem__)
        axes.annotate(f"peak {total[peak]:.1f} MiB", (peak, total[peak]), (0, 5),
                      textcoords="offset points", ha="center")
        axes.set(title=f"--recompute {mode}", xlabel="operations", xlim=(0, len(rows)))
    panels[0].set(ylabel="MiB alive", ylim=(0, 34))
    for axes in panels:
        axes.locator_params(axis="x", nbins=3)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    first = next(at for at, row in enumerate(rows) if row[1 + list(COLORS).index("optimizer states")])     # of the last panel
    axes.annotate("the first update\nmakes the optimizer states", (first, 3.4), (0.02 * len(rows), 15), fontsize=8.5,
                  arrowprops=dict(arrowstyle="->", relpos=(0.05, 0)))
    panels[-1].legend(loc="upper right", fontsize=10, frameon=False)
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "memory.png"), dpi=120)


def preset_table():
    rows = ["| model | parameters | weights, gradients, optimizer "
            "| activations of one 4,096-token sequence: none | selective | full |",
            "|---|---|---|---|---|---|"]
    for name, c in config.PRESETS.items():
        if name != "tiny":
            P = metrics.parameter_count(c)
            kept = [f"{n * c.num_hidden_layers * 4096 / 2**30:,.1f} GiB" for n in activation_bytes(c)]
            rows.append(f"| {name} | {P / 1e9:.2f} B | {18 * P / 2**30:,.0f} GiB | {' | '.join(kept)} |")
    return rows


def activation_bytes(c):
    """Return the activation bytes per token and layer, in bfloat16 with fused norms, for --recompute none, selective, full."""
    h, q, kv, i = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
    before_qk_norm = q + kv if c.qk_norm else 0
    return 2 * (4 * h + 2 * q + 2 * kv + 4 * i + before_qk_norm), 2 * (3 * h + 2 * q + 2 * kv + 2 * i), 2 * h


class FusedNorm(torch.autograd.Function):
    """An RMSNorm that keeps what a fused kernel keeps: the input, and one float32 per token. (Torch's own is for CUDA only.)"""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inverse = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).type_as(x) * weight


def with_probabilities(q, k, v):
    """Compute attention without a flash kernel: each head makes [seq, seq] probabilities, which backward needs."""
    seq, kv_heads, head_dim = k.shape[1:]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q.reshape(q.shape[0], kv_heads, -1, head_dim) @ k.mT
    scores = scores * head_dim ** -0.5                                # [batch, kv, heads / kv * seq, seq]
    later = torch.full((seq, seq), float("-inf"), dtype=q.dtype).triu(1)
    probabilities = (scores.unflatten(2, (-1, seq)) + later).softmax(-1)
    return (probabilities.flatten(2, 3) @ v).unflatten(2, (-1, seq)).flatten(1, 2).transpose(1, 2)


def kept_at_full_size(c, seq_len, core=None):
    """Return the bytes that a layer of a real model keeps for one sequence: count the live storages of fake tensors."""
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        block = llama.Block(c)
        torch.set_default_dtype(torch.float32)
        block.self_attn.inner_attention = core or block.self_attn.inner_attention
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.forward = lambda x, norm=norm: FusedNorm.apply(x, norm.weight, norm.eps)
        x = torch.empty(1, seq_len, c.hidden_size, dtype=torch.bfloat16)
        tables = llama.rotary_tables(torch.arange(seq_len), c, x.dtype)
        live = Storages(given=True)
        live.note_all([*block.parameters(), *tables], "parameters")
        live.note(x, "activations")
        with live:
            out = block(x.requires_grad_(), *tables)
        # tensors made in a Function's forward count as "rest"
        return alive(live, "activations", "rest") - out.untyped_storage().nbytes()


def attention_picture():
    """Plot one sequence's activations against its length, with and without a flash kernel."""
    c = config.PRESETS["llama-8b"]
    layers, flash = c.num_hidden_layers, activation_bytes(c)[0]
    curves = {"with": (None, lambda s: flash * s, "#4878a8", "-", [2048, 4096, 8192, 12288, 16384]),
              "without": (with_probabilities, lambda s: flash * s + 2 * c.num_attention_heads * s * s,
                          "#c8605a", "--", [1024, 2048, 4096, 6144, 8192])}
    figure, axes = plt.subplots(figsize=(8, 4.4))
    lengths = range(0, 16385, 64)
    for name, (core, formula, color, style, measured) in curves.items():
        axes.plot(lengths, [formula(s) * layers / 2**30 for s in lengths], style, color=color, lw=2,
                  label=f"{name} a flash kernel: formula")
        kept = [kept_at_full_size(c, s, core) for s in measured]
        for s, k in zip(measured, kept):
            print(f"{name}, {s:,}: {k / 2**30:.3f} GiB a layer, {k / formula(s):.4f} of the formula")
        axes.plot(measured, [k * layers / 2**30 for k in kept], "o" if core is None else "s", color=color, ms=6,
                  label=f"{name}: live storages of a layer, x {layers}")
        crossing = next(s for s in range(1, 10**6) if formula(s) * layers > H100 * 2**30)
        print(f"{name}: {H100} GiB from {crossing:,} tokens on")
    axes.axhline(H100, color="black", lw=1.2)
    axes.text(10240, H100 + 2, f"{H100} GiB, an H100", ha="center", va="bottom", fontsize=10)
    top, bottom = (curves[name][1](4096) * layers / 2**30 for name in ("without", "with"))
    axes.annotate("", (4096, top), (4096, bottom), arrowprops=dict(arrowstyle="<->", lw=1.2))
    words = f"{top - bottom:.0f} GiB of\nprobabilities"
    axes.text(4200, (top + bottom) / 2 + 6, words, fontsize=10, va="center")
    axes.set(xlabel="tokens in the sequence", ylabel="all 32 layers, GiB",
             xlim=(0, 16500), ylim=(0, 200), xticks=range(0, 16385, 2048))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    one_layer = axes.secondary_yaxis("right", functions=(lambda y: y / layers, lambda y: y * layers))
    one_layer.set_ylabel("one layer, GiB")
    axes.legend(loc="upper right", fontsize=9.5, framealpha=1, bbox_to_anchor=(1, 0.99))
    axes.set_title("Activations of one sequence of llama-8b, nothing recomputed", fontsize=11)
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "attention.png"), dpi=130)


def fits_picture():
    """Draw what training keeps in memory as bars, beside one GPU's memory."""
    kinds = ["weights", "gradients", "optimizer states", "activations of one\n4,096-token sequence"]
    colors = [COLORS[name] for name in ("parameters", "gradients", "optimizer states", "activations")]
    names = ["llama-1b", "llama-3b", "llama-8b", "llama-70b"]
    figure, axes = plt.subplots(figsize=(8, 3.3))
    for row, name in enumerate(names):
        c = config.PRESETS[name]
        P, at = metrics.parameter_count(c), 0
        sizes = [2 * P, 4 * P, 12 * P, activation_bytes(c)[0] * c.num_hidden_layers * 4096]
        for kind, color, size in zip(kinds, colors, sizes):
            gib = size / 2**30
            axes.barh(row, gib, left=at, color=color, edgecolor="white", lw=1.5, height=0.62,
                      label=kind if row == 0 else None)
            if gib > 10 and at + gib < 195:
                axes.text(at + gib / 2, row, f"{gib:.0f}", ha="center", va="center", fontsize=10, weight="bold")
            at += gib
        behind = H100 if H100 - 15 < at < H100 else min(at, 197)
        axes.text(behind + 2, row, f"{at:,.0f} GiB", va="center", fontsize=10)
        if at > 197:
            axes.text(190, row, "...", ha="center", va="center", fontsize=16, weight="bold")
    axes.axvline(H100, color="black", lw=1.4)
    axes.axvspan(USABLE, H100, color="#bbbbbb", alpha=0.5, lw=0, zorder=0)
    axes.text(H100 + 1.5, -0.62, f"{H100} GiB, an H100 (grey: about what CUDA and fragmentation take)", fontsize=10, va="center")
    axes.set(xlim=(0, 197), ylim=(len(names) - 0.5, -0.95), yticks=range(len(names)),
             xlabel="GiB (the last bar goes on)")
    axes.set_yticklabels(names, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="upper center", ncol=4, fontsize=9.5, frameon=False)
    figure.tight_layout(rect=(0, 0, 0.98, 0.9))
    figure.savefig(os.path.join(FIGURES, "fits.png"), dpi=130)


PICTURES = dict(fits=fits_picture, attention=attention_picture, memory=memory_picture)
TABLES = dict(persistent=persistent_table, activations=activation_table, presets=preset_table)

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
    if not sys.argv[1:]:
        put_into_pages(STEP, {name: table() for name, table in TABLES.items()})
