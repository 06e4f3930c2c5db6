"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step03.py                 (about three minutes on two cores)
    python dev/figures/step03.py timeline        (the timeline alone)

The runs come first, in one torchrun of this file per number of ranks; rank 0 writes what it saw in each.
"""
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time

from common import bytes_of, do_runs, paths_of, put_into_pages, seen_in_runs, torchrun

STEP, FIGURES = paths_of(3)

import matplotlib.pyplot as plt

import config
import ledger
import metrics
import train
import zero
from watch import KINDS as COLORS, Storages, replaced_profiler

WHAT = ["parameters", "gradients", "optimizer states"]
P = metrics.parameter_count(config.PRESETS["tiny"])
DP = 4


def flags(stage, dtype="float32", micro_batches=1, more=""):
    """Return the flags of a run with four sequences on each rank."""
    batch = f"--global_batch_size {4 * DP} --micro_batch_size {4 // micro_batches}"
    return f"--zero {stage} --dtype {dtype} --seq_len 32 {batch} {more}"


RUNS = [flags(stage, "bfloat16") for stage in range(4)]
RUNS += [flags(stage, micro_batches=m) for stage in range(4) for m in (1, 2, 4)]
RUNS += [flags(stage, more="--zero_shard 2") for stage in (1, 3)]
SEEN = {}                                                 # by flags
# bytes per parameter in float32 and in bfloat16, and the stage from which on they are divided by dp
BYTES = {"parameters": (4, 2, 3), "gradients": (4, 4, 2), "optimizer states": (8, 12, 1)}


# ---------------------------------------------------------------------------------------------- inside a rank
def tensors_of(model, optimizer):
    """Return the tensors that persist, by kind."""
    params, units = list(model.parameters()), model.zero_units
    masters = [master for master in optimizer.masters if master.dtype != params[0].dtype]
    grads = [t for unit in units for t in (unit.flat_grad, unit.grad_shard) if t is not None]
    states = [t for state in optimizer.adamw.state.values() for t in state.values() if t.dim()]
    return {"parameters": params + [unit.param_shard for unit in units],
            "gradients": grads or [p.main_grad for p in params],
            "optimizer states": masters + states}


def watch(argv):
    """Run the trainer; return the bytes that persist, what the ledger saw, and memory over the last step."""
    seen, live, kept = {}, Storages(), {}

    @contextlib.contextmanager
    def noted_step(step, model, optimizer, args):
        kinds = tensors_of(model, optimizer)
        seen["persistent"] = {kind: bytes_of(tensors) for kind, tensors in kinds.items()}
        for kind, tensors in kinds.items():
            live.note_all(tensors, kind)
        kept["first"] = len(live.events)
        yield
        kept["last"] = len(live.events)
    add = zero.Zero2Unit.accumulate_grad

    def noted_add(unit, param):
        add(unit, param)
        live.note(unit.flat_grad, "gradients")
    zero.Zero2Unit.accumulate_grad = noted_add
    ledger.print_table = lambda sent, formula: seen.update(
        calls={" ".join(key): n for key, n in sent.calls.items()},
        wire={" ".join(key): n for key, n in sent.wire.items()},
        payload={" ".join(key): n for key, n in sent.payload.items()},
        formula={" ".join(key): n for key, n in formula.items()})
    with live, replaced_profiler(noted_step):
        train.main([*argv.split(), "--steps", "3", "--ledger"])
    zero.Zero2Unit.accumulate_grad = add
    seen["rows"] = [row[1:] for row in live.timeline()[kept["first"]:kept["last"]]]
    return seen


# -------------------------------------------------------------------------------- the timeline, inside a rank
# 2.7M parameters in three blocks; one micro-batch of 4 x 64 tokens on each of two ranks
TRACED = dict(model_type="llama", vocab_size=1024, hidden_size=256, intermediate_size=688,
              num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
              rms_norm_eps=1e-5, rope_theta=500000.0, max_position_embeddings=4096)
TRACED_FLAGS = "--zero 3 --seq_len 64 --global_batch_size 8 --micro_batch_size 4 --steps 40"


def trace(out, argv):
    """Run the trainer; write for every step what happened, and when.

    The times are by this thread's clock, which stands still while it waits."""
    steps, number = [], {}

    @contextlib.contextmanager
    def traced_step(*_):
        steps.append([])
        yield

    def note(what, unit):
        if steps:                                         # skip what happens while the model is built
            steps[-1].append((what, number[unit], time.thread_time()))

    def noted(what, function):
        def call(unit, *args):
            note(what, unit)
            return function(unit, *args)
        return call

    def noted_forward(unit, function):
        def call(*args):
            note("forward", unit)
            result = function(*args)
            note("forward done", unit)
            return result
        return call
    build, wait = train.build_model, zero.Zero1Unit.wait_for_all_gather

    def noted_build(*args):
        model = build(*args)
        number.update((unit, i) for i, unit in enumerate(model.zero_units))
        for unit in number:
            for module in unit.modules:
                module.forward = noted_forward(unit, module.forward)
        return model

    def noted_wait(unit):
        gathering = unit.gather_handle
        wait(unit)
        if gathering:
            note("there", unit)
    train.build_model, zero.Zero1Unit.wait_for_all_gather = noted_build, noted_wait
    zero.Zero1Unit.start_all_gather = noted("ask", zero.Zero1Unit.start_all_gather)
    zero.Zero3Unit.reshard = noted("drop", zero.Zero3Unit.reshard)
    zero.Zero3Unit.start_reduce_scatter = noted("reduce", zero.Zero3Unit.start_reduce_scatter)
    zero.Zero3Unit.finish_reduce_scatter = noted("summed", zero.Zero3Unit.finish_reduce_scatter)
    with replaced_profiler(traced_step):
        train.main(argv)
    if os.environ["RANK"] == "0":
        with open(out, "w") as file:
            json.dump(steps, file)


