"""DeepSpeed's pipeline clips float32 gradients, without ZeRO, by the norm of the first stage alone.

    torchrun --nproc_per_node 2 exercises/wild/stage_clips_alone.py

Run with DeepSpeed 0.19.8 and torch 2.13.0, on two CPU ranks.
"""
import os
import sys

os.environ |= dict(DS_ACCELERATOR="cpu", DS_SKIP_CUDA_CHECK="1")
import deepspeed  # noqa: E402
import deepspeed.comm.torch  # noqa: E402
import deepspeed.runtime.engine as of_engine  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None                    # so that nothing is compiled
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
model = PipelineModule([LayerSpec(torch.nn.Linear, 8, 8) for _ in range(4)], num_stages=2, loss_fn=torch.nn.functional.mse_loss)
config = dict(train_batch_size=4, train_micro_batch_size_per_gpu=2, gradient_clipping=1e-3, steps_per_print=10**9)
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config,
                                  dist_init_required=False)
clip = of_engine.clip_grad_norm_


def watched(parameters, **kwargs):
    parameters = [*parameters]
    own = sum(param.grad.square().sum() for param in parameters)
    dist.all_reduce(both := own.clone())
    said, own, both = clip(parameters, **kwargs), float(own) ** 0.5, float(both) ** 0.5
    print(f"stage {dist.get_rank()}: its norm is {own:.5f}, that of both {both:.5f}, and DeepSpeed's {float(said):.5f}", flush=True)
    return said


of_engine.clip_grad_norm_ = watched
engine.train_batch(iter([(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(2)]))
