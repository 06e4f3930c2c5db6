"""The hang lab: each program hangs where it should and shows what an answer needs, and the checker tells right from wrong."""
import concurrent.futures
import os
import signal
import subprocess
import sys
import time

import lab
import pytest
from answers import ANSWERS
from steps import ROOT, clean_environment

LAB = [sys.executable, str(ROOT / "exercises/hangs/lab.py")]
WAITS = "gloo:all_reduce", "started"
#        for each rank: the last call, its state, and a part of the line of the program in which the rank stands
WANTED = {1: [(*WAITS, "dist.all_reduce")] * 2 + [("gloo:barrier", "started", "dist.barrier")] + [(*WAITS, "dist.all_reduce")],
          2: [(*WAITS, "dist.all_reduce(tensors[name]")] * 4,
          4: [(f"gloo:send ->{rank}", "started", "dist.send") for rank in (1, 2, 3, 0)],
          5: [(*WAITS, "norm"), (*WAITS, "copies"), (*WAITS, "norm"), (*WAITS, "norm")],
          6: [("gloo:all_gather_into_tensor", "started", "dist.all_gather_into_tensor")] + [(*WAITS, "dist.all_reduce")] * 3,
          7: [(*WAITS, "dist.all_reduce"), ("gloo:all_reduce", "completed", "batches.get"), *[(*WAITS, "dist.all_reduce")] * 2],
          9: [("gloo:reduce_scatter_tensor", "started", "dist.reduce_scatter_tensor")] * 3 +
             [("gloo:all_to_all_single", "started", "dist.all_to_all_single(tokens")]}


slow = pytest.mark.slow                                   # a whole run takes fifteen seconds


@pytest.fixture(scope="module")
def looks():
    """Look at all programs at once: they only wait."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with concurrent.futures.ThreadPoolExecutor(len(lab.NUMBERS)) as threads:
        return dict(zip(lab.NUMBERS, threads.map(lab.look, lab.NUMBERS)))


def source(number):
    return (ROOT / f"exercises/hangs/hang{number}.py").read_text().splitlines()


@slow
@pytest.mark.parametrize("number", WANTED)
def test_lists_and_stacks_show_where_each_rank_is(looks, number):
    ranks, later = looks[number]
    for rank, (name, state, text) in enumerate(WANTED[number]):
        last, stack = ranks[rank]["calls"][-1], ranks[rank]["stack"]
        assert (last["profiling_name"], last["state"]) == (name, state), rank
        lines = [line for _, file, line in stack if file.endswith(f"hang{number}.py")]
        assert text in source(number)[lines[0] - 1], (rank, stack)
        assert later[rank] == last, "a second look shows the same"


def last_of(looks, number, rank):
    return looks[number][0][rank]["calls"][-1]


@slow
def test_what_else_an_answer_needs(looks):
    """Check what an answer needs besides the names of the calls: sequence numbers, groups, sizes, output."""
    assert {last_of(looks, 1, rank)["collective_seq_id"] for rank in range(4)} == {7}
    assert [last_of(looks, 2, rank)["process_group"] for rank in range(4)] == ["world", "world", "ranks 2,3", "world"]
    got = [call for call in looks[5][0][3]["calls"] if call["profiling_name"] == "gloo:all_to_all_single"][-1]
    assert got["output_sizes"] == [0, 16] and last_of(looks, 5, 1)["process_group"] == "ranks 1,3"
    orders = [[call["profiling_name"] for call in looks[9][0][rank]["calls"]] for rank in range(4)]
    assert orders[0] == orders[1] == orders[2] and orders[3][:-1] == orders[0][:-1], "the last call alone differs"
    assert last_of(looks, 9, 3)["process_group"] == "ranks 2,3"
    assert "save" in [function for function, _, _ in looks[6][0][0]["stack"]]
    printed = lab.printed(7, looks[7][0][1]["out"])
    line = next(i for i, text in enumerate(source(7), 1) if "batches.put" in text)
    assert f"hang7.py:{line} in read" in printed and any("ValueError" in line for line in printed)


@slow
def test_unequal_sizes_end_the_rank_whose_buffer_is_small(looks):
    ranks, _ = looks[3]
    assert ranks[2]["exit"] == -signal.SIGABRT and "EnforceNotMet" in ranks[2]["out"]
    assert any(file.endswith("hang3.py") for _, file, _ in ranks[2]["stack"])
    assert [call["output_sizes"] for call in ranks[2]["calls"] if "irecv" in call["profiling_name"]][-1] == [6, 16]
    assert [call["input_sizes"] for call in ranks[1]["calls"] if "send" in call["profiling_name"]][-1] == [8, 16]


@slow
def test_a_slow_rank_is_told_from_one_that_hangs_by_the_lists(looks):
    ranks, later = looks[8]
    before = [found["calls"][-1]["collective_seq_id"] for found in ranks]
    assert all(last["collective_seq_id"] > number for last, number in zip(later, before)), "it goes on"
    moved = [number for number in WANTED if looks[number][1] != [found["calls"][-1] for found in looks[number][0]]]
    assert not moved, "none of the others goes on"


@pytest.mark.parametrize("number", lab.NUMBERS)
def test_answers(number, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab, "HINTS", tmp_path)
    wanted, slow = ANSWERS[number], "slow " * ANSWERS[number].get("slow", False)
    right = lab.lines_of(number)
    assert len(right) >= len(wanted["lines"]), "each text occurs in the program"
    near = {line + off for line in right for off in (-1, 0, 1)}
    code = [i for i, line in enumerate(source(number), 1) if line.strip()]
    assert len(near & set(code)) < 0.75 * len(code), "a guess is not good enough"
    for rank in range(4):
        for line in range(1, len(source(number)) + 1):
            verdict, said = lab.judge(number, f"{slow}{rank} hang{number}.py:{line}")
            assert verdict == (rank in wanted["ranks"] and line in near), (rank, line)
    said = f"yes. {wanted['why']}\nTo watch it line by line: make play N={number}"
    assert lab.judge(number, f"{slow}{wanted['ranks'][0]} {right[0]}") == (True, said)
    wrong = f"{'' if slow else 'slow '}{wanted['ranks'][0]} {right[0]}"
    for shown in (1, 2, 2):                               # each wrong answer brings a hint
        assert lab.main([str(number), wrong]) == 3
        assert capsys.readouterr().out.count("\nhint ") == shown
    assert lab.main([str(number), f"{slow}{wanted['ranks'][0]} {right[0]}"]) == 0
    assert lab.main([str(number), "hint"]) == 0 and capsys.readouterr().out.count("hint ") == 1


@pytest.mark.parametrize("words", [[], ["10"], ["x"], ["1", "4 hang1.py:3"], ["1", "2 hang2.py:3"], ["1", "2 x"]])
def test_bad_input_is_refused_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as refused:
        lab.main(words)
    assert refused.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1


def wait(until, seconds=120):
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(group):
    """Count the processes of a group, except zombies."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return sum(line.split()[0] == str(group) and "Z" not in line.split()[1] for line in listed.splitlines())


def test_no_process_is_left_behind():
    child = subprocess.Popen([*LAB, "3"], env=clean_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    said, _ = child.communicate(timeout=300)
    assert child.returncode == 0 and "gloo:irecv <-1" in said
    wait(lambda: alive(child.pid) == 0)
    child = subprocess.Popen([*LAB, "1"], env=clean_environment(), stdout=subprocess.PIPE, start_new_session=True)
    wait(lambda: alive(child.pid) >= 5)
    child.kill()                                          # so it can no longer end its ranks
    child.wait()
    wait(lambda: alive(child.pid) == 0)
