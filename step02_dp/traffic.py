"""The bytes that each technique should send in one training step, for --ledger to compare with those sent."""
import torch
import torch.distributed as dist

from mesh import data_mesh


def expected_traffic(model, mesh, args):
    """Return a list of (process group, collective, payload bytes), for the loss and for every technique."""
    loss = dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize
    return [loss, *data_parallel_traffic(model, mesh, args)]


def data_parallel_traffic(model, mesh, args):
    group = data_mesh(mesh).get_group()
    return [(group, "all_reduce", param.main_grad.nbytes) for param in model.parameters()]
