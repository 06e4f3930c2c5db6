"""One process per device: starting them, their mesh, and ending in a way that says what happened."""
import contextlib
import gc
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ending
from agreement import TIMEOUT, agree, alone, meeting_place, said, tell

# torch 2.13 renames two collectives; 2.11 has the old names only
warnings.filterwarnings("ignore", "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated")


def start_mesh(args):
    """Joins the processes that torchrun started (or this one alone) and names the dimensions they lie in."""
    agree("start")
    store, rank, world_size = meeting_place()
    if alone():                                           # gloo listens to this machine only
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if args.device == "cuda":                             # what is started first runs first, in all groups
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world_size)
    sizes = (args.pp, args.dp, args.cp, args.tp)
    mesh = init_device_mesh(args.device, sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))
    mesh["dp", "cp"]._flatten("dp_cp")                    # the ranks with the same weights and other tokens
    return mesh


def dimensions(mesh):
    """{name of a process group: the dimension of the mesh along which its ranks lie}"""
    return {mesh.get_group(name).group_name: name for name in ("dp_cp", *mesh.mesh_dim_names)}


def check_started():
    """The four variables that torchrun sets."""
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    there = world_size == "1" or {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not there or not (rank + world_size).isdecimal() or int(rank) >= int(world_size):
        print(f"error: RANK {rank} of WORLD_SIZE {world_size}: torchrun sets these, MASTER_ADDR and "
              "MASTER_PORT; leave out all of them, or start with torchrun", file=sys.stderr, flush=True)
        sys.exit(2)


@contextlib.contextmanager
def ends_well():
    """Around main: a collective that fails is reported with rank and line; at the end all is let go."""
    check_started()
    try:
        with ending.ends_well():
            yield
    except SystemExit as end:
        if hasattr(end, "message") and not alone():
            tell(end.message)
        raise
    except RuntimeError as error:
        if said():
            sys.exit(2)                                   # another rank is gone, and why has been said
        here = os.path.dirname(os.path.abspath(__file__))
        frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) == here]
        place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}"
        message = str(error).splitlines()[0]
        print(f"rank {os.environ.get('RANK', '0')} failed in {place}: {message}", file=sys.stderr, flush=True)
        raise
    dist.destroy_process_group()
    gc.collect()                                          # gloo's threads must not outlive the interpreter


def together(work, *inputs):
    """Does the work on every rank; what one of them refuses in it, all refuse. (A stand-in: the house brings its own.)"""
    refusal, result = None, None
    try:
        result = work(*inputs)
    except SystemExit as end:
        refusal = end.message, end.code
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, refusal)
    for rank, refusal in enumerate(every):
        if refusal:
            if rank > 0 and dist.get_rank() == 0:
                print(f"error: rank {rank}: {refusal[0]}", file=sys.stderr, flush=True)
            sys.exit(refusal[1])
    return result


def from_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
