"""Step 5: with every sequence sharded over cp, in four modes, it trains as one process does; attention in blocks is attention."""
import cases
import layouts
import pytest
from cases import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP
from harness import Refused, assert_same_run, train_job
from jobs import assert_refused, attention_job, check_job, kept_by_a_layer, traced_job
from layouts import Layout
from observe import check

STEP, BASELINE = "step05_cp", "step01_single_gpu"
LAYERS = 2
MODES = ["zigzag", "ring", "allgather", "ulysses"]
EXACT = "--dtype float64 --recompute none --micro_batch_size 12"
slow = pytest.mark.slow


def few_heads(shape, cp, tp):
    return Layout(STEP, cp * tp, shape, "adamw", f"{EXACT} --cp {cp} --tp {tp} --sp on --cp_mode ulysses")


@pytest.mark.parametrize("layout", [*layouts.every_layout(5),
    # ulysses with fewer key-value heads than ranks, or with a number that is not a multiple of cp
    pytest.param(few_heads("dense-2-kv1", 4, 1), id="one head", marks=slow),
    pytest.param(few_heads("dense-2-kv2", 2, 2), id="two heads", marks=slow),
    pytest.param(few_heads("dense-2-heads20-kv10", 4, 1), id="ten heads", marks=slow)])
def test_layout(pool, layout):
    check(pool, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [
    Layout(STEP, 8, "dense-2", "adamw", f"{EXACT} {more} --cp_mode {mode}")
    for more in ("--micro_batch_size 24 --cp 8", "--cp 4 --tp 2 --sp on --zero 3") for mode in MODES], ids=str)
def test_more_ranks(pool, layout):
    check(pool, layout)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return cases.make(tmp_path_factory.mktemp("case"), **cases.shape("dense-2")) + " --micro_batch_size 6"


@slow
@pytest.mark.parametrize("more, graphs", [("--cp_mode zigzag", 1), *(pytest.param(*case, marks=pytest.mark.sweep) for case in [
    ("--recompute full", 3), ("--cp_mode ulysses", 1)])])
def test_compile(pool, flags, more, graphs):
    base = f"{flags} --steps 3 --micro_batch_size 12"
    trained = pool.train(STEP, f"{base} --cp 2 --compile {more}", world=2, timeout=200, job=traced_job)
    assert min(trained.answers) >= graphs
    assert_same_run(trained, pool.train(BASELINE, base), 1e-4, weights=False)


# ------------------------------------------------------------------------------------- attention in blocks is attention
@slow
def test_blocks_are_attention(pool):
    """Compare errors on 4,096 tokens and 8 ranks. In bfloat16 the blocks are added up in float32, so they should be about as good
    as the kernel on the whole sequence."""
    per_rank = pool.call(attention_job, STEP, world=8, timeout=200, modes=MODES, seq_len=4096,
                         dtypes=["float64", "float32", "bfloat16"])
    worst = {key: [max(errors[key][i] for errors in per_rank) for i in range(4)] for key in per_rank[0]}
    for mode in MODES:
        assert max(worst[mode, "float64"]) < 1e-10, (mode, worst[mode, "float64"])
        assert max(worst[mode, "float32"]) < 1e-5, (mode, worst[mode, "float32"])
        for ours, kernel in zip(worst[mode, "bfloat16"], worst["flash", "bfloat16"]):
            assert ours < 1.5 * kernel, (mode, worst[mode, "bfloat16"], worst["flash", "bfloat16"])


def by_formula_job(argv, optimizer):
    """Train as on a GPU without a flash kernel."""
    from unittest.mock import patch

    import context_parallel
    with patch.object(context_parallel, "has_flash_kernel", lambda q: False), \
            patch.object(context_parallel, "aten", None):                          # so that no kernel is called
        train_job(argv, optimizer)


@pytest.mark.parametrize("mode", ["zigzag", "ring", "allgather"])
def test_blocks_without_a_flash_kernel(pool, flags, mode):
    base = f"{flags} {EXACT}"
    by_formula = pool.train(STEP, f"{base} --cp 2 --cp_mode {mode}", world=2, job=by_formula_job)
    assert_same_run(by_formula, pool.train(BASELINE, base), 1e-9)


def strided_job():
    """Exchange a tensor that is strided like the gradient of a transposed product, over a gloo that refuses what NCCL refuses.
    (torch.stack of its chunks is strided as well.) Return whether the result is that of a contiguous copy."""
    import torch
    from context_parallel import UlyssesAllToAll
    from mesh import init_distributed
    from torch.distributed import group
    from prove.unforgiving import unforgiving
    with init_distributed(), unforgiving():
        x = torch.randn(2, 1, 8, 4).permute(0, 3, 1, 2)   # [batch, seq, heads, head_dim]
        results = [UlyssesAllToAll.apply(tensor, 1, 2, group.WORLD) for tensor in (x, x.contiguous())]
        return torch.equal(*results)


def test_ulysses_sends_what_nccl_accepts(pool):
    assert pool.call(strided_job, STEP, world=2) == [True, True]


def computed_job(argv):
    """Train. Return the multiplications in this rank's blocks of attention, counted as the kernels are called."""
    import context_parallel
    import train
    counted, flash = [0], context_parallel.flash

    def counting(q, k, v, causal):
        pairs = q.shape[2] * (k.shape[2] + 1) / 2 if causal else q.shape[2] * k.shape[2]
        counted[0] += q.shape[0] * q.shape[1] * q.shape[3] * pairs * 2
        return flash(q, k, v, causal)
    context_parallel.flash = counting
    try:
        train.main(argv)
    finally:
        context_parallel.flash = flash
    return counted[0]


