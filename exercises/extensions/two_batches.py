"""Two batches: the all-to-alls of one half of a micro-batch behind the computation of the other half.

expert_chunks hides rows behind the experts alone. Narrow experts have too little to compute for that, if the network is slow.
Attention cannot help, because it needs the results of the same tokens. So `--two_batches` splits a micro-batch into halves of whole
sequences, which take turns in every layer, and all that one half computes hides rows of the other. The bytes of the rows stay the
same, and so does the simulated peak of memory. (In bfloat16, autograd adds a weight's two gradients in bfloat16.)

**How.** For each half, the layer is a generator that yields while rows are in flight; a loop advances both in turns. An all-to-all
is two autograd operations: one starts it, one waits. Autograd runs operations in the reverse of forward's order, so backward
overlaps without code of its own, and all ranks start their collectives in the same order.

A layer begins before the last results of the one before have arrived. With recomputation or ZeRO-3 it must wait for them, which
exposes the return of half B, a quarter of the rows. DualPipe and Megatron-LM pair the forward of one micro-batch with the backward
of another. That leaves micro-batches whole, but needs a schedule of pairs and a backward in segments.

DeepSeek-V3 also limits the nodes per token. That would save nothing here: a token sends a row for each of its experts, even if all
are on one node.

**What it gains.** Simulated: qwen3-30b-a3b on 16 H100s, two micro-batches of two sequences per rank.

| seconds per step (of it waiting) | without | `--expert_chunks 4` | `--two_batches` |
|---|---|---|---|
| two nodes, 2,048 tokens | 1.77 (62%) | 1.61 (46%) | 1.23 (32%) |
| the same with NVLink between all 16 | 0.83 (19%) | | 0.81 (2%) |
| two nodes, 4,096 tokens, `--recompute full` | 5.03 (64%) | 4.64 (53%) | 4.00 (48%) |

    python tools/simulate exercise/two_batches 16 --model qwen3-30b-a3b --ep 16 --zero 1 --seq_len 2048 --global_batch_size 64 \
        --micro_batch_size 2 --two_batches

Kernels take back part of the hidden time: halves have smaller products, and in the simulator kernels lose speed while NCCL sends,
half of it over NVLink and less over a network. Between nodes that costs a quarter of what was hidden, inside a node most of it. So
inside a node there is little to gain.

**The breaks.** If MoE kept its routing on the module, B's would overwrite A's, and A's results would go to the wrong tokens.
Nothing fails, and after 60 steps the loss is 2.82 instead of 2.67. A comparison with one process shows it in the first loss, 5.80
instead of 5.77. Another mistake passes even that: to wait where a transfer starts. All numbers are right, and nothing overlaps.
Only the waits of a run that is played back show it.

    EXERCISE=7=exercise/two_batches PYTHONPATH=tools:tests:tests/support python exercises/extensions/two_batches.py       # losses
"""
import json
from types import SimpleNamespace
from unittest.mock import patch

import cases
import pytest
import torch
import toy
from harness import JobFailed, assert_same_run, relative, train_job
from jobs import assert_refused
from layouts import Layout
from observe import case, check
from safetensors.torch import load_file
from steps import ROOT
from test_step07 import STEP, routed_job

EXACT = "--dtype float64"
# halves of a micro-batch of 3 have 2 and 1 sequences; some layouts have an odd number of micro-batches
LAYOUTS = [
    (2, "top2-3", "--recompute none --micro_batch_size 4 --ep 2 --balance bias"),
    (2, "top4-2-qk", "--recompute none --micro_batch_size 3 --ep 2 --cp 2 --cp_mode zigzag --zero 1 --balance aux"),
    (2, "top2-2", "--recompute full --micro_batch_size 3 --ep 2 --zero 3 --balance bias"),
    (4, "top1-2", "--recompute none --micro_batch_size 2 --ep 4 --zero 2 --balance none"),
    (4, "top2-3", "--recompute none --micro_batch_size 3 --ep 2 --zero 3 --zero_shard 2 --balance aux"),
    (4, "top2-2", "--recompute selective --micro_batch_size 4 --ep 2 --tp 2 --sp on --zero 1 --balance bias"),
    (4, "top2-3", "--recompute none --micro_batch_size 3 --ep 2 --tp 2 --sp on --balance bias"),
    (4, "top2-2", "--recompute full --micro_batch_size 3 --ep 2 --tp 2 --sp off --balance aux"),
    (4, "top2-2", "--recompute full --micro_batch_size 6 --ep 4 --cp 2 --cp_mode ulysses --balance bias"),
    (4, "top2-2", "--recompute none --micro_batch_size 6 --ep 2 --dp_mode overlap --balance none"),
    (8, "top2-2", "--recompute none --micro_batch_size 2 --ep 4 --tp 2 --sp on --cp 2 --cp_mode allgather --balance bias")]
