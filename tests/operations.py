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
        collectives = {rank: [o for o in said[rank] if o[2] is None] for rank in ranks}
        for rank in ranks:
            assert collectives[rank] == collectives[ranks[0]], f"group {ranks}: ranks {ranks[0]} and {rank} differ"
            for other in ranks:
                sent = [shapes for what, shapes, peer in said[rank] if what == "send" and peer == other]
                received = [shapes for what, shapes, peer in said[other] if what == "recv_" and peer == rank]
                assert sent == received, f"group {ranks}: from {rank} to {other}"
    return len(groups)
