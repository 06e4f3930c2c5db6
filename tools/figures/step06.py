"""Makes, from runs, this README's pictures and the tables between its `<!-- measured: ... -->` marks.

    python tools/figures/step06.py          (about two minutes on two cores)
    python tools/figures/step06.py drawn    (only what needs no run: the pictures of the lists)

The runs are done first, by a torchrun of this file per number of ranks; rank 0 writes what all saw of each.
"""
import contextlib
import gc
import os
import sys
import time

from common import bytes_of, do_runs, paths_of, put_into_page, seen_in_runs

STEP, FIGURES = paths_of(6)

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import config
import ledger
import live_storages
import metrics
import pipeline_parallel
import profiling
import schedule as shown
import schedules
import train
import zero

PP, M = 4, 8
SCHEDULES = list(schedules.SCHEDULES)
TWO = {"interleaved": 2, "dualpipe": 2}                   # stages on a rank
COLORS = {"afab": "#444444", "1f1b": "#4878a8", "interleaved": "#d9a441", "zerobubble": "#6aa56e",
          "dualpipe": "#c8605a"}
P = metrics.parameter_count(config.PRESETS["tiny"])
HIDDEN, SEQ, UNIT = 64, 32, 0.04                          # UNIT: seconds of sleep in place of a unit of time
SLEEPS = [(name, (1, 1, 1)) for name in SCHEDULES]
SLEEPS += [(name, times) for times in ((1.25, 1, 0.75), (1, 1, 1.5), (1, 1.25, 0.75))
           for name in ("1f1b", "zerobubble")]


def flags(more, batch=16, micro_batch=2):
    return f"--seq_len {SEQ} --global_batch_size {batch} --micro_batch_size {micro_batch} --steps 2 {more}"


def same_flags(more):
    return f"--seq_len {SEQ} --dtype float64 --steps 4 --micro_batch_size 1 {more}"


LAYOUTS = ["--pp 4", "--pp 2 --tp 2", "--pp 2 --tp 2 --sp off", "--pp 2 --cp 2", "--pp 2 --dp 2"]
#          flags, sequences in the global batch and in a micro-batch
AGAINST = [("--zero 3", 16, 4), ("--zero 3", 32, 4), ("--zero 3", 32, 8), ("--pp 4", 16, 2),
           ("--pp 4", 32, 2), ("--pp 2 --zero 3", 16, 2), ("--pp 2 --zero 3", 32, 2),
           ("--pp 2 --zero 1", 16, 2), ("--pp 2 --zero 1", 32, 2)]
SAME = [*(f"--pp 4 --schedule {name}" for name in SCHEDULES), "--pp 2 --tp 2 --schedule zerobubble",
        "--pp 2 --cp 2 --schedule interleaved", "--pp 2 --zero 3 --schedule dualpipe"]
RUNS = {1: [("watch", flags("")), ("same", same_flags(""))],
        PP: [*(("watch", flags(f"--pp 4 --schedule {name}")) for name in SCHEDULES),
             *(("watch", flags(more)) for more in LAYOUTS[1:]),
             *(("watch", flags(*more)) for more in AGAINST if more != ("--pp 4", 16, 2)),
             *(("same", same_flags(more)) for more in SAME),
             *((f"sleep {' '.join(map(str, times))}", flags(f"--pp 4 --schedule {name}"))
               for name, times in SLEEPS)]}
SEEN = {}                                                 # by (kind of run, flags): what every rank saw


# ---------------------------------------------------------------------------------------------- inside a rank
def one_run(kind, argv):
    """Runs the trainer; returns what every rank saw, in a list by rank."""
    seen, ranks = {}, []
    kept = dict(Pipeline=train.Pipeline, Profiler=train.Profiler, ledger=train.ledger, Zero=train.Zero,
                Metrics=train.Metrics, make_units=train.make_units)

    class Finishing(zero.Zero):
        def wait(self):                                   # the last thing before the processes part
            super().wait()
            ranks.extend([None] * dist.get_world_size())
            dist.all_gather_object(ranks, seen)

    class Quiet(metrics.Metrics):
        def log(self, step, loss, grad_norm, lr, **load):
            seen.update(loss=float(loss), grad_norm=float(grad_norm))
    train.Zero, train.Metrics = Finishing, Quiet
    gather = zero.Unit3.gather_if_released
    if kind == "watch":
        watch(seen)
    elif kind.startswith("sleep"):
        train.Pipeline = sleeping(seen, *map(float, kind.split()[1:]))
    train.main(argv.split())
    zero.Unit3.gather_if_released = gather
    for name, value in kept.items():
        setattr(train, name, value)
    return ranks