PIPELINES = [("afab", 3, 3, "--recompute full --zero 2"), ("1f1b", 4, 4, "--recompute none --zero 3"),
             ("interleaved", 5, 2, "--recompute none --zero 1")]
LAYOUTS += [(4, f"top2-{layers}", f"--micro_batch_size {size} --pp 2 --schedule {schedule} --ep 2 --balance bias {more}")
            for schedule, layers, size, more in PIPELINES]


@pytest.mark.parametrize("world, shape, flags", LAYOUTS, ids=[flags for *_, flags in LAYOUTS])
def test_trains_as_one_process(pool, world, shape, flags):
    """Check the weights, the bytes against the formula, that operations meet, and that nothing is read before it was waited for."""
    check(pool, Layout(STEP, world, shape, "adamw", f"{EXACT} {flags} --two_batches"))


@pytest.mark.parametrize("world, dtype, optimizer, flags", [(2, "float64", "sgd", "--ep 2 --micro_batch_size 3"),
                                                            (4, "float64", "sgd", "--ep 2 --pp 2 --micro_batch_size 4 --zero 2"),
                                                            (2, "float32", "sgd", "--ep 2 --micro_batch_size 4"),
                                                            (2, "bfloat16", "adamw", "--ep 2 --micro_batch_size 4 --zero 1")])
def test_sums_of_gradients_and_dtypes(pool, world, dtype, optimizer, flags):
    """Compare the sums of the gradients, with SGD except in bfloat16: AdamW would hide a factor."""
    check(pool, Layout(STEP, world, "top2-2", optimizer, f"--dtype {dtype} --recompute none {flags} --balance bias --two_batches"))


@pytest.mark.parametrize("world, bias, flags", [(2, [9.0, 5] + [0] * 6, "--ep 2 --zero 3"),                  # rank 1 has no row
                                                (4, [0] * 6 + [5, 9.0], "--ep 4 --recompute full")])
def test_ranks_without_rows(pool, tmp_path, world, bias, flags):
    base = f"{cases.make(tmp_path / 'case', **cases.shape('top2-2'))} {EXACT} --balance none --micro_batch_size 3"

    def trained(world, more):
        folder = tmp_path / str(world)
        folder.mkdir()
        pool.call(routed_job, STEP, world=world, argv=f"{base} {more}".split(), bias=bias, folder=str(folder))
        lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
        return SimpleNamespace(losses=[line["loss"] for line in lines], grad_norms=[line["grad_norm"] for line in lines],
                               weights=load_file(folder / "model.safetensors"))
    assert_same_run(trained(world, f"{flags} --two_batches"), trained(1, ""), 1e-9, flags)


def test_without_the_flag_it_is_the_step_itself(pool):
    """Compare to the last bit."""
    flags = f"{case(pool, 'top2-2')} --micro_batch_size 6 --ep 2 --steps 2"
    here, there = (pool.train(step, flags, world=2) for step in (STEP, ROOT / STEP))
    assert here.losses == there.losses and here.grad_norms == there.grad_norms
    assert here.weights.keys() == there.weights.keys() and all(map(torch.equal, here.weights.values(), there.weights.values()))


# ------------------------------------------------------------------------------------- what is hidden
def exposed(pool, flags):
    """Play a run back; return how long ranks wait for the rows."""
    more = f"--tp 2 --ep 2 {flags} --lr 0 --seq_len 64 --global_batch_size 8 --micro_batch_size 4"
    notes = toy.run(pool, STEP, 4, more, **toy.EXPERTS, num_hidden_layers=4)
    return toy.waited(toy.play(notes, 100), "ep") - toy.waited(toy.play(notes, 0), "ep")


@pytest.mark.parametrize("flags, share", [("--recompute none", 1 / 16), ("--recompute full", 1 / 4), ("--zero 3", 1 / 4)])
def test_rows_travel_while_the_other_half_is_computed(pool, flags, share):
    """Check that only half B's way back is exposed, and that of its gradients: in every layer if layers must be complete, otherwise
    in the last one alone."""
    assert exposed(pool, f"{flags} --two_batches") == pytest.approx(share * exposed(pool, flags), rel=0.15)


