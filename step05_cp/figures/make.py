"""Makes, from runs, this README's pictures and the tables between its `<!-- measured: ... -->` marks.

    python step05_cp/figures/make.py        (about three minutes on two cores)

The ranks are the workers of tests/harness.py; some of what they measure, they measure as the tests do.
"""
import os
import re
import sys
import tempfile
from pathlib import Path

FIGURES = Path(__file__).resolve().parent
STEP = FIGURES.parent
sys.path[:0] = [str(FIGURES), str(STEP), str(STEP.parent / "tests")]

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from torch.utils._python_dispatch import TorchDispatchMode

import cases
from harness import Pool
from jobs import attention_job, kept_job, ledger_rows

MODES, CP = ["ring", "zigzag", "allgather", "ulysses"], 4
COLORS = ["#4878a8", "#d9a441", "#6aa56e", "#c8605a"]
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 8, 64, 8, 4, 8, 192                   # tiny
SEQ_LEN, BATCH = 128, 4                                                              # one micro-batch
FLAGS = f"--seq_len {SEQ_LEN} --global_batch_size {BATCH} --micro_batch_size {BATCH}"
LONG, LONG_HEADS, LONG_KV_HEADS, LONG_DIM = 4096, 8, 4, 64                          # for memory in attention
POOL = Pool()


# ---------------------------------------------------------------------------------------------- inside a rank
class Pairs(TorchDispatchMode):
    """Counts the (query, key) pairs of which the kernels of attention's forward compute a score."""

    def __init__(self):
        super().__init__()
        self.pairs = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._opname == "_scaled_dot_product_flash_attention_for_cpu":
            q, k = args[:2]
            causal = args[4] if len(args) > 4 else (kwargs or {}).get("is_causal", False)
            pairs = q.shape[2] * (k.shape[2] + 1) // 2 if causal else q.shape[2] * k.shape[2]
            self.pairs += q.shape[:2].numel() * pairs
        return op(*args, **(kwargs or {}))


def pairs_job(argv):
    import train
    with Pairs() as counted:
        train.main(argv)
    return counted.pairs


def alive_bytes(live):
    return sum(change for _, _, change in live.events)


def after_forward_job(argv):
    """Bytes that are there after the forward pass of one micro-batch and were not before."""
    import profiling
    import train
    seen = []

    def measure(model, micro_batches, args):
        inputs, positions, targets = micro_batches[0]
        with profiling.LiveStorages() as live:
            for param in model.parameters():              # views of them are no news
                live.note(param, "parameters")
            before = alive_bytes(live)
            hidden = model.model(inputs, positions)
        seen.append(alive_bytes(live) - before)
        model.lm_head(hidden, targets).backward()
        return torch.zeros(())
    forward_backward, train.forward_backward = train.forward_backward, measure
    try:
        train.main(argv)
    finally:
        train.forward_backward = forward_backward
    return seen[0]


