"""The ladder of step 5: every sequence cut over ranks. Each test is a rung; exercise.py says how they are used.

In all rungs with attention a sequence has 12 tokens, in one head of size 1. Every query is 1, and the key of token t is the
logarithm of WEIGHTS[t], so that exp(score) is WEIGHTS[t]: 1 1 2 4 8 ..., each as much as all before it together. The value of
token t is t. So the output of token t is its own value and the output before it, half and half: t - 1 + 1 / 2**t. The gradient of
this output is 2**t, which is the sum of the weights that it sees: so each query that sees token s adds WEIGHTS[s] to the gradient
of its value.
"""
from types import SimpleNamespace

import layouts
import pytest
from exercise import rung
from observe import check

STEP = "step05_cp"
TOKENS, RANKS = 12, 3
WEIGHTS = [1, *(2**t for t in range(TOKENS - 1))]
NAMES = ["output", "gradient of q", "gradient of k", "gradient of v"]
HANGS = 20                                                # seconds: ranks that wait for each other are ended


# ------------------------------------------------------------------------------------------------ on every rank
def positions_of(rank, mode, seq_len, cp):
    import context_parallel
    mesh, args = SimpleNamespace(get_local_rank=lambda name: rank), SimpleNamespace(seq_len=seq_len, cp=cp, cp_mode=mode)
    return context_parallel.local_positions(mesh, args)


def attended(core, positions):
    """Output and gradients of q, k and v of the tokens at these positions; core takes [batch, seq, heads, head_dim]."""
    import torch

    def column(numbers):
        return torch.tensor([float(numbers[t]) for t in positions], dtype=torch.float64).view(1, -1, 1, 1)
    q, k, v = column([1] * TOKENS), column(WEIGHTS).log(), column(range(TOKENS))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = core(*leaves)
    yield out.flatten().tolist()
    out.backward(column([2**t for t in range(TOKENS)]))
    yield from (leaf.grad.flatten().tolist() for leaf in leaves)


def attention_job(mode, backward):
    """This rank's positions; their outputs and, with backward, gradients; what was under way while each kernel ran."""
    from unittest.mock import patch

    import context_parallel
    import torch.distributed as dist
    from unforgiving import unforgiving
    dist.init_process_group("gloo")
    positions = positions_of(dist.get_rank(), mode, TOKENS, dist.get_world_size()).tolist()
    kernel = "flash_backward" if backward else "flash"
    compute, busy = getattr(context_parallel, kernel), []
    with unforgiving() as under_way:
        def watched(*args):
            busy.append(len(under_way))
            return compute(*args)
        with patch.object(context_parallel, kernel, watched):
            found = attended(context_parallel.in_blocks(mode, dist.group.WORLD), positions)
            found = list(found) if backward else [next(found)]
    return positions, found, busy


# ------------------------------------------------------------------------------------------------ of all ranks
def assert_attention(answers):
    """What ranks have found for their tokens is what one process finds for all."""
    from torch.nn.functional import scaled_dot_product_attention

    def core(*qkv):
        q, k, v = (t.transpose(1, 2) for t in qkv)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    expected = list(attended(core, range(TOKENS)))
    for rank, (positions, found, *_) in enumerate(answers):
        for name, numbers, right in zip(NAMES, found, expected):
            right = [right[t] for t in positions]
            assert numbers == pytest.approx(right, rel=1e-9), \
                f"the {name} of rank {rank}'s tokens {positions} is {shown(numbers)}, not {shown(right)}"


def shown(numbers):
    return "[" + ", ".join(f"{number:.6g}" for number in numbers) + "]"


def assert_overlap(answers):
    for rank, (_, _, busy) in enumerate(answers):
        assert all(busy[:-1]), (f"rank {rank} had {busy} operations under way while it worked on its blocks: but for the last "
                                f"block, the next keys and values should be on their way meanwhile")


# ------------------------------------------------------------------------------------------------ the rungs
def positions_job():
    return {(mode, cp): [positions_of(rank, mode, 4 * cp, cp).tolist() for rank in range(cp)]
            for mode in ("ring", "zigzag", "allgather", "ulysses") for cp in (1, 2, 3)}


