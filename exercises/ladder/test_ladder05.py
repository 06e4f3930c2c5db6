"""The ladder of step 5: every sequence sharded over ranks. Each test is a rung; exercise.py explains how to use them.

In all rungs with attention, a sequence has 12 tokens, in heads of size 1. Every query is 1, and the key of token t is the
logarithm of WEIGHTS[t], so that exp(score) is WEIGHTS[t]: 1 1 2 4 8 ..., each as much as all before it together. The value of
token t is t. So the output of token t is the mean of its own value and of the output before it: t - 1 + 1 / 2**t. The gradient
of this output is 2**t, which is the sum of the weights that it sees: so each query that sees token s adds WEIGHTS[s] to the
gradient of its value. This holds in head 0 of sequence 0. In key-value head h, values and gradients are h + 1 times as large; in
sequence 1 they are negative; and query heads with the same key-value head have unequal shares of the gradient, which add up to it.

The group is never the world: rank 0 of the world is in no group, so rank r of the group is rank r + 1 of the world.
"""
import contextlib
from collections import Counter
from types import SimpleNamespace

import layouts
import pytest
from exercise import NOT_IN_GROUP, rung
from observe import check

STEP = "step05_cp"
TOKENS, RANKS = 12, 3
BATCH, HEADS, KV_HEADS = 2, 6, 3
WEIGHTS = [1, *(2**t for t in range(TOKENS - 1))]
NAMES = ["output", "gradient of q", "gradient of k", "gradient of v"]


# ------------------------------------------------------------------------------------------------ on every rank
def start(ranks=RANKS):
    """Return the group of all ranks but rank 0, or None on rank 0."""
    import torch.distributed as dist
    dist.init_process_group("gloo")
    group = dist.new_group(range(1, ranks + 1))
    dist.barrier()                                        # no group may end while others still connect
    return group if dist.get_rank() else None


def answers_of(pool, job, ranks=RANKS, **arguments):
    return pool.call(job, STEP, world=ranks + 1, **arguments)[1:]


@contextlib.contextmanager
def sent_in(group):
    """Yield a Counter of the bytes that this rank sends, by collective, as the ledger counts them."""
    from prove.unforgiving import batches
    from watch import COLLECTIVES, Watch, collective_of
    sent, rank, size = Counter(), group.rank(), group.size()

    def see(op, args, kwargs):
        name, collective = op._opname, collective_of(op, args)
        if collective is None:
            return
        assert collective.group.group_name == group.group_name, \
            f"{name}: runs on other ranks than those of `group`; pass group=group, or all ranks of the world take part"
        if name in ("send", "recv_"):
            assert in_batch and len(in_batch[-1]) == 2, (
                "put the send and the receive in one batch_isend_irecv: over nccl each would wait for the other")
            peer = (rank + 1) % size if name == "send" else (rank - 1) % size
            assert args[2] == peer, (
                f"rank {rank} of the group's {size}: {name.strip('_')}, peer {args[2]} in the group, expected {peer} "
                f"(group_peer takes ranks of the group, peer those of the world)")
        assert name in COLLECTIVES, (
            f"{name}: takes lists of tensors, and escapes the ledger. One tensor with all parts is sent without a "
            f"copy: all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single")
        if name != "recv_":
            sent[collective.what] += collective.bytes

    with batches() as in_batch, Watch(see):
        yield sent


def positions_of(rank, mode, seq_len, cp):
    import context_parallel
    import torch

    def local_rank(name=None):
        assert name == "cp", f"mesh.get_local_rank({name!r}) is not this rank's number among the ranks of cp"
        return rank
    mesh, args = SimpleNamespace(get_local_rank=local_rank), SimpleNamespace(seq_len=seq_len, cp=cp, cp_mode=mode)
    positions = context_parallel.local_positions(mesh, args)
    what = positions.dtype if isinstance(positions, torch.Tensor) else type(positions)
    assert what == torch.int64, f"local_positions must return a tensor of integers (torch.int64), to index with; not {what}"
    return positions


def attended(inner_attention, positions, heads=HEADS, kv_heads=KV_HEADS, dtype="float64"):
    """Yield the output and the gradients of q, k and v for the tokens at these positions; inner_attention takes [batch,
    seq, heads, head_dim]."""
    import torch

    def numbers(of_tokens, of_heads):
        column = torch.tensor([float(of_tokens[t]) for t in positions], dtype=torch.float64)
        of_heads = torch.tensor(of_heads, dtype=torch.float64)
        return torch.einsum("t,bh->bth", column, of_heads).unsqueeze(-1).to(getattr(torch, dtype))
    signed = [[sign * (h + 1) for h in range(kv_heads)] for sign in (1, -1)]
    each = heads // kv_heads
    shared = [[x * (2 * i + 1) / each**2 for x in row for i in range(each)] for row in signed]
    q, k = numbers([1] * TOKENS, [[1] * heads] * BATCH), numbers(WEIGHTS, [[1] * kv_heads] * BATCH).log()
    leaves = [t.requires_grad_() for t in (q, k, numbers(range(TOKENS), signed))]
    out = inner_attention(*leaves)
    assert out.dtype == q.dtype, f"q, k and v are in {q.dtype}, but the output is in {out.dtype}"
    assert out.shape == q.shape, (
        f"{heads} heads, {kv_heads} of keys and values: the output has the shape {list(out.shape)}, not {list(q.shape)}: "
        "own tokens, all heads")
    yield out.squeeze(-1).tolist()
    out.backward(numbers([2**t for t in range(TOKENS)], shared))
    yield from (leaf.grad.squeeze(-1).tolist() for leaf in leaves)


