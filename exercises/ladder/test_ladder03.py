"""The ladder of step 3: ZeRO, from one flat tensor to weights that are gathered when needed. Each test is a rung; exercise.py
explains how to use them."""
import contextlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import layouts
import pytest
import torch
import torch.distributed as dist
import unforgiving
from exercise import rung
from observe import check
from torch import nn

STEP = "step03_zero"


# ------------------------------------------------------------------------------------------------ on every rank
class Ranks(NamedTuple):
    """Stands for a process group where nothing is sent."""
    count: int
    mine: int

    def size(self):
        return self.count

    def rank(self):
        return self.mine


def new_unit(kind, modules, params, group, stage=1, micro_batches=1):
    import zero
    ranks = group.size()
    args = SimpleNamespace(zero=stage, global_batch_size=ranks * micro_batches, micro_batch_size=1, dp=ranks)
    mesh = SimpleNamespace(get_all_groups=lambda: [Ranks(1, 0), group])
    return getattr(zero, kind)(modules, params, mesh, args), args


def start(ranks=2):
    """Return this rank's group, and its rank there. With four ranks, 0 and 1 are one group, 2 and 3 the other."""
    dist.init_process_group("gloo")
    group, _ = dist.new_subgroups(ranks)
    dist.barrier()                                        # no group may end while the other still connects
    return group, group.rank()


def numbered(*shapes, dtype=torch.float32):
    """Make parameters that contain the numbers 1 2 3 ..."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.arange(1.0, 1 + sum(sizes), dtype=dtype).split(sizes)
    return [nn.Parameter(part.clone().view(shape)) for part, shape in zip(parts, shapes)]


def numbered_unit(kind, group, *shapes, dtype=torch.float32):
    """Make a unit of such parameters, and shard it."""
    from placement import Placement
    params = numbered(*shapes, dtype=dtype)
    unit, _ = new_unit(kind, [], params, group)
    for i, param in enumerate(params):
        param.placement = Placement(num_replicas=2 * group.size(), decays=i == 0)
        unit.add_to_unit(param)
    return unit


def add_gradients(unit, times):
    """Add a gradient for each parameter, as backward makes it: `times` 1 2 3 ... over all of them."""
    for param, numbers in zip(unit.params, numbered(*(param.shape for param in unit.params))):
        param.grad = (times * numbers.detach()).to(param.dtype)
        unit.accumulate_grad(param)
        param.grad = None


def start_reduce_scatter(unit, events):
    grads, events[:] = unit.flat_grad.data_ptr(), []
    returned = unit.start_reduce_scatter()
    assert events == ["reduce"], (
        f"start_reduce must start one dist.reduce_scatter_tensor and not wait for it; it did {in_words(events)}")
    assert events.given == grads, (
        "the reduce-scatter was given a tensor that is not self.grads: a copy takes as much memory as all gradients of the unit")
    assert type(returned) is tuple and len(returned) == 2 and hasattr(returned[0], "wait_for_all_gather"), (
        f"start_reduce returned {returned}; expected two things: the work of the collective that it started, and what "
        f"finish_reduce needs, or None")
    return returned


def values(params):
    return [param.tolist() for param in params]


def in_words(events):
    return ", ".join(events) or "nothing"


def memory(tensor):
    return tensor.untyped_storage().nbytes()


def kept(unit):
    """Return the bytes of all tensors that a unit refers to, counting each storage once."""
    storages, rest = {}, [value for name, value in vars(unit).items() if name != "modules"]
    while rest:
        value = rest.pop()
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage()._cdata] = memory(value)
        elif isinstance(value, dict):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            rest += value
    return sum(storages.values())


class Events(list):
    """What was started and waited for, and the address of the memory that the last collective was given."""
    given = None


class Noted:
    """The work of a collective. It notes when it is waited for."""

    def __init__(self, work, events, name):
        self.work, self.events, self.name = work, events, name

    def wait(self):
        self.events.append(f"wait for {self.name}")
        try:
            self.work.wait()
        except AssertionError as error:
            raise AssertionError(f"{error}; was {self.name} started too early (a reduction: before the unit's last gradient), or "
                                 "were its tensors used, zeroed or freed before this wait?") from None

    def is_completed(self):
        return self.work.is_completed()


@contextlib.contextmanager
def watched(group, names=None):
    """Yield a list of what is started and waited for: "reduce", "gather", or, given names by the whole tensor's length, "reduce 2".
    As over nccl, an operation's result is not there before its wait."""
    events = Events()

    def noted(what, collective, whole):
        def start_it(*args, **kwargs):
            call = f"dist.{collective.__name__}"
            groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
            assert groups == [group], f"{call} must be called with group=self.shard"
            assert kwargs.get("async_op"), f"{call} waits at once: async_op=True returns a work that you can wait for later"
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            name = what if names is None else f"{what} {names[tensors[whole].numel()]}"
            events.append(name)
            events.given = tensors[1].data_ptr()
            return Noted(collective(*args, **kwargs), events, name)
        return start_it

    def refused(name):
        def refuse(*args, **kwargs):
            raise AssertionError(f"dist.{name} was called; dist.reduce_scatter_tensor and dist.all_gather_into_tensor are enough: "
                                 "others send more, or copy, or escape the ledger")
        return refuse

    def caller():                                         # who called start_it
        frame = sys._getframe(4)
        return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    others = "all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "start_all_gather", "scatter", "all_to_all_single"
    with unforgiving.unforgiving(), patch.object(unforgiving, "caller", caller):
        ours = dict(reduce_scatter_tensor=noted("reduce", dist.reduce_scatter_tensor, 1),
                    all_gather_into_tensor=noted("start_all_gather", dist.all_gather_into_tensor, 0))
        with patch.multiple(dist, **ours, **{name: refused(name) for name in others}):
            yield events


