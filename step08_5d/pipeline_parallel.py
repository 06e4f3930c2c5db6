"""Pipeline parallelism: each rank holds one or more stages of the model; micro-batches pass through them all.

In forward, each stage sends the activations of a micro-batch, [batch, seq, hidden], to the next stage. In
backward, it gets back their gradient, of the same shape. A schedule (schedules.py) lists what each rank
computes, in order. `Pipeline` runs the list of any schedule.

GPipe: https://arxiv.org/abs/1811.06965. 1F1B and interleaving, as in Megatron-LM:
https://arxiv.org/abs/2104.04473.
"""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import schedules
from config import at_least
from messages import fail
from model import Decoder
from shards import full_tensor
from zero_bubble import split_backward


# ------------------------------------------------------------------------------- the stages that a rank holds
def stage_boundaries(config, num_stages):
    """Return the index of each stage's first layer, then the number of layers.

    The stages have about equal work; the embedding and the head count as layers, in proportion to their size.
    """
    layers = config.num_hidden_layers
    width = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    width += 3 * config.intermediate_size * (config.num_experts_per_tok or 1)
    ends = config.vocab_size / width                      # the size of the head, in layers
    # rounded, but with at least one layer each
    even = [math.floor((layers + 2 * ends) * i / num_stages - ends + 0.5) for i in range(num_stages + 1)]
    return [max(i, min(layers - num_stages + i, first)) for i, first in enumerate(even)]


def local_stages(mesh: DeviceMesh, args):
    num_stages, rank = args.pp * args.stages_per_rank, mesh.get_local_rank("pp")
    if schedules.SCHEDULES[args.schedule].v_shaped:
        return [rank, num_stages - 1 - rank]              # one on the V's way down, one on its way up
    return list(range(rank, num_stages, args.pp))


def keep_local_stages(model, config, mesh: DeviceMesh, args):
    """Drop the layers that other ranks hold, while the model is on the meta device.

    The parameters that stay keep their names.
    """
    boundaries, stages = stage_boundaries(config, args.pp * args.stages_per_rank), local_stages(mesh, args)
    decoder = model.model
    kept = {str(layer) for stage in stages for layer in range(boundaries[stage], boundaries[stage + 1])}
    for name in decoder.layers.keys() - kept:
        del decoder.layers[name]
    if 0 not in stages:
        decoder.embed_tokens = None
    if len(boundaries) - 2 not in stages:
        decoder.norm = model.lm_head = None
    for param in model.parameters():
        param.placement.num_replicas //= args.pp


class Stage(nn.Module):
    """Some layers of a decoder. The first stage also has the embedding, the last one the norm."""

    def __init__(self, decoder, layers, is_first, is_last):
        super().__init__()
        self.config = decoder.config
        self.embed_tokens = decoder.embed_tokens if is_first else None
        self.layers = nn.ModuleDict({str(i): decoder.layers[str(i)] for i in layers})
        self.norm = decoder.norm if is_last else None

    forward = Decoder.forward


def connect(group: ProcessGroup, wraps, device):
    """Send a number from each rank to the next, because NCCL creates two ranks' communicator at first use.

    Without this, NCCL would create the communicators in the first training step, where each pair has to wait
    for the pair before it. (Each pair has its own, since init_process_group gets no device_id.) All ranks
    must call this.
    """
    number = torch.zeros(1, device=device)
    for sender in range(group.size() if wraps else group.size() - 1):
        receiver = (sender + 1) % group.size()
        if group.rank() == sender:
            dist.send(number, group=group, group_dst=receiver)
        if group.rank() == receiver:
            dist.recv(number, group=group, group_src=sender)


