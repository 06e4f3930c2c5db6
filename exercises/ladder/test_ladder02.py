"""The ladder of step 2: gradients summed over ranks, three ways. Each test is a rung; exercise.py explains how to use them."""
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import layouts
import pytest
import torch
import torch.distributed as dist
from exercise import rung
from harness import JobFailed
from observe import check

STEP = "step02_dp"
# two micro-batches on each of two ranks
ARGS = dict(global_batch_size=4, micro_batch_size=1, dp=2, bucket_mb=0.0001)


# ------------------------------------------------------------------------------------------------ on every rank
def add_hook(param, noted=lambda param: None):
    """Give a parameter a main_grad to which every backward adds, as add_main_grads does."""
    def add(param):
        param.main_grad += param.grad
        param.grad = None
        noted(param)
    param.main_grad = torch.zeros(param.shape)
    param.register_post_accumulate_grad_hook(add)


class Watch:
    """Stands in for dist.all_reduce. It notes each call's number of elements, when it started (`now`: the step, and where in it),
    and when it was waited for. As over nccl, an asynchronous call has its sum only after the wait."""

    def __init__(self, group):
        self.group, self.all_reduce, self.calls, self.now = group, dist.all_reduce, [], (1, "before micro-batch 1")

    def gradient(self, param):
        step, where = self.now
        self.now = step, f"{where.split(',')[0]}, after the gradient of {param.numel()} numbers"

    def __call__(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        assert tensor is not None, "all_reduce got None: after backward param.grad is None, and the gradient is in main_grad"
        assert group is self.group, "all_reduce without group=self.group: from step 4 on, other ranks are in the world, too"
        result, waits = tensor.clone(), []
        work = self.all_reduce(result, op, group, async_op)
        self.calls.append(SimpleNamespace(numbers=tensor.numel(), step=self.now[0], where=self.now[1], waits=waits,
                                          asynchronous=work is not None))

        def wait():
            work.wait()
            if not waits:
                tensor.copy_(result)
            waits.append(self.now)
        if work is not None:
            return SimpleNamespace(wait=wait)
        tensor.copy_(result)


def two_steps_job(mode, sizes):
    """Run two steps of two micro-batches. All gradients are 1 and then 10 on rank 0, 100 and then 1000 on rank 1."""
    import data_parallel
    dist.init_process_group("gloo")
    group, sums, share = dist.new_group(), [], 100 ** dist.get_rank()
    watch = Watch(group)
    params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for param in params:
        add_hook(param, watch.gradient)
    with patch.object(dist, "all_reduce", watch):
        reducer = data_parallel.make_reducer(params, group, SimpleNamespace(dp_mode=mode, **ARGS))
        assert hasattr(reducer, "finish"), f"with dp_mode {mode} make_reducer must return a reducer, not {reducer!r}"
        for step in (1, 2):
            for micro_batch in (1, 2):
                watch.now = step, f"in micro-batch {micro_batch}"
                (share * 10**(micro_batch - 1) * sum(param.sum() for param in params)).backward()
            watch.now = step, FINISH
            reducer.finish()
            sums.append([int(param.main_grad.mean()) for param in params])
            for param in params:
                param.main_grad.zero_()
    return sums, watch.calls


# ------------------------------------------------------------------------------------------------ what it has to show
FINISH = "in finish()"
SIZES = [2, 3, 40]


def after(numbers):
    return f"in micro-batch 2, after the gradient of {numbers} numbers"


def assert_two_steps(pool, mode, sizes, begin, one):
    """Check two steps. begin: {elements of an all-reduce: where it must start}; one: each of these has one all-reduce."""
    for rank, (sums, calls) in enumerate(pool.call(two_steps_job, STEP, world=2, mode=mode, sizes=sizes)):
        for step in (1, 2):
            of_step = [call for call in calls if call.step == step]
            assert_begun(step, of_step, begin, one)
            if mode != "naive":
                assert_asynchronous(step, of_step)
            assert_waited(step, of_step)
            again = [call.numbers for call in calls if call.step < step and any(wait[0] == step for wait in call.waits)]
            assert not again, (f"step {step} waited for all-reduces of {again} numbers that were started in the step "
                               "before: empty the list of handles after the waits")
            expected = [1111] * len(sizes)
            assert sums[step - 1] == expected, (
                f"after finish() in step {step} the main_grads on rank {rank} are {sums[step - 1]}, not {expected}: 1 + 10 come "
                "from rank 0, and 100 + 1000 from rank 1")


def assert_begun(step, calls, begin, one):
    early = [call for call in calls if not call.where.startswith((FINISH, "in micro-batch 2"))]
    assert not early, f"{len(early)} all-reduces were started before the last micro-batch, so its gradients are not in them"
    numbers = sorted(call.numbers for call in calls)
    assert numbers == sorted(begin), (f"in step {step} there were all-reduces of {numbers} numbers, not of {sorted(begin)}: "
                                      f"one per {one}, in every step")
    for call in calls:
        assert call.where == begin[call.numbers], (
            f"in step {step} the all-reduce of {call.numbers} numbers began {call.where}, not {begin[call.numbers]}: too early, "
            "and it misses some gradients; too late, and less of backward is left to hide it")


def assert_asynchronous(step, calls):
    numbers = [call.numbers for call in calls if not call.asynchronous]
    assert not numbers, (f"in step {step} the all-reduces of {numbers} numbers were called without async_op=True: backward stops "
                         "until they are done")


def assert_waited(step, calls):
    for call in calls:
        where = call.waits[0][1] if call.waits and call.waits[0][0] == step else FINISH
        assert where == FINISH, (f"in step {step} the all-reduce of {call.numbers} numbers was waited for {where}: backward "
                                   "stops meanwhile; the wait belongs in finish()")
    missed = [call.numbers for call in calls if call.asynchronous and (step, FINISH) not in call.waits]
    assert not missed, (f"in step {step} nobody waited for the all-reduces of {missed} numbers, out of {len(calls)} "
                        "started: finish() must wait for all of them")


@rung({"data_parallel.py": ["NaiveReducer.finish"]}, hints="""
    `param.main_grad` holds the gradient from this rank's sequences alone. Which collective replaces it, on every rank, by the sum
    over all ranks?

    `dist.all_reduce(tensor, group=group)` sums in place, and returns when it is done. You need it once for each parameter.

    Loop over `self.params` and call `dist.all_reduce(param.main_grad, group=self.group)` for each.""")
def test_a_sum_after_backward(pool):
    """Write `NaiveReducer.finish`. The trainer calls it after backward. When it returns, every parameter's main_grad must hold the
    sum over all ranks of the group. `__init__`, which is given, keeps params and group."""
    assert_two_steps(pool, "naive", SIZES, dict.fromkeys(SIZES, FINISH), "parameter")


GROUP = "the group"                                       # nothing is sent in the second rung


def counted_job():
    """Return how often start had been called after each of six backwards, for which parameters, and main_grad at each call. Check
    whose gradient was the last to arrive."""
    import data_parallel
    params, seen, called, shares = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)], [], [], []
    came, number = [], {param: i for i, param in enumerate(params)}
    for param in params:
        add_hook(param, lambda param: came.append(number[param]))

    def start(param):
        assert param in number, "start was called with a tensor that is no parameter: some hooks get the gradient instead"
        called.append([number[param]])
        shares.append(int(param.main_grad[0]))
        assert came[-1:] == called[-1], ("start was called for a parameter only after the gradient of another had come: it "
                                         "must be called as soon as its own is final, while backward computes the others")

    class Counting(data_parallel.OverlapReducer):
        def start(self, param):
            start(param)
    reducer = Counting(params, GROUP, 3)
    for backward in range(6):
        (params[0].sum() + params[1].sum()).backward()
        seen.append(len(called))
        if backward == 2:
            for param in params:
                param.main_grad.zero_()
    handles = getattr(reducer, "handles", "missing")
    return seen, called, shares, [getattr(reducer, "group", None) == GROUP, getattr(reducer, "num_micro_batches", None), handles]


