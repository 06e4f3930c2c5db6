"""Step 5: every sequence cut over cp, in four modes, trains as one process does; attention in blocks is attention."""
import random

import cases
import pytest
import torch
from harness import Refused, assert_same_run
from operations import assert_all_meet, recorded_job
from test_step02 import ledger_rows, refused_job
from test_step04 import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, LONG, MLP, SHAPE, graphs_job, kept_job

STEP, BASELINE = "step05_cp", "step01_single_gpu"
MODES = ["zigzag", "ring", "allgather", "ulysses"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return cases.make(tmp_path_factory.mktemp("case"), **SHAPE) + " --micro_batch_size 6"


@pytest.fixture(scope="module")
def baseline(pool, flags):
    return pool.train(BASELINE, f"{flags} --dtype float64")


@pytest.fixture(scope="module")
def gradients(pool, flags):
    return pool.train(BASELINE, f"{flags} --steps 1 --dtype float64", gradients=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world, more", [
    (2, "--cp 2"), (4, "--cp 4 --micro_batch_size 12"), (8, "--cp 8 --micro_batch_size 24"),
    pytest.param(4, "--cp 2 --dp_mode overlap", marks=LONG), pytest.param(4, "--cp 2 --zero 1", marks=LONG),
    pytest.param(4, "--cp 2 --zero 3 --zero_shard 2", marks=LONG), (4, "--cp 4 --zero 3"),
    (4, "--cp 2 --tp 2 --zero 2"), pytest.param(8, "--cp 2 --tp 2 --sp off", marks=LONG), (8, "--cp 4 --tp 2 --zero 3 --micro_batch_size 12"),
    (2, "--cp 2 --recompute full"), (2, "--cp 2 --recompute selective")])
def test_trains_as_one_process(pool, flags, baseline, world, more, mode):
    more = f"{more} --cp_mode {mode}"
    assert_same_run(pool.train(STEP, f"{flags} --dtype float64 {more}", world=world), baseline, 1e-9, more)


@pytest.mark.parametrize("heads, kv_heads, cp, tp", [(8, 1, 4, 1), (8, 2, 2, 2), (12, 6, 4, 1)])
def test_ulysses_with_few_kv_heads(pool, tmp_path, heads, kv_heads, cp, tp):
    flags = cases.make(tmp_path, **SHAPE | dict(num_attention_heads=heads, num_key_value_heads=kv_heads))
    flags += " --micro_batch_size 12 --dtype float64 --steps 2"
    run = pool.train(STEP, f"{flags} --cp {cp} --tp {tp} --cp_mode ulysses", world=cp * tp)
    assert_same_run(run, pool.train(BASELINE, flags), 1e-9)


def combinations(number, seed):
    draw, drawn = random.Random(seed), []
    for _ in range(number):
        cp, tp = draw.choice([(2, 1), (2, 2), (4, 1), (4, 2), (2, 4), (1, 4)])
        dp, stage = draw.choice([n for n in (1, 2, 3, 4) if cp * tp * n <= 8]), draw.choice([0, 1, 2, 3])
        shard = draw.choice([n for n in range(1, dp * cp + 1) if dp * cp % n == 0])
        micro_batch = draw.choice([n for n in (4, 6, 8, 12, 24) if 24 // dp % n == 0])
        modes = MODES if SHAPE["num_attention_heads"] // tp % cp == 0 else MODES[:3]
        drawn.append((cp * tp * dp, f"--cp {cp} --cp_mode {draw.choice(modes)} --tp {tp} --sp {draw.choice(['on', 'off'])} --zero {stage} "
                                    f"{f'--zero_shard {shard}' if stage else ''} --micro_batch_size {micro_batch} "
                                    f"--dp_mode {draw.choice(['naive', 'overlap', 'bucket'])} --recompute {draw.choice(['none', 'selective', 'full'])}"))
    return drawn


@pytest.mark.parametrize("world, more", combinations(8, seed=1))
def test_random_combinations(pool, flags, baseline, world, more):
    assert_same_run(pool.train(STEP, f"{flags} --dtype float64 {more}", world=world), baseline, 1e-9, more)


@pytest.mark.sweep
@pytest.mark.parametrize("world, more", combinations(120, seed=2))
def test_many_random_combinations(pool, flags, baseline, world, more):
    assert_same_run(pool.train(STEP, f"{flags} --dtype float64 {more}", world=world), baseline, 1e-9, more)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-9), ("float32", 1e-4)])
@pytest.mark.parametrize("mode", MODES)
def test_first_gradients(pool, flags, gradients, dtype, tolerance, mode):
    run = pool.train(STEP, f"{flags} --steps 1 --dtype {dtype} --cp 2 --cp_mode {mode}", world=4, gradients=True)
    assert_same_run(run, gradients, tolerance, mode)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16(pool, flags, mode):
    one = pool.train(BASELINE, f"{flags} --dtype bfloat16")
    assert_same_run(pool.train(STEP, f"{flags} --dtype bfloat16 --cp 2 --cp_mode {mode}", world=2), one, 2e-2, weights=False)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["zigzag", pytest.param("ulysses", marks=LONG)])
