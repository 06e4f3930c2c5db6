"""The layouts that the tests train: their flags contain everything that they should cover, and the trainer refuses or never reads
what they leave out."""
import itertools
import os

import layouts
import pytest
from cases import FAMILIES
from layouts import FACTORS, MESH, covered, every, factors, filled, wanted

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
               family=(["llama"] + [name for name in FAMILIES if layout.shape.endswith(f"-{name}")])[-1])
    return {name: value for name, value in row.items() if value is not None and FACTORS[name][0] <= number}


def every_choice(step):
    return [choices(layout) for layout in [*layouts.named(step).values(), *layouts.in_table(step)]]


@pytest.mark.parametrize("step", STEPS)
def test_every_possible_value_or_pair_is_in_some_layout(step):
    """If it fails after a change of FACTORS: python tests/support/layouts.py --write"""
    seen = set().union(*map(covered, every_choice(step)))
    assert sorted(map(list, wanted(step) - seen), key=str) == []
    assert {frozenset({(name, value)}) for name in factors(step) for value in FACTORS[name][1]} <= seen


def test_only_exact_layouts_count_for_what_dtype_is_no_part_of():
    row = dict(dtype="float32", zero=3, tp=2, pp=1)
    assert covered(row) == {frozenset({("dtype", "float32"), *other}) for other in ([], [("zero", 3)], [("tp", 2)], [("pp", 1)])}
    assert frozenset({("zero", 3), ("tp", 2), ("pp", 1)}) in covered(row | dict(dtype="float64"))


@pytest.mark.parametrize("step", STEPS)
def test_a_named_layout_is_its_row(step):
    rows = [filled(row, step) for row in layouts.NAMED[step].values()]
    assert [choices(layout) for layout in layouts.named(step).values()] == rows


@pytest.mark.parametrize("step", STEPS)
def test_the_quick_layouts_have_every_dimension(step):
    dimensions = [name for name in (*MESH, "ep") if FACTORS[name][0] <= step]
    assert all(any(row.get(name, 1) > 1 for row in layouts.QUICK[step].values()) for name in dimensions)


def test_a_sweep_can_be_repeated_and_another_seed_is_another(monkeypatch):
    monkeypatch.delenv("SEED", raising=False)
    usual, sweeps = layouts.every_layout(3), []
    for seed in ("1", "1", "2"):
        monkeypatch.setenv("SEED", seed)
        sweeps.append([layout for layout, in (param.values for param in layouts.every_layout(3)[len(usual):])])
    assert sweeps[0] == sweeps[1] != sweeps[2] and len(sweeps[2]) == 100


# ------------------------------------------------------------------------------- what is left out: a second rule
# A flag is not a choice where the trainer does not read it. READ has, for each such flag, the layouts in which it is read; all
# other flags are always read.
READ = {"zero": lambda run: run["zero"] == 0 or run["dp"] * run["cp"] > 1,
        "shard": lambda run: run["zero"] > 0 and run["dp"] * run["cp"] in ((4,) if run.get("shard") == "part" else (2, 3, 4)),
        "dp_mode": lambda run: run["zero"] == 0 and run["dp"] * run["cp"] > 1,
        "sp": lambda run: run["tp"] > 1,
        "cp_mode": lambda run: run["cp"] > 1,
        "schedule": lambda run: run["pp"] > 1,
        "balance": lambda run: run["experts"] != "dense",
        "family": lambda run: run["experts"] == "dense" or FAMILIES[run["family"]][1] is not None}
LEFT_OUT = dict(dtype="bfloat16", optimizer="sgd")        # sgd serves to compare weights, and bfloat16 is too coarse for that
COUNTS = {"one": [1], "few": [2, 3, 4], "many": [5, 6, 8, 12, 24]}


def runs_with(values):
    """Yield all runs, on up to four ranks or eight split along three dimensions, in which the trainer would read these values."""
    gates = {name: [value for value in FACTORS[name][1] if values.get(name, value) == value] for name in (*MESH, "zero", "experts")}
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
    import train
    taken = []
    for world, words in runs:
        os.environ["WORLD_SIZE"] = str(world)
        try:
            args = config.parse_args(words.split(), train.TECHNIQUES)
            config.check(args, config.load_config(args), train.TECHNIQUES)
            taken.append((world, words))
        except SystemExit:
            pass
    return taken


def wrongly_left_out(pool):
    """Return the pairs and triples that no layout of step 8 needs to have, but which the trainer does read and accept, with the
    runs that have them."""
    runs = {values: list(runs_with(dict(values))) for values in every(8) - wanted(8)}
    taken, = pool.call(taken_job, "step08_5d", world=1, runs=sorted(set(sum(runs.values(), []))))
    return {values: [run for run in of_one if run in taken] for values, of_one in runs.items() if set(of_one) & set(taken)}


def test_what_is_unwanted_is_refused_or_never_read(pool):
    assert every(8) - wanted(8) and wrongly_left_out(pool) == {}


def test_a_pair_that_is_silently_unwanted_is_seen(monkeypatch, pool):
    agree, pair = layouts.agree, dict(zero=3, schedule="zerobubble")
    monkeypatch.setattr(layouts, "agree", lambda row: agree(row) and not pair.items() <= row.items())
    assert set(wrongly_left_out(pool)) == {frozenset(pair.items())}


@pytest.mark.parametrize("step", STEPS)
def test_every_value_that_is_read_is_chosen(step):
    for row in [*every_choice(step), *map(choices, layouts.drawn(step, seed=0))]:
        run = layouts.ALONE | row
        assert set(row) == {name for name in factors(step) if name not in READ or READ[name](run)}, row
