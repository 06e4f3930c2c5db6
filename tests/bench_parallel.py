"""Steps 2 and 3 against torch's own DDP and FSDP2, on two ranks with one thread each: python tests/bench_parallel.py

The same model, weights, batches and fused AdamW in all, float32 on gloo; no clipping and no reading of the loss. All
of it is code of step 3, whose data_parallel.py is step 2's. Torch's DDP and FSDP2 are put around the same model.Llama
with its own loss, so that only the parallelism differs; "..., logits" are the same two with F.cross_entropy on whole
logits, as most would write it. FSDP2 shards every block and the root, drops weights after forward, and sums
gradients over ranks on the last micro-batch only ("..., every": on each, as stage 3 does; for its memory).

Rounds of all contestants alternate in order; the numbers to read are the medians of the ratios within a round. A
contestant's turn is some training steps in a row, from a barrier to a barrier, with all that it started finished.
Then the peak of live storages of one rank over two steps, of new models, is taken.
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
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from steps import step_dir

RANKS, SEQ_LEN, MICRO_BATCH, MICRO_BATCHES, LR = 2, 256, 2, 4, 3e-4                # micro-batches of both ranks
SHAPE = dict(vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=8,
             num_key_value_heads=4, head_dim=32)
TARGETS = [("bucket", "DDP", 0.97), ("zero 1", "bucket", 0.93), ("zero 2", "bucket", 0.85), ("zero 3", "FSDP2", 1.1),
           ("bucket", "DDP, logits", None), ("zero 3", "FSDP2, logits", None)]


def ours(args, shape, mesh):
    import optimizer
    import train
    import zero
    model = train.build_model(shape, args)
    shards, sum_gradients, gather_weights = zero.zero(model, mesh, args)
    adamw = optimizer.Optimizer(shards, args)

    def turn(batches):
        for micro_batches in batches:
            loss = train.forward_backward(model, micro_batches, args)
            sum_gradients()
            adamw.step(LR)
            gather_weights()
        zero.wait_for_weights(model)
        return loss
    return turn


def theirs(parallel, loss_of, args, shape, mesh):
    import train
    model, before_micro_batch = parallel(train.build_model(shape, args), mesh)
    groups = [dict(params=[p for p in model.parameters() if p.dim() == dim], weight_decay=decay)
              for dim, decay in ((2, args.weight_decay), (1, 0.0))]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)

    def turn(batches):
        for micro_batches in batches:
            total = 0
            for i, micro_batch in enumerate(micro_batches, start=1):
                with before_micro_batch(i == len(micro_batches)):
                    loss = loss_of(model, *micro_batch) / (args.global_batch_size * args.seq_len)
                    (loss * RANKS).backward()                                      # torch's own divide the sum by the ranks
                total += loss.detach()
            adamw.step()
            adamw.zero_grad()
        return total
    return turn


def own_loss(model, inputs, positions, targets):
    return model(inputs, positions, targets)


def loss_of_logits(model, inputs, positions, targets):
    logits = model(inputs, positions)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


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


# In the order of the turns: those that are compared are neighbours.
CONTESTANTS = {
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
ONLY_FOR_MEMORY, MEMORY = ["FSDP2, every"], ["bucket", "DDP", "zero 1", "zero 2", "zero 3", "FSDP2", "FSDP2, every"]


def make(name, mesh):
    flags, contestant = CONTESTANTS[name]
    return contestant(*parse(flags), mesh)


def parse(flags):
    import config
    args = config.parse_args(f"--device cpu --dtype float32 --seq_len {SEQ_LEN} --micro_batch_size {MICRO_BATCH} "
                             f"--global_batch_size {MICRO_BATCH * MICRO_BATCHES} {flags}".split())
    shape = config.ModelConfig(**SHAPE)
    config.check(args, shape)
    return args, shape


def random_batches(generator, steps):
    """The micro-batches of this rank, the same for every contestant."""
    positions = torch.arange(SEQ_LEN)
    rows = torch.randint(0, SHAPE["vocab_size"], (steps, MICRO_BATCHES, MICRO_BATCH, SEQ_LEN + 1), generator=generator)
    return [[(row[:, :-1], positions, row[:, 1:]) for row in step[dist.get_rank()::RANKS]] for step in rows]


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


def print_speed(seconds, steps):
    tokens = steps * MICRO_BATCHES * MICRO_BATCH * SEQ_LEN
    for name, times in seconds.items():
        print(f"{name:>25}: {tokens / statistics.median(times):8,.0f} tokens/s")
    for a, b, target in TARGETS:
        if a in seconds and b in seconds:
            ratios = [theirs / ours for ours, theirs in zip(seconds[a], seconds[b])]
            aim = f"target {target}; " if target else ""
            print(f"{f'{a} / {b}':>25}: {statistics.median(ratios):8.3f} ({aim}{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds)")


def measure_memory(names, mesh, steps):
    """{name: the most bytes alive at a time on this rank}"""
    batches, peaks = random_batches(torch.Generator().manual_seed(0), steps), {}
    for name in names:
        turn = make(name, mesh)
        gc.collect()
        with resizable_storages() as memory:
            turn(batches)
        peaks[name] = max(sum(row[1:]) for row in memory.timeline())
        del turn, memory
    return peaks


def resizable_storages():
    from profiling import LiveStorages

    class ResizableStorages(LiveStorages):
        """Storages that shrink to nothing and grow again count as large as they are; what is only used counts too."""

        def __init__(self):
            super().__init__()
            self.sizes = {}                               # storage number: bytes

        def resize(self, number, size):
            if size != self.sizes.get(number, 0):
                self.events.append((time.perf_counter(), number, size - self.sizes.get(number, 0)))
                self.sizes[number] = size

        def note(self, tensor, kind):
            storage = tensor.untyped_storage()
            if storage not in self.numbers:
                number = self.numbers[storage] = len(self.kinds)
                self.kinds.append(kind)
                self.resize(number, storage.nbytes())
                weakref.finalize(storage, self.resize, number, 0).atexit = False

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented                     # what it does to the local tensors is seen instead
            for storage, number in list(self.numbers.items()):
                self.resize(number, storage.nbytes())
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self.note(tensor, "rest")
            return super().__torch_dispatch__(op, types, args, kwargs)

    return ResizableStorages()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", default="step03_zero")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="training steps in a turn")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="some of the contestants")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
        sys.exit(subprocess.run([*torchrun, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)
    torch.set_num_threads(1)
    sys.path.insert(0, str(step_dir(args.step)))
    import mesh
    device_mesh = mesh.start_mesh(parse("")[0])
    names = [name for name in CONTESTANTS if name in (args.only or CONTESTANTS)]
    if args.rounds:
        seconds = measure_speed([name for name in names if name not in ONLY_FOR_MEMORY], device_mesh, args.rounds, args.steps)
        if dist.get_rank() == 0:
            print_speed(seconds, args.steps)
    for name, peak in measure_memory([name for name in names if name in MEMORY], device_mesh, args.steps).items():
        if dist.get_rank() == 0:
            print(f"{name:>25}: {peak / 2**20:8.1f} MiB at the peak of rank 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
