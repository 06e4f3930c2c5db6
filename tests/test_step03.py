"""Step 3: every stage of ZeRO, fully sharded or hybrid, trains as one process does and holds what the formula says."""
import cases
import layouts
import pytest
import toy
from harness import assert_same_run
from jobs import assert_loads, assert_refused, memory_job, storage_bytes, traced_job, trained_parts
from layouts import Layout
from observe import check

STEP, BASELINE = "step03_zero", "step01_single_gpu"
EXACT = "--dtype float64 --recompute none"
slow = pytest.mark.slow


@pytest.mark.parametrize("layout", [*layouts.every_layout(3),
    # six ranks, sharded over groups of three
    pytest.param(Layout(STEP, 6, "dense-2", "adamw", f"{EXACT} --micro_batch_size 2 --zero 3 --zero_shard 3"),
                 id="six ranks", marks=slow)])
def test_layout(pool, layout):
    check(pool, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [
    Layout(STEP, dp, "dense-3", "adamw", f"{EXACT} --micro_batch_size 1 --zero {stage} --zero_shard {shard}")
    for dp, shard in [(6, 6), (6, 2), (8, 8), (8, 2), (8, 4)] for stage in (1, 2, 3)], ids=str)
def test_more_ranks(pool, layout):
    check(pool, layout)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return cases.make(tmp_path_factory.mktemp("case"))


@slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.sweep), 3])
def test_compile(pool, tmp_path, stage):
    flags = cases.make(tmp_path, num_hidden_layers=2) + " --micro_batch_size 6 --steps 3"
    trained = pool.train(STEP, f"{flags} --zero {stage} --compile", world=2, timeout=200, job=traced_job)
    assert_same_run(trained, pool.train(BASELINE, flags), 1e-4, weights=False)


@slow
def test_loads_a_checkpoint_and_saves_one(pool, flags, tmp_path):
    assert_loads(pool, STEP, tmp_path, f"{flags} --micro_batch_size 6 --dtype float64", (4, "--zero 1"), (4, "--zero 3"))


# ------------------------------------------------------------------------------------- memory
def persistent_job(argv):
    """Train. Return the bytes alive between two steps, counting each storage once: weights, gradients, separate masters, Adam's
    states."""
    model, optimizer = trained_parts(argv)
    units = model.zero_units
    weights = list(model.parameters()) + [unit.param_shard for unit in units]
    grads = [unit.grad_shard for unit in units] + [unit.flat_grad for unit in units if unit.flat_grad is not None]
    masters = [m for m in optimizer.masters if m.dtype != units[0].flat_param.dtype]
    states = [t for state in optimizer.adamw.state.values() for t in state.values() if t.dim()]
    assert all(p.grad is None for p in model.parameters())
    return [storage_bytes(weights), storage_bytes(grads), storage_bytes(masters), storage_bytes(states)]


def unit_sizes():
    """Return the numbers of parameters of the embedding, of each block, and of the last norm with the head."""
    return [61 * 40] + 3 * [2 * 40 * 40 + 2 * 20 * 40 + 3 * 40 * 56 + 2 * 40] + [40 + 61 * 40]


@pytest.mark.parametrize("dtype, weight, master, adam, stage, dp, shard", [
    ("bfloat16", 2, 4, 8, 3, 3, 3), ("float32", 4, 0, 8, 1, 3, 3),
    *(pytest.param(*case, marks=slow) for case in [
        ("float32", 4, 0, 8, 2, 3, 3), ("float32", 4, 0, 8, 3, 4, 2), ("bfloat16", 2, 4, 8, 1, 4, 2),
        ("bfloat16", 2, 4, 8, 2, 4, 2)])])
