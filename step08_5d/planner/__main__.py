"""From a model and a cluster to a layout: fit in memory, reach the batch, be fast.

    python step08_5d/planner --model llama-70b --gpus 512 --seq_len 4096 --global_batch_tokens 4e6
    python step08_5d/planner --gpus 64 --config dp=32,tp=2,zero=1,mbs=2      # explains this one
    python step08_5d/planner --html plan.html                                # as a page with sliders
    python step08_5d/planner --fit results.csv --constants mine.json         # your cluster's constants
    python step08_5d/planner --predict runs.csv --out predicted.csv          # of nanotron
"""
import argparse
import json
import math
import signal

import costs
import measured
import nanotron
import plan_page
from explain import command, details, reasons, table
from plan import best_per_mesh, evaluate, fewest_gpus, parse_config, search
from speed import GPUS, NETWORKS, Cluster
from trainer import PRESETS, load_config, refuse

OF_A_GPU = dict(flops="bfloat16 FLOPs per second", hbm="bytes per second of its memory", memory="GiB",
                nvlink="bytes per second inside a node")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = refuse
    add = parser.add_argument
    add("--model", default="llama-8b",
        help=f"one of {', '.join(PRESETS)}; or a directory or hub id with a config.json")
    add("--gpus", type=int, default=8)
    add("--gpu", choices=GPUS, default="h100")
    add("--network", default="infiniband",
        help=f"between nodes: {', '.join(NETWORKS)}, or bytes per second per GPU")
    add("--gpus_per_node", type=int, default=8)
    for name, what in OF_A_GPU.items():
        add(f"--{name}", type=float, help=f"{what}, in place of --gpu's")
    add("--seq_len", type=int, default=4096)
    add("--global_batch_tokens", type=float, default=4e6)
    add("--config", help="explain this one: "
        "dp=..,tp=..,cp=..,pp=..,ep=..,zero=..,schedule=..,mbs=..,acc=..,recompute=..")
    add("--constants", help="a file that --fit wrote, or is to write")
    add("--fit", help="a CSV file of bench.py: fit the constants to this cluster")
    add("--html", help="write a page to this file that needs no network, and opens at this configuration")
    add("--predict", help="a CSV file of runs of the benchmarked trainer")
    add("--out", help="where --predict writes")
    args = parser.parse_args()
    for name in ("gpus", "gpus_per_node", "seq_len", "global_batch_tokens", *OF_A_GPU):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            refuse(f"--{name} {getattr(args, name)}: must be positive")
    return args


def cluster_of(args):
    own = {name: getattr(args, name) for name in OF_A_GPU if getattr(args, name) is not None}
    try:
        network = NETWORKS.get(args.network) or float(args.network)
        if not 0 < network < math.inf:
            raise ValueError
    except ValueError:
        refuse(f"--network {args.network}: {', '.join(NETWORKS)}, or bytes per second per GPU")
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        refuse(f"--gpus {args.gpus} is not a multiple of gpus_per_node({args.gpus_per_node})")
    return Cluster(args.gpus, GPUS[args.gpu]._replace(**own), network, args.gpus_per_node)


def main():
    args = parse_args()
    if args.predict:
        return nanotron.predict_file(args.predict, args.out or refuse("--predict needs --out FILE"))
    cluster = cluster_of(args)
    if args.fit:
        return fit(args, cluster)
    c, constants = load_config(args), measured.load_constants(args.constants)
    if args.html:
        return plan_page.write(args.html, args, cluster, constants)
    sequences = max(1, args.global_batch_tokens / args.seq_len)
    if args.config:
        l = parse_config(args.config, c, cluster, args.seq_len, sequences)
        return show(args.model, c, evaluate(c, l, cluster, constants), cluster, sequences, constants)
    fewest = fewest_gpus(c, cluster, args.seq_len, constants["slack"])
    billions = costs.model_parameters(c) / 1e9
    print(f"{args.model}, {billions:.2f}B parameters, on {cluster.gpus:,} x {args.gpu}; "
          f"the fewest GPUs that hold it: {fewest:,}", flush=True)     # the search takes seconds
    candidates, looked_at = search(c, cluster, args.seq_len, sequences, constants)
    if candidates:
        print(f"{len(candidates):,} of {looked_at:,} layouts fit\n")
    else:
        print(f"none of {looked_at:,} layouts fits and meets the batch\n")
    best = best_per_mesh(c, candidates, cluster, constants["slack"])
    if not best:
        return print("more GPUs, a shorter sequence, or another batch")
    print("\n".join(table(best)), "\n")
    show(args.model, c, best[0], cluster, sequences, constants)


def fit(args, cluster):
    constants, runs = measured.fit_own(args.fit, cluster)
    with open(args.constants or refuse("--fit needs --constants FILE to write to"), "w") as file:
        json.dump(constants, file, indent=1)
    print(f"fitted to {runs} runs: {args.constants}")


def show(model, c, one, cluster, sequences, constants):
    """A layout in detail."""
    why = reasons(c, one, cluster, sequences, constants["slack"])
    print("\n".join([*details(c, one, cluster), "", *why, "", command(model, one.layout, cluster)]))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)         # python step08_5d/planner | head
    main()
