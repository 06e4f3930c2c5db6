"""Record what one rank does in a training step, in order: kernels, collectives, waits for them, memory that comes and goes.

The step may be simulated (stand_ins.py), or a real one on real ranks. The trainer's modules are imported inside functions, because
only then is it known which step they belong to. Few of its names are needed: main, build_model, Optimizer, batches and Metrics.log;
and in the steps that have them, build_mesh, mesh_dim_of_group and Pipeline.
"""
import contextlib
import os
import sys
from collections import defaultdict, namedtuple
from itertools import count, islice
from traceback import walk_stack
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from simulate.fuse import fuse
from simulate.kernels import cost_of, size
from simulate.stand_ins import fused_kernels, one_rank
from watch import COLLECTIVES, KINDS, Storages, Watch, collective_of, keeping, tensors, timeline

# functions of torch.distributed that start operations, and wait for them unless async_op is set
STARTERS = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single",
            "all_to_all_single", "broadcast", "isend", "irecv"]
Action = namedtuple("Action", "name start end")           # such as "F3 of stage 0"; the notes between which it lies


class Operation(NamedTuple):
    """A collective, or one end of a message, as one rank sees it."""
    what: str
    dimension: str
    ranks: tuple                                          # for a message: the sender and the receiver
    payload: int
    wire: float                                           # bytes that this rank sends, or receives if that is more
    grouped: bool                                         # started by batch_isend_irecv: both ways at the same time