@contextlib.contextmanager
def nothing_is_zero():
    """Fill torch.empty with NaN: otherwise it often happens to be zero."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def views_job():
    params, flat = numbered((2, 2), (3,), dtype=torch.bfloat16), torch.arange(8.0)     # gradients are wider
    unit, _ = new_unit("Zero1Unit", [], params, Ranks(1, 0))
    unit.params = params
    views = unit.views(flat)
    found = values(views[param] for param in params)
    views[params[1]].zero_()
    return found, flat.tolist()


@rung({"zero.py": ["Zero1Unit.views"]}, hints="""
    The parameters lie in the flat tensor one after the other, in the order of `self.params`. Each of them has
    `param.numel()` elements there. After the last one there is padding.

    `tensor.split([4, 3])` gives two views, of 4 and of 3 elements; the sizes have to add up to the length of the tensor.
    `part.view(shape)` gives a part the shape of its parameter, and copies nothing.

    Make a list `sizes` of all `param.numel()`. Then `parts = flat[:sum(sizes)].split(sizes)`, and return a dictionary with
    `param: part.view(param.shape)` for each pair of `zip(self.params, parts)`.""")
def test_parameters_in_a_flat_tensor(pool):
    """Write `views(flat)`. It returns a dictionary that maps each of self.params to the view of its part of the flat tensor, in the
    parameter's shape. The flat tensor may be longer than all parameters together, and of another dtype: gradients of bfloat16
    parameters are added up in float32."""
    (found, flat), = pool.call(views_job, STEP)
    expected = [[[0, 1], [2, 3]], [4, 5, 6]]
    assert found == expected, f"in the flat tensor 0 1 ... 7, parameters of shapes [2, 2] and [3] have {found}, not {expected}"
    assert flat == [0, 1, 2, 3, 0, 0, 0, 7], (
        f"writing to a parameter's view must write to the flat tensor; after zeros for the second one it has {flat}")


def cut_job(ranks, rank):
    unit = numbered_unit("Zero1Unit", Ranks(ranks, rank), (2, 2), (3,), dtype=torch.bfloat16)
    assert unit.flat_param.dtype == torch.bfloat16, f"parameters are in bfloat16, but self.weights is in {unit.flat_param.dtype}"
    assert hasattr(unit, "flat_grad"), "there are no gradients: `make_gradients` was not called"
    assert not unit.flat_param.requires_grad, "self.weights has a gradient function: detach the parameters before you join them"
    more = kept(unit) - (2 + 4) * len(unit.flat_param)
    assert more == 0, (
        f"the unit keeps {more} bytes more than self.weights and make_gradients' self.grads: in stage 3 it must be "
        f"possible to free the weights, so only self.weights may hold them: parameters and self.weight_slice are views of it")
    found = unit.flat_param.tolist(), (unit.shard_slice.start, unit.shard_slice.stop), unit.param_shard.tolist()
    gradients = len(getattr(unit, "flat_grad", ()))
    unit.flat_param += 10
    return *found, unit.param_shard.tolist(), values(unit.params), gradients


@rung({"zero.py": ["Zero1Unit.flatten_and_shard"]}, hints="""
    First join all parameters in one flat tensor, then work out how long a slice is. All slices have the same length, so 7
    elements on 3 ranks make slices of 3, and two elements of padding at the end. `self.shard.size()` is the number of ranks and
    `self.shard.rank()` is the number of this rank.

    `torch.cat` joins the parameters, each with `.detach().flatten()`. The length of a slice is rounded up:
    `-(-len(flat) // ranks)`. `nn.functional.pad(flat, (0, n))` adds n zeros at the end. A parameter becomes a view of the flat
    tensor by `param.data = view`; the views come from the rung before.

    With `size` for the length of a slice: `self.my_slice = slice(rank * size, (rank + 1) * size)`;
    `self.weights = nn.functional.pad(flat, (0, ranks * size - len(flat)))`; `self.weight_slice = self.weights[self.my_slice]`; then
    `param.data = view` for each item of `self.views(self.weights)`; at last `self.make_gradients()`.""")
def test_the_slice_of_a_rank(pool):
    """Write `cut`. It puts all self.params into one flat tensor, self.weights, with zeros at the end so that all ranks have slices
    of the same length, the shortest possible. self.my_slice is the rank's slice as a Python slice; self.weight_slice is the view of
    self.weights at self.my_slice; every parameter becomes a view of self.weights. At the end, call self.make_gradients()."""
    expected = {(3, 0): ([1, 2, 3, 4, 5, 6, 7, 0, 0], (0, 3), [1, 2, 3]), (3, 1): ([1, 2, 3, 4, 5, 6, 7, 0, 0], (3, 6), [4, 5, 6]),
                (3, 2): ([1, 2, 3, 4, 5, 6, 7, 0, 0], (6, 9), [7, 0, 0]), (7, 6): ([1, 2, 3, 4, 5, 6, 7], (6, 7), [7])}
    for (ranks, rank), (weights, mine, of_mine) in expected.items():
        (found, found_mine, found_slice, changed_slice, params, gradients), = pool.call(cut_job, STEP, ranks=ranks, rank=rank)
        here = f"with parameters 1 ... 7, on rank {rank} of {ranks},"
        assert found == weights, f"{here} self.weights is {found}, not {weights}"
        assert found_mine == mine, (
            f"{here} self.my_slice goes from {found_mine[0]} to {found_mine[1]}, not from {mine[0]} to {mine[1]}")
        assert found_slice == of_mine, f"{here} self.weight_slice is {found_slice}, not {of_mine}"
        assert params == [[[11, 12], [13, 14]], [15, 16, 17]], (
            f"after self.weights += 10 the parameters are {params}: each must be a view of self.weights, in its shape")
        assert changed_slice == [n + 10 for n in of_mine], "after self.weights += 10 the slice has the old numbers: it is no view"
        assert gradients == len(weights), "there are no gradients of the flat tensor's length: `make_gradients` was not called"


def pieces_job(rank):
    unit = numbered_unit("Zero1Unit", Ranks(5, rank), (2, 2), (2,), (4,), (1,))
    # as in stages 2 and 3, where the whole tensors come and go
    unit.param_shard, unit.grad_shard = unit.param_shard.clone(), unit.grad_shard.clone()
    unit.flat_param.fill_(torch.nan)
    unit.flat_grad = None
    sharded_params = unit.sharded_params()
    found = values(sharded_params)
    whole = {param.placement.num_replicas for param in unit.params}
    assert whole == {10}, (
        f"10 ranks have each parameter, but after pieces() the parameters' own placements say {whole}: give a piece a copy")
    unit.param_shard += 10
    unit.grad_shard += torch.arange(101.0, 104) + 3 * rank
    gradients = [sharded_param.main_grad.tolist() for sharded_param in sharded_params]
    return found, values(sharded_params), gradients, [(sharded_param.placement.decays, sharded_param.placement.num_replicas) for sharded_param in sharded_params]


@rung({"zero.py": ["Zero1Unit.sharded_params"]}, hints="""
    Go through the parameters and keep track of where each begins in the flat tensor. A parameter's piece is its overlap with
    the slice. Without an overlap there is no piece.

    A parameter lies from `start` to `start + param.numel()`, the slice from `self.my_slice.start` to `self.my_slice.stop`.
    The overlap begins at the later of the two starts, and ends at the earlier of the two ends. In `self.weight_slice`
    the indices are smaller by `self.my_slice.start`.

    With `first` and `last` for these two places, and if first < last: `here = slice(first - self.my_slice.start, last -
    self.my_slice.start)`; `piece = nn.Parameter(self.weight_slice[here], requires_grad=False)`; `piece.main_grad =
    self.grad_slice[here]`; and `piece.placement` is `replace(param.placement, times_counted=...)` with the times_counted of
    the parameter divided by `self.shard.size()`.""")
def test_pieces_for_the_optimizer(pool):
    """Write `pieces`. It returns this rank's slice, cut where parameters begin and end: a list of nn.Parameters that are views of
    self.weight_slice. No piece contains padding. Each has a main_grad, the view of the same elements of self.grad_slice, and a copy
    of its parameter's placement with `times_counted` divided by the number of ranks that the unit is sharded over. A rank may have
    only padding, and so no pieces. In stages 2 and 3 the two slices are separate tensors; do not rely on self.grads, or on the
    contents of self.weights."""
    for rank, expected in enumerate([[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9]], [[10], [11]], []]):
        here = f"parameters of 4, 2, 4 and 1 elements, 1 ... 11, have on rank {rank} of 5"
        (found, changed, gradients, placements), = pool.call(pieces_job, STEP, rank=rank)
        assert found == expected, f"{here} the pieces {found}, not {expected} (self.weights is all NaN: do not use it)"
        expected_changed = [[n + 10 for n in sharded_param] for sharded_param in expected]
        assert changed == expected_changed, (
            f"after self.weight_slice += 10 the pieces are {changed}, not {expected_changed}: they must be views of the slice")
        expected_gradients = [[n + 100 for n in sharded_param] for sharded_param in expected]
        assert gradients == expected_gradients, (
            f"with gradients 101 ... 111 the main_grads on rank {rank} are {gradients}, not {expected_gradients}: they must be "
            f"views of self.grad_slice, at the places of the pieces")
        for sharded_param, (decays, times) in zip(expected, placements):
            assert decays == (sharded_param[0] <= 4), f"the piece {sharded_param} has decays={decays}: that is not its own parameter's"
            assert times == 2, (
                f"10 ranks have each parameter, sharded over 5: a piece has times_counted 2, not {times}")


TIMES = (1, 100, 4)                                       # one for each rank; bfloat16 can hold each gradient, but not their sums


def stage_1_job(ranks):
    group, rank = start(ranks)
    unit = numbered_unit("Zero1Unit", group, (3,), (2,), dtype=torch.bfloat16)
    sharded_params = unit.sharded_params()
    with watched(group) as events:
        for _ in range(2):
            add_gradients(unit, TIMES[rank])
        added = unit.flat_grad.tolist()
        work, part = start_reduce_scatter(unit, events)
        assert part is None, "in stage 1 start_reduce returns the work and None: the sums go into self.grad_slice at once"
        work.wait()
        unit.finish_reduce_scatter(part)
        reduced = unit.flat_grad.tolist()
        add_gradients(unit, 1)                            # a gradient of the next step
        again, of_pieces = unit.flat_grad.tolist(), sum((sharded_param.main_grad.tolist() for sharded_param in sharded_params), [])
        unit.param_shard *= -1                           # an update
        events.clear()
        unit.start_all_gather()
        assert hasattr(unit.gather_handle, "wait_for_all_gather"), (
            f"`gather` must leave its all-gather's work in self.gathering, so that self.wait() can wait; it is {unit.gather_handle}")
        assert events.given == unit.param_shard.data_ptr(), "the all-gather was given a copy: give it self.weight_slice itself"
        started = list(events)
        unit.wait_for_all_gather()
    return rank, added, reduced, (again, of_pieces), started, values(unit.params)


@rung({"zero.py": ["Zero1Unit.accumulate_grad", "Zero1Unit.start_reduce_scatter", "Zero1Unit.finish_reduce_scatter", "Zero1Unit.start_all_gather"]}, hints="""
    An all-reduce is a reduce-scatter followed by an all-gather. In stage 1 the optimizer's update comes in between: the first
    sums gradients, of which each rank gets its slice; the second collects the slices of the weights. Both are called with
    async_op=True, and so return a work that can be waited for later. Backward goes on meanwhile, so do not wait here.

    `self.grad_views[param]` is the place of a parameter's gradient in `self.grads`. The two collectives are
    `dist.reduce_scatter_tensor(output, input, group=self.shard, async_op=True)` and `dist.all_gather_into_tensor(output, input,
    group=self.shard, async_op=True)`. After the first, self.grads has sums only in the slice; the rest is this rank's own
    and must not be added to the next step's.

    add_gradient: `self.grad_views[param].add_(param.grad)`. start_reduce: return the work of reduce_scatter_tensor with
    self.grad_slice as output and self.grads as input, and None. finish_reduce: `.zero_()` on self.grads before
    self.my_slice.start, and on self.grads from self.my_slice.stop on. gather: `self.gathering` is the work of
    all_gather_into_tensor with self.weights as output and self.weight_slice as input.""")
def test_an_update_between_the_two_halves(pool):
    """Write the methods of stage 1. `add_gradient` adds param.grad to the parameter's part of self.grads. `start_reduce` starts to
    sum self.grads over the ranks of the group self.shard into self.grad_slice, and returns the work and None, without waiting.
    `finish_reduce` is called when that is done, and zeroes all of self.grads except this rank's slice. `gather` starts to gather
    the slices of the same ranks into self.weights, and leaves the work in self.gathering. Copy nothing."""
    for ranks, world in ((2, 4), (3, 3)):
        size = 6 // ranks
        total = sum(TIMES[:ranks])
        for rank, added, reduced, (again, of_pieces), started, params in pool.call(stage_1_job, STEP, world=world, ranks=ranks):
            here = f"{world} ranks in groups of {ranks}, rank {rank} of its group:"
            expected = [n * 2 * TIMES[rank] for n in (1, 2, 3, 4, 5, 0)]
            assert added == expected, (
                f"{here} self.grads is {added} after two gradients {TIMES[rank]} ... {5 * TIMES[rank]}, not {expected}")
            mine = range(rank * size, rank * size + size)
            expected = [n * 2 * total if i in mine else 0 for i, n in enumerate((1, 2, 3, 4, 5, 0))]
            assert reduced == expected, (
                f"{here} after finish_reduce self.grads is {reduced}, not {expected} (weights in bfloat16, sums in float32)")
            expected = [old + n for old, n in zip(reduced, (1, 2, 3, 4, 5, 0))]
            assert again == expected, (
                f"{here} gradients of the next step, 1 ... 5, turn self.grads {reduced} into {again}, not {expected} (in float32)")
            expected = [again[i] for i in mine if i < 5]
            assert of_pieces == expected, (
                f"{here} then the main_grads of the pieces are {of_pieces}, not {expected}: self.grads and self.grad_slice must "
                f"stay the same tensors, which change in place")
            assert started == ["start_all_gather"], (
                f"{here} `gather` must start one dist.all_gather_into_tensor and leave the waiting to self.wait(); it did "
                f"{in_words(started)}")
            assert params == [[-1, -2, -3], [-4, -5]], (
                f"{here} each rank has negated its slice of 1 ... 5; after `gather` the parameters are {params}")


# ------------------------------------------------------------------------------------------------ a small model, on every rank
class Product(torch.autograd.Function):
    """Sums x times each element. The elements add up to 1 or to 2, so the gradients can be worked out by hand."""

    @staticmethod
    def forward(ctx, x, weight, block):
        block.computes("forward", weight.unit)
        ctx.block, ctx.unit = block, weight.unit
        ctx.save_for_backward(x, weight)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            ctx.block.computes("backward", ctx.unit)
            grad_x = grad * weight.sum()
        return grad_x, (grad * x).repeat(weight.shape), None


class Times(nn.Module):
    """A block with weights of these sizes."""

    def __init__(self, number, events, sizes):
        super().__init__()
        self.number, self.events = number, events
        self.flat_param = nn.ParameterList(torch.eye(1, size)[0] for size in sizes)

    def forward(self, x):
        for weight in [*self.flat_param[1:], self.flat_param[0]]:          # so that backward has no order to rely on
            x = Product.apply(x, weight, self)
        return x

    def computes(self, what, unit):
        assert memory(unit.flat_param) > 0, f"block {self.number} computes its {what}, but its weights are not there"
        assert unit.gather_handle is None, f"block {self.number} computes its {what}, but nobody has waited for its weights"
        if f"{what} {self.number}" not in self.events:
            self.events.append(f"{what} {self.number}")


def small_model(stage, micro_batches, group, events, *blocks):
    """Make a model of blocks with weights of these sizes, each a unit. Return it with its Zero."""
    import zero
    from placement import Placement
    model = nn.Sequential(*(Times(i, events, sizes) for i, sizes in enumerate(blocks)))
    for block in model:
        unit, args = new_unit({1: "Zero1Unit", 3: "Zero3Unit"}[stage], [block], list(block.flat_param), group, stage, micro_batches)
        for param in block.flat_param:
            param.placement = Placement(num_replicas=group.size(), decays=True)
            unit.add_to_unit(param)
    return model, zero.Zero(model, None, args)


def collect_job(stage):
    group, rank = start()
    with watched(group, {10: "0", 20: "1", 30: "2"}) as events:
        model, zero = small_model(1, 2, group, events, (4, 3, 3), (20,), (30,))
        zero.stage = stage                                # units are of stage 1: only the order matters here
        steps = []
        for _ in range(2):
            reduced = []
            for x in (1.0, 2.0):
                events.clear()
                model(torch.tensor(x * 10 ** rank)).backward()
                reduced.append([event for event in events if "reduce" in event])
            under_way = len(zero.reduce_scatters)
            left = sum(param.grad is not None for param in model.parameters())
            zero.finish_grad_reduction()
            steps.append((reduced, under_way, left, [sorted(set(unit.grad_shard.tolist())) for unit in zero.units]))
            for unit in zero.units:                       # as the optimizer does
                unit.grad_shard.zero_()
    return steps


def assert_in_order(came, expected, what):
    for i, (a, b) in enumerate(zip([*came, "nothing"], [*expected, "nothing"])):
        before = f"after {', '.join(expected[max(0, i - 3):i])}" if i else "at the beginning"
        assert a == b, f"{what}, {before}: expected {b}, got {a}"


def assert_collected(stage, steps):
    expected, left_over = ["reduce 2", "reduce 1", "wait_for_all_gather for reduce 2", "reduce 0", "wait_for_all_gather for reduce 1"], 1
    if stage == 1:
        expected, left_over = ["reduce 2", "reduce 1", "reduce 0"], 3
    for step, ((first, last), under_way, left, slices) in enumerate(steps, 1):
        where = f"stage {stage}, step {step}"
        assert first == [], f"{where}: {', '.join(first)} happened in the first of two micro-batches, not in the last"
        assert_in_order(last, expected, f"{where}, reductions in the last backward (a transfer runs while the next unit "
                                        f"computes its backward)")
        assert under_way == left_over, f"{where}: after backward {under_way} reductions are under way; expected {left_over}"
        assert left == 0, f"{where}: {left} parameters have a param.grad after backward; expected None"
        assert slices == [[33]] * 3, (
            f"{where}: all gradients are 1 + 2 on rank 0 and 10 + 20 on rank 1, so 33 in all; the slices have {slices}")


@rung({"zero.py": ["Zero.post_accumulate_grad", "Zero.finish_oldest"]}, hints="""
    `collect` is called by a hook, once for each parameter in each backward. So it can count: when does a unit have all gradients of
    the last micro-batch?

    `unit.backwards_per_reduce` says how many micro-batches are added up. So a unit is complete when `unit.arrived` is
    `len(unit.params) * unit.backwards_per_reduce`; then the count begins again at 0. Append to `self.under_way` all that
    finish_oldest will need: the unit, the work, and whatever else start_reduce returned.

    collect: `unit = param.unit`; `unit.add_gradient(param)`; `param.grad = None`; add 1 to unit.arrived; if it is complete, set it
    to 0, `self.under_way.append((unit, *unit.start_reduce()))`, and if now `self.stage > 1` and `len(self.under_way) > 1` call
    `self.finish_oldest()`.
    finish_oldest: `unit, work, part = self.under_way.pop(0)`; `work.wait()`; `unit.finish_reduce(part)`.""")
def test_a_unit_is_reduced_when_it_is_complete(pool):
    """Write `collect(param)`, which is called when backward has made param.grad. Give the gradient to the parameter's unit and set
    param.grad to None. If it is the unit's last gradient in the last micro-batch, start the unit's reduction while backward goes
    on. The gradients of a unit may come in any order. In stage 1 that is all: after backward, sum_gradients finishes the reductions
    (self.under_way). In stages 2 and 3 each reduction will hold a buffer. So there, if two are under way now, finish the older one,
    which has had all of this unit's backward to travel in: `finish_oldest` waits for it and calls the unit's finish_reduce."""
    for stage in (1, 2, 3):
        for steps in pool.call(collect_job, STEP, stage=stage, world=2):
            assert_collected(stage, steps)


def stage_2_job():
    group, rank = start()
    unit = numbered_unit("Zero2Unit", group, (3,), (2,), dtype=torch.bfloat16)
    sharded_params, least = unit.sharded_params(), kept(unit)
    with watched(group) as events, nothing_is_zero():
        add_gradients(unit, 100 ** rank)
        work, part = start_reduce_scatter(unit, events)
        gone = unit.flat_grad is None, kept(unit) - least
        add_gradients(unit, 2 * 100 ** rank)              # the second micro-batch begins before the first is summed
        second = unit.flat_grad.tolist()
        work.wait()
        unit.finish_reduce_scatter(part)
        once = unit.grad_shard.tolist()
        work, part = start_reduce_scatter(unit, events)
        work.wait()
        unit.finish_reduce_scatter(part)
    of_pieces = sum((sharded_param.main_grad.tolist() for sharded_param in sharded_params), [])
    wide = numbered_unit("Zero2Unit", group, (3,), dtype=torch.float64)
    add_gradients(wide, 1)
    found = wide.grads.dtype
    assert found == torch.float64, f"weights and self.grad_slice are in float64, but self.grads is in {found}"
    work, part = wide.start_reduce_scatter()
    work.wait()
    assert part.dtype == torch.float64, f"weights are in float64, but the new tensor for the sums is in {part.dtype}"
    return rank, gone, second, once, unit.grad_shard.tolist(), of_pieces


@rung({"zero.py": ["Zero2Unit.accumulate_grad", "Zero2Unit.start_reduce_scatter", "Zero2Unit.finish_reduce_scatter"]}, hints="""
    Stage 1 adds up whole gradients and reduces once. Stage 2 reduces the whole gradients of every micro-batch and adds up slices.
    So self.grads exists only from the first gradient of a micro-batch to its reduction.

    `make_gradients` of Unit2, which is there, sets self.grads to None. The first add_gradient has to make self.grads and
    self.grad_views; the rest is as in stage 1: `super().add_gradient(param)`. The sums cannot go into self.grad_slice, which
    has the sum of earlier micro-batches: they need a tensor of their own.

    add_gradient: if self.grads is None, make it, `torch.zeros_like(self.weights, dtype=self.grad_slice.dtype)`, and
    `self.grad_views = self.views(self.grads)`. start_reduce: `part = torch.empty_like(self.grad_slice)`; start the
    reduce-scatter of self.grads into part; set self.grads and self.grad_views to None; return the work and part. finish_reduce:
    `self.grad_slice += part`.""")
def test_only_the_slice_of_the_gradients_is_kept(pool):
    """Write the methods of stage 2. `add_gradient` makes self.grads and self.grad_views if there are none; as in stage 1 they
    are in float32 if the weights are in bfloat16 (in the dtype of self.grad_slice), and include the padding. `start_reduce`
    starts to sum self.grads over the ranks of self.shard into a new tensor of the slice's length, and returns the work and this
    tensor, without waiting; then self.grads and self.grad_views are None, and nothing else in the unit holds their memory.
    `finish_reduce` adds the new tensor to self.grad_slice, which holds the sum of all micro-batches, and which the optimizer's
    pieces are views of."""
    for rank, (gone, more), second, once, twice, of_pieces in pool.call(stage_2_job, STEP, world=4):
        assert gone, "after start_reduce self.grads must be None: later gradients belong to the next micro-batch"
        assert more == 0, (
            f"after start_reduce the unit still refers to {more} bytes more than weights and slice: self.grad_views are views of "
            f"self.grads, and hold its memory too; return the new tensor, but do not keep it")
        expected = [n * 2 * 100**rank for n in (1, 2, 3, 4, 5, 0)]
        assert second == expected, f"self.grads in the second micro-batch is {second}, not {expected}"
        expected = [[101, 202, 303], [404, 505, 0]][rank]
        assert once == expected, (
            f"after one micro-batch rank {rank} has self.grad_slice {once}, not {expected} (weights in bfloat16, sums in float32)")
        expected = [3 * n for n in expected]
        assert twice == expected, f"after two, the second with gradients twice as large, it has {twice}, not {expected}"
        expected = expected[:3 - rank]
        assert of_pieces == expected, (
            f"self.grad_slice is right, but the main_grads of the pieces are {of_pieces}: add to it in place: they are its views")


def stage_3_job():
    group, rank = start()
    unit = numbered_unit("Zero3Unit", group, (3,), (2,), dtype=torch.bfloat16)
    least, size = kept(unit), memory(unit.param_shard)
    assert size == 6, f"after cut self.weight_slice has {size} bytes of storage; a separate tensor of 3 bfloat16 elements has 6"
    found = [memory(unit.flat_param), unit.param_shard.tolist()]
    assert least == 6 + 12, (
        f"after cut the unit keeps {least} bytes; the slices of weights and float32 gradients have 6 and 12")
    with watched(group) as events:
        unit.unshard()
        assert unit.gather_handle is not None, (
            f"gather_if_released did {in_words(events)}: it must start to gather, and leave the waiting to self.wait()")
        unit.wait_for_all_gather()
        size = memory(unit.flat_param)
        assert size == 12, f"after the gather, self.weights' storage has {size} bytes; 6 elements in bfloat16 have 12"
        found += [values(unit.params), events.count("start_all_gather")]
        unit.unshard()
        unit.wait_for_all_gather()
        found.append(events.count("start_all_gather"))
        add_gradients(unit, 100 ** rank)
        work, part = start_reduce_scatter(unit, events)
        found.append(memory(unit.flat_param))
        work.wait()
        unit.finish_reduce_scatter(part)
        sums, more = unit.grad_shard.tolist(), kept(unit) - least
        unit.param_shard *= -1                           # an update
        unit.unshard()
        unit.wait_for_all_gather()
    return rank, (sums, more), *found, values(unit.params)


@rung({"zero.py": ["Zero3Unit.flatten_and_shard", "Zero3Unit.reshard", "Zero3Unit.unshard", "Zero3Unit.start_reduce_scatter"]}, hints="""
    Parameters and autograd refer to self.weights, so the tensor cannot be deleted. But its storage, the memory that all its views
    share, can be made empty, and full size again. In stage 1 the slice is a view of the whole; if the whole is dropped, the slice
    has to be a tensor of its own.

    `storage = self.weights.untyped_storage()` has `storage.nbytes()` and `storage.resize_(number of bytes)`. `self.weights.nbytes`
    says how many bytes the tensor needs, also when its storage is empty. All the rest is there already: `super().cut()`,
    `self.gather()`, `super().start_reduce()`.

    cut: `super().cut()`; `self.weight_slice = self.weight_slice.clone()`; `self.release()`. release:
    `self.weights.untyped_storage().resize_(0)`. gather_if_released: if storage.nbytes() is 0, call
    `storage.resize_(self.weights.nbytes)` and `self.gather()`. start_reduce: `self.release()`, and return what
    `super().start_reduce()` returns.""")
def test_weights_are_dropped_and_come_back(pool):
    """Write the methods of stage 3. `cut` does what it does in stage 1, then keeps only the slice: self.weight_slice is a separate
    tensor, and the whole weights are released. `release` empties the storage of self.weights. `gather_if_released` does nothing if
    the weights are there; otherwise it gives the storage its full size and starts to gather, without waiting. `start_reduce`
    releases the weights, because the unit's backward is over, and does what it does in stage 2."""
    for rank, (sums, more), *answer in pool.call(stage_3_job, STEP, world=4):
        whole, shard_slice, params, once, again, after_backward, updated = answer
        assert whole == 0, f"after cut the storage of self.weights has {whole} bytes; expected 0"
        expected = [[1, 2, 3], [4, 5, 0]][rank]
        assert shard_slice == expected, f"after cut rank {rank} has self.weight_slice {shard_slice}, not {expected}"
        assert params == [[1, 2, 3], [4, 5]], f"after the gather, the parameters are {params}, not [[1, 2, 3], [4, 5]]"
        assert (once, again) == (1, 1), (
            f"only the first of two calls must gather; expected 1 and 1 all-gathers after them, got {once} and {again}")
        assert after_backward == 0, f"start_reduce must release the weights; their storage has {after_backward} bytes"
        assert more == 0, f"after the reduction the unit keeps {more} bytes more than after cut"
        expected = [[101, 202, 303], [404, 505, 0]][rank]
        assert sums == expected, (
            f"gradients 1 ... 5 and 100 ... 500 sum to {sums} in self.grad_slice of rank {rank}, not {expected}")
        assert updated == [[-1, -2, -3], [-4, -5]], (
            f"each rank has negated its slice of 1 ... 5; gathered again, the parameters are {updated}")


