"""Kernels in Triton, each with a twin in torch. They run on a GPU, or without one in Triton's interpreter.

A kernel is the program of ONE block of threads. The grid sets how many blocks there are, and program_id says which one this is.
Triton deals a block of numbers to the block's warps, 32 threads each, neighbours to neighbours.
"""
import os

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"                                      # read when a kernel is defined

import triton
import triton.language as tl


# ------------------------------------------------------------------------------------------------- 1. copy
@triton.jit
def copy_kernel(x, y, n, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, STRIDED: tl.constexpr):
    # ROUNDS is coarsening: one program does the work of several, so its index arithmetic is done once for all, and
    # several loads are under way at a time. Too much of it leaves multiprocessors without a program.
    first = tl.program_id(0) * BLOCK * ROUNDS
    for i in tl.static_range(ROUNDS):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        if STRIDED:                                                           # in the order of a transposed matrix
            at = at % 32 * (n // 32) + at // 32
        # Memory comes in sectors of 32 bytes. `at` of 32 neighbouring threads are 32 neighbouring floats, four whole
        # sectors; or, strided, one float in each of 32 sectors.
        # The mask ends the last block. A warp with some threads masked takes as long as a whole one: that is divergence at its
        # mildest. (With an `if` whose sides both compute, the warp would run one after the other.)
        tl.store(y + at, tl.load(x + at, mask=inside), mask=inside)


def copy(x, block=1024, rounds=1, strided=False):                             # strided: for a multiple of 32 numbers
    y, n = torch.empty_like(x), x.numel()
    copy_kernel[(triton.cdiv(n, block * rounds),)](x, y, n, block, rounds, strided)
    return y


# ---------------------------------------------------------------------------------------------- 2. softmax
@triton.jit
def softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    # A row per program. The row stays in the registers of the program's threads from the load to the store, so the
    # maximum, the exponentials, the sum and the division move nothing.
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    numbers = tl.load(x + row + column, mask=column < columns, other=float("-inf"))
    power = tl.exp(numbers - tl.max(numbers, axis=0))
    tl.store(y + row + column, power / tl.sum(power, axis=0), mask=column < columns)


def softmax(x):                                                               # [rows, columns]
    y = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, y, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return y


def softmax_twin(x):
    power = (x - x.amax(-1, keepdim=True)).exp()
    return power / power.sum(-1, keepdim=True)


# ------------------------------------------------------------------------------------- 3. a product in tiles
@triton.jit
def matmul_kernel(a, b, c, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    # One tile of c per program. Its loads go to the multiprocessor's shared memory, and from there each number of a is used TILE_N
    # times, each of b TILE_M times. Larger tiles load less, until they no longer fit.
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in range(0, K, TILE_K):
        inner = k + tl.arange(0, TILE_K)
        of_a = tl.load(a + rows[:, None] * K + inner, mask=(rows[:, None] < M) & (inner < K), other=0.0)
        of_b = tl.load(b + inner[:, None] * N + columns, mask=(inner[:, None] < K) & (columns < N), other=0.0)
        total += tl.dot(of_a, of_b, input_precision="ieee")                   # with bfloat16, on the tensor cores
    tl.store(c + rows[:, None] * N + columns, total, mask=(rows[:, None] < M) & (columns < N))


def matmul(a, b, tile=32):                                                    # [M, K] x [K, N]; tile of 16 or more
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    matmul_kernel[(triton.cdiv(M, tile), triton.cdiv(N, tile))](a, b, c, M, N, K, tile, tile, tile)
    return c


# ------------------------------------------------------------------------------------ 4. RMSNorm and SwiGLU
@triton.jit
def rms_norm_kernel(x, weight, y, hidden, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside, row = column < hidden, tl.program_id(0) * hidden
    numbers = tl.load(x + row + column, mask=inside, other=0.0)
    scale = 1 / tl.sqrt_rn(tl.sum(numbers * numbers, axis=0) / hidden + eps)  # threads of a row meet here, in a tree
    tl.store(y + row + column, numbers * scale * tl.load(weight + column, mask=inside), mask=inside)


def rms_norm(x, weight, eps=1e-5):                                            # [tokens, hidden]
    y = torch.empty_like(x)
    rms_norm_kernel[(x.shape[0],)](x, weight, y, x.shape[1], eps, triton.next_power_of_2(x.shape[1]))
    return y


def rms_norm_twin(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@triton.jit
def swiglu_kernel(gate, up, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n)
    tl.store(y + at, g / (1 + tl.exp(-g)) * tl.load(up + at, mask=at < n), mask=at < n)


def swiglu(gate, up, block=1024):
    y, n = torch.empty_like(gate), gate.numel()
    swiglu_kernel[(triton.cdiv(n, block),)](gate, up, y, n, block)
    return y


def swiglu_twin(gate, up):
    return F.silu(gate) * up


# ------------------------------------------------------------------------------------- 5. the rotary step
@triton.jit
def rotary_kernel(x, cos, sin, y, heads, HALF: tl.constexpr):
    # One head of one token per program. Both halves are loaded once and rotated together; torch's cat would write them again.
    at = tl.arange(0, HALF)
    table = tl.program_id(0) // heads * 2 * HALF + at                         # the row of a token, the same for all its heads
    head = tl.program_id(0) * 2 * HALF + at
    a, b = tl.load(x + head), tl.load(x + head + HALF)
    c, s = tl.load(cos + table), tl.load(sin + table)                         # both halves of a row are equal
    tl.store(y + head, a * c - b * s)
    tl.store(y + head + HALF, b * c + a * s)


def rotary(x, cos, sin):                                                      # [seq, heads, head_dim], [seq, 1, head_dim]
    y = torch.empty_like(x)
    rotary_kernel[(x.shape[0] * x.shape[1],)](x, cos, sin, y, x.shape[1], x.shape[2] // 2)
    return y


def rotary_twin(x, cos, sin):                                                 # apply_rotary_emb in step 1
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


# ---------------------------------------------------------------------------------------- 6. flash attention
@triton.jit
def flash_kernel(q, k, v, out, lse, seq, keys, scale, HEAD: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr):
    # TILE queries of one head per program. They, their sums and their output stay on the chip while keys come by.
    queries, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, HEAD)
    head = tl.program_id(1)
    mine = (head * seq + queries[:, None]) * HEAD + column
    my_q = tl.load(q + mine, mask=queries[:, None] < seq, other=0.0)
    largest = tl.full((TILE,), float("-inf"), tl.float32)                     # the largest score of each query so far
    total = tl.zeros((TILE,), tl.float32)                                     # the sum of exp(score - largest)
    sum_of_v = tl.zeros((TILE, HEAD), tl.float32)                             # with the same weights
    # A causal block ends at its own diagonal. All its threads take this branch alike, so nothing diverges; only in
    # the block on the diagonal are some of a warp's scores masked, and computed in vain.
    end = tl.minimum((tl.program_id(0) + 1) * TILE, keys) if CAUSAL else keys
    for start in range(0, end, TILE):
        key = start + tl.arange(0, TILE)
        theirs = (head * keys + key[:, None]) * HEAD + column
        their_k = tl.load(k + theirs, mask=key[:, None] < keys, other=0.0)
        scores = tl.dot(my_q, tl.trans(their_k), input_precision="ieee") * scale
        seen = (key < keys) & (queries[:, None] >= key) if CAUSAL else (key < keys) & (queries[:, None] >= 0)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1))
        power = tl.exp(scores - now[:, None])
        shrink = tl.exp(largest - now)                                        # rescales the sums to the new largest score
        their_v = tl.load(v + theirs, mask=key[:, None] < keys, other=0.0)
        total = total * shrink + tl.sum(power, axis=1)
        sum_of_v = sum_of_v * shrink[:, None] + tl.dot(power, their_v, input_precision="ieee")
        largest = now
    tl.store(out + mine, sum_of_v / total[:, None], mask=queries[:, None] < seq)
    tl.store(lse + head * seq + queries, largest + tl.log(total), mask=queries < seq)


def flash(q, k, v, causal=True, tile=32):                                     # [heads, seq, head_dim]; k and v: [heads, keys, ...]
    (heads, seq, head_dim), keys = q.shape, k.shape[1]
    out, lse = torch.empty_like(q), q.new_empty(heads, seq)
    flash_kernel[(triton.cdiv(seq, tile), heads)](q, k, v, out, lse, seq, keys, head_dim**-0.5, head_dim, tile, causal)
    return out, lse


@triton.jit
def flash_backward_keys_kernel(q, k, v, grad, lse, delta, grad_k, grad_v, seq, scale, HEAD: tl.constexpr, TILE: tl.constexpr):
    # TILE keys of one head per program; the queries that see them come by. It needs nothing of other keys, because lse already
    # accounts for all of them. (That is why a ring of ranks can go backward block by block.)
    keys, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, HEAD)
    head = tl.program_id(1)
    mine, there = (head * seq + keys[:, None]) * HEAD + column, keys[:, None] < seq
    my_k, my_v = tl.load(k + mine, mask=there, other=0.0), tl.load(v + mine, mask=there, other=0.0)
    sum_k, sum_v = tl.zeros((TILE, HEAD), tl.float32), tl.zeros((TILE, HEAD), tl.float32)
    for start in range(tl.program_id(0) * TILE, seq, TILE):                   # from the diagonal on
        query = start + tl.arange(0, TILE)
        theirs, here = (head * seq + query[:, None]) * HEAD + column, query[:, None] < seq
        their_q, their_grad = tl.load(q + theirs, mask=here, other=0.0), tl.load(grad + theirs, mask=here, other=0.0)
        row = head * seq + query
        scores = tl.dot(their_q, tl.trans(my_k), input_precision="ieee") * scale
        seen = here & (query[:, None] >= keys)
        share = tl.where(seen, tl.exp(scores - tl.load(lse + row, mask=query < seq, other=0.0)[:, None]), 0.0)
        sum_v += tl.dot(tl.trans(share), their_grad, input_precision="ieee")
        of_share = tl.dot(their_grad, tl.trans(my_v), input_precision="ieee")
        of_score = share * (of_share - tl.load(delta + row, mask=query < seq, other=0.0)[:, None]) * scale
        sum_k += tl.dot(tl.trans(of_score), their_q, input_precision="ieee")
    tl.store(grad_k + mine, sum_k, mask=there)
    tl.store(grad_v + mine, sum_v, mask=there)


@triton.jit
def flash_backward_queries_kernel(q, k, v, grad, lse, delta, grad_q, seq, scale, HEAD: tl.constexpr, TILE: tl.constexpr):
    # The same shares again, the other way round: TILE queries stay, and their keys come by.
    queries, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, HEAD)
    head = tl.program_id(1)
    mine, there = (head * seq + queries[:, None]) * HEAD + column, queries[:, None] < seq
    my_q, my_grad = tl.load(q + mine, mask=there, other=0.0), tl.load(grad + mine, mask=there, other=0.0)
    my_lse = tl.load(lse + head * seq + queries, mask=queries < seq, other=0.0)
    my_delta = tl.load(delta + head * seq + queries, mask=queries < seq, other=0.0)
    sum_q = tl.zeros((TILE, HEAD), tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * TILE, seq), TILE):
        key = start + tl.arange(0, TILE)
        theirs, here = (head * seq + key[:, None]) * HEAD + column, key[:, None] < seq
        their_k, their_v = tl.load(k + theirs, mask=here, other=0.0), tl.load(v + theirs, mask=here, other=0.0)
        scores = tl.dot(my_q, tl.trans(their_k), input_precision="ieee") * scale
        share = tl.where(queries[:, None] >= key, tl.exp(scores - my_lse[:, None]), 0.0)
        of_share = tl.dot(my_grad, tl.trans(their_v), input_precision="ieee")
        sum_q += tl.dot(share * (of_share - my_delta[:, None]) * scale, their_k, input_precision="ieee")
    tl.store(grad_q + mine, sum_q, mask=there)


def flash_backward(q, k, v, out, lse, grad, tile=32):
    """Return the gradients of q, k and v, for causal attention."""
    (heads, seq, head_dim), grads = q.shape, [torch.empty_like(q) for _ in range(3)]
    delta = (out * grad).sum(-1)                                              # sum(g y) in softmax's y (g - sum(g y))
    grid, scale = (triton.cdiv(seq, tile), heads), head_dim**-0.5
    flash_backward_queries_kernel[grid](q, k, v, grad, lse, delta, grads[0], seq, scale, head_dim, tile)
    flash_backward_keys_kernel[grid](q, k, v, grad, lse, delta, grads[1], grads[2], seq, scale, head_dim, tile)
    return grads


def attention_twin(q, k, v):
    scores = q @ k.mT * q.shape[-1]**-0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    return softmax_twin(scores) @ v, scores.logsumexp(-1)
