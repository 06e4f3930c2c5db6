"""Step 4: every matrix cut over tp, the sequence too or not, trains as one process does, and sends what the formula says."""
import gc
import random
import time

import cases
import pytest
import torch
from harness import Refused, assert_same_run
from operations import assert_all_meet, recorded_job
from test_step02 import ledger_rows, refused_job

STEP, BASELINE = "step04_tp_sp", "step01_single_gpu"
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 2, 40, 8, 4, 6, 56, 64
LONG = pytest.mark.sweep
SHAPE = dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return cases.make(tmp_path_factory.mktemp("case"), **SHAPE) + " --micro_batch_size 6"


@pytest.fixture(scope="module")
def baseline(pool, flags):
    return pool.train(BASELINE, f"{flags} --dtype float64")


@pytest.fixture(scope="module")
def gradients(pool, flags):
    return pool.train(BASELINE, f"{flags} --steps 1 --dtype float64", gradients=True)


@pytest.mark.parametrize("sp", ["on", "off"])
@pytest.mark.parametrize("world, more", [
    (1, "--tp 1"), (2, "--tp 2"), (4, "--tp 4"), (8, "--tp 8 --micro_batch_size 24"),
    pytest.param(4, "--tp 2 --dp_mode overlap", marks=LONG), (6, "--tp 2 --dp_mode naive --micro_batch_size 4"), pytest.param(8, "--tp 4 --zero 1", marks=LONG),
    (4, "--tp 2 --zero 1"),
    (4, "--tp 2 --zero 2"), (4, "--tp 2 --zero 3"), (8, "--tp 2 --zero 3 --zero_shard 2"), pytest.param(8, "--tp 4 --zero 2 --zero_shard 1", marks=LONG),
    (2, "--tp 2 --recompute full"), (2, "--tp 2 --recompute selective"), (8, "--tp 4 --zero 3 --recompute selective")])
def test_trains_as_one_process(pool, flags, baseline, world, more, sp):
    assert_same_run(pool.train(STEP, f"{flags} --dtype float64 {more} --sp {sp}", world=world), baseline, 1e-9, f"{more} --sp {sp}")


@pytest.mark.parametrize("kv_heads, tp", [(1, 2), (1, 4), (2, 4), (2, 8), (4, 8), (8, 4)])
def test_fewer_kv_heads_than_ranks(pool, tmp_path, kv_heads, tp):
    """Their gradients are the sums of what the ranks that share a head have."""
    flags = cases.make(tmp_path, **SHAPE | dict(num_key_value_heads=kv_heads)) + f" --micro_batch_size {3 * tp} --dtype float64 --steps 2"
    more = "--sp off" if kv_heads == 2 else "--zero 3" if tp < 8 else ""
    assert_same_run(pool.train(STEP, f"{flags} --tp {tp} {more}", world=8), pool.train(BASELINE, flags), 1e-9)


def combinations(number, seed):
    draw, drawn = random.Random(seed), []
    for _ in range(number):
        tp, stage = draw.choice([2, 2, 4]), draw.choice([0, 1, 2, 3])
        dp = draw.choice([n for n in (1, 2, 3, 4) if tp * n <= 8])
        shard = draw.choice([n for n in range(1, dp + 1) if dp % n == 0])
        micro_batch = draw.choice([n for n in (2, 4, 6, 8, 12, 24) if 24 // dp % n == 0])
        drawn.append((tp * dp, f"--tp {tp} --sp {draw.choice(['on', 'off'])} --zero {stage} {f'--zero_shard {shard}' if stage else ''} "
                               f"--micro_batch_size {micro_batch} --dp_mode {draw.choice(['naive', 'overlap', 'bucket'])} "
                               f"--bucket_mb {draw.choice([0.01, 25])} --recompute {draw.choice(['none', 'selective', 'full'])}"))
    return drawn


@pytest.mark.parametrize("world, more", combinations(8, seed=1))
def test_random_combinations(pool, flags, baseline, world, more):
    assert_same_run(pool.train(STEP, f"{flags} --dtype float64 {more}", world=world), baseline, 1e-9, more)


@pytest.mark.sweep
@pytest.mark.parametrize("world, more", combinations(120, seed=2))
def test_many_random_combinations(pool, flags, baseline, world, more):
    assert_same_run(pool.train(STEP, f"{flags} --dtype float64 {more}", world=world), baseline, 1e-9, more)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-9), ("float32", 1e-4)])
