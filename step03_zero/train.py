"""Train a Llama on several devices. Each gets a part of every batch, and keeps a part of the model's state.

    torchrun --standalone --nproc_per_node 4 step03_zero/train.py --zero 3
    python step03_zero/train.py --help
"""
import torch
import torch.distributed as dist

import data_parallel
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
TECHNIQUES = (data_parallel, zero)


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
    model.zero_units = zero.make_units(model, mesh, args)
    materialize(model, config, args)
    if args.attention == "flash":
        use_flash_attention(model)
    recompute_and_compile(model, args)
    return model


def forward_backward(model, micro_batches, args):
    """Accumulate the gradient of the global batch's mean loss; return this rank's part of that loss."""
    total = 0
    for inputs, positions, targets in micro_batches:
        loss = model(inputs, positions, targets) / (args.global_batch_size * args.seq_len)
        loss.backward()
        total += loss.detach()
    return total


def train_step(model, sharding, optimizer, micro_batches, lr, args):
    """Train on a global batch. Return its mean loss, and the norm of the gradients before clipping."""
    sharding.start_all_gather()
    loss = forward_backward(model, micro_batches, args)
    sharding.finish_grad_reduction()
    dist.all_reduce(loss)
    grad_norm = optimizer.clip_grad_norm()
    optimizer.step(lr)
    return loss, grad_norm


@init_distributed()
def main(argv=None):
    args, config, tokens = prepare(argv)
    check_same_on_all_ranks(args, config, tokens)
    mesh = build_mesh(args)
    model = build_model(config, mesh, args)
    sharding = zero.Zero(model, args) if args.zero else data_parallel.DataParallel(model, mesh, args)
    optimizer = Optimizer(sharding.params, args)
    profiler = Profiler(args)
    metrics = Metrics(model, config, args)
    for step, micro_batches in batches(tokens, config, mesh, args):
        lr = learning_rate(step, args)
        with profiler.step(step), ledger(step, model, mesh, args, TECHNIQUES):
            loss, grad_norm = train_step(model, sharding, optimizer, micro_batches, lr, args)
        metrics.log(step, loss, grad_norm, lr)
    if args.save:
        sharding.start_all_gather()
        sharding.wait_for_all_gather()
        save_model(model, config, args)


if __name__ == "__main__":
    main()
