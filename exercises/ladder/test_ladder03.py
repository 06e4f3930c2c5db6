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
from prove import unforgiving
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
    """Return a unit of these parameters that does not have them yet, and the flags."""
    import zero
    ranks = group.size()
    args = SimpleNamespace(zero=stage, global_batch_size=ranks * micro_batches, micro_batch_size=1, dp=ranks, dtype=params[0].dtype)
    mesh = SimpleNamespace(get_all_groups=lambda: [Ranks(1, 0), group])
    return getattr(zero, kind)(modules, len(params), mesh, args), args


def shard(unit, params):
    """Give a unit its parameters, and shard it."""
    unit.params = params
    for param in params:
        param.unit = unit
    unit.flatten_and_shard()


def start(ranks=2):
    """Return this rank's group, and its rank there. With four ranks, 0 and 1 are one group, 2 and 3 the other."""
    dist.init_process_group("gloo")
    group, _ = dist.new_subgroups(ranks)
    dist.barrier()                                        # no group may end while the other still connects
    return group, group.rank()


def of_the_group_only():
    """Without process groups, let dist.get_rank and dist.get_world_size answer for a unit's group, and say so for the world."""
    def asked(name, method):
        def answer(group=None):
            assert group, f"dist.{name}() asks for the world; a unit is sharded over the ranks of self.shard_group"
            return getattr(group, method)()
        return answer
    return patch.multiple(dist, get_rank=asked("get_rank", "rank"), get_world_size=asked("get_world_size", "size"))


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
        param.placement = Placement(num_replicas=2 * group.size(), decays=i == 0, data_mesh=None)
    shard(unit, params)
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
        f"start_reduce_scatter must start one dist.reduce_scatter_tensor and not wait for it; it did {in_words(events)}")
    assert events.given == grads, (
        "the reduce-scatter was given a tensor that is not self.flat_grad: a copy takes as much memory as all gradients of the "
        "unit")
    assert type(returned) is tuple and len(returned) == 2 and hasattr(returned[0], "wait"), (
        f"start_reduce_scatter returned {returned}; expected two things: the handle of the collective that it started, and the "
        "shard that will hold the sum")
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
    """The handle of a collective. It notes when it is waited for."""

    def __init__(self, handle, events, name):
        self.handle, self.events, self.name = handle, events, name

    def wait(self):
        self.events.append(f"wait for {self.name}")
        try:
            self.handle.wait()
        except AssertionError as error:
            raise AssertionError(f"{error}; was {self.name} started too early (a reduction: before the unit's last gradient), or "
                                 "were its tensors used, zeroed or freed before this wait?") from None

    def is_completed(self):
        return self.handle.is_completed()


@contextlib.contextmanager
def watched(group, names=None):
    """Yield a list of what is started and waited for: "reduce", "gather", or, given names by the whole tensor's length, "reduce 2".
    As over nccl, an operation's result is not there before its wait."""
    events = Events()

    def noted(what, collective, whole):
        def start_it(*args, **kwargs):
            call = f"dist.{collective.__name__}"
            groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
            assert groups == [group], f"{call} must be called with group=self.shard_group"
            assert kwargs.get("async_op"), f"{call} waits at once: async_op=True returns a handle that you can wait for later"
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                assert memory(tensor) >= tensor.nbytes, (
                    f"{call} was given a tensor that needs {tensor.nbytes} bytes, but its storage was resized to {memory(tensor)}")
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
    others = "all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "gather", "scatter", "all_to_all_single"
    with unforgiving.unforgiving(), patch.object(unforgiving, "caller", caller):
        ours = dict(reduce_scatter_tensor=noted("reduce", dist.reduce_scatter_tensor, 1),
                    all_gather_into_tensor=noted("gather", dist.all_gather_into_tensor, 0))
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
    assert isinstance(views, dict), f"views returned {views}; expected a dictionary"
    assert all(param in views for param in params), "views returned a dictionary whose keys are not the parameters of self.params"
    found = values(views[param] for param in params)
    views[params[1]].zero_()
    return found, flat.tolist()


@rung({"zero.py": ["Zero1Unit.views"]}, hints="""
    The parameters lie in the flat tensor one after the other, in the order of `self.params`. Each of them has
    `param.numel()` elements there. After the last one there is padding.

    `tensor.split([4, 3])` gives two views, of 4 and of 3 elements; the sizes have to add up to the length of the tensor.
    `chunk.view(shape)` gives a chunk the shape of its parameter, and copies nothing.

    Make a list `sizes` of all `param.numel()`. Then `chunks = flat[:sum(sizes)].split(sizes)`, and return a dictionary with
    `param: chunk.view(param.shape)` for each pair of `zip(self.params, chunks)`.""")
def test_parameters_in_a_flat_tensor(pool):
    """Write `views(flat)`. It returns a dictionary that maps each of self.params to the view of its part of the flat tensor, in the
    parameter's shape. The flat tensor may be longer than all parameters together, and of another dtype: gradients of bfloat16
    parameters are added up in float32."""
    (found, flat), = pool.call(views_job, STEP)
    expected = [[[0, 1], [2, 3]], [4, 5, 6]]
    assert found == expected, f"in the flat tensor 0 1 ... 7, parameters of shapes [2, 2] and [3] have {found}, not {expected}"
    assert flat == [0, 1, 2, 3, 0, 0, 0, 7], (
        f"writing to a parameter's view must write to the flat tensor; after zeros for the second one it has {flat}")


