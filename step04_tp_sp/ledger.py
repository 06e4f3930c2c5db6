"""--ledger: what one training step sends, seen as it is sent, beside what the formula says.

Every collective, wherever it is called from (forward, backward, a hook, the optimizer), is an operation of
the c10d library, and a TorchDispatchMode sees every operation. Nothing has to be wrapped or told.

Payload is what a call moves seen from one rank: the tensor that is reduced or exchanged, the whole of what is
gathered or scattered. On the wire a ring moves of it, per rank: 2 (n-1)/n for an all-reduce, (n-1)/n for the
others.
"""
import contextlib
from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mesh import mesh_dim_of_group
from messages import print0

formulas = []                             # every technique adds its own: (model, mesh, args) -> what it sends

#                       c10d's name         ours              argument with the payload, wire per payload
COLLECTIVES = {"allreduce_":           ("all_reduce",     0, lambda n: 2 * (n - 1) / n),
               "_allgather_base_":     ("all_gather",     0, lambda n: (n - 1) / n),
               "_reduce_scatter_base_": ("reduce_scatter", 1, lambda n: (n - 1) / n),
               "alltoall_base_":       ("all_to_all",     1, lambda n: (n - 1) / n),
               "broadcast_":           ("broadcast",      0, lambda n: (n - 1) / n),
               "send":                 ("send",           0, lambda n: 1)}


class Ledger(TorchDispatchMode):
    def __init__(self, mesh):
        super().__init__()
        self.names = {dist.group.WORLD.group_name: "world", **mesh_dim_of_group(mesh)}
        self.calls, self.payload, self.wire = Counter(), Counter(), Counter()     # by (dimension, collective)

    def name(self, group):
        return self.names.get(group.group_name, group.group_desc.removeprefix("mesh_"))

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d" and op._opname in COLLECTIVES:
            collective, payload, on_the_wire = COLLECTIVES[op._opname]
            group = group_of(args)
            what = self.name(group), collective
            size = sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
            self.calls[what] += 1
            self.payload[what] += size
            self.wire[what] += size * on_the_wire(group.size())
            if collective == "all_to_all" and args[4]:    # uneven: all is sent but what stays here
                self.wire[what] += size * (1 / group.size() - args[4][group.rank()] / max(1, sum(args[4])))
        return op(*args, **(kwargs or {}))


def group_of(args):
    objects = [a for a in args if isinstance(a, torch.ScriptObject)]
    return next(dist.ProcessGroup.unbox(a) for a in objects if a._type().name() == "ProcessGroup")


@contextlib.contextmanager
def ledger(step, model, mesh, args):
    """Records the second training step, or the only one; rank 0 prints it."""
    if not args.ledger or step != min(args.first_step + 1, args.steps - 1):
        yield
        return
    # under a mode torch would give up compiling, for the rest of the run
    eager = torch.compiler.set_stance("force_eager") if args.compile else contextlib.nullcontext()
    with eager, Ledger(mesh) as seen:
        yield
    expected = Counter()
    for group, collective, size in expected_traffic(model, mesh, args):
        expected[seen.name(group), collective] += size
    print_table(seen, expected)


def print_table(seen, expected):
    print0(f"{'dimension':<10}{'collective':<16}{'calls':>7}"
        f"{'payload bytes':>16}{'expected_traffic':>16}{'on the wire':>16}")
    for what in sorted(seen.calls.keys() | expected.keys()):
        print0(f"{what[0]:<10}{what[1]:<16}{seen.calls[what]:>7,}"
            f"{seen.payload[what]:>16,}{expected[what]:>16,}{seen.wire[what]:>16,.0f}")


def expected_traffic(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes): all techniques, and the loss."""
    loss = dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize
    return [loss, *(sent for technique in formulas for sent in technique(model, mesh, args))]
