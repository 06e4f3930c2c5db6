"""Packed documents under context parallelism: each token attends only to its own document; all layouts train as step 1 does with
an explicit mask, and send what they sent before. A table shows how much each rank computes.

    EXERCISE=5=exercise/documents PYTHONPATH=tools:tests/support \\
        python exercises/extensions/documents.py                                  # prints that table, for 8 ranks
"""
from pathlib import Path
from unittest.mock import patch

import cases
import numpy as np
import pytest
from harness import assert_same_run, relative, train_job
from jobs import assert_refused
from observe import observed_job
from operations import assert_all_meet

STEP, BASELINE, END = "step05_cp", "step01_single_gpu", 5
DOCUMENTS = f"--documents {END}"


def write_tokens(folder, length, mean, vocab=61):
    """Write documents whose lengths come from a memoryless source: each token ends its document with probability 1 / mean."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, vocab, length).astype(np.uint16)
    tokens[tokens == END] = END + 1
    tokens[draw.random(length) < 1 / mean] = END
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", tokens)
    return f"--dataset {folder}/tokens.npy"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Make sequences of 32 tokens that contain documents of 1 to 31 tokens."""
    folder = tmp_path_factory.mktemp("documents")
    return (f"{cases.make(folder, **cases.shape('dense-2'))} {write_tokens(folder, 32 * 64 + 1, 7)} --seq_len 32 "
            "--global_batch_size 8 --dtype float64")


# ------------------------------------------------------------------------------------- what it is compared with
def masked_job(argv, optimizer):
    """Train step 1 with a softmax under a mask of [batch, seq, seq]: a token sees earlier tokens of its document, and itself."""
    import model
    import torch
    seen, forward = [None], model.Decoder.forward

    def noting(decoder, tokens, positions):
        before = torch.nn.functional.pad(tokens[:, :-1] == END, (1, 0)).cumsum(1)  # how many documents have ended
        seen[0] = (before.unsqueeze(2) == before.unsqueeze(1)) & (positions.unsqueeze(1) >= positions)
        return forward(decoder, tokens, positions)

    def masked(q, k, v):                                                           # [batch, seq, heads, head_dim]
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen[0].unsqueeze(1), -torch.inf).softmax(-1), v)
    with patch.object(model.Decoder, "forward", noting), patch.object(model, "sdpa", masked):
        train_job(argv, optimizer)


@pytest.fixture(scope="module")
def one(pool, flags):
    return pool.train(BASELINE, f"{flags} --micro_batch_size 4", job=masked_job)


def test_the_mask_matters(pool, flags, one):
    without = pool.train(BASELINE, f"{flags} --micro_batch_size 4")
    assert relative(without.losses[0], one.losses[0]) > 1e-4 and relative(without.grad_norms[0], one.grad_norms[0]) > 1e-3


# ------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("world, more", [
    (1, "--micro_batch_size 8"), (2, "--micro_batch_size 2 --recompute full --zero 3"), (2, "--micro_batch_size 4 --tp 2"),
    (2, "--micro_batch_size 4 --cp 2 --cp_mode zigzag --recompute selective"),
    (4, "--micro_batch_size 2 --cp 4 --cp_mode zigzag --zero 1"), (4, "--micro_batch_size 4 --cp 2 --cp_mode zigzag --tp 2"),
    (2, "--micro_batch_size 1 --cp 2 --cp_mode ring"), (4, "--micro_batch_size 2 --cp 4 --cp_mode ring --recompute full"),
    (2, "--micro_batch_size 4 --cp 2 --cp_mode striped --zero 2 --recompute selective"),
    (4, "--micro_batch_size 4 --cp 4 --cp_mode striped"),
    (4, "--micro_batch_size 2 --cp 2 --cp_mode striped --tp 2 --sp off --zero 3 --recompute full"),
    (4, "--micro_batch_size 4 --cp 2 --cp_mode allgather --zero 3 --zero_shard 2"),
    (4, "--micro_batch_size 4 --cp 4 --cp_mode allgather --recompute selective"),
    (4, "--micro_batch_size 4 --cp 2 --cp_mode ulysses --tp 2 --recompute selective"),
    (4, "--micro_batch_size 4 --cp 4 --cp_mode ulysses --zero 2"),
    (8, "--micro_batch_size 8 --cp 8 --cp_mode zigzag"), (8, "--micro_batch_size 8 --cp 8 --cp_mode striped")])