@rung({"context_parallel.py": ["local_positions"]}, hints="""
    How many tokens does a rank have, and in how many chunks? In ring and ulysses it is one chunk, the rank-th of cp. In
    zigzag and allgather it is two, so that a rank has an early one, which sees little, and a late one, which sees much.

    `torch.arange(args.seq_len).chunk(n)` is a tuple of n tensors of positions. `mesh.get_local_rank("cp")` is this rank's
    number among the ranks of cp.

    ring and ulysses: `torch.arange(args.seq_len).chunk(args.cp)[rank]`. The other two: with `chunks =
    torch.arange(args.seq_len).chunk(2 * args.cp)` it is `torch.cat((chunks[rank], chunks[-1 - rank]))`.""")
def test_which_tokens_are_mine(pool):
    """`local_positions` is a tensor of the places in the sequence that are this rank's, in rising order. In ring and ulysses:
    of cp equal chunks the one with the rank's number. In zigzag and allgather: of 2 cp chunks the one with the rank's number
    from the start, and the one with this number from the end."""
    ring = {1: [[0, 1, 2, 3]], 2: [[0, 1, 2, 3], [4, 5, 6, 7]], 3: [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]}
    zigzag = {1: [[0, 1, 2, 3]], 2: [[0, 1, 6, 7], [2, 3, 4, 5]], 3: [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]}
    found, = pool.call(positions_job, STEP)
    for (mode, cp), ranks in found.items():
        expected = (ring if mode in ("ring", "ulysses") else zigzag)[cp]
        assert ranks == expected, f"{mode}, {4 * cp} tokens on {cp} ranks: the ranks have {ranks}, not {expected}"


def merge_job():
    """Three merges, each of two queries with outputs of two numbers: what became of the output and of the log-sum-exp."""
    import context_parallel
    import torch

    def merged(first, first_lse, second, second_lse):
        def output(pair):
            return torch.tensor([[x, 10 * x] for x in pair], dtype=torch.float64).view(1, 1, 2, 2)

        def logs(pair):
            return torch.tensor(pair, dtype=torch.float64).view(1, 1, 2)
        out, lse = output(first), logs(first_lse)
        context_parallel.merge(out, lse, output(second), logs(second_lse))
        return out.flatten().tolist(), lse.flatten().tolist()
    from math import inf, log
    return (merged([15, 1], [log(2), log(1)], [37.5, 3], [log(8), log(1)]), merged([0, 0], [-inf, -inf], [5, 6], [log(3), 0]),
            merged([1, 1], [1000, -1000], [2, 2], [1000 + log(3), -1000 + log(3)]))


@rung({"context_parallel.py": ["merge"]}, hints="""
    The output of a block is a mean of values, and exp(lse) is the sum of its weights. The mean over both blocks is the mean
    of the two means, weighted by these sums: (2 * 15 + 8 * 37.5) / (2 + 8) = 33.

    exp(lse) can be too large for a number. Find the new lse first, by `torch.logaddexp(lse, block_lse)`. Then the weights
    are exp(lse - new) and exp(block_lse - new): never above 1, and their sum is 1.

    lse is [batch, heads, seq], out has one dimension more, so the weights need `.unsqueeze(-1)`. Change the given tensors in
    place: `out.mul_(weight).add_(block_out * block_weight)`, and after it `lse.copy_(new)`.""")
