"""The optimizer on the host: what travels between the two memories, and when the GPU's work hides it.

In bfloat16, training keeps 18 bytes per parameter: 2 for the weight, 4 for the gradient, 12 for the master weight and the
moments. Only the update reads those 12, once per step. ZeRO-Offload (arXiv 2101.06840) moves them, and the update, to the host.
It helps one GPU, too: `--zero 1 --offload`.

**What travels.** In a step, each parameter of a rank's shard sends 4 bytes of gradient and receives 2 of weight. One class
serves all three stages, because each ends backward with a shard of gradients and begins forward with a shard of weights.
Gradients accumulate on the device, so they travel once. FSDP2's CPUOffloadPolicy also keeps the shards of weights and gradients
on the host. That saves more, but gradients then travel in every micro-batch, and weights before every gather.

**When it is hidden.** Over a link of B bytes/s, the gradients of P parameters take 4P / (dp B) seconds. The last backward, with
T tokens at F FLOP/s, takes 4PT / F, or more with recomputation. So it hides them if T is at least F / (dp B), whatever the
model. For weights, both times are half as long: 2P / (dp B), behind a
forward of 2PT / F. An RTX 4090 (126 TFLOP/s) with PCIe 4 (25 GB/s) needs 5,000 tokens; an H100 (653) with PCIe 5
(50), 13,000.

Nothing hides the embedding, whose weights come first and whose gradients go last, or the update, which needs the norm of all
gradients. Per parameter, the update moves 42 bytes of the host's memory: clipping 8, AdamW 28, rounding 6. Set OMP_NUM_THREADS:
for several ranks, torchrun sets it to 1.

Simulated: llama-1b on an RTX 4090, 8 micro-batches, `--recompute full`, seconds per step. Without `--offload` the peak, 28.2
GiB, does not fit. tools/simulate does not model the host's memory, so this file adds it, at an assumed 50 GB/s. The
update's time is computed from that.

| tokens per micro-batch | without | `--offload` | update | waits for gradients | for weights | peak |
|---|---|---|---|---|---|---|
| 2,048 | 1.87 | 3.25 | 1.26 | 0.12 | 0.08 | 11.0 GiB |
| 4,096 | 3.47 | 4.76 | 1.26 | 0.06 | 0.04 | 11.1 GiB |
| 8,192 | 6.66 | 7.94 | 1.26 | 0.06 | 0.04 | 11.4 GiB |

**The break.** `CopyStream.synchronize` makes the update wait for the gradients. On the CPU nothing shows that it is missing,
because a copy is over when the call returns. On a GPU the last copy, the embedding's, may be late, and the update reads the
gradients of the step before. Modelled, the loss after 60 steps is 2.698 instead of 2.702. `LateStream` sees it: a copy's
destination is NaN until somebody waits.

    EXERCISE=3=exercise/offload PYTHONPATH=tools:tests/support python exercises/extensions/offload.py       # break and table
"""
import contextlib
from unittest.mock import patch

import cases
import pytest
import torch
from harness import JobFailed, assert_same_run, relative, train_job
from jobs import assert_refused, storage_bytes, trained_parts
from layouts import Layout
from observe import case, check
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STEP, ONE, EXACT = "step03_zero", "step01_single_gpu", "--dtype float64"
BLOCK = cases.HIDDEN * (2 * cases.HEADS * cases.HEAD_DIM + 2 * cases.KV_HEADS * cases.HEAD_DIM + 3 * cases.MLP + 2)
UNITS = [cases.VOCAB * cases.HIDDEN, BLOCK, BLOCK, cases.HIDDEN + cases.VOCAB * cases.HIDDEN]          # parameters of dense-2