def shard_job(ranks, rank):
    params = numbered((2, 2), (3,), dtype=torch.bfloat16)
    unit, _ = new_unit("Zero1Unit", [], params, Ranks(ranks, rank))
    with of_the_group_only():
        shard(unit, list(params))
    assert unit.flat_param.dtype == torch.bfloat16, f"parameters are in bfloat16, but self.flat_param is in {unit.flat_param.dtype}"
    assert hasattr(unit, "flat_grad"), "there are no gradients: `allocate_grads` was not called"
    assert not unit.flat_param.requires_grad, "self.flat_param has a gradient function: detach the parameters before you join them"
    more = kept(unit) - (2 + 4) * len(unit.flat_param)
    assert more == 0, (
        f"the unit keeps {more} bytes more than self.flat_param and allocate_grads' self.flat_grad: in stage 3 it must be possible "
        "to free the weights, so only self.flat_param may hold them: parameters and self.param_shard are views of it")
    found = unit.flat_param.tolist(), (unit.shard_slice.start, unit.shard_slice.stop), unit.param_shard.tolist()
    gradients = len(getattr(unit, "flat_grad", ()))
    unit.flat_param += 10
    return *found, unit.param_shard.tolist(), values(params), gradients


@rung({"zero.py": ["Zero1Unit.flatten_and_shard"]}, hints="""
    First join all parameters in one flat tensor, then work out how long a shard is. All shards have the same length, so 7
    elements on 3 ranks make shards of 3, and two elements of padding at the end. `self.shard_group.size()` is the number of ranks
    and `self.shard_group.rank()` is the number of this rank.

    `torch.cat` joins the parameters, each with `.detach().flatten()`. The length of a shard is rounded up:
    `-(-len(flat) // num_shards)`. `nn.functional.pad(flat, (0, n))` adds n zeros at the end. A parameter becomes a view of the flat
    tensor by `param.data = view`; the views come from the rung before.

    With `size` for the length of a shard: `self.shard_slice = slice(rank * size, (rank + 1) * size)`;
    `self.flat_param = nn.functional.pad(flat, (0, num_shards * size - len(flat)))`; `self.param_shard =
    self.flat_param[self.shard_slice]`; then `param.data = view` for each item of `self.views(self.flat_param)`; finally
    `self.allocate_grads()`.""")
def test_the_shard_of_a_rank(pool):
    """Write `flatten_and_shard`. It puts all self.params into one flat tensor, self.flat_param, with zeros at the end so that all
    ranks have shards of the same length, the shortest possible. self.shard_slice is a Python slice, the place of this rank's shard;
    self.param_shard is the view of self.flat_param there; every parameter becomes a view of self.flat_param. At the end, call
    self.allocate_grads()."""
    expected = {(3, 0): ([1, 2, 3, 4, 5, 6, 7, 0, 0], (0, 3), [1, 2, 3]), (3, 1): ([1, 2, 3, 4, 5, 6, 7, 0, 0], (3, 6), [4, 5, 6]),
                (3, 2): ([1, 2, 3, 4, 5, 6, 7, 0, 0], (6, 9), [7, 0, 0]), (7, 6): ([1, 2, 3, 4, 5, 6, 7], (6, 7), [7])}
    for (ranks, rank), (weights, mine, of_mine) in expected.items():
        (found, found_mine, found_slice, changed_slice, params, gradients), = pool.call(shard_job, STEP, ranks=ranks, rank=rank)
        here = f"with parameters 1 ... 7, on rank {rank} of {ranks},"
        assert found == weights, f"{here} self.flat_param is {found}, not {weights}"
        assert found_mine == mine, (
            f"{here} self.shard_slice goes from {found_mine[0]} to {found_mine[1]}, not from {mine[0]} to {mine[1]}")
        assert found_slice == of_mine, f"{here} self.param_shard is {found_slice}, not {of_mine}"
        assert params == [[[11, 12], [13, 14]], [15, 16, 17]], (
            f"after self.flat_param += 10 the parameters are {params}: each nn.Parameter must be a view of self.flat_param, in its "
            "shape; the model has these objects, so do not replace them by others")
        assert changed_slice == [n + 10 for n in of_mine], (
            "after self.flat_param += 10, self.param_shard has the old numbers: it is not a view")
        assert gradients == len(weights), (
            "there are no gradients of the flat tensor's length: `allocate_grads` was not called")


def sharded_params_job(rank):
    unit = numbered_unit("Zero1Unit", Ranks(5, rank), (2, 2), (2,), (4,), (1,))
    # as in stages 2 and 3, where the whole tensors come and go
    unit.param_shard, unit.grad_shard = unit.param_shard.clone(), unit.grad_shard.clone()
    unit.flat_param.fill_(torch.nan)
    unit.flat_grad = None
    with of_the_group_only():
        sharded_params = unit.sharded_params()
    found = values(sharded_params)
    whole = {param.placement.num_replicas for param in unit.params}
    assert whole == {10}, (
        "10 ranks have each parameter, but after sharded_params() the parameters' own placements say "
        f"{whole}: give a sharded parameter a copy")
    unit.param_shard += 10
    unit.grad_shard += torch.arange(101.0, 104) + 3 * rank
    gradients = [param.main_grad.tolist() for param in sharded_params]
    placements = [(param.placement.decays, param.placement.num_replicas) for param in sharded_params]
    return found, values(sharded_params), gradients, placements


