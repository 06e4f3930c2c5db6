"""diloco.patch: islands train apart as they do by hand, send 1/H of the bytes between them, and wait for nobody until they meet.

The link between two machines of eight GPUs is slow. Data parallelism sums gradients over all sixteen in every step, and every rank
waits until the link has carried them. DiLoCo lets each machine, an island, train by itself for H steps, with AdamW as always. Then
it takes the weights at the last meeting minus the mean of the weights now, and treats the difference as if it were a gradient: a
second optimizer, gradient descent with Nesterov momentum, takes a step with it, and every island goes on from there.

By hand: the islands met at 10; now one is at 8 and the other at 7, so the "gradient" is 2.5. If H is 1 and the inner optimizer
takes one step of gradient descent, this is data parallelism itself (a test checks it to 1e-9); with AdamW it is not, as AdamW
divides by a root.

Between islands, one float32 per weight travels every H steps, and each GPU sends a shard of it: for llama-1b on 2 x 8 GPUs,
749,241,344 bytes per rank at each meeting, where a plain all-reduce takes 5,993,930,752 in every step. A rank keeps two more
shards. Simulated on H100s, with a link for each GPU, in seconds per step of 128 x 4,096 tokens:

    python tools/simulate exercise/diloco 16 --model llama-1b --dtype bfloat16 --seq_len 4096 --global_batch_size 128
        --micro_batch_size 4 --recompute selective --network 0.125 --islands 2      # GB/s: 1 Gbit/s

| link | data parallelism | meeting after 1 step | 10 steps | 50 steps |
|---|---|---|---|---|
| 10 Gbit/s | 1.95 | 1.53 | 0.86 | 0.80 |
| 1 Gbit/s | 14.6 | 8.27 | 1.53 | 0.93 |

(A step that ends in a meeting is simulated; for H steps, its wait for the other island, `between`, is divided by H. Without
--islands, the command simulates the first column.)

Loss on 256 sequences after 100 steps of tiny, 64 tokens, two islands of one rank: data parallelism 2.68; islands that move to their
mean 2.68 (H = 1), 2.74 (50); with the default outer step 2.94 (1), 2.96 (10), 2.79 (50).

If one machine stops for a while, the other goes on until the next meeting, and waits there: pauses at different times within a
round cost only the longer one, not their sum. If it never comes back, the other ends after ten minutes, as in any all-reduce.
"""
import time
from pathlib import Path

import cases
import observe
import pytest
import torch
from harness import assert_same_tensors, distance
from jobs import assert_refused, trained_parts

STEP, ONE, EXACT = "step02_dp", "step01_single_gpu", "--dtype float64"
MEAN = "--outer_lr 1 --outer_momentum 0"                  # the outer step moves to the mean of the islands


def parameters(layers):
    attention = cases.HIDDEN * cases.HEAD_DIM * (2 * cases.HEADS + 2 * cases.KV_HEADS)
    return 2 * cases.VOCAB * cases.HIDDEN + layers * (attention + 3 * cases.HIDDEN * cases.MLP + 2 * cases.HIDDEN) + cases.HIDDEN


# ------------------------------------------------------------------------------------- what it must be equal to
@pytest.mark.parametrize("world, islands", [(2, 2), (4, 2), (3, 3)])
def test_meeting_after_every_step_of_gradient_descent_is_data_parallelism(pool, world, islands):
    """Check with SGD: if each island moves by its own gradient, the mean of their weights moves by the mean gradient. This is not
    true of AdamW, which divides by a root."""
    flags = f"{observe.case(pool, 'dense-2')} {EXACT} --micro_batch_size 2 --grad_clip 0"
    one = pool.reference(ONE, flags, "sgd")
    apart = f"{flags} --islands {islands} --inner_steps 1 {MEAN}"
    run = pool.train(STEP, apart, world, job=observe.observed_job, optimizer="sgd")
    assert_same_tensors(run.weights, one.weights, 1e-9)
    adamw = pool.train(STEP, apart, world)
    assert max(distance(adamw.weights[name], w) for name, w in pool.reference(ONE, flags).weights.items()) > 1e-3


