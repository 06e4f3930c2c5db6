"""One line per step: loss, gradient norm, tokens per second, model FLOPs utilization (MFU), peak memory."""
import json
import math
import os
import resource
import sys
import time

import torch
import torch.distributed as dist

from mesh import fail_together
from messages import RANK, fail, print0
from model import Llama
from disk import lock, log_size_to_keep

# dense bfloat16, by a part of the name that torch.cuda.get_device_name() returns
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989.5e12, "H200": 989.5e12,
              "A100": 312e12, "GB200": 2500e12, "B200": 2250e12}


def active_parameter_count(config):
    """Count the active parameters, those that one token uses. On the meta device they take no memory."""
    with torch.device("meta"):
        params = dict(Llama(config).named_parameters())
    for name in [name for name in params if ".experts." in name]:
        params[name] = params[name][:config.num_experts_per_tok]
    return sum(param.numel() for param in params.values())


def flops_per_token(c, seq_len):
    """Count 6 FLOPs per active parameter (2 forward, 4 backward), plus attention's two [seq, seq] products.

    The embedding counts as well, though it multiplies nothing; torchtitan leaves it out.
    """
    attention = 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * seq_len
    return 6 * active_parameter_count(c) + attention


def peak_flops(device):
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for gpu, peak in PEAK_FLOPS.items() if gpu in name), None)


def peak_memory_gib(device):
    """Return the most the CUDA allocator handed out, or on the CPU the process's peak resident memory."""
    if device == "cuda":
        return torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
    unit = 1 if sys.platform == "darwin" else 1024
    return torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30)


def print_memory_outside_allocator():
    """Print what else is on rank 0's GPU: CUDA, NCCL, other processes.

    Call it after every group has communicated, because NCCL allocates then.
    """
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    print0(f"{outside / 2**30:.2f} GiB of rank 0's GPU are in use outside PyTorch's allocator")


def print_header(model, config, args):
    """Print the layout of the ranks, the size of a step, and rank 0's part of the model (before ZeRO)."""
    degrees = {name: vars(args)[name] for name in ("pp", "dp", "cp", "tp") if name in vars(args)}
    num_micro_batches = args.global_batch_size // (args.micro_batch_size * degrees.get("dp", 1))
    parameters, layers = sum(param.numel() for param in model.parameters()), len(model.model.layers)
    if degrees:
        print0(" x ".join(f"{name} {degree}" for name, degree in degrees.items()))
    print0(f"each step: {num_micro_batches} micro-batches x {args.micro_batch_size} sequences x "
           f"{args.seq_len} tokens{' per dp rank' if degrees else ''}; "
           f"the model on rank 0: {parameters:,} parameters, {layers} of {config.num_hidden_layers} layers")


def open_log(name, args):
    """Open a log and keep the lines of the steps already done. Fail if another run is writing it."""
    try:
        file = open(name, "a+b", buffering=0)
        lock(file, f"--log_file {name}")
        file.seek(0)
        if not b'{"step": '.startswith(file.read(9)):
            fail(f"--log_file {name}: already exists and is not a training log; choose another name")
        if file.read(1) and args.first_step == 0:
            print0(f"--log_file {name}: replaces the log of an earlier run")
        file.truncate(log_size_to_keep(name, args))
    except OSError as error:
        fail(f"--log_file {name}: cannot be written ({error})")
    return file


class Metrics:
    @fail_together()
    def __init__(self, model, config, args):
        print_header(model, config, args)
        self.args, self.world_size = args, int(os.environ.get("WORLD_SIZE", 1))
        self.flops_per_token, self.peak_flops = flops_per_token(config, args.seq_len), peak_flops(args.device)
        self.file = open_log(args.log_file, args) if args.log_file and RANK == 0 else None
        self.start = time.perf_counter()

    def restart_clock(self):
        """Leave what the run has done since the last step, such as a save, out of the next tokens/s."""
        self.start = time.perf_counter()

    def log(self, step, loss, grad_norm, lr, **extra):
        """Print and write one step's line; stop the run if the loss or the norm is not finite."""
        loss, grad_norm = float(loss), float(grad_norm)                            # waits for the device
        if not math.isfinite(loss + grad_norm):
            print0(f"error: step {step + 1}: loss {loss}, grad norm {grad_norm}; stopping without saving",
                   sys.stderr)
            raise SystemExit(3)
        seconds, self.start = time.perf_counter() - self.start, time.perf_counter()
        tokens = self.args.global_batch_size * self.args.seq_len
        speed = tokens / seconds
        mfu = speed / self.world_size * self.flops_per_token / self.peak_flops if self.peak_flops else None
        memory = peak_memory_gib(self.args.device)
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
        extra = {name: float(value) for name, value in extra.items()}
        suffix = "".join(f"  {name} {value:.2f}" for name, value in extra.items())
        suffix = f"  MFU {mfu:.1%}{suffix}" if mfu else suffix
        print0(f"step {step + 1:>{len(str(self.args.steps))}}/{self.args.steps}  loss {loss:.4f}  "
               f"grad norm {grad_norm:.3f}  lr {lr:.2e}  {speed:,.0f} tokens/s{suffix}  {memory:.2f} GiB")
        if self.file:
            line = dict(step=step, loss=loss, grad_norm=grad_norm, lr=lr, tokens=(step + 1) * tokens,
                        tokens_per_s=speed, tokens_per_s_per_device=speed / self.world_size, mfu=mfu,
                        peak_memory_gib=float(memory), **extra)
            self.file.write(json.dumps(line).encode() + b"\n")
        if step == self.args.first_step and self.args.device == "cuda":
            print_memory_outside_allocator()
