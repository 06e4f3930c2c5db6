"""transformers' Llama under torch.distributed.pipelining: pp=2 acc=4 schedule=Schedule1F1B or ScheduleGPipe."""
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch_dp import BATCH, SEQ, VOCAB, init, llama, modules, parts  # noqa: F401

NEEDS = "transformers"


class Stage(torch.nn.Module):
    """The layers of one rank. Modules keep their names, so parameters do, too."""

    def __init__(self, whole, rank, stages):
        super().__init__()
        layers, self.model, last = whole.model.layers, whole.model, rank == stages - 1
        mine = range(rank * len(layers) // stages, (rank + 1) * len(layers) // stages)
        self.model.layers = torch.nn.ModuleDict({str(i): layers[i] for i in mine})
        self.model.embed_tokens = self.model.embed_tokens if rank == 0 else None
        self.model.norm, self.lm_head = (self.model.norm, whole.lm_head) if last else (None, None)

    def forward(self, x):
        x = self.model.embed_tokens(x) if self.model.embed_tokens else x
        tables = self.model.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=tables)
        return self.lm_head(self.model.norm(x)).flatten(0, 1) if self.lm_head else x


def build(flags):
    device = init()
    rank, pp, acc = dist.get_rank(), flags.get("pp", 1), flags.get("acc", 1)
    stage = pipelining.PipelineStage(Stage(llama(flags, device), rank, pp), rank, pp, device)
    schedule = getattr(pipelining, flags.get("schedule", "Schedule1F1B"))
    loss = lambda logits, y: torch.nn.functional.cross_entropy(logits, y.flatten())
    return SimpleNamespace(model=stage.submod, schedule=schedule(stage, acc, loss), acc=acc, pp=pp, device=device,
                           adamw=torch.optim.AdamW(stage.submod.parameters(), lr=1e-2))


def step(run, inputs, targets):
    run.adamw.zero_grad()
    first, last, losses = dist.get_rank() == 0, dist.get_rank() == run.pp - 1, []
    run.schedule.step(*[inputs.to(run.device)] * first, **dict(target=targets.to(run.device), losses=losses) if last else {})
    square = sum(param.grad.double().square().sum() for param in run.model.parameters())
    dist.all_reduce(square)
    run.adamw.step()
    return sum(losses).detach() / run.acc if last else None, square.sqrt()


def place(run):
    return {"pp": dist.get_rank()}
