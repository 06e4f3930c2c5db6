"""The CUDA path, as far as it can be tested without a GPU: shapes and bytes of a rank's kernels, and code that only CUDA runs."""
import contextlib
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import cases
import pytest
from jobs import assert_refused, compiled_calls_job

STEP = "step08_5d"
slow = pytest.mark.slow


# ------------------------------------------------------------------------------------------------ a rank's kernels
def kernels_job(ranks, argv, layers):
    """Run one training step as rank 0 of `ranks`, with the model cut to `layers` layers unless that is None. Return its matrix
    products as {(m, n, k): calls}, and the bytes that its operations read and write. There is only this rank, and its tensors have
    no data (tools/simulate)."""
    import math
    from collections import Counter

    import config
    import train
    from simulate.stand_ins import one_rank
    from watch import Watch, tensors
    products, moved = Counter(), Counter()

    def note(op, args, kwargs, result):
        if op._opname == "mm":
            products[(*args[0].shape, args[1].shape[1])] += 1
        if not op.is_view and op.namespace == "aten":
            moved[op._opname] += sum(math.prod(n for n, stride in zip(t.shape, t.stride()) if stride) * t.itemsize
                                     for t in tensors((args, result)))

    @contextlib.contextmanager
    def watch(profiler, step):
        optimizers[0].adamw.step()                        # this makes its states, as the watched step must not be the first
        with Watch(after=note):
            yield

    def make_optimizer(*args):
        optimizers.append(make(*args))
        return optimizers[0]
    optimizers, make = [], train.Optimizer
    preset = argv[argv.index("--model") + 1]
    shape = config.PRESETS[preset] if layers is None else replace(config.PRESETS[preset], num_hidden_layers=layers)
    with (one_rank(ranks, 0), patch("profiling.Profiler.step", watch), patch.object(train, "Optimizer", make_optimizer),
          patch.dict(config.PRESETS, {preset: shape})):
        train.main(argv)
    return dict(products), dict(moved)


LAYOUTS = {"llama-1b": (1, "--global_batch_size 4 --micro_batch_size 4"),
           "llama-8b, tp": (8, "--tp 8 --global_batch_size 1 --micro_batch_size 1"),
           "llama-8b, ZeRO-3": (8, "--zero 3 --global_batch_size 8 --micro_batch_size 1 --recompute full")}