@pytest.mark.parametrize("world, more", [(2, "--tp 2"), (2, "--tp 2 --sp off"), (4, "--tp 2 --zero 2"), (8, "--tp 8 --micro_batch_size 24")])
def test_first_gradients(pool, flags, gradients, dtype, tolerance, world, more):
    run = pool.train(STEP, f"{flags} --steps 1 --dtype {dtype} {more}", world=world, gradients=True)
    assert_same_run(run, gradients, tolerance, more)


@pytest.mark.parametrize("sp", ["on", "off"])
def test_bfloat16(pool, flags, sp):
    """Partial sums are rounded before they are added up: the numbers are near one process's, not equal."""
    one = pool.train(BASELINE, f"{flags} --dtype bfloat16")
    run = pool.train(STEP, f"{flags} --dtype bfloat16 --tp 2 --sp {sp}", world=2)
    assert_same_run(run, one, 2e-2, weights=False)
    assert run.weights["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("sp", ["on", pytest.param("off", marks=LONG)])
def test_compile(pool, flags, sp):
    run = pool.train(STEP, f"{flags} --steps 3 --micro_batch_size 12 --tp 2 --sp {sp} --compile", world=2, timeout=200)
    assert_same_run(run, pool.train(BASELINE, f"{flags} --steps 3"), 1e-4, weights=False)


def graphs_job(argv):
    """How many graphs torch.compile makes."""
    import torch._dynamo
    import train
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    train.main(argv)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_compile_with_recomputation(pool, flags, recompute):
    """The pieces of a layer are compiled, not only the loss; and recomputed right."""
    flags = f"{flags} --steps 3 --micro_batch_size 12"
    assert min(pool.call(graphs_job, STEP, world=2, timeout=200, argv=f"{flags} --tp 2 --compile --recompute {recompute}".split())) > 3
    run = pool.train(STEP, f"{flags} --tp 2 --compile --recompute {recompute}", world=2, timeout=200)
    assert_same_run(run, pool.train(BASELINE, flags), 1e-4, weights=False)


def test_loads_a_checkpoint_and_saves_one(pool, flags, tmp_path):
    base = f"{flags} --dtype float64"
    pool.train(BASELINE, f"{base} --seed 7 --steps 1 --save {tmp_path}", weights=False)
    one = pool.train(BASELINE, f"{base} --init_from {tmp_path}")
    for world, more in (4, "--tp 2 --zero 3"), (8, "--tp 8 --sp off --micro_batch_size 12"):
        assert_same_run(pool.train(STEP, f"{base} --init_from {tmp_path} {more}", world=world), one, 1e-9)


# ------------------------------------------------------------------------------------- the four pairs, by finite differences
def gradcheck_job(sp, kind):
    """Rank r's input is row r of one tensor that all ranks know, or the tensor itself where all have the same; likewise
    the output. So every rank checks the whole map, from all inputs to all outputs."""
    import os

    import torch.distributed as dist
    import torch.nn.functional as F
    from tensor_parallel import Enter, EnterLinears, Leave, all_gather, all_reduce, identity, reduce_scatter
    dist.init_process_group("gloo")
    rank, group = int(os.environ["RANK"]), dist.group.WORLD
    border = *((all_gather, reduce_scatter) if sp == "on" else (identity, all_reduce)), group

    class MyRow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            ctx.shape = rows.shape
            return rows[rank].clone()

        @staticmethod
        def backward(ctx, grad):
            rows = grad.new_zeros(ctx.shape)
            rows[rank] = grad
            dist.all_reduce(rows)
            return rows

    class AllRows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, row):
            rows = row.new_zeros(group.size(), *row.shape)
            rows[rank] = row
            dist.all_reduce(rows)
            return rows

        @staticmethod
        def backward(ctx, grad):
            return grad[rank].clone()

    draw = torch.Generator().manual_seed(0)
    random_tensor = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
    if kind == "leave":                                   # [batch, seq, hidden] partial sums
        rows = random_tensor(group.size(), 2, 4, 3)
        parts = lambda x: Leave.apply(MyRow.apply(x), *border)
        whole = lambda x: AllRows.apply(parts(x)) if sp == "on" else parts(x)
        assert torch.autograd.gradcheck(whole, rows)
        expected = rows.sum(0)
        assert torch.equal(whole(rows), torch.stack(expected.chunk(group.size(), 1)) if sp == "on" else expected)
        return
    x = random_tensor(group.size(), 2, 2, 3) if sp == "on" else random_tensor(2, 4, 3)
    mine = MyRow.apply if sp == "on" else lambda x: x
    whole = torch.cat(x.unbind(), dim=1) if sp == "on" else x
    if kind == "enter":
        assert torch.autograd.gradcheck(lambda x: AllRows.apply(Enter.apply(mine(x), *border)), x)
        assert torch.equal(Enter.apply(mine(x), *border), whole)
    else:
        weights = random_tensor(group.size(), 5, 3), random_tensor(group.size(), 2, 3)
        products = lambda x, *weights: [AllRows.apply(y) for y in EnterLinears.apply(mine(x), *border, *map(MyRow.apply, weights))]
        assert torch.autograd.gradcheck(products, (x, *weights))
        for product, weight in zip(products(x, *weights), weights):
            torch.testing.assert_close(product, torch.stack([F.linear(whole, w) for w in weight]))