@contextlib.contextmanager
def kept_of(made):
    """Put all tensors that are saved for backward into the list."""
    import torch
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: made.append(tensor) or tensor, lambda tensor: tensor):
        yield


def noted_on(out):
    """Return the tensors that our functions have put on ctx without save_for_backward."""
    import torch
    from torch.utils._pytree import tree_leaves
    nodes, found = [out.grad_fn], []
    while nodes:
        node = nodes.pop()
        found += [x for x in tree_leaves(getattr(node, "__dict__", {})) if isinstance(x, torch.Tensor)]
        nodes += [before for before, _ in node.next_functions if before is not None]
    return found


def size_of(tensors):
    """Return the bytes, counting every storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def attention_job(mode, backward):
    """Return this rank's positions, with their outputs and, with backward, gradients; and for each kernel, how much was under way
    meanwhile and how many pairs of a query and a key it scored, all in float64. Also return sums, and what is sent and kept, in
    bfloat16."""
    import inspect
    from unittest.mock import patch

    import context_parallel
    import torch
    from prove.unforgiving import unforgiving
    group = start()
    if not group:
        return NOT_IN_GROUP
    positions = positions_of(group.rank(), mode, TOKENS, RANKS).tolist()
    kernel, update_out_and_lse = "flash_backward" if backward else "flash", context_parallel.update_out_and_lse
    compute, kernels = getattr(context_parallel, kernel), []
    inner_attention = context_parallel.blockwise_attention(mode, group)
    with unforgiving() as handles, sent_in(group) as sent_wide:
        def watched(*args, **kwargs):
            call = SimpleNamespace(**inspect.signature(compute).bind(*args, **kwargs).arguments)
            queries, keys = call.q.shape[2], call.k.shape[2]
            kernels.append((len(handles), queries * (queries + 1) // 2 if call.causal else queries * keys))
            assert not backward or call.lse.is_contiguous(), \
                "flash_backward was given a non-contiguous lse, part of another tensor: the kernel on GPUs would read other numbers"
            return compute(*args, **kwargs)
        with patch.object(context_parallel, kernel, watched):
            found = attended(inner_attention, positions)
            found = list(found) if backward else [next(found)]

    def wide(out, lse, *block):
        assert out.dtype == lse.dtype == torch.float32, \
            f"with q, k and v in bfloat16, add blocks up in float32 (see init_out_and_lse), not with out in {out.dtype} and lse " \
            f"in {lse.dtype}"
        return update_out_and_lse(out, lse, *block)

    def one_number(grad_out, q, k, v, out, lse, causal):
        return [torch.full_like(x, 256 if causal else 1) for x in (q, k, v)]
    kept, ends, qkv_of_own = [], [], []

    def keeping(*qkv):
        qkv_of_own.append(qkv)
        with kept_of(kept):
            ends.append(inner_attention(*qkv))
        return ends[0]
    with patch.object(context_parallel, "update_out_and_lse", wide), patch.object(context_parallel, "flash_backward", one_number):
        with sent_in(group) as forward:
            found_low = attended(keeping, positions, dtype="bfloat16")
            next(found_low)
        kept += noted_on(ends[0])
        logs = [x.view(BATCH, HEADS, -1) for x in kept if x.numel() == BATCH * HEADS * len(positions)]
        right = torch.tensor(positions) * torch.tensor(2.0).log()
        lse_kept = any(x.isfinite().all() and (x.float() - right).abs().max() < 0.1 for x in logs)
        numbers = {number for x in kept for number in x.flatten().tolist()}
        own = all(numbers.issuperset(x.flatten().tolist()) for x in qkv_of_own[0][1:])
        answer = dict(forward=dict(forward), wide=dict(sent_wide), kept=size_of(kept), lse_kept=lse_kept, own=own)
        if backward:
            with sent_in(group) as sent:
                answer |= dict(sums=list(found_low), backward=dict(sent))
    return positions, found, kernels, answer


# ------------------------------------------------------------------------------------------------ of all ranks
def assert_attention(answers, heads=HEADS, kv_heads=KV_HEADS):
    """Check that ranks find for their tokens what one process finds for all tokens."""
    from torch.nn.functional import scaled_dot_product_attention

    def inner_attention(*qkv):
        q, k, v = (t.transpose(1, 2) for t in qkv)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    expected = list(attended(inner_attention, range(TOKENS), heads, kv_heads))
    for rank, (positions, found, *_) in enumerate(answers):
        for name, numbers, right in zip(NAMES, found, expected):
            for sequence in range(BATCH):
                for head in range(len(right[sequence][0])):
                    came, wanted = ([row[head] for row in rows] for rows in (
                        numbers[sequence], [right[sequence][t] for t in positions]))
                    assert came == pytest.approx(wanted, rel=1e-9), \
                        f"{heads} heads, {kv_heads} of keys and values, {len(answers)} ranks: the {name} of rank {rank}'s tokens " \
                        f"{positions} is {shown(came)}, not {shown(wanted)} (sequence {sequence}, head {head})"


def shown(numbers):
    return "[" + ", ".join(f"{number:.6g}" for number in numbers) + "]"


def assert_work(answers, mode, backward):
    """Check that no masked pair of a query and a key is scored, that transfers are under way meanwhile, and that no more is sent or
    kept than necessary."""
    tokens = TOKENS // RANKS
    q, kv = (BATCH * n * tokens for n in (HEADS, 2 * KV_HEADS))                    # numbers of elements
    for rank, (positions, _, kernels, low) in enumerate(answers):
        busy, pairs = [n for n, _ in kernels], [n for _, n in kernels]
        blocks = rank + 1 if mode == "ring" else RANKS
        right = sum(t + 1 for t in positions)
        name = "flash_backward" if backward else "flash"
        assert sum(pairs) == right and len(pairs) == blocks, (
            f"{mode}: {name} of rank {rank} scores {pairs} pairs of a query and a key; its tokens {positions} see {right} keys in "
            f"all, in {blocks} blocks: do not compute a block, or a part of one, that is masked")
        if mode != "allgather":
            least = [2] + [4 if backward else 2] * (RANKS - 2) + [2 if backward else 0]
            assert all(n >= m for n, m in zip(busy, least)), (
                f"{mode}: rank {rank} had {busy} operations under way while it worked on its blocks, not {least[:blocks]}: except "
                f"for the last block, send and receive the next keys and values meanwhile"
                + (", and, except for the first, the sums of their gradients" if backward else ""))
        here = f"{mode}, in bfloat16: rank {rank}"
        gathered = mode == "allgather"
        there = {"all_gather": RANKS * kv * 2} if gathered else {"send": (RANKS - 1) * kv * 2}
        assert low["forward"] == there, f"{here} sends {low['forward']} bytes in forward, and should send {there}"
        keeps = (2 * q + kv) * 2 + q * 4
        assert low["kept"] <= keeps, (
            f"{here} keeps {low['kept']} bytes for backward; its own q, k, v and the output in bfloat16 and the lse in float32 "
            f"have {keeps}: save only these, the output in q's dtype; the keys and values of others travel again in backward")
        assert low["lse_kept"], f"{here}: forward must save the lse over all keys that a query sees"
        assert low["own"], f"{here}: forward must save the k and v of its own tokens"
        if backward:
            back = ({"all_gather": RANKS * kv * 2, "reduce_scatter": RANKS * kv * 4} if gathered
                    else {"send": (RANKS - 1) * kv * 2 + RANKS * kv * 4})
            assert low["backward"] == back, (
                f"{here} sends {low['backward']} bytes in backward, and should send {back}: keys and values in bfloat16, sums of "
                f"gradients in float32")
            both = ({"all_gather": 2 * RANKS * kv * 8, "reduce_scatter": RANKS * kv * 8} if gathered
                    else {"send": 2 * (RANKS - 1) * kv * 8 + RANKS * kv * 8})
            assert low["wide"] == both, (
                f"{mode}, in float64: rank {rank} sends {low['wide']} bytes in forward and backward, not {both}: sums of "
                f"gradients are in lse's dtype, here float64, and not in float32, which would round them")
            if mode != "ring":
                assert_sums(here, rank, positions, low["sums"], answers)


def assert_sums(here, rank, positions, sums, answers):
    """Check sums of gradients that are 256 from a rank's own block and 1 from every other: in bfloat16, 256 + 1 is 256."""
    others = [positions for i, (positions, *_) in enumerate(answers) if i != rank]
    before = [256 + sum(min(other) < t for other in others) for t in positions]
    behind = [256 + sum(max(other) > t for other in others) for t in positions]
    for name, numbers, wanted in zip(NAMES[1:], sums, (before, behind, behind)):
        came, wanted = [row[0] for row in numbers[0]], [256 if x == 257 else x for x in wanted]
        assert came == wanted, (
            f"{here}, with gradients of 256 from a rank's own block and 1 from any other: the {name} of the tokens {positions} "
            f"is {came}, not {wanted}: add in float32 (in bfloat16, 256 + 1 is 256), and round at the end")


