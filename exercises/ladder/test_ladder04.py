"""The ladder of step 4: matrices sharded over ranks, and what is sent where regions begin and end. Each test is a rung; exercise.py
explains how to use them."""
import contextlib
from types import SimpleNamespace
from unittest.mock import patch

import layouts
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise import rung
from observe import check
from torch import nn
from prove.unforgiving import unforgiving
from watch import Watch

STEP = "step04_tp_sp"
# two small matrices, 2 -> 4 and 4 -> 2, for numbers that one can check by hand
UP = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]]
DOWN = [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0]]


# ------------------------------------------------------------------------------------------------ on every rank
def start():
    """Return this rank's number in its group, and the group. Of four ranks, 0 and 1 are one group; 2 and 3 are another, which does
    the same."""
    dist.init_process_group("gloo")
    group, _ = dist.new_subgroups(2)
    dist.barrier()                                        # no group may end while the other still connects
    return group.rank(), group


def answers(pool, job, **arguments):
    """Return the job's answer from each rank, with the rank's number in its group."""
    return [(i % 2, answer) for i, answer in enumerate(pool.call(job, STEP, world=4, **arguments))]


def comm_without_sp(group):
    from tensor_parallel import all_reduce, identity
    return identity, all_reduce, group


@contextlib.contextmanager
def watched():
    """Yield a list of the collectives that are started, each with the number of elements of its output, and of the waits."""
    calls = []

    def wait(handle):
        calls.append(("wait", 0))
        return handle and handle.wait()

    def noted(name, collective):
        def start_it(*args, **kwargs):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            calls.append((name, tensors[0].numel()))
            assert all(tensor.is_contiguous() for tensor in tensors), (
                f"dist.{name} was called with a tensor that is not contiguous, which GPUs refuse; use x.contiguous() (in "
                "all_reduce, see clone's memory_format)")
            handle = collective(*args, **kwargs)          # None: it has been waited for
            return SimpleNamespace(wait=lambda: wait(handle)) if handle else wait(handle)
        return start_it
    names = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
    with patch.multiple(dist, **{name: noted(name, getattr(dist, name)) for name in names}):
        yield calls


def shards_job():
    import shards
    whole, found = torch.arange(1.0, 17).view(4, 4), []
    for splits in ([(0, 2, 1)], [(1, 2, 0)], [(1, 4, 2)], [(0, 2, 1), (1, 2, 0)], []):
        shape = [4, 4]
        for dim, count, _ in splits:
            shape[dim] //= count
        param = nn.Parameter(torch.zeros(shape))
        param.placement = SimpleNamespace(shards=[shards.Shard(None, *split) for split in splits])
        index = shards.local_slices(param)
        assert type(index) is tuple and len(index) == 2, (
            f"for a matrix, local_slices must return a tuple of two slices; got {index}")
        found.append((splits, whole[index].tolist(), shards.global_shape(param)))
    norm = nn.Parameter(torch.zeros(4))
    norm.placement = SimpleNamespace(shards=[])
    index = shards.local_slices(norm)
    assert index in ((slice(None),), (slice(0, 4),)), (
        f"for a norm, which has one dimension, local_slices must return a tuple of one slice; got {index}")
    products = []
    for rank in (0, 1):
        rows, columns = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
        for param, dim in ((rows, 0), (columns, 1)):
            param.placement = SimpleNamespace(shards=[shards.Shard(None, dim, 2, rank)])
        outputs = F.linear(torch.tensor([1.0, 2.0]), torch.tensor(UP)[shards.local_slices(rows)])
        terms = F.linear(outputs, torch.tensor(DOWN)[shards.local_slices(columns)])
        products.append((outputs.tolist(), terms.tolist()))
    return found, products


