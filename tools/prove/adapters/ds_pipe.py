"""DeepSpeed's pipeline engine, the other ranks replicas: pp= acc= zero= (0 or 1) clip= (on CPUs, with --dtype float32).

    python tools/prove tools/prove/adapters/ds_pipe.py --world 2 --both "clip=0.3" --flags "pp=2 acc=4" --dtype float32

The model is a small one, made of LayerSpecs; tied=1, in --both, ties its head to its embedding. clip= belongs in --both, too.
"""
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ds_zero import (BATCH, SEQ, VOCAB, deepspeed, engine_of, modules, norm_of, safe_set_full_fp32_param,  # noqa: F401
                     whole_gradients)
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec    # after ds_zero, which tells DeepSpeed to use the CPU

NEEDS = "deepspeed==0.19.8, transformers"
WIDTH, LAYERS = 32, 4


class Block(torch.nn.Module):
    """A token looks at the mean of those before it, in place of attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

    def forward(self, x):
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(mean))))


def loss_of(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def layers(tied):
    embed, head = LayerSpec(torch.nn.Embedding, VOCAB, WIDTH), LayerSpec(torch.nn.Linear, WIDTH, VOCAB, bias=False)
    if tied:
        embed = TiedLayerSpec("embed", torch.nn.Embedding, VOCAB, WIDTH)
        head = TiedLayerSpec("embed", torch.nn.Embedding, VOCAB, WIDTH, forward_fn=lambda embed, x: x @ embed.weight.t())
    return [embed, *[LayerSpec(Block) for _ in range(LAYERS)], LayerSpec(torch.nn.LayerNorm, WIDTH), head]


def build(flags):
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    pp, acc = flags.get("pp", 1), flags.get("acc", 1)
    model = PipelineModule(layers(flags.get("tied", 0)), num_stages=pp, loss_fn=loss_of, partition_method="uniform")
    engine = engine_of(model, flags, acc)
    run = SimpleNamespace(engine=engine, model=model, acc=acc, dp=dist.get_world_size() // pp, zero=flags.get("zero", 0), grads={})
    update = engine._take_model_step

    def kept(*args, **kwargs):                            # between the reduction and the clipping
        run.grads = whole_gradients(model)
        return update(*args, **kwargs)
    engine._take_model_step = kept
    return run


def step(run, inputs, targets):
    mine = slice(run.engine.grid.get_data_parallel_rank(), None, run.dp)
    loss = run.engine.train_batch(iter(zip(inputs[mine].chunk(run.acc), targets[mine].chunk(run.acc))))
    return loss, norm_of(run.engine)


def parts(run):
    return ((name, param, run.grads.get(name), None) for name, param in run.model.named_parameters())


def loaded(run):
    if run.zero:
        for param in run.model.parameters():              # copies that the optimizer updates
            safe_set_full_fp32_param(param, param.detach().clone())


def place(run):
    grid = run.engine.grid
    return {"pp": grid.get_pipe_parallel_rank(), "dp": grid.get_data_parallel_rank()}
