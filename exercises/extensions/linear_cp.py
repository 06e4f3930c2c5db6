"""linear_cp.patch: it equals a plain recurrence, however the sequence is sharded, and its bytes do not grow with the sequence.

Softmax lets every token look at every earlier one, so a rank has to see the keys and values of all other ranks. A gated linear
layer keeps only one matrix per head of the past, the state. Each token fades the state by a gate and adds its key times its value.
By hand, with numbers instead of matrices and a gate of 1/2: put tokens 4, 2 on rank 0 and 6, 8 on rank 1. Rank 0 ends with 2 + 4/2
= 4. Rank 1 starts from 0 and ends with 8 + 6/2 = 11; whatever state reaches it will have been halved twice, so its tokens act as
the map S -> S/4 + 11. From these two pairs, (1/4, 4) and (1/4, 11), each rank computes what reaches it: rank 1 gets 4, and the end
is 12.

Ranks all-gather one pair each, and in backward the gradients of the pairs are reduce-scattered. With zigzag, a rank has an early
and a late run of tokens, so two pairs. With one run per rank, the first rank needs nobody's pair. So autograd would skip its part
in the reduce-scatter, and the others would wait for ever. Therefore its state is made to depend on all pairs, too. --softmax_every
4 has three linear layers for each layer with softmax.

Payload per step of llama-1b, with 16,384 tokens on cp 8: the ring sends 2,013,265,920 bytes on each rank. With linear layers alone,
the formula says 134,250,496 bytes gathered and as many reduce-scattered, at any length; half of that with one run per rank
(ulysses), as simulated here. Seconds per step on H100s, then how much of that is waiting for what these layers send:

| | 16,384 tokens | 65,536 tokens |
|---|---|---|
| one machine, ring | 0.125, 0.002 | 0.643, 0.007 |
| states | 0.280, 0.006 | 0.965, 0.001 |
| eight machines, ring | 0.368, 0.052 | 0.723, 0.027 |
| states | 0.482, 0.194 | 1.017, 0.116 |

    python tools/simulate exercise/linear_cp 8 --model llama-1b --dtype bfloat16 --cp 8 --global_batch_size 1 --micro_batch_size 1
        --seq_len 16384 --cp_mode ulysses --softmax_every 99 --gpus_per_node 1      # the ring: without --cp_mode, --softmax_every

The ring is faster: its kernels are fused, and these are plain products of 64 tokens in float32. But for four times the tokens, the
ring takes 5.1 times as long on one machine, and the states 3.4 times. Between machines, sending few bytes does not help: gradients
are summed in the same group (dp is 1), and backward's small reduce-scatter queues behind them.
"""
import cases
import observe
import pytest
import torch
from harness import assert_same_run
from jobs import ledger_rows

STEP, EXACT = "step05_cp", "--dtype float64"


