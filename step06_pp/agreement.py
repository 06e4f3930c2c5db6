"""What only some ranks can see is made known to all: they go on together, or end together with one line why.

The ranks meet in a store, a dictionary that torchrun keeps for them, before they have another connection.
"""
import contextlib
import datetime
import functools
import os
import sys

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from config import refuse

TIMEOUT = datetime.timedelta(minutes=10)                  # a collective that takes longer than this is stuck
PATIENCE = datetime.timedelta(seconds=5)                  # with rank 0, which is the one to say what is wrong
POINTS = ("start", "weights", "checkpoint", "resumed")    # at which no rank goes on before all do


def alone():
    """Whether torchrun did not start others as well."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or "MASTER_ADDR" not in os.environ


def meeting_place():
    """A store that all ranks see; this rank; how many there are. One process alone listens to nobody."""
    if alone():
        return dist.HashStore(), 0, 1
    return join(os.environ["MASTER_PORT"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@functools.lru_cache(maxsize=1)
def join(port, attempt):
    """After a restart the store still has what the attempt before left in it: each has a part of its own."""
    store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
    return dist.PrefixStore(attempt, store), rank, world_size


def agree(point, value="the same"):
    """All ranks wait here for each other, with the same value; if one refuses, or has another, all end."""
    if alone():
        return
    store, _, world_size = meeting_place()
    first = store.compare_set(f"{point}: value", "", value).decode()
    if value != first:
        refuse(f"{value} here, {first} on another rank")
    if store.add(f"{point}: ready", 1) == world_size:
        store.compare_set(f"{point}: verdict", "", "go on")
    verdict = store.get(f"{point}: verdict").decode()     # waits for it
    if verdict != "go on":
        refuse(verdict)


def tell(message):
    """Others of what this rank has refused. It is said once: by rank 0, or if it is silent by who sees it."""
    with contextlib.suppress(RuntimeError):               # without torchrun the store ends with rank 0
        store, rank, _ = meeting_place()
        for point in POINTS:
            store.compare_set(f"{point}: verdict", "", f"rank {rank}: {message}")
        if rank > 0:
            with contextlib.suppress(RuntimeError):
                store.wait(["said"], PATIENCE)
        by = store.compare_set("said", "", str(rank)).decode()
        if rank > 0 and by == str(rank):
            print(f"error: rank {rank}: {message}", file=sys.stderr, flush=True)


def said():
    """Whether it has been said why the run ends."""
    with contextlib.suppress(RuntimeError):
        return not alone() and meeting_place()[0].check(["said"])
