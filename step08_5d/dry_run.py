"""--dry_run WORLD: this very trainer as one rank of many, for one training step, with no memory, GPU or other
process.

    python step08_5d/train.py --dry_run 16384 --model llama-405b --pp 16 --tp 8 --zero 1 --seq_len 8192 \\
        --global_batch_size 2048 --micro_batch_size 1

Tensors are on PyTorch's meta device: they have a shape, and a storage of some size, but no data. The process
group is its `fake` one, in which a collective is over at once. All else is the code that trains, and none of
what is printed is worked out: storages are seen to come and go, collectives to be called, matrices to be
multiplied. The kernels are CUDA's, with --device cpu the CPU's; they differ in what the norms keep, and
collectives in whether they hold on to their input. What a kernel takes for itself, and what NCCL and the
allocator take, is not seen.
"""
import contextlib
import os
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import schedules
from config import refuse
from ledger import Ledger
from profiling import KINDS, LiveStorages, note_state

aten = torch.ops.aten


# ------------------------------------------------------------------------------- one process plays one rank
@contextlib.contextmanager
def dry_run(args):
    """Around the whole program. What takes data, other processes or a device is replaced by what does not."""
    if args.dry_run is None:
        yield
        return
    check_dry_run(args)
    init_process_group = dist.init_process_group
    replacements = {
        "torch.distributed.init_process_group": lambda *_, **__: init_process_group(
            "fake", rank=args.dry_run_rank, world_size=args.dry_run, store=FakeStore()),
        "torch.distributed.Work.is_completed": lambda work: True,                  # the fake group's never is
        "torch.optim.adam._device_dtype_check_for_fused": lambda *_: None,         # to AdamW meta is unknown
        "data.open_token_file": lambda path: np.broadcast_to(
            np.uint16(0), args.seq_len * args.global_batch_size + 1),
        "checkpoint.initial_weight": lambda name, meta, config, args: torch.empty(meta.shape, device="meta"),
        "metrics.Metrics.log": lambda *_: None,
        "metrics.print_start": lambda *_: None,
        "model.sdpa": flash_attention}
    if args.device == "cuda":
        replacements |= {
            "torch.nn.functional.rms_norm": lambda x, shape, weight, eps: FusedNorm.apply(x, weight),
            "torch.distributed.reduce_scatter_tensor": keeping_its_input(dist.reduce_scatter_tensor)}
    args.device, args.steps, args.dataset = "meta", 1, "none.npy"
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(patch.dict(os.environ, WORLD_SIZE=str(args.dry_run)))
        os.environ.pop("MASTER_ADDR", None)               # no other rank is there to agree with
        for name, instead in replacements.items():
            replaced.enter_context(patch(name, instead))
        replaced.enter_context(patch.dict(dist.Backend.backend_capability, fake=["cpu", "meta"]))
        replaced.enter_context(NoData())
        yield


def check_dry_run(args):
    if args.dry_run < 1:
        refuse(f"--dry_run {args.dry_run}: the number of ranks must be at least 1")
    if not 0 <= args.dry_run_rank < args.dry_run:
        refuse(f"--dry_run_rank {args.dry_run_rank}: of {args.dry_run} ranks the last is {args.dry_run - 1}")
    for name in ("init_from", "save", "log_file", "profile", "compile", "checkpoint", "resume"):
        if getattr(args, name, None):
            refuse(f"--dry_run reads, writes and compiles nothing: leave out --{name}")
    if args.attention == "flash":
        refuse("--dry_run takes --attention sdpa, which keeps and computes the same")


def keeping_its_input(reduce_scatter):
    """nccl's has its input until it is waited for. gloo's copies it, the fake group lets it go at once."""
    def start(output, input, group, async_op=False):
        work = reduce_scatter(output, input, group=group, async_op=async_op)
        return work and SimpleNamespace(wait=work.wait, input=input)
    return start


def flash_attention(q, k, v):                             # [batch, seq, heads, head_dim]
    """The kernel that sdpa takes on a real device. On meta it would take one that makes all the scores."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0].transpose(1, 2)


class FusedNorm(torch.autograd.Function):
    """What CUDA's kernel keeps: the input, and a float32 per token. On the CPU, and on meta, more is kept."""

    @staticmethod
    def forward(ctx, x, weight):
        dtype = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=dtype))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:2])


