"""Step 4: with every matrix sharded over tp, and the sequence too or not, it trains as one process does, and keeps what the formula
says."""
import re

import cases
import layouts
import pytest
import torch
from cases import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, SHAPE, VOCAB
from harness import assert_same_run
from jobs import assert_loads, assert_refused, kept_by_a_layer, kept_job, memory_job, traced_job
from layouts import Layout
from observe import check

from steps import text_of

STEP, BASELINE = "step04_tp_sp", "step01_single_gpu"
LAYERS = 2
EXACT = "--dtype float64 --recompute none --micro_batch_size 6"
slow = pytest.mark.slow


def few_heads(world, shape, more):
    return Layout(STEP, world, shape, "adamw", f"{EXACT} {more}")


@pytest.mark.parametrize("layout", [*layouts.every_layout(4),
    # with fewer key-value heads than ranks, the ranks that share a head must sum its gradients
    pytest.param(few_heads(4, "dense-2-kv2", "--tp 4 --sp on"), id="shared heads", marks=slow),
    pytest.param(few_heads(4, "dense-2-kv1", "--tp 2 --sp off --zero 3"), id="one head", marks=slow),
    pytest.param(few_heads(8, "dense-2", "--tp 8 --sp on --micro_batch_size 24"), id="eight ranks", marks=slow)])
def test_layout(pool, layout):
    check(pool, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [
    few_heads(8, shape, f"--tp {tp} --sp {sp} --micro_batch_size {3 * tp} --zero {zero}") for shape, tp in [
        ("dense-2-kv1", 2), ("dense-2-kv1", 4), ("dense-2-kv2", 4), ("dense-2-kv2", 8), ("dense-2", 8), ("dense-2-kv8", 4)]
    for sp in ("on", "off") for zero in (0, 3) if tp < 8 or zero == 0], ids=str)
def test_more_ranks(pool, layout):
    check(pool, layout)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return cases.make(tmp_path_factory.mktemp("case"), **cases.shape("dense-2")) + " --micro_batch_size 6"


@slow
@pytest.mark.parametrize("more, graphs", [("--recompute full", 4), *(pytest.param(*case, marks=pytest.mark.sweep) for case in [
    ("--sp on", 1), ("--sp off", 1), ("--recompute selective", 4)])])
def test_compile(pool, flags, more, graphs):
    """Check that even with recomputation the pieces of a layer are compiled, and not only the loss."""
    base = f"{flags} --steps 3 --micro_batch_size 12"
    trained = pool.train(STEP, f"{base} --tp 2 --compile {more}", world=2, timeout=200, job=traced_job)
    assert min(trained.answers) >= graphs
    assert_same_run(trained, pool.train(BASELINE, base), 1e-4, weights=False)


@slow
def test_loads_a_checkpoint_and_saves_one(pool, flags, tmp_path):
    assert_loads(pool, STEP, tmp_path, f"{flags} --dtype float64", (4, "--tp 2 --zero 3"),
                 (4, "--tp 4 --sp off --micro_batch_size 12"))


# ------------------------------------------------------------------------------------- one linear by itself
def alone_job(argv):
    """Tell whether q_proj and up_proj, called by themselves, return the same as the region, which fuses all its first linears."""
    from unittest.mock import patch

    import torch
    import train
    same, build = [], train.build_model

    def built(*arguments):
        model = build(*arguments)
        attention, mlp = (getattr(model.model.layers["0"], name) for name in ("self_attn", "mlp"))
        x = torch.randn(1, 4, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=attention.q_proj.weight.dtype)
        with torch.no_grad():
            same.append(torch.equal(attention.q_proj(x), attention.project(x)[0]))
            same.append(torch.equal(mlp.up_proj(x), mlp.project(x)[1]))
        return model
    with patch.object(train, "build_model", built):
        train.main(argv)
    return same


@pytest.mark.parametrize("step", [STEP, pytest.param("step08_5d", marks=slow)])
def test_a_linear_called_by_itself_computes_from_its_input(pool, tmp_path, step):
    argv = f"{cases.make(tmp_path, **SHAPE)} --tp 2 --steps 1".split()
    assert pool.call(alone_job, step, world=2, argv=argv) == [[True, True]] * 2


