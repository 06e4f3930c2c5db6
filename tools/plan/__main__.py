"""Find, for a model and a cluster, a layout that fits in memory, reaches the batch and is fast.

    python tools/plan --model llama-70b --gpus 512 --seq_len 4k --global_batch_tokens 4M
"""
import argparse
import json
import re
import signal
import sys

import explain
import models
import page
from plan import Question
from speed import GPUS, NETWORKS, full_nodes, gpus
from trainer import TOO_LARGE as MOST, Refused, fail
from trainers import TRAINERS, constants_of, load_constants

# a value outside these ranges is in the wrong unit
RANGES = dict(flops=(1e9, 1e18), hbm=(1e6, 1e15), memory=(0.1, 1e5), nvlink=(1e6, 1e15), network=(1e6, 1e15),
              power=(1, 1e5), tokens=(0, 1e18), price=(0, 1e18), balance=(1, 1e3))
LARGEST = dict(gpus=2**17, gpus_per_node=2**17, seq_len=2**24, tokens=2**36)
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def count(text):
    """Read a number with a unit: 4k is 4,096 and 4M is 4,194,304, because lengths and batches are powers of two."""
    plain = text.strip().lower().replace(",", "").replace("_", "")
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmg]?)", plain)
    try:
        return float(found[1]) * UNITS[found[2]]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write it as 4096, 4k, 4e6 or 4M") from None


def network(text):
    try:
        return NETWORKS.get(text) or float(text)
    except ValueError:
        choices = ", ".join(NETWORKS)
        raise argparse.ArgumentTypeError(f"{text}: unknown network; choose from "
                                         f"{choices}, or give bytes per second per GPU, such as 25e9") from None


