"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step02.py                 everything (about three minutes on two cores)
    python dev/figures/step02.py idea ring       only these pictures, and no table
"""
import json
import os
import sys
import tempfile
import time
import types
import warnings

from common import paths_of, put_into_pages, torchrun

STEP, FIGURES = paths_of(2)
os.environ["OMP_NUM_THREADS"] = "1"

import matplotlib.pyplot as plt
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.patches import FancyArrowPatch, Rectangle
import torch.distributed as dist
import torch.multiprocessing as mp

import config
import data
import data_parallel as dp
import mesh
import optimizer
import train

# 7.9M parameters: 31.6 MB of float32 gradients in 75 tensors
SHAPE = dict(model_type="llama", vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=8,
             num_attention_heads=8, num_key_value_heads=4, head_dim=32, rms_norm_eps=1e-5,
             rope_theta=500000.0, max_position_embeddings=4096)
MODES = {"naive": "naive", "overlap": "overlap", "bucket": "bucket --bucket_mb 4"}
SEQ_LEN = 64


# --------------------------------------------------------------------------------------- pictures of the idea
RANKS = ["#9ecae8", "#f2b880", "#a8d5a2", "#d9b3d9"]      # one colour per rank
SUM, NOTHING = "#3d5a80", "#eeeeee"                       # for a sum over all ranks; for an empty place


def box(axes, x, y, width, height, text="", color="white", **how):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="#444444", linewidth=0.8))
    ink = "white" if color == SUM else "black"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center",
              **{"fontsize": 9, "color": ink, **how})


def arrow(axes, start, end, **how):
    look = {"color": "#444444", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, **how}
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, **look))


def blank(figure, width, height, place=(0, 0, 1, 1)):
    axes = figure.add_axes(place)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def save(figure, name):
    figure.savefig(os.path.join(FIGURES, name), dpi=150)
    plt.close(figure)


def shares_of(ranks):
    """Return each rank's part of the loss in the first step of the default run, and one number of its gradient."""
    args = config.parse_args([], train.TECHNIQUES)
    args.dp = ranks
    shape = config.load_config(args)
    tokens, shares = train.load_tokens(args, shape.vocab_size), []
    for rank in range(ranks):
        with mesh.init_distributed():                     # build_model asks whether all ranks succeed
            model = train.build_model(shape, args)
        optimizer.add_main_grads(model.parameters())
        here = types.SimpleNamespace(get_local_rank=lambda name, rank=rank: rank)
        loss = train.forward_backward(model, data.micro_batches(tokens, shape, here, args, 0), args)
        shares.append((float(loss), float(model.model.norm.weight.main_grad[0])))
    return shares


def idea_picture():
    shares, (whole,) = shares_of(4), shares_of(1)
    figure = plt.figure(figsize=(8, 4.1))
    axes = blank(figure, 8, 4.1)
    axes.text(0.08, 3.86, "one training step: 16 sequences, four ranks", fontsize=10, weight="bold")
    for rank, (loss, gradient) in enumerate(shares):
        x = 0.1 + 1.97 * rank
        box(axes, x, 3.3, 1.85, 0.38, f"sequences {4 * rank} to {4 * rank + 3}", RANKS[rank])
        box(axes, x, 1.98, 1.85, 0.95, f"rank {rank}\nthe whole model,\nthe same weights", RANKS[rank])
        box(axes, x, 1.2, 1.85, 0.42, f"loss {loss:.4f}\ngradient {1e3 * gradient:+.3f}e-3", RANKS[rank],
            fontsize=8.5)
        arrow(axes, (x + 0.92, 3.3), (x + 0.92, 2.93))
        arrow(axes, (x + 0.92, 1.98), (x + 0.92, 1.62))
        arrow(axes, (x + 0.92, 1.2), (x + 0.92, 0.9))
    axes.text(0.62, 1.8, "forward,\nbackward", fontsize=8, va="center", ha="center")
    loss, gradient = (sum(column) for column in zip(*shares))
    summed = f"loss {loss:.4f},  gradient {1e3 * gradient:+.3f}e-3"
    alone = f"{whole[0]:.4f}, {1e3 * whole[1]:+.3f}e-3"
    box(axes, 0.1, 0.5, 7.76, 0.4,
        f"sum, then on every rank:  {summed}      (one process alone: {alone})", SUM)
    axes.text(3.98, 0.3, "clip and AdamW, the same arithmetic on every rank: the weights stay the same",
              ha="center", va="center", fontsize=9)
    which = "one of its 427,072 numbers, that of model.norm.weight[0], in the first step of the default run"
    axes.text(3.98, 0.08, f'"gradient": {which}', ha="center", va="center", fontsize=8)
    save(figure, "idea.png")


