"""Pipeline parallelism: the layers are cut into stages, the micro-batches go through them in the order of a
schedule.

A rank holds one stage or several. Between stages travel the activations of a micro-batch, [batch, seq,
hidden], forward, and their gradient, of the same size, backward. What is done when is the schedule's business
(schedules.py).
"""
import copy
import functools
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parts
import schedules
import tensor_parallel
from ledger import formulas


def first_layers(config, stages):
    """Of each stage its first layer's number, and the end. Embedding and head count as layers, by size."""
    layers, hidden = config.num_hidden_layers, config.hidden_size
    width = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    width += 3 * config.intermediate_size
    ends = config.vocab_size * hidden / (width * hidden)
    even = [math.floor((layers + 2 * ends) * stage / stages - ends + 0.5) for stage in range(stages + 1)]
    return [max(stage, min(layers - stages + stage, first)) for stage, first in enumerate(even)]


def my_stages(mesh, args):
    stages, rank = args.pp * args.stages_per_rank, mesh.get_local_rank("pp")
    if args.schedule == "dualpipe":
        return [rank, stages - 1 - rank]                  # there and back
    return list(range(rank, stages, args.pp))


def cut_stages(model, config, mesh, args):
    """Drops, on the meta device, what other ranks hold; what stays keeps its name."""
    first, mine = first_layers(config, args.pp * args.stages_per_rank), my_stages(mesh, args)
    decoder = model.model
    held = {str(layer) for stage in mine for layer in range(first[stage], first[stage + 1])}
    for name in decoder.layers.keys() - held:
        del decoder.layers[name]
    if 0 not in mine:
        decoder.embed_tokens = None
    if len(first) - 2 not in mine:
        decoder.norm = model.lm_head = None
    for param in model.parameters():
        param.placement.replicas //= args.pp


class Pipeline:
    """Runs the lists of any schedule."""

    def __init__(self, model, config, mesh, args):
        self.model, self.args, self.group = model, args, mesh.get_group("pp")
        self.last = args.pp * args.stages_per_rank - 1
        first, layers = first_layers(config, self.last + 1), model.model.layers
        self.stages = {}
        for stage in my_stages(mesh, args):
            names = [str(layer) for layer in range(first[stage], first[stage + 1])]
            self.stages[stage] = self.part(stage, {name: layers[name] for name in names})
        count = args.global_batch_size // (args.micro_batch_size * args.dp)
        schedule = schedules.make(args.schedule, args.pp, count, args.stages_per_rank)
        self.program = schedules.programs(schedule)[self.group.rank()]
        seq = args.seq_len // args.cp // (args.tp if args.sp == "on" else 1)
        self.shape = (args.micro_batch_size, seq, config.hidden_size)              # of what travels
        self.queue, self.events = [], []                 # what the I under way leaves to its W; what ran when
        if any(action.kind in "IW" for actions in schedule for action in actions):
            split_backward(layers.values(), self.queue)

    def part(self, stage, layers):
        """A stage is a Decoder too: some layers; the first has the embedding as well, the last the norm."""
        decoder = copy.copy(self.model.model)             # with modules of its own, which are the same
        embedding = decoder.embed_tokens if stage == 0 else None
        norm = decoder.norm if stage == self.last else None
        parts_of_it = dict(embed_tokens=embedding, norm=norm, layers=nn.ModuleDict(layers))
        decoder._modules = {**decoder._modules, **parts_of_it}
        return decoder

    def run(self, micro_batches):
        """Adds the gradient of the mean loss to every main_grad; returns this rank's share of that loss."""
        wide = torch.promote_types(self.args.dtype, torch.float32)
        self.micro_batches, self.loss = micro_batches, torch.zeros((), dtype=wide, device=self.args.device)
        self.kept, self.delayed, self.ready, self.coming, self.going = {}, {}, {}, {}, []
        self.events = []
        for step, what, peer in self.program:
            if step == "send":
                tensor = self.ready.pop(what)
                self.going = [(work, tensor) for work, tensor in self.going if not work.is_completed()]
                self.going.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))
            elif step == "receive":
                buffer = torch.empty(self.shape, dtype=self.args.dtype, device=self.args.device)
                self.coming[what] = dist.irecv(buffer, group=self.group, group_src=peer), buffer
            else:
                self.compute(what)
        for work, _ in self.going:
            work.wait()
        self.going.clear()
        return self.loss / self.args.tp                   # all ranks of tp have the same

    def compute(self, action):
        wanted, given = schedules.needs(action, self.last), schedules.gives(action, self.last)
        came = self.take(wanted) if wanted else None
        start = self.now()
        run = {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient, "B": self.backward}
        out = run[action.kind](action.stage, action.micro_batch, came)
        if given:
            self.ready[given] = out
        self.events.append(schedules.Event(self.group.rank(), action, start, self.now()))

    def now(self):
        """Where it is to be drawn, when the GPU has come so far, and not only Python."""
        if self.args.profile and self.args.device == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    def take(self, message):
        if message in self.ready:                         # from this rank's other stage
            return self.ready.pop(message)
        work, tensor = self.coming.pop(message)
        work.wait()
        return tensor

    def forward(self, stage, i, x):
        inputs, positions, _ = self.micro_batches[i]
        x = inputs if x is None else x.requires_grad_()
        y = self.stages[stage](x, positions)
        self.kept[stage, i] = x, y
        return y.detach()

    def input_gradient(self, stage, i, grad):
        x, y = self.kept.pop((stage, i))
        if stage == self.last:                   # the head only here: it computes its gradients with the loss
            _, _, targets = self.micro_batches[i]
            y = self.model.lm_head(y, targets) / (self.args.global_batch_size * self.args.seq_len)
            self.loss += y.detach()
        torch.autograd.backward(y, grad)
        self.delayed[stage, i] = self.queue[:]
        self.queue.clear()
        return x.grad

    @torch.no_grad()
    def weight_gradient(self, stage, i, _):
        queue = self.delayed.pop((stage, i))
        while queue:
            queue.pop(0).work_off()                       # and is freed

    def backward(self, stage, i, grad):
        grad = self.input_gradient(stage, i, grad)
        self.weight_gradient(stage, i, None)
        return grad

    def draw(self):
        """--profile: the last step as it was on the ranks of rank 0's pipeline (of one machine's clock)."""
        every = [None] * self.args.pp
        dist.all_gather_object(every, self.events, group=self.group)
        if dist.get_rank() == 0 and self.events:
            path = os.path.join(self.args.profile, "pipeline.png")
            schedules.draw(sum(every, []), path, f"{self.args.schedule}, as it ran")


