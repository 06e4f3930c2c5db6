"""Plant a mistake in the user's own run. If the tool does not see it, EQUAL would mean nothing.

A plant changes what torch does, so it needs to know nothing about the trainer. It is planted anew in every training step.
"""
import contextlib
import functools
import inspect
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

PLANTS = {"half": "on the last rank, every backward pass counts half",
          "drop": "on the last rank, the first backward pass of every step counts nothing",
          "sum": "of every step's sums over ranks, the first is left out: each rank keeps its own term"}


@contextlib.contextmanager
def scaled_backward(factor, first_only):
    """Multiply what enters a backward pass. Yield a list with an entry for each pass that was changed."""
    real, changed, passes = torch.autograd.backward, [], []

    def backward(tensors, grad_tensors=None, *args, **kwargs):
        if torch._C._current_graph_task_id() != -1:       # recomputation may run a pass inside a pass
            return real(tensors, grad_tensors, *args, **kwargs)
        passes.append(1)
        if len(passes) == 1 or not first_only:
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
            grads = [*grad_tensors] if isinstance(grad_tensors, list | tuple) else [grad_tensors] * len(tensors)
            grad_tensors = [factor * (torch.ones_like(tensor) if grad is None else grad) if tensor.requires_grad else grad
                            for tensor, grad in zip(tensors, grads)]
            changed.append(1)
        return real(tensors, grad_tensors, *args, **kwargs)
    with patch.object(torch.autograd, "backward", backward):
        yield changed


class SumLeftOut(TorchDispatchMode):
    """Undoes the first sum of more than one number: the ranks call it together, and then each writes its own term.

    DDP and DTensor call c10d from C++, which only a dispatch mode sees, and a mode sees only its own thread. A trainer that runs in
    a thread of its own calls functions of torch.distributed, which are replaced.
    """
    def __init__(self):
        super().__init__()
        self.changed, self.replaced = [], contextlib.ExitStack()

    def __enter__(self):
        for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"):         # the last is new in torch 2.13
            if hasattr(dist, name):
                self.replaced.enter_context(patch.object(dist, name, self.replacing(getattr(dist, name))))
        return super().__enter__()

    def __exit__(self, *exception):
        self.replaced.close()
        return super().__exit__(*exception)

    def replacing(self, real):
        signature = inspect.signature(real)

        @functools.wraps(real)
        def call(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            group = given.get("group")
            if "tensor" in given:
                return self.all_reduce(lambda: real(**given), given["tensor"], group, lambda work: work and work.wait())
            return self.reduce_scatter(lambda out: real(**given | dict(output=out)), given["output"], given["input"], group)
        return call

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        def run():
            return op(*args, **(kwargs or {}))
        name = str(op).removesuffix(".default")
        if name == "c10d.allreduce_" and len(args[0]) == 1:
            return self.all_reduce(run, args[0][0], dist.ProcessGroup.unbox(args[1]), lambda out: dist.Work.unbox(out[1]).wait())
        if name == "c10d._reduce_scatter_base_":
            def run_into(out):
                return args[0], op(out, *args[1:], **(kwargs or {}))[1]
            return self.reduce_scatter(run_into, args[0], args[1], dist.ProcessGroup.unbox(args[2]))
        if name in ("_c10d_functional.all_reduce", "_c10d_functional.reduce_scatter_tensor"):
            group = _resolve_process_group(args[-1])
            if self.is_first(args[0], group):
                out = torch.ops._c10d_functional.wait_tensor(run())
                return out.copy_(own_part(args[0], out, group))
        return run()

    def is_first(self, term, group):
        """Tell whether this is the sum to leave out. Note that it is, because what it calls may come here, too."""
        first = not self.changed and term.is_floating_point() and term.numel() > 1 and (group or dist.group.WORLD).size() > 1
        self.changed += [1] * first
        return first

    def all_reduce(self, run, term, group, wait):
        if not self.is_first(term, group):
            return run()
        own = term.detach().clone()
        result = run()
        wait(result)
        term.detach().copy_(own)                          # DDP reads the result there
        return result

    def reduce_scatter(self, run, out, term, group):
        if not self.is_first(term, group):
            return run(out)
        result = run(out.detach().clone())                # gloo may write its output again in a second wait()
        out.detach().copy_(own_part(term, out, group))
        return result


def own_part(term, out, group):
    group = group or dist.group.WORLD
    return term.detach() if out.shape == term.shape else term.detach().chunk(group.size())[group.rank()]


@contextlib.contextmanager
def sum_left_out():
    with SumLeftOut() as mode:
        yield mode.changed


def planted(name, rank, world):
    """Plant one of PLANTS on this rank, for one training step. Yield a list that is not empty if it has changed something."""
    if name == "sum":
        return sum_left_out()
    if name and rank == world - 1:
        return scaled_backward(0.5 if name == "half" else 0.0, first_only=name == "drop")
    return contextlib.nullcontext([])