# -------------------------------------------------------------------------------------------- the collectives
def collective_worker(rank, folder, results):
    """Call every collective once, on four gloo ranks; put into results (name, what this rank has before, what after)."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    four, one = torch.tensor([1, 2, 3, 4]) + 10 * rank, torch.tensor([rank + 5])
    none, seen = torch.tensor([], dtype=torch.long), []

    def note(name, call, before, after):
        given = before.clone()
        call()
        seen.append((name, given.tolist(), after.tolist()))
    x = one.clone() if rank == 2 else torch.zeros_like(one)
    note("broadcast, from rank 2", lambda: dist.broadcast(x, src=2), one if rank == 2 else none, x)
    y = four.clone()
    dist.reduce(y, dst=0)                                 # on the other ranks the result is undefined
    seen.append(("reduce, to rank 0", four.tolist(), y.tolist() if rank == 0 else []))
    z = four.clone()
    note("all-reduce", lambda: dist.all_reduce(z), four, z)
    whole = torch.zeros(4, dtype=torch.long)
    places = list(whole.split(1)) if rank == 0 else None
    note("gather, to rank 0", lambda: dist.gather(one, places, dst=0), one, whole if rank == 0 else none)
    both = torch.zeros(4, dtype=torch.long)
    note("all-gather", lambda: dist.all_gather_into_tensor(both, one), one, both)
    part = torch.zeros(1, dtype=torch.long)
    there = torch.tensor([5, 6, 7, 8])
    parts = list(there.split(1)) if rank == 0 else None
    note("scatter, from rank 0", lambda: dist.scatter(part, parts, src=0), there if rank == 0 else none, part)
    share = torch.zeros(1, dtype=torch.long)
    note("reduce-scatter", lambda: dist.reduce_scatter_tensor(share, four), four, share)
    theirs = torch.zeros(4, dtype=torch.long)
    note("all-to-all", lambda: dist.all_to_all_single(theirs, four), four, theirs)
    came = torch.zeros(1, dtype=torch.long)

    def pass_on():
        sending = dist.isend(one, (rank + 1) % 4)
        dist.recv(came, (rank - 1) % 4)
        sending.wait()
    note("send and receive, to the next", pass_on, one, came)
    results.put((rank, seen))
    dist.barrier()
    dist.destroy_process_group()


def collectives_picture():
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(collective_worker, args=(folder, results), nprocs=4)
        ranks = dict(results.get() for _ in range(4))
    figure = plt.figure(figsize=(8, 7.4))
    for number, (name, *_) in enumerate(ranks[0]):
        column, row = number % 3, number // 3
        axes = blank(figure, 10.4, 5.6, (0.005 + 0.333 * column, 0.985 - 0.325 * (row + 1), 0.325, 0.315))
        axes.text(5.2, 5.3, name, ha="center", va="center", fontsize=10, weight="bold")
        axes.text(0.42, 4.72, "rank", ha="center", va="center", fontsize=7)
        axes.text(1.05, 4.72, "before", va="center", fontsize=8)
        axes.text(6.15, 4.72, "after", va="center", fontsize=8)
        cells = {value: rank for rank in range(4) for value in ranks[rank][number][1]}
        for rank in range(4):
            y = 3.5 - 1.12 * rank
            axes.text(0.45, y + 0.42, f"{rank}", ha="center", va="center", fontsize=8.5)
            _, before, after = ranks[rank][number]
            for left, values in ((1.05, before), (6.15, after)):
                for i, value in enumerate(values):
                    color = RANKS[cells[value]] if value in cells else SUM
                    box(axes, left + i, y, 1, 0.84, str(value), color)
                if not values:
                    box(axes, left, y, 1, 0.84, "-", NOTHING)
        arrow(axes, (5.25, 2.25), (5.95, 2.25))
    save(figure, "collectives.png")


# ------------------------------------------------------------------------------------------------ the ring
def ring_moves(n=4):
    """Work through the messages of a ring all-reduce on a table.

    Return [(phase, table before, [(from, to, part, value)], table after)]."""
    table, moves = [[(part + 1) * 10**rank for part in range(n)] for rank in range(n)], []
    for i in range(2 * (n - 1)):
        summing = i < n - 1
        # as in by_hand.py's ring_all_reduce
        parts = [(rank - i if summing else rank - (i - n + 1) + 1) % n for rank in range(n)]
        messages = [(rank, (rank + 1) % n, parts[rank], table[rank][parts[rank]]) for rank in range(n)]
        before = [list(row) for row in table]
        for _, to, part, value in messages:
            table[to][part] = table[to][part] + value if summing else value
        phase = (f"reduce-scatter, message {i + 1} of {n - 1}: add what arrives" if summing
                 else f"all-gather, message {i - n + 2} of {n - 1}: keep what arrives")
        moves.append((phase, before, messages, [list(row) for row in table]))
    return moves


def ring_gif():
    corners, width, height = [(0.25, 3.1), (4.75, 3.1), (4.75, 0.95), (0.25, 0.95)], 0.75, 0.62
    moves = ring_moves()
    total = [sum((part + 1) * 10**rank for rank in range(4)) for part in range(4)]
    start = "start: every rank has four parts", moves[0][1], [], moves[0][1]
    end = "every rank has every sum: 6 messages of a quarter each", moves[-1][3], [], moves[-1][3]
    moving = [(move, step) for move in moves for step in (0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1)]
    frames = [(start, 0)] * 4 + moving + [(end, 1)] * 8
    figure = plt.figure(figsize=(8, 4.7))
    axes = blank(figure, 8, 4.7)

    def at(rank, part, sideways):
        """Return the middle of a message beside a cell. Messages that go sideways fly outside the rows, the others between."""
        above = (rank < 2) == sideways
        return corners[rank][0] + width * (part + 0.5), corners[rank][1] + (height + 0.25 if above else -0.25)

    def draw(frame):
        (title, before, messages, after), way = frame
        axes.clear()
        axes.set(xlim=(0, 8), ylim=(0, 4.7))
        axes.axis("off")
        axes.text(0.25, 4.5, title, fontsize=12, weight="bold", va="center")
        for tail, head in (((3.4, 3.5), (4.65, 3.5)), ((7.9, 3.0), (7.9, 1.65)), ((4.6, 1.35), (3.35, 1.35)),
                           ((0.1, 1.65), (0.1, 3.0))):
            arrow(axes, tail, head, color="#bbbbbb")
        table = after if way == 1 else before
        for rank, (x, y) in enumerate(corners):
            side = dict(x=x + 4 * width + 0.08) if rank in (0, 3) else dict(x=x - 0.08, ha="right")
            axes.text(y=y + 0.1, s=f"rank {rank}", fontsize=10, va="center", **side)
            for part, value in enumerate(table[rank]):
                changed = way == 1 and any(to == rank and p == part for _, to, p, _ in messages)
                color = SUM if value == total[part] else "#f6d98b" if changed else "white"
                box(axes, x + width * part, y, width, height, f"{value}", color, fontsize=11)
        if 0 <= way < 1:
            for rank, to, part, value in messages:
                x, y = corners[rank]
                axes.add_patch(Rectangle((x + width * part, y), width, height, facecolor="none", edgecolor="#e3a008",
                                         linewidth=3, zorder=5))
                (x0, y0), (x1, y1) = (at(end, part, rank in (0, 2)) for end in (rank, to))
                x, y = x0 + (x1 - x0) * way, y0 + (y1 - y0) * way
                box(axes, x - 0.3, y - 0.17, 0.6, 0.34, f"{value}", "#e3a008", fontsize=9.5, weight="bold", zorder=6)
        axes.text(0.25, 0.18, "frame: is being sent     yellow: on its way, or just added     dark: the sum of all four",
                  fontsize=9.5, va="center")
    animation = FuncAnimation(figure, draw, frames=frames)
    animation.save(os.path.join(FIGURES, "ring.gif"), writer=PillowWriter(fps=4), dpi=100)
    plt.close(figure)


# ------------------------------------------------------------------------------------------ buckets that fill
def buckets_worker(rank, port, folder, results):
    """Watch one training step after another with --bucket_mb 4.

    Put into results, from the step with the fastest backward, when each gradient came and when each all-reduce began and ended."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.set_num_threads(1)
    args = config.parse_args(f"--model {folder} --seq_len {SEQ_LEN} --micro_batch_size 4 "
                             "--global_batch_size 8 --bucket_mb 4".split(), train.TECHNIQUES)
    args.dp = 2
    dist.init_process_group("gloo")
    the_mesh = mesh.build_mesh(args)
    model = train.build_model(config.load_config(args), args)
    optimizer.add_main_grads(model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    came, reduces, all_reduce = [], [], dist.all_reduce
    note = lambda param: came.append((names[id(param)], param.main_grad.nbytes, time.perf_counter()))
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)
    reducer = dp.make_reducer(list(model.parameters()), the_mesh.get_group("dp"), args)

    def watched(tensor, **how):
        times = [time.perf_counter(), None]
        work = all_reduce(tensor, **how)
        work.get_future().then(lambda _: times.__setitem__(1, time.perf_counter()))
        reduces.append((len(came), times))
        return work
    dist.all_reduce, rows, fastest = watched, torch.randint(0, 4096, (4, SEQ_LEN + 1)), None
    for _ in range(100):                                  # let us hope that one of them has both cores to itself
        came.clear()
        reduces.clear()
        dist.barrier()
        loss = model(rows[:, :-1], torch.arange(SEQ_LEN), rows[:, 1:])
        start = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        reducer.finish()
        time.sleep(0.05)                                  # until all callbacks have run
        step = dict(end=1e3 * (end - start), came=[(name, size, 1e3 * (t - start)) for name, size, t in came],
                    reduces=[(last, 1e3 * (a - start), 1e3 * (b - start)) for last, (a, b) in reduces])
        fastest = min(fastest or step, step, key=lambda s: max(s["end"], s["reduces"][-1][2]))
    dist.all_reduce = all_reduce
    if rank == 0:
        results.put(fastest)
    dist.barrier()
    dist.destroy_process_group()


