"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step06.py          (about two minutes on two cores)
    python dev/figures/step06.py drawn    (only the pictures and the table that need no run)

The runs come first, in one torchrun of this file; rank 0 writes what all ranks saw in each.
"""
import contextlib
import gc
import itertools
import os
import subprocess
import sys
import time

from common import ROOT, do_runs, paths_of, put_into_pages, seen_in_runs

STEP, FIGURES = paths_of(6)

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.legend_handler import HandlerTuple

import pipeline_parallel
import schedule as shown
import schedules
import train
from watch import Storages, replaced_profiler

PP, M = 4, 8
SCHEDULES = list(schedules.SCHEDULES)
COLORS = dict(zip(SCHEDULES, itertools.cycle(["#444444", "#7b4ea3", "#2a9d8f", "#c8605a", "#d4569d", "#8a6d3b", "#4878a8"])))
UNIT = 0.04                                               # seconds of sleep that stand for a unit of time


def flags(name):
    return f"--seq_len 32 --steps 2 --pp {PP} --schedule {name}"


RUNS = [(kind, flags(name)) for name in SCHEDULES for kind in ("watch", "sleep")]
SEEN = {}                                                 # by (kind of run, flags): what every rank saw


# ---------------------------------------------------------------------------------------------- inside a rank
def one_run(kind, argv):
    """Run the trainer; return a list with what each rank saw."""
    seen, ranks = {}, []
    batches, pipeline = train.batches, pipeline_parallel.Pipeline

    def then_gathered(*arguments):
        yield from batches(*arguments)
        ranks.extend([None] * dist.get_world_size())
        dist.all_gather_object(ranks, seen)               # before the processes part
    train.batches = then_gathered
    if kind == "watch":
        with replaced_profiler(watch(seen)):
            train.main(argv.split())
    else:
        pipeline_parallel.Pipeline = sleeping(seen)
        train.main(f"{argv} --steps 8".split())
    train.batches, pipeline_parallel.Pipeline = batches, pipeline
    return ranks


def watch(seen):
    """Replace train's Pipeline by one that notes the bytes alive between the second step's actions. Return a context manager for
    each step."""
    live, marks = Storages(), []

    class Watched(pipeline_parallel.Pipeline):
        def forward_backward(self, micro_batches):
            gc.collect()
            marks[:] = [len(live.events)]
            return super().forward_backward(micro_batches)

        def compute(self, action):
            super().compute(action)
            marks.append(len(live.events))

    @contextlib.contextmanager
    def noted_step(step, model, optimizer, args):
        live.tag_state(model, optimizer)
        with live:
            yield
        live.tag_state(model, optimizer)                  # AdamW makes its states in step 0
        alive = [0]
        for _, _, size in live.events:
            alive.append(alive[-1] + size)
        between = [alive[mark] - alive[marks[0]] for mark in marks[1:]]
        seen.update(kept=max(between), of_one=between[0])
    pipeline_parallel.Pipeline = Watched
    return noted_step


def sleeping(seen):
    """Return a Pipeline whose stages only take time. Messages of the right size go where they should, and nobody reads them."""
    class Sleeping(pipeline_parallel.Pipeline):
        def __init__(self, model, config, mesh, args):
            super().__init__(model, config, mesh, args)
            self.seconds = UNIT / args.stages_per_rank
            self.events = shown.as_it_runs(self)

        def forward(self, stage, i, x):
            time.sleep(self.seconds)
            return torch.empty(self.shape, dtype=self.args.dtype)

        def input_gradient(self, stage, i, grad):
            time.sleep(self.seconds)
            return torch.empty(self.shape, dtype=self.args.dtype)

        def weight_gradient(self, stage, i, grad):
            time.sleep(self.seconds)

        def forward_backward(self, micro_batches):
            dist.barrier()
            self.events.clear()
            loss = super().forward_backward(micro_batches)
            seen.setdefault("steps", []).append([(event.rank, list(event.action), event.start, event.end)
                                                 for event in self.events])
            return loss
    return Sleeping


# ------------------------------------------------------------------------------------------------ the runs
def run_all():
    """Fill SEEN with what the ranks saw in each run."""
    SEEN.update(zip(RUNS, seen_in_runs(os.path.abspath(__file__), "rank", PP, RUNS, timeout=900)))


def stages_per_rank(name):
    """Return a rank's number of stages. Counts and times of a stage are divided by it, to be those of all layers of a rank."""
    return schedules.SCHEDULES[name].stages_per_rank


