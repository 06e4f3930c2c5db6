"""ZeRO: of N data-parallel ranks each keeps one Nth of what it need not have whole, and the bucket of step 2 is cut.

    stage 1   optimizer states   gradients are reduce-scattered instead of all-reduced, a rank updates its slice of the
                                 weights, and the slices are all-gathered: the two halves of an all-reduce
    stage 2   + gradients        every micro-batch's are reduce-scattered, and only the slice is added up
    stage 3   + weights          all-gathered just before use, dropped after, in forward and again in backward

A unit is what travels together: a transformer block, the embedding, or the last norm with the head. Its parameters lie
side by side in one flat tensor, padded so that N divides it; rank r of N owns elements r/N to (r+1)/N.
"""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import data_parallel as without_zero
from optimizer import accumulate_gradients


def zero_units(model, args):
    """Notes on every parameter, which is still on the meta device, the unit that it will belong to."""
    if args.zero == 0:
        return
    sizes = (args.pp, args.dp * args.cp // args.zero_shard, args.zero_shard, args.tp)
    mesh = init_device_mesh(args.device, sizes, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    slices = args.zero_shard // math.gcd(args.zero_shard, args.ep)                 # of an expert: ep neighbours have different ones
    sizes = (args.pp, args.dp * args.cp // args.ep // slices, slices, args.ep, args.tp)
    expert_mesh = init_device_mesh(args.device, sizes, mesh_dim_names=("pp", "ep_copies", "ep_shard", "ep", "tp"))
    decoder = model.model
    for modules in filter(all, ([decoder.embed_tokens], *([layer] for layer in decoder.layers.values()), [decoder.norm, model.lm_head])):
        params = [param for module in modules for param in module.parameters()]
        experts = [param for param in params if param.dim() == 3]
        others = [param for param in params if param.dim() < 3]
        Unit(modules, others, args.zero, mesh.get_group("shard"), mesh.get_group("replicate"), keep=args.pp > 1)
        if experts:
            Unit(modules, experts, args.zero, expert_mesh.get_group("ep_shard"), expert_mesh.get_group("ep_copies"), keep=args.pp > 1)


def units_per_block(model):
    """A block's experts are a unit of their own, since fewer ranks have them."""
    return 2 if any(param.dim() == 3 for param in model.parameters()) else 1


def zero(model, mesh, args):
    """What the optimizer is to update; and what to call after backward, and after the optimizer's step."""
    if args.zero == 0:
        accumulate_gradients(model.parameters())
        groups = {}                                       # of ranks that have the same parameters: these
        for param in model.parameters():
            groups.setdefault(param.copies, []).append(param)
        finish = [without_zero.data_parallel(params, group, args) for group, params in groups.items()]
        return list(model.parameters()), lambda: [sum_gradients() for sum_gradients in finish], lambda: None
    units = list(dict.fromkeys(param.unit for param in model.parameters()))
    finish_reduces = reduce_when_ready(units, args.global_batch_size // (args.micro_batch_size * args.dp))
    gather_when_needed(units, units_per_block(model), args)

    def sum_gradients():
        finish_reduces()
        for unit in units if args.zero == 3 else []:      # a pipeline keeps them from its first micro-batch to its last
            unit.release()
        for unit in units:
            if unit.replicate.size() > 1:                 # hybrid: slices have replicas
                dist.all_reduce(unit.grad_slice, group=unit.replicate)

    def gather_weights():
        for unit in units if args.zero < 3 else []:
            unit.gather()
    return [piece for unit in units for piece in unit.pieces()], sum_gradients, gather_weights


def formula(model, mesh, args):
    """What one training step sends, as (group, collective, payload bytes)."""
    number = torch.promote_types(args.dtype, torch.float32).itemsize
    norm = (dist.group.WORLD, "all_reduce", number)
    if args.zero == 0:
        return [norm, *without_zero.formula(model, mesh, args)]
    units = list(dict.fromkeys(param.unit for param in model.parameters()))
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.dp)
    sent = [norm, (dist.group.WORLD, "all_reduce", number)]                        # and the loss
    for i, unit in enumerate(units):
        again = 0 < i < len(units) - units_per_block(model) - 1                    # of stage 3, in backward
        gathers = micro_batches * (1 + again) if args.zero == 3 and args.pp == 1 else 1
        reduces = micro_batches if args.zero >= 2 else 1
        sent.append((unit.shard, "all_gather", gathers * unit.weights.nbytes))
        sent.append((unit.shard, "reduce_scatter", reduces * unit.grad_slice.nbytes * unit.shard.size()))
        if unit.replicate.size() > 1:
            sent.append((unit.replicate, "all_reduce", unit.grad_slice.nbytes))
    return sent


def reduce_when_ready(units, micro_batches):
    """A unit is reduced as soon as its last gradient is there: in stage 1 once per step, in 2 and 3 every micro-batch."""
    under_way = []

    def collect(param):
        unit = param.unit
        unit.grad_view(param).add_(param.grad)
        param.grad = None
        unit.arrived += 1
        if unit.arrived == len(unit.params) * (micro_batches if unit.stage == 1 else 1):
            unit.arrived = 0
            under_way.append((unit, *unit.start_reduce()))
            if len(under_way) > 1:                        # of the buffers in stages 2 and 3, two exist at a time
                finish_oldest()

    def finish_oldest():
        unit, work, part = under_way.pop(0)
        work.wait()
        unit.finish_reduce(part)

    def finish():
        while under_way:
            finish_oldest()
    for unit in units:
        for param in unit.params:
            param.register_post_accumulate_grad_hook(collect)
    return finish


def gather_when_needed(units, per_block, args):
    """Stages 1 and 2 wait for what the last step gathered; stage 3 gathers, the next unit while this one computes."""
    def before_forward(i):
        units[i].gather_if_released()
        units[i].wait()
        for unit in units[i + 1:i + 1 + per_block]:
            unit.gather_if_released()

    def before_backward(i):
        units[i].gather_if_released()
        units[i].wait()
        for unit in units[max(1, i - per_block):i]:
            unit.gather_if_released()

    def after_forward(i, output):
        if args.zero == 3 and args.pp == 1 and i > 0:     # unit 0, the embedding, needs no weights in backward
            output.register_hook(lambda grad: before_backward(i))
        if args.zero == 3 and args.pp == 1 and i < len(units) - per_block - 1:     # the last block and the head stay: backward begins with them
            units[i].release()

    for i, unit in enumerate(units):
        unit.modules[0].register_forward_pre_hook(lambda module, inputs, i=i: before_forward(i))
        unit.modules[-1].register_forward_hook(lambda module, inputs, output, i=i: after_forward(i, output))


def wait_for_weights(model):
    """After the last step: no process may end while others still gather from it."""
    for param in model.parameters():
        if hasattr(param, "unit"):
            param.unit.wait()


def whole(param):
    """A parameter's value, for saving."""
    if not hasattr(param, "unit") or param.unit.stage < 3:
        return param.detach()
    param.unit.gather_if_released()
    param.unit.wait()
    value = param.detach().clone()
    param.unit.release()
    return value


class Unit:
    def __init__(self, modules, metas, stage, shard, replicate, keep):
        self.modules, self.stage, self.shard, self.replicate, self.keep = modules, stage, shard, replicate, keep
        for param in metas:
            param.unit = self
        self.count, self.params, self.arrived = len(metas), [], 0
        self.gathering = self.grads = None

    def add(self, param):
        """Takes the parameters as they are made and cuts them once it has all, so that no rank ever has all units."""
        self.params.append(param)
        if len(self.params) == self.count:
            self.cut()

    def cut(self):
        ranks, rank = self.shard.size(), self.shard.rank()
        flat = torch.cat([param.detach().flatten() for param in self.params])
        size = -(-len(flat) // ranks)                                              # of a slice
        self.mine = slice(rank * size, (rank + 1) * size)
        self.weights = nn.functional.pad(flat, (0, ranks * size - len(flat)))      # [ranks * size]
        self.weight_slice = self.weights[self.mine]
        for param, view in self.views(self.weights).items():
            param.data = view
        if self.stage == 1:
            self.make_grads()
            self.grad_slice = self.grads[self.mine]
        else:
            self.grad_slice = torch.zeros_like(self.weight_slice, dtype=torch.promote_types(flat.dtype, torch.float32))
        if self.stage == 3:
            self.weight_slice = self.weight_slice.clone()
            self.release()

    def views(self, flat):
        """{parameter: its part of a flat tensor, in its shape}"""
        sizes = [param.numel() for param in self.params]
        return {param: part.view(param.shape) for param, part in zip(self.params, flat[:sum(sizes)].split(sizes))}

    def pieces(self):
        """My slice as parameters for the optimizer, cut at the borders of the real ones."""
        pieces, start = [], 0
        for param in self.params:
            first, last = max(start, self.mine.start), min(start + param.numel(), self.mine.stop)
            start += param.numel()
            if first < last:
                here = slice(first - self.mine.start, last - self.mine.start)
                shape = (1, -1) if param.dim() >= 2 else (-1,)                     # a matrix's piece is a row, so it decays
                piece = nn.Parameter(self.weight_slice[here].view(shape), requires_grad=False)
                piece.main_grad = self.grad_slice[here].view(shape)
                piece.replicas = param.replicas // self.shard.size()
                piece.unit = self
                piece.sum_over = param.sum_over
                pieces.append(piece)
        return pieces

    def gather(self):
        self.gathering = dist.all_gather_into_tensor(self.weights, self.weight_slice, group=self.shard, async_op=True)

    def gather_if_released(self):
        storage = self.weights.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.weights.nbytes)
            self.gather()

    def wait(self):
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    def release(self):
        """Gives the memory back. The parameters, and what autograd saved of them, stay views of it, until it is refilled."""
        self.weights.untyped_storage().resize_(0)

    def make_grads(self):
        self.grads = torch.zeros_like(self.weights, dtype=torch.promote_types(self.weights.dtype, torch.float32))
        self.grad_views = self.views(self.grads)

    def grad_view(self, param):
        if self.grads is None:
            self.make_grads()
        return self.grad_views[param]

    def start_reduce(self):
        if self.stage == 3 and not self.keep:
            self.release()                                # the unit's backward is over
        part = self.grad_slice if self.stage == 1 else torch.empty_like(self.grad_slice)
        work = dist.reduce_scatter_tensor(part, self.grads, group=self.shard, async_op=True)
        if self.stage > 1:                                # what comes from now on goes into a new one
            self.grads = self.grad_views = None
        return work, part

    def finish_reduce(self, part):
        if self.stage == 1:                               # only the slice is a sum now: the rest starts anew
            self.grads[:self.mine.start].zero_()
            self.grads[self.mine.stop:].zero_()
        else:
            self.grad_slice += part
