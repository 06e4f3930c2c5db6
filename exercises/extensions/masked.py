"""masked.patch: prompts and padding have no loss. Ranks then have different numbers of targets, and train as one process does.

In fine-tuning, a model should learn to write completions, not prompts, and short examples are padded. The loss leaves these
targets out (-100 in torch). So sequences, micro-batches and ranks have different numbers of targets, and some have none.

By hand: rank 0 has one target, with a loss of 6, and rank 1 has three, each with a loss of 2. The loss of the batch is their sum
over their number, 12 / 4 = 3. The mean of both ranks' means is (6 + 2) / 2 = 4: one target counts as much as the other three.

**So every rank divides by the number of targets in the global batch.** This number covers dp, cp and all micro-batches, but counts
a target once, however many ranks of tp and pp share it. Who counts, and when? Here a global batch is a pure function of (data,
step), and the data holds ~token where a token is no target. So each rank reads the whole batch, counts for itself, divides before
backward, and sends nothing. For four million tokens it reads 16 MB.

In most trainers a rank knows only its own sequences, so an all-reduce over dp x cp adds the counts. It runs *before the first
backward*, when all micro-batches have been read, as in torchtitan since pull request 2206. Or it runs *after the last one*:
backward starts from the sum, and the gradients are scaled. Megatron's --calculate-per-token-loss does this, and so every pipeline
stage needs the count; before backward, only the last one does. Where DDP or FSDP averages gradients, multiply by its number of
ranks.

The patch is on step 5, the first with dp, cp and accumulation. Pipelines need no more: a test carries it into step 8.

**Break it.** Three mistakes are planted below, and the comparison with one process sees each:

1. *The local count.* Each rank takes the mean over its own targets. In Megatron 7513, a sequence with one target gets half its
   gradient under cp 2. In verl 6609 nobody passes on the count, so Megatron does not divide the auxiliary losses
   at all. SkyRL 1420 multiplies by cp, and 1751 takes that out again: Megatron had done it, too.
2. *A mean of means* over micro-batches: transformers 24725, corrected by 34191 in October 2024. prime-rl 1961 had both.
3. *The empty rank.* Its mean is 0/0, and the sum of gradients brings NaN to all ranks: Megatron 1764. A nanmean, as in axolotl
   3033, removes the NaN, and leaves a mean of means.

The first two are silent. With the built-in pairs and cp 2, the loss over steps 51 to 60 is 2.902; it is 2.901 with the first, and
2.933 with the second. And where all counts are equal, no test fails, so the tests' masks are uneven.

`tools/prove --mask` finds all three, too. It calls the first two a mean of means. Of the third it says that all activations are
right, and names the count inside the loss.

    EXERCISE=5=exercise/masked PYTHONPATH=tools:tests/support:exercises python exercises/extensions/masked.py      # these losses
"""
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import cases
import huggingface
import numpy as np
import pytest
import torch
from harness import JobFailed, assert_same_run, assert_same_tensors, relative, train_job
from jobs import assert_refused, main_job
from observe import observed_job
from operations import assert_all_meet
from patched import copy_step
from steps import ROOT, clean_environment

STEP, ONE = "step05_cp", "step01_single_gpu"
EXACT, COMPLETIONS = "--dtype float64", "--targets completions"
S, G, STEPS = 16, 24, 4                                   # tokens of a sequence, sequences of a global batch, steps in cases.FLAGS


# ------------------------------------------------------------------------------------- the data
def has_loss(kind):
    """Return which tokens are targets, [step, sequence, seq]. In each sequence, "uneven" has a run of random place and length; in
    "empty" some of these are missing; in "even" every second token is a target."""
    if kind == "even":
        return np.tile(np.arange(S) % 2 == 0, (STEPS, G, 1))
    draw = np.random.default_rng(3)
    begin, end = np.sort(draw.integers(0, S + 1, (2, STEPS, G, 1)), axis=0)
    mask = (np.arange(S) >= begin) & (np.arange(S) < end)
    if kind == "empty":
        mask[0, :6] = False                               # a micro-batch without a target
        mask[1, :, 4:12] = False                          # rank 1 of --cp 2, zigzag, has none in this step,
        mask[2, :, :8] = False                            # rank 0 of ring and of ulysses none in this one,
        mask[3, :12] = False                              # rank 0 of --dp 2 none in this one
    return mask