@rung({"zero.py": ["Zero1Unit.sharded_params"]}, hints="""
    Go through the parameters and keep track of where each begins in the flat tensor. What this rank updates of a parameter is the
    overlap of the parameter with the shard. Without an overlap there is no sharded parameter.

    A parameter lies from `offset` to `offset + param.numel()`, the shard from `self.shard_slice.start` to
    `self.shard_slice.stop`. The overlap begins at the later of the two starts, and ends at the earlier of the two ends. In
    `self.param_shard` the indices are smaller by `self.shard_slice.start`.

    With `start` and `stop` for these two places, and if start < stop: `local = slice(start - self.shard_slice.start, stop -
    self.shard_slice.start)`; `sharded_param = nn.Parameter(self.param_shard[local], requires_grad=False)`;
    `sharded_param.main_grad = self.grad_shard[local]`; and `sharded_param.placement` is `replace(param.placement,
    num_replicas=...)` with the num_replicas of the parameter divided by `self.shard_group.size()`.""")
def test_sharded_parameters_for_the_optimizer(pool):
    """Write `sharded_params`. It returns this rank's shard, split where parameters begin and end: a list of nn.Parameters that are
    views of self.param_shard. None of them contains padding. Each has a main_grad, the view of the same elements of
    self.grad_shard, and a copy of its parameter's placement with `num_replicas` divided by the number of ranks that the unit is
    sharded over. A rank may have only padding, and so an empty list. (Ours then has one parameter without elements, because an
    optimizer needs one.) In stages 2 and 3 the two shards are separate tensors; do not rely on self.flat_grad, or on the contents
    of self.flat_param."""
    for rank, expected in enumerate([[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9]], [[10], [11]], []]):
        here = f"parameters of 4, 2, 4 and 1 elements, 1 ... 11, have on rank {rank} of 5"
        (found, changed, gradients, placements), = pool.call(sharded_params_job, STEP, rank=rank)
        if not expected and found == [[]]:                # as ours
            continue
        assert found == expected, (
            f"{here} the sharded parameters {found}, not {expected} (self.flat_param is all NaN: do not use it)")
        expected_changed = [[n + 10 for n in numbers] for numbers in expected]
        assert changed == expected_changed, (
            f"after self.param_shard += 10 the sharded parameters are {changed}, not {expected_changed}: they must be views of it")
        expected_gradients = [[n + 100 for n in numbers] for numbers in expected]
        assert gradients == expected_gradients, (
            f"with gradients 101 ... 111 the main_grads on rank {rank} are {gradients}, not {expected_gradients}: they must be "
            f"views of self.grad_shard, at the same places")
        for numbers, (decays, replicas) in zip(expected, placements):
            assert decays == (numbers[0] <= 4), f"the sharded parameter {numbers} has decays={decays}: that is not its parameter's"
            assert replicas == 2, f"10 ranks have each parameter, sharded over 5: a sharded one has num_replicas 2, not {replicas}"


TIMES = (1, 100, 4)                                       # one for each rank; bfloat16 can hold each gradient, but not their sums


def stage_1_job(ranks):
    group, rank = start(ranks)
    unit = numbered_unit("Zero1Unit", group, (3,), (2,), dtype=torch.bfloat16)
    sharded_params = unit.sharded_params()
    with watched(group) as events:
        for _ in range(2):
            add_gradients(unit, TIMES[rank])
        added = unit.flat_grad.tolist()
        handle, sums = start_reduce_scatter(unit, events)
        assert sums.data_ptr() == unit.grad_shard.data_ptr(), (
            "in stage 1 start_reduce_scatter returns the handle and self.grad_shard: that is where the sums go")
        handle.wait()
        unit.finish_reduce_scatter(sums)
        reduced = unit.flat_grad.tolist()
        add_gradients(unit, 1)                            # a gradient of the next step
        again, of_shard = unit.flat_grad.tolist(), sum((param.main_grad.tolist() for param in sharded_params), [])
        unit.param_shard *= -1                            # an update
        events.clear()
        unit.start_all_gather()
        assert hasattr(unit.gather_handle, "wait"), (
            "`start_all_gather` must leave its all-gather's handle in self.gather_handle, so that self.wait_for_all_gather() can "
            f"wait; it is {unit.gather_handle}")
        assert events.given == unit.param_shard.data_ptr(), "the all-gather was given a copy: give it self.param_shard itself"
        started = list(events)
        unit.wait_for_all_gather()
    return rank, added, reduced, (again, of_shard), started, values(unit.params)


STAGE_1 = ["Zero1Unit." + name for name in ("accumulate_grad", "start_reduce_scatter", "finish_reduce_scatter", "start_all_gather")]


@rung({"zero.py": STAGE_1}, hints="""
    An all-reduce is a reduce-scatter followed by an all-gather. In stage 1 the optimizer's update comes between the two. The first
    sums gradients, and gives each rank its shard of the sum. The second collects the shards of the weights. Both are called with
    async_op=True, and so return a handle that can be waited for later. Backward continues meanwhile, so do not wait here.

    `self.grad_views[param]` is the place of a parameter's gradient in `self.flat_grad`. The two collectives are
    `dist.reduce_scatter_tensor(output, input, group=self.shard_group, async_op=True)` and `dist.all_gather_into_tensor(output,
    input, group=self.shard_group, async_op=True)`. After the first, self.flat_grad has sums only in the shard; the rest is this
    rank's own and must not be added to the next step's.

    accumulate_grad: `self.grad_views[param].add_(param.grad)`. start_reduce_scatter: return the handle of reduce_scatter_tensor
    with self.grad_shard as output and self.flat_grad as input, and self.grad_shard. finish_reduce_scatter: `.zero_()` on
    self.flat_grad before self.shard_slice.start, and on self.flat_grad from self.shard_slice.stop on. start_all_gather:
    `self.gather_handle` is the handle of all_gather_into_tensor with self.flat_param as output and self.param_shard as input.""")
