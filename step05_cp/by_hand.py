"""Ring attention on four real ranks, forward and backward, in plain ring order and then with zigzag.

    python step05_cp/by_hand.py
"""
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

cp, seq, head_dim = 4, 16, 8                              # ranks; tokens; the size of a head
batch, kv_heads, sharing = 2, 2, 3                        # how many query heads share each kv head
# q and out are [batch, kv_heads, sharing, tokens, head_dim]; k and v have a 1 in place of `sharing`


def tokens_of(rank, mode):                                # this rank's positions in the sequence
    chunks = torch.arange(seq).chunk(2 * cp)
    return torch.cat((chunks[rank], chunks[-1 - rank]) if mode == "zigzag" else chunks[2 * rank:2 * rank + 2])


def scores(q, k, rows, columns):                          # of a block; -inf where the key comes later
    return (q @ k.mT / head_dim ** 0.5).masked_fill(columns > rows[:, None], -torch.inf)


def pass_on(tensor, rank):
    """Start sending to the next rank and receiving from the previous one. Return a function that waits."""
    recv_buffer = torch.empty_like(tensor)
    handles = [dist.isend(tensor, (rank + 1) % cp), dist.irecv(recv_buffer, (rank - 1) % cp)]
    def receive():
        [handle.wait() for handle in handles]
        return recv_buffer
    return receive


def forward(q, k, v, rank, mode):
    out, seen = torch.zeros_like(q), []
    lse = torch.full_like(q[..., :1], -torch.inf)         # the log of an empty sum
    for hop in range(cp):
        receive = pass_on(torch.stack((k, v)), rank)      # they travel while this rank computes with k and v
        block = scores(q, k, tokens_of(rank, mode), tokens_of((rank - hop) % cp, mode))
        total = torch.logaddexp(lse, block.logsumexp(-1, keepdim=True))        # with the keys of this hop
        out = (lse - total).exp() * out + (block - total).exp() @ v            # the mean of all values so far
        lse = total
        seen.append(int(block[0, 0, 0].isfinite().sum()))                      # of one head
        k, v = receive()                                  # after the last hop, its own are back
    return out, lse, seen


def backward(grad_out, q, k, v, out, lse, rank, mode):
    mean = (grad_out * out).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for hop in range(cp):
        block = scores(q, k, tokens_of(rank, mode), tokens_of((rank - hop) % cp, mode))
        P = (block - lse).exp()                           # the final lse gives the final probabilities
        grad_block = P * (grad_out @ v.mT - mean) / head_dim ** 0.5
        grad_q += grad_block @ k
        # this rank's term, for the keys that are here now: the sum over the query heads that share them
        grad_k += (grad_block.mT @ q).sum(2, keepdim=True)
        grad_v += (P.mT @ grad_out).sum(2, keepdim=True)
        k, v, grad_k, grad_v = pass_on(torch.stack((k, v, grad_k, grad_v)), rank)()
    return grad_q, grad_k, grad_v                         # after a full round, those of its own keys are back


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=cp)
    torch.manual_seed(0)                                  # the same numbers on every rank
    draw = lambda heads: torch.randn(batch, kv_heads, heads, seq, head_dim, dtype=torch.float64)
    q, k, v, grad_out = whole = draw(sharing), draw(1), draw(1), draw(sharing)
    every = torch.arange(seq)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    expected = scores(q, k, every, every).softmax(-1) @ v                      # one process, all tokens
    grads = torch.autograd.grad(expected, (q, k, v), grad_out)
    for mode in ("ring", "zigzag"):
        tokens, lines = tokens_of(rank, mode), [None] * cp
        mine = lambda tensors: tuple(tensor.detach()[..., tokens, :] for tensor in tensors)
        q, k, v, grad_out = mine(whole)
        out, lse, seen = forward(q, k, v, rank, mode)
        ours = backward(grad_out, q, k, v, out, lse, rank, mode)
        torch.testing.assert_close((out, *ours), mine((expected, *grads)))
        dist.all_gather_object(lines, f"rank {rank} has tokens {tokens.tolist()}; scores at each hop: {seen}")
        if rank == 0:
            print(mode, *lines, "outputs and gradients equal those of one process", sep="\n")
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    mp.start_processes(main, (folder,), nprocs=cp, start_method="fork")
