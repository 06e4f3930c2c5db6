"""windows.patch: with sliding windows and sinks, ranks of cp train as one process does; their bytes do not grow with the sequence.

With a window of 3, a query sees its own key and the two before it. Put tokens 0 to 3 on rank 0 and 4 to 7 on rank 1. Query 4 sees
keys 2, 3 and 4; query 5 sees 3, 4 and 5; query 6 sees nothing of rank 0. So rank 1 needs two keys, those before its first token.
With a million tokens per rank, it would still need two. Stencil codes call them a halo. A halo longer than a rank's part of the
sequence comes from several ranks.

Contiguous parts have equal work, except that the sequence's first queries see fewer keys. Zigzag would balance nothing, and send
two halos, one per chunk.

"Sink" has two meanings. StreamingLLM keeps the first tokens visible during generation. Models trained with sinks, such as gpt-oss,
learn a score per head that has no value. This is transformers' `sinks`, and what is meant here: one more term in the softmax's
denominator, once per query, not once per block. So forward starts with lse = sink instead of minus infinity.

Models are transformers' `mistral` (windows) and `granite_swa` (also sinks; here with windows in all layers and no multipliers).
Layers without a window, which gpt-oss has as well, would prefer zigzag; they are left out.

**Break it.** If context parallelism brings a causal attention of its own, windows and sinks are lost without an error. With cp 2,
the loss of `tiny-window` is then 2.703 instead of 2.684 after 60 steps, and after 120 even too low: 2.399 instead of 2.511. To see
it, change one token and list the outputs that change. In two layers with a window of 4, token 18 of 32 reaches 18 to 24; without
the window, 18 to 31.

Simulated on 8 H100s: seconds per step, and what a rank sends for attention. v0.3 has no window.

| mistral-7b, tokens | v0.1, halo | v0.1, ulysses | v0.3, zigzag |
|---|---|---|---|
| 32,768 | 0.72, 2.1 GB | 0.81, 8.1 GB | 1.20, 19.9 GB |
| 131,072 | 2.48, 2.1 GB | 2.74, 32.2 GB | 10.55, 79.5 GB |
| 131,072, eight machines | 2.68 | 4.86 | 10.98 |

    python tools/simulate exercise/windows 8 --model mistral-7b-v0.1 --dtype bfloat16 --cp 8 --cp_mode halo --zero 3
        --recompute full --seq_len 131072 --global_batch_size 1 --micro_batch_size 1      # --gpus_per_node 1: eight machines
"""
from unittest.mock import patch

import cases
import huggingface
import numpy as np
import pytest
import torch
from harness import assert_same_run, assert_same_tensors, relative, train_job
from jobs import assert_refused, ledger_rows
from observe import observed_job
from operations import assert_all_meet

STEP, BASELINE = "step05_cp", "step01_single_gpu"
FAMILIES = {"llama": {}, "mistral": dict(model_type="mistral"), "granite": dict(
    model_type="granite_swa", tie_word_embeddings=False, attention_multiplier=cases.HEAD_DIM**-0.5,
    layer_types=2 * ["sliding_attention"])}
EXACT = "--dtype float64"


def flags(pool, family, window=None):
    """Return the flags of a run on a small model. Mistral has windows, Granite windows and sinks, Llama neither."""
    changes = cases.shape("dense-2") | FAMILIES[family] | dict(sliding_window=window)
    return pool.once((family, window), lambda: cases.make(pool.folder() / f"{family}-{window}", **changes))


# ------------------------------------------------------------------------------------- what it is compared with
def plain_job(argv, optimizer):
    """Train step 1 with a softmax under a mask. A sink is one more column of the scores."""
    import weights
    import model
    window, sinks = (int(argv.pop(argv.index(flag) + 1)) for flag in ("--window", "--sinks"))
    argv = [flag for flag in argv if flag not in ("--window", "--sinks")]
    init, initial_weight = model.Attention.__init__, weights.initial_weight

    def masked(attention, config):
        def inner_attention(q, k, v):                                              # [batch, seq, heads, head_dim]
            k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
            age = torch.arange(q.shape[1]).unsqueeze(1) - torch.arange(q.shape[1])
            scores = scores.masked_fill((age < 0) | (age >= window), -torch.inf)
            if sinks:
                scores = torch.cat((scores, attention.sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
            return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :q.shape[1]], v)
        init(attention, config)
        attention.sinks = torch.nn.Parameter(torch.empty(config.num_attention_heads)) if sinks else None
        attention.inner_attention = inner_attention

    def drawn(name, meta, *rest):
        return initial_weight(name, meta.unsqueeze(-1), *rest).squeeze(-1) if "sinks" in name else initial_weight(name, meta, *rest)
    with patch.object(model.Attention, "__init__", masked), patch.object(weights, "initial_weight", drawn):
        train_job(argv, optimizer)


