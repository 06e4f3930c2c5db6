"""reshard.patch: engines receive the weights bit for bit, whatever the layouts; bytes as planned; no rank holds the whole model.

Reinforcement learning generates text with the weights that it trains, step after step, in inference engines of K ranks, sharded by
tp alone. The simple way gathers each layer everywhere and lets each engine take its part: every rank receives the whole model, only
to keep 1/K of it.

By hand: train a matrix of four rows with ZeRO-3, so rank 0 has rows 0-1 and rank 1 has rows 2-3. An engine on both ranks cuts the
columns. Rank 0 already has the left columns of rows 0-1, and needs those of rows 2-3 from rank 1. Two rectangles intersect in a
rectangle: it begins where the later one begins, and ends where the earlier one ends. So each rank tells all others where its
rectangles are, and then every rank knows who sends what to whom. Among replicas, the one that has least to send does the sending.
gloo's sends wait for their receives, so all those of a layer start in one batch.

A rank remembers what it sent. From then on, a bfloat16 number whose bits have changed takes six bytes, four of them for its
position. In the second step of tiny (4 ranks, `--dtype bfloat16 --pp 2 --zero 3 --infer_tp 2 --ledger`), rank 0 sends this much
of its 313,344 bytes:

| --lr | 1e-3 | 1e-4 | 1e-5 | 1e-6 |
|---|---|---|---|---|
| bytes | 313,344 | 304,418 | 34,980 | 3,270 |

The cost is a second copy of a rank's weights, to compare with, and an exchange of sizes per layer that the host waits for. For
llama-8b in bfloat16 on two machines of 8 H100s, gathering makes each rank receive 15.06 GB, in a simulated 0.049 s. Point to point,
this table has the most that any rank receives, and the simulated seconds of the exchanges of sizes and of the transfers
(PYTHONPATH=tools:tests/support:tests python exercises/extensions/reshard.py):

| training | engines | GB | seconds |
|---|---|---|---|
| --zero 3 | 8 of tp 2 | 8.03 | 0.152 |
| --zero 3 | 2 of tp 8 | 2.01 | 0.044 |
| --tp 4 --pp 2 --zero 1 | 4 of tp 4 | 3.01 | 0.102 |
| --tp 4 --pp 2 --zero 1 | 2 of tp 8 | 2.01 | 0.052 |

So there are fewer bytes, but not always less time: a ring takes each number to the other machine once, and here each engine there
asks again.
"""
import itertools
import json
import math
import multiprocessing
import sys
from types import SimpleNamespace
from unittest.mock import patch

import cases
import observe
import pytest
import torch
from harness import assert_same_run, relative
from jobs import assert_refused
from steps import ROOT

STEP, EXACT = "step08_5d", "--dtype float64"
LAYOUTS = [  # ranks, model, training flags, ranks of an engine
    (2, "dense-2", "", 2), (3, "dense-2", "--zero 3", 1), (4, "dense-4", "--pp 2 --zero 3", 2),
    (4, "dense-2", "--tp 4 --sp off", 2), (4, "dense-2", "--tp 2 --zero 1", 4),
    (4, "dense-5", "--pp 2 --schedule dualpipe --cp 2", 4), (4, "top2-2", "--ep 2 --cp 2 --zero 2", 2),
    (4, "dense-2-kv2", "--tp 2 --zero 3", 4),
    (8, "dense-4", "--pp 2 --tp 2 --zero 3", 2), (8, "top2-2", "--ep 4 --tp 2 --zero 3 --zero_shard 2", 8),
    (8, "dense-5", "--pp 2 --schedule interleaved --tp 4", 8)]


def engines_job(argv, optimizer):
    """Return what observed_job returns; and after each step, for this rank's engine, {box: part} and the loss on some tokens."""
    import boxes
    import engines
    import train
    made, seen, make, log = [], [], engines.WeightSync.__init__, train.Metrics.log

    def keep(self, model, engine, optimizer):
        made.append(engine)
        make(self, model, engine, optimizer)

    def look(self, *args, **more):
        draw, parts = torch.Generator().manual_seed(0), {}
        tokens, targets = (torch.randint(61, (2, 16), generator=draw) for _ in range(2))
        for name, param in made[0].named_parameters():
            parts |= boxes.boxes(name, param, 0, param.detach().clone())
        with torch.no_grad():
            seen.append((parts, float(made[0](tokens, torch.arange(16), targets))))
        log(self, *args, **more)
    with patch.object(engines.WeightSync, "__init__", keep), patch.object(train.Metrics, "log", look):
        return observe.observed_job(argv, optimizer), seen


