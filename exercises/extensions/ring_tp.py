"""--tp_ring on step 4: it trains as one process does, sends the formula's bytes, and, played back, hides communication.

The table has the time of one layer as a multiple of the time of its products. The model is a layer of llama-70b with a sequence of
8,192 tokens, all sizes divided by 64, in float32. 7 FLOPs per byte stand for an H100's NVLink, 62.5 for a network of 400 Gbit/s.
Only products and bytes take time.

| FLOPs per byte | 7 | 15 | 30 | 62.5 |
|---|---|---|---|---|
| `--tp 2` | 1.02 | 1.03 | 1.07 | 1.14 |
| `--tp 2 --tp_ring` | 1.00 | 1.00 | 1.00 | 1.03 |
| `--tp 4` | 1.05 | 1.10 | 1.21 | 1.50 |
| `--tp 4 --tp_ring` | 1.00 | 1.00 | 1.05 | 1.25 |
| `--tp 8` | 1.11 | 1.26 | 1.57 | 2.26 |
| `--tp 8 --tp_ring` | 1.00 | 1.07 | 1.28 | 1.89 |
"""
import cases
import observe
import pytest
import toy
from harness import assert_same_run
from jobs import assert_refused, kept_by_a_layer, traced_job

STEP, ONE = "step04_tp_sp", "step01_single_gpu"
TOKENS, EXACT = 24 * 16, "--dtype float64"


# ------------------------------------------------------------------------------------- as one process, and to the byte
def same_as_one_process(pool, base, hidden, layers, world, tp, flags, optimizer="adamw"):
    one = pool.reference(ONE, f"{base} --micro_batch_size 6 {EXACT}", optimizer)
    run = pool.train(STEP, f"{base} {EXACT} --tp {tp} {flags} --tp_ring", world, job=observe.observed_job, optimizer=optimizer)
    assert_same_run(run, one, 1e-9, flags)
    operations, per_rank = zip(*run.answers)
    assert observe.assert_all_meet(operations) > 0
    again = "--recompute" in flags
    stream = TOKENS * tp // world * hidden * 8            # [batch, seq, hidden], for all micro-batches of a rank
    by_hand = {("tp", "send"): (4 + 2 + 3 * again) * layers * stream * (tp - 1) // tp,      # forward; g's backward; recomputation
               ("tp", "all_gather"): (2 * layers + 2) * stream, ("tp", "reduce_scatter"): (2 * layers + 2) * stream}
    for rank, sent in enumerate(per_rank):
        assert {what: seen for what, (seen, _) in sent.items() if what in by_hand} == by_hand, f"rank {rank}"
        assert all(seen == formula for seen, formula in sent.values()), f"rank {rank}: {sent}"


@pytest.mark.parametrize("world, shape, tp, flags", [
    (2, "dense-2", 2, "--micro_batch_size 6"),
    (4, "dense-2", 2, "--micro_batch_size 4 --zero 1 --recompute full"),
    (4, "dense-2", 2, "--micro_batch_size 6 --zero 2 --recompute selective"),
    (4, "dense-2-kv1", 2, "--micro_batch_size 3 --zero 3"),
    (4, "dense-2", 2, "--micro_batch_size 6 --zero 3 --recompute full"),
    (4, "dense-2", 4, "--micro_batch_size 12 --recompute full"),
    (4, "dense-2-kv2", 4, "--micro_batch_size 24 --recompute selective"),
    (8, "dense-2", 8, "--micro_batch_size 24")])
def test_equals_one_process(pool, world, shape, tp, flags):
    same_as_one_process(pool, observe.case(pool, shape), cases.HIDDEN, 2, world, tp, flags)


def test_the_sum_of_the_gradients(pool):
    """Train with SGD, because AdamW would hide a factor."""
    base = observe.case(pool, "dense-2") + " --steps 2"
    same_as_one_process(pool, base, cases.HIDDEN, 2, 4, 4, "--micro_batch_size 12", optimizer="sgd")


def test_products_that_selective_recomputation_keeps(pool, tmp_path):
    """Check that a sum's terms, which are kept if a rank's inner dimension is no less than hidden, are not added to in place."""
    base = cases.make(tmp_path, **cases.SHAPE | dict(num_hidden_layers=2, intermediate_size=192, head_dim=24))
    same_as_one_process(pool, base, cases.HIDDEN, 2, 2, 2, "--micro_batch_size 12 --recompute selective")


def test_compiles_what_lies_between(pool):
    base = observe.case(pool, "dense-1") + " --steps 2 --micro_batch_size 12"
    run = pool.train(STEP, f"{base} --tp 2 --tp_ring --compile --recompute full", 2, 200, weights=False, job=traced_job)
    assert min(run.answers) > 1
    assert_same_run(run, pool.reference(ONE, base), 1e-4, weights=False)


# ------------------------------------------------------------------------------------- memory, and what is refused
def test_a_layer_keeps_no_more(pool, tmp_path):
    without = kept_by_a_layer(pool, tmp_path / "without", STEP, 2, "--tp 2")
    assert kept_by_a_layer(pool, tmp_path / "with", STEP, 2, "--tp 2 --tp_ring") == pytest.approx(without, rel=1e-3)


def test_refused_without_sequence_parallelism(pool):
    flags = observe.case(pool, "dense-2")
    assert_refused(pool, STEP, 2, f"{flags} --tp 2 --sp off --tp_ring", "--tp_ring: requires --sp on")


# ------------------------------------------------------------------------------------- time, played back
# llama-70b with all sizes divided by 64, and one sequence of 8,192 / 64 tokens
MODEL = dict(hidden_size=128, intermediate_size=448, num_attention_heads=64, num_key_value_heads=8, head_dim=2, vocab_size=64)
SPEEDS = [7, 15, 30, 62.5]


def times_of_a_layer(pool, flags, tp):
    """Return for each speed the time of a layer, as a multiple of the time of its products."""
    flags = f"--tp {tp} --seq_len 128 --global_batch_size 1 --micro_batch_size 1 {flags}"
    one, two = (toy.run(pool, STEP, tp, flags, **MODEL, num_hidden_layers=layers) for layers in (1, 2))
    played = [(toy.play(one, speed), toy.play(two, speed)) for speed in SPEEDS]
    return [(b.seconds - a.seconds) / (b.computing[0] - a.computing[0]) for a, b in played]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_waits_are_shorter(pool, tp):
    """Check that waits are more than halved, up to twice the FLOPs per byte of an H100 with NVLink, and that the table above has
    the numbers."""
    without, ring = times_of_a_layer(pool, "", tp), times_of_a_layer(pool, "--tp_ring", tp)
    for flags, times in ("", without), (" --tp_ring", ring):
        row = f"| `--tp {tp}{flags}` | {' | '.join(f'{time:.2f}' for time in times)} |"
        assert row in __doc__, row
    assert all(b < a for a, b in zip(without, ring))
    assert all(b - 1 < (a - 1) / 2 for a, b in zip(without[:2], ring))
