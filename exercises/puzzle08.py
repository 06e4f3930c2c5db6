"""A puzzle for step 8: which layout sends the fewest bytes?

    python exercises/puzzle08.py            # judge exercise/puzzle08.txt; create it first if it does not exist

Train an 8B model on 16 GPUs, with 64 sequences of 8,192 tokens per step, in bfloat16, without recomputation. The file has one line,
a layout in the form of the planner's --config: dp=..,tp=..,cp=..,pp=..,zero=..,schedule=..,v=..,mbs=..,acc=.. (If you leave
out a field, tp, cp, pp and mbs are 1, zero is 0, schedule is 1f1b and v is 2; dp and acc follow from the rest.) Of all layouts that
fit, which sends the fewest bytes, summed over all ranks? That depends on the memory of a GPU:

    GiB of a GPU that may be used         70       40       24       15
    GiB on the wire in a step          100.9    484.9  1,748.9  6,209.8

`least` tries all layouts that the planner knows. The best one need not be fast: a pipeline sends little but waits a lot.
The program prints a command of tools/simulate that shows what your layout keeps and sends. Hybrid sharding and the other modes
of cp are left out.
"""
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "exercise/puzzle08.txt"
sys.path.append(str(ROOT / "tools/plan"))

import costs
import explain
import models
import plan
from trainer import Refused

MODEL, GPUS, SEQ_LEN, SEQUENCES = "llama-8b", 16, 8192, 64
LIMITS = [70, 40, 24, 15]
C = models.load(MODEL)
CLUSTER = SimpleNamespace(gpus=GPUS, gpus_per_node=8)
FIRST = "dp=16,zero=3\n"


def on_the_wire(l):
    """Return {dimension: bytes of all ranks together}."""
    ranks = dict(dp=l.dp * l.cp, tp=l.tp)
    wire = {}
    for rank in range(l.pp):
        for (dimension, collective), payload in costs.sent(C, l, rank).items():
            n = ranks.get(dimension, 2)
            of_payload = 1 if collective == "send" else (n - 1) / n * (2 if collective == "all_reduce" else 1)
            wire[dimension] = wire.get(dimension, 0) + payload * of_payload * GPUS // l.pp
    return {dimension: size for dimension, size in wire.items() if size}


def held(l):
    """Return the GiB on the fullest rank."""
    return sum(plan.memory(C, l).values())


def layouts():
    for mesh in plan.meshes(C, CLUSTER, SEQ_LEN):
        for size in (2**i for i in range(11) if SEQUENCES // mesh.dp % 2**i == 0):
            m = SEQUENCES // mesh.dp // size
            for schedule, v in plan.schedules(C, mesh.pp):
                if m < plan.fewest_micro_batches(mesh._replace(schedule=schedule)):
                    continue
                for zero in (0, 1, 2, 3) if mesh.dp * mesh.cp > 1 else (0,):
                    yield mesh._replace(zero=zero, schedule=schedule, virtual=v, micro_batch=size, accumulation=m)


def least():
    """Return, for each limit, the layout that fits and sends least."""
    best = dict.fromkeys(LIMITS)
    for l in sorted(layouts(), key=lambda l: sum(on_the_wire(l).values())):
        open_ = [limit for limit in LIMITS if best[limit] is None]
        if not open_:
            break
        size = held(l)
        best |= {limit: l for limit in open_ if size <= limit}
    return best


def main():
    if not FILE.exists():
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(FIRST)
    shown = FILE.relative_to(ROOT)
    try:
        l = plan.parse_config(FILE.read_text().strip(), C, CLUSTER, SEQ_LEN, SEQUENCES)
    except Refused as refused:
        sys.exit(f"{shown}: {refused}")
    if l.recompute != "none":
        sys.exit(f"{shown}: recompute={l.recompute} is not allowed in this puzzle; leave it out")
    if l.dp * l.micro_batch * l.accumulation != SEQUENCES:
        sys.exit(f"{shown}: dp({l.dp}) x mbs({l.micro_batch}) x acc({l.accumulation}) must be {SEQUENCES} sequences; change one")
    wire, size = on_the_wire(l), held(l)
    total = sum(wire.values())
    print(f"{size:.1f} GiB on the fullest rank; {total / 2**30:,.1f} GiB on the wire per step: "
          + ", ".join(f"{dimension} {part / 2**30:,.1f}" for dimension, part in sorted(wire.items())))
    print("To see it in a dry run: " + explain.dry_run(C, MODEL, l))
    for limit, best in least().items():
        if size <= limit:
            fewest = sum(on_the_wire(best).values())
            verdict = "no layout sends less" if total <= fewest else f"{fewest / 2**30:,.1f} GiB are possible"
            print(f"with {limit} GiB: {verdict}")


if __name__ == "__main__":
    main()