# ------------------------------------------------------------------------------------- as one process
@pytest.mark.parametrize("world, shape, flags", [
    (1, "dense-2", f"{EXACT} --micro_batch_size 6 --zero 1"),
    (1, "dense-2", f"{EXACT} --micro_batch_size 4 --zero 3 --recompute full"),
    (2, "dense-3", f"{EXACT} --micro_batch_size 4 --zero 1"),
    (3, "dense-3", f"{EXACT} --micro_batch_size 8 --zero 1 --recompute selective"),
    (4, "dense-3-qk", f"{EXACT} --micro_batch_size 2 --zero 1 --recompute full"),
    (4, "dense-2", f"{EXACT} --micro_batch_size 2 --zero 1 --zero_shard 2"),
    (4, "dense-2", f"{EXACT} --micro_batch_size 6 --zero 1 --zero_shard 1"),
    (2, "dense-3", f"{EXACT} --micro_batch_size 12 --zero 2"),
    (3, "dense-3", f"{EXACT} --micro_batch_size 2 --zero 2 --recompute full"),
    (4, "dense-2-qk", f"{EXACT} --micro_batch_size 3 --zero 2 --zero_shard 2 --recompute selective"),
    (2, "dense-3", f"{EXACT} --micro_batch_size 6 --zero 3"),
    (3, "dense-3-qk", f"{EXACT} --micro_batch_size 8 --zero 3 --recompute full"),
    (4, "dense-3", f"{EXACT} --micro_batch_size 2 --zero 3 --zero_shard 2 --recompute selective"),
    (2, "dense-2", "--dtype float32 --micro_batch_size 6 --zero 1"),
    (2, "dense-2", "--dtype bfloat16 --micro_batch_size 6 --zero 2")])
def test_trains_as_one_process(pool, world, shape, flags):
    """Check losses, norms and weights, the bytes against the formula, and that the operations of the ranks meet."""
    check(pool, Layout(STEP, world, shape, "adamw", f"{flags} --offload"))


@pytest.mark.parametrize("world, flags", [(2, "--micro_batch_size 4 --zero 1"), (4, "--micro_batch_size 3 --zero 2 --zero_shard 2"),
                                          (3, "--micro_batch_size 2 --zero 3")])
def test_the_sum_of_the_gradients(pool, world, flags):
    """Train with SGD, because AdamW would hide a factor."""
    base = f"{case(pool, 'dense-2')} {EXACT} --steps 2"
    run = pool.train(STEP, f"{base} {flags} --offload", world, optimizer="sgd")
    assert_same_run(run, pool.reference(ONE, f"{base} --micro_batch_size 6", "sgd"), 1e-9, flags)


@pytest.mark.parametrize("world, flags", [(2, "--dtype float32 --zero 1"), (2, "--dtype bfloat16 --zero 1 --grad_clip 0"),
                                          (4, "--dtype bfloat16 --zero 3 --zero_shard 2")])
def test_to_the_last_bit_as_without(pool, world, flags):
    flags = f"{case(pool, 'dense-2')} --micro_batch_size 3 {flags}"
    here, there = pool.train(STEP, f"{flags} --offload", world), pool.train(STEP, flags, world)
    assert here.losses == there.losses and here.grad_norms == there.grad_norms
    assert here.weights.keys() == there.weights.keys() and all(map(torch.equal, here.weights.values(), there.weights.values()))


def test_refused_without_zero(pool):
    assert_refused(pool, STEP, 2, "--offload", "--offload: requires --zero 1, 2 or 3; a single process can use --zero 1, too")


# ------------------------------------------------------------------------------------- two memories, told apart
class TwoMemories(TorchDispatchMode):
    """Tell apart two memories that on the CPU are one. What is computed from tensors on the host is on the host. Only a copy may
    have tensors of both (single numbers aside), and only tensors on the device travel between ranks."""

    def __init__(self):
        super().__init__()
        self.bytes = {"to host": 0, "to device": 0}

    def copy_to_host(self, tensor):                       # replaces the trainer's
        copy = torch.empty_like(tensor).copy_(tensor)
        copy.untyped_storage().in_host_memory = True
        return copy

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor) and tensor.dim()]
        places = {in_host_memory(tensor) for tensor in tensors}
        result = op(*args, **(kwargs or {}))
        if len(places) == 2:
            assert op._opname == "copy_", f"{op} has tensors of both memories"
            self.bytes["to host" if in_host_memory(args[0]) else "to device"] += args[0].nbytes
        elif places == {True}:
            assert op.namespace != "c10d", f"{op} would send what is in the host's memory"
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    tensor.untyped_storage().in_host_memory = True
        return result


def in_host_memory(tensor):
    return hasattr(tensor.untyped_storage(), "in_host_memory")


