"""Tests on GPUs: every step on one, every technique over NCCL on several. Without GPUs these tests are skipped, and say so.

    make test                                                    # on a node of 8 GPUs they run with all the others
    GPU_TEST_SHARE=1 python -m pytest tests/test_gpus.py         # up to 8 ranks share a GPU; first run
                                                                 # `nvidia-cuda-mps-control -d`, or they take turns
    GPU_TESTS_ON=cpu python -m pytest tests/test_gpus.py         # the same runs over gloo, to see that the tests are right
    GPU_TEST_STEPS=5 GPU_TEST_RANKS=2 python -m pytest tests/test_gpus.py                # a first look: short runs, few ranks
    make gpu                                                     # a short run of these tests is part of its report

In float64, every training step of a run must equal that of one process to 1e-8, and so must the weights at the end. A
buffer that is reused too early, or a missing wait, would change the numbers by more than rounding does. Float64 does
not reach two kinds of kernels, which take only bfloat16: in float64, `--cp_mode` zigzag, ring and allgather compute
their blocks by the formula, and the experts run in a loop. So every layout runs in bfloat16, too, unless the GPU has
none (below compute capability 8.0). Then these runs are skipped.
"""
import json
import os
import random
import sys

import cases
import pytest
from fixtures import GPUS, VISIBLE
from harness import Pool, assert_same_run, relative
from jobs import blocks_job, capability_job, grouped_job, looped_job
from layouts import SCHEDULES, all_of_a_world
from steps import NAMES, ROOT, run

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
SHARED = os.environ.get("GPU_TEST_SHARE") == "1"
# Ranks that share a GPU are on different hosts for NCCL (see the worker in harness.py), so it sends through sockets. Its kernels,
# which wait for each other, must all fit on the GPU.
SHARING = dict(NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo", NCCL_MAX_CTAS="1", NCCL_NVLS_ENABLE="0") if SHARED else {}
LIMIT = 1000 if SHARED else 300                           # seconds
LARGE = (dict(hidden_size=512, intermediate_size=768, head_dim=64, vocab_size=4096) if DEVICE == "cuda" else
         dict(hidden_size=64, intermediate_size=96, head_dim=8, vocab_size=64))
DENSE = dict(num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, **LARGE)
SHAPES = {"dense": DENSE, "moe": DENSE | dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)}
STEPS, SEQ_LEN = (30, 256) if DEVICE == "cuda" else (6, 32)       # many steps, so that races show
STEPS, MOST_RANKS = int(os.environ.get("GPU_TEST_STEPS", STEPS)), int(os.environ.get("GPU_TEST_RANKS", 8))
FLAGS = f"--device {DEVICE} --seq_len {SEQ_LEN} --global_batch_size 24 --steps {STEPS} --lr 1e-3 --warmup 2 --grad_clip 0.5"
BLOCK_MODES = ("zigzag", "ring", "allgather")             # values of --cp_mode with flash kernels, which take only bfloat16


def need(ranks):
    if ranks > MOST_RANKS:
        pytest.skip(f"needs {ranks} ranks, GPU_TEST_RANKS is {MOST_RANKS}")
    if DEVICE == "cuda" and ranks > (8 * GPUS if SHARED else GPUS):
        pytest.skip(f"needs {ranks} GPUs, this machine has {GPUS}")


