"""Held-out loss in a pipeline: every layout gives the loss of one process; the lists of forwards are right, and so are what is sent
and what stays in memory."""
import cases
import huggingface
import numpy as np
import pytest
import torch
from harness import assert_same_run, relative
from jobs import assert_refused, main_job
from layouts import SCHEDULES, Layout
from observe import assert_sent, observed_job
from operations import assert_all_meet
from rendezvous import rendezvous

STEP, BASELINE = "step06_pp", "step01_single_gpu"
S, WHOLE, HELD_OUT = 16, 70, 48                           # 4 steps of 24 sequences: training repeats the other 22
EVAL = f"--eval_every 1 --eval_sequences {HELD_OUT}"


def layout(world, layers, flags):
    return pytest.param(Layout(STEP, world, f"dense-{layers}", "adamw", f"--dtype float64 {flags}"), id=flags)


LAYOUTS = [
    layout(4, 3, "--recompute none --micro_batch_size 3 --pp 2 --schedule 1f1b --zero 3"),
    layout(4, 5, "--recompute full --micro_batch_size 6 --pp 2 --schedule dualpipe --cp 2 --cp_mode zigzag --zero 2"),
    layout(4, 3, "--recompute none --micro_batch_size 6 --pp 2 --schedule zerobubble --tp 2 --sp on"),
    layout(4, 5, "--recompute selective --micro_batch_size 4 --pp 2 --schedule interleaved --tp 2 --sp off --zero 1"),
    layout(4, 5, "--recompute none --micro_batch_size 6 --pp 4 --schedule afab"),
    layout(4, 2, "--recompute full --micro_batch_size 6 --zero 3 --tp 2 --sp on"),
    layout(4, 2, "--recompute none --micro_batch_size 3 --zero 3 --zero_shard 2 --cp 2 --cp_mode allgather"),
    layout(4, 2, "--recompute none --micro_batch_size 12 --dp_mode overlap --cp 2 --cp_mode ulysses"),
    layout(8, 5, "--recompute none --micro_batch_size 3 --pp 2 --schedule dualpipe --tp 2 --sp on --zero 3")]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Make, for each number of layers, a file with sequences to hold out, and one that ends before them."""
    made = {}
    for layers in (2, 3, 5):
        for name, sequences in ("all", WHOLE), ("training", WHOLE - HELD_OUT):
            made[name, layers] = cases.make(tmp_path_factory.mktemp("case"), tokens=S * WHOLE, **cases.shape(f"dense-{layers}"))
            if name == "training":
                path = made[name, layers].split()[3]
                np.save(path, np.load(path)[:S * sequences + 1])
    return made


def held_out_losses(run):
    return [line["held_out_loss"] for line in run.lines]


def layers_of(layout):
    return int(layout.shape.split("-")[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(pool, flags, layout):
    """Check that held-out losses are those of one process; that training is step 1's on a file that ends where they begin; and that
    in the step that the ledger sees, between two evaluations, every rank sends what the formula says."""
    layers = layers_of(layout)
    trained = pool.reference(BASELINE, f"{flags['training', layers]} --dtype float64 --micro_batch_size 6")
    one = pool.reference(STEP, f"{flags['all', layers]} --dtype float64 --micro_batch_size 6 {EVAL}")
    run = pool.train(STEP, f"{flags['all', layers]} {layout.flags} {EVAL}", layout.world, job=observed_job)
    for reference in trained, one:
        assert_same_run(run, reference, 1e-9, str(layout))
    assert len(held_out_losses(run)) == 4
    for a, b in zip(held_out_losses(run), held_out_losses(one)):
        assert relative(a, b) < 1e-9, (held_out_losses(run), held_out_losses(one))
    operations, sent = zip(*run.answers)
    assert_sent(layout, sent)
    assert assert_all_meet(operations) > 0


def test_one_process_gives_the_loss_of_full_logits(pool, tmp_path):
    """Compare with transformers, from full logits of the file's last whole sequences."""
    flags = cases.make(tmp_path / "case", tokens=S * WHOLE)                         # in sizes that transformers accepts
    run = pool.train(STEP, f"{flags} --dtype float64 --micro_batch_size 6 {EVAL} --save {tmp_path / 'saved'}", weights=False)
    tokens = np.load(tmp_path / "case/tokens.npy").astype(np.int64)
    rows = torch.from_numpy(np.stack([tokens[i * S:i * S + S + 1] for i in range(WHOLE - HELD_OUT, WHOLE)]))
    with torch.no_grad():
        logits = huggingface.load(tmp_path / 'saved', torch.float64)(input_ids=rows[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert relative(held_out_losses(run)[-1], float(loss)) < 1e-9


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[5]])
def test_training_does_not_notice(pool, flags, layout):
    """Evaluate after every step, after the last alone, or never: training must be the same to the last bit."""
    base = f"{flags['all', layers_of(layout)]} {layout.flags} --eval_sequences {HELD_OUT}"
    often, once, never = (pool.train(STEP, f"{base} --eval_every {every}", layout.world) for every in (1, 100, 0))
    assert [[loss is not None for loss in held_out_losses(run)] for run in (often, once, never)] == [
        [True] * 4, [False] * 3 + [True], [False] * 4]
    assert held_out_losses(often)[-1] == held_out_losses(once)[-1]
    for run in often, once:
        assert_same_run(run, never, 0)


