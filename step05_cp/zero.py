"""ZeRO: what data-parallel ranks hold alike is sharded over them. Its stage 3 is FSDP.

    stage 1   optimizer states   gradients are reduce-scattered instead of all-reduced, a rank updates its
                                 slice of the weights, and the slices all-gathered: an all-reduce in halves
    stage 2   + gradients        every micro-batch's are reduce-scattered, and only the slice is added up
    stage 3   + weights          all-gathered just before use, dropped after, in forward and again in backward

A unit is what travels together: a transformer block, the embedding, or the last norm with the head. Its
parameters lie side by side in one flat tensor, padded so that N ranks divide it; rank r owns elements r/N to
(r+1)/N, its slice.
"""
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from data_parallel import data_parallel
from ledger import formulas
from mesh import data_mesh
from optimizer import accumulate_gradients


class Unit:
    """Stage 1: every rank has all weights and gradients, a flat tensor each; its optimizer gets a slice."""

    def __init__(self, modules, params, mesh, args):
        self.modules, self.params, self.expected = modules, [], len(params)
        self.replicate, self.shard = mesh.get_all_groups()           # who has the same slice, who the others
        self.backwards_per_reduce = args.global_batch_size // (args.micro_batch_size * args.dp)
        self.arrived, self.gathering = 0, None
        for param in params:
            param.unit = self

    def add(self, param):
        """Takes the parameters as they are made, cuts them when it has all: no rank ever has all units."""
        param.unit = self
        self.params.append(param)
        if len(self.params) == self.expected:
            self.cut()

    def cut(self):
        ranks, rank = self.shard.size(), self.shard.rank()
        flat = torch.cat([param.detach().flatten() for param in self.params])
        size = -(-len(flat) // ranks)                                              # of a slice
        self.my_slice = slice(rank * size, (rank + 1) * size)
        self.weights = nn.functional.pad(flat, (0, ranks * size - len(flat)))      # [ranks * size]
        self.weight_slice = self.weights[self.my_slice]
        for param, view in self.views(self.weights).items():
            param.data = view
        self.make_gradients()

    def make_gradients(self):
        wide = torch.promote_types(self.weights.dtype, torch.float32)
        self.grads = torch.zeros_like(self.weights, dtype=wide)
        self.grad_views = self.views(self.grads)
        self.grad_slice = self.grads[self.my_slice]

    def views(self, flat):
        """{parameter: its part of a flat tensor, in its shape}"""
        sizes = [param.numel() for param in self.params]
        parts = flat[:sum(sizes)].split(sizes)
        return {param: part.view(param.shape) for param, part in zip(self.params, parts)}

    def pieces(self):
        """My slice as parameters for the optimizer, cut at the borders of the real ones."""
        pieces, start = [], 0
        for param in self.params:
            first = max(start, self.my_slice.start)
            last = min(start + param.numel(), self.my_slice.stop)
            start += param.numel()
            if first < last:
                here = slice(first - self.my_slice.start, last - self.my_slice.start)
                piece = nn.Parameter(self.weight_slice[here], requires_grad=False)
                piece.main_grad = self.grad_slice[here]
                times_counted = param.placement.times_counted // self.shard.size()
                piece.placement = replace(param.placement, times_counted=times_counted)
                pieces.append(piece)
        return pieces

    def add_gradient(self, param):
        self.grad_views[param].add_(param.grad)

    def start_reduce(self):
        return dist.reduce_scatter_tensor(self.grad_slice, self.grads, group=self.shard, async_op=True), None

    def finish_reduce(self, _):
        """Only the slice is a sum now. The optimizer zeroes that; the rest is zeroed here."""
        self.grads[:self.my_slice.start].zero_()
        self.grads[self.my_slice.stop:].zero_()

    def gather(self):
        slices = self.weight_slice
        self.gathering = dist.all_gather_into_tensor(self.weights, slices, group=self.shard, async_op=True)

    def wait(self):
        if self.gathering:
            self.gathering.wait()
            self.gathering = None


class Zero:
    """What train.py calls. Without ZeRO it is step 2, and there are no units."""

    def __init__(self, model, mesh, args):
        self.stage, self.units, self.under_way, self.all_reduces = args.zero, units_of(model), [], []
        self.params = list(model.parameters())            # what the optimizer is to update
        if args.zero == 0:
            accumulate_gradients(self.params)
            self.all_reduces = [data_parallel(self.params, data_mesh(mesh).get_group(), args)]
            return
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.collect)
        self.params = [piece for unit in self.units for piece in unit.pieces()]
        if args.zero == 3:
            gather_when_needed(self.units)
        else:
            for unit in self.units:                  # what the last step gathered comes while others compute
                unit.modules[0].register_forward_pre_hook(lambda module, inputs, unit=unit: unit.wait())

    def collect(self, param):
        """Backward has made a gradient. A unit is reduced once it has its last, while backward goes on."""
        unit = param.unit
        unit.add_gradient(param)
        param.grad = None
        unit.arrived += 1
        if unit.arrived == len(unit.params) * unit.backwards_per_reduce:
            unit.arrived = 0
            self.under_way.append((unit, *unit.start_reduce()))
            if self.stage > 1 and len(self.under_way) > 1:     # each holds a buffer: two exist at a time
                self.finish_oldest()

    def finish_oldest(self):
        unit, work, part = self.under_way.pop(0)
        work.wait()
        unit.finish_reduce(part)

    def sum_gradients(self):
        for all_reduce in self.all_reduces:
            all_reduce()
        while self.under_way:
            self.finish_oldest()
        for unit in self.units:
            if unit.replicate.size() > 1:                 # hybrid: slices have replicas
                dist.all_reduce(unit.grad_slice, group=unit.replicate)

    def gather_weights(self):
        for unit in self.units:
            if self.stage < 3:                            # which gathers them when they are needed
                unit.gather()

    def wait(self):
        """After the last step: no process may end while others still gather from it."""
        for unit in self.units:
            unit.wait()