def masked_tokens(folder, kind):
    """Write a token file in which ~token is no target. Return the flags of a run on it."""
    flags = cases.make(folder, **cases.shape("dense-2"))
    tokens = np.load(folder / "tokens.npy").astype(np.int64)[:STEPS * G * S + 1]
    tokens[1:] = np.where(has_loss(kind).flatten(), tokens[1:], ~tokens[1:])
    np.save(folder / "tokens.npy", tokens)
    return f"{flags} {EXACT} {COMPLETIONS}"


def case(pool, kind):
    """Return the flags of a run, and the run of one process that takes a global batch at once."""
    flags = pool.once(("masked", kind), lambda: masked_tokens(pool.folder() / f"masked-{kind}", kind))
    return flags, pool.reference(STEP, f"{flags} --micro_batch_size {G}")


@pytest.fixture(scope="module")
def flags(pool):
    return case(pool, "empty")[0]


@pytest.fixture(scope="module")
def one(pool):
    return case(pool, "empty")[1]


# ------------------------------------------------------------------------------------- what it must be equal to
def masked_batch(batch, *arguments):
    """Return inputs, and targets with torch's -100."""
    inputs, targets = batch(*arguments)
    return torch.where(inputs < 0, ~inputs, inputs), targets.masked_fill(targets < 0, -100)


def test_one_process_trains_as_transformers_does(pool, flags, one, tmp_path):
    """Compare with transformers' model in a plain loop of torch, whose cross_entropy ignores -100, and with the loss that the model
    itself returns (in float32)."""
    base = f"{flags} --lr_schedule constant --micro_batch_size {G}"
    pool.train(STEP, f"{base} --steps 0 --save {tmp_path}/start", weights=False)
    run = pool.train(STEP, base)
    model, batch = huggingface.load(tmp_path / "start", torch.float64), partial(masked_batch, huggingface.batch)
    tokens = np.load(flags.split()[3])
    inputs, targets = batch(tokens, 0, G, S)
    labels = torch.nn.functional.pad(targets, (1, 0), value=-100)                  # transformers itself shifts them by one
    own = model(torch.nn.functional.pad(inputs, (0, 1)), labels=labels, num_items_in_batch=(targets >= 0).sum()).loss
    assert relative(own.item(), run.losses[0]) < 1e-6
    with patch.object(huggingface, "batch", batch):
        losses, norms, weights = huggingface.train(model, tokens, STEPS, G, S, lr=1e-2, warmup=2, grad_clip=0.5)
    assert max(map(relative, losses + norms, run.losses + run.grad_norms)) < 1e-9
    assert_same_tensors(run.weights, weights, 1e-9)
    assert relative(run.losses[0], one.losses[0]) < 1e-12


def counted_job(argv, optimizer):
    """Do as observed_job does. Return also, for each step, the targets that each micro-batch of this rank has, and the count that
    it was given."""
    import train
    counts, forward_backward = [], train.forward_backward

    def counting(model, micro_batches, args):
        counts.append([(int((targets >= 0).sum()), num_targets) for _, _, targets, num_targets in micro_batches])
        return forward_backward(model, micro_batches, args)
    with patch.object(train, "forward_backward", counting):
        return *observed_job(argv, optimizer), counts


LAYOUTS = [
    (1, "--micro_batch_size 2 --recompute full"), (2, "--micro_batch_size 3 --dp 2 --zero 2"),
    (2, "--micro_batch_size 4 --cp 2 --cp_mode ring"), (2, "--micro_batch_size 6 --tp 2 --sp on"),
    (2, "--micro_batch_size 3 --tp 2 --sp off --recompute selective"), (4, "--micro_batch_size 2 --cp 2 --dp 2 --zero 3"),
    (4, "--micro_batch_size 6 --cp 2 --cp_mode ulysses --dp 2 --dp_mode naive"),
    (4, "--micro_batch_size 6 --cp 4 --cp_mode allgather"), (4, "--micro_batch_size 6 --cp 2 --tp 2"),
    (8, "--micro_batch_size 3 --dp 2 --cp 2 --tp 2 --zero 1")]


