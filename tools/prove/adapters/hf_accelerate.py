"""transformers' Llama under Hugging Face accelerate: its DDP, with accumulation (acc=2)."""
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from torch_dp import BATCH, SEQ, VOCAB, llama  # noqa: F401

NEEDS = "accelerate, transformers"


def build(flags):
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=flags.get("acc", 1))
    model = llama(flags, accelerator.device)
    wrapped, adamw = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return SimpleNamespace(accelerator=accelerator, model=model, wrapped=wrapped, adamw=adamw, acc=flags.get("acc", 1), norm=None)


def step(run, inputs, targets):
    accelerator = run.accelerator
    run.adamw.zero_grad()
    mine, total = slice(accelerator.process_index, None, accelerator.num_processes), torch.zeros((), device=accelerator.device)
    for x, y in zip(inputs[mine].to(accelerator.device).chunk(run.acc), targets[mine].to(accelerator.device).chunk(run.acc)):
        with accelerator.accumulate(run.wrapped):         # it divides the loss by acc
            loss = torch.nn.functional.cross_entropy(run.wrapped(input_ids=x).logits.flatten(0, 1), y.flatten())
            accelerator.backward(loss)
            total = total + loss.detach() / run.acc
            if accelerator.sync_gradients:
                run.norm = accelerator.clip_grad_norm_(run.wrapped.parameters(), float("inf"))
                run.adamw.step()
    return accelerator.reduce(total, reduction="mean"), run.norm


def parts(run):
    return ((name, param, param.grad, None) for name, param in run.model.named_parameters())


def place(run):
    return {"dp": run.accelerator.process_index}


def modules(run):
    return run.model.named_modules()