# ------------------------------------------------------------------------------------------------ the runs
def run_all():
    """Fill SEEN with what rank 0 saw in the third training step of each run."""
    SEEN.update(zip(RUNS, seen_in_runs(os.path.abspath(__file__), "watch", DP, [(argv,) for argv in RUNS], timeout=600)))
    for key, seen in SEEN.items():
        assert seen["payload"] == seen["formula"], (key, seen["payload"], seen["formula"])


def run(argv):
    return SEEN[argv]


def share(what, stage, dp, dtype="float32"):
    """Return the bytes per parameter, by the formula."""
    float32, bfloat16, first = BYTES[what]
    return (float32 if dtype == "float32" else bfloat16) / (dp if stage >= first else 1)


def persistent_table():
    rows = ["| precision | stage | parameters: formula | measured | gradients: formula | measured "
            "| optimizer states: formula | measured | in all |",
            "|---|---|---|---|---|---|---|---|---|"]
    for dtype in ("float32", "bfloat16"):
        for stage in range(4):
            seen, cells = run(flags(stage, dtype))["persistent"], []
            for what in WHAT:
                number, cut = BYTES[what][dtype == "bfloat16"], "/dp" if stage >= BYTES[what][2] else ""
                cells.append(f"{number}P{cut} = {P * share(what, stage, DP, dtype):,.0f} | {seen[what]:,}")
            rows.append(f"| {dtype} | {stage} | " + " | ".join(cells) + f" | {sum(seen.values()) / P:g} P |")
    return rows


def wire_of(seen, *collectives):
    return sum(n for key, n in seen["wire"].items() if key.split()[1] in collectives)


def wire_table():
    """Make the table for one and for four micro-batches per step. P counts elements here; the loss and the norm are left out."""
    again = P - 2 * 16384 - 64 - (P - 2 * 16384 - 64) // 8                         # all blocks but the last
    assert again == P - 16384 - 16448 - 49280
    rows = ["| stage | micro-batches | reduced, elements: formula | measured | gathered: formula "
            "| measured | bytes on the wire per rank | calls |",
            "|---|---|---|---|---|---|---|---|"]
    for m in (1, 4):
        for stage in range(4):
            seen = run(flags(stage, micro_batches=m))
            paid = lambda name: seen["payload"].get("dp " + name, 0) // 4
            reduced, unsharded_param = paid("reduce_scatter"), paid("all_gather")
            if stage == 0:
                reduced, unsharded_param = 2 * (paid("all_reduce") - 2), 0
            to_reduce, reduces = [("2P", 2 * P), ("P", P), ("mP", m * P), ("mP", m * P)][stage]
            to_gather, gathers = [("0", 0), ("P", P), ("P", P), ("m(P + R)", m * (P + again))][stage]
            assert (reduced, unsharded_param) == (reduces, gathers)
            calls = sum(seen["calls"].values()) - 2
            on_wire = wire_of(seen, "all_reduce", "reduce_scatter", "all_gather") - 2 * 4 * 1.5
            rows.append(f"| {stage} | {m} | {to_reduce} = {reduces:,} | {reduced:,} "
                        f"| {to_gather} = {gathers:,} | {unsharded_param:,} | {on_wire:,.0f} | {calls} |")
    return rows