def one_attention_job(mode, seq_len, heads, kv_heads, head_dim):
    """The most bytes that one attention has alive at a time beside its inputs, in forward and in backward."""
    from types import SimpleNamespace

    import context_parallel
    import model
    import profiling
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    args = SimpleNamespace(seq_len=seq_len, cp=mesh.size(), cp_mode=mode)
    rows = len(context_parallel.local_positions(mesh, args))
    q, k, v = (torch.randn(1, rows, n, head_dim, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    group, ulysses, in_blocks = mesh.get_group(), context_parallel.ulysses, context_parallel.in_blocks
    core = ulysses(model.sdpa, group) if mode == "ulysses" else in_blocks(mode, group)
    core = model.sdpa if mesh.size() == 1 else core
    grad = torch.randn(1, rows, heads, head_dim)
    with profiling.LiveStorages() as live:
        for tensor in (q, k, v, grad):
            live.note(tensor, "rest")
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


def train(flags, world, step="step05_cp", **more):
    return POOL.train(step, flags, world=world, weights=False, **more)


def same_table():
    flags = "--dtype float64 --steps 4 --micro_batch_size 8"
    rows = ["| run | loss of the 4th step, float64 | gradient norm |", "|---|---|---|"]
    runs = [("step 1, one process", "step01_single_gpu", 1, "")]
    runs += [(f"`--cp 4 --cp_mode {mode}`", "step05_cp", 4, f"--cp 4 --cp_mode {mode}") for mode in MODES]
    runs += [(f"`{more}`", "step05_cp", 4, more) for more in ("--cp 2 --tp 2", "--cp 2 --zero 3")]
    seen = [(name, train(f"{flags} {more}", world, step).lines[-1]) for name, step, world, more in runs]
    for name, line in seen:
        assert all(abs(line[key] / seen[0][1][key] - 1) < 1e-9 for key in ("loss", "grad_norm")), (name, line)
        rows.append(f"| {name} | {line['loss']:.12f} | {line['grad_norm']:.12f} |")
    return rows


def ring_share(rank, seq_len, cp):
    block = seq_len // cp
    return (block + 1 + 2 * rank * block) / (cp * (seq_len + 1))


def balance_table():
    ranks = " | ".join(f"rank {r}" for r in range(CP))
    rows = [f"| mode | {ranks} | smallest / largest | slowest / even |", "|---|" + "---|" * (CP + 2)]
    whole = LAYERS * BATCH * HEADS * SEQ_LEN * (SEQ_LEN + 1) // 2
    shares = [ring_share(r, SEQ_LEN, CP) for r in range(CP)]
    rows.append("| ring, formula | " + " | ".join(f"{share:.2%}" for share in shares)
                + f" | {shares[0] / shares[-1]:.3f} | {CP * shares[-1]:.2f} |")
    for mode in MODES:
        done = call(pairs_job, CP, f"{FLAGS} --steps 1 --cp {CP} --cp_mode {mode}")
        assert sum(done) == whole, (mode, done)
        rows.append(f"| {mode} | " + " | ".join(f"{pairs / whole:.2%}" for pairs in done)
                    + f" | {min(done) / max(done):.3f} | {CP * max(done) / whole:.2f} |")
    return rows


def sent(mode, dtype, more="", cp=CP):
    """{collective: (calls, payload, formula, wire)} over cp, for one layer and one micro-batch."""
    run = train(f"{FLAGS} --steps 2 --ledger --dtype {dtype} --cp {cp} --cp_mode {mode} {more}", cp)
    rows = ledger_rows(run.output).items()
    return {collective: [n / LAYERS for n in numbers] for (dimension, collective), numbers in rows
            if dimension == "cp" and collective != "all_reduce"}


FORMULAS = {"ring": {"send": "(2 (c − 1) e + c x) K"},
            "allgather": {"all_gather": "2 c e K", "reduce_scatter": "c x K"},
            "ulysses": {"all_to_all": "2 e (2 Q + K)"}}
FORMULAS["zigzag"] = FORMULAS["ring"]


def wire_tables():
    rows = ["| mode | precision | collective | calls | payload, bytes: formula | measured "
            "| on the wire, bytes |",
            "|---|---|---|---|---|---|---|"]
    again = ["| mode | as it is | `--recompute selective` | `--recompute full` | forward alone |",
             "|---|---|---|---|---|"]
    tokens = BATCH * SEQ_LEN // CP
    symbols = dict(c=CP, K=2 * tokens * KV_HEADS * HEAD_DIM, Q=tokens * HEADS * HEAD_DIM)
    for mode in MODES:
        for dtype, e in (("float32", 4), ("bfloat16", 2)):
            for collective, numbers in sent(mode, dtype).items():
                formula = FORMULAS[mode][collective]
                factors = re.compile(r"\) (?=[KQ(])|(?<=[\w)]) (?=[\w(])")
                spelled = factors.sub(lambda m: m[0].replace(" ", "*"), formula.replace("−", "-"))
                value = eval(spelled, dict(symbols, e=e, x=4))
                calls, payload, _, wire = numbers
                assert payload == value, (mode, collective, payload, value)
                rows.append(f"| {mode} | {dtype} | {collective} | {calls:g} | {formula} = {value:,.0f} "
                            f"| {payload:,.0f} | {wire:,.0f} |")
        total = [sum(numbers[3] for numbers in sent(mode, "bfloat16", more).values())
                 for more in ("", "--recompute selective", "--recompute full")]
        cells = " | ".join(f"{n:,.0f}" for n in [*total, total[2] - total[0]])
        again.append(f"| {mode} | {cells} |")
    return rows, again


def of_a_layer(job, world, more, measured=lambda answers: answers[0]):
    """Of a model of three layers less one of two."""
    seen = []
    for layers in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            shape = dict(num_hidden_layers=layers, hidden_size=HIDDEN, intermediate_size=MLP,
                         num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
                         vocab_size=256)
            flags = f"{cases.make(Path(folder), **shape)} {FLAGS} --steps 1 {more}"
            seen.append(measured(call(job, world, flags)))
    return seen[1] - seen[0]


def kept(more, world):
    return of_a_layer(kept_job, world, more, lambda answers: max(activations for activations, _ in answers))


def kept_formula(cp=1, mode="zigzag", tp=1, sp="on"):
    """Bytes in float32."""
    tokens = BATCH * SEQ_LEN // cp
    # of kv heads that are fewer than the ranks; for powers of two
    repeats = max(1, cp * tp / KV_HEADS) if mode == "ulysses" else 1
    inside = 2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM * repeats + HEADS + 4 * MLP
    inside += HEADS * HEAD_DIM if mode == "ulysses" and cp > 1 else 0
    return 4 * tokens * (inside / tp + (6 * HIDDEN + 2) / (tp if sp == "on" else 1))


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


def with_sp_table():
    rows = ["| layout | ranks | a layer's tokens inside the regions, and outside | kept per layer: formula "
            "| measured |",
            "|---|---|---|---|---|"]
    layouts = ((1, 1, "on"), (1, 2, "off"), (1, 2, "on"), (2, 1, "on"), (1, 4, "on"), (4, 1, "on"),
               (2, 2, "off"), (2, 2, "on"))
    for cp, tp, sp in layouts:
        flags = f"--cp {cp} --tp {tp}" + (f" --sp {sp}" if tp > 1 else "")
        inside, outside = BATCH * SEQ_LEN // cp, BATCH * SEQ_LEN // cp // (tp if sp == "on" else 1)
        rows.append(f"| `{flags}` | {cp * tp} | {inside}, {outside} "
                    f"| {kept_formula(cp, 'zigzag', tp, sp):,.0f} | {kept(flags, cp * tp):,} |")
    return rows


def recompute_table():
    """What is there after forward, whoever keeps it."""
    rows = ["| mode | `none`: rank 0 | rank 3 | `selective`: rank 0 | rank 3 | `full`: rank 0 | rank 3 |",
            "|---|---|---|---|---|---|---|"]
    for mode in ("one rank", *MODES):
        cells = []
        for recompute in ("none", "selective", "full"):
            world = 1 if mode == "one rank" else CP
            flags = f"--recompute {recompute} --cp {world} --cp_mode {'zigzag' if world == 1 else mode}"
            seen = of_a_layer(after_forward_job, world, flags, np.array)
            cells.append(f"{seen[0]:,} | {seen[-1] if world > 1 else seen[0]:,}")
        rows.append(f"| {mode} | " + " | ".join(cells) + " |")
    return rows


def alive_table():
    rows = ["| mode | in forward | in backward |", "|---|---|---|"]
    for mode in ("one rank", *MODES):
        world = 1 if mode == "one rank" else CP
        seen = call(one_attention_job, world, mode=mode, seq_len=LONG, heads=LONG_HEADS,
                    kv_heads=LONG_KV_HEADS, head_dim=LONG_DIM)
        rows.append(f"| {mode} | "
                    + " | ".join(f"{max(numbers) / 2**20:.1f} MiB" for numbers in zip(*seen)) + " |")
    return rows


def accuracy_table():
    per_rank = call(attention_job, 8, modes=MODES, seq_len=8192, dtypes=["float64", "float32", "bfloat16"])
    worst = {key: [max(errors[key][i] for errors in per_rank) for i in range(4)] for key in per_rank[0]}
    rows = ["| | float64: output | gradients | float32: output | gradients | bfloat16: output | gradients |",
            "|---|---|---|---|---|---|---|"]
    for mode in ("flash", *MODES):
        cells = []
        for dtype in ("float64", "float32", "bfloat16"):
            out, *grads = worst[mode, dtype]
            cells += [f"{error:.1e}" if error else "0" for error in (out, max(grads))]
        name = "the flash kernel on the whole, on one rank" if mode == "flash" else mode
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


# ----------------------------------------------------------------------------------------------- the pictures
def placed(rank, mode, length):
    """context_parallel.local_positions for a rank that is not there."""
    from types import SimpleNamespace

    import context_parallel
    mesh = SimpleNamespace(get_local_rank=lambda name: rank)
    args = SimpleNamespace(seq_len=length, cp=CP, cp_mode=mode)
    return context_parallel.local_positions(mesh, args).numpy()


def computed(mode, length):
    """Who computes the score of each query and key, and at which hop; -1: nobody. From visible() itself."""
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


def timeline(mode, length):
    """[(rank, hop, start, work)]: a hop starts when the last one is done and its keys have come, at once."""
    who, when = computed(mode, length)
    unit, start, done, bars = (length // CP) ** 2, {}, dict.fromkeys(range(CP), 0), []
    for hop in range(CP):
        for rank in range(CP):
            work = ((who == rank) & (when == hop)).sum() / unit
            start[rank, hop] = max(done[rank], start.get(((rank - 1) % CP, hop - 1), 0))
            bars.append((rank, hop, start[rank, hop], work))
        for rank, _, begin, work in bars[-CP:]:
            done[rank] = begin + work
    return bars


def who_picture():
    length, cells = 256, 2 * CP
    figure, panels = plt.subplots(2, 2, figsize=(12, 8.8), gridspec_kw=dict(height_ratios=[6, 2.3]))
    for column, mode in enumerate(("ring", "zigzag")):
        axes, (who, when) = panels[0][column], computed(mode, length)
        axes.imshow(np.ma.masked_less(who, 0), cmap=ListedColormap(COLORS), vmin=0, vmax=CP - 1,
                    extent=(0, cells, cells, 0), interpolation="nearest")
        size = length // cells
        for i in range(cells):
            for j in range(i + 1):
                inside = when[i * size:(i + 1) * size, j * size:(j + 1) * size]
                hop, = set(inside[inside >= 0])
                shift = 0.17 if i == j else 0                                  # into the triangle
                axes.text(j + 0.5 - shift, i + 0.5 + shift, str(hop), ha="center", va="center", color="white",
                          fontsize=12, fontweight="bold")
        for line in range(cells + 1):
            axes.plot([0, line], [line, line], color="white", lw=0.8)
            axes.plot([line, line], [line, cells], color="white", lw=0.8)
        owner = [next(rank for rank in range(CP) if i * size in placed(rank, mode, length))
                 for i in range(cells)]
        axes.text(cells, 1.6, "colour: the rank that computes the scores\nnumber: the hop at which it does",
                  ha="right", va="center", fontsize=10)
        names = [f"chunk {i}: rank {rank}" for i, rank in enumerate(owner)]
        axes.set_yticks(np.arange(cells) + 0.5, names)
        axes.set_xticks(np.arange(cells) + 0.5,
                        [f"{i}\nrank {rank}" for i, rank in enumerate(owner)], fontsize=9)
        for label, rank in zip(axes.get_yticklabels(), owner):
            label.set_color(COLORS[rank])
        axes.set(xlabel="keys: chunk, and the rank that they come from", title=f"--cp_mode {mode}")
        axes.set_ylabel("queries" if column == 0 else "")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

        axes, bars = panels[1][column], timeline(mode, length)
        for rank, hop, start, work in bars:
            if work:
                axes.barh(-rank, work, left=start, height=0.72, color=COLORS[rank], edgecolor="white", lw=1.5)
                axes.text(start + work / 2, -rank, str(hop), ha="center", va="center", color="white",
                          fontsize=11, fontweight="bold")
        end = max(start + work for _, _, start, work in bars)
        axes.axvline(end, color="#444444", ls="--", lw=1)
        axes.text(end + 0.04, -1.5, f"{end:.1f}", va="center", color="#444444")
        axes.set_yticks([-rank for rank in range(CP)], [f"rank {rank}" for rank in range(CP)])
        axes.set(xlim=(0, 4), xlabel="time, in units of one whole block of scores; transfers take none",
                 ylim=(-CP + 0.5, 0.5))
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(h_pad=2)
    figure.savefig(FIGURES / "who_computes.png", dpi=110)


def against_cp_picture(points):
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.3))
    curves = ("zigzag", COLORS[0], "ring, zigzag, allgather"), ("ulysses", COLORS[3], "ulysses")
    for mode, color, label in curves:
        many = np.linspace(1 if mode != "ulysses" else 1.02, 8, 100)
        left.plot(many, [kept_formula(cp, mode) / 2**10 for cp in many], color=color, lw=1)
        left.plot([2, 4], [points[mode, cp] / 2**10 for cp in (2, 4)], "o", color=color, ms=7,
                  label=f"{label}, measured")
    left.plot([1], [points["zigzag", 1] / 2**10], "o", color="#444444", ms=7, label="one rank, measured")
    left.set(xlabel="cp", ylabel="KiB",
             title=f"kept per layer: {BATCH} sequences of {SEQ_LEN} tokens, tiny, float32", ylim=(0, None))
    left.set_xticks([1, 2, 4, 8])
    tokens = BATCH * SEQ_LEN
    q, kv = tokens * HEADS * HEAD_DIM, 2 * tokens * KV_HEADS * HEAD_DIM                # of whole sequences
    lines = {"ring": lambda c: (2 * (c - 1) * 2 + c * 4) * kv / c,
             "allgather": lambda c: (c - 1) * (2 * 2 + 4) * kv / c,
             "ulysses": lambda c: (c - 1) / c * 2 * 2 * (2 * q + kv * (c / 4 if c > 4 else 1)) / c}
    sizes = [1, 2, 4, 8]
    curves = (("ring", COLORS[0], "ring, zigzag"), ("allgather", COLORS[2], "allgather"),
              ("ulysses", COLORS[3], "ulysses"))
    for mode, color, label in curves:
        line = [lines[mode](cp) / 2**10 if cp > 1 else 0 for cp in sizes]
        right.plot(sizes, line, color=color, lw=1, marker="x", ms=4)
        seen = [sum(numbers[3] for numbers in sent(mode, "bfloat16", cp=cp).values()) for cp in (2, 4)]
        assert np.allclose(seen, [1024 * line[1], 1024 * line[2]]), (mode, seen, line)
        right.plot([2, 4], [n / 2**10 for n in seen], "o", color=color, ms=7, label=f"{label}, measured")
    right.set(xlabel="cp", ylabel="KiB on the wire, per rank",
              title="sent per layer, forward and backward: the same in bfloat16", ylim=(0, None))
    right.set_xticks(sizes)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(FIGURES / "against_cp.png", dpi=110)


def put_into_readme(tables):
    text = (STEP / "README.md").read_text()
    for name, rows in tables.items():
        text, found = re.subn(rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)",
                              lambda m: m[1] + "\n".join(rows) + "\n" + m[2], text, flags=re.S)
        assert found == 1, f"README.md has {found} tables of the name {name}"
    (STEP / "README.md").write_text(text)


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    who_picture()
    kept_rows, points = kept_table()
    against_cp_picture(points)
    wire, again = wire_tables()
    put_into_readme(dict(kept=kept_rows, wire=wire, again=again, same=same_table(), balance=balance_table(),
                         alive=alive_table(), recompute=recompute_table(), with_sp=with_sp_table(),
                         accuracy=accuracy_table()))
    POOL.stop()


if __name__ == "__main__":
    import make                                           # under this name the workers find its functions
    make.main()
