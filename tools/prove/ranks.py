"""Run an adapter on ranks of this machine, in bounded time, and return what every rank has seen.

The ranks are forked from this process, which has imported torch and the adapter, so they start at once. Each launch has its own
ranks, because a trainer may keep global state.
"""
import collections
import contextlib
import functools
import itertools
import math
import os
import pickle
import traceback
import warnings
from numbers import Integral
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # noqa: F401, an optimizer's first step would import it on every rank
import torch.distributed as dist
from prove import CannotRun
from prove.plants import planted
from prove.processes import Processes, environment, frames, new_store
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

GRACE = 0.5                                               # seconds that the other ranks get after one has failed
# torch's store has a thread; the ranks do not need it
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)


class Job(NamedTuple):
    """One training step. With weights, every rank first takes its parts of them."""
    weights: dict | None
    inputs: torch.Tensor
    targets: torch.Tensor
    watched: bool = False                                 # whether to record activations


class How(NamedTuple):
    """What a launch does besides its jobs."""
    load: str = ""                                        # a folder that the adapter's load reads before the first job
    save: str = ""                                        # a folder that its save writes after the last one
    plant: str = ""                                       # one of plants.PLANTS


# ------------------------------------------------------------------------------------------- on a rank
def local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def blocks_of(weight, where, memory):
    """Yield (offsets, slices) of every block of a rank's part: where it begins in the whole tensor, and where it lies in memory."""
    if not any(isinstance(placement, _StridedShard) for placement in getattr(weight, "placements", ())):
        yield offsets_of(weight, where, memory), ...
    elif memory.numel():
        numbers = torch.arange(weight.numel(), device=memory.device).view(weight.shape)
        numbers = distribute_tensor(numbers, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
        blocks = []                                       # in each dimension, those of consecutive indices
        for dim, size in enumerate(weight.shape):
            index = numbers.movedim(dim, 0).reshape(memory.shape[dim], -1)[:, 0] // math.prod(weight.shape[dim + 1:]) % size
            ends = [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist(), len(index)]
            blocks.append([(int(index[begin]), slice(begin, end)) for begin, end in itertools.pairwise(ends)])
        for block in itertools.product(*blocks):
            yield tuple(zip(*block))


def offsets_of(weight, where, memory):
    """Return where a rank's part begins in the whole tensor, in every dimension."""
    if hasattr(weight, "to_local"):
        _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        return tuple(offsets)
    if isinstance(where, list):
        return tuple(where)
    return tuple((where or {}).get(dim, 0) * size for dim, size in enumerate(memory.shape))


def read_parts(adapter, run, kind):
    """Return [(name, offsets, memory)] of this rank's "gradients" or "weights"."""
    found, taken, some = [], set(), False
    for part in adapter.parts(run):
        if not isinstance(part, tuple) or len(part) != 4:
            what = f"a tuple of {len(part)}" if isinstance(part, tuple) else type(part).__name__
            raise CannotRun(f"parts: yields {what}; it must yield (name, weight, gradient, where)")
        name, weight, gradient, where = part
        if not isinstance(name, str) or not isinstance(weight, torch.Tensor):
            raise CannotRun(f"parts: yields name {name!r} and a weight of type {type(weight).__name__}; "
                            "it must yield a str and a tensor")
        if not (where is None or isinstance(where, dict | list)):
            raise CannotRun(f"parts: {name} has where {where!r}; it must be None, a dict {{dimension: which of equal parts}} "
                            "or a list of offsets")
        memory = local(weight)
        if isinstance(where, list) and len(where) != memory.dim():
            raise CannotRun(f"parts: {name} has offsets {where}, but {memory.dim()} dimensions")
        blocks = [*blocks_of(weight, where, memory)]
        for offsets, _ in blocks:
            if not all(isinstance(offset, Integral) and offset >= 0 for offset in offsets):
                raise CannotRun(f"parts: {name} has where {where}; its numbers must be whole, and 0 or more")
            if (name, offsets) in taken:
                raise CannotRun(f"parts: yields {name}{list(offsets)} twice; every part must have a name or offsets of its own")
            taken.add((name, offsets))
        if kind == "gradients":
            if hasattr(gradient, "redistribute"):         # it may still be a partial sum
                gradient = gradient.redistribute(weight.device_mesh, weight.placements)
            some |= gradient is not None
            memory = torch.zeros_like(memory) if gradient is None else local(gradient).to_dense()
            if memory.shape != local(weight).shape:
                raise CannotRun(f"parts: {name} has shape {list(local(weight).shape)}, but its gradient has {list(memory.shape)}")
        found += [(name, offsets, memory[slices]) for offsets, slices in blocks]
    if not found and kind == "weights" and int(os.environ["WORLD_SIZE"]) == 1:
        raise CannotRun("parts: yields nothing; it must yield (name, weight, gradient, where) of every parameter")
    if kind == "gradients" and not some and int(os.environ["WORLD_SIZE"]) == 1:
        raise CannotRun("parts: no part has a gradient after step; keep the gradients until the next step begins")
    return found


def cut(whole, offsets, shape):
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape))]


