"""Zero bubble, part two of step 6: split the backward of a stage into two parts, I and W.

    I   the gradient of the stage's input, which the previous stage is waiting for
    W   the gradients of its linears' weights, which nothing needs before the optimizer

So a schedule can put W where a rank would otherwise idle (https://arxiv.org/abs/2401.10241). Autograd
computes both parts at once. To split them, each linear of attention and MLP (from step 7 on, also of the
experts) computes with its weight detached, so that autograd computes I alone; and each queues what W needs,
its input and its output's gradient. (The other gradients, such as those of norms, embedding and head, remain
in I.) The schedules that use this, zero_bubble and dualpipe, are at the end of schedules.py.
"""
import functools

import torch
import torch.nn.functional as F

from moe import MoE, grouped_product, grouped_weight_grad
from tensor_parallel import enter_region, leave_region


def linear_weight_grad(grad, x):
    return grad.flatten(0, -2).T @ x.flatten(0, -2)       # [outputs, inputs]


def accumulate_weight_grads(x, grads, comm, weight_grad):
    """Compute W for linears with the common input x, from {linear: gradient of its output}."""
    if comm:                                           # x is this tp rank's part, as in ColumnParallelLinears
        gather, _, group = comm
        x = gather(x, group)()
    for linear, grad in grads.items():
        linear.weight.backward(weight_grad(grad, x))      # accumulates in a leaf, and so calls its hooks


class DeferWeightGrads(torch.autograd.Function):
    """The identity, in front of linears. Its backward, which runs after theirs, queues their W.

    By then the gradients of their outputs are known, and autograd has kept or recomputed their input.
    """

    @staticmethod
    def forward(ctx, x, grads, comm, weight_grad, queue):
        ctx.save_for_backward(x)
        ctx.grads, ctx.comm, ctx.weight_grad, ctx.queue = grads, comm, weight_grad, queue
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        W = functools.partial(accumulate_weight_grads, x, ctx.grads, ctx.comm, ctx.weight_grad)
        ctx.queue.append(W)
        return grad, None, None, None, None


def keep_grad(y, linear, grads):
    """Store the gradient of y, a linear's output, when autograd has computed it."""
    def hook(grad):
        grads[linear] = grad
    y.register_hook(hook)


def defer_weight_grads(linears, queue, comm=None):
    """Return a function that applies linears to their common input and leaves their weight gradients to W."""
    def products(x):
        grads = {}
        x = DeferWeightGrads.apply(x, grads, comm, linear_weight_grad, queue)
        if comm:
            x = enter_region(x, comm)
        outputs = [F.linear(x, linear.weight.detach()) for linear in linears]
        for linear, y in zip(linears, outputs):
            keep_grad(y, linear, grads)
        return outputs
    return torch.compiler.disable(products)               # a compiled backward would hide what W needs


def defer_output_linear(linear, queue):
    """Defer the weight gradient of the linear that ends a region. With tp, its outputs are partial sums."""
    products, comm = defer_weight_grads([linear], queue), getattr(linear, "comm", None)
    linear.forward = lambda x: leave_region(products(x)[0], comm) if comm else products(x)[0]


def defer_grouped_weight_grads(linear, queue):
    """Defer the weight gradient of a grouped linear."""
    def product(x, tokens_per_expert):
        grads, weight = {}, linear.weight
        weight_grad = lambda grad, x: grouped_weight_grad(grad, x, weight, tokens_per_expert)
        x = DeferWeightGrads.apply(x, grads, None, weight_grad, queue)
        y = grouped_product(x, weight.detach(), tokens_per_expert)
        keep_grad(y, linear, grads)
        return y
    return torch.compiler.disable(product)


def split_backward(layers, queue):
    """Make backward append the linears' weight gradients to the queue, as functions to call: W."""
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        comm = getattr(attention.q_proj, "comm", None)    # with tp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        attention.project = defer_weight_grads(qkv, queue, comm)
        defer_output_linear(attention.o_proj, queue)
        if isinstance(mlp, MoE):
            for linear in mlp.experts.children():
                linear.forward = defer_grouped_weight_grads(linear, queue)
            continue
        mlp.project = defer_weight_grads([mlp.gate_proj, mlp.up_proj], queue, comm)
        defer_output_linear(mlp.down_proj, queue)