def hybrid_table():
    rows = ["| stage | `--zero_shard` | persists, P bytes | on the wire inside a group "
            "| on the wire across groups |",
            "|---|---|---|---|---|"]
    for stage in (1, 3):
        for shard in (4, 2):
            seen = run(flags(stage, more="--zero_shard 2" if shard == 2 else ""))
            inside = wire_of(seen, "reduce_scatter", "all_gather")
            across = seen["wire"].get("replicate all_reduce", 0)
            rows.append(f"| {stage} | {shard} | {sum(seen['persistent'].values()) / P:g} | {inside:,.0f} "
                        f"| {across:,.0f} |")
    return rows


# ----------------------------------------------------------------------------------------------- the pictures
def holds_picture():
    """Draw who holds what: a row per rank, and a column of four quarters per kind."""
    figure, panels = plt.subplots(1, 4, figsize=(10, 3.7))
    titles = ["--zero 0", "--zero 1", "--zero 2", "--zero 3"]
    for stage, axes in enumerate(panels):
        for rank in range(DP):
            for column, what in enumerate(WHAT):
                for quarter in range(DP):
                    held = stage < BYTES[what][2] or quarter == rank
                    axes.add_patch(plt.Rectangle((column * 1.25 + quarter * 0.25, -rank), 0.25, 0.62, lw=0.8,
                                                 edgecolor="#666666" if held else "#cccccc",
                                                 facecolor=COLORS[what] if held else "white"))
        total = sum(share(what, stage, DP, "bfloat16") for what in WHAT)
        axes.set(xlim=(-0.15, 3.65), ylim=(-DP + 0.65, 0.9),
                 title=f"{titles[stage]}\n{total:g} bytes per\nparameter on each rank")
        axes.title.set_fontsize(10)
        names = [f"rank {rank}" for rank in range(DP)] if stage == 0 else [""] * DP
        axes.set_yticks([0.31 - rank for rank in range(DP)], names)
        axes.set_xticks([0.5, 1.75, 3.0], ["weights\n2 B", "gradients\n4 B", "states\n12 B"])
        axes.tick_params(length=0)
        axes.tick_params(labelsize=9.5)
        for spine in axes.spines.values():
            spine.set_visible(False)
    figure.tight_layout(w_pad=0.2)
    figure.savefig(os.path.join(FIGURES, "who_holds_what.png"), dpi=110)


def step_picture():
    """Draw the memory on rank 0 over one training step of two micro-batches."""
    figure, panels = plt.subplots(2, 2, figsize=(9.5, 6.4), sharey=True)
    panels = list(panels.flat)
    for stage, axes in enumerate(panels):
        rows = run(flags(stage, micro_batches=2))["rows"]
        order = ["optimizer states", "gradients", "parameters", "activations", "rest"]
        kinds = [[row[list(COLORS).index(kind)] / 2**20 for row in rows] for kind in order]
        axes.stackplot(range(len(rows)), kinds, labels=order,
                       colors=[COLORS[kind] for kind in order], step="post")
        total = [sum(row) / 2**20 for row in rows]
        peak = max(range(len(rows)), key=total.__getitem__)
        axes.annotate(f"peak {total[peak]:.1f} MiB", (peak, total[peak]), (0, 5),
                      textcoords="offset points", ha="center")
        axes.set(title=f"--zero {stage}", xlabel="allocations and frees, in order", xlim=(0, len(rows)))
        axes.locator_params(axis="x", nbins=4)
        bottoms = itertools.accumulate([0, *(layer[0] for layer in kinds)])
        for below, kind, layer in zip(bottoms, order[:3] if stage < 2 else [], kinds):
            axes.text(0.03 * len(rows), below + layer[0] / 2, kind, va="center", fontsize=9)
    for axes in panels[::2]:
        axes.set(ylabel="MiB alive on rank 0 of 4", ylim=(0, 1.2 * panels[0].dataLim.ymax))
    handles, labels = panels[-1].get_legend_handles_labels()
    panels[-1].legend(handles[::-1], labels[::-1], loc="upper right", fontsize=9.5, frameon=False)
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "step.png"), dpi=110)