@pytest.mark.parametrize("world, more", LAYOUTS)
def test_trains_as_one_process(pool, flags, one, world, more):
    """Check also that all ranks count the same number, and that they send what step 5's formulas say, thus no count."""
    run = pool.train(STEP, f"{flags} {more}", world, job=counted_job)
    assert_same_run(run, one, 1e-9, more)
    operations, sent, counts = zip(*run.answers)
    for rank, of_rank in enumerate(sent):
        assert all(seen == formula for seen, formula in of_rank.values()), (rank, of_rank)
    assert world == 1 or assert_all_meet(operations) > 0
    tp = 2 if "--tp 2" in more else 1                     # these ranks have the same targets
    per_step = list(zip(*counts))                         # [step][rank][micro-batch]
    for mask, of_ranks in zip(has_loss("empty"), per_step, strict=True):
        found, given = zip(*(pair for of_rank in of_ranks for pair in of_rank))
        assert set(given) == {mask.sum()} and sum(found) == mask.sum() * tp
    assert any(found == 0 for of_rank in per_step[0] for found, _ in of_rank)      # a micro-batch without targets
    alone = any(sum(found for found, _ in of_rank) == 0 for of_ranks in per_step for of_rank in of_ranks)
    assert alone == ("--cp" in more or "--dp" in more)    # a rank without targets in a whole step


@pytest.mark.parametrize("world, more", [(1, "--micro_batch_size 6"), (4, "--micro_batch_size 3 --cp 2 --tp 2 --zero 3")])
def test_gradients_themselves_and_lower_precision(pool, flags, world, more):
    """Compare sums of gradients, as AdamW would hide a factor; and bfloat16 with float64."""
    exact = pool.reference(STEP, f"{flags} --micro_batch_size {G} --steps 2", "sgd")
    assert_same_run(pool.train(STEP, f"{flags} {more} --steps 2", world, optimizer="sgd"), exact, 1e-9, more)
    rough = pool.train(STEP, f"{flags} {more} --steps 2 --dtype bfloat16", world, optimizer="sgd", weights=False)
    assert max(map(relative, rough.losses, exact.losses)) < 2e-2


@pytest.mark.parametrize("world, more", [(1, "--micro_batch_size 6"), (4, "--micro_batch_size 3 --cp 2 --tp 2 --zero 1")])
def test_with_all_targets_it_is_the_step_itself(pool, world, more):
    """Compare to the last bit with the step without the patch."""
    base = f"{pool.once('whole', lambda: cases.make(pool.folder() / 'whole', **cases.shape('dense-2')))} {EXACT} {more}"
    run, before = pool.train(STEP, base, world), pool.train(ROOT / STEP, base, world)
    assert_same_run(run, before, 0)
    assert_same_run(pool.train(STEP, f"{base} {COMPLETIONS}", world), before, 0)   # all of its tokens count


# ------------------------------------------------------------------------------------- what the two losses do with -100
def loss_job(chunk):
    """Return the error, or the relative errors of the loss and of two gradients, of a head that is sharded over all ranks."""
    import loss
    import tensor_parallel
    import torch.distributed as dist
    import torch.nn.functional as F
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (20, 12))
    targets = torch.randint(12, (20,))
    targets[3:15] = -100
    exact = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    expected = [exact, *torch.autograd.grad(exact, (hidden, weight))]
    mine = weight.detach().chunk(world)[rank].requires_grad_()
    function = tensor_parallel.vocab_parallel_cross_entropy(dist.group.WORLD) if world > 1 else loss.cross_entropy
    try:
        with patch.object(loss, "CHUNK", chunk):
            ours = loss.ChunkedLoss.apply(hidden, mine, targets, function)
    except RuntimeError as error:
        return str(error)
    grad_hidden, grad_weight = torch.autograd.grad(ours, (hidden, mine))
    dist.all_reduce(grad_hidden)
    wanted = [expected[0], expected[1], expected[2].chunk(world)[rank]]
    return [float((a - b).norm() / b.norm()) for a, b in zip((ours, grad_hidden, grad_weight), wanted)]


