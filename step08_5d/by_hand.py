"""Which ranks communicate with which, in five dimensions, on 16 real ranks: python step08_5d/by_hand.py"""
import string
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

PP, DP, CP, TP = 2, 2, 2, 2                               # outermost first: the ranks of tp are neighbours
EP = 4                                                    # divides dp x cp x tp: ep adds no ranks of its own
RANKS = PP * DP * CP * TP
NODE = 8                                                  # ranks that share the fast links
GROUPS = {                # {name: (dimensions in which the ranks of a group agree, what they send)}
    "tp":        (("pp", "dp", "cp"), "parts of the activations, several times a layer"),
    "cp":        (("pp", "dp", "tp"), "keys and values, in every attention"),
    "ep":        (("pp", "expert_dp"), "tokens, to their experts and back"),
    "dp":        (("pp", "cp", "tp"), "nothing by itself: see dp_cp"),
    "dp_cp":     (("pp", "tp"), "gradients of all but the experts, once a step"),
    "expert_dp": (("pp", "ep"), "gradients of the experts, once a step"),
    "pp":        (("dp", "cp", "tp"), "activations, from stage to stage")}


# With a pencil: a rank's place in each dimension, by division with remainder.
def place(rank):
    at = {"tp": rank % TP, "cp": rank // TP % CP, "dp": rank // (TP * CP) % DP, "pp": rank // (TP * CP * DP)}
    at["dp_cp"] = at["dp"] * CP + at["cp"]                # ranks with the same weights and different tokens
    in_stage = rank % (DP * CP * TP)                      # its number among the ranks of its pp stage
    at["ep"] = in_stage % EP                              # which experts it has
    at["expert_dp"] = in_stage // EP                      # which of their copies it has
    return at


def peers(rank, name):                                    # all ranks that agree with it in these dimensions
    same = GROUPS[name][0]
    return [r for r in range(RANKS) if all(place(r)[where] == place(rank)[where] for where in same)]


# With torch: a mesh of four dimensions. For the experts, dp x cp x tp is split again, into expert_dp x ep.
def process_groups():
    mesh = init_device_mesh("cpu", (PP, DP, CP, TP), mesh_dim_names=("pp", "dp", "cp", "tp"))
    data, stage = mesh["dp", "cp"]._flatten("dp_cp"), mesh["dp", "cp", "tp"]._flatten("dp_cp_tp")
    experts = stage._unflatten(0, (DP * CP * TP // EP, EP), ("expert_dp", "ep"))
    return {name: part.get_group(name) for part in (mesh, data, experts) for name in part.mesh_dim_names}


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    groups = process_groups()
    if rank == 0:
        print("ranks of a group have the same letter; | is the end of a node\n")
        print(f"{'rank':10}", row(range(RANKS)))
    for name in GROUPS:
        ranks = all_gather(rank, groups[name])
        assert ranks == peers(rank, name), (rank, name, ranks, peers(rank, name))
        first = all_gather(ranks[0])                      # for every rank, the first rank of its group
        letters = dict(zip(sorted(set(first)), string.ascii_uppercase))
        if rank == 0:
            print(f"{name:10}", row(letters[number] for number in first), "", GROUPS[name][1])
    dist.barrier()                                        # no rank exits while others still communicate
    dist.destroy_process_group()


def all_gather(number, group=None):                       # the numbers of all ranks of the group
    numbers = [torch.tensor([0]) for _ in range(dist.get_world_size(group))]
    dist.all_gather(numbers, torch.tensor([number]), group)
    return [number.item() for number in numbers]


def row(entries):
    cells = [f"{entry:>3}" for entry in entries]
    return " |".join("".join(cells[i:i + NODE]) for i in range(0, RANKS, NODE))


with tempfile.TemporaryDirectory() as folder:
    mp.start_processes(main, (folder,), nprocs=RANKS, start_method="fork")
print("\nin every group, the ranks that communicate are those that the arithmetic predicts")
