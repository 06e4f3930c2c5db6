"""The lab of runs that hang: what is shown leads to the answer, and only the answer is taken."""
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from steps import ROOT, run

HANGS = ROOT / "exercises/hangs"
sys.path.append(str(HANGS))
import lab  # noqa: E402
from answers import ANSWERS  # noqa: E402

NUMBERS = range(1, 9)


@pytest.fixture(scope="module")
def looked():
    """All eight at once: they wait most of the time."""
    def look(number):
        return run([sys.executable, HANGS / "lab.py", str(number)], ROOT, 300)
    with ThreadPoolExecutor(len(NUMBERS)) as threads:
        return dict(zip(NUMBERS, threads.map(look, NUMBERS)))


def stood(output, rank):
    """The line of its program in which a rank stands, and its calls."""
    part = output.split(f"--- rank {rank} stands here")[1].split("--- rank")[0]
    lines = [int(line) for line in re.findall(r"hang\d\.py:(\d+) in", part)]
    return lines, [line for line in output.splitlines() if line.startswith(f"    rank {rank}: ")]


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_the_two_lists_show_who_is_to_blame(looked, number):
    """The rank to blame stands elsewhere than the others, or has called something else than they wait in."""
    status, output = looked[number]
    assert status == 0 and "Traceback" not in output, output
    ranks = {rank: stood(output, rank) for rank in range(lab.RANKS)}
    last = {rank: re.sub(r"peer \d  ", "", calls[-1].split(":", 1)[1]) for rank, (_, calls) in ranks.items()}
    to_blame = set(ANSWERS[number]["ranks"])
    others = {last[rank] for rank in last if rank not in to_blame}
    if to_blame == set(ranks):                            # a send that meets a send: all are alike
        assert len(set(last.values())) == 1 and "send" in last[0]
    elif number == 3:                                     # 3 waits for a message of 2, who has ended
        assert "ended" in last[2] and any("irecv" in call and "started" in call for call in ranks[3][1])
    elif number == 2:                                     # ranks 2 and 3 are a pair, and only one of them is in it
        assert "ranks 2 3" in last[2] and "world" in last[3] and "started" in last[2] and "started" in last[3]
    else:
        assert all(last[rank] not in others or ranks[rank][0] != ranks[0][0] for rank in to_blame), output
    assert ("nothing has moved" in output) == (not ANSWERS[number].get("slow")), output


@pytest.mark.slow
def test_a_rank_says_what_its_thread_died_of(looked):
    assert "it has printed: ValueError" in looked[7][1] and "queue.py" in looked[7][1]


@pytest.mark.parametrize("number", NUMBERS)
def test_only_the_answer_is_taken(number):
    wanted = ANSWERS[number]
    slow = "slow " if wanted.get("slow") else ""
    lines = lab.lines_of(number, wanted["lines"])
    assert lines and len(wanted["hints"]) >= 2
    for rank in range(lab.RANKS):
        for line in range(1, 30):
            right, said = lab.judge(number, f"{slow}{rank} hang{number}.py:{line}")
            assert right == (rank in wanted["ranks"] and any(abs(line - of) <= 1 for of in lines)), said
    assert not lab.judge(number, f"{'' if slow else 'slow '}{wanted['ranks'][0]} {lines[0]}")[0]
    assert lab.judge(number, "train.py:3")[1].startswith("error: ")


def test_hints_come_one_by_one(tmp_path):
    assert [lab.hint(1, tmp_path).count("hint ") for _ in range(4)] == [1, 2, 2, 2]


@pytest.mark.parametrize("words", [[], ["9"], ["²"], ["1", "2", "3"], ["x", "hint"]])
def test_what_is_no_hang_is_refused_in_a_line(words):
    status, output = run([sys.executable, HANGS / "lab.py", *words], ROOT, 60)
    assert status == 2 and output.startswith("error: ") and output.count("\n") == 1


def test_programs_are_short():
    for number in NUMBERS:
        assert len(Path(HANGS, f"hang{number}.py").read_text().splitlines()) <= 27


def test_it_leaves_no_process(tmp_path):
    with lab.running(8, str(tmp_path)) as processes:
        pids = [process.pid for process in processes]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