@rung({"shards.py": ["local_slices", "global_shape"]}, hints="""
    `param` is the shard that this rank has, and `param.placement.shards` says how the parameter was split: a list of Shard, which
    may be empty. To split a matrix in two along dimension 0 means that each rank has half of the rows.

    An index over all dimensions is a tuple with one slice for each: `whole[slice(0, 2), slice(None)]` is the first two rows;
    `slice(None)` takes all of a dimension. The slice is as long as the shard: `param.shape[shard.dim]`.

    local_slices: begin with `slices = [slice(None)] * param.dim()`. For each shard: `size = param.shape[shard.dim]`, and
    `slices[shard.dim] = slice(shard.index * size, (shard.index + 1) * size)`. Return tuple(slices). global_shape: begin with
    `list(param.shape)`, and multiply the entry of each `shard.dim` by `shard.num_shards`.""")
def test_which_shard_of_a_matrix_a_rank_has(pool):
    """Write `local_slices(param)`, which returns the place of this rank's shard: whole[local_slices(param)] is the shard that the
    rank has. Write `global_shape(param)`, which returns the shape of the whole parameter, a list. Both follow the entries of
    param.placement.shards."""
    (found, products), = pool.call(shards_job, STEP)
    expected = [[[9, 10, 11, 12], [13, 14, 15, 16]], [[1, 2], [5, 6], [9, 10], [13, 14]], [[3], [7], [11], [15]],
                [[9, 10], [13, 14]], [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]]
    for (splits, numbers, shape), want in zip(found, expected):
        has = " and ".join(f"shard {index} of {count} along dimension {dim}" for dim, count, index in splits) or "all"
        assert numbers == want, f"a matrix has the rows 1 2 3 4, 5 6 7 8 ...; a rank has {has}: expected {want}, got {numbers}"
        assert shape == [4, 4], f"a rank has {has} of a matrix of the shape [4, 4]: global_shape returns {shape}, not this list"
    # the purpose of the two ways to split: x = 1 2 through UP is 1 2 3 -1, and through DOWN 5 1
    assert products == [([1, 2], [3, 2]), ([3, -1], [2, -1])], (
        f"outputs of the first matrix, terms of the second: expected [1, 2], [3, 2] and [3, -1], [2, -1], got {products}")


def all_reduce_job():
    from tensor_parallel import all_reduce
    rank, group = start()
    found = []
    for x in torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).T:
        x *= 10**rank
        before = x.tolist()
        with watched() as calls:
            result = all_reduce(x, group)
            started = [name for name, _ in calls]
            assert callable(result), f"all_reduce returned {type(result)}, not a function without arguments"
            found.append((started, result().tolist(), x.tolist() == before))
    return found


@rung({"tensor_parallel.py": ["all_reduce"]}, hints="""
    `identity`, above it, shows the form: it does its work and returns a function that gives the result. Here that function has to
    wait first. Between the two calls, the caller can compute something else.

    `dist.all_reduce(tensor, group=group, async_op=True)` returns a handle at once; after `handle.wait()` the tensor has the sums.
    It changes the tensor in place, so make a copy first: `x.clone(memory_format=torch.contiguous_format)`. The elements of this
    copy lie in order in memory, even if x is a transposed tensor.

    `x = x.clone(memory_format=torch.contiguous_format)`; `handle = dist.all_reduce(x, group=group, async_op=True)`; then define a
    function `result()` that calls `handle.wait()` and returns x; return the function, not its result.""")
def test_a_sum_that_is_waited_for_later(pool):
    """Write `all_reduce(x, group)`. It starts to sum x over the ranks of the group, and returns a function. That function waits,
    and returns the sum. x itself must not change. x may also be a transposed tensor."""
    for _, answer in answers(pool, all_reduce_job):
        for (started, found, unchanged), expected in zip(answer, ([11, 22], [[11, 44], [22, 55], [33, 66]])):
            assert started == ["all_reduce"], (
                f"before it returns, all_reduce must start one collective and not wait for it (async_op=True); it did {started}")
            assert found == expected, (
                f"two of four ranks are a group; with x ten times as large on its rank 1, the sum is {found}, "
                f"expected {expected}")
            assert unchanged, "all_reduce has changed x: others still need it, so the sum must be made in a copy"


EXCHANGED = ", with gather and reduce exchanged"