def kernels(pool, layout):
    ranks, flags = LAYOUTS[layout]
    argv = ["--model", layout.split(",")[0], "--seq_len", "4096", *flags.split()]
    layers = None if layout == "llama-1b" else 2          # more layers have the same products
    return pool.once(layout, lambda: pool.call(kernels_job, STEP, ranks=ranks, argv=argv, layers=layers)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_of_whole_tiles(pool, layout):
    """Check that all sizes of products, except one, are multiples of 128: a GPU computes a product in tiles of 128 or more, and a
    partial tile costs as much as a whole one. Llama 3's vocabulary is 1,002 tiles, of which each of eight ranks has 125 and a
    quarter."""
    products, _ = kernels(pool, layout)
    odd = {n for shape in products for n in shape if n % 128}
    assert products and odd <= ({128256 // 8} if "--tp 8" in LAYOUTS[layout][1] else set())


BYTES_OF_A_STEP = 502.2


def test_bytes_of_a_micro_batch(pool):
    """Check how many bytes the operations of one step of llama-1b with 4 x 4,096 tokens read and write: memory-bound work must not
    grow unseen."""
    _, moved = kernels(pool, "llama-1b")
    assert sum(moved.values()) / 1e9 == pytest.approx(BYTES_OF_A_STEP, rel=0.01), moved


# ------------------------------------------------------------------------------------------------ what only CUDA runs
def flash_job():
    import context_parallel
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    found = []
    with FakeTensorMode():
        for causal, keys in ((True, 128), (False, 64)):
            q = torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.empty(2, 4, keys, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            out, lse = context_parallel.flash(q, k, v, causal)
            grads = context_parallel.flash_backward(torch.empty_like(out), q, k, v, out, lse, causal)[:3]
            found.append([(list(t.shape), str(t.dtype), t.device.type) for t in (out, lse, *grads)])
    return found


def test_the_flash_kernels_of_cuda_take_what_they_are_given(pool):
    """Check with tensors that have no data that the operations exist with these arguments, and what they return."""
    for keys, found in zip((128, 64), pool.call(flash_job, STEP)[0]):
        q, kv = [2, 4, 128, 64], [2, 4, keys, 64]
        assert found == [(q, "torch.bfloat16", "cuda"), ([2, 4, 128], "torch.float32", "cuda"), (q, "torch.bfloat16", "cuda"),
                         (kv, "torch.bfloat16", "cuda"), (kv, "torch.bfloat16", "cuda")]


def parsed_on_cuda_job(argv, capability):
    """Parse and check the flags on a GPU of this compute capability. Return the type that the trainer chooses."""
    import config
    import train
    from messages import clean_exit
    with patch("torch.cuda.is_available", lambda: True), \
            patch("torch.cuda.get_device_capability", lambda: capability), clean_exit():
        args = config.parse_args(argv, train.TECHNIQUES)
        config.check(args, config.load_config(args), train.TECHNIQUES)
    return str(args.dtype)


@pytest.mark.parametrize("step", ["step01_single_gpu", STEP])
def test_bfloat16_is_for_gpus_that_have_it(pool, step):
    """Check the compute capability: on a T4 (7.5), torch.cuda.is_bf16_supported() is true, although bfloat16 is only emulated."""
    chosen = [pool.call(parsed_on_cuda_job, step, argv=[], capability=capability)[0] for capability in ((7, 5), (8, 0), (10, 0))]
    assert chosen == ["torch.float32", "torch.bfloat16", "torch.bfloat16"]
    assert pool.call(parsed_on_cuda_job, step, argv=["--dtype", "float32"], capability=(9, 0)) == ["torch.float32"]
    assert_refused(pool, step, 1, "--dtype bfloat16", "--dtype bfloat16: requires a GPU of compute capability 8.0 or more",
                   job=parsed_on_cuda_job, capability=(7, 5))


@pytest.mark.parametrize("cuda, dtype, head_dim, has", [
    (False, "float64", 10, True), (True, "bfloat16", 64, True), (True, "bfloat16", 10, False), (True, "float32", 64, False)])
def test_which_tensors_have_a_flash_kernel(pool, cuda, dtype, head_dim, has):
    assert pool.call(flash_kernel_job, STEP, cuda=cuda, dtype=dtype, head_dim=head_dim) == [has]


def flash_kernel_job(cuda, dtype, head_dim):
    import context_parallel
    import torch
    q = SimpleNamespace(is_cuda=cuda, dtype=getattr(torch, dtype), shape=(1, 1, 1, head_dim))
    return context_parallel.has_flash_kernel(q)


def environment_job():
    """Return what is set before NCCL starts a group. The job stops at that point, because there is no NCCL here."""
    import mesh
    import model  # noqa: F401
    import torch
    seen = []
    args = SimpleNamespace(device="cuda", pp=1, dp=1, cp=1, tp=1)

    def connect(what, *_, **__):
        seen.append((what, os.environ.pop("NCCL_LAUNCH_ORDER_IMPLICIT", None)))
        raise ZeroDivisionError
    with patch("torch.cuda.is_available", lambda: True), patch("torch.distributed.init_process_group", connect):
        with pytest.raises(ZeroDivisionError), mesh.init_distributed():
            raise AssertionError("the processes have not been connected")
    with patch.dict(os.environ, LOCAL_RANK="5"), patch("torch.cuda.set_device", seen.append), \
            patch("mesh.init_device_mesh", connect):
        with pytest.raises(ZeroDivisionError):
            mesh.build_mesh(args)
    return seen, not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_what_is_set_for_cuda(pool):
    """Check that one group serves both devices, that a rank has chosen its GPU before its first NCCL group, and that NCCL runs its
    kernels in the order in which they were launched."""
    assert pool.call(environment_job, STEP) == [([("cpu:gloo,cuda:nccl", None), 5, ("cuda", "1")], True)]


def logged_on_cuda_job():
    """Log two steps of a run that says it is on a GPU of 80 GiB, of which 70 are free and torch's allocator has 8."""
    import metrics
    import torch
    gib = 2**30
    log = metrics.Metrics.__new__(metrics.Metrics)
    log.args = SimpleNamespace(device="cuda", first_step=3, steps=5, global_batch_size=1, seq_len=1)
    log.world_size, log.flops_per_token, log.peak_flops, log.file, log.start = 1, 1, None, None, 0
    with patch("torch.cuda.mem_get_info", lambda: (70 * gib, 80 * gib)), patch("metrics.dist.all_reduce"), \
            patch("torch.cuda.memory_reserved", lambda: 8 * gib), \
            patch("metrics.peak_memory_gib", lambda device: torch.ones(())):
        log.log(3, 1.0, 1.0, 1.0)
        log.log(4, 1.0, 1.0, 1.0)


def test_memory_outside_the_allocator_is_printed_once(pool):
    """Check it after the first step, of a resumed run too: only then have all groups communicated."""
    pool.call(logged_on_cuda_job, STEP)
    assert [line[:8] for line in pool.output.splitlines()] == ["step 4/5", "2.00 GiB", "step 5/5"]
    assert "2.00 GiB of rank 0's GPU are in use outside" in pool.output


def started_order_job(argv):
    """Train. Return what is started, in order: gathers of a unit's weights, units that compute, all-reduces, forward."""
    import torch.distributed as dist
    import train
    import zero
    events = []

    def note(owner, name, event):
        original = getattr(owner, name)

        def noted(*args, **how):
            events.append(event)
            return original(*args, **how)
        return patch.object(owner, name, noted)
    with (note(zero.Zero1Unit, "start_all_gather", "gather"), note(zero.Zero1Unit, "pre_forward", "unit"),
          note(dist, "all_reduce", "sum"), note(train.pipeline_parallel.Pipeline, "forward_backward", "forward")):
        train.main(argv)
    return events


def steps_of(events):
    """Return the events of each training step but the last, from the event before its forward to that before the next one's."""
    starts = [i - 1 for i, event in enumerate(events) if event == "forward"]
    return [events[start:end] for start, end in zip(starts, starts[1:])]


@pytest.mark.parametrize("stage, model, gathers, layer", [(1, "tiny-moe", 18, 2), (2, "tiny", 10, 1)])
def test_weights_are_gathered_one_layer_ahead(pool, stage, model, gathers, layer, tmp_path):
    """Check the order in which collectives start, since NCCL runs them in that order across groups. (With tp, a layer's experts are
    a unit of their own.) Before forward only the first unit's weights are gathered, and no all-reduce stands between. In forward
    the gathers are at most one layer ahead, so that an all-reduce of tp waits for one layer's weights and not for the model's."""
    flags = f"--steps 3 --seq_len 16 --global_batch_size 4 --micro_batch_size 2 --zero {stage} --tp 2 --sp off"
    argv = f"{flags} --model {model} --checkpoint {tmp_path}".split()
    steps = steps_of(pool.call(started_order_job, STEP, world=4, argv=argv)[0])
    assert len(steps) == 2
    for step in steps:
        assert step[:2] == ["gather", "forward"], step[:4]
        ahead = [Counter(step[:i])["gather"] - Counter(step[:i])["unit"] for i, event in enumerate(step) if event == "sum"]
        assert Counter(step)["gather"] == gathers and 0 <= min(ahead), step
        assert max(ahead) == layer, ahead


def many_layers_job(argv):
    import torch._dynamo
    import train
    torch._dynamo.reset()
    traced = partial(torch.compile, backend="eager")      # nothing is generated: only the number of graphs counts
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), patch("torch.compile", traced):
        train.main(argv)


@slow
@pytest.mark.parametrize("step, more, eager", [("step01_single_gpu", "--profile {}", []), ("step02_dp", "--ledger", [1])])
def test_who_watches_does_not_end_compiling(pool, tmp_path, step, more, eager):
    """Check that torch compiles again after a watched step: while a dispatch mode sees every operation it compiles nothing, and
    unless it is told otherwise, it remembers that for the rest of the run."""
    flags = f"{cases.make(tmp_path / 'case', **cases.shape('dense-2'))} --steps 6 --micro_batch_size 12 --compile"
    calls, = pool.call(compiled_calls_job, step, argv=f"{flags} {more.format(tmp_path)}".split())
    a_step = 2 * (2 + 1)                                  # two micro-batches, two layers, the loss
    assert calls == [0 if i in eager else a_step for i in range(6)]
    pool.stop()                                           # once a worker has compiled, its garbage collection is slow


@slow
def test_twelve_layers_are_compiled_once(pool, tmp_path):
    """Check that layers are not compiled one by one: from the ninth on, PyTorch would give up and say so only in a log that
    nobody reads."""
    flags = f"{cases.make(tmp_path, num_hidden_layers=12)} --steps 2 --micro_batch_size 6 --compile"
    pool.call(many_layers_job, STEP, argv=flags.split())
    pool.stop()                                           # once a worker has compiled, its garbage collection is slow
