"""Time the kernels on a GPU, beside torch: step by step, compiled, and its own fused operation.

    python exercises/kernels/timed.py              # prints the table of README.md

Apart from those of attention, inputs and outputs are larger than the L2 cache (small tables and weights aside), so their numbers
come from global memory. All are float32, and so are the products.
"""
import torch
import torch.nn.functional as F
from triton.testing import do_bench

import kernels

ROWS, COLUMNS, SIZE, HEADS, SEQ, DIM = 16384, 4096, 4096, 32, 4096, 64


def cases():
    """Yield name, bytes that must move, FLOPs, our kernel, its twin step by step, and torch's own (or None)."""
    random = lambda *shape: torch.randn(shape, device="cuda")
    x, y, weight, whole = random(ROWS, COLUMNS), random(ROWS, COLUMNS), random(COLUMNS), 4 * ROWS * COLUMNS
    yield "copy", 2 * whole, 0, lambda: kernels.copy(x), None, lambda: torch.clone(x)
    yield "copy, 4 rounds", 2 * whole, 0, lambda: kernels.copy(x, rounds=4), None, None
    yield "copy, strided", 2 * whole, 0, lambda: kernels.copy(x, strided=True), None, None
    yield "softmax", 2 * whole, 0, lambda: kernels.softmax(x), lambda: kernels.softmax_twin(x), lambda: x.softmax(-1)
    yield ("RMSNorm", 2 * whole, 0, lambda: kernels.rms_norm(x, weight), lambda: kernels.rms_norm_twin(x, weight),
           lambda: F.rms_norm(x, (COLUMNS,), weight, 1e-5))
    yield "SwiGLU", 3 * whole, 0, lambda: kernels.swiglu(x, y), lambda: kernels.swiglu_twin(x, y), None
    turned, angle = x.view(ROWS, -1, 128), random(ROWS, 1, 64).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    yield "rotary", 2 * whole, 0, lambda: kernels.rotary(turned, cos, sin), lambda: kernels.rotary_twin(turned, cos, sin), None
    a, b = random(SIZE, SIZE), random(SIZE, SIZE)
    for tile in 16, 32, 64:
        yield (f"matmul, tiles of {tile}", 3 * 4 * SIZE**2, 2 * SIZE**3, lambda: kernels.matmul(a, b, tile), None,
               (lambda: a @ b) if tile == 16 else None)
    q, k, v, grad = (random(HEADS, SEQ, DIM) for _ in range(4))
    flops = 4 * HEADS * SEQ * SEQ / 2 * DIM                                   # half the scores, because of the causal mask
    yield ("flash attention", 4 * 4 * q.numel(), flops, lambda: kernels.flash(q, k, v), lambda: kernels.attention_twin(q, k, v)[0],
           lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]

    def backward(out):
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
    out, lse = kernels.flash(q, k, v)
    yield ("its backward", 8 * 4 * q.numel(), 2.5 * flops, lambda: kernels.flash_backward(q, k, v, out, lse, grad),
           backward(kernels.attention_twin(*leaves)[0]), backward(F.scaled_dot_product_attention(*leaves, is_causal=True)))


def microseconds(call):
    return f"{do_bench(call, warmup=10, rep=60, return_mode='median') * 1e3:,.0f}" if call else ""


def table():
    """Yield the rows of a Markdown table."""
    yield "| kernel | ours, µs | GB/s | TFLOP/s | torch, step by step, µs | the same, compiled | torch's own |"
    yield "|---|---|---|---|---|---|---|"
    for name, moved, flops, ours, twin, library in cases():
        found = microseconds(ours)
        seconds = float(found.replace(",", "")) / 1e6
        compiled = microseconds(torch.compile(twin)) if twin and name != "its backward" else ""
        rates = f"{moved / seconds / 1e9:,.0f} | {flops / seconds / 1e12:.1f}" if flops else f"{moved / seconds / 1e9:,.0f} | "
        yield f"| {name} | {found} | {rates} | {microseconds(twin)} | {compiled} | {microseconds(library)} |"


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    for row in table():
        print(row, flush=True)