def f_and_g_job():
    from tensor_parallel import EnterRegion, LeaveRegion
    rank, group = start()
    gather, reduce, _ = comm = comm_without_sp(group)
    found, saved = {}, []
    for name, kind, mine, gradient in [("EnterRegion", EnterRegion, [1.0, 2.0], [[1.0, 1.0], [2.0, 0.0]][rank]),
                                       ("LeaveRegion", LeaveRegion, [[3.0, 2.0], [2.0, -1.0]][rank], [1.0, 0.0])]:
        # with gather and reduce exchanged, a sum must appear where there was none, and the other way round
        for how, used in (("", comm), (EXCHANGED, (reduce, gather, group))):
            x = torch.tensor([[mine]], requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(name) or tensor, lambda tensor: tensor):
                y = kind.apply(x, *used)
            y.backward(torch.tensor([[gradient]]))
            found[name + how] = y.flatten().tolist(), x.grad.flatten().tolist()
    assert not saved, f"{saved[0]} saves a tensor for backward, and so keeps its memory; gather and reduce need none"
    return found


F_AND_G = ["EnterRegion.forward", "EnterRegion.backward", "LeaveRegion.forward", "LeaveRegion.backward"]


@rung({"tensor_parallel.py": F_AND_G}, hints="""
    When a region is entered, all ranks already have the input, so forward has nothing to do with --sp off. But each rank computes
    only its own terms of the input's gradient, so backward has to sum them over the ranks. When a region is left, it is the other
    way round. Both classes get the functions that do this as arguments: `gather` and `reduce`.

    Each of the two functions starts something and returns a function that waits: `gather(x, group)()` does both. Forward keeps
    what backward needs on ctx: `ctx.reduce, ctx.group = reduce, group`. backward returns a gradient for every argument of forward
    but ctx: x, gather, reduce, group. For an argument that is not a tensor it is None.

    EnterRegion.forward: keep reduce and group on ctx, return `gather(x, group)()`. EnterRegion.backward: return `ctx.reduce(grad,
    ctx.group)(), None, None, None`. LeaveRegion is the same, with gather and reduce exchanged.""")
def test_f_and_g(pool):
    """Write f and g. EnterRegion is f: forward returns `gather` of x, and backward returns `reduce` of the gradient. LeaveRegion is
    g: forward does `reduce`, backward does `gather`. Use the functions that you get as arguments. With --sp off these are identity
    and all_reduce; with --sp on they will be others."""
    for rank, found in answers(pool, f_and_g_job):
        expected = {"EnterRegion": ([1, 2], [3, 1]), "EnterRegion" + EXCHANGED: ([2, 4], [[1, 1], [2, 0]][rank]),
                    "LeaveRegion": ([5, 1], [1, 0]), "LeaveRegion" + EXCHANGED: ([[3, 2], [2, -1]][rank], [2, 0])}
        for name, (forward, backward) in found.items():
            want, want_backward = expected[name]
            assert forward == want, f"{name}: forward returns {forward} on rank {rank}, expected {want}"
            assert backward == want_backward, f"{name}: the gradient of x is {backward} on rank {rank}, expected {want_backward}"


def region_job():
    from tensor_parallel import ColumnParallelLinear, RowParallelLinear
    rank, group = start()
    (gather, reduce, _), mine, used = comm_without_sp(group), slice(2 * rank, 2 * rank + 2), []
    comm = (lambda *args: used.append("gather") or gather(*args), lambda *args: used.append("reduce") or reduce(*args), group)
    first = ColumnParallelLinear(nn.Linear(2, 4, bias=False), 2, comm)
    last = RowParallelLinear(nn.Linear(4, 2, bias=False), 2, comm)
    first.weight.data, last.weight.data = torch.tensor(UP)[mine], torch.tensor(DOWN)[:, mine].contiguous()
    x = torch.tensor([[[1.0, 2.0]]], requires_grad=True)
    inner = first(x)
    y = last(inner.relu())
    y[..., 0].sum().backward()
    return [inner.flatten().tolist(), y.flatten().tolist(), x.grad.flatten().tolist(),
            first.weight.grad.tolist(), last.weight.grad.tolist(), used]


