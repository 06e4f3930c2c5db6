"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step05.py             (about three minutes on two cores)
    python dev/figures/step05.py pictures    (only the pictures that need no run)

The ranks are the workers of tests/support/harness.py, and they measure some things just as the tests do.
"""
import os
import sys
import tempfile
import threading
from pathlib import Path

from common import paths_of, put_into_pages

STEP, FIGURES = paths_of(5)

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import PillowWriter
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import Normal, Stroke

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
H100 = 79                                                                           # GiB
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
            axes.plot(tokens, tokens * each / 2**30, style, color=color, lw=2, label=label)
            most = H100 * 2**30 / each
            axes.plot([most], [H100], "o", color=color, ms=5)
            inside = most < 2**19                         # else the number would run out of the panel
            axes.annotate(f"{float(f'{most:.3g}'):,.0f}", (most, H100), (2, -11) if inside else (-3, 5), fontsize=8,
                          textcoords="offset points", ha="left" if inside else "right", color=color)
        axes.axhline(H100, color="#444444", lw=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([2**n for n in (11, 13, 15, 17, 19, 21)],
                        ["2K", "8K", "32K", "128K", "512K", "2M"], fontsize=8)
        axes.set_yticks([1, 10, H100, 1000, 10000], ["1", "10", f"{H100} (an H100)", "1,000", "10,000"], fontsize=8)
        axes.minorticks_off()
        axes.set(ylim=(1, 1e5), xlim=(2**11, 2**21))
        axes.set_xlabel("tokens in the sequence", fontsize=9)
        axes.set_title(name, fontsize=10)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("GiB kept for backward, on each GPU", fontsize=9)
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
                    # with a dark edge, without which the lightest colour is hardly seen on white
                    arrow = dict(arrowstyle="-|>", color=RANKS[source], lw=1.6, shrinkA=0, shrinkB=0, mutation_scale=9,
                                 path_effects=[Stroke(linewidth=2.5, foreground="#444444"), Normal()])
                    if to:
                        axes.annotate("", (right, to * step_y + 0.12), (left, y + 0.88), arrowprops=arrow,
                                      zorder=4)
                    else:                                 # from the last rank to the first
                        axes.annotate("", (right, 0.5), (left, y + 0.5), zorder=1,
                                      arrowprops=dict(arrow, ls=":", lw=1.8, connectionstyle="arc3,rad=0"))
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


def who_works_picture():
    """Draw a batch of four sequences, and which rank works on which part of it, with dp, tp and cp."""
    figure, panels = plt.subplots(1, 3, figsize=(8.3, 2.35))
    titles = ("dp 4: each rank has\nwhole sequences", "tp 4: all ranks work on all tokens,\neach with a part of every matrix",
              "cp 4: each rank has a part\nof every sequence")
    for axes, title in zip(panels, titles):
        for row in range(CP):
            if title.startswith("dp"):
                parts = [(0, row, 2 * CP, 0.8, row)]
            elif title.startswith("tp"):
                parts = [(0, row + 0.2 * rank, 2 * CP, 0.2, rank) for rank in range(CP)]
            else:
                owner = {chunk: rank for rank in range(CP) for chunk in placed(rank, "zigzag", 2 * CP)}
                parts = [(chunk, row, 1, 0.8, rank) for chunk, rank in owner.items()]
            for x, y, width, height, rank in parts:
                axes.add_patch(Rectangle((x, y), width, height, facecolor=RANKS[rank], edgecolor="white", lw=0.4))
            axes.add_patch(Rectangle((0, row), 2 * CP, 0.8, facecolor="none", edgecolor="#444444", lw=1))
        axes.set_title(title, fontsize=9)
        axes.set(xlim=(-0.1, 2 * CP + 0.1), ylim=(CP, -0.2), xticks=[])
        axes.set_xlabel("tokens", fontsize=9)
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    panels[0].set_yticks([row + 0.4 for row in range(CP)], [f"sequence {row}" for row in range(CP)], fontsize=8)
    panels[0].tick_params(length=0)
    legend = [Patch(facecolor=RANKS[rank], label=f"rank {rank}") for rank in range(CP)]
    figure.legend(handles=legend, ncols=CP, loc="lower center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.09, 1, 1), w_pad=2)
    figure.savefig(FIGURES / "who_works.png", dpi=150)
    plt.close(figure)


def backward_schedule(kernel, add, per_byte):
    """Run RingAttention.backward on CP threads, with a clock per rank in the place of kernels and links.

    Return [(rank, lane, hop, start, end)]. A transfer starts when both its ends have called ring_send_recv and the link has
    finished the one before it.
    """
    from types import SimpleNamespace
    from unittest.mock import patch

    import context_parallel
    clock, events, ends, posted, changed = [0.0] * CP, [], {}, {}, threading.Condition()

    def work(lane, seconds):
        def advance(*_):
            rank = int(threading.current_thread().name)
            hop = sum(event[:2] == (rank, lane) for event in events)
            events.append((rank, lane, hop, clock[rank], clock[rank] + seconds))
            clock[rank] += seconds
        return advance

    def end_of(sender, n):
        """Return when transfer n of a sender has arrived. Wait until both its ends have posted it."""
        with changed:
            changed.wait_for(lambda: {(sender, n), ((sender + 1) % CP, n)} <= posted.keys(), timeout=10)
            if (sender, n) not in ends:
                previous = end_of(sender, n - 1) if n else 0
                (mine, seconds, lane), (theirs, _, _) = posted[sender, n], posted[(sender + 1) % CP, n]
                start = max(mine, theirs, previous)
                ends[sender, n] = start + seconds
                hop = sum(event[:2] == (sender, lane) for event in events)
                events.append((sender, lane, hop, start, start + seconds))
            return ends[sender, n]

    def ring_send_recv(tensor, group):
        rank = group.rank()
        with changed:
            n = sum(name == rank for name, _ in posted)
            lane = "K, V" if tensor.dtype == torch.bfloat16 else "gradient"
            posted[rank, n] = clock[rank], tensor.nbytes * per_byte, lane
            changed.notify_all()

        def receive():
            clock[rank] = max(clock[rank], end_of(rank, n), end_of((rank - 1) % CP, n))
            return torch.empty_like(tensor)
        return receive

    def one_rank(rank):
        q, kv = torch.zeros(1, 2, 8, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 8, 1, dtype=torch.bfloat16)
        saved = q, kv, kv, q, torch.zeros(1, 2, 8)
        group = SimpleNamespace(rank=lambda: rank, size=lambda: CP)
        context_parallel.RingAttention.backward(SimpleNamespace(saved_tensors=saved, mode="zigzag", group=group), q)
    threads = [threading.Thread(target=one_rank, args=(rank,), name=str(rank)) for rank in range(CP)]
    with patch.multiple(context_parallel, ring_send_recv=ring_send_recv, block_gradients=work("kernel", kernel),
                        add_gradients=work("add", add)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(events) == CP * (CP + CP + CP - 1 + CP), "kernels, additions, transfers of K and V, and of gradients"
    return sorted(events)


def backward_picture():
    """Draw two neighbours in the ring's backward. The order is the code's; the lengths are chosen to show it."""
    events = backward_schedule(kernel=1.0, add=0.12, per_byte=0.26 / 32)
    shown, gap, height = (0, 1), 3.5, 0.66
    lanes = {"kernel": 0, "add": 0, "K, V": 1, "gradient": 2}
    figure, axes = plt.subplots(figsize=(8.3, 3.9))
    at = {}
    for rank, lane, hop, start, end in events:
        if rank not in shown:
            continue
        source, y = (rank - hop) % CP, shown.index(rank) * gap + lanes[lane]
        at[rank, lane, hop] = start, end, y
        color, ink = (RANKS[source], INKS[source]) if lane != "add" else ("#444444", "white")
        axes.add_patch(Rectangle((start, y), end - start, height, facecolor=color, edgecolor="#444444", lw=0.9, zorder=3))
        word = {"kernel": f"hop {hop}: K, V of {source}", "add": "", "K, V": str(source), "gradient": f"of {source}"}[lane]
        axes.text((start + end) / 2, y + height / 2, word, ha="center", va="center", fontsize=9, color=ink, zorder=4)
    arrow = dict(arrowstyle="-|>", lw=1.6, shrinkA=0, shrinkB=0, mutation_scale=9,
                 path_effects=[Stroke(linewidth=2.6, foreground="#444444"), Normal()])
    for hop in range(CP - 1):                             # from rank 0 to rank 1: what waits for what
        color = RANKS[(0 - hop) % CP]
        _, end, y = at[0, "K, V", hop]
        start, _, below = at[1, "kernel", hop + 1]
        axes.annotate("", (start + 0.07, below), (end, y + height / 2), zorder=5, arrowprops=dict(arrow, color=color, ls=":"))
        _, end, y = at[0, "gradient", hop]
        start, stop, below = at[1, "add", hop + 1]
        axes.annotate("", ((start + stop) / 2, below), (end, y + height / 2), zorder=5, arrowprops=dict(arrow, color=color))
    last = max(end for *_, end in events)
    start, end, y = at[0, "gradient", CP - 1]
    axes.text((start + end) / 2, y - 0.12, "goes home:\nnothing hides it", ha="center", va="bottom", fontsize=8.5)
    names = {"kernel": "computes", "K, V": "sends K, V", "gradient": "sends gradients"}
    ticks = [(shown.index(rank) * gap + lanes[lane] + height / 2, f"rank {rank} {name}")
             for rank in shown for lane, name in names.items()]
    axes.set_yticks(*zip(*ticks), fontsize=9)
    axes.set_xticks([])
    axes.set_xlabel("time", fontsize=9)
    axes.set(xlim=(-0.05, last + 0.05), ylim=(gap + 3, -0.35))
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    legend = [Patch(facecolor=RANKS[rank], edgecolor="#444444", label=f"K, V of rank {rank}") for rank in range(CP)]
    legend.append(Patch(facecolor="#444444", label="adds its terms"))
    figure.legend(handles=legend, ncols=5, loc="lower center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(FIGURES / "backward.png", dpi=150)
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
    for draw in (who_works_picture, too_long_picture, goes_round_picture, backward_picture, zigzag_gif):
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
