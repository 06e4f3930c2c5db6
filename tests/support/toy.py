"""A cluster for tests: a product takes its FLOPs, an operation its bytes times a number that we choose, nothing else any time.

So time is counted in FLOPs, and is the same on every machine. A rank has one link, which sends and receives at the same time.
"""
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import cases

MODEL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
             head_dim=16, vocab_size=64)
EXPERTS = dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
FLAGS = "--device cpu --dtype float32 --seq_len 256 --global_batch_size 16 --micro_batch_size 2"


class Toy(NamedTuple):
    flops_per_byte: float                                 # that a device computes while its link moves one byte
    issue = 0

    def kernel(self, kernel):
        return kernel.flops

    def transfer(self, operation):
        return 0, operation.wire * self.flops_per_byte, "link"


def record_job(argv):
    """Each worker simulates the rank that it is."""
    from simulate.record import record
    return record(argv, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))


def run(pool, step, world, flags, **model):
    """What each rank of a small model's training step notes; flags come after those of the model."""
    with tempfile.TemporaryDirectory() as folder:
        base = cases.make(Path(folder) / "case", tokens=256 * 64, **{**MODEL, **model})
        return dict(enumerate(pool.call(record_job, step, world, argv=f"{base} {FLAGS} {flags}".split())))


def play(recordings, flops_per_byte):
    from simulate.play import Player
    return Player(recordings, Toy(flops_per_byte)).play()


def waited(played, dimension):
    """The mean over ranks."""
    every = [seconds for of_rank in played.waited.values() for (name, _), seconds in of_rank.items() if name == dimension]
    return sum(every) / len(played.times)