def parse_args():
    parser = argparse.ArgumentParser(prog="planner", description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda why: fail(why + "; --help lists the flags; a layout goes into --config" * why.startswith("unrecog"))
    add = parser.add_argument
    add("--model", default="llama-8b",
        help=f"one of {', '.join(models.PRESETS)}, or a directory or hub id with a config.json")
    add("--gpus", type=count, default=8, help="how many GPUs the run has")
    add("--gpu", choices=GPUS, default="h100", help="which GPU they are")
    add("--network", type=network, default="infiniband",
        help=f"the network between nodes: {', '.join(NETWORKS)}, or bytes per second per GPU")
    add("--gpus_per_node", type=count, help="how many GPUs NVLink connects (8; gb200 and gb300: 64)")
    add("--flops", type=float, help="bfloat16 FLOPs per second, if not those of --gpu")
    add("--hbm", type=float, help="bytes per second of a GPU's memory, if not those of --gpu")
    add("--memory", type=float, help="GiB of memory, if not those of --gpu")
    add("--nvlink", type=float, help="bytes per second inside a node, if not those of --gpu")
    add("--power", type=float, help="watts that a GPU may draw, if fewer than in its data sheet")
    add("--trainer", choices=TRAINERS, default="this", help="the trainer whose speed and memory to estimate")
    add("--compile", action="store_true", help="use torch.compile (and with torchtitan, asynchronous tp)")
    fewer_bits = parser.add_mutually_exclusive_group().add_argument
    for flag, precision, what in (("--fp8", "float8", "8 bits"), ("--mxfp8", "mxfp8", "MXFP8 (Blackwell)"),
                                  ("--nvfp4", "nvfp4", "NVFP4 (Blackwell)")):
        fewer_bits(flag, dest="precision", action="store_const", const=precision, default="bfloat16",
                   help=f"compute the matrix products of the layers in {what}")
    add("--balance", type=float, default=1.0,
        help="tokens that come to the rank whose experts get most, divided by the mean over the ranks of ep")
    add("--seq_len", type=count, default=4096, help="tokens per sequence; 4k is 4,096")
    add("--global_batch_tokens", type=count, default=4e6, help="tokens per training step; 4M is 4,194,304")
    add("--config", help="explain this layout instead of searching: "
        "dp=..,tp=..,cp=..,pp=..,ep=..,zero=..,schedule=..,v=..,mbs=..,acc=..,recompute=..")
    add("--tokens", type=float, default=0, help="tokens to train on, such as 15e12: adds days and GPU-hours to the answer")
    add("--price", type=float, default=0, help="dollars per GPU-hour: with --tokens, adds what the run costs")
    add("--details", action="store_true", help="print more: where a step's time goes, what is sent, each knob turned")
    add("--json", action="store_true", help="print the answer as JSON")
    add("--constants", help="a file of constants that dev/bench/fit_own.py has fitted to runs of your cluster")
    add("--html", help="write the answer to this file, as a page for a browser")
    args = parser.parse_args()
    check(args)
    return args


def check(args):
    args.gpus_per_node = GPUS[args.gpu].node if args.gpus_per_node is None else args.gpus_per_node
    for name in ("gpus", "gpus_per_node", "seq_len"):
        value, most = getattr(args, name), LARGEST[name]
        if not 1 <= value <= most or value != int(value):
            fail(f"--{name} {value:.10g}: must be a whole number from 1 to {most:,}")
        setattr(args, name, int(value))
    for name, (least, most) in RANGES.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            unit = ", in bytes per second, such as 50e9" * (name in ("hbm", "nvlink", "network"))
            fail(f"--{name} {value:g}: must be from {least:g} to {most:g}{unit}")
    tokens, most = args.global_batch_tokens, LARGEST["tokens"]
    if not 1 <= tokens <= most:
        fail(f"--global_batch_tokens {tokens:,.15g}: must be from 1 to {most:,}")
    if tokens / args.seq_len > MOST / 2:
        fail(f"--global_batch_tokens {tokens:,.15g}: must be at most {MOST // 2:,} sequences of "
             f"{args.seq_len:,} tokens")


def cluster_of(args):
    gpu = GPUS[args.gpu]
    own = dict(bfloat16=args.flops, hbm=args.hbm, memory=args.memory, nvlink=args.nvlink)
    gpu = gpu._replace(**{name: value for name, value in own.items() if value})
    if args.power:
        gpu = gpus.at_power(gpu, args.power)
    return full_nodes(args.gpus, gpu, args.network, args.gpus_per_node)


def main():
    args = parse_args()
    cluster, c = cluster_of(args), models.load(args.model)
    asked = dict(known=load_constants(args.constants), trainer=args.trainer, compiled=args.compile, precision=args.precision,
                 balance=args.balance)
    question = Question(args.model, c, args.gpu, cluster, args.seq_len, args.global_batch_tokens / args.seq_len,
                        constants_of(**asked, gpu=args.gpu), (args.tokens, args.price))
    if args.html:
        try:
            open(args.html, "a").close()                  # the search takes seconds
            page.write(question, asked, args.config, args.html)
            return print(f"{args.html}: open it in a browser")
        except OSError as error:
            fail(f"--html {args.html}: {error.strerror}")
    if args.config:
        one = question.evaluate(args.config)
        if args.json:
            return print(json.dumps(explain.as_json(question, one), indent=1))
        lines = [*explain.heading(question, "its batch", one.layout.batch), "", *explain.one_in_brief(question, one)]
        lines += explain.one_in_detail(question, one) if args.details else []
        return print("\n".join([*lines, "", *explain.commands(question, one)]))
    heading = list(explain.heading(question))
    if not args.json:
        print("\n".join(heading), flush=True)              # the search takes seconds
    search = question.search()
    best = search.best()
    if args.json:
        if not best:
            print(explain.nothing_fits(question), file=sys.stderr)
        return print(json.dumps([explain.as_json(question, one) for one in best], indent=1))
    if not best:
        return print(explain.nothing_fits(question))
    answers, brief = list(explain.two_answers(question, search)), list(explain.one_in_brief(question, best[0]))
    commands = explain.commands(question, best[0])
    rows = 20 - sum(map(len, (heading, answers, brief, commands)))         # of 25 lines; 5 more are printed here
    print("\n".join(answers))
    print(f"the best layout for each tp, pp and ep, of {len(search.ordered):,} layouts that were timed"
          f"{explain.how_many_are_equal(best)}" + "; --details says more" * (not args.details) + "\n")
    print("\n".join([*explain.table(question, best if args.details else best[:rows]), "", *brief]))
    if len(best) > 1:
        print(explain.why_not("The second", best[0], best[1]))
    if args.details:
        print("\n".join([*explain.one_in_detail(question, best[0]), ""]))
    print("\n".join(commands))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)         # python tools/plan | head
    try:
        main()
    except Refused as refused:
        print(f"error: {' '.join(str(refused).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
