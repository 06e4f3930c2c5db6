"""Ring attention on four real ranks, in plain ring order and then with zigzag: python step05_cp/by_hand.py"""
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

CP, BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16, 6, 2, 8    # three query heads share each kv head


def local_positions(rank, mode):                          # of this rank's tokens in the sequence
    if mode == "ring":
        return torch.arange(SEQ).chunk(CP)[rank]
    chunks = torch.arange(SEQ).chunk(2 * CP)
    return torch.cat((chunks[rank], chunks[-1 - rank]))   # one from each end of the sequence


def group_heads(t):                                       # [batch, seq, heads, head_dim]
    return t.unflatten(2, (KV_HEADS, -1)).movedim(1, 3)   # [batch, kv_heads, heads/kv_heads, seq, head_dim]


def scores_of(q, k, rank, source, mode):                  # a block: rank's queries, and the keys of source
    scores = q @ k.mT / HEAD_DIM**0.5                     # @ repeats a kv head for its query heads
    queries, keys = local_positions(rank, mode), local_positions(source, mode)
    return scores.masked_fill(keys > queries.unsqueeze(-1), -torch.inf)        # no query sees a later key


def ring_send_recv(tensor, rank):
    """Start sending to the next rank and receiving from the previous one. Return a function that waits."""
    recv_buffer = torch.empty_like(tensor)
    handles = [dist.isend(tensor, (rank + 1) % CP), dist.irecv(recv_buffer, (rank - 1) % CP)]
    def receive():
        [handle.wait() for handle in handles]
        return recv_buffer
    return receive


def forward(q, k, v, rank, mode):
    out, seen = torch.zeros_like(q), []
    lse = torch.full_like(q[..., :1], -torch.inf)         # the log of an empty sum
    for hop in range(CP):
        receive_kv = ring_send_recv(torch.stack((k, v)), rank)   # they travel while this rank computes
        source = (rank - hop) % CP                        # the rank whose k and v are here now
        scores = scores_of(q, k, rank, source, mode)
        total_lse = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))   # with the keys of this hop
        out = (lse - total_lse).exp() * out + (scores - total_lse).exp() @ v   # the mean of all values so far
        lse = total_lse
        seen.append(int(scores[0, 0, 0].isfinite().sum()))                     # of one query head
        k, v = receive_kv()                               # after the last hop, its own are back
    return out, lse, seen


def backward(grad_out, q, k, v, out, lse, rank, mode):
    mean = (grad_out * out).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for hop in range(CP):
        scores = scores_of(q, k, rank, (rank - hop) % CP, mode)
        probs = (scores - lse).exp()                      # the final lse gives the final probabilities
        grad_scores = probs * (grad_out @ v.mT - mean) / HEAD_DIM**0.5
        grad_q += grad_scores @ k
        # this rank's terms for the keys that are here now: a kv head sums over the query heads that share it
        grad_k += (grad_scores.mT @ q).sum(2, keepdim=True)
        grad_v += (probs.mT @ grad_out).sum(2, keepdim=True)
        k, v, grad_k, grad_v = ring_send_recv(torch.stack((k, v, grad_k, grad_v)), rank)()
    return grad_q, grad_k, grad_v                         # after a full round, those of its own keys are back


def one_process(q, k, v, grad_out):                       # torch's attention on all tokens
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    q, k, v = (t.transpose(1, 2) for t in leaves)         # [batch, heads, seq, head_dim]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=CP)
    torch.manual_seed(0)                                  # the same numbers on every rank
    q, k, v, grad_out = whole = [torch.randn(BATCH, SEQ, heads, HEAD_DIM, dtype=torch.float64)
                                 for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    expected = one_process(*whole)
    for mode in ("ring", "zigzag"):
        tokens, lines = local_positions(rank, mode), [None] * CP
        mine = lambda tensors: tuple(group_heads(t[:, tokens]) for t in tensors)
        q, k, v, grad_out = mine(whole)
        out, lse, seen = forward(q, k, v, rank, mode)
        grads = backward(grad_out, q, k, v, out, lse, rank, mode)
        torch.testing.assert_close((out, *grads), mine(expected))
        dist.all_gather_object(lines, f"rank {rank} has tokens {tokens.tolist()}; scores at each hop: {seen}")
        if rank == 0:
            print(mode, *lines, "outputs and gradients equal those of one process", sep="\n")
    dist.barrier()                                        # no rank exits while others still communicate
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    mp.start_processes(main, (folder,), nprocs=CP, start_method="fork")
