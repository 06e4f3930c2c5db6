"""No wrong number comes out in silence, and nothing that somebody needs is lost: what a run does not train on, what all ranks must
have in common, and what step 8 promises about files."""
import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import JobFailed, Refused, assert_same_run, assert_same_tensors
from jobs import assert_refused, check_job, main_job, told_job
from safetensors.torch import load_file, save_file
from steps import STEPS, clean_environment, step_dir
from test_step01 import write_config

ONE, ALL, LAST = STEPS[0], STEPS, STEPS[-1]
TINY = "--steps 4 --seq_len 16 --global_batch_size 4 --micro_batch_size 2"
slow = pytest.mark.slow


def refused(pool, step, argv, job=main_job, world=1, status=2, **more):
    """Return the only error line of a run that must be refused: all ranks must end with status 2, or rank 0 with the given
    status."""
    with pytest.raises(JobFailed) as failed:
        pool.call(job, step, world=world, argv=argv if isinstance(argv, list) else argv.split(), **more)
    text = str(failed.value)
    assert isinstance(failed.value, Refused) or f"--- rank 0: {status}\n" in text, text
    said = re.findall("error: .*", text)
    assert len(said) == 1 and "Traceback" not in text, text
    return said[0]


# ------------------------------------------------------------------------------------- what would train on other numbers
def test_a_family_reads_only_its_own_fields(pool, tmp_path):
    """Check that a Llama with a stray number of experts stays a Llama, and is not saved as a mixture of experts."""
    folder, out = write_config(tmp_path / "stray", num_local_experts=4, num_experts_per_tok=2), tmp_path / "out"
    pool.call(main_job, LAST, argv=f"{TINY} --steps 1 --model {folder} --save {out}".split())
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not [name for name in load_file(out / "model.safetensors") if "experts" in name]


@pytest.mark.parametrize("step", [STEPS[4], LAST])
@pytest.mark.parametrize("seq_len", [1, 2, 3])
def test_short_sequences_are_what_they_are_in_step_1(pool, step, seq_len):
    flags = f"--dtype float64 --steps 2 --global_batch_size 4 --seq_len {seq_len}"
    assert_same_run(pool.train(step, flags), pool.reference(ONE, flags), 1e-9)
    if step != "step05_cp":
        assert_same_run(pool.train(step, f"{flags} --pp 2", world=2), pool.reference(ONE, flags), 1e-9)
    for mode in ("zigzag", "ring", "allgather", "ulysses") if seq_len == 2 else []:
        if mode in ("ring", "ulysses"):                   # the other modes give each rank two chunks
            assert_same_run(pool.train(step, f"{flags} --cp 2 --cp_mode {mode}", world=2), pool.reference(ONE, flags), 1e-9)
        else:
            assert_refused(pool, step, 2, f"{flags} --cp 2 --cp_mode {mode}", "--seq_len 2: must be a multiple of 4")


@pytest.fixture(scope="module")
def model(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    pool.call(main_job, ONE, argv=["--steps", "0", "--save", str(folder)])
    return folder


def test_files_that_lie_beside_a_model_are_not_read(pool, model, tmp_path):
    shutil.copytree(model, tmp_path / "one")
    weights = load_file(model / "model.safetensors")
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    save_file(zeros, tmp_path / "one/model_old.safetensors")
    two = tmp_path / "two"
    two.mkdir()
    names, file = sorted(weights), "model-0000{}-of-00002.safetensors".format
    parts = [names[::2], names[1::2]]
    for i, part in enumerate(parts, 1):
        save_file({name: weights[name] for name in part}, two / file(i))
    save_file(zeros, two / "model-00003-of-00003.safetensors")
    where = {name: file(i) for i, part in enumerate(parts, 1) for name in part}
    (two / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=where)))
    for folder in (tmp_path / "one", two):
        assert_same_tensors(pool.train(ONE, f"--steps 0 --init_from {folder}").weights, weights, 0.0)
    (two / file(1)).unlink()
    assert f"--init_from {two}: not found or corrupt (No such file" in refused(pool, ONE, f"--steps 0 --init_from {two}")


