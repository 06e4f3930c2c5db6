"""The bytes that each technique should send in one training step, for --ledger to compare with those sent."""
import torch
import torch.distributed as dist

from mesh import data_mesh
from model import MLP, Attention


def expected_traffic(model, mesh, args):
    """Return a list of (process group, collective, payload bytes), for the loss and for every technique."""
    loss = dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize
    return [loss, *data_parallel_traffic(model, mesh, args), *zero_traffic(model, args),
            *tensor_parallel_traffic(model, mesh, args)]


def data_parallel_traffic(model, mesh, args):
    group = data_mesh(mesh).get_group()
    params = [] if args.zero else model.parameters()
    return [(group, "all_reduce", param.main_grad.nbytes) for param in params]


def zero_traffic(model, args):
    grad_norm = dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize
    num_micro_batches, traffic = args.global_batch_size // (args.micro_batch_size * args.dp), [grad_norm]
    for unit in model.zero_units:
        gathers = 1
        reduces = num_micro_batches if args.zero >= 2 else 1
        if args.zero == 3:                                # in forward, and some units again in backward
            gathers = num_micro_batches * (1 + (unit.weights_in_backward and unit.reshard_after_forward))
        traffic.append((unit.shard_group, "all_gather", gathers * unit.flat_param.nbytes))
        grad_bytes = unit.grad_shard.nbytes * unit.shard_group.size()
        traffic.append((unit.shard_group, "reduce_scatter", reduces * grad_bytes))
        if unit.replicate_group.size() > 1:
            traffic.append((unit.replicate_group, "all_reduce", unit.grad_shard.nbytes))
    return traffic


def tensor_parallel_traffic(model, mesh, args):
    if args.tp == 1:
        return []
    group, decoder = mesh.get_group("tp"), model.model
    tokens = args.global_batch_size // args.dp * args.seq_len
    activation_bytes = tokens * decoder.config.hidden_size * args.dtype.itemsize   # [batch, seq, hidden]
    layers, recomputes = len(decoder.layers), args.recompute != "none"
    # A layer has two regions; embedding and head are half a region each. Forward reduces on leaving a region,
    # backward where forward entered it. Recomputing repeats one of forward's two reductions in a layer: it
    # stops before the last operation.
    ends = (decoder.embed_tokens is not None) + (model.lm_head is not None)
    reductions = (4 + recomputes) * layers + ends
    traffic = []
    if args.sp == "off":
        traffic.append((group, "all_reduce", reductions * activation_bytes))
    else:                                                # ColumnParallelLinears gathers again in backward
        gathered_again = sum(isinstance(module, (Attention, MLP)) for module in decoder.modules())
        gathers = (4 + 2 * recomputes) * layers + ends + gathered_again
        traffic.append((group, "reduce_scatter", reductions * activation_bytes))
        traffic.append((group, "all_gather", gathers * activation_bytes))
    if model.lm_head is not None:                         # the cross-entropy's three numbers per token
        dtype = torch.promote_types(args.dtype, torch.float32)
        traffic.append((group, "all_reduce", 3 * tokens * dtype.itemsize))
    params = [param for unit in model.zero_units for param in unit.sharded_params()]
    for param in params or model.parameters():
        if param.placement.grad_reduce_group:
            traffic.append((param.placement.grad_reduce_group, "all_reduce", param.main_grad.nbytes))
    return traffic