def copies(adapter, run, kind):
    return [(name, offsets, memory.cpu().clone()) for name, offsets, memory in read_parts(adapter, run, kind)]


def load(adapter, run, weights):
    """Write this rank's parts of the given weights into the trainer's memory."""
    written = read_parts(adapter, run, "weights")
    for name, offsets, memory in written:
        if name not in weights:
            raise CannotRun(f"parts: yields {name}, which one process does not have; names must be the same under every layout. "
                            f"One process has {', '.join([*weights][:3])}, ...")
        part = cut(weights[name], offsets, memory.shape)
        if part.shape != memory.shape:
            raise CannotRun(f"parts: no part of shape {list(memory.shape)} begins at {list(offsets)} in {name}, "
                            f"which has shape {list(weights[name].shape)}; correct `where`")
        memory.copy_(part)
    if hasattr(adapter, "loaded"):
        adapter.loaded(run)
    for (name, offsets, memory), (_, _, before) in zip(read_parts(adapter, run, "weights"), written):
        lasting = memory.data_ptr() == before.data_ptr()
        if not lasting or not torch.equal(memory.cpu(), cut(weights[name], offsets, memory.shape).to(memory.dtype)):
            raise CannotRun(f"parts: {name} is not what was written into it; yield the memory itself, not a copy")


def first_tensor(value):
    """Return the first tensor of numbers in a module's input or output, or None."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((tensor for tensor in map(first_tensor, value) if tensor is not None), None)
    return value if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1 else None


def rows_of(tensor):
    """Return this rank's part of a tensor, as [rows, width]; None if it is a partial sum."""
    if tensor is None or any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        return None
    return as_rows(local(tensor))


def as_rows(tensor):
    return tensor.flatten(0, -2).double().cpu().clone()


@contextlib.contextmanager
def watch(adapter, run, wanted):
    """Yield {name of a module: [[its input, its output, the gradient of its output] of every call]}, which fills during step."""
    seen, handles = {}, []

    def note(name):
        def hook(module, args, kwargs, output):
            if torch._C._current_graph_task_id() == -1:   # not while backward recomputes it
                output = first_tensor(output)
                call = [rows_of(first_tensor((*args, kwargs))), rows_of(output), None]
                seen.setdefault(name, []).append(call)
                if call[1] is not None and output.requires_grad:
                    output.register_hook(functools.partial(keep, call))
        return hook

    def keep(call, gradient):
        gradient = local(gradient)                        # a partial sum, too: trace.py adds up those of the ranks
        if call[2] is None and gradient.shape[-1] == call[1].shape[1] and gradient.numel() == call[1].numel():
            call[2] = as_rows(gradient)
    if wanted and hasattr(adapter, "modules"):
        modules = [(name, module) for name, module in adapter.modules(run) or () if name]
        handles = [module.register_forward_hook(note(name), with_kwargs=True) for name, module in modules]
    yield seen
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def tokens_read():
    """Yield {embedding: number of tokens it was given}, which fills during forward."""
    read = collections.Counter()

    def note(module, args):
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1 or getattr(module, "weight", None) is None:
            return
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype in (torch.int32, torch.int64):
            read[module] += local(args[0]).numel()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    yield read
    handle.remove()


def issued():
    """Return how many collectives this rank has issued so far, in all its groups. Gloo counts sends and receives, too."""
    number = 0
    for group in dist.distributed_c10d._world.pg_map:
        with contextlib.suppress(RuntimeError):           # not every backend counts
            number += group._get_sequence_number_for_group()
    return number


def number(value, what):
    if value is None:
        return None
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise CannotRun(f"step: returns a {what} of type {type(value).__name__}; it must be a number, or None where the rank does "
                        "not know it") from None