# ------------------------------------------------------------------------------------- the four pairs, by finite differences
def gradcheck_job(sp, kind):
    """Check gradients by finite differences. Every rank checks the whole map, from the inputs of all ranks to the outputs of all: a
    rank's input is its row of a tensor that all ranks have, or this tensor itself if all have the same input. So is its output."""
    import os

    import torch.distributed as dist
    import torch.nn.functional as F
    from tensor_parallel import EnterRegion, ColumnParallelLinears, LeaveRegion, all_gather, all_reduce, identity, reduce_scatter
    dist.init_process_group("gloo")
    rank, group = int(os.environ["RANK"]), dist.group.WORLD
    comm = *((all_gather, reduce_scatter) if sp == "on" else (identity, all_reduce)), group

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
        parts = lambda x: LeaveRegion.apply(MyRow.apply(x), *comm)
        whole = lambda x: AllRows.apply(parts(x)) if sp == "on" else parts(x)
        assert torch.autograd.gradcheck(whole, rows)
        expected = rows.sum(0)
        assert torch.equal(whole(rows), torch.stack(expected.chunk(group.size(), 1)) if sp == "on" else expected)
        return
    x = random_tensor(group.size(), 2, 2, 3) if sp == "on" else random_tensor(2, 4, 3)
    mine = MyRow.apply if sp == "on" else lambda x: x
    whole = torch.cat(x.unbind(), dim=1) if sp == "on" else x
    if kind == "enter":
        assert torch.autograd.gradcheck(lambda x: AllRows.apply(EnterRegion.apply(mine(x), *comm)), x)
        assert torch.equal(EnterRegion.apply(mine(x), *comm), whole)
    else:
        weights = random_tensor(group.size(), 5, 3), random_tensor(group.size(), 2, 3)
        def products(x, *weights):
            return [AllRows.apply(y) for y in ColumnParallelLinears.apply(mine(x), *comm, *map(MyRow.apply, weights))]
        assert torch.autograd.gradcheck(products, (x, *weights))
        for product, weight in zip(products(x, *weights), weights):
            torch.testing.assert_close(product, torch.stack([F.linear(whole, w) for w in weight]))


@pytest.mark.parametrize("sp, kind", [("on", "leave"), ("off", "enter_linears"), *(pytest.param(*case, marks=slow) for case in [
    ("on", "enter"), ("on", "enter_linears"), ("off", "enter"), ("off", "leave")])])
def test_pairs_are_conjugate(pool, sp, kind):
    pool.call(gradcheck_job, STEP, world=2, sp=sp, kind=kind)


# ------------------------------------------------------------------------------------- what is kept
def some(*cases):
    """Return the cases, with all but the first marked as slow."""
    return [cases[0], *(pytest.param(*case, marks=slow) for case in cases[1:])]


@pytest.mark.parametrize("world, more", some((2, "--tp 2"), (1, ""), (2, "--tp 2 --sp off"), (4, "--tp 4")))
def test_what_a_layer_keeps(pool, tmp_path, world, more):
    """Check that the interior of the regions is divided by tp and, with sp, everything is. A norm keeps its input, the normalized
    input, one number per token and, as the input of what follows, its output."""
    tokens, tp = 24 * 16, world
    outside = tokens // (tp if "off" not in more else 1)
    interior = tokens // tp * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + HEADS + 4 * MLP)
    assert kept_by_a_layer(pool, tmp_path, STEP, world, more) == pytest.approx(interior + outside * (6 * HIDDEN + 2), rel=1e-3)


@pytest.mark.parametrize("world, more", some((2, "--tp 2"), (1, ""), (4, "--tp 4 --sp off")))
def test_what_a_layer_keeps_with_selective_recomputation(pool, tmp_path, world, more):
    """Check that a layer keeps the first products of a region, attention's output, and its own input. It keeps the last products
    only without tp: with tp, they are still partial sums, of all tokens."""
    tokens, tp = 24 * 16, world
    interior = tokens // tp * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + HEADS + 2 * MLP)
    outside = tokens // (tp if "off" not in more else 1) * (3 if tp == 1 else 1) * HIDDEN
    kept = kept_by_a_layer(pool, tmp_path, STEP, world, f"{more} --recompute selective")
    assert kept == pytest.approx(interior + outside, rel=1e-3)


