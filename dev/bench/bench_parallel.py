"""Compare steps 2 to 7 with torch's own parallelism, on two ranks with one thread each: python dev/bench/bench_parallel.py

All use the same model, weights, batches and fused AdamW, in float32 on gloo, and nobody clips or reads the loss. Torch's
parallelism wraps the same model.Llama. Each table is a launch of its own, with the code of one step:

data     Step 3, whose data_parallel.py is step 2's. DDP and FSDP2 use the model's own loss, so that only the parallelism
         differs; "..., logits" are the same two with F.cross_entropy on whole logits, as most would write it. FSDP2 shards
         every block and the root, reshards after forward, and reduces gradients over ranks on the last micro-batch only
         ("..., every": on each micro-batch, as stage 3 does; for its memory).
tensor   Step 4 and parallelize_module, with SequenceParallel or without, and loss_parallel on logits sharded by vocabulary.
context  Step 5 and all-gathered keys and values with a mask, in DDP: torch's context_parallel does not run on the CPU.
pipeline Step 6 and torch.distributed.pipelining, with the same stages and the loss of model.LMHead. "torch, zerobubble" is its
         interleaved schedule with one stage per rank. "at most" is what the bubble allows if stages are equal (the last also has
         the head).
expert   Step 7 on a mixture of 8 experts, 2 per token, with half the intermediate size. Torch has no counterpart.
sleep    Not part of "all": step 6 on four ranks that sleep instead of computing, but really send, beside the simulator's times.

"one rank" does the whole batch by itself, with no collective, while the other rank waits in a barrier.
The order of the contestants alternates from round to round; the numbers to read are the medians of the ratios within a round. A
contestant's turn is some training steps in a row, from barrier to barrier, with everything finished that it started.
For the table "data", a last pass with new models measures one rank's peak of live storages over two steps.
"""
import argparse
import contextlib
import functools
import gc
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed._functional_collectives import all_gather_tensor, all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from prove.processes import torchrun
from steps import PYTHONPATH, on_page, replace_on_page, step_dir
from watch import Storages

sys.path += PYTHONPATH

warnings.filterwarnings("ignore", "`torch.distributed._functional_collectives.all_gather_tensor")      # which torch 2.13 renamed
RANKS, SEQ_LEN, MICRO_BATCH, MICRO_BATCHES, LR = 2, 256, 2, 4, 3e-4                # MICRO_BATCHES of all ranks together
SHAPE = dict(vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=8,
             num_key_value_heads=4, head_dim=32)
MOE = dict(intermediate_size=344, num_local_experts=8, num_experts_per_tok=2)
SHORT = dict(vocab_size=256, hidden_size=32, intermediate_size=64, head_dim=4)     # shows that it works; measures no speed


def build_model(args, shape, mesh):
    import train
    return train.build_model(shape, mesh, args)


def whole_model():
    return build_model(*parse(""), no_parts())


def no_parts():
    """Return a mesh in which every rank has the whole model."""
    return init_device_mesh("cpu", (1, RANKS, 1, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))


def forward_and_backward(model, shape, mesh, args):
    """Return the function that a step begins with: train.py's loop over the micro-batches, or the pipeline's."""
    import train
    if hasattr(train, "pipeline_parallel"):
        return train.pipeline_parallel.Pipeline(model, shape, mesh, args).forward_backward
    return lambda micro_batches: train.forward_backward(model, micro_batches, args)


def one_rank(args, shape, mesh):
    import optimizer
    model, args.dp = whole_model(), 1
    forward_backward = forward_and_backward(model, shape, no_parts(), args)
    optimizer.add_main_grads(model.parameters())
    adamw = optimizer.Optimizer(model.parameters(), args)

    def turn(batches):
        loss = torch.zeros(())
        for rows in batches if dist.get_rank() == 0 else []:
            loss = forward_backward(micro_batches(rows, torch.arange(SEQ_LEN)))
            adamw.step(LR)
        return loss
    return turn


