"""What is seen in a training step: memory, products, collectives. The step may be simulated, or a real one.

The modules of the trainer are imported where they are used: which step's they are is not known before.
"""
import contextlib
import functools
import time
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from simulate.stand_ins import one_rank


def simulate(argv, ranks, rank=0, note=None):
    """What that rank sees, with these flags of the trainer whose folder is on the path."""
    import train
    with one_rank(ranks, rank), observed(note) as steps:
        train.main(argv)
    return steps[0]


class Action(NamedTuple):
    """Something that was done: F, B, I or W of a micro-batch through a stage."""
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@contextlib.contextmanager
def observed(note=None):
    """Around the trainer's main. Yields a list, which gets what was seen in each training step; note(seen, model,
    optimizer, mesh) may add to it."""
    import profiling
    steps, actions, meshes = [], [], [None]

    @contextlib.contextmanager
    def step(profiler, _):
        actions.clear()
        with observe(profiler.model, profiler.optimizer, meshes[-1], actions) as seen:
            yield
        seen.args = profiler.args
        if note:
            note(seen, profiler.model, profiler.optimizer, meshes[-1])
        steps.append(seen)
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(patch.object(profiling.Profiler, "step", step))
        for owner, name, noted in seams(actions, meshes):
            replaced.enter_context(patch.object(owner, name, noted))
        yield steps


def seams(actions, meshes):
    """Where the trainer is watched: (whose function, its name, one that does the same and is noted). Where there
    is no pipeline, the one stage's actions are the calls of forward and backward; the head is part of B (step 6
    has it there)."""
    import torch
    import train

    def keep(kind, stage, micro_batch, start):
        actions.append(Action(kind, stage, micro_batch, start, time.perf_counter()))

    def compute(pipeline, action, original):
        start = time.perf_counter()
        original(pipeline, action)
        keep(*action, start)

    def forward(decoder, x, positions, original):
        start = time.perf_counter()
        y = original(decoder, x, positions)
        keep("F", 0, len(actions) // 2, start)
        return y

    def backward(loss, original):
        original(loss)
        keep("B", 0, len(actions) // 2, actions[-1].end)

    def start_mesh(args, original):
        meshes.append(original(args))
        return meshes[-1]

    def noted(owner, name, by):
        return owner, name, functools.partialmethod(by, original=getattr(owner, name))
    if hasattr(train, "start_mesh"):
        yield train, "start_mesh", functools.partial(start_mesh, original=train.start_mesh)
    if hasattr(train, "Pipeline"):
        yield noted(train.Pipeline, "compute", compute)
    else:
        import model
        yield noted(model.Decoder, "forward", forward)
        yield noted(torch.Tensor, "backward", backward)


@contextlib.contextmanager
def observe(model, optimizer, mesh, actions):
    """Yields what will, after a training step, have been seen."""
    from profiling import KINDS, LiveStorages, note_state
    memory, flops, sent, seen = LiveStorages(), Flops(), ledger_of(mesh), SimpleNamespace()
    note_state(memory, model, optimizer)
    with sent, flops, memory:
        yield seen
    note_state(memory, model, optimizer)
    made_in_forward(memory, actions)
    _, *columns = zip(*memory.timeline())                 # a row per event, a column per kind
    totals = [sum(row) for row in zip(*columns)]
    peak = totals.index(max(totals))
    seen.peak, seen.between = (dict(zip(KINDS, [column[row] for column in columns])) for row in (peak, -1))
    seen.most = {kind: max(column) for kind, column in zip(KINDS, columns)}
    seen.place, seen.flops, seen.sent = place(memory.events[peak][0], actions), flops.total, sent
    seen.actions = list(actions)
    seen.mesh = {name: (mesh.get_local_rank(name), mesh[name].size()) for name in mesh.mesh_dim_names} if mesh else {}


def ledger_of(mesh):
    """A step of one process has none, and sends nothing."""
    if mesh:
        from ledger import Ledger
        return Ledger(mesh)
    nothing = contextlib.nullcontext()
    nothing.calls = nothing.payload = nothing.wire = {}
    return nothing


class Flops(TorchDispatchMode):
    """Two for every multiplication of a matrix product; a causal attention kernel leaves out half."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._opname in ("mm", "bmm", "_grouped_mm"):
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        elif op._opname == "_scaled_dot_product_flash_attention_for_cpu":
            # two products of [seq, seq]
            self.total += attention_flops(2, *args[:2], causal=True in args[4:5])
        elif op._opname == "_scaled_dot_product_flash_attention_for_cpu_backward":
            # the first once more, and four
            self.total += attention_flops(5, *args[1:3], causal=True in args[7:8])
        return op(*args, **(kwargs or {}))


def attention_flops(products, q, k, causal):              # [batch, heads, seq, head_dim]
    return products * 2 * q.numel() * k.shape[2] // (2 if causal else 1)


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
            when = "in" if seconds >= start else "before"
            return f"{when} {kind}{micro_batch} of stage {stage}, action {i} of {len(actions)}"
    return "after the last backward, in the sums of gradients or the optimizer"
