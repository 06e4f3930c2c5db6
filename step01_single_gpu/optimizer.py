"""AdamW with float32 master weights, gradient accumulation in float32, and the learning-rate schedule.

In bfloat16, adding a thousandth of a weight to the weight changes nothing, and neither does adding a small
gradient to a large sum. So gradients are accumulated in float32 (`param.main_grad`), AdamW updates a float32
copy of each weight (the master weight), and the model computes with the master weights rounded to bfloat16.
"""
import math

import torch


def add_main_grads(params):
    """Give each parameter a main_grad. Every backward pass adds its gradient there, not to param.grad."""
    for param in params:
        param.main_grad = torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))
        param.register_post_accumulate_grad_hook(accumulate_in_main_grad)


def accumulate_in_main_grad(param):
    param.main_grad += param.grad
    param.grad = None


def learning_rate(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    if args.lr_schedule == "constant":
        return args.lr
    progress = (step - args.warmup) / max(1, args.steps - 1 - args.warmup)         # 1 at the last step
    return args.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


class Optimizer:
    def __init__(self, params, args):
        self.params, self.grad_clip = list(params), args.grad_clip
        # in float32 and float64 `to` copies nothing: the master weight is the parameter's own memory
        self.masters = [param.detach().to(param.main_grad.dtype) for param in self.params]
        self.grads = [param.main_grad for param in self.params]
        for master, grad in zip(self.masters, self.grads):
            master.grad = grad
        decay = [m for m, p in zip(self.masters, self.params) if p.dim() >= 2]
        no_decay = [m for m, p in zip(self.masters, self.params) if p.dim() < 2]   # the norms
        groups = [dict(params=decay, weight_decay=args.weight_decay), dict(params=no_decay, weight_decay=0.0)]
        self.adamw = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def clip_grad_norm(self):
        """Scale all gradients to a global norm of at most grad_clip. Return the norm before clipping."""
        square = torch.stack(torch._foreach_norm(self.grads)).square().sum()
        norm = square.sqrt()
        if self.grad_clip:
            torch._foreach_mul_(self.grads, (self.grad_clip / (norm + 1e-6)).clamp(max=1))
        return norm

    def step(self, lr):
        """Update the master weights, copy them into the weights, and zero the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        if self.params and self.params[0].dtype != self.masters[0].dtype:
            torch._foreach_copy_([param.data for param in self.params], self.masters)
        torch._foreach_zero_(self.grads)
