"""torch's FSDP2, on a mesh of one rank, divides float16 and float64 gradients twice by set_gradient_divide_factor.

    torchrun --nproc_per_node 1 exercises/wild/divided_twice.py

The gradient is 1, and the factor 2. Run with torch 2.13.0, on a CPU.
"""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
for forced in (False, True):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        model.set_gradient_divide_factor(2.0)
        model.set_force_sum_reduction_for_comms(forced)
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        said = ", summed by force" if forced else ""
        print(f"reduced in {str(dtype).removeprefix('torch.')}{said}: {model.weight.grad.full_tensor().item()}", flush=True)
