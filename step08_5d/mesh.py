"""One process per device: starting them, their mesh, and ending in a way that says what happened."""
import contextlib
import datetime
import gc
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

# torch 2.13 renames two collectives; 2.11 has the old names only
warnings.filterwarnings("ignore", "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated")
TIMEOUT = datetime.timedelta(minutes=10)                  # a collective that takes longer than this is stuck


def start_mesh(args):
    """Joins the processes that torchrun started (or this one alone) and names the dimensions they are laid out in."""
    alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.update({key: value for key, value in alone.items() if key not in os.environ})
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=TIMEOUT, **meeting_place())
    mesh = init_device_mesh(args.device, (args.pp, args.dp, args.cp, args.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    mesh["dp", "cp"]._flatten("dp_cp")                    # the ranks with the same weights and other tokens
    return mesh


def meeting_place():
    """Of the ranks: torchrun's store. After a restart it still has what the attempt before left in it, so each has a part of its own."""
    store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dict(store=dist.PrefixStore(attempt, store), rank=rank, world_size=world_size)


@contextlib.contextmanager
def ends_well():
    """Around main: a collective that fails is reported with the rank and the line that waited; at the end all is let go."""
    try:
        yield
    except RuntimeError as error:
        here = os.path.dirname(os.path.abspath(__file__))
        frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) == here]
        place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}"
        print(f"rank {os.environ.get('RANK', '0')} failed in {place}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        raise
    dist.destroy_process_group()
    gc.collect()                                          # gloo's threads must not outlive the interpreter