def one_process(pool, family, window, optimizer="adamw"):
    argv = f"{flags(pool, 'llama')} {EXACT} --micro_batch_size 6 --window {window} --sinks {int(family == 'granite')}"
    return pool.once((argv, optimizer), lambda: pool.train(BASELINE, argv, optimizer=optimizer, job=plain_job))


def test_window_and_sinks_matter(pool):
    """Check that neither could be lost without being noticed by the tests below."""
    causal = pool.reference(BASELINE, f"{flags(pool, 'llama')} {EXACT} --micro_batch_size 6")
    assert_same_run(one_process(pool, "mistral", 16), causal, 1e-9)
    windowed, with_sinks = one_process(pool, "mistral", 5), one_process(pool, "granite", 5)
    for run, other in ((windowed, causal), (with_sinks, windowed)):
        assert relative(run.losses[0], other.losses[0]) > 1e-6 and relative(run.grad_norms[0], other.grad_norms[0]) > 1e-4


# ------------------------------------------------------------------------------------- training
LAYOUTS = [                                               # of 16 tokens, so that with cp 8 a halo comes from several ranks
    ("mistral", 5, 1, "--micro_batch_size 6"), ("granite", 5, 1, "--micro_batch_size 2 --recompute full"),
    ("granite", 5, 2, "--micro_batch_size 3 --zero 3"),
    ("mistral", 5, 2, "--cp 2 --cp_mode halo --micro_batch_size 12"),
    ("granite", 5, 2, "--cp 2 --cp_mode halo --micro_batch_size 6 --recompute selective"),
    ("granite", 5, 4, "--cp 2 --cp_mode halo --micro_batch_size 6 --zero 3 --recompute full"),
    ("granite", 5, 4, "--cp 2 --cp_mode halo --tp 2 --micro_batch_size 12 --zero 1"),
    ("granite", 5, 4, "--cp 2 --cp_mode halo --tp 2 --sp off --micro_batch_size 4 --recompute full"),
    ("granite", 5, 8, "--cp 2 --cp_mode halo --tp 2 --micro_batch_size 6 --zero 2 --zero_shard 2"),
    ("granite", 5, 4, "--cp 4 --cp_mode halo --micro_batch_size 24 --zero 2"),
    ("mistral", 5, 8, "--cp 8 --cp_mode halo --micro_batch_size 12"),
    ("granite", 6, 4, "--cp 4 --cp_mode halo --micro_batch_size 8"),
    ("mistral", 6, 8, "--cp 8 --cp_mode halo --micro_batch_size 24"),
    ("mistral", 6, 4, "--cp 2 --cp_mode halo --micro_batch_size 4 --dp_mode overlap"),
    ("granite", 5, 8, "--tp 8 --micro_batch_size 24"),
    ("granite", 1, 2, "--cp 2 --cp_mode halo --micro_batch_size 6"),
    ("granite", 40, 4, "--cp 4 --cp_mode halo --micro_batch_size 6"),
    ("granite", 5, 2, "--cp 2 --cp_mode ulysses --micro_batch_size 12 --recompute selective"),
    ("granite", 5, 4, "--cp 2 --cp_mode ulysses --tp 2 --micro_batch_size 6 --zero 3"),
    ("mistral", 5, 8, "--cp 8 --cp_mode ulysses --micro_batch_size 24")]


@pytest.mark.parametrize("family, window, world, more", LAYOUTS)
def test_trains_as_one_process(pool, family, window, world, more):
    """Also check that each rank sends what the formula says, and that the ranks' operations meet."""
    run = pool.train(STEP, f"{flags(pool, family, window)} {EXACT} {more}", world, job=observed_job)
    assert_same_run(run, one_process(pool, family, window), 1e-9, more)
    operations, sent = zip(*run.answers)
    for rank, of_rank in enumerate(sent):
        assert of_rank or world == 1, rank
        for what, (seen, formula) in of_rank.items():
            assert seen == formula, f"rank {rank} sends {seen:,} bytes by {what}, its formula says {formula:,}"
    assert world == 1 or assert_all_meet(operations) > 0