def where(name):
    """Return the place of a parameter in the model, in few letters."""
    others = {"lm_head.weight": "head", "model.embed_tokens.weight": "embedding", "model.norm.weight": "norm"}
    return others.get(name) or f"layer {name.split('.')[2]}"


def buckets_picture(folder):
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(buckets_worker, args=(29171 + os.getpid() % 500, folder, results), nprocs=2)
    step = results.get()
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 4.6), sharex=True, height_ratios=[2.1, 1])
    first, shades = 0, ["#2f6f9f", "#d9862b"]
    for number, (last, begin, end) in enumerate(step["reduces"]):
        grads, color = step["came"][first:last], shades[number % 2]
        lane, alpha, ink = (0.55, 0.85, "white") if number % 2 == 0 else (0.08, 0.6, "black")
        previous = step["came"][first - 1][2] if first else 0
        times, level = [previous], [0]
        for _, size, time_ in grads:
            times += [time_, time_]
            level += [level[-1], level[-1] + size / 2**20]
        upper.fill_between(times, level, color=color, alpha=alpha, linewidth=0)
        places = list(dict.fromkeys(where(name) for name, *_ in grads))
        upper.text(times[-1], level[-1] + 0.12, f"{number + 1}", ha="center", fontsize=10, weight="bold")
        span = places[0] if len(places) == 1 else f"{places[0]}\nto {places[-1]}"
        upper.text((times[0] + times[-1]) / 2, level[-1] + 0.75, span, ha="center", fontsize=8)
        upper.plot([times[-1]] * 2, [level[-1], 0], color=color, linewidth=3, solid_capstyle="butt")
        lower.broken_barh([(begin, end - begin)], (lane, 0.38), facecolor=color, alpha=alpha,
                          edgecolor="black", linewidth=0.8)
        lower.text((begin + end) / 2, lane + 0.18, f"{number + 1}", ha="center", va="center", fontsize=10,
                   weight="bold", color=ink)
        first = last
    done = max(step["end"], max(end for *_, end in step["reduces"]))
    for axes in (upper, lower):
        axes.axvline(step["end"], color="black", linestyle="--", linewidth=1)
        axes.axvspan(step["end"], done, color="#c8605a", alpha=0.25, linewidth=0)
        axes.spines[["top", "right"]].set_visible(False)
    upper.set(ylabel="MiB in the bucket", ylim=(0, 7.6),
              title="Each bucket fills, and leaves when it is full (rank 0 of 2, --bucket_mb 4)")
    upper.title.set_fontsize(10)
    lower.text(step["end"], 1.06, "backward ends  ", ha="right", fontsize=8.5)
    lower.set(xlabel="ms since the start of backward", ylabel="all-reduce\nunder way", yticks=[],
              ylim=(0, 1.25), xlim=(-0.03 * done, done * 1.01))
    figure.tight_layout()
    save(figure, "buckets.png")


