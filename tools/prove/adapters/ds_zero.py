"""DeepSpeed's engine on transformers' Llama: zero= (0 to 3) acc= clip= (on CPUs, with --dtype float32).

    python tools/prove tools/prove/adapters/ds_zero.py --world 2 --flags "zero=3" --dtype float32

DeepSpeed refuses float64. clip= belongs in --both; without it, ZeRO 0 computes no gradient norm.
"""
import os
import sys
from types import SimpleNamespace

os.environ |= dict(DS_ACCELERATOR="cpu", DS_SKIP_CUDA_CHECK="1")
import deepspeed  # noqa: E402
import deepspeed.comm.torch  # noqa: E402
import deepspeed.runtime.engine as of_engine  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param, safe_set_local_fp32_param  # noqa: E402
from torch_dp import BATCH, SEQ, VOCAB, llama, modules, place  # noqa: E402, F401

NEEDS = "deepspeed==0.19.8, transformers"
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None    # a faster all-reduce for CPUs, which takes minutes to compile


def engine_of(model, flags, acc, **more):
    """Return DeepSpeed's engine round a model. Replicas share the batch, and each cuts its part into `acc` micro-batches."""
    config = dict(train_batch_size=BATCH, gradient_accumulation_steps=acc, gradient_clipping=float(flags.get("clip", 0)),
                  zero_optimization=dict(stage=flags.get("zero", 0), reduce_bucket_size=5000, stage3_param_persistence_threshold=0),
                  zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False, steps_per_print=10**9, **more)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config,
                                      dist_init_required=False)
    clip = of_engine.clip_grad_norm_

    def logged(*args, **kwargs):
        engine.clipped_by = clip(*args, **kwargs)
        return engine.clipped_by
    of_engine.clip_grad_norm_ = logged                    # only ZeRO 0 calls it, and keeps the norm to itself
    return engine


def norm_of(engine):
    return getattr(engine, "clipped_by", engine.get_global_grad_norm())


def whole_gradients(model):
    return {name: safe_get_full_grad(param).clone() for name, param in model.named_parameters()}


def build(flags):
    deepspeed.init_distributed("gloo", verbose=False)
    acc, model = flags.get("acc", 1), llama(flags, "cpu")
    engine = engine_of(model, flags, acc, communication_data_type="fp32")
    return SimpleNamespace(engine=engine, model=model, acc=acc, zero=flags.get("zero", 0), grads={})


def step(run, inputs, targets):
    engine, rank, world = run.engine, dist.get_rank(), dist.get_world_size()
    count, total = (targets >= 0).sum(), torch.zeros((), dtype=torch.float64)      # of the global batch
    for x, y in zip(inputs[rank::world].chunk(run.acc), targets[rank::world].chunk(run.acc)):
        logits = engine(input_ids=x).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / count
        engine.backward(loss * world * run.acc)           # it takes the mean over ranks and micro-batches
        total += loss.detach()
        if engine.is_gradient_accumulation_boundary():
            run.grads = whole_gradients(run.model)
        engine.step()
    dist.all_reduce(total)
    return total, norm_of(engine)


def parts(run):
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, param in run.model.named_parameters():
        grad = run.grads.get(name)
        if run.zero == 3 and world > 1:                   # a flat slice, which here is a block of rows
            held = param.ds_tensor.view(param.ds_shape[0] // world, *param.ds_shape[1:])
            yield name, held, grad if grad is None else grad.chunk(world)[rank], {0: rank}
        else:
            yield name, param, grad, None


def loaded(run):
    for param in run.model.parameters():                  # copies that the optimizer updates
        if run.zero == 3:
            safe_set_local_fp32_param(param, param.ds_tensor.detach().clone())
        elif run.zero:
            safe_set_full_fp32_param(param, param.detach().clone())
