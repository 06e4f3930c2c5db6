"""Jobs that more than one test file runs on ranks, and helpers that read what they print. (The jobs that simply train are in
harness.py and observe.py.)"""
import functools
import gc
import itertools
import os
import re
import signal
import time

from harness import assert_same_run, train_job


# ------------------------------------------------------------------------------------- refusals
def main_job(argv):
    import train
    train.main(argv)


def check_job(argv, world_size=1):
    """Parse and check the flags as rank 0 of `world_size` ranks. One rank is enough: every rank refuses the same flags."""
    from unittest.mock import patch

    import config
    import messages
    import train
    with patch.dict(os.environ, WORLD_SIZE=str(world_size), RANK="0"), messages.clean_exit():
        args = config.parse_args(argv, train.TECHNIQUES)
        config.check(args, config.load_config(args), train.TECHNIQUES)


def assert_refused(pool, step, world, flags, message, job=check_job, **more):
    """Check that the step refuses these flags: with this message, on one line, and exit status 2."""
    import pytest
    from harness import Refused
    with pytest.raises(Refused) as refused:
        if job is check_job:
            pool.call(check_job, step, argv=flags.split(), world_size=world)
        else:
            pool.call(job, step, world=world, argv=flags.split(), **more)
    assert message in str(refused.value) and str(refused.value).count("\n") == 1, refused.value


# ------------------------------------------------------------------------------------- weights from a file
def assert_loads(pool, step, folder, base, *layouts):
    """Train from saved weights under each layout, given as (number of ranks, flags), and compare with one process of step 1."""
    baseline = "step01_single_gpu"
    pool.train(baseline, f"{base} --seed 7 --steps 1 --save {folder}", weights=False)
    base = f"{base} --steps 2 --init_from {folder}"
    one = pool.train(baseline, base)
    for world, more in layouts:
        assert_same_run(pool.train(step, f"{base} {more}", world=world), one, 1e-9, more)


def save_in_pieces_job(argv):
    """Train, and save in files of at most 200,000 bytes instead of 5 GB."""
    from unittest.mock import patch

    import weights
    split = functools.partial(weights.split_torch_state_dict_into_shards, max_shard_size=200_000)
    with patch.object(weights, "split_torch_state_dict_into_shards", split):
        main_job(argv)


# ------------------------------------------------------------------------------------- signals
def told_job(argv, number, rank=1, at=1):
    """Train, but send one rank this signal in the middle of step `at`. Return the exit status, or None if the run ends normally."""
    import train
    own, calls, before = train.pipeline_parallel.Pipeline.forward_backward, itertools.count(), signal.getsignal(number)

    def run(self, micro_batches):
        if next(calls) == at and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), number)
        return own(self, micro_batches)
    train.pipeline_parallel.Pipeline.forward_backward = run
    signal.signal(number, signal.SIG_DFL)                 # under nohup it may be ignored here, and a trainer respects that
    try:
        train.main(argv)
    except SystemExit as stopped:
        return stopped.code
    finally:
        train.pipeline_parallel.Pipeline.forward_backward = own
        signal.signal(number, before)


# ------------------------------------------------------------------------------------- the ledger's table
def ledger_rows(output):
    """Return the table that --ledger prints, as {(dimension, collective): (calls, payload, formula, wire)}."""
    rows = re.findall(r"^(\w+) +(\w+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", output, re.M)
    assert rows, output
    return {(dim, collective): tuple(int(n.replace(",", "")) for n in numbers) for dim, collective, *numbers in rows}


