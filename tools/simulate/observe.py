"""What is seen in a training step: memory, products, collectives. The step may be simulated, or a real one.

The trainer's modules are imported where they are used: before that nobody knows of which step they are.
"""
import contextlib
import time
from collections import namedtuple
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simulate.stand_ins import one_rank

Action = namedtuple("Action", "kind stage micro_batch start end")                # F, B, I or W, and when it was
#                                        products of [seq, seq]; which argument is q, which says whether it is causal
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu": (2, 0, 4),
             "_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1, 7)}   # the first of the two once more


def dry_run(argv, ranks, rank=0, note=lambda *_: None):
    """What that rank sees in a training step that is not the first: AdamW has made its states."""
    import train
    with one_rank(ranks, rank), observed(note, lambda optimizer: optimizer.adamw.step()) as steps:
        train.main(argv)
    return steps[0]


@contextlib.contextmanager
def observed(note=lambda *_: None, before=lambda optimizer: None):
    """Around main. Yields a list, which gets what was seen in each training step; note(seen, model, optimizer, mesh) may add."""
    steps, actions, meshes = [], [], [None]

    @contextlib.contextmanager
    def step(profiler, _):
        actions.clear()
        before(profiler.optimizer)
        with observe(profiler.model, profiler.optimizer, meshes[-1], actions) as seen:
            yield
        seen.args = profiler.args
        note(seen, profiler.model, profiler.optimizer, meshes[-1])
        steps.append(seen)
    with contextlib.ExitStack() as replaced:
        for name, function in [("profiling.Profiler.step", step), *noted(actions, meshes)]:
            replaced.enter_context(patch(name, function))
        yield steps


def noted(actions, meshes):
    """The functions that tell what is done. Without a pipeline forward and backward are a stage's actions; the head is part of
    B, as it is from step 6 on."""
    import model
    import train

    def around(function, note):
        def call(*inputs):
            start, result = time.perf_counter(), function(*inputs)
            note(result, start, *inputs)
            return result
        return call

    def keep(kind, stage, micro_batch, start):
        actions.append(Action(kind, stage, micro_batch, start, time.perf_counter()))
    if hasattr(train, "start_mesh"):                      # not in step 1
        yield "train.start_mesh", around(train.start_mesh, lambda mesh, *_: meshes.append(mesh))
    if hasattr(train, "Pipeline"):
        compute = train.Pipeline.compute
        yield "pipeline_parallel.Pipeline.compute", around(compute, lambda _, start, pipeline, action: keep(*action, start))
    else:
        forward, backward = model.Decoder.forward, torch.Tensor.backward
        yield "model.Decoder.forward", around(forward, lambda _, start, *__: keep("F", 0, len(actions) // 2, start))
        yield "torch.Tensor.backward", around(backward, lambda *_: keep("B", 0, len(actions) // 2, actions[-1].end))


@contextlib.contextmanager
def observe(model, optimizer, mesh, actions):
    """Yields what will, after a training step, have been seen."""
    from live_storages import KINDS, LiveStorages, note_state
    memory, flops, ledger, seen = LiveStorages(), Flops(), contextlib.nullcontext(), SimpleNamespace(mesh={}, sent={})
    if mesh:                                              # step 1 has none, and sends nothing
        from ledger import Ledger
        ledger = Ledger(mesh)
        seen.mesh = {name: (mesh.get_local_rank(name), mesh[name].size()) for name in mesh.mesh_dim_names}
    note_state(memory, model, optimizer)
    with ledger, flops, memory:
        yield seen
    note_state(memory, model, optimizer)
    made_in_forward(memory, actions)
    _, *columns = zip(*memory.timeline())                 # a row per event, a column per kind
    totals = [sum(row) for row in zip(*columns)]
    peak = totals.index(max(totals))
    seen.peak, seen.between = (dict(zip(KINDS, [column[row] for column in columns])) for row in (peak, -1))
    seen.most = {kind: max(column) for kind, column in zip(KINDS, columns)}
    seen.place, seen.flops, seen.actions = place(memory.events[peak][0], actions), flops.total, list(actions)
    for what in sorted(getattr(ledger, "calls", ())):     # dimension and collective
        seen.sent[what] = ledger.calls[what], ledger.payload[what], ledger.wire[what]


class Flops(TorchDispatchMode):
    """Two for every multiplication of a matrix product; a causal attention kernel leaves out half."""
    total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._opname in ("mm", "bmm", "_grouped_mm"):
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        elif op._opname in ATTENTION:                     # of [batch, heads, seq, head_dim]
            products, q, causal = ATTENTION[op._opname]
            whole = products * 2 * args[q].numel() * args[q + 1].shape[2]
            self.total += whole // (2 if True in args[causal:causal + 1] else 1)
        return op(*args, **(kwargs or {}))


def made_in_forward(memory, actions):
    """What a forward pass made is an activation, also where autograd does not look: in our own functions."""
    spans = iter([(action.start, action.end) for action in actions if action.kind == "F"])
    start, end = next(spans)
    for seconds, number, size in memory.events:
        while seconds > end:
            start, end = next(spans, (float("inf"), float("inf")))
        if size > 0 and seconds >= start and memory.kinds[number] == "rest":
            memory.kinds[number] = "activations"


def place(seconds, actions):
    for i, (kind, stage, micro_batch, start, end) in enumerate(actions, 1):
        if seconds <= end:
            return f"{'in' if seconds >= start else 'before'} {kind}{micro_batch} of stage {stage}, action {i} of {len(actions)}"
    return "after the last backward, in the sums of gradients or the optimizer"
