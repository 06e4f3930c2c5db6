"""docs/playbook.md: each row says where its claim is taught and whether this repository agrees; quotes from the notes are in the
notes; and every rule that is called the playbook's has a row."""
import csv
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from readme import PAGES, broken_anchors, broken_links
from steps import ROOT

sys.path[:0] = [str(ROOT / "step08_5d"), str(ROOT / "tools/plan")]
import explain
import models
import plan
import speed
from costs import Layout

PAGE = ROOT / "docs/playbook.md"
TEXT = PAGE.read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines()
        if line.startswith("| ") and "](" in line.split(" | ")[1] and line.count(" | ") == 2]
VERDICTS = "*agrees*", "*agrees where* ", "*differs, because* ", "*not here*"
# What other pages say about the playbook, and the row that has it. A mere link to the playbook is not a claim.
SAID_ELSEWHERE = {
    "Notes on the playbook say *across* nodes": "Put experts across nodes",
    "recommends a ratio above ten": "greater than 10:1",
    "The playbook prefers a larger dp to more accumulation": "maximize dp over grad_acc",
    "change their advice at 1B, 13B and 70B": "Under 1B dp alone",
    "The playbook combines pp with ZeRO-1 or 2": "ZeRO-1 and 2 combine with pp",
}


def notes_of(claim):
    """Return the numbers in brackets: the notes that say it."""
    return {int(n) for group in re.findall(r"\((\d(?:, \d)*)(?:, its table)?\)", claim) for n in group.split(", ")}


def test_each_row_says_whose_it_is_where_and_what_ours_is():
    tables = re.findall(r"^\| the notes \| where \| ours \|\n\|[-|]+\n((?:\|.*\n)*)", TEXT, re.MULTILINE)
    assert len(ROWS) == sum(table.count("\n") for table in tables) > 0
    for claim, where, ours in ROWS:
        assert notes_of(claim) and notes_of(claim) <= set(range(5)), claim
        assert re.fullmatch(r"\[[A-Za-z0-9]+\]\((\.\./[\w/]+README\.md|(glossary|FAQ)\.md)(#[\w-]+)?\)", where), where
        assert ours.startswith(VERDICTS), ours
    assert broken_links(TEXT, PAGE.parent) == broken_anchors(TEXT, PAGE) == []


def test_what_is_quoted_is_theirs():
    """Compare the quotes with tests/data, which has only a few words of each note: the notes are not ours to publish."""
    theirs = {(row["words"], int(row["note"])) for row in csv.DictReader((ROOT / "tests/data/notes.csv").open())}
    quoted = {(words, note) for claim, _, _ in ROWS for words in re.findall('"([^"]+)"', claim) for note in notes_of(claim)}
    assert theirs <= quoted
    assert {words for words, _ in quoted} == {words for words, _ in theirs}
    assert all(len(words.split()) <= 7 for words, _ in theirs)


def rules():
    """Yield everything that explain.py calls a rule of the playbook."""
    nobody = SimpleNamespace(ordered=[], first=lambda follows: None)
    for model in ("llama-8b", "llama-70b", "llama-405b"):
        for gpus in (8, 64, 256, 2048):
            yield from (rule for rule, _ in explain.playbook(models.PRESETS[model], nobody, speed.Cluster(gpus)))


@pytest.mark.parametrize("rule", sorted(set(rules())))
def test_the_planners_rules_are_rows(rule):
    assert any(f"`{rule}`" in claim for claim, _, _ in ROWS)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/playbook.md"])
