"""OLMo-core's TransformerTrainModule, its own train_batch and optim_step: dp= kind=fsdp, ddp or hsdp, tp= acc= clip= (on CPUs).

    python tools/prove tools/prove/adapters/of_olmo_core.py --world 2 --flags "dp=2" --mask --dtype float32

Its model is llama-like, with QK-norm. Its FSDP reduces in float32; use --dtype float32 for sharper words. clip= belongs in --both.
"""
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train.train_module.transformer import TransformerTrainModule
from olmo_core.train.train_module.transformer.config import TransformerDataParallelConfig, TransformerTensorParallelConfig

NEEDS = "ai2-olmo-core==3.0.0"
BATCH, SEQ, VOCAB = 8, 16, 64


class Kept(TransformerTrainModule):
    """Keeps the loss that it logs, the gradient norm, and the gradients before they are clipped."""

    def record_ce_loss(self, loss, reduce_type=None):
        self.loss = loss.clone()

    def _clip_grad_norm(self, *args, **kwargs):
        self.grads = {name: param.grad.detach().clone() for name, param in self.model.named_parameters()}
        self.norm = super()._clip_grad_norm(*args, **kwargs)
        return self.norm


def build(flags):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dp, tp, acc, kind = (flags.get(*pair) for pair in (("dp", 1), ("tp", 1), ("acc", 1), ("kind", "fsdp")))
    config = TransformerConfig.llama_like(d_model=32, vocab_size=VOCAB, n_layers=2, n_heads=4, n_kv_heads=2, rope_theta=10000,
                                          hidden_size_multiple_of=16, qk_norm=True, use_head_qk_norm=True,
                                          attn_backend=AttentionBackendName.torch)
    model, more = config.build(init_device="cpu").to(getattr(torch, flags["dtype"])), {}
    if dist.get_world_size() > 1:                         # it wants this for tp alone, too
        more["dp_config"] = TransformerDataParallelConfig(name=DataParallelType[kind], num_replicas=2 if kind == "hsdp" else None)
    if tp > 1:
        more["tp_config"] = TransformerTensorParallelConfig(degree=tp)
    run = Kept(model, AdamWConfig(lr=1e-2), rank_microbatch_size=BATCH // dp // acc * SEQ, max_sequence_length=SEQ,
               max_grad_norm=float(flags.get("clip", "inf")), device=torch.device("cpu"), **more)
    run._trainer, run.sizes, run.grads = MagicMock(), SimpleNamespace(dp=dp, tp=tp), {}
    return run


def step(run, inputs, targets):
    run.zero_grads()
    mine = slice(dist.get_rank() // run.sizes.tp, None, run.sizes.dp)
    run.train_batch(dict(input_ids=inputs[mine].contiguous(), labels=targets[mine].contiguous()))
    run.optim_step()
    loss = run.loss.double()
    dist.all_reduce(loss)                                 # it logs a mean over all ranks
    return loss / dist.get_world_size(), run.norm


def parts(run):
    for name, param in run.model.named_parameters():
        yield name.removeprefix("module."), param, run.grads.get(name), None


def place(run):
    rank, tp = dist.get_rank(), run.sizes.tp
    return {"dp": rank // tp, "tp": rank % tp}


def modules(run):
    return [(name.removeprefix("module."), module) for name, module in run.model.named_modules()]