@pytest.mark.parametrize("mode", ["zigzag", "allgather", "ring"])
def test_who_computes_how_much(pool, flags, mode):
    done = pool.call(computed_job, STEP, world=4, argv=f"{flags} --steps 1 --micro_batch_size 24 --cp 4 --cp_mode {mode}".split())
    length = 16
    everything = LAYERS * 24 * HEADS * HEAD_DIM * 2 * length * (length + 1) / 2
    assert sum(done) == everything
    if mode == "ring":                                    # rank r: its own block's triangle, and the r blocks before it
        block = length // 4
        share = [(block * (block + 1) / 2 + r * block * block) / (length * (length + 1) / 2) for r in range(4)]
        assert done == pytest.approx([everything * s for s in share])
    else:
        assert len(set(done)) == 1


# ------------------------------------------------------------------------------------- what is kept
@pytest.mark.parametrize("mode, cp, tp, sp", [("zigzag", 2, 1, "on"), *(pytest.param(*case, marks=slow) for case in [
    ("zigzag", 1, 1, "on"), ("ulysses", 4, 1, "on"), ("ulysses", 2, 2, "off"), ("ring", 2, 2, "off"), ("allgather", 4, 1, "on"),
    ("allgather", 2, 2, "on")])])
def test_what_a_layer_keeps(pool, tmp_path, mode, cp, tp, sp):
    """Check that a layer keeps all that step 4 counts, divided by cp. With ulysses, o_proj's input is a tensor of its own, which is
    assembled from what comes back. In the other modes it is the output, which attention keeps anyway."""
    tokens = 24 * 16 // cp
    outside = tokens // (tp if sp == "on" else 1)
    interior = tokens // tp * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + HEADS + 4 * MLP)
    if cp > 1 and mode == "ulysses":                      # o_proj's input is assembled from what comes back
        interior += tokens // tp * HEADS * HEAD_DIM
    kept = kept_by_a_layer(pool, tmp_path, STEP, cp * tp, f"--cp {cp} --tp {tp} --sp {sp} --cp_mode {mode}")
    assert kept == pytest.approx(interior + outside * (6 * HIDDEN + 2), rel=1e-3)


def long_sequence_job(argv):
    import resource

    import train
    train.main(argv)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@pytest.mark.sweep
def test_a_long_sequence(pool):
    """Train on 32,768 tokens and 8 ranks, in fresh processes, because a process's peak memory never goes down."""
    pool.stop()
    argv = "--seq_len 32768 --global_batch_size 1 --micro_batch_size 1 --steps 1 --cp 8 --recompute full".split()
    used = pool.call(long_sequence_job, STEP, world=8, timeout=600, argv=argv)
    assert sum(used) < 6, used


# ------------------------------------------------------------------------------------- what can go wrong
@pytest.mark.parametrize("world, more, message", [
    (3, "--cp 3",
     "--seq_len 16: must be a multiple of 6, because of cp 3 with --cp_mode zigzag; choose 12 or 18"),
    (2, "--cp 0", "--cp: must be at least 1 and below 100000000, but is 0"),
    (3, "--cp 2", "dp 1 x cp 2 x tp 1: must equal the world size, 3; leave --dp out and choose cp x tp from 1, 3"),
    (64, "--cp 8 --tp 8 --cp_mode ring", "--seq_len 16: must be a multiple of 64"),
    (4, "--cp 4 --zero 3 --zero_shard 3", "--zero_shard 3: must divide dp 1 x cp 4 = 4; choose from 1, 2, 4"),
    (16, "--cp 16 --cp_mode ulysses",
     "--cp 16: must divide the heads that --cp_mode ulysses splits, num_attention_heads 8 / tp 1 = 8; choose from 1, 2, 4, 8"),
    (2, "--cp 2 --cp_mode helix", "invalid choice: 'helix'")])
def test_bad_layouts_are_refused(pool, flags, world, more, message):
    assert_refused(pool, STEP, world, f"{flags} {more}", message)


def flash_job(argv, world_size):
    """Run check_job as if there were a GPU and flash-attn."""
    import importlib.util
    from unittest.mock import patch

    import torch
    with (patch.object(torch.cuda, "is_available", lambda: True), patch.object(importlib.util, "find_spec", lambda name: name),
          patch.object(torch.cuda, "get_device_capability", lambda: (8, 0))):
        check_job(argv, world_size)


@pytest.mark.parametrize("cp, mode", [(2, "zigzag"), (2, "ring"), (2, "allgather"), (2, "ulysses"), (1, "zigzag")])
def test_the_package_computes_no_blocks(pool, flags, cp, mode):
    """Check that --attention flash is refused where attention is in blocks: the kernels are PyTorch's, and the flag would change
    nothing."""
    argv = f"{flags} --device cuda --dtype bfloat16 --attention flash --model tiny --cp {cp} --cp_mode {mode}".split()
    if cp == 1 or mode == "ulysses":
        pool.call(flash_job, STEP, argv=argv, world_size=cp)
    else:
        with pytest.raises(Refused, match=f"--cp_mode {mode} has its own kernels; use --attention sdpa or --cp_mode ulysses"):
            pool.call(flash_job, STEP, argv=argv, world_size=cp)
