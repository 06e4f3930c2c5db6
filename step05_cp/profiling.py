"""--profile: record what the device does in one training step and, on CUDA, what its memory holds.

    trace_rank0.json     a trace of the fifth step; open it in https://ui.perfetto.dev or chrome://tracing
    memory_rank0.pickle  on CUDA, the allocator's history; drop it on https://pytorch.org/memory_viz

On the CPU, tools/memory.py draws what a step holds in memory.
"""
import contextlib
import os

import torch

from messages import RANK

TRACED_STEP = 4                                           # earlier steps also allocate memory and compile


class Profiler:
    def __init__(self, args):
        self.args = args
        if args.profile and args.device == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)

    @contextlib.contextmanager
    def step(self, step):
        """Trace this step if it is the one to trace."""
        first, last = self.args.first_step, self.args.steps - 1
        if not self.args.profile or step != min(first + TRACED_STEP, last):
            yield
            return
        write_trace = lambda trace: trace.export_chrome_trace(self.path("trace", "json"))
        with torch.profiler.profile(record_shapes=True, on_trace_ready=write_trace):
            yield
        if self.args.device == "cuda":
            torch.cuda.memory._dump_snapshot(self.path("memory", "pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def path(self, name, ending):
        return os.path.join(self.args.profile, f"{name}_rank{RANK}.{ending}")
