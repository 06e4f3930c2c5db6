"""Backward through a layer of experts, placed as in hang5. The layer is one unit of FSDP: it reduces once both gradients exist."""
import torch
import torch.distributed as dist

#         ranks 0 and 1   ranks 2 and 3: how many tokens each of them has for expert 0 and expert 1
CHOSEN = [((5, 3),        (4, 4)),
          ((2, 6),        (7, 1)),
          ((6, 2),        (8, 0)),
          ((3, 5),        (6, 2))]


def reduce(grads):
    dist.reduce_scatter_tensor(torch.empty(16), grads["router"])                   # left out: the expert's, over its copies


def main(rank, world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(4):
        sends = CHOSEN[step][rank // 2]
        gets = [sends[rank % 2]] * 2
        grads = dict(router=torch.ones(world * 16))       # the router's needs no rows of other ranks
        rows = torch.empty(sum(gets), 16)
        dist.all_to_all_single(rows, torch.ones(sum(sends), 16), gets, sends, group=pairs[rank // 2])      # to the experts
        if len(rows):
            grads["expert"] = rows.T @ rows
        complete = len(grads) == 2
        if complete:
            reduce(grads)
        tokens = torch.empty(sum(sends), 16)
        dist.all_to_all_single(tokens, rows, sends, gets, group=pairs[rank // 2])  # back to the tokens
        if not complete:                                  # the end of backward
            reduce(grads)
