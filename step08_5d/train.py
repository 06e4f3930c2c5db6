"""Train a Llama or a Mixtral on several devices, with every dimension of parallelism.

    torchrun --standalone --nproc_per_node 8 step08_5d/train.py --model tiny-moe --pp 2 --cp 2 --tp 2 --ep 2
    python step08_5d/train.py --help
"""
import torch
import torch.distributed as dist

import balance
import context_parallel
import data_parallel
import expert_parallel
import pipeline_parallel
import resume
import tensor_parallel
import zero
from config import check, load_config, parse_args, set_num_threads
from data import batches, load_tokens
from ledger import ledger
from mesh import build_mesh, check_same_on_all_ranks, fail_together, init_distributed
from metrics import Metrics
from model import Llama, use_flash_attention
from optimizer import Optimizer, learning_rate
from placement import init_placements
from profiling import Profiler
from recompute import recompute_and_compile
from weights import materialize, save_model

# config.py calls their flags, defaults (if any) and check, in this order; ledger.py calls their traffic
TECHNIQUES = (data_parallel, zero, tensor_parallel, context_parallel, pipeline_parallel,
              expert_parallel, balance, resume)


@fail_together()
def prepare(argv):
    args = parse_args(argv, TECHNIQUES)
    config = load_config(args)
    check(args, config, TECHNIQUES)
    set_num_threads(args, config)
    return args, config, load_tokens(args, config.vocab_size)


@fail_together()
def build_model(config, mesh, args):
    with torch.device("meta"):                            # shapes without memory
        model = Llama(config)
    init_placements(model, mesh)
    tensor_parallel.apply(model, config, mesh, args)
    expert_parallel.apply(model, config, mesh, args)
    pipeline_parallel.keep_local_stages(model, config, mesh, args)
    model.zero_units = zero.make_units(model, mesh, args)
    materialize(model, config, args)
    if args.attention == "flash":
        use_flash_attention(model)
    context_parallel.apply(model, mesh, args)
    recompute_and_compile(model, args)
    return model


def train_step(pipeline, sharding, optimizer, balancer, micro_batches, lr):
    """Train on a global batch. Return its mean loss, the norm of the gradients, and `balance`."""
    sharding.start_all_gather()
    loss = pipeline.forward_backward(micro_batches)
    sharding.finish_grad_reduction()
    tensor_parallel.all_reduce_partial_grads(sharding.params)
    dist.all_reduce(loss)
    grad_norm = optimizer.clip_grad_norm()
    optimizer.step(lr)
    return loss, grad_norm, balancer.update()


@init_distributed()
def main(argv=None):
    args, config, tokens = prepare(argv)
    check_same_on_all_ranks(args, config, tokens)
    mesh = build_mesh(args)
    model = build_model(config, mesh, args)
    balancer = balance.LoadBalancer(model, config, mesh, args)
    pipeline = pipeline_parallel.Pipeline(model, config, mesh, args)
    sharding = zero.Zero(model, args) if args.zero else data_parallel.DataParallel(model, mesh, args)
    optimizer = Optimizer(sharding.params, args)
    profiler = Profiler(args)
    checkpoints = resume.Checkpoints(model, optimizer, balancer, tokens, args)
    args.first_step = checkpoints.load()
    metrics = Metrics(model, config, args)
    for step, micro_batches in batches(tokens, config, mesh, args):
        lr = learning_rate(step, args)
        with profiler.step(step), ledger(step, model, mesh, args, TECHNIQUES):
            loss, grad_norm, load = train_step(pipeline, sharding, optimizer, balancer, micro_batches, lr)
        metrics.log(step, loss, grad_norm, lr, **load)
        if checkpoints.save_if_due(step):                 # a signal told the run to stop
            raise SystemExit(143)                         # 128 + SIGTERM, whichever signal it was
        metrics.restart_clock()
    if args.save:
        sharding.start_all_gather()
        sharding.wait_for_all_gather()
        save_model(model, config, mesh, args)


if __name__ == "__main__":
    main()
