"""The training steps that step08.py and the site draw on one axis of time: 64 simulated GPUs, one technique for each lane.

Every GPU trains on two micro-batches of 4,096 tokens, as far as the technique leaves them on one GPU. The groups of tp, cp, pp and
ep have eight ranks. A lane shows one rank.
"""
from typing import NamedTuple

GPUS, STEP = 64, 8
COMMON = "--dtype bfloat16"
LLAMA, SEQUENCE = "--model llama-8b", "--seq_len 4096 --global_batch_size 128 --micro_batch_size 1"


class Lane(NamedTuple):
    title: str
    flags: str
    rank: int = 0                                         # the one to show

    @property
    def command(self):
        return f"{STEP} {GPUS} {self.flags} {COMMON}" + f" --rank {self.rank}" * (self.rank > 0)


LANES = {
    "dp": Lane("dp 64", f"{LLAMA} {SEQUENCE}"),
    "zero1": Lane("dp 64, ZeRO-1", f"{LLAMA} {SEQUENCE} --zero 1"),
    "zero3": Lane("dp 64, ZeRO-3", f"{LLAMA} {SEQUENCE} --zero 3"),
    "tp": Lane("tp 8 × dp 8, ZeRO-1", f"{LLAMA} --seq_len 4096 --global_batch_size 128 --micro_batch_size 8 --tp 8 --zero 1"),
    "cp": Lane("cp 8 × dp 8, ZeRO-1", f"{LLAMA} --seq_len 32768 --global_batch_size 16 --micro_batch_size 1 --cp 8 --zero 1"),
    "pp": Lane("pp 8 × dp 8, ZeRO-1", f"{LLAMA} {SEQUENCE} --pp 8 --zero 1", rank=56),
    "ep": Lane("ep 8 in dp 64, ZeRO-1", f"--model qwen3-30b-a3b {SEQUENCE} --ep 8 --zero 1"),
}


def rows(trace, rank):
    """Yield (stream, name, place, start, microseconds) of all that a rank does in a trace of the simulator.

    The stream is actions, compute, NVLink or network: a transfer belongs to the link that carries it.
    """
    threads = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    for event in trace:
        if event["ph"] == "X" and event["pid"] == rank:
            stream, place = threads[event["tid"]], event["args"]["at"]
            link = dict(nvlink="NVLink", network="network").get(place)
            name, place = (f"{stream}: {event['name']}", "") if link else (event["name"], place)
            yield link or stream, name, place, event["ts"], event["dur"]


def memory(trace, rank):
    """Return [(microseconds, GiB), ...]: how much a rank holds from then on."""
    return [(event["ts"], event["args"]["GiB"]) for event in trace if event["ph"] == "C" and event["pid"] == rank]