def test_an_update_between_the_two_halves(pool):
    """Write the methods of stage 1. `accumulate_grad` adds param.grad to the parameter's part of self.flat_grad.
    `start_reduce_scatter` starts to sum self.flat_grad over the ranks of self.shard_group into self.grad_shard, and returns the
    handle and self.grad_shard, without waiting. `finish_reduce_scatter` is called when that is done, and zeroes all of
    self.flat_grad except this rank's shard. `start_all_gather` starts to gather the shards of the same ranks into self.flat_param,
    and leaves the handle in self.gather_handle. Copy nothing."""
    for ranks, world in ((2, 4), (3, 3)):
        size = 6 // ranks
        total = sum(TIMES[:ranks])
        for rank, added, reduced, (again, of_shard), started, params in pool.call(stage_1_job, STEP, world=world, ranks=ranks):
            here = f"{world} ranks in groups of {ranks}, rank {rank} of its group:"
            expected = [n * 2 * TIMES[rank] for n in (1, 2, 3, 4, 5, 0)]
            assert added == expected, (
                f"{here} self.flat_grad is {added} after two gradients {TIMES[rank]} ... {5 * TIMES[rank]}, not {expected}")
            mine = range(rank * size, rank * size + size)
            expected = [n * 2 * total if i in mine else 0 for i, n in enumerate((1, 2, 3, 4, 5, 0))]
            assert reduced == expected, (
                f"{here} after finish_reduce_scatter self.flat_grad is {reduced}, not {expected} (weights in bfloat16, sums in "
                "float32)")
            expected = [old + n for old, n in zip(reduced, (1, 2, 3, 4, 5, 0))]
            assert again == expected, (
                f"{here} gradients of the next step, 1 ... 5, turn self.flat_grad {reduced} into {again}, not {expected} (in "
                "float32)")
            expected = [again[i] for i in mine if i < 5]
            assert of_shard == expected, (
                f"{here} then the main_grads of the sharded parameters are {of_shard}, not {expected}: self.flat_grad and "
                "self.grad_shard must stay the same tensors, which change in place")
            assert started == ["gather"], (
                f"{here} `start_all_gather` must start one dist.all_gather_into_tensor and leave the waiting to "
                f"self.wait_for_all_gather(); it did {in_words(started)}")
            assert params == [[-1, -2, -3], [-4, -5]], (
                f"{here} each rank has negated its shard of 1 ... 5; after `start_all_gather` the parameters are {params}")


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
    """A module with weights of these sizes, of the unit with this number."""

    def __init__(self, number, name, events, sizes):
        super().__init__()
        self.number, self.name, self.events = number, name, events
        self.weights = nn.ParameterList(torch.eye(1, size)[0] for size in sizes)

    def forward(self, x):
        for weight in [*self.weights[1:], self.weights[0]]:          # so that backward has no order to rely on
            x = Product.apply(x, weight, self)
        return x

    def computes(self, what, unit):
        assert memory(unit.flat_param) > 0, f"{self.name} computes its {what}, but the unit's weights are not there"
        assert unit.gather_handle is None, f"{self.name} computes its {what}, but nobody has waited for the unit's weights"
        if f"{what} {self.number}" not in self.events:
            self.events.append(f"{what} {self.number}")


def small_model(stage, micro_batches, group, events, *units):
    """Make a model of units, each a list of modules with weights of these sizes. Return it with its Zero."""
    import zero
    from placement import Placement
    modules = [[Times(i, f"module {j} of unit {i}" if len(unit) > 1 else f"unit {i}", events, sizes)
                for j, sizes in enumerate(unit)] for i, unit in enumerate(units)]
    model = nn.Sequential(*sum(modules, []))
    model.zero_units = []
    for of_unit in modules:
        params = [param for module in of_unit for param in module.weights]
        unit, args = new_unit(f"Zero{stage}Unit", of_unit, params, group, stage, micro_batches)
        for param in params:
            param.placement = Placement(num_replicas=group.size(), decays=True, data_mesh=None)
        shard(unit, params)
        model.zero_units.append(unit)
    return model, zero.Zero(model, args)


def collect_job(stage):
    from zero import Zero1Unit
    group, rank = start()
    sent, returned = watched(group, {10: "0", 20: "1", 30: "2"}), {}
    start_it, finish_it = Zero1Unit.start_reduce_scatter, Zero1Unit.finish_reduce_scatter

    def start_reduce_scatter(unit):
        handle, shard = start_it(unit)
        returned[unit] = shard[:]                         # in stage 2 it is not self.grad_shard either
        return handle, returned[unit]

    def finish_reduce_scatter(unit, shard):
        assert shard is returned[unit], "finish_reduce_scatter was not given the shard that start_reduce_scatter returned"
        finish_it(unit, shard)
    ours = dict(pre_forward=lambda *args: None,           # a later rung: no weights are gathered
                start_reduce_scatter=start_reduce_scatter, finish_reduce_scatter=finish_reduce_scatter)
    with sent as events, patch.multiple(Zero1Unit, **ours):
        model, zero = small_model(1, 2, group, events, [(4, 3, 3)], [(20,)], [(30,)])
        zero.stage = stage                                # units are of stage 1: only the order matters here
        finish_oldest = zero.finish_oldest

        def shortens():
            before = len(zero.reduce_scatters)
            finish_oldest()
            assert len(zero.reduce_scatters) == before - 1, (
                f"finish_oldest must take one entry out of self.reduce_scatters; of {before} it left {len(zero.reduce_scatters)}")
        zero.finish_oldest = shortens
        steps = []
        for _ in range(2):
            reduced = []
            for x in (1.0, 2.0):
                events.clear()
                model(torch.tensor(x * 10 ** rank)).backward()
                reduced.append([event for event in events if "reduce" in event])
            started = len(zero.reduce_scatters)
            left = sum(param.grad is not None for param in model.parameters())
            zero.finish_grad_reduction()
            steps.append((reduced, started, left, [sorted(set(unit.grad_shard.tolist())) for unit in zero.units]))
            for unit in zero.units:                       # as the optimizer does
                unit.grad_shard.zero_()
    return steps


