"""Simulate a cluster on a laptop: run a training step of any of the eight steps on GPUs that you do not have.

    python tools/simulate 3 8 --model llama-8b --zero 3 --seq_len 8192 --global_batch_size 8 --micro_batch_size 1

The trainer of that step really runs, but with stand-ins for its memory, its GPU and all other processes (stand_ins.py). The
simulator records what it does (record.py) and plays that on simulated GPUs (play.py, gpus.py). It cannot see the memory that
the allocator and NCCL take. All flags that are not listed here go to the trainer.
"""
import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])                         # tools/, in which simulate is a package
from refuse import refuse

MOST_RANKS = 10**6


def parse_args(gpus, network):
    """Return the tool's own arguments, and all other flags, for the trainer."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter,
                                     allow_abbrev=False)
    parser.error = lambda why: refuse(f"{why}; for example: python tools/simulate 8 16 --tp 4")
    add = parser.add_argument
    add("step", metavar="STEP", help="a step, 1 to 8, or a folder with a train.py")
    add("ranks", metavar="RANKS", type=int, help="the number of processes that torchrun would start")
    add("--gpu", choices=list(gpus), default="h100", help="the GPU to simulate (h100)")
    add("--gpus_per_node", type=int, help="how many GPUs NVLink connects (8; gb200 and gb300: 64)")
    add("--network", type=float, default=network, metavar="GB/s", help=f"speed of the network card that each GPU has ({network:g})")
    add("--rank", type=int, default=0, help="the rank whose memory, FLOPs and bytes to show (0)")
    add("--details", action="store_true", help="also print FLOPs, what the rank sends, and the longest waits")
    add("--trace", metavar="FILE", help="write a trace to open in https://ui.perfetto.dev")
    add("--plot", metavar="FILE", help="draw the step: kernels, waits, links, memory")
    add("--json", metavar="FILE", help="write the numbers as JSON")
    args, flags = parser.parse_known_args()
    if args.step not in list("12345678") and not (Path(args.step) / "train.py").is_file():
        refuse(f"STEP {args.step}: must be a step, 1 to 8, or a folder with a train.py")
    if args.ranks > MOST_RANKS:
        refuse(f"RANKS {args.ranks}: must be at most {MOST_RANKS:,}")
    if args.ranks < 1 or args.ranks > 1 and args.step == "1":
        refuse(f"RANKS {args.ranks}: must be at least 1, and for step 1 exactly 1")
    if not 0 <= args.rank < args.ranks:
        refuse(f"--rank {args.rank}: must be from 0 to {args.ranks - 1}, since RANKS is {args.ranks}")
    args.gpus_per_node = gpus[args.gpu].node if args.gpus_per_node is None else args.gpus_per_node
    if args.gpus_per_node < 1 or not 0 < args.network < 1e6:
        refuse(f"--gpus_per_node {args.gpus_per_node}, --network {args.network:g}: both must be positive, and --network below 1e6")
    for name in filter(None, (args.trace, args.plot, args.json)):
        try:
            open(name, "a").close()
        except OSError as error:
            refuse(f"{name}: cannot be written ({error.strerror})")
    return args, flags


def main():
    from simulate.gpus import GPUS, NETWORKS, Cluster
    args, flags = parse_args(GPUS, NETWORKS["infiniband"] / 1e9)
    from steps import step_dir
    sys.path.insert(0, str(step_dir(args.step) if args.step.isdecimal() else Path(args.step).resolve()))
    from simulate.draw import plot, trace
    from simulate.play import Player
    from simulate.ranks import Ranks, look, record_all
    from simulate.report import Result, report
    ranks = Ranks(look(flags, args.ranks, args.rank), args.rank)
    recordings = record_all(flags, args.ranks, ranks.recorded)
    if not GPUS[args.gpu].float8 and any(kernel.name == "_scaled_mm" for one in recordings.values() for kernel in one.kernels):
        refuse(f"--gpu {args.gpu}: cannot multiply in 8 bits; choose another GPU")
    cluster = Cluster(GPUS[args.gpu], args.gpus_per_node, args.network * 1e9)
    played = Player(recordings, cluster, ranks.stands_for, ranks.stage_of).play()
    result = Result(recordings, ranks, args.rank, args.ranks, played, cluster)
    report(result, args.gpu, args.details)
    if args.json:
        Path(args.json).write_text(json.dumps(result.as_json(), indent=1))
    args.trace and trace(result, Path(args.trace))
    if args.plot:
        try:
            plot(result, args.plot, args.gpu)
        except ValueError as error:                       # its suffix is not an image format
            refuse(f"--plot {args.plot}: {error}")


if __name__ == "__main__":
    main()
