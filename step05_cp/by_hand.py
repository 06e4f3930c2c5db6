"""Ring attention on four real ranks, forward and backward, in plain ring order and then with zigzag.

    python step05_cp/by_hand.py
"""
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

cp, seq, dim = 4, 16, 8                                   # ranks; tokens; the size of a head


def tokens_of(rank, mode):                                # this rank's positions in the sequence
    chunks = torch.arange(seq).chunk(2 * cp)
    return torch.cat((chunks[rank], chunks[-1 - rank]) if mode == "zigzag" else chunks[2 * rank:2 * rank + 2])


def scores(q, k, rows, columns):                          # of a block; -inf where the key comes later
    return (q @ k.T / dim ** 0.5).masked_fill(columns > rows[:, None], -torch.inf)


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
    lse = q.new_full((len(q), 1), -torch.inf)             # the log of an empty sum
    for hop in range(cp):
        receive = pass_on(torch.stack((k, v)), rank)      # they travel while this rank computes with k and v
        block = scores(q, k, tokens_of(rank, mode), tokens_of((rank - hop) % cp, mode))
        total = torch.logaddexp(lse, block.logsumexp(1, keepdim=True))         # with the keys of this hop
        out = (lse - total).exp() * out + (block - total).exp() @ v            # the mean of all values so far
        lse = total
        seen.append(int(block.isfinite().sum()))
        k, v = receive()                                  # after the last hop, its own are back
    return out, lse, seen


def backward(grad_out, q, k, v, out, lse, rank, mode):
    mean = (grad_out * out).sum(1, keepdim=True)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for hop in range(cp):
        block = scores(q, k, tokens_of(rank, mode), tokens_of((rank - hop) % cp, mode))
        P = (block - lse).exp()                           # the final lse gives the final probabilities
        grad_block = P * (grad_out @ v.T - mean) / dim ** 0.5
        grad_q += grad_block @ k
        grad_k += grad_block.T @ q                        # this rank's term, for the keys that are here now
        grad_v += P.T @ grad_out
        k, v, grad_k, grad_v = pass_on(torch.stack((k, v, grad_k, grad_v)), rank)()
    return torch.stack((grad_q, grad_k, grad_v))          # after a full round, those of its own keys are back


def main(rank, port):
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=cp)
    torch.manual_seed(0)                                  # the same numbers on every rank
    whole = torch.randn(4, seq, dim, dtype=torch.float64, requires_grad=True)
    (q, k, v, grad_out), every = whole, torch.arange(seq)
    expected = scores(q, k, every, every).softmax(1) @ v                       # one process, all tokens
    grads = torch.autograd.grad(expected, whole, grad_out)[0][:3]
    for mode in ("ring", "zigzag"):
        mine, lines = tokens_of(rank, mode), [None] * cp
        with torch.no_grad():
            out, lse, seen = forward(q[mine], k[mine], v[mine], rank, mode)
            ours = backward(grad_out[mine], q[mine], k[mine], v[mine], out, lse, rank, mode)
        torch.testing.assert_close((out, ours), (expected[mine], grads[:, mine]))
        dist.all_gather_object(lines, f"rank {rank} has tokens {mine.tolist()}; scores at each hop: {seen}")
        if rank == 0:
            print(mode, *lines, "outputs and gradients equal those of one process", sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, (server.port,), nprocs=cp)
