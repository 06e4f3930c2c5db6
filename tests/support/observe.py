"""Everything that one run of a layout can show.

`check(pool, layout)` trains a layout once. It compares losses, gradient norms and weights with those of one process; what each
rank sends in a step with the trainer's formula, and with a formula worked out here from the layout alone; and the operations of
all ranks with each other. Missing waits show as well, because training runs over the gloo of unforgiving.py.

If the layout's optimizer is sgd, the weights saved at the end are the sums of all gradients: these would show a factor that AdamW
hides. In float32 only these sums are compared, not AdamW's weights. In bfloat16 only losses and norms are compared.
"""
import contextlib
import math
import os
from unittest.mock import patch

import cases
from harness import assert_same_run, relative, train_job
from layouts import SCHEDULES
from operations import Recorder, assert_all_meet
from steps import NAMES, ROOT

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}


# ------------------------------------------------------------------------------------------------ on every rank
def observed_job(argv, optimizer):
    """Train. Return this rank's operations in the second step, and what it sends there:
    {(dimension, collective): (bytes seen, bytes by the trainer's formula)}."""
    import ledger
    import traffic
    import train
    sent, recorder = {}, Recorder()

    class Both(ledger.Ledger):                            # one dispatch mode, because each makes every operation slower
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            recorder.note(op, args)
            return super().__torch_dispatch__(op, types, args, kwargs)

    @contextlib.contextmanager
    def on_every_rank(step, model, mesh, args):
        if step != min(1, args.steps - 1):
            yield
            return
        with patch("torch.distributed.batch_isend_irecv", recorder.batch_isend_irecv), Both(mesh) as seen:
            yield
        expected = ledger.Counter()
        for group, collective, size in traffic.expected_traffic(model, mesh, args):
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
    for what, expected in by_hand(layout).items():
        total = sum(sent.get(what, (0, 0))[0] for sent in per_rank)
        assert total == expected, f"all ranks send {total:,} bytes by {what}, by hand {expected:,}"


# ------------------------------------------------------------------------------------------------ what is sent, by hand
def by_hand(layout):
    """Work out from the layout alone what all ranks together send in one step, as {(dimension, collective): bytes}. With
    recomputation, return only the data-parallel part of it."""
    model, dense = cases.shape(layout.shape), layout.shape.startswith("dense")
    layers, hidden, heads, kv_heads = (
        model[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"))
    q, kv = heads * model["head_dim"], kv_heads * model["head_dim"]
    tp, cp, pp = layout.number("tp"), layout.number("cp"), layout.number("pp")
    number = {"float64": 8, "float32": 4, "bfloat16": 2}[layout.flag("dtype")]
    wide = max(4, number)                                 # bytes of a number in a sum
    head_norms = 2 * model["head_dim"] * layout.shape.endswith("-qk")               # a layer's norms of queries and keys
    tokens = 24 * 16
    stream = tokens * hidden * number                     # [batch, seq, hidden] of the global batch
    sent = {}
    if layout.step in NAMES[1:3] and layout.world > 1:
        block = hidden * (2 * q + 2 * kv + 3 * model["intermediate_size"] + 2) + head_norms
        embedding = model["vocab_size"] * hidden          # the head has as many
        sent |= data_by_hand(layout, [embedding, *[block] * layers, hidden + embedding], number, wide)
    if layout.flag("recompute") != "none":
        return sent
    if tp > 1:                                            # a layer enters and leaves two regions, also in backward; and two ends
        scalars = tp * 3 * tokens * wide                  # the loss
        if layout.flag("sp") == "on":                     # backward gathers the two inputs again, except the experts'
            sent["tp", "all_gather"] = tp * ((6 if dense else 5) * layers + 2) * stream
            sent["tp", "reduce_scatter"] = tp * (4 * layers + 2) * stream
        norms = layers * head_norms + (2 * layers + 1) * hidden * (layout.flag("sp") == "on")        # their gradients are summed
        # a tp group that is the whole world has other all-reduces, too
        if dense and layout.world > tp and (not norms or layout.number("zero") == 0 and pp == 1):
            regions = tp * (4 * layers + 2) * stream * (layout.flag("sp") == "off")
            sent["tp", "all_reduce"] = regions + scalars + layout.world * norms * wide
        if tp > kv_heads and layout.number("zero") == 0 and pp == 1:
            sent["kv_heads", "all_reduce"] = layout.world * 2 * layers * hidden * model["head_dim"] * wide
    attention = layers * tokens
    if layout.flag("cp_mode") in ("zigzag", "ring"):      # k and v in forward; in backward again, with their gradients as wide sums
        sent["cp", "send"] = attention * 2 * kv * ((cp - 1) * 2 * number + cp * wide)
    # with ZeRO, its groups may be the cp groups and so share their name
    if layout.flag("cp_mode") == "allgather" and layout.number("zero") == 0:
        sent["cp", "all_gather"] = cp * attention * 2 * kv * 2 * number
        sent["cp", "reduce_scatter"] = cp * attention * 2 * kv * wide
    # q, k, v and the output; if there are fewer kv heads than ranks, they are copied
    if layout.flag("cp_mode") == "ulysses" and layout.number("ep") == 1:
        copies = cp // math.gcd(kv_heads // tp, cp)
        sent["cp", "all_to_all"] = attention * 2 * (2 * q + 2 * kv * copies) * number
    # every border is crossed in forward and in backward; with sp off, all ranks of a tp group send the same
    if pp > 1:
        schedule = SCHEDULES[layout.flag("schedule", "1f1b")]
        stages = pp * int(layout.flag("stages_per_rank", schedule.stages_per_rank))
        borders = stages - 1 - schedule.v_shaped          # in a V, the two stages at the turn are on one rank
        sent["pp", "send"] = 2 * borders * stream * (tp if layout.flag("sp") == "off" else 1)
    return sent


def data_by_hand(layout, units, number, wide):
    """Work out what data parallelism sends: every gradient once, and the loss. With ZeRO the units are padded, and ranks also send
    the weights, once or for every use, and the norm."""
    dp, zero, shard = layout.world, layout.number("zero"), int(layout.flag("zero_shard", layout.world))
    numbers = 1 if layout.step == NAMES[1] else 2         # the loss; from step 3 on, the squared norm too
    if zero == 0:
        return {("dp", "all_reduce"): dp * wide * (sum(units) + numbers)}
    micro_batches = 24 // dp // int(layout.flag("micro_batch_size"))
    sizes = [-(-size // shard) * shard for size in units]
    gathers = sum(sizes) if zero < 3 else micro_batches * (sum(sizes) + sum(sizes[1:-2]))
    name = "shard" if shard < dp else "dp"
    sent = {("dp", "all_reduce"): dp * wide * numbers, (name, "all_gather"): dp * gathers * number,
            (name, "reduce_scatter"): dp * wide * sum(sizes) * (1 if zero == 1 else micro_batches)}
    if shard < dp:                                        # ranks with the same shard reduce it; with one shard, that is all ranks
        copies = ("replicate" if shard > 1 else "dp", "all_reduce")
        sent[copies] = sent.get(copies, 0) + dp * wide * sum(sizes) // shard
    return sent
