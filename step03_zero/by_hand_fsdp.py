"""FSDP in one small class: hooks do what by_hand.py's loops did.

    python step03_zero/by_hand_fsdp.py
"""
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

DP, BLOCKS, HIDDEN, BATCH, STEPS = 4, 6, 64, 8, 3
events = []                                                 # +3: block 3 was gathered; -3: it was freed
warnings.filterwarnings("ignore", category=FutureWarning)   # torch 2.13 has new names for the collectives


class Unit:                                                 # a block, whole only while it computes
    def __init__(self, number, block):
        self.number, self.params = number, list(block.parameters())
        self.flat_param = torch.cat([param.detach().flatten() for param in self.params])
        # clone: a view would lose its memory in reshard
        self.param_shard = nn.Parameter(self.flat_param.chunk(DP)[dist.get_rank()].clone())
        for param, view in zip(self.params, self.flat_param.split([param.numel() for param in self.params])):
            # nn.Parameter(view) would share flat_param's version counter: backward would reject what unshard
            # has refilled
            param.data = view.view_as(param)
            param.register_post_accumulate_grad_hook(self.post_accumulate_grad)
        block.register_forward_pre_hook(lambda block, inputs: self.unshard())
        block.register_forward_hook(self.post_forward)
        self.reshard()

    def unshard(self):
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        dist.all_gather_into_tensor(self.flat_param, self.param_shard.detach())
        events.append(f"+{self.number}")

    def reshard(self):                                      # free the memory; all views stay, autograd's too
        self.flat_param.untyped_storage().resize_(0)
        events.append(f"-{self.number}")

    def post_forward(self, block, inputs, output):
        output.register_hook(lambda grad: self.unshard())   # backward enters a block through its output
        self.reshard()

    def post_accumulate_grad(self, param):
        if any(param.grad is None for param in self.params):
            return
        self.reshard()                                      # that was the last one: nothing reads weights now
        flat_grad = torch.cat([param.grad.flatten() for param in self.params])
        self.param_shard.grad = torch.empty_like(self.param_shard)
        dist.reduce_scatter_tensor(self.param_shard.grad, flat_grad)
        for param in self.params:
            param.grad = None


def main(rank, folder, world_size):                         # one rank trains without sharding
    store = f"file://{folder}/store{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)                                    # the same weights and batches on every rank
    blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks).double()
    params = list(model.parameters())
    if world_size > 1:
        params = [Unit(number, block).param_shard for number, block in enumerate(model)]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    for _ in range(STEPS):
        x = torch.randn(BATCH, HIDDEN).double().chunk(world_size)[rank]        # my rows
        loss = model(x).square().sum() / BATCH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    if rank == 0:
        print(f"ranks {world_size}  loss {loss:.12f}", *events[-4 * BLOCKS:], flush=True)
    result = torch.cat([param.detach().flatten() for param in params]).view(BLOCKS, -1)
    torch.save(result, f"{folder}/result{rank}of{world_size}")
    dist.barrier()                                          # no rank exits while others still communicate
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    for world_size in (DP, 1):
        mp.start_processes(main, (folder, world_size), nprocs=world_size, start_method="fork")
    shards = [torch.load(f"{folder}/result{rank}of{DP}") for rank in range(DP)]
    expected = torch.load(f"{folder}/result0of1")
torch.testing.assert_close(torch.cat(shards, dim=1), expected)
