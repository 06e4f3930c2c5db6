"""transformers' Llama under torch.distributed.pipelining: pp=2 acc=4 schedule=1F1B, GPipe, Interleaved1F1B, DualPipeV, ...

    python tools/prove tools/prove/adapters/torch_pp.py --world 2 --both "layers=4" --flags "pp=2 acc=4 schedule=ZBVZeroBubble"

The schedules after GPipe have two stages on each rank, which takes layers=4 in --both. The loss is a mean over a micro-batch, or,
with mean=0, its share of the mean over the batch. scale= sets the schedule's scale_grads, which is right if it equals mean=.
"""
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch_dp import BATCH, SEQ, VOCAB, init, llama  # noqa: F401

NEEDS = "transformers"


class Stage(torch.nn.Module):
    """The layers of one stage. Modules keep their names, so parameters do, too."""

    def __init__(self, whole, index, stages):
        super().__init__()
        layers, self.model, last = whole.model.layers, whole.model, index == stages - 1
        mine = range(index * len(layers) // stages, (index + 1) * len(layers) // stages)
        self.model.layers = torch.nn.ModuleDict({str(i): layers[i] for i in mine})
        self.model.embed_tokens = self.model.embed_tokens if index == 0 else None
        self.model.norm, self.lm_head = (self.model.norm, whole.lm_head) if last else (None, None)

    def forward(self, x):
        x = self.model.embed_tokens(x) if self.model.embed_tokens else x
        tables = self.model.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=tables)
        return self.lm_head(self.model.norm(x)).flatten(0, 1) if self.lm_head else x


def build(flags):
    device, rank, pp, acc = init(), dist.get_rank(), flags.get("pp", 1), flags.get("acc", 1)
    name, mean = flags.get("schedule", "1F1B"), bool(flags.get("mean", 1))
    schedule = get_schedule_class(name.removeprefix("Schedule"))
    several = pp > 1 and issubclass(schedule, PipelineScheduleMulti)
    number = 2 * pp if several else pp
    second = number - 1 - rank if "V" in name else rank + pp                       # ZBV and DualPipeV go back up the ranks
    mine = [rank, second] if several else [rank]
    stages = [PipelineStage(Stage(llama(flags, device), index, number), index, number, device) for index in mine]
    run = SimpleNamespace(model=stages[0].submod, stages=stages, acc=acc, mean=mean, device=device, first=0 in mine,
                          last=number - 1 in mine)

    def loss(logits, y):
        loss = torch.nn.functional.cross_entropy(logits, y.flatten(), reduction="mean" if mean else "sum")
        return loss if mean else loss / run.count
    run.schedule = schedule(stages if several else stages[0], acc, loss, scale_grads=bool(flags.get("scale", mean)))
    run.adamw = torch.optim.AdamW([param for _, param, *_ in parts(run)], lr=1e-2)
    return run


def step(run, inputs, targets):
    run.adamw.zero_grad()
    run.count, losses = (targets >= 0).sum(), []                                   # of the global batch
    for_last = dict(target=targets.to(run.device), losses=losses) if run.last else {}
    run.schedule.step(*[inputs.to(run.device)] * run.first, **for_last)
    square = sum(grad.double().square().sum() for _, _, grad, _ in parts(run))
    dist.all_reduce(square)
    run.adamw.step()
    return sum(losses).detach() / (run.acc if run.mean else 1) if run.last else None, square.sqrt()


def parts(run):
    return ((name, param, param.grad, None) for stage in run.stages for name, param in stage.submod.named_parameters())


def place(run):
    return {"pp": dist.get_rank()}


def modules(run):
    return ((name, module) for stage in run.stages for name, module in stage.submod.named_modules())