# ------------------------------------------------------------------------------------- an evaluation, seen from inside
def evaluations_job(argv, optimizer):
    """Train. Return for every evaluation what this rank sends, how many bytes of gathered weights there are before and after it,
    how much of what it allocates is left, and the peak."""
    import gc
    import time
    from unittest.mock import patch

    import evaluation
    import ledger
    import train
    from watch import Storages
    seen, make = [], evaluation.make_evaluate

    def watched(model, config, zero, tokens, mesh, args):
        evaluate = make(model, config, zero, tokens, mesh, args)
        whole = lambda: sum(unit.flat_param.untyped_storage().nbytes() for unit in model.zero_units)

        def watch(step):
            before, live, held = whole(), Storages(), [0]
            for tensor in [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]:
                live.note(tensor, "parameters")           # whatever was there before
            with ledger.Ledger(mesh) as sent, live:
                loss = evaluate(step)
            time.sleep(0.3)                               # gloo's threads free what they sent a little after the wait
            for _, number, size in live.events:
                held.append(held[-1] + size * (live.kinds[number] != "parameters"))
            seen.append((dict(sent.payload), before, whole(), held[-1], max(held)))
            return loss
        return watch
    with patch.object(train.evaluation, "make_evaluate", watched):
        train.main(argv)
    return seen


def evaluations(pool, flags, world, layers, more):
    """Return for every rank what evaluations_job returns."""
    base = f"{flags['all', layers]} --dtype float64 --steps 2 --eval_every 1"
    return pool.train(STEP, f"{base} {more}", world, weights=False, job=evaluations_job).answers


STREAM = 24 * S * cases.HIDDEN * 8                        # bytes that cross a border for as many sequences as a step takes


def test_a_pipeline_sends_activations_there_and_nothing_back(pool, flags):
    ranks = evaluations(pool, flags, 4, 5, "--pp 4 --micro_batch_size 4")
    for rank, seen in enumerate(ranks):
        for sent, *_ in seen:
            assert sent.pop(("pp", "send"), 0) == (STREAM if rank < 3 else 0)
            assert sum(sent.values()) == 8                # the loss