def ours(args, shape, mesh):
    import optimizer
    import train
    model = build_model(args, shape, mesh)
    forward_backward = forward_and_backward(model, shape, mesh, args)
    zero = train.zero.Zero(model, args) if args.zero else train.data_parallel.DataParallel(model, mesh, args)
    adamw = optimizer.Optimizer(zero.params, args)
    all_reduce_partial_grads = lambda params: None
    if hasattr(train, "tensor_parallel"):
        all_reduce_partial_grads = train.tensor_parallel.all_reduce_partial_grads

    def turn(batches):
        for rows in batches:
            zero.start_all_gather()
            loss = forward_backward(mine(rows, mesh, args))
            zero.finish_grad_reduction()
            all_reduce_partial_grads(zero.params)
            adamw.step(LR)
        zero.start_all_gather()
        zero.wait_for_all_gather()
        return loss
    return turn


def fused_adamw(model, args):
    groups = [dict(params=[p for p in model.parameters() if p.dim() == dim], weight_decay=decay)
              for dim, decay in ((2, args.weight_decay), (1, 0.0))]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)


def theirs(parallel, loss_of, args, shape, mesh):
    model, before_micro_batch = parallel(whole_model(), mesh)
    adamw, tp = fused_adamw(model, args), getattr(args, "tp", 1)                   # steps 2 and 3 have no tp

    def turn(batches):
        for rows in batches:
            total, parts = 0, mine(rows, mesh, args)
            for i, micro_batch in enumerate(parts, start=1):
                with before_micro_batch(i == len(parts)):
                    loss = loss_of(model, *micro_batch) / (args.global_batch_size * args.seq_len)
                    (loss * (RANKS // tp)).backward()     # torch's wrappers divide the sum by the ranks
                total += loss.detach()
            adamw.step()
            adamw.zero_grad()
        return total / tp                                 # all ranks of tp have the same loss
    return turn


def own_loss(model, inputs, positions, targets):
    return model(inputs, positions, targets)


def loss_of_logits(model, inputs, positions, targets):
    logits = model(inputs, positions)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def loss_of_cut_logits(model, inputs, positions, targets):
    return loss_of_logits(model, inputs, positions, targets).full_tensor()


def ddp(model, mesh):
    model = DistributedDataParallel(model)
    return model, lambda last: contextlib.nullcontext() if last else model.no_sync()


def fsdp2(model, mesh, every=False):
    for layer in model.model.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def before_micro_batch(last):
        model.set_requires_gradient_sync(last or every)
        return contextlib.nullcontext()
    return model, before_micro_batch


def parallelized(model, mesh, sp):
    rest = Shard(1) if sp else Replicate()                # the placement of activations outside the matrices
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=rest),
            "lm_head": ColwiseParallel(input_layouts=rest, use_local_output=False)}
    block = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    block |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    block |= {name: RowwiseParallel(output_layouts=rest) for name in ("self_attn.o_proj", "mlp.down_proj")}
    if sp:
        ends["model.norm"] = SequenceParallel()
        block |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        block["self_attn"] = PrepareModuleInput(input_layouts=(rest, None, None), desired_input_layouts=(Replicate(), None, None))
        block["mlp"] = PrepareModuleInput(input_layouts=rest, desired_input_layouts=Replicate())
    parallelize_module(model, mesh["tp"], ends)
    for layer in model.model.layers.values():
        parallelize_module(layer, mesh["tp"], block)
    return model, lambda last: loss_parallel()


def ddp_gathered(model, mesh):
    from context_parallel import local_positions
    group, positions = mesh.get_group("cp"), local_positions(mesh, parse(GATHERED)[0])
    mask = all_gather_tensor(positions, 0, group) <= positions.unsqueeze(-1)       # [seq/cp, seq]

    def core(q, k, v):                                                             # [batch, seq/cp, heads, head_dim]
        k, v = all_gather_tensor_autograd(torch.stack((k, v)), 2, group)           # [batch, seq, kv_heads, head_dim]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    for layer in model.model.layers.values():
        layer.self_attn.inner_attention = core
    return ddp(model, mesh)