def train(adapter, flags, jobs, how):
    """Build the trainer and run the jobs. Return what this rank has seen."""
    run = adapter.build(dict(flags))
    if run is None:
        raise CannotRun("build: returns None; it must return what parts and step take")
    if how.load:
        adapter.load(run, how.load)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = (adapter.place(run) if hasattr(adapter, "place") else None) or {}
    if not isinstance(place, dict):
        raise CannotRun(f"place: returns a {type(place).__name__}; it must return a dict such as {{'tp': 0, 'pp': 1}}")
    if not all(isinstance(at, int | str) for at in place.values()):
        raise CannotRun(f"place: returns {place}; every coordinate must be a whole number or a str")
    seen = dict(own=copies(adapter, run, "weights"), place=place, steps=[], planted=0)
    for job in jobs:
        if job.weights:
            load(adapter, run, job.weights)
        before = issued()
        with watch(adapter, run, job.watched) as activations, tokens_read() as read, planted(how.plant, rank, world) as changed:
            result = adapter.step(run, job.inputs.clone(), job.targets.clone())
        issued_by_step = issued() - before
        seen["planted"] += len(changed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise CannotRun(f"step: returns {type(result).__name__}; it must return (loss, gradient norm), None for what this rank "
                            "does not know")
        loss, norm = number(result[0], "loss"), number(result[1], "norm")
        seen["steps"].append(dict(loss=loss, norm=norm, gradients=copies(adapter, run, "gradients"),
                                  weights=copies(adapter, run, "weights"), activations=activations,
                                  read=max(read.values(), default=0), issued=issued_by_step))
    if how.save:
        adapter.save(run, how.save)
    return seen


def worker(rank, folder, pipe, adapter, world, port, flags, jobs, unforgiving, how):
    os.environ.update(environment(rank, world, port))
    torch.set_num_threads(1)
    try:
        with unforgiving() if world > 1 else contextlib.nullcontext():
            answer = "ok", train(adapter, flags, jobs, how)
    except BaseException as error:
        answer = "error", describe(rank, error)
    pipe.send_bytes(pickle.dumps(answer))                 # by torch's own send(), tensors would end with this process


def describe(rank, error):
    if isinstance(error, CannotRun):
        return str(error)
    message = getattr(error, "message", None) or str(error)                        # of a step's refusal, see its messages.py
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = "".join(f"\n    {frame.filename}:{frame.lineno} {frame.line}" for frame in frames[-4:])
    return f"rank {rank}: {type(error).__name__}: {message}{where}"


# ------------------------------------------------------------------------------------------- in the parent
def launch(adapter, world, flags, jobs, seconds=120, unforgiving=contextlib.nullcontext, how=How()):
    """Run the jobs on `world` ranks. Return what each of them has seen, or raise CannotRun within `seconds` or a little more."""
    store = new_store()
    with Processes(worker, "fork", (adapter, world, store.port, flags, jobs, unforgiving, how)) as ranks:
        ranks.start(world)
        answers = ranks.collect(world, seconds, GRACE)
        if [kind for kind, *_ in answers.values()] == ["ok"] * world:
            return [answers[rank][1] for rank in range(world)]
        raise CannotRun(why(ranks, world, answers, seconds))


def why(ranks, world, answers, seconds):
    """Say what went wrong first: a death, as what the others say follows from it; an error; or else that time ran out."""
    for rank, (kind, status, *_) in sorted(answers.items()):
        if kind == "died":
            return f"rank {rank} died with exit status {status}. {ranks.read(rank, 'out').strip()[-500:]}"
    failed = {rank: answer[1] for rank, answer in answers.items() if answer[0] == "error"}
    if failed:
        first = next(iter(failed.values()))
        printed = [ranks.read(rank, "out").strip()[-500:] for rank in sorted(failed) if "SystemExit" in first]
        return "\n    ".join([first.splitlines()[0], *filter(None, printed)]) if any(printed) else first
    stood = ["it has finished" if rank in answers else stands(ranks, rank) for rank in range(world)]
    return "\n".join([f"--seconds {seconds}: the ranks did not finish. Each of them is here, innermost call first:",
                      *(f"    rank {rank}: {where}" for rank, where in enumerate(stood))])


def stands(ranks, rank):
    """Return where a rank is: the innermost call, and those outside the libraries."""
    calls = frames(ranks.stack(rank))
    own = [call for call in calls if "/lib/python" not in call[0] and Path(call[0]).parent != Path(__file__).parent]
    shown = dict.fromkeys(calls[:1] + (own or calls)[:3])
    return " < ".join(f"{os.path.basename(file)}:{line} {function}" for file, line, function in shown) or "no stack"
