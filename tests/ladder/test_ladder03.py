"""The ladder of step 3: ZeRO, from one flat tensor to weights that come when they are needed. Each test is a rung; exercise.py says
how they are used."""
import contextlib
import math
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import layouts
import pytest
import torch
import torch.distributed as dist
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
    return getattr(zero, kind)(modules, params, group, Ranks(1, 0), args), args


def numbered(*shapes):
    """Parameters with the numbers 1 2 3 ... in them."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.arange(1.0, 1 + sum(sizes)).split(sizes)
    return [nn.Parameter(part.clone().view(shape)) for part, shape in zip(parts, shapes)]


def numbered_unit(kind, group, *shapes):
    """A unit of such parameters, cut."""
    from placement import Placement
    params = numbered(*shapes)
    unit, _ = new_unit(kind, [], params, group)
    for i, param in enumerate(params):
        param.placement = Placement(None, replicas=2 * group.size(), decays=i == 0)
        unit.add(param)
    return unit


def add_gradients(unit, times):
    """Of each parameter, as backward makes them: `times` 1 2 3 ... over all of them."""
    for param, numbers in zip(unit.params, numbered(*(param.shape for param in unit.params))):
        param.grad = times * numbers.detach()
        unit.add_gradient(param)
        param.grad = None


def start_reduce(unit):
    returned = unit.start_reduce()
    assert type(returned) is tuple and len(returned) == 2 and hasattr(returned[0], "wait"), (
        f"start_reduce has returned {returned}; expected are two things: the work of a collective that was started, and what "
        f"finish_reduce needs, or None")
    return returned


def values(params):
    return [param.tolist() for param in params]


def memory(tensor):
    return tensor.untyped_storage().nbytes()


def views_job():
    params, flat = numbered((2, 2), (3,)), torch.arange(8.0)
    unit, _ = new_unit("Unit", [], params, Ranks(1, 0))
    unit.params = params
    views = unit.views(flat)
    found = values(views[param] for param in params)
    views[params[1]].zero_()
    return found, flat.tolist()


@rung({"zero.py": ["Unit.views"]}, hints="""
    The parameters lie in the flat tensor one after the other, in the order of `self.params`. Each of them has
    `param.numel()` elements there. What lies behind the last one is padding.

    `tensor.split([4, 3])` gives two views, of 4 and of 3 elements; the sizes have to add up to the length of the tensor.
    `part.view(shape)` gives a part the shape of its parameter, and copies nothing.

    Make a list `sizes` of all `param.numel()`. Then `parts = flat[:sum(sizes)].split(sizes)`, and return a dictionary with
    `param: part.view(param.shape)` for each pair of `zip(self.params, parts)`.""")
def test_parameters_in_a_flat_tensor(pool):
    """`views(flat)` returns a dictionary: for each of self.params the view of its part of the flat tensor, in the parameter's
    shape. The flat tensor may be longer than all parameters together."""
    (found, flat), = pool.call(views_job, STEP)
    expected = [[[0, 1], [2, 3]], [4, 5, 6]]
    assert found == expected, f"of the flat tensor 0 1 ... 7, parameters of shapes [2, 2] and [3] have {found}, not {expected}"
    assert flat == [0, 1, 2, 3, 0, 0, 0, 7], (
        f"what is written to a parameter's view must be written to the flat tensor; after zeros for the second one it has {flat}")


def cut_job(ranks, rank):
    unit = numbered_unit("Unit", Ranks(ranks, rank), (2, 2), (3,))
    found = unit.weights.tolist(), (unit.mine.start, unit.mine.stop), unit.weight_slice.tolist()
    gradients = len(getattr(unit, "grads", ()))
    unit.weights += 10
    return *found, unit.weight_slice.tolist(), values(unit.params), gradients


@rung({"zero.py": ["Unit.cut"]}, hints="""
    First make one flat tensor of all parameters, then find out how long a slice is. All slices have the same length, so 7
    elements on 3 ranks make slices of 3, and two elements of padding at the end. `self.shard.size()` is the number of ranks and
    `self.shard.rank()` is the number of this rank.

    `torch.cat` joins the parameters, each with `.detach().flatten()`. The length of a slice is rounded up:
    `-(-len(flat) // ranks)`. `nn.functional.pad(flat, (0, n))` adds n zeros at the end. A parameter becomes a view of the flat
    tensor by `param.data = view`; the views come from the rung before.

    With `size` for the length of a slice: `self.mine = slice(rank * size, (rank + 1) * size)`;
    `self.weights = nn.functional.pad(flat, (0, ranks * size - len(flat)))`; `self.weight_slice = self.weights[self.mine]`; then
    `param.data = view` for each item of `self.views(self.weights)`; at last `self.make_gradients()`.""")
def test_the_slice_of_a_rank(pool):
    """`cut` puts all self.params into one flat tensor, self.weights, with zeros at the end so that all ranks have slices of the
    same length, the shortest possible. self.mine is the rank's slice as a Python slice; self.weight_slice is the view of
    self.weights at self.mine; every parameter becomes a view of self.weights. At the end `cut` calls self.make_gradients()."""
    expected = {(3, 0): ([1, 2, 3, 4, 5, 6, 7, 0, 0], (0, 3), [1, 2, 3]), (3, 1): ([1, 2, 3, 4, 5, 6, 7, 0, 0], (3, 6), [4, 5, 6]),
                (3, 2): ([1, 2, 3, 4, 5, 6, 7, 0, 0], (6, 9), [7, 0, 0]), (7, 6): ([1, 2, 3, 4, 5, 6, 7], (6, 7), [7])}
    for (ranks, rank), (weights, mine, of_mine) in expected.items():
        (found, found_mine, found_slice, changed_slice, params, gradients), = pool.call(cut_job, STEP, ranks=ranks, rank=rank)
        here = f"of parameters with the numbers 1 ... 7, on rank {rank} of {ranks},"
        assert found == weights, f"{here} self.weights is {found}, not {weights}"
        assert found_mine == mine, f"{here} self.mine goes from {found_mine[0]} to {found_mine[1]}, not from {mine[0]} to {mine[1]}"
        assert found_slice == of_mine, f"{here} self.weight_slice is {found_slice}, not {of_mine}"
        assert params == [[[11, 12], [13, 14]], [15, 16, 17]], (
            f"after self.weights += 10 the parameters are {params}: each must be a view of self.weights, in its shape")
        assert changed_slice == [n + 10 for n in of_mine], "after self.weights += 10 the slice has the old numbers: it is no view"
        assert gradients == len(weights), "there are no gradients of the flat tensor's length: `make_gradients` was not called"


def pieces_job(rank):
    unit = numbered_unit("Unit", Ranks(4, rank), (2, 2), (3,), (3,))
    pieces = unit.pieces()
    found = values(pieces)
    unit.weight_slice += 10
    unit.grad_slice += torch.arange(101.0, 104) + 3 * rank
    gradients = [piece.main_grad.tolist() for piece in pieces]
    return found, values(pieces), gradients, [(piece.placement.decays, piece.placement.replicas) for piece in pieces]


@rung({"zero.py": ["Unit.pieces"]}, hints="""
    Go through the parameters and keep count of where each begins in the flat tensor. The piece of a parameter is what lies both in
    the parameter and in the slice. If nothing does, there is no piece.

    A parameter lies from `start` to `start + param.numel()`, the slice from `self.mine.start` to `self.mine.stop`. Both together
    begin at the larger of the two beginnings, and end at the smaller of the two ends. In `self.weight_slice` the places are
    smaller by `self.mine.start`.

    With `first` and `last` for these two places, and if first < last: `here = slice(first - self.mine.start, last -
    self.mine.start)`; `piece = nn.Parameter(self.weight_slice[here], requires_grad=False)`; `piece.main_grad =
    self.grad_slice[here]`; and `piece.placement` is `replace(param.placement, replicas=...)` with the replicas of the parameter
    divided by `self.shard.size()`.""")
def test_pieces_for_the_optimizer(pool):
    """`pieces` returns this rank's slice cut at the borders of the parameters: a list of nn.Parameters that are views of
    self.weight_slice. Padding is in none of them. Each has a main_grad, the view of the same elements of self.grad_slice, and the
    placement of its parameter, but with `replicas` divided by the number of ranks that the unit is cut over."""
    for rank, expected in enumerate([[[1, 2, 3]], [[4], [5, 6]], [[7], [8, 9]], [[10]]]):
        here = f"parameters of 4, 3 and 3 elements, 1 ... 10, have on rank {rank} of 4"
        (found, changed, gradients, placements), = pool.call(pieces_job, STEP, rank=rank)
        assert found == expected, f"{here} the pieces {found}, not {expected}"
        expected_changed = [[n + 10 for n in piece] for piece in expected]
        assert changed == expected_changed, (
            f"after self.weight_slice += 10 the pieces are {changed}, not {expected_changed}: they must be views of the slice")
        expected_gradients = [[n + 100 for n in piece] for piece in expected]
        assert gradients == expected_gradients, (
            f"with gradients 101 ... 110 the main_grads on rank {rank} are {gradients}, not {expected_gradients}: they must be "
            f"views of self.grad_slice, at the places of the pieces")
        for piece, (decays, replicas) in zip(expected, placements):
            assert decays == (piece[0] <= 4), f"the piece {piece} has decays={decays}: that is not of its own parameter"
            assert replicas == 2, f"8 ranks have each parameter, and 4 ranks share it: a piece has 2 replicas, not {replicas}"


def stage_1_job():
    dist.init_process_group("gloo")
    unit = numbered_unit("Unit", dist.group.WORLD, (3,), (2,))
    for _ in range(2):
        add_gradients(unit, 10 ** dist.get_rank())
    added = unit.grads.tolist()
    work, part = start_reduce(unit)
    work.wait()
    unit.finish_reduce(part)
    reduced = unit.grads.tolist()
    unit.weight_slice -= unit.grad_slice
    unit.gather()
    started = hasattr(unit.gathering, "wait")
    unit.wait()
    return added, reduced, started, values(unit.params)


@rung({"zero.py": ["Unit.add_gradient", "Unit.start_reduce", "Unit.finish_reduce", "Unit.gather"]}, hints="""
    An all-reduce is a reduce-scatter and then an all-gather. In stage 1 the optimizer's update lies between the two: the first
    sums gradients, of which each rank gets its slice; the second collects the slices of the weights. Both are called with
    async_op=True, and so return a work that can be waited for later.

    `self.grad_views[param]` is the place of a parameter's gradient in `self.grads`. The two collectives are
    `dist.reduce_scatter_tensor(output, input, group=self.shard, async_op=True)` and `dist.all_gather_into_tensor(output, input,
    group=self.shard, async_op=True)`. After the first one self.grads has sums in the slice only; the rest is this rank's own
    and must not be added to the next step's.

    add_gradient: `self.grad_views[param].add_(param.grad)`. start_reduce: return the work of reduce_scatter_tensor with
    self.grad_slice as output and self.grads as input, and None. finish_reduce: `.zero_()` on self.grads before
    self.mine.start, and on self.grads from self.mine.stop on. gather: `self.gathering` is the work of all_gather_into_tensor
    with self.weights as output and self.weight_slice as input.""")
def test_an_update_between_the_two_halves(pool):
    """Stage 1. `add_gradient` adds param.grad to the parameter's part of self.grads. `start_reduce` starts to sum self.grads over
    the ranks into self.grad_slice, and returns the work and None. `finish_reduce` is called when that is done, and leaves zeros in
    all of self.grads but this rank's slice. `gather` starts to collect the slices of all ranks in self.weights; the work of
    that is self.gathering."""
    for rank, (added, reduced, started, params) in enumerate(pool.call(stage_1_job, STEP, world=2)):
        expected = [n * 2 * 10**rank for n in (1, 2, 3, 4, 5, 0)]
        assert added == expected, f"self.grads is {added} after two gradients of {10**rank} ... {5 * 10**rank}, not {expected}"
        expected = [[22, 44, 66, 0, 0, 0], [0, 0, 0, 88, 110, 0]][rank]
        assert reduced == expected, f"after finish_reduce rank {rank} has self.grads {reduced}, not {expected}"
        assert started, "`gather` must leave the work of its all-gather in self.gathering; self.wait() waits for it"
        assert params == [[-21, -42, -63], [-84, -105]], (
            f"1 ... 5 less the gradients 22 44 66 88 110 are -21 -42 -63 -84 -105; after `gather` the parameters are {params}")


# ------------------------------------------------------------------------------------------------ a small model, on every rank
class Product(torch.autograd.Function):
    """The sum of x times each element. The elements add up to 1 or to 2, so the gradients can be worked out by hand."""

    @staticmethod
    def forward(ctx, x, weight, block):
        block.computes("forward")
        ctx.block = block
        ctx.save_for_backward(x, weight)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            ctx.block.computes("backward")
            grad_x = grad * weight.sum()
        return grad_x, (grad * x).repeat(weight.shape), None


class Times(nn.Module):
    def __init__(self, number, events, *sizes):
        super().__init__()
        self.number, self.events = number, events
        self.weights = nn.ParameterList(torch.eye(1, size)[0] for size in sizes)

    def forward(self, x):
        for weight in self.weights:
            x = Product.apply(x, weight, self)
        return x

    def computes(self, what):
        unit = self.weights[0].unit
        assert memory(unit.weights) > 0, f"block {self.number} computes its {what}, and its weights are not there"
        assert unit.gathering is None, f"block {self.number} computes its {what}, and nobody has waited for its weights"
        self.events.append(f"{what} {self.number}")


def small_model(stage, micro_batches, *blocks):
    """Blocks of 10, 20, 30 ... elements; its Zero; and a list of what happens."""
    import zero
    from placement import Placement
    dist.init_process_group("gloo")
    events = []
    model = nn.Sequential(*(Times(i, events, *sizes) for i, sizes in enumerate(blocks)))
    for block in model:
        params = list(block.parameters())
        unit, args = new_unit({1: "Unit", 3: "Unit3"}[stage], [block], params, dist.group.WORLD, stage, micro_batches)
        for param in params:
            param.placement = Placement(None, replicas=dist.get_world_size(), decays=True)
            unit.add(param)
    return model, zero.Zero(model, args), events


@contextlib.contextmanager
def watched(events):
    """Notes which block is reduced or gathered: its length says which it is."""
    def noted(what, collective, whole):
        def start_it(*args, **kwargs):
            events.append(f"{what} {[*args, *kwargs.values()][whole].numel() // 10 - 1}")
            return collective(*args, **kwargs)
        return start_it
    with patch.multiple(dist, reduce_scatter_tensor=noted("reduce", dist.reduce_scatter_tensor, 1),
                        all_gather_into_tensor=noted("gather", dist.all_gather_into_tensor, 0)):
        yield


def collect_job():
    model, zero, events = small_model(1, 2, (4, 6), (20,), (30,))
    steps = []
    with watched(events):
        for _ in range(2):
            reduced = []
            for x in (1.0, 2.0):
                events.clear()
                model(torch.tensor(x * 10 ** dist.get_rank())).backward()
                reduced.append([event for event in events if "reduce" in event])
            under_way = len(zero.under_way)
            left = sum(param.grad is not None for param in model.parameters())
            zero.sum_gradients()
            steps.append((reduced, under_way, left, [sorted(set(unit.grad_slice.tolist())) for unit in zero.units]))
            for unit in zero.units:                       # as the optimizer does
                unit.grad_slice.zero_()
    return steps


@rung({"zero.py": ["Zero.collect", "Zero.finish_oldest"]}, hints="""
    `collect` is called by a hook, once for each parameter in each backward. It can count: when has a unit got all gradients of
    the last micro-batch?

    `unit.backwards` says how many micro-batches are added up. So a unit is complete when `unit.arrived` is `len(unit.params) *
    unit.backwards`; then the count begins again at 0. Append to `self.under_way` all that finish_oldest will need: the unit, the
    work, and what else start_reduce has returned.

    collect: `unit = param.unit`; `unit.add_gradient(param)`; `param.grad = None`; add 1 to unit.arrived; if it is complete, set it
    to 0, `self.under_way.append((unit, *unit.start_reduce()))`, and if now `len(self.under_way) > 1` call `self.finish_oldest()`.
    finish_oldest: `unit, work, part = self.under_way.pop(0)`; `work.wait()`; `unit.finish_reduce(part)`.""")
def test_a_unit_is_reduced_when_it_is_complete(pool):
    """`collect(param)` is called when backward has made param.grad. It gives the gradient to the unit of the parameter and sets
    param.grad to None. When that was the last gradient of the unit in the last micro-batch, it starts the reduction of the unit,
    and backward goes on. If then two reductions are under way (self.under_way), it finishes the older one: `finish_oldest` waits
    for it and calls the unit's finish_reduce."""
    for steps in pool.call(collect_job, STEP, world=2):
        for step, ((first, last), under_way, left, slices) in enumerate(steps, 1):
            assert first == [], f"step {step}: {', '.join(first)} came in the first of two micro-batches, not in the last"
            assert last == ["reduce 2", "reduce 1", "reduce 0"], (
                f"step {step}: expected in the last backward is reduce 2, reduce 1, reduce 0; came {', '.join(last) or 'nothing'}")
            assert under_way <= 1, f"step {step}: after backward {under_way} reductions are under way; expected is 1, the newest"
            assert left == 0, f"step {step}: {left} parameters have a param.grad after backward; expected is None"
            assert slices == [[33]] * 3, (
                f"step {step}: all gradients are 1 + 2 on rank 0 and 10 + 20 on rank 1, which is 33; the slices have {slices}")


