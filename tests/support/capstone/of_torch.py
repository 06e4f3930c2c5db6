"""A solution of the capstone made of torch's own parts: DDP, FSDP2, parallelize_module, pipelining, DCP. No cp, no ep."""
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from model import Config, Model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Stage(nn.Module):
    """The layers of one rank; modules keep their names."""

    def __init__(self, whole, rank, stages):
        super().__init__()
        share = len(whole.layers) // stages
        self.embed = whole.embed if rank == 0 else None
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in range(rank * share, (rank + 1) * share)})
        self.norm, self.head = (whole.norm, whole.head) if rank == stages - 1 else (None, None)

    def forward(self, x):
        x = self.embed(x) if self.embed else x
        for layer in self.layers.values():
            x = layer(x, torch.arange(x.shape[1]))
        return self.head(self.norm(x)) if self.head else x


def tensor_parallel(model, mesh):
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {"attn.q": columns, "attn.k": columns, "attn.v": columns, "attn.o": rows,
                                         "ffn.gate": columns, "ffn.up": columns, "ffn.down": rows})
    if model.embed:
        parallelize_module(model.embed, mesh, RowwiseParallel(input_layouts=Replicate()))
    if model.head:
        parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))


def build(flags):
    dist.init_process_group("gloo")
    pp, dp, tp, acc, zero = (flags.get(name, 1) for name in ("pp", "dp", "tp", "acc", "zero"))
    if flags.keys() & {"cp", "ep", "experts"}:
        raise NotImplementedError(f"cp, ep: {flags}")
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    stage = mesh["pp"].get_local_rank()
    model = Stage(Model(Config()).to(getattr(torch, flags["dtype"])), stage, pp)
    run = SimpleNamespace(mesh=mesh, model=model, wrapped=model, acc=acc, dp=dp, pp=pp, last=stage == pp - 1)
    if tp > 1:
        tensor_parallel(model, mesh["tp"])
    if zero == 3 or tp > 1 and dp > 1:
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif dp > 1:
        run.wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    if pp > 1:
        part = PipelineStage(model, stage, pp, torch.device("cpu"), group=mesh["pp"].get_group())
        run.schedule = Schedule1F1B(part, acc, lambda logits, targets: loss_of(run, logits, targets), scale_grads=False)
    if flags.get("zero") == 1:
        run.adamw = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    else:
        run.adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    return run


def loss_of(run, logits, targets):
    """Return the share of the global batch's loss; DDP and FSDP take a mean over dp, so it counts dp times."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / run.count * run.dp


def step(run, inputs, targets):
    run.adamw.zero_grad()
    run.count, losses = (targets >= 0).sum(), []
    inputs, targets = (tokens.chunk(run.dp)[run.mesh["dp"].get_local_rank()] for tokens in (inputs, targets))
    if run.pp > 1:
        run.schedule.step(*[inputs] * (run.model.embed is not None), **dict(target=targets, losses=losses) if run.last else {})
    else:
        for i, (tokens, wanted) in enumerate(zip(inputs.chunk(run.acc), targets.chunk(run.acc))):
            run.wrapped.require_backward_grad_sync = i == run.acc - 1
            losses.append(loss_of(run, run.wrapped(tokens), wanted))
            losses[-1].backward()
    grads = [param.grad for param in run.model.parameters()]
    grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    squares = torch.nn.utils.get_total_norm(grads).square()
    dist.all_reduce(squares, group=run.mesh["pp"].get_group())
    run.adamw.step()
    total = sum(loss.detach() for loss in losses) / run.dp if run.last else None
    if run.last:
        dist.all_reduce(total, group=run.mesh["dp"].get_group())
    return total, squares.sqrt()


def parts(run):
    for name, param in run.model.named_parameters():
        yield name, param, param.grad, None


def place(run):
    return {name: run.mesh[name].get_local_rank() for name in run.mesh.mesh_dim_names}


def modules(run):
    return run.model.named_modules()


def save(run, folder):
    model, optimizer = get_state_dict(run.model, run.adamw)
    dcp.save(dict(model=model, optimizer=optimizer), checkpoint_id=folder)


def load(run, folder):
    model, optimizer = get_state_dict(run.model, run.adamw)                        # filled in place
    dcp.load(dict(model=model, optimizer=optimizer), checkpoint_id=folder)
    set_state_dict(run.model, run.adamw, model_state_dict=model, optim_state_dict=optimizer)