def test_quantized_weights_are_no_numbers(pool, model, tmp_path):
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(torch.int8)}, tmp_path / "model.safetensors")
    line = refused(pool, ONE, f"--steps 0 --init_from {tmp_path}")
    assert f"{name} is I8 [192, 64]; --model tiny needs floating-point numbers of" in line
    raw = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | dict(quantization_config=dict(quant_method="fp8"))))
    assert "quantization_config is " in refused(pool, ONE, f"--steps 0 --model {tmp_path}")


@pytest.mark.parametrize("step", [ONE, LAST])
def test_weights_of_the_same_sizes_and_another_model(pool, model, tmp_path, step):
    shutil.copytree(model, tmp_path / "other")
    raw = json.loads((model / "config.json").read_text())
    for rope in ("rope_parameters", "rope_scaling"):
        raw.pop(rope, None)
    (tmp_path / "other/config.json").write_text(json.dumps(raw | dict(rope_theta=10000.0)))
    line = refused(pool, step, f"--steps 0 --init_from {tmp_path / 'other'}")
    assert "its rope_theta is 10000.0, but --model tiny has 500000.0" in line
    pool.call(main_job, step, argv=f"--steps 0 --init_from {tmp_path / 'other'} --model {tmp_path / 'other'}".split())


@pytest.mark.parametrize("step", ALL)
def test_a_loss_that_is_not_finite_ends_every_step_with_status_3(pool, tmp_path, step):
    log = tmp_path / "log"
    argv = f"{TINY} --lr 9e7 --warmup 0 --grad_clip 0 --log_file {log} --save {tmp_path / 'save'}"
    line = refused(pool, step, argv, status=3, world=1 if step == ONE else 2)
    assert "stopping without saving" in line and os.listdir(tmp_path / "save") == []
    assert "NaN" not in log.read_text()


def infinite_weights_job(argv):
    """Train with an optimizer whose updates make weights infinite."""
    import train
    step = train.Optimizer.step

    def broken(self, lr):
        step(self, lr)
        for param, master in zip(self.params, self.masters):
            param.data[..., -1] = master[..., -1] = float("inf")
    with patch.object(train.Optimizer, "step", broken):
        train.main(argv)


def test_weights_that_are_not_finite_are_no_checkpoint(pool, tmp_path):
    line = refused(pool, LAST, f"{TINY} --steps 1 --checkpoint {tmp_path}", infinite_weights_job, world=2, status=3)
    assert "weights or optimizer states are not finite" in line
    assert not [name for name in os.listdir(tmp_path) if not name.endswith(".tmp") and name != ".lock"]


# ------------------------------------------------------------------------------------- what only some ranks see
def on_one_rank_job(argv, rank, instead):
    """Train, but give rank `rank` other arguments, as if it saw other files."""
    main_job(instead if int(os.environ["RANK"]) == rank else argv)


@pytest.mark.parametrize("step", STEPS[1:])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_the_data_ends_all(pool, tmp_path, step, rank):
    np.save(tmp_path / "tokens.npy", np.arange(2000) % 256)
    argv = f"{TINY} --dataset {tmp_path / 'tokens.npy'}".split()
    line = refused(pool, step, argv, on_one_rank_job, world=2, rank=rank, instead=[*argv, "--dataset", "gone.npy"])
    assert line.startswith("error: " + "rank 1: " * rank + "--dataset gone.npy: not a token file (") and "No such file" in line


SAME = "start all ranks with the same flags and files"