@rung({"data_parallel.py": ["OverlapReducer.__init__", "OverlapReducer.on_grad"]}, hints="""
    Backward runs once per micro-batch. How does a parameter know that this was the last one? It can count.

    `param.register_post_accumulate_grad_hook(f)` makes backward call f(param) each time it has computed this parameter's gradient.
    Hooks run in the order in which they were registered, so accumulate_in_main_grad has already added the gradient to main_grad.
    `register_hook` would be too early. Keep a count for each parameter, in a dictionary.

    `__init__`: `self.backwards = dict.fromkeys(params, 0)`, and register `self.on_grad` as the hook of each parameter. `on_grad`:
    add one to the parameter's count; if `self.num_micro_batches` divides it, call `self.start(param)`. There is no need to reset
    the count at the end of a step.""")
def test_knowing_when_a_gradient_is_final(pool):
    """Write `OverlapReducer.__init__` and `on_grad`. `__init__` keeps the group in self.group and the number of micro-batches in
    self.num_micro_batches, and creates self.handles, an empty list for the next rung. It also registers on_grad, to be called
    whenever backward has computed a parameter's gradient. `on_grad(param)` calls self.start(param) when the gradient is final. With
    3 micro-batches that is in the 3rd backward, then in the 6th, and in no other. By then main_grad must contain the last
    micro-batch's gradient, and backward must not have moved on to the next parameter."""
    (seen, called, shares, attributes), = pool.call(counted_job, STEP)
    expected = [0, 0, 2, 2, 2, 4]
    assert seen == expected, f"calls of start so far (2 parameters), after each of six backwards: {seen}, not {expected}"
    assert sorted(called[:2]) == sorted(called[2:]) == [[0], [1]], (
        "start must be called once for each parameter, with the parameter as its argument")
    held = min(shares)
    assert held == 3, f"when start was called, main_grad held {held} of 3 gradients: the hook runs before the last is added"
    assert attributes == [True, 3, []], (
        "`__init__` must keep what it is given in self.group and self.num_micro_batches, and make an empty list, self.handles")


