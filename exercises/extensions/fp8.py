"""fp8.patch: with every kind of scale, quantized bits are those of one process. Also who must agree, what is sent, and training.

Tensor cores multiply 8-bit floats twice as fast as bfloat16. But an 8-bit float has only two or three bits of fraction and a small
range, so numbers are divided by a scale first. --fp8 says how many numbers share a scale: a tensor, a row along the dimension that
the product sums over, or a block of 128 numbers of such a row. The scale is their largest magnitude, the amax, divided by the
largest 8-bit number: 448 in e4m3, for weights and activations, and 57,344 in e5m2, for gradients.

mx32 is MXFP8, by the rules of OCP's MX specification, section 6.3
(https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). 32 numbers share a scale, which is a
power of two and takes a byte (E8M0): 2 to the floor(log2 amax) - emax, where emax, the exponent of the largest number, is 8 in
e4m3 and 15 in e5m2. In e4m3 this brings the amax to 256 or more, but less than 512, and what is larger than 448 is clamped.
(NVIDIA's recipe, https://arxiv.org/abs/2506.08027, rounds the scale up instead, and has e4m3 for gradients, too.) Blackwell's
tensor cores multiply such numbers with their scales. Other devices cannot, so here a product with mx32 is a sum of products, like
one with blocks.

By hand: cut a row 1 2 3 | 4 over two ranks. One process finds the amax 4. By itself, the first rank would find 3 and get different
bits, without any error. So all ranks that share a scale must agree on the amax. With a scale per tensor, every cut separates
numbers that share one, and one number is all-reduced over tp. With a scale per row, only a cut along the sum does so (o_proj and
down_proj in forward, the others in backward), and one number per row is all-reduced. Blocks that a cut would cross are refused.

A tensor is quantized along both dimensions, because backward sums over the other one. A scale is multiplied with the sum of its
block's products, so the numbers of a block must be terms of one sum. The table compares the two copies of a million normally
distributed numbers in e4m3: how many bytes differ, and how many of the numbers for which they stand. The last column is the error
of one copy, relative to the norm:

| | bytes differ | numbers differ | error |
|---|---|---|---|
| tensor | 0% | 0% | 2.6% |
| row | 74% | 100% | 2.6% |
| block | 82% | 100% | 2.6% |
| mx32 | 35% | 0.9% | 2.9% |

With another power of two, most numbers keep their bits and change only their exponent: few are clamped, or too small for three
bits. Even so mx32 needs both copies, because the scales along one dimension are of no use in a sum along the other.

These stay out of 8 bits: masters and sums of gradients (an update would round to nothing), norms, softmax, embedding, head, and
whatever is sent.

To agree, each rank of tp sends this payload per layer and micro-batch, in bytes: tensor 4 x 28, row 4 x 7 x (tokens + hidden),
block and mx32 0. Simulated seconds per step on H100s, which cannot multiply mx32 in one product:

| | plain | --compile |
|---|---|---|
| bfloat16 | 1.12 | 1.04 |
| tensor | 1.45 | 0.97 |
| row | 1.43 | 0.95 |
| block | 9.03 | 7.68 |

    python tools/simulate exercise/fp8 8 --model llama-8b --dtype bfloat16 --zero 3 --tp 2 --seq_len 8192 --global_batch_size 8
        --micro_batch_size 1 --fp8 row

With rows, the layers' products take 0.27 s (0.54 s in bfloat16), quantizing takes 0.36 s, and adding and casting float32 results
0.21 s. If the last two were fused, they would take 0.17 s together: --compile simulates that, but torch does not compile these
functions. In total this is 1.56 times the time of bfloat16's products, or 0.81 times when fused; the planner's FLOAT8 assumes 0.6.

Loss of tiny, the mean of the last 20 of 300 steps with 512 tokens: bfloat16 2.380, tensor 2.364, row 2.383, blocks of 16 2.365,
mx32 2.384.
"""
import math
import re

import cases
import observe
import pytest
import toy
import torch
from harness import relative
from jobs import assert_refused
from steps import ROOT, clean_environment, run, step_dir