@pytest.mark.parametrize("step", STEPS[1:])
def test_ranks_that_were_started_with_other_flags_or_read_other_data_do_not_train(pool, tmp_path, step):
    tokens = np.arange(2000) % 256
    np.save(tmp_path / "tokens.npy", tokens)
    tokens[::2] += 1
    np.save(tmp_path / "other.npy", tokens)
    np.save(tmp_path / "longer.npy", np.arange(2001) % 256)
    argv = f"{TINY} --dataset {tmp_path / 'tokens.npy'}".split()
    for name, value in dict(lr=1e-4, seed=7, steps=5).items():
        line = refused(pool, step, argv, on_one_rank_job, world=2, rank=1, instead=[*argv, f"--{name}", str(value)])
        assert re.fullmatch(rf"error: {name} differs between ranks: \S+ on rank 0, {value} on rank 1; {SAME}", line), line
    for name, count in dict(other=2000, longer=2001).items():                      # the same file name, as on two machines
        line = refused(pool, step, argv, other_data_job, world=2, rank=1, other=str(tmp_path / f"{name}.npy"))
        pattern = rf"error: data differs between ranks: 2000 tokens, \w+ on rank 0, {count} tokens, \w+ on rank 1; {SAME}"
        assert re.fullmatch(pattern, line), line


def other_data_job(argv, rank, other):
    """Train, but let rank `rank` read another file under the same name."""
    import data
    open_token_file = data.open_token_file
    name = other if int(os.environ["RANK"]) == rank else argv[argv.index("--dataset") + 1]
    with patch.object(data, "open_token_file", lambda path: open_token_file(name)):
        main_job(argv)


@pytest.mark.parametrize("step", STEPS[1:])
def test_ranks_that_read_other_weights_under_the_same_name_do_not_train(pool, tmp_path, step):
    for folder, seed in (("weights", 1), ("other", 2)):
        pool.call(main_job, ONE, argv=["--steps", "0", "--seed", str(seed), "--save", str(tmp_path / folder)])
    argv = f"{TINY} --init_from {tmp_path / 'weights'}".split()
    line = refused(pool, step, argv, other_weights_job, world=2, rank=1, other=str(tmp_path / "other"))
    assert re.fullmatch(rf"error: content of --init_from differs between ranks: \w+ on rank 0, \w+ on rank 1; {SAME}", line), line


def other_weights_job(argv, rank, other):
    """Train, but let rank `rank` find other weights under the same name, as on another machine."""
    import mesh
    import weights
    digest, open_weights = mesh.weights_digest, weights.open_weights
    if int(os.environ["RANK"]) != rank:
        return main_job(argv)
    with patch.object(mesh, "weights_digest", lambda name: digest(other)), \
         patch.object(weights, "open_weights", lambda name: open_weights(other)):
        main_job(argv)


def test_a_weight_that_only_the_last_stage_misses(pool, tmp_path):
    pool.call(main_job, ONE, argv=["--steps", "0", "--save", str(tmp_path)])
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    assert "rank 1: --init_from" in refused(pool, "step06_pp", f"{TINY} --pp 2 --init_from {tmp_path}", world=2)


# ------------------------------------------------------------------------------------- what is written
class Killed(BaseException):
    pass


def killed_while_saving_job(argv, at, shard_bytes):
    """Save a model, but die before change number `at` on the disk. Return whether the save ended before that."""
    import functools

    import weights
    import train
    calls = itertools.count()

    def counted(function):
        def call(*arguments, **named):
            if next(calls) >= at:                         # a dead process changes nothing any more
                raise Killed
            return function(*arguments, **named)
        return call
    split = functools.partial(weights.split_torch_state_dict_into_shards, max_shard_size=shard_bytes)
    with (patch("os.rename", counted(os.rename)), patch("os.mkdir", counted(os.mkdir)),
          patch.multiple(weights, save_file=counted(weights.save_file), split_torch_state_dict_into_shards=split)):
        try:
            train.main(argv)
        except Killed:
            return False
    return True


def read_model(folder):
    """Return the weights of a saved model, or None if files are missing."""
    index, weights = folder / "model.safetensors.index.json", {}
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    if not (folder / "config.json").exists() or not all((folder / file).exists() for file in files):
        return None
    for file in files:
        weights |= load_file(folder / file)
    return weights


def seed_of(folder, models):
    """Return the seed of the model that is in the folder, or None if none is there as a whole."""
    read = read_model(folder)
    return next((seed for seed, weights in models.items()
                 if read and read.keys() == weights.keys() and all(torch.equal(weights[name], read[name]) for name in read)), None)


