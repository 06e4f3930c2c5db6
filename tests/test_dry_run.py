"""Step 8's --dry_run: what it says of a run without running it is what is seen when it runs."""
import contextlib
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from harness import Refused
from jobs import main_job
from steps import clean_environment, run, step_dir

STEP = "step08_5d"
SHAPE = "--device cpu --seq_len 64 --global_batch_size 16 --steps 2"
LAYOUTS = [                                               # of 8 ranks
    "--model tiny --dtype float32 --tp 2 --pp 2 --zero 1 --micro_batch_size 2",
    "--model tiny --dtype bfloat16 --zero 3 --recompute full --micro_batch_size 1",
    "--model tiny --dtype float32 --pp 4 --schedule interleaved --zero 2 --micro_batch_size 1",
    "--model tiny --dtype bfloat16 --tp 4 --cp 2 --recompute selective --micro_batch_size 16",
    "--model tiny --dtype float32 --cp 4 --tp 2 --sp off --cp_mode allgather --dp_mode naive --micro_batch_size 8",
    ("--model tiny --dtype bfloat16 --pp 2 --schedule dualpipe --cp 2 --cp_mode ulysses --zero 3 --zero_shard 2 "
     "--micro_batch_size 2"),
    "--model tiny-moe --dtype float32 --pp 2 --ep 4 --schedule zerobubble --micro_batch_size 1",
    "--model tiny-moe --dtype bfloat16 --ep 8 --zero 2 --balance aux --micro_batch_size 2",
    "--model tiny-moe --dtype bfloat16 --tp 2 --cp 2 --pp 2 --ep 2 --schedule afab --zero 1 --recompute full --micro_batch_size 8",
    "--model tiny-moe --dtype float32 --cp 4 --cp_mode ring --tp 2 --ep 4 --zero 3 --micro_batch_size 8"]
ALONE = ["--model tiny", "--model tiny-moe --balance aux"]