# ----------------------------------------------------------------------------------------- running a schedule
class Pipeline:
    """Run this rank's part of a schedule: its computations, and the sends and receives between them."""

    def __init__(self, model, config, mesh: DeviceMesh, args):
        self.model, self.args, self.group = model, args, mesh.get_group("pp")
        self.last = args.pp * args.stages_per_rank - 1
        boundaries = stage_boundaries(config, self.last + 1)
        self.stages = {i: Stage(model.model, range(boundaries[i], boundaries[i + 1]), i == 0, i == self.last)
                       for i in local_stages(mesh, args)}
        num_micro_batches = args.global_batch_size // (args.micro_batch_size * args.dp)
        schedule = schedules.make(args.schedule, args.pp, num_micro_batches, args.stages_per_rank)
        self.program = schedules.add_send_recv(schedule, self.group.rank())
        seq = args.seq_len // args.cp // (args.tp if args.sp == "on" else 1)
        self.shape = (args.micro_batch_size, seq, config.hidden_size)              # of each message
        self.queue = []                                # deferred W: functions to call (zero_bubble.py)
        if schedules.SCHEDULES[args.schedule].split_backward:
            split_backward(model.model.layers.values(), self.queue)
        wraps = args.stages_per_rank > 1 and not schedules.SCHEDULES[args.schedule].v_shaped
        connect(self.group, wraps, args.device)

    def forward_backward(self, micro_batches):
        """Accumulate the gradient of the global batch's mean loss; return this rank's part of that loss."""
        self.micro_batches = micro_batches
        dtype = torch.promote_types(self.args.dtype, torch.float32)
        self.loss = torch.zeros((), dtype=dtype, device=self.args.device)
        self.fwd_cache = {}                               # from F to B: a stage's input and output
        self.weight_grad_queues = {}                      # from I to W
        self.ready = {}                                   # {message: tensor} that this rank has computed
        self.recv_handles = {}                            # {message: (handle, buffer)}
        self.send_handles = []                     # (handle, tensor): keeps the tensor alive until it is sent
        for op, item, peer in self.program:               # item: a Message, or the Action to compute
            if op == "send":
                tensor = self.ready.pop(item)
                self.send_handles = [sent for sent in self.send_handles if not sent[0].is_completed()]
                handle = dist.isend(tensor, group=self.group, group_dst=peer)
                self.send_handles.append((handle, tensor))
            elif op == "receive":
                buffer = torch.empty(self.shape, dtype=self.args.dtype, device=self.args.device)
                self.recv_handles[item] = dist.irecv(buffer, group=self.group, group_src=peer), buffer
            else:
                self.compute(item)
        for handle, _ in self.send_handles:
            handle.wait()
        self.send_handles.clear()
        return self.loss / self.args.tp                   # all tp ranks have the same loss

    def compute(self, action):
        received, sent = schedules.receives(action, self.last), schedules.sends(action, self.last)
        tensor = self.wait_for(received) if received else None
        run = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}
        with torch.profiler.record_function(f"{action} of stage {action.stage}"):  # for --profile's trace
            result = run[action.kind](action.stage, action.micro_batch, tensor)
        if sent:
            self.ready[sent] = result

    def wait_for(self, message):
        if message in self.ready:                         # from another stage of this rank
            return self.ready.pop(message)
        handle, tensor = self.recv_handles.pop(message)
        handle.wait()
        return tensor

    def forward(self, stage, i, x):
        """F: run a stage on micro-batch i, and keep its input and output for backward."""
        inputs, positions, _ = self.micro_batches[i]
        x = inputs if x is None else x.requires_grad_()
        y = self.stages[stage](x, positions)
        self.fwd_cache[stage, i] = x, y
        return y.detach()

    def head_and_loss(self, i, y):
        """Compute the head and the loss of micro-batch i, at the start of the last stage's backward.

        The head computes its gradients together with the loss (loss.py). In forward that would be too early:
        they would be kept for every micro-batch in flight.
        """
        _, _, targets = self.micro_batches[i]
        loss = self.model.lm_head(y, targets) / (self.args.global_batch_size * self.args.seq_len)
        self.loss += loss.detach()
        return loss

    def backward(self, stage, i, grad):
        """B: compute I, then W. If the schedule does not split backward, autograd computes both in I."""
        grad = self.input_gradient(stage, i, grad)
        self.weight_gradient(stage, i, None)
        return grad

    def input_gradient(self, stage, i, grad):
        """I: run autograd. It computes the weights' gradients too, unless split_backward defers them."""
        x, y = self.fwd_cache.pop((stage, i))
        if stage == self.last:
            y = self.head_and_loss(i, y)
        torch.autograd.backward(y, grad)
        self.weight_grad_queues[stage, i] = self.queue[:]
        self.queue.clear()
        return x.grad

    @torch.no_grad()
    def weight_gradient(self, stage, i, _):
        """W: compute the weights' gradients that input_gradient has deferred."""
        queue = self.weight_grad_queues.pop((stage, i))
        while queue:
            queue.pop(0)()                                # frees its tensors before the next one runs


