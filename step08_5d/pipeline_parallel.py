"""Pipeline parallelism: the layers are cut into stages, the micro-batches go through them in the order of a
schedule.

A rank holds one stage or several. Between stages travel the activations of a micro-batch, [batch, seq,
hidden], forward, and their gradient, of the same size, backward. What is done when is the schedule's business
(schedules.py).
"""
import copy
import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import schedules
import tensor_parallel
from ledger import formulas
from moe import MoE, split_grouped
from shards import full_tensor


def stage_boundaries(config, stages):
    """Of each stage its first layer's number, and the end. Embedding and head count as layers, by size."""
    layers, hidden = config.num_hidden_layers, config.hidden_size
    width = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    width += 3 * config.intermediate_size * (config.num_experts_per_tok or 1)
    ends = config.vocab_size * hidden / (width * hidden)
    even = [math.floor((layers + 2 * ends) * stage / stages - ends + 0.5) for stage in range(stages + 1)]
    return [max(stage, min(layers - stages + stage, first)) for stage, first in enumerate(even)]


def local_stages(mesh, args):
    stages, rank = args.pp * args.stages_per_rank, mesh.get_local_rank("pp")
    if schedules.SCHEDULES[args.schedule].v_shaped:
        return [rank, stages - 1 - rank]                  # there and back
    return list(range(rank, stages, args.pp))


def keep_local_stages(model, config, mesh, args):
    """Drops, on the meta device, what other ranks hold; what stays keeps its name."""
    first, mine = stage_boundaries(config, args.pp * args.stages_per_rank), local_stages(mesh, args)
    decoder = model.model
    held = {str(layer) for stage in mine for layer in range(first[stage], first[stage + 1])}
    for name in decoder.layers.keys() - held:
        del decoder.layers[name]
    if 0 not in mine:
        decoder.embed_tokens = None
    if len(first) - 2 not in mine:
        decoder.norm = model.lm_head = None
    for param in model.parameters():
        param.placement.num_replicas //= args.pp


class Pipeline:
    """Runs the lists of any schedule."""

    def __init__(self, model, config, mesh, args):
        self.model = model
        self.args = args
        self.group = mesh.get_group("pp")
        self.last = args.pp * args.stages_per_rank - 1
        first = stage_boundaries(config, self.last + 1)
        layers = model.model.layers
        self.stages = {}
        for stage in local_stages(mesh, args):
            names = [str(layer) for layer in range(first[stage], first[stage + 1])]
            self.stages[stage] = self.part(stage, {name: layers[name] for name in names})
        micro_batches = args.global_batch_size // (args.micro_batch_size * args.dp)
        schedule = schedules.make(args.schedule, args.pp, micro_batches, args.stages_per_rank)
        self.program = schedules.add_send_recv(schedule, self.group.rank())
        seq = args.seq_len // args.cp // (args.tp if args.sp == "on" else 1)
        self.shape = (args.micro_batch_size, seq, config.hidden_size)              # of what travels
        self.queue = []                                   # what the I under way leaves to its W
        if any(action.kind == "W" for actions in schedule for action in actions):
            split_backward(layers.values(), self.queue)

    def part(self, stage, layers):
        """A stage is a Decoder too: some layers; the first has the embedding as well, the last the norm."""
        decoder = copy.copy(self.model.model)             # with modules of its own, which are the same
        embedding = decoder.embed_tokens if stage == 0 else None
        norm = decoder.norm if stage == self.last else None
        decoder._modules = dict(embed_tokens=embedding, layers=nn.ModuleDict(layers), norm=norm)
        return decoder

    def forward_backward(self, micro_batches):
        """Adds the gradient of the mean loss to every main_grad; returns this rank's share of that loss."""
        self.micro_batches = micro_batches
        wide = torch.promote_types(self.args.dtype, torch.float32)
        self.loss = torch.zeros((), dtype=wide, device=self.args.device)
        self.fwd_cache = {}                                    # from F to I: input and output
        self.weight_grad_queues = {}                                # from I to W: what W computes
        self.ready = {}                                   # of messages: made here
        self.recv_handles = {}
        self.send_handles = []                                 # with their tensors, which must live as long
        for kind, what, peer in self.program:
            if kind == "send":
                tensor = self.ready.pop(what)
                self.send_handles = [(work, tensor) for work, tensor in self.send_handles if not work.is_completed()]
                self.send_handles.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))
            elif kind == "receive":
                buffer = torch.empty(self.shape, dtype=self.args.dtype, device=self.args.device)
                self.recv_handles[what] = dist.irecv(buffer, group=self.group, group_src=peer), buffer
            else:
                self.compute(what)
        for work, _ in self.send_handles:
            work.wait()
        self.send_handles.clear()
        return self.loss / self.args.tp                   # all ranks of tp have the same

    def wait_for(self, message):
        if message in self.ready:                         # from this rank's other stage
            return self.ready.pop(message)
        work, tensor = self.recv_handles.pop(message)
        work.wait()
        return tensor

    def compute(self, action):
        received = schedules.receives(action, self.last)
        sent = schedules.sends(action, self.last)
        received = self.wait_for(received) if received else None
        run = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}
        with torch.profiler.record_function(f"{action} of stage {action.stage}"):  # for --profile's trace
            out = run[action.kind](action.stage, action.micro_batch, received)
        if sent:
            self.ready[sent] = out

    def forward(self, stage, i, x):
        inputs, positions, _ = self.micro_batches[i]
        x = inputs if x is None else x.requires_grad_()
        y = self.stages[stage](x, positions)
        self.fwd_cache[stage, i] = x, y
        return y.detach()

    def head_and_loss(self, i, y):
        """Of the last stage, at the beginning of its I or B and not in its F: the head computes its gradients
        with the loss (loss.py), and they would be kept for every micro-batch in flight."""
        _, _, targets = self.micro_batches[i]
        loss = self.model.lm_head(y, targets) / (self.args.global_batch_size * self.args.seq_len)
        self.loss += loss.detach()
        return loss

    def input_gradient(self, stage, i, grad):
        x, y = self.fwd_cache.pop((stage, i))
        if stage == self.last:
            y = self.head_and_loss(i, y)
        torch.autograd.backward(y, grad)
        self.weight_grad_queues[stage, i] = self.queue[:]
        self.queue.clear()
        return x.grad

    @torch.no_grad()
    def weight_gradient(self, stage, i, _):
        queue = self.weight_grad_queues.pop((stage, i))
        while queue:
            queue.pop(0)()                                # and what it took is freed

    def backward(self, stage, i, grad):
        """B is I and then W. Where a schedule has no W by itself nothing was split: autograd computes all
        gradients in the first line, and the second finds an empty queue."""
        grad = self.input_gradient(stage, i, grad)
        self.weight_gradient(stage, i, None)
        return grad