def test_two_blocks_of_softmax(pool):
    """`merge` puts the outputs and the log-sum-exps (lse) of one attention over two blocks of keys together, in place: `out`
    and `lse` are then those over both blocks. A mean of 15 with weights of sum 2, and a mean of 37.5 with weights of sum 8,
    are a mean of 33 with weights of sum 10. A block that has seen no key yet has lse -inf."""
    from math import log
    (plain, plain_lse), (first, first_lse), (huge, huge_lse) = pool.call(merge_job, STEP)[0]
    assert plain == pytest.approx([33, 330, 2, 20]), f"two queries with outputs of two numbers each: {plain}, not [33, 330, 2, 20]"
    assert plain_lse == pytest.approx([log(10), log(2)]), f"lse is {plain_lse}, not [log(10), log(2)] = {[log(10), log(2)]}"
    assert first == pytest.approx([5, 50, 6, 60]), f"merged into nothing (lse -inf), [5, 50, 6, 60] became {first}"
    assert first_lse == pytest.approx([log(3), 0]), f"merged into nothing (lse -inf), lse is {first_lse}, not {[log(3), 0]}"
    assert huge == pytest.approx([1.75, 17.5, 1.75, 17.5]), \
        f"with lse near 1000 and -1000, the outputs are {huge}, not [1.75, 17.5, 1.75, 17.5]: exp(1000) is inf and exp(-1000) is 0"
    assert huge_lse == pytest.approx([1000 + log(4), -1000 + log(4)]), f"lse near 1000 and -1000 became {huge_lse}"


def visible_job():
    """{(mode, rank, source): which queries may see which keys, by their positions and by `visible`, as rows of 0 and 1}"""
    import context_parallel
    import torch

    def rows(matrix):
        return " ".join("".join("01"[int(x)] for x in row) for row in matrix)
    found = {}
    for mode in ("ring", "zigzag"):
        places = [positions_of(rank, mode, TOKENS, RANKS) for rank in range(RANKS)]
        for rank, mine in enumerate(places):
            for source, theirs in enumerate(places):
                by_visible, block = torch.zeros(len(mine), len(theirs)), context_parallel.visible(rank, source, mode, len(mine))
                if block:
                    queries, keys, causal = block
                    area = torch.ones_like(by_visible[queries, keys])
                    by_visible[queries, keys] = area.tril() if causal else area
                found[mode, rank, source] = rows(mine.unsqueeze(1) >= theirs), rows(by_visible), block is None
    return found


@rung({"context_parallel.py": ["visible"]}, hints="""
    A query sees the keys at its own position and before it. Draw the positions of two ranks on paper, queries as rows and
    keys as columns. Among a rank's own tokens it is the usual triangle, since they lie in rising order.

    In ring all tokens of a rank before lie before all of mine, and those of a rank behind lie behind. In zigzag the early
    chunks lie in the order of the ranks, and the late chunks the other way round. Which of the four pairs of chunks are
    visible, where source < rank, and where source > rank?

    source == rank: (every, every, True), where every = slice(None). ring: (every, every, False) if source < rank, else
    None. Otherwise: source < rank, (every, early, False); else (late, every, False), with early = slice(0, length // 2) and
    late = slice(length // 2, None).""")
def test_who_sees_whom(pool):
    """`visible(rank, source, mode, length)` says which queries of rank see which keys of source, each of which has `length`
    tokens: (a slice of the queries, a slice of the keys, whether only up to the diagonal), or None if no query sees a key.
    Every mode but "ring" has zigzag's chunks."""
    found, = pool.call(visible_job, STEP)
    for (mode, rank, source), (expected, came, nothing) in found.items():
        where = f"{mode}, queries of rank {rank} as rows, keys of rank {source} as columns"
        assert came == expected, f"{where}: visible says {came}, by the positions it is {expected}"
        assert nothing == ("1" not in expected), f"{where}: None is wanted where nothing is visible, and only there"


def gather_job():
    """What `gather` returns on this rank, of keys and values that say whose they are: 10 for rank 1, 20 for rank 2, 100 more
    for values."""
    import context_parallel
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    k = 10.0 * dist.get_rank() + torch.arange(2.0).view(1, 1, 2, 1)
    every = context_parallel.gather(k, k + 100, dist.group.WORLD)
    return [kv.flatten(1).tolist() for kv in every]


@rung({"context_parallel.py": ["gather", "GatherAttention.forward"]}, hints="""
    Keys and values of all ranks come in one collective. Then a rank goes through the ranks as sources: what of this
    source's keys do my queries see? Everything for one source is there already: `visible` and `add_block`.

    `gather`: `torch.stack((k, v))` is one tensor; `dist.all_gather_into_tensor(every, kv, group=group)` fills a tensor that
    is group.size() times as long in its first dimension; `every.chunk(group.size())` are the ranks' parts. `forward`: begin
    with `out, lse = no_block(q)`.

    For source, kv in enumerate(gather(k, v, group)): `add_block(out, lse, q, kv, visible(group.rank(), source, mode,
    q.shape[2]))`. Then `out = out.type_as(q)`; for backward `ctx.save_for_backward(q, k, v, out, lse)` and `ctx.mode,
    ctx.group = mode, group`; return out.""")