# -------------------------------------------------------------------------------------------- overlap, traced
def spans_of(trace):
    """Return (start, end) of backward, all-reduces (with their thread) and optimizer, in ms from the start of backward."""
    with open(trace) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    reduces = [e for e in events if e["name"] == "gloo:all_reduce"]
    loss = max(reduces, key=lambda e: e["ts"])            # the last one reduces the loss
    backward = [e for e in events if e["name"].startswith("autograd::engine")]
    adamw = next(e for e in events if e["name"].startswith("Optimizer.step"))
    start = min(e["ts"] for e in backward)
    span = lambda es: ((min(e["ts"] for e in es) - start) / 1e3,
                       (max(e["ts"] + e["dur"] for e in es) - start) / 1e3)
    threads = sorted({e["tid"] for e in reduces})
    return dict(backward=span(backward), optimizer=span([adamw]),
                reduces=[(threads.index(e["tid"]), *span([e])) for e in reduces if e is not loss])


def overlap_picture(folder):
    """Draw a training step of each mode on rank 0 of 2, from the start of backward: the shortest of three traces."""
    traces = {}
    for mode, flags in MODES.items():
        for _ in range(3):
            words = (f"--model {folder} --seq_len {SEQ_LEN} --micro_batch_size 4 --global_batch_size 8 --steps 5 "
                     f"--dp_mode {flags} --profile {folder}").split()
            torchrun(2, STEP / "train.py", *words, capture_output=True, timeout=120)
            spans = spans_of(os.path.join(folder, "trace_rank0.json"))
            if mode not in traces or spans["optimizer"][1] < traces[mode]["optimizer"][1]:
                traces[mode] = spans
    figure, panels = plt.subplots(3, 1, figsize=(11, 5.2), sharex=True)
    for (mode, flags), axes in zip(MODES.items(), panels):
        spans = traces[mode]
        for name, color in (("backward", "#6aa56e"), ("optimizer", "#a9a9a9")):
            begin, end = spans[name]
            axes.broken_barh([(begin, end - begin)], (1.1, 0.8), color=color)
            axes.text(end if name == "optimizer" else begin, 1.5, f" {name}", va="center", fontsize=9)
        for thread, begin, end in spans["reduces"]:
            axes.broken_barh([(begin, end - begin)], (0.1 + 0.4 * (1 - thread), 0.38), facecolor="#d9a441",
                             edgecolor="white", linewidth=0.5 * (end - begin > 3))
        over, done = spans["backward"][1], max(end for *_, end in spans["reduces"])
        axes.text((max(over, done) + spans["optimizer"][0]) / 2, 1.5, "loss,\nclip", ha="center", va="center", fontsize=7.5)
        axes.axvspan(over, max(over, done), color="#c8605a", alpha=0.2, linewidth=0)
        late = f"{max(0, done - over):.0f} ms of them after backward"
        axes.set(title=f"--dp_mode {flags}: {len(spans['reduces'])} all-reduces, {late}", yticks=[0.5, 1.5],
                 yticklabels=["network\n(2 threads)", "compute"], ylim=(0, 2))
        axes.title.set_fontsize(10)
    last = max(spans["optimizer"][1] for spans in traces.values())
    panels[-1].set(xlabel="ms since the start of backward", xlim=(0, 1.08 * last))
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "overlap.png"), dpi=110)


