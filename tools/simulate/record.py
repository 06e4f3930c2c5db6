"""What one rank does in a training step, noted in its order: kernels, collectives, waits for them, memory that comes and goes.

The step may be simulated (stand_ins.py), or a real one on real ranks. The trainer's modules are imported where they are used:
before that nobody knows of which step they are. Of its names few are needed: main, build_model, Optimizer, batches, Pipeline and
Metrics.log of every step, start_mesh from step 2 on.
"""
import contextlib
import os
import sys
from collections import Counter, namedtuple
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from simulate.fuse import fuse
from simulate.kernels import kernel_of, size, tensors
from simulate.memory import KINDS, Memory, timeline
from simulate.stand_ins import fused_kernels, one_rank

# functions of torch.distributed: each starts operations, and waits for them unless it is told not to
STARTERS = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single",
            "all_to_all_single", "broadcast", "isend", "irecv", "send", "recv", "barrier"]
#              c10d's name               argument with the payload; what of it a ring moves, per rank
COLLECTIVES = {"allreduce_":           ("all_reduce", 0, lambda n: 2 * (n - 1) / n),
               "_allgather_base_":     ("all_gather", 0, lambda n: (n - 1) / n),
               "_reduce_scatter_base_": ("reduce_scatter", 1, lambda n: (n - 1) / n),
               "alltoall_base_":       ("all_to_all", 1, lambda n: (n - 1) / n),
               "broadcast_":           ("broadcast", 0, lambda n: (n - 1) / n),
               "barrier":              ("barrier", None, lambda n: 0),
               "send":                 ("send", 0, lambda n: 1),
               "recv_":                ("receive", 0, lambda n: 1)}
Action = namedtuple("Action", "name start end")           # F3 of stage 0; between which notes


class Operation(NamedTuple):
    """A collective, or one end of a message, as one rank sees it."""
    what: str
    dimension: str
    ranks: tuple                                          # of a message the sender and the receiver
    payload: int
    wire: float                                           # bytes that this rank sends, or receives if that is more
    grouped: bool                                         # by batch_isend_irecv: both ways at the same time