def stage_2_job():
    dist.init_process_group("gloo")
    unit, times = numbered_unit("Unit2", dist.group.WORLD, (3,), (2,)), 10 ** dist.get_rank()
    found = []
    add_gradients(unit, times)
    work, part = start_reduce(unit)
    found.append(unit.grads is None)
    add_gradients(unit, 2 * times)                        # the second micro-batch begins before the first is summed
    found.append(unit.grads.tolist())
    work.wait()
    unit.finish_reduce(part)
    found.append(unit.grad_slice.tolist())
    work, part = start_reduce(unit)
    work.wait()
    unit.finish_reduce(part)
    return *found, unit.grad_slice.tolist()


@rung({"zero.py": ["Unit2.add_gradient", "Unit2.start_reduce", "Unit2.finish_reduce"]}, hints="""
    Stage 1 adds up whole gradients and reduces once. Stage 2 reduces the whole gradients of every micro-batch and adds up slices.
    So self.grads exists only from the first gradient of a micro-batch to its reduction.

    `make_gradients` of Unit2, which is there, sets self.grads to None. The first add_gradient has to make self.grads and
    self.grad_views; what follows is as in stage 1: `super().add_gradient(param)`. The sums cannot go into self.grad_slice, which
    has the sum of earlier micro-batches: they go into a tensor of their own.

    add_gradient: if self.grads is None, make it, `torch.zeros_like(self.weights, dtype=self.grad_slice.dtype)`, and
    `self.grad_views = self.views(self.grads)`. start_reduce: `part = torch.empty_like(self.grad_slice)`; start the
    reduce-scatter of self.grads into part; set self.grads and self.grad_views to None; return the work and part. finish_reduce:
    `self.grad_slice += part`.""")
