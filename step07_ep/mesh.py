"""One process per device: starting them, refusing together what one of them refuses, and their mesh."""
import contextlib
import datetime
import gc
import hashlib
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from messages import fail, print0

TIMEOUT = datetime.timedelta(minutes=10)                  # a collective that takes longer than this is stuck
# torch 2.13 renames two collectives; 2.11 has the old names only
warnings.filterwarnings("ignore", "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated")


@contextlib.contextmanager
def init_distributed():
    """Around main: joins the processes that torchrun started, or makes a world of this one."""
    store, rank, ranks = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=TIMEOUT))
        # torchrun's store still has the addresses of before a restart: each attempt has a part of its own
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    else:                                                 # gloo listens to this machine only
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.distributed_c10d.default_pg_timeout = TIMEOUT    # of the mesh's groups, which else wait 30 minutes
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=ranks)
    end = None
    try:
        yield
    except SystemExit as refusal:
        end = refusal.with_traceback(None)                # which holds on to the groups
    dist.destroy_process_group()
    gc.collect()                                          # gloo's threads must not outlive the interpreter
    if end:
        raise end


def together(work, *inputs):
    """Does the work on every rank. What one rank refuses all do: a file may be missing on one machine."""
    result, refusal = None, None
    try:
        result = work(*inputs)
    except SystemExit as end:
        refusal = getattr(end, "message", None), end.code
    for rank, refusal in enumerate(all_gather_object(refusal)):
        if refusal:
            message, status = refusal
            if message:
                print0(f"error: rank {rank}: {message}" if rank else f"error: {message}", sys.stderr)
            dist.barrier()                                # torchrun ends all as soon as one has ended
            raise SystemExit(status)
    return result


def all_gather_object(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_same_on_all_ranks(args, config, tokens):
    """Refuses ranks that were started with other flags, that read other data, or that have no GPU."""
    every = all_gather_object({**vars(args), **vars(config), "data": dataset_digest(tokens)})
    for rank, theirs in enumerate(every):
        for name, value in theirs.items():
            if value != every[0][name]:
                fail(f"{name} is {every[0][name]} on rank 0 and {value} on rank {rank}")
    if args.device == "cuda" and int(os.environ.get("LOCAL_RANK", 0)) >= torch.cuda.device_count():
        fail(f"each process takes a GPU of its own, and this machine has {torch.cuda.device_count()}")


def dataset_digest(tokens):
    """Tells one dataset from another: its length, and a digest of a thousand of its tokens."""
    some = [int(tokens[i:i + 1][0]) for i in range(0, len(tokens), len(tokens) // 1000 + 1)]
    return f"{len(tokens)} tokens, {hashlib.sha256(str(some).encode()).hexdigest()[:16]}"


def build_mesh(args):
    """Names the dimensions in which the ranks lie."""
    if args.device == "cuda":                             # what is started first runs first, in all groups
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    sizes = (args.pp, args.dp, args.cp, args.tp)
    return init_device_mesh(args.device, sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))


def data_mesh(mesh):
    """The ranks with the same weights and other tokens."""
    return mesh["dp", "cp"]._flatten("dp_cp")


def mesh_dim_of_group(mesh):
    """{name of a process group: the dimension of the mesh along which its ranks lie}"""
    names = {data_mesh(mesh).get_group().group_name: "dp_cp"}
    return names | {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names}