# A note is one of
#     ("compute", kernel's number, layer)     ("start", operation's number, site)     ("wait", operation's number, site)
#     ("begin", action)  ("end", action)      ("host waits", site): for all that was computed so far
class Recorder(TorchDispatchMode):
    def __init__(self, mesh, fused=False):
        super().__init__()
        self.fused, self.touched = fused, {}
        self.notes, self.kernels, self.operations = [], {}, []
        self.memory = Memory(lambda: len(self.notes))
        self.layer, self.begun, self.actions, self.grouped = "", [], [], False
        self.members, self.names = {}, {dist.group.WORLD.group_name: "world"} if dist.is_initialized() else {}
        self.calls, self.payload, self.wire = Counter(), Counter(), Counter()      # by (dimension, collective)
        if mesh is not None:
            from mesh import dimensions
            self.names |= dimensions(mesh)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.namespace == "c10d" and op._opname in COLLECTIVES:
            self.start(op._opname, args)
            result = op(*args, **kwargs)
        else:
            result = op(*args, **kwargs)
            if op._opname == "_to_copy" and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
                self.notes.append(("host waits", site()))
        self.memory.note_all(result, "activations" if torch.is_grad_enabled() else "rest")
        if op.namespace != "c10d" and (kernel := kernel_of(op, args, result)):
            self.compute(kernel, args, result)
        return result

    def compute(self, kernel, args, result):
        if self.fused and kernel.kind == "memory":
            reads, writes = self.storages(tensors(args)), self.storages(tensors([result]))
            self.touched[len(self.notes)] = reads, writes
        self.notes.append(("compute", self.kernels.setdefault(kernel, len(self.kernels)), self.layer))

    def storages(self, values):
        found = {value.untyped_storage()._cdata: size(value) for value in values}
        return {self.memory.alive[key][0] if key in self.memory.alive else -key: bytes for key, bytes in found.items()}

    def start(self, name, args):
        what, payload, on_the_wire = COLLECTIVES[name]
        group = group_of(args)
        dimension = self.names.get(group.group_name) or group.group_desc.removeprefix("mesh_")
        if group.group_name not in self.members:
            self.members[group.group_name] = tuple(dist.get_process_group_ranks(group))
        ranks = self.members[group.group_name]
        moved = 0 if payload is None else sum(t.nbytes for t in tensors([args[payload]]))
        wire = moved * on_the_wire(len(ranks))
        if what == "all_to_all" and args[4]:              # uneven: all is sent but what stays here
            wire = moved * (1 - args[4][group.rank()] / max(1, sum(args[4])))
        if what != "receive":
            self.calls[dimension, what] += 1
            self.payload[dimension, what] += moved
            self.wire[dimension, what] += wire
        if what == "all_to_all" and args[3]:              # more may come
            wire = max(wire, args[0].nbytes * (1 - args[3][group.rank()] / max(1, sum(args[3]))))
        if what in ("send", "receive"):
            ends = dist.get_rank(), ranks[args[2]]
            ranks = ends if what == "send" else ends[::-1]
        self.notes.append(("start", len(self.operations), site()))
        self.operations.append(Operation(what, dimension, ranks, moved, wire, self.grouped))

    # ------------------------------------------------------------------------------------------- names and waits
    def begin(self, name):
        self.begun.append((name, len(self.notes)))
        self.notes.append(("begin", name))

    def end(self):
        name, start = self.begun.pop()
        self.actions.append(Action(name, start, len(self.notes)))
        self.notes.append(("end", name))

    def noting_waits(self, function):
        def call(*args, **kwargs):
            first = len(self.operations)
            work = function(*args, **kwargs)
            started = range(first, len(self.operations))
            if work is None:
                self.waits(started)
                return None
            return Waiting(work, started, self)
        return call

    def waits(self, numbers):
        self.notes.extend(("wait", number, site()) for number in numbers)

    def noting_groups(self, function):
        def call(messages):
            self.grouped = True
            works = function(messages)
            self.grouped = False
            return works
        return call

    @contextlib.contextmanager
    def watching(self):
        def named(recorder, name):                        # torch.profiler.record_function: a pipeline's actions
            @contextlib.contextmanager
            def action():
                recorder.begin(name)
                yield
                recorder.end()
            return action()
        with contextlib.ExitStack() as replaced:
            for name in filter(lambda name: hasattr(dist, name), STARTERS):
                call = self.noting_waits(getattr(dist, name))
                for module in (dist, distributed_c10d):   # the latter for batch_isend_irecv
                    if hasattr(module, name):
                        replaced.enter_context(patch.object(module, name, call))
            replaced.enter_context(patch.object(dist, "batch_isend_irecv", self.noting_groups(dist.batch_isend_irecv)))
            replaced.enter_context(patch("torch.profiler.record_function", lambda name: named(self, name)))
            replaced.enter_context(self.memory.resizes())
            fused_kernels.append(self.compute)
            with self:
                yield
            fused_kernels.clear()


class Waiting:
    """Stands for the Work of an operation, and notes when it is waited for."""

    def __init__(self, work, numbers, recorder):
        self.work, self.numbers, self.recorder = work, numbers, recorder

    def wait(self):
        self.recorder.waits(self.numbers)
        return self.work.wait()

    def is_completed(self):
        return self.work.is_completed()


def group_of(args):
    objects = [a for a in args if isinstance(a, torch.ScriptObject)]
    return next(dist.ProcessGroup.unbox(a) for a in objects if a._type().name() == "ProcessGroup")


def site():
    """The line of the trainer that is being executed: file.py:12."""
    folder, frame = trainer(), sys._getframe(1)
    while frame and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


def trainer():
    return os.path.dirname(sys.modules["train"].__file__) + os.sep


# ------------------------------------------------------------------------------------------- around the trainer
def record(argv, ranks, rank=0, note=lambda *_: None):
    """What that rank does in a training step that is not the first: AdamW has made its states."""
    import train
    with one_rank(ranks, rank), recorded(note, before=lambda optimizer: optimizer.adamw.step()) as steps:
        train.main(argv)
    return steps[0].seen


@contextlib.contextmanager
def recorded(note=lambda seen, model, optimizer, mesh: None, before=lambda optimizer: None):
    """Around main. Yields a list, which gets what is seen in each training step; note may add to it."""
    import metrics
    import train
    steps, made, log, read = [], {}, metrics.Metrics.log, train.batches

    def keeping(name):
        function = getattr(train, name)

        def call(*args, **kwargs):
            made[name] = function(*args, **kwargs)
            made.setdefault("args", args[-1])             # the trainer's
            return made[name]
        return patch.object(train, name, call)

    def batches(*args):
        before(made["Optimizer"])
        for step in read(*args):
            steps.append(Step(made, args[-1]))
            yield step

    def end(self, *args, **kwargs):
        steps[-1].end(note)
        log(self, *args, **kwargs)
    with contextlib.ExitStack() as replaced:
        for name in ("start_mesh", "build_model", "Optimizer"):
            if hasattr(train, name):
                replaced.enter_context(keeping(name))
        replaced.enter_context(patch.object(train, "batches", batches))
        replaced.enter_context(patch.object(metrics.Metrics, "log", end))
        yield steps