STEP = "step04_tp_sp"
SHAPE = cases.SHAPE | dict(head_dim=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2)     # so that blocks of 32 fit
KINDS = ["tensor", "row", "block", "mx32"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return cases.make(tmp_path_factory.mktemp("case"), **SHAPE) + " --dtype float32"


# ------------------------------------------------------------------------------------- who must agree, on a matrix
def same_bits_job(scaling, cut, agree):
    """Return whether this rank's part of a matrix has the same bits and the same scales as in the whole matrix."""
    import eight_bits
    import mesh
    import torch.distributed as dist
    with mesh.init_distributed():
        group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        whole = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).exp()
        same = True
        for dtype in (eight_bits.E4M3, eight_bits.E5M2):
            q, scale = eight_bits.quantize(whole, dtype, (scaling, 8))
            groups = {"row_group" if cut == 0 else "sum_group": group} if agree else {}
            mine, its_scale = eight_bits.quantize(whole.chunk(size, cut)[rank], dtype, (scaling, 8), **groups)
            expected = scale.float().expand(64, -1)
            expected = expected.chunk(size, cut)[rank] if cut == 0 or scaling in ("block", "mx32") else expected
            same &= torch.equal(mine.view(torch.uint8), q.view(torch.uint8).chunk(size, cut)[rank])
            same &= torch.equal(its_scale.float().expand(expected.shape), expected)
        return same


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scaling, cut, alone", [
    ("tensor", 0, False), ("tensor", 1, False),           # any cut divides the tensor
    ("row", 0, True), ("row", 1, False),                  # a cut between rows divides none of them
    ("block", 0, True), ("block", 1, True), ("mx32", 0, True), ("mx32", 1, True)])
def test_whoever_shares_a_scale_must_agree(pool, world, scaling, cut, alone):
    assert all(pool.call(same_bits_job, STEP, world=world, scaling=scaling, cut=cut, agree=True))
    assert all(pool.call(same_bits_job, STEP, world=world, scaling=scaling, cut=cut, agree=False)) == alone


def product_job(scaling):
    """Return the relative error of the product against a plain one of the dequantized numbers, and of that one against the exact
    product."""
    import eight_bits
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 96, generator=draw) for rows in (32, 40))
    a8, b8 = eight_bits.quantize(a, eight_bits.E5M2, (scaling, 16)), eight_bits.quantize(b, eight_bits.E4M3, (scaling, 16))

    def value(q, scale):
        return (q.double().unflatten(1, (scale.shape[1], -1)) * scale.float().unsqueeze(2)).flatten(1)
    plain, exact = value(*a8) @ value(*b8).T, a.double() @ b.double().T
    return float((eight_bits.product(*a8, *b8) - plain).norm() / plain.norm()), float((plain - exact).norm() / exact.norm())


@pytest.mark.parametrize("scaling", KINDS)
def test_a_product_is_that_of_what_the_numbers_stand_for(pool, scaling):
    off, rounded = pool.call(product_job, STEP, scaling=scaling)[0]
    assert off < 1e-6 and 0.01 < rounded < 0.1            # with two and three bits of fraction, each term is off by a few per cent


# ------------------------------------------------------------------------------------- MX, and a tensor's two copies
def mx_job(x, mistake):
    """Return (the numbers, the scales' bytes) for each type, with a mistake in how the scales are chosen."""
    import contextlib
    from unittest.mock import patch

    import eight_bits
    power_of_two, quantize = eight_bits.power_of_two, eight_bits.quantize
    planted = {None: contextlib.nullcontext(),
               "scale rounded up": patch.object(eight_bits, "power_of_two", lambda amax, dtype: 2 * power_of_two(amax, dtype)),
               "scale that clamps nothing": patch.object(eight_bits, "power_of_two", lambda amax, dtype: torch.exp2(
                   torch.log2(amax / torch.finfo(dtype).max).ceil())),
               "blocks along the other dimension": patch.object(eight_bits, "quantize", lambda x, *more: [
                   t.view(torch.uint8).T.contiguous().view(t.dtype) for t in quantize(x.T, *more)])}[mistake]
    with planted:
        made = [eight_bits.quantize(x, dtype, ("mx32", 8)) for dtype in (eight_bits.E4M3, eight_bits.E5M2)]
    return [(q.float().tolist(), scale.view(torch.uint8).tolist()) for q, scale in made]


def by_the_specification(row, fraction, bias, codes):
    """Quantize blocks of 32 with Python's numbers: list all 8-bit numbers, and take the nearest; of two, the even one."""
    numbers = [c / 2**fraction * 2.0 ** (1 - bias) if c < 2**fraction else
               (1 + c % 2**fraction / 2**fraction) * 2.0 ** ((c >> fraction) - bias) for c in range(codes)]
    emax, made, scales = math.frexp(numbers[-1])[1] - 1, [], []
    for block in (row[i:i + 32] for i in range(0, len(row), 32)):
        exponent = math.frexp(max(map(abs, block)))[1] - 1 - emax
        scales.append(exponent + 127)
        for x in block:
            away = [abs(abs(x) / 2.0**exponent - number) for number in numbers]
            nearest = [c for c in range(codes) if away[c] == min(away)]
            made.append(math.copysign(numbers[min(nearest, key=lambda c: c % 2)], x))
    return made, scales


