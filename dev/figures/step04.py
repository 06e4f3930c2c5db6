"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step04.py             (about a minute on two cores)
    python dev/figures/step04.py weights     (only the picture that needs no run)

The runs come first, in one torchrun of this file per number of ranks; rank 0 writes what was seen in each.
"""
import dataclasses
import gc
import json
import os
import sys
import time

from common import paths_of, put_into_pages, seen_by_ranks

STEP, FIGURES = paths_of(4)

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import config
import data
import ledger
import recompute
import tensor_parallel
import train
import watch
from data_parallel import DataParallel
from zero import Zero

TINY = config.PRESETS["tiny"]
SEQ_LEN, MICRO_BATCH = 32, 2
BATCH = f"--seq_len {SEQ_LEN} --micro_batch_size {MICRO_BATCH}"
TOKENS = SEQ_LEN * MICRO_BATCH
STREAM = TOKENS * TINY.hidden_size * 4                    # bytes of [batch, seq, hidden]
SP, RECOMPUTE, TPS = ("off", "on"), ("none", "selective", "full"), (1, 2, 4, 8)


# (job, its arguments), by number of ranks
JOBS = {tp: [("kept_by_a_layer", (f"--tp {tp} --sp {sp}", "as it is")) for sp in (SP if tp > 1 else ["on"])]
        for tp in TPS}
for tp in (2, 4, 8):
    JOBS[tp] += [("kept_by_a_layer", (f"--tp {tp} --sp on --recompute selective", keep))
                 for keep in ("as it is", "every product")]
JOBS[1] += [("kept_by_a_layer", ("--tp 1 --sp on --recompute selective", "as it is"))]
JOBS[2] += [("walk", (f"--tp 2 --sp {sp}",)) for sp in SP]
JOBS[4] += [("sent_by_a_layer", (f"--tp 4 --sp {sp} --recompute {mode}", "as it is"))
            for sp in SP for mode in RECOMPUTE]
JOBS[8] += [("heads_of_ranks", ("--tp 8",))]
SEEN = {}                                                 # by (job, *arguments)


# ---------------------------------------------------------------------------------------------- inside a rank
def do_all(out, jobs):
    dist.init_process_group("gloo")
    seen = [globals()[job](*arguments) for job, arguments in json.loads(jobs)]
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(seen, file)
    dist.destroy_process_group()
    gc.collect()                                          # gloo's threads must not outlive the interpreter


def set_up(flags, layers=TINY.num_hidden_layers):
    """Do what train.main does before its loop, on this process group. Return its objects, and the first micro-batches."""
    shape = dataclasses.replace(TINY, num_hidden_layers=layers)
    args = config.parse_args(f"{flags} {BATCH} --dtype float32 --device cpu".split(), train.TECHNIQUES)
    args.global_batch_size = MICRO_BATCH * (dist.get_world_size() // args.tp)
    config.check(args, shape, train.TECHNIQUES)
    mesh = init_device_mesh("cpu", (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    model = train.build_model(shape, mesh, args)
    zero = Zero(model, args) if args.zero else DataParallel(model, mesh, args)
    _, micro_batches = next(data.batches(data.load_tokens(args, shape.vocab_size), shape, mesh, args))
    return args, mesh, model, zero, micro_batches


def per_layer(measure, flags, keep):
    """Return how much more a model with one more layer has."""
    save_matmuls_policy = recompute.save_matmuls_policy
    if keep == "every product":
        recompute.save_matmuls_policy = lambda hidden, *call, **named: save_matmuls_policy(0, *call, **named)
    two, three = (measure(*set_up(flags, layers)) for layers in (2, 3))
    recompute.save_matmuls_policy = save_matmuls_policy
    return {what: three[what] - two.get(what, 0) for what in three}


def sent_by_a_layer(flags, keep):
    def measure(args, mesh, model, zero, micro_batches):
        with ledger.Ledger(mesh) as sent:
            train.forward_backward(model, micro_batches, args)
        counters = ("calls", sent.calls), ("payload", sent.payload), ("wire", sent.wire)
        return {f"{what} {collective}": n for what, counts in counters
                for (dimension, collective), n in counts.items() if dimension == "tp"}
    return per_layer(measure, flags, keep)


def kept_by_a_layer(flags, keep):
    """Return the bytes per layer that are alive between forward and backward, parameters aside; and its parameters."""
    def measure(args, mesh, model, zero, micro_batches):
        live = watch.Storages()
        live.note_all([*model.parameters()], "parameters")
        with live:
            hidden = model.model(*micro_batches[0][:2])
        gc.collect()
        time.sleep(0.3)                                   # gloo's threads release what they have sent a bit late
        kept = sum(size for _, number, size in live.events if live.kinds[number] != "parameters")
        model.lm_head(hidden, micro_batches[0][2]).backward()
        return {"bytes": kept, "parameters": sum(param.numel() for param in model.parameters())}
    return per_layer(measure, flags, keep)


def heads_of_ranks(flags):
    args, mesh, model, *_ = set_up(flags)
    attention = model.model.layers["0"].self_attn
    def heads(linear):
        count, index = len(linear.weight) // attention.head_dim, linear.weight.placement.shards[0].index
        return list(range(index * count, (index + 1) * count))
    shared = attention.k_proj.weight.placement.grad_reduce_group
    sharing = dist.get_process_group_ranks(shared) if shared else []
    return gather_objects((heads(attention.q_proj), heads(attention.k_proj), sharing))


def gather_objects(mine):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


PARTIAL_SUMS = ("embedding's rows", "o_proj's product", "down_proj's product")     # the outputs of the regions and of the embedding


class Events(ledger.Ledger):
    """A ledger that lists the places that the walk passes, and the collectives over tp between them, in order."""
    def __init__(self, mesh):
        super().__init__(mesh)
        self.list = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        before = self.payload.copy()
        result = super().__torch_dispatch__(op, types, args, kwargs)
        self.list += [("wire", collective, size) for (dimension, collective), size
                      in (self.payload - before).items() if dimension == "tp"]
        return result

    def note(self, place, tensor):
        self.list.append(("forward", place))
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self.list.append(("backward", place)))


def walk(flags):
    """Run one forward and backward; return the places and the collectives between them, in order."""
    args, mesh, model, _, micro_batches = set_up(flags, 1)
    events, decoder, head = Events(mesh), model.model, model.lm_head
    layer = decoder.layers["0"]

    def after(place, module):
        module.register_forward_hook(lambda module, inputs, output: events.note(place, output))

    def before(place, module):
        module.register_forward_pre_hook(lambda module, inputs: events.note(place, inputs[0]))

    def first_product(place, region):
        project = region.project

        def noted_project(x):
            products = project(x)
            events.note(place, products[0])
            return products
        region.project = noted_project

    def noted_leave(x, comm):                             # in the order of forward
        events.note(next(partial_sums), x)
        return leave(x, comm)

    def noted_enter(x, comm):                             # only the head's; the regions enter in `project`
        events.note("head's input", gathered := enter(x, comm))
        return gathered
    enter, leave, partial_sums = tensor_parallel.enter_region, tensor_parallel.leave_region, iter(PARTIAL_SUMS)
    tensor_parallel.enter_region, tensor_parallel.leave_region = noted_enter, noted_leave
    core, cross_entropy = layer.self_attn.inner_attention, head.cross_entropy

    def noted_core(*qkv):
        output = core(*qkv)
        events.note("softmax, per head", output)
        return output

    def noted_cross_entropy(logits, targets):
        events.note("logits", logits)
        return cross_entropy(logits, targets)
    layer.self_attn.inner_attention, head.cross_entropy = noted_core, noted_cross_entropy
    after("residual stream", decoder.embed_tokens)
    after("norm", layer.input_layernorm)
    first_product("q", layer.self_attn)
    after("attention's output", layer.self_attn)
    before("residual stream, 2", layer.post_attention_layernorm)
    after("norm, 2", layer.post_attention_layernorm)
    first_product("gate", layer.mlp)
    before("silu(gate) · up", layer.mlp.down_proj)
    after("MLP's output", layer.mlp)
    after("residual stream, 3", layer)
    after("last norm", decoder.norm)
    with events:
        inputs, positions, targets = micro_batches[0]
        events.note("tokens", inputs)
        loss = model(inputs, positions, targets)
        events.note("loss", loss)
        loss.backward()
    tensor_parallel.enter_region, tensor_parallel.leave_region = enter, leave
    return events.list


# ------------------------------------------------------------------------------------------------ the runs
def run_all():
    for world, jobs in JOBS.items():
        found = seen_by_ranks(os.path.abspath(__file__), "do", world, jobs, timeout=600)
        SEEN.update({(job, *arguments): seen for (job, arguments), seen in zip(jobs, found)})


# ------------------------------------------------------------------------------------------------ the tables
def between(events, first, last):
    """Return the collectives between two events."""
    return [event[1:] for event in events[events.index(first) + 1:events.index(last)] if event[0] == "wire"]


# all-gathers and reduce-scatters per layer and micro-batch, where an all-reduce counts as one of each; without and with
# forward run again up to its last product
COLLECTIVES = {"off": (8, 10), "on": (10, 13)}


def counts(seen):
    return [seen.get(f"calls {name}", 0) for name in ("all_reduce", "all_gather", "reduce_scatter")]


def wire_cells(seen, tp=4):
    payload, wire = (sum(n for what, n in seen.items() if what.startswith(kind))
                     for kind in ("payload", "wire"))
    reduces, gathers, scatters = counts(seen)
    count = 2 * reduces + gathers + scatters
    assert payload == (reduces + gathers + scatters) * STREAM and wire == count * STREAM * (tp - 1) / tp
    return f"{reduces} | {gathers} | {scatters} | {payload:,} | {wire:,.0f}", count


def wire_table():
    rows = ["| `--sp` | recomputation | all-reduces | all-gathers | reduce-scatters | payload "
            "| on the wire per rank | formula |",
            "|---|---|---|---|---|---|---|---|"]
    for mode in RECOMPUTE:
        for sp in SP:
            seen = SEEN["sent_by_a_layer", f"--tp 4 --sp {sp} --recompute {mode}", "as it is"]
            cells, count = wire_cells(seen)
            expected = COLLECTIVES[sp][mode != "none"]
            assert count == expected
            rows.append(f"| {sp} | {mode} | {cells} "
                        f"| {expected} · S · 3/4 = {expected * STREAM * 3 / 4:,.0f} |")
    return rows


def kept_per_token(tp, sp, keep="as it is"):
    return SEEN["kept_by_a_layer", f"--tp {tp} --sp {sp}", keep]["bytes"] / 4 / TOKENS


def kept_formula(tp, shape=TINY, of_norms=6):
    """Return the numbers kept per token inside the regions, and outside with and without sp."""
    kv_heads = max(shape.num_key_value_heads / tp, 1)
    projected = (2 * shape.num_attention_heads / tp + 2 * kv_heads) * shape.head_dim
    inside = projected + (shape.num_attention_heads + 4 * shape.intermediate_size) / tp
    outside = of_norms * shape.hidden_size + 2
    return inside, outside / tp, outside


def kept_table():
    rows = ["| tp | inside the regions | outside, `--sp off` | in all | measured | outside, `--sp on` "
            "| in all | measured |",
            "|---|---|---|---|---|---|---|---|"]
    for tp in TPS:
        inside, cut, whole = kept_formula(tp)
        off, on = kept_per_token(tp, "off" if tp > 1 else "on"), kept_per_token(tp, "on")
        rows.append(f"| {tp} | {inside:,.0f} | {whole:,.0f} | {inside + whole:,.1f} | {off:,.1f} "
                    f"| {cut:,.1f} | {inside + cut:,.1f} | {on:,.1f} |")
        assert abs(off - inside - whole) < 1 and abs(on - inside - cut) < 1
    return rows


def selective_table():
    rows = ["| `--recompute` | tp 1 | tp 2 | tp 4 | tp 8 |", "|---|---|---|---|---|"]
    ways = (("`none`", "", "as it is"),
            ("`selective`, if it stored every product", " --recompute selective", "every product"),
            ("`selective`", " --recompute selective", "as it is"))
    for name, flags, keep in ways:
        kept = [SEEN["kept_by_a_layer", f"--tp {tp} --sp on{flags}", "as it is" if tp == 1 else keep]
                for tp in TPS]
        cells = [seen["bytes"] / 4 / TOKENS for seen in kept]
        rows.append(f"| {name} | {' | '.join(f'{cell:,.1f}' for cell in cells)} |")
    return rows


def heads_table():
    ranks = SEEN["heads_of_ranks", "--tp 8"]
    rows = ["| rank | " + " | ".join(map(str, range(len(ranks)))) + " |", "|---" * (len(ranks) + 1) + "|"]
    for name, cells in (("query head", [q for q, _, _ in ranks]),
                        ("key-value head", [kv for _, kv, _ in ranks])):
        rows.append(f"| {name} | " + " | ".join(", ".join(map(str, cell)) for cell in cells) + " |")
    partners = [next(other for other in shared if other != rank) for rank, (_, _, shared) in enumerate(ranks)]
    rows.append("| sums its gradient with rank | " + " | ".join(map(str, partners)) + " |")
    return rows


# ----------------------------------------------------------------------------------------------- the pictures
BLUE, ORANGE = watch.KINDS["parameters"], watch.KINDS["gradients"]
#          a tensor: its title, and whether a rank has part of the stream (as --sp says), half of the columns, or a
#          partial sum; or a border: its name, and the walk's places before and behind it
BLOCK = [("residual\nstream", "stream"), ("norm", "stream"),
         ("f", "norm", "q"), ("q, k, v", "columns"), ("softmax\nper head", "columns"),
         ("o_proj", "partial"), ("g", "o_proj's product", "attention's output"),
         ("residual\nstream", "stream"), ("norm", "stream"),
         ("f", "norm, 2", "gate"), ("gate,\nup", "columns"), ("silu\n· up", "columns"),
         ("down_\nproj", "partial"), ("g", "down_proj's product", "MLP's output"),
         ("residual\nstream", "stream")]
# the kinds of tensor on entering and leaving a region: tensors, left to right; their gradients, right to left
KINDS = {("off", "f"): ("invariant → replicated", "invariant ← partial"),
         ("off", "g"): ("partial → invariant", "replicated ← invariant"),
         ("on", "f"): ("varying → replicated", "varying ← partial"),
         ("on", "g"): ("partial → varying", "replicated ← varying")}


def border_words(before, after, sp):
    """Return what is sent at a border in forward and in backward, as the walk has seen it."""
    events = [tuple(event) for event in SEEN["walk", f"--tp 2 --sp {sp}"]]
    ways = (between(events, ("forward", before), ("forward", after)),
            between(events, ("backward", after), ("backward", before)))
    return [[name.replace("_", "-") for name, _ in sent] or ["nothing"] for sent in ways]


def draw_layer(axes, sp, kinds):
    """Draw what each rank has of a layer's tensors, what f and g send and, if `kinds`, the kinds of tensor there."""
    lines = (-2.4, -3.2) if kinds else (-2.4, -2.9)
    said = {}
    for start, name in ((2, "attention, by heads"), (9, "MLP, by columns")):
        axes.add_patch(plt.Rectangle((start, -1.4), 4, 3.08, facecolor="#f3f0e8", edgecolor="none",
                                     zorder=0))
        axes.text(start + 2, 1.45, name, ha="center", va="center", fontsize=10, color="#6b5a2e")
    for x, stop in enumerate(BLOCK):
        if len(stop) == 3:
            axes.plot([x, x], [-2.3, 1.1], color="#c8605a", lw=2)
            axes.text(x, 1.42, stop[0], ha="center", va="center", fontsize=17, style="italic",
                      color="#c8605a")
            forward, backward = border_words(*stop[1:], sp)
            if stop[0] in said:                           # the second region does what the first did
                assert said[stop[0]] == (forward, backward)
                continue
            said[stop[0]] = forward, backward
            small = dict(ha="center", va="top", fontsize=10)
            for y, sent, kinds_here in zip(lines, (forward[0], backward[-1]), KINDS[sp, stop[0]]):
                axes.text(x, y, sent if sent != "nothing" else "nothing is sent", weight="bold", **small)
                if kinds:
                    axes.text(x, y - 0.36, kinds_here, **small)
            if len(backward) > 1:                         # the idea does not need this one
                axes.text(x, -4.0, f"({backward[0]} again, to save memory)", color="#8a8a8a", **small)
            continue
        for rank, y in ((0, 0.62), (1, -0.72)):
            tensor(axes, x, y, rank, stop[1], sp)
        axes.text(x, -1.5, stop[0], ha="center", va="top", fontsize=10, color="#444444", linespacing=1.1)
    axes.text(11, -2.4, "f and g of the MLP\ndo the same again", ha="center", va="top", fontsize=10,
              color="#777777", linespacing=1.3)
    for y, way in zip(lines, ("forward", "backward")):
        axes.text(-1.45, y, way, ha="left", va="top", fontsize=10, color="#777777")
    for rank, y in ((0, 0.62), (1, -0.72)):
        axes.text(-0.55, y, f"rank {rank}", ha="right", va="center", fontsize=10)
    axes.set(xlim=(-1.5, len(BLOCK) - 0.4))
    axes.axis("off")