@rung({"tensor_parallel.py": ["ColumnParallelLinear.forward", "RowParallelLinear.forward"]}, hints="""
    Two linears make a region: the first one computes some of the inner numbers on each rank, the second turns them into one term
    of every output. Where does f belong, and where does g? One of the two is called before the product, the other after it.

    `F.linear(x, self.weight)` is the product with the shard that this rank has. `enter_region(x, self.comm)` is f and
    `leave_region(x, self.comm)` is g.

    ColumnParallelLinear: return `F.linear(enter_region(x, self.comm), self.weight)`. RowParallelLinear: return
    `leave_region(F.linear(x, self.weight), self.comm)`.""")
def test_a_region_of_two_linears(pool):
    """Write both forwards. ColumnParallelLinear computes some of the outputs; it stands where a region is entered.
    RowParallelLinear has some of the inputs; it stands where the region is left. Together they must return on all ranks what two
    whole linears return, with the gradients of two whole linears."""
    # 1 2 | 3 -1 in between; relu turns -1 into 0
    expected = [("between the two linears are", [[1, 2], [3, -1]]), ("the outputs are", [[6, 2], [6, 2]]),
                ("the gradient of x is", [[2, 2], [2, 2]]),
                ("the gradient of the first weight is", [[[1, 2], [1, 2]], [[1, 2], [0, 0]]]),
                ("the gradient of the last weight is", [[[1, 2], [0, 0]], [[3, 0], [0, 0]]]),
                ("the functions called from self.comm are", [["gather", "reduce", "gather", "reduce"]] * 2)]
    for rank, found in answers(pool, region_job):
        for (what, want), came in zip(expected, found):
            assert came == want[rank], f"{what} {came} on rank {rank}, expected {want[rank]}"


def sequence_job():
    from tensor_parallel import all_gather, reduce_scatter
    rank, group = start()
    whole = torch.tensor([[0.0, 1, 2, 3], [10, 11, 12, 13]])                       # [batch, seq]
    whole = torch.stack((whole, -whole)).permute(1, 2, 0)                          # [batch, seq, 2], not in order in memory
    found = []
    for collective, x in ((all_gather, whole[:, 2 * rank:2 * rank + 2]), (reduce_scatter, whole * 100**rank)):
        with unforgiving(), watched() as calls:           # until it is waited for, the result is NaN
            result = collective(x, group)
            started = list(calls)
            assert callable(result), f"{collective.__name__} returned {type(result)}, not a function without arguments"
            y = result()
        found.append((started, list(y.shape), y[..., 0].tolist(), y[..., -1].tolist()))
    return found


@rung({"tensor_parallel.py": ["all_gather", "reduce_scatter"]}, hints="""
    The two collectives work along the first dimension: a gathered tensor has all of rank 0, then all of rank 1. But the sequence is
    the second dimension, after batch. So move the ranks' parts to the front before a reduce-scatter, and back into place
    after an all-gather. As in `all_reduce`, start the collective and return a function that waits.

    `dist.all_gather_into_tensor(output, input, group=group, async_op=True)` and `dist.reduce_scatter_tensor(output, input, ...)`
    want contiguous tensors. `t.unflatten(dim, (group.size(), -1))` splits a dimension into ranks and the rest, `transpose(0, 1)`
    swaps it with another one, and `flatten(i, i + 1)` merges two dimensions into one.

    all_gather: the output is `gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])`, the input `x.contiguous()`; after
    the wait return `gathered.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)`. reduce_scatter: `parts =
    x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1)`; the output is `shard = torch.empty_like(parts[:len(x)])`, the
    input `parts.contiguous()`; after the wait return shard.""")