def by_hand_job(argv, islands, inner_steps, lr, momentum):
    """Train one process with a model for each island, in turns, and with torch's own Nesterov. Return the final weights."""
    import mesh
    import train
    with mesh.init_distributed():
        args, config, tokens = train.prepare(argv)
        device_mesh = train.build_mesh(args)
        models = [train.build_model(config, args) for _ in range(islands)]
        for model in models:
            train.data_parallel.add_main_grads(model.parameters())
        inner = [train.Optimizer(model.parameters(), args) for model in models]
        met = train.build_model(config, args)
        outer = torch.optim.SGD(met.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        for step, micro_batches in train.batches(tokens, config, device_mesh, args):
            share = len(micro_batches) // islands
            for i, (model, optimizer) in enumerate(zip(models, inner)):
                for x, positions, y in micro_batches[i * share:(i + 1) * share]:
                    (model(x, positions, y) * islands / (args.global_batch_size * args.seq_len)).backward()
                optimizer.clip_grad_norm()
                optimizer.step(train.learning_rate(step, args))
            if (step + 1) % inner_steps == 0 or step + 1 == args.steps:
                with torch.no_grad():
                    for param, *theirs in zip(met.parameters(), *(model.parameters() for model in models)):
                        param.grad = param - sum(theirs) / islands
                    outer.step()
                    for param, *theirs in zip(met.parameters(), *(model.parameters() for model in models)):
                        for other in theirs:
                            other.copy_(param)
        return {name: param.detach() for name, param in met.named_parameters()}


@pytest.mark.parametrize("world, islands, inner_steps, lr, momentum, more", [
    (2, 2, 2, 0.7, 0.9, ""), (4, 2, 3, 0.7, 0.9, "--dp_mode overlap"),             # after four steps the round is not over
    (4, 4, 1, 0.5, 0.8, "--dp_mode naive"), (3, 3, 2, 1, 0, ""), (6, 2, 2, 0.7, 0.9, "")])
def test_equals_islands_that_take_turns(pool, world, islands, inner_steps, lr, momentum, more):
    flags = f"{observe.case(pool, 'dense-2')} {EXACT} --micro_batch_size 2"
    by_hand = pool.call(by_hand_job, STEP, argv=flags.split(), islands=islands, inner_steps=inner_steps, lr=lr,
                        momentum=momentum)[0]
    run = pool.train(STEP, f"{flags} --islands {islands} --inner_steps {inner_steps} --outer_lr {lr} "
                     f"--outer_momentum {momentum} {more}", world)
    assert_same_tensors(run.weights, by_hand, 1e-9)


def test_one_island_is_the_step_itself(pool):
    flags = f"{observe.case(pool, 'dense-2')} {EXACT} --micro_batch_size 2 --islands 1"
    assert_same_tensors(pool.train(STEP, flags, 2).weights, pool.reference(ONE, flags.removesuffix("--islands 1")).weights, 1e-9)


def weights_job(argv):
    model, optimizer = trained_parts(argv)
    return [param.detach() for param in model.parameters()], [master.detach().clone() for master in optimizer.masters]


def test_ends_alike_in_bfloat16(pool):
    """Check that all ranks end with the same bits, and that the weights that compute are the averaged ones, rounded."""
    argv = f"{observe.case(pool, 'dense-2')} --dtype bfloat16 --micro_batch_size 2 --islands 2 --inner_steps 3".split()
    ranks = pool.call(weights_job, STEP, world=4, argv=argv)
    for params, masters in ranks:
        assert all(map(torch.equal, masters, ranks[0][1]))
        assert all(torch.equal(param, master.bfloat16()) for param, master in zip(params, masters))


# ------------------------------------------------------------------------------------- bytes
def every_step_job(argv):
    """Return for every step what this rank sends: {(dimension, collective): bytes}."""
    import contextlib
    from unittest.mock import patch

    import ledger
    import train
    steps = []

    @contextlib.contextmanager
    def seen(step, model, mesh, args, techniques):
        with ledger.Ledger(mesh) as seen:
            yield
        steps.append({what: size for what, size in seen.payload.items() if size})
    with patch.object(train, "ledger", seen):
        train.main(argv)
    return steps


@pytest.mark.parametrize("inner_steps", [1, 3, 6])
def test_between_islands_travels_one_slice_in_h_steps(pool, inner_steps):
    flags = f"{observe.case(pool, 'dense-2')} {EXACT} --micro_batch_size 2 --steps 6".split()
    steps = pool.call(every_step_job, STEP, world=4, argv=[*flags, "--islands", "2", "--inner_steps", str(inner_steps)])
    every = 8 * parameters(2)                             # divisible by two
    for of_rank in steps:
        between = [sum(size for (where, _), size in step.items() if where == "between") for step in of_rank]
        meets = [(i + 1) % inner_steps == 0 for i in range(6)]
        assert between == [every // 2 if meet else 0 for meet in meets]
        assert [step["within", "all_reduce"] for step in of_rank] == [every + 8] * 6
        assert not any(where in ("dp", "world") for step in of_rank for where, _ in step)
    # with data parallelism, all of it would have to pass in every step
    assert 6 // inner_steps * every // 2 == sum(between)


@pytest.mark.parametrize("world, dtype", [(2, "float64"), (4, "float32"), (4, "bfloat16"), (6, "float32")])
def test_the_ledger_has_its_formula(pool, world, dtype):
    flags = f"{observe.case(pool, 'dense-2')} --dtype {dtype} --micro_batch_size 2 --islands 2 --inner_steps 2"
    run = pool.train(STEP, flags, world, job=observe.observed_job)
    operations, per_rank = zip(*run.answers)
    assert observe.assert_all_meet(operations) > 0
    assert all(seen == formula for sent in per_rank for seen, formula in sent.values()), per_rank
    number = 8 if dtype == "float64" else 4
    between = "dp" if world == 2 else "between"              # islands of one rank: the group is that of all ranks
    assert all(sent[between, "all_reduce"][0] == number * -(-parameters(2) // (world // 2)) for sent in per_rank)


# ------------------------------------------------------------------------------------- one of the two stops for a while
def stopping_job(argv, folder):
    """Make the second island wait, before its second step, for the first to finish its third. Return whether it did so within 5
    seconds."""
    import os
    from unittest.mock import patch

    import train
    sign, forward_backward, steps = Path(folder, "sign"), train.forward_backward, []

    def stops(*arguments):
        steps.append(len(steps))
        if len(steps) == 2 and os.environ["RANK"] == "1":
            deadline = time.monotonic() + 5
            while not sign.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            steps[-1] = "in vain" if not sign.exists() else steps[-1]
        if len(steps) == 4 and os.environ["RANK"] == "0":
            sign.touch()
        return forward_backward(*arguments)
    with patch.object(train, "forward_backward", stops):
        train.main(argv)
    return "in vain" not in steps


@pytest.mark.parametrize("more, goes_on", [("--islands 2 --inner_steps 4", True), ("--islands 2 --inner_steps 2", False),
                                           ("", False)])
def test_the_other_goes_on_until_they_meet(pool, tmp_path, more, goes_on):
    argv = f"{observe.case(pool, 'dense-2')} --micro_batch_size 2 {more}".split()
    assert all(pool.call(stopping_job, STEP, world=2, argv=argv, folder=str(tmp_path))) == goes_on


# ------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize("flags, message", [
    ("--islands 3", "--islands 3: must divide dp 4; choose from 1, 2, 4"),
    ("--islands 2 --inner_steps 0", "--inner_steps: must be at least 1 and below 100000000, but is 0")])
def test_refused(pool, flags, message):
    assert_refused(pool, STEP, 4, f"{observe.case(pool, 'dense-2')} --micro_batch_size 1 {flags}", message)
