"""The bytes that each technique should send in one training step, for --ledger to compare with those sent."""
import math

import torch
import torch.distributed as dist

from expert_parallel import moe_layers
from mesh import data_mesh, mesh_of
from model import MLP, Attention
from pipeline_parallel import local_stages


def expected_traffic(model, mesh, args):
    """Return a list of (process group, collective, payload bytes), for the loss and for every technique."""
    loss = dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize
    return [loss, *data_parallel_traffic(model, mesh, args), *zero_traffic(model, args),
            *tensor_parallel_traffic(model, mesh, args), *context_parallel_traffic(model, mesh, args),
            *pipeline_traffic(model, mesh, args), *expert_parallel_traffic(model, mesh, args)]


def data_parallel_traffic(model, mesh, args):
    params = [] if args.zero else model.parameters()
    return [(mesh_of(param, mesh).get_group(), "all_reduce", param.main_grad.nbytes) for param in params]


def zero_traffic(model, args):
    grad_norm = dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize
    num_micro_batches, traffic = args.global_batch_size // (args.micro_batch_size * args.dp), [grad_norm]
    for unit in model.zero_units:
        gathers = 1
        reduces = num_micro_batches if args.zero >= 2 else 1
        if args.zero == 3 and args.pp == 1:               # in forward, and some units again in backward
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
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp
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


def context_parallel_traffic(model, mesh, args):
    if args.cp == 1:
        return []
    group, layers = mesh.get_group("cp"), model.model.layers
    attention = next(iter(layers.values())).self_attn
    # each token of this rank goes through the attention of every layer
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp * len(layers)
    # number of elements in all queries, and in all keys; outputs and values have as many
    q, kv = (tokens * len(proj.weight) for proj in (attention.q_proj, attention.k_proj))
    itemsize = args.dtype.itemsize
    acc_itemsize = torch.promote_types(args.dtype, torch.float32).itemsize     # gradients are summed in this
    num_passes = 2 if args.recompute == "none" else 3     # forward, backward; recomputing runs forward again
    if args.cp_mode == "ulysses":
        # each pass exchanges q, k, v and the output, or their gradients
        kv_heads = len(attention.k_proj.weight) // attention.head_dim
        repeats = args.cp // math.gcd(kv_heads, args.cp)  # each kv head is sent this many times
        return [(group, "all_to_all", num_passes * itemsize * (2 * q + 2 * kv * repeats))]
    if args.cp_mode == "allgather":
        # each pass gathers keys and values; backward also reduce-scatters their gradients
        gathered = num_passes * args.cp * 2 * kv * itemsize
        return [(group, "all_gather", gathered), (group, "reduce_scatter", args.cp * 2 * kv * acc_itemsize)]
    # ring, zigzag: each pass sends keys and values cp - 1 times, and backward sends their gradients cp times
    sent, grads_sent = num_passes * (args.cp - 1) * 2 * kv * itemsize, args.cp * 2 * kv * acc_itemsize
    return [(group, "send", sent + grads_sent)]


def pipeline_traffic(model, mesh, args):
    stages, num_stages = local_stages(mesh, args), args.pp * args.stages_per_rank
    neighbors = [neighbor for stage in stages for neighbor in (stage - 1, stage + 1)]
    # activations go to the stage after, gradients to the stage before, if another rank holds it
    messages = sum(0 <= neighbor < num_stages and neighbor not in stages for neighbor in neighbors)
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp
    if args.sp == "on":
        tokens //= args.tp
    message_bytes = tokens * model.model.config.hidden_size * args.dtype.itemsize
    return [(mesh.get_group("pp"), "send", messages * message_bytes)] if messages else []


def expert_parallel_traffic(model, mesh, args):
    """Return the expected traffic if all experts get equally many tokens: each row goes there and back."""
    layers, config = moe_layers(model), model.model.config
    if not layers:
        return []
    sequences = args.global_batch_size // args.dp
    tokens = sequences * args.seq_len // args.cp
    forwards = 1 if args.recompute == "none" else 2
    count_bytes = len(layers) * config.num_local_experts * torch.int64.itemsize    # a number per expert
    traffic = [(data_mesh(mesh).get_group(), "all_reduce", count_bytes),
               (dist.group.WORLD, "all_reduce", torch.float64.itemsize)]           # `balance`, for the log
    if args.ep > 1:
        group = layers[0].dispatch.group
        rows = len(layers) * tokens * config.num_experts_per_tok
        row_bytes = rows * config.hidden_size * args.dtype.itemsize
        traffic.append((group, "all_to_all", 2 * (forwards + 1) * row_bytes))      # there and back
        traffic.append((group, "all_to_all", forwards * sequences // args.micro_batch_size * count_bytes))
    if args.balance == "aux":
        traffic.append((mesh.get_group("cp"), "all_reduce", forwards * sequences * count_bytes))
    return traffic
