"""One rank of many, simulated: what it would hold, compute and send in a training step of any of the eight steps.

    python tools/simulate 8 16384 --model llama-405b --pp 16 --tp 8 --zero 1 --seq_len 8192 \\
        --global_batch_size 2048 --micro_batch_size 1
    python tools/simulate 3 8 --rank 7 --zero 3 --json seen.json

It is the step's own trainer that runs, with the flags that it would be given, but with no memory, GPU or other
process (stand_ins.py). None of what is printed is worked out: storages are seen to come and go, collectives to
be called, matrices to be multiplied (observe.py). What a kernel takes for itself, and what NCCL and the
allocator take, is not seen.
"""
import argparse
import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])    # tools, where this is a package
from simulate.report import as_json, report
from steps import STEPS, full_name, step_dir


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse_args():
    """What the tool itself takes; all else is the trainer's."""
    parser = argparse.ArgumentParser(prog="python tools/simulate", description=__doc__.partition("\n")[0],
                                     usage="%(prog)s STEP RANKS [--rank R] [--json FILE] FLAGS OF THE TRAINER",
                                     allow_abbrev=False)
    parser.error = fail
    parser.add_argument("step", help="1 to 8, or the name of its folder")
    parser.add_argument("ranks", type=int, help="the number of processes that torchrun would start")
    parser.add_argument("--rank", type=int, default=0, help="which of them is played")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there, too")
    args, flags = parser.parse_known_args()
    try:
        args.step = full_name(args.step)
    except StopIteration:
        fail(f"there is no step {args.step}; there are {', '.join(STEPS)}")
    if args.ranks < 1:
        fail(f"RANKS {args.ranks}: the number of ranks must be at least 1")
    if args.ranks > 1 and args.step == STEPS[0]:
        fail(f"RANKS {args.ranks}: {args.step} is one process, so RANKS is 1")
    if not 0 <= args.rank < args.ranks:
        fail(f"--rank {args.rank}: of {args.ranks} ranks the last is {args.ranks - 1}")
    return args, flags


def main():
    args, flags = parse_args()
    os.environ.pop("RANK", None)                          # messages.py reads it: this process is the one to speak
    sys.path.insert(0, str(step_dir(args.step)))
    from simulate.observe import simulate                 # torch takes seconds
    seen = simulate(flags, args.ranks, args.rank)
    report(seen, args.ranks, args.rank)
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(as_json(seen), indent=1))
        except OSError as error:
            fail(f"--json {args.json}: cannot be written ({error.strerror})")


if __name__ == "__main__":
    main()
