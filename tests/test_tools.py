"""The tools behind the make targets. Each runs in a small repository of its own or on files made here."""
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import time

import diff
import plot
import pytest
import torch
import torch.distributed as dist
from harness import JobFailed
from operations import assert_none_waits_for_ever
from readme import real_diff
from steps import CHANGES, LESSON, NAMES, ROOT, SUPPORT, clean_environment, copy_repository, pairs, run
from unforgiving import unforgiving


@pytest.fixture
def small_repository(tmp_path):
    """Make a repository with two steps of one line each, a test for the second, and the real tools."""
    folder = tmp_path / "repository"
    for name in ("tests", "tools", "dev", "exercises/ladder"):
        (folder / name).mkdir(parents=True)
    for name in ("Makefile", "tools/steps.py", "tools/diff.py", "exercises/exercise.py", "exercises/patched.py", "dev/break_it.py",
                 "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    for step, line in zip(NAMES, ("answer = 41\n", "answer = 42\n")):
        (folder / step).mkdir()
        (folder / step / "train.py").write_text(line)
        (folder / step / "README.md").write_text(f"of {step}\n")
    (folder / "tests/test_step02.py").write_text(
        "import pytest, steps\n"
        "def test_answer():\n"
        "    assert 'answer = 42' in (steps.step_dir(2) / 'train.py').read_text(), 'no answer'\n"
        "def test_anything(): pass\n"
        "def test_import(): exec((steps.step_dir(2) / 'train.py').read_text())\n"
        "@pytest.mark.sweep\n"
        "def test_long(): assert False\n")
    return folder


def make(folder, *arguments, **environment):
    done = subprocess.run(["make", *arguments], cwd=folder, env=clean_environment() | environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


# --------------------------------------------------------------------------------------------------- make targets
@pytest.mark.parametrize("target, status", [("help", 0), ("", 0), ("nonsense", 2)])
def test_make_help_names_every_target(small_repository, target, status):
    """Check plain make as well, and make with a target that does not exist."""
    found, output = make(small_repository, *target.split())
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    targets = {name for line in phony for name in line.split() if "/" not in name} - {"help"}
    assert found == status and {"run", "simulate", "carry"} < targets
    assert [name for name in targets if not re.search(rf"\b{name}\b", output)] == []
    assert ("no such target" in output) == (target == "nonsense")


@pytest.fixture
def two_steps(small_repository):
    """Add a file of each kind: changed, unchanged, new, and no part of a step's diff."""
    old, new = (small_repository / name for name in NAMES[:2])
    for step in (old, new):
        (step / "data.py").write_text(f"first = {step is new}\nsecond = 2\n")
        (step / "model.py").write_text("layers = 8\n")
        (step / "figures").mkdir()
        (step / "figures/fits.png").write_text(f"of {step.name}\n")
    (new / "ledger.py").write_text("calls = 0\nbytes = 0\n")
    (new / "extra.py").write_text("in_no = True\nlist = True\n")
    return small_repository


DIFF = """\
step01_single_gpu -> step02_dp: 4 changed lines in the lesson, 4 in support
  train.py                +1 -1
  data.py                 +1 -1
== support, for a second reading ==
  ledger.py               new, 2 lines
  extra.py                new, 2 lines

--- step01_single_gpu/train.py
+++ step02_dp/train.py
@@ -1 +1 @@
-answer = 41
+answer = 42

--- step01_single_gpu/data.py
+++ step02_dp/data.py
@@ -1,2 +1,2 @@
-first = False
+first = True
 second = 2

== support, for a second reading ==

--- step01_single_gpu/ledger.py
+++ step02_dp/ledger.py
@@ -0,0 +1,2 @@
+calls = 0
+bytes = 0

--- step01_single_gpu/extra.py
+++ step02_dp/extra.py
@@ -0,0 +1,2 @@
+in_no = True
+list = True
"""


def test_make_diff(two_steps):
    assert make(two_steps, "diff", "STEP=2") == (0, DIFF)
    assert make(two_steps, "diff", "STEP=2", "FILE=data.py") == (0, DIFF.split("\n\n")[2] + "\n")


def test_make_diff_of_a_lesson_without_support(two_steps):
    for name in ("ledger.py", "extra.py"):
        (two_steps / NAMES[1] / name).unlink()
    status, output = make(two_steps, "diff", "STEP=2")
    assert status == 0 and "4 changed lines in the lesson, 0 in support\n" in output and "second reading" not in output


@pytest.mark.parametrize("words, message", [
    *((words, "compares step N with step N-1; choose N from 2 to 2")
      for words in ("STEP=0", "STEP=1", "STEP=3", "STEP=", "STEP=x")),
    *((f"STEP=2 FILE={name}", f"FILE={name}: step 2 does not change this file; choose from train.py, data.py, ledger.py, extra.py")
      for name in ("model.py", "gone.py", "figures/fits.png"))])
def test_make_diff_refuses(two_steps, words, message):
    status, output = make(two_steps, "diff", *words.split())
    assert status == 2 and message in output and "Traceback" not in output, output
    said = [line for line in output.splitlines() if not line.startswith("make: ***")]
    assert len(said) == 1


def test_make_diff_is_coloured_on_a_terminal_alone(two_steps):
    terminal, inside = pty.openpty()
    subprocess.run([sys.executable, "tools/diff.py", "2"], cwd=two_steps, stdout=inside, env=clean_environment(), check=True)
    os.close(inside)
    with open(terminal, "rb", buffering=0) as file:
        shown = file.read(10_000).decode().replace("\r\n", "\n")
    assert "\033[31m-answer = 41\033[0m\n\033[32m+answer = 42\033[0m\n" in shown
    assert f"\033[1m{diff.LINE}\033[0m\n" in shown and re.sub(r"\033\[\d+m", "", shown) == DIFF


def test_make_diff_of_every_step_is_what_diff_says():
    def hunks(text):
        return sorted(line for line in text if re.match(r"[-+@ ]", line) and not re.match(r"---|\+\+\+|  \w", line))
    for old, new in pairs():
        status, output = run([sys.executable, ROOT / "tools/diff.py", new.name[4:6]], ROOT, timeout=60)
        assert status == 0 and hunks(output.splitlines()) == hunks(real_diff(old, new))
        shown = re.findall(r"^\+\+\+ \S+?/(\S+)$", output, re.M)
        assert shown == CHANGES[new.name] == [*LESSON[new.name], *SUPPORT[new.name]] and shown[0] == "train.py"
        head, *halves = output.split("\n\n", 1)[0], *output.split(f"\n\n{diff.LINE}\n\n")
        assert len(halves) == 2 and re.findall(r"^\+\+\+ \S+?/(\S+)$", halves[0], re.M) == LESSON[new.name]
        assert shown == re.findall(r"^  (\S+) ", head, re.M)
        added, removed = (sum(map(int, re.findall(rf"^  .* \{sign}(\d+)\b", head, re.M))) for sign in "+-")
        of_old = [line for name in CHANGES[new.name] if (old / name).exists() for line in real_diff(old / name, new / name)[2:]]
        assert [added, removed] == [sum(line.startswith(sign) for line in of_old) for sign in "+-"]
        parts = [sum(map(int, re.findall(r"[-+, ](\d+)\b", part))) for part in head.split("\n", 1)[1].split(diff.LINE)]
        assert head.startswith("{} -> {}: {} changed lines in the lesson, {} in support\n".format(old.name, new.name, *parts))


def test_make_diff_that_nobody_reads_to_the_end():
    words = "make -s diff STEP=6 | head -1"
    done = subprocess.run(words, shell=True, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert re.fullmatch(r"step05_cp -> step06_pp: \d+ changed lines in the lesson, \d+ in support\n", done.stdout)
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_make_diff_into_a_full_disk():
    words = f"{sys.executable} tools/diff.py 6 > /dev/full"
    done = subprocess.run(words, shell=True, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "make diff: [Errno 28] No space left on device\n"


def test_make_exercise(small_repository):
    status, output = make(small_repository, "exercise", "STEP=2")
    assert status == 0 and "EXERCISE=2=exercise/step02 make test STEP=2" in output, output
    exercise = small_repository / "exercise/step02"
    assert sorted(os.listdir(exercise)) == ["AGENTS.md", "Makefile", "train.py"]
    assert (exercise / "train.py").read_text() == "answer = 41\n"
    status, output = make(small_repository, "test", "STEP=2", EXERCISE="2=exercise/step02")
    assert status == 2 and "no answer" in output and "1 failed" in output
    (exercise / "train.py").write_text("answer = 42  # mine\n")
    status, output = make(small_repository, "test", "STEP=2", EXERCISE="2=exercise/step02")
    assert status == 0 and "3 passed, 1 deselected" in output, output
    status, output = make(small_repository, "exercise", "STEP=2")
    assert status == 0 and "was not changed" in output and "mine" in (exercise / "train.py").read_text()


@pytest.mark.parametrize("step, message", [("1", "from 2 to 8"), ("", "from 2 to 8"), ("²", "from 2 to 8"),
                                           ("4", "STEP=4: this repository has only")])
def test_make_exercise_refuses(small_repository, step, message):
    status, output = make(small_repository, "exercise", f"STEP={step}")
    assert status == 2 and message in output and not (small_repository / "exercise").exists() and "Traceback" not in output


def test_make_exercise_leaves_the_readers_own_files(small_repository):
    make(small_repository, "exercise", "STEP=2")
    note = small_repository / "exercise/step02/AGENTS.md"
    note.write_text("help me\n")
    assert make(small_repository, "exercise", "STEP=2")[0] == 0 and note.read_text() == "help me\n"
    assert sorted(os.listdir(small_repository / "exercise")) == ["step02"]


def test_make_exercise_where_nothing_can_be_written(small_repository):
    (small_repository / "exercise").write_text("a file in the place of the folder\n")
    status, output = make(small_repository, "exercise", "STEP=2")
    said = [line for line in output.splitlines() if not line.startswith("make: ***")]
    assert status == 2 and len(said) == 1 and said[0].startswith("error: [Errno ") and "/exercise" in said[0], output


@pytest.mark.parametrize("content", ["", "[]", '{"rung": 1}', '{"rung": "two", "hints": {}}', '{"rung": 0, "hints": {}}',
                                     '{"rung": 1, "hints": {"1": null}}'])
def test_a_broken_memory_of_the_rungs_is_refused(small_repository, content):
    (small_repository / "exercises/ladder/test_ladder02.py").write_text("")
    (small_repository / "exercise/step02").mkdir(parents=True)
    (small_repository / "exercise/step02/.rung.json").write_text(content)
    for what in ("check", "hint", "solution"):
        status, output = make(small_repository, what, "STEP=2")
        said = [line for line in output.splitlines() if not line.startswith("make: ***")]
        assert status == 2 and said == ["error: exercise/step02/.rung.json is not what make check wrote; "
                                        "delete it to start at the first rung"], output


def test_make_sweep_runs_the_long_tests_and_no_others(small_repository):
    status, output = make(small_repository, "sweep")
    assert status == 2 and "test_long" in output and "1 failed, 3 deselected" in output, output


def test_no_tests_is_a_failure(small_repository):
    assert make(small_repository, "test", "STEP=3")[0] == 2


FAKE = """#!/bin/sh
echo "did $0 $*"
[ "$2" != venv ] || { mkdir -p .venv/bin; cp "$0" .venv/bin/python; }
"""


@pytest.mark.parametrize("there, made", [
    ("a link", False), ("older, and the same", False), ("of other packages", True), ("none", True)])
def test_the_environment_is_made_where_it_has_to_be(small_repository, there, made):
    path = small_repository.parent / "bin/python3"
    wanted, venv, linked = small_repository / "requirements.txt", small_repository / ".venv", small_repository.parent / "linked"
    wanted.write_text("torch\n")
    target = linked if there == "a link" else venv
    for python in [path] if there == "none" else [path, target / "bin/python"]:
        python.parent.mkdir(parents=True)
        python.write_text(FAKE)
        python.chmod(0o755)
    if there == "a link":
        venv.symlink_to(linked)
    elif there != "none":
        (venv / "requirements.txt").write_text("torch\n" if "same" in there else "numpy\n")
        os.utime(venv / "requirements.txt", (1, 1))       # git clone gives files the time at which it writes them
    environment = dict(PYTHON="", PATH=f"{path.parent}:{os.environ['PATH']}")
    for again in (False, True):
        status, output = make(small_repository, "test", "STEP=2", **environment)
        did = [line.split()[1:] for line in output.splitlines() if line.startswith("did ")]
        assert status == 0 and did[-1][:3] == [".venv/bin/python", "-m", "pytest"], output
        modules = [words[2] for words in did if words[1] == "-m"]
        assert modules == [*["venv", "pip"] * (made and not again), "pytest"], output
    assert there == "a link" and os.listdir(linked) == ["bin"] or (venv / "requirements.txt").read_text() == "torch\n"


# ------------------------------------------------------------------------------------------------------- dev/break_it.py
MISTAKE = '[step02_answer]\ntest = "tests/test_step02.py::{test}"\nfile = "train.py"\nold = "answer = 42"\nnew = "{line}"\n'


def break_it(folder, test, line, *names):
    (folder / "exercises/mistakes.toml").write_text(MISTAKE.format(test=test, line=line))
    return run([sys.executable, "dev/break_it.py", *names], folder, timeout=120)


def test_a_planted_mistake_that_goes_red(small_repository):
    status, output = break_it(small_repository, "test_answer", "answer = 40")
    assert status == 0 and "| yes | AssertionError: no answer |" in output, output
    assert (small_repository / "step02_dp/train.py").read_text() == "answer = 42\n"


@pytest.mark.parametrize("test, line, message", [
    ("test_anything", "answer = 40", "| NO |"),                                    # stays green
    ("test_import", "import nowhere", "| NO | ModuleNotFoundError"),               # red, but it teaches nothing
    ("test_gone", "answer = 40", "| NO | there is no such test"),
    ("test_long", "answer = 40", "| NO | there is no such test")])                 # a test that is not run
def test_a_planted_mistake_that_shows_nothing_is_seen(small_repository, test, line, message):
    status, output = break_it(small_repository, test, line)
    assert status == 1 and message in output, output


def test_what_is_red_anyway_shows_nothing(small_repository):
    (small_repository / "step02_dp/train.py").write_text("answer = 41\n")
    mistake = MISTAKE.format(test="test_answer", line="answer = 40").replace("answer = 42", "answer = 41")
    (small_repository / "exercises/mistakes.toml").write_text(mistake)
    status, output = run([sys.executable, "dev/break_it.py", "--green"], small_repository, timeout=120)
    assert status == 1 and "must pass before a mistake is planted: AssertionError: no answer" in output, output


def test_an_unknown_planted_mistake_is_refused(small_repository):
    status, output = break_it(small_repository, "test_answer", "answer = 40", "step02_question")
    assert status == 1 and "no planted mistake step02_question" in output


# ----------------------------------------------------------------------------------------------------------- plot
def write_log(path, losses, first=0):
    lines = [dict(step=first + i, loss=loss, grad_norm=1.0, tokens_per_s=100.0, peak_memory_gib=0.5)
             for i, loss in enumerate(losses)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def draw(tmp_path, *logs):
    return run([sys.executable, ROOT / "tools/plot.py", *logs, "--out", "curves.png"], tmp_path, timeout=120)


def test_plot(tmp_path):
    logs = [write_log(tmp_path / "one.jsonl", [5, 4, 2]), write_log(tmp_path / "tp2.jsonl", [5, 4, 2.02]),
            write_log(tmp_path / "later.jsonl", [2, 3], first=2), write_log(tmp_path / "apart.jsonl", [1], first=9)]
    status, output = draw(tmp_path, *logs)
    assert status == 0 and (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG"), output
    assert output.splitlines() == ["tp2: largest relative difference from the loss of one: 1.0e-02 (step 2)",
                                   "later: largest relative difference from the loss of one: 0.0e+00 (step 2)",
                                   "apart: no step in common with one", "curves.png: 4 runs"]


def test_plot_shows_every_curve_where_all_coincide(tmp_path):
    logs = [write_log(tmp_path / f"{name}.jsonl", [5, 4, 3, 2]) for name in "abc"]
    plot.draw(dict(zip("abc", map(plot.read, logs))), tmp_path / "curves.png")
    picture = (plot.plt.imread(tmp_path / "curves.png")[..., :3] * 255).round().astype(int)
    loss_panel = picture[80:picture.shape[0] // 2, :picture.shape[1] // 2].reshape(-1, 3)
    for color in plot.COLORS[:3]:
        rgb = [int(color[i:i + 2], 16) for i in (1, 3, 5)]
        assert (loss_panel == rgb).all(1).sum() > 300, color


def test_plot_refuses_what_is_not_there(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for name, message in (("gone.jsonl", "no such file"), ("empty.jsonl", "has no steps")):
        status, output = draw(tmp_path, name)
        assert status == 2 and message in output and "Traceback" not in output


@pytest.mark.parametrize("text", ["torn", '{"step": 0, "loss": "x", "grad_norm": 1, "tokens_per_s": 1, "peak_memory_gib": 1}',
                                  '{"step": 0, "loss": 1.0', '{"step": 0, "loss": 1.0}', "[1]", "[" * 100_000,
                                  f'{{"step": 0, "loss": {10**400}, "grad_norm": 1, "tokens_per_s": 1, "peak_memory_gib": 1}}'])
def test_plot_refuses_what_is_no_log(tmp_path, text):
    (tmp_path / "some.jsonl").write_text(text + "\n")
    assert draw(tmp_path, "some.jsonl") == (2, "error: some.jsonl: is not a training log; give files that --log_file has written\n")


def test_plot_does_not_replace_a_log(tmp_path):
    logs = [write_log(tmp_path / name, [5, 4]) for name in ("a.jsonl", "b.png")]
    before = logs[1].read_text()
    (tmp_path / "link.png").symlink_to("b.png")
    for out in ("b.png", "./b.png", "link.png"):
        status, output = run([sys.executable, ROOT / "tools/plot.py", *logs, "--out", out], tmp_path, timeout=120)
        assert status == 2 and f"error: --out {out}: is one of the logs" in output and logs[1].read_text() == before


def test_plot_replaces_nothing_but_a_picture(tmp_path):
    log, other = write_log(tmp_path / "a.jsonl", [5, 4]), write_log(tmp_path / "other.png", [3, 2])
    os.link(log, tmp_path / "hard.png")
    for out, message in (("hard.png", "is one of the logs"), ("other.png", "already exists and is not a picture")):
        before = (tmp_path / out).read_bytes()
        status, output = run([sys.executable, ROOT / "tools/plot.py", log, "--out", out], tmp_path, timeout=120)
        assert status == 2 and message in output and (tmp_path / out).read_bytes() == before
    assert other.read_text() and draw(tmp_path, log)[0] == 0 and draw(tmp_path, log)[0] == 0       # it replaces its own picture


@pytest.mark.parametrize("words, message", [
    ("--out gone/x.csv", "there is no folder gone"), ("--out folder.csv", "is a folder"), ("--out x.png", "must end in .csv"),
    ("--out mine.csv", "is not a sweep with these columns"),
    ("--out of.csv", "of.png already exists and belongs to something else"),
    ("--out x.csv --gpus 0", "--gpus 0: must be at least 1"),
    *((f"--out x.csv --time_limit {bad}", "must be a positive number") for bad in ("0", "nan", "inf")),
    ("--out x.csv --trainer nowhere.py", "--trainer nowhere.py: no such file")])
def test_sweep_refuses(tmp_path, monkeypatch, capsys, words, message):
    import sweep
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    for name in ("mine.csv", "of.png"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit) as refused:
        sweep.main(words.split())
    output = "".join(capsys.readouterr())
    assert refused.value.code == 2 and output.startswith("error: ") and message in output and output.count("\n") == 1, output
    assert {(tmp_path / name).read_text() for name in ("mine.csv", "of.png")} == {"a,b\n1,2\n"}


def test_extend_where_nothing_can_be_written_and_on_a_changed_step(tmp_path):
    copy_repository(tmp_path)
    (tmp_path / "exercise").write_text("a file in the place of the folder\n")
    status, output = run([sys.executable, "exercises/extend.py", "muon"], tmp_path, timeout=120)
    assert status == 2 and output.startswith("error: [Errno ") and output.count("\n") == 1, output
    (tmp_path / NAMES[2] / "optimizer.py").write_text("")
    status, output = run([sys.executable, "exercises/extend.py", "muon"], tmp_path, timeout=120)
    assert status == 2 and output.startswith("error: muon.patch does not fit step03_zero as it is here"), output


@pytest.mark.parametrize("out", ["gone/curves.png", "curves.jsonl"])
def test_plot_refuses_an_out_that_cannot_be_drawn(tmp_path, out):
    log = write_log(tmp_path / "a.jsonl", [5, 4])
    status, output = run([sys.executable, ROOT / "tools/plot.py", log, "--out", out], tmp_path, timeout=120)
    assert status == 2 and output.startswith(f"error: --out {out}: ") and "Traceback" not in output


# ------------------------------------------------------------------------------------------------- tools/memory.py
TINY = 427_072                                            # parameters


def both_job(argv):
    """Follow the storages of the second training step, and also count all of them again after each operation. Return for both ways
    the bytes of the kinds that persist, at the end, and the peak of all."""
    import contextlib
    import weakref
    from collections import Counter

    import train
    from watch import PERSISTENT, Storages, Watch, replaced_profiler, tensors
    live, kinds, counted, found = Storages(given=True), weakref.WeakKeyDictionary(), [], []

    def count(op, args, kwargs, result):
        for tensor in tensors((args, result)):
            kinds.setdefault(tensor.untyped_storage(), "other")
        counted.append(Counter())
        for storage, kind in kinds.items():
            counted[-1][kind] += storage.nbytes()

    @contextlib.contextmanager
    def watch(step, model, optimizer, args):
        live.tag_state(model, optimizer)
        states = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
        tagged = [*model.parameters(), *optimizer.params], [*states, *optimizer.masters], optimizer.grads
        for kind, of_kind in reversed([*zip(PERSISTENT, tagged)]):                 # in float32, a master is a parameter, too
            kinds.update((tensor.untyped_storage(), kind) for tensor in of_kind)
        if step == 0:
            yield
            return
        with live, Watch(after=count):
            yield
        rows = [row[1:] for row in live.timeline()]
        found.append((rows[-1][:3], max(map(sum, rows))))
        found.append((tuple(counted[-1][kind] for kind in PERSISTENT), max(map(Counter.total, counted))))
    with replaced_profiler(watch):
        train.main(argv)
    return found


@pytest.mark.parametrize("flags", ["--zero 2", "--zero 3 --recompute full"])
def test_memory_is_what_counting_again_finds(pool, flags):
    """Check watch.Storages, which learns from weak references when a storage is freed."""
    argv = f"{flags} --dtype bfloat16 --steps 2 --seq_len 64 --global_batch_size 4 --micro_batch_size 1".split()
    for (last, peak), (other_last, other_peak) in pool.call(both_job, NAMES[2], world=2, argv=argv):
        assert last == other_last and min(last) > 0
        assert sum(last) < 0.9 * peak and peak == pytest.approx(other_peak, rel=0.02)


@pytest.mark.parametrize("step, ranks, flags", [
    (NAMES[0], 1, ""), pytest.param(NAMES[2], 2, "--zero 3", marks=pytest.mark.slow),
    pytest.param(NAMES[7], 4, "--tp 2 --pp 2", marks=pytest.mark.slow)])
def test_memory_is_drawn(tmp_path, step, ranks, flags):
    out = tmp_path / "new/folder"
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}".split() if ranks > 1 else []
    flags += " --dtype float32 --steps 5 --seq_len 32 --global_batch_size 4"
    status, output = run([sys.executable, *torchrun, "tools/memory.py", f"{step}/train.py", "--out", out, *flags.split()], ROOT,
                         timeout=300)
    assert status == 0, output
    line = r"^step 3/5 .*\nmemory of a rank: ([\d.]+) MiB between steps, ([\d.]+) MiB at the peak\nstep 4/5 "
    (between, peak), = re.findall(line, output, re.M)
    if step != NAMES[7]:                                  # weights, gradients, and two moments
        assert between == f"{4 * 4 * TINY / ranks / 2**20:.1f}"
    assert float(peak) > float(between)
    pictures = sorted(out.iterdir())
    assert [picture.name for picture in pictures] == [f"memory_rank{rank}.png" for rank in range(ranks)]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize("words, message", [
    ("", "required: TRAINER, --out"), ("step03_zero/train.py", "required: --out"), ("--out x", "required: TRAINER"),
    ("gone/train.py --out x", "TRAINER gone/train.py: must be a step's train.py"),
    ("step03_zero/zero.py --out x", "TRAINER step03_zero/zero.py: must be a step's train.py"),
    ("step03_zero/train.py --out README.md/x", "--out README.md/x: cannot be written"),
    ("step03_zero/train.py --out x --compile", "--compile: does not work while every operation is watched; leave it out"),
    ("step03_zero/train.py --out x --profile=y", "--profile: does not work")])
def test_memory_refuses(monkeypatch, capsys, words, message):
    import memory
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as refused:
        memory.main(words.split())
    output = "".join(capsys.readouterr())
    assert refused.value.code == 2 and output.startswith("error: ") and message in output and output.count("\n") == 1, output
    assert not (ROOT / "x").exists()


# ------------------------------------------------------------------------------------------------ shared functions
def test_a_copy_of_the_repository_has_what_git_has_and_nothing_that_running_leaves(tmp_path):
    for name in ("tests/test_step02.py", ".gitignore", "new.py", "out/model.bin", "step01/__pycache__/x.pyc", ".venv/bin/python"):
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).write_text("__pycache__/\n/out/\n.venv/\n")
    kept = {"tests/test_step02.py", ".gitignore", "new.py"}
    copy_repository(tmp_path / "plain", tmp_path / "from")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "from", check=True)
    copy_repository(tmp_path / "git", tmp_path / "from")
    for copy in ("plain", "git"):
        assert {str(path.relative_to(tmp_path / copy)) for path in (tmp_path / copy).rglob("*") if path.is_file()} == kept


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path):
    status, output = run(["bash", "-c", "(sleep 3; touch late) & wait"], tmp_path, timeout=1)
    assert status == 124 and "did not end within 1 seconds" in output
    time.sleep(3)
    assert not (tmp_path / "late").exists()


# ------------------------------------------------------------------------------------ what the ranks say to each other
ALL_REDUCE, PAIR, OTHERS = ("allreduce_", ((4,),), None, None), ("pair", (0, 1)), ("others", (0, 1))


def message(what, peer, batch=None):
    return (*PAIR, what, ((4,),), peer, batch)


@pytest.mark.parametrize("ranks, meets", [
    ([[message("send", 1), message("recv_", 1)], [message("recv_", 0), message("send", 0)]], True),
    ([[message("send", 1), message("recv_", 1)], [message("send", 0), message("recv_", 0)]], False),            # both send first
    ([[message("send", 1, 0), message("recv_", 1, 0)], [message("send", 0, 0), message("recv_", 0, 0)]], True),   # but at once
    ([[(*PAIR, *ALL_REDUCE), (*OTHERS, *ALL_REDUCE)]] * 2, True),
    ([[(*PAIR, *ALL_REDUCE), (*OTHERS, *ALL_REDUCE)], [(*OTHERS, *ALL_REDUCE), (*PAIR, *ALL_REDUCE)]], False),
    ([[message("send", 1), (*OTHERS, *ALL_REDUCE)], [(*OTHERS, *ALL_REDUCE), message("recv_", 0)]], False),
    ([[(*PAIR, *ALL_REDUCE)], []], False)])
def test_operations_meet_one_after_the_other(ranks, meets):
    if meets:
        assert_none_waits_for_ever(ranks)
    else:
        with pytest.raises(AssertionError, match="all wait"):
            assert_none_waits_for_ever(ranks)


def misdeed(name):
    """Do one thing that gloo forgives. Two ranks run this."""
    dist.init_process_group("gloo")
    mine, sums, peer = torch.full((4,), dist.get_rank() + 1.), torch.zeros(8), 1 - dist.get_rank()
    with unforgiving():
        work = dist.all_gather_into_tensor(sums, mine, async_op=True)
        early = float(sums.sum())
        if name == "writes what is read":
            mine += 1
        if name == "writes where it comes":
            sums.zero_()
        if name == "gives memory back":
            mine.untyped_storage().resize_(0)
        if name != "forgets":
            work.wait()
        if name == "forgets a message":
            dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, sums[:4], peer)])[1].wait()
        dist.barrier()
    return early, float(sums.sum())


def test_unforgiving_gives_nothing_too_early(pool):
    for early, then in pool.call(misdeed, 2, world=2, name=""):
        assert math.isnan(early) and then == 12


@pytest.mark.parametrize("name, message", [
    ("writes what is read", r"is written to before wait\(\) of all_gather_into_tensor, started in test_tools.py"),
    ("writes where it comes", "is written to before wait"), ("gives memory back", "memory given back before wait"),
    ("forgets", "not waited for: all_gather_into_tensor"), ("forgets a message", "not waited for: isend")])
def test_unforgiving_sees(pool, name, message):
    with pytest.raises(JobFailed, match=message):
        pool.call(misdeed, 2, world=2, name=name)
