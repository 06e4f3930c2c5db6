"""Data parallelism: every rank holds the whole model and works on its own part of the batch; the gradients are summed.

The loss is a sum divided by the tokens of the global batch, so summing over ranks gives the gradient of the mean.
The same sum three ways, each with less waiting than the one before:

    naive     when backward is over, one all-reduce per parameter, one after the other
    overlap   an all-reduce per parameter as soon as its gradient is there, while backward goes on
    bucket    the same in few large messages: gradients live side by side in flat buffers, reduced when full

All of them speak only after the last micro-batch of a step: what earlier ones add up is not final.
"""
import torch
import torch.distributed as dist


def data_parallel(params, group, args):
    """Call before the optimizer is made; returns a function to call after backward, when it is over the gradients
    are summed."""
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.dp)
    params = list(params)
    if args.dp_mode == "naive":
        return naive(params, group)
    if args.dp_mode == "overlap":
        return overlap(params, group, micro_batches)
    return bucket(params, group, micro_batches, args.bucket_mb * 2**20)


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes): every main_grad once, and the loss."""
    number = torch.promote_types(args.dtype, torch.float32).itemsize
    return [*((param.copies, "all_reduce", param.main_grad.nbytes) for param in model.parameters()),
            (dist.group.WORLD, "all_reduce", number)]


def naive(params, group):
    def finish():
        for param in params:
            dist.all_reduce(param.main_grad, group=group)
    return finish


def after_last_micro_batch(params, micro_batches, ready):
    """Calls ready(param) as soon as backward has added the last micro-batch's share to param.main_grad."""
    backwards = dict.fromkeys(params, 0)
    def count(param):
        backwards[param] += 1
        if backwards[param] % micro_batches == 0:
            ready(param)
    for param in params:
        param.register_post_accumulate_grad_hook(count)   # runs after optimizer.py's add_to_main_grad


def overlap(params, group, micro_batches):
    under_way = []
    def ready(param):
        under_way.append(dist.all_reduce(param.main_grad, group=group, async_op=True))
    after_last_micro_batch(params, micro_batches, ready)

    def finish():
        for all_reduce in under_way:
            all_reduce.wait()
        under_way.clear()
    return finish


def bucket(params, group, micro_batches, bucket_bytes):
    buckets = flat_buckets(params, bucket_bytes)
    bucket_of = {param: bucket for bucket in buckets for param in bucket["params"]}
    under_way = []
    def ready(param):
        bucket = bucket_of[param]
        bucket["missing"] -= 1
        if bucket["missing"] == 0:
            under_way.append(dist.all_reduce(bucket["flat"], group=group, async_op=True))
            bucket["missing"] = len(bucket["params"])
    after_last_micro_batch(params, micro_batches, ready)

    def finish():
        for all_reduce in under_way:
            all_reduce.wait()
        under_way.clear()
    return finish


def flat_buckets(params, bucket_bytes):
    """Cuts the parameters, in the order in which backward reaches them, into runs of about bucket_bytes, and makes
    their main_grads views of one flat buffer per run: nothing is copied to be sent."""
    runs, size = [[]], 0
    for param in reversed(params):
        if size >= bucket_bytes:
            runs.append([])
            size = 0
        runs[-1].append(param)
        size += param.main_grad.nbytes
    buckets = []
    for run in runs:
        flat = torch.cat([param.main_grad.flatten() for param in run])
        for param, view in zip(run, flat.split([param.numel() for param in run])):
            param.main_grad = view.view_as(param)
        buckets.append(dict(params=run, flat=flat, missing=len(run)))
    return buckets
