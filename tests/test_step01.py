"""Step 1: comparisons with transformers and with the formulas, and everything that can be wrong."""
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

import huggingface
from harness import Refused, assert_same_run, assert_same_tensors, distance, relative
from jobs import main_job, memory_job, save_in_pieces_job
from steps import step_dir

STEP = "step01_single_gpu"
slow = pytest.mark.slow
SMALL = dict(model_type="llama", vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
             num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=512)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
BATCH = "--seq_len 48 --global_batch_size 8 --micro_batch_size 2 --lr 1e-3 --lr_schedule constant --warmup 2"


def write_config(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, **changes}))
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 257, 48 * 50 + 1).astype(np.uint16))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("small"), rope_scaling=LLAMA3)


@pytest.fixture(scope="module")
def initial(pool, small, tokens, tmp_path_factory):
    """Save a checkpoint of the initial weights in float64. Return its folder."""
    folder = tmp_path_factory.mktemp("initial")
    pool.train(STEP, f"--model {small} --dataset {tokens} {BATCH} --dtype float64 --steps 0 --save {folder}", weights=False)
    return folder


# ------------------------------------------------------------------------------------- as a newcomer runs it
@slow
def test_default_run_learns_and_transformers_generates_from_it(tmp_path):
    out, log = tmp_path / "out", tmp_path / "log.jsonl"
    command = [sys.executable, step_dir(STEP) / "train.py", "--save", out, "--log_file", log]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert abs(lines[0]["loss"] - math.log(256)) < 0.4 and lines[-1]["loss"] < 2.6
    assert sum("tokens/s" in line for line in done.stdout.splitlines()) == len(lines)
    assert set(lines[0]) == {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "tokens_per_s_per_device", "mfu",
                             "peak_memory_gib"}
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert lines[-1]["tokens"] == len(lines) * 16 * 128
    model = huggingface.load(out, torch.float32, exact=False)
    prompt = torch.tensor([list(b"The statement ")])
    text = bytes(model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist())
    assert len(text) == 54 and sum(chr(byte).isalpha() or byte == 32 for byte in text) > 40, text


THREADS = """
import sys
sys.path.insert(0, sys.argv[1])
import config, torch, train
args = config.parse_args(sys.argv[2:], train.TECHNIQUES)
before = torch.get_num_threads()
config.set_num_threads(args, config.load_config(args))
print(before, torch.get_num_threads())
"""