def needed_job():
    group, rank = start()
    blocks, steps = [(10,), (20,), (30,), (40,), (50,)], []
    names = {sum(sizes): str(i) for i, sizes in enumerate(blocks)}
    with watched(group, names) as events:
        model, zero = small_model(3, 1, group, events, *blocks)
        note, kind = Times.computes, type(zero.units[0])
        release = kind.release

        def noted(self, what, unit):
            if f"{what} {self.number}" not in events:
                there = [names[len(unit.flat_param)] for unit in zero.units if memory(unit.flat_param) > 0]
                coming = [names[len(unit.flat_param)] for unit in zero.units if unit.gather_handle is not None]
                at.append((f"{what} {self.number}", there, coming))
            note(self, what, unit)

        def arrived(unit):
            name = names[len(unit.flat_param)]
            assert unit.gather_handle is None, f"unit {name} is released while it is being gathered, so the gather was for nothing"
            release(unit)
        with patch.object(Times, "computes", noted), patch.object(kind, "reshard", arrived):
            for _ in range(2):
                at = []
                events.clear()
                loss = model(torch.tensor(1.0 + 9 * rank))
                loss.backward()
                zero.finish_grad_reduction()
                order = [event for event in events if "reduce" not in event and "wait_for_all_gather" not in event]
                steps.append((order, at, loss.item(), [sorted(set(unit.grad_shard.tolist())) for unit in zero.units]))
                for unit in zero.units:
                    unit.grad_shard.zero_()
                    unit.param_shard *= 2                # in place of the update
    return steps