# ------------------------------------------------------------------------------------------------ the rungs
def positions_job():
    return {(mode, cp): [positions_of(rank, mode, 4 * cp, cp).tolist() for rank in range(cp)]
            for mode in ("ring", "zigzag", "allgather", "ulysses") for cp in (1, 2, 3)}


@rung({"context_parallel.py": ["local_positions"]}, hints="""
    How many tokens does a rank have, and in how many chunks? In ring and ulysses it has one chunk. In zigzag and allgather it has
    two, an early one, which sees few keys, and a late one, which sees many.

    `torch.arange(args.seq_len).chunk(n)` is a tuple of n tensors of positions. `mesh.get_local_rank("cp")` is this rank's number
    among the ranks of cp.

    ring and ulysses: `torch.arange(args.seq_len).chunk(args.cp)[rank]`. The other two: with `chunks =
    torch.arange(args.seq_len).chunk(2 * args.cp)` it is `torch.cat((chunks[rank], chunks[-1 - rank]))`.""")
def test_which_tokens_are_mine(pool):
    """Write `local_positions`. It returns a tensor with this rank's positions in the sequence, in rising order. In ring and
    ulysses, cut the sequence into cp equal chunks; rank r has chunk r. In zigzag and allgather, cut it into 2 cp chunks; rank r has
    the r-th from the start and the r-th from the end, counting from 0."""
    ring = {1: [[0, 1, 2, 3]], 2: [[0, 1, 2, 3], [4, 5, 6, 7]], 3: [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]}
    zigzag = {1: [[0, 1, 2, 3]], 2: [[0, 1, 6, 7], [2, 3, 4, 5]], 3: [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]}
    found, = pool.call(positions_job, STEP)
    for (mode, cp), ranks in found.items():
        expected = (ring if mode in ("ring", "ulysses") else zigzag)[cp]
        assert ranks == expected, f"{mode}, {4 * cp} tokens, cp {cp}: the ranks have {ranks}, not {expected}"