def sleeping(seen, *seconds):
    """A pipeline whose stages only take time: messages of the right size go where they should, unread."""
    class Sleeping(pipeline_parallel.Pipeline):
        def __init__(self, model, config, mesh, args):
            super().__init__(model, config, mesh, args)
            self.seconds = [time * UNIT / args.stages_per_rank for time in seconds]
            self.events = shown.as_it_runs(self)

        def forward(self, stage, i, x):
            time.sleep(self.seconds[0])
            return torch.empty(self.shape, dtype=self.args.dtype)

        def input_gradient(self, stage, i, grad):
            time.sleep(self.seconds[1])
            return torch.empty(self.shape, dtype=self.args.dtype)

        def weight_gradient(self, stage, i, grad):
            time.sleep(self.seconds[2])

        def forward_backward(self, micro_batches):
            dist.barrier()
            self.events.clear()
            loss = super().forward_backward(micro_batches)
            seen["events"] = [(event.rank, list(event.action), event.start, event.end)
                              for event in self.events]
            return loss
    return Sleeping


def tensors_of(model, optimizer):
    """What persists."""
    params, units = list(model.parameters()), zero.units_of(model)
    return [*params, *optimizer.params, *optimizer.grads, *optimizer.masters,
            *(unit.grads for unit in units if unit.grads is not None),
            *(t for state in optimizer.adamw.state.values() for t in state.values() if t.dim())]


def watch(seen):
    """Sees of the first training step products multiplied and hooks that fire; of the second bytes sent, and
    alive between actions."""
    live, marks, fired = live_storages.LiveStorages(), [], {}

    class Watched(pipeline_parallel.Pipeline):
        def __init__(self, model, config, mesh, args):
            super().__init__(model, config, mesh, args)
            for name, param in model.named_parameters():
                param.register_post_accumulate_grad_hook(
                    lambda _, name=name: fired.__setitem__(name, fired.get(name, 0) + 1))

        def forward_backward(self, micro_batches):
            if not fired:                                 # the first step: counting keeps tensors alive
                with FlopCounterMode(display=False) as flops:
                    loss = super().forward_backward(micro_batches)
                seen.update(flops=flops.get_total_flops(), fired=sorted(set(fired.values())))
                return loss
            gc.collect()
            marks[:] = [len(live.events)]
            return super().forward_backward(micro_batches)

        def compute(self, action):
            super().compute(action)
            marks.append(len(live.events))

    class Keeping(profiling.Profiler):
        @contextlib.contextmanager
        def step(self, step):
            live_storages.note_state(live, self.model, self.optimizer)
            seen["persistent"], first = bytes_of(tensors_of(self.model, self.optimizer)), len(live.events)
            with live:
                yield
            live_storages.note_state(live, self.model, self.optimizer)                 # AdamW's come in step 0
            if step == 0:
                return
            alive = [0]
            for _, _, size in live.events:
                alive.append(alive[-1] + size)
            between = [alive[mark] - alive[marks[0]] for mark in marks[1:]]
            seen.update(peak=max(alive[first:]), kept=max(between), of_one=between[0])

    @contextlib.contextmanager
    def noted_ledger(step, model, mesh, args):
        with ledger.Ledger(mesh) as sent:
            yield
        expected = {}
        for group, collective, size in ledger.formula(model, mesh, args):
            key = f"{sent.name(group)} {collective}"
            expected[key] = expected.get(key, 0) + size
        of = lambda counter: {" ".join(key): n for key, n in counter.items()}
        seen.update(calls=of(sent.calls), payload=of(sent.payload), wire=of(sent.wire),
                    formula={key: n for key, n in expected.items() if n})
    gather = zero.Unit3.gather_if_released

    def noted_gather(unit):
        gather(unit)
        seen["whole"] = max(seen.get("whole", 0),
                            sum(u.weights.untyped_storage().nbytes() for u in Watched.units))

    def noted_units(model, mesh, args):
        cut(model, mesh, args)
        Watched.units = zero.units_of(model)
    cut = zero.make_units
    zero.Unit3.gather_if_released = noted_gather
    train.Pipeline, train.Profiler = Watched, Keeping
    train.ledger, train.make_units = noted_ledger, noted_units