def test_what_a_page_says_of_the_playbook_is_a_row(page):
    text = re.sub(r"```.*?```|\[Ultra-Scale\s+Playbook\]\(\S*\)|\]\(\S*\)", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for sentence in re.split(r"(?<=[.:|]) +|\n\n", re.sub(r"(?<!\n)\n(?!\n)", " ", text)):
        if re.search(r"\b[Pp]laybook\b", sentence):
            known = [claim for words, claim in SAID_ELSEWHERE.items() if words in sentence]
            assert known and any(known[0] in claim for claim, _, _ in ROWS), sentence


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
    """Check the recipe: tp fills the node; one stage if dp then waits for at most a tenth of the step; otherwise more stages, until
    it does."""
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


# ------------------------------------------------------------------------------------------------ the page's numbers
def row_of(claim):
    return next(ours for said, _, ours in ROWS if claim in said)


def published(**wanted):
    """Return the tokens per second per GPU of the fastest run with these values."""
    runs = csv.DictReader((ROOT / "tests/data/ultrascale_benchmarks.csv").open())
    return max(float(run["tok_s_gpu"]) for run in runs
               if run["status"] == "ok" and all(run[name] in map(str, values) for name, values in wanted.items()))


def test_numbers_of_published_runs():
    new, legacy, cut = dict(code=["new"]), dict(code=["legacy"]), range(2, 65)
    of_tp = [published(model=["8B"], nodes=[8], tp=[tp], pp=[1], **new) for tp in (2, 4, 8)]
    assert f"tp 2, 4, 8 reach {', '.join(f'{speed:,.0f}' for speed in of_tp)}." in row_of("tp should be as large")
    then, later = (published(model=["8B"], nodes=[8], tp=[1], pp=[16], **code) for code in (legacy, new))
    tp = published(model=["8B"], nodes=[32], tp=cut, pp=[1], **new)
    pp = published(model=["8B"], nodes=[32], tp=[1], pp=cut, **new)
    assert f"{then:.0f} and later {later:,.0f} tokens/s; on 32, tp {tp:,.0f}, pp {pp:,.0f}" in row_of("Optimised pp beat")
    few, many = (published(model=["1B"], nodes=[nodes], tp=[1], pp=[1], zero=[0], **new) for nodes in (1, 32))
    assert f"256 GPUs are {32 * many / few:.1f} times as fast as 8" in row_of("maximize dp over grad_acc")


def test_what_is_computed():
    usable, of = 70 * 2**30, {0: lambda n: 18, 1: lambda n: 6 + 12 / n, 2: lambda n: 2 + 16 / n, 3: lambda n: 18 / n}
    holds = lambda zero, gpus: f"{usable / of[zero](gpus) / 1e9:.0f}B"
    assert (f"dp holds {holds(0, 8)}; on 8 GPUs ZeRO-1 {holds(1, 8)}, ZeRO-2 {holds(2, 8)}, ZeRO-3 {holds(3, 8)}; "
            f"on 64, {holds(1, 64)}, {holds(2, 64)}, {holds(3, 64)}") in row_of("Under 1B dp alone")
    assert f"room for {holds(3, 8)} on 8 GPUs" in row_of("beyond 70B")
    assert f"{18 * 80e9 / 32 / 2**30:.0f} GiB of 70 on 32 GPUs" in row_of("80B on 4 nodes")
    bubbles = [f"{(p - 1) / m * 100:.1f}" for p in (2, 4, 16) for m in (8, 16)]
    assert bubbles == ["12.5", "6.2", "37.5", "18.8", "187.5", "93.8"]
    assert "(12 to 6% of the work); if p is 4, they leave 38 to 19%; if p is 16, 188 to 94%" in row_of("8-16")
    scores = 5 * 96 * 2048 / 12288                         # the second term of 34 + 5 heads seq / hidden, for GPT-3
    assert scores == 80 and round(scores / (34 + scores), 1) == 0.7
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert round(layer / 4096**2) == 13


def seconds(model, gpus, gpus_per_node=8, **layout):
    return plan.evaluate(models.PRESETS[model], Layout(**layout), speed.Cluster(gpus, gpus_per_node=gpus_per_node),
                         dict(time=speed.USUAL, slack=1.0))


def test_what_is_estimated():
    once, often = (seconds("llama-70b", 256, dp=16, tp=4, pp=4, zero=zero, accumulation=64).step for zero in (1, 2))
    assert f"takes {often:.1f} s instead of {once:.1f} s" in row_of("ZeRO-2 is always better")


EIGHTS, ONES = "--gpus_per_node 8", "--gpus_per_node 1"
OF_16 = "--seq_len 4096 --global_batch_size 64 --micro_batch_size 1"
LONG = f"5 16 {ONES} --model llama-8b --global_batch_size 2 --micro_batch_size 1 --zero 3 --cp 8 --recompute full"


@pytest.mark.slow
@pytest.mark.parametrize("claim, little, much, of, runs", [
    ("Put experts across", "3% of a step inside a node", "a third across", "ep",
     [f"7 16 {nodes} --model mixtral-8x7b {OF_16} --zero 1 --ep 8" for nodes in (EIGHTS, ONES)]),
    ("Keep cp in a node or", "2% of a step at 131,072 tokens", "a fifth at 32,768", "cp",
     [f"{LONG} --seq_len {length}" for length in (131072, 32768)]),
    ("greater than 10:1", "0% of a step in nodes of eight H100", "two thirds in nodes of one", "dp",
     [f"3 16 {nodes} --model llama-8b --seq_len 4096 --global_batch_size 16 --micro_batch_size 1" for nodes in (EIGHTS, ONES)])],
    ids=["ep", "cp", "dp"])
def test_what_is_simulated(claim, little, much, of, runs, tmp_path):
    """Compare as coarsely as the page rounds: the simulated GPUs are only a model."""
    few, many = (one["exposed"][of] / one["step_seconds"] for one in (simulated(run, tmp_path) for run in runs))
    assert little in row_of(claim) and few == pytest.approx(float(little.split("%")[0]) / 100, abs=0.015)
    share = {"two thirds": 2 / 3, "a third": 1 / 3, "a fifth": 1 / 5}[re.match(r"two thirds|a \w+", much)[0]]
    assert much in row_of(claim) and many == pytest.approx(share, abs=0.05)


@pytest.mark.slow
def test_zero_2_beside_zero_1_simulated(tmp_path):
    once, often = (simulated(f"3 16 {EIGHTS} --model llama-8b {OF_16} --zero {zero}", tmp_path) for zero in (1, 2))
    assert 1.05 < often["step_seconds"] / once["step_seconds"] < 1.15
    less = f"its peak is {often['peak_bytes'] / 2**30:.0f} GiB instead of {once['peak_bytes'] / 2**30:.0f} GiB"
    wire = [sum(sent["wire_bytes"] for sent in one["sent"]) / 1e9 for one in (often, once)]
    ours = row_of("ZeRO-2 is always better")
    assert f"{wire[0]:.0f} GB on the wire where ZeRO-1 puts {wire[1]:.0f} GB, and takes a tenth longer" in ours and less in ours


def simulated(words, folder):
    step, ranks, *flags = words.split()
    subprocess.run([sys.executable, ROOT / "tools/simulate", step, ranks, "--json", folder / "found.json", *flags],
                   check=True, capture_output=True, timeout=600)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("model, gpus, said", [
    ("llama-8b", 64, {"by size, under 10B": "10% slower than with selective", "its recipe": "35% for an 8B on 64"}),
    ("llama-8b", 8, {"by GPUs, one node": "best for an 8B"}),
    ("llama-70b", 256, {"by size, 10B to 100B": "first, with full recompute", "its recipe": "13% slower for a 70B on 256"}),
    ("llama-405b", 512, {"by size, above 100B": "20% slower for a 405B on 512", "its recipe": "best for a 405B on 512"})])
def test_what_the_rules_cost(model, gpus, said):
    """Compare with the planner, for 1,024 sequences of 4,096 tokens."""
    c, cluster = models.PRESETS[model], speed.Cluster(gpus)
    search = plan.Search(c, cluster, 4096, 1024, dict(time=speed.USUAL, slack=1.0))
    best = search.best()[0]
    found = {rule: one.tokens_per_s / best.tokens_per_s - 1 for rule, one in explain.playbook(c, search, cluster)}
    for claim, words in said.items():
        lost = next(lost for rule, lost in found.items() if claim in rule)
        assert words in row_of(claim)
        begins = ("best", "first") if lost == 0 else (f"{-lost:.0%}", f"{-lost:.1%}")
        assert words.startswith(begins), (claim, lost)