def part_of(weights, key, shape):
    """Return a box of the model that --save wrote, where each expert has a tensor of its own."""
    name, begin = key.split("[")[0], json.loads(key[key.index("["):])
    if ".mlp.gate." in name or ".experts." in name:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    for ours, theirs in {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}.items():
        name = name.replace(ours, theirs) if ".experts." in name else name
    every = [name.replace(".experts.", f".experts.{i}.") for i in range(8)]
    whole = torch.stack([weights[one] for one in every]) if ".experts." in name else weights[name]
    return whole[tuple(slice(b, b + n) for b, n in zip(begin, shape))]


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


CASES = [(*layout, "float64", "1e-2") for layout in LAYOUTS] + [(*layout, "bfloat16", "1e-4") for layout in LAYOUTS[2::2]]


@pytest.mark.parametrize("world, shape, flags, tp, dtype, lr", CASES, ids=map(" ".join, (map(str, case) for case in CASES)))
def test_engines_have_the_weights_bit_for_bit(pool, world, shape, flags, tp, dtype, lr):
    """Check the first send, of everything, and three more, of changes; the engines must also compute the same loss as one
    process."""
    base = f"{observe.case(pool, shape)} --micro_batch_size 2 --dtype {dtype} --lr {lr} --warmup 0"
    run = pool.train(STEP, f"{base} {flags} --infer_tp {tp}", world, job=engines_job)
    watched, seen = zip(*run.answers)
    for of_rank in seen:
        parts, _ = of_rank[-1]
        assert all(same_bits(part, part_of(run.weights, key, part.shape)) for key, part in parts.items())
        head, = (part for key, part in parts.items() if key.startswith("lm_head"))
        assert head.numel() == cases.VOCAB * cases.HIDDEN // tp
    assert observe.assert_all_meet([operations for operations, _ in watched]) > 0
    if dtype == "float64":                                # in float64 every number changes in every step
        one = pool.once((STEP, base, "engine"), lambda: pool.train(STEP, f"{base} --infer_tp 1", job=engines_job))
        assert_same_run(run, one, 1e-9)
        for of_rank in seen:
            for (_, loss), (_, expected) in zip(of_rank, one.answers[0][1], strict=True):
                assert relative(loss, expected) < 1e-9
        assert all(sends(sent) == sends(sent, 1) for _, sent in watched)


def sends(sent, formula=0):
    """Return the bytes between any two ranks, without those of ring attention and the pipeline."""
    return sum(both[formula] for (dimension, what), both in sent.items() if what == "send" and dimension not in ("cp", "pp"))


def bits_job(now, before, into):
    """Return whether `into` becomes equal to `now`, and how many bytes that takes."""
    import engines
    now, before, into = (torch.tensor(x, dtype=torch.bfloat16) for x in (now, before, into))
    message = engines.encode([(now[:4], before[:4]), (now[4:].view(2, -1), before[4:].view(2, -1))])
    engines.decode(message, [into[:4], into[4:].view(2, -1)])
    return into.view(torch.int16).tolist() == now.view(torch.int16).tolist(), len(message)


@pytest.mark.parametrize("changed, sent", [
    ({}, 0), ({5: -0.0}, 6), ({0: 1.0, 7: float("nan"), 3: 2.0}, 18), (dict.fromkeys(range(4), 1.0), 24),
    (dict.fromkeys(range(8), 3.0), 24)])
def test_a_number_that_has_changed_takes_six_bytes(pool, changed, sent):
    """Send twelve bfloat16 numbers: if a third or more have changed, all of them take no more bytes. Minus zero counts as a change
    from zero."""
    before = [0.0] * 12
    now = [changed.get(i, 0.0) for i in range(12)]
    assert pool.call(bits_job, STEP, now=now, before=before, into=before) == [(True, sent)]


# ------------------------------------------------------------------------------------- bytes
def parameters(layers):
    """Return the number of parameters in matrices, and in norms."""
    attention = cases.HIDDEN * cases.HEAD_DIM * (2 * cases.HEADS + 2 * cases.KV_HEADS)
    return 2 * cases.VOCAB * cases.HIDDEN + layers * (attention + 3 * cases.HIDDEN * cases.MLP), (2 * layers + 1) * cases.HIDDEN


