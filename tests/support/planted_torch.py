"""Mistakes planted in trainers that use torch's own parallelism. The layout has `plant=NAME` among its flags; one process is right.

A mistake is a function of this file. It is called when the trainer has been built, and changes it as a slip of its author would.
"""
import functools
import itertools

import torch
import torch.distributed as dist
import torch_dp
import torch_pp
import torch_tp
from plants import plant
from torch.distributed.tensor import DTensor, Replicate

BATCH, SEQ, VOCAB = 8, 16, 64
TORCH, PLANTED = {}, {}                                   # {name: what the test expects}, {name: (adapter, function)}


def planted(adapter, layout, causes, place="", **options):
    def note(function):
        name = "torch_" + function.__name__
        TORCH[name] = plant(f"{layout} of={adapter.__name__} plant={name}", causes, place, **options)
        PLANTED[name] = adapter, function
        return function
    return note


def build(flags):
    name, module = flags.pop("plant", None), flags.pop("of", "torch_dp")
    run = {"torch_dp": torch_dp, "torch_tp": torch_tp, "torch_pp": torch_pp}[module].build(flags)
    run.adapter, run.take_step = {"torch_dp": torch_dp, "torch_tp": torch_tp, "torch_pp": torch_pp}[module], None
    run.take_step = run.adapter.step
    if name:
        PLANTED[name][1](run)
    return run


def step(run, inputs, targets):
    return run.take_step(run, inputs, targets)


def parts(run):
    return torch_dp.parts(run)


def place(run):
    return {} if dist.get_world_size() == 1 else run.adapter.place(run)


def modules(run):
    return run.model.named_modules()


def before_update(run, change):
    """Call a function between backward and the optimizer's step."""
    update = run.adamw.step

    @functools.wraps(update)
    def changed(*args):
        change()
        return update(*args)
    run.adamw.step = changed


def with_batch(run, change):
    """Have a function change inputs and targets."""
    take_step = run.take_step
    run.take_step = lambda run, inputs, targets: take_step(run, *change(inputs, targets))


def with_log(run, change):
    take_step = run.take_step
    run.take_step = lambda *args: change(*take_step(*args))


def shared_rows(x):
    """Return the global batch as it must be so that each data-parallel rank cuts out the first rank's part."""
    world = dist.get_world_size()
    return x[::world].repeat_interleave(world, dim=0)


# ------------------------------------------------------------------------------------------- DDP
@planted(torch_dp, "2 mode=ddp", "all gradients times a factor")
def summed_not_averaged(run):
    before_update(run, lambda: [param.grad.mul_(2) for param in run.model.parameters()])


@planted(torch_dp, "2 mode=ddp acc=2", "not reduced")
def never_synchronized(run):
    run.wrapped = run.model


@planted(torch_dp, "2 mode=ddp acc=2", "gradients of some data")
def last_micro_batch_counts(run):
    run.wrapped.register_forward_pre_hook(lambda *_: run.adamw.zero_grad())


@planted(torch_dp, "2 mode=ddp", "other data")
def same_data_everywhere(run):
    with_batch(run, lambda inputs, targets: (shared_rows(inputs), shared_rows(targets)))


@planted(torch_dp, "2 mode=ddp", "not zeroed")
def not_zeroed(run):
    run.adamw.zero_grad = lambda *_: None


@planted(torch_dp, "2 mode=ddp", "log times a factor")
def log_summed(run):
    with_log(run, lambda loss, norm: (loss * 2, norm))


@planted(torch_dp, "2 mode=ddp", "decay")
def norms_do_not_decay(run):
    norms = [param for param in run.model.parameters() if param.dim() < 2]
    run.adamw.param_groups[0]["params"] = [param for param in run.model.parameters() if param.dim() > 1]
    run.adamw.add_param_group(dict(params=norms, weight_decay=0.0))


@planted(torch_dp, "2 mode=ddp", "update times a factor")
def learning_rate_scaled(run):
    run.adamw.param_groups[0]["lr"] *= 2