# ------------------------------------------------------------------------------------------- the other tables
def bfloat16_table():
    """Add real gradients of single sequences one after another, as a ring does; make a table of the errors."""
    args = config.parse_args("--global_batch_size 64 --micro_batch_size 1".split(), train.TECHNIQUES)
    args.dp = 1
    shape = config.load_config(args)
    grads = []
    with mesh.init_distributed():
        model = train.build_model(shape, args)
        _, one = next(train.batches(train.load_tokens(args, shape.vocab_size), shape, mesh.build_mesh(args), args))
    for inputs, positions, targets in one:
        model(inputs, positions, targets).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    rows = ["| ranks | error of the sum in float32 | in bfloat16 |", "|---|---|---|"]
    for ranks in (2, 8, 64):
        exact = sum(g.double() for g in grads[:ranks])
        summed = lambda dtype: sum(g.to(dtype) for g in grads[:ranks])
        error = lambda dtype: float((summed(dtype).double() - exact).norm() / exact.norm())
        rows.append(f"| {ranks} | {error(torch.float32):.0e} | {error(torch.bfloat16):.1%} |")
    return rows


PICTURES = dict(idea=idea_picture, collectives=collectives_picture, ring=ring_gif)
PICTURES_OF_THE_MODEL = dict(buckets=buckets_picture, overlap=overlap_picture)


if __name__ == "__main__":
    wanted = sys.argv[1:] or [*PICTURES, *PICTURES_OF_THE_MODEL]
    for name, draw in PICTURES.items():
        if name in wanted:
            draw()
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(SHAPE, file)
        for name, draw in PICTURES_OF_THE_MODEL.items():
            if name in wanted:
                draw(folder)
    if not sys.argv[1:]:
        put_into_pages(STEP, dict(bfloat16=bfloat16_table()))