def test_compile(pool, flags, mode):
    run = pool.train(STEP, f"{flags} --steps 3 --micro_batch_size 12 --cp 2 --cp_mode {mode} --compile", world=2, timeout=200)
    assert_same_run(run, pool.train(BASELINE, f"{flags} --steps 3"), 1e-4, weights=False)


@pytest.mark.slow
def test_compile_with_recomputation(pool, flags):
    base = f"{flags} --steps 3 --micro_batch_size 12"
    argv = f"{base} --cp 2 --recompute full --compile"
    assert min(pool.call(graphs_job, STEP, world=2, timeout=200, argv=argv.split())) > 2
    assert_same_run(pool.train(STEP, argv, world=2, timeout=200), pool.train(BASELINE, base), 1e-4, weights=False)


# ------------------------------------------------------------------------------------- attention in blocks is attention
def attention_job(modes, seq_len, dtypes):
    """{(mode, dtype): for the output and the three gradients the relative error of this rank's part}, and under "flash"
    that of the flash kernel on the whole; the reference is the flash kernel in float64."""
    from types import SimpleNamespace

    import context_parallel
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    draw = torch.Generator().manual_seed(0)
    q, out_grad = (torch.randn(1, seq_len, 8, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, seq_len, 4, 16, generator=draw, dtype=torch.float64) for _ in range(2))

    def run(core, dtype, rows):
        mine = [t[:, rows].to(dtype).requires_grad_() for t in (q, k, v)]
        out = core(*mine)
        return out.detach(), *torch.autograd.grad(out, mine, out_grad[:, rows].to(dtype))

    def whole(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    errors, every = {}, torch.arange(seq_len)
    exact = run(whole, torch.float64, every) if mesh.get_rank() == 0 else [torch.empty_like(t) for t in (q, q, k, v)]
    for tensor in exact:
        dist.broadcast(tensor, 0)
    error = lambda got, rows: [float((g.double() - e[:, rows]).norm() / e[:, rows].norm()) for g, e in zip(got, exact)]
    for dtype in dtypes:
        errors["flash", dtype] = error(run(whole, getattr(torch, dtype), every), every) if mesh.get_rank() == 0 else 4 * [0.0]
        for mode in modes:
            rows = context_parallel.local_positions(mesh, SimpleNamespace(seq_len=seq_len, cp=mesh.size(), cp_mode=mode))
            group = mesh.get_group()
            core = context_parallel.ulysses(whole, group) if mode == "ulysses" else context_parallel.in_blocks(mode, group)
            errors[mode, dtype] = error(run(core, getattr(torch, dtype), rows), rows)
    return errors


@pytest.mark.slow
def test_blocks_are_attention(pool):
    """8,192 tokens on 8 ranks. In bfloat16 the blocks are added up in float32: no worse than the kernel on the whole."""
    per_rank = pool.call(attention_job, STEP, world=8, timeout=200, modes=MODES, seq_len=8192, dtypes=["float64", "float32", "bfloat16"])
    worst = {key: [max(errors[key][i] for errors in per_rank) for i in range(4)] for key in per_rank[0]}
    for mode in MODES:
        assert max(worst[mode, "float64"]) < 1e-10, (mode, worst[mode, "float64"])
        assert max(worst[mode, "float32"]) < 1e-5, (mode, worst[mode, "float32"])
        for ours, kernel in zip(worst[mode, "bfloat16"], worst["flash", "bfloat16"]):
            assert ours < 1.5 * kernel, (mode, worst[mode, "bfloat16"], worst["flash", "bfloat16"])


def computed_job(argv):
    """Multiplications in the blocks of attention on this rank, counted as the kernels are called."""
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


# ------------------------------------------------------------------------------------- what is sent, what is kept
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world, cp, tp", [(2, 2, 1), (4, 4, 1), (4, 2, 2)])
def test_ledger(pool, flags, mode, world, cp, tp):
    run = pool.train(STEP, f"{flags} --steps 2 --ledger --dtype bfloat16 --micro_batch_size 12 --cp {cp} --tp {tp} --cp_mode {mode}", world=world, weights=False)
    rows = {what: numbers[1:3] for what, numbers in ledger_rows(run.output).items()}
    assert all(seen == formula for seen, formula in rows.values()), rows
    sent = {collective: numbers[0] for (dimension, collective), numbers in rows.items() if dimension == "cp" and collective != "all_reduce"}
    tokens = LAYERS * 24 * 16 // cp                       # a rank's, through attention
    keys_and_values = tokens * 2 * KV_HEADS // tp * HEAD_DIM
    if mode in ("zigzag", "ring"):                        # there and, with gradients in float32, back
        assert sent == {"send": (cp - 1) * keys_and_values * 2 + (cp - 1) * keys_and_values * 2 + cp * keys_and_values * 4}
    elif mode == "allgather":                             # in forward and in backward; the gradients in float32
        assert sent == {"all_gather": 2 * cp * keys_and_values * 2, "reduce_scatter": cp * keys_and_values * 4}
    else:
        assert sent == {"all_to_all": 2 * 2 * (2 * tokens * HEADS // tp * HEAD_DIM + keys_and_values)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world, more", [(2, "--cp 2 --recompute full"), (4, "--cp 2 --tp 2 --recompute selective")])
def test_ledger_with_recomputation(pool, flags, mode, world, more):
    run = pool.train(STEP, f"{flags} --steps 2 --ledger --dtype bfloat16 --micro_batch_size 12 --cp_mode {mode} {more}", world=world, weights=False)
    rows = {what: numbers[1:3] for what, numbers in ledger_rows(run.output).items()}
    assert rows and all(seen == formula for seen, formula in rows.values()), rows


@pytest.mark.parametrize("more", ["--cp 4 --zero 3", "--cp 2 --tp 2 --cp_mode allgather", "--cp 2 --tp 2 --cp_mode ulysses", "--cp 2 --tp 2 --recompute full"])
def test_what_ranks_say_meets(pool, flags, more):
    assert assert_all_meet(pool.call(recorded_job, STEP, world=8, argv=f"{flags} --steps 2 {more}".split())) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp, tp, sp", [(1, 1, "on"), (2, 1, "on"), (4, 1, "on"), (2, 2, "on"), (2, 2, "off")])
def test_what_a_layer_keeps(pool, tmp_path, mode, cp, tp, sp):
    """All that step 4 counts, divided by cp. With ulysses the input of o_proj is a tensor of its own, put together from what
    comes back; in the other modes it is the output that attention keeps anyway."""
    tokens, kept = 24 * 16 // cp, []
    for layers in (2, 3):
        flags = cases.make(tmp_path / str(layers), **SHAPE | dict(num_hidden_layers=layers))
        argv = f"{flags} --steps 1 --micro_batch_size 24 --cp {cp} --tp {tp} --sp {sp} --cp_mode {mode}".split()
        measured = pool.call(kept_job, STEP, world=cp * tp, argv=argv)
        kept.append(measured[0][0])
    outside = tokens // (tp if sp == "on" else 1)
    interior = tokens // tp * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + HEADS + 4 * MLP)
    if cp > 1 and mode == "ulysses":                      # o_proj's input is put together from what comes back
        interior += tokens // tp * HEADS * HEAD_DIM
    assert (kept[1] - kept[0]) / 4 == pytest.approx(interior + outside * (6 * HIDDEN + 2), rel=1e-3)


def long_sequence_job(argv):
    import resource

    import train
    train.main(argv)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@pytest.mark.sweep
def test_a_long_sequence(pool):
    """32,768 tokens on 8 ranks, in fresh processes, since a process never gives its peak back."""
    pool.stop()
    argv = "--seq_len 32768 --global_batch_size 1 --micro_batch_size 1 --steps 1 --cp 8 --recompute full".split()
    used = pool.call(long_sequence_job, STEP, world=8, timeout=600, argv=argv)
    assert sum(used) < 6, used


# ------------------------------------------------------------------------------------- what can go wrong
@pytest.mark.parametrize("world, more, message", [
    (2, "--cp 3", "seq_len 16 is not a multiple of 6, which cp(3) with --cp_mode zigzag and tp(1) with --sp on take; it could be 12 or 18"),
    (2, "--cp 0", "--cp 0: must be at least 1"),
    (3, "--cp 2", "dp(1) x cp(2) x tp(1) != world size (3); cp x tp could be 1, 3, with --dp left out"),
    (8, "--cp 8 --tp 8 --cp_mode ring", "seq_len 16 is not a multiple of 64"),
    (4, "--cp 4 --zero 3 --zero_shard 3", "dp(1) x cp(4) is not a multiple of zero_shard(3); zero_shard could be 1, 2, 4"),
    (16, "--cp 16 --cp_mode ulysses", "num_attention_heads 8 / tp(1) = 8 is not a multiple of cp(16); with --cp_mode ulysses cp could be 1, 2, 4, 8"),
    (2, "--cp 2 --cp_mode helix", "invalid choice: 'helix'")])
def test_bad_layouts_are_refused(pool, flags, world, more, message):
    """Two of them read the world size alone, and so need no such world."""
    with pytest.raises(Refused) as refused:
        pool.call(refused_job, STEP, world=min(world, 8), argv=f"{flags} {more}".split())
    assert message in str(refused.value) and str(refused.value).count("\n") == 1
