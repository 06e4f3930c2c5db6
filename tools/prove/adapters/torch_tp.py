"""transformers' Llama under torch's parallelize_module: tensor parallel (tp=2), with sequence parallel (sp=1) or without."""
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               parallelize_module)
from torch_dp import BATCH, SEQ, VOCAB, init, llama, modules, parts  # noqa: F401

NEEDS = "transformers"


def plans(sp):
    """Return the plan of a layer, and that of the model's ends."""
    between = Shard(1) if sp else Replicate()             # how activations lie between the sharded matrices
    column, row = ColwiseParallel, lambda: RowwiseParallel(output_layouts=between)
    layer = {"self_attn.q_proj": column(), "self_attn.k_proj": column(), "self_attn.v_proj": column(), "self_attn.o_proj": row(),
             "mlp.gate_proj": column(), "mlp.up_proj": column(), "mlp.down_proj": row()}
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate())}
    if sp:
        layer |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(),
                  "self_attn": PrepareModuleInput(input_kwarg_layouts={"hidden_states": Shard(1)},
                                                  desired_input_kwarg_layouts={"hidden_states": Replicate()}),
                  "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))}
        ends["model.norm"] = SequenceParallel()
    return layer, ends


def build(flags):
    device = init()
    model, tp = llama(flags, device), flags.get("tp", 1)
    if tp > 1:
        mesh = init_device_mesh(device.type, (tp,))
        of_layer, of_ends = plans(flags.get("sp", 0))
        for layer in model.model.layers:
            parallelize_module(layer, mesh, of_layer)
        parallelize_module(model, mesh, of_ends)
    return SimpleNamespace(model=model, device=device, adamw=torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))


def step(run, inputs, targets):
    run.adamw.zero_grad()
    inputs, targets = inputs.to(run.device), targets.to(run.device)
    logits = run.model(input_ids=inputs, position_ids=torch.arange(inputs.shape[1], device=run.device)[None]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    grads = [param.grad for param in run.model.parameters()]                       # torch takes no norm of DTensors with tensors
    norm = torch.nn.utils.get_total_norm([grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads])
    run.adamw.step()
    return loss.detach(), norm


def place(run):
    return {"tp": dist.get_rank()}
