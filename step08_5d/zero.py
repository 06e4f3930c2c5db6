"""ZeRO: shard over the data-parallel ranks what data parallelism replicates. Stage 3 is FSDP.

AdamW updates each element independently. So a rank can update one part of the weights if it has the summed
gradients and the optimizer states of that part. And an all-reduce is a reduce-scatter followed by an
all-gather, so the update fits between the two. A training step needs three collectives:

    reduce-scatter   every rank's gradients -> this rank's shard of their sum
    all-gather       every rank's shard of the updated weights -> the whole weights
    all-reduce       sums a shard's gradients over its replicas, if it has any (--zero_shard)

The stages differ in how long whole tensors exist:

    stage 1   shards the optimizer states; weights and gradients stay whole
    stage 2   shards gradients too: they are whole in backward only, and reduced after every micro-batch
    stage 3   shards weights too: they are all-gathered before each use, in forward and backward, then freed

Collectives work on units: the embedding, each transformer block, the final norm with the head. A unit's
parameters lie side by side in a flat tensor, padded so that it divides into equal shards. With two ranks:

    flat_param   A0 A1 A2 B0 | B1 B2 B3 pad       parameters A and B; rank 0's shard | rank 1's shard

FSDP1 does the same. FSDP2 shards each parameter along dimension 0, and copies the shards into a flat buffer
to communicate.

A block's experts are a unit of their own, unless the ranks that share them also share the rest of the block.
"""
import itertools
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from config import at_least, must_divide
from mesh import data_mesh, degrees
from messages import fail
from placement import group_by_mesh