def draw_legend(figure):
    legend = [plt.Rectangle((0, 0), 1, 1, facecolor=BLUE), plt.Rectangle((0, 0), 1, 1, facecolor=ORANGE),
              plt.Rectangle((0, 0), 1, 1, facecolor="#f2dfb6", edgecolor="#8a6d1f", hatch="////")]
    names = ["final numbers (down: sequence, across: hidden)", "some of the columns",
             "a partial sum of all of it"]
    figure.legend(legend, names, loc="lower center", ncol=3, frameon=False, fontsize=10)


def f_and_g_picture():
    """Draw a layer without SP and without the kinds of tensor, which the README has not named yet."""
    figure, axes = plt.subplots(figsize=(10, 3.6))
    draw_layer(axes, "off", kinds=False)
    axes.set(ylim=(-3.3, 1.75))
    draw_legend(figure)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.12)
    figure.savefig(os.path.join(FIGURES, "f_and_g.png"), dpi=110)


def block_picture():
    figure, panels = plt.subplots(2, 1, figsize=(10, 7.6))
    for sp, axes in zip(SP, panels):
        draw_layer(axes, sp, kinds=True)
        axes.text(-1.45, 1.45, f"--sp {sp}", ha="left", va="center", fontsize=13, weight="bold")
        axes.set(ylim=(-4.5, 1.75))
    draw_legend(figure)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.06, hspace=0.03)
    figure.savefig(os.path.join(FIGURES, "block.png"), dpi=110)


