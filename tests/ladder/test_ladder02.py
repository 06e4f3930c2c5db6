"""The ladder of step 2: gradients summed over ranks, three ways. Each test is a rung; exercise.py says how they are used."""
from types import SimpleNamespace

import layouts
import pytest
from exercise import rung
from observe import check

STEP = "step02_dp"
# two micro-batches on each of two ranks
ARGS = dict(global_batch_size=4, micro_batch_size=1, dp=2, bucket_mb=0.0001)


# ------------------------------------------------------------------------------------------------ on every rank
def three_parameters(rank):
    """Small parameters, each with a main_grad of its own that says whose it is: 100 for rank 1, 10 for the second parameter
    ..."""
    import torch
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 3, 40)]
    for i, param in enumerate(params):
        param.main_grad = torch.full_like(param, 100.0 * rank + 10 * i)
    return params


def summed_job(mode):
    """main_grad of each parameter before and after the sum, where backward has run twice, and how often a collective was
    called."""
    from unittest.mock import patch

    import data_parallel
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, calls, all_reduce = dist.get_rank(), [], dist.all_reduce
    params = three_parameters(rank)

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    def backward():
        sum(param.sum() for param in params).backward()
        for param in params:
            param.grad = None
    with patch.object(dist, "all_reduce", counted):
        sum_gradients = data_parallel.data_parallel(params, dist.group.WORLD, SimpleNamespace(dp_mode=mode, **ARGS))
        backward()
        early = len(calls)
        backward()
        sum_gradients()
    assert all((param.main_grad == param.main_grad.flatten()[0]).all() for param in params)
    return [param.main_grad.flatten()[0].item() for param in params], early, calls


def assert_summed(pool, mode):
    """100 + 0 and, of the i-th, twice 10 i."""
    answers = pool.call(summed_job, STEP, world=2, mode=mode)
    for sums, early, _ in answers:
        assert sums == [100, 120, 140], f"the main_grads are {sums} after the sum over two ranks, not [100, 120, 140]"
        assert early == 0, f"{early} all-reduces were started before the last micro-batch: its share is not in them"
    return answers[0][2]


@rung({"data_parallel.py": ["naive"]}, hints="""
    `param.main_grad` is this rank's sum. Which collective replaces it, on every rank, by the sum of all ranks'?

    `dist.all_reduce(tensor, group=group)` sums in place and returns when it is done. It is wanted once per parameter, after
    backward: in a function that `naive` returns.

    Define a function without arguments that loops over `params` and calls `dist.all_reduce(param.main_grad, group=group)`.
    Return the function, not its result.""")
def test_a_sum_after_backward(pool):
    """`naive` returns a function that, when it is called after backward, leaves in every parameter's main_grad the sum over
    all ranks."""
    assert assert_summed(pool, "naive") == [2, 3, 40], "one all-reduce per parameter, in their order"


def counted_job():
    import data_parallel
    import torch
    params, final = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)], []
    data_parallel.when_final(params, 3, lambda param: final.append(next(i for i, p in enumerate(params) if p is param)))
    seen = []
    for _ in range(6):
        (params[0].sum() + params[1].sum()).backward()
        seen.append(len(final))
    return seen, final


@rung({"data_parallel.py": ["when_final"]}, hints="""
    Backward runs once per micro-batch. How does a parameter find out that this was the last one? It can count.

    `param.register_post_accumulate_grad_hook(f)` calls f(param) each time that backward has made this parameter's gradient.
    Keep a count per parameter, in a dictionary.

    In the hook: add one to the parameter's count; if the count can be divided by `micro_batches` without a rest, call
    `start(param)`. Do not reset at the end of a step: the rest of the division does that.""")
def test_knowing_when_a_gradient_is_final(pool):
    """With 3 micro-batches `start` is called for each parameter in the 3rd backward, and in the 6th again; in no other."""
    (seen, final), = pool.call(counted_job, STEP)
    assert seen == [0, 0, 2, 2, 2, 4], f"after each of six backwards, start had been called {seen} times, not [0, 0, 2, 2, 2, 4]"
    assert sorted(final[:2]) == sorted(final[2:]) == [0, 1], "once for each parameter, with the parameter as its argument"


@rung({"data_parallel.py": ["overlap", "wait_for_all"]}, hints="""
    An all-reduce can be started and waited for later: then backward goes on meanwhile. Which argument of dist.all_reduce
    asks for that, and what does it return then?

    `dist.all_reduce(..., async_op=True)` returns a work with a method `wait()`. Start one for each parameter when it is
    final, and keep the works in a list.

    `overlap`: a list, a function start(param) that appends the work, `when_final(params, micro_batches, start)`, and return
    `functools.partial(wait_for_all, under_way)`. `wait_for_all` waits for each of the list, and empties it for the next
    step.""")
