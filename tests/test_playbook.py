"""docs/playbook.md: each row says where, and whether ours agrees; what it quotes of the notes is theirs; each rule that is called
the playbook's is a row."""
import csv
import re
import sys
from types import SimpleNamespace

import pytest

from readme import PAGES, broken_anchors, broken_links
from steps import ROOT

sys.path[:0] = [str(ROOT / "step08_5d"), str(ROOT / "planner")]
import explain
import models
import speed
from costs import Layout

PAGE = ROOT / "docs/playbook.md"
TEXT = PAGE.read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines()
        if line.startswith("| ") and "](" in line.split(" | ")[1] and line.count(" | ") == 2]
VERDICTS = "*agrees*", "*agrees where* ", "*differs, because* ", "*not here*"
# A README's words about the playbook, and the row that has them.
CALLED_THE_PLAYBOOKS = {
    "playbook's formula is larger": "by the playbook's formula 80 of 114 parts",
    "playbook's borders are 10B and 100B": "`by size, 10B to 100B: ",
    "playbook's: tp as large as the node": "tp should be as large as the node",
    "playbook's team": "*published*",
}


def notes_of(claim):
    """The numbers in brackets."""
    return {int(n) for group in re.findall(r"\((\d(?:, \d)*)(?:, its table)?\)", claim) for n in group.split(", ")}


def test_each_row_says_whose_it_is_where_and_what_ours_is():
    assert len(ROWS) >= 140
    for claim, where, ours in ROWS:
        assert notes_of(claim) and notes_of(claim) <= set(range(5)), claim
        assert re.fullmatch(r"\[[a-z0-9]+\]\((\.\./[\w/]+README\.md|glossary\.md)(#[\w-]+)?\)", where), where
        assert ours.startswith(VERDICTS), ours
    assert broken_links(TEXT, PAGE.parent) == broken_anchors(TEXT, PAGE) == []


def test_what_is_quoted_is_theirs():
    """A few words of each note, in tests/data: the notes themselves are not ours to print."""
    theirs = {(row["words"], int(row["note"])) for row in csv.DictReader((ROOT / "tests/data/notes.csv").open())}
    quoted = {(words, note) for claim, _, _ in ROWS for words in re.findall('"([^"]+)"', claim) for note in notes_of(claim)}
    assert theirs <= quoted
    assert {words for words, _ in quoted} == {words for words, _ in theirs}
    assert all(len(words.split()) <= 7 for words, _ in theirs)


def rules():
    """All that explain.py calls a rule of the playbook's."""
    nobody = SimpleNamespace(ordered=[], first=lambda follows: None)
    for model in ("llama-8b", "llama-70b", "llama-405b"):
        for gpus in (8, 64, 256, 2048):
            yield from (rule for rule, _ in explain.playbook(models.PRESETS[model], nobody, speed.Cluster(gpus)))


@pytest.mark.parametrize("rule", sorted(set(rules())))
def test_the_planners_rules_are_rows(rule):
    assert any(f"`{rule}`" in claim for claim, _, _ in ROWS)


def test_what_a_page_calls_the_playbooks_is_a_row():
    for page in PAGES:
        text = " ".join((ROOT / page).read_text().replace("*", "").split())
        for found in re.finditer(r"[Pp]laybook(?:'s|(?: says| advises| wants| recommends| counts)) ?.{0,80}", text):
            said = found[0].replace("Playbook", "playbook")
            known = [row for words, row in CALLED_THE_PLAYBOOKS.items() if said.startswith(words)]
            link = said.startswith("playbook's chapter")
            assert link or known and known[0] in TEXT, f"{page}: {found[0]}"


@pytest.mark.parametrize("rule, follows, does_not", [
    (explain.by_size(8, 8), [Layout(dp=8, tp=8), Layout(dp=64, zero=3, recompute="full")],
     [Layout(dp=32, tp=2), Layout(dp=64, zero=3), Layout(dp=64, zero=2), Layout(tp=8, pp=8)]),
    (explain.by_size(70, 8), [Layout(tp=8, pp=4), Layout(dp=8, tp=8, zero=3), Layout(dp=64, zero=3)],
     [Layout(dp=8, tp=8, zero=1), Layout(dp=4, tp=4, pp=4)]),
    (explain.by_size(405, 8), [Layout(dp=4, tp=8, pp=16, zero=2)],
     [Layout(dp=4, tp=4, pp=16, zero=1), Layout(dp=4, tp=8, pp=16, zero=1)]),
    (explain.by_gpus(speed.Cluster(8)), [Layout(tp=8), Layout(dp=8, zero=3)],
     [Layout(dp=4, tp=2), Layout(dp=8), Layout(dp=2, pp=4)]),
    (explain.by_gpus(speed.Cluster(64)), [Layout(dp=2, tp=8, pp=4, zero=1), Layout(dp=8, tp=8, zero=3)],
     [Layout(dp=32, tp=2), Layout(dp=64, zero=3)]),
    (explain.by_gpus(speed.Cluster(256)), [Layout(dp=4, tp=8, pp=8, zero=1), Layout(dp=4, tp=8, pp=8, zero=2)],
     [Layout(dp=32, tp=8, zero=1), Layout(dp=4, tp=8, pp=8, zero=3)]),
    (explain.by_gpus(speed.Cluster(2048)), [Layout(dp=32, tp=8, pp=8, zero=2)], [Layout(dp=32, tp=8, pp=8, zero=1)])],
    ids=["under 10B", "to 100B", "above", "one node", "to 64", "to 512", "above 1,024"])
def test_a_rule_is_what_its_words_say(rule, follows, does_not):
    assert all(map(rule[1], follows)) and not any(map(rule[1], does_not))


def test_the_recipe_goes_from_dp_to_pp_where_dp_is_waited_for():
    """tp to the node; one stage as long as dp waits at most a tenth; then more, until it does."""
    def one(pp, zero, waits, tokens_per_s=1.0, recompute="none"):
        layout = Layout(dp=8, tp=8, pp=pp, zero=zero, recompute=recompute)
        return SimpleNamespace(layout=layout, step=1.0, seconds=dict(dp=waits), tokens_per_s=tokens_per_s)

    def chosen(*ordered):
        dp_alone = SimpleNamespace(layout=Layout(dp=64))
        search = SimpleNamespace(ordered=[*ordered, dp_alone], fits=lambda one: one.layout.zero > 0)
        return explain.recipe(search, speed.Cluster(64))

    few, much = one(1, 1, 0.05), one(1, 1, 0.3)
    assert chosen(one(2, 1, 0.0), few, one(1, 0, 0.0)) is few
    assert chosen(one(1, 2, 0.0), few) is few and chosen(one(1, 1, 0.0, tokens_per_s=0.5), few) is few
    assert chosen(much, one(2, 1, 0.0, recompute="full")).layout.pp == 2
    assert chosen(much, one(2, 1, 0.4)) is much
