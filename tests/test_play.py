"""tools/play records what a program does without changing it, and shows where each rank stands if it hangs."""
import json
import re
import shutil
import subprocess
import sys

import pytest
from steps import ROOT, clean_environment

PROGRAM = '''
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def double(x):
    y = 2 * x
    return y

def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x = torch.tensor([1.0, rank])
    received = torch.empty(2)
    handle = dist.isend(x, 1 - rank)
    dist.recv(received, 1 - rank)
    handle.wait()
    total = double(received)
    dist.all_reduce(total)
    large = torch.zeros(10, 10)
    pairs = [rank for rank in range(3)]
    if rank == 0:
        print("the sum is", total.tolist())
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="METHOD")
'''
HANGS = '''
import torch
import torch.distributed as dist

def main(rank, world):
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        dist.barrier()
    else:
        dist.recv(torch.ones(3), 1)
'''


def play(tmp_path, *words, status=0):
    command = [sys.executable, ROOT / "tools/play", "--out", tmp_path / "page.html", *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), text=True, capture_output=True, timeout=600)
    assert done.returncode == status, done.stdout + done.stderr
    if status:
        return done.stdout, done.stderr, None
    (text,) = re.findall(r"^const data = (.*);$", (tmp_path / "page.html").read_text(), re.M)
    return done.stdout, done.stderr, json.loads(text)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_program_is_recorded_and_prints_what_it_prints(tmp_path, method):
    (tmp_path / "two.py").write_text(PROGRAM.replace("METHOD", method))
    out, _, data = play(tmp_path, "two.py")
    assert out.startswith("the sum is [4.0, 2.0]\n") and data["ended"] and data["ranks"] == 2
    assert "\n".join(data["code"][0]) + "\n" == (tmp_path / "two.py").read_text()
    for rank in (0, 1):
        mine = [event[1:] for event in data["events"] if event[0] == rank]
        seen = [rest[3].items() for kind, *rest in mine if kind == "l"]
        values = {name: data["strings"][value] for changed in reversed(seen) for name, value in changed}   # the first of each
        doubled = f"[2, {2 * (1 - rank)}]"
        assert values["x"] == f"[1, {rank}]" and values["y"] == values["total"] == doubled
        assert data["strings"].count("[4, 2]") == 1, "the sum replaces it in place"
        assert values["large"] == "[10, 10]" and values["pairs"] == "[0, 1, 2]", "a large tensor shows its shape"
        assert [rest[3] for kind, *rest in mine if kind == "c"][-2:] == ["main", "double"], "a comprehension has no frame"
        assert {rest[2] for kind, *rest in mine if kind == "s"} == {"message 0>1 0", "message 1>0 0", "group 0,1 0"}
        numbers = {kind: [rest[0] for k, *rest in mine if k == kind] for kind in "swe"}
        assert numbers["s"] == sorted(numbers["w"]) == sorted(numbers["e"]) == [1, 2, 3]
        assert numbers["w"] == [2, 1, 3], "the send is waited for after the receive"


def test_of_a_program_that_hangs_the_last_picture_says_who_waits_for_whom(tmp_path):
    (tmp_path / "stuck.py").write_text(HANGS)
    out, error, data = play(tmp_path, "--ranks", 2, "--seconds", 20, "stuck.py")
    assert "did not end well" in out and not data["ended"] and "Traceback" not in error
    for rank, key, line in ((0, "message 1>0 0", 10), (1, "group 0,1 1", 8)):
        mine = [event[1:] for event in data["events"] if event[0] == rank]
        started = {rest[0]: rest[2] for kind, *rest in mine if kind == "s"}
        waits = {rest[0] for kind, *rest in mine if kind == "w"} - {rest[0] for kind, *rest in mine if kind == "e"}
        assert [started[number] for number in waits] == [key]
        assert [rest[2] for kind, *rest in mine if kind == "l"][-1] == line


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="apt install chromium")
def test_the_page_works_in_a_browser(tmp_path):
    (tmp_path / "stuck.py").write_text(HANGS)
    play(tmp_path, "--ranks", 2, "--seconds", 20, "stuck.py")
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run --enable-logging=stderr"
    done = subprocess.run(["chromium", *flags.split(), f"--user-data-dir={tmp_path}/profile", "--dump-dom",
                           f"file://{tmp_path}/page.html"], text=True, capture_output=True, timeout=120)
    assert "Rank 0 waits in message for rank 1. Rank 1 waits in barrier for rank 0." in done.stdout, done.stdout + done.stderr
    assert done.stdout.count('<h2>rank ') == 3 and "CONSOLE" not in done.stderr, done.stderr
    assert not re.search(r"https?://(?!www\.w3\.org)", (tmp_path / "page.html").read_text()), "a page that needs nothing else"


def test_what_cannot_be_played_is_refused_in_one_line(tmp_path):
    (tmp_path / "one.py").write_text("print(1)\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    for words, message in ((["x.py"], "x.py: no such file"), (["latin.py"], "latin.py: cannot be read as text ('utf-8' codec can't "
                            "decode byte 0xe9 in position 2: invalid continuation byte); give a Python program in UTF-8"),
                           (["--ranks", "0", "one.py"], "--ranks 0: must be from 1 to 16"),
                           (["one.py"], "one.py: no rank has called init_process_group; does torchrun have to start it? "
                                        "Try --ranks 4")):
        _, error, _ = play(tmp_path, *words, status=2)
        assert error == f"error: {message}\n"


@pytest.mark.slow
def test_a_trainer_is_played_with_the_file_of_its_technique(tmp_path):
    _, _, data = play(tmp_path, "--ranks", 2, "--also", ROOT / "step02_dp/data_parallel.py", ROOT / "step02_dp/train.py",
                      "--steps", 1, "--global_batch_size", 4)
    assert data["ended"] and data["files"] == ["train.py", "data_parallel.py"]
    assert {event[3] for event in data["events"] if event[1] == "l"} == {0, 1}