# ---------------------------------------------------------------------------------------------- on every rank
def storage_bytes(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def plain(seen):
    return SimpleNamespace(between=seen.between, peak=seen.peak, most=seen.most, place=seen.place, flops=seen.flops,
                           calls=dict(seen.sent.calls), payload=dict(seen.sent.payload))


def real_job(argv):
    """The second training step as it is, but for a router that gives every expert as many tokens."""
    import dry_run
    import torch
    import train
    from expert_parallel import Balance
    choose, steps = Balance.choose, []

    def choose_evenly(self, i, scores):
        expert = choose(self, i, scores)
        return expert.copy_((torch.arange(expert.numel()) % scores.shape[-1]).view_as(expert))

    @contextlib.contextmanager
    def watch(model, optimizer, pipeline, mesh, args):
        with dry_run.observe(model, optimizer, pipeline, mesh) as seen:
            yield
        steps.append(plain(seen))
        states = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
        steps[-1].state = {"parameters": storage_bytes([*model.parameters(), *optimizer.params]),
                           "gradients": storage_bytes(optimizer.grads),
                           "optimizer states": storage_bytes(states + optimizer.masters * (args.dtype is torch.bfloat16))}
    finished = lambda work: work.wait() or True           # of a send gloo says so only when it has been waited for
    with (patch("train.watch", watch), patch("torch.distributed.Work.is_completed", finished),
          patch("expert_parallel.Balance.choose", choose_evenly)):
        train.main(argv)
    return steps[1]


def dry_job(argv):
    """Each worker plays the rank that it is."""
    import os

    import train
    kept = []
    with patch("dry_run.report", lambda seen, *_: kept.append(plain(seen))):
        train.main([*argv, "--dry_run", os.environ["WORLD_SIZE"], "--dry_run_rank", os.environ["RANK"]])
    return kept[0]


# ---------------------------------------------------------------------------------------------- against reality
@pytest.mark.parametrize("layout", [
    pytest.param(layout, marks=pytest.mark.sweep if i in (1, 3, 4, 8) else pytest.mark.slow) for i, layout in enumerate(LAYOUTS)])
def test_says_what_is_seen_in_a_real_run(pool, layout):
    dry = pool.call(dry_job, STEP, world=8, timeout=300, argv=f"{SHAPE} {layout}".split())
    # gloo's threads may let go of a tensor late, so that more is seen than there is
    for last_try in (False, False, True):
        real = pool.call(real_job, STEP, world=8, timeout=300, argv=f"{SHAPE} {layout}".split())
        if last_try or all(map(same_memory, dry, real)):
            break
    for rank, (said, seen) in enumerate(zip(dry, real)):
        for kind in ("parameters", "gradients", "optimizer states"):
            assert said.between[kind] == seen.between[kind] == seen.state[kind] > 0, f"{kind}, rank {rank}"
            assert said.most[kind] == seen.most[kind], f"{kind}, rank {rank}"
        assert said.calls == seen.calls and said.payload == seen.payload, f"rank {rank}"
        assert said.flops == seen.flops, f"rank {rank}"
        assert same_memory(said, seen), f"rank {rank}: said {said.most}, {said.peak}; seen {seen.most}, {seen.peak}"


def same_memory(said, seen):
    """Activations within 2%; of all at the peak 5%, since gradients on their way are among those that gloo lets go late."""
    return (said.most["activations"] == pytest.approx(seen.most["activations"], rel=0.02) and
            sum(said.peak.values()) == pytest.approx(sum(seen.peak.values()), rel=0.05))


@pytest.mark.slow
def test_flops_are_those_of_the_products(pool):
    """Of every token: six per weight of a matrix, and attention's seven products (two forward, five in backward), of which
    a causal kernel makes half."""
    layers, hidden, tokens, seq = 8, 64, 4 * 128, 128
    weights = layers * (2 * hidden * hidden + 2 * hidden * 32 + 3 * hidden * 192) + 256 * hidden
    seen = pool.call(dry_job, STEP, argv=["--seq_len", "128", "--global_batch_size", "4"])[0]
    assert seen.flops == 6 * weights * tokens + layers * 7 * 2 * tokens * seq * hidden // 2


@pytest.mark.slow
def test_norms_keep_less_with_the_kernels_of_cuda(pool):
    """CUDA's one kernel keeps its input; on the CPU that is a float32 copy, and the quotient is kept beside it."""
    argv = "--dtype bfloat16 --seq_len 64 --global_batch_size 2".split()
    cpu, cuda = (pool.call(dry_job, STEP, argv=[*argv, "--device", device])[0] for device in ("cpu", "auto"))
    assert (cpu.calls, cpu.flops, cpu.between) == (cuda.calls, cuda.flops, cuda.between)
    assert 0 < cuda.most["activations"] < cpu.most["activations"]


# ---------------------------------------------------------------------------------------------- nobody waits for the device
def waits_job(argv):
    """The operations of a training step for whose result the host would have to wait, were the device a GPU."""
    import dry_run
    import torch
    import train
    from torch.utils._python_dispatch import TorchDispatchMode
    aten, asked, watch = torch.ops.aten, [], dry_run.watch
    waits = {aten.bincount.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.equal.default,
             aten._local_scalar_dense.default}

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            to_host = op == aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu")
            picks = op == aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1])
            repeats = op == aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
            if op in waits or to_host or picks or repeats:
                asked.append(op)
            return op(*args, **kwargs)

    @contextlib.contextmanager
    def watch_step(*args):
        with watch(*args), Waits():
            yield
    with patch("train.watch", watch_step), patch("dry_run.report", lambda *_: None):
        train.main(argv)
    return set(map(str, asked))


@pytest.mark.parametrize("layout", [*ALONE, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS)])
def test_the_host_waits_only_for_the_counts_of_rows(pool, layout):
    """The log comes after the step. In it a GPU has always something to do, but for all-to-alls, whose buffers the host has to
    make."""
    ranks = 1 if layout in ALONE else 8
    argv = f"--seq_len 64 --global_batch_size 16 {layout} --dry_run {ranks} --dry_run_rank {ranks // 2}".split()
    assert pool.call(waits_job, STEP, argv=argv) == [{"aten._to_copy.default"} if "--ep" in layout else set()]