def simulated(name, m=M, message=0):
    lists = schedules.make(name, PP, m, stages_per_rank(name))
    return schedules.simulate(lists, *[1 / stages_per_rank(name)] * 3, message=message)


def length(events):
    return max(event.end for event in events) - min(event.start for event in events)


def ran(name):
    """Return the events of all ranks in a sleeping run's shortest step, in units of time."""
    steps = zip(*(seen["steps"] for seen in SEEN["sleep", flags(name)]))
    events = [[schedules.Event(rank, schedules.Action(*action), start / UNIT, end / UNIT)
               for of_rank in step for rank, action, start, end in of_rank] for step in steps]
    return min(events, key=length)


def idle_formula(name):
    """Return the idle time of a rank with F = I = W = 1; simulated where there is no formula."""
    known = {"afab": 3, "1f1b": 3, "interleaved": 1.5, "zerobubble": 1, "dualpipe": 0.5}
    return (PP - 1) * known[name] if name in known else max(schedules.bubble(simulated(name)))


def number(x):
    return f"{round(x, 6):g}"


def message_table():
    rows = ["| a message takes | micro-batches | " + " | ".join(SCHEDULES) + " |",
            "|---" * (2 + len(SCHEDULES)) + "|"]
    for message, m in ((0, 8), (0.25, 8), (0.25, 32), (0.5, 8), (0.5, 32)):
        idle = [max(schedules.bubble(simulated(name, m, message))) for name in SCHEDULES]
        rows.append(f"| {number(message)} | {m} | " + " | ".join(map(number, idle)) + " |")
    return rows


def counted(name):
    return [schedules.max_in_flight(actions) for actions in schedules.make(name, PP, M, stages_per_rank(name))]


KEPT = {"afab": "m", "1f1b": "min(m, p - r)", "interleaved": "min(mv, 2(p - 1 - r) + (v - 1) R + 1)",
        "zerobubble": "min(m, p)", "dualpipe": "2p + 1"}


def kept_by_formula(name):
    known = [{"afab": M, "1f1b": min(M, PP - r), "interleaved": min(2 * M, 2 * (PP - 1 - r) + PP + 1),
              "zerobubble": min(M, PP), "dualpipe": 2 * PP + 1} for r in range(PP)]
    return [of_rank[name] for of_rank in known] if name in KEPT else counted(name)


def memory_table():
    rows = ["| schedule | pairs on rank r: formula | ranks 0 to 3, counted | measured, in forwards of a stage |",
            "|---|---|---|---|"]
    for name in SCHEDULES:
        assert counted(name) == kept_by_formula(name)
        forwards = ", ".join(f"{seen['kept'] / seen['of_one']:.1f}" for seen in SEEN["watch", flags(name)])
        rows.append(f"| {name} | {KEPT.get(name, 'counted')} | {', '.join(map(str, counted(name)))} | {forwards} |")
    return rows


# ----------------------------------------------------------------------------------------------- the pictures
def phases(events, rank):
    """Return when a rank's warm-up ends, with its first backward, and its steady phase, with its last forward."""
    mine = [event for event in events if event.rank == rank]
    warm = min(event.start for event in mine if event.action.kind != "F")
    return warm, max(warm, *(event.end for event in mine if event.action.kind == "F"))


def mark_phases(axes, events):
    """Draw two staircases over the rows, from the lists, that divide warm-up, steady phase and cool-down."""
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


def mark_idle(axes, events, rank):
    """Write at each gap of a rank how long it idles there, as a formula."""
    mine = [event for event in events if event.rank == rank]
    times = [0, *(time for event in mine for time in (event.start, event.end)), length(events)]
    gaps = [(start, end) for start, end in zip(times[::2], times[1::2]) if end > start]
    terms = ["r F", "(p−1−r)(F+B)", "r B"]
    for (start, end), term in zip(gaps, terms, strict=True):
        axes.annotate("", (end, rank), (start, rank), arrowprops=dict(arrowstyle="|-|, widthA=0.35, widthB=0.35", color="#b03030",
                                                                     lw=1.4, shrinkA=0, shrinkB=0))
        side = "left" if start == 0 else "right" if end == length(events) else "center"
        at = {"left": start, "right": end, "center": (start + end) / 2}[side]
        axes.text(at, rank - 0.16, term, ha=side, va="bottom", fontsize=7.5, color="#b03030")