def every_send_job(argv):
    """Return for each step how many bytes this rank sends, how many numbers of its engine changed that it did not have itself, and
    the peak memory of sending. Also return the bytes that this rank keeps for it."""
    import engines
    import ledger
    import train
    from watch import Storages
    seen, kept, made, build_mesh = [], [], [], train.build_mesh
    make, send = engines.WeightSync.__init__, engines.WeightSync.send

    def keep(self, model, engine, optimizer):
        make(self, model, engine, optimizer)
        self.engine = engine
        self.others = [param for name, param in engine.named_parameters() if name not in dict(model.named_parameters())]
        of_three = self.held.values(), self.last_sent.values(), engine.parameters()
        kept.extend(sum(x.nbytes for x in tensors) for tensors in of_three)

    def watched(self):
        before, memory = [param.clone() for param in self.others], Storages()
        for tensor in (*self.held.values(), *self.last_sent.values(), *self.engine.parameters()):
            memory.note(tensor, "parameters")
        there = len(memory.events)
        with ledger.Ledger(made[0]) as sent, memory:
            send(self)
        alive = itertools.accumulate(size for _, _, size in memory.events[there:])
        changed = sum(int((a != b).sum()) for a, b in zip(before, self.others))
        seen.append((sum(size for (_, what), size in sent.payload.items() if what == "send"), changed, max(alive)))
    with (patch.object(engines.WeightSync, "__init__", keep), patch.object(engines.WeightSync, "send", watched),
          patch.object(train, "build_mesh", lambda args: made.append(build_mesh(args)) or made[-1])):
        train.main(argv)
    return seen, kept


def every_send(pool, world, flags, shape="dense-4"):
    argv = f"{observe.case(pool, shape)} --micro_batch_size 2 --warmup 0 --lr_schedule constant {flags}".split()
    return pool.call(every_send_job, STEP, world=world, argv=argv)


@pytest.mark.parametrize("world, flags, tp, by_hand", [
    (4, "--tp 4", 2, lambda matrices, norms: 3 / 2 * matrices),                    # ranks 0 and 3 have half of what they want
    (2, "--pp 2", 2, lambda matrices, norms: matrices / 2 + norms),
    (4, "", 4, lambda matrices, norms: 0)])               # a rank that has everything receives nothing
def test_bytes_of_the_first_send(pool, world, flags, tp, by_hand):
    ranks = every_send(pool, world, f"{EXACT} --steps 1 {flags} --infer_tp {tp}")
    assert sum(sent for ((sent, _, _),), _ in ranks) == 8 * by_hand(*parameters(4))


def test_replicas_share_the_sending(pool):
    ranks = every_send(pool, 4, f"{EXACT} --steps 1 --pp 2 --infer_tp 2")
    sent = [size for ((size, _, _),), _ in ranks]
    assert all(abs(size / sum(sent) - 1 / 4) < 0.02 for size in sent), sent


@pytest.mark.parametrize("lr", ["1e-5", "0"])
def test_then_only_what_has_changed(pool, lr):
    """Expect six bytes for each bfloat16 number whose bits changed, and nothing if there are none."""
    ranks = every_send(pool, 2, f"--dtype bfloat16 --steps 3 --lr {lr} --pp 2 --infer_tp 2")
    first, *more = zip(*(seen for seen, _ in ranks))
    matrices, norms = parameters(4)
    assert sum(sent for sent, _, _ in first) == 2 * (matrices / 2 + norms)
    for step in more:
        sent, changed, _ = (sum(numbers) for numbers in zip(*step))
        assert sent == 6 * changed and (0 < changed < matrices / 10 if lr != "0" else changed == 0)


def test_no_rank_has_the_whole_model(pool):
    """Train a model of nine layers on four ranks: a rank has a quarter of it, remembers a quarter, and has a quarter in its engine.
    Sending takes no more extra memory than one layer."""
    whole = 8 * sum(parameters(9))
    for seen, kept in every_send(pool, 4, f"{EXACT} --steps 2 --zero 3 --infer_tp 4", "dense-9"):
        assert all(abs(size / whole - 1 / 4) < 0.01 for size in kept)              # padding; and norms, which are not sharded
        assert all(0 < memory < whole / 9 for _, _, memory in seen), [memory / whole for _, _, memory in seen]