# ------------------------------------------------------------------------------------------------ the runs
def run_all():
    """Fills SEEN with what the ranks saw of the last training step of each run."""
    for world, runs in RUNS.items():
        SEEN.update(zip(runs, seen_in_runs(os.path.abspath(__file__), "rank", world, runs, timeout=900)))
    for (kind, argv), ranks in SEEN.items():
        for rank, seen in enumerate(ranks):
            if kind == "watch":
                assert seen["payload"] == seen["formula"], (argv, rank, seen["payload"], seen["formula"])


def watched(more, batch=16, micro_batch=2):
    return SEEN["watch", flags(more, batch, micro_batch)]


def share(name):
    """Stages of a rank: with them, times are those of a rank's whole share."""
    return TWO.get(name, 1)


def simulated(name, times=(1, 1, 1), m=M, p=PP):
    lists = schedules.make(name, p, m, share(name))
    return schedules.simulate(lists, *(time / share(name) for time in times))


def length(events):
    return max(event.end for event in events) - min(event.start for event in events)


def ran(name, times=(1, 1, 1)):
    """The events of a sleeping run, of all ranks, in units of time."""
    ranks = SEEN[f"sleep {' '.join(map(str, times))}", flags(f"--pp 4 --schedule {name}")]
    return [schedules.Event(rank, schedules.Action(*action), start / UNIT, end / UNIT)
            for seen in ranks for rank, action, start, end in seen["events"]]


FORMULAS = {"afab": "(p - 1)(F + I + W)", "1f1b": "(p - 1)(F + I + W)",
            "interleaved": "(p - 1)(F + I + W) / v", "zerobubble": "(p - 1)(F + I - W)",
            "dualpipe": "(p - 1)(F + I - W) / 2"}


def idle_formula(name, F=1, I=1, W=1, p=PP):
    return (p - 1) * {"afab": F + I + W, "1f1b": F + I + W, "interleaved": (F + I + W) / 2,
                      "zerobubble": max(F, I, F + I - W), "dualpipe": (F + I - W) / 2}[name]


def number(x):
    return f"{round(x, 6):g}"


def bubble_table():
    rows = ["| schedule | idle: formula | of 4 ranks | simulation | per work | whole step: simulation "
            "| real run | difference |",
            "|---|---|---|---|---|---|---|---|"]
    for name in SCHEDULES:
        events = simulated(name)
        idle, whole, real = schedules.bubble(events), length(events), length(ran(name))
        assert {round(time, 6) for time in idle} == {idle_formula(name)}, (name, idle)
        rows.append(f"| {name} | {FORMULAS[name]} | {number(idle_formula(name))} | {number(idle[0])} "
                    f"| {idle[0] / (whole - idle[0]):.1%} | {number(whole)} units = {whole * UNIT:.2f} s "
                    f"| {real * UNIT:.3f} s | {real / whole - 1:+.1%} |")
    return rows


def uneven_table():
    rows = ["| F, I, W | 1f1b: formula | simulation | real run | zerobubble: formula | simulation "
            "| real run |",
            "|---|---|---|---|---|---|---|"]
    for times in dict.fromkeys(times for _, times in SLEEPS):
        cells = []
        for name in ("1f1b", "zerobubble"):
            idle, real = schedules.bubble(simulated(name, times))[0], schedules.bubble(ran(name, times))
            assert round(idle, 6) == round(idle_formula(name, *times), 6), (name, times, idle)
            formula = number(idle_formula(name, *times))
            cells.append(f"{formula} | {number(idle)} | {sum(real) / len(real):.2f}")
        rows.append(f"| {', '.join(map(number, times))} | {' | '.join(cells)} |")
    return rows