@pytest.mark.parametrize("flags, asked, one", [("", None, True), ("", "3", False), ("--model llama-1b", None, False)])
def test_a_small_model_takes_one_thread_if_nobody_asks_for_more(flags, asked, one):
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": asked} if asked else {}
    command = [sys.executable, "-c", THREADS, step_dir(STEP), *flags.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    before, after = done.stdout.split()
    assert after == ("1" if one else before), done.stderr


# ------------------------------------------------------------------------------------- against transformers
@pytest.mark.parametrize("family, recompute, micro_batch, exact, tolerance", [
    ("llama", "selective", 4, True, 1e-9), ("qwen3", "none", 2, True, 1e-9), *(pytest.param(*case, marks=slow) for case in [
        ("llama", "none", 2, True, 1e-9), ("llama", "full", 1, True, 1e-9), ("llama", "none", 2, False, 1e-5),
        ("qwen3", "selective", 4, True, 1e-9), ("qwen3", "none", 2, False, 1e-5)])])
def test_trains_as_transformers(pool, tokens, tmp_path, family, exact, tolerance, recompute, micro_batch):
    small, initial = write_config(tmp_path / "small", model_type=family, rope_scaling=LLAMA3), tmp_path / "initial"
    pool.train(STEP, f"--model {small} --dataset {tokens} {BATCH} --dtype float64 --steps 0 --save {initial}", weights=False)
    flags = f"{BATCH} --micro_batch_size {micro_batch} --recompute {recompute} --dtype float64 --steps 4 --grad_clip 0.5"
    run = pool.train(STEP, f"--model {small} --dataset {tokens} --init_from {initial} {flags}")
    model = huggingface.load(initial, torch.float64, exact)
    assert model.config.model_type == family
    losses, norms, weights = huggingface.train(model, np.load(tokens), 4, 8, 48, lr=1e-3, warmup=2, grad_clip=0.5)
    assert max(norms) > 0.5, "the test should clip"
    for ours, theirs in zip(run.losses + run.grad_norms, losses + norms):
        assert relative(ours, theirs) < tolerance
    assert_same_tensors(run.weights, weights, tolerance if exact else 1e-4)


@pytest.mark.parametrize("rope", [
    dict(rope_theta=5e5), dict(rope_scaling=LLAMA3), dict(rope_parameters=dict(rope_theta=2e4, rope_type="default")),
    dict(rope_parameters=dict(rope_theta=5e5, **LLAMA3))])
def test_logits_and_first_gradients_of_every_kind_of_config(pool, tokens, tmp_path, rope):
    config = write_config(tmp_path / "model", num_key_value_heads=4, **rope)
    base = f"--model {config} --dataset {tokens} {BATCH} --seq_len 96 --dtype float64"
    pool.train(STEP, f"{base} --steps 0 --save {tmp_path / 'init'}", weights=False)
    gradients = pool.train(STEP, f"{base} --steps 1 --grad_clip 0", optimizer="sgd")
    model = huggingface.load(tmp_path / "init", torch.float64)
    inputs, targets = huggingface.batch(np.load(tokens), 0, 8, 96)
    logits = model(input_ids=inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    assert_same_tensors(gradients.weights, {name: p.grad for name, p in model.named_parameters()}, 1e-9)
    ours = pool.call(logits_job, STEP, model=str(config), init=str(tmp_path / "init"), inputs=inputs)[0]
    assert distance(ours, logits.detach()) < 1e-10


def logits_job(model, init, inputs):
    import config
    import train
    args = config.parse_args(["--model", model, "--init_from", init, "--dtype", "float64"], train.TECHNIQUES)
    with torch.no_grad():
        return train.build_model(config.load_config(args), args)(inputs, torch.arange(inputs.shape[1]))


def test_float32_against_float64(pool, small, tokens):
    flags = f"--model {small} --dataset {tokens} {BATCH} --steps 1 --grad_clip 0"
    single, double = (pool.train(STEP, f"{flags} --dtype {dtype}", optimizer="sgd") for dtype in ("float32", "float64"))
    assert_same_run(single, double, 1e-4)


# ------------------------------------------------------------------------------------- precision, accumulation, schedules
@slow
def test_bfloat16_follows_float32(pool):
    flags = "--steps 50 --warmup 5 --lr 6e-3 --seq_len 32 --global_batch_size 8 --micro_batch_size 8"
    single = pool.train(STEP, flags, weights=False, timeout=300)
    half = pool.train(STEP, f"{flags} --dtype bfloat16", weights=False, timeout=300)
    assert single.losses[-1] < 3.2
    assert relative(np.mean(half.losses[-5:]), np.mean(single.losses[-5:])) < 0.02


@slow
def test_bfloat16_small_updates_are_not_lost(pool):
    """Make updates of 1e-5, which vanish in bfloat16 weights near 0.1. Check that the float32 masters add them up."""
    flags = ("--steps 40 --lr 1e-5 --lr_schedule constant --warmup 0 --grad_clip 0 --seq_len 32 --global_batch_size 2 "
             "--weight_decay 0")
    moved = {dtype: pool.train(STEP, f"{flags} --dtype {dtype}") for dtype in ("float32", "bfloat16")}
    start = {dtype: pool.train(STEP, f"{flags} --steps 0 --dtype {dtype}").weights for dtype in moved}
    change = {dtype: sum(distance(run.weights[name], start[dtype][name]) for name in start[dtype]) for dtype, run in moved.items()}
    assert change["bfloat16"] > 0.25 * change["float32"], change


def test_accumulation_gives_the_gradient_of_the_whole_batch(pool):
    base = "--dtype float64 --steps 1 --grad_clip 0 --global_batch_size 8 --seq_len 32"
    runs = [pool.train(STEP, f"{base} --micro_batch_size {8 // n}", optimizer="sgd") for n in (1, 2, 4, 8)]
    for run in runs[1:]:
        assert_same_run(run, runs[0], 1e-12)


def test_same_seed_same_run_other_seed_other_run(pool):
    flags = "--steps 2 --global_batch_size 2 --seq_len 32"
    first, again, other = (pool.train(STEP, f"{flags} --seed {seed}") for seed in (1, 1, 2))
    assert_same_run(again, first, 0.0)
    assert other.losses[0] != first.losses[0]


def test_learning_rate(pool):
    def lrs(flags):
        return [line["lr"] for line in pool.train(STEP, f"{flags} --lr 1 --global_batch_size 2 --seq_len 8", weights=False).lines]
    assert lrs("--lr_schedule constant --warmup 4 --steps 6") == [0.25, 0.5, 0.75, 1, 1, 1]
    cosine = lrs("--lr_schedule cosine --warmup 2 --steps 7")
    expected = [0.5, 1.0] + [0.1 + 0.45 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    np.testing.assert_allclose(cosine, expected, rtol=1e-12)


def test_decay_touches_matrices_only(pool):
    """Train with and without decay, and compare: the weights may differ by the decay alone."""
    flags = "--steps 1 --lr 1e-3 --warmup 0 --lr_schedule constant --dtype float64 --seq_len 32 --global_batch_size 2"
    with_decay, without = (pool.train(STEP, f"{flags} --weight_decay {d}").weights for d in (0.5, 0.0))
    start = pool.train(STEP, f"{flags} --steps 0").weights
    for name, weight in start.items():
        expected = without[name] - 1e-3 * 0.5 * weight if weight.dim() == 2 else without[name]
        assert distance(with_decay[name], expected) < 1e-12, name


def test_clipping_off(pool):
    flags = "--steps 1 --dtype float64 --seq_len 32 --global_batch_size 2"
    clipped = pool.train(STEP, f"{flags} --grad_clip 0.01")
    assert clipped.grad_norms == pool.train(STEP, f"{flags} --grad_clip 0").grad_norms, "the norm is logged before clipping"


@slow
def test_compile_changes_nothing(pool, tmp_path, tokens):
    config = write_config(tmp_path / "one", num_hidden_layers=1)
    flags = (f"--model {config} --dataset {tokens} --steps 2 --seq_len 32 --global_batch_size 2 --micro_batch_size 1 "
             "--recompute selective")
    assert_same_run(pool.train(STEP, flags + " --compile", timeout=300), pool.train(STEP, flags), 1e-4, weights=False)


# ------------------------------------------------------------------------------------- the chunked loss
def loss_job():
    import loss
    torch.manual_seed(0)
    results = {}
    for dtype in (torch.float64, torch.bfloat16):
        head = loss.LMHead(16, 50).to(dtype)
        hidden, targets = torch.randn(3, 7, 16, dtype=dtype, requires_grad=True), torch.randint(0, 50, (3, 7))
        for chunk in (50 * 4, 10**9):                     # 4 tokens at a time (4 does not divide 21), and all at once
            loss.CHUNK, head.weight.grad, hidden.grad = chunk, None, None
            value = head(hidden, targets)
            (value / 3).backward()
            results[dtype, chunk] = value.item(), hidden.grad.clone(), head.weight.grad.clone()
        reference_hidden, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
        logits = reference_hidden.flatten(0, 1) @ weight.T
        value = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        (value / 3).backward()
        results[dtype, "reference"] = value.item(), reference_hidden.grad, weight.grad
    return results


def test_chunked_loss_equals_torch(pool):
    results = pool.call(loss_job, STEP)[0]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        value, *gradients = results[dtype, "reference"]
        for chunk in (200, 10**9):
            assert relative(results[dtype, chunk][0], value) < tolerance
            for ours, reference in zip(results[dtype, chunk][1:], gradients):
                assert distance(ours, reference) < tolerance


def largest_storage_job(vocab, tokens, chunk):
    import loss
    from watch import Storages
    loss.CHUNK = vocab * chunk
    head, hidden = loss.LMHead(8, vocab), torch.randn(tokens, 8, requires_grad=True)
    with Storages() as live:
        head(hidden, torch.zeros(tokens, dtype=torch.long)).backward()
    return max(size for _, _, size in live.events)


def test_the_logits_never_exist_whole(pool):
    vocab, tokens, chunk = 5000, 640, 64
    assert pool.call(largest_storage_job, STEP, vocab=vocab, tokens=tokens, chunk=chunk)[0] == vocab * chunk * 4


def two_backwards_job():
    import loss
    torch.manual_seed(0)
    head, hidden = loss.LMHead(8, 20).double(), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 20, (6,))
    value = head(hidden, targets)
    torch.autograd.grad(value, [hidden, head.weight], torch.tensor(2.0), retain_graph=True)
    try:
        torch.autograd.grad(value, [hidden, head.weight], torch.tensor(3.0))
    except RuntimeError as error:
        return str(error)


def test_gone_backward_through_twice_the_loss_says_that_it_cannot(pool):
    """Check that a second backward fails: the loss scales its stored gradients in place, and would scale them twice."""
    assert "modified by an inplace operation" in pool.call(two_backwards_job, STEP)[0]


# ------------------------------------------------------------------------------------- memory, against the formulas
def state_bytes_job(dtype):
    """Train for two steps. Return the bytes of the storages that are alive then, counting each storage once."""
    import gc
    import train
    kept = {}
    optimizer = train.Optimizer
    train.Optimizer = lambda params, args: kept.setdefault("optimizer", optimizer(params, args))
    try:
        train.main(["--dtype", dtype, "--steps", "2", "--seq_len", "32", "--global_batch_size", "4"])
    finally:
        train.Optimizer = optimizer
    gc.collect()
    opt = kept["optimizer"]
    storages = lambda tensors: {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    params = storages(opt.params)
    states = storages([t for state in opt.adamw.state.values() for t in state.values() if t.dim()])
    masters = storages(opt.masters)
    return dict(params=sum(params.values()), grads=sum(storages([p.main_grad for p in opt.params]).values()),
                own_grads=sum(p.grad is not None for p in opt.params), states=sum(states.values()),
                masters=sum(size for at, size in masters.items() if at not in params), count=sum(p.numel() for p in opt.params))


@pytest.mark.parametrize("dtype, weights, gradients, masters, adam", [
    ("float32", 4, 4, 0, 8), ("bfloat16", 2, 4, 4, 8), ("float64", 8, 8, 0, 16)])
def test_bytes_that_persist(pool, dtype, weights, gradients, masters, adam):
    measured = pool.call(state_bytes_job, STEP, dtype=dtype)[0]
    P = measured["count"]
    assert P == 2 * 256 * 64 + 8 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192 + 2 * 64) + 64
    assert measured == dict(params=weights * P, grads=gradients * P, own_grads=0, states=adam * P, masters=masters * P, count=P)


def activation_bytes_job(dtype, mode, seq_len, batch):
    """Return the bytes that one layer keeps between forward and backward: half the difference between 4 layers and 2."""
    import config
    import train
    from watch import Storages
    alive = []
    for layers in (2, 4):
        args = config.parse_args(["--dtype", dtype, "--recompute", mode], train.TECHNIQUES)
        model = train.build_model(replace(config.PRESETS["tiny"], num_hidden_layers=layers, hidden_size=128, head_dim=16), args)
        live = Storages()
        for param in model.parameters():
            live.note(param, "parameters")
        with live:
            out = model.model(torch.zeros(batch, seq_len, dtype=torch.long), torch.arange(seq_len))
        alive.append(sum(size for _, number, size in live.events if live.kinds[number] != "parameters"))
        del out
    return (alive[1] - alive[0]) / 2


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_bytes_of_a_layer(pool, dtype, mode):
    seq_len, batch, h, kv, i, tokens = 128, 2, 128, 64, 192, 256
    measured = pool.call(activation_bytes_job, STEP, dtype=dtype, mode=mode, seq_len=seq_len, batch=batch)[0]
    e = 4 if dtype == "float32" else 2
    formula = {"none": 16 * h + e * (4 * h + 2 * kv + 4 * i),                      # a norm keeps two float32 copies
               "selective": e * (5 * h + 2 * kv + 2 * i),
               "full": e * h}[mode] * tokens
    assert abs(measured / formula - 1) < 0.05, (measured, formula)


@slow
def test_profile_writes_a_trace(pool, tmp_path):
    pool.call(main_job, STEP, argv=f"--steps 6 --seq_len 32 --global_batch_size 4 --profile {tmp_path}".split())
    trace = json.loads((tmp_path / "trace_rank0.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in trace)


@slow
def test_memory_of_all_kinds(pool):
    """Check tools/memory.py: between steps each of weights, gradients and both moments has one number per parameter."""
    columns, rows = pool.call(memory_job, STEP, argv="--steps 6 --seq_len 32 --global_batch_size 4".split())[0]
    assert columns == ["parameters", "optimizer states", "gradients", "activations", "rest"]
    P, last = 4 * 427072, rows[-1]
    assert last[1] == P and last[3] == P and abs(last[2] - 2 * P) < 1000
    assert max(row[4] for row in rows) > 10 * max(64, last[4]) and min(min(row) for row in rows) >= 0


# ------------------------------------------------------------------------------------- data
def batches_job(argv, steps, vocab=1 << 16):
    import config
    import data
    import train
    args, shape = config.parse_args(argv, train.TECHNIQUES), replace(config.PRESETS["tiny"], vocab_size=vocab)
    tokens = data.load_tokens(args, vocab)
    return [[tuple(t.clone() for t in micro) for micro in data.micro_batches(tokens, shape, args, step)] for step in range(steps)]


@pytest.mark.parametrize("ending", ["npy", "bin"])
def test_token_files_are_read_in_order_and_wrap(pool, tmp_path, ending):
    stream = np.arange(1000, 1000 + 7 * 10 + 5, dtype=np.uint16)                   # 7 whole sequences of 10
    path = tmp_path / f"tokens.{ending}"
    np.save(path, stream) if ending == "npy" else stream.tofile(path)
    argv = ["--dataset", str(path), "--seq_len", "10", "--global_batch_size", "4", "--micro_batch_size", "2"]
    steps = pool.call(batches_job, STEP, argv=argv, steps=3)[0]
    seen = [row.tolist() for micro_batches in steps for inputs, _, _ in micro_batches for row in inputs]
    assert seen == [list(range(1000 + i % 7 * 10, 1010 + i % 7 * 10)) for i in range(12)]
    for inputs, positions, targets in sum(steps, []):
        assert torch.equal(targets, inputs + 1) and positions.tolist() == list(range(10))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    vocab = {"<end>": 0, "<unk>": 1, **{word: i for i, word in enumerate("the cat sat on a mat and dog ran".split(), start=2)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    return folder


DOCUMENTS = ["the cat sat on a mat", "the dog ran", "a cat and a dog"]
IDS = [2, 3, 4, 5, 6, 7, 0, 2, 9, 10, 0, 6, 3, 8, 6, 9, 0]


@pytest.mark.parametrize("ending", ["txt", pytest.param("jsonl", marks=slow)])
def test_texts_are_tokenized_once_and_parted_by_the_end_token(pool, tmp_path, tokenizer, monkeypatch, ending):
    import datasets
    path = tmp_path / f"documents.{ending}"
    if ending == "txt":
        path.write_text("\n".join(DOCUMENTS))
    else:
        datasets.Dataset.from_dict({"id": [1, 2, 3], "text": DOCUMENTS}).to_json(path)
    argv = ["--dataset", str(path), "--tokenizer", str(tokenizer), "--seq_len", "4", "--global_batch_size", "4"]
    first, second, batches = pool.call(tokenize_twice_job, STEP, argv=argv, cache=str(tmp_path / "cache"))[0]
    assert first == second == IDS and batches == 1


def tokenize_twice_job(argv, cache):
    """Load the tokens twice. Return both results, and how many batches of documents the tokenizer has seen."""
    from pathlib import Path

    import config
    import data
    import datasets
    import train
    from transformers import PreTrainedTokenizerBase
    own, calls = PreTrainedTokenizerBase.__call__, []
    def counted(self, *arguments, **named):
        calls.append(1)
        return own(self, *arguments, **named)
    with (patch.object(datasets.config, "HF_DATASETS_CACHE", Path(cache)),
          patch.object(PreTrainedTokenizerBase, "__call__", counted)):
        first, second = (data.load_tokens(config.parse_args(argv, train.TECHNIQUES), 100)[:].tolist() for _ in range(2))
    return first, second, len(calls)


# ------------------------------------------------------------------------------------- checkpoints, configs
def test_save_and_init_from_round_trip_in_several_files(pool, tmp_path):
    pool.call(save_in_pieces_job, STEP, argv=["--steps", "0", "--save", str(tmp_path / "a")])
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "a" / file).stat().st_size < 220_000 for file in files)
    again = pool.train(STEP, f"--init_from {tmp_path / 'a'} --steps 0")
    fresh = pool.train(STEP, "--steps 0")
    assert_same_tensors(again.weights, fresh.weights, 0.0)
    theirs = huggingface.load(tmp_path / "a", torch.float32, exact=False)
    assert_same_tensors({name: p.detach() for name, p in theirs.named_parameters()}, fresh.weights, 0.0)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_checkpoint_of_transformers_is_loaded_tied_ones_untied_with_a_notice(pool, tmp_path, family):
    import transformers
    model_class, config_class = (getattr(transformers, family + kind) for kind in ("ForCausalLM", "Config"))
    for tied in (False, True):
        theirs = model_class(config_class(**{**SMALL, "model_type": family.lower(), "tie_word_embeddings": tied}))
        theirs.save_pretrained(tmp_path / str(tied))
        ours = pool.train(STEP, f"--model {tmp_path / str(tied)} --init_from {tmp_path / str(tied)} --steps 0")
        assert_same_tensors(ours.weights, {name: p for name, p in theirs.state_dict().items()}, 0.0)
        assert ("ties the head" in ours.output) == tied


def test_saved_config_means_the_same_to_transformers(pool, small, initial):
    theirs = huggingface.load(initial, torch.float64).config
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "rms_norm_eps"):
        assert getattr(theirs, key) == SMALL[key]
    assert {key: theirs.rope_parameters[key] for key in LLAMA3} == LLAMA3 and theirs.rope_parameters["rope_theta"] == 10000.0


# ------------------------------------------------------------------------------------- bad input: one line, status 2
def wrong_inputs(folder, tokenizer):
    """Return {flags: what the trainer says}: for what would silently train on wrong numbers, and for each kind of bad flag."""
    np.save(folder / "short.npy", np.zeros(100, dtype=np.uint16))
    np.save(folder / "square.npy", np.zeros((200, 200), dtype=np.uint16))
    np.save(folder / "floats.npy", np.zeros(1000))
    for name, rows in (("null", ['{"text": "a b c"}', '{"text": null}']), ("two", ['{"id": "a", "content": "hello"}'])):
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "text.txt").write_text("a b c")
    shutil.copytree(tokenizer, folder / "endless")
    settings = json.loads((folder / "endless" / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (folder / "endless" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "endless" / "special_tokens_map.json").unlink(missing_ok=True)
    write_config(folder / "gpt2", model_type="gpt2")
    write_config(folder / "yarn", rope_scaling=dict(rope_type="yarn", factor=2.0))
    write_config(folder / "bias", attention_bias=True)
    write_config(folder / "dropout", attention_dropout=0.1)
    write_config(folder / "heads", num_attention_heads=8, num_key_value_heads=3)
    write_config(folder / "theta", rope_theta=0)
    write_config(folder / "vast", vocab_size=10**12)
    os.mkfifo(folder / "pipe.npy")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return {
        "--no_such_flag": "unrecognized arguments: --no_such_flag",
        "--dtype float16": "invalid choice: 'float16'",
        "--weight_decay nan": "argument --weight_decay: must be at least 0 and below 100000000, but is nan",
        "--seq_len 0": "argument --seq_len: must be at least 1 and below 100000000, but is 0",
        "--global_batch_size 12 --micro_batch_size 5":
            "--micro_batch_size 5: must divide global_batch_size 12; choose from 1, 2, 3, 4, 6, 12",
        "--model llama-9b": "); the presets are tiny, llama-1b",
        f"--model {folder}/gpt2": "model_type is 'gpt2'; supported: llama",
        f"--model {folder}/yarn": "rope_type is 'yarn'; only 'default' and 'llama3' are supported",
        f"--model {folder}/bias": "attention_bias is True; only False is supported",
        f"--model {folder}/dropout": "attention_dropout is 0.1; only 0.0 is supported",
        f"--model {folder}/heads": "num_attention_heads 8 must be a multiple of num_key_value_heads 3",
        f"--model {folder}/theta": "rope_theta is 0, not a positive float",
        f"--model {folder}/vast": "vocab_size is 1000000000000, not a positive int below 100000000",
        f"--dataset {folder}/pipe.npy": "pipe.npy: is not a regular file; give a .npy or .bin file",
        f"--init_from {folder}/nowhere": "nowhere: not found or unsupported (",
        f"--init_from {folder}": "no tensor model.embed_tokens.weight",
        "--dataset nowhere.npy": "No such file",
        f"--dataset {folder}/null.jsonl --tokenizer {tokenizer}": "a document in column 'text' is not text",
        f"--dataset {folder}/two.jsonl --tokenizer {tokenizer}": "needs documents in a column 'text'",
        f"--dataset {folder}/text.txt --tokenizer {folder}/endless": "has no end-of-text token",
        f"--dataset {folder}/short.npy": "needs seq_len + 1 = 129; use a larger dataset or a smaller --seq_len",
        f"--dataset {folder}/square.npy": "but is 2-D of",
        f"--dataset {folder}/floats.npy": "float64",
        "--attention flash": "--attention flash: requires --device cuda",
        "--save /proc": "--save /proc: cannot be written to ("}


def test_what_would_train_on_something_else_is_refused_in_one_line(pool, tmp_path, tokenizer):
    for flags, message in wrong_inputs(tmp_path, tokenizer).items():
        with pytest.raises(Refused) as refused:
            pool.call(main_job, STEP, argv=f"--steps 1 {flags}".split())
        text = str(refused.value)                         # datasets may have printed its progress
        assert text.count("error: ") == 1 and "Traceback" not in text and message in text.splitlines()[-1], f"{flags}: {text}"


@pytest.mark.parametrize("wrong", [256, -1])
def test_a_token_outside_the_vocabulary_ends_the_run_in_any_step(pool, tmp_path, wrong):
    tokens = np.zeros(16 * 8 * 4, dtype=np.int32)
    tokens[16 * 8 * 2 + 5] = wrong                        # the third step reads it
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(Refused, match=f"tokens range from {min(0, wrong)} to {max(0, wrong)}, but the vocabulary"):
        pool.call(main_job, STEP, argv=f"--dataset {tmp_path / 'tokens.npy'} --steps 3 --seq_len 16 --global_batch_size 8".split())


def test_a_checkpoint_of_another_model_is_refused(pool, tmp_path, small, initial):
    with pytest.raises(Refused, match="its vocab_size is 257, but --model tiny has 256"):
        pool.call(main_job, STEP, argv=["--init_from", str(initial)])
    deeper = write_config(tmp_path / "deeper", num_hidden_layers=4)
    weights = tmp_path / "weights"                        # without a config.json of their own
    shutil.copytree(initial, weights, ignore=shutil.ignore_patterns("config.json"))
    with pytest.raises(Refused, match=r"is F64 \[257, 64\]; --model tiny needs floating-point numbers of shape \[256, 64\]"):
        pool.call(main_job, STEP, argv=["--init_from", str(weights)])
    with pytest.raises(Refused, match="no tensor model.layers.3"):
        pool.call(main_job, STEP, argv=["--model", str(deeper), "--init_from", str(weights)])


@slow
def test_exit_status_from_the_shell_is_2(tmp_path):
    done = subprocess.run([sys.executable, step_dir(STEP) / "train.py", "--micro_batch_size", "3"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    environment = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, step_dir(STEP) / "train.py"], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "world size 2" in done.stderr