# A note is one of
#     ("compute", kernel's number, layer)     ("start", operation's number, site)     ("wait", operation's number, site)
#     ("begin", action)  ("end", action)      ("host waits", site): the host waits for all kernels
class Recorder(Watch):
    """Records one training step."""
    def __init__(self, model, optimizer, mesh, args):
        super().__init__()
        self.model, self.optimizer, self.mesh, self.args = model, optimizer, mesh, args
        self.notes, self.kernels, self.operations, self.touched = [], {}, [], {}
        self.memory = Storages(now=lambda: len(self.notes))
        self.layer, self.begun, self.actions = "", [], []
        self.members, self.names = {}, {}                 # for each group: its ranks; its dimension
        self.sent = defaultdict(lambda: (0, 0, 0))        # by (dimension, collective): calls, payload bytes, bytes on the wire
        if mesh is not None:
            from mesh import mesh_dim_of_group
            self.names = {dist.group.WORLD.group_name: "world", **mesh_dim_of_group(mesh)}

    def before(self, op, args, kwargs):
        if op._opname in COLLECTIVES and (collective := collective_of(op, args)):
            self.start(collective, args)

    def after(self, op, args, kwargs, result):
        if op._opname == "_to_copy" and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            self.notes.append(("host waits", site()))
        # Tensors made in forward are activations, even inside our own autograd functions, where grad mode is off.
        forward = torch.is_grad_enabled() or any(name.startswith("F") for name, _ in self.begun)
        self.memory.note_all(result, "activations" if forward else "rest")
        if op.namespace != "c10d" and (cost := cost_of(op)):
            self.compute(cost(op._opname, args, result), args, result)

    def compute(self, kernel, args, result):
        if kernel.kind == "memory" and getattr(self.args, "fused", False):
            self.touched[len(self.notes)] = self.storages(args), self.storages([result])
        self.notes.append(("compute", self.kernels.setdefault(kernel, len(self.kernels)), self.layer))

    def storages(self, values):
        found = {value.untyped_storage()._cdata: size(value) for value in tensors(values)}
        return {self.memory.alive[key][0] if key in self.memory.alive else -key: bytes for key, bytes in found.items()}

    def start(self, collective, args):
        what, group = collective.what, collective.group
        dimension = self.names.get(group.group_name) or group.group_desc.removeprefix("mesh_")
        if group.group_name not in self.members:
            self.members[group.group_name] = tuple(dist.get_process_group_ranks(group))
        ranks = self.members[group.group_name]
        moved = collective.bytes
        wire = moved * collective.ring
        if what == "all_to_all" and args[4]:              # uneven: this rank sends all but its own part
            wire = moved * (1 - args[4][group.rank()] / max(1, sum(args[4])))
        if what != "receive":
            self.sent[dimension, what] = tuple(map(sum, zip(self.sent[dimension, what], (1, moved, wire))))
        if what == "all_to_all" and args[3]:              # it may receive more
            wire = max(wire, args[0].nbytes * (1 - args[3][group.rank()] / max(1, sum(args[3]))))
        if what in ("send", "receive"):
            ends = dist.get_rank(), ranks[args[2]]
            ranks = ends if what == "send" else ends[::-1]
        grouped = any(frame.f_code.co_name == "batch_isend_irecv" for frame, _ in islice(walk_stack(None), 9))
        self.notes.append(("start", len(self.operations), site()))
        self.operations.append(Operation(what, dimension, ranks, moved, wire, grouped))

    def begin(self, name):
        self.begun.append((name, len(self.notes)))
        self.notes.append(("begin", name))

    def end(self):
        name, start = self.begun.pop()
        self.actions.append(Action(name, start, len(self.notes)))
        self.notes.append(("end", name))
        self.layer = ""

    @contextlib.contextmanager
    def action(self, name):                               # replaces torch.profiler.record_function
        self.begin(name)
        yield
        self.end()

    def noting_waits(self, function):
        def call(*args, **kwargs):
            first = len(self.operations)
            work = function(*args, **kwargs)
            started = range(first, len(self.operations))

            def wait():
                self.notes.extend(("wait", number, site()) for number in started)
                return work and work.wait()
            return SimpleNamespace(wait=wait, is_completed=lambda: work.is_completed()) if work else wait()
        return call

    @contextlib.contextmanager
    def watching(self):
        import train
        self.memory.tag_state(self.model, self.optimizer)
        with contextlib.ExitStack() as replaced:
            for name in filter(lambda name: hasattr(dist, name), STARTERS):
                call = self.noting_waits(getattr(dist, name))
                for module in (dist, distributed_c10d):   # batch_isend_irecv uses the latter
                    replaced.enter_context(patch.object(module, name, call))
            replaced.enter_context(patch("torch.profiler.record_function", self.action))
            replaced.enter_context(self.memory.resizes())
            replaced.enter_context(named_layers(self.model, self))
            if not hasattr(train, "pipeline_parallel"):
                replaced.enter_context(named_passes(self.model.model, self))
            fused_kernels[:] = [self.compute]
            with self:
                yield
            fused_kernels.clear()
        self.memory.tag_state(self.model, self.optimizer)

    def seen(self):
        from metrics import flops_per_token
        notes, kernels, events, kinds = self.notes, [*self.kernels], self.memory.events, self.memory.kinds
        _, *columns = zip(*timeline(events, kinds))       # a row per event, a column per kind
        totals = [sum(row) for row in zip(*columns)]
        peak = totals.index(max(totals))
        at_peak = events[peak][0]
        if self.touched:
            notes, kernels, events = fuse(notes, kernels, self.touched, events)
        return SimpleNamespace(
            args=self.args, notes=notes, kernels=kernels, operations=self.operations, events=events, kinds=kinds,
            actions=self.actions, place=place(at_peak, self.actions, getattr(self.args, "pp", 1)),
            peak=dict(zip(KINDS, [column[peak] for column in columns])),
            between=dict(zip(KINDS, [column[-1] for column in columns])),
            most={kind: max(column) for kind, column in zip(KINDS, columns)},
            flops=sum(kernels[number].flops for what, number, *_ in notes if what == "compute"),
            flops_per_token=flops_per_token(self.model.model.config, self.args.seq_len),
            sent=dict(sorted(self.sent.items())),
            mesh={name: (self.mesh.get_local_rank(name), self.mesh[name].size())
                  for name in getattr(self.mesh, "mesh_dim_names", ())})


