"""Pipeline parallelism: the layers are cut into stages, the micro-batches go through them in the order of a schedule.

    python pipeline_parallel.py --schedule 1f1b --pp 4 --micro_batches 8      # shows a schedule, no training

A rank holds one stage or several. Between stages travel the activations of a micro-batch, [batch, seq, hidden], forward,
and their gradient, of the same size, backward. What is done when is the schedule's business (schedules.py).
"""
import argparse
import copy
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import context_parallel
import schedules
import tensor_parallel


def first_layers(config, stages):
    """The number of the first layer of each stage, and the end. Embedding and head count as the layers they are as large as."""
    layers, hidden = config.num_hidden_layers, config.hidden_size
    width = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim + 3 * config.intermediate_size
    ends = config.vocab_size * hidden / (width * hidden)
    even = [math.floor((layers + 2 * ends) * stage / stages - ends + 0.5) for stage in range(stages + 1)]
    return [max(stage, min(layers - stages + stage, first)) for stage, first in enumerate(even)]       # one layer at least


def my_stages(mesh, args):
    stages, rank = args.pp * args.stages_per_rank, mesh.get_local_rank("pp")
    if args.schedule == "dualpipe":
        return [rank, stages - 1 - rank]                  # there and back
    return list(range(rank, stages, args.pp))


def cut_stages(model, config, mesh, args):
    """Drops, on the meta device, what other ranks hold; what stays keeps its name."""
    first, mine, decoder = first_layers(config, args.pp * args.stages_per_rank), my_stages(mesh, args), model.model
    held = {str(layer) for stage in mine for layer in range(first[stage], first[stage + 1])}
    for name in decoder.layers.keys() - held:
        del decoder.layers[name]
    if 0 not in mine:
        decoder.embed_tokens = None
    if len(first) - 2 not in mine:
        decoder.norm = model.lm_head = None
    for param in model.parameters():
        param.replicas //= args.pp


class Pipeline:
    """Runs the lists of any schedule."""

    def __init__(self, model, config, mesh, args):
        self.model, self.args, self.group = model, args, mesh.get_group("pp")
        self.last = args.pp * args.stages_per_rank - 1
        first, layers = first_layers(config, self.last + 1), model.model.layers
        self.stages = {stage: self.part(stage, {name: layers[name] for name in map(str, range(first[stage], first[stage + 1]))})
                       for stage in my_stages(mesh, args)}
        count = args.global_batch_size // (args.micro_batch_size * args.dp)
        schedule = schedules.make(args.schedule, args.pp, count, args.stages_per_rank)
        self.program = schedules.programs(schedule)[self.group.rank()]
        seq = args.seq_len // args.cp // (args.tp if args.sp == "on" else 1)
        self.shape = (args.micro_batch_size, seq, config.hidden_size)              # of what travels
        self.noted, self.events = [], []                  # by the linears, for W; what ran when
        if any(action.kind in "IW" for actions in schedule for action in actions):
            split_backward(layers.values(), self.noted, mesh, args)

    def part(self, stage, layers):
        """A stage is a Decoder too: of some of the layers, of the embedding if it is the first, of the norm if the last."""
        decoder = copy.copy(self.model.model)             # with modules of its own, which are the same
        ends = dict(embed_tokens=decoder.embed_tokens if stage == 0 else None, norm=decoder.norm if stage == self.last else None)
        decoder._modules = {**decoder._modules, **ends, "layers": nn.ModuleDict(layers)}
        return decoder

    def run(self, micro_batches):
        """Adds the gradient of the global batch's mean loss to every main_grad; returns this rank's share of that loss."""
        self.micro_batches, self.loss = micro_batches, torch.zeros((), dtype=torch.promote_types(self.args.dtype, torch.float32), device=self.args.device)
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
        start = time.perf_counter()
        out = {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient, "B": self.backward}[action.kind](*action[1:3], came)
        if given:
            self.ready[given] = out
        self.events.append(schedules.Event(self.group.rank(), action, start, time.perf_counter()))

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
        if stage == self.last:                            # the head only here: it computes its gradients with the loss
            y = self.model.lm_head(y, self.micro_batches[i][2]) / (self.args.global_batch_size * self.args.seq_len)
            self.loss += y.detach()
        torch.autograd.backward(y, grad)
        self.delayed[stage, i] = self.noted[:]
        self.noted.clear()
        return x.grad

    @torch.no_grad()
    def weight_gradient(self, stage, i, _):
        noted = self.delayed.pop((stage, i))
        while noted:                                      # each is freed when it is done
            weight_gradients, x, grads = noted.pop(0)
            weight_gradients(x, grads)

    def backward(self, stage, i, grad):
        grad = self.input_gradient(stage, i, grad)
        self.weight_gradient(stage, i, None)
        return grad

    def draw(self):
        """--profile: the last step as it was, on the ranks of rank 0's pipeline (of one machine: clocks differ)."""
        every = [None] * self.args.pp
        dist.all_gather_object(every, self.events, group=self.group)
        if dist.get_rank() == 0 and self.events:
            schedules.draw(sum(every, []), os.path.join(self.args.profile, "pipeline.png"), f"{self.args.schedule}, as it ran")