class NoData(TorchDispatchMode):
    """Answers the operations whose result depends on data: those of a router of experts, and of the log."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        x = args[0] if args else None
        if op == aten.sort.stable:                        # puts rows in the order of their experts
            self.rows = x.numel()
        if op == aten._to_copy.default and x.is_meta and kwargs.get("device") == torch.device("cpu"):
            return balanced(self.rows, x.shape[-1]).expand(x.shape)
        if op == aten._local_scalar_dense.default and x.is_meta:
            return 0
        return op(*args, **(kwargs or {}))


def balanced(rows, parts):
    """Counts of rows, the same for every expert, or rank; or nearly so, and experts add up to their rank."""
    return (torch.arange(parts + 1) * rows // parts).diff()


# ------------------------------------------------------------------------------------------- what is seen
@contextlib.contextmanager
def watch(model, optimizer, pipeline, mesh, args):
    """Around the training step."""
    if args.dry_run is None:
        yield
        return
    optimizer.adamw.step()                                # makes its states: the step is not to be the first
    with observe(model, optimizer, pipeline, mesh) as seen:
        yield
    report(seen, pipeline, mesh, args)


@contextlib.contextmanager
def observe(model, optimizer, pipeline, mesh):
    """Yields what will, after a training step, have been seen. It may be a real one."""
    memory, flops, sent, seen = LiveStorages(), Flops(), Ledger(mesh), SimpleNamespace()
    note_state(memory, model, optimizer)
    with sent, flops, memory:
        yield seen
    note_state(memory, model, optimizer)
    made_in_forward(memory, pipeline.events)
    _, *columns = zip(*memory.timeline())                 # a row per event, a column per kind
    totals = [sum(row) for row in zip(*columns)]
    peak = totals.index(max(totals))
    seen.peak, seen.between = (dict(zip(KINDS, [column[row] for column in columns])) for row in (peak, -1))
    seen.most = {kind: max(column) for kind, column in zip(KINDS, columns)}
    seen.place, seen.flops, seen.sent = place(memory.events[peak][0], pipeline.events), flops.total, sent


class Flops(TorchDispatchMode):
    """Two for every multiplication of a matrix product; a causal attention kernel leaves out half."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._opname in ("mm", "bmm", "_grouped_mm"):
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        elif op._opname == "_scaled_dot_product_flash_attention_for_cpu":
            # two products of [seq, seq]
            self.total += attention_flops(2, *args[:2], causal=True in args[4:5])
        elif op._opname == "_scaled_dot_product_flash_attention_for_cpu_backward":
            # the first once more, and four
            self.total += attention_flops(5, *args[1:3], causal=True in args[7:8])
        return op(*args, **(kwargs or {}))


def attention_flops(products, q, k, causal):              # [batch, heads, seq, head_dim]
    return products * 2 * q.numel() * k.shape[2] // (2 if causal else 1)


def made_in_forward(memory, events):
    """What a forward pass made is an activation, also where autograd does not look: in our own functions."""
    spans = iter([(event.start, event.end) for event in events if event.action.kind == "F"])
    start, end = next(spans)
    for seconds, number, size in memory.events:
        while seconds > end:
            start, end = next(spans, (float("inf"), float("inf")))
        if size > 0 and seconds >= start and memory.kinds[number] == "rest":
            memory.kinds[number] = "activations"


def place(seconds, events):
    for i, (_, action, start, end) in enumerate(events, 1):
        if seconds <= end:
            when = "in" if seconds >= start else "before"
            return f"{when} {action} of stage {action.stage}, action {i} of {len(events)}"
    return "after the last backward, in the sums of gradients or the optimizer"


# ------------------------------------------------------------------------------------------- what is printed
def report(seen, pipeline, mesh, args):
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names}
    where = ", ".join(f"{name} {mesh.get_local_rank(name)} of {size}" for name, size in sizes.items())
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.dp)
    print(f"dry run of rank {args.dry_run_rank} of {args.dry_run:,}: {where}\n"
          f"{args.model}, {str(args.dtype).removeprefix('torch.')}, a training step of {micro_batches} "
          f"micro-batches of {args.micro_batch_size} x {args.seq_len:,} tokens\n")
    print(f"{'memory, MiB':<18}{'between steps':>15}{'at the peak':>15}{'at most':>15}")
    for kind in KINDS:
        row = [column[kind] for column in (seen.between, seen.peak, seen.most)]
        print(f"{kind:<18}" + "".join(f"{size / 2**20:>15,.2f}" for size in row))
    row = [sum(column.values()) for column in (seen.between, seen.peak)]
    print(f"{'all':<18}" + "".join(f"{size / 2**20:>15,.2f}" for size in row))
    print(f"the peak is {seen.place}\n")
    tokens = args.global_batch_size // args.dp * args.seq_len // args.cp
    print(f"{seen.flops:.4e} FLOPs, {seen.flops / tokens:.4e} for each of the {tokens:,} tokens "
          "that this rank works on")
    print_bubble(pipeline, args, micro_batches)
    print(f"\n{'dimension':<16}{'collective':<16}{'calls':>9}{'payload bytes':>20}{'on the wire':>20}")
    sent = seen.sent
    for what in sorted(sent.calls):
        print(f"{what[0]:<16}{what[1]:<16}{sent.calls[what]:>9,}{sent.payload[what]:>20,}"
              f"{sent.wire[what]:>20,.0f}")


def print_bubble(pipeline, args, micro_batches):
    events = schedules.simulate(schedules.make(args.schedule, args.pp, micro_batches, args.stages_per_rank))
    idle, whole = schedules.bubble(events)[pipeline.group.rank()], max(event.end for event in events)
    print(f"bubble: {args.schedule} leaves this rank idle for {idle} of {whole} units, {idle / whole:.1%} of "
          f"the step, {idle / (whole - idle):.1%} of its work (a stage's F, I and W take one each)")