@planted(torch_dp, "2 mode=ddp", "not updated")
def only_rank_0_updates(run):
    if dist.get_rank():
        run.adamw.step = lambda *_: None


@planted(torch_dp, "2 mode=ddp", "mean of means", mask=True)
def own_number_of_targets(run):
    def own(run, inputs, targets):
        run.adamw.zero_grad()
        logits = run.wrapped(input_ids=inputs[dist.get_rank()::2]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[dist.get_rank()::2].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), float("inf"))
        run.adamw.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss / 2, norm
    run.take_step = own


@planted(torch_dp, "2 mode=ddp", "low precision")
def gradients_in_bfloat16(run):
    before_update(run, lambda: [param.grad.copy_(param.grad.bfloat16()) for param in run.model.parameters()])


@planted(torch_dp, "2 mode=ddp", "", r"layers\.0\.input_layernorm")
def other_epsilon(run):
    for module in run.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


@planted(torch_dp, "2 mode=ddp", "not reduced")
def head_left_out_of_ddp(run):
    head = run.model.lm_head.weight
    own = {}
    head.register_hook(lambda grad: own.update(grad=grad.clone()))
    before_update(run, lambda: head.grad.copy_(own["grad"]))


@planted(torch_dp, "2 mode=ddp", "zero gradients")
def embedding_frozen(run):
    before_update(run, lambda: run.model.model.embed_tokens.weight.grad.zero_())


# ------------------------------------------------------------------------------------------- FSDP2
@planted(torch_dp, "2 mode=fsdp", "norm of one rank")
def norm_of_the_shard(run):
    def local_norm(loss, norm):
        square = sum(param.grad.to_local().square().sum() for param in run.model.parameters())
        return loss, square.sqrt()
    with_log(run, local_norm)


@planted(torch_dp, "2 mode=fsdp", "all gradients times a factor")
def divided_by_nothing(run):
    before_update(run, lambda: [param.grad.mul_(dist.get_world_size()) for param in run.model.parameters()])


@planted(torch_dp, "2 mode=fsdp", "not updated")
def head_not_in_the_optimizer(run):
    run.adamw.param_groups[0]["params"] = [p for name, p in run.model.named_parameters() if name != "lm_head.weight"]


@planted(torch_dp, "2 mode=fsdp", "scaled apart")
def clipped_by_the_shard(run):
    def clip():
        shards = [param.grad.to_local() for param in run.model.parameters()]
        norm = torch.nn.utils.get_total_norm(shards)
        for shard in shards:
            shard.mul_(0.1 / norm)
    before_update(run, clip)


@planted(torch_dp, "2 mode=fsdp acc=2", "gradients of some data")
def first_micro_batch_only(run):
    count = itertools.count()
    forward = run.wrapped.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits if next(count) % 2 == 0 else output.logits.detach() + 0 * output.logits
        return output
    run.wrapped.forward = scaled


@planted(torch_dp, "2 mode=fsdp", "low precision")
def reduced_in_bfloat16(run):
    before_update(run, lambda: [param.grad.to_local().copy_(param.grad.to_local().bfloat16()) for param in run.model.parameters()])


# ------------------------------------------------------------------------------------------- parallelize_module
def local_as_whole(param):
    """Take a partial sum for the whole gradient."""
    if isinstance(param.grad, DTensor) and any(placement.is_partial() for placement in param.grad.placements):
        param.grad = DTensor.from_local(param.grad.to_local(), param.device_mesh, [Replicate()], run_check=False)


@planted(torch_tp, "2 tp=2 sp=1", "not reduced")
def norms_not_summed(run):
    for name, module in run.model.named_modules():
        if "norm" in name:
            module.weight.register_post_accumulate_grad_hook(local_as_whole)