def test_all_keys_at_once(pool):
    """`gather` returns a list: of each rank its keys and values, stacked, [2, batch, heads, seq/cp, head_dim].
    `GatherAttention.forward` returns the attention of this rank's queries to the keys of all ranks, one block of keys after
    the other, and saves for backward q, k, v, the output and its log-sum-exp."""
    expected = [[[10 * rank, 10 * rank + 1], [10 * rank + 100, 10 * rank + 101]] for rank in range(RANKS)]
    for rank, every in enumerate(pool.call(gather_job, STEP, world=RANKS, timeout=HANGS)):
        assert every == expected, f"on rank {rank}, of ranks with keys 0 1, 10 11 and 20 21, values 100 more, gather is {every}"
    assert_attention(pool.call(attention_job, STEP, world=RANKS, timeout=HANGS, mode="allgather", backward=False))


@rung({"context_parallel.py": ["block_gradients", "GatherAttention.backward"]}, hints="""
    A probability is exp(score - lse) with the lse over all keys. So if `flash_backward` is given the final output and the
    final lse, what it returns for a block of keys are exact terms of the gradients, and only have to be added up. Whose
    gradients does a rank have in the end that it has to give away?

    `block_gradients`: cut grad_out, q, out and lse to the block's queries and kv to its keys, [:, :, rows] and [:, :, :,
    columns], and call `flash_backward` (lse.contiguous()). Without a block it returns nothing. `backward`: gather again, and
    let `add_gradients` add each block's terms to grad_q and to the part of a tensor [2 cp, ...] that is the source's.

    grads = zeros of [2 * cp, *k.shape] in lse.dtype; for source, (kv, grad_kv) in enumerate(zip(gather(k, v, ctx.group),
    grads.chunk(cp))): add_gradients(grad_q, grad_kv, block_gradients(grad_out, q, kv, out, lse, block), block). Then
    `dist.reduce_scatter_tensor(mine, grads, group=ctx.group)` with mine like grads[:2]; return grad_q, grad_k, grad_v (each
    .type_as(q)), None, None.""")
def test_gradients_of_all_keys(pool):
    """`block_gradients` returns what a block adds to the gradients of q, k and v. `GatherAttention.backward` returns the
    gradients of q, and those of this rank's k and v, to which all ranks have added. (The value of token s has the gradient
    WEIGHTS[s] times the number of tokens from s on: 12, 11, 20, 36, 64 ...)"""
    assert_attention(pool.call(attention_job, STEP, world=RANKS, timeout=HANGS, mode="allgather", backward=True))


def pass_on_job():
    """What `pass_on` brings to this rank of a tensor that is full of its sender's rank, though the rank goes on writing to other
    memory meanwhile; and how much was under way when `pass_on` had returned."""
    import context_parallel
    import torch
    import torch.distributed as dist
    from unforgiving import unforgiving
    dist.init_process_group("gloo")
    with unforgiving() as under_way:
        tensor = torch.full((2, 3), float(dist.get_rank())).T           # not contiguous
        receive = context_parallel.pass_on(tensor, dist.group.WORLD)
        started = len(under_way)
        came = receive()
        return list(came.shape), came.flatten().tolist(), started


@rung({"context_parallel.py": ["pass_on", "RingAttention.forward"]}, hints="""
    A rank sends to the next one of the ring and receives from the one before. Both are started before anybody waits:
    otherwise all ranks send and nobody receives. In forward a rank passes on what it has, works with it, and then waits for
    what comes. At hop h, whose keys and values does it have?

    `pass_on`: `dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, group=group, group_peer=next), dist.P2POp(dist.irecv,
    coming, group=group, group_peer=previous)])` returns works with wait(); both tensors must be contiguous. Return a function
    that waits for all works and returns `coming`. `forward`: at hop h the source is (rank - h) % cp, and in the last hop
    nothing is passed on.

    For hop in range(cp): if hop < cp - 1, `receive = pass_on(kv, group)`; then `add_block(out, lse, q, kv, visible(rank, (rank -
    hop) % cp, mode, q.shape[2]))`; then, if hop < cp - 1, `kv = receive()`. Before it `out, lse = no_block(q)` and `kv =
    torch.stack((k, v))`; after it the same as in `GatherAttention.forward`.""")