class Step:
    """One training step, from its batch to its log."""

    def __init__(self, made, args):
        import train
        self.model, self.optimizer, self.mesh, self.args = made["build_model"], made["Optimizer"], made.get("start_mesh"), args
        self.recorder, self.watched = Recorder(self.mesh, getattr(args, "fused", False)), contextlib.ExitStack()
        self.recorder.memory.note_state(self.model, self.optimizer)
        self.watched.enter_context(named_layers(self.model, self.recorder))
        if not hasattr(train, "Pipeline"):
            self.watched.enter_context(named_passes(self.model, self.recorder))
        self.watched.enter_context(self.recorder.watching())

    def end(self, note):
        self.watched.close()
        from metrics import flops_per_token
        recorder, memory = self.recorder, self.recorder.memory
        memory.note_state(self.model, self.optimizer)
        memory.made_in((action.start + 1, action.end) for action in recorder.actions if action.name.startswith("F"))
        _, *columns = zip(*timeline(memory.events, memory.kinds))                  # a row per event, a column per kind
        totals = [sum(row) for row in zip(*columns)]
        peak = totals.index(max(totals))
        notes, kernels, events = recorder.notes, [*recorder.kernels], memory.events
        if recorder.fused:
            notes, kernels, events = fuse(notes, kernels, recorder.touched, events)
        self.seen = SimpleNamespace(
            args=self.args, notes=notes, kernels=kernels, operations=recorder.operations,
            events=events, kinds=memory.kinds, actions=recorder.actions,
            peak=dict(zip(KINDS, [column[peak] for column in columns])),
            between=dict(zip(KINDS, [column[-1] for column in columns])),
            most={kind: max(column) for kind, column in zip(KINDS, columns)},
            place=place(memory.events[peak][0], recorder.actions),
            flops_per_token=flops_per_token(self.model.model.config, self.args.seq_len),
            sent={what: (recorder.calls[what], recorder.payload[what], recorder.wire[what]) for what in sorted(recorder.calls)},
            mesh={} if self.mesh is None else {name: (self.mesh.get_local_rank(name), self.mesh[name].size())
                                               for name in self.mesh.mesh_dim_names})
        self.seen.flops = sum(kernels[number].flops for what, number, *_ in notes if what == "compute")
        note(self.seen, self.model, self.optimizer, self.mesh)
        self.model = self.optimizer = self.mesh = self.recorder = None


def place(when, actions):
    for i, action in enumerate(actions, 1):
        if when <= action.end:
            return f"{'in' if when > action.start else 'before'} {action.name}, action {i} of {len(actions)}"
    return "after the last backward, in the sums of gradients or the optimizer"


@contextlib.contextmanager
def named_layers(model, recorder):
    """In forward by hooks of the module; in backward by one of its output, which runs when the output's gradient is there."""
    hooks = []

    def hook(name, module):
        def enter(*_):
            recorder.layer = name

        def leave(_, inputs, output):
            recorder.layer = ""
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(enter)
        hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        hooks.append(module.register_forward_hook(leave))
    for i, layer in model.model.layers.items():
        hook(f"layer {i}", layer)
    if model.lm_head is not None:
        hook("head", model.lm_head)
    yield
    for one in hooks:
        one.remove()


@contextlib.contextmanager
def named_passes(model, recorder):
    """Without a pipeline forward and backward are a stage's actions; the head is part of B, as it is from step 6 on."""
    backward, forwards = torch.Tensor.backward, []

    def leave(*_):
        recorder.end()
        recorder.begin(f"B{len(forwards)} of stage 0")
        forwards.append(None)

    def both(*args, **kwargs):
        backward(*args, **kwargs)
        recorder.layer = ""
        recorder.end()
    hooks = [model.model.register_forward_pre_hook(lambda *_: recorder.begin(f"F{len(forwards)} of stage 0"), prepend=True),
             model.model.register_forward_hook(leave)]
    with patch.object(torch.Tensor, "backward", both):
        yield
    for one in hooks:
        one.remove()