def message_table():
    rows = ["| a message takes | micro-batches | " + " | ".join(SCHEDULES) + " |",
            "|---" * (2 + len(SCHEDULES)) + "|"]
    for message in (0, 0.25, 0.5):
        for m in (8, 16, 32):
            idle = []
            for name in SCHEDULES:
                lists = schedules.make(name, PP, m, share(name))
                events = schedules.simulate(lists, *[1 / share(name)] * 3, message=message)
                idle.append(max(schedules.bubble(events)))
            rows.append(f"| {number(message)} | {m} | " + " | ".join(map(number, idle)) + " |")
    return rows


def counted(name, p=PP, m=M):
    return [schedules.in_flight(actions) for actions in schedules.make(name, p, m, share(name))]


KEPT = {"afab": "m", "1f1b": "min(m, p - r)", "interleaved": "min(mv, 2(p - 1 - r) + (v - 1) R + 1)",
        "zerobubble": "min(m, p)", "dualpipe": "2p + 1"}


def kept_by_formula(name):
    return [{"afab": M, "1f1b": min(M, PP - r), "interleaved": min(2 * M, 2 * (PP - 1 - r) + PP + 1),
             "zerobubble": min(M, PP), "dualpipe": 2 * PP + 1}[name] for r in range(PP)]


def memory_table():
    rows = ["| schedule | stages' worth: formula | ranks 0 to 3, counted | measured, in forwards of a stage "
            "| measured, KiB | worth of whole ranks, rank 0 |",
            "|---|---|---|---|---|---|"]
    for name in SCHEDULES:
        ranks = watched(f"--pp 4 --schedule {name}")
        assert counted(name) == kept_by_formula(name)
        forwards = ", ".join(f"{seen['kept'] / seen['of_one']:.1f}" for seen in ranks)
        kib = ", ".join(f"{seen['kept'] / 1024:,.0f}" for seen in ranks)
        rows.append(f"| {name} | {KEPT[name]} | {', '.join(map(str, counted(name)))} | {forwards} | {kib} "
                    f"| {number(counted(name)[0] / share(name))} |")
    return rows


def work_table():
    one = watched("")[0]
    rows = ["| run | floating-point operations of the matrix products of one step, all ranks "
            "| times a gradient's hook fires per micro-batch |",
            "|---|---|---|",
            f"| one process | {one['flops']:,} | {', '.join(number(n / M) for n in one['fired'])} |"]
    for name in SCHEDULES:
        ranks = watched(f"--pp 4 --schedule {name}")
        fired = sorted({n for seen in ranks for n in seen["fired"]})
        rows.append(f"| `--pp 4 --schedule {name}` | {sum(seen['flops'] for seen in ranks):,} "
                    f"| {', '.join(number(n / M) for n in fired)} |")
    return rows


def wire_table():
    """Of all ranks of --pp 4; an element is 4 bytes."""
    rows = ["| schedule | borders between ranks | messages per step, all ranks: 2 m borders | measured "
            "| bytes: messages x 2 x 32 x 64 x 4 | measured | by rank 0, 1, 2, 3 |",
            "|---|---|---|---|---|---|---|"]
    for name in SCHEDULES:
        ranks = watched(f"--pp 4 --schedule {name}")
        borders = PP * share(name) - 1 - (name == "dualpipe")
        calls = sum(seen["calls"]["pp send"] for seen in ranks)
        sent = [seen["payload"]["pp send"] for seen in ranks]
        assert calls == 2 * M * borders and sum(sent) == calls * 2 * SEQ * HIDDEN * 4
        rows.append(f"| {name} | {borders} | {2 * M * borders} | {calls} "
                    f"| {2 * M * borders * 2 * SEQ * HIDDEN * 4:,} | {sum(sent):,} "
                    f"| {', '.join(f'{n:,}' for n in sent)} |")
    return rows