def test_parts_of_a_sequence(pool):
    """Write the collectives for --sp on. In `all_gather(x, group)`, x is this rank's part of the sequence, [batch, seq/tp,
    hidden], and the result is the whole, [batch, seq, hidden]. In `reduce_scatter(x, group)`, x is the whole sequence on each
    rank, and the result is this rank's part of the sum over the ranks. Both start one collective and return a function that
    waits for the result."""
    whole = [[0, 1, 2, 3], [10, 11, 12, 13]]
    for rank, (gathered, scattered) in answers(pool, sequence_job):
        sums = [[101 * n for n in row[2 * rank:2 * rank + 2]] for row in whole]
        for name, answer, expected in ("all_gather", gathered, whole), ("reduce_scatter", scattered, sums):
            started, shape, first, last = answer
            names, want = [name for name, _ in started], [2, len(expected[0]), 2]
            assert names == [f"{name}_{'into_' * (name == 'all_gather')}tensor"], (
                f"{name} must start one dist.{name}_... before it returns, and not wait for it (async_op=True); it did {names}")
            assert shape == want, f"{name}: from 2 sequences of 4 tokens of 2 numbers, the result has the shape {shape}, not {want}"
            assert first == expected, (
                f"{name}: the sequences are {whole[0]} and {whole[1]}, times 100 on rank 1 if they are summed; rank {rank} has "
                f"{first}, expected {expected}")
            want = [[-n for n in row] for row in expected]
            assert last == want, f"{name}: a token's second number is the first times -1; got {last}, expected {want}"


def embedding_job():
    from tensor_parallel import VocabParallelEmbedding
    rank, group = start()
    embedding = VocabParallelEmbedding(nn.Embedding(6, 2), 2, comm_without_sp(group))
    rows = torch.tensor([[n, 10.0 * n] for n in (1, 2, 3, 4, 5, 6)])
    embedding.weight.data = rows[3 * rank:3 * rank + 3]
    tokens = torch.tensor([[1, 3, 3, 5]])
    y = embedding(tokens)
    y.sum().backward()
    assert tokens.tolist() == [[1, 3, 3, 5]], "forward has changed the tokens that it was given"
    return y.tolist(), embedding.weight.grad[:, 0].tolist()


@rung({"tensor_parallel.py": ["VocabParallelEmbedding.forward"]}, hints="""
    Each rank has the vectors of some tokens. For any other token it makes a vector of zeros. Then the sum over the
    ranks is right for every token, since exactly one rank has added a vector.

    With n rows on each rank, rank r has the tokens r n to (r + 1) n, so subtract `group.rank() * len(self.weight)` from the tokens
    first. A mask says which are between 0 and len(self.weight). The others must not be looked up: put 0 in their places, and
    multiply what comes by the mask, so that row 0 gets no gradient from them.

    `_, _, group = self.comm`; `tokens = tokens - group.rank() * len(self.weight)`; `local_mask = (tokens >= 0) & (tokens <
    len(self.weight))`; `vectors = F.embedding(tokens.where(local_mask, 0), self.weight) * local_mask.unsqueeze(-1)`; return
    `leave_region(vectors, self.comm)`.""")
def test_a_part_of_the_vocabulary(pool):
    """Write VocabParallelEmbedding.forward(tokens), which returns the vectors of all tokens, on all ranks. Each rank has the same
    number of rows of the table, rank 0 the first ones. The region ends where the ranks' terms are added up, so return
    `leave_region` of them."""
    for rank, (vectors, gradient) in answers(pool, embedding_job):
        expected = [[[2, 20], [4, 40], [4, 40], [6, 60]]]
        assert vectors == expected, f"with the rows [1, 10] ... [6, 60], the tokens 1 3 3 5 have {vectors}, expected {expected}"
        expected = [[0, 1, 0], [2, 0, 1]][rank]
        assert gradient == expected, (
            f"tokens 1 3 3 5: on rank {rank} the gradient of each row is how often its token occurs, {expected}; "
            f"got {gradient}")


