"""FSDP in one small class: hooks do what by_hand.py's loops did.

    python step03_zero/by_hand_fsdp.py
"""
import tempfile

import torch
import torch.distributed as dist
from torch import nn

RANKS, BLOCKS, DIM, BATCH, STEPS = 4, 6, 64, 8, 3
events = []                                                 # +3: block 3 was gathered; -3: it was freed


class ShardedBlock:
    def __init__(self, number, block):
        self.number, self.params = number, list(block.parameters())
        self.flat = torch.cat([param.detach().flatten() for param in self.params])
        self.shard = nn.Parameter(self.flat.chunk(RANKS)[dist.get_rank()].clone())  # free would empty a view
        for param, view in zip(self.params, self.flat.split([param.numel() for param in self.params])):
            # nn.Parameter(view) would share flat's version counter: backward would reject what gather rewrote
            param.data = view.view_as(param)
            param.register_post_accumulate_grad_hook(self.after_gradient)
        block.register_forward_pre_hook(lambda block, inputs: self.gather())
        block.register_forward_hook(self.after_forward)
        self.free()

    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather(list(self.flat.chunk(RANKS)), self.shard.detach())
        events.append(f"+{self.number}")

    def free(self):                                         # only the memory: all views stay, autograd's too
        self.flat.untyped_storage().resize_(0)
        events.append(f"-{self.number}")

    def after_forward(self, block, inputs, output):
        output.register_hook(lambda grad: self.gather())    # backward enters a block through its output
        self.free()

    def after_gradient(self, param):
        if all(param.grad is not None for param in self.params):    # the last one: nothing reads weights now
            self.free()
            whole = torch.cat([param.grad.flatten() for param in self.params])
            self.shard.grad = torch.empty_like(self.shard)
            dist.reduce_scatter(self.shard.grad, list(whole.chunk(RANKS)))
            for param in self.params:
                param.grad = None


def train(rank, ranks, folder):                             # one rank trains without sharding
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    torch.manual_seed(0)                                    # the same weights and batches on every rank
    model = nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(BLOCKS)]).double()
    params = [ShardedBlock(*pair).shard for pair in enumerate(model)] if ranks > 1 else [*model.parameters()]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    for _ in range(STEPS):
        loss = model(torch.randn(BATCH, DIM).double().chunk(ranks)[rank]).square().sum() / BATCH  # my rows
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    if rank == 0:
        print(f"ranks {ranks}  loss {loss:.12f}", *events[-4 * BLOCKS:], flush=True)
    torch.save(torch.cat([p.detach().flatten() for p in params]).view(BLOCKS, -1), f"{folder}/{rank}-{ranks}")
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    for ranks in (RANKS, 1):
        torch.multiprocessing.start_processes(train, (ranks, folder), ranks, start_method="fork")
    shards = [torch.load(f"{folder}/{rank}-{RANKS}") for rank in range(RANKS)]
    torch.testing.assert_close(torch.cat(shards, dim=1), torch.load(f"{folder}/0-1"))
