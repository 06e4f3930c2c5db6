"""Gloo, made as unforgiving as NCCL.

NCCL runs an asynchronous operation on a stream of its own: until its wait(), its output is not there, and its input is still being
read. Gloo works in the background as well, but has mostly finished before anybody looks, and so it hides a missing wait. Here every
asynchronous operation (async_op=True, isend, irecv) works on copies of its tensors. Until its wait()

- its output is NaN, so reading it too early spoils the run;
- its input and output must stay as they are: writing to them or freeing their memory is an error.

And the caller must call wait(), or is_completed() until it returns True. Also, the tensors of every operation must be contiguous.
"""
import contextlib
import functools
import inspect
import sys
import weakref
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# for each operation, the argument that it writes to and the one that it reads (for all_reduce, it is the same one)
OUT_AND_GIVEN = {"all_reduce": (0, None), "all_gather_into_tensor": (0, 1), "reduce_scatter_tensor": (0, 1), "isend": (None, 0),
                 "irecv": (0, None), "all_to_all_single": (0, 1)}


class Work:
    def __init__(self, operation, args, kwargs, out, given, under_way):
        self.what, self.under_way = f"{operation.__name__}, started in {caller()}", under_way
        copies = [arg.data.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        self.real = operation(*copies, **kwargs)
        self.out, self.result = (None, None) if out is None else (args[out].data, copies[out])
        tensors = [] if out is None else [self.out.fill_(nothing(self.out))]
        if given is not None:                             # an input that is a slice of the output keeps its values
            shares = out is not None and same_storage(self.out, args[given])
            tensors.append(args[given].data.copy_(copies[given]) if shares else args[given].data)
        self.before = [(tensor, as_bytes(tensor).clone()) for tensor in tensors]
        under_way[self] = self.what

    def wait(self):
        self.real.wait()
        self.done()

    def is_completed(self):
        if completed := self.real.is_completed():
            self.done()
        return completed

    def done(self):
        if self.under_way.pop(self, None):
            for tensor, before in self.before:
                assert tensor.untyped_storage().nbytes() >= tensor.nbytes, f"memory given back before wait() of {self.what}"
                assert torch.equal(as_bytes(tensor), before), f"a tensor is written to before wait() of {self.what}"
            if self.out is not None:
                self.out.copy_(self.result)


def nothing(tensor):
    return torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min


def same_storage(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def caller():
    """Return the file and line in the step's code that started the operation."""
    frame = sys._getframe()
    while frame.f_code.co_filename in (__file__, distributed_c10d.__file__):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def started(name, under_way):
    operation, (out, given) = getattr(dist, name), OUT_AND_GIVEN[name]
    tensors = [*inspect.signature(operation).parameters][:len({out, given} - {None})]

    @functools.wraps(operation)                           # torch.compile inspects the signature
    def start(*args, **kwargs):
        args = *args, *(kwargs.pop(tensor) for tensor in tensors[len(args):])      # they may be given by name
        for place in {out, given} - {None}:
            assert args[place].is_contiguous(), f"{name} of a tensor that is not contiguous, in {caller()}; NCCL refuses it"
        if name not in ("isend", "irecv") and not kwargs.get("async_op"):
            return operation(*args, **kwargs)             # it blocks, so nobody can touch its tensors meanwhile
        return Work(operation, args, kwargs, out, given, under_way)
    return start


@contextlib.contextmanager
def unforgiving():
    under_way = {}
    with contextlib.ExitStack() as replaced:
        for name in OUT_AND_GIVEN:
            start = started(name, under_way)
            for module in (dist, distributed_c10d):       # the latter for batch_isend_irecv
                replaced.enter_context(patch.object(module, name, start))
        yield under_way
    assert not under_way, f"not waited for: {', '.join(sorted(set(under_way.values())))}"


@contextlib.contextmanager
def batches():
    """Yield a list, which holds the operations of a batch while batch_isend_irecv starts them."""
    in_batch, real = [], dist.batch_isend_irecv

    def start(operations):
        in_batch.append(operations)
        try:
            return real(operations)
        finally:
            in_batch.pop()
    with patch.object(dist, "batch_isend_irecv", start):
        yield in_batch


@contextlib.contextmanager
def noted(pipeline):
    """Yield a list that notes what a pipeline does: the names of actions (once they have what they need), "send" and "receive"
    when these start, and "wait for a send", "wait for a receive". When is_completed() is called, a send counts as complete."""
    did, sent, started, wait = [], [], dict(send=dist.isend, receive=dist.irecv), Work.wait

    def start(what):
        def noting(tensor, *args, **kwargs):
            if what == "receive":
                src = [args[0]] if args else [kwargs.get(name) for name in ("src", "group_src")]
                assert any(place is not None for place in src), "a receive that names no source; NCCL needs the rank of the sender"
            if what == "send":
                held = [i for i, earlier in enumerate(sent) if earlier() is not None]
                assert not held, "drop completed sends (is_completed) before the next send, or their tensors stay to the end"
                sent.append(weakref.ref(tensor))
            did.append(what)
            return started[what](tensor, *args, **kwargs)
        return noting

    def action(kind, run):
        def noting(stage, i, came):
            did.append(f"{kind}{stage}{i}")
            return run(stage, i, came)
        return noting

    def waiting(work):
        did.append("wait for a " + ("send" if work.what.startswith("isend") else "receive"))
        wait(work)

    def over(work):
        wait(work)
        return True
    pipeline.forward, pipeline.backward = action("F", pipeline.forward), action("B", pipeline.backward)
    with patch.object(dist, "isend", start("send")), patch.object(dist, "irecv", start("receive")), \
            patch.object(Work, "wait", waiting), patch.object(Work, "is_completed", over):
        yield did