# --------------------------------------------------------------------------- what stages 2 and 3 do otherwise
class Unit2(Unit):
    """Gradients are whole only while a micro-batch's backward makes them; what is added up is the slice."""

    def make_gradients(self):
        self.grads, self.backwards_per_reduce = None, 1
        wide = torch.promote_types(self.weights.dtype, torch.float32)
        self.grad_slice = torch.zeros_like(self.weight_slice, dtype=wide)

    def add_gradient(self, param):
        if self.grads is None:
            self.grads = torch.zeros_like(self.weights, dtype=self.grad_slice.dtype)
            self.grad_views = self.views(self.grads)
        super().add_gradient(param)

    def start_reduce(self):
        part = torch.empty_like(self.grad_slice)
        work = dist.reduce_scatter_tensor(part, self.grads, group=self.shard, async_op=True)
        self.grads = self.grad_views = None               # what comes from now on goes into a new one
        return work, part

    def finish_reduce(self, part):
        self.grad_slice += part


class Unit3(Unit2):
    """Weights are whole only while they are used; what is kept is the slice."""

    def cut(self):
        super().cut()
        self.weight_slice = self.weight_slice.clone()
        self.release()

    def release(self):
        """Gives the memory back. What autograd saved of the weights stays a view of it, until refilled."""
        self.weights.untyped_storage().resize_(0)

    def gather_if_released(self):
        storage = self.weights.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.weights.nbytes)
            self.gather()

    def start_reduce(self):
        self.release()                                    # the unit's backward is over
        return super().start_reduce()


def gather_when_needed(units):
    """Before a unit computes, its weights are waited for, and those of the next one are asked for."""
    def need(i, following):
        units[i].gather_if_released()
        units[i].wait()
        if 0 < following < len(units):                  # unit 0, the embedding, needs no weights in backward
            units[following].gather_if_released()

    def before_forward(i):
        need(i, i + 1)

    def before_backward(i):
        need(i, i - 1)

    def after_forward(i, output):
        """The output's hook runs when its gradient is there, the last moment before the unit's backward."""
        if i > 0:
            output.register_hook(lambda grad: before_backward(i))
        if i < len(units) - 2:                   # the last block and the head stay: backward begins with them
            units[i].release()

    for i, unit in enumerate(units):
        unit.modules[0].register_forward_pre_hook(lambda module, inputs, i=i: before_forward(i))
        unit.modules[-1].register_forward_hook(lambda module, inputs, output, i=i: after_forward(i, output))


# ------------------------------------------------------------------------------------- which ranks share what
def make_units(model, mesh, args):
    """Notes on every parameter, which is still on the meta device, the unit that it will belong to."""
    if args.zero == 0:
        return
    data, decoder = data_mesh(mesh), model.model
    sizes = (data.size() // args.zero_shard, args.zero_shard)
    shards = data._unflatten(0, sizes, ("replicate", "shard"))
    layers = ([layer] for layer in decoder.layers.values())
    for modules in ([decoder.embed_tokens], *layers, [decoder.norm, model.lm_head]):
        params = [param for module in modules for param in module.parameters()]
        {1: Unit, 2: Unit2, 3: Unit3}[args.zero](modules, params, shards, args)


def units_of(model):
    """In the order of forward."""
    return list(dict.fromkeys(param.unit for param in model.parameters() if hasattr(param, "unit")))


def gathered(param):
    """A parameter's value, for saving."""
    unit = getattr(param, "unit", None)
    if not isinstance(unit, Unit3):
        return param.detach()
    unit.gather_if_released()
    unit.wait()
    value = param.detach().clone()
    unit.release()
    return value


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    wide = torch.promote_types(args.dtype, torch.float32)
    sent = [(dist.group.WORLD, "all_reduce", wide.itemsize)]                       # the norm
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.dp)
    units = units_of(model)
    for i, unit in enumerate(units):
        again = 0 < i < len(units) - 2                    # in backward, of ZeRO stage 3
        gathers = micro_batches * (1 + again) if args.zero == 3 else 1
        reduces = micro_batches if args.zero >= 2 else 1
        sent.append((unit.shard, "all_gather", gathers * unit.weights.nbytes))
        sent.append((unit.shard, "reduce_scatter", reduces * unit.grad_slice.nbytes * unit.shard.size()))
        if unit.replicate.size() > 1:
            sent.append((unit.replicate, "all_reduce", unit.grad_slice.nbytes))
    return sent


formulas.append(formula)