def test_sending_while_backward_goes_on(pool):
    """`overlap` starts a parameter's all-reduce as soon as its gradient is final, and returns a function that waits for all
    that were started."""
    assert sorted(assert_summed(pool, "overlap")) == [2, 3, 40], "one all-reduce per parameter"


def bucket_job():
    import data_parallel
    params = three_parameters(1)[:2]
    bucket = data_parallel.Bucket(params)
    before = bucket.flat.tolist()
    bucket.flat += 1
    return before, [param.main_grad.tolist() for param in params], bucket.missing


@rung({"data_parallel.py": ["Bucket.__init__"]}, hints="""
    One large message is faster than many small ones. To send several main_grads at once they have to lie side by side in
    one flat tensor. Copying them there every step would cost time: how can they lie there always?

    Make one flat tensor of all main_grads (torch.cat of the flattened ones), then let each parameter's main_grad be a view
    of its part: split and view_as.

    `self.params`, `self.missing` (how many gradients have not come yet: all), `self.flat = torch.cat([... .flatten()
    ...])`; then `for param, view in zip(params, self.flat.split(sizes)): param.main_grad = view.view_as(param)`.""")
def test_gradients_side_by_side(pool):
    """A Bucket of parameters has `flat` with all their main_grads' numbers, and every main_grad is a view of it; `missing`
    is their number."""
    (before, after, missing), = pool.call(bucket_job, STEP)
    assert before == [100, 100, 110, 110, 110], f"flat has {before}"
    assert after == [[101, 101], [111, 111, 111]], "what is added to flat must be seen in main_grad: a view, not a copy"
    assert missing == 2


def runs_job(bucket_bytes):
    import data_parallel
    import torch
    params = []
    for size in (10, 20, 30, 40):
        params.append(torch.nn.Parameter(torch.zeros(size)))
        params[-1].main_grad = torch.zeros(size)
    return [[len(param) for param in bucket.params] for bucket in data_parallel.make_buckets(params, bucket_bytes)]


@rung({"data_parallel.py": ["make_buckets"]}, hints="""
    Backward reaches the parameters in the reverse of their order in the model. Which of them should share a bucket, so that
    the first bucket is full early?

    Go through `reversed(params)` and fill lists. When the present list has reached `bucket_bytes` (main_grad.nbytes), begin
    another.

    Keep `runs = [[]]` and `size = 0`. For each parameter: if size >= bucket_bytes, append a new list and set size to 0;
    then append the parameter and add its bytes. Make a Bucket of each list.""")
def test_which_gradients_share_a_bucket(pool):
    """In the order of backward (the last parameter first), a bucket is closed when it has at least `bucket_bytes`."""
    expected_by_size = {1: [[40], [30], [20], [10]], 200: [[40, 30], [20, 10]], 281: [[40, 30, 20], [10]],
                        10**6: [[40, 30, 20, 10]]}
    for size, expected in expected_by_size.items():
        found = pool.call(runs_job, STEP, bucket_bytes=size)[0]
        assert found == expected, (f"with {size} bytes, parameters of 10, 20, 30, 40 numbers are put together "
                                   f"as {found}, not {expected}")


@rung({"data_parallel.py": ["bucketed"]}, hints="""
    It is `overlap` with one change: what is sent is not a parameter's main_grad, but a bucket's flat tensor. When may it be
    sent?

    Give each bucket a count of gradients that are missing. A dictionary says which bucket a parameter is in.

    start_when_full(param): take one from bucket.missing; when it is 0, start the all-reduce of bucket.flat, keep the work,
    and set missing to len(bucket.params) again for the next step.""")
def test_a_bucket_is_sent_when_it_is_full(pool):
    """`bucketed` starts one all-reduce per bucket, when the last gradient of the bucket is final."""
    calls = assert_summed(pool, "bucket")
    assert calls == [40, 5], f"all-reduces of {calls} numbers: with buckets of 105 bytes it is one of 40, then one of 3 + 2"


@pytest.mark.slow
@rung({"data_parallel.py": ["formula"]}, hints="""
    The ledger compares what was sent with what a technique says that it sends. How many bytes of gradients does a rank sum
    in a step?

    A list of (group, collective, bytes). The group of the data-parallel ranks is mesh.get_group("dp").

    One entry per parameter: `(mesh.get_group("dp"), "all_reduce", param.main_grad.nbytes)`. The buckets have the same bytes
    in all.""")
@pytest.mark.parametrize("mode", ["naive", "overlap", "bucket"])
def test_a_training_run(pool, mode):
    """Four steps on two ranks give the losses, gradient norms and weights of one process, and the ledger's bytes are the
    formula's."""
    flags = f"--dtype float64 --recompute none --micro_batch_size 6 --dp_mode {mode}"
    check(pool, layouts.Layout(STEP, 2, "dense-3", "adamw", flags))