@pytest.mark.parametrize("kind", ["enter", "leave", "enter_linears"])
@pytest.mark.parametrize("sp", ["on", "off"])
def test_pairs_are_conjugate(pool, sp, kind):
    pool.call(gradcheck_job, STEP, world=2, sp=sp, kind=kind)


# ------------------------------------------------------------------------------------- what is sent, what is kept
@pytest.mark.parametrize("world, more", [(2, "--tp 2"), (4, "--tp 2 --sp off"), (4, "--tp 4 --zero 3"), (4, "--tp 2 --zero 2"), (8, "--tp 8")])
def test_ledger(pool, flags, world, more):
    run = pool.train(STEP, f"{flags} --steps 2 --ledger --dtype bfloat16 {more}", world=world, weights=False)
    rows = {what: numbers[1:3] for what, numbers in ledger_rows(run.output).items()}
    assert all(seen == formula for seen, formula in rows.values()), rows
    tp = int(more.split()[1])
    tokens = 24 // (world // tp) * 16
    stream, scalars = tokens * HIDDEN * 2, 3 * tokens * 4                          # [batch, seq, hidden] in bfloat16; the loss
    if "off" in more:
        assert rows["tp", "all_reduce"][0] == (4 * LAYERS + 2) * stream + scalars
        return
    norms = 4 * (2 * LAYERS + 1) * HIDDEN
    assert rows["tp", "reduce_scatter"][0] == (4 * LAYERS + 2) * stream
    assert rows["tp", "all_gather"][0] == (4 * LAYERS + 2) * stream + 2 * LAYERS * stream        # and the inputs again
    if "zero" not in more:                                # else a rank has a part of the norms, summed where it lies
        assert rows["tp", "all_reduce"][0] == scalars + norms + (8 if world == tp else 0)        # tp is the world: its two numbers
    kv_matrices = 2 * LAYERS * HIDDEN * HEAD_DIM          # of one head, in float32
    assert rows.get(("kv_heads", "all_reduce"), (0,))[0] == (4 * kv_matrices if tp == 8 else 0)


@pytest.mark.parametrize("world, more", [(2, "--tp 2 --recompute full"), (2, "--tp 2 --sp off --recompute selective"), (4, "--tp 4 --zero 3 --recompute selective")])
def test_ledger_with_recomputation(pool, flags, world, more):
    run = pool.train(STEP, f"{flags} --steps 2 --ledger --dtype bfloat16 {more}", world=world, weights=False)
    rows = {what: numbers[1:3] for what, numbers in ledger_rows(run.output).items()}
    assert rows and all(seen == formula for seen, formula in rows.values()), rows


@pytest.mark.parametrize("more", ["--tp 2 --zero 3", "--tp 4 --sp off --zero 1", "--tp 8"])
def test_what_ranks_say_meets(pool, flags, more):
    assert assert_all_meet(pool.call(recorded_job, STEP, world=8, argv=f"{flags} --steps 2 {more} --micro_batch_size 12".split()
                                     if "8" in more else f"{flags} --steps 2 {more}".split())) > 1


def kept_job(argv):
    """Bytes of the storages that are alive between forward and backward of one micro-batch, parameters aside; and the bytes
    of the parameters themselves."""
    import profiling
    import train

    def measure(model, micro_batches, args):
        inputs, positions, targets = micro_batches[0]
        live = profiling.LiveStorages()
        for param in model.parameters():
            live.note(param, "parameters")
        with live:
            hidden = model.model(inputs, positions)
        gc.collect()
        time.sleep(0.3)                                   # gloo's threads let go of what they sent a little after the wait
        measure.activations = sum(size for _, number, size in live.events if live.kinds[number] != "parameters")
        measure.parameters = sum(param.nbytes for param in model.parameters())
        (model.lm_head(hidden, targets)).backward()
        return torch.zeros(())
    forward_backward, train.forward_backward = train.forward_backward, measure
    try:
        train.main(argv)
    finally:
        train.forward_backward = forward_backward
    return measure.activations, measure.parameters