@pytest.fixture(scope="module")
def models(pool):
    return {seed: pool.train(ONE, f"--steps 0 --seed {seed}").weights for seed in (1, 2, 3)}


@pytest.mark.parametrize("shard_bytes", [pytest.param(200_000, marks=slow), 10**9])
def test_killed_at_any_moment_of_a_save_no_part_of_a_model_has_its_name(pool, models, tmp_path, shard_bytes):
    """Check that step 8 gives a model its name only when it is complete, and that the next save is not disturbed by what a killed
    one left."""
    pool.call(main_job, ONE, argv=f"--steps 0 --seed 1 --save {tmp_path / '1'}".split())
    seen, at = [], 1
    while not seen or seen[-1] is None:
        folder = tmp_path / f"killed {at}" / "save"
        argv = ["--steps", "0", "--init_from", str(tmp_path / "1"), "--save", str(folder)]
        ended = pool.call(killed_while_saving_job, LAST, argv=argv, at=at, shard_bytes=shard_bytes)[0]
        seen.append(seed_of(folder, models))
        assert seen[-1] == (1 if ended else None) and (ended or not folder.exists() or not os.listdir(folder))
        if not ended:
            pool.call(main_job, LAST, argv=["--steps", "0", "--seed", "2", "--save", str(folder)])
            assert seed_of(folder, models) == 2
        assert os.listdir(folder.parent) == ["save"]
        at += 1
    assert at > 4


@pytest.mark.parametrize("step, world", [(ONE, 1), ("step02_dp", 2), (LAST, 2)])
def test_a_directory_that_is_not_empty_is_refused(pool, tmp_path, step, world):
    (tmp_path / "precious").write_text("mine")
    line = refused(pool, step, f"{TINY} --save {tmp_path}", world=world)
    assert line == f"error: --save {tmp_path}: must be empty; choose a new or an empty directory"
    assert os.listdir(tmp_path) == ["precious"] and (tmp_path / "precious").read_text() == "mine"