def traced_step():
    """Return rank 0's events of a step, as (what, unit, ms).

    All steps have the same events. The time between two of them is the median over the steps."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(TRACED, file)
        out = os.path.join(folder, "trace.json")
        torchrun(2, os.path.abspath(__file__), "trace", out, "--model", folder, *TRACED_FLAGS.split(), timeout=600)
        with open(out) as file:
            steps = json.load(file)[4:]
    names = [event[:2] for event in steps[0]]
    assert all([event[:2] for event in step] == names for step in steps)
    gaps = [0] + [statistics.median(1000 * (step[i][2] - step[i - 1][2]) for step in steps)
                  for i in range(1, len(names))]
    return [(*name, now) for name, now in zip(names, itertools.accumulate(gaps))]


def timeline_picture():
    """Draw when each unit's weights are whole on rank 0 of 2, and the time that each transfer has."""
    events, blocks = traced_step(), TRACED["num_hidden_layers"]
    end = max(now for _, _, now in events)
    rows = ["compute", "embedding", *(f"block {i}" for i in range(1, blocks + 1)), "norm, head"]
    figure, axes = plt.subplots(figsize=(9.5, 4.3))

    def when(what, unit):
        return [now for kind, i, now in events if (kind, i) == (what, unit)]

    def bar(row, start, stop, color, label="", **style):
        axes.barh(row, stop - start, 0.62, start, color=color, edgecolor="#333333", lw=0.6, label=label, **style)

    def computes(unit, start, stop, color):
        bar(0, start, stop, color)
        if stop - start > 0.025 * end:                    # the embedding's is too narrow for a label
            label = "head" if unit > blocks else f"block {unit}"
            axes.text((start + stop) / 2, 0, label, ha="center", va="center", fontsize=9)
    turn, head = max(when("forward done", blocks + 1)), blocks + 1
    for unit in range(blocks + 2):
        for start, stop in zip(when("forward", unit), when("forward done", unit)):
            computes(unit, start, stop, "#d9ead9")
        for start, there in zip(when("ask", unit), when("there", unit)):
            stop = min(stop for stop in when("drop", unit) if stop > there)
            named = unit == 1 and start < turn            # only one bar of each kind is named: for the legend
            bar(1 + unit, start, there, "#cfe0f1", "all-gather: from its start until the weights are needed" * named, hatch="///")
            bar(1 + unit, there, stop, COLORS["parameters"], "weights are whole" * named)
        for start, stop in zip(when("reduce", unit), when("summed", unit)):
            bar(1 + unit, start, stop, "#f6e3bd",
                "reduce-scatter: from its start until the rank waits for it" * (unit == head), hatch="\\\\\\")
    began = turn
    for stop, unit in sorted((when("reduce", unit)[0], unit) for unit in range(blocks + 2)):
        computes(unit, began, stop, COLORS["optimizer states"])
        began = stop
    axes.axvline(turn, color="#333333", ls=":", lw=1)
    axes.text(turn / 2, -0.5, "forward", ha="center", va="bottom", fontsize=10)
    axes.text((turn + end) / 2, -0.5, "backward", ha="center", va="bottom", fontsize=10)
    axes.set(xlim=(-0.005 * end, 1.005 * end), ylim=(len(rows) - 0.5, -1))
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("ms that rank 0 computes (its waiting is left out)", fontsize=10)
    axes.tick_params(labelsize=9.5)
    figure.legend(loc="lower center", ncols=3, fontsize=9, frameon=False, columnspacing=1.2)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(os.path.join(FIGURES, "timeline.png"), dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    if sys.argv[1:2] == ["watch"]:
        do_runs(watch, *sys.argv[2:])
    elif sys.argv[1:2] == ["trace"]:
        trace(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:] == ["timeline"]:
        timeline_picture()
    else:
        run_all()
        timeline_picture()
        holds_picture()
        step_picture()
        put_into_pages(STEP, dict(persistent=persistent_table(), wire=wire_table(),
                             hybrid=hybrid_table()))
