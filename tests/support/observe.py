"""Everything that one run of a layout can show.

`check(pool, layout)` trains a layout once. It compares losses, gradient norms and weights with those of one process; what each
rank sends in a step, as its ledger sees it, with the trainer's formula; and the operations of all ranks with each other. Missing
waits show as well, because training runs over the gloo of unforgiving.py.

If the layout's optimizer is sgd, the weights saved at the end are the sums of all gradients: these would show a factor that AdamW
hides. In float32 only these sums are compared, not AdamW's weights. In bfloat16 only losses and norms are compared.
"""
import contextlib
import os
from unittest.mock import patch

import cases
from harness import assert_same_run, relative, train_job
from operations import Recorder, assert_all_meet
from steps import NAMES, ROOT

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}


# ------------------------------------------------------------------------------------------------ on every rank
def observed_job(argv, optimizer):
    """Train. Return this rank's operations in the second step, and what it sends there:
    {(dimension, collective): (bytes seen, bytes by the trainer's formula)}."""
    import ledger
    import train
    sent, recorder = {}, Recorder()

    class Both(ledger.Ledger):                            # one dispatch mode, because each makes every operation slower
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            recorder.note(op, args)
            return super().__torch_dispatch__(op, types, args, kwargs)

    @contextlib.contextmanager
    def on_every_rank(step, model, mesh, args, techniques):
        if step != min(1, args.steps - 1):
            yield
            return
        with patch("torch.distributed.batch_isend_irecv", recorder.batch_isend_irecv), Both(mesh) as seen:
            yield
        expected = ledger.Counter()
        for group, collective, size in ledger.expected_traffic(model, mesh, args, techniques):
            expected[seen.name(group), collective] += size
        sent.update({what: (seen.payload[what], expected[what]) for what in seen.payload.keys() | expected.keys()})

    with patch.object(train, "ledger", on_every_rank):
        train_job(argv, optimizer)
    return recorder.operations, sent


# ------------------------------------------------------------------------------------------------ in the test process
def case(pool, shape):
    """Return the flags of a run on a model of this shape. The model and the tokens are made once."""
    return pool.once(("case", shape), lambda: cases.make(pool.folder() / shape, **cases.shape(shape)))


def one_process(pool, layout):
    """Return the run of one process that a layout is compared with: of step 1, or of step 7 if the model has experts."""
    dense, dtype, balance = layout.shape.startswith("dense"), layout.flag("dtype"), layout.flag("balance")
    # with experts, bfloat16 is compared with float32, as one process's router chooses the experts in float32
    dtype = "float32" if dtype == "bfloat16" and not dense else dtype
    flags = f"{case(pool, layout.shape)} --micro_batch_size 6 --dtype {dtype} {steps(layout)}"
    flags += f" --balance {balance}" if balance else ""
    return pool.reference(NAMES[0] if dense else NAMES[6], flags, layout.optimizer)


def steps(layout):
    """Return the flag for the number of steps: four of AdamW in float64; otherwise two, and that is enough for summed gradients.
    With experts in float32 it is one: rounding may send a token to another expert, and everything that follows differs."""
    if layout.flag("dtype") == "float32" and not layout.shape.startswith("dense"):
        return "--steps 1"
    return "--steps 4" if layout.flag("dtype") == "float64" and layout.optimizer == "adamw" else "--steps 2"


def check(pool, layout):
    try:
        compare(pool, layout)
    except AssertionError as error:
        mine = os.environ.get("EXERCISE", "").replace(f"{ROOT}/", "")
        again = f"EXERCISE={mine} " * bool(mine) + f"python tests/support/layouts.py {layout.step} '{layout}'"
        raise type(error)(f"{error}\nagain: {again}") from error          # exercise.py asks a JobFailed for the ranks' errors


def compare(pool, layout):
    one = one_process(pool, layout)
    flags = f"{case(pool, layout.shape)} {layout.flags} {steps(layout)}"
    run = pool.train(layout.step, flags, layout.world, job=observed_job, optimizer=layout.optimizer)
    dtype = layout.flag("dtype")
    if dtype != "bfloat16":
        for line, reference in zip(run.lines, one.lines):
            assert relative(line.get("balance") or 0, reference.get("balance") or 0) < 1e-12, "other experts were chosen"
    compared = dtype == "float64" or dtype == "float32" and layout.optimizer == "sgd"
    assert_same_run(run, one, TOLERANCE[dtype], str(layout), weights=compared)
    assert {str(tensor.dtype) for tensor in run.weights.values()} == {f"torch.{dtype}"}
    operations, sent = zip(*run.answers)
    assert_sent(layout, sent)
    if layout.world > 1:
        assert assert_all_meet(operations) > 0


def assert_sent(layout, per_rank):
    """Check to the byte what each rank sends. Experts' all-to-alls are exact only as a sum over ranks: a rank returns as much as
    it was sent, and that depends on the other ranks' tokens."""
    for what in {what for sent in per_rank for what in sent}:
        of_ranks = [sent.get(what, (0, 0)) for sent in per_rank]
        if what[1] == "all_to_all" and layout.number("ep") > 1:
            of_ranks = [tuple(map(sum, zip(*of_ranks)))]
        for rank, (seen, formula) in enumerate(of_ranks):
            assert isinstance(formula, int), f"rank {rank}, {what}: its formula says {formula} bytes, which is not an int"
            assert seen == formula, f"rank {rank} sends {seen:,} bytes by {what}, its formula says {formula:,}"
