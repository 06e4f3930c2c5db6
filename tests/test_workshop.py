"""docs/workshop/: no command would be refused, and its key has the right answers."""
import json
import re
import shlex
import sys

import pytest
from jobs import ledger_rows
from programs import run_program
from readme import blocks
from steps import ROOT, STEPS, full_name, run
from test_readmes import called, refused, trainings

FOLDER = ROOT / "docs/workshop"
PAGES = sorted(path.name for path in FOLDER.glob("*.md"))


@pytest.fixture
def room(tmp_path):
    """Make a place with this repository's folders and with an nvidia-smi that shows eight GPUs."""
    for name in ("docs", *STEPS):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8; do echo 81559; done\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    return tmp_path


def commands_of(page):
    return "".join(block.text for block in blocks((FOLDER / page).read_text()) if block.language == "bash")


def test_no_command_would_be_refused(room):
    """Check the commands in every kind of room. In each, only the two that are meant to be refused may be refused."""
    begins = [f"export SLURM_JOB_ID=7\nsource docs/workshop/{source}\n" for source in ("laptop.sh", "pair.sh 2", "slurm.sh")]
    texts = [begin + commands_of(page) for begin in begins for page in PAGES if page != "README.md"]
    commands = trainings(called(texts, room))
    assert len(commands) >= 90 and {step for step, _, _ in commands} == set(STEPS)
    said = refused(commands)
    assert len(said) == 2 * len(begins), said
    for message in ("--seq_len 126: must be", "--global_batch_size 15: must be"):
        assert sum(message in line for line in said) == len(begins), said


# ------------------------------------------------------------------------------------------------ the preflight
@pytest.mark.slow
def test_a_machine_that_is_ready():
    status, output = run([sys.executable, FOLDER / "preflight.py"], ROOT, timeout=600)
    assert status == 0 and output.endswith("two ranks  ok\nREADY\n"), output


# ------------------------------------------------------------------------------------------------ the key
def key():
    """Return [(what, answer, the words of the command)]."""
    rows = re.findall(r"^\| [\d.]+ \| (.*?) \| ([\d.,]+) \| `(.*)` \|$", (FOLDER / "key.md").read_text(), re.M)
    return [(what, float(answer.replace(",", "")), shlex.split(command)) for what, answer, command in rows]


def commands(*verbs):
    """Return {command: [(what, answer)]}."""
    found = {}
    for what, answer, words in key():
        if words[0] in verbs:
            found.setdefault(shlex.join(words), []).append((what, answer))
    return found


def as_called(command, folder):
    words, = called([f"source docs/workshop/laptop.sh; {command}"], folder)
    return words


def test_the_sheet_asks_what_the_key_answers():
    sheet, answers = ((re.findall(r"^\| (\d\.\d) \|", (FOLDER / page).read_text(), re.M)) for page in ("sheet.md", "key.md"))
    assert sheet == answers != []
    assert len(LAYOUTS) == (FOLDER / "teacher.md").read_text().count("\n| `--") > 0
    assert len(key()) == (FOLDER / "key.md").read_text().count("` |\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", commands("dry", "dry_long"))
def test_what_is_simulated(command, room, tmp_path):
    words = as_called(command, room)
    status, output = run_program([*words[1:], "--json", tmp_path / "seen.json"], ROOT, timeout=600)
    assert status == 0, output
    seen = json.loads((tmp_path / "seen.json").read_text())
    for what, answer in commands("dry", "dry_long")[command]:
        assert simulated(what, seen, output) == pytest.approx(answer, abs=0.051), what


def simulated(what, seen, output):
    if what == "GiB at the peak":
        return seen["peak_bytes"] / 2**30
    if what == "GiB between steps":
        return float(re.search(r"^all +([\d,.]+)", output, re.M)[1].replace(",", "")) / 1024
    field, collective, *wire = re.fullmatch(r"(calls|bytes) of (\w+)( on the wire)?", what).groups()
    column = 0 if field == "calls" else 2 if wire[0] else 1
    rows = re.findall(rf"^\w+ +{collective} +([\d,]+) +([\d,]+) +([\d,]+)$", output, re.M)
    return max(float(row[column].replace(",", "")) for row in rows)


LAYOUTS = re.findall(r"^\| `(--.*)` \| ([\d.]+) \| ([\d,]+) \|$", (FOLDER / "teacher.md").read_text(), re.M)


@pytest.mark.parametrize("flags, gib, speed", [
    pytest.param(*layout, marks=pytest.mark.sweep if i else pytest.mark.slow) for i, layout in enumerate(LAYOUTS)])
def test_the_layouts_of_the_competition(flags, gib, speed, room, tmp_path):
    words = as_called(f"dry 8 8 --model llama-8b --global_batch_size 32 {flags}", room)
    status, output = run_program([*words[1:], "--json", tmp_path / "seen.json"], ROOT, timeout=600)
    assert status == 0, output
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["peak_bytes"] / 2**30 == pytest.approx(float(gib), abs=0.051)
    assert seen["tokens_per_s_per_gpu"] == pytest.approx(float(speed.replace(",", "")), rel=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands("train", "long"))
def test_what_a_laptop_runs(command, room, pool):
    words = as_called(command, room)
    place = next(i for i, word in enumerate(words) if word.endswith("train.py"))
    world, step, flags = int(words[place - 1]), full_name(words[place].split("/")[0]), words[place + 1:]
    ran = pool.train(step, shlex.join([*flags, "--device", "cpu"]), world=world, weights=False)
    if "tiny-moe" not in flags and "1024" not in flags:
        # the key has these numbers; the built-in text, that of help(), is a little different in every version of Python
        assert ran.losses == pytest.approx([5.7309, 4.9988, 4.4400, 4.2191, 4.0200], abs=0.005)
    for what, answer in commands("train", "long")[command]:
        if what.startswith("balance of step "):
            assert ran.lines[int(what.split()[-1]) - 1]["balance"] == pytest.approx(answer, abs=0.15)
        else:
            field, collective = re.fullmatch(r"(calls|bytes) of (\w+)", what).groups()
            rows = [row for (_, name), row in ledger_rows(ran.output).items() if name == collective]
            assert max(row[field == "bytes"] for row in rows) == answer


@pytest.mark.slow
@pytest.mark.parametrize("command", commands("python"))
def test_what_a_schedule_idles(command, tmp_path):
    words = [str(ROOT / word) if word.startswith("tools/") else word for word in shlex.split(command)]
    status, output = run_program(words[1:], tmp_path, timeout=120)
    (_, answer), = commands("python")[command]
    assert status == 0 and f"units: [{int(answer)}, " in output