@rung({"data_parallel.py": ["OverlapReducer.start", "OverlapReducer.all_reduce", "OverlapReducer.finish"]}, hints="""
    An all-reduce can start now and be waited for later, while backward continues. Which argument of dist.all_reduce asks for that,
    and what does the call return then?

    `dist.all_reduce(..., async_op=True)` returns a handle, which has a method `wait()`. `on_grad` calls `start` for each parameter
    whose gradient is final. Start its all-reduce there, and keep the handle in `self.handles`.

    `start`: `self.all_reduce(param.main_grad)`. `all_reduce`: append `dist.all_reduce(tensor, group=self.group, async_op=True)` to
    `self.handles`. `finish`: call `wait()` on each handle of the list, then `self.handles.clear()` for the next step.""")
def test_sending_while_backward_goes_on(pool):
    """Write the rest of `OverlapReducer`. `start(param)` starts the all-reduce of a parameter's main_grad, without waiting for it.
    `all_reduce(tensor)` does the same for any tensor, and keeps the handle in self.handles. `finish` waits for all that were
    started in this step, and empties the list for the next step."""
    assert_two_steps(pool, "overlap", SIZES, {size: after(size) for size in SIZES}, "parameter")


def bucket_job():
    import data_parallel
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2,), (3, 1))]
    for i, param in enumerate(params):
        param.main_grad = torch.full_like(param, 100.0 + 10 * i, dtype=torch.float64).detach()
    bucket = data_parallel.Bucket(params)
    kinds = bucket.flat_grad.dtype, *(param.main_grad.dtype for param in params)
    found = ", ".join(map(str, kinds))
    assert set(kinds) == {torch.float64}, f"main_grads are in float64, but then flat_grad and they are in {found}"
    kept = len(bucket.params) == 2 and all(a is b for a, b in zip(bucket.params, params))
    before = bucket.flat_grad.tolist()
    bucket.flat_grad += 1
    shapes = [tuple(param.main_grad.shape) for param in params]
    return kept, before, shapes, [param.main_grad.flatten().tolist() for param in params], bucket.num_pending