# ------------------------------------------------------------------------------------------- backward in two parts
class Note(torch.autograd.Function):
    """The identity, before linears that have one input. Its backward comes after theirs, and notes what their weights' takes."""

    @staticmethod
    def forward(ctx, x, weight_gradients, grads, noted):
        ctx.save_for_backward(x)
        ctx.note = weight_gradients, grads, noted
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        weight_gradients, grads, noted = ctx.note
        noted.append((weight_gradients, *ctx.saved_tensors, grads))
        return grad, None, None, None


def split_backward(layers, noted, mesh, args):
    """Linears that leave their weights out of backward, and note input and output gradient instead, for W."""
    def product_of(linears, enter, gather):
        def weight_gradients(x, grads):
            x = gather(x).flatten(0, -2)
            for linear, grad in zip(linears, grads):
                linear.weight.backward(grad.flatten(0, -2).T @ x)                  # of a leaf: accumulates, and its hooks fire

        def product(x, *weights):
            grads = [None] * len(linears)
            x = enter(Note.apply(x, weight_gradients, grads, noted))
            products = [F.linear(x, weight.detach()) for weight in weights]
            for i, y in enumerate(products):
                y.register_hook(lambda grad, i=i: grads.__setitem__(i, grad))
            return products
        return torch.compiler.disable(product)            # what a compiled backward takes cannot be seen from outside

    def alone(linear):
        product = product_of([linear], lambda x: x, lambda x: x)
        linear.forward = lambda x: product(x, linear.weight)[0]

    def region(module, first, last):
        alone(last)
        if args.tp == 1:
            for linear in first:
                alone(linear)
        else:                                             # W gathers the region's input again, as EnterLinears does
            gather, reduce, group = module.border
            module.product = product_of(first, lambda x: tensor_parallel.Enter.apply(x, gather, reduce, group), lambda x: gather(x, group)())

    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        region(attention, [attention.q_proj, attention.k_proj, attention.v_proj], attention.o_proj)
        region(mlp, [mlp.gate_proj, mlp.up_proj], mlp.down_proj)


# ------------------------------------------------------------------------------------------- the seams to other files
def whole(model, name, shape, mesh, args):
    """A parameter's value, for saving: its stage has it, and adds it to the zeros of the others."""
    param = dict(model.named_parameters()).get(name)
    value = torch.zeros(shape, dtype=args.dtype, device=args.device) if param is None else tensor_parallel.whole(param).contiguous()
    dist.all_reduce(value, group=mesh.get_group("pp"))
    return value


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    mine, stages = my_stages(mesh, args), args.pp * args.stages_per_rank
    borders = sum(0 <= neighbour < stages and neighbour not in mine for stage in mine for neighbour in (stage - 1, stage + 1))
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp // (args.tp if args.sp == "on" else 1)
    size = tokens * model.model.config.hidden_size * args.dtype.itemsize
    return context_parallel.formula(model, mesh, args) + [(mesh.get_group("pp"), "send", borders * size)] * (borders > 0)


def main():
    parser = argparse.ArgumentParser(description="shows a schedule: its timeline as text and as a picture, its bubble, what it keeps")
    parser.add_argument("--schedule", choices=schedules.SCHEDULES, default="1f1b")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--stages_per_rank", type=int, default=2, help="of interleaved")
    parser.add_argument("--picture", default="schedule.png")
    args = parser.parse_args()
    if min(args.pp, args.stages_per_rank) < 1 or args.micro_batches < schedules.least(args.schedule, args.pp):
        parser.error(f"pp and stages_per_rank must be at least 1, micro_batches at least {schedules.least(args.schedule, args.pp)} with this schedule")
    schedule = schedules.make(args.schedule, args.pp, args.micro_batches, args.stages_per_rank)
    events = schedules.simulate(schedule)
    print(schedules.text(events))
    print(f"idle, of {max(event.end for event in events)} units: {schedules.bubble(events)}")
    print(f"kept at most, micro-batches of a stage: {[schedules.in_flight(actions) for actions in schedule]}")
    schedules.draw(events, args.picture, f"{args.schedule}: {args.pp} ranks, {args.micro_batches} micro-batches")
    print(f"the picture is in {args.picture}")


if __name__ == "__main__":
    main()