# -------------------------------------------------------------------------------------- backward in two parts
def linear_gradient(grad, x):
    return grad.flatten(0, -2).T @ x.flatten(0, -2)       # [outputs, inputs]


def deferred_weight_gradients(x, grads, comm, gradient):
    """W of linears with the same input, from the gradients of their outputs: {linear: gradient}."""
    if comm:                                       # of a region of tp: gathered again, as EnterLinears does
        gather, _, group = comm
        x = gather(x, group)()
    for linear, grad in grads.items():
        linear.weight.backward(gradient(grad, x))                 # of a leaf: accumulates, and its hooks fire


class QueueWeightGradient(torch.autograd.Function):
    """The identity, before the linears. Its backward comes after theirs: then all that W takes is there, x
    included, which autograd kept or recomputed."""

    @staticmethod
    def forward(ctx, x, grads, comm, gradient, queue):
        ctx.save_for_backward(x)
        ctx.how = grads, comm, gradient
        ctx.queue = queue
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.queue.append(functools.partial(deferred_weight_gradients, *ctx.saved_tensors, *ctx.how))
        return grad, None, None, None, None


def split(linears, queue, comm=None):
    """The linears' products; autograd knows nothing of the weights, whose gradients are left to W."""
    def products(x):
        grads = {}
        x = QueueWeightGradient.apply(x, grads, comm, linear_gradient, queue)
        if comm:
            x = tensor_parallel.enter_region(x, comm)
        outputs = [F.linear(x, linear.weight.detach()) for linear in linears]
        for linear, y in zip(linears, outputs):
            y.register_hook(functools.partial(grads.__setitem__, linear))
        return outputs
    return torch.compiler.disable(products)       # what a compiled backward takes cannot be seen from outside


def split_last(linear, queue):
    products = split([linear], queue)
    if hasattr(linear, "comm"):                         # of tp: the products are partial sums
        linear.forward = lambda x: tensor_parallel.leave_region(products(x)[0], linear.comm)
    else:
        linear.forward = lambda x: products(x)[0]


def split_backward(layers, queue):
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        comm = getattr(attention.q_proj, "comm", None)                         # of tp
        attention.project = split([attention.q_proj, attention.k_proj, attention.v_proj], queue, comm)
        split_last(attention.o_proj, queue)
        if isinstance(mlp, MoE):
            for linear in mlp.experts.children():
                linear.forward = split_grouped(linear, queue, QueueWeightGradient)
            continue
        mlp.project = split([mlp.gate_proj, mlp.up_proj], queue, comm)
        split_last(mlp.down_proj, queue)


# ----------------------------------------------------------------------------------- the seams to other files
def gather_from_pipeline(model, name, shape, mesh, args):
    """A parameter's value, for saving: its stage has it, and adds it to the zeros of the others."""
    param = dict(model.named_parameters()).get(name)
    if param is None:
        value = torch.zeros(shape, dtype=args.dtype, device=args.device)
    else:
        value = full_tensor(param).contiguous()
    dist.all_reduce(value, group=mesh.get_group("pp"))
    return value


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    mine = local_stages(mesh, args)
    stages = range(args.pp * args.stages_per_rank)
    neighbours = [neighbour for stage in mine for neighbour in (stage - 1, stage + 1)]
    borders = sum(neighbour in stages and neighbour not in mine for neighbour in neighbours)
    if not borders:
        return []
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp
    if args.sp == "on":
        tokens //= args.tp
    size = tokens * model.model.config.hidden_size * args.dtype.itemsize
    return [(mesh.get_group("pp"), "send", borders * size)]


formulas.append(formula)