def memories_job(argv):
    """Train. Return the bytes that cross in each step, and those that each memory holds between two steps, by kind."""
    import metrics
    import cpu_offload
    crossed, log, memories = [], metrics.Metrics.log, TwoMemories()

    def note(*args):
        crossed.append(dict(memories.bytes))
        memories.bytes = dict.fromkeys(memories.bytes, 0)
        log(*args)
    with patch.object(cpu_offload, "copy_to_host", memories.copy_to_host), patch.object(metrics.Metrics, "log", note), memories:
        model, optimizer = trained_parts(argv)
    units = model.zero_units
    held = dict(weights=[*model.parameters(), *(unit.param_shard for unit in units)],
                grads=[grad for unit in units for grad in (unit.grad_shard, unit.flat_grad) if grad is not None],
                copies=[copy for unit in units for copy in (unit.host_param, unit.host_grad)],
                masters=[m for m in optimizer.masters if m.dtype != units[0].flat_param.dtype],
                moments=[t for state in optimizer.adamw.state.values() for t in state.values() if t.dim()])
    for kind, tensors in held.items():
        assert {in_host_memory(tensor) for tensor in tensors} <= {kind not in ("weights", "grads")}, kind
    return crossed, {kind: storage_bytes(tensors) for kind, tensors in held.items()}


@pytest.mark.parametrize("dtype, stage, dp, shard", [
    ("float64", 1, 1, 1), ("float32", 1, 3, 3), ("bfloat16", 1, 2, 2), ("bfloat16", 2, 3, 3), ("bfloat16", 3, 4, 4),
    ("bfloat16", 2, 4, 2), ("float32", 3, 4, 2)])