def layout_table():
    rows = ["| layout | micro-batches | elements of a message: formula | measured "
            "| bytes sent by rank 0 in a step |",
            "|---|---|---|---|---|"]
    for more in LAYOUTS:
        ranks = watched(more if more != "--pp 4" else "--pp 4 --schedule 1f1b")
        halved = "--cp 2" in more or "--tp 2" in more and "off" not in more
        tokens = SEQ // 2 if halved else SEQ
        calls, payload = ranks[0]["calls"]["pp send"], ranks[0]["payload"]["pp send"]
        size = payload // calls // 4
        assert size == 2 * tokens * HIDDEN
        rows.append(f"| `{more}` | {calls} | 2 x {tokens} x 64 = {2 * tokens * HIDDEN:,} | {size:,} "
                    f"| {payload:,} |")
    return rows


def wire(seen, *names):
    return sum(n for key, n in seen["wire"].items() if key.split()[1] in names)


def against_table():
    """The rank with the most, in float32."""
    rows = ["| run | sequences in a step, in a micro-batch | micro-batches | persists "
            "| weights whole at most | gathered | reduced | sent to a stage | all on the wire "
            "| peak of all memory |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    for more, batch, micro_batch in AGAINST:
        seen_as = more if more != "--pp 4" or batch != 16 else "--pp 4 --schedule 1f1b"
        ranks = watched(seen_as, batch, micro_batch)
        dp = 4 if "--pp" not in more else 2 if "--pp 2" in more else 1
        most = lambda get: max(get(seen) for seen in ranks)
        whole = f"{most(lambda seen: seen.get('whole', 0)) / P:.2f} P" if "zero 3" in more else "persist"
        names = "all_gather", "reduce_scatter", "send"
        cells = [most(lambda seen: wire(seen, *some)) for some in (*((name,) for name in names), names)]
        persists, peak = most(lambda seen: seen["persistent"]), most(lambda seen: seen["peak"])
        rows.append(f"| `{more}` | {batch}, {micro_batch} | {batch // dp // micro_batch} "
                    f"| {persists / P:.2f} P | {whole} | {' | '.join(f'{n:,.0f}' for n in cells)} "
                    f"| {peak / 2**20:.2f} MiB |")
    return rows


def same_table():
    rows = ["| run | loss of the 4th step, float64 | gradient norm |", "|---|---|---|"]
    one = SEEN["same", same_flags("")][0]
    runs = {"one process": one, **{f"`{more}`": SEEN["same", same_flags(more)][0] for more in SAME}}
    for name, seen in runs.items():
        assert abs(seen["loss"] / one["loss"] - 1) < 1e-12
        assert abs(seen["grad_norm"] / one["grad_norm"] - 1) < 1e-10
        rows.append(f"| {name} | {seen['loss']:.12f} | {seen['grad_norm']:.10f} |")
    return rows


def stages_table():
    """First layers and parameters of four stages."""
    rows = ["| model | embedding or head, in layers | layers of stages 0 to 3 "
            "| parameters of each, in billions | computation of each, as many layers |",
            "|---|---|---|---|---|"]
    for model in ("tiny", "llama-1b", "llama-8b", "llama-70b"):
        shape = config.PRESETS[model]
        first, ends = pipeline_parallel.first_layers(shape, 4), shape.vocab_size * shape.hidden_size
        layer = (metrics.parameter_count(shape) - 2 * ends - shape.hidden_size) / shape.num_hidden_layers
        counts = [b - a for a, b in zip(first, first[1:])]
        held = [count * layer + ends * (i in (0, 3)) for i, count in enumerate(counts)]
        held[3] += shape.hidden_size                      # the last norm
        scale = 1e9 if model != "tiny" else 1e3
        parameters = ", ".join(f"{n / scale:.2f}" for n in held) + " thousand" * (scale < 1e9)
        computed = ", ".join(f"{count + (i == 3) * ends / layer:.1f}" for i, count in enumerate(counts))
        rows.append(f"| `{model}` | {ends / layer:.1f} | {', '.join(map(str, counts))} | {parameters} "
                    f"| {computed} |")
    return rows


# ----------------------------------------------------------------------------------------------- the pictures
def phases(events, rank):
    """Where a rank's warm-up ends, with its first backward, and its steady phase, with its last forward."""
    mine = [event for event in events if event.rank == rank]
    warm = min(event.start for event in mine if event.action.kind != "F")
    return warm, max(warm, *(event.end for event in mine if event.action.kind == "F"))


def mark_phases(axes, events):
    """Two staircases over the rows, from the lists: warm-up | steady | cool-down."""
    start, ranks = min(event.start for event in events), 1 + max(event.rank for event in events)
    ends = [[time - start for time in phases(events, rank)] for rank in range(ranks)]
    for which in (0, 1):
        times = [time for rank in range(ranks) for time in [ends[rank][which]] * 2]
        edges = [edge for rank in range(ranks) for edge in (rank - 0.5, rank + 0.5)]
        axes.plot(times, edges, color="white", lw=4, solid_joinstyle="miter")
        axes.plot(times, edges, color="black", lw=1.6, ls="-" if which == 0 else (0, (3, 1.2)),
                  solid_joinstyle="miter")
    borders = [0, *ends[0], length(events)]
    for name, left, right in zip(("warm-up", "steady", "cool-down"), borders, borders[1:]):
        if right > left:
            axes.text((left + right) / 2, 1.02, name, ha="center", va="bottom", fontsize=9,
                      transform=axes.get_xaxis_transform())


@contextlib.contextmanager
def on_one_scale(units):
    """tools/schedule.py's draw, with a time axis that does not end where the schedule does, and with the phases.

    To be read 800 pixels wide."""
    close = plt.close

    def restyled(figure):
        axes = figure.axes[0]
        for label in axes.texts:                          # a number in a box: black where the box is light
            at = axes.transData.transform(label.get_position())
            box = next(bar for bar in axes.patches if bar.contains_point(at))
            dark = box.get_facecolor() == matplotlib.colors.to_rgba("#4878a8")
            label.set(fontsize=8, color="white" if dark else "black")
        mark_phases(axes, restyled.events)
        axes.set(xlim=(0, units))
        axes.set_xlabel("units of time", fontsize=9)
        title = axes.get_title()
        axes.set_title("")
        axes.set_title(title, fontsize=10, loc="left", pad=18)
        axes.tick_params(labelsize=9)
        handles = axes.get_legend().legend_handles
        names = ["F", "B, or I alone", "W"]
        if any(len(stages) > 1 for stages in shown.local_stages(restyled.events).values()):
            handles = [*handles, plt.Rectangle((0, 0), 1, 1, color=handles[0].get_facecolor(), alpha=0.65)]
            names.append("light: second stage")
        solid, dashed = (plt.Line2D([], [], color="black", lw=1.6, ls=style) for style in ("-", "--"))
        names = [*names, "warm-up ends", "cool-down begins"]
        axes.legend([*handles, solid, dashed], names, loc="upper center", bbox_to_anchor=(0.5, -0.24),
                    ncols=6, frameon=False, fontsize=8, handlelength=1.4, columnspacing=1.2)
        figure.set_size_inches(8.4, 2.5)
        figure.savefig(restyled.path, dpi=150, bbox_inches="tight")
        close(figure)
    plt.close = restyled

    def draw(events, name, title):
        restyled.path, restyled.events = os.path.join(FIGURES, f"{name}.png"), events
        shown.draw(events, restyled.path, title)
    yield draw
    plt.close = close


def idle_words(events):
    return f"ranks idle {number(schedules.bubble(events)[0])} of {number(length(events))} units"


def list_pictures():
    one = schedules.simulate(schedules.make("afab", PP, 1), M, M, M)
    with on_one_scale(length(one)) as draw:
        draw(one, "one_micro_batch", f"the whole batch as one micro-batch: {idle_words(one)}")
    with on_one_scale(33) as draw:
        for name in SCHEDULES:
            events = simulated(name)
            kept = ", ".join(map(str, counted(name))) + (" halves" if name in TWO else " micro-batches")
            draw(events, name, f"{name}: {idle_words(events)}, keep at most {kept}")


def fold_picture():
    """Who has which stage in DualPipe, and in DualPipeV; from the lists of the latter."""
    stages = [sorted({action.stage for action in actions}) for actions in schedules.make("dualpipe", PP, M)]
    last = 2 * PP - 1
    ways = ("#4878a8", "#d9a441")
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8.4, 5.2), height_ratios=(1, 1))

    def box(axes, rank, row, stage, color):
        axes.add_patch(plt.Rectangle((rank - 0.36, row - 0.3), 0.72, 0.6, facecolor=color,
                                     edgecolor="black", lw=0.8))
        axes.text(rank, row, f"stage {stage}", ha="center", va="center", fontsize=8.5,
                  color="white" if color == ways[0] else "black")

    def arrow(axes, start, end, color):
        axes.annotate("", end, start,
                      arrowprops=dict(arrowstyle="-|>", color=color, lw=1.8, shrinkA=0, shrinkB=0))
    for rank in range(2 * PP):                            # the right half is the left one's mirror image
        mine = stages[rank] if rank < PP else stages[last - rank][::-1]
        for row, stage, color in zip((1, 0), mine, ways):
            box(top, rank, row, stage, color)
        if rank < last:
            arrow(top, (rank + 0.36, 1), (rank + 0.64, 1), ways[0])
            arrow(top, (rank + 0.64, 0), (rank + 0.36, 0), ways[1])
    top.axvline(PP - 0.5, color="black", ls="--", lw=1.2)
    top.text(PP - 0.42, 1.52, "cut here", fontsize=9, va="center")
    top.text(-0.5, 1.52, "half of the micro-batches enter here", fontsize=9, va="center", color=ways[0])
    top.text(last + 0.5, -0.52, "the other half enters here", fontsize=9, va="center", ha="right",
             color="#9a6a10")
    top.set_title("DualPipe: 8 ranks, each stage exists twice (upper row one way, lower row the other)",
                  fontsize=10, loc="left")
    for rank, (there, back) in enumerate(stages):
        box(bottom, rank, 1, there, ways[0])
        box(bottom, rank, 0, back, ways[1])
        if rank < PP - 1:
            arrow(bottom, (rank + 0.36, 1), (rank + 0.64, 1), ways[0])
            arrow(bottom, (rank + 0.64, 0), (rank + 0.36, 0), ways[1])
    arrow(bottom, (PP - 1, 0.7), (PP - 1, 0.3), "black")
    there, back = stages[-1]
    bottom.text(PP - 0.5, 0.5, f"from stage {there} to stage {back}:\nsame rank, no message",
                fontsize=9, va="center")
    bottom.text(-0.5, 1.52, "all micro-batches enter here", fontsize=9, va="center", color=ways[0])
    bottom.text(-0.5, -0.52, "and have their loss here", fontsize=9, va="center", color="#9a6a10")
    bottom.set_title("DualPipeV: 4 ranks, each stage exists once; a micro-batch goes there and back",
                     fontsize=10, loc="left")
    for axes, ranks in ((top, 2 * PP), (bottom, PP)):
        axes.set(xlim=(-0.55, 2 * PP - 0.45), ylim=(-0.75, 1.75), yticks=[])
        axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=9)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "fold.png"), dpi=150)
    plt.close(figure)