def kept_by_a_layer(pool, tmp_path, world, more):
    """Numbers, in float32."""
    kept = []
    for layers in (2, 3):
        flags = cases.make(tmp_path / str(layers), **SHAPE | dict(num_hidden_layers=layers))
        measured = pool.call(kept_job, STEP, world=world, argv=f"{flags} --steps 1 --micro_batch_size 24 {more}".split())
        assert len(set(measured)) == 1
        kept.append(measured[0][0])
    return (kept[1] - kept[0]) / 4


@pytest.mark.parametrize("world, more", [(1, ""), (2, "--tp 2"), (2, "--tp 2 --sp off"), (4, "--tp 4"), (4, "--tp 4 --sp off")])
def test_what_a_layer_keeps(pool, tmp_path, world, more):
    """The interior of the regions divided by tp; with sp all of it. A norm keeps its input, that input normalised, one
    number per token and, as the input of what follows, its output."""
    tokens, tp = 24 * 16, world
    outside = tokens // (tp if "off" not in more else 1)
    interior = tokens // tp * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + HEADS + 4 * MLP)
    assert kept_by_a_layer(pool, tmp_path, world, more) == pytest.approx(interior + outside * (6 * HIDDEN + 2), rel=1e-3)


@pytest.mark.parametrize("world, more", [(1, ""), (2, "--tp 2"), (2, "--tp 2 --sp off"), (4, "--tp 4"), (4, "--tp 4 --sp off")])
def test_what_a_layer_keeps_with_selective_recomputation(pool, tmp_path, world, more):
    """The first products of a region, attention's output and the layer's input. The last products only without tp: with it
    they are sums that are not whole yet, of all tokens."""
    tokens, tp = 24 * 16, world
    interior = tokens // tp * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + HEADS + 2 * MLP)
    outside = tokens // (tp if "off" not in more else 1) * (3 if tp == 1 else 1) * HIDDEN
    assert kept_by_a_layer(pool, tmp_path, world, f"{more} --recompute selective") == pytest.approx(interior + outside, rel=1e-3)


@pytest.mark.parametrize("tp", [2, 8])
def test_a_rank_has_its_part_of_the_weights(pool, flags, tp):
    measured = pool.call(kept_job, STEP, world=tp, argv=f"{flags} --steps 1 --tp {tp}".split())
    heads = HEADS * HEAD_DIM // tp * 2 + max(1, KV_HEADS // tp) * HEAD_DIM * 2
    layer = HIDDEN * (heads + 3 * MLP // tp + 2)
    assert {parameters for _, parameters in measured} == {4 * (LAYERS * layer + 2 * VOCAB // tp * HIDDEN + HIDDEN)}


# ------------------------------------------------------------------------------------- what can go wrong
@pytest.mark.parametrize("world, more, message", [
    (2, "--tp 3", "num_attention_heads 8 is not a multiple of tp(3); tp could be 1, 2, 4, 8"),
    (3, "--tp 2", "dp(1) x tp(2) != world size (3); tp could be 1, 3, with --dp left out"),
    (4, "--tp 2 --dp 4", "dp(4) x tp(2) != world size (4)"),
    (2, "--tp 0", "--tp 0: must be at least 1"),
    (2, "--tp 2 --seq_len 15", "seq_len 15 is not a multiple of tp(2); it could be 14 or 16; or --sp off"),
    (4, "--tp 4 --model {folder}/a", "num_key_value_heads 6 is neither a multiple of tp(4) nor a divisor; tp could be 1, 2"),
    (2, "--tp 2 --model {folder}/b", "vocab_size 61 is not a multiple of tp(2); tp could be 1"),
    (4, "--tp 4 --model {folder}/c", "intermediate_size 58 is not a multiple of tp(4); tp could be 1, 2")])
def test_bad_layouts_are_refused(pool, tmp_path, flags, world, more, message):
    cases.make(tmp_path / "a", **SHAPE | dict(num_attention_heads=12, num_key_value_heads=6))
    cases.make(tmp_path / "b", **SHAPE | dict(vocab_size=61))
    cases.make(tmp_path / "c", **SHAPE | dict(intermediate_size=58))
    with pytest.raises(Refused) as refused:
        pool.call(refused_job, STEP, world=world, argv=f"{flags} {more.format(folder=tmp_path)}".split())
    assert message in str(refused.value) and str(refused.value).count("\n") == 1