# ---------------------------------------------------------------------------------------------------- saving
def gather_from_pipeline(model, name, shape, mesh: DeviceMesh, args):
    """Return on every rank the whole value of a parameter that one stage holds. All ranks must call this."""
    param = dict(model.named_parameters()).get(name)
    if param is None:
        value = torch.zeros(shape, dtype=args.dtype, device=args.device)
    else:
        value = full_tensor(param).contiguous()
    dist.all_reduce(value, group=mesh.get_group("pp"))    # the other stages add zeros
    return value


# ------------------------------------- config.py calls flags, defaults, check; ledger.py calls traffic
def flags(add):
    add("--pp", type=at_least(1), default=1, help="pipeline-parallel ranks; each holds some of the layers")
    add("--schedule", choices=list(schedules.SCHEDULES), default="1f1b",
        help="pipeline schedule; afab is GPipe, zerobubble is ZB-H1, dualpipe is DualPipeV")
    add("--stages_per_rank", type=at_least(1),
        help="stages of the model on each pp rank (default: the fewest that --schedule allows)")


def defaults(args):
    args.schedule = args.schedule if args.pp > 1 else "1f1b"               # 1f1b also runs without a pipeline
    args.stages_per_rank = args.stages_per_rank or schedules.SCHEDULES[args.schedule].stages_per_rank


def check(args, config):
    schedule, per_rank = schedules.SCHEDULES[args.schedule], args.stages_per_rank
    if per_rank < schedule.stages_per_rank or per_rank > schedule.stages_per_rank and not schedule.or_more:
        needs = f"--schedule {args.schedule} requires" if args.pp > 1 else "with --pp 1, use"
        fail(f"--stages_per_rank {per_rank}: {needs} {schedule.stages_per_rank}"
             + " or more" * schedule.or_more)
    layers, stages = config.num_hidden_layers, args.pp * per_rank
    if layers < stages:
        fail(f"--pp {args.pp}: with stages_per_rank {per_rank} there are {stages} stages, but only {layers} "
             f"layers (num_hidden_layers); pp x stages_per_rank can be {layers} at most")
    needed = schedule.min_micro_batches(args.pp)
    micro_batches = args.global_batch_size // args.dp // args.micro_batch_size
    if micro_batches < needed:
        fail(f"--schedule {args.schedule}: requires {needed} micro-batches or more with pp {args.pp}, but "
             f"global_batch_size {args.global_batch_size} / dp {args.dp} / micro_batch_size "
             f"{args.micro_batch_size} = {micro_batches}; use --global_batch_size "
             f"{needed * args.dp * args.micro_batch_size}")


def traffic(model, mesh, args):
    stages, num_stages = local_stages(mesh, args), args.pp * args.stages_per_rank
    neighbours = [neighbour for stage in stages for neighbour in (stage - 1, stage + 1)]
    # activations go to the stage after, gradients to the stage before, if another rank holds it
    messages = sum(0 <= neighbour < num_stages and neighbour not in stages for neighbour in neighbours)
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp
    if args.sp == "on":
        tokens //= args.tp
    message_bytes = tokens * model.model.config.hidden_size * args.dtype.itemsize
    return [(mesh.get_group("pp"), "send", messages * message_bytes)] if messages else []
