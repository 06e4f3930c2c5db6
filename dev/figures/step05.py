"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step05.py             (about three minutes on two cores)
    python dev/figures/step05.py pictures    (only the pictures that need no run)

The ranks are the workers of tests/support/harness.py, and they measure some things just as the tests do.
"""
import os
import sys
import tempfile
from pathlib import Path

from common import paths_of, put_into_pages

STEP, FIGURES = paths_of(5)

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import PillowWriter
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

import cases
from harness import Pool
from jobs import kept_job, ledger_rows
from watch import Storages

MODES, CP = ["ring", "zigzag", "allgather", "ulysses"], 4
RANKS = ["#27476e", "#c2554d", "#7fb884", "#f3d98b"]      # of ranks 0 to 3, from dark to light
INKS = ["white", "white", "black", "black"]               # for text that is legible on them
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 8, 64, 8, 4, 8, 192                   # tiny
SEQ_LEN, BATCH = 128, 4                                                              # one micro-batch
FLAGS = f"--seq_len {SEQ_LEN} --global_batch_size {BATCH} --micro_batch_size {BATCH}"
LONG, LONG_HEADS, LONG_KV_HEADS, LONG_DIM = 4096, 8, 4, 64                          # for memory in attention
POOL = Pool()


# ---------------------------------------------------------------------------------------------- inside a rank
def alive_bytes(live):
    return sum(change for _, _, change in live.events)


def one_attention_job(mode, seq_len, heads, kv_heads, head_dim):
    """Return the most bytes that one attention has alive at a time, besides its inputs, in forward and in backward."""
    from types import SimpleNamespace

    import context_parallel
    import model
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    args = SimpleNamespace(seq_len=seq_len, cp=mesh.size(), cp_mode=mode)
    rows = len(context_parallel.local_positions(mesh, args))
    q, k, v = (torch.randn(1, rows, n, head_dim, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    group, ulysses, blockwise_attention = mesh.get_group(), context_parallel.ulysses, context_parallel.blockwise_attention
    core = ulysses(model.sdpa, group) if mode == "ulysses" else blockwise_attention(mode, group)
    core = model.sdpa if mesh.size() == 1 else core
    grad = torch.randn(1, rows, heads, head_dim)
    with Storages() as live:
        live.note_all((q, k, v, grad), "rest")
        given, first = alive_bytes(live), len(live.events)
        out = core(q, k, v)
        between = len(live.events)
        out.backward(grad)
    alive = np.cumsum([change for _, _, change in live.events])
    return int(alive[first:between].max() - given), int(alive[between:].max() - given)


# ------------------------------------------------------------------------------------------------ the runs
def call(job, world, argv=None, **more):
    if argv is not None:
        more["argv"] = argv.split()
    return POOL.call(job, "step05_cp", world=world, timeout=300, **more)


def sent(mode, cp):
    """Return the bytes on the wire over cp for one layer and one micro-batch in bfloat16."""
    flags = f"{FLAGS} --steps 2 --ledger --dtype bfloat16 --cp {cp} --cp_mode {mode}"
    run = POOL.train("step05_cp", flags, world=cp, weights=False)
    return sum(numbers[3] for (dimension, collective), numbers in ledger_rows(run.output).items()
               if dimension == "cp" and collective != "all_reduce") / LAYERS


def kept(more, world):
    """Return the bytes that a layer keeps on the rank with the most: a model of three layers less one of two."""
    seen = []
    for layers in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            shape = dict(num_hidden_layers=layers, hidden_size=HIDDEN, intermediate_size=MLP,
                         num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
                         vocab_size=256)
            flags = f"{cases.make(Path(folder), **shape)} {FLAGS} --steps 1 {more}"
            seen.append(max(activations for activations, _ in call(kept_job, world, flags)))
    return seen[1] - seen[0]


def kept_formula(cp=1, mode="zigzag"):
    """Return the bytes that a layer keeps in float32, by the formula."""
    tokens = BATCH * SEQ_LEN // cp
    # kv heads are repeated if they are fewer than the ranks; this is for powers of two
    repeats = max(1, cp / KV_HEADS) if mode == "ulysses" else 1
    inside = 2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM * repeats + HEADS + 4 * MLP
    inside += HEADS * HEAD_DIM if mode == "ulysses" and cp > 1 else 0
    return 4 * tokens * (inside + 6 * HIDDEN + 2)


def kept_table():
    rows = ["| mode | cp 1: formula | measured | cp 2: formula | measured | cp 4: formula | measured |",
            "|---|---|---|---|---|---|---|"]
    points = {}
    for mode in MODES:
        cells = []
        for cp in (1, 2, 4):
            points[mode, cp] = kept(f"--cp {cp} --cp_mode {mode}", cp)
            cells.append(f"{kept_formula(cp, mode):,.0f} | {points[mode, cp]:,}")
        rows.append(f"| {mode} | " + " | ".join(cells) + " |")
    return rows, points


def alive_table():
    rows = ["| mode | in forward | in backward |", "|---|---|---|"]
    for mode in ("one rank", *MODES):
        world = 1 if mode == "one rank" else CP
        seen = call(one_attention_job, world, mode=mode, seq_len=LONG, heads=LONG_HEADS,
                    kv_heads=LONG_KV_HEADS, head_dim=LONG_DIM)
        rows.append(f"| {mode} | "
                    + " | ".join(f"{max(numbers) / 2**20:.1f} MiB" for numbers in zip(*seen)) + " |")
    return rows


# ----------------------------------------------------------------------------------------------- the pictures
def placed(rank, mode, length):
    """Return context_parallel.local_positions for any rank, without starting ranks."""
    from types import SimpleNamespace

    import context_parallel
    mesh = SimpleNamespace(get_local_rank=lambda name: rank)
    args = SimpleNamespace(seq_len=length, cp=CP, cp_mode=mode)
    return context_parallel.local_positions(mesh, args).numpy()


def computed(mode, length):
    """Return who computes the score of each query and key, and at which hop; -1 for nobody. Ask visible() itself."""
    import context_parallel
    who, when = np.full((length, length), -1), np.full((length, length), -1)
    for rank in range(CP):
        for hop in range(CP):
            source = (rank - hop) % CP
            block = context_parallel.visible(rank, source, mode, length // CP)
            if block:
                rows, columns, causal = block
                queries, keys = placed(rank, mode, length)[rows], placed(source, mode, length)[columns]
                shape = len(queries), len(keys)
                mask = np.tri(*shape, dtype=bool) if causal else np.ones(shape, bool)
                index = np.ix_(queries, keys)
                assert (who[index][mask] == -1).all()
                who[index] = np.where(mask, rank, who[index])
                when[index] = np.where(mask, hop, when[index])
    assert ((who >= 0) == np.tri(length, dtype=bool)).all(), "the whole triangle, each pair once"
    return who, when


def one_sequence(shape, recompute, tp=1):
    """Return the bytes per token that one sequence keeps in bfloat16, as step 1 counts them, with fused norms.

    They are divided over tp, with --sp on."""
    kv = shape.num_key_value_heads * shape.head_dim
    layer = 2 * (6 * shape.hidden_size + 2 * kv + 4 * shape.intermediate_size)
    if recompute == "full":
        # the input of every layer, and one whole layer, while backward is in it
        return (2 * shape.hidden_size * shape.num_hidden_layers + layer) / tp
    return layer * shape.num_hidden_layers / tp


def too_long_picture():
    import config
    figure, panels = plt.subplots(1, 2, figsize=(8.3, 3.5), sharey=True)
    tokens = np.geomspace(2**11, 2**21, 100)
    for axes, name in zip(panels, ("llama-8b", "llama-70b")):
        shape = config.PRESETS[name]
        lines = (("none", 1, "-", RANKS[1], "one GPU"), ("none", 8, "-", RANKS[0], "tp 8"),
                 ("full", 8, "--", RANKS[0], "tp 8, --recompute full"))
        for recompute, tp, style, color, label in lines:
            each = one_sequence(shape, recompute, tp)
            axes.plot(tokens, tokens * each / 1e9, style, color=color, lw=2, label=label)
            axes.plot([80e9 / each], [80], "o", color=color, ms=5)
            most = float(f"{80e9 / each:.3g}")
            axes.annotate(f"{most:,.0f}", (80e9 / each, 80), (2, -11), textcoords="offset points",
                          fontsize=8, color=color)
        axes.axhline(80, color="#444444", lw=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([2**n for n in (11, 13, 15, 17, 19, 21)],
                        ["2K", "8K", "32K", "128K", "512K", "2M"], fontsize=8)
        axes.set_yticks([1, 10, 80, 1000, 10000], ["1", "10", "80 (one GPU)", "1,000", "10,000"], fontsize=8)
        axes.minorticks_off()
        axes.set(ylim=(1, 1e5), xlim=(2**11, 2**21))
        axes.set_xlabel("tokens in the sequence", fontsize=9)
        axes.set_title(name, fontsize=10)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("GB kept for backward, on each GPU", fontsize=9)
    figure.tight_layout()
    figure.savefig(FIGURES / "too_long.png", dpi=150)
    plt.close(figure)


def local_block(mode, rank, source, length):
    """Return [queries of rank, keys of source]: whether rank computes the score. Ask visible() itself."""
    import context_parallel
    seen = np.zeros((length // CP, length // CP), dtype=bool)
    block = context_parallel.visible(rank, source, mode, length // CP)
    if block:
        rows, columns, causal = block
        shape = seen[rows, columns].shape
        seen[rows, columns] = np.tri(*shape, dtype=bool) if causal else True
    queries, keys = placed(rank, mode, length), placed(source, mode, length)
    assert (seen == (queries[:, None] >= keys[None, :])).all()
    return seen


def goes_round_picture():
    length, side, step_x, step_y = 2**10, 1.0, 1.42, 1.5
    figure, panels = plt.subplots(1, 2, figsize=(8.3, 4.9))
    for axes, mode in zip(panels, ("ring", "zigzag")):
        for hop in range(CP):
            slowest = 0
            for rank in range(CP):
                x, y, source = hop * step_x, rank * step_y, (rank - hop) % CP
                seen = local_block(mode, rank, source, length)
                slowest = max(slowest, seen.mean())
                axes.add_patch(Rectangle((x, y), side, side, facecolor="#f4f4f4", edgecolor="#aaaaaa",
                                         hatch="/////", lw=0))
                axes.imshow(np.ma.masked_equal(seen, False), cmap=ListedColormap([RANKS[source]]),
                            extent=(x, x + side, y + side, y), interpolation="nearest", zorder=2)
                axes.add_patch(Rectangle((x, y), side, side, facecolor="none", edgecolor="#444444", lw=1,
                                         zorder=3))
                if mode == "zigzag":                      # a line between the early chunk and the late one
                    axes.plot([x + side / 2] * 2, [y, y + side], color="#444444", lw=0.5, zorder=3)
                    axes.plot([x, x + side], [y + side / 2] * 2, color="#444444", lw=0.5, zorder=3)
                axes.text(x + side / 2, y - 0.06, f"K, V of {source}", ha="center", va="bottom", fontsize=8)
                if hop < CP - 1:
                    to = (rank + 1) % CP
                    left, right = x + side + 0.01, x + step_x - 0.01
                    arrow = dict(arrowstyle="-|>", color=RANKS[source], lw=1.3, shrinkA=0, shrinkB=0,
                                 mutation_scale=8)
                    if to:
                        axes.annotate("", (right, to * step_y + 0.12), (left, y + 0.88), arrowprops=arrow,
                                      zorder=4)
                    else:                                 # from the last rank to the first
                        axes.annotate("", (right, 0.5), (left, y + 0.5), zorder=1,
                                      arrowprops=dict(arrow, ls=":", lw=1.6, connectionstyle="arc3,rad=0"))
            middle = hop * step_x + side / 2
            axes.text(middle, -0.62, f"hop {hop}", ha="center", fontsize=9, fontweight="bold")
            axes.text(middle, CP * step_y - 0.12, f"{slowest:.1f}", ha="center", fontsize=9)
        total = sum(max(local_block(mode, rank, (rank - hop) % CP, length).mean() for rank in range(CP))
                    for hop in range(CP))
        busiest = f"blocks that the busiest rank computes in the hop: {total:.1f} in all"
        axes.text(CP * step_x / 2 - 0.2, CP * step_y + 0.3, busiest, ha="center", fontsize=8)
        chunks = [sorted(set(placed(rank, mode, 2 * CP))) for rank in range(CP)]
        names = [f"rank {rank}\nchunks {', '.join(map(str, chunks[rank]))}" for rank in range(CP)]
        axes.set_yticks([rank * step_y + side / 2 for rank in range(CP)], names, fontsize=8)
        axes.set_xticks([])
        axes.set(xlim=(-0.1, CP * step_x - 0.3), ylim=(CP * step_y + 0.4, -0.85))
        axes.set_title(f"--cp_mode {mode}", fontsize=10)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    legend = [Patch(facecolor=RANKS[rank], label=f"keys and values of rank {rank}") for rank in range(CP)]
    legend.append(Patch(facecolor="#f4f4f4", edgecolor="#aaaaaa", hatch="/////",
                        label="masked: nobody computes it"))
    figure.legend(handles=legend, ncols=3, loc="lower center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(FIGURES / "goes_round.png", dpi=150)
    plt.close(figure)


def zigzag_gif():
    """Animate how attention's matrix is computed while keys and values go round. A hop's transfer and work are shown at once."""
    length, cells, moves, holds = 256, 2 * CP, 6, 5
    who, when = computed("zigzag", length)
    chunks = [sorted(set(placed(rank, "zigzag", cells))) for rank in range(CP)]
    owner = [next(rank for rank in range(CP) if i in chunks[rank]) for i in range(cells)]
    colors = np.array([[int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)] for color in RANKS])
    places = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])                          # of the ranks, clockwise
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 4.3))
    writer = PillowWriter(fps=5)

    def frame(hop, part):
        """Draw the state in which `part` of a hop is done."""
        left.clear()
        shown = np.ones((length, length, 3))
        shown[np.tri(length, dtype=bool)] = 0.92
        for done in range(hop + 1):
            weight = 1 if done < hop else 0.35 + 0.65 * part
            mask = when == done
            shown[mask] = weight * colors[who[mask]] + (1 - weight)
        left.imshow(shown, extent=(0, cells, cells, 0), interpolation="nearest")
        for i in range(cells):
            for j in range(i + 1):
                at = when[i * length // cells + length // cells - 1, j * length // cells]
                if at <= hop:
                    shift = 0.17 if i == j else 0
                    left.text(j + 0.5 - shift, i + 0.5 + shift, str(at), ha="center", va="center",
                              fontsize=9, fontweight="bold", color=INKS[owner[i]])
        for line in range(cells + 1):
            left.plot([0, line], [line, line], color="white", lw=0.8)
            left.plot([line, line], [line, cells], color="white", lw=0.8)
        left.set_yticks(np.arange(cells) + 0.5, [f"{i}: rank {owner[i]}" for i in range(cells)], fontsize=9)
        left.set_xticks(np.arange(cells) + 0.5, range(cells), fontsize=9)
        left.set(xlabel="chunk of the keys", ylabel="chunk of the queries")
        left.set_title("colour: who computes   number: at which hop", fontsize=10)
        left.tick_params(length=0)
        left.spines[:].set_visible(False)

        right.clear()
        for rank in range(CP):
            x, y = places[rank] * 1.35
            right.add_patch(Rectangle((x - 0.5, y - 0.42), 1, 0.84, facecolor="white", edgecolor="black",
                                      lw=1.2))
            right.text(x, y + 0.25, f"rank {rank}", ha="center", va="center", fontsize=10, fontweight="bold")
            source = (rank - hop) % CP
            chip(*(places[rank] * 1.35 + [0, -0.1]), source)
            if hop < CP - 1 and 0 < part < 1:             # a copy travels while the original is in use
                angle = np.pi / 2 - (rank + part) * np.pi / 2
                chip(1.35 * np.cos(angle), 1.35 * np.sin(angle) - 0.1, source, small=True)
            if hop < CP - 1:
                middle = np.pi / 2 - (rank + 0.5) * np.pi / 2
                turned = middle - np.pi / 2
                centre = 1.75 * np.array([np.cos(middle), np.sin(middle)])
                along = 0.25 * np.array([np.cos(turned), np.sin(turned)])
                right.annotate("", centre + along, centre - along,
                               arrowprops=dict(arrowstyle="-|>", color="#888888", lw=1.2))
        said = "compute, and send K, V on" if hop < CP - 1 else "compute; nothing to send"
        right.text(0, 0, f"hop {hop}", ha="center", va="center", fontsize=13, fontweight="bold")
        right.set_title(said, fontsize=10)
        right.set(xlim=(-2.1, 2.1), ylim=(-2.0, 2.0), aspect="equal")
        right.axis("off")

    def chip(x, y, source, small=False):
        size = np.array([0.74, 0.3]) * (0.85 if small else 1)
        right.add_patch(Rectangle((x, y) - size / 2, *size, facecolor=RANKS[source], edgecolor="black",
                                  lw=0.8, zorder=3))
        early, late = chunks[source]
        right.text(x, y, f"K,V {early} {late}", ha="center", va="center", fontsize=8, color=INKS[source],
                   zorder=4)

    with writer.saving(figure, FIGURES / "zigzag.gif", dpi=100):
        for hop in range(CP):
            for move in range(moves + 1):
                frame(hop, move / moves)
                if hop == move == 0:
                    figure.tight_layout()
                for _ in range(holds if move == moves else 1):
                    writer.grab_frame()
        for _ in range(2 * holds):
            writer.grab_frame()
    plt.close(figure)
    assert (FIGURES / "zigzag.gif").stat().st_size < 2**20


def against_cp_picture(points):
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.3, 3.5))
    for mode, color, label in (("zigzag", RANKS[0], "ring, zigzag, allgather"),
                               ("ulysses", RANKS[1], "ulysses")):
        many = np.linspace(1 if mode != "ulysses" else 1.02, 8, 100)
        left.plot(many, [kept_formula(cp, mode) / 2**10 for cp in many], color=color, lw=1)
        left.plot([2, 4], [points[mode, cp] / 2**10 for cp in (2, 4)], "o", color=color, ms=7,
                  label=f"{label}, measured")
    left.plot([1], [points["zigzag", 1] / 2**10], "o", color="#444444", ms=7, label="one rank, measured")
    left.set(xlabel="cp", ylabel="KiB", ylim=(0, None))
    left.set_title(f"kept per layer: tiny, float32,\n{BATCH} sequences of {SEQ_LEN} tokens", fontsize=9)
    left.set_xticks([1, 2, 4, 8])
    tokens = BATCH * SEQ_LEN
    q, kv = tokens * HEADS * HEAD_DIM, 2 * tokens * KV_HEADS * HEAD_DIM                # of whole sequences
    lines = {"ring": lambda c: (2 * (c - 1) * 2 + c * 4) * kv / c,
             "allgather": lambda c: (c - 1) * (2 * 2 + 4) * kv / c,
             "ulysses": lambda c: (c - 1) / c * 2 * 2 * (2 * q + kv * (c / 4 if c > 4 else 1)) / c}
    sizes = [1, 2, 4, 8]
    for mode, color, label in (("ring", RANKS[0], "ring, zigzag"), ("allgather", RANKS[2], "allgather"),
                               ("ulysses", RANKS[1], "ulysses")):
        line = [lines[mode](cp) / 2**10 if cp > 1 else 0 for cp in sizes]
        right.plot(sizes, line, color=color, lw=1, marker="x", ms=4)
        seen = [sent(mode, cp) for cp in (2, 4)]
        assert np.allclose(seen, [1024 * line[1], 1024 * line[2]]), (mode, seen, line)
        right.plot([2, 4], [n / 2**10 for n in seen], "o", color=color, ms=7, label=f"{label}, measured")
    right.set(xlabel="cp", ylabel="KiB on the wire, per rank", ylim=(0, None))
    right.set_title("sent per layer, forward and backward:\nthis model, bfloat16", fontsize=9)
    right.set_xticks(sizes)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(FIGURES / "against_cp.png", dpi=150)


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    for draw in (too_long_picture, goes_round_picture, zigzag_gif):
        draw()
    if sys.argv[1:] == ["pictures"]:
        return
    kept_rows, points = kept_table()
    against_cp_picture(points)
    put_into_pages(STEP, dict(kept=kept_rows, alive=alive_table()))
    POOL.stop()


if __name__ == "__main__":
    import step05                                         # under this name the workers find its functions
    step05.main()