@pytest.mark.parametrize("world", [1, 2])
def test_both_losses_ignore_it(pool, world):
    """Check also what they do without the patch: step 1's fails; in step 4's, no rank has that target, and nothing fails."""
    for chunk in (12 * 5, 2**27):
        assert all(max(errors) < 1e-12 for errors in pool.call(loss_job, STEP, world, chunk=chunk))
    before = pool.call(loss_job, ROOT / STEP, world, chunk=2**27)
    if world == 1:
        assert "out of bounds" in before[0]
    else:
        assert all(min(errors) > 0.1 for errors in before)


# ------------------------------------------------------------------------------------- three mistakes
def divisors(mistake, micro_batches, args):
    """Return what the mistake divides each micro-batch's loss by, and not by num_targets."""
    import torch.distributed as dist
    own = [float((targets >= 0).sum()) for _, _, targets, _ in micro_batches]
    data_ranks = args.dp * args.cp                        # gradients are summed, so a mean over ranks divides by this
    if mistake == "local count":
        return [max(1, sum(own)) * data_ranks] * len(own)
    if mistake == "mean of means":                        # each micro-batch is counted correctly, over all ranks
        counts = torch.tensor(own)
        dist.all_reduce(counts)
        return [max(1, count / args.tp) * len(own) for count in counts.tolist()]
    return [torch.tensor(sum(own)) * data_ranks] * len(own)                        # "empty rank": as the first, without max


def mistaken_job(argv, optimizer, mistake):
    """Train with a mistake. Return also the losses as they are: the sum over all targets, divided by their number."""
    import torch.distributed as dist
    import train
    forward_backward, losses = train.forward_backward, []

    def mistaken(model, micro_batches, args):
        sums = []

        def noted(*micro_batch):
            sums.append(model(*micro_batch))
            return sums[-1]
        wrong = divisors(mistake, micro_batches, args)
        logged = forward_backward(noted, [(*rest, n) for (*rest, _), n in zip(micro_batches, wrong, strict=True)], args)
        total = sum(loss.detach() for loss in sums)
        dist.all_reduce(total)
        losses.append(float(total) / args.tp / micro_batches[0][-1])
        return logged
    with patch.object(train, "forward_backward", mistaken):
        train_job(argv, optimizer)
    return losses


def local_count(argv, optimizer):
    return mistaken_job(argv, optimizer, "local count")


def mean_of_means(argv, optimizer):
    return mistaken_job(argv, optimizer, "mean of means")


def empty_rank(argv, optimizer):
    return mistaken_job(argv, optimizer, "empty rank")


TWO = "--micro_batch_size 4 --cp 2"


@pytest.mark.parametrize("job", [local_count, mean_of_means])
def test_a_mean_of_means_stays_silent(pool, job):
    """Plant it. The comparison with one process fails, though the losses look the same. With equal counts, nothing would fail."""
    flags, one = case(pool, "uneven")
    run = pool.train(STEP, f"{flags} {TWO}", 2, job=job)
    with pytest.raises(AssertionError, match=r"losses\[0\]"):
        assert_same_run(run, one, 1e-9)
    assert max(map(relative, run.losses, one.losses)) < 0.01
    flags, one = case(pool, "even")
    assert_same_run(pool.train(STEP, f"{flags} {TWO}", 2, job=job), one, 1e-9)


def test_an_empty_rank_divides_by_zero(pool, flags):
    """Plant it. Step 1 is finite. In step 2 rank 1 has no target; its NaN reaches all ranks with the sum."""
    with pytest.raises(JobFailed) as failed:
        pool.train(STEP, f"{flags} {TWO}", 2, job=empty_rank)
    assert "step 2: loss nan, grad norm nan" in str(failed.value) and "step 1/4  loss 4" in str(failed.value)


def test_a_batch_without_targets_ends_the_run_on_all_ranks(pool, flags, tmp_path):
    tokens = np.load(flags.split()[3])
    tokens[G * S + 1:2 * G * S + 1] = -1                   # the second of four steps
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(AssertionError, match="a global batch has no targets; use a larger --global_batch_size"):
        pool.call(main_job, STEP, 2, argv=flags.replace(flags.split()[3], str(tmp_path / "tokens.npy")).split())