@pytest.fixture(scope="module")
def pool():
    visible = {} if VISIBLE is None else {"CUDA_VISIBLE_DEVICES": VISIBLE}
    pool = Pool(8, **SHARING, **(visible or {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(GPUS)))} if DEVICE == "cuda" else {}))
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    return {kind: f"{cases.make(folder / kind, tokens=SEQ_LEN * 100, **shape)} {FLAGS}" for kind, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def one_process(pool, flags):
    """Return a function that makes runs of one process, each when it is first asked for."""
    made = {}

    def one(kind, dtype):
        if (kind, dtype) not in made:
            made[kind, dtype] = pool.train("step08_5d", f"{flags[kind]} --micro_batch_size 6 --dtype {dtype}", timeout=LIMIT)
        return made[kind, dtype]
    return one


@pytest.fixture(scope="module")
def device(pool):
    """Return whether the GPU has bfloat16, and the bytes of its memory. A worker finds out, since this process sees no GPU."""
    need(1)
    return pool.call(capability_job, "step08_5d")[0] if DEVICE == "cuda" else (True, 0)


@pytest.fixture
def need_bfloat16(device):
    device[0] or pytest.skip("this GPU has no bfloat16")


@pytest.fixture
def dtype(request):
    """Return the type of the run. Skip the test if that is bfloat16 and the GPU has none."""
    if request.param == "bfloat16":
        request.getfixturevalue("need_bfloat16")
    return request.param


def assert_as_one_process(pool, flags, one_process, step, world, more, dtype, kind="dense"):
    need(world)
    one = one_process(kind, dtype)
    trained = pool.train(step, f"{flags[kind]} --dtype {dtype} {more}", world=world, timeout=LIMIT)
    if dtype == "float64":
        assert_same_run(trained, one, 1e-8, more)
    else:
        assert_about_the_same(trained, one, more)


def assert_about_the_same(trained, one, more):
    """Compare loosely: bfloat16 rounds every product, and AdamW turns that into different updates. Allow 2% in the losses, and 15%
    in the gradient norms of the first steps (later, a token that goes to another expert may change a norm by more)."""
    for name, steps, tolerance in (("losses", STEPS, 0.02), ("grad_norms", 6, 0.15)):
        worst = max(map(relative, getattr(trained, name)[:steps], getattr(one, name)[:steps]))
        assert worst <= tolerance, f"{more}: {name} differ by {worst:.3f}"


# ------------------------------------------------------------------------------------- one GPU
@pytest.mark.parametrize("compile", ["", "--compile"])
@pytest.mark.parametrize("step", NAMES)
def test_a_step_on_one_gpu(pool, flags, one_process, need_bfloat16, step, compile):
    assert_as_one_process(pool, flags, one_process, step, 1, f"--micro_batch_size 6 {compile}", "bfloat16")


@pytest.mark.parametrize("step", NAMES)
def test_a_step_on_one_gpu_exactly(pool, flags, one_process, step):
    assert_as_one_process(pool, flags, one_process, step, 1, "--micro_batch_size 3 --recompute selective", "float64")


@pytest.mark.parametrize("compile", ["", "--compile"])
@pytest.mark.parametrize("step", NAMES[6:])
def test_experts_on_one_gpu(pool, flags, need_bfloat16, step, compile):
    """Compare the grouped kernel with a loop over experts."""
    need(1)
    same = f"{flags['moe']} --micro_batch_size 6 --dtype bfloat16 --balance none"
    loop = pool.train(step, same, job=looped_job, weights=False, timeout=LIMIT)
    assert_about_the_same(pool.train(step, f"{same} {compile}", weights=False, timeout=LIMIT), loop, compile)


@pytest.mark.parametrize("counts", [[64, 0, 128, 32], [0, 0, 0, 0], [1, 250, 3, 2]])
def test_grouped_products_on_one_gpu(pool, need_bfloat16, counts):
    """Check experts that no token chose, up to all of them."""
    need(1)
    errors, = pool.call(grouped_job, "step08_5d", device=DEVICE, counts=counts)
    assert max(errors) < 1e-2, errors


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 2e-2)], indirect=["dtype"])
def test_attention_in_blocks_on_one_gpu(pool, dtype, tolerance, head_dim):
    """Check the kernels of context parallelism, or the formula in float32 on a GPU: a run on a single rank calls neither."""
    need(1)
    errors, = pool.call(blocks_job, "step08_5d", device=DEVICE, dtype=dtype, head_dim=head_dim)
    assert max(errors) < tolerance, errors


def test_profile_on_a_gpu(pool, flags, tmp_path):
    need(1)
    pool.train("step01_single_gpu", f"{flags['dense']} --steps 6 --profile {tmp_path}", weights=False)
    names = {"trace_rank0.json", *["memory_rank0.pickle"] * (DEVICE == "cuda")}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "trace_rank0.json").read_text())["traceEvents"]


@pytest.mark.skipif(DEVICE == "cpu" or not GPUS, reason="there is no GPU to compare with the simulated one")
@pytest.mark.parametrize("more", ["--recompute none", "--recompute full", "--zero 1"])
def test_peak_memory_is_the_simulated(pool, device, more):
    """Compare for a model so large that the memory that kernels need for themselves hardly counts: the first that fits."""
    has_bfloat16, memory = device
    for model in ("llama-1b", "qwen3-0.6b"):
        flags = (f"--model {model} --dtype {'bfloat16' if has_bfloat16 else 'float32'} --seq_len 1024 --global_batch_size 4 "
                 f"--micro_batch_size 1 --lr 1e-4 {more}")
        code, output = run([sys.executable, "tools/simulate", "8", "1", *flags.split()], ROOT, timeout=120)
        assert code == 0, output
        said = float(next(line for line in output.splitlines() if line.startswith("all ")).split()[2].replace(",", "")) / 1024
        if said < 0.85 * memory / 2**30:
            break
    else:
        pytest.skip(f"{model} takes {said:.1f} GiB, and this GPU has {memory / 2**30:.1f}")
    real = pool.train("step08_5d", f"{flags} --device cuda --steps 3", weights=False, timeout=LIMIT).lines[-1]["peak_memory_gib"]
    assert abs(real / said - 1) < 0.05, f"{real:.2f} GiB, tools/simulate says {said:.2f}"