def matrix(axes, left, middle, values, color_of, hatch=None):
    """Draw a matrix with its numbers, the middle of its left edge at (left, middle). Return its right edge."""
    for row, numbers in enumerate(values):
        for column, number in enumerate(numbers):
            x, y = left + CELL * column, middle + CELL * (len(values) / 2 - 1 - row)
            axes.add_patch(plt.Rectangle((x, y), CELL, CELL, facecolor=color_of(row, column),
                                         edgecolor="#555555", lw=0.8, hatch=hatch))
            axes.text(x + CELL / 2, y + CELL / 2, f"{number:g}", ha="center", va="center", fontsize=12,
                      bbox=dict(facecolor="white", edgecolor="none", pad=1.2, alpha=0.85 if hatch else 0))
    return left + CELL * len(values[0])


CELL = 0.42
OF_RANK = ["#7fa8d1", "#f3d9a4"]                          # distinct in grey too


def weights_picture():
    """Draw the two weights of the README's example, sharded, and what each rank computes with its shards."""
    x = torch.tensor([[1., 2.]])
    first = torch.tensor([[1., 0.], [0., 1.], [1., 1.], [1., -1.]]).T             # on paper, y = x W: 2 x 4
    second = torch.tensor([[1., 1., 0., 1.], [0., 1., 1., 2.]]).T                 # 4 x 2, all rows different
    figure, axes = plt.subplots(figsize=(10, 4.9))
    white = lambda row, column: "white"
    usual = dict(ha="center", va="center", fontsize=10.5)
    say = lambda x, y, text, **style: axes.text(x, y, text, **usual | style)
    say(1.15, 4.85, "the weights, whole", weight="bold")
    say(1.15, 4.35, "A, cut in columns")
    matrix(axes, 0.3, 3.55, first.tolist(), lambda row, column: OF_RANK[column // 2])
    say(1.15, 2.3, "B, cut in rows")
    matrix(axes, 0.72, 1.15, second.tolist(), lambda row, column: OF_RANK[row // 2])
    axes.plot([2.55, 2.55], [0, 5], color="#cccccc", lw=1)
    partials, outputs = [], []
    for rank, middle in ((0, 3.55), (1, 1.15)):
        mine = lambda row, column: OF_RANK[rank]
        a, b = first[:, 2 * rank:2 * rank + 2], second[2 * rank:2 * rank + 2]
        inner = x @ a
        partials.append(inner @ b)
        end = matrix(axes, 3.55, middle, x.tolist(), white)
        say(end + 0.22, middle, "×", fontsize=14)
        end = matrix(axes, end + 0.44, middle, a.tolist(), mine)
        say(end + 0.25, middle, "=", fontsize=14)
        end = matrix(axes, end + 0.5, middle, inner.tolist(), mine)
        say(end + 0.22, middle, "×", fontsize=14)
        end = matrix(axes, end + 0.44, middle, b.tolist(), mine)
        say(end + 0.25, middle, "=", fontsize=14)
        end = matrix(axes, end + 0.5, middle, partials[-1].tolist(), mine, hatch="///")
        outputs.append(end)
        say(2.95, middle, f"rank {rank}", weight="bold", ha="center")
    for text, x_of in (("input", 3.97), ("its columns\nof A", 5.26), ("inner,\nfinal", 6.6),
                       ("its rows\nof B", 7.88), ("partial\nsum", 9.22)):
        say(x_of, 4.62, text)
    total = sum(partials)
    assert torch.equal(total, x @ first @ second)
    for middle in (3.55, 1.15):
        side = 1 if middle > 2 else -1
        axes.annotate("", xy=(10.15, 2.35 + 0.32 * side), xytext=(outputs[0] + 0.08, middle),
                      arrowprops=dict(arrowstyle="->", color="#c8605a", lw=1.8))
    say(10.3, 2.35, "+", fontsize=17, color="#c8605a")
    for side in (1, -1):                                  # the input's gradients, in backward
        axes.annotate("", xy=(3.97, 2.35 + 0.5 * side), xytext=(3.97, 2.35 + 0.9 * side),
                      arrowprops=dict(arrowstyle="->", color="#c8605a", lw=1.8, ls="--"))
    say(3.35, 2.6, "f", fontsize=17, style="italic", color="#c8605a")
    say(3.97, 2.05, "in backward the two\ngradients are added")
    say(10.3, 1.55, "g", fontsize=17, style="italic", color="#c8605a")
    matrix(axes, 10.62, 2.35, total.tolist(), white)
    say(11.04, 2.9, "final,\non both")
    axes.set(xlim=(0.1, 11.6), ylim=(0, 5.1))
    axes.axis("off")
    figure.subplots_adjust(left=0.005, right=0.995, top=0.99, bottom=0.01)
    figure.savefig(os.path.join(FIGURES, "weights.png"), dpi=110)


def tensor(axes, x, y, rank, kind, sp):
    """Draw a tensor as a grid of sequence (down) by hidden (across), and fill the part that this rank has."""
    for row in range(2):
        for column in range(2):
            held = {"partial": True, "columns": column == rank, "stream": sp == "off" or row == rank}[kind]
            style = {"partial": dict(facecolor="#f2dfb6", hatch="////", edgecolor="#8a6d1f"),
                     "columns": dict(facecolor=ORANGE, edgecolor="#555555"),
                     "stream": dict(facecolor=BLUE, edgecolor="#555555")}[kind]
            axes.add_patch(plt.Rectangle((x - 0.36 + 0.36 * column, y + 0.45 - 0.45 * (row + 1)), 0.36, 0.45,
                                         lw=0.8, zorder=2 if held else 1,
                                         **style if held else dict(facecolor="white", edgecolor="#cccccc")))


def kept_picture():
    """Plot what a layer keeps per token against tp: measured, beside the formula; and for a large model, the formula alone."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4))
    off_color, on_color = watch.KINDS["activations"], BLUE
    places = range(len(TPS))
    for shift, sp, color in ((-0.2, "off", off_color), (0.2, "on", on_color)):
        kept = [kept_per_token(tp, sp if tp > 1 else "on") for tp in TPS]
        bars = left.bar([x + shift for x in places], kept, 0.38, color=color, label=f"--sp {sp}, measured")
        left.bar_label(bars, fmt="{:,.0f}", fontsize=9, padding=4)
        formula = [kept_formula(tp)[0] + kept_formula(tp)[1 if sp == "on" else 2] for tp in TPS]
        left.hlines(formula, [x + shift - 0.19 for x in places], [x + shift + 0.19 for x in places],
                    color="black", lw=1.6, label="formula" if sp == "on" else None)
    left.set_xticks(places, TPS)
    left.set(xlabel="tp", ylabel="numbers per token and layer",
             title="tiny in float32 on the CPU, norms not fused", ylim=(0, 1550))
    left.legend(frameon=False, fontsize=9)
    large = config.PRESETS["llama-70b"]
    gib = lambda number: number * 2 * 8192 * large.num_hidden_layers / 2**30
    inside, outside = [gib(kept_formula(tp, large, of_norms=4)[0]) for tp in TPS], {}
    outside["off"], outside["on"] = ([gib(kept_formula(tp, large, of_norms=4)[part]) for tp in TPS]
                                     for part in (2, 1))
    for shift, sp, color in ((-0.2, "off", off_color), (0.2, "on", on_color)):
        right.bar([x + shift for x in places], inside, 0.38, color="#bbbbbb",
                  label="inside the regions" if sp == "off" else None)
        bars = right.bar([x + shift for x in places], outside[sp], 0.38, bottom=inside, color=color,
                         label=f"outside, --sp {sp}")
        right.bar_label(bars, [f"{a + b:.0f}" for a, b in zip(inside, outside[sp])], fontsize=9, padding=2)
    right.set_xticks(places, TPS)
    right.set(xlabel="tp", ylabel="GiB per rank, 80 layers", ylim=(0, 260),
              title="llama-70b, one sequence of 8,192, 2 bytes a number, fused norms:\n"
                    "by the formula")
    right.title.set_fontsize(11)
    right.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "kept.png"), dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["do"]:
        do_all(*sys.argv[2:])
    elif sys.argv[1:] == ["weights"]:
        weights_picture()
    else:
        run_all()
        weights_picture()
        f_and_g_picture()
        block_picture()
        kept_picture()
        put_into_pages(STEP, dict(wire=wire_table(), kept=kept_table(), selective=selective_table(),
                                              heads=heads_table()))
