"""Train a Llama on several devices, each with a part of the batch, of every sequence and of every matrix.

    torchrun --standalone --nproc_per_node 4 step05_cp/train.py --tp 2 --cp 2
    python step05_cp/train.py --help
"""
import torch
import torch.distributed as dist

from checkpoint import materialize, save_checkpoint
from config import check, load_config, parse_args
from context_parallel import context_parallel
from data import batches, load_tokens
from ledger import ledger
from mesh import ends_well, start_mesh
from metrics import Metrics
from model import Llama
from optimizer import Optimizer, learning_rate
from profiling import Profiler
from recompute import recompute
from tensor_parallel import sum_replicas, tensor_parallel
from zero import wait_for_weights, zero, zero_units


def build_model(config, mesh, args):
    with torch.device("meta"):                            # shapes without memory
        model = Llama(config)
    tensor_parallel(model, config, mesh, args)
    zero_units(model, args)
    materialize(model, config, args)
    layers = model.model.layers.values()
    if args.attention == "flash":
        from flash_attn import flash_attn_func
        for layer in layers:
            layer.self_attn.core = lambda q, k, v: flash_attn_func(q, k, v, causal=True)
    context_parallel(model, mesh, args)
    in_pieces = args.tp * args.cp > 1
    # then not all of a layer can be compiled: its pieces are, inside of what is recomputed
    for layer in layers if in_pieces else []:
        layer.self_attn.core = torch.compiler.disable(layer.self_attn.core)        # for selective recomputation to see
    recompute(layers, "none" if in_pieces else args.recompute)
    for layer in layers if args.compile else []:
        layer.forward = torch.compile(layer.forward)
    recompute(layers, args.recompute if in_pieces else "none")
    if args.compile:
        model.lm_head.cross_entropy = torch.compile(model.lm_head.cross_entropy)
    return model


def forward_backward(model, micro_batches, args):
    """Adds the gradient of the global batch's mean loss to every main_grad; returns that loss."""
    total = 0
    for inputs, positions, targets in micro_batches:
        loss = model(inputs, positions, targets) / (args.global_batch_size * args.seq_len)
        loss.backward()
        total += loss.detach()
    return total / args.tp                                # all ranks of tp have the same loss


@ends_well()
def main(argv=None):
    args = parse_args(argv)
    config = load_config(args)
    check(args, config)
    tokens = load_tokens(args, config.vocab_size)
    mesh = start_mesh(args)
    model = build_model(config, mesh, args)
    shards, sum_gradients, gather_weights = zero(model, mesh, args)
    optimizer = Optimizer(shards, args)
    profiler = Profiler(model, optimizer, args)
    metrics = Metrics(config, args)
    for step, micro_batches in enumerate(batches(tokens, mesh, args)):
        lr = learning_rate(step, args)
        with profiler.step(step), ledger(step, model, mesh, args):
            loss = forward_backward(model, micro_batches, args)
            sum_gradients()
            sum_replicas(shards)
            dist.all_reduce(loss)
            grad_norm = optimizer.clip()
            optimizer.step(lr)
            gather_weights()
        metrics.log(step, loss, grad_norm, lr)
    wait_for_weights(model)
    if args.save:
        save_checkpoint(model, config, args)


if __name__ == "__main__":
    main()