# ---------------------------------------------------------------------------------------------- what it prints
def dry_run(flags, timeout=300):
    """What the command prints, and its table of memory: {kind: MiB between steps, at the peak, at most}."""
    status, output = run([clean_environment()["PYTHON"], "train.py", *flags.split()], cwd=step_dir(STEP), timeout=timeout)
    assert status == 0, output
    number = r" +([\d,]+\.\d\d)"
    rows = re.findall(f"^([a-z][a-z ]*?){number}{number}(?:{number})?$", output, re.MULTILINE)
    return output, {kind: [float(value.replace(",", "")) for value in values if value] for kind, *values in rows}


@pytest.mark.slow
def test_prints_what_a_rank_would_take():
    output, memory = dry_run("--dry_run 8 --dry_run_rank 7 --tp 2 --pp 2 --micro_batch_size 2 --zero 1")
    assert "dry run of rank 7 of 8: pp 1 of 2, dp 1 of 2, cp 0 of 1, tp 1 of 2" in output
    assert "tiny, bfloat16, a training step of 4 micro-batches of 2 x 128 tokens" in output
    assert list(memory) == ["parameters", "optimizer states", "gradients", "activations", "rest", "all"]
    for column in (0, 1):
        assert memory["all"][column] == pytest.approx(sum(row[column] for kind, row in memory.items() if kind != "all"), abs=0.04)
    assert re.search(r"the peak is in [FB]\d of stage 1, action \d of 8", output)
    assert "FLOPs, " in output and "for each of the 1,024 tokens that this rank works on" in output
    assert "1f1b leaves this rank idle for 3 of 15 units, 20.0%" in output
    sent = {tuple(line.split()[:2]): line.split()[2:] for line in output[output.index("dimension"):].splitlines()[1:]}
    hidden_states = 2 * 128 // 2 * 64 * 2                 # bytes of a rank's part of a micro-batch
    assert sent["pp", "send"] == ["4", f"{4 * hidden_states:,}", f"{4 * hidden_states:,}"]
    assert {("shard", "all_gather"), ("shard", "reduce_scatter"), ("tp", "all_gather"), ("tp", "reduce_scatter")} <= sent.keys()
    assert "step 1/1" not in output                       # no loss, since there is none


@pytest.mark.parametrize("more, message", [
    ("--dry_run 12 --tp 8", r"pp\(1\) x dp\(1\) x cp\(1\) x tp\(8\) != world size \(12\)"),
    ("--dry_run 0", "--dry_run 0: the number of ranks must be at least 1"),
    ("--dry_run many", "--dry_run: invalid int value: 'many'"),
    ("--dry_run 8 --dry_run_rank 8", "--dry_run_rank 8: of 8 ranks the last is 7"),
    ("--dry_run 8 --save out", "leave out --save"),
    ("--dry_run 8 --attention flash", "takes --attention sdpa")])
def test_refused_in_one_line(pool, more, message):
    with pytest.raises(Refused, match=message) as refused:
        pool.call(main_job, STEP, argv=more.split())
    assert len(str(refused.value).strip().splitlines()) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("more", ["--seq_len 8192 --global_batch_size 2048", "--cp 16 --seq_len 131072 --global_batch_size 128"])
def test_a_large_model_on_16384_ranks(more):
    output, memory = dry_run(f"--dry_run 16384 --model llama-405b --tp 8 --pp 16 --zero 1 --micro_batch_size 1 {more}", timeout=900)
    hidden, mlp, kv, vocabulary = 16384, 53248, 1024, 128256
    layer = (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp) // 8 + 2 * hidden
    weights = vocabulary * hidden // 8 + 7 * layer        # the first stage: the embedding counts as one of its eight
    assert memory["parameters"] == [pytest.approx(2 * weights / 2**20, abs=0.01)] * 3
    assert memory["gradients"] == [pytest.approx(4 * weights / 2**20, abs=0.01)] * 3
    assert memory["optimizer states"][0] == pytest.approx(12 * weights / 128 / 2**20, abs=0.01)
    assert "idle for 45 of 93 units" in output
