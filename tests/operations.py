"""What each rank sends and receives over a whole run, and whether it all meets: nccl needs the same collectives in the
same order from all ranks of a group, and of every pair of ranks the sends in the order of the receives."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            import torch.distributed as dist
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and a._type().name() == "ProcessGroup")
            ranks = tuple(dist.get_process_group_ranks(group))
            shapes = tuple(tuple(tensor.shape) for tensor in tree_leaves(args[0]) if isinstance(tensor, torch.Tensor))
            peer = ranks[args[2]] if op._opname in ("send", "recv_") else None
            if op._opname == "alltoall_base_" and args[4]:                         # as many rows to each as there are
                shapes, peer = None, (tuple(args[4]), tuple(args[3]))
            self.operations.append((group.group_name, ranks, op._opname, shapes, peer))
        return op(*args, **(kwargs or {}))


def recorded_job(argv):
    import train
    with Recorder() as recorder:
        train.main(argv)
    return recorder.operations


def assert_all_meet(per_rank):
    """per_rank: what recorded_job returned on each rank. Returns the number of groups in which something was said."""
    groups = {(name, ranks) for operations in per_rank for name, ranks, *_ in operations if len(ranks) > 1}
    for name, ranks in groups:
        said = {rank: [o[2:] for o in per_rank[rank] if o[:2] == (name, ranks)] for rank in ranks}
        collectives = {rank: [(*o[:2], None) for o in said[rank] if not isinstance(o[2], int)] for rank in ranks}
        uneven = {rank: [o[2] for o in said[rank] if isinstance(o[2], tuple)] for rank in ranks}
        for rank in ranks:
            assert collectives[rank] == collectives[ranks[0]], f"group {ranks}: ranks {ranks[0]} and {rank} differ"
            for i, other in enumerate(ranks):
                to, of = [sent[i] for sent, _ in uneven[rank]], [received[ranks.index(rank)] for _, received in uneven[other]]
                assert to == of, f"group {ranks}: what {rank} sends to {other} is not what {other} expects"
                sent = [shapes for what, shapes, peer in said[rank] if what == "send" and peer == other]
                received = [shapes for what, shapes, peer in said[other] if what == "recv_" and peer == rank]
                assert sent == received, f"group {ranks}: from {rank} to {other}"
    return len(groups)