IN_ORDER = ["start_all_gather 0", "start_all_gather 1", "forward 0", "start_all_gather 2", "forward 1", "start_all_gather 3", "forward 2", "start_all_gather 4", "forward 3",
            "forward 4", "backward 4", "start_all_gather 2", "backward 3", "start_all_gather 1", "backward 2", "backward 1"]
COMING = {"forward 0": ["1"], "forward 1": ["2"], "forward 2": ["3"], "forward 3": ["4"], "backward 3": ["2"], "backward 2": ["1"]}
HOOKS = ["gather_when_needed." + name for name in ("need", "before_forward", "before_backward", "after_forward")]


@rung({"zero.py": HOOKS}, hints="""
    Think of a row of units: the embedding, the blocks, the head. When unit 3 computes in forward, unit 4 should be on its way; in
    backward, unit 2. `gather_when_needed` registers the hooks at its end; their bodies are missing.

    `need`: ask for the weights of unit i (`units[i].gather_if_released()`), wait for them (`units[i].wait()`), and only then ask
    for those of unit `following`. There may be no such unit: after the last unit in forward, and in backward after unit 1,
    since unit 0, the embedding, needs no weights in backward. `output.register_hook(f)` calls f(gradient of the output), when the
    backward of the unit begins.

    need: the two calls for `units[i]`; then, if `0 < following < len(units)`, `units[following].gather_if_released()`.
    before_forward: `need(i, i + 1)`. before_backward: `need(i, i - 1)`. after_forward: if i > 0, `output.register_hook(lambda grad:
    before_backward(i))`; then `units[i].release()` if `i < len(units) - 2`, because backward begins with the last two.""")
