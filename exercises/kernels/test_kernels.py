"""Tests of the kernels. `make kernels` runs them; `make test` does not, because they need Triton."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fixtures import VISIBLE

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "step05_cp")]
os.environ.pop("CUDA_VISIBLE_DEVICES")                    # fixtures.py has hidden the GPUs from other tests
if VISIBLE is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = VISIBLE
import kernels
from context_parallel import update_out_and_lse
from model import rotary_tables, apply_rotary_emb
from readme import broken_links

counts = None if kernels.DEVICE == "cuda" else __import__("count")
in_the_interpreter = pytest.mark.skipif(kernels.DEVICE == "cuda", reason="a GPU has no interpreter to count in")
README = (HERE / "README.md").read_text()


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(kernels.DEVICE)


@pytest.mark.parametrize("block, rounds", [(32, 1), (128, 4), (1024, 1)])
def test_copy(block, rounds):
    x = random(37, 32)
    assert torch.equal(kernels.copy(x, block, rounds), x) and torch.equal(kernels.copy(x, block, rounds, strided=True), x)


@pytest.mark.parametrize("columns", [1, 33, 128])
def test_softmax(columns):
    x = 30 * random(5, columns)
    torch.testing.assert_close(kernels.softmax(x), x.softmax(-1))
    torch.testing.assert_close(kernels.softmax_twin(x), x.softmax(-1))


@pytest.mark.parametrize("tile", [16, 32])
def test_matmul(tile):
    a, b = random(40, 70), random(70, 33)
    torch.testing.assert_close(kernels.matmul(a, b, tile), a @ b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("hidden", [48, 64])
def test_rms_norm_and_swiglu(hidden):
    x, y, weight = random(7, hidden), 3 * random(7, hidden), random(hidden)
    torch.testing.assert_close(kernels.rms_norm(x, weight), F.rms_norm(x, (hidden,), weight, 1e-5))
    torch.testing.assert_close(kernels.rms_norm_twin(x, weight), F.rms_norm(x, (hidden,), weight, 1e-5))
    torch.testing.assert_close(kernels.swiglu(x, y, block=64), kernels.swiglu_twin(x, y))


def test_rotary():
    """Compare with apply_rotary_emb of step 1, with its tables."""
    from config import PRESETS
    config = PRESETS["tiny"]
    cos, sin = (t.to(kernels.DEVICE) for t in rotary_tables(torch.arange(13), config, torch.float32))
    x = random(13, config.num_attention_heads, config.head_dim)
    torch.testing.assert_close(kernels.rotary(x, cos, sin), apply_rotary_emb(x, cos, sin))
    torch.testing.assert_close(kernels.rotary_twin(x, cos, sin), apply_rotary_emb(x, cos, sin))


@pytest.mark.parametrize("seq", [32, 45, 96])
def test_flash(seq):
    q, k, v = random(3, 2, seq, 16)
    out, lse = kernels.flash(q, k, v)
    for expected in (F.scaled_dot_product_attention(q, k, v, is_causal=True), kernels.attention_twin(q, k, v)[0]):
        torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, kernels.attention_twin(q, k, v)[1])


@pytest.mark.parametrize("seq", [32, 45, 96])
def test_flash_backward(seq):
    q, k, v, grad = random(4, 2, seq, 16)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    expected = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)
    q, k, v = q.detach(), k.detach(), v.detach()
    for found, wanted in zip(kernels.flash_backward(q, k, v, *kernels.flash(q, k, v), grad), expected):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_what_the_ring_of_step_5_merges():
    """Compute each half of the keys by itself, then merge: the kernel does the same from tile to tile."""
    q, k, v = random(3, 2, 64, 16)
    out, lse = kernels.flash(q, k[:, :32].contiguous(), v[:, :32].contiguous(), causal=False)
    update_out_and_lse(out, lse, *kernels.flash(q, k[:, 32:].contiguous(), v[:, 32:].contiguous(), causal=False))
    whole, whole_lse = kernels.flash(q, k, v, causal=False)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    torch.testing.assert_close(whole, F.scaled_dot_product_attention(q, k, v))


@in_the_interpreter
def test_bytes_are_those_of_the_formulas():
    for name, kernel, _, inputs, loads, stores in counts.cases():
        with counts.counted() as seen:
            kernel(*inputs)
        assert (seen.loaded, seen.stored) == (loads, stores), name


@in_the_interpreter
def test_what_strides_and_ragged_ends_cost():
    def seen(n, **how):
        with counts.counted() as found:
            kernels.copy(random(n), **how)
        return found
    whole, strided = seen(4096), seen(4096, strided=True)
    assert (whole.loaded, strided.sectors) == (strided.loaded, 8 * whole.sectors)
    assert whole.mixed == 0 and seen(4096 + 5).mixed == 2                     # one warp, in its load and its store
    assert seen(4096, block=128, rounds=8).loaded == whole.loaded


@in_the_interpreter
def test_the_readme_has_what_is_counted():
    assert "\n".join(counts.table()) in README


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_what_torch_compile_writes():
    said = subprocess.run([sys.executable, HERE / "compiled.py"], capture_output=True, text=True, timeout=600)
    forward = said.stdout.split("backward\n")[0]
    assert said.returncode == 0 and "x mm" in forward and "x _scaled_dot_product_flash_attention" in forward, said.stderr + said.stdout
    fused = [line for line in forward.splitlines() if "fused" in line and "flash_attention" not in line]
    assert all(any(what in line for line in fused) for what in ("rsqrt", "cat", "silu")), "the norm, rotary, SwiGLU"
    assert any("add" in line and "rsqrt" in line for line in fused[1:]), "the residual sum with the second norm"


def test_the_readme_shows_lines_that_are_there():
    assert broken_links(README, HERE) == []
    source = (HERE / "kernels.py").read_text()
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        assert all(line in source for line in block.splitlines() if line.strip() != "..."), block