# ------------------------------------------------------------------------------------------- stage 1
class Zero1Unit:
    """A unit whose weights and gradients are whole on every rank. Only the optimizer states are sharded."""

    def __init__(self, modules, num_params: int, mesh: DeviceMesh, args):
        self.modules, self.num_params, self.params = modules, num_params, []
        self.replicate_group, self.shard_group = mesh.get_all_groups()
        self.backwards_per_reduce = args.global_batch_size // (args.micro_batch_size * args.dp)
        self.grad_dtype = torch.promote_types(args.dtype, torch.float32)
        self.num_grads, self.gather_handle, self.is_whole = 0, None, True
        self.reshard_after_use = args.pp == 1             # stage 3; a pipeline reshards after the last use

    def accumulate_grad(self, param):
        self.grad_views[param].add_(param.grad)

    def start_reduce_scatter(self):
        """Start summing gradients over the ranks. Return the handle, and the shard that will hold the sum."""
        shard, whole = self.grad_shard, self.flat_grad    # in place: one is a view of the other
        return dist.reduce_scatter_tensor(shard, whole, group=self.shard_group, async_op=True), shard

    def finish_reduce_scatter(self, shard):
        """Zero flat_grad outside the shard. Otherwise the next step would add to it and send it again."""
        # the shard holds the sum now; the optimizer zeroes it after the update
        self.flat_grad[:self.shard_slice.start].zero_()
        self.flat_grad[self.shard_slice.stop:].zero_()

    def start_all_gather(self):
        whole, shard = self.flat_param, self.param_shard
        self.gather_handle = dist.all_gather_into_tensor(whole, shard, group=self.shard_group, async_op=True)

    def wait_for_all_gather(self):
        if self.gather_handle:
            self.gather_handle.wait()
            self.gather_handle = None

    def unshard(self):
        """Start gathering the weights, unless they are whole or on their way."""
        if not self.is_whole:
            self.is_whole = True                          # once gather_handle has been waited for
            self.start_all_gather()

    def reshard(self):
        """Mark the whole weights as stale: the optimizer has updated only the shard."""
        self.is_whole = False

    def pre_forward(self, module, inputs):
        self.unshard_and_prefetch(self.next_in_forward)

    def unshard_and_prefetch(self, next_units):
        """Wait for the weights of this unit, and start gathering those of the unit that computes next.

        Prefetching one unit ahead is enough for overlap. NCCL runs kernels in the order in which the program
        launched them, across groups (mesh.py). If forward launched the gathers of all units first, the first
        collective of tp could start only after the last of them.
        """
        self.unshard()
        self.wait_for_all_gather()
        for unit in next_units:
            unit.unshard()

    # --------------------------------------------------------------- its flat tensors
    def flatten_and_shard(self):
        """Move the parameters into a flat tensor and take this rank's shard of it."""
        num_shards, rank = self.shard_group.size(), self.shard_group.rank()
        flat = torch.cat([param.detach().flatten() for param in self.params])
        shard_size = -(-len(flat) // num_shards)          # rounded up
        self.shard_slice = slice(rank * shard_size, (rank + 1) * shard_size)
        self.flat_param = nn.functional.pad(flat, (0, num_shards * shard_size - len(flat)))
        self.param_shard = self.flat_param[self.shard_slice]
        for param, view in self.views(self.flat_param).items():
            # Assigning .data keeps the same Parameter, with its hooks. And it keeps the Parameter's version
            # counter apart from flat_param's: backward rejects a saved tensor whose counter has moved since
            # forward, and stage 3 refills flat_param in between.
            param.data = view
        self.allocate_grads()

    def allocate_grads(self):
        self.flat_grad = torch.zeros_like(self.flat_param, dtype=self.grad_dtype)
        self.grad_views = self.views(self.flat_grad)
        self.grad_shard = self.flat_grad[self.shard_slice]

    def views(self, flat):
        """Return {parameter: the view of its elements in a flat tensor, in its own shape}."""
        sizes = [param.numel() for param in self.params]
        chunks = flat[:sum(sizes)].split(sizes)
        return {param: chunk.view(param.shape) for param, chunk in zip(self.params, chunks)}

    def sharded_params(self):
        """Return what the optimizer updates: the part of each parameter that lies in this rank's shard."""
        sharded_params, offset = [], 0
        for param in self.params:
            start = max(offset, self.shard_slice.start)
            stop = min(offset + param.numel(), self.shard_slice.stop)
            # The optimizer needs a parameter. So a unit whose shard is all padding gives it an empty one.
            if start < stop or param is self.params[-1] and not sharded_params:
                local = slice(start - self.shard_slice.start, max(start, stop) - self.shard_slice.start)
                sharded_param = nn.Parameter(self.param_shard[local], requires_grad=False)
                sharded_param.main_grad = self.grad_shard[local]
                sharded_param.origin = param, start - offset         # for resume.py: where it starts in param
                num_replicas = param.placement.num_replicas // self.shard_group.size()
                sharded_param.placement = replace(param.placement, num_replicas=num_replicas)
                sharded_params.append(sharded_param)
            offset += param.numel()
        return sharded_params


class Zero:
    """ZeRO as train.py sees it. It has the methods of DataParallel, whose place it takes."""

    def __init__(self, model, args):
        self.stage, self.units = args.zero, model.zero_units
        self.reduce_scatters = []                         # in progress: (unit, handle, shard)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.post_accumulate_grad)
        self.params = [param for unit in self.units for param in unit.sharded_params()]
        numbered = number_by_modules(self.units)
        for i, unit in numbered:
            unit.next_in_forward = [other for j, other in numbered if j == i + 1]
            unit.modules[0].register_forward_pre_hook(unit.pre_forward)
        if self.stage == 3:                               # which also gathers in backward
            register_post_forward_hooks(numbered)

    def start_all_gather(self):
        """Let forward gather the weights that the last step updated; start with the first unit's."""
        for unit in self.units:
            unit.reshard()
        for unit in self.units[:1]:
            unit.unshard()

    def post_accumulate_grad(self, param):
        """Take a gradient that backward has computed. After a unit's last one, start its reduce-scatter."""
        unit = param.unit
        unit.accumulate_grad(param)
        param.grad = None
        unit.num_grads += 1
        if unit.num_grads == len(unit.params) * unit.backwards_per_reduce:
            unit.num_grads = 0
            self.reduce_scatters.append((unit, *unit.start_reduce_scatter()))
            if self.stage > 1 and len(self.reduce_scatters) > 1:     # each holds whole gradients: allow two
                self.finish_oldest()

    def finish_oldest(self):
        unit, handle, shard = self.reduce_scatters.pop(0)
        handle.wait()
        unit.finish_reduce_scatter(shard)

    def finish_grad_reduction(self):
        """Finish summing the shards of gradients over the data-parallel ranks."""
        while self.reduce_scatters:
            self.finish_oldest()
        for unit in self.units:
            if self.stage == 3:
                unit.reshard()                            # in a pipeline, the weights are still whole
            if unit.replicate_group.size() > 1:           # hybrid sharding: other ranks have the same shard
                # (FSDP2 starts this in backward, after the unit's reduce-scatter.)
                dist.all_reduce(unit.grad_shard, group=unit.replicate_group)

    def wait_for_all_gather(self):
        """Wait until the weights are whole again after the last update: --save reads them."""
        for unit in self.units:
            if self.stage < 3:                            # saving gathers those of stage 3 one by one
                unit.unshard()
            unit.wait_for_all_gather()


# ------------------------------------------------------------------------------------------- stage 2
class Zero2Unit(Zero1Unit):
    """A unit whose gradients are whole only in its backward. Between micro-batches it keeps their shard."""

    def allocate_grads(self):
        self.flat_grad, self.backwards_per_reduce = None, 1        # reduce after every micro-batch
        self.grad_shard = torch.zeros_like(self.param_shard, dtype=self.grad_dtype)

    def accumulate_grad(self, param):
        if self.flat_grad is None:                        # the first gradient of this micro-batch
            self.flat_grad = torch.zeros_like(self.flat_param, dtype=self.grad_dtype)
            self.grad_views = self.views(self.flat_grad)
        super().accumulate_grad(param)

    def start_reduce_scatter(self):
        shard = torch.empty_like(self.grad_shard)
        handle = dist.reduce_scatter_tensor(shard, self.flat_grad, group=self.shard_group, async_op=True)
        self.flat_grad = self.grad_views = None           # the handle holds the memory until it is waited for
        return handle, shard

    def finish_reduce_scatter(self, shard):
        self.grad_shard += shard


# ------------------------------------------------------------------------------------------- stage 3
class Zero3Unit(Zero2Unit):
    """A unit whose weights are whole only while it computes. Between uses it keeps their shard.

    (In a pipeline they stay whole from the first micro-batch's forward to the last one's backward. Gathering
    them again for every micro-batch would send too much.)
    """

    def flatten_and_shard(self):
        super().flatten_and_shard()
        self.param_shard = self.param_shard.clone()       # a view would lose its memory in reshard
        self.reshard()

    def reshard(self):
        """Free the whole weights. Autograd's saved tensors stay views of the storage that unshard refills."""
        super().reshard()
        self.flat_param.untyped_storage().resize_(0)

    def unshard(self):
        """Start gathering the whole weights, unless they are there, into the storage that reshard emptied."""
        if not self.is_whole:
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        super().unshard()

    def post_forward(self, module, inputs, output):
        """Set a hook on the output: its gradient comes just before backward needs the weights."""
        if self.weights_in_backward:
            output.register_hook(self.pre_backward)
        if self.reshard_after_forward:
            self.reshard()

    def pre_backward(self, grad):
        self.unshard_and_prefetch(self.next_in_backward)

    def start_reduce_scatter(self):
        # An operation computes the gradients of its input and its weight together, so after the unit's last
        # gradient nothing reads its weights, unless a pipeline has more micro-batches for them.
        if not self.reshard_after_use:
            return super().start_reduce_scatter()
        self.reshard()
        return super().start_reduce_scatter()


def number_by_modules(units):
    """Return [(i, unit)] in forward order. A layer's two units, experts and the rest, have the same i."""
    groups = itertools.groupby(units, key=lambda unit: unit.modules)
    return [(i, unit) for i, (_, group) in enumerate(groups) for unit in group]


def register_post_forward_hooks(numbered):
    """Tell each unit of stage 3 what to do after its forward, and which units compute next in backward."""
    last, _ = numbered[-1]
    for i, unit in numbered:
        # Unit 0 is the embedding, whose backward reads no weights, or in a pipeline a block that stays whole.
        unit.weights_in_backward = i > 0
        # Backward begins with the last two: they would be gathered again as soon as they were freed.
        unit.reshard_after_forward = unit.reshard_after_use and i < last - 1
        unit.next_in_backward = [other for j, other in numbered if j == i - 1] if i > 1 else []
        unit.modules[-1].register_forward_hook(unit.post_forward)


# ------------------------------------------------------------------ from the meta device, and to a checkpoint
def make_units(model, mesh: DeviceMesh, args):
    """Group the parameters, still on the meta device, into units. Return the units in forward order."""
    if args.zero == 0:
        return []
    unit_class = {1: Zero1Unit, 2: Zero2Unit, 3: Zero3Unit}[args.zero]
    decoder, units, shard_meshes = model.model, [], {}
    for data, _ in group_by_mesh(model.parameters()):
        # Every stride-th rank holds the same elements; the stride is tp, or for experts ep. Those among
        # lcm(zero_shard x tp, stride) neighbours share the shards. With zero_shard 4, tp 1 and ep 2, an
        # expert has two shards; with zero_shard 2 and ep 4 it has one, since no neighbour holds it.
        stride = args.dp * args.cp * args.tp // data.size()
        neighbours = args.zero_shard * args.tp
        num_shards = neighbours // math.gcd(neighbours, stride)
        names = ("replicate", "shard") if data == data_mesh(mesh) else ("ep_copies", "ep_shard")
        shard_meshes[data] = data._unflatten(0, (data.size() // num_shards, num_shards), names)
    layers = ([layer] for layer in decoder.layers.values())
    for modules in ([decoder.embed_tokens], *layers, [decoder.norm, model.lm_head]):
        params = [param for module in modules if module for param in module.parameters()]
        for data, shared in group_by_mesh(params):        # empty if another pp rank holds them
            unit = unit_class(modules, len(shared), shard_meshes[data], args)
            units.append(unit)
            for param in shared:
                param.unit = unit
    return units


def add_to_unit(param, unit):
    """Add a materialized parameter. Once its unit is complete, shard the unit.

    So under stage 3, no rank ever holds the whole weights of all units while it makes or loads them.
    """
    param.unit = unit                                     # make_units has set it on the meta parameter
    unit.params.append(param)
    if len(unit.params) == unit.num_params:
        unit.flatten_and_shard()


def unsharded_param(param):
    """Return a parameter's value with ZeRO's sharding undone, for saving. All ranks must call this."""
    unit = getattr(param, "unit", None)
    if not isinstance(unit, Zero3Unit):
        return param.detach()
    unit.unshard()
    unit.wait_for_all_gather()
    value = param.detach().clone()
    unit.reshard()
    return value


# ------------------------------------- config.py calls flags, defaults, check; ledger.py calls traffic
def data_ranks(args):
    """Return how many ranks hold the same weights: dp, and from step 5 on dp x cp."""
    return args.dp * degrees(args).get("cp", 1)


def flags(add):
    add("--zero", type=int, choices=[0, 1, 2, 3], default=0,
        help="ZeRO stage; 1: shard optimizer states, 2: also gradients, 3: also weights (FSDP)")
    add("--zero_shard", type=at_least(1),
        help="data-parallel ranks that share one set of shards; the others hold replicas (default: all)")


def defaults(args):
    if args.zero == 0 and args.zero_shard:
        fail("--zero_shard: requires --zero 1, 2 or 3")
    args.zero_shard = args.zero_shard or data_ranks(args)


def check(args, config):
    what = f"dp {args.dp} x cp {args.cp} =" if "cp" in degrees(args) else "dp"
    must_divide("zero_shard", args.zero_shard, what, data_ranks(args))


def traffic(model, mesh, args):
    grad_norm = dist.group.WORLD, "all_reduce", torch.promote_types(args.dtype, torch.float32).itemsize
    num_micro_batches, traffic = args.global_batch_size // (args.micro_batch_size * args.dp), [grad_norm]
    for unit in model.zero_units:
        gathers = 1
        reduces = num_micro_batches if args.zero >= 2 else 1
        if args.zero == 3 and args.pp == 1:               # in forward, and some units again in backward
            gathers = num_micro_batches * (1 + (unit.weights_in_backward and unit.reshard_after_forward))
        traffic.append((unit.shard_group, "all_gather", gathers * unit.flat_param.nbytes))
        grad_bytes = unit.grad_shard.nbytes * unit.shard_group.size()
        traffic.append((unit.shard_group, "reduce_scatter", reduces * grad_bytes))
        if unit.replicate_group.size() > 1:
            traffic.append((unit.replicate_group, "all_reduce", unit.grad_shard.nbytes))
    return traffic