# ------------------------------------------------------------------------------------- a json file
PAIRS = [("2+2=", "4"), ("", "hi"), ("a long prompt: ", "and more")]
BYTES = [[0, *b"2+2="], [*b"4", 0], [0] * 1, [0], [*b"hi", 0], [0] * 4, [0, *b"a long prompt: "], [*b"and more", 0], [0] * 7, [0]]


def load_job(argv):
    import config
    import data
    import train
    args = config.parse_args(argv, train.TECHNIQUES)
    return data.load_tokens(args, 256)[:].tolist()


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_json_file_in_bytes(pool, tmp_path, ending, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / f"pairs.{ending}").write_text("\n".join(json.dumps(dict(prompt=a, completion=b)) for a, b in PAIRS))
    argv = f"--dataset {tmp_path}/pairs.{ending} {COMPLETIONS} --seq_len 8 --global_batch_size 2"
    tokens, = pool.call(load_job, STEP, argv=argv.split())
    expected = [part if i % 3 == 1 else [~token for token in part] for i, part in enumerate(BYTES)]
    assert tokens == sum(expected, []) and len(tokens) % 8 == 1
    text = bytes(token for token in tokens if token >= 0)
    assert text == b"4\0hi\0and more\0"                   # what the model learns to write


def test_a_json_file_with_a_tokenizer(pool, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = {word: i for i, word in enumerate("<end> <unk> what is it a cat".split())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>").save_pretrained(tmp_path / "words")
    (tmp_path / "pairs.json").write_text(json.dumps(dict(prompt="what is it", completion="a cat")))
    argv = f"--dataset {tmp_path}/pairs.json --tokenizer {tmp_path}/words {COMPLETIONS} --seq_len 8"
    assert pool.call(load_job, STEP, argv=argv.split()) == [[~0, ~2, ~3, ~4, 5, 6, 0, ~0, ~0]]


def test_builtin_trains_and_its_loss_falls(pool):
    run = pool.train(STEP, f"{COMPLETIONS} --cp 2 --steps 12 --global_batch_size 8", 2, weights=False)
    assert run.losses[-1] < run.losses[0] - 1


def test_refused(pool, flags, tmp_path):
    assert_refused(pool, STEP, 2, f"{COMPLETIONS} --dataset text.txt", "--dataset text.txt has no prompts; use builtin, or a .json")
    assert_refused(pool, STEP, 1, flags.replace(COMPLETIONS, ""), "tokens range from -", job=main_job)
    (tmp_path / "pairs.json").write_text('{"text": "no prompt"}')
    assert_refused(pool, STEP, 1, f"{COMPLETIONS} --dataset {tmp_path}/pairs.json --tokenizer none", "cannot be loaded (",
                   job=main_job)


# ------------------------------------------------------------------------------------- pipelines, and tools/prove
def carried(folder, *edits):
    """Apply the patch to a copy of step 8, which has two more places that unpack a micro-batch. Return the copy."""
    copy = copy_step("step08_5d", folder)
    parts = re.split(r"(?m)^(?=--- )", Path(__file__).with_suffix(".patch").read_text())
    diff = "".join(part for part in parts[1:] if "/train.py" not in part).replace(STEP, copy.name)
    command = ["git", "apply", "--unsafe-paths", f"--directory={folder}", "-"]
    subprocess.run(command, cwd=folder, input=diff, text=True, check=True)
    for name, old, new in [
            ("train.py", "balance, resume)", "balance, resume, completions)"),
            ("train.py", "import balance\n", "import balance\nimport completions\n"),
            ("pipeline_parallel.py", "inputs, positions, _ = ", "inputs, positions, _, _ = "),
            ("pipeline_parallel.py", "_, _, targets = ", "_, _, targets, num_targets = "),
            ("pipeline_parallel.py", "(self.args.global_batch_size * self.args.seq_len)", "num_targets"), *edits]:
        text = (copy / name).read_text()
        assert text.count(old) == 1, (name, old)
        (copy / name).write_text(text.replace(old, new))
    return copy


@pytest.mark.parametrize("world, more", [
    (2, "--micro_batch_size 3 --pp 2 --schedule 1f1b"), (4, "--micro_batch_size 3 --pp 2 --cp 2 --schedule zerobubble"),
    (4, "--micro_batch_size 3 --pp 2 --dp 2 --zero 2 --schedule afab")])
def test_pipelines_need_no_more(pool, flags, one, tmp_path, world, more):
    """Every stage reads the batch, so the last one divides by the same count."""
    assert_same_run(pool.train(carried(tmp_path), f"{flags} {more}", world), one, 1e-9, more)


ADAPTER = '''
import step08
import torch
from step08 import *
FLAGS["targets"] = "completions"


class Rows:
    """The rows of a batch as a token file. Where a target is -100, it holds ~token."""
    def __init__(self, inputs, targets):
        following = inputs.roll(-1, 1)
        self.rows = torch.cat((inputs, targets[:, -1:]), 1)
        self.rows[:, 1:] = torch.where(targets >= 0, targets, ~following)
    def __len__(self):
        return self.rows.shape[0] * SEQ + 1
    def __getitem__(self, place):
        return self.rows[place.start // SEQ].numpy()


def step(run, inputs, targets):
    assert inputs.shape[1] == SEQ and ((targets < 0) | (targets == inputs.roll(-1, 1)))[:, :-1].all()
    run.batch.put((Rows(inputs, targets), inputs, targets))
    result = listen(run)
    listen(run)
    return result
'''
def prove(tmp_path, flags, *edits, world=4, mask=True):
    (tmp_path / "adapter.py").write_text(ADAPTER)
    environment = clean_environment() | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", STEP=str(carried(tmp_path, *edits)),
                                             PYTHONPATH=str(ROOT / "tools/prove/adapters"))
    command = [sys.executable, ROOT / "tools/prove", tmp_path / "adapter.py", "--world", str(world), "--flags", flags,
               "--json", tmp_path / "said.json"] + ["--mask"] * mask
    done = subprocess.run(command, text=True, env=environment, capture_output=True, timeout=1800)
    return done.returncode, done.stdout + done.stderr, json.loads((tmp_path / "said.json").read_text())[0]


OWN, ALL_OWN = "(targets >= 0).sum()", "sum((targets >= 0).sum() for _, _, targets, _ in self.micro_batches)"
PLANTED = {"local count": ("dp=2 cp=2 cp_mode=ring micro_batch_size=2", f"({ALL_OWN} * self.args.dp * self.args.cp)"),
           "mean of means": ("pp=2 dp=2 micro_batch_size=1", f"({OWN} * len(self.micro_batches) * self.args.dp)"),
           "empty rank": ("cp=4 cp_mode=ring micro_batch_size=1", f"({OWN} * len(self.micro_batches) * self.args.cp)")}


def test_prove_finds_no_difference(tmp_path):
    status, output, said = prove(tmp_path, "pp=2 cp=2 micro_batch_size=2")
    assert status == 0 and said["largest"] < 1e-9, output


@pytest.mark.parametrize("mistake", PLANTED)
def test_prove_names_the_mistake(tmp_path, mistake):
    flags, divisor = PLANTED[mistake]
    status, output, said = prove(tmp_path, flags, ("pipeline_parallel.py", "/ num_targets", f"/ {divisor}"))
    assert status == 1 and said["step"] == 1, output
    assert said["cause"] == "mean of means" or mistake == "empty rank" and "its count" in said["means"], output


def print_table():
    """Print the loss over steps 51 to 60, right and with two of the mistakes: as it is, and as it is logged."""
    from harness import shared_pool
    for job in (train_job, local_count, mean_of_means):
        run = shared_pool().train(STEP, f"{COMPLETIONS} --cp 2 --steps 60", 2, job=job, weights=False)
        print(job.__name__, *(f"{sum(losses[-10:]) / 10:.3f}" for losses in (run.answers[0] or run.losses, run.losses)), flush=True)


if __name__ == "__main__":
    import masked                                         # workers cannot import functions from __main__
    masked.print_table()