@pytest.mark.parametrize("more", ["--cp 4 --cp_mode halo --zero 2", "--cp 2 --cp_mode ulysses --tp 2"])
def test_sums_of_gradients(pool, more):
    run = pool.train(STEP, f"{flags(pool, 'granite', 6)} {EXACT} --micro_batch_size 8 {more}", 4, optimizer="sgd")
    assert_same_run(run, one_process(pool, "granite", 6, "sgd"), 1e-9, more)


@pytest.mark.parametrize("more", ["--cp_mode halo", "--cp_mode ulysses"])
def test_bfloat16(pool, more):
    base = f"{flags(pool, 'granite', 5)} --dtype bfloat16 --micro_batch_size 12 --steps 2 --cp 2"
    run = pool.train(STEP, f"{base} {more}", 2, weights=False)
    one = one_process(pool, "granite", 5)
    for ours, exact in zip(run.losses + run.grad_norms, one.losses[:2] + one.grad_norms[:2]):
        assert relative(ours, exact) < 2e-2


def test_a_model_without_windows_trains_as_before(pool):
    run = pool.train(STEP, f"{flags(pool, 'llama')} {EXACT} --micro_batch_size 6 --cp 2", 2)
    assert_same_run(run, pool.reference(BASELINE, f"{flags(pool, 'llama')} {EXACT} --micro_batch_size 6"), 1e-9)


