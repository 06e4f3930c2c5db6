"""Makes, from runs, this README's pictures and the tables between its `<!-- measured: ... -->` marks.

    python step01_single_gpu/figures/make.py        (about two minutes on two cores)
"""
import json
import os
import re
import sys
import tempfile
from dataclasses import replace

STEP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIGURES = os.path.join(STEP, "figures")
sys.path.insert(0, STEP)

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import config
import metrics
import profiling
import train

COLORS = profiling.KINDS
MODES = ["none", "selective", "full"]


def run(flags, keep):
    """Runs the trainer; returns its log lines, and what `keep` says of its model and optimizer afterwards."""
    kept = {}
    class Keeping(train.Profiler):
        def __init__(self, model, optimizer, args):
            super().__init__(model, optimizer, args)
            kept.update(model=model, optimizer=optimizer)
    with tempfile.TemporaryDirectory() as folder:
        original, train.Profiler = train.Profiler, Keeping
        log = os.path.join(folder, "log.jsonl")
        try:
            train.main([*flags.split(), "--log_file", log, "--profile", folder])
        finally:
            train.Profiler = original
        with open(log) as lines, open(os.path.join(folder, "memory_rank0.json")) as memory:
            return [json.loads(line) for line in lines], json.load(memory)["rows"], keep(**kept)


def bytes_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def persistent(model, optimizer):
    """Bytes of live storages between two steps, each counted once."""
    params = list(model.parameters())
    own = [master for master in optimizer.masters if master.dtype != params[0].dtype]
    states = [t for state in optimizer.adamw.state.values() for t in state.values() if t.dim()]
    return [bytes_of(params), bytes_of([p.main_grad for p in params]), bytes_of(own), bytes_of(states)]


def persistent_table():
    rows = ["| precision | weights | gradients | master weights | Adam | in all "
            "| formula, bytes per parameter |",
            "|---|---|---|---|---|---|---|"]
    for dtype, formula in (("float32", "4 + 4 + 0 + 8 = 16"), ("bfloat16", "2 + 4 + 4 + 8 = 18")):
        measured = run(f"--steps 2 --dtype {dtype}", persistent)[2]
        P = metrics.parameter_count(config.PRESETS["tiny"])
        rows.append(f"| {dtype} | " + " | ".join(f"{b / P:g} P" for b in measured)
                    + f" | {sum(measured) / P:g} P | {formula} |")
    return rows


def kept_by_a_layer(dtype, mode, seq_len=128, batch=2):
    """Bytes that one layer more keeps from forward to backward."""
    shape, alive = replace(config.PRESETS["tiny"], hidden_size=128, head_dim=16), []
    for layers in (2, 4):
        args = config.parse_args(["--dtype", dtype, "--recompute", mode])
        model = train.build_model(replace(shape, num_hidden_layers=layers), args)
        live = profiling.LiveStorages()
        for param in model.parameters():
            live.note(param, "parameters")
        with live:
            out = model.model(torch.zeros(batch, seq_len, dtype=torch.long), torch.arange(seq_len))
        alive.append(live.timeline()[-1][4])
        del out
    return (alive[1] - alive[0]) / 2 / (batch * seq_len)


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


def accumulation_table():
    def gradient(micro_batch):
        flags = f"--dtype float64 --global_batch_size 8 --micro_batch_size {micro_batch}"
        args = config.parse_args(flags.split())
        shape = config.load_config(args)
        model = train.build_model(shape, args)
        train.accumulate_gradients(model.parameters())
        train.forward_backward(model, train.micro_batches_of(args, shape), args)
        return torch.cat([p.main_grad.flatten() for p in model.parameters()])
    train.micro_batches_of = lambda args, shape: next(
        train.batches(train.load_tokens(args, shape.vocab_size), args))
    whole = gradient(8)
    rows = ["| micro-batches | gradient norm | difference to one batch of 8, relative |", "|---|---|---|"]
    for micro_batch in (8, 4, 2, 1):
        g = gradient(micro_batch)
        rows.append(f"| {8 // micro_batch} | {g.norm():.12f} | {(g - whole).norm() / whole.norm():.0e} |")
    return rows


def memory_picture():
    """The memory profile of each recomputation mode, two steps of it, on one scale."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 3.6), sharey=True)
    for mode, axes in zip(MODES, panels):
        rows = run(f"--steps 4 --seq_len 256 --global_batch_size 6 --recompute {mode}", lambda **_: None)[1]
        seconds, *kinds = zip(*rows)
        axes.stackplot(range(len(rows)), [[b / 2**20 for b in kind] for kind in kinds], labels=COLORS,
                       colors=COLORS.values(), step="post")
        total = [sum(row[1:]) / 2**20 for row in rows]
        peak = max(range(len(rows)), key=total.__getitem__)
        axes.annotate(f"peak {total[peak]:.1f} MiB", (peak, total[peak]), (0, 5),
                      textcoords="offset points", ha="center")
        axes.set(title=f"--recompute {mode}", xlabel="allocations and frees, in order", xlim=(0, len(rows)))
    panels[0].set(ylabel="MiB alive", ylim=(0, 34))
    for axes in panels:
        axes.locator_params(axis="x", nbins=4)
    panels[-1].legend(loc="upper right", fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "memory.png"), dpi=110)


def preset_table():
    rows = ["| model | parameters | weights, gradients, optimizer "
            "| activations of one 4,096-token sequence: none | selective | full |",
            "|---|---|---|---|---|---|"]
    for name, c in config.PRESETS.items():
        if name != "tiny":
            P, h = metrics.parameter_count(c), c.hidden_size
            kv, i = c.num_key_value_heads * c.head_dim, c.intermediate_size
            kept = [n * c.num_hidden_layers * 4096 / 1e9
                    for n in (12 * h + 4 * kv + 8 * i, 10 * h + 4 * kv + 4 * i, 2 * h)]
            rows.append(f"| {name} | {P / 1e9:.2f} B | {18 * P / 1e9:,.0f} GB | "
                        + " | ".join(f"{gb:,.1f} GB" for gb in kept) + " |")
    return rows


def put_into_readme(tables):
    path = os.path.join(STEP, "README.md")
    with open(path) as file:
        text = file.read()
    for name, rows in tables.items():
        text, found = re.subn(rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)",
                              lambda m: m[1] + "\n".join(rows) + "\n" + m[2], text, flags=re.S)
        assert found == 1, f"README.md has {found} tables of the name {name}"
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    memory_picture()
    put_into_readme(dict(persistent=persistent_table(), activations=activation_table(),
                         accumulation=accumulation_table(), presets=preset_table()))
