"""Train the model on one process. This is what your trainer has to equal: every certificate compares it with this file."""
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from model import Config, Model

BATCH, SEQ, VOCAB = 8, 16, 64                             # of the global batch


def build(flags):
    torch.manual_seed(0)
    model = Model(Config(experts=flags.get("experts", 0))).to(getattr(torch, flags["dtype"]))
    return SimpleNamespace(model=model, adamw=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))


def step(run, inputs, targets):
    run.adamw.zero_grad()
    logits = run.model(inputs)
    # the mean over all targets of the global batch but those that are -100
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in run.model.parameters()])
    run.adamw.step()
    return loss.detach(), norm


def parts(run):
    for name, param in run.model.named_parameters():
        yield name, param, param.grad, None


def modules(run):
    return run.model.named_modules()