@pytest.mark.parametrize("more, gathered", [("--pp 2 --micro_batch_size 3", "once"), ("--micro_batch_size 2", "often")])
def test_zero_3_gathers_and_gives_back(pool, flags, more, gathered):
    """Expect one gather with a pipeline. Without a pipeline, expect one per micro-batch, but only one in all for the last block and
    the head."""
    model = cases.shape("dense-3")
    layer = cases.HIDDEN * (2 * 48 + 2 * 24 + 3 * cases.MLP + 2)
    ends = model["vocab_size"] * cases.HIDDEN
    units = [ends, layer, layer, layer, ends + cases.HIDDEN]
    ranks = evaluations(pool, flags, 4, 3, f"{more} --zero 3")
    for seen in ranks:
        for sent, before, after, left, _ in seen:
            assert before == after == 0
            assert left <= 16                             # the loss
            assert not any(collective == "reduce_scatter" for _, collective in sent)
            if gathered != "once":
                times = [3, 3, 3, 1, 1]
                assert sent["dp", "all_gather"] == sum(n * -(-unit // 4) * 4 * 8 for n, unit in zip(times, units))
    if gathered == "once":
        of_ranks = [seen[0][0]["shard", "all_gather"] for seen in ranks]
        assert sum(of_ranks) == 2 * sum(-(-unit // 2) * 2 * 8 for unit in units)


def test_nothing_is_kept_of_a_micro_batch(pool, flags):
    """Check that three times the micro-batches need no more memory, except what gloo holds of what was sent: a border's
    activations."""
    base = "--micro_batch_size 4 --pp 2 --schedule afab --global_batch_size 16"
    few, many = (evaluations(pool, flags, 2, 5, f"{base} --eval_sequences {n}") for n in (8, 24))
    for rank, (a, b) in enumerate(zip(few, many)):
        held = 0 if rank else 4 * STREAM // 6
        assert b[0][4] <= a[0][4] + held + 64, (rank, a[0][4], b[0][4])
        assert a[1][3] <= 16 and b[1][3] <= 16


# ------------------------------------------------------------------------------------- the lists
def lists_job(name, p, m, v):
    """Check that a schedule's forwards are complete and can run. Return the ranks' idle time."""
    import schedules
    trained = schedules.make(name, p, m, v)
    lists = schedules.forwards(trained)
    assert sorted((kind, stage, i) for actions in lists for kind, stage, i in actions) == sorted(
        ("F", stage, i) for stage in range(p * v) for i in range(m))
    programs = [schedules.add_send_recv(lists, rank) for rank in range(p)]
    assert rendezvous(programs, schedules.receives) == []
    return schedules.bubble(schedules.simulate(lists))


@pytest.mark.parametrize("name", SCHEDULES)
def test_lists_of_forwards(pool, name):
    """Check that a rank idles only while the pipeline fills or drains: p - 1 forwards of a stage, and twice that if stages form a
    V."""
    for p in (2, 4):
        for m in (2 * p, 2 * p + 1, 4 * p):
            idle, = pool.call(lists_job, STEP, name=name, p=p, m=m, v=SCHEDULES[name].stages_per_rank)
            assert idle == [(p - 1) * (2 if SCHEDULES[name].v_shaped else 1)] * p


# ------------------------------------------------------------------------------------- what can go wrong
@pytest.mark.parametrize("world, more, message", [
    (4, "--eval_sequences 6 --micro_batch_size 3",
     "--eval_sequences 6: must be a multiple of dp 4 x micro_batch_size 3, and 12 or more; choose 12 or 24"),
    (2, "--eval_sequences 9 --micro_batch_size 3 --pp 2 --schedule dualpipe",
     "--eval_sequences 9: must be a multiple of dp 1 x micro_batch_size 3, and 12 or more; choose 12 or 15"),
    (2, "--eval_sequences -2", "--eval_sequences: must be at least 0 and below 100000000, but is -2")])
def test_refused(pool, flags, world, more, message):
    assert_refused(pool, STEP, world, f"{flags['all', 5]} --eval_every 1 {more}", message)


def test_something_must_be_left(pool, flags):
    message = "--eval_sequences 72: the dataset has 70 sequences of 16 tokens, and training needs one; use 69 or less"
    assert_refused(pool, STEP, 2, f"{flags['all', 3]} --eval_every 1 --eval_sequences 72 --pp 2", message, job=main_job)
