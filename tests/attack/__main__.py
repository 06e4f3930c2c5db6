"""A campaign of hostile attempts, drawn from a seed and judged by the contract.

    make attack SEED=7 COUNT=50                 # or: python tests/attack --seed 7 --count 50 [--only killed,a_full_disk]

fine     it did what it was told, and the numbers and files are right
clear    it ended with one line that says why, and nothing is gone
unclear  it ended without such a line
silent   it ended well, and what it did is wrong
lost     something that was there before is gone
endless  it did not end, or left processes behind
"""
import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tools")]

import attempts  # noqa: E402
from runs import CLEAR, FINE, House  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description="A campaign of hostile attempts.")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", default="", help="names of attempts, with commas")
    args = parser.parse_args()
    known = {attempt.__name__: attempt for attempt in attempts.ATTEMPTS}
    chosen = args.only.split(",") if args.only else list(known)
    if args.count < 1 or not set(chosen) <= set(known):
        parser.error(f"--count from 1 on, and --only of {', '.join(known)}")
    counts, began = Counter(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        for number in range(args.count):
            draw = random.Random(f"{args.seed} {number}")
            name = chosen[number % len(chosen)]
            place = Path(folder, f"attempt_{number}")
            place.mkdir()
            verdict, what = known[name](draw, place, house)
            counts[verdict] += 1
            print(f"{number:4} {verdict:8} {name}: {what}", flush=True)
    bad = sum(counts.values()) - counts[FINE] - counts[CLEAR]
    print(f"{args.count} attempts in {time.time() - began:.0f} s: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