def site():
    """Return the line of the trainer that is being executed, such as file.py:12."""
    folder = os.path.dirname(sys.modules["train"].__file__)
    return next((f"{os.path.basename(frame.f_code.co_filename)}:{line}" for frame, line in walk_stack(None)
                 if os.path.dirname(frame.f_code.co_filename) == folder), "")


def place(when, actions, pp):
    for i, (name, start, end) in enumerate(actions, 1):
        if when <= end:
            passes = dict(F="forward", B="backward")
            name = f"{name}, action {i} of {len(actions)}" if pp > 1 else f"{passes[name[0]]} of micro-batch {name[1:].split()[0]}"
            return f"{'in' if when > start else 'before'} {name}"
    return "after the last backward, in the sums of gradients or the optimizer"


@contextlib.contextmanager
def named_layers(model, recorder):
    """Tell the recorder which layer computes: in forward by hooks on the modules, in backward by a hook on each layer's output,
    which runs when the output's gradient is there."""
    def hooks(name, module):
        def enter(*_):
            recorder.layer = name

        def leave(_, inputs, output):
            recorder.layer = ""
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(enter)
        return module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave)
    parts = {f"layer {i}": layer for i, layer in model.model.layers.items()} | {"head": model.lm_head}
    made = [hook for name, module in parts.items() if module is not None for hook in hooks(name, module)]
    yield
    for hook in made:
        hook.remove()


@contextlib.contextmanager
def named_passes(decoder, recorder):
    """Record forward and backward as a stage's actions, where there is no pipeline. The head belongs to B, as from step 6 on."""
    backward, started, done = torch.Tensor.backward, count(), count()

    def leave(*_):
        recorder.end()
        recorder.begin(f"B{next(done)} of stage 0")

    def to_the_end(*args, **kwargs):
        backward(*args, **kwargs)
        recorder.end()
    enter = decoder.register_forward_pre_hook(lambda *_: recorder.begin(f"F{next(started)} of stage 0"), prepend=True)
    made = enter, decoder.register_forward_hook(leave)
    with patch.object(torch.Tensor, "backward", to_the_end):
        yield
    for hook in made:
        hook.remove()


# ------------------------------------------------------------------------------------------- around the trainer
def record(argv, ranks, rank=0, note=lambda *_: None):
    """Record what a rank does in a training step after the first, when AdamW already has its states."""
    import train
    with one_rank(ranks, rank), recorded(note, before=lambda optimizer: optimizer.adamw.step()) as steps:
        train.main(argv)
    return steps[0]


@contextlib.contextmanager
def recorded(note=lambda seen, model, optimizer, mesh: None, before=lambda optimizer: None):
    """Record the training steps of the main that runs inside. Yield a list that gets an item for each step, from batch to log.

    Call note with each item; it may add to the item.
    """
    import metrics
    import train
    steps, made, watched = [], {}, contextlib.ExitStack()
    log, read = metrics.Metrics.log, train.batches

    def batches(*args):
        before(made["Optimizer"])
        for batch in read(*args):
            made["recorder"] = Recorder(made["build_model"], made["Optimizer"], made.get("build_mesh"), args[-1])
            watched.enter_context(made["recorder"].watching())
            yield batch

    def end(metrics, *args, **kwargs):
        watched.close()
        recorder = made.pop("recorder")
        steps.append(recorder.seen())
        note(steps[-1], recorder.model, recorder.optimizer, recorder.mesh)
        log(metrics, *args, **kwargs)
    with contextlib.ExitStack() as replaced:
        for name in filter(lambda name: hasattr(train, name), ("build_mesh", "build_model", "Optimizer")):
            replaced.enter_context(keeping(train, name, made))
        replaced.enter_context(patch.object(train, "batches", batches))
        replaced.enter_context(patch.object(metrics.Metrics, "log", end))
        yield steps
