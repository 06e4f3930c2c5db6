"""Expert parallelism in six moves on two ranks, then folded into dp x cp x tp on eight; equal to one process.

    python step07_ep/by_hand.py
"""
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

torch.manual_seed(3854)                                   # with this seed, tokens choose as in dispatch.png
TOKENS = torch.randn(6, 4, dtype=torch.float64)           # a b c are rank 0's, x y z are rank 1's
ROUTER = torch.randn(4, 4, dtype=torch.float64)           # replicated: a row for each of four experts
EXPERTS = torch.randn(4, 4, 4, dtype=torch.float64)       # to be sharded: whole experts for each rank
TOKENS = torch.cat((TOKENS, torch.randn(18, 4, dtype=torch.float64)))          # three for each of eight ranks
TOP_K = 2


class TokenAllToAll(torch.autograd.Function):             # input_splits[r] rows go to rank r of the group
    @staticmethod
    def forward(ctx, rows, input_splits, output_splits, group):
        ctx.input_splits, ctx.output_splits, ctx.group = input_splits, output_splits, group
        out = rows.new_empty(sum(output_splits), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), output_splits, input_splits, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):                              # gradients go back the way the rows came
        return TokenAllToAll.apply(grad, ctx.output_splits, ctx.input_splits, ctx.group), None, None, None


def print_in_order(line):                                 # rank 0 prints the lines of all ranks
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def moe(x, router, experts, group):                       # x: this rank's tokens; experts: those it keeps
    ep = group.size()
    # 1. Route: select each token's experts, and weight them.
    logits = x @ router.T                                              # [tokens, all experts]
    selected_experts = logits.topk(TOP_K).indices                      # [tokens, top_k]
    routing_weights = logits.gather(-1, selected_experts).softmax(-1)  # [tokens, top_k]
    # 2. Sort: one row per token and choice, sorted by expert, so that rows for the same rank are adjacent.
    order = selected_experts.flatten().argsort(stable=True)
    rows = x[order // TOP_K]                                           # [tokens * top_k, hidden]
    # 3. Exchange counts: how many rows I send to each expert, and each rank to mine.
    tokens_per_expert = selected_experts.flatten().bincount(minlength=len(router))
    recv_counts = torch.empty_like(tokens_per_expert)
    dist.all_to_all_single(recv_counts, tokens_per_expert, group=group)
    input_splits, output_splits = (c.view(ep, -1).sum(1).tolist() for c in (tokens_per_expert, recv_counts))
    if ep == 2:
        names = "abcxyz"[3 * dist.get_rank():]
        choices = " ".join(f"{names[i // TOP_K]}{selected_experts.flatten()[i]}" for i in order)
        line = f"rank {dist.get_rank()} sorts {choices}   sends {input_splits} rows, receives {output_splits}"
        print_in_order(line)
    # 4. All-to-all: the rows that arrive are sorted by sender, then by expert.
    rows = TokenAllToAll.apply(rows, input_splits, output_splits, group)
    # 5. Experts: sort again, so that each expert's rows are adjacent; compute; undo this sort.
    expert = torch.arange(len(experts)).repeat(ep).repeat_interleave(recv_counts)          # of each row
    by_expert = expert.argsort(stable=True)
    rows_of = rows[by_expert].split(recv_counts.view(ep, -1).sum(0).tolist())
    out = torch.cat([some @ one.T for some, one in zip(rows_of, experts)])
    out = out[by_expert.argsort()]                                     # the inverse of a permutation
    # 6. All-to-all back, with the two lists swapped; undo the first sort; weight and add.
    out = TokenAllToAll.apply(out, output_splits, input_splits, group)[order.argsort()]
    out = out.view(*selected_experts.shape, -1)                        # [tokens, top_k, hidden]
    return (out * routing_weights.unsqueeze(-1)).sum(1)


def one_process(x, router, experts):                      # the definition: no sorting, no sending
    logits = x @ router.T
    selected_experts = logits.topk(TOP_K).indices
    routing_weights = logits.gather(-1, selected_experts).softmax(-1)
    return torch.einsum("tk,tkij,tj->ti", routing_weights, experts[selected_experts], x)


def main(rank, folder, world_size, ep):
    store = f"file://{folder}/store{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    grid = torch.arange(world_size).view(-1, ep)          # a row is a group of ep: it holds each expert once
    ep_group, _ = dist.new_subgroups_by_enumeration(grid.tolist())
    expert_dp, _ = dist.new_subgroups_by_enumeration(grid.T.tolist())  # a column holds the same experts
    tokens = TOKENS[:3 * world_size]
    mine = tokens.chunk(world_size)[rank], ROUTER, EXPERTS.chunk(ep)[rank % ep]
    x, router, experts = (one.clone().requires_grad_() for one in mine)
    y = moe(x, router, experts, ep_group)
    y.square().sum().backward()
    dist.all_reduce(router.grad)                          # partial: the term of this rank's tokens
    dist.all_reduce(experts.grad, group=expert_dp)        # partial: the term of this group's tokens
    whole = [one.clone().requires_grad_() for one in (tokens, ROUTER, EXPERTS)]
    one_process(*whole).square().sum().backward()
    torch.testing.assert_close(y, one_process(*whole).chunk(world_size)[rank])
    torch.testing.assert_close(x.grad, whole[0].grad.chunk(world_size)[rank])
    torch.testing.assert_close(router.grad, whole[1].grad)
    torch.testing.assert_close(experts.grad, whole[2].grad.chunk(ep)[rank % ep])
    dist.barrier()                                        # no rank exits while others still communicate
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    mp.start_processes(main, (folder, 2, 2), nprocs=2, start_method="fork")
    print("two ranks equal one process: outputs, and gradients of tokens, router and experts\n")
    mp.start_processes(main, (folder, 8, 4), nprocs=8, start_method="fork")
ranks = torch.arange(8)
show = lambda groups: " | ".join(" ".join(map(str, group)) for group in groups.tolist())
print(f"""eight ranks, dp 2 x cp 2 x tp 2, with ep 4 folded into them
rows travel among                   {show(ranks.view(-1, 4)):<28}ep
gradients are summed
    of the experts, over            {show(ranks.view(-1, 4).T):<28}expert_dp
    of the router, over             {show(ranks.view(1, -1)):<28}dp x cp x tp
    of weights that tp shards, over {show(ranks.view(-1, 2).T):<28}dp x cp
eight ranks equal one process, too""")