@pytest.mark.parametrize("flags, message", [
    ("--infer_tp 3", "--infer_tp 3: must divide the world size, 4; choose from 1, 2, 4"),
    ("--infer_tp 0", "--infer_tp: must be at least 1 and below 100000000, but is 0")])
def test_refused(pool, flags, message):
    assert_refused(pool, STEP, 4, f"{observe.case(pool, 'dense-2')} --micro_batch_size 1 {flags}", message)


def test_an_engine_that_heads_do_not_allow_is_refused(pool):
    assert_refused(pool, STEP, 16, f"{observe.case(pool, 'dense-2')} --global_batch_size 16 --micro_batch_size 1 --infer_tp 16",
                   "--infer_tp 16: must divide num_attention_heads 8")


# ------------------------------------------------------------------------------------- how long it takes, simulated
LLAMA = "--model llama-8b --dtype bfloat16 --seq_len 4096 --global_batch_size 64 --micro_batch_size 1"
RANKS, SIMULATED = 16, ["--zero 3 --infer_tp 2", "--zero 3 --infer_tp 8", "--tp 4 --pp 2 --zero 1 --infer_tp 4",
                        "--tp 4 --pp 2 --zero 1 --infer_tp 8"]


def one_of(argv, rank, every):
    """Return what a rank has and wants; or, given that for every rank, what it sends: {layer: {to: bytes}}."""
    import engines
    import train
    from simulate.stand_ins import one_rank
    found = []

    def all_gather_object(mine):
        found.append(mine)
        return every or sys.exit()

    def planned(*args):
        layers = engines.WeightSync(*args).layers.items()
        found.append({layer: {to: sum(now.nbytes for now, _ in views) for to, views in outgoing.items() if to != rank}
                      for layer, (outgoing, _) in layers})
        sys.exit()
    with (one_rank(RANKS, rank), patch.object(engines, "all_gather_object", all_gather_object),
          patch.object(train.engines, "WeightSync", planned)):
        try:
            train.main(argv)
        except SystemExit:
            return found[-1]


def seconds(layers):
    """Return the simulated seconds of `layers`, {rank: operations} for each layer: a rank starts them together and waits for
    them."""
    from simulate.gpus import GPUS, Cluster
    from simulate.play import Player
    recordings = {}
    for rank in range(RANKS):
        notes, operations = [], []
        for layer in layers:
            numbers = range(len(operations), len(operations) + len(layer[rank]))
            notes += [(what, number, "") for what in ("start", "wait") for number in numbers]
            operations += layer[rank]
        recordings[rank] = SimpleNamespace(notes=notes, kernels=[], operations=operations)
    return Player(recordings, Cluster(GPUS["h100"])).play().seconds


def main():
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "exercise/reshard")]
    from simulate.record import Operation
    world = tuple(range(RANKS))
    for flags in SIMULATED:
        argv = f"{LLAMA} {flags}".split()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            every = pool.starmap(one_of, [(argv, rank, None) for rank in world])
            sent = pool.starmap(one_of, [(argv, rank, every) for rank in world])
        moved = {layer: {(rank, to): size for rank in world for to, size in sent[rank][layer].items()} for layer in sent[0]}
        apart = []
        for ends in moved.values():
            sizes = Operation("all_to_all", "world", world, 8 * RANKS, 8 * (RANKS - 1), False)
            apart.append({rank: [sizes] for rank in world})
            apart.append({rank: [Operation("send" if rank == pair[0] else "receive", "world", pair, size, size, True)
                                 for pair, size in ends.items() if rank in pair] for rank in world})
        received = max(sum(size for ends in moved.values() for (_, to), size in ends.items() if to == rank) for rank in world)
        whole = dict.fromkeys(moved, 0)
        for key, shape in {key: shape for held, _ in every for key, shape in held.items()}.items():
            whole[".".join(key.split("[")[0].split(".")[:3])] += 2 * math.prod(shape)
        wire = {layer: size * (RANKS - 1) / RANKS for layer, size in whole.items()}
        gathered = [dict.fromkeys(world, [Operation("all_gather", "world", world, whole[layer], wire[layer], False)])
                    for layer in moved]
        print(f"{flags}: {received / 1e9:.2f} GB, {seconds(apart):.3f} s; "
              f"gathered {sum(wire.values()) / 1e9:.2f} GB, {seconds(gathered):.3f} s")


if __name__ == "__main__":
    main()
