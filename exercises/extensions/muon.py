"""Muon under ZeRO trains as one process does, wherever the matrices are cut; and one process trains as torch's Muon does."""
import cases
import pytest
from harness import assert_same_run, assert_same_tensors, train_job
from jobs import assert_refused, storage_bytes, trained_parts
from observe import observed_job
from operations import assert_all_meet

STEP, MUON = "step03_zero", "--optimizer muon --dtype float64"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Return a function that makes a model of so many layers, and returns the flags of a run on it. Shards end inside matrices; on
    three ranks, units are padded."""
    made = {}

    def of(layers):
        if layers not in made:
            made[layers] = cases.make(tmp_path_factory.mktemp("case"), **cases.shape(f"dense-{layers}"))
        return made[layers]
    return of


def one_process(pool, flags, more=MUON):
    return pool.reference(STEP, f"{flags} --micro_batch_size 6 {more}")


# in a block: q and o, k and v, the MLP; then two norms
MATRICES = cases.HIDDEN * (2 * cases.HEADS * cases.HEAD_DIM + 2 * cases.KV_HEADS * cases.HEAD_DIM + 3 * cases.MLP)
BLOCK = MATRICES + 2 * cases.HIDDEN


# ------------------------------------------------------------------------------------- as one process, and what is sent
@pytest.mark.parametrize("world, layers, layout", [
    (2, 3, "--zero 0 --micro_batch_size 6"),
    (2, 3, "--zero 1 --micro_batch_size 4"),              # three micro-batches; in the last turn rank 1 has no block
    (4, 3, "--zero 2 --micro_batch_size 3"),              # fewer blocks than ranks
    (3, 5, "--zero 3 --micro_batch_size 4"),              # in the last turn, two blocks for three ranks
    (2, 2, "--zero 3 --micro_batch_size 12 --recompute full"),
    (4, 3, "--zero 1 --zero_shard 2 --micro_batch_size 6"),
    (4, 3, "--zero 3 --zero_shard 2 --micro_batch_size 2"),
    (1, 3, "--zero 2 --micro_batch_size 12")])
def test_equal_to_one_process(pool, flags, world, layers, layout):
    run = pool.train(STEP, f"{flags(layers)} {MUON} {layout}", world, job=observed_job)
    assert_same_run(run, one_process(pool, flags(layers)), 1e-9, layout)
    operations, sent = zip(*run.answers)
    for rank, of_rank in enumerate(sent):
        assert all(seen == formula for seen, formula in of_rank.values()), (rank, of_rank)
    if world > 1:
        assert assert_all_meet(operations) > 0
    assert_all_to_all_by_hand(sent, world, layers, layout)


def assert_all_to_all_by_hand(sent, world, layers, layout, number=8):
    """Expect one shard of every block on the way out; on the way back, every shard of the blocks whose turn fell to this rank."""
    words = layout.split()
    shard = int(words[words.index("--zero_shard") + 1]) if "--zero_shard" in words else world
    size = -(-BLOCK // shard)
    for rank, of_rank in enumerate(sent):
        seen = sum(seen for (_, what), (seen, _) in of_rank.items() if what == "all_to_all")
        mine = len(range(rank % shard, layers, shard))
        assert seen == (0 if "--zero 0" in layout else number * size * (layers + shard * mine)), (rank, of_rank)


def test_on_the_wire_two_nths_of_an_all_gather(pool, flags):
    """Train 4 layers on 4 ranks, so that each rank has one."""
    wire = pool.call(wire_job, STEP, world=4, argv=f"{flags(4)} {MUON} --zero 1 --micro_batch_size 6 --steps 1".split())
    size = 8 * -(-BLOCK // 4)
    assert wire == [2 * 3 * size] * 4                     # a shard to each of three others, out and back
    assert wire[0] == 2 / 4 * (3 / 4 * 4 * 4 * size)      # half of what it takes to all-gather four blocks of four shards


def wire_job(argv):
    """Return how many bytes this rank sends to others by all-to-alls."""
    from unittest.mock import patch

    import ledger
    import train
    seen = []

    class Kept(ledger.Ledger):
        def __init__(self, mesh):
            super().__init__(mesh)
            seen.append(self)
    with patch.object(ledger, "Ledger", Kept):
        train.main([*argv, "--ledger"])
    return seen[0].wire["dp", "all_to_all"]


def test_bfloat16_sends_half(pool, flags):
    """Check that the exchange has the precision of the weights, not of the sums. Losses agree to 2%, as for every layout."""
    layout = "--zero 2 --micro_batch_size 6"
    run = pool.train(STEP, f"{flags(3)} --optimizer muon --dtype bfloat16 {layout}", 2, job=observed_job)
    one = one_process(pool, flags(3), "--optimizer muon --dtype float32")
    assert_same_run(run, one, 2e-2, weights=False)
    sent = [of_rank for _, of_rank in run.answers]
    assert all(seen == formula for of_rank in sent for seen, formula in of_rank.values()), sent
    assert_all_to_all_by_hand(sent, 2, 3, layout, number=2)


def test_of_a_matrix_one_average_persists(pool, flags):
    """Expect 4 bytes for each element of a block's matrix, instead of AdamW's 8. Everything else takes 8."""
    argv = f"{flags(3)} --optimizer muon --dtype float32 --zero 1 --micro_batch_size 6 --steps 2".split()
    states = pool.call(states_job, STEP, world=2, argv=argv)
    others = 3 * 2 * cases.HIDDEN + 2 * cases.VOCAB * cases.HIDDEN + cases.HIDDEN
    assert sum(states) == 4 * 3 * MATRICES + 8 * others


def states_job(argv):
    _, optimizer = trained_parts(argv)
    return storage_bytes(t for state in optimizer.adamw.state.values() for t in state.values() if t.dim())


# ------------------------------------------------------------------------------------- as torch's Muon
def torch_muon_job(argv, optimizer, exact):
    """Train with torch.optim.Muon in place of ours. It orthogonalizes in bfloat16, or, if exact, in float64."""
    import contextlib
    from unittest.mock import patch

    import optimizer as trainers
    import torch

    class Torchs:
        def __init__(self, masters, states, zero_units, args):
            self.muon = torch.optim.Muon(masters, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw")
            assert masters and not zero_units

        def step(self, lr):
            self.muon.param_groups[0]["lr"] = lr
            in_float64 = patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)
            with in_float64 if exact else contextlib.nullcontext():
                self.muon.step()
    with patch.object(trainers, "Muon", Torchs):
        train_job(argv, optimizer)


def exact_job(argv, optimizer):
    torch_muon_job(argv, optimizer, exact=True)


def bfloat16_job(argv, optimizer):
    torch_muon_job(argv, optimizer, exact=False)


def test_one_process_is_torchs_muon(pool, flags):
    run = one_process(pool, flags(3))
    torchs = pool.train(STEP, f"{flags(3)} --micro_batch_size 6 {MUON}", job=exact_job)
    assert_same_run(run, torchs, 1e-9)
    adamw = one_process(pool, flags(3), "--dtype float64")
    assert abs(run.losses[-1] - adamw.losses[-1]) > 1e-3  # and it is not AdamW


def test_one_process_is_torchs_muon_as_it_is(pool, flags):
    """Compare with bfloat16: an element is off by up to 1/256, and five steps of three products each add up to about 1% of an
    update. After four updates from small weights, the weights differ by 1.3%, losses and norms by 1e-5. (Muon and AdamW differ by
    76% and 8%.)"""
    run = one_process(pool, flags(3))
    torchs = pool.train(STEP, f"{flags(3)} --micro_batch_size 6 {MUON}", job=bfloat16_job)
    assert_same_run(run, torchs, 1e-3, weights=False)
    assert_same_tensors(run.weights, torchs.weights, 3e-2)


# ------------------------------------------------------------------------------------- singular values
def orthogonal_job(shapes):
    """Orthogonalize matrices with singular values from 0.1 to 1. Return for each the smallest and the largest singular value of the
    update, without the scale, and how far the singular vectors have turned."""
    import matrices
    import torch
    found = []
    for rows, columns in shapes:
        draw = torch.Generator().manual_seed(rows)
        u, _, vt = torch.linalg.svd(torch.randn(rows, columns, generator=draw, dtype=torch.float64), full_matrices=False)
        matrix = u @ torch.linspace(0.1, 1, len(vt), dtype=torch.float64).diag() @ vt
        inside = u.T @ matrices.orthogonalize(matrix) @ vt.T / (0.2 * max(rows, columns) ** 0.5)
        values = inside.diagonal()                        # everything else is 0 if the singular vectors are the same
        found.append((float(values.min()), float(values.max()), float((inside - values.diag()).norm())))
    return found


def test_singular_values_become_about_one(pool):
    for least, most, turned in pool.call(orthogonal_job, STEP, shapes=[(16, 48), (48, 16), (24, 24)])[0]:
        assert 0.65 < least and most < 1.25 and turned < 1e-12, (least, most, turned)


# ------------------------------------------------------------------------------------- refusals
def test_other_optimizers_are_refused(pool):
    assert_refused(pool, STEP, 2, "--optimizer lion", "argument --optimizer: invalid choice: 'lion'")
