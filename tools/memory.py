"""Draw what a rank holds in memory over the first four training steps: how many bytes of each kind, and when.

    python tools/memory.py step01_single_gpu/train.py --out out/memory --recompute full
    torchrun --standalone --nproc_per_node 2 tools/memory.py step03_zero/train.py --out out/memory --zero 3

The trainer runs with all flags that are not this tool's, and stops after four steps unless --steps says otherwise. Only its
Profiler is replaced, by one that watches every operation. That makes a step slower, but its memory stays the same. Each rank
draws memory_rankN.png, and rank 0 prints its memory between steps and at the peak.
"""
import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from refuse import refuse
from watch import KINDS, Storages, replaced_profiler

RANK = int(os.environ.get("RANK") or 0)                   # torchrun sets it; a single process is rank 0
STEPS = 4                                                 # to watch


def run(flags, finish):
    """Run the trainer with these flags. Call finish with the rows of the watched steps, after the last of them."""
    import train                                          # of the step whose folder is on the path
    live = Storages(given=True)

    @contextlib.contextmanager
    def watch(step, model, optimizer, args):
        last = min(args.first_step + STEPS, args.steps) - 1
        if step > last:
            yield
            return
        live.tag_state(model, optimizer)
        with live:
            yield
        if step == last:
            finish(live.timeline())
    with replaced_profiler(watch):
        train.main(flags)


def draw(rows, path):
    from matplotlib.figure import Figure
    seconds, *kinds = zip(*rows)
    axes = Figure(figsize=(11, 4.5)).subplots()
    mebibytes = [[size / 2**20 for size in kind] for kind in kinds]
    alive = [sum(kinds) for kinds in zip(*mebibytes)]
    if RANK == 0:
        print(f"memory of a rank: {alive[-1]:.1f} MiB between steps, {max(alive):.1f} MiB at the peak", flush=True)
    axes.stackplot(seconds, mebibytes, labels=KINDS, colors=KINDS.values(), step="post")
    axes.set(xlabel="seconds (observing slows the run)", ylabel="MiB alive")
    axes.legend(loc="upper left")
    axes.figure.savefig(path, dpi=130)


def fail(message):
    if RANK:                                              # rank 0 prints for all; torchrun ends the others when it exits
        time.sleep(10)
    refuse(message)


def parse_args(argv):
    """Return the tool's own arguments, and all other flags, for the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False,
                                     usage="memory.py TRAINER --out DIR [TRAINER FLAGS]")
    parser.error = fail
    parser.add_argument("trainer", metavar="TRAINER", help="a step's trainer, such as step03_zero/train.py")
    parser.add_argument("--out", required=True, metavar="DIR", help="where each rank puts its picture, memory_rankN.png")
    args, flags = parser.parse_known_args(argv)
    if Path(args.trainer).name != "train.py" or not Path(args.trainer).is_file():
        fail(f"TRAINER {args.trainer}: must be a step's train.py; choose one such as step03_zero/train.py")
    for flag in ("--compile", "--profile"):
        if any(given.split("=")[0] == flag for given in flags):
            fail(f"{flag}: does not work while every operation is watched; leave it out")
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {args.out}: cannot be written ({error.strerror}); choose another directory")
    return args, flags


def main(argv=None):
    args, flags = parse_args(argv)
    sys.path.insert(0, str(Path(args.trainer).resolve().parent))
    drawn = []
    run(["--steps", str(STEPS), *flags], lambda rows: drawn.append(draw(rows, Path(args.out, f"memory_rank{RANK}.png"))))
    if not drawn:
        fail("--steps: the trainer ran no step to watch; give a larger number")


if __name__ == "__main__":
    main()