def assert_in_order(came, expected, what):
    for i, (a, b) in enumerate(zip([*came, "nothing"], [*expected, "nothing"])):
        before = f"after {', '.join(expected[max(0, i - 3):i])}" if i else "at the beginning"
        assert a == b, f"{what}, {before}: expected {b}, got {a}"


def assert_collected(stage, steps):
    expected, left_over = ["reduce 2", "reduce 1", "wait for reduce 2", "reduce 0", "wait for reduce 1"], 1
    if stage == 1:
        expected, left_over = ["reduce 2", "reduce 1", "reduce 0"], 3
    for step, ((first, last), started, left, shards) in enumerate(steps, 1):
        where = f"stage {stage}, step {step}"
        assert first == [], f"{where}: {', '.join(first)} happened in the first of two micro-batches, not in the last"
        assert_in_order(last, expected, f"{where}, reductions in the last backward (a transfer runs while the next unit "
                                        f"computes its backward)")
        assert started == left_over, f"{where}: after backward self.reduce_scatters has {started} entries; expected {left_over}"
        assert left == 0, f"{where}: {left} parameters have a param.grad after backward; expected None"
        assert shards == [[33]] * 3, (
            f"{where}: all gradients are 1 + 2 on rank 0 and 10 + 20 on rank 1, so 33 in all; the shards have {shards}")


@rung({"zero.py": ["Zero.post_accumulate_grad", "Zero.finish_oldest"]}, hints="""
    `post_accumulate_grad` is a hook; it runs once for each parameter in each backward. So it can count: when does a unit have all
    gradients of the last micro-batch?

    `unit.backwards_per_reduce` says how many micro-batches are added up. So a unit is complete when `unit.num_grads` is
    `len(unit.params) * unit.backwards_per_reduce`; then the count begins again at 0. Append to `self.reduce_scatters` all that
    finish_oldest will need: the unit, the handle, and the shard.

    post_accumulate_grad: `unit = param.unit`; `unit.accumulate_grad(param)`; `param.grad = None`; add 1 to unit.num_grads; if it is
    complete, set it to 0, `self.reduce_scatters.append((unit, *unit.start_reduce_scatter()))`, and if now `self.stage > 1` and
    `len(self.reduce_scatters) > 1` call `self.finish_oldest()`.
    finish_oldest: `unit, handle, shard = self.reduce_scatters.pop(0)`; `handle.wait()`; `unit.finish_reduce_scatter(shard)`.""")
def test_a_unit_is_reduced_when_it_is_complete(pool):
    """Write `post_accumulate_grad(param)`, which is called when backward has computed param.grad. Pass the gradient to the
    parameter's unit, and set param.grad to None. If this was the unit's last gradient in the last micro-batch, start the unit's
    reduce-scatter, and let backward continue. The gradients of a unit may come in any order. In stage 1 that is all, because
    finish_grad_reduction finishes all of self.reduce_scatters after backward. In stages 2 and 3, each entry of this list keeps the
    whole gradients of a unit in memory. So there, as soon as the list has two entries, finish the older one. It has had the whole
    backward of this unit to travel in. `finish_oldest` takes it out of the list, waits for it, calls
    the unit's finish_reduce_scatter, and passes it the shard that start_reduce_scatter returned."""
    for stage in (1, 2, 3):
        for steps in pool.call(collect_job, STEP, stage=stage, world=2):
            assert_collected(stage, steps)


def stage_2_job():
    group, rank = start()
    unit = numbered_unit("Zero2Unit", group, (3,), (2,), dtype=torch.bfloat16)
    sharded_params, least = unit.sharded_params(), kept(unit)
    with watched(group) as events, nothing_is_zero():
        add_gradients(unit, 100 ** rank)
        handle, sums = start_reduce_scatter(unit, events)
        gone = unit.flat_grad is None, kept(unit) - least
        add_gradients(unit, 2 * 100 ** rank)              # the second micro-batch begins before the first is summed
        second = unit.flat_grad.tolist()
        handle.wait()
        unit.finish_reduce_scatter(sums)
        once = unit.grad_shard.tolist()
        handle, sums = start_reduce_scatter(unit, events)
        handle.wait()
        unit.finish_reduce_scatter(sums)
    of_shard = sum((param.main_grad.tolist() for param in sharded_params), [])
    wide = numbered_unit("Zero2Unit", group, (3,), dtype=torch.float64)
    add_gradients(wide, 1)
    found = wide.flat_grad.dtype
    assert found == torch.float64, f"weights and self.grad_shard are in float64, but self.flat_grad is in {found}"
    handle, sums = wide.start_reduce_scatter()
    handle.wait()
    assert sums.dtype == torch.float64, f"weights are in float64, but the new tensor for the sums is in {sums.dtype}"
    return rank, gone, second, once, unit.grad_shard.tolist(), of_shard