@rung({"data_parallel.py": ["Bucket.__init__"]}, hints="""
    One large message is faster than many small ones. To send several main_grads in one message, they must lie side by side in one
    flat tensor. Copying them there in every step would take time. How can they always lie there?

    Build one flat tensor from all main_grads (torch.cat of the flattened ones). Then make each parameter's main_grad a view of its
    part, with split and view_as.

    `self.params = params`; `self.num_pending = len(params)`; `self.flat_grad = torch.cat([param.main_grad.flatten() for param in
    params])`; then, for each `param, view` of `zip(params, self.flat_grad.split(sizes))`, `param.main_grad =
    view.view_as(param)`.""")
def test_gradients_side_by_side(pool):
    """Write `Bucket.__init__`. `params` is the list that it gets. `flat_grad` is one tensor with the elements of all their
    main_grads, one after the other, and every main_grad becomes a view of it. `num_pending` is the number of parameters whose
    gradients are not final yet: at first len(params)."""
    (kept, before, shapes, main_grads, num_pending), = pool.call(bucket_job, STEP)
    assert kept, "`params` is not the list of parameters that Bucket was given"
    expected = [100, 100, 110, 110, 110]
    assert before == expected, f"`flat_grad` has {before}, not {expected}: the values of main_grad, one parameter after the other"
    assert shapes == [(2,), (3, 1)], f"the main_grads have the shapes {shapes}, not those of their parameters, [(2,), (3, 1)]"
    assert main_grads == [[101, 101], [111, 111, 111]], (
        f"after flat_grad += 1 the main_grads are {main_grads}: an addition to flat_grad must be seen in main_grad: make it a "
        "view, not a copy")
    assert num_pending == 2, f"`num_pending` is {num_pending}, not 2: it counts parameters"


def groups_job(bucket_bytes):
    import data_parallel
    params = []
    for size in (10, 20, 30, 40):
        params.append(torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)))
        params[-1].main_grad = torch.zeros(size)
    buckets = data_parallel.make_buckets(params, bucket_bytes)
    assert isinstance(buckets, list), f"make_buckets returned a {type(buckets).__name__}, not a list"
    others = {type(bucket).__name__ for bucket in buckets if not isinstance(bucket, data_parallel.Bucket)}
    assert not others, f"make_buckets returned a list of {' and '.join(others)}, not of Bucket: make a Bucket from each list"
    return [[len(param) for param in bucket.params] for bucket in buckets]


@rung({"data_parallel.py": ["make_buckets"]}, hints="""
    Backward reaches the parameters in the reverse of their order in the model. Which of them should share a bucket, so that the
    first bucket is complete early?

    Go through `reversed(params)` and fill lists. When the current list has reached `bucket_bytes` (count main_grad.nbytes), start
    another.

    Keep `groups = [[]]` and `size = 0`. For each parameter: if size >= bucket_bytes, append a new list and set size to 0; then
    append the parameter, and add its bytes to size. Return a Bucket for each list.""")
def test_which_gradients_share_a_bucket(pool):
    """Write `make_buckets(params, bucket_bytes)`. It returns a list of Bucket. Fill buckets with parameters, the last parameter
    first, and close a bucket as soon as its main_grads have at least `bucket_bytes`. What remains forms a last, smaller bucket."""
    expected_by_size = {1: [[40], [30], [20], [10]], 81: [[40], [30], [20, 10]], 200: [[40, 30], [20, 10]],
                        280: [[40, 30], [20, 10]], 281: [[40, 30, 20], [10]],
                        10**6: [[40, 30, 20, 10]]}
    for size, expected in expected_by_size.items():
        found = pool.call(groups_job, STEP, bucket_bytes=size)[0]
        assert found == expected, (f"with {size} bytes, parameters of 10, 20, 30, 40 numbers in bfloat16, their main_grads in "
                                   f"float32, are put together as {found}, not {expected}")