def merge_job():
    """Merge blocks, each for two queries with outputs of two numbers. Return the outputs and the log-sum-exps."""
    import context_parallel
    import torch

    def merged(first, first_lse, second, second_lse, low=torch.float64):
        def output(pair, dtype=torch.float64):
            return torch.tensor([[x, 10 * x] for x in pair], dtype=dtype).view(1, 1, 2, 2)

        def logs(pair):
            return torch.tensor(pair, dtype=torch.float64).view(1, 1, 2)
        out, lse = output(first), logs(first_lse)
        before = dict(out=out.clone(), lse=lse.clone())
        context_parallel.update_out_and_lse(out, lse, output(second, low), logs(second_lse))
        for name, tensor in dict(out=out, lse=lse).items():
            assert not torch.equal(tensor, before[name]), (
                f"{name} is unchanged, {tensor.flatten().tolist()}; `{name} = ...` only names a new tensor")
        return out.flatten().tolist(), lse.flatten().tolist()
    from math import inf, log
    return (merged([15, 1], [log(2), log(1)], [37.5, 3], [log(8), log(1)]), merged([0, 0], [-inf, -inf], [5, 6], [log(3), 0]),
            merged([1, 1], [1000, -1000], [2, 2], [1000 + log(3), -1000 + log(3)]),
            merged([0, 1], [-inf, 0], [5, 3], [log(3), 0]), merged([1, 4], [0, 2000], [2, 3], [2000, 0]),
            merged([1, 1], [0, 0], [5, 5], [log(2), log(2)], torch.bfloat16))


@rung({"context_parallel.py": ["update_out_and_lse"]}, hints="""
    The output of a block is a mean of values, and exp(lse) is the sum of its weights. The mean over both blocks is the mean
    of the two means, weighted by these sums: (2 * 15 + 8 * 37.5) / (2 + 8) = 33.

    exp(lse) can overflow. First find the lse of both blocks: `total_lse = torch.logaddexp(lse, block_lse)`. Then the weights
    are exp(lse - total_lse) and exp(block_lse - total_lse): never above 1, and their sum is 1.

    lse is [batch, heads, seq], out has one dimension more, so the weights need `.unsqueeze(-1)`. Change the given tensors in
    place: `out.mul_(weight).add_(block_out * block_weight)`, and then `lse.copy_(total_lse)`.""")
def test_two_blocks_of_softmax(pool):
    """Write `update_out_and_lse`. `out` and `lse` are the output and the log-sum-exp of attention over the keys so far, and
    block_out and block_lse are those over one more block of keys. Change `out` and `lse` in place, so that they are those over all
    these keys. For example, a mean of 15 with weights that sum to 2, and a mean of 37.5 with weights that sum to 8, give a mean of
    33 with weights that sum to 10. Where a query has seen no key yet, its lse is -inf. Two lse may lie far apart. Blocks may be in
    bfloat16, but `out` and `lse` are wider, and must lose no precision."""
    from math import log
    (plain, plain_lse), (first, first_lse), (huge, huge_lse), mixed, apart, low = pool.call(merge_job, STEP)[0]
    assert plain == pytest.approx([33, 330, 2, 20]), f"two queries with outputs of two numbers each: {plain}, not [33, 330, 2, 20]"
    assert plain_lse == pytest.approx([log(10), log(2)]), f"lse is {plain_lse}, not [log(10), log(2)] = {[log(10), log(2)]}"
    assert first == pytest.approx([5, 50, 6, 60]), f"merged into nothing (lse -inf), [5, 50, 6, 60] became {first}"
    assert first_lse == pytest.approx([log(3), 0]), f"merged into nothing (lse -inf), lse is {first_lse}, not {[log(3), 0]}"
    assert huge == pytest.approx([1.75, 17.5, 1.75, 17.5]), \
        f"with lse near 1000 and -1000, the outputs are {huge}, not [1.75, 17.5, 1.75, 17.5]: exp(1000) is inf and exp(-1000) is 0"
    assert huge_lse == pytest.approx([1000 + log(4), -1000 + log(4)]), f"lse near 1000 and -1000 became {huge_lse}"
    for (out, lse), right, what in ((mixed, ([5, 50, 2, 20], [log(3), log(2)]), "only the first query has seen no key (lse -inf)"),
                                    (apart, ([2, 20, 4, 40], [2000, 2000]), "lse 0 and 2000, and 2000 and 0, are merged")):
        assert out == pytest.approx(right[0]), f"{what}: the outputs are {out}, not {right[0]}"
        assert lse == pytest.approx(right[1]), f"{what}: lse is {lse}, not {right[1]}"
    right = [11 / 3, 110 / 3] * 2
    assert low[0] == pytest.approx(right, rel=1e-5), \
        f"1 and twice 5 have the mean 11/3; with the block in bfloat16, got {low[0]}, not {right}: weights stay as wide as lse"


def visible_job():
    """Return {(mode, rank, source): which queries may see which keys, by their positions and by `visible`, as rows of 0 and 1}."""
    import context_parallel
    import torch

    def rows(matrix):
        return " ".join("".join("01"[int(x)] for x in row) for row in matrix)
    found = {}
    for mode in ("ring", "zigzag", "allgather"):
        places = [positions_of(rank, mode, TOKENS, RANKS) for rank in range(RANKS)]
        for rank, mine in enumerate(places):
            for source, theirs in enumerate(places):
                by_visible, block = torch.zeros(len(mine), len(theirs)), context_parallel.visible(rank, source, mode, len(mine))
                if block is not None:
                    assert type(block) is tuple and [type(x) for x in block] == [slice, slice, bool], (
                        f"visible must return (slice, slice, bool) or None, not {block}")
                    queries, keys, causal = block
                    area = torch.ones_like(by_visible[queries, keys])
                    by_visible[queries, keys] = area.tril() if causal else area
                found[mode, rank, source] = rows(mine.unsqueeze(1) >= theirs), rows(by_visible), block is None
    return found


