"""Train a Llama on one device.

    python step01_single_gpu/train.py
    python step01_single_gpu/train.py --help
"""
import torch

from config import check, load_config, parse_args, set_num_threads
from data import batches, load_tokens
from messages import clean_exit
from metrics import Metrics
from model import Llama, use_flash_attention
from optimizer import Optimizer, add_main_grads, learning_rate
from profiling import Profiler
from recompute import recompute_and_compile
from weights import materialize, save_model

TECHNIQUES = ()                                           # of parallelism; step02_dp has the first


def prepare(argv):
    args = parse_args(argv, TECHNIQUES)
    config = load_config(args)
    check(args, config, TECHNIQUES)
    set_num_threads(args, config)
    return args, config, load_tokens(args, config.vocab_size)


def build_model(config, args):
    with torch.device("meta"):                            # shapes without memory
        model = Llama(config)
    materialize(model, config, args)
    if args.attention == "flash":
        use_flash_attention(model)
    recompute_and_compile(model, args)
    return model


def forward_backward(model, micro_batches, args):
    """Accumulate the gradient of the global batch's mean loss; return that loss."""
    total = 0
    for inputs, positions, targets in micro_batches:
        loss = model(inputs, positions, targets) / (args.global_batch_size * args.seq_len)
        loss.backward()
        total += loss.detach()
    return total


def train_step(model, optimizer, micro_batches, lr, args):
    """Train on a global batch. Return its mean loss, and the norm of the gradients before clipping."""
    loss = forward_backward(model, micro_batches, args)
    grad_norm = optimizer.clip_grad_norm()
    optimizer.step(lr)
    return loss, grad_norm


@clean_exit()
def main(argv=None):
    args, config, tokens = prepare(argv)
    model = build_model(config, args)
    add_main_grads(model.parameters())
    optimizer = Optimizer(model.parameters(), args)
    profiler = Profiler(args)
    metrics = Metrics(model, config, args)
    for step, micro_batches in batches(tokens, config, args):
        lr = learning_rate(step, args)
        with profiler.step(step):
            loss, grad_norm = train_step(model, optimizer, micro_batches, lr, args)
        metrics.log(step, loss, grad_norm, lr)
    if args.save:
        save_model(model, config, args)


if __name__ == "__main__":
    main()
