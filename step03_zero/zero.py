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

from data_parallel import make_reducer
from ledger import formulas
from mesh import data_mesh
from optimizer import add_main_grads


class Zero1Unit:
    """Stage 1: every rank has all weights and gradients, a flat tensor each; its optimizer gets a slice."""

    def __init__(self, modules, params, mesh, args):
        self.modules, self.params, self.expected = modules, [], len(params)
        self.replicate_group, self.shard_group = mesh.get_all_groups()           # who has the same slice, who the others
        self.backwards_per_reduce = args.global_batch_size // (args.micro_batch_size * args.dp)
        self.num_grads, self.gather_handle = 0, None
        for param in params:
            param.unit = self

    def add_to_unit(self, param):
        """Takes the parameters as they are made, cuts them when it has all: no rank ever has all units."""
        param.unit = self
        self.params.append(param)
        if len(self.params) == self.expected:
            self.flatten_and_shard()

    def flatten_and_shard(self):
        ranks, rank = self.shard_group.size(), self.shard_group.rank()
        flat = torch.cat([param.detach().flatten() for param in self.params])
        size = -(-len(flat) // ranks)                                              # of a slice
        self.shard_slice = slice(rank * size, (rank + 1) * size)
        self.flat_param = nn.functional.pad(flat, (0, ranks * size - len(flat)))      # [ranks * size]
        self.param_shard = self.flat_param[self.shard_slice]
        for param, view in self.views(self.flat_param).items():
            param.data = view
        self.allocate_grads()

    def allocate_grads(self):
        wide = torch.promote_types(self.flat_param.dtype, torch.float32)
        self.flat_grad = torch.zeros_like(self.flat_param, dtype=wide)
        self.grad_views = self.views(self.flat_grad)
        self.grad_shard = self.flat_grad[self.shard_slice]

    def views(self, flat):
        """{parameter: its part of a flat tensor, in its shape}"""
        sizes = [param.numel() for param in self.params]
        parts = flat[:sum(sizes)].split(sizes)
        return {param: part.view(param.shape) for param, part in zip(self.params, parts)}

    def sharded_params(self):
        """My slice as parameters for the optimizer, cut at the borders of the real ones."""
        sharded_params, start = [], 0
        for param in self.params:
            first = max(start, self.shard_slice.start)
            last = min(start + param.numel(), self.shard_slice.stop)
            start += param.numel()
            if first < last:
                here = slice(first - self.shard_slice.start, last - self.shard_slice.start)
                sharded_param = nn.Parameter(self.param_shard[here], requires_grad=False)
                sharded_param.main_grad = self.grad_shard[here]
                num_replicas = param.placement.num_replicas // self.shard_group.size()
                sharded_param.placement = replace(param.placement, num_replicas=num_replicas)
                sharded_params.append(sharded_param)
        return sharded_params

    def accumulate_grad(self, param):
        self.grad_views[param].add_(param.grad)

    def start_reduce_scatter(self):
        return dist.reduce_scatter_tensor(self.grad_shard, self.flat_grad, group=self.shard_group, async_op=True), None

    def finish_reduce_scatter(self, _):
        """Only the slice is a sum now. The optimizer zeroes that; the rest is zeroed here."""
        self.flat_grad[:self.shard_slice.start].zero_()
        self.flat_grad[self.shard_slice.stop:].zero_()

    def start_all_gather(self):
        slices = self.param_shard
        self.gather_handle = dist.all_gather_into_tensor(self.flat_param, slices, group=self.shard_group, async_op=True)

    def wait_for_all_gather(self):
        if self.gather_handle:
            self.gather_handle.wait()
            self.gather_handle = None


class Zero:
    """What train.py calls. Without ZeRO it is step 2, and there are no units."""

    def __init__(self, model, mesh, args):
        self.stage, self.units, self.reduce_scatters, self.reducers = args.zero, zero_units(model), [], []
        self.params = list(model.parameters())            # what the optimizer is to update
        if args.zero == 0:
            add_main_grads(self.params)
            self.reducers = [make_reducer(self.params, data_mesh(mesh).get_group(), args)]
            return
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.post_accumulate_grad)
        self.params = [sharded_param for unit in self.units for sharded_param in unit.sharded_params()]
        if args.zero == 3:
            gather_when_needed(self.units)
        else:
            for unit in self.units:                  # what the last step gathered comes while others compute
                unit.modules[0].register_forward_pre_hook(lambda module, inputs, unit=unit: unit.wait_for_all_gather())

    def post_accumulate_grad(self, param):
        """Backward has made a gradient. A unit is reduced once it has its last, while backward goes on."""
        unit = param.unit
        unit.accumulate_grad(param)
        param.grad = None
        unit.num_grads += 1
        if unit.num_grads == len(unit.params) * unit.backwards_per_reduce:
            unit.num_grads = 0
            self.reduce_scatters.append((unit, *unit.start_reduce_scatter()))
            if self.stage > 1 and len(self.reduce_scatters) > 1:     # each holds a buffer: two exist at a time
                self.finish_oldest()

    def finish_oldest(self):
        unit, work, part = self.reduce_scatters.pop(0)
        work.wait()
        unit.finish_reduce_scatter(part)

    def finish_grad_reduction(self):
        for all_reduce in self.reducers:
            all_reduce()
        while self.reduce_scatters:
            self.finish_oldest()
        for unit in self.units:
            if unit.replicate_group.size() > 1:                 # hybrid: slices have replicas
                dist.all_reduce(unit.grad_shard, group=unit.replicate_group)

    def start_all_gather(self):
        for unit in self.units:
            if self.stage < 3:                            # which gathers them when they are needed
                unit.start_all_gather()

    def wait_for_all_gather(self):
        """After the last step: no process may end while others still gather from it."""
        for unit in self.units:
            unit.wait_for_all_gather()


