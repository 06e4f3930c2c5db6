"""Train a Llama or a Mixtral on several devices, each with a part of all that can be cut.

    torchrun --standalone --nproc_per_node 8 step08_5d/train.py --model tiny-moe --pp 2 --cp 2 --tp 2 --ep 2
    python train.py --help
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
from mesh import agree, ends_well, start_mesh
from metrics import Metrics
from model import Llama
from optimizer import Optimizer, learning_rate
from pipeline_parallel import Pipeline, cut_stages
from placement import place
from profiling import Profiler
from recompute import recompute_and_compile
from resume import Checkpoints
from tensor_parallel import sum_partial_gradients, tensor_parallel
from zero import Zero, zero_units


def build_model(config, mesh, args):
    with torch.device("meta"):                            # shapes without memory
        model = Llama(config)
    place(model, mesh)
    tensor_parallel(model, config, mesh, args)
    expert_parallel(model, config, mesh, args)
    cut_stages(model, config, mesh, args)
    zero_units(model, args)
    materialize(model, config, args)
    if args.attention == "flash":
        from flash_attn import flash_attn_func
        for layer in model.model.layers.values():
            layer.self_attn.core = lambda q, k, v: flash_attn_func(q, k, v, causal=True)
    context_parallel(model, mesh, args)
    in_pieces = args.tp * args.cp > 1 or args.schedule in ("zerobubble", "dualpipe")
    in_pieces = in_pieces or config.num_local_experts > 0
    recompute_and_compile(model, args, in_pieces)
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
    agree("weights")                                      # that every rank could read its own
    balance = Balance(model, config, mesh, args)
    pipeline = Pipeline(model, config, mesh, args)
    zero = Zero(model, args)
    optimizer = Optimizer(zero.params, args)
    profiler = Profiler(model, optimizer, args)
    checkpoints = Checkpoints(model, optimizer, balance, tokens, mesh, args)
    first = checkpoints.load()
    metrics = Metrics(model, config, args, first)
    for step, micro_batches in enumerate(batches(tokens, mesh, args, first), first):
        lr = learning_rate(step, args)
        watched = watch(model, optimizer, pipeline, mesh, args)
        with profiler.step(step - first), ledger(step - first, model, mesh, args), watched:
            zero.gather_weights()
            loss = pipeline.run(micro_batches)
            zero.sum_gradients()
            sum_partial_gradients(zero.params)
            dist.all_reduce(loss)
            grad_norm = optimizer.clip()
            optimizer.step(lr)
            load = balance.update()
        metrics.log(step, loss, grad_norm, lr, load)
        if checkpoints.save_if_due(step):
            return
    zero.gather_weights()
    zero.wait()
    if args.save:
        save_checkpoint(model, config, mesh, args)
    if args.profile:
        pipeline.draw()


if __name__ == "__main__":
    main()
