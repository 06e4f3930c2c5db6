"""The arrays of layouts.py: the flags that run contain everything that the arrays claim to cover, and the trainer refuses or never
reads what they leave out."""
import itertools
import os
import random

import layouts
import pytest
from layouts import FACTORS, MESH, Layout, factors, layout_of, meshes, tuples_of, wanted

STEPS = range(2, 9)


def choices(layout):
    """Read the value of each factor from a layout's flags alone."""
    dp, tp, cp, pp, zero = (layout.number(name) for name in ("dp", "tp", "cp", "pp", "zero"))
    number = layouts.NAMES.index(layout.step) + 1
    count = 24 // dp // int(layout.flag("micro_batch_size"))
    mode = layout.flag("dp_mode")
    row = dict(dtype=layout.flag("dtype"), optimizer=layout.optimizer, recompute=layout.flag("recompute"), dp=dp, tp=tp, cp=cp,
               pp=pp, zero=zero, micro_batches="one" if count == 1 else "few" if count < 5 else "many",
               dp_mode=f"{mode} --bucket_mb 0.02" if layout.flag("bucket_mb") else mode,
               shard=None if zero == 0 else "part" if layout.flag("zero_shard") else "all", sp=layout.flag("sp"),
               cp_mode=layout.flag("cp_mode"), schedule=layout.flag("schedule"), ep=layout.number("ep"),
               experts=layout.shape.split("-")[0], balance=layout.flag("balance"),
               qk_norm="on" if layout.shape.endswith("-qk") else "off")
    return {name: value for name, value in row.items() if value is not None and FACTORS[name][0] <= number}


@pytest.mark.parametrize("step", STEPS)
def test_every_possible_pair_is_in_some_layout(step):
    rows = [choices(layout) for layout in [*layouts.named(step).values(), *layouts.drawn(step)]]
    covered = set().union(*(tuples_of(row, step) for row in rows))
    assert wanted(step) - covered == set()
    if step == 8:
        values = {frozenset({item}) for item in ((name, value) for name, (_, all_of) in FACTORS.items() for value in all_of)}
        assert [value for value in values if not any(value <= pair for pair in covered)] == []


@pytest.mark.parametrize("forbidden", ["sp", "balance", "schedule", "dp_mode"])
def test_a_factor_that_silently_gets_no_value_is_seen(monkeypatch, forbidden):
    """Let a rule of agree() forbid all values of a factor."""
    agree = layouts.agree
    monkeypatch.setattr(layouts, "agree", lambda row: agree(row) and row.get(forbidden) is None)
    with pytest.raises(AssertionError, match=f"{forbidden} applies but has no value"):
        for seed in range(100):
            layouts.complete({"experts": "top2"} if forbidden == "balance" else {}, 8, random.Random(seed))


# ------------------------------------------------------------------------------- what is left out: a second rule
# A flag is not a choice where the trainer does not read it. READ has, for each such flag, the layouts in which it is read; all
# other flags are always read.
READ = {"zero": lambda run: run["zero"] == 0 or run["dp"] * run["cp"] > 1,
        "shard": lambda run: run["zero"] > 0 and run["dp"] * run["cp"] in ((4,) if run.get("shard") == "part" else (2, 3, 4)),
        "dp_mode": lambda run: run["zero"] == 0 and run["dp"] * run["cp"] > 1,
        "sp": lambda run: run["tp"] > 1,
        "cp_mode": lambda run: run["cp"] > 1,
        "schedule": lambda run: run["pp"] > 1,
        "balance": lambda run: run["experts"] != "dense"}
LEFT_OUT = dict(dtype="bfloat16", optimizer="sgd")        # sgd serves to compare weights, and bfloat16 is too coarse for that
COUNTS = {"one": [1], "few": [2, 3, 4], "many": [5, 6, 8, 12, 24]}


def unwanted(step):
    """Return the pairs, and in step 8 the triples, that no layout of the step needs to have."""
    of_one = {name: [(name, value) for value in FACTORS[name][1]] for name in factors(step)}
    groups = [pair for pair in itertools.combinations(of_one, 2) if step == 8 or step in [FACTORS[name][0] for name in pair]]
    every = {frozenset(values) for names in [*groups, *[("zero", "tp", "pp")] * (step == 8)]
             for values in itertools.product(*(of_one[name] for name in names))}
    return every - wanted(step)