def test_keys_go_round_a_ring(pool):
    """`pass_on(tensor, group)` starts sending the tensor to the next rank of the ring, and returns a function that waits, and
    returns what the rank before has sent. `RingAttention.forward` returns what `GatherAttention.forward` does, but keys and
    values go round, and while a rank works with some the next ones are under way."""
    for rank, (shape, came, started) in enumerate(pool.call(pass_on_job, STEP, world=RANKS, timeout=HANGS)):
        before = (rank - 1) % RANKS
        assert (shape, came) == ([3, 2], [before] * 6), \
            f"rank {rank} received {came} of shape {shape}, not six times {before} of shape [3, 2] (nan: read before it has come)"
        assert started == 2, f"when pass_on returned, {started} operations were under way, not a send and a receive"
    for mode in ("ring", "zigzag"):
        answers = pool.call(attention_job, STEP, world=RANKS, timeout=HANGS, mode=mode, backward=False)
        assert_attention(answers)
        assert_overlap(answers)


@rung({"context_parallel.py": ["RingAttention.backward"]}, hints="""
    Keys and values go round once more, as in forward. The gradients of a rank's keys have to meet every rank too, since each
    adds its share, and must come home. So they go round behind the keys, and one hop more.

    At each hop: pass kv on (but not in the last hop); compute this block's share with `block_gradients`; only then wait for
    the sum that the ranks before have made; add the share with `add_gradients`; pass the sum on. In the first hop nobody has
    added anything: zeros. After the last hop the sum comes home.

    Begin with `receive_grad = lambda: torch.zeros_like(kv, dtype=lse.dtype)`. In each hop: `grads = block_gradients(grad_out,
    q, kv, out, lse, block)`, `grad_kv = receive_grad()`, `add_gradients(grad_q, grad_kv, grads, block)`, `receive_grad =
    pass_on(grad_kv, ctx.group)`. After the loop `grad_k, grad_v = receive_grad().type_as(k)`; return grad_q.type_as(q),
    grad_k, grad_v, None, None.""")
def test_gradients_follow_the_keys(pool):
    """`RingAttention.backward` returns the gradients of q, and those of this rank's k and v, to which every rank has added its
    share while they went round the ring."""
    for mode in ("ring", "zigzag"):
        answers = pool.call(attention_job, STEP, world=RANKS, timeout=HANGS, mode=mode, backward=True)
        assert_attention(answers)
        assert_overlap(answers)


def ulysses_job():
    """On two ranks. Of a tensor with 10 t + h for token t and head h: what AllToAll makes of it, and its gradient where that of
    what is made is itself. Then attention of two heads to one head of keys and values, of this rank's positions."""
    import context_parallel
    import torch
    import torch.distributed as dist
    from model import sdpa
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    x = (10.0 * torch.arange(2 * rank, 2 * rank + 2).view(1, 2, 1, 1) + torch.arange(4.0).view(1, 1, 4, 1)).requires_grad_()
    y = context_parallel.AllToAll.apply(x, 2, 1, group)
    y.backward(y.detach())
    there, back = y.squeeze((0, 3)).tolist(), x.grad.squeeze((0, 3)).tolist()
    positions = positions_of(rank, "ulysses", TOKENS, 2).tolist()

    def core(*qkv):
        shapes = [list(t.shape) for t in qkv]
        assert shapes == [[1, TOKENS, 1, 1]] * 3, \
            f"core was given q, k, v of the shapes {shapes}, not [1, 12, 1, 1] each: all of 12 tokens, and one of two heads"
        return sdpa(*qkv)

    def two_heads(q, k, v):
        return context_parallel.ulysses(core, group)(q.repeat(1, 1, 2, 1), k, v).mean(dim=2, keepdim=True)
    return there, back, positions, list(attended(two_heads, positions))