def test_only_the_slice_of_the_gradients_is_kept(pool):
    """Stage 2. `add_gradient` makes self.grads and self.grad_views if there are none. `start_reduce` starts to sum self.grads over
    the ranks into a new tensor of the slice's length, and returns the work and this tensor; then self.grads and self.grad_views are
    None. `finish_reduce` adds the new tensor to self.grad_slice, which has the sum of all micro-batches."""
    for rank, (gone, second, once, twice) in enumerate(pool.call(stage_2_job, STEP, world=2)):
        assert gone, "after start_reduce self.grads must be None: what comes from now on belongs to the next micro-batch"
        expected = [n * 2 * 10**rank for n in (1, 2, 3, 4, 5, 0)]
        assert second == expected, f"self.grads in the second micro-batch is {second}, not {expected}"
        expected = [[11, 22, 33], [44, 55, 0]][rank]
        assert once == expected, f"after one micro-batch rank {rank} has self.grad_slice {once}, not {expected}"
        expected = [3 * n for n in expected]
        assert twice == expected, f"after two, the second with gradients twice as large, it has {twice}, not {expected}"


def stage_3_job():
    dist.init_process_group("gloo")
    unit, events = numbered_unit("Unit3", dist.group.WORLD, (3,), (2,)), []
    size = memory(unit.weight_slice)
    assert size == 12, f"after cut the storage of self.weight_slice has {size} bytes; 3 elements of their own have 12"
    found = [memory(unit.weights), unit.weight_slice.tolist()]
    with watched(events):
        unit.gather_if_released()
        unit.wait()
        found += [values(unit.params), len(events)]
        unit.gather_if_released()
        unit.wait()
        found.append(len(events))
    add_gradients(unit, 10 ** dist.get_rank())
    work, part = start_reduce(unit)
    found.append(memory(unit.weights))
    work.wait()
    unit.finish_reduce(part)
    unit.weight_slice -= unit.grad_slice
    unit.gather_if_released()
    unit.wait()
    return *found, values(unit.params)


