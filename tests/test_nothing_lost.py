"""Nothing lost, nothing silent: files that somebody needs, ranks that see different things, input that is none, a full disk."""
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
from jobs import assert_refused, check_job, main_job
from steps import STEPS, clean_environment, step_dir
from test_step01 import LLAMA3, SMALL, tokenizer, write_config  # noqa: F401

ONE, ALL, LAST = STEPS[0], STEPS, STEPS[-1]
TINY = "--steps 4 --seq_len 16 --global_batch_size 4 --micro_batch_size 2"
slow = pytest.mark.slow


def refused(pool, step, argv, job=main_job, world=1, status=2, **more):
    """The one line. Rank 0 ends with the status, and so do all others, unless they had nothing left to do."""
    with pytest.raises(JobFailed) as failed:
        pool.call(job, step, world=world, argv=argv if isinstance(argv, list) else argv.split(), **more)
    text = str(failed.value)
    assert isinstance(failed.value, Refused) or f"--- rank 0: {status}\n" in text, text
    said = re.findall("error: .*", text)
    assert len(said) == 1 and "Traceback" not in text, text
    return said[0]


# ------------------------------------------------------------------------------------- flags
@pytest.mark.parametrize("flags, message", [
    ("--weight_decay nan", "--weight_decay nan: must be a number below 100,000,000"), ("--lr inf", "--lr inf: must be"),
    ("--grad_clip nan", "nan"), ("--lr=-inf", "--lr -inf"),
    ("--global_batch_size 1000000007", "--global_batch_size 1000000007: must be a number below"),
    ("--global_batch_size 99999989", "micro_batch_size could be 1"), ("--steps 1000000000000", "--steps 1000000000000"),
    ("--save ", "--save is empty"), ("--init_from ", "--init_from is empty"), ("--model ", "--model is empty")])
def test_flags_that_are_no_numbers_or_empty(pool, flags, message):
    assert message in refused(pool, ONE, flags.split(" "), check_job, world_size=1)


@pytest.mark.parametrize("flags", ["--bucket_mb nan", "--bucket_mb 1e300"])
def test_a_bucket_that_is_no_size(pool, flags):
    assert_refused(pool, "step02_dp", 2, flags, "must be a number below")


# ------------------------------------------------------------------------------------- config.json
WRONG = [dict(vocab_size="257"), dict(vocab_size=1.5), dict(vocab_size=True), dict(vocab_size=10**20), dict(hidden_size=None),
         dict(hidden_size=0), dict(hidden_size=-64), dict(intermediate_size=[]), dict(num_hidden_layers=0),
         dict(num_hidden_layers="3"), dict(num_attention_heads=0), dict(num_attention_heads=0, head_dim=None),
         dict(num_attention_heads="8", head_dim=None), dict(num_key_value_heads=-2), dict(head_dim=7), dict(head_dim=1),
         dict(head_dim=-8), dict(head_dim="8"), dict(rms_norm_eps=None), dict(rms_norm_eps="1e-5"), dict(rms_norm_eps=0),
         dict(rope_theta=None), dict(rope_theta="1"), dict(rope_theta=float("nan")), dict(rope_theta=-1),
         dict(rope_scaling="llama3"), dict(rope_scaling=["llama3"]), dict(rope_scaling=dict(rope_type="llama3")),
         dict(rope_scaling={**LLAMA3, "factor": "8"}), dict(rope_scaling={**LLAMA3, "factor": None}), dict(rope_parameters=3),
         dict(initializer_range=float("inf")), dict(max_position_embeddings=0), dict(model_type=["llama"]), dict(model_type=None)]


@pytest.mark.parametrize("step", [ONE, LAST])
def test_a_config_that_is_none(pool, tmp_path, step):
    for i, changes in enumerate(WRONG):
        write_config(tmp_path / str(i), **changes)
        said = refused(pool, step, f"--model {tmp_path / str(i)}", check_job, world_size=1)
        assert f"--model {tmp_path / str(i)}: " in said, changes
    for text in ("[]", "null", "3", '"x"', "{", "", "\0"):
        (tmp_path / "0" / "config.json").write_text(text)
        assert "not a config.json" in refused(pool, step, f"--model {tmp_path / '0'}", check_job, world_size=1), text
    for fine in (dict(), dict(num_key_value_heads=None), dict(head_dim=None), dict(rope_theta=3580165449.0),
                 dict(rope_scaling=LLAMA3)):
        pool.call(check_job, step, argv=["--model", str(write_config(tmp_path / "0", **fine))], world_size=1)


