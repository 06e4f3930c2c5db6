"""A dry run: what one rank of many would hold, compute and send in a training step of any of the eight steps.

    python tools/simulate 3 8 --rank 7 --zero 3 --json seen.json
    python tools/simulate 8 16384 --model llama-405b --pp 16 --tp 8 --zero 1 --seq_len 8192 --global_batch_size 2048

It is the step's own trainer that runs, with the flags that it would be given, but with no memory, GPU or other process
(stand_ins.py). None of what is printed is worked out: storages are seen to come and go, collectives to be called, matrices to
be multiplied (observe.py). What a kernel takes for itself, and what NCCL and the allocator take, is not seen.
"""
import argparse
import json
import sys
from pathlib import Path


def refuse(message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse_args():
    """What the tool itself takes; all else is the trainer's."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter,
                                     allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("step", metavar="STEP", help="1 to 8")
    parser.add_argument("ranks", metavar="RANKS", type=int, help="how many processes torchrun would start")
    parser.add_argument("--rank", type=int, default=0, help="which of them is played")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there, too")
    args, flags = parser.parse_known_args()
    args.step in list("12345678") or refuse(f"STEP {args.step}: the steps are 1 to 8")
    if args.ranks < 1 or args.ranks > 1 and args.step == "1":
        refuse(f"RANKS {args.ranks}: there must be at least 1, and step 1 has no more")
    if not 0 <= args.rank < args.ranks:
        refuse(f"--rank {args.rank}: of {args.ranks} ranks the last is {args.ranks - 1}")
    return args, flags


def main():
    args, flags = parse_args()
    sys.path[0] = str(Path(__file__).resolve().parents[1])                         # tools, where this is a package
    from steps import step_dir
    sys.path.insert(0, str(step_dir(args.step)))
    from simulate.observe import dry_run
    from simulate.report import as_json, report
    report(seen := dry_run(flags, args.ranks, args.rank), args.ranks, args.rank)
    try:
        args.json and Path(args.json).write_text(json.dumps(as_json(seen), indent=1))
    except OSError as error:
        refuse(f"--json {args.json}: cannot be written ({error.strerror})")


if __name__ == "__main__":
    main()
