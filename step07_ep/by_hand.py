"""Expert parallelism in six moves, on two real ranks, equal to one process: python step07_ep/by_hand.py"""
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

torch.manual_seed(3854)                                   # with it the tokens choose as in dispatch.png
TOKENS = torch.randn(6, 4, dtype=torch.float64)           # a b c are rank 0's, x y z are rank 1's
ROUTER = torch.randn(4, 4, dtype=torch.float64)           # replicated: a row for each of four experts
EXPERTS = torch.randn(4, 4, 4, dtype=torch.float64)       # to be sharded: two whole experts for each rank
TOP_K = 2


class AllToAll(torch.autograd.Function):                  # sent[r] rows to rank r, received[r] from it
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sent, ctx.received = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):                              # gradients go back the way that rows came
        return AllToAll.apply(grad, ctx.received, ctx.sent), None, None


def print_in_order(line):                                 # rank 0 prints what all ranks say
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def moe(x, router, experts, names):                       # x: this rank's tokens; experts: those it keeps
    ranks = dist.get_world_size()
    # 1. Route: whom each token chooses, and how much each counts.
    logits = x @ router.T                                              # [tokens, all experts]
    expert = logits.topk(TOP_K).indices                                # [tokens, top_k]
    share = logits.gather(-1, expert).softmax(-1)                      # [tokens, top_k]
    # 2. Sort: a row per token and choice, in the order of experts, so rows for the same rank stand together.
    order = expert.flatten().argsort(stable=True)
    rows = x[order // TOP_K]                                           # [tokens * top_k, hidden]
    # 3. Exchange counts: what I send to each expert, what each rank sends to mine.
    counts = expert.flatten().bincount(minlength=len(router))
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    sent, received = counts.view(ranks, -1).sum(1).tolist(), theirs.view(ranks, -1).sum(1).tolist()
    choices = " ".join(f"{names[i // TOP_K]}{expert.flatten()[i]}" for i in order)
    print_in_order(f"rank {dist.get_rank()} sorts {choices}   sends {sent} rows, receives {received}")
    # 4. All-to-all: what comes is sorted by sender, and within each sender by expert.
    rows = AllToAll.apply(rows, sent, received)
    # 5. Experts: sort once more, so that each expert's rows stand together; compute; undo that sort.
    whose = torch.arange(len(experts)).repeat(ranks).repeat_interleave(theirs)
    again = whose.argsort(stable=True)
    of_each = rows[again].split(theirs.view(ranks, -1).sum(0).tolist())
    out = torch.cat([some @ one.T for some, one in zip(of_each, experts)])
    out = out[again.argsort()]                                         # the inverse of a permutation
    # 6. All-to-all back, with the two lists exchanged; undo the first sort; weigh and add.
    out = AllToAll.apply(out, received, sent)[order.argsort()].view(*expert.shape, -1)
    return (out * share.unsqueeze(-1)).sum(1)


def one_process(x, router, experts):                      # the definition: nothing sorted, nothing sent
    expert = (x @ router.T).topk(TOP_K).indices
    share = (x @ router.T).gather(-1, expert).softmax(-1)
    return torch.einsum("tk,tkij,tj->ti", share, experts[expert], x)


def main(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mine = TOKENS.chunk(ranks)[rank], ROUTER, EXPERTS.chunk(ranks)[rank]
    x, router, experts = (one.clone().requires_grad_() for one in mine)
    y = moe(x, router, experts, "abcxyz"[3 * rank:])
    y.square().sum().backward()
    dist.all_reduce(router.grad)                          # partial: of my tokens. An expert's is complete
    whole = [one.clone().requires_grad_() for one in (TOKENS, ROUTER, EXPERTS)]
    one_process(*whole).square().sum().backward()
    torch.testing.assert_close(y, one_process(*whole).chunk(ranks)[rank])
    torch.testing.assert_close(router.grad, whole[1].grad)
    for part, all in ((x, whole[0]), (experts, whole[2])):
        torch.testing.assert_close(part.grad, all.grad.chunk(ranks)[rank])
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    mp.start_processes(main, (2, folder), nprocs=2, start_method="fork")
print("two ranks equal one process: outputs, and gradients of tokens, router and experts")