def disk_full_job(argv, bytes):
    import resource
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))                  # to the writer, this is like a full disk
    out, error = io.StringIO(), io.StringIO()             # a worker's own are files, and would be limited
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            main_job(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        print(out.getvalue() + error.getvalue(), end="")


def test_a_full_disk_ends_a_save_in_a_line(pool, tmp_path):
    with pytest.raises(JobFailed) as full:
        pool.call(disk_full_job, LAST, world=2, argv=f"{TINY} --steps 1 --save {tmp_path / 'model'}".split(), bytes=100_000)
    said = re.findall("error: rank.*", str(full.value))
    assert len(said) == 1 and "rank 0, weights.py:" in said[0] and "File too large" in said[0], said
    assert os.listdir(tmp_path / "model") == []


def test_a_full_disk_ends_a_checkpoint_in_a_line(pool, tmp_path):
    line = refused(pool, LAST, f"{TINY} --checkpoint {tmp_path} --save_every 1", disk_full_job, world=1, bytes=100_000)
    assert "cannot be written (" in line and "File too large" in line and "available checkpoints: none" in line


def test_a_log_is_cut_at_the_half_line_of_a_killed_run_and_at_no_foreign_one(pool, tmp_path):
    log, argv = tmp_path / "log", f"{TINY} --checkpoint {tmp_path / 'run'} --log_file {tmp_path / 'log'}"
    pool.call(main_job, LAST, argv=f"{argv} --steps 1".split())
    first = log.read_text()
    log.write_text(first + "my notes\n")
    assert "line 2 is not from a training log" in refused(pool, LAST, f"{argv} --steps 2 --resume")
    assert log.read_text() == first + "my notes\n"
    log.write_text(first + '{"step": 1, "lo')
    pool.call(main_job, LAST, argv=f"{argv} --steps 2 --resume".split())
    assert log.read_text().startswith(first) and [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize("change, named", [
    (lambda lines: lines, False), (lambda lines: lines[:1], True), (lambda lines: [lines[0], *lines], True),
    (lambda lines: [], True), (lambda lines: [lines[0], lines[1].replace('"tokens": 128', '"tokens": 256')], True)])
def test_a_log_that_is_not_that_of_the_steps_done_is_named(pool, tmp_path, change, named):
    log, argv = tmp_path / "log", f"{TINY} --checkpoint {tmp_path / 'run'} --log_file {tmp_path / 'log'}"
    pool.call(main_job, LAST, argv=f"{argv} --steps 2".split())
    lines = change(log.read_text().splitlines(True))
    log.write_text("".join(lines))
    pool.call(main_job, LAST, argv=f"{argv} --steps 3 --resume".split())
    assert ("is not the log of the 2 steps that this run has done" in pool.output) == named
    assert log.read_text().startswith("".join(lines)) and json.loads(log.read_text().splitlines()[-1])["step"] == 2


@pytest.mark.parametrize("step", [ONE, LAST])
def test_a_log_file_of_others_is_not_overwritten(pool, tmp_path, step):
    (tmp_path / "precious").write_text("my notes\n")
    assert "is not a training log" in refused(pool, step, f"{TINY} --log_file {tmp_path / 'precious'}")
    assert (tmp_path / "precious").read_text() == "my notes\n"
    for again in (False, True):                           # a log of its own is started over, and it says so
        pool.call(main_job, step, argv=f"{TINY} --steps 2 --log_file {tmp_path / 'log'}".split())
        assert ("replaces the log of an earlier run" in pool.output) == again
        assert [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()] == [0, 1]


@slow
def test_whatever_becomes_of_the_output_the_model_and_the_log_are_whole(tmp_path):
    command = [sys.executable, str(step_dir(LAST) / "train.py"), *f"{TINY} --save model --log_file log.jsonl".split()]
    done = subprocess.run(["bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", *command], cwd=tmp_path, text=True,
                          capture_output=True, timeout=300, env=clean_environment() | dict(PYTHONUNBUFFERED="1"))
    assert done.returncode == 0 and not done.stderr and done.stdout.count("\n") == 1, done.stderr
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    assert read_model(tmp_path / "model") and sorted(os.listdir(tmp_path)) == ["log.jsonl", "model"]


# ------------------------------------------------------------------------------------- checkpoints
@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Make checkpoints after two and after four steps, on two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    pool.call(main_job, LAST, world=2, argv=f"{TINY} --checkpoint {folder} --save_every 2".split())
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def goes_on(folder, more=""):
    return f"{TINY} --steps 6 --checkpoint {folder} --resume {more}"


def test_ranks_that_see_other_checkpoints_do_not_go_on(pool, copy, tmp_path):
    argv = goes_on(copy).split()
    stale = shutil.copytree(copy, copy.parent / "stale")
    index = stale / "step_00000004" / "index.json"
    index.write_text(index.read_text().replace('"weight_decay": 0.1', '"weight_decay": 0.2'))
    for other in (tmp_path / "unmounted", stale):
        with pytest.raises(JobFailed) as failed:
            pool.call(elsewhere_job, LAST, world=2, argv=argv, rank=1, folder=str(other))
        assert "index.json is missing or corrupt, or differs between ranks" in str(failed.value)


def elsewhere_job(argv, rank, folder):
    """Train, but let rank `rank` see other files in the checkpoint folder."""
    import disk
    index_of, at_home = disk.index_of, int(os.environ["RANK"]) != rank
    with patch.object(disk, "index_of", lambda path: index_of(path if at_home else Path(folder, path.name))):
        main_job(argv)


def test_only_own_names_are_touched(pool, copy):
    others = ["project.tmp", "step_00000002_best", "step_best", "step_2", "xstep_00000009", "step_00000009.tmp.d"]
    for name in others:
        (copy / name).mkdir()
        (copy / name / "precious").touch()
    (copy / "step_00000003.tmp").mkdir()                  # left by a run that was killed
    pool.call(main_job, LAST, argv=f"{goes_on(copy)} --save_every 1 --keep 1".split())
    assert sorted(os.listdir(copy)) == sorted([".lock", "step_00000006", *others])
    assert all((copy / name / "precious").exists() for name in others)


def test_two_runs_do_not_share_a_directory(pool, tmp_path):
    tmp_path.joinpath(".lock").write_text("somebody's notes")
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run is using it" in refused(pool, LAST, f"{TINY} --checkpoint {tmp_path}", world=2)
    pool.call(main_job, LAST, world=2, argv=f"{TINY} --checkpoint {tmp_path}".split())        # its owner is dead
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000004"]
    assert (tmp_path / ".lock").read_text() == "somebody's notes"


def test_two_runs_do_not_save_to_one_directory(pool, tmp_path):
    with open(tmp_path / "m.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run is using it" in refused(pool, LAST, f"{TINY} --save {tmp_path / 'm'}", world=2)
    (tmp_path / "m.unfinished").mkdir()
    (tmp_path / "m.unfinished" / ".tmpiTYBNJ").touch()    # safetensors leaves such a file when it is killed
    pool.call(main_job, LAST, world=2, argv=f"{TINY} --save {tmp_path / 'm'}".split())
    assert read_model(tmp_path / "m") and os.listdir(tmp_path) == ["m"]


def status_job(argv):
    try:
        main_job(argv)
    except SystemExit as end:
        return end.code
    return 0


def test_a_run_that_is_done_is_a_success_however_often_it_is_started(pool, tmp_path):
    model = tmp_path / "model"
    argv = f"{TINY} --checkpoint {tmp_path / 'run'} --save {model} --resume --steps"
    for _ in range(3):
        assert pool.call(status_job, LAST, world=2, argv=f"{argv} 2".split()) == [0, 0]
    assert pool.output.endswith(f"--save {model}: all 2 steps are done, and the model is saved\n")
    assert f"--save {model}: must be empty" in refused(pool, LAST, f"{argv} 3", world=2)
    assert "saved with seq_len 16" in refused(pool, LAST, f"{argv} 2 --seq_len 32", world=2)
    (model / "config.json").rename(model / "notes.txt")
    assert f"--save {model}: must be empty" in refused(pool, LAST, f"{argv} 2", world=2)


def test_what_would_keep_the_model_from_its_place_is_found_before_training(pool, tmp_path):
    save, mine = tmp_path / "m", tmp_path / "mine.unfinished"
    mine.mkdir()
    (mine / "precious").touch()
    (tmp_path / "file.unfinished").touch()
    (tmp_path / "link.unfinished").symlink_to(mine)
    for flags, message in {f"--save {save} --checkpoint {save}": "--checkpoint",
                           f"--save {save} --log_file {save}/log": "--log_file",
                           f"--save {save} --profile {save}/trace": "--profile",
                           f"--save {save} --log_file {save}.unfinished/log": "--log_file",
                           f"--save {tmp_path / 'mine'}": "killed run left it",
                           f"--save {tmp_path / 'file'}": "killed run left it",
                           f"--save {tmp_path / 'link'}": "killed run left it",
                           f"--save {tmp_path / 'mine.unfinished'}": "must not end in .unfinished"}.items():
        assert message in refused(pool, LAST, f"{TINY} {flags}", check_job), flags
    assert (mine / "precious").exists()


def other_directory_job(argv, other):
    """Train, but let rank 1 write its part of the checkpoints to another directory, as on a node that does not see rank 0's."""
    import resume
    load = resume.Checkpoints.load

    def and_leave(self):
        steps = load(self)
        self.args.checkpoint = other if os.environ["RANK"] == "1" else self.args.checkpoint
        return steps
    with patch.object(resume.Checkpoints, "load", and_leave), patch.object(resume.time, "sleep"):
        main_job(argv)


def test_a_checkpoint_that_rank_0_does_not_see_whole_is_not_complete(pool, tmp_path):
    argv = f"{TINY} --checkpoint {tmp_path / 'run'} --save_every 1"
    (tmp_path / "other").mkdir()
    line = refused(pool, LAST, argv, other_directory_job, world=2, other=str(tmp_path / "other"))
    assert "step_00000001: rank_00001.safetensors is missing; all ranks must write to the same directory" in line, line
    assert os.listdir(tmp_path / "run") == [".lock", "step_00000001.tmp"]


def left_over_job(argv):
    """Train, but let nothing delete files that are left over."""
    with patch("shutil.rmtree"), patch("time.sleep"):
        main_job(argv)


def test_a_file_of_another_run_is_not_saved_as_ours(pool, tmp_path):
    (tmp_path / "step_00000001.tmp").mkdir()
    (tmp_path / "step_00000001.tmp" / "rank_00007.safetensors").touch()
    line = refused(pool, LAST, f"{TINY} --checkpoint {tmp_path} --save_every 1", left_over_job, world=2)
    assert "step_00000001: rank_00007.safetensors is not a file of this checkpoint" in line, line


def not_renamed_job(argv):
    """Train, but let nobody rename an outdated checkpoint, as in another user's directory."""
    rename = Path.rename

    def refuse(self, target):
        if self.suffix != ".tmp":
            raise PermissionError(13, "not permitted", str(self))
        return rename(self, target)
    with patch.object(Path, "rename", refuse):
        main_job(argv)


def test_an_outdated_checkpoint_that_cannot_be_renamed_ends_nothing(pool, tmp_path):
    pool.call(not_renamed_job, LAST, world=2, argv=f"{TINY} --checkpoint {tmp_path} --save_every 1 --keep 1".split())
    assert f"{tmp_path}/step_00000001 cannot be deleted (" in pool.output
    assert sorted(os.listdir(tmp_path)) == [".lock", *(f"step_0000000{step}" for step in (1, 2, 3, 4))]


def umask_job(argv, umask):
    before = os.umask(umask)
    try:
        main_job(argv)
    finally:
        os.umask(before)


@pytest.mark.parametrize("step", [ONE, LAST])
@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_everyone_who_may_read_the_folder_may_read_its_files(pool, tmp_path, step, umask):
    more = f"--checkpoint {tmp_path / 'run'}" * (step == LAST)
    pool.call(umask_job, step, argv=f"{TINY} --steps 1 --save {tmp_path / 'model'} {more}".split(), umask=umask)
    files = [path for path in tmp_path.rglob("*.*s*") if path.is_file() and path.name != ".lock"]
    assert len(files) >= 2 and {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}, files


def synced_job(argv):
    """Save a model. Return the order in which files go to the disk and the folder gets its name."""
    order = []
    rename, sync = os.rename, os.sync
    with (patch("os.sync", lambda: order.append("sync") or sync()),
          patch("os.rename", lambda *paths: order.append("rename") or rename(*paths))):
        main_job(argv)
    return order


def test_a_saved_model_survives_a_power_loss(pool, tmp_path):
    argv = f"{TINY} --steps 0 --save {tmp_path / 'model'}".split()
    assert pool.call(synced_job, LAST, argv=argv)[0] == ["sync", "rename", "sync"]


OTHER = {"--seq_len 32": "seq_len 16, but this run has 32", "--global_batch_size 8": "global_batch_size 4, but this run has 8",
         "--dataset {tokens}": "this run has 466195 tokens", "--model {moe}": "num_local_experts 0, but this run has 8",
         "--model {rope}": "rope_theta", "--model {eps}": "rms_norm_eps",
         "--model {heads}": "num_attention_heads 8, but this run has 4",
         "--weight_decay 0": "weight_decay 0.1, but this run has 0.0",
         "--grad_clip 0.5": "grad_clip 1.0, but this run has 0.5", "--warmup 0": "warmup 5, but this run has 0",
         "--lr_schedule constant": "lr_schedule cosine, but this run has constant", "--seed 3": "seed 42, but this run has 3",
         "--dtype float64": "dtype float32, but this run has float64"}


def test_another_run_is_not_gone_on_with(pool, copy, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(466195) % 256)
    tiny = dict(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=4, head_dim=8, rms_norm_eps=1e-5, rope_theta=500000.0)
    changed = dict(rope=dict(rope_theta=10000.0), eps=dict(rms_norm_eps=1e-6),
                   heads=dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16),
                   moe=dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2))
    names = {name: write_config(tmp_path / name, **{**tiny, **change}) for name, change in changed.items()}
    names["tokens"] = tmp_path / "tokens.npy"
    for flags, message in OTHER.items():
        with pytest.raises(Refused) as other:
            pool.call(main_job, LAST, argv=goes_on(copy, flags.format(**names)).split())
        assert message in str(other.value), other.value
    same = write_config(tmp_path / "same", **tiny)
    more = f"--model {same} --lr 1e-4 --tp 2 --recompute full"
    pool.call(main_job, LAST, world=2, argv=goes_on(copy, more).split())


def damages(folder):
    """Return {name: (a function that damages the newest checkpoint, what the trainer then says)}."""
    data, index = folder / "rank_00001.safetensors", folder / "index.json"

    def zeroed():
        with open(data, "r+b") as file:
            file.seek(data.stat().st_size // 2)
            file.write(bytes(64))

    def changed(change):
        text = json.loads(index.read_text())
        change(text)
        index.write_text(json.dumps(text))

    def unfilled():
        """Remove a box from the file, but make the digests right."""
        tensors = load_file(data)
        tensors.pop(next(key for key in tensors if ".weight[" in key))
        save_file(tensors, data)
        changed(lambda text: text["digests"].update({data.name: hashlib.sha256(data.read_bytes()).hexdigest()}))
    return {"index cut": (lambda: os.truncate(index, 1000), "index.json is missing or corrupt"),
            "index of another step": (lambda: changed(lambda text: text.update(steps=6)), "index.json is missing or corrupt"),
            "file gone": (data.unlink, "rank_00001.safetensors is missing"),
            "one too many": (lambda: shutil.copy(data, folder / "rank_00002.safetensors"),
                             "rank_00002.safetensors is not a file of this checkpoint"),
            "zeroed": (zeroed, "rank_00001.safetensors has changed since it was written"),
            "unfilled": (unfilled, "elements of model.")}


@pytest.mark.parametrize("what, world", [*((what, 1) for what in damages(Path())), ("zeroed", 2), ("unfilled", 2)])
def test_a_damaged_checkpoint_is_named_and_the_older_one(pool, copy, what, world):
    damage, message = damages(copy / "step_00000004")[what]
    damage()
    with pytest.raises(Refused) as damaged:
        pool.call(main_job, LAST, world=world, argv=goes_on(copy).split())
    line = str(damaged.value).splitlines()[-1]
    assert "--resume: step_00000004 is corrupt (" in line and message in line, line
    assert "to continue from step_00000002, which is older and intact, move the newer ones away" in line, line
    if what == "zeroed":
        (copy / "step_00000004").rename(copy / "step_00000004.away")
        trained = pool.train(LAST, goes_on(copy), world=world)
        assert [line["step"] for line in trained.lines] == [2, 3, 4, 5]
        assert sorted(os.listdir(copy)) == [".lock", "step_00000002", "step_00000004.away", "step_00000006"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_save_too(pool, tmp_path, number):
    assert pool.call(told_job, LAST, world=2, argv=f"{TINY} --checkpoint {tmp_path}".split(), number=number) == [143, 143]
    assert f"stopped by {number.name} after step 2" in pool.output
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000002"]


def test_told_to_end_in_the_last_step_it_ends_as_any_run(pool, tmp_path):
    argv = f"{TINY} --steps 2 --checkpoint {tmp_path / 'run'} --save {tmp_path / 'model'}".split()
    assert pool.call(told_job, LAST, world=2, argv=argv, number=signal.SIGTERM) == [None, None]
    assert "stopped by" not in pool.output and sorted(os.listdir(tmp_path / "run")) == [".lock", "step_00000002"]
    assert (tmp_path / "model/model.safetensors").exists()
