"""Two experts with two copies each: ranks 0 and 1 hold one copy of each expert, ranks 2 and 3 the other."""
import torch
import torch.distributed as dist

#         ranks 0 and 1   ranks 2 and 3: how many tokens each of them has for expert 0 and expert 1
CHOSEN = [((5, 3),        (4, 4)),
          ((2, 6),        (7, 1)),
          ((6, 2),        (8, 0)),
          ((3, 5),        (6, 2))]


def main(rank, world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for step in range(4):
        sends = CHOSEN[step][rank // 2]
        gets = [sends[rank % 2]] * 2
        rows = torch.empty(sum(gets), 16)
        dist.all_to_all_single(rows, torch.ones(sum(sends), 16), gets, sends, group=pairs[rank // 2])
        if len(rows):
            gradient = rows.T @ rows                      # instead of a backward pass
            dist.all_reduce(gradient, group=copies[rank % 2])
        dist.all_reduce(torch.ones(1))                    # the gradient norm
