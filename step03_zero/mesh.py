"""One process per device: join them, arrange them in a mesh, and make them exit together when one fails."""
import contextlib
import datetime
import gc
import glob
import hashlib
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn                # imported later, its defaults would hold a process group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from messages import clean_exit, fail, print0

TIMEOUT = datetime.timedelta(minutes=10)                  # a collective that takes longer has hung
# torch 2.13 renames two collectives; torch 2.11 has only the old names
warnings.filterwarnings("ignore", "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated")


@contextlib.contextmanager
def init_distributed():
    """Join the processes that torchrun started, or form a world of one, for as long as main runs."""
    with clean_exit():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.distributed_c10d.default_pg_timeout = TIMEOUT         # the mesh's groups take torch's default
        try:
            store, rank, world_size = meeting_place()
            dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world_size)
        except (ValueError, RuntimeError) as error:
            raise OSError(f"the ranks cannot meet ({error}); start them with torchrun") from None
        failure = None
        try:
            yield
        except SystemExit as error:
            failure = error.with_traceback(None)          # a traceback would keep the process groups alive
        dist.destroy_process_group()
        free_process_groups()
        if failure:
            raise failure


def free_process_groups():
    """End gloo's threads before the interpreter ends, by freeing all that holds their process groups."""
    for value in gc.get_objects():
        if type(value) is torch.nn.Parameter and value._post_accumulate_grad_hooks:
            value._post_accumulate_grad_hooks.clear()     # they lead to a cycle that the collector cannot see
    gc.collect()


def meeting_place():
    """Return the store through which the ranks find each other, this process's rank, and the world size."""
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":      # keep gloo off the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        return dist.HashStore(), 0, 1
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun lends the ranks its own store, which still holds the old addresses after a restart. So give
        # each attempt its own prefix, its number. But the torchruns of several nodes count differently.
        nodes, restarts = (os.environ.get(name) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
        if nodes not in (None, "1") and restarts not in (None, "0"):
            fail("--max-restarts on several nodes: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for each "
                 "torchrun and use --rdzv_backend c10d; otherwise a restart may hang")
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return store, rank, world_size


@contextlib.contextmanager
def fail_together():
    """Make all ranks exit if one calls fail() in the decorated function: its machine may lack a file.

    Otherwise the others would wait in their next collective until torchrun kills them or it times out, and
    the message of a rank other than 0 would not be printed.
    """
    failure = None
    try:
        yield
    except SystemExit as error:
        failure = getattr(error, "message", None), error.code
    for rank, failure in enumerate(all_gather_object(failure)):
        if failure:
            message, status = failure
            if message:
                print0(f"error: rank {rank}: {message}" if rank else f"error: {message}", sys.stderr)
            # let rank 0 print first: torchrun kills the other ranks when one exits with an error
            dist.barrier()
            raise SystemExit(status)


def all_gather_object(value):
    """Return the list of every rank's value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@fail_together()
def check_same_on_all_ranks(args, config, tokens):
    """Fail if ranks were started with different flags or read different files, or if one has no GPU."""
    files = {"data": dataset_digest(tokens), "content of --init_from": weights_digest(args.init_from)}
    settings = all_gather_object({**vars(args), **vars(config), **files})
    for rank, rank_settings in enumerate(settings):
        for name, value in rank_settings.items():
            if value != settings[0][name]:
                fail(f"{name} differs between ranks: {settings[0][name]} on rank 0, {value} on rank {rank}; "
                     "start all ranks with the same flags and files")
    if args.device == "cuda" and int(os.environ.get("LOCAL_RANK", 0)) >= torch.cuda.device_count():
        fail(f"more processes than GPUs on this machine; use --nproc_per_node {torch.cuda.device_count()}")


def dataset_digest(tokens):
    """Return a string that tells one dataset from another: its length and a hash of a thousand tokens."""
    sample = [int(tokens[i:i + 1][0]) for i in range(0, len(tokens), len(tokens) // 1000 + 1)]
    return f"{len(tokens)} tokens, {hashlib.sha256(str(sample).encode()).hexdigest()[:16]}"


def weights_digest(folder):
    """Return a string that tells the weight files in one folder from others, by a hundred parts of each."""
    sample = hashlib.sha256()
    for path in sorted(glob.glob(f"{folder}/*.safetensors")):
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            for start in range(0, size, size // 100 + 1):
                file.seek(start)
                sample.update(file.read(1000))
    return sample.hexdigest()[:16]


def build_mesh(args) -> DeviceMesh:
    """Arrange the ranks in a mesh with named dimensions."""
    if args.device == "cuda":
        # Launch NCCL's kernels in program order, across groups. Otherwise two ranks could start the kernels
        # of two groups in opposite orders, and wait for each other forever.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    sizes = degrees(args)
    return init_device_mesh(args.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def degrees(args):
    """Return {mesh dimension: its size}, outermost first, for the dimensions that this step has."""
    return {name: getattr(args, name) for name in ("pp", "dp", "cp", "tp") if hasattr(args, name)}


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same weights and compute on different tokens."""
    return mesh["dp"]


def mesh_dim_of_group(mesh: DeviceMesh):
    """Return {name of a process group: the mesh dimension along which its ranks lie}."""
    return {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names}
