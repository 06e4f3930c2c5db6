"""transformers' Llama under torch's DDP (mode=ddp) or FSDP2 (mode=fsdp), with accumulation (acc=2)."""
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

NEEDS = "transformers"
BATCH, SEQ, VOCAB = 8, 16, 64


def init():
    """Start torch.distributed, with nccl where there are GPUs; return this rank's device."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        return torch.device("cuda")
    dist.init_process_group("gloo")
    return torch.device("cpu")


def llama(flags, device):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=flags.get("layers", 2),
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ, use_cache=False)
    return LlamaForCausalLM(config).to(device, getattr(torch, flags["dtype"]))


def build(flags):
    device = init()
    model, mode = llama(flags, device), flags.get("mode")
    if mode == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if mode == "ddp" else model
    return SimpleNamespace(model=model, wrapped=wrapped, acc=flags.get("acc", 1), device=device,
                           adamw=torch.optim.AdamW(model.parameters(), lr=1e-2))


def parts(run):
    return ((name, param, param.grad, None) for name, param in run.model.named_parameters())


def step(run, inputs, targets):
    run.adamw.zero_grad()
    count = (targets >= 0).sum().to(run.device)                                    # of the global batch
    mine, total = slice(dist.get_rank(), None, dist.get_world_size()), torch.zeros((), dtype=torch.float64, device=run.device)
    micro_batches = [*zip(inputs[mine].to(run.device).chunk(run.acc), targets[mine].to(run.device).chunk(run.acc))]
    for i, (x, y) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        if hasattr(run.model, "set_requires_gradient_sync"):
            run.model.set_requires_gradient_sync(last)
        run.wrapped.require_backward_grad_sync = last
        logits = run.wrapped(input_ids=x).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / count
        (loss * dist.get_world_size()).backward()         # both wrappers average over the ranks
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), float("inf"))
    run.adamw.step()
    dist.all_reduce(total)
    return total, norm


def save(run, folder):
    model, optimizer = get_state_dict(run.model, run.adamw)
    dcp.save(dict(model=model, optimizer=optimizer), checkpoint_id=folder)


def load(run, folder):
    model, optimizer = get_state_dict(run.model, run.adamw)                        # filled in place
    dcp.load(dict(model=model, optimizer=optimizer), checkpoint_id=folder)
    set_state_dict(run.model, run.adamw, model_state_dict=model, optim_state_dict=optimizer)


def place(run):
    return {"dp": dist.get_rank()}


def modules(run):
    return run.model.named_modules()