# -------------------------------------------------------------------------------------- backward in two parts
def linear_gradient(grad, x):
    return grad.flatten(0, -2).T @ x.flatten(0, -2)       # [outputs, inputs]


class Waiting:
    """What W takes for linears with the same input: that input, and the gradient of each one's output."""

    def __init__(self, border=None, gradient=linear_gradient):
        self.border, self.gradient, self.x, self.grads = border, gradient, None, {}

    def work_off(self):
        x = self.x
        if self.border:                              # of a region of tp: gathered again, as EnterLinears does
            gather, _, group = self.border
            x = gather(x, group)()
        for linear, grad in self.grads.items():
            linear.weight.backward(self.gradient(grad, x))        # of a leaf: accumulates, and its hooks fire


class Input(torch.autograd.Function):
    """The identity, before the linears. Its backward comes after theirs: then the queue gets what W takes."""

    @staticmethod
    def forward(ctx, x, waiting, queue):
        ctx.save_for_backward(x)
        ctx.waiting, ctx.queue = waiting, queue
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.waiting.x, = ctx.saved_tensors
        ctx.queue.append(ctx.waiting)
        return grad, None, None


def split(linears, queue, border=None):
    """The linears' products; autograd knows nothing of the weights, whose gradients are left to W."""
    def products(x):
        waiting = Waiting(border)
        x = Input.apply(x, waiting, queue)
        if border:
            x = tensor_parallel.enter(x, border)
        outputs = [F.linear(x, linear.weight.detach()) for linear in linears]
        for linear, y in zip(linears, outputs):
            y.register_hook(functools.partial(waiting.grads.__setitem__, linear))
        return outputs
    return torch.compiler.disable(products)       # what a compiled backward takes cannot be seen from outside


def split_last(linear, queue):
    products = split([linear], queue)
    if isinstance(linear, tensor_parallel.RowParallelLinear):
        linear.forward = lambda x: tensor_parallel.leave(products(x)[0], linear.border)
    else:
        linear.forward = lambda x: products(x)[0]


def split_backward(layers, queue):
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        border = getattr(attention.q_proj, "border", None)                         # of tp
        attention.project = split([attention.q_proj, attention.k_proj, attention.v_proj], queue, border)
        split_last(attention.o_proj, queue)
        mlp.project = split([mlp.gate_proj, mlp.up_proj], queue, border)
        split_last(mlp.down_proj, queue)


# ----------------------------------------------------------------------------------- the seams to other files
def whole(model, name, shape, mesh, args):
    """A parameter's value, for saving: its stage has it, and adds it to the zeros of the others."""
    param = dict(model.named_parameters()).get(name)
    if param is None:
        value = torch.zeros(shape, dtype=args.dtype, device=args.device)
    else:
        value = parts.whole(param).contiguous()
    dist.all_reduce(value, group=mesh.get_group("pp"))
    return value


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    mine, stages = my_stages(mesh, args), args.pp * args.stages_per_rank
    neighbours = [neighbour for stage in mine for neighbour in (stage - 1, stage + 1)]
    borders = sum(0 <= neighbour < stages and neighbour not in mine for neighbour in neighbours)
    if not borders:
        return []
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp
    if args.sp == "on":
        tokens //= args.tp
    size = tokens * model.model.config.hidden_size * args.dtype.itemsize
    return [(mesh.get_group("pp"), "send", borders * size)]


formulas.append(formula)