# ------------------------------------------------------------------------------------- a plain recurrence
def recurrence(q, k, v):
    """Compute token by token, as the formula says."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    state, outputs = torch.zeros(len(q), q.shape[2], k.shape[3], v.shape[3], dtype=q.dtype), []
    for t in range(q.shape[1]):
        gate = torch.sigmoid(4 + k[:, t].mean(-1))[..., None, None]
        state = gate * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) / q.shape[-1] @ state).squeeze(-2))
    return torch.stack(outputs, 1)


def attention_job(mode, tokens):
    """Return the relative errors of the output and of three gradients, for this rank's tokens."""
    from types import SimpleNamespace

    import context_parallel
    import linear_attention
    import torch.distributed as dist
    import train
    with train.init_distributed():
        group, cp, draw = dist.group.WORLD, dist.get_world_size(), torch.Generator().manual_seed(0)
        whole = [torch.randn(2, tokens, heads, 6, generator=draw, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
        weight = torch.randn(2, tokens, 4, 6, generator=draw, dtype=torch.float64)
        mesh, args = SimpleNamespace(get_local_rank=lambda _: group.rank()), SimpleNamespace(seq_len=tokens, cp=cp, cp_mode=mode)
        local = context_parallel.local_positions(mesh, args)
        expected = recurrence(*whole)
        (expected * weight).sum().backward()
        parts = [t.detach()[:, local].requires_grad_() for t in whole]
        out = linear_attention.linear_attention(mode, group)(*parts)
        (out * weight[:, local]).sum().backward()
        pairs = [(out, expected[:, local]), *((part.grad, t.grad[:, local]) for part, t in zip(parts, whole))]
        return [float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs]


@pytest.mark.parametrize("world, mode", [(1, "ring"), (2, "ring"), (2, "zigzag"), (4, "zigzag"), (3, "ring")])
def test_equals_a_plain_recurrence(pool, world, mode):
    """Use full blocks and one that is not full: 72 tokens on a rank, or runs of 72."""
    tokens = 72 * world * (2 if mode == "zigzag" else 1)
    for errors in pool.call(attention_job, STEP, world=world, mode=mode, tokens=tokens):
        assert max(errors) < 1e-12, errors


# ------------------------------------------------------------------------------------- in the trainer
@pytest.mark.parametrize("every", [2, 9])                 # half of the layers have a softmax; none has
@pytest.mark.parametrize("world, flags", [
    (2, "--cp 2 --cp_mode ring --micro_batch_size 6"), (2, "--cp 2 --cp_mode zigzag --micro_batch_size 6 --recompute full"),
    (4, "--cp 4 --cp_mode zigzag --micro_batch_size 12"), (4, "--cp 2 --cp_mode ulysses --tp 2 --micro_batch_size 12"),
    (4, "--cp 2 --cp_mode allgather --micro_batch_size 6 --zero 3 --recompute selective"),
    (8, "--cp 2 --tp 2 --micro_batch_size 12 --sp off")])
def test_trains_as_one_process(pool, every, world, flags):
    base = f"{observe.case(pool, 'dense-4')} {EXACT} --softmax_every {every}"
    one = pool.reference(STEP, f"{base} --micro_batch_size 6")
    run = pool.train(STEP, f"{base} {flags}", world, job=observe.observed_job)
    assert_same_run(run, one, 1e-9, flags)
    operations, per_rank = zip(*run.answers)
    assert observe.assert_all_meet(operations) > 0
    assert all(seen == formula for sent in per_rank for seen, formula in sent.values()), per_rank


def test_without_the_flag_it_is_the_step_itself(pool):
    flags = f"{observe.case(pool, 'dense-2')} {EXACT} --micro_batch_size 6"
    assert_same_run(pool.train(STEP, f"{flags} --cp 2", 2), pool.reference("step01_single_gpu", flags), 1e-9)


def sent_by(pool, more):
    flags = f"{observe.case(pool, 'dense-4')} {EXACT} --micro_batch_size 2 --global_batch_size 4 --steps 2 --cp 4 --ledger"
    rows = ledger_rows(pool.train(STEP, f"{flags} {more}", 4, weights=False).output)
    return {what: size for (dim, what), (_, size, _, _) in rows.items() if dim == "cp"}


def test_bytes_do_not_grow_with_the_sequence(pool):
    """Check that only a ring's bytes grow. By hand: 4 sequences, 4 layers, 2 runs on each of 4 ranks, and for each head a matrix
    and a gate."""
    state = 8 * 4 * 4 * 2 * 4 * cases.HEADS * (cases.HEAD_DIM ** 2 + 1)
    linear = [sent_by(pool, f"--softmax_every 9 --seq_len {seq}") for seq in (16, 64)]
    for sent in linear:
        assert sent.get("send", 0) == 0 and sent["all_gather"] == sent["reduce_scatter"] == state
    short, long = (sent_by(pool, f"--seq_len {seq}")["send"] for seq in (16, 64))
    assert long == 4 * short
    both = sent_by(pool, "--softmax_every 2 --seq_len 64")
    assert both["all_gather"] == state / 2 and both["send"] == long / 2