@rung({"zero.py": ["Zero2Unit.accumulate_grad", "Zero2Unit.start_reduce_scatter", "Zero2Unit.finish_reduce_scatter"]}, hints="""
    Stage 1 adds up whole gradients and reduces once. Stage 2 reduces the whole gradients of every micro-batch and adds up shards.
    So self.flat_grad exists only from the first gradient of a micro-batch to its reduce-scatter.

    `allocate_grads` of Zero2Unit, which is there, sets self.flat_grad to None. The first accumulate_grad has to make self.flat_grad
    and self.grad_views; the rest is as in stage 1: `super().accumulate_grad(param)`. The sums cannot go into self.grad_shard, which
    has the sum of earlier micro-batches: they need a tensor of their own.

    accumulate_grad: if self.flat_grad is None, make it, `torch.zeros_like(self.flat_param, dtype=self.grad_dtype)`, and
    `self.grad_views = self.views(self.flat_grad)`. start_reduce_scatter: `shard = torch.empty_like(self.grad_shard)`; start the
    reduce-scatter of self.flat_grad into shard; set self.flat_grad and self.grad_views to None; return the handle and shard.
    finish_reduce_scatter: `self.grad_shard += shard`.""")
def test_only_the_shard_of_the_gradients_is_kept(pool):
    """Write the methods of stage 2. `accumulate_grad` makes self.flat_grad and self.grad_views if there are none; as in stage 1
    they are in self.grad_dtype (float32 if the weights are in bfloat16), and include the padding. `start_reduce_scatter` starts to
    sum self.flat_grad over the ranks of self.shard_group into a new tensor of the shard's length, and returns the handle and this
    tensor, without waiting; then self.flat_grad and self.grad_views are None, and nothing else in the unit holds their memory.
    `finish_reduce_scatter` adds the new tensor to self.grad_shard, which holds the sum of all micro-batches, and of which the
    optimizer's main_grads are views."""
    for rank, (gone, more), second, once, twice, of_shard in pool.call(stage_2_job, STEP, world=4):
        assert gone, "after start_reduce_scatter self.flat_grad must be None: later gradients belong to the next micro-batch"
        assert more == 0, (
            f"after start_reduce_scatter the unit still refers to {more} bytes more than flat_param and grad_shard: "
            "self.grad_views are views of self.flat_grad, and hold its memory too; return the new tensor, but do not keep it")
        expected = [n * 2 * 100**rank for n in (1, 2, 3, 4, 5, 0)]
        assert second == expected, f"self.flat_grad in the second micro-batch is {second}, not {expected}"
        expected = [[101, 202, 303], [404, 505, 0]][rank]
        assert once == expected, (
            f"after one micro-batch rank {rank} has self.grad_shard {once}, not {expected} (weights in bfloat16, sums in float32)")
        expected = [3 * n for n in expected]
        assert twice == expected, f"after two, the second with gradients twice as large, it has {twice}, not {expected}"
        expected = expected[:3 - rank]
        assert of_shard == expected, (
            f"self.grad_shard is right, but the main_grads of the sharded parameters are {of_shard}: add to it in place, since "
            "they are its views")


def stage_3_job():
    group, rank = start()
    unit = numbered_unit("Zero3Unit", group, (3,), (2,), dtype=torch.bfloat16)
    assert unit.flat_param is not None, "self.flat_param is None; keep the tensor, and empty its storage"
    size = memory(unit.flat_param)
    assert size == 0, f"after flatten_and_shard the storage of self.flat_param has {size} bytes; expected 0"
    least, size = kept(unit), memory(unit.param_shard)
    assert size == 6, (
        f"after flatten_and_shard self.param_shard has {size} bytes of storage; a separate tensor of 3 bfloat16 elements has 6")
    found = [unit.param_shard.tolist()]
    assert least == 6 + 12, (
        f"after flatten_and_shard the unit keeps {least} bytes; the shards of weights and float32 gradients have 6 and 12")
    with watched(group) as events:
        unit.unshard()
        assert unit.gather_handle is not None, (
            f"unshard did {in_words(events)}: it must start to gather, and leave the waiting to self.wait_for_all_gather()")
        unit.wait_for_all_gather()
        size = memory(unit.flat_param)
        assert size == 12, f"after the gather, self.flat_param's storage has {size} bytes; 6 elements in bfloat16 have 12"
        found += [values(unit.params), events.count("gather")]
        unit.unshard()
        unit.wait_for_all_gather()
        found.append(events.count("gather"))
        add_gradients(unit, 100 ** rank)
        handle, sums = start_reduce_scatter(unit, events)
        found.append(memory(unit.flat_param))
        handle.wait()
        unit.finish_reduce_scatter(sums)
        sums, more = unit.grad_shard.tolist(), kept(unit) - least
        unit.param_shard *= -1                            # an update
        unit.unshard()
        unit.wait_for_all_gather()
    return rank, (sums, more), *found, values(unit.params)


STAGE_3 = ["Zero3Unit." + name for name in ("flatten_and_shard", "reshard", "unshard", "start_reduce_scatter")]


@rung({"zero.py": STAGE_3}, hints="""
    Parameters and autograd refer to self.flat_param, so the tensor cannot be deleted. But its storage, the memory that all its
    views share, can be made empty, and full size again. In stage 1 the shard is a view of the whole; if the whole is freed, the
    shard has to be a tensor of its own.

    `storage = self.flat_param.untyped_storage()` has `storage.nbytes()` and `storage.resize_(number of bytes)`.
    `self.flat_param.nbytes` says how many bytes the tensor needs, even when its storage is empty. All the rest is there already:
    `super().flatten_and_shard()`, `super().reshard()`, `super().unshard()`, `super().start_reduce_scatter()`, and `self.is_whole`,
    which says whether the weights are there or on their way.

    flatten_and_shard: `super().flatten_and_shard()`; `self.param_shard = self.param_shard.clone()`; `self.reshard()`. reshard:
    `super().reshard()`; `storage.resize_(0)`. unshard: if not self.is_whole, `storage.resize_(self.flat_param.nbytes)`; then
    `super().unshard()`. start_reduce_scatter: `self.reshard()`, and return what `super().start_reduce_scatter()` returns.""")