@contextlib.contextmanager
def on_one_scale(units):
    """Yield tools/schedule.py's draw, with a time axis that does not end where the schedule does, and with the phases.

    The picture is made to be read 800 pixels wide."""
    close = plt.close

    def restyled(figure):
        axes = figure.axes[0]
        for label in axes.texts:                          # numbers are black in light boxes
            at = axes.transData.transform(label.get_position())
            box = next(bar for bar in axes.patches if bar.contains_point(at))
            dark = box.get_facecolor() == matplotlib.colors.to_rgba("#4878a8")
            label.set(fontsize=8, color="white" if dark else "black")
        mark_phases(axes, restyled.events)
        if restyled.idle is not None:
            mark_idle(axes, restyled.events, restyled.idle)
        axes.set(xlim=(0, units))
        axes.set_xlabel("units of time", fontsize=9)
        title = axes.get_title()
        axes.set_title("")
        axes.set_title(title, fontsize=10, loc="left", pad=18)
        axes.tick_params(labelsize=9)
        handles = axes.get_legend().legend_handles
        names = ["F", "I", "W"] if any(event.action.kind == "W" for event in restyled.events) else ["F", "B"]
        handles = handles[:len(names)]
        if any(len(stages) > 1 for stages in shown.local_stages(restyled.events).values()):
            pale = [plt.Rectangle((0, 0), 1, 1, color=handle.get_facecolor(), alpha=0.65) for handle in handles[:2]]
            handles = [*handles, tuple(pale)]
            names.append("pale: second stage")
        solid, dashed = (plt.Line2D([], [], color="black", lw=1.6, ls=style) for style in ("-", "--"))
        names = [*names, "warm-up ends", "cool-down begins"]
        axes.legend([*handles, solid, dashed], names, loc="upper center", bbox_to_anchor=(0.5, -0.24),
                    ncols=6, frameon=False, fontsize=8, handlelength=1.4, columnspacing=1.2,
                    handler_map={tuple: HandlerTuple(ndivide=None, pad=0)})
        figure.set_size_inches(8.4, 2.5)
        figure.savefig(restyled.path, dpi=150, bbox_inches="tight")
        close(figure)
    plt.close = restyled

    def draw(events, name, title, idle=None):
        restyled.path, restyled.events, restyled.idle = os.path.join(FIGURES, f"{name}.png"), events, idle
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
            kept = ", ".join(number(n / stages_per_rank(name)) for n in counted(name))
            if not schedules.SCHEDULES[name].v_shaped:        # dualpipe has a picture of its own
                title = f"{name}: {idle_words(events)}; at most {kept} micro-batches in flight"
                draw(events, name, title, 1 if name == "afab" else None)


def dualpipe_picture(traced=0):
    """Draw DualPipeV, with the way of one micro-batch: down the V and up again in forward, and once more in backward."""
    events, colours = simulated("dualpipe"), {"F": "#4878a8", "B": "#d9a441", "I": "#d9a441", "W": "#6aa56e"}
    figure, axes = plt.subplots(figsize=(8.4, 3.2))
    way = []
    for rank, action, start, end in events:
        mine = action.micro_batch == traced
        axes.barh(rank, end - start, left=start, height=0.86, color=colours[action.kind], alpha=1 if mine else 0.3,
                  edgecolor="black" if mine else "white", lw=1.2 if mine else 0.6, zorder=3 if mine else 1)
        if mine and action.kind != "W":
            axes.text((start + end) / 2, rank, action.stage, ha="center", va="center", fontsize=10, fontweight="bold", zorder=5,
                      color="white" if action.kind == "F" else "black")
            way.append((start, end, rank))
    for (_, end, here), (start, _, there) in zip(sorted(way), sorted(way)[1:]):
        axes.plot([end, start], [here, there], color="black", lw=1.3, zorder=2)
    axes.set_yticks(range(PP), [f"rank {rank}, stages {rank} and {2 * PP - 1 - rank}" for rank in range(PP)], fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, length(events)))
    axes.set_xlabel("units of time", fontsize=9)
    axes.tick_params(labelsize=9)
    kept = number(counted("dualpipe")[0] / stages_per_rank("dualpipe"))
    axes.set_title(f"dualpipe: {idle_words(events)}; at most {kept} micro-batches in flight", fontsize=10, loc="left")
    patches = [plt.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in "FBW"]
    line = plt.Line2D([], [], color="black", lw=1.3)
    axes.legend([*patches, line], ["F", "B, or I alone", "W", f"the path of micro-batch {traced}; numbers are stages"], ncols=4,
                loc="upper center", bbox_to_anchor=(0.4, -0.19), frameon=False, fontsize=8, handlelength=1.6, columnspacing=1.2)
    figure.savefig(os.path.join(FIGURES, "dualpipe.png"), dpi=150, bbox_inches="tight")
    plt.close(figure)


