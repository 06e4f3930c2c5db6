"""Held-out loss, in one process: it covers the right tokens, equals the loss from transformers' logits, and changes nothing
else."""
import json

import cases
import huggingface
import numpy as np
import pytest
import torch
from harness import assert_same_run, relative
from jobs import assert_refused, traced_job

STEP = "step01_single_gpu"
S, WHOLE, TAIL = 16, 70, 5                                # tokens of a sequence, sequences of the file, tokens left over
EXACT = "--dtype float64 --micro_batch_size 6"            # 4 steps of 24 sequences: training repeats what is not held out


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return cases.make(tmp_path_factory.mktemp("case"), tokens=S * WHOLE + TAIL)


def tokens_of(flags):
    return np.load(flags.split()[3])


def with_tokens(flags, path, tokens):
    np.save(path, tokens)
    return flags.replace(flags.split()[3], str(path))


def held_out_losses(run):
    return [line["held_out_loss"] for line in run.lines]


def by_full_logits(folder, tokens, sequences):
    """Return the mean cross-entropy of the file's last whole sequences, from transformers' full logits."""
    model = huggingface.load(folder, torch.float64)
    rows = torch.from_numpy(np.stack([tokens[i * S:i * S + S + 1] for i in range(WHOLE - sequences, WHOLE)]).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


@pytest.mark.parametrize("sequences, more", [(24, ""), (7, "--eval_sequences 7 --recompute full"),           # 7: 6 and 1
                                             (1, "--eval_sequences 1 --recompute selective")])
def test_it_is_the_loss_of_full_logits(pool, flags, tmp_path, sequences, more):
    run = pool.train(STEP, f"{flags} {EXACT} --eval_every 3 {more} --save {tmp_path}", weights=False)
    seen = held_out_losses(run)
    assert [loss is not None for loss in seen] == [False, False, True, True]       # every third step, and the last one
    assert relative(seen[-1], by_full_logits(tmp_path, tokens_of(flags), sequences)) < 1e-9


@pytest.mark.parametrize("sequences", [1, 24, 69])
def test_training_is_that_of_a_file_that_ends_there(pool, flags, tmp_path, sequences):
    """Train on a file that ends with the token at the border, the last target. The run must be the same to the last bit, evaluated
    or not."""
    short = with_tokens(flags, tmp_path / "short.npy", tokens_of(flags)[:(WHOLE - sequences) * S + 1])
    reference = pool.train(STEP, f"{short} {EXACT}")
    for every in (0, 1, 4):
        run = pool.train(STEP, f"{flags} {EXACT} --eval_every {every} --eval_sequences {sequences}")
        assert_same_run(run, reference, 0)
        assert [loss is None for loss in held_out_losses(run)] == [every == 0 or step + 1 < every for step in range(4)]


def test_what_is_held_out_is_not_trained_on_and_the_reverse(pool, flags, tmp_path):
    """Change tokens, with lr 0: each loss must see only its own targets. The token at the border is a target of training."""
    border = (WHOLE - 24) * S
    base, flags = flags, f"--dtype float64 --eval_every 1 --lr 0 --steps 1 --global_batch_size {WHOLE - 24} --micro_batch_size 23"
    flags += " --eval_sequences 24"

    def losses(changed):
        tokens = tokens_of(base)
        for place in changed:
            tokens[place] = (tokens[place] + 1) % 61
        run = pool.train(STEP, f"{with_tokens(base, tmp_path / 'tokens.npy', tokens)} {flags}", weights=False)
        return run.losses[0], held_out_losses(run)[0]
    training, held_out = losses([])
    for places, which in [([0, border - 1], (True, False)), ([border], (True, True)), ([border + 1, WHOLE * S], (False, True)),
                          ([WHOLE * S + 1, WHOLE * S + TAIL], (False, False))]:
        changed = losses(places)
        assert (changed[0] != training, changed[1] != held_out) == which, places


def head_job(vocab, tokens, chunk):
    """Return the loss without gradients, with gradients, and from torch on full logits; and the size in numbers of each storage it
    takes."""
    import loss
    import torch.nn.functional as F
    from watch import Storages
    torch.manual_seed(0)
    loss.CHUNK = chunk
    head = loss.LMHead(8, vocab).double()
    hidden, targets = torch.randn(2, tokens // 2, 8, dtype=torch.float64), torch.randint(vocab, (2, tokens // 2))
    with_gradients = float(head(hidden, targets))
    live = Storages()
    with torch.no_grad(), live:
        alone = float(head(hidden, targets))
    whole = F.cross_entropy(hidden.flatten(0, 1) @ head.weight.T, targets.flatten(), reduction="sum")
    return alone, with_gradients, float(whole), [size // 8 for _, _, size in live.events]


def test_the_head_takes_a_chunk_at_a_time_and_no_gradients(pool):
    (alone, with_gradients, whole, sizes), = pool.call(head_job, STEP, vocab=640, tokens=300, chunk=640 * 20)
    assert relative(alone, whole) < 1e-12 and relative(alone, with_gradients) < 1e-12
    assert max(sizes) == 640 * 20 and sizes.count(640 * 8) == 1                     # only the weight, and no gradient of it


def test_compiled(pool, tmp_path):
    base = f"{cases.make(tmp_path, num_hidden_layers=1)} --micro_batch_size 24 --eval_every 2"
    run, plain = (pool.train(STEP, f"{base} {more}", job=traced_job) for more in ("--compile --recompute selective", ""))
    assert_same_run(run, plain, 1e-4, weights=False)
    assert run.answers[0] > 0
    for a, b in zip(held_out_losses(run), held_out_losses(plain)):
        assert a is b is None or relative(a, b) < 1e-5


def test_the_line_says_it_where_there_is_one(pool, flags):
    run = pool.train(STEP, f"{flags} --eval_every 2", weights=False)
    said = [line.split("held-out loss ")[1].split()[0] for line in run.output.splitlines() if "held-out loss" in line]
    assert said == [f"{loss:.4f}" for loss in held_out_losses(run) if loss is not None] and len(said) == 2


def test_speed_is_that_of_training(pool, flags, tmp_path):
    log = tmp_path / "log"
    evaluated, = pool.call(clock_job, STEP, argv=f"{flags} --steps 4 --eval_every 2 --log_file {log}".split())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["tokens"] / (line["step"] + 1) / line["tokens_per_s"] for line in lines] == [1.0] * 4
    assert evaluated == [100.0, 100.0]


def clock_job(argv):
    """Train on a clock that moves by one for each step, and by a hundred for each evaluation."""
    from unittest.mock import patch

    import metrics
    import train
    clock, evaluated = [0.0], []
    make, log = train.evaluation.make_evaluate, metrics.Metrics.log

    def slow(*arguments):
        evaluate = make(*arguments)

        def slowly(step):
            loss = evaluate(step)
            if loss is not None:
                evaluated.append(100.0)
                clock[0] += 100
            return loss
        return slowly

    def logged(self, *arguments):
        clock[0] += 1
        return log(self, *arguments)

    with (patch.object(metrics.time, "perf_counter", lambda: clock[0]), patch.object(train.evaluation, "make_evaluate", slow),
          patch.object(metrics.Metrics, "log", logged)):
        train.main(argv)
    return evaluated


@pytest.mark.parametrize("more, message", [
    ("--eval_every -1", "--eval_every: must be at least 0 and below 100000000, but is -1"),
    ("--eval_every 1 --eval_sequences -3", "--eval_sequences: must be at least 0 and below 100000000, but is -3")])
def test_refused(pool, flags, more, message):
    assert_refused(pool, STEP, 1, f"{flags} {more}", message)


def test_something_must_be_left(pool, flags):
    from jobs import main_job
    message = "--eval_sequences 70: the dataset has 70 sequences of 16 tokens, and training needs one; use 69 or less"
    assert_refused(pool, STEP, 1, f"{flags} --eval_every 1 --eval_sequences 70", message, job=main_job)
