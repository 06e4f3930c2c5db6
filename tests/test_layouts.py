"""The arrays of layouts.py: what they are said to cover is in the flags of what is run."""
import random

import layouts
import pytest
from layouts import FACTORS, Layout, layout_of, meshes, tuples_of, wanted


def choices(layout):
    """The value of each factor, read from a layout's flags alone."""
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


@pytest.mark.parametrize("step", range(2, 9))
def test_every_possible_pair_is_in_some_layout(step):
    rows = [choices(layout) for layout in [*layouts.named(step).values(), *layouts.drawn(step)]]
    covered = set().union(*(tuples_of(row, step) for row in rows))
    assert wanted(step) - covered == set()
    if step == 8:
        values = {frozenset({item}) for item in ((name, value) for name, (_, all_of) in FACTORS.items() for value in all_of)}
        assert [value for value in values if not any(value <= pair for pair in covered)] == []


@pytest.mark.parametrize("forbidden", ["sp", "balance", "schedule", "dp_mode"])
def test_a_factor_that_silently_gets_no_value_is_seen(monkeypatch, forbidden):
    """As when a rule of agree forbids all values of a factor."""
    agree = layouts.agree
    monkeypatch.setattr(layouts, "agree", lambda row: agree(row) and row.get(forbidden) is None)
    with pytest.raises(AssertionError, match=f"{forbidden} applies but has no value"):
        for seed in range(100):
            layouts.complete({"experts": "top2"} if forbidden == "balance" else {}, 8, random.Random(seed))


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