# ------------------------------------------------------------------------------------- memory
def storage_bytes(tensors):
    """Return the bytes that these tensors take. Count each storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def trained_parts(argv):
    """Train. Return the model and the optimizer as they are after the last step."""
    import train
    from watch import keeping
    made = {}
    with keeping(train, "build_model", made), keeping(train, "Optimizer", made):
        train.main(argv)
    return made["build_model"], made["Optimizer"]


def kept_job(argv):
    """Return the bytes of the storages, parameters aside, that are alive between forward and backward of one micro-batch; and the
    bytes of the parameters."""
    from unittest.mock import patch

    import torch
    import train
    from watch import Storages
    measured = []

    def measure(model, micro_batches, args):
        inputs, positions, targets, *_ = micro_batches[0]     # an extension adds the number of targets
        live = Storages()
        live.note_all([*model.parameters()], "parameters")
        with live:
            hidden = model.model(inputs, positions)
        gc.collect()
        time.sleep(0.3)                                   # gloo's threads release what they sent a little after the wait
        measured.append(sum(size for _, number, size in live.events if live.kinds[number] != "parameters"))
        measured.append(sum(param.nbytes for param in model.parameters()))
        (model.lm_head(hidden, targets)).backward()
        return torch.zeros(())
    with patch.object(train, "forward_backward", measure):
        train.main(argv)
    return tuple(measured)


def kept_by_a_layer(pool, tmp_path, step, world, flags):
    """Return how many float32 numbers forward keeps for one layer: the difference between models of three and of two layers."""
    import cases
    kept = []
    for layers in (2, 3):
        base = cases.make(tmp_path / str(layers), **cases.shape(f"dense-{layers}"))
        measured = pool.call(kept_job, step, world=world, argv=f"{base} --steps 1 --micro_batch_size 24 {flags}".split())
        assert len(set(measured)) == 1
        kept.append(measured[0][0])
    return (kept[1] - kept[0]) / 4


def capability_job():
    """Return whether the GPU has bfloat16, and the bytes of its memory. (In test_gpus.py, a worker would import fixtures.py, which
    hides the GPUs.)"""
    import config
    import torch
    return config.gpu_has_bfloat16(), torch.cuda.get_device_properties(0).total_memory


def looped_job(argv, optimizer):
    """Train with a loop over the experts instead of the grouped kernel."""
    from unittest.mock import patch
    with patch("moe.supports_grouped_mm", lambda weight: False):
        train_job(argv, optimizer)


def grouped_job(device, counts):
    """Compare the grouped product with a loop over experts. Return the relative errors of the product, of its two gradients, and
    of the weight gradient as a deferred W computes it."""
    from unittest.mock import patch

    import torch
    from moe import grouped_product, grouped_weight_grad
    torch.manual_seed(0)
    counts = torch.tensor(counts, device=device)
    rows = int(counts.sum())
    x, grad = (torch.randn(rows, width, device=device).bfloat16() for width in (256, 128))
    weight = torch.randn(len(counts), 128, 256, device=device).bfloat16()

    def results():
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = grouped_product(*leaves, counts)
        out.backward(grad)
        return out, *(leaf.grad for leaf in leaves), grouped_weight_grad(grad, x, weight, counts)
    grouped = results()
    with patch("moe.supports_grouped_mm", lambda weight: False):
        return [relative_norm(a, b) for a, b in zip(grouped, results())]


def memory_job(argv):
    """Run a trainer under tools/memory.py. Return the kinds of memory, and rows of seconds and the bytes of each kind."""
    import memory
    found = []
    memory.run(argv, found.extend)
    return [*memory.KINDS], found


def blocks_job(device, dtype, head_dim):
    """Compare attention in blocks with attention in one piece and in float64. Return the relative errors of the output and of the
    three gradients."""
    import torch
    from context_parallel import add_block, add_gradients, block_gradients, init_out_and_lse
    torch.manual_seed(0)
    q, k, v, grad_out = (torch.randn(2, 8, 512, head_dim, dtype=torch.float64, device=device) for _ in range(4))
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    later = torch.ones(512, 512, device=device, dtype=torch.bool).triu(1)
    scores = (exact[0] @ exact[1].mT / head_dim**0.5).masked_fill(later, -torch.inf)
    expected = scores.softmax(-1) @ exact[2]
    expected.backward(grad_out)

    q, k, v, grad_out = (x.to(getattr(torch, dtype)) for x in (q, k, v, grad_out))
    kv, early, late = torch.stack((k, v)), slice(0, 256), slice(256, 512)
    blocks = [(early, early, True), (late, early, False), (late, late, True)]
    out, lse = init_out_and_lse(q)
    for block in blocks:
        add_block(out, lse, q, kv, block)
    grad_q, grad_kv = torch.zeros_like(out), torch.zeros_like(kv, dtype=out.dtype)
    for block in blocks:
        add_gradients(grad_q, grad_kv, block_gradients(grad_out, q, kv, out.to(q.dtype), lse, block), block)
    return [relative_norm(a, b) for a, b in zip((out, grad_q, *grad_kv), (expected, *(x.grad for x in exact)))]


def relative_norm(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


# ------------------------------------------------------------------------------------- torch.compile
def compiled_job(argv, optimizer):
    """Train. Return how many graphs torch.compile made."""
    import torch._dynamo
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    train_job(argv, optimizer)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def traced_job(argv, optimizer):
    """Do what compiled_job does, but run the graphs as they were traced: generating C++ of them takes twenty seconds of CPU, and
    what is generated for a layer hardly depends on the technique. Steps 1 and 7 generate it."""
    from unittest.mock import patch

    import torch
    with patch("torch.compile", functools.partial(torch.compile, backend="aot_eager")):
        return compiled_job(argv, optimizer)


def compiled_calls_job(argv):
    """Train. Return for each step how often compiled code was called."""
    from unittest.mock import patch

    import torch
    import train
    calls, per_step, compile, log = [], [], torch.compile, train.Metrics.log

    def counted(graph, inputs):
        return lambda *args: calls.append(graph) or graph.forward(*args)

    def note(metrics, *args):
        per_step.append(len(calls))
        calls.clear()
        log(metrics, *args)
    torch._dynamo.reset()
    with patch("torch.compile", lambda function: compile(function, backend=counted)), patch.object(train.Metrics, "log", note):
        train_job(argv)
    return per_step


# ------------------------------------------------------------------------------------- attention in blocks
def attention_job(modes, seq_len, dtypes):
    """Compare attention with the flash kernel in float64. Return {(mode, dtype): the relative errors of the output and the three
    gradients, in this rank's part of the sequence}, and under "flash" those of the flash kernel on the whole sequence."""
    from types import SimpleNamespace

    import context_parallel
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    draw = torch.Generator().manual_seed(0)
    q, out_grad = (torch.randn(1, seq_len, 8, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, seq_len, 4, 16, generator=draw, dtype=torch.float64) for _ in range(2))

    def run(core, dtype, rows):
        mine = [t[:, rows].to(dtype).requires_grad_() for t in (q, k, v)]
        out = core(*mine)
        return out.detach(), *torch.autograd.grad(out, mine, out_grad[:, rows].to(dtype))

    def whole(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    errors, every = {}, torch.arange(seq_len)
    exact = run(whole, torch.float64, every) if mesh.get_rank() == 0 else [torch.empty_like(t) for t in (q, q, k, v)]
    for tensor in exact:
        dist.broadcast(tensor, 0)

    def error(got, rows):
        return [float((g.double() - e[:, rows]).norm() / e[:, rows].norm()) for g, e in zip(got, exact)]
    for dtype in dtypes:
        errors["flash", dtype] = error(run(whole, getattr(torch, dtype), every), every) if mesh.get_rank() == 0 else 4 * [0.0]
        for mode in modes:
            rows = context_parallel.local_positions(mesh, SimpleNamespace(seq_len=seq_len, cp=mesh.size(), cp_mode=mode))
            group = mesh.get_group()
            ulysses, blockwise = context_parallel.ulysses, context_parallel.blockwise_attention
            core = ulysses(whole, group) if mode == "ulysses" else blockwise(mode, group)
            errors[mode, dtype] = error(run(core, getattr(torch, dtype), rows), rows)
    return errors
