"""Data parallelism: every rank holds the whole model and works on its own part of the batch; the gradients
are summed.

The loss is a sum divided by the tokens of the global batch, so summing over ranks gives the gradient of the
mean. The same sum three ways:

    naive     when backward is over, one all-reduce per parameter, one after the other
    overlap   an all-reduce per parameter as soon as its gradient is there, while backward goes on
    bucket    the same in few large messages: gradients live side by side in flat buffers, reduced when full

All of them send only after the last micro-batch of a step: what earlier ones add up is not final.
"""
import functools

import torch
import torch.distributed as dist

from ledger import formulas
from mesh import data_mesh


def make_reducer(params, group, args):
    """Call before the optimizer is made. What it returns is called after backward, and sums the gradients."""
    params = list(params)
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.dp)
    if args.dp_mode == "naive":
        return naive(params, group)
    if args.dp_mode == "overlap":
        return overlap(params, group, micro_batches)
    return bucketed(params, group, micro_batches, args.bucket_mb * 2**20)


# ------------------------------------------------------------------------------------------- naive
def naive(params, group):
    def sum_gradients():
        for param in params:
            dist.all_reduce(param.main_grad, group=group)
    return sum_gradients


# ------------------------------------------------------------------------------------------- overlap
def overlap(params, group, micro_batches):
    handles = []

    def start(param):
        handles.append(dist.all_reduce(param.main_grad, group=group, async_op=True))
    on_grad(params, micro_batches, start)
    return functools.partial(wait_for_all, handles)


def wait_for_all(handles):
    for all_reduce in handles:
        all_reduce.wait()
    handles.clear()


def on_grad(params, micro_batches, start):
    """Calls start(param) as soon as backward has added the last micro-batch's share to param.main_grad."""
    backwards = dict.fromkeys(params, 0)

    def count(param):
        backwards[param] += 1
        if backwards[param] % micro_batches == 0:
            start(param)
    for param in params:
        param.register_post_accumulate_grad_hook(count)   # runs after optimizer.py's add_to_main_grad


# ------------------------------------------------------------------------------------------- bucket
class Bucket:
    """Parameters whose main_grads are views of one flat buffer: nothing is copied to be sent."""

    def __init__(self, params):
        self.params, self.num_pending = params, len(params)
        self.flat_grad = torch.cat([param.main_grad.flatten() for param in params])
        for param, view in zip(params, self.flat_grad.split([param.numel() for param in params])):
            param.main_grad = view.view_as(param)


def make_buckets(params, bucket_bytes):
    """Runs of about bucket_bytes, in the order in which backward reaches the parameters."""
    runs, size = [[]], 0
    for param in reversed(params):
        if size >= bucket_bytes:
            runs.append([])
            size = 0
        runs[-1].append(param)
        size += param.main_grad.nbytes
    return [Bucket(run) for run in runs]


def bucketed(params, group, micro_batches, bucket_bytes):
    bucket_of = {param: bucket for bucket in make_buckets(params, bucket_bytes) for param in bucket.params}
    handles = []

    def start_when_full(param):
        bucket = bucket_of[param]
        bucket.num_pending -= 1
        if bucket.num_pending == 0:
            handles.append(dist.all_reduce(bucket.flat_grad, group=group, async_op=True))
            bucket.num_pending = len(bucket.params)
    on_grad(params, micro_batches, start_when_full)
    return functools.partial(wait_for_all, handles)


# ------------------------------------------------------------------------------------------- what it sends
def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes): every main_grad once."""
    group = data_mesh(mesh).get_group()
    params = [] if args.zero else model.parameters()
    return [(group, "all_reduce", param.main_grad.nbytes) for param in params]


formulas.append(formula)