def test_weights_are_freed_and_come_back(pool):
    """Write the methods of stage 3. `flatten_and_shard` does what it does in stage 1, then keeps only the shard: self.param_shard
    is a separate tensor, and the whole weights are freed. `reshard` empties the storage of self.flat_param. `unshard` does nothing
    if the weights are there; otherwise it gives the storage its full size and starts to gather, without waiting.
    `start_reduce_scatter` frees the weights, because the unit's backward is over, and does what it does in stage 2."""
    for rank, (sums, more), *answer in pool.call(stage_3_job, STEP, world=4):
        of_rank, params, once, again, after_backward, updated = answer
        expected = [[1, 2, 3], [4, 5, 0]][rank]
        assert of_rank == expected, f"after flatten_and_shard rank {rank} has self.param_shard {of_rank}, not {expected}"
        assert params == [[1, 2, 3], [4, 5]], f"after the gather, the parameters are {params}, not [[1, 2, 3], [4, 5]]"
        assert (once, again) == (1, 1), (
            f"only the first of two calls must gather; expected 1 and 1 all-gathers after them, got {once} and {again}")
        assert after_backward == 0, f"start_reduce_scatter must free the weights; their storage has {after_backward} bytes"
        assert more == 0, f"after the reduce-scatter the unit keeps {more} bytes more than after flatten_and_shard"
        expected = [[101, 202, 303], [404, 505, 0]][rank]
        assert sums == expected, (
            f"gradients 1 ... 5 and 100 ... 500 sum to {sums} in self.grad_shard of rank {rank}, not {expected}")
        assert updated == [[-1, -2, -3], [-4, -5]], (
            f"each rank has negated its shard of 1 ... 5; gathered again, the parameters are {updated}")


def by_number(given, zero):
    if isinstance(given, list):
        return "[" + ", ".join(str(by_number(unit, zero)) for unit in given) + "]"
    return f"unit {zero.units.index(given)}" if given in zero.units else given


def needed_job(stage):
    group, rank = start()
    units, steps = [[(10,)], [(20,)], [(10,), (20,)], [(40,)], [(50,)]], []       # unit 2 has two modules
    names = {10: "0", 20: "1", 30: "2", 40: "3", 50: "4"}
    with contextlib.ExitStack() as patched:
        events = patched.enter_context(watched(group, names))
        model, zero = small_model(stage, 1, group, events, *units)
        for i, unit in enumerate(zero.units if stage == 3 else []):
            came, expected = unit.next_in_backward, zero.units[i - 1:i] if i > 1 else []
            assert came == expected, f"unit {i}: next_in_backward is {by_number(came, zero)}, not {by_number(expected, zero)}"
        note, kind = Times.computes, type(zero.units[0])

        def noted(self, what, unit):
            if f"{what} {self.number}" not in events:
                there = [names[len(unit.flat_param)] for unit in zero.units if memory(unit.flat_param) > 0]
                coming = [names[len(unit.flat_param)] for unit in zero.units if unit.gather_handle is not None]
                at.append((f"{what} {self.number}", there, coming))
            note(self, what, unit)
        patched.enter_context(patch.object(Times, "computes", noted))
        if stage == 3:
            reshard = kind.reshard

            def arrived(unit):
                name = names[len(unit.flat_param)]
                assert unit.gather_handle is None, f"unit {name} is freed while it is being gathered, so the gather was for nothing"
                reshard(unit)
            patched.enter_context(patch.object(kind, "reshard", arrived))
        for step in (1, 2):
            at = []
            events.clear()
            if step == 2:                                 # as train.py does after an update
                zero.start_all_gather()
            loss = model(torch.tensor(1.0 + 9 * rank))
            loss.backward()
            zero.finish_grad_reduction()
            order = [event for event in events if "reduce" not in event and "wait" not in event]
            steps.append((order, at, loss.item(), [sorted(set(unit.grad_shard.tolist())) for unit in zero.units]))
            for unit in zero.units:
                unit.grad_shard.zero_()
                unit.param_shard *= 2                     # in place of the update
    return steps


FORWARD = ["gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "gather 3", "forward 2", "gather 4", "forward 3",
           "forward 4"]
BACKWARD = ["backward 4", "gather 2", "backward 3", "gather 1", "backward 2", "backward 1"]
COMING = {"forward 0": ["1"], "forward 1": ["2"], "forward 2": ["3"], "forward 3": ["4"]}
COMING_BACK = {"backward 3": ["2"], "backward 2": ["1"]}
HOOKS = ["Zero1Unit.unshard_and_prefetch", "Zero1Unit.pre_forward", "Zero3Unit.post_forward", "Zero3Unit.pre_backward",
         "register_post_forward_hooks"]


def without_gathers(events):
    return [event for event in events if "gather" not in event]


@rung({"zero.py": HOOKS}, hints="""
    Think of a row of units: the embedding, the blocks, the head. When unit 3 computes in forward, unit 4 should be on its way; in
    backward, unit 2. In stage 3 each unit has to know three things: whether its backward needs weights, whether to free them after
    forward, and which unit comes next in backward. `register_post_forward_hooks` works them out.

    `unshard_and_prefetch(next_units)`: ask for this unit's weights (`self.unshard()`), wait for them
    (`self.wait_for_all_gather()`), and only then ask for those of each unit of the list, which has one unit or none. The first
    unit, the embedding, reads no weights in backward. The last two need not be freed after forward, because backward begins with
    them. `output.register_hook(f)` calls f(gradient of the output) when the backward of the unit begins.

    unshard_and_prefetch: the two calls, then `unit.unshard()` for each unit of next_units. pre_forward:
    `self.unshard_and_prefetch(self.next_in_forward)`; pre_backward: the same with self.next_in_backward. post_forward:
    `output.register_hook(self.pre_backward)` if self.weights_in_backward, then `self.reshard()` if self.reshard_after_forward.
    register_post_forward_hooks, for i and unit of enumerate(units): `unit.weights_in_backward = i > 0`;
    `unit.reshard_after_forward = i < len(units) - 2`; `unit.next_in_backward = units[i - 1:i] if i > 1 else []`;
    `unit.modules[-1].register_forward_hook(unit.post_forward)`.""")