@rung({"context_parallel.py": ["visible"]}, hints="""
    A query sees the keys at its own position and before it. Draw the positions of two ranks on paper, queries as rows and keys as
    columns. Among a rank's own tokens you get the usual triangle, because they are in rising order.

    In ring, all tokens of an earlier rank come before all of mine, and those of a later rank come after. In zigzag the early
    chunks are in the order of the ranks, and the late chunks the other way round. Which of the four pairs of chunks are visible if
    source < rank, and which if source > rank?

    source == rank: (everything, everything, True), where everything = slice(None). ring: (everything, everything, False) if source
    < rank, else None. Otherwise, with early = slice(0, length // 2) and late = slice(length // 2, None): (everything, early,
    False) if source < rank, else (late, everything, False).""")
def test_who_sees_whom(pool):
    """Write `visible(rank, source, mode, length)`. It says which queries of `rank` see which keys of `source`. Each of the two has
    `length` tokens. Return (a slice of the queries, a slice of the keys, whether only the keys up to the diagonal count), or None
    if no query sees a key. All modes except "ring" have zigzag's chunks."""
    found, = pool.call(visible_job, STEP)
    for (mode, rank, source), (expected, came, nothing) in found.items():
        where = f"{mode}, queries of rank {rank} as rows, keys of rank {source} as columns"
        assert came == expected, f"{where}: visible says {came}, but the positions give {expected}"
        assert nothing == ("1" not in expected), f"{where}: return None if nothing is visible, and only then"


def gather_job():
    """Return this rank's result of `all_gather_kv`, for keys and values that say whose they are: 10 for rank 1, 20 for rank 2, and
    100 more for values."""
    import context_parallel
    import torch
    group = start()
    if not group:
        return NOT_IN_GROUP
    k = 10.0 * group.rank() + torch.arange(2.0).view(1, 1, 2, 1)
    with sent_in(group) as sent:
        every = context_parallel.all_gather_kv(k, k + 100, group)
    return [kv.flatten(1).tolist() for kv in every], dict(sent)


@rung({"context_parallel.py": ["all_gather_kv", "AllGatherAttention.forward"]}, hints="""
    Keys and values of all ranks come in one collective. Then a rank goes through all ranks, one source after another: which of
    this source's keys do my queries see? For a single source you already have everything: `visible` and `add_block`.

    `all_gather_kv`: `torch.stack((k, v))` is one tensor; `dist.all_gather_into_tensor(all_kv, kv, group=group)` fills a tensor
    that is group.size() times as long in its first dimension; `all_kv.chunk(group.size())` are the ranks' parts. `forward`:
    begin with `out, lse = init_out_and_lse(q)`.

    For source, kv in enumerate(all_gather_kv(k, v, group)): `add_block(out, lse, q, kv, visible(group.rank(), source, mode,
    q.shape[2]))`. Then `out = out.type_as(q)`; for backward `ctx.save_for_backward(q, k, v, out, lse)` and `ctx.mode, ctx.group =
    mode, group`; return out.""")
def test_all_keys_at_once(pool):
    """Write `all_gather_kv`, which returns a list: for each rank of the group its keys and values, stacked, [2, batch, heads,
    seq/cp, head_dim]. Write `AllGatherAttention.forward`, which returns the attention of this rank's queries to the keys of all
    ranks, one block of keys after another. For backward, save q, k, v, the output (in q's dtype) and its log-sum-exp, and
    nothing that came from other ranks. Accumulate the blocks in float32 or wider. (exp(score) of tokens 0, 1, 2 ... is 1 1 2 4 8
    ..., and the value of token t is t; so the output of token t is t - 1 + 1 / 2**t, such as 9.00098 for token 10.)"""
    expected = [[[10 * rank, 10 * rank + 1], [10 * rank + 100, 10 * rank + 101]] for rank in range(RANKS)]
    for rank, (every, sent) in enumerate(answers_of(pool, gather_job)):
        assert every == expected, f"on rank {rank}, all_gather_kv returns {every}; keys are 0 1, 10 11 and 20 21, values 100 more"
        right = {"all_gather": RANKS * 16}
        assert sent == right, f"all_gather_kv sends {sent} bytes, and should send {right}"
    answers = answers_of(pool, attention_job, mode="allgather", backward=False)
    assert_attention(answers)
    assert_work(answers, "allgather", backward=False)


@rung({"context_parallel.py": ["block_gradients", "AllGatherAttention.backward"]}, hints="""
    A probability is exp(score - lse) with the lse over all keys. So if `flash_backward` is given the final output and the final
    lse, it returns exact terms of the gradients for a block of keys, which only have to be added up. In the end a rank also holds
    gradients that it has to send away: whose?

    `block_gradients`: take the block's queries of grad_out, q, out and lse, [:, :, queries], and its keys of kv, [:, :, :, keys],
    and call `flash_backward` (lse.contiguous()). Without a block it returns nothing. `backward`: gather again, and let
    `add_gradients` add each block's terms to grad_q and to the part of a tensor [2 cp, ...] that is the source's.

    all_grad_kv = zeros of [2 * cp, *k.shape] in lse.dtype; for source, (kv, grad_kv) in enumerate(zip(all_gather_kv(k, v,
    ctx.group), all_grad_kv.chunk(cp))): add_gradients(grad_q, grad_kv, block_gradients(grad_out, q, kv, out, lse, block),
    block). Then `dist.reduce_scatter_tensor(local_grad_kv, all_grad_kv, group=ctx.group)` with local_grad_kv like
    all_grad_kv[:2]; its two parts are grad_k and grad_v. Return grad_q, grad_k, grad_v (each .type_as(q)), None, None.""")