@pytest.mark.parametrize("step", STEPS[6:])
@pytest.mark.parametrize("experts", [
    dict(), dict(num_local_experts=0, num_experts_per_tok=2), dict(num_local_experts=None, num_experts_per_tok=2),
    dict(num_local_experts=8), dict(num_local_experts=8, num_experts_per_tok=0),
    dict(num_local_experts=8, num_experts_per_tok="2")])
def test_a_mixtral_without_experts_does_not_become_dense(pool, tmp_path, step, experts):
    folder = write_config(tmp_path, model_type="mixtral", **experts)
    assert "experts" in refused(pool, step, f"--model {folder}", check_job, world_size=1)


# ------------------------------------------------------------------------------------- data
def text_cases(folder):
    (folder / "numbers.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    (folder / "nulls.jsonl").write_text('{"text": "the cat"}\n{"text": null}\n')
    (folder / "empty.txt").touch()
    (folder / "damaged.parquet").write_text("PAR1 but nothing more")
    (folder / "strange.xyz").write_text("text")
    return {"numbers.jsonl": "not every document has a text", "nulls.jsonl": "not every document has a text", "empty.txt": "",
            "damaged.parquet": "no text, json or parquet", "strange.xyz": "no text, json or parquet file"}


def test_texts_that_are_there_are_not_said_to_be_missing(pool, tmp_path, tokenizer):  # noqa: F811
    for name, message in text_cases(tmp_path).items():
        line = refused(pool, ONE, f"--dataset {tmp_path / name} --tokenizer {tokenizer}")
        assert message in line and "no such file" not in line, line
    for name in ("text.TXT", "text.md"):
        (tmp_path / name).write_text("the cat sat on a mat\n" * 40)
        pool.call(main_job, ONE, argv=f"{TINY} --steps 1 --dataset {tmp_path / name} --tokenizer {tokenizer}".split())


def test_tokens_that_are_none(pool, tmp_path):
    np.save(tmp_path / "negative.npy", np.full(1000, -3))
    np.savez(tmp_path / "archive", np.zeros(1000, dtype=np.int64))
    os.rename(tmp_path / "archive.npz", tmp_path / "archive.npy")
    assert "token -3, but the model's vocabulary is 256" in refused(pool, ONE, f"--dataset {tmp_path / 'negative.npy'}")
    assert "not a file of tokens" in refused(pool, ONE, f"--dataset {tmp_path / 'archive.npy'}")
    tokens = np.zeros(1000, dtype=np.int32)
    tokens[3 * 4 * 16 + 5] = 999                          # of the fourth step
    np.save(tmp_path / "late.npy", tokens)
    with pytest.raises(Refused) as late:
        pool.call(main_job, ONE, argv=f"{TINY} --dataset {tmp_path / 'late.npy'}".split())
    assert "tokens from 0 to 999 in step 3, the vocabulary is 256" in str(late.value) and "Traceback" not in str(late.value)
    pool.call(main_job, ONE, argv=f"{TINY} --steps 3 --dataset {tmp_path / 'late.npy'}".split())


def asked_job(argv):
    """What AutoTokenizer is asked with."""
    from unittest.mock import patch

    import transformers
    with patch.object(transformers.AutoTokenizer, "from_pretrained", side_effect=KeyError) as asked:
        try:
            main_job(argv)
        except SystemExit:
            return asked.call_args.kwargs


def test_a_tokenizers_own_code_is_not_run(pool, tmp_path):
    (tmp_path / "text.txt").write_text("text")
    asked = pool.call(asked_job, ONE, argv=["--dataset", str(tmp_path / "text.txt"), "--tokenizer", "x"])
    assert asked[0] == dict(trust_remote_code=False)


@pytest.mark.parametrize("step", STEPS[4:])
@pytest.mark.parametrize("seq_len", [1, 2, 3])
def test_short_sequences_are_what_they_are_in_step_1(pool, step, seq_len):
    flags = f"--dtype float64 --steps 2 --global_batch_size 4 --seq_len {seq_len}"
    assert_same_run(pool.train(step, flags), pool.reference(ONE, flags), 1e-9)
    if step != "step05_cp":
        assert_same_run(pool.train(step, f"{flags} --pp 2", world=2), pool.reference(ONE, flags), 1e-9)
    for mode in ("zigzag", "ring", "allgather", "ulysses") if seq_len == 2 else []:
        if mode in ("ring", "ulysses"):                   # the others take two chunks of each rank
            assert_same_run(pool.train(step, f"{flags} --cp 2 --cp_mode {mode}", world=2), pool.reference(ONE, flags), 1e-9)
        else:
            assert_refused(pool, step, 2, f"{flags} --cp 2 --cp_mode {mode}", "seq_len 2 is not a multiple of 4")


# ------------------------------------------------------------------------------------- what is written
@pytest.mark.parametrize("step", ALL)
def test_a_loss_that_is_not_finite_ends_every_step_with_status_3(pool, tmp_path, step):
    log = tmp_path / "log"
    argv = f"{TINY} --lr 9e7 --warmup 0 --grad_clip 0 --log_file {log} --save {tmp_path / 'save'}"
    line = refused(pool, step, argv, status=3, world=1 if step == ONE else 2)
    assert "stopped, nothing saved" in line and os.listdir(tmp_path / "save") == []
    assert "NaN" not in log.read_text()


def weights_that_are_none_job(argv):
    """The last update makes one."""
    from unittest.mock import patch

    import train
    step = train.Optimizer.step

    def broken(self, lr):
        step(self, lr)
        for param, master in zip(self.params, self.masters):
            param.data[..., -1] = master[..., -1] = float("inf")
    with patch.object(train.Optimizer, "step", broken):
        train.main(argv)


@pytest.mark.parametrize("step", ALL)
def test_weights_that_are_not_finite_are_not_saved(pool, tmp_path, step):
    world = 1 if step == ONE else 2
    pool.call(main_job, step, world=world, argv=f"{TINY} --steps 1 --save {tmp_path}".split())
    before = (tmp_path / "model.safetensors").read_bytes()
    line = refused(pool, step, f"{TINY} --steps 1 --save {tmp_path}", weights_that_are_none_job, world=world, status=3)
    assert "not finite" in line and (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_weights_that_are_not_finite_are_no_checkpoint(pool, tmp_path):
    line = refused(pool, LAST, f"{TINY} --steps 1 --checkpoint {tmp_path}", weights_that_are_none_job, world=2, status=3)
    assert "some weights are not finite any more" in line
    assert not [name for name in os.listdir(tmp_path) if not name.endswith(".tmp") and name != ".lock"]


class Killed(BaseException):
    pass


def killed_while_saving_job(old, new, folder, at):
    """Saves over a model, and is killed at one of the moments at which something on the disk changes; what can be read then."""
    from unittest.mock import patch

    import checkpoint
    import train
    calls, names = itertools.count(), ("link", "replace", "rename", "remove", "makedirs")

    def counted(function):
        def call(*arguments, **named):
            number = next(calls)
            if number >= at:                              # who is dead does nothing any more
                raise Killed
            return function(*arguments, **named)
        return call
    try:
        counting = {name: counted(getattr(os, name)) for name in names}
        with patch.multiple(os, **counting), patch("shutil.rmtree", counted(shutil.rmtree)):
            with patch("checkpoint.SHARD_BYTES", 200_000 if at % 2 else 10**9):
                train.main(["--steps", "0", "--init_from", new, "--save", folder])
        ended = True
    except Killed:
        ended = False
    saved = checkpoint.open_checkpoint(folder)
    read = {name: file.get_tensor(name) for name, file in saved.items()}
    return ended, read


def test_killed_at_any_moment_of_a_save_one_model_is_whole(pool, tmp_path):
    models = {seed: pool.train(ONE, f"--steps 0 --seed {seed} ").weights for seed in (1, 2)}
    for seed in models:
        pool.call(main_job, ONE, argv=f"--steps 0 --seed {seed} --save {tmp_path / str(seed)}".split())
    seen, ended, at = set(), False, 1
    while not ended:
        folder = shutil.copytree(tmp_path / "1", tmp_path / f"killed {at}")
        (folder / "mine.txt").write_text("precious")
        folders = dict(old=str(tmp_path / "1"), new=str(tmp_path / "2"), folder=str(folder))
        ended, read = pool.call(killed_while_saving_job, ONE, **folders, at=at)[0]
        which = [seed for seed, weights in models.items() if all(torch.equal(weights[name], read[name]) for name in weights)]
        assert len(which) == 1, f"at {at}: neither the old model nor the new one"
        seen |= set(which)
        assert (folder / "mine.txt").read_text() == "precious"
        if at % 4 == 0 or ended:                          # and it can be done again
            pool.call(main_job, ONE, argv=["--steps", "0", "--seed", "2", "--save", str(folder)])
            assert sorted(os.listdir(folder)) == ["config.json", "mine.txt", "model.safetensors"]
        at += 1
    assert seen == {1, 2} and at > 8


def disk_full_job(argv, bytes):
    import resource
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))                  # what a full disk is to who writes
    try:
        main_job(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("step", [ONE, "step02_dp", LAST])
def test_a_full_disk_leaves_the_old_model(pool, tmp_path, step):
    world = 1 if step == ONE else 2
    pool.call(main_job, step, world=world, argv=f"{TINY} --steps 1 --save {tmp_path}".split())
    before = (tmp_path / "model.safetensors").read_bytes()
    line = refused(pool, step, f"{TINY} --steps 1 --save {tmp_path}", disk_full_job, world=world, bytes=100_000)
    assert f"--save {tmp_path}: [Errno" in line and (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_a_full_disk_ends_a_checkpoint_in_a_line(pool, tmp_path):
    line = refused(pool, LAST, f"{TINY} --checkpoint {tmp_path} --save_every 1", disk_full_job, world=1, bytes=100_000)
    assert "cannot be written (" in line and "File too large" in line and "checkpoints there: none" in line


@pytest.mark.parametrize("step", [ONE, "step02_dp", LAST])
def test_a_log_file_of_others_is_not_overwritten(pool, tmp_path, step):
    (tmp_path / "precious").write_text("my notes\n")
    assert "is no log of a run" in refused(pool, step, f"{TINY} --log_file {tmp_path / 'precious'}")
    assert (tmp_path / "precious").read_text() == "my notes\n"
    for _ in range(2):                                    # its own is begun anew
        pool.call(main_job, step, argv=f"{TINY} --steps 2 --log_file {tmp_path / 'log'}".split())
        assert [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize("step", [ONE, "step02_dp", LAST])
def test_a_full_log_disk_does_not_end_the_training(pool, step):
    pool.call(main_job, step, argv=f"{TINY} --log_file /dev/full".split())
    assert "--log_file /dev/full ends here: [Errno 28]" in pool.output and "step 4/4" in pool.output


def test_a_log_stays_when_no_checkpoint_is_found(pool, tmp_path):
    base = f"{TINY} --steps 2 --log_file {tmp_path / 'log'} --checkpoint {tmp_path}"
    pool.call(main_job, LAST, argv=f"{base}/a".split())
    before = (tmp_path / "log").read_text()
    pool.call(main_job, LAST, argv=f"{base}/gone --resume".split())
    assert (tmp_path / "log").read_text().startswith(before) and len(before.splitlines()) == 2


def from_the_shell(step, argv, folder, **environment):
    return subprocess.Popen([sys.executable, step_dir(step) / "train.py", *argv], cwd=folder, env=clean_environment() | environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@slow
@pytest.mark.parametrize("step", [ONE, LAST])
def test_ctrl_c_head_and_a_terminal_without_umlauts_give_no_traceback(tmp_path, step):
    process = from_the_shell(step, ["--steps", "1000"], tmp_path)
    assert any("1/1000" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT and "Traceback" not in process.stderr.read()
    process = from_the_shell(step, ["--steps", "1000"], tmp_path)
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(60) == 2 and error.count("\n") == 1, error
    (tmp_path / "ü").mkdir()
    process = from_the_shell(step, ["--steps", "1", "--init_from", "ü"], tmp_path, PYTHONIOENCODING="ascii")
    out, error = process.communicate(timeout=300)
    assert process.returncode == 2 and "no .safetensors file there" in error and error.count("\n") == 1


@pytest.mark.parametrize("step, more", [(ONE, ""), (LAST, "--checkpoint run")])
def test_an_output_that_nobody_reads_any_more_costs_no_model(tmp_path, step, more):
    """A closed terminal, or a tee that Ctrl-C ended first."""
    process = from_the_shell(step, f"{TINY} --save model {more}".split(), tmp_path)
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(60) == 0 and not error, error
    assert (tmp_path / "model/model.safetensors").exists()
    assert not more or (tmp_path / "run/step_00000004/index.json").exists()


def test_a_place_where_nothing_can_be_written_is_seen_before(pool):
    assert "cannot write there" in refused(pool, ONE, f"{TINY} --save /proc")
    assert "cannot write there" in refused(pool, ONE, f"{TINY} --profile /proc")


# ------------------------------------------------------------------------------------- weights of another model
@pytest.fixture(scope="module")
def model(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    pool.call(main_job, ONE, argv=["--steps", "0", "--save", str(folder)])
    return folder


def test_files_that_lie_beside_a_model_are_not_read(pool, model, tmp_path):
    from safetensors.torch import load_file, save_file
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
    assert f"--init_from {two}: damaged, or a file is missing" in refused(pool, ONE, f"--steps 0 --init_from {two}")


def test_quantized_weights_are_no_numbers(pool, model, tmp_path):
    from safetensors.torch import load_file, save_file
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(torch.int8)}, tmp_path / "model.safetensors")
    assert f"{name} is I8: quantized weights" in refused(pool, ONE, f"--steps 0 --init_from {tmp_path}")
    raw = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | dict(quantization_config=dict(quant_method="fp8"))))
    assert "quantization_config=" in refused(pool, ONE, f"--steps 0 --model {tmp_path}")


@pytest.mark.parametrize("step", [ONE, LAST])
def test_weights_of_the_same_sizes_and_another_model(pool, model, tmp_path, step):
    shutil.copytree(model, tmp_path / "other")
    raw = json.loads((model / "config.json").read_text())
    for rope in ("rope_parameters", "rope_scaling"):
        raw.pop(rope, None)
    (tmp_path / "other/config.json").write_text(json.dumps(raw | dict(rope_theta=10000.0)))
    line = refused(pool, step, f"--steps 0 --init_from {tmp_path / 'other'}")
    assert "rope_theta is 10000.0 in its config.json, --model tiny has 500000.0" in line
    pool.call(main_job, step, argv=f"--steps 0 --init_from {tmp_path / 'other'} --model {tmp_path / 'other'}".split())


def test_which_column_is_the_text(pool, tmp_path, tokenizer):  # noqa: F811
    (tmp_path / "two.jsonl").write_text('{"id": "a", "content": "hello hello"}\n' * 50)
    (tmp_path / "one.jsonl").write_text('{"content": "hello hello hello hello hello"}\n' * 50)
    flags = f"--steps 1 --seq_len 4 --global_batch_size 2 --tokenizer {tokenizer}"
    assert "of its columns none is 'text': ['id', 'content']" in refused(pool, ONE, f"{flags} --dataset {tmp_path / 'two.jsonl'}")
    pool.call(main_job, ONE, argv=f"{flags} --dataset {tmp_path / 'one.jsonl'}".split())


def test_a_bin_has_no_large_tokens(pool, tmp_path):
    np.arange(1000, dtype=np.uint32).tofile(tmp_path / "tokens.bin")
    line = refused(pool, ONE, f"--dataset {tmp_path / 'tokens.bin'} --model llama-1b", check_data_job)
    assert "a .bin has tokens below 65,536 (uint16), the model's vocabulary is 128256" in line


def check_data_job(argv):
    import config
    import data
    args = config.parse_args(argv)
    data.load_tokens(args, config.load_config(args).vocab_size)


# ------------------------------------------------------------------------------------- what only some ranks see
def on_one_rank_job(argv, rank, instead):
    """Rank `rank` has other arguments: it sees other files."""
    main_job(instead if int(os.environ["RANK"]) == rank else argv)


@pytest.mark.parametrize("step", STEPS[1:])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_the_data_ends_all(pool, tmp_path, step, rank):
    np.save(tmp_path / "tokens.npy", np.arange(2000) % 256)
    argv = f"{TINY} --dataset {tmp_path / 'tokens.npy'}".split()
    line = refused(pool, step, argv, on_one_rank_job, world=2, rank=rank, instead=[*argv, "--dataset", "gone.npy"])
    assert line == "error: " + "rank 1: " * rank + "--dataset gone.npy: no such file"


def test_a_weight_that_only_the_last_stage_misses(pool, tmp_path):
    from safetensors.torch import load_file, save_file
    pool.call(main_job, ONE, argv=["--steps", "0", "--save", str(tmp_path)])
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    assert "rank 1: --init_from" in refused(pool, "step06_pp", f"{TINY} --pp 2 --init_from {tmp_path}", world=2)


def started_job(argv, **environment):
    from unittest.mock import patch
    with patch.dict(os.environ, environment):
        for name, value in environment.items():
            if not value:
                del os.environ[name]
        main_job(argv)


@pytest.mark.parametrize("environment", [
    dict(WORLD_SIZE="2", RANK=""), dict(WORLD_SIZE="2", RANK="2"), dict(WORLD_SIZE="2", RANK="x"), dict(WORLD_SIZE="many"),
    dict(WORLD_SIZE="2", MASTER_ADDR=""), dict(WORLD_SIZE="", RANK="1")])
@pytest.mark.parametrize("step", STEPS[1::6])
def test_started_halfway_it_does_not_wait(pool, step, environment):
    assert "torchrun sets" in refused(pool, step, TINY, started_job, **environment)


def listening_job(argv):
    """The addresses that a process listens at while it trains alone."""
    import train
    seen = set()
    make = train.Optimizer

    def looked(*arguments):
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.islink(link)]
        inodes = {link[8:-1] for link in links if link.startswith("socket:")}
        for name in ("tcp", "tcp6"):
            for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    seen.add(fields[1].split(":")[0])
        return make(*arguments)
    from unittest.mock import patch
    with patch.object(train, "Optimizer", looked):
        train.main(argv)
    return seen


@pytest.mark.parametrize("step", STEPS[1::6])
def test_one_process_alone_listens_to_nobody_outside(pool, step):
    everywhere = {"00000000", "0" * 32}
    assert not pool.call(listening_job, step, argv=TINY.split())[0] & everywhere


# ------------------------------------------------------------------------------------- checkpoints
@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Checkpoints after two and after four steps, of two ranks."""
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
        assert "index.json is missing or damaged, or some ranks see another one" in str(failed.value)


def elsewhere_job(argv, rank, folder):
    """Rank `rank` sees other files in the same folder."""
    import resume
    index_of, at_home = resume.index_of, int(os.environ["RANK"]) != rank
    with patch.object(resume, "index_of", lambda path: index_of(path if at_home else Path(folder, path.name))):
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


@pytest.mark.parametrize("name, message", [("step_00000005", "step_00000005 is damaged: index.json is missing"),
                                           ("step_00000005.tmp", "step_00000005.tmp cannot be written ([Errno 17]")])
@pytest.mark.parametrize("make", ["touch", "symlink"])
def test_what_only_has_the_name_of_a_checkpoint_is_refused(pool, copy, name, message, make):
    (copy / name).touch() if make == "touch" else (copy / name).symlink_to(copy / "nowhere")
    with pytest.raises(Refused) as refused:
        pool.call(main_job, LAST, argv=goes_on(copy, "--save_every 1").split())
    assert message in str(refused.value) and os.path.lexists(copy / name)


def test_two_runs_do_not_share_a_directory(pool, tmp_path):
    import fcntl
    tmp_path.joinpath(".lock").write_text("somebody's notes")
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run is training there" in refused(pool, LAST, f"{TINY} --checkpoint {tmp_path}", world=2)
    pool.call(main_job, LAST, world=2, argv=f"{TINY} --checkpoint {tmp_path}".split())        # its owner is dead
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000004"]
    assert (tmp_path / ".lock").read_text() == "somebody's notes"


OTHER = {"--seq_len 32": "seq_len 16, this one has 32", "--global_batch_size 8": "global_batch_size 4, this one has 8",
         "--dataset {tokens}": "data 466195 tokens", "--model {rope}": "rope_theta", "--model {eps}": "rms_norm_eps",
         "--model {heads}": "num_attention_heads 8, this one has 4", "--weight_decay 0": "weight_decay 0.1, this one has 0.0",
         "--grad_clip 0.5": "grad_clip 1.0, this one has 0.5", "--warmup 0": "warmup 5, this one has 0",
         "--lr_schedule constant": "lr_schedule cosine, this one has constant", "--seed 3": "seed 42, this one has 3",
         "--dtype float64": "dtype float32, this one has float64"}


def test_another_run_is_not_gone_on_with(pool, copy, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(466195) % 256)
    tiny = dict(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=4, head_dim=8, rms_norm_eps=1e-5, rope_theta=500000.0)
    changed = dict(rope=dict(rope_theta=10000.0), eps=dict(rms_norm_eps=1e-6),
                   heads=dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16))
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
    """{what is done to the newest checkpoint: what is said}"""
    data, index, wrong = folder / "rank_00001.safetensors", folder / "index.json", "index.json is missing or damaged"

    def zeroed():
        with open(data, "r+b") as file:
            file.seek(data.stat().st_size // 2)
            file.write(bytes(64))

    def changed(change):
        def in_index():
            text = json.loads(index.read_text())
            change(text)
            index.write_text(json.dumps(text))
        return in_index

    def unfilled():
        """The digests are right, but a box is not there."""
        import hashlib

        from safetensors.torch import load_file, save_file
        tensors = load_file(data)
        tensors.pop(next(key for key in tensors if ".weight[" in key))
        save_file(tensors, data)
        changed(lambda text: text["digests"].update({data.name: hashlib.sha256(data.read_bytes()).hexdigest()}))()

    def replaced(path, make):
        def other():
            path.unlink()
            make(path)
        return other
    return {"index gone": (index.unlink, wrong), "index empty": (lambda: index.write_text(""), wrong),
            "index no object": (lambda: index.write_text("[]"), wrong), "index cut": (lambda: os.truncate(index, 1000), wrong),
            "index a pipe": (replaced(index, os.mkfifo), wrong), "index a folder": (replaced(index, os.mkdir), wrong),
            "index of another step": (changed(lambda text: text.update(steps=6)), wrong),
            "index of half a step": (changed(lambda text: text.update(steps=4.0)), wrong),
            "elsewhere": (changed(lambda text: text["digests"].update({"../../x.safetensors": "0"})), "x.safetensors is missing"),
            "file gone": (data.unlink, "rank_00001.safetensors is missing"),
            "file a pipe": (replaced(data, os.mkfifo), "rank_00001.safetensors is missing"),
            "one too many": (lambda: shutil.copy(data, folder / "rank_00002.safetensors"), "rank_00002.safetensors is not in"),
            "file cut": (lambda: os.truncate(data, 1000), "rank_00001.safetensors is not as it was written"),
            "garbage": (lambda: data.write_bytes(b"x" * 5000), "rank_00001.safetensors is not as it was written"),
            "zeroed": (zeroed, "rank_00001.safetensors is not as it was written"),
            "unfilled": (unfilled, "it has not all of model.")}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("what", damages(Path()))
def test_a_damaged_checkpoint_is_named_and_the_older_one(pool, copy, what, world):
    damage, message = damages(copy / "step_00000004")[what]
    damage()
    with pytest.raises(Refused) as damaged:
        pool.call(main_job, LAST, world=world, argv=goes_on(copy).split())
    line = str(damaged.value).splitlines()[-1]
    assert "step_00000004 is damaged" in line and message in line, line
    assert "--resume step_00000002 takes an older one, which is whole" in line, line
    if what == "zeroed":
        trained = pool.train(LAST, goes_on(copy, "step_00000002"), world=world)
        assert [line["step"] for line in trained.lines] == [2, 3, 4, 5]
        names = sorted(name.partition("_1")[0] for name in os.listdir(copy))
        assert names == [".lock", "step_00000002", "step_00000004.aside", "step_00000006"]


def test_an_older_one_twice_and_after_a_restart(pool, copy, tmp_path):
    """Each time newer ones are put aside; but what a run did before torchrun started it again counts."""
    def train(more):
        return [line["step"] for line in pool.train(LAST, goes_on(copy, more)).lines]
    assert train("step_00000002") == train("step_00000002") == [2, 3, 4, 5]
    names = sorted(name.partition("_1")[0] for name in os.listdir(copy))
    assert names == [".lock", "step_00000002", "step_00000004.aside", "step_00000006", "step_00000006.aside"]
    process = from_the_shell(LAST, goes_on(copy, "step_00000002").split(), tmp_path, TORCHELASTIC_RESTART_COUNT="1")
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0 and f"resuming from {copy}/step_00000006" in out, error


def test_a_log_is_cut_where_it_lies(pool, tmp_path):
    """Not in a copy, for which its disk may be too full; and a link stays a link."""
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "real.jsonl")
    base = f"{TINY} --checkpoint {tmp_path / 'run'} --save_every 2 --log_file {tmp_path / 'log.jsonl'}"
    pool.call(main_job, LAST, argv=base.split())
    before = (tmp_path / "real.jsonl").read_text().splitlines()
    with open(tmp_path / "real.jsonl", "a") as log:
        log.write('{"step": 4, "lo')
    pool.call(main_job, LAST, argv=f"{base} --steps 6 --resume step_00000002".split())
    lines = (tmp_path / "real.jsonl").read_text().splitlines()
    assert lines[:2] == before[:2] and [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "log.jsonl").is_symlink() and sorted(os.listdir(tmp_path)) == ["log.jsonl", "real.jsonl", "run"]


def test_the_log_of_another_run_is_not_cut(pool, copy, tmp_path):
    """Of none that is longer, shorter, or as long; a new one is begun, and says what it has not."""
    pool.call(main_job, LAST, argv=f"{TINY} --steps 6 --log_file {tmp_path / 'other'}".split())
    lines = (tmp_path / "other").read_text().splitlines(keepends=True)
    for count in (6, 4, 1):
        text = "".join(lines[:count])
        (tmp_path / "log").write_text(text)
        assert "is not the log of the run that goes on" in refused(pool, LAST, goes_on(copy, f"--log_file {tmp_path / 'log'}"))
        assert (tmp_path / "log").read_text() == text
    pool.call(main_job, LAST, argv=goes_on(copy, f"--log_file {tmp_path / 'new'}").split())
    assert f"--log_file {tmp_path / 'new'}: has 0 of the 4 steps that are done" in pool.output
    assert [json.loads(line)["step"] for line in (tmp_path / "new").read_text().splitlines()] == [4, 5]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_save_too(pool, tmp_path, number):
    pool.call(told_job, LAST, world=2, argv=f"{TINY} --checkpoint {tmp_path}".split(), number=number)
    assert f"told to end ({number.name}) after step 2" in pool.output
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000002"]


def test_told_to_end_in_the_last_step_it_ends_as_any_run(pool, tmp_path):
    argv = f"{TINY} --steps 2 --checkpoint {tmp_path / 'run'} --save {tmp_path / 'model'}".split()
    pool.call(told_job, LAST, world=2, argv=argv, number=signal.SIGTERM)
    assert "told to end" not in pool.output and sorted(os.listdir(tmp_path / "run")) == [".lock", "step_00000002"]
    assert (tmp_path / "model/model.safetensors").exists()


def undeletable_job(argv):
    def rmtree(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError("busy")
    with patch("shutil.rmtree", rmtree):
        main_job(argv)


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(pool, tmp_path):
    pool.call(undeletable_job, LAST, argv=f"{TINY} --checkpoint {tmp_path} --save_every 1 --keep 1".split())
    assert "--keep: " in pool.output and "cannot be deleted (busy)" in pool.output and (tmp_path / "step_00000004").is_dir()


def told_job(argv, number):
    import train
    own, calls, before = train.Pipeline.forward_backward, itertools.count(), signal.getsignal(number)

    def run(self, micro_batches):
        if next(calls) == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)
        return own(self, micro_batches)
    train.Pipeline.forward_backward = run
    signal.signal(number, signal.SIG_DFL)                 # nohup may have it ignored here, which a trainer leaves as it is
    try:
        train.main(argv)
    finally:
        train.Pipeline.forward_backward = own
        signal.signal(number, before)


# ------------------------------------------------------------------------------------- the loss
def two_backwards_job():
    import loss
    torch.manual_seed(0)
    head, hidden = loss.LMHead(8, 20).double(), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 20, (6,))
    value = head(hidden, targets)
    first = torch.autograd.grad(value, [hidden, head.weight], torch.tensor(2.0), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(value, [hidden, head.weight], torch.tensor(3.0))
    return kept, list(first), [gradient * 2 / 3 for gradient in second]


def test_the_loss_can_be_gone_backward_through_twice(pool):
    kept, first, second = pool.call(two_backwards_job, ONE)[0]
    for other in (first, second):
        assert_same_tensors(dict(enumerate(other)), dict(enumerate(kept)), 1e-12)