def test_documents_are_a_mask(pool, flags, one, world, more):
    """Also check that each rank sends what the formula says, which knows nothing of documents."""
    run = pool.train(STEP, f"{flags} {DOCUMENTS} {more}", world, job=observed_job)
    assert_same_run(run, one, 1e-9, more)
    operations, sent = zip(*run.answers)
    for rank, of_rank in enumerate(sent):
        assert of_rank or world == 1, rank
        for what, (seen, formula) in of_rank.items():
            assert seen == formula, f"rank {rank} sends {seen:,} bytes by {what}, its formula says {formula:,}"
    assert world == 1 or assert_all_meet(operations) > 0


@pytest.mark.parametrize("world, more", [(4, "--cp 4"), (4, "--cp 2 --tp 2 --recompute full")])
def test_striped_without_documents(pool, flags, world, more):
    run = pool.train(STEP, f"{flags} --micro_batch_size 4 --cp_mode striped {more}", world)
    assert_same_run(run, pool.reference(BASELINE, f"{flags} --micro_batch_size 4"), 1e-9, more)


@pytest.mark.parametrize("world, more", [(1, ""), (2, "--cp 2 --cp_mode striped"), (2, "--cp 2 --cp_mode ulysses")])
def test_bfloat16(pool, flags, one, world, more):
    run = pool.train(STEP, f"{flags} {DOCUMENTS} --micro_batch_size 8 --dtype bfloat16 --steps 2 {more}", world, weights=False)
    for ours, exact in zip(run.losses + run.grad_norms, one.losses[:2] + one.grad_norms[:2]):
        assert relative(ours, exact) < 2e-2


@pytest.mark.parametrize("more", ["--documents 64", "--documents -1"])
def test_what_is_no_token_is_refused(pool, flags, more):
    assert_refused(pool, STEP, 2, f"{flags} --cp 2 {more}", f"{more}: not a token of the model; choose from 0 to 63")


def test_striped_takes_lengths_that_zigzag_does_not(pool, flags):
    with_six = f"{flags} {DOCUMENTS} --seq_len 6 --steps 1 --cp 2"
    assert_refused(pool, STEP, 2, with_six, "--seq_len 6: must be a multiple of 4")
    pool.train(STEP, f"{with_six} --cp_mode striped", 2, weights=False)


# ------------------------------------------------------------------------------------- the blocks
def blocks_job(sequences, length):
    """Return {(mode, cp): how many blocks contain each pair of a query and a key, with all sequences laid end to end}."""
    from types import SimpleNamespace

    import context_parallel
    import torch
    found = {}
    for mode in ("ring", "zigzag", "striped", "allgather"):
        for cp in (1, 2, 3, 4, 8):
            args = SimpleNamespace(documents=END, seq_len=length, cp=cp, cp_mode=mode)
            seen = torch.zeros(len(sequences) * length, len(sequences) * length, dtype=torch.int64)
            places = torch.arange(len(sequences)).unsqueeze(1) * length
            parts = [(places + context_parallel.local_positions(None, args, rank)).flatten() for rank in range(cp)]
            context_parallel.documents[:] = context_parallel.find_documents(torch.tensor(sequences), args)
            for rank in range(cp):
                for source in range(cp):
                    for rows, columns, causal in context_parallel.visible(rank, source, mode, length // cp):
                        block = torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.int64)
                        assert not causal or block.shape[0] == block.shape[1]    # only then do kernels agree where the diagonal is
                        seen[parts[rank][rows].unsqueeze(1), parts[source][columns]] += block.tril() if causal else block
            found[mode, cp] = seen.tolist()
    context_parallel.documents.clear()
    return found


@pytest.mark.parametrize("mean", [1.5, 5, 20, 1000])
def test_blocks_have_what_the_mask_shows(pool, mean):
    """Check that the blocks contain each visible pair once, and no other pair."""
    draw = np.random.default_rng(int(mean))
    sequences = np.where(draw.random((3, 49)) < 1 / mean, END, 0)
    document = np.pad(sequences[:, :-2] == END, ((0, 0), (1, 0))).cumsum(1) + 100 * np.arange(3).reshape(3, 1)
    mask = np.tril(np.equal.outer(document.flatten(), document.flatten()))
    found, = pool.call(blocks_job, STEP, sequences=sequences.tolist(), length=48)
    for what, seen in found.items():
        assert np.array_equal(seen, mask), what