def test_weights_come_when_they_are_needed(pool):
    """Write the hooks. `need(i, following)` asks for the weights of unit i, waits for them, and then asks for those of unit
    `following`, which arrive while unit i computes. `before_forward(i)` and `before_backward(i)` call it with the unit that comes
    next in forward and in backward; in backward, unit 0 needs no weights. `after_forward(i, output)` arranges for
    before_backward(i) to be called when the backward of the unit begins, but not for unit 0; and it releases the unit, unless it is
    one of the last two."""
    for rank, steps in enumerate(pool.call(needed_job, STEP, world=2)):
        for step, (order, at, loss, slices) in enumerate(steps, 1):
            for when, there, _ in at:
                assert len(there) <= 2, (
                    f"step {step}, {when}: the weights of units {', '.join(there)} are whole; expected two at most")
            assert_in_order(order, IN_ORDER, f"step {step}")
            for when, _, coming in at:
                expected = COMING.get(when, [])
                assert coming == expected, (
                    f"step {step}, {when}: units under way should be {in_words(expected)}, but are {in_words(coming)}; "
                    f"ask for the next unit, but do not wait for it")
            expected = (1 + 9 * rank) * 32 ** (step - 1)
            assert loss == expected, f"step {step}: rank {rank} has the loss {loss}, not {expected}"
            expected = 11 * 16 ** (step - 1)
            assert slices == [[expected]] * 5, f"step {step}: all gradients are {expected}; the slices of the units have {slices}"