@planted(torch_tp, "2 tp=2", "partial sum", r"layers\.1\.self_attn")
def attention_not_summed(run):
    """Keep the partial sum of each rank behind a layer's output projection."""
    projection = run.model.model.layers[1].self_attn.o_proj
    projection._forward_hooks.clear()
    projection.register_forward_hook(lambda module, args, output: output.to_local() if isinstance(output, DTensor) else output)


@planted(torch_tp, "2 tp=2", "backward, not reduced", r"layers\.1\.mlp|layers\.1\.post")
def entering_not_summed(run):
    """Keep the gradient of the MLP's input apart on each rank."""
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            if isinstance(grad, DTensor):
                return grad
            return grad * (2 * dist.get_rank() + 0.5)
    run.model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (Own.apply(args[0]),))


@planted(torch_tp, "2 tp=2", "", r"layers\.0\.self_attn")
def heads_of_the_other_rank(run):
    """Give each rank the keys of the other rank's heads."""
    attention = run.model.model.layers[0].self_attn

    def other(module, args, output):
        local = output.to_local() if isinstance(output, DTensor) else output
        swapped = local.clone()
        dist.all_reduce(swapped)
        return swapped - local
    attention.k_proj.register_forward_hook(other)


@planted(torch_tp, "2 tp=2", "norm counts")
def norm_counts_copies(run):
    def counted(loss, norm):
        copies = [param.grad for param in run.model.parameters() if not isinstance(param.grad, DTensor)]
        return loss, (norm.square() + sum(grad.square().sum() for grad in copies)).sqrt()
    with_log(run, counted)


@planted(torch_tp, "2 tp=2", "forward", "embed_tokens")
def embedding_of_one_rank(run):
    def half(module, args, output):
        local = output.to_local() if isinstance(output, DTensor) else output
        tokens = args[0].to_local() if isinstance(args[0], DTensor) else args[0]
        return local * (1 - 0.5 * (tokens >= VOCAB // 2))[..., None]
    run.model.model.embed_tokens.register_forward_hook(half)


# ------------------------------------------------------------------------------------------- pipelining
@planted(torch_pp, "2 pp=2 acc=4", "all gradients times a factor")
def not_scaled(run):
    run.schedule.scale_grads = False


@planted(torch_pp, "2 pp=2 acc=4", "", r"layers\.1\.self_attn")
def stage_with_other_positions(run):
    if dist.get_rank():
        rotary = run.model.model.rotary_emb
        forward = rotary.forward
        rotary.forward = lambda x, positions: forward(x, positions * 2)


@planted(torch_pp, "2 pp=2 acc=4", "sent", r"layers\.1\b")
def sends_the_micro_batch_before(run):
    stage, sends = run.schedule._stage, {}
    own, stage.get_fwd_send_ops = stage.get_fwd_send_ops, lambda i: sends.update({i: own(i)}) or sends[max(i - 1, 0)]


@planted(torch_pp, "2 pp=2 acc=4", "end of forward, other data")
def targets_of_another_micro_batch(run):
    with_batch(run, lambda inputs, targets: (inputs, targets.roll(2, 0)))


@planted(torch_pp, "2 pp=2 acc=4", "norm of one rank")
def norm_of_the_stage(run):
    def own(loss, norm):
        return loss, sum(param.grad.double().square().sum() for param in run.model.parameters()).sqrt()
    with_log(run, own)


@planted(torch_pp, "2 pp=2 acc=4", "not updated")
def last_stage_stands_still(run):
    if dist.get_rank():
        run.adamw.step = lambda *_: None


@planted(torch_pp, "2 pp=2 acc=4", "log times a factor")
def log_of_all_micro_batches(run):
    with_log(run, lambda loss, norm: (None if loss is None else loss * run.acc, norm))


@planted(torch_pp, "2 pp=2 acc=4", "some gradients times a factor", "pp 0")
def gradient_halved_on_the_way(run):
    """Divide once too often what the first stage gets back."""
    if dist.get_rank() == 0:
        before_update(run, lambda: [param.grad.div_(2) for param in run.model.parameters()])
