"""A solution of the capstone in plain collectives: every certificate, as briefly as it can be said.

A parallel dimension changes the model from outside: it cuts weights, and puts collectives before or after a module. What is left is
one list of parts. Each knows where it lies in the whole parameter, and over which ranks its gradient is a sum.
"""
import itertools
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Config, Model, MoE
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

GRID = ("pp", "pairs", "ep", "cp", "tp")                  # outermost first; dp is pairs x ep
CUT_BY_TP = dict(embed=0, q=0, k=0, v=0, gate=0, up=0, head=0, o=1, down=1)


# ------------------------------------------------------------------------------------------------ ranks
class Group:
    """The ranks that differ from this one in some dimensions of the grid only."""
    made = {}

    def __init__(self, grid, *dims):
        dims = [GRID.index(dim) for dim in dims]
        rows = grid.movedim(dims, [*range(-len(dims), 0)]).reshape(-1, *[grid.shape[dim] for dim in dims]).flatten(1).tolist()
        self.ranks = next(row for row in rows if dist.get_rank() in row)
        self.size, self.rank, key = len(self.ranks), self.ranks.index(dist.get_rank()), str(rows)
        if key not in self.made:                          # with dp alone, dp and data are the same ranks
            self.made[key], _ = dist.new_subgroups_by_enumeration(rows)
        self.group = self.made[key]

    def mine(self, tensor, dim=0):
        return tensor.chunk(self.size, dim)[self.rank]


def groups(flags):
    sizes = {dim: flags.get(dim, 1) for dim in ("pp", "dp", "ep", "cp", "tp")}
    sizes["pairs"] = sizes["dp"] // sizes["ep"]
    grid = torch.arange(dist.get_world_size()).view([sizes[dim] for dim in GRID])
    return SimpleNamespace(tp=Group(grid, "tp"), cp=Group(grid, "cp"), dp=Group(grid, "pairs", "ep"), pp=Group(grid, "pp"),
                           data=Group(grid, "pairs", "ep", "cp"), ep=Group(grid, "ep"), same_experts=Group(grid, "pairs", "cp"))


# ------------------------------------------------------------------------------------------------ collectives with a backward
class Sum(torch.autograd.Function):
    """Add up the terms of all ranks. All then compute the same, so the gradient is already that of each term."""
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group.group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Copy(torch.autograd.Function):
    """Let each rank use x for a part of the work. The gradient of x is the sum over the parts."""
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return Sum.apply(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """Concatenate the parts of all ranks. The gradient of a part is the sum of what all ranks did with it."""
    @staticmethod
    def forward(ctx, part, group, dim=0):
        ctx.group, ctx.dim = group, dim
        out = part.new_empty(group.size * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(out, part.contiguous(), group=group.group)
        return torch.cat(out.chunk(group.size), dim)

    @staticmethod
    def backward(ctx, grad):
        terms = torch.cat(grad.chunk(ctx.group.size, ctx.dim))
        out = terms.new_empty(terms.shape[0] // ctx.group.size, *terms.shape[1:])
        dist.reduce_scatter_tensor(out, terms, group=ctx.group.group)
        return out, None, None


class Exchange(torch.autograd.Function):
    """Send rows to every rank, and receive rows from every rank. Gradients go back the same way."""
    @staticmethod
    def forward(ctx, rows, sent, came, group):
        ctx.sent, ctx.came, ctx.group = sent, came, group
        out = rows.new_empty(sum(came), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), came, sent, group=group.group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.came, ctx.sent, ctx.group), None, None, None


# ------------------------------------------------------------------------------------------------ what changes the model
def keep_stage(model, group):
    """Keep this stage's layers; modules keep their names."""
    share = len(model.layers) // group.size
    model.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(group.rank * share, (group.rank + 1) * share)})
    if group.rank > 0:
        model.embed = None
    if group.rank < group.size - 1:
        model.norm = model.head = None


def tensor_parallel(model, group):
    """Cut the matrices: the first ones of a block by rows, so their input is copied, and the last by columns, so outputs add up."""
    for name, module in model.named_modules():
        if (kind := name.split(".")[-1]) in CUT_BY_TP:
            module.weight = nn.Parameter(group.mine(module.weight.data, CUT_BY_TP[kind]).clone())
        if kind in ("attn", "ffn", "head"):
            module.register_forward_pre_hook(lambda module, args: (Copy.apply(args[0], group), *args[1:]))
        if kind in ("o", "down"):
            module.register_forward_hook(lambda module, args, out: Sum.apply(out, group))

    def embed(self, tokens):
        row, here = rows_here(tokens, self.weight.shape[0], group)
        return Sum.apply(F.embedding(row, self.weight) * here[..., None], group)
    if model.embed:
        model.embed.forward = MethodType(embed, model.embed)


def rows_here(numbers, rows, group):
    """Return which of this rank's rows of the vocabulary they are, and whether they are here at all."""
    row = numbers - group.rank * rows
    here = (row >= 0) & (row < rows)
    return row.where(here, 0), here