def test_gradients_of_all_keys(pool):
    """Write `block_gradients`, which returns what a block adds to the gradients of q, k and v; the kernel takes a contiguous lse.
    Write `AllGatherAttention.backward`, which returns the gradients of q, and those of this rank's k and v, to which all ranks
    contribute. Gather once more, and reduce-scatter the gradients; add them up in float32 or wider, in lse's dtype. (exp(score) of
    tokens 0, 1, 2 ... is 1 1 2 4 8 ...; the gradient of value s is that, times the number of tokens from s on: 12 11 20 36 64
    ...)"""
    answers = answers_of(pool, attention_job, mode="allgather", backward=True)
    assert_attention(answers)
    assert_work(answers, "allgather", backward=True)


def ring_send_recv_job():
    """Pass on a tensor filled with its sender's rank, while the rank goes on writing to other memory. Return what
    `ring_send_recv` brings, and how much was under way when it returned."""
    import context_parallel
    import torch
    from prove.unforgiving import unforgiving
    group = start()
    if not group:
        return NOT_IN_GROUP
    with unforgiving() as handles, sent_in(group):
        tensor = torch.full((2, 3), float(group.rank()), dtype=torch.float64).T                    # not contiguous
        receive = context_parallel.ring_send_recv(tensor, group)
        assert callable(receive), f"ring_send_recv returned {type(receive)}; expected a function that waits, and returns what came"
        started = len(handles)
        came = receive()
        return list(came.shape), came.flatten().tolist(), started, str(came.dtype)


@rung({"context_parallel.py": ["ring_send_recv", "RingAttention.forward"]}, hints="""
    A rank sends to the next one of the ring and receives from the one before. Both must start before anybody waits. Otherwise all
    ranks would send and nobody would receive. In forward a rank passes on what it has, works with it, and then waits for what
    comes. At hop h, whose keys and values does it have?

    `ring_send_recv`: `dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, group=group, group_peer=next), dist.P2POp(dist.irecv,
    recv_buffer, group=group, group_peer=previous)])` returns handles with wait(); both tensors must be contiguous. Return a
    function that waits for all handles and returns `recv_buffer`. `forward`: at hop h the source is (rank - h) % cp, and in the
    last hop nothing is passed on.

    For hop in range(cp): if hop < cp - 1, `receive_kv = ring_send_recv(kv, group)`; then `add_block(out, lse, q, kv, visible(rank,
    (rank - hop) % cp, mode, q.shape[2]))`; then, if hop < cp - 1, `kv = receive_kv()`. Before it `out, lse = init_out_and_lse(q)`
    and `kv = torch.stack((k, v))`; after it the same as in `AllGatherAttention.forward`.""")
def test_keys_go_round_a_ring(pool):
    """Write `ring_send_recv(tensor, group)`. It starts to send the tensor to the next rank of the ring, and to receive from the one
    before, both in one dist.batch_isend_irecv, which takes only contiguous tensors. It returns a function that waits, and returns
    the tensor that came. Write `RingAttention.forward`, which returns what `AllGatherAttention.forward` returns. But here keys and
    values go round, and while a rank computes with one block, the next one is under way. For backward it saves just as little."""
    for rank, (shape, came, started, dtype) in enumerate(answers_of(pool, ring_send_recv_job)):
        before = (rank - 1) % RANKS
        assert (shape, came) == ([3, 2], [before] * 6), \
            f"rank {rank} received {came} of shape {shape}, not six times {before} of shape [3, 2] (nan: read before it arrived)"
        assert started == 2, f"when ring_send_recv returned, {started} operations were under way, not a send and a receive"
        assert dtype == "torch.float64", f"rank {rank} received a tensor of {dtype} where torch.float64 was sent"
    for mode in ("ring", "zigzag"):
        answers = answers_of(pool, attention_job, mode=mode, backward=False)
        assert_attention(answers)
        assert_work(answers, mode, backward=False)


@rung({"context_parallel.py": ["RingAttention.backward"]}, hints="""
    Keys and values go round once more, as in forward. The gradients of a rank's keys also have to visit every rank, because each
    adds its terms, and then they must come home. So they go round behind the keys, and make one hop more.

    At each hop: pass kv on (but not in the last hop); compute this block's terms with `block_gradients`; only then wait for the
    sum that the ranks before have made; add the terms with `add_gradients`; pass the sum on. In the first hop nobody has added
    anything: zeros. After the last hop the sum comes home.

    Begin with `receive_grad = None`. In each hop: `grads = block_gradients(grad_out, q, kv, out, lse, block)`; `grad_kv =
    receive_grad() if receive_grad else torch.zeros_like(kv, dtype=lse.dtype)`; `add_gradients(grad_q, grad_kv, grads, block)`;
    `receive_grad = ring_send_recv(grad_kv, ctx.group)`. After the loop `grad_k, grad_v = receive_grad().type_as(k)`; return
    grad_q.type_as(q), grad_k, grad_v, None, None.""")