# ------------------------------------------------------------------------------------- nccl
LAYOUTS = [
    *(("step02_dp", world, f"--dp_mode {mode} --bucket_mb 1 --micro_batch_size 3")
      for mode in ("naive", "overlap", "bucket") for world in (2, 4, 8)),
    *(("step03_zero", world, f"--zero {stage} --micro_batch_size 1") for stage in (1, 2, 3) for world in (2, 8)),
    *(("step03_zero", 8, f"--zero {stage} --zero_shard 4 --micro_batch_size 3") for stage in (1, 3)),
    *(("step04_tp_sp", world, f"--tp {world} --sp {sp} --micro_batch_size 6") for sp in ("on", "off") for world in (2, 4, 8)),
    ("step04_tp_sp", 8, "--tp 2 --zero 3 --micro_batch_size 3"),
    ("step04_tp_sp", 4, "--tp 4 --recompute selective --micro_batch_size 6"),
    *(("step05_cp", world, f"--cp {world} --cp_mode {mode} --micro_batch_size 6")
      for mode in (*BLOCK_MODES, "ulysses") for world in (2, 8)),
    ("step05_cp", 8, "--cp 4 --tp 2 --zero 3 --micro_batch_size 6"),
    *(("step06_pp", world, f"--pp {world} --schedule {schedule} --micro_batch_size 2")
      for schedule in SCHEDULES for world in (2, 4)),
    ("step06_pp", 8, "--pp 8 --schedule zerobubble --micro_batch_size 2"),
    ("step06_pp", 8, "--pp 4 --dp 2 --schedule interleaved --zero 2 --micro_batch_size 1"),
]
EXPERTS = [*((world, f"--ep {world} --micro_batch_size 3") for world in (2, 4, 8)),
           (8, "--ep 2 --tp 2 --zero 3 --micro_batch_size 3"), (8, "--ep 4 --pp 2 --schedule dualpipe --micro_batch_size 1")]
MIXES = random.Random(4).sample([(kind, more) for kind, more in all_of_a_world(8) if more.count(" 2 ") > 2], 8)


def in_precisions(layouts):
    return [(dtype, *layout) for layout in layouts for dtype in ("float64", "bfloat16")]


@pytest.mark.parametrize("dtype, step, world, more", in_precisions(LAYOUTS), indirect=["dtype"])
def test_a_technique_on_many_ranks(pool, flags, one_process, dtype, step, world, more):
    assert_as_one_process(pool, flags, one_process, step, world, more, dtype)


@pytest.mark.parametrize("dtype, world, more", in_precisions(EXPERTS), indirect=["dtype"])
def test_experts_on_many_ranks(pool, flags, one_process, dtype, world, more):
    assert_as_one_process(pool, flags, one_process, "step07_ep", world, more, dtype, kind="moe")


@pytest.mark.parametrize("dtype, kind, more", in_precisions(MIXES), indirect=["dtype"])
def test_dimensions_mixed(pool, flags, one_process, dtype, kind, more):
    assert_as_one_process(pool, flags, one_process, "step08_5d", 8, more, dtype, kind)


@pytest.mark.parametrize("compile", ["--tp 2 --micro_batch_size 6", "--pp 2 --dp 2 --zero 3 --micro_batch_size 6"])
def test_compiled_on_many_ranks(pool, flags, one_process, need_bfloat16, compile):
    assert_as_one_process(pool, flags, one_process, "step08_5d", 2 * compile.count(" 2 "), f"{compile} --compile", "bfloat16")


def test_a_checkpoint_goes_on_under_another_layout(pool, flags, one_process, tmp_path):
    need(8)
    saved = f"{flags['moe']} --dtype float64 --checkpoint {tmp_path} --save_every {STEPS // 2} --keep 9"
    one = one_process("moe", "float64")
    pool.train("step08_5d", f"{saved} --tp 2 --pp 2 --ep 2 --zero 3 --micro_batch_size 3", world=8, weights=False, timeout=LIMIT)
    (tmp_path / f"step_{STEPS:08d}").rename(tmp_path / "not_the_newest")
    trained = pool.train("step08_5d", f"{saved} --resume --ep 4 --zero 1 --micro_batch_size 3", world=4, timeout=LIMIT)
    assert len(trained.lines) == STEPS - STEPS // 2
    for line, ours in zip(trained.lines, one.lines[STEPS // 2:]):
        assert relative(line["loss"], ours["loss"]) <= 1e-8 and line["step"] == ours["step"]