@rung({"data_parallel.py": ["BucketReducer.__init__", "BucketReducer.start"]}, hints="""
    It is an `OverlapReducer` with one change: it sends a bucket's flat_grad instead of a parameter's main_grad. When may it send
    that?

    Each bucket counts the gradients that are not final yet. A dictionary maps each parameter to its bucket.

    `__init__`: `super().__init__(params, group, num_micro_batches)`; then `self.bucket_of` maps each parameter to its bucket, for
    all buckets that `make_buckets(params, bucket_bytes)` returns. `start`: subtract one from bucket.num_pending; when it reaches 0,
    set it back to len(bucket.params) for the next step, and call `self.all_reduce(bucket.flat_grad)`.""")
def test_a_bucket_is_sent_when_it_is_full(pool):
    """Write `BucketReducer.__init__` and `start`. In every step it starts one all-reduce for each bucket, when the last gradient of
    the bucket is final, without waiting for it. It inherits the rest: OverlapReducer calls start(param) for each gradient that is
    final."""
    # buckets of at least 105 bytes: 20 + 30 numbers, 10 + 25, and the rest
    assert_two_steps(pool, "bucket", [3, 2, 25, 10, 30, 20], {50: after(30), 35: after(25), 5: after(3)}, "bucket")


def traffic_job():
    """Return what traffic says for gradients of 180 bytes on four ranks."""
    import data_parallel
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = torch.nn.ParameterList([torch.zeros(size, dtype=torch.bfloat16) for size in (5, 40)])
    for param in model:
        param.main_grad = torch.zeros(param.shape)
    args = SimpleNamespace(dp_mode="naive", **ARGS | dict(dp=4), dtype=torch.bfloat16)
    entries = data_parallel.traffic(model, mesh, args)
    assert isinstance(entries, list), (
        f"traffic returned a {type(entries).__name__}, not a list of (group, collective, bytes)")
    for entry in entries:
        assert isinstance(entry, tuple) and len(entry) == 3, f"{entry} in its list is not a (group, collective, bytes)"
    group, sent = mesh.get_group("dp"), Counter()
    for of, collective, size in entries:
        sent["dp" if of == group else str(of), collective] += size
    return dict(sent)


def assert_traffic(pool):
    found = pool.call(traffic_job, STEP, world=4)[0]
    expected = {("dp", "all_reduce"): 180}
    assert found == expected, (
        f"for main_grads of 180 bytes in all, on four ranks, traffic says {found}, not {expected}: count the payload "
        "that the all-reduce is given, not the bytes that a ring moves for it")


WRITTEN = {"naive": "NaiveReducer", "overlap": "OverlapReducer", "bucket": "BucketReducer"}


@pytest.mark.slow
@rung({"data_parallel.py": ["traffic"]}, hints="""
    The ledger compares the bytes that were sent with those that `traffic` expects. How many bytes of gradients does a rank
    all-reduce in a step?

    Return a list of (group, collective, bytes). `data_mesh(mesh).get_group()` is the group of the data-parallel ranks.

    One entry per parameter: `(group, "all_reduce", param.main_grad.nbytes)`. Buckets have the same bytes in total.""")
@pytest.mark.parametrize("mode", ["naive", "overlap", "bucket"])
def test_a_training_run(pool, mode):
    """Write `traffic`. It returns what summing the gradients should send in a training step, as a list of (group,
    collective, payload bytes). Together with the bytes of the loss, this must equal the ledger's bytes. Four steps on two ranks
    must give the losses, gradient norms and weights of one process."""
    assert_traffic(pool)
    flags = f"--dtype float64 --recompute none --micro_batch_size 6 --dp_mode {mode}"
    try:
        check(pool, layouts.Layout(STEP, 2, "dense-3", "adamw", flags))
    except AssertionError as error:
        first = str(error).splitlines()[0]
        if isinstance(error, JobFailed) or "its formula says" in first:
            raise
        raise AssertionError(f"{first}. The fault may be in {WRITTEN[mode]} (dp_mode is {mode}), not in "
                             "traffic: losses[0] is before any update, losses[1] after the first sum") from None