def simulated_picture():
    """Draw 1F1B of the same size with a real model, as tools/simulate plays it."""
    words = ("6 4 --pp 4 --schedule 1f1b --model llama-8b --dtype bfloat16 --seq_len 4096 --global_batch_size 8 "
             "--micro_batch_size 1 --plot").split()
    subprocess.run([sys.executable, ROOT / "tools/simulate", *words, os.path.join(FIGURES, "simulated.png")],
                   check=True, stdout=subprocess.DEVNULL)


def in_flight_picture():
    """Draw how long rank 0 keeps each micro-batch's activations, from its F to its B, and how many at a time."""
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


def bubble_picture():
    """Plot the idle share against the micro-batches, and the memory per rank."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2))
    many = range(PP, 33)
    for name in SCHEDULES:
        style = dict(color=COLORS[name])
        taken = [m for m in many if m >= schedules.SCHEDULES[name].min_micro_batches(PP)]
        left.plot(taken, [idle_formula(name) / (3 * m) for m in taken], lw=1,
                  ls="--" if name == "afab" else "-", **style)
        points = [m for m in taken if m in (4, 8, 12, 16, 24, 32)]
        idle = [schedules.bubble(simulated(name, m))[0] / (3 * m) for m in points]
        left.plot(points, idle, "o", ms=7 if name == "afab" else 4, label=name, **style)
        real = ran(name)
        left.plot(M, sum(schedules.bubble(real)) / PP / (3 * M), "x", ms=9, mew=1.5, **style)
    left.plot([], [], "x", color="black", label="measured run")
    left.set(xlabel="micro-batches m", ylabel="idle time, relative to a rank's work",
             title="lines: formula; dots: simulation", ylim=(0, None))
    left.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, 0))
    left.legend(frameon=False, fontsize=9)
    for i, name in enumerate(SCHEDULES):
        ranks = SEEN["watch", flags(name)]
        places = [rank + (i - (len(SCHEDULES) - 1) / 2) * 0.8 / len(SCHEDULES) for rank in range(PP)]
        right.bar(places, [n / stages_per_rank(name) for n in counted(name)], width=0.7 / len(SCHEDULES),
                  color=COLORS[name], label=name)
        measured = [seen["kept"] / seen["of_one"] / stages_per_rank(name) for seen in ranks]
        right.plot(places, measured, "k_", ms=9, mew=1.5, label="measured" if name == SCHEDULES[-1] else None)
    right.set(ylabel="activations held, in micro-batches",
              title="bars: counted in the lists; dashes: measured bytes", ylim=(0, 12))
    right.set_xticks(range(PP), [f"rank {rank}" for rank in range(PP)])
    right.legend(frameon=False, fontsize=9, ncols=3, loc="upper center")
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "bubble_and_memory.png"), dpi=150)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        do_runs(one_run, *sys.argv[2:])
    else:
        list_pictures()
        dualpipe_picture()
        simulated_picture()
        in_flight_picture()
        put_into_pages(STEP, dict(messages=message_table()))
        if sys.argv[1:2] != ["drawn"]:
            run_all()
            bubble_picture()
            put_into_pages(STEP, dict(memory=memory_table()))