# --------------------------------------------------------------------------- what stages 2 and 3 do otherwise
class Zero2Unit(Zero1Unit):
    """Gradients are whole only while a micro-batch's backward makes them; what is added up is the slice."""

    def allocate_grads(self):
        self.flat_grad, self.backwards_per_reduce = None, 1
        wide = torch.promote_types(self.flat_param.dtype, torch.float32)
        self.grad_shard = torch.zeros_like(self.param_shard, dtype=wide)

    def accumulate_grad(self, param):
        if self.flat_grad is None:
            self.flat_grad = torch.zeros_like(self.flat_param, dtype=self.grad_shard.dtype)
            self.grad_views = self.views(self.flat_grad)
        super().accumulate_grad(param)

    def start_reduce_scatter(self):
        part = torch.empty_like(self.grad_shard)
        work = dist.reduce_scatter_tensor(part, self.flat_grad, group=self.shard_group, async_op=True)
        self.flat_grad = self.grad_views = None               # what comes from now on goes into a new one
        return work, part

    def finish_reduce_scatter(self, part):
        self.grad_shard += part


class Zero3Unit(Zero2Unit):
    """Weights are whole only while they are used; what is kept is the slice."""

    def flatten_and_shard(self):
        super().flatten_and_shard()
        self.param_shard = self.param_shard.clone()
        self.reshard()

    def reshard(self):
        """Gives the memory back. What autograd saved of the weights stays a view of it, until refilled."""
        self.flat_param.untyped_storage().resize_(0)

    def unshard(self):
        storage = self.flat_param.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat_param.nbytes)
            self.start_all_gather()

    def start_reduce_scatter(self):
        self.reshard()                                    # the unit's backward is over
        return super().start_reduce_scatter()


def gather_when_needed(units):
    """Before a unit computes, its weights are waited for, and those of the next one are asked for."""
    def need(i, following):
        units[i].unshard()
        units[i].wait_for_all_gather()
        if 0 < following < len(units):                  # unit 0, the embedding, needs no weights in backward
            units[following].unshard()

    def before_forward(i):
        need(i, i + 1)

    def before_backward(i):
        need(i, i - 1)

    def after_forward(i, output):
        """The output's hook runs when its gradient is there, the last moment before the unit's backward."""
        if i > 0:
            output.register_hook(lambda grad: before_backward(i))
        if i < len(units) - 2:                   # the last block and the head stay: backward begins with them
            units[i].reshard()

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
        {1: Zero1Unit, 2: Zero2Unit, 3: Zero3Unit}[args.zero](modules, params, shards, args)


def zero_units(model):
    """In the order of forward."""
    return list(dict.fromkeys(param.unit for param in model.parameters() if hasattr(param, "unit")))


def unsharded_param(param):
    """A parameter's value, for saving."""
    unit = getattr(param, "unit", None)
    if not isinstance(unit, Zero3Unit):
        return param.detach()
    unit.unshard()
    unit.wait_for_all_gather()
    value = param.detach().clone()
    unit.reshard()
    return value


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    wide = torch.promote_types(args.dtype, torch.float32)
    sent = [(dist.group.WORLD, "all_reduce", wide.itemsize)]                       # the norm
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.dp)
    units = zero_units(model)
    for i, unit in enumerate(units):
        again = 0 < i < len(units) - 2                    # in backward, of ZeRO stage 3
        gathers = micro_batches * (1 + again) if args.zero == 3 else 1
        reduces = micro_batches if args.zero >= 2 else 1
        sent.append((unit.shard_group, "all_gather", gathers * unit.flat_param.nbytes))
        sent.append((unit.shard_group, "reduce_scatter", reduces * unit.grad_shard.nbytes * unit.shard_group.size()))
        if unit.replicate_group.size() > 1:
            sent.append((unit.replicate_group, "all_reduce", unit.grad_shard.nbytes))
    return sent


formulas.append(formula)