def test_bytes_that_persist(pool, flags, dtype, weight, master, adam, stage, dp, shard):
    argv = f"{flags} --micro_batch_size 2 --steps 2 --dtype {dtype} --zero {stage} --zero_shard {shard}".split()
    per_rank = pool.call(persistent_job, STEP, world=dp, argv=argv)
    padded = sum(-(-size // shard) * shard for size in unit_sizes())

    def kept(cut):
        return padded // shard if cut else padded
    grads = 4 * kept(stage >= 2)
    for rank, measured in enumerate(per_rank):
        # the padding at the end of the last shard has no master and no states
        pieces = sum(owned(size, shard, rank % shard) for size in unit_sizes())
        assert measured == [weight * kept(stage == 3), grads, master * pieces, adam * pieces], (rank, measured)


def owned(size, shard, rank):
    slice_size = -(-size // shard)
    return max(0, min(size, (rank + 1) * slice_size) - rank * slice_size)


def residency_job(argv):
    """Train. Return the most blocks that were whole at any moment, checked at every gather of a unit; and the events in order."""
    import train
    import zero
    most, events, units = [0], [], []
    gather, build = zero.Zero1Unit.start_all_gather, train.build_model

    def watched_gather(self):
        gather(self)
        blocks = units[1:-1]
        most[0] = max(most[0], sum(unit.flat_param.untyped_storage().nbytes() > 0 for unit in blocks))
        events.append(f"gather {units.index(self)}")

    def watched_build(*args):
        model = build(*args)
        units.extend(model.zero_units)
        for i, layer in enumerate(model.model.layers.values(), start=1):
            layer.register_forward_hook(lambda *_, i=i: events.append(f"forward {i} done"))
            layer.register_full_backward_hook(lambda *_, i=i: events.append(f"backward {i} done"))
        return model
    zero.Zero1Unit.start_all_gather, train.build_model = watched_gather, watched_build
    try:
        train.main(argv)
    finally:
        zero.Zero1Unit.start_all_gather, train.build_model = gather, build
    return most[0], events


@pytest.mark.parametrize("step, recompute", [
    (STEP, "none"), pytest.param(STEP, "full", marks=slow), pytest.param("step08_5d", "none", marks=slow)])
def test_at_most_two_blocks_are_whole_and_the_next_is_under_way(pool, tmp_path, step, recompute):
    flags = cases.make(tmp_path, num_hidden_layers=5)
    argv = f"{flags} --micro_batch_size 12 --steps 2 --zero 3 --recompute {recompute}".split()
    for most, events in pool.call(residency_job, step, world=2, argv=argv):
        assert most == 2
        one = events[:len(events) // 2]
        assert events == one + one
        forward, backward = one[:one.index("forward 5 done") + 1], one[one.index("forward 5 done") + 1:]
        assert [e for e in forward if "gather" in e] == [f"gather {i}" for i in range(7)]
        assert [e for e in backward if "gather" in e] == ["gather 4", "gather 3", "gather 2", "gather 1"]
        for i in range(1, 5):                             # gathered while the block before it was still computing
            assert one.index(f"gather {i + 1}") < one.index(f"forward {i} done")
        for i in range(2, 5):
            assert backward.index(f"gather {i - 1}") < backward.index(f"backward {i} done")


def peaks_job(names):
    import bench_parallel
    import mesh
    return bench_parallel.measure_memory(names, mesh.build_mesh(bench_parallel.parse("")[0]), steps=2)


@slow
def test_stage_3_needs_no_more_memory_than_fsdp2(pool):
    for peaks in pool.call(peaks_job, STEP, world=2, timeout=200, names=["bucket", "zero 1", "zero 2", "zero 3", "FSDP2"]):
        assert peaks["zero 3"] < peaks["FSDP2"], peaks
        assert peaks["zero 3"] < peaks["zero 2"] < peaks["zero 1"] < peaks["bucket"], peaks


@slow
def test_weights_come_and_go(pool, tmp_path):
    flags = cases.make(tmp_path, num_hidden_layers=5) + " --micro_batch_size 6 --steps 4 --zero 3"
    embedding, block, *_, head = unit_sizes()
    for _, rows in pool.call(memory_job, STEP, world=2, argv=flags.split()):
        weights = [row[1] for row in rows]
        slices = 4 * (embedding + 5 * block + head) / 2
        assert weights[-1] == slices                      # between steps a rank has only its shards
        most = max(weights) - slices                      # two blocks, or a block and an end of the model
        assert 4 * block < most <= 4 * (2 * block + head), (most, block, head)
        assert rows[-1][3] == slices and abs(rows[-1][2] - 2 * slices) < 1000


def nothing_whole_job(argv):
    """Build the model. Return the most bytes of whole weights that exist at any time meanwhile."""
    from unittest.mock import patch

    import weights
    import train
    most, alive, add_to_unit = [0], {}, weights.add_to_unit

    def watched(param, unit):
        alive[id(param)] = param
        add_to_unit(param, unit)
        most[0] = max(most[0], storage_bytes(alive.values()))
    with patch.object(weights, "add_to_unit", watched):
        train.main(argv)
    return most[0]


def test_no_rank_ever_has_the_whole_model(pool, flags):
    argv = f"{flags} --zero 3 --steps 0 --micro_batch_size 1".split()
    assert max(pool.call(nothing_whole_job, STEP, world=2, argv=argv)) <= 4 * max(unit_sizes())


# ------------------------------------------------------------------------------------- what can go wrong
@pytest.mark.parametrize("world, more, message", [
    (4, "--zero 3 --zero_shard 3", "--zero_shard 3: must divide dp 4; choose from 1, 2, 4"),
    (2, "--zero 3 --zero_shard 0", "argument --zero_shard: must be at least 1 and below 100000000, but is 0"),
    (2, "--zero 4", "invalid choice: 4"),
    (2, "--zero_shard 1", "--zero_shard: requires --zero 1, 2 or 3")])
def test_bad_layouts_are_refused(pool, world, more, message):
    assert_refused(pool, STEP, world, more, message)


def test_a_reduction_is_waited_for_when_the_next_has_begun(pool):
    """Check the order of starts and waits: each reduce-scatter must have the backward of a unit to hide behind."""
    seen = toy.run(pool, STEP, 2, "--zero 2")[0]
    order = [note[:2] for note in seen.notes if note[0] in ("start", "wait") and seen.operations[note[1]].what == "reduce_scatter"]
    started = [n for what, n in order if what == "start"]
    assert len(started) == 4 * (4 + 2)                    # in each micro-batch: every layer, the embedding, the head with the norm
    for this, following in zip(started, started[1:]):
        assert order.index(("wait", this)) > order.index(("start", following))
