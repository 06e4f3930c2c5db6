"""A toy cluster for tests. A matrix product takes as long as its FLOPs, communication its bytes times a factor; all else is free.

So time is counted in FLOPs and is the same on every machine. A rank has one link, which can send and receive at the same time.
"""
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import cases

MODEL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
             head_dim=16, vocab_size=64)
EXPERTS = dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
FLAGS = "--device cpu --dtype float32 --seq_len 256 --global_batch_size 16 --micro_batch_size 2"


class Toy(NamedTuple):
    flops_per_byte: float                                 # FLOPs that a device computes while its link moves one byte
    issue = 0

    def kernel(self, kernel):
        return kernel.flops

    def share_taken(self, rate):
        return 0

    def transfer(self, operation):
        return 0, operation.wire * self.flops_per_byte, "link"


def operation(wire, ranks=(0, 1), what="all_gather", dimension="dp"):
    from simulate.record import Operation
    return Operation(what, dimension, ranks, wire, wire, grouped=False)


def rank(*notes, operations):
    """Return the recording of a rank with these notes, in which ("compute", 10) takes a time of 10."""
    from simulate.kernels import Kernel
    work = sorted({value for what, value, *_ in notes if what == "compute"})
    kernels = [Kernel("mm", "product", "float32", seconds, 0) for seconds in work]
    numbered = [(what, work.index(value) if what == "compute" else value, "train.py:1") for what, value in notes]
    return SimpleNamespace(notes=numbered, kernels=kernels, operations=operations)


def notes_of_program(schedules, number, program, last):
    """Return the recording of a rank's pipeline program, in which F, I and W take 1 each, and a message is one byte."""
    notes, operations, at = [], [], {}
    for step, what, peer in program:
        if step == "compute":
            notes += [("wait", at[needed]) for needed in [schedules.receives(what, last)] if needed in at]
            notes.append(("compute", 2 if what.kind == "B" else 1))
            continue
        at[what] = len(operations)
        operations.append(operation(1, (number, peer) if step == "send" else (peer, number), step, "pp"))
        notes.append(("start", at[what]))
    return rank(*notes, operations=operations)


def record_job(argv, ranks=None):
    """Record the training step of this worker's rank, without running it, if it is one of these ranks."""
    from simulate.record import record
    rank = int(os.environ["RANK"])
    return record(argv, int(os.environ["WORLD_SIZE"]), rank) if ranks is None or rank in ranks else None


def run(pool, step, world, flags, **model):
    """Record a training step of a small model. Return {rank: its recording}. The model's own flags come before `flags`."""
    with tempfile.TemporaryDirectory() as folder:
        base = cases.make(Path(folder) / "case", tokens=256 * 64, **{**MODEL, **model})
        return dict(enumerate(pool.call(record_job, step, world, argv=f"{base} {FLAGS} {flags}".split())))


def play(recordings, flops_per_byte):
    from simulate.play import Player
    return Player(recordings, Toy(flops_per_byte)).play()


def waited(played, dimension):
    """Return how long a rank waits for operations of this dimension, as a mean over the ranks."""
    every = [seconds for of_rank in played.waited.values() for (name, _), seconds in of_rank.items() if name == dimension]
    return sum(every) / len(played.times)
