"""--profile: what the device does (a trace) and what its memory holds (a picture), observed over the first
steps.

    trace_rank0.json     one training step; open it in https://ui.perfetto.dev or chrome://tracing
    memory_rank0.png     bytes alive over the first four steps, by kind; memory_rank0.json has the numbers
                         (not with --compile: torch would give up compiling while all operations are watched)
    memory_rank0.pickle  on CUDA: the allocator's history; drop it on https://pytorch.org/memory_viz
"""
import contextlib
import json
import os
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from messages import RANK

KINDS = {"parameters": "#4878a8", "optimizer states": "#6aa56e", "gradients": "#d9a441",
         "activations": "#c8605a", "rest": "#a9a9a9"}
MEMORY_STEPS, TRACED_STEP = 4, 4


class LiveStorages(TorchDispatchMode):
    """Sees the result of every operation, and through weak references the end of every storage.

    events: (seconds, storage number, bytes gained or lost); kinds: what each storage turned out to be.
    """

    def __init__(self):
        super().__init__()
        self.events, self.kinds, self.numbers = [], [], weakref.WeakKeyDictionary()
        self.resized = {}                # {storage that is given back and taken again (step 3): its size now}

    def note(self, tensor, kind):
        storage = tensor.untyped_storage()
        if storage not in self.numbers:
            number, size = len(self.kinds), storage.nbytes()
            self.numbers[storage] = number
            self.kinds.append(kind)
            self.events.append((time.perf_counter(), number, size))
            end = weakref.finalize(storage, lambda: self.events.append((time.perf_counter(), number, -size)))
            end.atexit = False
        elif kind in ("parameters", "optimizer states", "gradients"):
            self.kinds[self.numbers[storage]] = kind

    def note_resized(self, tensor, kind):
        self.note(tensor, kind)
        self.resized.setdefault(tensor.untyped_storage(), tensor.untyped_storage().nbytes())

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        for storage, size in self.resized.items():        # no operation tells
            if storage.nbytes() != size:
                self.events.append((time.perf_counter(), self.numbers[storage], storage.nbytes() - size))
                self.resized[storage] = storage.nbytes()
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):          # under no_grad: backward, the loss, the optimizer
                self.note(tensor, "activations" if torch.is_grad_enabled() else "rest")
        return result

    def timeline(self):
        """A row per event: seconds since the first, and the bytes of each kind alive then."""
        alive, rows, start = dict.fromkeys(KINDS, 0), [], self.events[0][0]
        for seconds, number, size in list(self.events):
            alive[self.kinds[number]] += size
            rows.append((seconds - start, *alive.values()))
        return rows


def note_state(memory, model, optimizer):
    if memory is None:
        return
    for param in (*model.parameters(), *optimizer.params):
        memory.note_resized(param, "parameters")
    for grad in optimizer.grads:
        memory.note(grad, "gradients")
    for master, state in zip(optimizer.masters, map(optimizer.adamw.state.get, optimizer.masters)):
        if master.dtype != optimizer.params[0].dtype:     # bfloat16: the float32 copy is the optimizer's
            memory.note(master, "optimizer states")
        for tensor in (state or {}).values():
            memory.note(tensor, "optimizer states")


def draw(rows, path):
    from matplotlib.figure import Figure
    seconds, *kinds = zip(*rows)
    mebibytes = [[size / 2**20 for size in kind] for kind in kinds]
    peak = max(map(sum, zip(*mebibytes)))
    figure = Figure(figsize=(11, 4.5))
    axes = figure.subplots()
    axes.stackplot(seconds, mebibytes, labels=KINDS, colors=KINDS.values(), step="post")
    axes.set(xlabel="seconds (observing slows the run)", ylabel="MiB alive", title=f"at most {peak:,.1f} MiB")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=130, bbox_inches="tight")


class Profiler:
    def __init__(self, model, optimizer, args):
        self.model, self.optimizer, self.args = model, optimizer, args
        self.memory = LiveStorages() if args.profile and not args.compile else None
        note_state(self.memory, model, optimizer)
        if args.profile and args.device == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)

    @contextlib.contextmanager
    def step(self, step):
        """The tools that watch this step; most steps have none."""
        if not self.args.profile:
            yield
            return
        step, last = step - self.args.first_step, self.args.steps - self.args.first_step - 1
        with contextlib.ExitStack() as tools:
            if self.memory and step < MEMORY_STEPS:
                tools.enter_context(self.memory)
            if step == min(TRACED_STEP, last):
                write_trace = lambda trace: trace.export_chrome_trace(self.path("trace", "json"))
                tools.enter_context(torch.profiler.profile(record_shapes=True, on_trace_ready=write_trace))
            yield
        if step < MEMORY_STEPS:
            note_state(self.memory, self.model, self.optimizer)    # AdamW makes its states in the first step
        if step == min(MEMORY_STEPS - 1, last):
            self.write_memory()

    def write_memory(self):
        if self.memory:
            rows = self.memory.timeline()
            with open(self.path("memory", "json"), "w") as file:
                json.dump({"columns": ["seconds", *KINDS], "rows": rows}, file)
            draw(rows, self.path("memory", "png"))
        if self.args.device == "cuda":
            torch.cuda.memory._dump_snapshot(self.path("memory", "pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def path(self, name, ending):
        return os.path.join(self.args.profile, f"{name}_rank{RANK}.{ending}")
