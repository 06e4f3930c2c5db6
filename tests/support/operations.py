"""What each rank sends and receives in a step, and whether it all meets: nccl needs the same collectives in the
same order from all ranks of a group, and of every pair of ranks the sends in the order of the receives. And where ranks talk in
several groups, none may wait for ever even if all that a rank has started ran one after the other, as a busy GPU is free to do."""
import itertools

import torch
from torch.utils._pytree import tree_leaves


class Recorder:
    def __init__(self):
        self.operations, self.batch = [], None

    def batch_isend_irecv(self, operations):
        import torch.distributed as dist
        self.batch = len(self.operations)
        works = dist.distributed_c10d.batch_isend_irecv(operations)
        self.batch = None
        return works

    def note(self, op, args):
        """To be told of every operation that torch dispatches."""
        if op.namespace == "c10d":
            import torch.distributed as dist
            group = next(dist.ProcessGroup.unbox(a) for a in args
                         if isinstance(a, torch.ScriptObject) and a._type().name() == "ProcessGroup")
            ranks = tuple(dist.get_process_group_ranks(group))
            tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)]
            assert all(tensor.is_contiguous() for tensor in tensors), f"nccl takes contiguous tensors only: {op}"
            shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tree_leaves(args[0])
                           if isinstance(tensor, torch.Tensor))
            peer = ranks[args[2]] if op._opname in ("send", "recv_") else None
            if op._opname == "alltoall_base_" and args[4]:                         # as many rows to each as there are
                shapes, peer = None, (tuple(args[4]), tuple(args[3]))
            self.operations.append((group.group_name, ranks, op._opname, shapes, peer, self.batch))


def assert_all_meet(per_rank):
    """per_rank: a Recorder's operations on each rank. Returns the number of groups in which something was said."""
    groups = {(name, ranks) for operations in per_rank for name, ranks, *_ in operations if len(ranks) > 1}
    for name, ranks in groups:
        said = {rank: [o[2:5] for o in per_rank[rank] if o[:2] == (name, ranks)] for rank in ranks}
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
    assert_none_waits_for_ever(per_rank)
    return len(groups)


def assert_none_waits_for_ever(per_rank):
    """Each rank does one thing after the other, a batch of sends and receives being one; all that can be done together is done."""
    coming = []                                           # of each rank, the last first: {what is done: the ranks that do it}
    for rank, operations in enumerate(per_rank):
        alone = itertools.count(-1, -1)
        batches = itertools.groupby((o for o in operations if len(o[1]) > 1), key=lambda o: next(alone) if o[5] is None else o[5])
        coming.append([dict(meeting(rank, *operation) for operation in batch) for _, batch in batches][::-1])
    while any(coming):
        moving = {rank for rank, things in enumerate(coming) if things}
        while stuck := {rank for rank in moving for thing, others in coming[rank][-1].items()
                        if any(other not in moving or thing not in coming[other][-1] for other in others)}:
            moving -= stuck
        assert moving, "all wait:\n" + "\n".join(f"rank {rank} for {list(things[-1])}"
                                                 for rank, things in enumerate(coming) if things)
        for rank in moving:
            coming[rank].pop()


def meeting(rank, group, ranks, what, shapes, peer, batch):
    ends = {"send": (rank, peer), "recv_": (peer, rank)}.get(what)
    return (group, ranks, ends or what), ends or ranks
