"""Record what each rank sends and receives in a step, and check that it all meets.

NCCL needs the same collectives in the same order from all ranks of a group and, for every pair of ranks, the sends in the order
of the receives. If ranks communicate in several groups, no rank may wait for ever, even if the operations that a rank has started
run one after the other: a busy GPU is free to run them like that.
"""
import itertools

from watch import group_of, tensors


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
        """Note an operation that torch dispatches. The caller passes every one of them."""
        if op.namespace == "c10d":
            import torch.distributed as dist
            group = group_of(args)
            ranks = tuple(dist.get_process_group_ranks(group))
            assert all(tensor.is_contiguous() for tensor in tensors(args)), f"nccl takes contiguous tensors only: {op}"
            shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(args[:1]))
            peer = ranks[args[2]] if op._opname in ("send", "recv_") else None
            if op._opname == "alltoall_base_" and args[4]:                         # uneven: the numbers of rows decide
                shapes, peer = None, (tuple(args[4]), tuple(args[3]))
            self.operations.append((group.group_name, ranks, op._opname, shapes, peer, self.batch))


def assert_all_meet(per_rank):
    """Check that the operations of all ranks, a Recorder's on each, meet. Return the number of groups that communicated."""
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
    """Check that all operations end if each rank runs its own strictly in order. A batch of sends and receives counts as one."""
    coming = []                                           # for each rank, the last first: {operation: the ranks that take part}
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
