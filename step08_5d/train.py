"""Train a Llama or a Mixtral on several devices, with every dimension of parallelism.

    torchrun --standalone --nproc_per_node 8 step08_5d/train.py --model tiny-moe --pp 2 --cp 2 --tp 2 --ep 2
    python step08_5d/train.py --help
"""
import torch
import torch.distributed as dist

from checkpoint import materialize, save_checkpoint
from config import check, load_config, parse_args, set_num_threads
from context_parallel import context_parallel
from data import batches, load_tokens
from expert_parallel import LoadBalancer, expert_parallel
from ledger import ledger
from mesh import build_mesh, check_same_on_all_ranks, fail_together, init_distributed
from metrics import Metrics
from model import Llama
from optimizer import Optimizer, learning_rate
from pipeline_parallel import Pipeline, keep_local_stages
from placement import init_placements
from profiling import Profiler
from recompute import recompute_and_compile
from resume import Checkpoints
from schedules import SCHEDULES
from tensor_parallel import all_reduce_partial_grads, tensor_parallel
from zero import Zero, make_units


@fail_together()
def prepare(argv):
    args = parse_args(argv)
    config = load_config(args)
    check(args, config)
    set_num_threads(args, config)
    return args, config, load_tokens(args, config.vocab_size)


@fail_together()
def build_model(config, mesh, args):
    with torch.device("meta"):                            # shapes without memory
        model = Llama(config)
    init_placements(model)
    tensor_parallel(model, config, mesh, args)
    expert_parallel(model, config, mesh, args)
    keep_local_stages(model, config, mesh, args)
    model.zero_units = make_units(model, mesh, args)
    materialize(model, config, args)
    if args.attention == "flash":
        from flash_attn import flash_attn_func
        for layer in model.model.layers.values():
            layer.self_attn.inner_attention = lambda q, k, v: flash_attn_func(q, k, v, causal=True)
    context_parallel(model, mesh, args)
    has_graph_breaks = (args.tp * args.cp > 1 or SCHEDULES[args.schedule].split_backward
                        or config.num_local_experts > 0)  # routing is not compiled
    recompute_and_compile(model, args, has_graph_breaks)
    return model


@init_distributed()
def main(argv=None):
    args, config, tokens = prepare(argv)
    check_same_on_all_ranks(args, config, tokens)
    mesh = build_mesh(args)
    model = build_model(config, mesh, args)
    balance = LoadBalancer(model, config, mesh, args)
    pipeline = Pipeline(model, config, mesh, args)
    zero = Zero(model, mesh, args)
    optimizer = Optimizer(zero.params, args)
    profiler = Profiler(args)
    checkpoints = Checkpoints(model, optimizer, balance, tokens, args)
    args.first_step = checkpoints.load()
    metrics = Metrics(model, config, args)
    for step, micro_batches in batches(tokens, config, mesh, args):
        lr = learning_rate(step, args)
        with profiler.step(step), ledger(step, model, mesh, args):
            zero.start_all_gather()
            loss = pipeline.forward_backward(micro_batches)
            zero.finish_grad_reduction()
            all_reduce_partial_grads(zero.params)
            dist.all_reduce(loss)
            grad_norm = optimizer.clip_grad_norm()
            optimizer.step(lr)
            load = balance.update()
        metrics.log(step, loss, grad_norm, lr, **load)
        if checkpoints.save_if_due(step):                 # a signal told the run to stop
            return
    zero.start_all_gather()
    zero.wait_for_all_gather()
    if args.save:
        save_checkpoint(model, config, mesh, args)


if __name__ == "__main__":
    main()