@rung({"zero.py": ["Unit3.cut", "Unit3.release", "Unit3.gather_if_released", "Unit3.start_reduce"]}, hints="""
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
    """Stage 3. `cut` does what stage 1 does, then leaves only the slice: self.weight_slice is a tensor of its own, and the whole
    is released. `release` makes the storage of self.weights empty. `gather_if_released` does nothing if the weights are there;
    if they are not, it gives the storage its full size and starts to gather. `start_reduce` releases the weights, because the
    unit's backward is over, and does what stage 2 does."""
    for rank, answer in enumerate(pool.call(stage_3_job, STEP, world=2)):
        whole, my_slice, params, once, again, after_backward, updated = answer
        assert whole == 0, f"after cut the storage of self.weights has {whole} bytes; expected are 0"
        expected = [[1, 2, 3], [4, 5, 0]][rank]
        assert my_slice == expected, f"after cut rank {rank} has self.weight_slice {my_slice}, not {expected}"
        assert params == [[1, 2, 3], [4, 5]], f"gathered, the parameters are {params}, not [[1, 2, 3], [4, 5]]"
        assert (once, again) == (1, 1), (
            f"of two calls only the first has to gather; expected are 1 and 1 all-gathers after them, came {once} and {again}")
        assert after_backward == 0, f"start_reduce must release the weights; their storage has {after_backward} bytes"
        assert updated == [[-10, -20, -30], [-40, -50]], (
            f"1 ... 5 less the gradients 11 22 33 44 55 are -10 -20 -30 -40 -50; gathered again, the parameters are {updated}")


def needed_job():
    model, zero, events = small_model(3, 1, (10,), (20,), (30,), (40,), (50,))
    steps, note, kind = [], Times.computes, type(zero.units[0])
    release = kind.release

    def noted(self, what):
        note(self, what)
        whole.append((f"{what} {self.number}", [i for i, unit in enumerate(zero.units) if memory(unit.weights) > 0]))

    def arrived(unit):
        number = zero.units.index(unit)
        assert unit.gathering is None, f"block {number} is released while it is being gathered: it was asked for, and not used"
        release(unit)
    with watched(events), patch.object(Times, "computes", noted), patch.object(kind, "release", arrived):
        for _ in range(2):
            whole = []
            events.clear()
            loss = model(torch.tensor(1.0 + 9 * dist.get_rank()))
            loss.backward()
            zero.sum_gradients()
            order = [event for event in events if "reduce" not in event]
            steps.append((order, whole, loss.item(), [sorted(set(unit.grad_slice.tolist())) for unit in zero.units]))
            for unit in zero.units:
                unit.grad_slice.zero_()
                unit.weight_slice *= 2                    # for the update
    return steps


IN_ORDER = ["gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "gather 3", "forward 2", "gather 4", "forward 3",
            "forward 4", "backward 4", "gather 2", "backward 3", "gather 1", "backward 2", "backward 1"]
HOOKS = ["gather_when_needed." + name for name in ("need", "before_forward", "before_backward", "after_forward")]


def assert_in_order(came, expected, what):
    for i, (a, b) in enumerate(zip([*came, "nothing"], [*expected, "nothing"])):
        before = f"after {', '.join(expected[max(0, i - 3):i])}" if i else "at the beginning"
        assert a == b, f"{what}, {before}: expected is {b}, came {a}"


@rung({"zero.py": HOOKS}, hints="""
    Think of a row of blocks. When block 3 computes in forward, block 4 should be on its way; in backward, block 2. The hooks are
    registered at the end of `gather_when_needed`; what they do is missing. A block is a list of units.

    `need`: ask for the block's weights (`unit.gather_if_released()`), wait for them (`unit.wait()`), and only then ask for those
    of the following block. What follows may be nothing: after the last block in forward, and in backward after block 1, since block
    0, the embedding, needs no weights in backward. `sum(blocks[a:b], [])` is the list of the units of some blocks.
    `output.register_hook(f)` calls f(gradient of the output), when the backward of the block begins.

    before_forward: `need(blocks[i], sum(blocks[i + 1:i + 2], []))`. before_backward: `need(blocks[i], sum(blocks[max(1, i - 1):i],
    []))`. after_forward: if i > 0, `output.register_hook(lambda grad: before_backward(i))`; then release every unit of the block
    if `i < len(blocks) - 2`, because backward begins with the last two.""")
def test_weights_come_when_they_are_needed(pool):
    """`need(block, following)` asks for the weights of the block's units, waits for them, and then asks for those of the following
    units. `before_forward(i)` and `before_backward(i)` call it with what comes next in forward and in backward; in backward block 0
    needs no weights. `after_forward(i, output)` has before_backward(i) called when the backward of the block begins, but not for
    block 0; and it releases the block, but not the last two."""
    for rank, steps in enumerate(pool.call(needed_job, STEP, world=2)):
        for step, (order, whole, loss, slices) in enumerate(steps, 1):
            for when, blocks in whole:
                assert len(blocks) <= 2, f"step {step}, {when}: the weights of blocks {blocks} are whole; expected are two at most"
            assert_in_order(order, IN_ORDER, f"step {step}")
            expected = (1 + 9 * rank) * 32 ** (step - 1)
            assert loss == expected, f"step {step}: rank {rank} has the loss {loss}, not {expected}"
            expected = 11 * 16 ** (step - 1)
            assert slices == [[expected]] * 5, f"step {step}: all gradients are {expected}; the slices of the units have {slices}"


@pytest.mark.slow
@rung({"zero.py": ["formula"]}, hints="""
    For each unit there are two questions: how often is it gathered in a training step, and how often is it reduced? The README's
    section "What it costs" answers them for each stage. The norm of the gradients is one number, summed over all ranks.

    A list of (group, collective, bytes); the collectives are called "all_reduce", "all_gather" and "reduce_scatter". Payload is the
    whole tensor that is gathered or scattered. Weights have `unit.weights.nbytes`. Gradients have `unit.grad_slice.nbytes *
    unit.shard.size()`; they may be wider than the weights. `blocks_of(model)` is the list of the blocks, each a list of units. In
    stage 3 all blocks are gathered in forward, and in backward all but the first one and the last two.

    Begin with `(dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize)`; without ZeRO that is
    all. The micro-batches are `m = args.global_batch_size // (args.micro_batch_size * args.dp)`. Gathers of block i: 1 in stages 1
    and 2; in stage 3 it is 2 m if 0 < i < len(blocks) - 2, else m. Reduces: 1 in stage 1, else m. Each unit adds (unit.shard,
    "all_gather", gathers times its bytes) and (unit.shard, "reduce_scatter", reduces times its bytes); and if
    unit.replicate.size() > 1, (unit.replicate, "all_reduce", unit.grad_slice.nbytes).""")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_run(pool, stage):
    """Four steps on two ranks give the losses, gradient norms and weights of one process, in each stage; and the ledger's bytes
    are those that `formula` returns: what one training step sends, as a list of (group, collective, payload bytes)."""
    flags = f"--dtype float64 --recompute none --micro_batch_size 6 --zero {stage}"
    check(pool, layouts.Layout(STEP, 2, "dense-3", "adamw", flags))