def runs_with(values, step):
    """Yield all runs, on up to four ranks or eight split along three dimensions, in which the trainer would read these values."""
    gates = {name: [value for value in FACTORS[name][1] if values.get(name, value) == value] if name in factors(step) else [alone]
             for name, alone in dict(dp=1, tp=1, cp=1, pp=1, zero=0, experts="dense").items()}
    for gate in itertools.product(*gates.values()):
        run = {**dict(zip(gates, gate)), **values}
        degrees = [run[name] for name in MESH]
        world = degrees[0] * degrees[1] * degrees[2] * degrees[3]
        if (world <= 4 or world == 8 and max(degrees) == 2) and all(READ[name](run) for name in values if name in READ):
            if not LEFT_OUT.items() <= values.items():
                for count in COUNTS[run.get("micro_batches", "many")]:
                    if 24 // run["dp"] % count == 0:
                        yield world, flags(run, 24 // run["dp"] // count)


def flags(run, micro_batch):
    words = [f"--{name} {run[name]}" for name in (*MESH, "zero", "dp_mode", "sp", "cp_mode", "schedule", "ep", "balance", "dtype",
                                                  "recompute") if name in run]
    return " ".join([*words, "--zero_shard 2" if run.get("shard") == "part" else "", f"--micro_batch_size {micro_batch}",
                     f"--global_batch_size 24 --device cpu --model {'tiny' if run['experts'] == 'dense' else 'tiny-moe'}"])


def taken_job(runs):
    """Return the runs that the trainer does not refuse."""
    import config
    taken = []
    for world, words in runs:
        os.environ["WORLD_SIZE"] = str(world)
        try:
            args = config.parse_args(words.split())
            config.check(args, config.load_config(args))
            taken.append((world, words))
        except SystemExit:
            pass
    return taken


def wrongly_left_out(step, pool):
    """Return the unwanted values that the trainer does read and accept, with the runs that have them."""
    runs = {values: list(runs_with(dict(values), step)) for values in unwanted(step)}
    taken, = pool.call(taken_job, "step08_5d", world=1, runs=sorted(set(sum(runs.values(), []))))
    return {values: [run for run in of_one if run in taken] for values, of_one in runs.items() if set(of_one) & set(taken)}


@pytest.mark.parametrize("step", STEPS)
def test_what_is_unwanted_is_refused_or_never_read(step, pool):
    assert unwanted(step) and wrongly_left_out(step, pool) == {}


def test_a_pair_that_is_silently_unwanted_is_seen(monkeypatch, pool):
    agree, pair = layouts.agree, dict(zero=3, schedule="zerobubble")
    monkeypatch.setattr(layouts, "agree", lambda row: agree(row) and not pair.items() <= row.items())
    assert set(wrongly_left_out(6, pool)) == {frozenset(pair.items())}


@pytest.mark.parametrize("step", STEPS)
def test_every_value_that_is_read_is_chosen(step):
    for layout in [*layouts.named(step).values(), *layouts.drawn(step)]:
        row = choices(layout)
        run = layouts.ALONE | row
        assert set(row) == {name for name in factors(step) if name not in READ or READ[name](run)}, layout


@pytest.mark.parametrize("step, values", [
    (8, dict(zero=3, tp=2, pp=2)), (5, dict(cp=4, cp_mode="ring")), (6, dict(schedule="dualpipe", zero=2)),
    (7, dict(ep=4, experts="top1"))])
def test_what_is_possible_is_wanted(step, values):
    assert meshes(values, step)
    assert len(values) > 3 or any(set(values.items()) <= set(one) for one in wanted(step))


@pytest.mark.parametrize("step, values", [
    (8, dict(tp=4, pp=4)), (8, dict(zero=1, dp_mode="bucket")), (8, dict(experts="dense", ep=2)), (8, dict(shard="part", zero=0)),
    (5, dict(cp=1, cp_mode="ring")), (4, dict(zero=3, tp=4)), (6, dict(schedule="dualpipe", micro_batches="one")),
    (3, dict(dtype="bfloat16", optimizer="sgd"))])
def test_what_is_impossible_is_not(step, values):
    assert not meshes(values, step)
    assert frozenset(values.items()) not in wanted(step)


def test_only_exact_layouts_count_for_what_dtype_is_no_part_of():
    row = dict(dtype="float32", zero=3, tp=2, pp=1)
    assert tuples_of(row, 8) == {frozenset({("dtype", "float32"), other}) for other in (("zero", 3), ("tp", 2), ("pp", 1))}
    assert frozenset({("zero", 3), ("tp", 2), ("pp", 1)}) in tuples_of(row | dict(dtype="float64"), 8)


def test_a_draw_is_the_same_again_and_another_is_another():
    first, again, other = (layouts.drawn(3, number) for number in (1, 1, 2))
    assert first == again != other


def test_a_layout_from_its_row():
    row = dict(dtype="float64", optimizer="adamw", recompute="full", micro_batches="few", qk_norm="on", dp=2, zero=2, shard="all",
               tp=1, cp=1, pp=2, schedule="dualpipe")
    layout = layout_of(row, 6, random.Random(0))
    flags = "--dtype float64 --recompute full --micro_batch_size 3 --zero 2 --pp 2 --schedule dualpipe"
    assert layout == Layout("step06_pp", 4, "dense-5-qk", "adamw", flags) and choices(layout) == row