# ------------------------------------------------------------------------------------- the breaks
def shared_routing_job(argv, optimizer):
    """Train with the mistake: the module keeps the routing from route to combine."""
    import moe
    route, combine = moe.MoE.route, moe.MoE.combine

    def keep(self, x):
        rows, tokens_per_expert, self.routing = route(self, x)
        return rows, tokens_per_expert, self.routing
    with patch.object(moe.MoE, "route", keep), \
            patch.object(moe.MoE, "combine", lambda self, out, *_: combine(self, out, *self.routing)):
        train_job(argv, optimizer)


def test_one_process_sees_a_shared_routing(pool):
    base = f"{case(pool, 'top2-2')} {EXACT}"
    one = pool.reference(STEP, f"{base} --micro_batch_size 6")
    without = pool.train(STEP, f"{base} --micro_batch_size 6 --ep 2", 2, job=shared_routing_job)
    assert_same_run(without, one, 1e-9)                   # harmless with one batch at a time
    run = pool.train(STEP, f"{base} --micro_batch_size 6 --ep 2 --two_batches", 2, job=shared_routing_job)
    assert relative(run.losses[0], one.losses[0]) < 0.05, "silent no longer"
    with pytest.raises(AssertionError, match=r"losses\[0\]"):
        assert_same_run(run, one, 1e-9)


def wait_at_once():
    """Plant the mistake: wait for a transfer where it starts."""
    import expert_parallel
    start = expert_parallel.Transfer.start

    def start_and_wait(self, *args):
        out = start(self, *args)
        self.in_flight[0].wait()
        return out
    return patch.object(expert_parallel.Transfer, "start", start_and_wait)


def waiting_job(argv, optimizer):
    with wait_at_once():
        train_job(argv, optimizer)


def recorded_waiting_job(argv):
    with wait_at_once():
        return toy.record_job(argv)


def test_only_the_waits_show_that_nothing_overlaps(pool):
    base = f"{case(pool, 'top2-2')} {EXACT}"
    run = pool.train(STEP, f"{base} --micro_batch_size 4 --ep 2 --two_batches", 2, job=waiting_job)
    assert_same_run(run, pool.reference(STEP, f"{base} --micro_batch_size 6"), 1e-9)
    without, right = exposed(pool, ""), exposed(pool, "--two_batches")
    with patch.object(toy, "record_job", recorded_waiting_job):
        wrong = exposed(pool, "--two_batches")
    assert right < 0.1 * without and wrong > 0.95 * without


def no_wait_in_backward_job(argv, optimizer):
    import expert_parallel

    def backward(ctx, unused_grad):
        _, out, _ = ctx.transfer.in_flight
        return out, None
    with patch.object(expert_parallel.StartTransfer, "backward", staticmethod(backward)):
        train_job(argv, optimizer)


def test_a_missing_wait_is_seen(pool):
    flags = f"{case(pool, 'top2-2')} --micro_batch_size 4 --ep 2 --two_batches"
    with pytest.raises(JobFailed, match="grad norm nan"):
        pool.train(STEP, flags, 2, job=no_wait_in_backward_job)


# ------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize("flags, message", [
    ("--micro_batch_size 2", "--two_batches: requires --ep 2 or more; with --ep 1 no row travels"),
    ("--ep 2 --micro_batch_size 1", "--micro_batch_size 1: cannot be halved for --two_batches; use 2 or more"),
    ("--ep 2 --micro_batch_size 2 --compile",
     "--compile: cannot compile layers whose halves take turns; leave out --compile or --two_batches"),
    ("--ep 2 --micro_batch_size 2 --pp 2 --schedule zerobubble", "--schedule zerobubble: computes W once per micro-batch, and with "
     "--two_batches each half has its own; use afab, 1f1b or interleaved")])
def test_refused(pool, flags, message):
    world = 4 if "--pp" in flags else 2
    assert_refused(pool, STEP, world, f"{case(pool, 'top2-2')} {flags} --two_batches", message)


if __name__ == "__main__":
    import two_batches                                    # workers cannot import functions from __main__
    from harness import shared_pool
    for job in (train_job, two_batches.shared_routing_job):
        run = shared_pool().train(STEP, "--model tiny-moe --steps 60 --ep 2 --two_batches", 2, job=job, weights=False)
        print(f"{job.__name__}: loss {run.losses[0]:.2f} in the first step, {run.losses[-1]:.2f} in the last", flush=True)