def test_weights_come_when_they_are_needed(pool):
    """Write the hooks. `unshard_and_prefetch(next_units)` asks for the weights of this unit, waits for them, and then asks for
    those of next_units, a list of at most one unit, which arrive while this unit computes. `pre_forward` and `pre_backward` call it
    with self.next_in_forward and self.next_in_backward. `post_forward` arranges for pre_backward to be called when the backward of
    the unit begins, if self.weights_in_backward, and frees the weights if self.reshard_after_forward.
    `register_post_forward_hooks(units)` sets weights_in_backward (unit 0 needs no weights in backward), reshard_after_forward (all
    but the last two units) and next_in_backward (a list of the unit before it; empty if that one needs no weights in backward) of
    each unit, and registers post_forward as the forward hook of the unit's last module. In stage 1, forward gathers the weights
    that the last update has changed, and does so one unit ahead as well."""
    for stage in (3, 1):
        for rank, steps in enumerate(pool.call(needed_job, STEP, world=2, stage=stage)):
            for step, (order, at, loss, shards) in enumerate(steps, 1):
                where = f"stage {stage}, step {step}"
                in_order, under_way = [*FORWARD, *BACKWARD], COMING | COMING_BACK
                if stage == 1:                            # step 1 has no update behind it, so nothing to gather
                    in_order = [*(FORWARD if step == 2 else without_gathers(FORWARD)), *without_gathers(BACKWARD)]
                    under_way = COMING if step == 2 else {}
                for when, there, _ in at:
                    assert stage == 1 or len(there) <= 2, (
                        f"{where}, {when}: the weights of units {', '.join(there)} are whole; expected two at most")
                assert_in_order(order, in_order, where)
                for when, _, coming in at:
                    expected = under_way.get(when, [])
                    assert coming == expected, (
                        f"{where}, {when}: units under way should be {in_words(expected)}, but are {in_words(coming)}; ask for the "
                        "next unit, but do not wait for it")
                expected = (1 + 9 * rank) * 64 ** (step - 1)
                assert loss == expected, f"{where}: rank {rank} has the loss {loss}, not {expected}"
                expected = 11 * 32 ** (step - 1)
                assert shards == [[expected]] * 5, f"{where}: all gradients are {expected}; the shards of the units have {shards}"


@pytest.mark.slow
@rung({"zero.py": ["traffic"]}, hints="""
    For each unit there are two questions: how often is it gathered in a training step, and how often is it reduced? The README's
    section "What it costs" answers them for each stage. The norm of the gradients is one number, summed over all ranks.

    Return a list of (group, collective, bytes); call these "all_reduce", "all_gather" or "reduce_scatter". Payload is the
    whole tensor that is gathered or scattered. Weights have `unit.flat_param.nbytes`. Gradients have `unit.grad_shard.nbytes *
    unit.shard_group.size()`; they may be wider than the weights. `model.zero_units` is the list of the units, in the order of
    forward; without ZeRO it is empty. In stage 3 all units are gathered in forward, and in backward those whose backward needs
    weights that were freed after forward.

    Begin with `(dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize)`. The micro-batches are
    `m = args.global_batch_size // (args.micro_batch_size * args.dp)`. Gathers of a unit: 1 in stages 1 and 2; in stage 3 it is
    2 m if unit.weights_in_backward and unit.reshard_after_forward, else m. Reductions: 1 in stage 1, else m. Each unit adds
    (unit.shard_group, "all_gather", gathers times its bytes) and (unit.shard_group, "reduce_scatter", reductions times its bytes);
    and if unit.replicate_group.size() > 1, (unit.replicate_group, "all_reduce", unit.grad_shard.nbytes).""")
@pytest.mark.parametrize("world, flags", [
    (3, "float64 --zero 1"), (3, "float64 --zero 2"), (3, "float64 --zero 3"), (4, "float64 --zero 1 --zero_shard 2"),
    (4, "float64 --zero 3 --zero_shard 2"), (3, "bfloat16 --zero 3"), (2, "float64 --zero 0")])
def test_a_training_run(pool, world, flags):
    """Write `traffic`. It returns what ZeRO and the gradient norm should send in one training step, as a list of (group,
    collective, payload). The payload is the bytes of the whole tensor gathered or scattered, an int; with what
    data_parallel.traffic has it must equal the ledger's. Four steps on three ranks must give the losses, gradient norms and weights
    of one process, in each stage. So must four ranks with --zero_shard 2. With --zero 0, list only the gradient norm, because
    data_parallel.traffic has the rest. With --zero_shard, the ranks that have the same shard, unit.replicate_group, all-reduce its
    gradients once per step. Count padding too, because it is sent."""
    micro_batch_size = {2: 6, 3: 4, 4: 2}[world]          # 2, 2 and 3 micro-batches
    flags = f"--recompute none --micro_batch_size {micro_batch_size} --dtype {flags}"
    check(pool, layouts.Layout(STEP, world, "dense-3", "adamw", flags))