def in_flight_picture():
    """How long rank 0 keeps what it needs of a micro-batch, from its F to its B, and how many at a time."""
    figure, columns = plt.subplots(2, 2, figsize=(8.4, 4.4), sharex=True, sharey="row", height_ratios=(2, 1))
    for name, (above, below) in zip(("afab", "1f1b"), columns.T):
        mine = [event for event in simulated(name) if event.rank == 0]
        starts, ends = ({event.action.micro_batch: event for event in mine if event.action.kind == kind}
                        for kind in "FB")
        for i in starts:
            above.barh(i, ends[i].end - starts[i].start, left=starts[i].start, height=0.75,
                       color="#d8d8d8", edgecolor="#888888", lw=0.5)
            for event, color in ((starts[i], "#4878a8"), (ends[i], "#d9a441")):
                above.barh(i, event.end - event.start, left=event.start, height=0.75, color=color)
        times = sorted({0, *(event.start for event in starts.values()),
                        *(event.end for event in ends.values())})
        kept = [sum(starts[i].start <= time < ends[i].end for i in starts) for time in times]
        most = max(kept)
        assert most == counted(name)[0]
        below.step(times, kept, where="post", color="black", lw=1.5)
        below.fill_between(times, kept, step="post", color="#d8d8d8")
        below.text(times[kept.index(most)] + 0.4, most + 0.25, f"at most {most}", fontsize=9, va="bottom")
        above.set_title(f"rank 0 in {name}", fontsize=10, loc="left")
        below.set_xlabel("units of time", fontsize=9)
    columns[0, 0].set_ylabel("micro-batch", fontsize=9)
    columns[0, 0].set(yticks=range(M))
    columns[0, 0].invert_yaxis()
    columns[1, 0].set_ylabel("in flight", fontsize=9)
    columns[1, 0].set(ylim=(0, M + 2.5), yticks=(0, 4, 8))
    for axes in columns.flat:
        axes.tick_params(labelsize=9)
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in ("#4878a8", "#d9a441", "#d8d8d8")]
    figure.legend(patches, ["F", "B", "kept from F to B"], loc="upper center", ncols=3, frameon=False,
                  fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(os.path.join(FIGURES, "in_flight.png"), dpi=150)
    plt.close(figure)


def ran_picture():
    events = ran("zerobubble")
    with on_one_scale(33) as draw:
        took = f"{length(events):.1f} units of {UNIT * 1000:.0f} ms"
        draw(events, "ran", f"zerobubble, as it ran on four processes: {took}")


def bubble_picture():
    """Idle share against micro-batches; memory per rank."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4))
    many = range(PP, 33)
    for name in SCHEDULES:
        style = dict(color=COLORS[name])
        left.plot(many, [idle_formula(name) / (3 * m) for m in many], lw=1,
                  ls="--" if name == "afab" else "-", **style)
        points = [m for m in (4, 8, 12, 16, 24, 32) if m >= 2 * PP or name != "dualpipe"]
        idle = [schedules.bubble(simulated(name, m=m))[0] / (3 * m) for m in points]
        left.plot(points, idle, "o", ms=7 if name == "afab" else 4, label=name, **style)
        real = ran(name)
        left.plot(M, sum(schedules.bubble(real)) / PP / (3 * M), "x", ms=9, mew=1.5, **style)
    left.plot([], [], "x", color="black", label="a real run")
    left.set(xlabel="micro-batches m", ylabel="idle time, as a share of the work",
             title="lines: formula; dots: simulation", ylim=(0, None))
    left.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, 0))
    left.legend(frameon=False, fontsize=9)
    for i, name in enumerate(SCHEDULES):
        ranks = watched(f"--pp 4 --schedule {name}")
        places = [rank + (i - 2) * 0.16 for rank in range(PP)]
        right.bar(places, [n / share(name) for n in counted(name)], width=0.14,
                  color=COLORS[name], label=name)
        measured = [seen["kept"] / seen["of_one"] / share(name) for seen in ranks]
        right.plot(places, measured, "k_", ms=9, mew=1.5, label="measured" if i == 4 else None)
    right.set(ylabel="micro-batches kept, of a rank's whole share",
              title="bars: counted in the lists; strokes: measured bytes", ylim=(0, 11.5))
    right.set_xticks(range(PP), [f"rank {rank}" for rank in range(PP)])
    right.legend(frameon=False, fontsize=9, ncols=3, loc="upper center")
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "bubble_and_memory.png"), dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        do_runs(one_run, *sys.argv[2:])
    else:
        list_pictures()
        fold_picture()
        in_flight_picture()
        put_into_page(STEP / "README.md", dict(stages=stages_table(), messages=message_table()))
        if sys.argv[1:2] != ["drawn"]:
            run_all()
            ran_picture()
            bubble_picture()
            put_into_page(STEP / "README.md", dict(bubble=bubble_table(), uneven=uneven_table(), memory=memory_table(),
                                 work=work_table(), wire=wire_table(), layouts=layout_table(),
                                 against=against_table(), same=same_table()))