# ------------------------------------------------------------------------------------- against transformers
def sinks_of_gpt_oss():
    """Register an attention that computes in the model's dtype. Granite's own computes softmax and sinks in float32."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.gpt_oss import modeling_gpt_oss
    AttentionInterface.register("gpt_oss", modeling_gpt_oss.eager_attention_forward)
    AttentionMaskInterface.register("gpt_oss", eager_mask)
    return "gpt_oss"


@pytest.mark.parametrize("family, kind, world, more", [
    ("mistral", "MistralForCausalLM", 4, "--cp 4 --cp_mode halo --micro_batch_size 8"),
    ("granite", "GraniteSWAForCausalLM", 4, "--cp 2 --cp_mode halo --tp 2 --micro_batch_size 12 --zero 3"),
    ("granite", "GraniteSWAForCausalLM", 1, "--micro_batch_size 6")])
def test_trains_as_transformers(pool, tmp_path, family, kind, world, more):
    """Start from what the trainer saves, which transformers loads as a model with this window; train both for four steps."""
    base = f"{flags(pool, family, 5)} {EXACT} --lr 1e-3 --lr_schedule constant --warmup 2"
    pool.train(STEP, f"{base} --steps 0 --save {tmp_path / 'start'}", weights=False)
    run = pool.train(STEP, f"{base} {more} --init_from {tmp_path / 'start'}", world)
    model = huggingface.load(tmp_path / "start", torch.float64)
    assert type(model).__name__ == kind and model.config.sliding_window == 5
    if family == "granite":
        model.set_attn_implementation(sinks_of_gpt_oss())
        assert model.model.layers[0].self_attn.sinks.detach().std() > 0.01
    tokens = np.load(pool.folder() / f"{family}-5/tokens.npy")
    losses, norms, weights = huggingface.train(model, tokens, 4, 24, 16, lr=1e-3, warmup=2, grad_clip=0.5)
    assert max(norms) > 0.5, "the test should clip"
    for ours, theirs in zip(run.losses + run.grad_norms, losses + norms, strict=True):
        assert relative(ours, theirs) < 1e-9
    assert_same_tensors(run.weights, weights, 1e-9)


# ------------------------------------------------------------------------------------- the blocks
def blocks_job(cases):
    """Return for each (length, window, cp) how many blocks contain each pair of a query and a key, and for each rank how many
    scores it computes."""
    from sliding_window import visible
    found = []
    for length, window, cp in cases:
        halo = min(window - 1, (cp - 1) * length)
        seen, scores = torch.zeros(cp * length, cp * length, dtype=torch.int64), []
        for rank in range(cp):
            part = torch.zeros(length, halo + length, dtype=torch.int64)
            for queries, keys, causal in visible(rank * length, length, window, halo):
                block = torch.ones(queries.stop - queries.start, keys.stop - keys.start, dtype=torch.int64)
                assert not causal or block.shape[0] == block.shape[1]              # kernels agree on the diagonal only for squares
                part[queries, keys] += {True: block.tril(), False: block, "reversed": block.triu()}[causal]
            scores.append(int(part.sum()))
            before = min(halo, rank * length)                                      # what a halo has of real tokens
            assert not part[:, :halo - before].any()
            seen[rank * length:(rank + 1) * length, rank * length - before:(rank + 1) * length] = part[:, halo - before:]
        found.append((seen.tolist(), scores))
    return found


def test_blocks_have_what_the_window_shows(pool):
    """Check that the blocks contain each visible pair once and no other pair; contiguous ranks then have equal work."""
    windows = (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 24, 100)
    shapes = [(length, window, cp) for length in (1, 3, 8, 12) for window in windows for cp in (1, 2, 5)]
    for (length, window, cp), (seen, scores) in zip(shapes, *pool.call(blocks_job, STEP, cases=shapes), strict=True):
        age = np.subtract.outer(np.arange(cp * length), np.arange(cp * length))
        assert np.array_equal(seen, (age >= 0) & (age < window)), (length, window, cp)
        full = [count for rank, count in enumerate(scores) if rank * length >= window - 1]
        assert all(count == length * window for count in full), (length, window, cp, scores)


def by_formula_job(argv, optimizer):
    """Train as on a GPU without a flash kernel."""
    import context_parallel
    with patch.object(context_parallel, "has_flash_kernel", lambda q: False):
        train_job(argv, optimizer)


def test_blocks_without_a_flash_kernel(pool):
    run = pool.train(STEP, f"{flags(pool, 'granite', 5)} {EXACT} --micro_batch_size 6 --cp 2 --cp_mode halo", 2, job=by_formula_job)
    assert_same_run(run, one_process(pool, "granite", 5), 1e-9)


# ------------------------------------------------------------------------------------- what is sent
def sent_over_cp(pool, seq_len, family, window, more):
    run = f"{flags(pool, family, window)} --micro_batch_size 1 --global_batch_size 2 --steps 2 --ledger --seq_len {seq_len} {more}"
    rows = ledger_rows(pool.train(STEP, run, 4, weights=False).output)
    return rows["cp", "send"][1]


def test_bytes_do_not_grow_with_the_sequence(pool):
    """Work out by hand what each rank sends: 2 sequences, 2 layers, keys and values of 4 tokens, in forward and as gradients."""
    by_hand = 2 * 2 * 2 * 4 * cases.KV_HEADS * cases.HEAD_DIM * 4
    for seq_len in (16, 64):
        assert sent_over_cp(pool, seq_len, "granite", 5, "--cp 4 --cp_mode halo") == 2 * by_hand
    assert sent_over_cp(pool, 16, "granite", 5, "--cp 4 --cp_mode halo --recompute full") == 3 * by_hand
    short, long = (sent_over_cp(pool, seq_len, "llama", None, "--cp 4 --cp_mode ring") for seq_len in (16, 64))
    assert long == 4 * short


# ------------------------------------------------------------------------------------- what nobody sees
def lose_the_window():
    """Plant what happened to several trainers: context parallelism brings an attention of its own, and this one is causal."""
    import context_parallel
    import train

    def causal(model, config, mesh, args):
        for layer in model.model.layers.values():
            layer.self_attn.inner_attention = context_parallel.blockwise_attention("ring", mesh.get_group("cp"))
    return patch.object(train.sliding_window, "window_attention", causal)


def without_window_job(argv, optimizer):
    with lose_the_window():
        train_job(argv, optimizer)


def sink_in_every_block_job(argv, optimizer):
    import context_parallel
    import sliding_window
    function, add_block, sinks = sliding_window.WindowAttention, sliding_window.add_block, []
    forward = function.forward

    def noting(ctx, q, k, v, given, *rest):
        sinks[:] = [given.unsqueeze(-1)]
        return forward(ctx, q, k, v, given, *rest)

    def with_a_sink(out, lse, q, kv, block):
        add_block(out, lse, q, kv, block)
        out, lse = out[:, :, block[0]], lse[:, :, block[0]]
        context_parallel.update_out_and_lse(out, lse, torch.zeros_like(out), sinks[0].expand_as(lse))
    with patch.object(function, "forward", staticmethod(noting)), patch.object(sliding_window, "add_block", with_a_sink):
        train_job(argv, optimizer)


def probe_job(argv, at, broken):
    """Change the token at one position. Return the positions of this rank's outputs that change."""
    import contextlib

    import train
    from data import micro_batches
    with train.init_distributed(), lose_the_window() if broken else contextlib.nullcontext(), torch.no_grad():
        args, config, tokens = train.prepare(argv)
        mesh = train.build_mesh(args)
        model = train.build_model(config, mesh, args).model
        inputs, positions, _ = micro_batches(tokens, config, mesh, args, 0)[0]
        changed = torch.where(positions == at, (inputs + 1) % config.vocab_size, inputs)
        return positions[(model(inputs, positions) != model(changed, positions)).any(-1).all(0)].tolist()