def cross_entropy(logits, targets, group):
    """Return the sum over all targets but those of -100. Each rank of the group has the logits of its rows of the vocabulary."""
    top = logits.detach().amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group.group)
    row, here = rows_here(targets, logits.shape[-1], group)
    logits = logits - top[..., None]
    right = Sum.apply(logits.gather(-1, row[..., None])[..., 0] * here, group)
    return ((Sum.apply(logits.exp().sum(-1), group).log() - right) * (targets >= 0)).sum()


def context_parallel(model, group):
    """Gather keys and values, since a query looks at those of all ranks before its own."""
    def attend(q, k, v):
        k, v = Gather.apply(k, group, 2), Gather.apply(v, group, 2)
        mask = torch.arange(q.shape[2])[:, None] + group.rank * q.shape[2] >= torch.arange(k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    for layer in model.layers.values():
        layer.attn.attend = attend


def expert_parallel(moe, group):
    """Keep this rank's experts, and send each token to those that it has chosen, and back."""
    share = len(moe.experts) // group.size
    moe.experts = nn.ModuleDict({str(i): moe.experts[i] for i in range(group.rank * share, (group.rank + 1) * share)})

    def forward(x):
        tokens = x.flatten(0, -2)
        weights, chosen = moe.route(tokens)
        order = chosen.flatten().argsort(stable=True)     # by expert, and so by rank
        row = order // moe.top_k
        sends = chosen.flatten().bincount(minlength=share * group.size).view(group.size, share)
        comes = torch.empty_like(sends)                   # [from this rank, for this expert of ours]
        dist.all_to_all_single(comes, sends, group=group.group)
        sent, came = sends.sum(1).tolist(), comes.sum(1).tolist()
        here = Exchange.apply(tokens[row], sent, came, group)
        expert_of = torch.arange(share).repeat(group.size).repeat_interleave(comes.flatten())
        out = torch.zeros_like(here)
        for i, expert in enumerate(moe.experts.values()):
            its = (expert_of == i).nonzero().flatten()
            out = out.index_copy(0, its, expert(here[its]))
        back = Exchange.apply(out, came, sent, group)
        return torch.zeros_like(tokens).index_add(0, row, back * weights.flatten()[order, None]).view_as(x)
    moe.forward = forward


# ------------------------------------------------------------------------------------------------ parts
def parts_of(model, at, zero):
    """Return every part of a parameter that this rank has, and with ZeRO-3 cut them once more.

    `offsets`: where it lies in the whole. `sum_over`: the group whose gradients add up, or None if backward has added them.
    `copies`: how many ranks have it. `owned`: what the optimizer updates here.
    """
    found = []
    for name, param in [*model.named_parameters()]:
        dim = CUT_BY_TP.get(name.split(".")[-2])
        part = SimpleNamespace(name=name, offsets=[0] * param.dim(), copies=1, sum_over=at.data)
        if dim is None:
            part.copies *= at.tp.size
        else:
            part.offsets[dim] = at.tp.rank * param.shape[dim]
        if ".experts." in name:
            part.sum_over = at.same_experts
        if zero == 3:
            part.sum_over, part.offsets[0] = None, part.offsets[0] + at.data.rank * param.shape[0] // at.data.size
            owner = model.get_submodule(name.rpartition(".")[0])
            owner.weight = param = nn.Parameter(at.data.mine(param.data).clone())
        else:
            part.copies *= part.sum_over.size
        part.param, part.owned, part.own_offsets = param, param, part.offsets
        if zero == 1:                                     # a view, so that AdamW updates the weight itself
            part.owned = nn.Parameter(at.data.mine(param.data))
            part.own_offsets = [part.offsets[0] + at.data.rank * len(part.owned), *part.offsets[1:]]
        found.append(part)
    return found


def gather_updated(run):
    """With ZeRO-1, get the rows that others have updated."""
    if run.zero == 1:
        for part in run.parts:
            dist.all_gather_into_tensor(part.param.data, part.owned.data.clone(), group=run.at.data.group)


# ------------------------------------------------------------------------------------------------ what tools/prove calls
def build(flags):
    dist.init_process_group("gloo")
    at, zero, experts = groups(flags), flags.get("zero", 0), flags.get("experts", 0)
    if experts and (at.tp.size > 1 or zero) or zero not in (0, 1, 3):
        raise NotImplementedError(f"experts with tp or ZeRO, or ZeRO-2: {flags}")
    torch.manual_seed(0)
    model = Model(Config(experts=experts)).to(getattr(torch, flags["dtype"]))
    keep_stage(model, at.pp)
    if at.tp.size > 1:
        tensor_parallel(model, at.tp)
    if at.cp.size > 1:
        context_parallel(model, at.cp)
    for module in [*model.modules()]:
        if isinstance(module, MoE):
            expert_parallel(module, at.ep)
    parts = parts_of(model, at, zero)
    adamw = torch.optim.AdamW([part.owned for part in parts], lr=1e-2, weight_decay=0.1)
    return SimpleNamespace(model=model, at=at, zero=zero, acc=flags.get("acc", 1), parts=parts, adamw=adamw)


def step(run, inputs, targets):
    at = run.at
    for part in run.parts:
        part.param.grad = None
    count, total = (targets >= 0).sum(), torch.zeros((), dtype=run.parts[0].param.dtype)
    mine = [at.cp.mine(at.dp.mine(tokens), 1).chunk(run.acc) for tokens in (inputs, targets)]
    micro_batches = [*zip(*mine)]
    # a pipeline runs all micro-batches forward, and then all backward; without one, there is no reason to wait
    for batch in [micro_batches] if at.pp.size > 1 else [[one] for one in micro_batches]:
        under_way = [forward(run, tokens, wanted, count) for tokens, wanted in batch]
        for came, out in under_way:
            backward(run, came, out)
            if at.pp.rank == at.pp.size - 1:
                total += out.detach()
    squares = torch.zeros_like(total)
    for part in run.parts:
        if part.sum_over:
            dist.all_reduce(part.param.grad, group=part.sum_over.group)
        squares += part.param.grad.square().sum() / part.copies
    dist.all_reduce(squares)
    dist.all_reduce(total, group=at.data.group)
    if run.zero == 1:
        for part in run.parts:
            part.owned.grad = at.data.mine(part.param.grad)
    run.adamw.step()
    gather_updated(run)
    return total if at.pp.rank == at.pp.size - 1 else None, squares.sqrt()


def forward(run, tokens, targets, count):
    """Run this stage. Return what came from the stage before, and the result: on the last stage, the loss."""
    model, at = run.model, run.at
    positions, came = torch.arange(tokens.shape[1]) + at.cp.rank * tokens.shape[1], None
    if at.pp.rank == 0:
        x = call(run, model.embed, tokens)
    else:
        came = x = torch.empty(*tokens.shape, Config().hidden, dtype=run.parts[0].param.dtype)
        dist.recv(came, at.pp.ranks[at.pp.rank - 1])
        came.requires_grad_()
    for layer in model.layers.values():
        x = call(run, layer, x, positions)
    if at.pp.rank == at.pp.size - 1:
        return came, cross_entropy(call(run, model.head, call(run, model.norm, x)), targets, at.tp) / count
    dist.send(x.detach(), at.pp.ranks[at.pp.rank + 1])
    return came, x


def backward(run, came, out):
    grad, at = None, run.at
    if at.pp.rank < at.pp.size - 1:
        grad = torch.empty_like(out)
        dist.recv(grad, at.pp.ranks[at.pp.rank + 1])
    torch.autograd.backward(out, grad)
    if came is not None:
        dist.send(came.grad, at.pp.ranks[at.pp.rank - 1])


def call(run, module, *args):
    """Call a module. With ZeRO-3, gather its weights first, and again in backward, instead of keeping them."""
    if run.zero != 3:
        return module(*args)

    def gathered(*args):
        return functional_call(module, {name: Gather.apply(param, run.at.data) for name, param in module.named_parameters()}, args)
    return checkpoint(gathered, *args, use_reentrant=False)


def parts(run):
    for part in run.parts:
        yield part.name, part.param, part.param.grad, part.offsets


def place(run):
    return {name: group.rank for name, group in vars(run.at).items() if name in ("pp", "dp", "cp", "tp") and group.size > 1}


def modules(run):
    return run.model.named_modules()


# ------------------------------------------------------------------------------------------------ checkpoints
def save(run, folder):
    """Write a file for each rank: the parts that its optimizer owns, with their places in the whole."""
    states = [(part, run.adamw.state[part.owned]) for part in run.parts]
    torch.save([(part.name, part.own_offsets, state["step"], [part.owned.data, state["exp_avg"], state["exp_avg_sq"]])
                for part, state in states], Path(folder, f"{dist.get_rank()}.pt"))
    dist.barrier()


def load(run, folder):
    """Fill each part with what overlaps it, in whichever file it is."""
    files = [torch.load(path) for path in sorted(Path(folder).glob("*.pt"))]
    for part in run.parts:
        for name, offsets, steps, saved in itertools.chain(*files):
            if name == part.name:
                state = run.adamw.state[part.owned]
                if not state:
                    state.update(step=steps, exp_avg=torch.zeros_like(part.owned), exp_avg_sq=torch.zeros_like(part.owned))
                for ours, theirs in zip((part.owned.data, state["exp_avg"], state["exp_avg_sq"]), saved):
                    copy_overlap(ours, part.own_offsets, theirs, offsets)
    gather_updated(run)


def copy_overlap(ours, our_offsets, theirs, their_offsets):
    begins = [*map(max, our_offsets, their_offsets)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(our_offsets, ours.shape, their_offsets, theirs.shape)]
    if all(begin < end for begin, end in zip(begins, ends)):
        here, there = ([slice(begin - offset, end - offset) for begin, end, offset in zip(begins, ends, of)]
                       for of in (our_offsets, their_offsets))
        ours[tuple(here)] = theirs[tuple(there)]
