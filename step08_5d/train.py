"""Train a Llama or a Mixtral on several devices, each with a part of the batch, of the layers, of every sequence, of every
matrix and of the experts.

    torchrun --standalone --nproc_per_node 8 step08_5d/train.py --model tiny-moe --pp 2 --cp 2 --tp 2 --ep 2
    python step08_5d/train.py --help
"""
import torch
import torch.distributed as dist

from checkpoint import materialize, save_checkpoint
from config import check, load_config, parse_args
from context_parallel import context_parallel
from data import batches, load_tokens
from dry_run import dry_run, watch
from expert_parallel import Balance, expert_parallel
from ledger import ledger
from mesh import ends_well, start_mesh
from metrics import Metrics
from model import Llama
from optimizer import Optimizer, learning_rate
from pipeline_parallel import Pipeline, cut_stages
from profiling import Profiler
from recompute import recompute
from resume import Checkpoints
from tensor_parallel import sum_replicas, tensor_parallel
from zero import wait_for_weights, zero, zero_units


def build_model(config, mesh, args):
    with torch.device("meta"):                            # shapes without memory
        model = Llama(config)
    tensor_parallel(model, config, mesh, args)
    expert_parallel(model, config, mesh, args)
    cut_stages(model, config, mesh, args)
    zero_units(model, args)
    materialize(model, config, args)
    layers = model.model.layers.values()
    if args.attention == "flash":
        from flash_attn import flash_attn_func
        for layer in layers:
            layer.self_attn.core = lambda q, k, v: flash_attn_func(q, k, v, causal=True)
    context_parallel(model, mesh, args)
    in_pieces = args.tp * args.cp > 1 or args.schedule in ("zerobubble", "dualpipe") or config.num_local_experts > 0
    # then not all of a layer can be compiled: its pieces are, inside of what is recomputed
    for layer in layers if in_pieces else []:
        layer.self_attn.core = torch.compiler.disable(layer.self_attn.core)        # for selective recomputation to see
    recompute(layers, "none" if in_pieces else args.recompute)
    for layer in layers if args.compile else []:
        layer.forward = torch.compile(layer.forward)
    recompute(layers, args.recompute if in_pieces else "none")
    if args.compile and model.lm_head:
        model.lm_head.cross_entropy = torch.compile(model.lm_head.cross_entropy)
    return model


@ends_well()
def main(argv=None):
    args = parse_args(argv)
    with dry_run(args):
        train(args)


def train(args):
    config = load_config(args)
    check(args, config)
    tokens = load_tokens(args, config.vocab_size)
    mesh = start_mesh(args)
    model = build_model(config, mesh, args)
    balance = Balance(model, config, mesh, args)
    pipeline = Pipeline(model, config, mesh, args)
    shards, sum_gradients, gather_weights = zero(model, mesh, args)
    optimizer = Optimizer(shards, args)
    profiler = Profiler(model, optimizer, args)
    checkpoints = Checkpoints(model, optimizer, balance, mesh, args)
    first = checkpoints.load()
    gather_weights()
    metrics = Metrics(config, args, first)
    for step, micro_batches in enumerate(batches(tokens, mesh, args, first), first):
        lr = learning_rate(step, args)
        with profiler.step(step - first), ledger(step - first, model, mesh, args), watch(model, optimizer, pipeline, mesh, args):
            loss = pipeline.run(micro_batches)
            sum_gradients()
            sum_replicas(shards)
            dist.all_reduce(loss)
            grad_norm = optimizer.clip()
            optimizer.step(lr)
            gather_weights()
            load = balance.update()
        metrics.log(step, loss, grad_norm, lr, load)
        if checkpoints.after(step, loss, grad_norm):
            return wait_for_weights(model)
    wait_for_weights(model)
    if args.profile:
        pipeline.draw()
    if args.save:
        save_checkpoint(model, config, mesh, args)


if __name__ == "__main__":
    main()
