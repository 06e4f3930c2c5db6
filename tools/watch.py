"""Watch what a rank does: its operations, what they send, and the storages that it holds, by kind.

    with Watch(after=function):                           # calls it after every operation, of forward, backward or the optimizer
    collective_of(op, args)                               # what one of them sends: name, group, payload
    with Storages() as live:                              # then live.timeline() is the bytes alive, event by event

They see whatever runs in this process. A step's ledger.py does the second of these itself, for its table.
"""
import contextlib
import time
import weakref
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

#              c10d's name               ours; index of the argument with the payload; share of it that a ring moves, per rank
COLLECTIVES = {"allreduce_":           ("all_reduce", 0, lambda n: 2 * (n - 1) / n),
               "_allgather_base_":     ("all_gather", 0, lambda n: (n - 1) / n),
               "_reduce_scatter_base_": ("reduce_scatter", 1, lambda n: (n - 1) / n),
               "alltoall_base_":       ("all_to_all", 1, lambda n: (n - 1) / n),
               "broadcast_":           ("broadcast", 0, lambda n: (n - 1) / n),
               "send":                 ("send", 0, lambda n: 1),
               "recv_":                ("receive", 0, lambda n: 1)}
# the kinds of storages, and their colours in pictures; the first three persist from step to step
KINDS = {"parameters": "#4878a8", "optimizer states": "#6aa56e", "gradients": "#d9a441", "activations": "#c8605a",
         "rest": "#a9a9a9"}
PERSISTENT = list(KINDS)[:3]


def tensors(values):
    """Yield the tensors in nested tuples, lists and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)
        elif isinstance(value, dict):
            yield from tensors(value.values())


# ------------------------------------------------------------------------------------------- operations
class Watch(TorchDispatchMode):
    """Calls before(op, args, kwargs) and after(op, args, kwargs, result) for every operation that runs inside `with`.

    Every collective is an operation of the c10d library, so these are seen, too.
    """
    def __init__(self, before=None, after=None):
        super().__init__()
        self.before, self.after = before or self.before, after or self.after

    def before(self, op, args, kwargs):
        pass

    def after(self, op, args, kwargs, result):
        pass

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.before(op, args, kwargs)
        result = op(*args, **kwargs)
        self.after(op, args, kwargs, result)
        return result


class Collective(NamedTuple):
    """A collective, or one end of a message, as the rank that calls it sees it."""
    what: str                                             # our name; c10d's, if COLLECTIVES does not have it
    group: dist.ProcessGroup
    payload: list                                         # the tensors that are reduced, gathered, scattered or sent
    ring: float                                           # bytes that a ring moves per byte of the payload

    @property
    def bytes(self):
        return sum(tensor.nbytes for tensor in self.payload)


def collective_of(op, args):
    """Return the Collective that an operation is, or None."""
    group = group_of(args) if op.namespace == "c10d" else None
    if group is None:
        return None
    what, payload, ring = COLLECTIVES.get(op._opname, (op._opname.strip("_"), 0, lambda n: 1))
    return Collective(what, group, [*tensors([args[payload]])], ring(group.size()))


def group_of(args):
    objects = [value for value in args if isinstance(value, torch.ScriptObject)]
    return next((dist.ProcessGroup.unbox(value) for value in objects if value._type().name() == "ProcessGroup"), None)


# ------------------------------------------------------------------------------------------- storages
class Storages(Watch):
    """Follows storages as they come and go: inside `with`, those that operations return, and if `given`, those that they get.

    events: (when, storage's number, bytes gained or lost); kinds: the kind of each number, which may become known later; `now`
    says when an event happens.
    """
    def __init__(self, now=time.perf_counter, given=False):
        super().__init__()
        self.now, self.given, self.events, self.kinds = now, given, [], []
        self.alive = {}                                   # by address: number, size, and the weakref that reports when it is freed

    def __enter__(self):
        self.resizing = self.resizes()
        self.resizing.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        self.resizing.__exit__(*exception)
        return super().__exit__(*exception)

    def after(self, op, args, kwargs, result):
        kind = "activations" if torch.is_grad_enabled() else "rest"    # grad mode is off in backward, the loss, the optimizer
        self.note_all(result, kind)
        for tensor in tensors((args, kwargs)) if self.given else ():
            number = self.note(tensor, kind)
            if tensor.requires_grad and self.kinds[number] == "rest":  # made in an autograd.Function's forward
                self.kinds[number] = "activations"

    def note(self, tensor, kind):
        """Note a tensor's storage. Return its number."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = len(self.kinds), storage.nbytes(), weakref.ref(storage, lambda _: self.end(key))
            self.events.append((self.now(), len(self.kinds), storage.nbytes()))
            self.kinds.append(kind)
        elif kind in PERSISTENT:
            self.kinds[self.alive[key][0]] = kind
        return self.alive[key][0]

    def note_all(self, values, kind):
        for tensor in tensors([values]):
            self.note(tensor, kind)

    def tag_state(self, model, optimizer):
        """Tell which storages persist from step to step. AdamW makes its states in the first step."""
        self.note_all([*model.parameters(), *optimizer.params], "parameters")
        self.note_all(optimizer.grads, "gradients")
        for master in optimizer.masters:
            if master.dtype != optimizer.params[0].dtype:  # bfloat16: the float32 copy is the optimizer's
                self.note(master, "optimizer states")
            self.note_all([*optimizer.adamw.state.get(master, {}).values()], "optimizer states")

    def end(self, key):
        number, size, _ = self.alive.pop(key)
        self.events.append((self.now(), number, -size))

    @contextlib.contextmanager
    def resizes(self):
        """Note storages that are freed and allocated again by resize_ (step 3), which dispatches no operation."""
        resize = torch.UntypedStorage.resize_

        def noted(storage, size):
            number, before, end = self.alive.get(storage._cdata, (None, 0, None))
            resize(storage, size)
            if number is not None and size != before:
                self.alive[storage._cdata] = number, size, end
                self.events.append((self.now(), number, size - before))
        with patch.object(torch.UntypedStorage, "resize_", noted):
            yield

    def timeline(self):
        return timeline(list(self.events), self.kinds)


def timeline(events, kinds):
    """Return a row per event: its time, and the bytes of each kind that are alive then."""
    alive, rows = dict.fromkeys(KINDS, 0), []
    for when, number, size in events:
        alive[kinds[number]] += size
        rows.append((when, *alive.values()))
    return rows


# ------------------------------------------------------------------------------------------- a trainer's steps
def keeping(module, name, made):
    """Return a patch with which made[name] becomes the latest result of a function of this module."""
    make = getattr(module, name)

    def call(*args, **kwargs):
        made[name] = make(*args, **kwargs)
        return made[name]
    return patch.object(module, name, call)


@contextlib.contextmanager
def replaced_profiler(watch):
    """Let the trainer whose main runs inside run each step in watch(step, model, optimizer, args), not in its Profiler's step."""
    import train                                          # of the step whose folder is on the path
    made = {}

    class Profiler:
        def __init__(self, args):
            self.args = args

        def step(self, step):
            return watch(step, made["build_model"], made["Optimizer"], self.args)
    with keeping(train, "build_model", made), keeping(train, "Optimizer", made), patch.object(train, "Profiler", Profiler):
        yield
