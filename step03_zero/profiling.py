"""--profile: what the device does (a trace) and what its memory holds (a picture), over the first steps.

    trace_rank0.json     one training step; open it in https://ui.perfetto.dev or chrome://tracing
    memory_rank0.png     bytes alive over the first four steps, by kind (not with --compile: torch would give
                         up compiling while all operations are watched)
    memory_rank0.pickle  on CUDA: the allocator's history; drop it on https://pytorch.org/memory_viz
"""
import contextlib
import os
import time
import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from messages import RANK, print0

KINDS = {"parameters": "#4878a8", "optimizer states": "#6aa56e", "gradients": "#d9a441",
         "activations": "#c8605a", "rest": "#a9a9a9"}
MEMORY_STEPS, TRACED_STEP = 4, 4


class LiveMemory(TorchDispatchMode):
    """Sees every operation. rows: when it was, and the bytes of each kind that were alive after it."""

    def __init__(self):
        super().__init__()
        self.rows, self.kinds = [], weakref.WeakKeyDictionary()        # of storages, which it keeps not alive

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        new = "activations" if torch.is_grad_enabled() else "rest"     # of backward, the loss, the optimizer
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor):
                kind = self.kinds.setdefault(tensor.untyped_storage(), new)
                if kind == "rest" and tensor.requires_grad:           # our own functions made it, grad off
                    self.kinds[tensor.untyped_storage()] = "activations"
        alive = Counter()
        for storage, kind in self.kinds.items():
            alive[kind] += storage.nbytes()
        self.rows.append((time.perf_counter(), *(alive[kind] for kind in KINDS)))
        return result


def draw(rows, path):
    from matplotlib.figure import Figure
    seconds, *kinds = zip(*rows)
    axes = Figure(figsize=(11, 4.5)).subplots()
    mebibytes = [[size / 2**20 for size in kind] for kind in kinds]
    alive = [sum(kinds) for kinds in zip(*mebibytes)]
    print0(f"memory of a rank: {alive[-1]:.1f} MiB stay from step to step, at most {max(alive):.1f} are alive")
    axes.stackplot(seconds, mebibytes, labels=KINDS, colors=KINDS.values(), step="post")
    axes.set(xlabel="seconds (observing slows the run)", ylabel="MiB alive")
    axes.legend(loc="upper left")
    axes.figure.savefig(path, dpi=130)


class Profiler:
    def __init__(self, model, optimizer, args):
        self.model, self.optimizer, self.args = model, optimizer, args
        self.memory = LiveMemory()
        if args.profile and args.device == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)

    @contextlib.contextmanager
    def step(self, step):
        """The tools that watch this step; most steps have none."""
        step -= self.args.first_step
        last = min(TRACED_STEP, self.args.steps - self.args.first_step - 1)
        if not self.args.profile or step > last:
            yield
            return
        self.tag_state()
        with contextlib.ExitStack() as tools:
            if step < MEMORY_STEPS and not self.args.compile:
                tools.enter_context(self.memory)
            if step == last:
                write_trace = lambda trace: trace.export_chrome_trace(self.path("trace", "json"))
                tools.enter_context(torch.profiler.profile(record_shapes=True, on_trace_ready=write_trace))
            yield
        if step == last:
            if self.memory.rows:
                draw(self.memory.rows, self.path("memory", "png"))
            if self.args.device == "cuda":
                torch.cuda.memory._dump_snapshot(self.path("memory", "pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)

    def tag_state(self):
        """Whose storages they are that last from step to step. AdamW makes its states in the first."""
        adam = [tensor for state in self.optimizer.adamw.state.values() for tensor in state.values()]
        for kind, tensors in {"optimizer states": [*adam, *self.optimizer.masters],
                              "gradients": self.optimizer.grads,
                              # in float32 these are the masters, too
                              "parameters": [*self.model.parameters(), *self.optimizer.params]}.items():
            for tensor in tensors:
                self.memory.kinds[tensor.untyped_storage()] = kind

    def path(self, name, ending):
        return os.path.join(self.args.profile, f"{name}_rank{RANK}.{ending}")