@pytest.mark.slow
@rung({"zero.py": ["formula"]}, hints="""
    For each unit there are two questions: how often is it gathered in a training step, and how often is it reduced? The README's
    section "What it costs" answers them for each stage. The norm of the gradients is one number, summed over all ranks.

    Return a list of (group, collective, bytes); call these "all_reduce", "all_gather" or "reduce_scatter". Payload is the
    whole tensor that is gathered or scattered. Weights have `unit.weights.nbytes`. Gradients have `unit.grad_slice.nbytes *
    unit.shard.size()`; they may be wider than the weights. `units_of(model)` is the list of the units, in the order of forward.
    In stage 3 all units are gathered in forward, and in backward all but the first one and the last two.

    Begin with `(dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize)`; without ZeRO that is
    all. The micro-batches are `m = args.global_batch_size // (args.micro_batch_size * args.dp)`. Gathers of unit i: 1 in stages 1
    and 2; in stage 3 it is 2 m if 0 < i < len(units) - 2, else m. Reduces: 1 in stage 1, else m. Each unit adds (unit.shard,
    "all_gather", gathers times its bytes) and (unit.shard, "reduce_scatter", reduces times its bytes); and if
    unit.replicate.size() > 1, (unit.replicate, "all_reduce", unit.grad_slice.nbytes).""")
@pytest.mark.parametrize("world, flags", [
    (3, "float64 --zero 1"), (3, "float64 --zero 2"), (3, "float64 --zero 3"), (4, "float64 --zero 1 --zero_shard 2"),
    (4, "float64 --zero 3 --zero_shard 2"), (3, "bfloat16 --zero 3"), (2, "float64 --zero 0")])
def test_a_training_run(pool, world, flags):
    """Write `formula`. It returns what one training step sends, as a list of (group, collective, payload bytes), which must equal
    the ledger's bytes. Four steps on three ranks must give the losses, gradient norms and weights of one process, in each stage,
    and so must four ranks with --zero_shard 2. With --zero 0 only the gradient norm is listed: data_parallel.py counts the rest.
    With --zero_shard, the ranks that have the same slice, unit.replicate, all-reduce its gradients once per step. Padding is sent
    too."""
    micro_batch_size = {2: 6, 3: 4, 4: 2}[world]          # 2, 2 and 3 micro-batches
    flags = f"--recompute none --micro_batch_size {micro_batch_size} --dtype {flags}"
    check(pool, layouts.Layout(STEP, world, "dense-3", "adamw", flags))