def test_gradients_follow_the_keys(pool):
    """Write `RingAttention.backward`. It returns the gradients of q, and those of this rank's k and v, to which every rank has
    added its terms while they went round the ring. Add them up and send them in float32 or wider, in lse's dtype. While a rank
    works on a block, two transfers are under way: the next keys and values, and the sum for the current ones."""
    for mode in ("ring", "zigzag"):
        answers = answers_of(pool, attention_job, mode=mode, backward=True)
        assert_attention(answers)
        assert_work(answers, mode, backward=True)


def ulysses_job(cases):
    """Run UlyssesAllToAll on four ranks, on a tensor with 10 t + h for token t and head h (100 more in sequence 1). Return its
    result, and the gradient of its input when the result is its own gradient. Then run attention with the given numbers of heads
    and key-value heads, and return this rank's positions and results, and what it sends in forward and backward."""
    import context_parallel
    import torch
    from model import sdpa
    group = start(4)
    if not group:
        return NOT_IN_GROUP
    rank = group.rank()
    x = 10.0 * torch.arange(2 * rank, 2 * rank + 2).view(1, 2, 1, 1) + torch.arange(8.0).view(1, 1, 8, 1)
    x, kept = torch.cat((x, x + 100)).requires_grad_(), []
    with sent_in(group) as sent, kept_of(kept):
        y = context_parallel.UlyssesAllToAll.apply(x, 2, 1, group)
    kept += noted_on(y)
    with sent_in(group) as sent_back:
        y.backward(y.detach())
    there, back = y.squeeze(3).tolist(), x.grad.squeeze(3).tolist()
    positions = positions_of(rank, "ulysses", TOKENS, 4).tolist()
    found = []
    for heads, kv_heads, copies in cases:
        def inner_attention(*qkv):
            shapes = [list(t.shape) for t in qkv]
            right = [[BATCH, TOKENS, n // 4, 1] for n in (heads, kv_heads * copies, kv_heads * copies)]
            assert shapes == right, (
                f"{heads} heads, {kv_heads} of keys and values, 4 ranks: inner_attention was given q, k, v of the shapes {shapes}, "
                f"not {right}: all tokens, and a fourth of the heads, with those of keys and values {copies} times each")
            return sdpa(*qkv)
        attention = context_parallel.ulysses(inner_attention, group)
        assert callable(attention), f"ulysses returned {attention}; expected a function of q, k and v"
        found.append(list(attended(attention, positions, heads, kv_heads)))
    return there, back, [dict(sent), dict(sent_back)], len(kept), positions, found


@rung({"context_parallel.py": ["UlyssesAllToAll.forward", "UlyssesAllToAll.backward", "ulysses"]}, hints="""
    Heads do not need each other, so a rank may have some heads of all tokens instead of all heads of some tokens. To get there
    each rank sends each other rank a piece: its own tokens, for the heads that the other will have. How does one get
    back, and what is the gradient of this exchange?

    `UlyssesAllToAll.forward`: `x.chunk(group.size(), dim=scatter_dim)` are the pieces; stack them, and make the stack
    contiguous, because nccl refuses any other tensor; `dist.all_to_all_single(recv_buffer, send_buffer, group=group)` sends the
    i-th to rank i; join the pieces that it received with `torch.cat(recv_buffer.unbind(), dim=gather_dim)`. Backward is the
    same with scatter_dim and gather_dim exchanged. Keep all three arguments on ctx. In `ulysses`, dimension 1 is tokens and 2
    is heads.

    backward: `return UlyssesAllToAll.apply(grad, ctx.gather_dim, ctx.scatter_dim, ctx.group), None, None, None`. `ulysses` returns
    a function of q, k, v: `repeats = group.size() // math.gcd(k.shape[2], group.size())`, k and v `.repeat_interleave(repeats,
    dim=2)`, all three through `UlyssesAllToAll.apply(t, 2, 1, group)`, and of the output `UlyssesAllToAll.apply(inner_attention(q,
    k, v), 1, 2, group)`.""")
def test_from_tokens_to_heads(pool):
    """Write `UlyssesAllToAll.apply(x, scatter_dim, gather_dim, group)`: its forward splits x along `scatter_dim` into a piece for
    each rank, and joins the pieces that it receives along `gather_dim`, in the order of the ranks; its backward undoes that. Write
    `ulysses(inner_attention, group)`, which returns attention for a rank's part of the tokens: inner_attention sees all tokens of a
    part of the heads. If the number of ranks does not divide the number of key-value heads, repeat each as few times as possible.
    Keep nothing for backward except scatter_dim, gather_dim and group."""
    cases = [(8, 4, 1), (4, 2, 2), (12, 6, 2), (4, 1, 4)]
    answers = answers_of(pool, ulysses_job, ranks=4, cases=cases)
    for rank, (there, back, sent, kept, *_) in enumerate(answers):
        pair = 2 * rank, 2 * rank + 1
        heads, tokens = ([[[more + 10 * t + h for h in of_heads] for t in of_tokens] for more in (0, 100)]
                         for of_heads, of_tokens in ((pair, range(8)), (range(8), pair)))
        assert there == heads, f"tokens (tens) and heads (units), two sequences: rank {rank} should have {heads}, not {there}"
        assert back == tokens, f"the gradient {heads} should come back as {tokens}, and is {back}"
        right = {"all_to_all": BATCH * 2 * 8 * 4}
        assert sent == [right] * 2, f"forward and backward of UlyssesAllToAll send {sent} bytes, and should send {right} each"
        assert not kept, (
            "UlyssesAllToAll keeps a tensor for backward, and so its memory; scatter_dim, gather_dim and group are all that "
            "backward needs")
    for i, (heads, kv_heads, _) in enumerate(cases):
        assert_attention([(positions, found[i]) for *_, positions, found in answers], heads, kv_heads)


def traffic_job(cases):
    """Return what `traffic` says for a model of 3 layers with 12 heads, 6 for keys and values, of 2 numbers,
    sharded over tp."""
    import torch
    import context_parallel

    def proj(rows):
        return SimpleNamespace(weight=torch.zeros(rows, 5))
    found, mesh = [], SimpleNamespace(get_group=str)
    for mode, cp, dp, tp, recompute, dtype in cases:
        attention = SimpleNamespace(q_proj=proj(24 // tp), k_proj=proj(12 // tp), v_proj=proj(12 // tp), head_dim=2)
        config = SimpleNamespace(num_hidden_layers=3, num_attention_heads=12, num_key_value_heads=6, head_dim=2, hidden_size=5)
        layers = {str(i): SimpleNamespace(self_attn=attention) for i in range(3)}
        args = SimpleNamespace(dp=dp, cp=cp, tp=tp, cp_mode=mode, sp="on", recompute=recompute, zero=0, dtype=getattr(torch, dtype),
                               seq_len=16, global_batch_size=24, micro_batch_size=3)
        model = SimpleNamespace(model=SimpleNamespace(config=config, layers=layers))
        came = context_parallel.traffic(model, mesh, args)
        assert isinstance(came, list | tuple) and all(len(sent) == 3 and isinstance(sent[2], int) for sent in came), (
            f"traffic must return a list of (group, name, bytes), and bytes must be an int; it returned {came}")
        found.append(came)
    return found


def by_hand(mode, cp, dp, tp, recompute, dtype):
    if cp == 1:
        return {}
    number, wide = {"bfloat16": (2, 4), "float32": (4, 4), "float64": (8, 8)}[dtype]
    tokens, q, kv, times = 3 * 24 * 16 // dp // cp, 24 // tp, 12 // tp, 2 if recompute == "none" else 3
    if mode == "ulysses":
        copies = {(2, 6): 1, (4, 6): 2, (4, 3): 4}[cp, 6 // tp]
        return {("cp", "all_to_all"): times * tokens * 2 * (q + kv * copies) * number}
    if mode == "allgather":
        return {("cp", "all_gather"): times * cp * tokens * 2 * kv * number, ("cp", "reduce_scatter"): cp * tokens * 2 * kv * wide}
    return {("cp", "send"): tokens * 2 * kv * (times * (cp - 1) * number + cp * wide)}


@pytest.mark.slow
@rung({"context_parallel.py": ["traffic"]}, hints="""
    The ledger compares the bytes sent in a training step with those that `traffic` expects. How many tokens of a rank go
    through attention in a step, over all its micro-batches and layers? How often does each of the tensors travel?

    `tokens = args.global_batch_size // args.dp * args.seq_len // args.cp * layers`; a token's keys have len(k_proj.weight)
    numbers, its queries len(q_proj.weight). q, k, v travel in args.dtype, sums of gradients in float32 or wider. With
    --recompute forward runs once more. Names: "send" for ring and zigzag, "all_gather" and "reduce_scatter", "all_to_all".
    Whatever is gathered or scattered counts whole: cp times a rank's part.

    Let q and kv be the elements of a step's queries and keys, e the itemsize of args.dtype and x that of float32 or wider, and
    passes = 2, or 3 with recomputation. ring and zigzag send passes * (cp - 1) * 2 * kv * e + cp * 2 * kv * x; allgather gathers
    passes * cp * 2 * kv * e and reduce-scatters cp * 2 * kv * x; ulysses exchanges passes * e * (2 * q + 2 * kv * repeats). Each as
    (mesh.get_group("cp"), name, bytes); with cp 1 the list is empty.""")
@pytest.mark.parametrize("mode", ["zigzag", "ring", "allgather", "ulysses"])
def test_a_training_run(pool, mode):
    """Write `traffic(model, mesh, args)`. It lists what context parallelism should send in a step, as
    (mesh.get_group("cp"), collective, bytes), which must equal the ledger's bytes: also with dp, with tp (then a rank has a part of
    the heads, and so of the rows of q_proj and k_proj), with either --recompute (full and selective repeat the same
    transfers), and in any dtype. Four steps on two ranks must give the losses, gradient norms and weights of one process."""
    cases = [(cp_mode, *more) for cp_mode in ("zigzag", "ring", "allgather", "ulysses") for more in (
        (1, 1, 1, "none", "float32"), (2, 1, 1, "none", "float32"), (4, 1, 1, "none", "bfloat16"), (4, 2, 1, "full", "bfloat16"),
        (4, 1, 2, "selective", "float64"))]
    found, = pool.call(traffic_job, STEP, cases=cases)
    for case, came in zip(cases, found):
        sums = Counter()
        for group, collective, size in came:
            sums[group, collective] += size
        right = by_hand(*case)
        assert dict(sums) == right, (
            "--cp_mode {}, cp {}, dp {}, tp {}, --recompute {}, {}; 24 sequences of 16 tokens, 3 layers of 12 heads of 2 numbers, "
            "6 for keys and values: traffic says {}, not {}").format(*case, dict(sums), right)
    recompute = "full" if mode == "zigzag" else "none"
    flags = f"--dtype float64 --recompute {recompute} --micro_batch_size 12 --cp 2 --cp_mode {mode}"
    check(pool, layouts.Layout(STEP, 2, "dense-2", "adamw", flags))