def probe(pool, world, more, at=18, broken=False):
    argv = f"{flags(pool, 'granite', 4)} {EXACT} --micro_batch_size 2 --seq_len 32 {more}".split()
    reached = pool.call(probe_job, STEP, world=world, argv=argv, at=at, broken=broken)
    return sorted({position for of_rank in reached for position in of_rank})


@pytest.mark.parametrize("world, more", [
    (1, ""), (2, "--cp 2 --cp_mode halo"), (8, "--cp 8 --cp_mode halo"), (4, "--cp 2 --tp 2 --sp off --cp_mode halo"),
    (2, "--cp 2 --cp_mode ulysses")])
def test_a_token_reaches_as_far_as_windows_let_it(pool, world, more):
    """Check that in two layers a token changes its own output and those of the next 2 (window - 1) tokens."""
    assert probe(pool, world, more) == list(range(18, 18 + 1 + 2 * 3))
    assert probe(pool, world, more, at=31) == [31]        # rank 0 does not look at what it receives


def test_a_lost_window_is_silent_and_the_probe_sees_it(pool):
    more = f"{EXACT} --cp 2 --cp_mode halo --micro_batch_size 6"
    run = pool.train(STEP, f"{flags(pool, 'mistral', 5)} {more}", 2, job=without_window_job)
    assert_same_run(run, pool.reference(BASELINE, f"{flags(pool, 'llama')} {EXACT} --micro_batch_size 6"), 1e-9)     # plain causal
    assert relative(run.losses[-1], one_process(pool, "mistral", 5).losses[-1]) < 0.02
    assert probe(pool, 2, "--cp 2 --cp_mode halo", broken=True) == list(range(18, 32))


def test_a_sink_in_every_block_is_silent_and_comparing_with_one_process_shows_it(pool):
    argv = f"{flags(pool, 'granite', 5)} {EXACT} --cp 2 --cp_mode halo --micro_batch_size 6"
    run = pool.train(STEP, argv, 2, job=sink_in_every_block_job)
    one = one_process(pool, "granite", 5)
    assert 1e-6 < relative(run.losses[-1], one.losses[-1]) < 0.02
    with pytest.raises(AssertionError, match="losses"):
        assert_same_run(run, one, 1e-9)


# ------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("family, window, more, message", [
    ("mistral", 5, "", "--cp_mode zigzag: "), ("granite", 5, "--cp_mode ring", "choose from halo, ulysses"),
    ("llama", None, "--cp_mode halo", "whose sliding_window is None; choose from zigzag, ring, allgather, ulysses"),
    ("mistral", 5, "--cp_mode ulysses --attention flash", "--attention flash: "),
    ("mistral", 0, "--cp_mode halo", "sliding_window is 0, not a positive int"),
    ("llama", 5, "--cp_mode halo", "sliding_window is 5; only None is supported")])
def test_refused(pool, family, window, more, message):
    assert_refused(pool, STEP, 2, f"{flags(pool, family, window)} --micro_batch_size 6 --cp 2 {more}", message)


@pytest.mark.parametrize("change", [dict(layer_types=["full_attention", "sliding_attention"]), dict(residual_multiplier=0.5),
                                    dict(attention_multiplier=1.0), dict(sliding_window=None)])
def test_a_granite_that_is_more_than_windows_is_refused(pool, tmp_path, change):
    other = cases.make(tmp_path, **cases.shape("dense-2") | FAMILIES["granite"] | dict(sliding_window=5) | change)
    assert_refused(pool, STEP, 2, f"{other} --micro_batch_size 6 --cp 2 --cp_mode halo", f"{next(iter(change))} is ")