def pipelined(schedule, args, shape, mesh):
    from pipeline_parallel import Stage, local_stages, stage_boundaries
    model, last, mine, stages = build_model(args, shape, mesh), args.pp * args.stages_per_rank - 1, local_stages(mesh, args), []
    first, positions = stage_boundaries(shape, last + 1), torch.arange(SEQ_LEN)
    for stage in mine:
        part = Stage(model.model, range(first[stage], first[stage + 1]), stage == 0, stage == last)
        part.forward = functools.partial(part.forward, positions=positions)
        part.lm_head = model.lm_head if stage == last else None                    # the loss calls it; it is here for its weights
        stages.append(pipelining.PipelineStage(part, stage, last + 1, torch.device("cpu"), group=mesh.get_group("pp")))

    def loss_of(hidden, targets):
        return model.lm_head(hidden, targets) / (args.global_batch_size * args.seq_len)

    def loss_of_I_and_W(hidden, targets):
        head = model.lm_head
        loss = gone_through_twice().apply(hidden.flatten(0, 1), head.weight, targets.flatten(), head.cross_entropy)
        return loss / (args.global_batch_size * args.seq_len)
    if "Zero" in schedule.__name__ or "DualPipe" in schedule.__name__:
        loss_of = loss_of_I_and_W
    one = issubclass(schedule, pipelining.schedules.PipelineScheduleSingle)
    schedule = schedule(stages[0] if one else stages, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    adamw = fused_adamw(model, args)

    def turn(batches):
        for rows in batches:
            losses, inputs, targets = [], rows[..., :-1].flatten(0, 1), rows[..., 1:].flatten(0, 1)
            schedule.step(*[inputs] * (0 in mine), target=targets if last in mine else None, losses=losses, return_outputs=False)
            adamw.step()
            adamw.zero_grad()
        return sum((loss.detach() for loss in losses), torch.zeros(()))
    return turn


def gone_through_twice():
    """Return a loss that allows two backwards: torch runs one for I and one for W, but the trainer's scales gradients in place."""
    import loss

    class Twice(loss.ChunkedLoss):
        @staticmethod
        def backward(ctx, grad_loss):
            grad_hidden, grad_weight = ctx.saved_tensors
            return grad_hidden * grad_loss, (grad_weight * grad_loss).type_as(grad_hidden), None, None
    return Twice


def asleep(args, shape, mesh):
    """Make a contestant of step 6's executor that sleeps instead of computing."""
    pipeline = forward_and_backward(build_model(args, shape, mesh), shape, mesh, args).__self__
    output = torch.zeros(pipeline.shape)

    def sleep(stage, i, received):
        time.sleep(SECONDS / args.stages_per_rank)
        return output
    pipeline.forward = pipeline.input_gradient = pipeline.weight_gradient = sleep

    def turn(batches):
        for _ in batches:
            pipeline.forward_backward(None)
            dist.barrier()
        return torch.ones(())
    return turn


# In the order of their turns: contestants that are compared are neighbours.
DATA = {
    "naive": ("--dp_mode naive", ours),
    "overlap": ("--dp_mode overlap", ours),
    "DDP, logits": ("", functools.partial(theirs, ddp, loss_of_logits)),
    "DDP": ("", functools.partial(theirs, ddp, own_loss)),
    "bucket": ("--dp_mode bucket", ours),
    "zero 1": ("--zero 1", ours),
    "zero 2": ("--zero 2", ours),
    "zero 3": ("--zero 3", ours),
    "FSDP2": ("", functools.partial(theirs, fsdp2, own_loss)),
    "FSDP2, logits": ("", functools.partial(theirs, fsdp2, loss_of_logits)),
    "FSDP2, every": ("", functools.partial(theirs, functools.partial(fsdp2, every=True), own_loss)),
}
TENSOR = {
    "torch, sp off": ("--tp 2", functools.partial(theirs, functools.partial(parallelized, sp=False), loss_of_cut_logits)),
    "sp off": ("--tp 2 --sp off", ours),
    "one rank": ("", one_rank),
    "sp on": ("--tp 2 --sp on", ours),
    "torch, sp on": ("--tp 2", functools.partial(theirs, functools.partial(parallelized, sp=True), loss_of_cut_logits)),
}
GATHERED = "--cp 2 --cp_mode allgather"
CONTEXT = {
    "ulysses": ("--cp 2 --cp_mode ulysses", ours),
    "ring": ("--cp 2 --cp_mode ring", ours),
    "one rank": ("", one_rank),
    "zigzag": ("--cp 2 --cp_mode zigzag", ours),
    "torch, allgather": (GATHERED, functools.partial(theirs, ddp_gathered, own_loss)),
    "allgather": (GATHERED, ours),
}
PIPELINE = {
    "torch, GPipe": ("--pp 2 --schedule afab", functools.partial(pipelined, pipelining.ScheduleGPipe)),
    "afab": ("--pp 2 --schedule afab", ours),
    "1f1b": ("--pp 2 --schedule 1f1b", ours),
    "torch, 1F1B": ("--pp 2 --schedule 1f1b", functools.partial(pipelined, pipelining.Schedule1F1B)),
    "torch, interleaved": ("--pp 2 --schedule interleaved", functools.partial(pipelined, pipelining.ScheduleInterleaved1F1B)),
    "interleaved": ("--pp 2 --schedule interleaved", ours),
    "one rank": ("", one_rank),
    "torch, zerobubble": ("--pp 2 --schedule zerobubble", functools.partial(pipelined, pipelining.ScheduleInterleavedZeroBubble)),
    "zerobubble": ("--pp 2 --schedule zerobubble", ours),
    "torch, ZBV": ("--pp 2 --schedule dualpipe", functools.partial(pipelined, pipelining.ScheduleZBVZeroBubble)),
    "torch, DualPipeV": ("--pp 2 --schedule dualpipe", functools.partial(pipelined, pipelining.ScheduleDualPipeV)),
    "dualpipe": ("--pp 2 --schedule dualpipe", ours),
}
SCHEDULES = [name for name in PIPELINE if PIPELINE[name][1] is ours]
SLEEP, SECONDS = f"--pp 4 --global_batch_size {8 * MICRO_BATCH}", 0.03             # seconds of F, of I and of W on a rank
ASLEEP = {f"{name}, asleep": (f"{SLEEP} --schedule {name}", asleep) for name in SCHEDULES}
EXPERT = {
    "ep 1": ("", ours),
    "one rank": ("", one_rank),
    "ep 2": ("--ep 2", ours),
}
CONTESTANTS = DATA | TENSOR | CONTEXT | PIPELINE | EXPERT | ASLEEP


def simulated(name, message=0):
    """Simulate a step in which F, I and W take SECONDS on a rank; return its seconds, and the seconds of work in it."""
    import schedules
    args = parse(CONTESTANTS[name][0])[0]
    lists = schedules.make(args.schedule, args.pp, args.global_batch_size // args.micro_batch_size, args.stages_per_rank)
    events = schedules.simulate(lists, *[SECONDS / args.stages_per_rank] * 3, message)
    return max(event.end for event in events), sum(event.end - event.start for event in events)


def bubble_allows(name):
    seconds, work = simulated(name)
    return f"at most {work / seconds:.2f}"                # relative to the speed of one rank


# the step, the flags of its mesh, the contestants, and the ratios: who, divided by whom, and the aim
TABLES = {
    "data": ("step03_zero", "", DATA, [
        ("bucket", "DDP", 0.97), ("zero 1", "bucket", 0.93), ("zero 2", "bucket", 0.85), ("zero 3", "FSDP2", 1.1),
        ("bucket", "DDP, logits", None), ("zero 3", "FSDP2, logits", None)]),
    "tensor": ("step04_tp_sp", "--tp 2", TENSOR, [
        ("sp on", "one rank", 0.9), ("sp off", "one rank", 1.15), ("torch, sp on", "one rank", None),
        ("torch, sp off", "one rank", None), ("sp on", "torch, sp on", 1), ("sp off", "torch, sp off", 1)]),
    "context": ("step05_cp", "--cp 2", CONTEXT, [
        ("zigzag", "one rank", 1.2), ("ring", "one rank", None), ("allgather", "one rank", None), ("ulysses", "one rank", None),
        ("torch, allgather", "one rank", None), ("zigzag", "torch, allgather", None)]),
    "pipeline": ("step06_pp", "--pp 2", PIPELINE, [
        ("afab", "torch, GPipe", 1), ("1f1b", "torch, 1F1B", 1), ("interleaved", "torch, interleaved", 1),
        ("zerobubble", "torch, zerobubble", 1), ("zerobubble", "torch, ZBV", 1), ("dualpipe", "torch, DualPipeV", 1),
        *((name, "one rank", bubble_allows) for name in SCHEDULES)]),
    "expert": ("step07_ep", "--ep 2", EXPERT, [("ep 2", "one rank", 1.2), ("ep 1", "one rank", None), ("ep 2", "ep 1", None)]),
    "sleep": ("step06_pp", SLEEP, ASLEEP, []),
}
ONLY_FOR_MEMORY, MEMORY = ["FSDP2, every"], ["bucket", "DDP", "zero 1", "zero 2", "zero 3", "FSDP2", "FSDP2, every"]


def make(name, mesh):
    flags, contestant = CONTESTANTS[name]
    return contestant(*parse(flags), mesh)


def parse(flags):
    import config
    import train
    args = config.parse_args(f"--device cpu --dtype float32 --seq_len {SEQ_LEN} --micro_batch_size {MICRO_BATCH} "
                             f"--global_batch_size {MICRO_BATCH * MICRO_BATCHES} {flags}".split(), train.TECHNIQUES)
    shape = config.ModelConfig(**SHAPE)
    config.check(args, shape, train.TECHNIQUES)
    return args, shape


def random_batches(generator, steps):
    """Return all ranks' micro-batches for each training step."""
    return torch.randint(0, SHAPE["vocab_size"], (steps, MICRO_BATCHES, MICRO_BATCH, SEQ_LEN + 1), generator=generator)


def micro_batches(rows, positions):
    return [(row[:, positions], positions, row[:, positions + 1]) for row in rows]


def mine(rows, mesh, args):
    """Return this rank's part of a step's micro-batches."""
    positions = torch.arange(SEQ_LEN)
    if getattr(args, "cp", 1) > 1:
        from context_parallel import local_positions
        positions = local_positions(mesh, args)
    return micro_batches(rows[mesh.get_local_rank("dp")::args.dp], positions)


def measure_speed(names, mesh, rounds, steps):
    contestants = {name: make(name, mesh) for name in names}
    generator, seconds, losses = torch.Generator().manual_seed(0), {name: [] for name in names}, {name: [] for name in names}
    for round in range(rounds + 1):
        batches = random_batches(generator, steps)
        for name in names if round % 2 == 0 else reversed(names):                  # who goes first alternates
            dist.barrier()
            start = time.perf_counter()
            loss = contestants[name](batches)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            dist.all_reduce(loss)
            losses[name].append(loss.item())
    for name in names:
        assert all(abs(a - b) < 1e-4 * b for a, b in zip(losses[name], losses[names[0]])), f"not the same work: {losses}"
    return {name: times[1:] for name, times in seconds.items()}                    # round 0 warms up


def ratios(seconds, rows):
    """Return (name, the ratio of the speeds in each round, the aim) for each row whose contestants took part."""
    return [(f"{a} / {b}", [theirs / ours for ours, theirs in zip(seconds[a], seconds[b])],
             target(a) if callable(target) else target) for a, b, target in rows if a in seconds and b in seconds]


def print_speed(seconds, steps, rows):
    tokens = steps * MICRO_BATCHES * MICRO_BATCH * SEQ_LEN
    for name, times in seconds.items():
        print(f"{name:>33}: {tokens / statistics.median(times):8,.0f} tokens/s")
    for name, values, target in ratios(seconds, rows):
        aim = f"target {target}; " if target else ""
        print(f"{name:>33}: {statistics.median(values):8.3f} ({aim}{min(values):.3f} to {max(values):.3f} in {len(values)} rounds)")


PAGE = ROOT / "docs/FAQ.md"


def write(step, found):
    """Put a step's ratios, (name, values, aim), into the page's table, in the place of those that it had before."""
    head, line, *rows = on_page(PAGE, "speed").splitlines()
    rows = [row for row in rows if not row.startswith(f"| {step} |")]
    rows += [f"| {step} | {name} | {statistics.median(values):.2f} | {target or ''} |" for name, values, target in found]
    replace_on_page(PAGE, "speed", "\n".join([head, line, *sorted(rows, key=lambda row: row.split(" | ")[0]), ""]))


def seconds_of_message(times=50):
    """Return the seconds of a message between stages: half a round trip between ranks 0 and 1."""
    seconds, rank, tensor = [], dist.get_rank(), torch.zeros(MICRO_BATCH, SEQ_LEN, SHAPE["hidden_size"])
    for _ in range(times if rank < 2 else 0):
        start = time.perf_counter()
        for sender in 0, 1:
            dist.send(tensor, 1 - rank) if rank == sender else dist.recv(tensor, 1 - rank)
        seconds.append((time.perf_counter() - start) / 2)
    dist.barrier()
    return statistics.median(seconds or [0])


def sleep_lines(seconds, rounds, steps, message):
    lines = [f"| messages of {1000 * message:.1f} ms | ms, median of {rounds} rounds | range | simulated | difference, aim 5% |",
             "|---|---|---|---|---|"]
    for name, times in seconds.items():
        times, said = [1000 * time / steps for time in times], 1000 * simulated(name, message)[0]
        ms = statistics.median(times)
        lines.append(f"| {name} | {ms:.0f} | {min(times):.0f} to {max(times):.0f} | {said:.0f} | {100 * (ms / said - 1):+.1f}% |")
    return lines


def measure_memory(names, mesh, steps):
    """Return {name: the most bytes alive at a time on this rank}."""
    batches, peaks = random_batches(torch.Generator().manual_seed(0), steps), {}
    for name in names:
        turn = make(name, mesh)
        gc.collect()
        with LocalStorages(given=True) as memory:
            turn(batches)
        peaks[name] = max(sum(row[1:]) for row in memory.timeline())
        del turn, memory
    return peaks


class LocalStorages(Storages):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented                         # its operations on local tensors are seen instead
        return super().__torch_dispatch__(op, types, args, kwargs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", choices=[*TABLES, "all"], default="all")
    parser.add_argument("--step", help="whose code; if not given, that of the table")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="training steps in a turn")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS, help="some of the contestants")
    parser.add_argument("--short", action="store_true", help="a tiny model: every contestant still has to run")
    parser.add_argument("--write", action="store_true", help="put the ratios into docs/FAQ.md")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        for table, (_, _, contestants, _) in TABLES.items():
            ranks, asked = (4, ["sleep"]) if table == "sleep" else (RANKS, [table, "all"])
            if args.table in asked and any(name in args.only for name in contestants):
                print(f"{table}:", flush=True)
                run = subprocess.run(torchrun(ranks, *sys.argv, "--table", table), env={**os.environ, "OMP_NUM_THREADS": "1"})
                if run.returncode:
                    sys.exit(run.returncode)
        return
    torch.set_num_threads(1)
    step, flags, contestants, rows = TABLES[args.table]
    SHAPE.update(MOE if args.table == "expert" else {})
    SHAPE.update(SHORT if args.short else {})
    folder = step_dir(args.step or step)
    sys.path.insert(0, str(folder))
    import mesh
    with mesh.init_distributed():
        measure(args, folder, [name for name in contestants if name in args.only], rows, mesh.build_mesh(parse(flags)[0]))


def measure(args, folder, names, rows, device_mesh):
    if args.rounds:
        message = seconds_of_message() if args.table == "sleep" else None
        seconds = measure_speed([name for name in names if name not in ONLY_FOR_MEMORY], device_mesh, args.rounds, args.steps)
        if dist.get_rank() == 0:
            if message:
                print(*sleep_lines(seconds, args.rounds, args.steps, message), sep="\n")
            else:
                print_speed(seconds, args.steps, rows)
                if args.write:
                    write(f"step {folder.name[5]}", ratios(seconds, rows))
    for name, peak in measure_memory([name for name in names if name in MEMORY], device_mesh, args.steps).items():
        if dist.get_rank() == 0:
            print(f"{name:>33}: {peak / 2**20:8.1f} MiB at the peak of rank 0")


if __name__ == "__main__":
    main()