def cross_entropy_job(more):
    from tensor_parallel import vocab_parallel_cross_entropy
    rank, group = start()
    more *= torch.tensor([[1], [-1]]) * (1 + dist.get_rank() // 2)                 # other logits in the other group
    probabilities = torch.tensor([[1.0, 2, 3, 2], [4, 1, 1, 2]], dtype=torch.float64) / 8
    with watched() as calls:
        loss, gradient = vocab_parallel_cross_entropy(group)(
            (probabilities.log() + more)[:, 2 * rank:2 * rank + 2].contiguous(), torch.tensor([2, 0]))
    low, _ = vocab_parallel_cross_entropy(group)(torch.zeros(2, 2, dtype=torch.bfloat16), torch.tensor([2, 0]))
    return loss.item(), (8 * gradient).tolist(), sum(size for _, size in calls), str(low.dtype)


@rung({"tensor_parallel.py": ["vocab_parallel_cross_entropy.cross_entropy"]}, hints="""
    The loss of a token is log(sum of exp(logit)) - (the target's logit), and its gradient is softmax(logits) minus 1 at the
    target. Each rank has the logits of some words. So three numbers per token need all ranks: the largest logit, which is
    subtracted first so that exp does not overflow; the sum; and the logit of the target, which one rank has.

    Compare `cross_entropy` in loss.py. For the largest: `dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)`. The sum and
    the target's logit are both summed, so both can go in one tensor of shape [tokens, 2]. Treat targets as you treated the tokens
    in the embedding: subtract group.rank() * logits.shape[1], make a mask, put 0 where the target is not here.

    `logits = logits.to(torch.promote_types(logits.dtype, torch.float32))`; `target = (targets - group.rank() *
    logits.shape[1]).unsqueeze(-1)`; `local_mask` as before; `target = target.where(local_mask, 0)`; `largest = logits.amax(-1,
    keepdim=True)`, reduced by MAX; `logits = logits - largest`; `sums =
    torch.cat((logits.exp().sum(-1, keepdim=True), logits.gather(-1, target) * local_mask), dim=-1)`, all-reduced; `log_sum =
    sums[:, :1].log()`. The loss is `(log_sum - sums[:, 1:]).sum()`; the gradient is `(logits - log_sum).exp()` with -1 added at
    the target where local_mask is true: `gradient.scatter_add_(-1, target, -local_mask.type_as(gradient))`.""")
def test_a_loss_over_all_parts_of_the_vocabulary(pool):
    """Write `cross_entropy(logits, targets)`. It gets the logits of this rank's part of the vocabulary, [tokens, vocab/tp], and all
    targets. Return the summed loss, the same on all ranks, and the gradient of this rank's logits. Logits may be large, and those
    of two tokens may be far apart. As in loss.py, sum in float32 or better. All-reduce only three numbers per token."""
    for more in (0, 1000):
        for rank, (loss, gradient, sent, low) in answers(pool, cross_entropy_job, more=more):
            here = f"softmax 1 2 3 2 and 4 1 1 2 eighths, targets 2 and 0, {'logits near +-1000, ' * bool(more)}rank {rank}:"
            assert loss == pytest.approx(1.673976, rel=1e-6), (
                f"{here} the loss is {loss:.6f}, expected log(8/3) + log(8/4) = 1.673976")
            for came, expected in zip(gradient, [[[1, 2], [-4, 1]], [[-5, 2], [1, 2]]][rank]):
                assert came == pytest.approx(expected), (
                    f"{here} the gradient, in eighths, is {', '.join(f'{n:.4g}' for n in came)}, expected {expected}")
            assert sent == 6, f"{here} {sent} numbers are all-reduced; expected 3 for each token, 6 in all"
            assert low == "torch.float32", f"logits are in bfloat16, and the loss is in {low}; loss.py computes it in float32"


def linears_job(sp):
    import tensor_parallel
    rank, group = start()
    draw = torch.Generator().manual_seed(0)
    numbers = lambda *shape: torch.randint(-3, 4, shape, generator=draw).double()
    whole, weights, grads = numbers(2, 4, 3), numbers(2, 7, 3), numbers(2, 2, 4, 7)
    log = []

    def note_products(op, args, kwargs):
        if op.name().split(".")[0].endswith("mm") and log[-1:] != ["products"]:
            log.append("products")

    def logged(name, collective):
        def start(x, group):
            log.append(f"start {name}")
            result = collective(x, group)
            return lambda: (log.append(f"wait for {name}"), result())[1]
        return start
    gather, reduce = ("all_gather", "reduce_scatter") if sp else ("identity", "all_reduce")
    comm = logged("gather", getattr(tensor_parallel, gather)), logged("reduce", getattr(tensor_parallel, reduce)), group
    part = slice(2 * rank, 2 * rank + 2) if sp else slice(None)
    x = whole[:, part].clone().requires_grad_()
    mine = [weight.clone().requires_grad_() for weight in weights[rank].split((5, 2))]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        products = tensor_parallel.ColumnParallelLinears.apply(x, *comm, *mine)
    what = type(products).__name__
    assert what == "tuple" and len(products) == 2, f"with two weights forward must return a tuple of two products; got a {what}"
    saved += [value for value in vars(products[0].grad_fn).values() if isinstance(value, torch.Tensor)]
    kept = sum(tensor.numel() for tensor in saved) - sum(weight.numel() for weight in mine)
    products_right = all(torch.equal(y, F.linear(whole, weight)) for y, weight in zip(products, mine))
    forward, log[:] = list(log), []
    with Watch(note_products):
        torch.autograd.backward(products, grads[rank].split((5, 2), dim=-1))
    expected_x = (grads[0] @ weights[0] + grads[1] @ weights[1])[:, part]
    expected_weight = grads[rank].flatten(0, 1).T @ whole.flatten(0, 1)
    return (products_right, kept - x.numel(), forward, torch.equal(x.grad, expected_x),
            torch.equal(torch.cat([weight.grad for weight in mine]), expected_weight), log)


@rung({"tensor_parallel.py": ["ColumnParallelLinears.forward", "ColumnParallelLinears.backward"]}, hints="""
    Several linears have the same input, so f is done once for all of them: gather x, then multiply it by each weight. With
    --sp on the gathered x is tp times as large as x. Autograd would keep it for backward; here only x is kept, and backward gathers
    it once more. Two collectives in backward, and two kinds of products: which product needs which result?

    For `y = F.linear(x, weight)` the gradient of x is `grad @ weight`, summed over the weights and then reduced over the ranks. The
    gradient of a weight is `grad.T @ x`, with all tokens of the batch in one dimension: `grad.flatten(0, 1).T @ x.flatten(0, 1)`.
    The first needs no x at all, so it can be computed while x is gathered; the second can be computed while the first is reduced.

    forward: `ctx.gather, ctx.reduce, ctx.group = gather, reduce, group`; `ctx.save_for_backward(x, *weights)`; `x = gather(x,
    group)()`; return a tuple of `F.linear(x, weight)`. backward: `x, *weights = ctx.saved_tensors`; `gathered = ctx.gather(x,
    ctx.group)`; `reduced = ctx.reduce(sum of grad @ weight, ctx.group)`; `x = gathered().flatten(0, 1)`; the weights' gradients;
    return `reduced(), None, None, None, *grad_weights`.""")
def test_one_gathering_for_several_linears(pool):
    """Write ColumnParallelLinears, which combines f with the products that follow it. `forward(ctx, x, gather, reduce, group,
    *weights)` gathers x and returns a tuple, the product with each weight. Save for backward the weights, and x as it was before
    gathering. `backward` starts to gather x again, computes the gradient of x meanwhile, starts to reduce that, and computes the
    weights' gradients meanwhile."""
    for sp in (False, True):
        for right, more, forward, x_right, weights_right, backward in (answer for _, answer in answers(pool, linears_job, sp=sp)):
            here = f"with --sp {'on' if sp else 'off'}"
            assert right, f"{here} the products are not those of the gathered x with each weight"
            assert forward == ["start gather", "wait for gather"], f"{here} forward must gather once; it did {', '.join(forward)}"
            assert x_right, f"{here} the gradient of x is not the sum of grad @ weight over the weights, reduced over the ranks"
            assert weights_right, f"{here} the gradients of the weights are not those of the products with the gathered x"
            assert more <= 0, f"{here} forward saves {more} numbers more than x and the weights; the gathered x must not be saved"
            assert more == 0, (f"{here} forward must keep x and the weights by ctx.save_for_backward: --recompute cannot drop "
                               "what is kept elsewhere")
            expected = ["start gather", "products", "start reduce", "wait for gather", "products", "wait for reduce"]
            assert backward == expected, f"{here} backward did {', '.join(backward)}; expected {', '.join(expected)}"


def partial_gradients_job():
    import tensor_parallel
    rank, group = start()
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for i, param in enumerate(params):
        param.main_grad = torch.full((2,), (i + 1.0) * 10**rank)
        param.placement = SimpleNamespace(grad_reduce_group=group if i != 1 else None)
    tensor_parallel.all_reduce_partial_grads(params)
    return [param.main_grad.tolist() for param in params]


@pytest.mark.slow
@rung({"tensor_parallel.py": ["all_reduce_partial_grads", "traffic"]}, hints="""
    Some parameters are replicated over tp, but each rank computes only a partial gradient of them. Their
    `placement.grad_reduce_group` is the group over which to sum these gradients, once per step. For the traffic, count how often a
    region is entered or left: each time, the payload is the whole [batch, seq, hidden], for all sequences of the step.

    A layer has two regions, and each is entered and left once in forward and once in backward. With --sp off only one of the two
    directions is an all-reduce, so there are 4 in each layer, and 1 at each end of the model (embedding and head). With --sp on
    both directions send: a reduce-scatter one way, an all-gather the other way; and ColumnParallelLinears gathers twice more per
    layer. The cross-entropy sends three numbers for each token.

    all_reduce_partial_grads: for each param with a placement.grad_reduce_group, `dist.all_reduce(param.main_grad,
    group=param.placement.grad_reduce_group)`. traffic: `tokens = args.global_batch_size // args.dp * args.seq_len`;
    `activation_bytes = tokens * model.model.config.hidden_size * args.dtype.itemsize`; `layers = len(model.model.layers)`;
    `reductions = 4 * layers + 2`. --sp off: (group, "all_reduce", reductions * activation_bytes). --sp on: (group,
    "reduce_scatter", reductions * activation_bytes) and (group, "all_gather", (reductions + 2 * layers) * activation_bytes).
    Always: (group, "all_reduce", 3 * tokens * torch.promote_types(args.dtype, torch.float32).itemsize), and
    (placement.grad_reduce_group, "all_reduce", main_grad.nbytes) of each parameter that has a grad_reduce_group. The group is
    `mesh.get_group("tp")`. If args.tp is 1 the list is empty. (This counts neither --recompute nor --zero; ours does.)""")
@pytest.mark.parametrize("flags", [
    "float64 --tp 2 --sp off", "float64 --tp 2 --sp on", "float64 --tp 4 --sp on", "float64 --tp 1 --sp on",
    "bfloat16 --tp 2 --sp on"])
def test_a_training_run(pool, flags):
    """Write `all_reduce_partial_grads(params)`: for each parameter with a placement.grad_reduce_group, sum its main_grad over that
    group. Write `traffic`: return what tensor parallelism should send in one training step, as a list of (group,
    collective, payload bytes). Four steps on four ranks, with tp 2, 4 or 1, must give the losses, gradient norms and weights of one
    process, and the ledger's bytes must be the expected ones, here for --recompute none and --zero 0. (`make test` also asks for
    the others. Recomputation enters and leaves a layer's regions again, except that it does not leave the last one. And with
    --zero, the sharded_params() of model.zero_units are summed instead of the parameters.)"""
    for rank, found in answers(pool, partial_gradients_job):
        expected = [[11, 11], [2 * 10**rank, 2 * 10**rank], [33, 33]]
        assert found == expected, (
            f"three parameters have the main_grads 1, 2, 3 on rank 0 and 10, 20, 30 on rank 1; the first and the last have a "
            f"placement.grad_reduce_group; rank {rank} has {found} after all_reduce_partial_grads, expected {expected}")
    shape = "dense-2-kv2" if "--tp 4" in flags else "dense-3"                      # fewer key-value heads than ranks
    check(pool, layouts.Layout(STEP, 4, shape, "adamw", f"--recompute none --micro_batch_size 6 --dtype {flags}"))
