"""The hunt: which planted mistakes can be drawn, and some hunts played to the end."""
import json
import sys

import pytest

import hunt
from patched import not_in, planted_mistakes
from steps import ROOT


@pytest.mark.sweep
def test_every_planted_mistake_shows_in_a_number_or_is_excluded_with_a_reason(pool, tmp_path):
    excluded = not_in("hunt")
    shown = {name: bool(hunt.plant(pool, name, tmp_path / name)) for name in planted_mistakes()
             if hunt.LAYOUTS[int(name[4:6])] and "differ from run to run" not in excluded.get(name, "")}
    assert {name for name, shows in shown.items() if not shows} == set(excluded) & set(shown)


def test_a_seed_draws_always_the_same_and_all_are_drawn():
    assert hunt.drawn("monday") == hunt.drawn("monday")
    assert {hunt.drawn(str(seed))[0] for seed in range(1500)} == set(hunt.drawn("monday"))
    assert len(hunt.drawn("monday")) > 50


def call(*words):
    """Run a command as the reader would. Return its exit status."""
    try:
        sys.argv = ["hunt.py", *words]
        return hunt.main() or 0
    except SystemExit as end:
        return end.code


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(hunt, "HUNT", tmp_path)
    monkeypatch.setattr(hunt, "HIDDEN", tmp_path / ".planted")
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


@pytest.mark.parametrize("level, seed", [("one", "monday"), pytest.param("any", "tuesday", marks=pytest.mark.slow)])
def test_played_to_its_end(pool, place, capsys, level, seed):
    hunt.begin(pool, seed, level)
    first = hunt.present()
    hunt.begin(pool, seed, level)
    assert hunt.present() == first, "the same seed, the same numbers"
    assert (first["step"] in capsys.readouterr().out) == (level == "one")
    assert first["name"] == hunt.drawn(seed)[0] and first["right"] != first["planted"]
    assert first["right"] == json.loads(json.dumps(hunt.run(pool, first["step"], first["layout"])))

    asked = [("loss",), ("grad_norm",), ("gradient",), ("weight",), ("bytes",), ("operations",)]
    asked.append(("gradient", "NAME=" + next(name for name in first["right"][0][0]["gradient"])))
    for number, (of, *name) in enumerate(asked, 1):
        assert call("probe", f"OF={of}", "RANK=0", "AT=2", *name) == 0
        assert f"(probe {number})" in capsys.readouterr().out and hunt.present()["probes"] == number
    for words in ("OF=x", "OF=loss RANK=99", "OF=loss AT=0", "OF=loss NAME=x", "OF=weight NAME=x", "OF=loss RANK=²"):
        words = words.split()
        assert call("probe", *words) == 2 and one_line(capsys)
    assert hunt.present()["probes"] == len(asked), "what is refused does not count as a probe"

    changed = hunt.changed_lines(first["step"], hunt.HIDDEN / first["step"])
    (file, lines), prefix = next(iter(changed.items())), f"{first['step']}/"
    far = max(max(lines) + 4, 1)
    assert call("hunt", f"ANSWER={prefix}{file}:{far}") == hunt.WRONG
    assert call("hunt", f"ANSWER={prefix}messages.py:1") == hunt.WRONG
    assert call("hunt", "ANSWER=it is broken") == 2
    if level == "any":
        assert call("hunt", f"ANSWER={file}:{min(lines)}") == 2, "of which step?"
        assert call("hunt", f"ANSWER=step08_5d/{file}:{min(lines)}") == hunt.WRONG
    capsys.readouterr()
    assert call("hunt", f"ANSWER={prefix}{file}:{max(lines) + 3}") == 0
    assert f"yes, with {len(asked)} probes; the fewest that anybody needed here: {len(asked)}" in capsys.readouterr().out
    hunt.remember(hunt.present() | dict(probes=3))
    assert call("hunt", f"ANSWER={'' if level == 'one' else prefix}{file}:{min(lines)}") == 0
    assert "the fewest that anybody needed here: 3" in capsys.readouterr().out


def test_the_answer_says_how_such_a_mistake_looks_from_outside():
    assert "not reduced over these ranks" not in hunt.looks_like("step02_loss_not_summed")
    assert "every rank has its own" in hunt.looks_like("step02_loss_not_summed")
    assert hunt.looks_like("step02_waited_for_at_once") == "", "it changes no number"


def one_line(capsys):
    printed = capsys.readouterr()
    return printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1


@pytest.mark.parametrize("words", [["hunt"], ["hunt", "SEED="], ["hunt", "SEED=a b"], ["hunt", "SEED=x", "LEVEL=two"],
                                   ["probe"], ["probe", "OF=loss"],
                                   ["hunt", "ANSWER=zero.py:1"]])
def test_bad_input_is_refused_in_one_line(words, place, capsys):
    assert call(*words) == 2 and one_line(capsys)


def test_the_hunt_is_the_readers_own():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert f"/{hunt.HUNT.parent.relative_to(ROOT)}/" in ignored