@slow
@pytest.mark.parametrize("tp", [2, 8])
def test_a_rank_has_its_part_of_the_weights(pool, flags, tp):
    measured = pool.call(kept_job, STEP, world=tp, argv=f"{flags} --steps 1 --tp {tp}".split())
    heads = HEADS * HEAD_DIM // tp * 2 + max(1, KV_HEADS // tp) * HEAD_DIM * 2
    layer = HIDDEN * (heads + 3 * MLP // tp + 2)
    assert {parameters for _, parameters in measured} == {4 * (LAYERS * layer + 2 * VOCAB // tp * HIDDEN + HIDDEN)}


@slow
@pytest.mark.parametrize("tp, sp", [(2, "off"), (2, "on")])
def test_the_memory_that_the_readme_shows(pool, tp, sp):
    """Compare with the README. Tensors that our own functions create in forward with autograd off are activations, too."""
    (keeps, activations), = re.findall(rf"^\| `--tp {tp} --sp {sp}` \|.*\| ([\d.]+) MiB \| ([\d.]+) MiB \|$",
                                       text_of(STEP), re.MULTILINE)
    argv = f"--tp {tp} --sp {sp} --steps 2".split()
    _, rows = pool.call(memory_job, STEP, world=tp, argv=argv)[0]
    assert f"{sum(rows[-1][1:]) / 2**20:.1f}" == keeps
    assert abs(max(row[4] for row in rows) / 2**20 - float(activations)) < 0.15


@slow
def test_the_head_is_cut_though_no_number_tells(pool, flags):
    """Check the memory: with --sp off, a whole head on every rank would give the same loss, norm and weights, but take tp times as
    much."""
    whole, cut = (pool.call(kept_job, STEP, world=world, argv=f"{flags} --steps 1 --tp {world} --sp off".split())[0][1]
                  for world in (1, 2))
    assert cut == (whole + 4 * (2 * LAYERS + 1) * HIDDEN) / 2           # both ranks have whole norms


# ------------------------------------------------------------------------------------- what can go wrong
def stuck_job(argv):
    """Wait in a sub-group's collective that nobody else joins. Return what ends the wait."""
    import datetime
    from unittest.mock import patch

    import config
    import mesh
    import torch.distributed as dist
    import train
    torch_s = dist.distributed_c10d.default_pg_timeout
    with (patch.object(mesh, "TIMEOUT", datetime.timedelta(seconds=5)),
          patch.object(dist.distributed_c10d, "default_pg_timeout", torch_s), mesh.init_distributed()):
        group, error = mesh.build_mesh(config.parse_args(argv, train.TECHNIQUES)).get_group("tp"), None
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except RuntimeError as timed_out:
                error = str(timed_out)
            store.set("rank 0 waits no longer", "")
        else:
            store.wait(["rank 0 waits no longer"], datetime.timedelta(seconds=100))
        return error


def test_a_sub_group_has_the_time_out_too(pool):
    """Check that a sub-group does not get torch's default of 30 minutes, which is independent of the world's timeout."""
    error, *others = pool.call(stuck_job, STEP, world=4, timeout=100, argv=["--tp", "2", "--dp", "2"])
    assert "timed out" in error.lower() or "timeout" in error.lower(), error
    assert others == [None] * 3


@pytest.mark.parametrize("world, more, message", [
    (3, "--tp 3", "--tp 3: must divide num_attention_heads 8; choose from 1, 2, 4, 8"),
    (3, "--tp 2", "dp 1 x tp 2: must equal the world size, 3; leave --dp out and choose tp from 1, 3"),
    (4, "--tp 2 --dp 4", "dp 4 x tp 2: must equal the world size, 4"),
    (2, "--tp 0", "--tp: must be at least 1 and below 100000000, but is 0"),
    (2, "--tp 2 --seq_len 15", "--seq_len 15: must be a multiple of tp 2; choose 14 or 16, or --sp off"),
    (4, "--tp 4 --model {folder}/a", "--tp 4: must divide num_key_value_heads 6, or be a multiple of it; choose from 1, 2"),
    (2, "--tp 2 --model {folder}/b", "--tp 2: must divide vocab_size 61; choose from 1"),
    (4, "--tp 4 --model {folder}/c", "--tp 4: must divide intermediate_size 58; choose from 1, 2")])
def test_bad_layouts_are_refused(pool, tmp_path, flags, world, more, message):
    cases.make(tmp_path / "a", **SHAPE | dict(hidden_size=48, num_attention_heads=12, num_key_value_heads=6))
    cases.make(tmp_path / "b", **SHAPE | dict(vocab_size=61))
    cases.make(tmp_path / "c", **SHAPE | dict(intermediate_size=58))
    assert_refused(pool, STEP, world, f"{flags} {more.format(folder=tmp_path)}", message)
