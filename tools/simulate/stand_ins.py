"""Replace everything that needs data, other processes or a device.

Tensors are on PyTorch's meta device: they have a shape, but no data. The process group is PyTorch's `fake` one, in which a
collective is over at once. Kernels behave as CUDA's do. With --device cpu they behave as the CPU's: norms keep other tensors for
backward, and collectives do not hold on to their input.
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

from simulate.gpus import Kernel
from simulate.kernels import sizes

LEFT_OUT = "init_from", "save", "log_file", "profile", "checkpoint", "resume"
fused_kernels = []                                        # functions to call with kernels that no operation here stands for
aten = torch.ops.aten


@contextlib.contextmanager
def one_rank(ranks, rank):
    """Run the step's main inside this as one rank of many. No other process exists."""
    import train                                          # from the step whose folder is on the path
    from messages import fail
    parse_args, init_process_group = train.parse_args, dist.init_process_group

    def parse(argv, techniques):
        # as if there were a GPU; every one of gpus.py has bfloat16
        with patch("torch.cuda.is_available", lambda: True), patch("torch.cuda.get_device_capability", lambda: (8, 0)):
            args = parse_args(argv, techniques)
        for name in LEFT_OUT:
            getattr(args, name, None) and fail(f"--{name}: a dry run reads, writes and compiles nothing; leave out --{name}")
        if args.attention != "sdpa":
            fail(f"--attention {args.attention}: not in a dry run; choose sdpa, which keeps and computes the same")
        for name, instead in of_data_and_device(args).items():
            replaced.enter_context(patch(name, instead))
        replaced.enter_context(NoData())
        args.device, args.steps, args.dataset = "meta", 1, "none.npy"
        args.fused, args.compile = getattr(args, "compile", False), False          # fuse.py does the compiler's work
        return args
    stand_ins = {
        "train.parse_args": parse,
        "metrics.Metrics.log": lambda *_, **__: None,
        "messages.RANK": 0,                               # this rank prints for all
        "torch.distributed.Work.is_completed": lambda work: True,                  # never true with the fake group
        "torch.distributed.rendezvous": lambda *_, **__: iter([(FakeStore(), rank, ranks)]),
        "torch.distributed.init_process_group":
            lambda *_, **__: init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())}
    if hasattr(train, "fail_together"):                   # every step but the first
        stand_ins["mesh.all_gather_object"] = lambda value: [value] * ranks
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(patch.dict(os.environ, WORLD_SIZE=str(ranks)))
        os.environ.pop("RANK", None)                      # that of the process that simulates (patch.dict restores it)
        replaced.enter_context(patch.dict(dist.Backend.backend_capability, fake=["cpu", "meta"]))
        for name, instead in stand_ins.items():
            replaced.enter_context(patch(name, instead))
        yield


def of_data_and_device(args):
    """Return {name: stand-in} for functions that cannot take meta tensors, or treat them unlike those on a device."""
    stand_ins = {
        "data.open_token_file": lambda path: np.broadcast_to(np.uint16(0), args.seq_len * args.global_batch_size + 1),
        "weights.initial_weight": lambda name, meta, *_: torch.empty(meta.shape, device="meta"),
        "metrics.print_header": lambda *_: None,
        "model.sdpa": flash_attention,
        "torch.optim.adam._device_dtype_check_for_fused": lambda *_: None}         # fused AdamW refuses meta
    if args.device == "cuda":
        stand_ins["torch.nn.functional.rms_norm"] = lambda x, shape, weight, eps: FusedNorm.apply(x, weight)
        stand_ins["torch.distributed.reduce_scatter_tensor"] = keeping_its_input(dist.reduce_scatter_tensor)
    return stand_ins


def keeping_its_input(reduce_scatter):
    """Make reduce_scatter hold its input until the wait, as NCCL does. gloo copies it; the fake group lets it go at once."""
    def start(output, input, group, async_op=False):
        work = reduce_scatter(output, input, group=group, async_op=async_op)
        return work and SimpleNamespace(wait=work.wait, input=input)
    return start


def flash_attention(q, k, v):                             # [batch, seq, heads, head_dim]
    """Call the kernel that sdpa would choose on a real device. On meta it would choose one that makes all the scores."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0].transpose(1, 2)


class FusedNorm(torch.autograd.Function):
    """An RMSNorm that keeps what CUDA's kernel keeps: the input, and a float32 per token. On the CPU and on meta, it keeps more."""
    @staticmethod
    def forward(ctx, x, weight):
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=wide))
        return note_kernel("rms_norm", [x], torch.empty_like(x))

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return note_kernel("rms_norm backward", [grad, x], (torch.empty_like(x), torch.empty_like(weight)))


def note_kernel(name, inputs, results):
    for note in fused_kernels:
        note(Kernel(name, "memory", str(inputs[0].dtype).removeprefix("torch."), 0, sizes((inputs, results))), inputs, results)
    return results


class NoData(TorchDispatchMode):
    """Answers the operations whose result depends on data: those of a router of experts, and of the log."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        x = args[0] if args else None
        if op == aten.sort.stable:                        # a router sorts rows by expert
            self.rows = x.numel()
        if op == aten._to_copy.default and x.is_meta and kwargs.get("device") == torch.device("cpu"):
            # the same count for every expert or rank, or nearly; experts add up to their rank's count, and chunks to all rows
            chunks = x.shape[1] if x.dim() == 3 else 1
            parts = [(torch.arange(x.shape[-1] + 1) * ((self.rows + i) // chunks) // x.shape[-1]).diff() for i in range(chunks)]
            return torch.stack(parts).expand(x.shape) if x.dim() > 1 else parts[0]
        return 0 if op == aten._local_scalar_dense.default and x.is_meta else op(*args, **(kwargs or {}))
