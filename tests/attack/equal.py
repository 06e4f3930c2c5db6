"""Layouts drawn from a seed, of every step from 2, each against one process: four steps of AdamW in float64, all flags drawn.

    python tests/attack/equal.py --seed 7 --layouts 200 --resumes 40

Losses, gradient norms (relative) and weights (of a tensor's norm) are to agree to 1e-9. A resume is a run of step 8 that was saved
after two steps under one layout and goes on under another.
"""
import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/support", "tools")]

import cases  # noqa: E402
import layouts  # noqa: E402
from harness import assert_same_run, shared_pool  # noqa: E402
from steps import NAMES  # noqa: E402

# and worlds of sixteen ranks with all dimensions, and uneven ones that the arrays leave out
MESHES = layouts.MESHES + [(2, 2, 2, 2), (4, 2, 2, 1), (2, 4, 1, 2), (1, 4, 2, 2), (4, 1, 2, 1), (2, 4, 1, 1), (1, 2, 4, 1),
                           (3, 2, 1, 1)]


def drawn(draw, step):
    return layouts.layout_of(layouts.complete(dict(dtype="float64", optimizer="adamw"), step, draw), step, draw)


def shared_flags(draw):
    """Those that change the numbers of one process too."""
    return (f"--dtype float64 --seed {draw.randrange(1000)} --weight_decay {draw.choice([0, .1, .7])} "
            f"--lr {draw.choice([1e-3, 1e-2])} --lr_schedule {draw.choice(['cosine', 'constant'])} --warmup {draw.randrange(6)} "
            f"--grad_clip {draw.choice([0, .01, .5, 100])} --seq_len {draw.choice([16, 32, 48])}")


def reference(pool, base, layout, shared):
    balance = f"--balance {layout.flag('balance')}" if layout.flag("balance") else ""
    step = NAMES[0] if layout.shape.startswith("dense") else NAMES[6]
    return pool.train(step, f"{base} --micro_batch_size {random.Random(shared).choice([4, 6, 12])} {shared} {balance}")


def base_of(pool, layout):
    return pool.once(layout.shape, lambda: cases.make(pool.folder() / layout.shape, tokens=48 * 200, **cases.shape(layout.shape)))


def compare(pool, draw):
    layout, shared = drawn(draw, draw.choice([2, 3, 4, 5, 6, 6, 7, 7, 8, 8, 8])), shared_flags(draw)
    base = base_of(pool, layout)
    what = f"{layout.step} {layout} {shared}"
    run = pool.train(layout.step, f"{base} {layout.flags} {shared}", layout.world)
    assert_same_run(run, reference(pool, base, layout, shared), 1e-9, what)
    return what


def resume(pool, draw):
    first, shared = drawn(draw, 8), shared_flags(draw)
    kind = first.shape.split("-")[0]
    second = drawn(draw, 8)
    while second.shape.split("-")[0] != kind or second.flag("balance") != first.flag("balance"):
        second = drawn(draw, 8)
    layers = max(int(layout.shape.split("-")[1]) for layout in (first, second))
    whole = first._replace(shape=f"{kind}-{layers}")
    base = base_of(pool, whole)
    what = f"{first} resumed as {second} {shared}"
    with tempfile.TemporaryDirectory() as folder:
        pool.train(NAMES[7], f"{base} {first.flags} {shared} --checkpoint {folder} --save_every 2", first.world, weights=False)
        shutil.rmtree(Path(folder, "step_00000004"))
        run = pool.train(NAMES[7], f"{base} {second.flags} {shared} --checkpoint {folder} --resume", second.world)
    one = reference(pool, base, whole, shared)
    one.losses, one.grad_norms = one.losses[2:], one.grad_norms[2:]
    assert_same_run(run, one, 1e-9, what)
    return what


def main():
    parser = argparse.ArgumentParser(description="Layouts drawn from a seed, against one process.")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--layouts", type=int, default=20)
    parser.add_argument("--resumes", type=int, default=4)
    args = parser.parse_args()
    layouts.MESHES = MESHES
    pool, bad = shared_pool(), 0
    for number in range(args.layouts + args.resumes):
        attempt = compare if number < args.layouts else resume
        draw = random.Random(f"{args.seed} {attempt.__name__} {number}")
        try:
            print(f"{attempt.__name__} {number}: equal: {attempt(pool, draw)}", flush=True)
        except AssertionError as error:
            bad += 1
            print(f"{attempt.__name__} {number}: NOT EQUAL: {error}", flush=True)
    print(f"{args.layouts} layouts and {args.resumes} resumes: {bad} not equal")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