@rung({"context_parallel.py": ["AllToAll.forward", "AllToAll.backward", "ulysses"]}, hints="""
    Heads do not need each other, so a rank may have some heads of all tokens instead of all heads of some tokens. To get there
    each rank sends each other rank a piece: the tokens that it has, of the heads that the other shall have. How does one get
    back, and what is the gradient of going there?

    `AllToAll.forward`: `x.chunk(group.size(), dim=cut)` are the pieces; stack them; `dist.all_to_all_single(received, parts,
    group=group)` sends the i-th to rank i; join what came with `torch.cat(received.unbind(), dim=join)`. Backward is the
    same with cut and join exchanged. Note all three in ctx. In `ulysses`, dimension 1 is tokens and 2 is heads.

    backward: `return AllToAll.apply(grad, ctx.join, ctx.cut, ctx.group), None, None, None`. `ulysses` returns a function of q,
    k, v: `repeats = group.size() // math.gcd(k.shape[2], group.size())`, k and v `.repeat_interleave(repeats, dim=2)`, all three
    through `AllToAll.apply(t, 2, 1, group)`, and `AllToAll.apply(core(q, k, v), 1, 2, group)` of the output.""")
def test_from_tokens_to_heads(pool):
    """`AllToAll.apply(x, cut, join, group)` cuts x along dimension `cut` into a piece for each rank, and joins the pieces that
    come along dimension `join`, in the order of the ranks. `ulysses(core, group)` returns attention for a rank's part of the
    tokens: core sees all tokens of a part of the heads. If there are fewer key-value heads than ranks they are repeated."""
    answers = pool.call(ulysses_job, STEP, world=2, timeout=HANGS)
    for rank, (there, back, _, _) in enumerate(answers):
        heads = [[10 * t + h for h in (2 * rank, 2 * rank + 1)] for t in range(4)]
        tokens = [[10 * t + h for h in range(4)] for t in (2 * rank, 2 * rank + 1)]
        assert there == heads, f"of tokens (tens) and heads (units), rank {rank} should have {heads}, and has {there}"
        assert back == tokens, f"the gradient {heads} should come back as {tokens}, and is {back}"
    assert_attention([(positions, found) for _, _, positions, found in answers])


@pytest.mark.slow
@rung({"context_parallel.py": ["formula"]}, hints="""
    The ledger compares what was sent with what a technique says that it sends in a training step. How many tokens of a rank go
    through attention in a step, over all its micro-batches and layers? How often does each of the tensors travel?

    `tokens = args.global_batch_size // args.dp * args.seq_len // args.cp * layers`; a token's keys have len(k_proj.weight)
    numbers, its queries len(q_proj.weight). q, k, v travel in args.dtype, sums of gradients in float32 or wider. With
    --recompute forward runs once more. Names: "send" for ring and zigzag, "all_gather" and "reduce_scatter", "all_to_all".
    What is gathered or scattered counts whole: cp times a rank's part.

    With q and kv the numbers of a step, e and x the bytes of a number and of a wide one, and times = 2, or 3 with
    recomputation: ring and zigzag send times * (cp - 1) * 2 * kv * e + cp * 2 * kv * x; allgather gathers times * cp * 2 * kv
    * e and reduce-scatters cp * 2 * kv * x; ulysses times * e * (2 * q + 2 * kv * repeats). Each as (mesh.get_group("cp"),
    name, bytes); with cp 1 the list is empty.""")
@pytest.mark.parametrize("mode", ["zigzag", "ring", "allgather", "ulysses"])
def test_a_training_run(pool, mode):
    """Four steps on two ranks give the losses, gradient norms and weights of one process, and the ledger's bytes are the
    formula's."""
    recompute = "full" if mode == "zigzag" else "none"
    flags = f"--dtype float64 --recompute {recompute} --micro_batch_size 12 --cp 2 --cp_mode {mode}"
    check(pool, layouts.Layout(STEP, 2, "dense-2", "adamw", flags))
