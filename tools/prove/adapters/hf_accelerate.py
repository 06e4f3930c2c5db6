"""Hugging Face accelerate, its own loop: DDP, or FSDP2 by fsdp= replicas=, or tp=, by its ParallelismConfig; acc= clip= (on CPUs).

    python tools/prove tools/prove/adapters/hf_accelerate.py --world 4 --flags "fsdp=2 replicas=2"

The loss is the mean over a micro-batch, as in accelerate's examples. On CPUs, accelerate refuses a ParallelismConfig, and without
one it wraps DDP where FSDP was asked for. So build skips that check, and says FSDP. In --both: clip=, and model= of hf_native.py.
"""
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import DistributedType
from hf_native import BATCH, SEQ, VOCAB, modules, own_rows, place, small_model  # noqa: F401
from transformers.distributed import DistributedConfig

NEEDS = "accelerate==1.15.0, transformers==5.24.0"
ParallelismConfig._validate_accelerator = lambda *_: None


def build(flags):
    dist.init_process_group("gloo")
    fsdp, replicas, tp, acc = (flags.get(name, 1) for name in ("fsdp", "replicas", "tp", "acc"))
    config, plugin = {}, None
    if fsdp * tp > 1:
        config["parallelism_config"] = ParallelismConfig(dp_shard_size=fsdp, dp_replicate_size=replicas, tp_size=tp)
    if fsdp > 1:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=acc, fsdp_plugin=plugin, **config)
    if plugin:
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        assert accelerator.is_fsdp2
    model = small_model(flags, **dict(distributed_config=DistributedConfig(tp_size=tp)) if tp > 1 else {})
    wrapped, adamw = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    return SimpleNamespace(accelerator=accelerator, model=accelerator.unwrap_model(wrapped), wrapped=wrapped, adamw=adamw, acc=acc,
                           tp=tp, fsdp=fsdp, clip=float(flags.get("clip", "inf")), grads={}, norm=None)


def step(run, inputs, targets):
    accelerator = run.accelerator
    run.adamw.zero_grad()
    mine, total = own_rows(run), torch.zeros(())
    for x, y in zip(inputs[mine].chunk(run.acc), targets[mine].chunk(run.acc)):
        with accelerator.accumulate(run.wrapped):         # it divides the loss by acc
            loss = torch.nn.functional.cross_entropy(run.wrapped(input_ids=x).logits.flatten(0, 1), y.flatten())
            accelerator.backward(loss)
            total = total + loss.detach() / run.acc
            if accelerator.sync_gradients:
                run.grads = {name: param.grad.detach().clone() for name, param in run.model.named_parameters()}
                run.norm = accelerator.clip_grad_norm_(run.wrapped.parameters(), run.clip)
                run.adamw.step()
    return accelerator.reduce(total, reduction="mean"), run.norm


def parts(run):
    return ((name, param, run.grads.get(name), None) for name, param in run.model.named_parameters())