def test_bytes_that_cross_and_that_stay(pool, dtype, stage, dp, shard):
    """Count the shard's gradients and weights once per step, whatever the stage and the number of micro-batches."""
    argv = f"{case(pool, 'dense-2')} --micro_batch_size 2 --steps 3 --dtype {dtype} --zero {stage} --zero_shard {shard} --offload"
    number = {"float64": 8, "float32": 4, "bfloat16": 2}[dtype]
    wide = max(4, number)
    sizes = [-(-size // shard) for size in UNITS]         # of a shard, padded
    whole = sum(sizes) * shard
    for rank, (steps, held) in enumerate(pool.call(memories_job, STEP, world=dp, argv=argv.split())):
        mine = sum(max(0, min(size, unit - rank % shard * size)) for size, unit in zip(sizes, UNITS))      # without the padding
        first, *others = steps
        assert first == {"to host": wide * sum(sizes), "to device": 0}             # there are no new weights yet
        assert others == 2 * [{"to host": wide * sum(sizes), "to device": number * sum(sizes)}]
        assert held == dict(weights=number * (whole // shard if stage == 3 else whole),
                            grads=wide * (whole // shard if stage > 1 else whole), copies=(number + wide) * sum(sizes),
                            masters=wide * mine * (dtype == "bfloat16"), moments=2 * wide * mine), rank


# ------------------------------------------------------------------------------------- while what computes
def events_job(argv):
    """Train. Return what each step does, in order: "forward 1" when unit 1 begins, "backward 1" when its last gradient is there,
    "to host 1" and "to device 1" when a copy starts."""
    import cpu_offload
    import train
    import zero
    steps, units, build_model, forward_backward = [], [], train.build_model, train.forward_backward
    to_host, gather, collect = (cpu_offload.Offloaded.start_copy_to_host, cpu_offload.Offloaded.start_all_gather,
                                zero.Zero.post_accumulate_grad)

    def build(*args):
        model = build_model(*args)
        units.extend(model.zero_units)
        for i, unit in enumerate(units):                  # before the trainer's hook, which waits for the weights
            unit.modules[0].register_forward_pre_hook(lambda *_, i=i: steps[-1].append(f"forward {i}"))
        return model

    def start_step(*args):
        steps.append([])
        return forward_backward(*args)

    def start_copy_to_host(unit):
        steps[-1].append(f"to host {units.index(unit)}")
        to_host(unit)

    def start_all_gather(unit):
        if unit.updated_on_host:
            steps[-1].append(f"to device {units.index(unit)}")
        gather(unit)

    def post_accumulate_grad(zero, param):
        if param.unit.num_grads == len(param.unit.params) * param.unit.backwards_per_reduce - 1:
            steps[-1].append(f"backward {units.index(param.unit)}")
        collect(zero, param)
    with (patch.object(train, "build_model", build), patch.object(train, "forward_backward", start_step),
          patch.object(cpu_offload.Offloaded, "start_copy_to_host", start_copy_to_host),
          patch.object(cpu_offload.Offloaded, "start_all_gather", start_all_gather),
          patch.object(zero.Zero, "post_accumulate_grad", post_accumulate_grad)):
        train.main(argv)
    return steps


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_start_while_others_compute(pool, stage):
    """Expect the weights one unit ahead of forward, and the gradients as soon as the next unit has its own."""
    argv = f"{case(pool, 'dense-2')} --micro_batch_size 6 --steps 2 --zero {stage} --offload"
    for _, second in pool.call(events_job, STEP, world=2, argv=argv.split()):
        start = ["forward 0", "to device 1", "forward 1",                          # unit 0 came before the step
                 "to device 2", "forward 2", "to device 3", "forward 3"]
        middle = [f"forward {i}" for i in range(4)]
        end = ["backward 3", "backward 2", "to host 3", "backward 1", "to host 2", "backward 0", "to host 1", "to host 0"]
        first_backward = [f"backward {i}" for i in (3, 2, 1, 0)] if stage > 1 else []        # stage 1 reduces once
        assert second[:len(start + first_backward + middle + end)] == start + first_backward + middle + end


# ------------------------------------------------------------------------------------- the break: an update that does not wait
class LateStream:
    """A CUDA stream, modelled on the CPU. A copy is done when Python synchronizes, or when a gather follows it on the stream.

    Until then its destination is NaN; or, if stale, still has what it had. In that case only the newest copy is not done yet.
    """

    def __init__(self, stale):
        self.stale, self.pending, self.launching, self.ordered, self.real_copy = stale, [], False, False, torch.Tensor.copy_

    def wait_stream(self, compute):
        self.ordered = True

    @contextlib.contextmanager
    def launch(self, stream):
        assert self.ordered, "copies what the computing stream may not have computed yet"
        self.launching = True
        yield
        self.launching = self.ordered = False

    def copy(self, destination, source, non_blocking=False):
        if not non_blocking:
            return self.real_copy(destination, source)
        assert self.launching, "a copy on the stream that computes: overlaps with nothing"
        if self.stale:
            self.synchronize()
        else:
            destination.fill_(torch.nan)
        self.pending.append((destination, source))
        return destination

    def synchronize(self):
        for destination, source in self.pending:          # source: as it is now, and not as it was when the copy started
            self.real_copy(destination, source)
        self.pending.clear()

    def before(self, start_all_gather):
        def start(unit):
            if self.launching:
                self.synchronize()
            start_all_gather(unit)
        return start


def late_job(argv, optimizer, wait, stale=False):
    """Train with late copies; without the wait for them, if that is asked for."""
    import cpu_offload
    import zero
    late = LateStream(stale)
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(patch.object(cpu_offload.CopyStream, "__init__", lambda self, device: setattr(self, "stream", late)))
        replaced.enter_context(patch.object(torch.cuda, "current_stream", lambda: "compute"))
        replaced.enter_context(patch.object(torch.cuda, "stream", late.launch))
        replaced.enter_context(patch.object(torch.Tensor, "copy_", lambda *args, **kwargs: late.copy(*args, **kwargs)))
        replaced.enter_context(patch.object(zero.Zero1Unit, "start_all_gather", late.before(zero.Zero1Unit.start_all_gather)))
        if not wait:
            replaced.enter_context(no_wait())
        train_job(argv, optimizer)


@contextlib.contextmanager
def no_wait():
    """Plant the mistake: nobody waits for the copies."""
    import cpu_offload
    with patch.object(cpu_offload.CopyStream, "synchronize", lambda self: None):
        yield


def late_and_waited_for(argv, optimizer):
    late_job(argv, optimizer, wait=True)


def late_and_not_waited_for(argv, optimizer):
    late_job(argv, optimizer, wait=False)


def stale_and_not_waited_for(argv, optimizer):
    late_job(argv, optimizer, wait=False, stale=True)


def not_waited_for(argv, optimizer):
    with no_wait():
        train_job(argv, optimizer)


LATE = [(2, "--zero 1 --micro_batch_size 4"), (3, "--zero 2 --micro_batch_size 8 --recompute full"),
        (2, "--zero 3 --micro_batch_size 6"), (4, "--zero 1 --zero_shard 2 --micro_batch_size 6")]


@pytest.mark.parametrize("world, flags", LATE)
def test_waits_for_late_copies(pool, world, flags):
    base = f"{case(pool, 'dense-2')} {EXACT}"
    run = pool.train(STEP, f"{base} {flags} --offload", world, job=late_and_waited_for)
    assert_same_run(run, pool.reference(ONE, f"{base} --micro_batch_size 6"), 1e-9, flags)


@pytest.mark.parametrize("world, flags", LATE)
def test_the_break_is_silent_until_copies_are_late(pool, world, flags):
    base = f"{case(pool, 'dense-2')} {EXACT}"
    one = pool.reference(ONE, f"{base} --micro_batch_size 6")
    assert_same_run(pool.train(STEP, f"{base} {flags} --offload", world, job=not_waited_for), one, 1e-9, flags)    # silent
    with pytest.raises(JobFailed, match="loss nan"):
        pool.train(STEP, f"{base} {flags} --offload", world, job=late_and_not_waited_for)


def test_what_the_break_does_on_a_gpu(pool):
    """Model a race that only the last copy loses, the embedding's: it is updated with the gradients of the step before. The first
    step shows nothing, and the losses stay close."""
    base = f"{case(pool, 'dense-2')} {EXACT}"
    one = pool.reference(ONE, f"{base} --micro_batch_size 6")
    run = pool.train(STEP, f"{base} --zero 1 --micro_batch_size 4 --offload", 2, job=stale_and_not_waited_for)
    assert relative(run.losses[0], one.losses[0]) < 1e-9 > relative(run.grad_norms[0], one.grad_norms[0])
    assert all(relative(ours, right) < 0.01 for ours, right in zip(run.losses, one.losses))
    with pytest.raises(AssertionError):
        assert_same_run(run, one, 1e-9)                   # comparing with one process shows this race, too, when it happens


# ------------------------------------------------------------------------------------- seconds, simulated
PCIE, HOST = 25e9, 50e9                                   # bytes per second: PCIe 4, in one direction; a desktop's memory: assumed


def simulated_job(argv, gpu="rtx4090", pcie=PCIE):
    """Simulate a step on one GPU with a second memory and a link to it. The CPU updates as fast as its memory allows. Return the
    seconds, and the bytes that the device holds."""
    import cpu_offload
    import zero
    from simulate import record
    from simulate.gpus import GPUS, Cluster, Kernel
    from simulate.kernels import cost_of
    from simulate.play import Player
    from watch import Storages, tensors
    now = [None]                                          # the recorder of the step

    def on_host(tensor):
        return hasattr(tensor.untyped_storage(), "on_host")

    def mark(tensor):
        tensor.untyped_storage().on_host = True
        return tensor

    class Recorder(record.Recorder):
        def __init__(self, model, optimizer, mesh, args):
            super().__init__(model, optimizer, mesh, args)
            now[0], self.to_host, self.to_device = self, [], {}
            if args.offload:
                for master in optimizer.masters:
                    for tensor in (master, *optimizer.adamw.state[master].values()):
                        mark(tensor)
                for unit in model.zero_units:             # as in every step but the first
                    unit.updated_on_host = True

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            places = {on_host(tensor) for tensor in tensors([args]) if tensor.dim()}
            if True not in places:
                return super().__torch_dispatch__(op, types, args, kwargs)
            result = op(*args, **(kwargs or {}))
            if len(places) == 2:
                assert op._opname == "copy_", op
                number = len(self.operations)
                self.operations.append(record.Operation("copy", "pcie", (0,), args[0].nbytes, args[0].nbytes, False))
                self.notes.append(("start", number, ""))
                if on_host(args[0]):
                    self.to_host.append(number)
                else:
                    self.to_device[args[0].untyped_storage()._cdata] = number
            elif cost := cost_of(op):
                kernel = Kernel(op._opname, "host", "float32", 0, cost(op._opname, args, result).bytes)
                self.notes.append(("compute", self.kernels.setdefault(kernel, len(self.kernels)), ""))
            return result

    def synchronize(copies):
        now[0].notes += [*(("wait", number, "gradients") for number in now[0].to_host), ("host waits", "")]

    def wait_for_all_gather(unit):
        number = now[0] and now[0].to_device.pop(unit.param_shard.untyped_storage()._cdata, None)
        if number is not None:
            now[0].notes.append(("wait", number, "weights"))
        gathered(unit)

    class WithHost(Cluster):
        def kernel(self, kernel):
            return kernel.bytes / HOST if kernel.kind == "host" else super().kernel(kernel)

        def transfer(self, operation):
            return (10e-6, operation.wire / pcie, "pcie") if operation.what == "copy" else super().transfer(operation)

    class NothingTaken(Player):                           # a copy engine takes nothing from the kernels that run meanwhile
        def start(self, rank, number):
            super().start(rank, number)
            if self.of[rank].operations[number].what == "copy":
                self.mine[rank][number].paid.add(rank)
    note, gathered = Storages.note, zero.Zero1Unit.wait_for_all_gather
    with (patch.object(cpu_offload, "copy_to_host", lambda tensor: mark(torch.empty_like(tensor))),
          patch.object(cpu_offload.CopyStream, "synchronize", synchronize),
          patch.object(zero.Zero1Unit, "wait_for_all_gather", wait_for_all_gather),
          patch.object(Storages, "note", lambda memory, tensor, kind: None if on_host(tensor) else note(memory, tensor, kind)),
          patch.object(record, "Recorder", Recorder)):
        seen = record.record(argv, 1)
    played = NothingTaken({0: seen}, WithHost(GPUS[gpu], 8), lambda rank: 0).play()
    ran = [seen.kernels[number] for what, number, *_ in seen.notes if what == "compute"]
    return dict(step=played.seconds, update=sum(kernel.bytes / HOST for kernel in ran if kernel.kind == "host"),
                peak=sum(seen.peak.values()), between=sum(seen.between.values()),
                **{what: played.waited[0]["pcie", what] for what in ("gradients", "weights")})


def simulate(pool, flags, **more):
    return pool.call(simulated_job, STEP, argv=f"--zero 1 --dtype bfloat16 {flags}".split(), **more)[0]


def test_the_link_of_the_simulation(pool):
    """Check that 12 bytes per parameter leave the device, that a slow link is waited for and a fast one hides all but its ends."""
    flags = f"{case(pool, 'dense-2')} --micro_batch_size 6"
    without, slow, fast = (simulate(pool, flags), simulate(pool, f"{flags} --offload", pcie=1e6),
                           simulate(pool, f"{flags} --offload", pcie=1e9))
    params, steps_of_adam = sum(UNITS), 4 * (2 * 9 + 3)   # a number for each tensor
    assert without["between"] - fast["between"] == 12 * params + steps_of_adam and without["update"] == 0 < fast["update"]
    assert 0.9 < slow["gradients"] * 1e6 / (4 * params) < 1 and 0.9 < slow["weights"] * 1e6 / (2 * params) < 1
    assert fast["gradients"] * 1e9 < 4 * sum(UNITS[:2]) + 1e5


def print_results(pool):
    for name, job in (("waits", late_and_waited_for), ("does not wait", stale_and_not_waited_for)):
        run = pool.train(STEP, "--steps 60 --zero 1 --offload", 2, job=job, weights=False)
        print(f"{name}: loss {run.losses[0]:.4f} in the first step, {run.losses[-1]:.4f} in the last", flush=True)
    for size in (1, 2, 4):
        flags = f"--model llama-1b --seq_len 2048 --recompute full --micro_batch_size {size} --global_batch_size {8 * size}"
        without, run = simulate(pool, flags), simulate(pool, f"{flags} --offload")
        seconds = without["step"], run["step"], run["update"], run["gradients"], run["weights"]
        print(f"| {2048 * size:,} | {' | '.join(f'{value:.2f}' for value in seconds)} | {run['peak'] / 2**30:.1f} GiB |"
              f"    without: {without['peak'] / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    import offload                                        # workers cannot import functions from __main__
    from harness import shared_pool
    offload.print_results(shared_pool())