# ------------------------------------------------------------------------------------- who computes how much
def counted_job(argv):
    """Count, for each step, the pairs of a query and a key that this rank scores in forward, by the rank that owns the keys. Count
    them where the kernel is called."""
    import context_parallel
    import train
    steps, source_now = [], [None]
    visible, flash, forward_backward = context_parallel.visible, context_parallel.flash, train.forward_backward

    def noting(rank, source, *more):
        source_now[0] = source
        return visible(rank, source, *more)

    def counting(q, k, v, causal):
        steps[-1][source_now[0]] += q.shape[2] * (k.shape[2] + 1) // 2 if causal else q.shape[2] * k.shape[2]
        return flash(q, k, v, causal)

    def next_step(*arguments):
        steps.append([0] * train.dist.get_world_size())
        return forward_backward(*arguments)
    with (patch.object(context_parallel, "visible", noting), patch.object(context_parallel, "flash", counting),
          patch.object(train, "forward_backward", next_step)):
        train.main(argv)
    return steps


def balance(per_rank):
    """Take [step][source] of each rank. Return the mean number of all pairs in a step; the slowest rank over the mean; the same if
    all ranks wait for the slowest at each hop; and the share of pairs (rank, another rank's keys) with anything to see."""
    pairs = np.array(per_rank).swapaxes(0, 1).astype(float)                        # [step, rank, source]
    cp = pairs.shape[1]
    by_hop = np.stack([pairs[:, np.arange(cp), (np.arange(cp) - hop) % cp] for hop in range(cp)])  # [hop, step, rank]
    mean = pairs.sum() / cp
    return (pairs.sum() / len(pairs), pairs.sum(2).max(1).sum() / mean, by_hop.max(2).sum() / mean,
            (by_hop[1:] > 0).mean())


def count(pool, folder, seq_len, cp, mode, mean, steps):
    """Train on one sequence per step, which is a single document if mean is 0. Return the balance of the ranks."""
    small = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=2, hidden_size=4, intermediate_size=8)
    base = f"{cases.make(folder / 'model', **small)} {write_tokens(folder / str(mean), seq_len * steps + 1, mean or 1)}"
    argv = (f"{base} --seq_len {seq_len} --global_batch_size 1 --micro_batch_size 1 --steps {steps} --cp {cp} --cp_mode {mode} "
            + DOCUMENTS * bool(mean))
    return balance(pool.call(counted_job, STEP, world=cp, argv=argv.split()))


@pytest.mark.parametrize("mode, at_least, at_most", [("ring", 1.5, 4), ("zigzag", 1.2, 4), ("striped", 1, 1.02)])
def test_documents_unbalance_zigzag_and_not_striped(pool, tmp_path, mode, at_least, at_most):
    """Check on a small scale what the README says of the balance: 1,024 tokens on 4 ranks, documents of 64."""
    pairs, slowest, by_hop, _ = count(pool, tmp_path, 1024, 4, mode, 64, 6)
    ends = np.load(tmp_path / "64/tokens.npy")[:-1].reshape(6, 1024) == END
    lengths = np.concatenate([np.diff(np.flatnonzero([1, *row[:-1], 1])) for row in ends])
    assert pairs == pytest.approx((lengths * (lengths + 1)).sum() / 2 / 6)
    assert at_least <= slowest <= by_hop <= at_most


def test_without_documents_zigzag_is_balanced(pool, tmp_path):
    assert count(pool, tmp_path, 256, 4, "zigzag", 0, 1)[:3] == (256 * 257 / 2, 1, 1)


def print_table(folder):
    from harness import shared_pool
    for mean in (0, 1024, 128):
        for mode in ("ring", "zigzag", "striped"):        # allgather scores the same pairs as zigzag
            pairs, slowest, by_hop, needed = count(shared_pool(), folder, 8192, 8, mode, mean, 8)
            length = f"{mean:,}" if mean else "no documents"
            print(f"| {length} | {pairs:,.0f} | {mode} | {slowest:.2f} | {by_hop:.2f} | {needed:.0%} |", flush=True)


if __name__ == "__main__":
    import tempfile

    import documents                                      # workers cannot import functions from __main__
    with tempfile.TemporaryDirectory() as name:
        documents.print_table(Path(name))