@pytest.mark.parametrize("mistake", [None, "scale rounded up", "scale that clamps nothing", "blocks along the other dimension"])
def test_mx32_does_what_the_specification_says(pool, mistake):
    """Compare each number and scale; in one block the amax is a power of two, in one just below it, and one spans many powers."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    x[0, 5], x[1, 5], x[2, :32] = 4.0, 3.9999, 2.0 ** -torch.arange(32)
    for (q, scales), (fraction, bias, codes) in zip(pool.call(mx_job, STEP, x=x, mistake=mistake)[0], [(3, 7, 127), (2, 15, 124)]):
        right = [by_the_specification(row, fraction, bias, codes) for row in x.tolist()]
        assert ((q, scales) == tuple(map(list, zip(*right)))) == (mistake is None)


def copies_job(scaling):
    """Return the parts of the bytes and of the numbers that differ between the two copies of a matrix, and the error of one."""
    import eight_bits

    def value(q, scale):
        return (q.float().unflatten(1, (scale.shape[1], -1)) * scale.float().unsqueeze(2)).flatten(1)
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    one, other = (eight_bits.quantize(matrix, eight_bits.E4M3, (scaling, 128)) for matrix in (x, x.T))
    differ = [a != b.T for a, b in [(one[0].view(torch.uint8), other[0].view(torch.uint8)), (value(*one), value(*other))]]
    return [float(bits.double().mean()) for bits in differ] + [float((value(*one) - x).norm() / x.norm())]


@pytest.mark.parametrize("scaling", KINDS)
def test_the_table_of_the_two_copies(pool, scaling):
    row, = (line for line in __doc__.splitlines() if line.startswith(f"| {scaling} |") and "%" in line)
    shown = [float(cell) for cell in re.findall(r"([0-9.]+)%", row)]
    assert [100 * part for part in pool.call(copies_job, STEP, scaling=scaling)[0]] == pytest.approx(shown, abs=0.5, rel=0.03)


# ------------------------------------------------------------------------------------- in the trainer
def first_bits_job(argv):
    """Return what the first attention quantizes in the first forward pass: x, x.T, three weights, then the same for o_proj."""
    from unittest.mock import patch

    import eight_bits
    import train
    made, quantize = [], eight_bits.quantize

    def keep(*arguments):
        result = quantize(*arguments)
        if len(made) < 8:
            made.append(result[0].view(torch.uint8).clone())
        return result
    with patch.object(eight_bits, "quantize", keep):
        train.main(argv)
    return made


def parts_of(tp, rank):
    """Return, for each of the eight tensors, a function that cuts out this rank's part, along the dimension that is sharded, if
    any."""
    cut = [None, None, 0, 0, 0, 1, 0, 1]
    return [lambda x, dim=dim: x if dim is None else x.chunk(tp, dim)[rank % tp] for dim in cut]


@pytest.mark.parametrize("scaling", KINDS)
@pytest.mark.parametrize("world, tp, more", [(2, 2, ""), (4, 4, "--sp off"), (4, 2, "--zero 3")])
def test_bits_of_a_layer_are_those_of_one_process(pool, base, scaling, world, tp, more):
    flags = f"{base} --steps 1 --micro_batch_size 6 --fp8 {scaling} --fp8_block 8"
    one = pool.once((base, scaling), lambda: pool.call(first_bits_job, STEP, argv=flags.split())[0])
    ranks = pool.call(first_bits_job, STEP, world=world, argv=f"{flags} --tp {tp} {more}".split())
    for rank in range(tp):                                # only of the first dp rank: the others have other tokens
        for i, (part, bits) in enumerate(zip(parts_of(tp, rank), ranks[rank], strict=True)):
            assert torch.equal(bits, part(one[i])), (rank, i)


def without_agreement_job(argv, optimizer):
    from unittest.mock import patch

    import eight_bits
    quantize = eight_bits.quantize
    with patch.object(eight_bits, "quantize", lambda x, dtype, scaling, *groups: quantize(x, dtype, scaling)):
        return observe.observed_job(argv, optimizer)


@pytest.mark.parametrize("scaling, numbers", [("tensor", 28), ("row", 7 * (6 * 16 + 64)), ("block", 0), ("mx32", 0)])
@pytest.mark.parametrize("world, tp, more", [(2, 2, ""), (4, 2, "--sp off --zero 2"), (4, 4, "")])
def test_trains_as_one_process_and_sends_what_it_says(pool, base, scaling, numbers, world, tp, more):
    """Check losses to 1e-3, the first to 1e-5, since sums in another order flip a bit here and there; check the bytes of agreeing
    exactly."""
    flags = f"{base} --micro_batch_size 6 --fp8 {scaling} --fp8_block 8"
    one = pool.reference(STEP, flags)
    run = pool.train(STEP, f"{flags} --tp {tp} {more}", world, job=observe.observed_job)
    assert relative(run.losses[0], one.losses[0]) < 1e-5 and max(map(relative, run.losses, one.losses)) < 1e-3
    operations, per_rank = zip(*run.answers)
    assert observe.assert_all_meet(operations) > 0
    assert all(seen == formula for sent in per_rank for seen, formula in sent.values()), per_rank
    if "--sp" not in more:                                # 24 sequences in micro-batches of 6; all other sums cancel
        dp = world // tp
        sent = per_rank[0].get(("tp", "all_reduce"), (0, 0))[0]
        bare = pool.train(STEP, f"{flags} --tp {tp} {more}", world, job=without_agreement_job)
        assert sent - bare.answers[0][1]["tp", "all_reduce"][0] == 4 * numbers * 2 * (24 // dp // 6)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_agrees_again(pool, base, recompute):
    for scaling in ("tensor", "row"):
        flags = f"{base} --micro_batch_size 6 --fp8 {scaling} --tp 2"
        run = pool.train(STEP, f"{flags} --recompute {recompute}", 2, job=observe.observed_job)
        assert run.losses == pool.train(STEP, flags, 2).losses
        assert all(seen == formula for _, sent in run.answers for seen, formula in sent.values()), run.answers[0][1]


@pytest.mark.parametrize("scaling", KINDS)
def test_learns_as_bfloat16_does(pool, scaling):
    flags = "--steps 40 --seq_len 32 --micro_batch_size 16 --dtype bfloat16"
    plain = pool.reference(STEP, flags)
    eight = pool.train(STEP, f"{flags} --fp8 {scaling} --fp8_block 16", weights=False)
    assert plain.losses[-1] < 0.8 * plain.losses[0]
    assert relative(eight.losses[-1], plain.losses[-1]) < 0.03


def test_a_block_that_a_cut_crosses_is_refused(pool, base):
    assert_refused(pool, STEP, 4, f"{base} --micro_batch_size 2 --tp 4 --fp8 block --fp8_block 64",
                   "--fp8_block 64: must divide the length of a sum on one rank, 32; choose from 1, 2, 4, 8, 16, 32")
    assert_refused(pool, STEP, 4, f"{base} --micro_batch_size 3 --tp 4 --fp8 mx32",
                   "--fp8 mx32: 32 must divide the length of a sum on one rank, 48; choose a smaller --tp, "
                   "or --fp8 block --fp8_block 16")


# ------------------------------------------------------------------------------------- simulated
@pytest.mark.parametrize("scaling", KINDS)
def test_the_layers_products_are_simulated_in_8_bits(pool, scaling):
    """Check that fp8 keeps the number of FLOPs, and that the layers' FLOPs, six for each weight and token, are in 8 bits."""
    flags = "--dtype bfloat16 --tp 2 --fp8_block 32 --fp8"
    plain, eight = (toy.run(pool, STEP, 2, f"{flags} {how}", num_hidden_layers=1) for how in ("off", scaling))
    weights = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384
    for rank in range(2):
        done = [eight[rank].kernels[number] for what, number, *_ in eight[rank].notes if what == "compute"]
        assert eight[rank].flops == plain[rank].flops > 0
        in_8_bits = [kernel.flops for kernel in done if kernel.kind == "product" and kernel.dtype.startswith("float8")]
        assert sum(in_8_bits) == 6 * weights // 2 * 16 * 256
        assert not any(kernel.dtype.startswith("float8") for kernel in plain[rank].kernels)


@pytest.mark.parametrize("gpu, status", [("h100", 0), ("a100", 2)])
def test_a_gpu_without_8_bits_is_refused(gpu, status):
    command = [clean_environment()["PYTHON"], "tools/simulate", step_dir(STEP), "1", "--gpu", gpu, "--fp8", "row"]
    found = run(command, ROOT, timeout=120)
    assert found[0] == status, found
    assert status == 0 or found[1] == "error: --gpu a100: cannot multiply in 8 bits; choose another GPU\n"
