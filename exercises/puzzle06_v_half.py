"""A second puzzle for step 6: write V-half, a schedule that keeps half as much as 1F1B and idles for half as long.

    python exercises/puzzle06_v_half.py     # judge exercise/v_half.py; create it first if it does not exist

The file has a function v_half(rank, num_ranks, m), which returns the list of actions of a rank, as in step06_pp/schedules.py.
As in DualPipeV, rank r has the stages r and 2 num_ranks - 1 - r. F, I and W of a stage take half a unit of time each; B is I and W.
A rank keeps a pair (stage, micro-batch) from F to W.
At first the function does all forwards, then all backwards. For an even number p of ranks and at least p micro-batches, write one
that

    keeps at most p + 2 pairs (stage, micro-batch) on each rank     1F1B keeps p micro-batches through both stages: 2 p pairs
    idles for at most 1.5 (p - 1) units                             1F1B idles for 3 (p - 1)

The picture of each attempt is in exercise/v_half.png.
"""
import sys
from collections import Counter

from puzzle06 import ROOT, ours
from schedule import draw
from steps import load_module

FILE = ROOT / "exercise/v_half.py"
CASES = [(4, 8), (2, 4), (4, 16), (8, 16)]                # ranks, micro-batches
FIRST = '''from schedules import Action


def v_half(rank, num_ranks, m):
    down, up = rank, 2 * num_ranks - 1 - rank
    return [Action(kind, stage, i) for kind, stage in [("F", down), ("F", up), ("B", up), ("B", down)] for i in range(m)]
'''


def check(actions, rank, p, m):
    """Raise a ValueError unless the list has each action of the rank's stages once, and F, I and W of each pair in this order."""
    stages, place, times = (rank, 2 * p - 1 - rank), {}, Counter()
    for kind, stage, i in actions:
        if kind not in ("F", "B", "I", "W") or i not in range(m):
            raise ValueError(f"rank {rank} does {kind}{i}: an action is F, B, I or W, then a micro-batch, 0 to {m - 1}")
        if stage not in stages:
            raise ValueError(f"rank {rank} does {kind}{i} of stage {stage}: its stages are {stages[0]} and {stages[1]}")
        for part in kind.replace("B", "IW"):
            times[part, stage, i] += 1
            place[part, stage, i] = len(place)
    for stage in stages:
        for i in range(m):
            for part in "FIW":
                if times[part, stage, i] != 1:
                    raise ValueError(f"rank {rank} does {part}{i} of stage {stage} {times[part, stage, i]} times instead of once")
            if not place["F", stage, i] < place["I", stage, i] < place["W", stage, i]:
                raise ValueError(f"rank {rank} does not do F{i}, I{i}, W{i} of stage {stage} in this order")


def judge(v_half, p, m):
    """Return (events, pairs kept at most by each rank, how long each rank idles). Raise an error for what is not a schedule."""
    schedules = ours()
    lists = [[schedules.Action(*action) for action in v_half(rank, p, m)] for rank in range(p)]
    for rank, actions in enumerate(lists):
        check(actions, rank, p, m)
    events = schedules.simulate(lists, 0.5, 0.5, 0.5)
    return events, [schedules.max_in_flight(actions) for actions in lists], schedules.bubble(events)[0]


def refused(kept, idle, p):
    """Return what is wrong with a schedule, a sentence each."""
    wrong = []
    if max(kept) > p + 2:
        wrong.append(f"rank {kept.index(max(kept))} keeps {max(kept)} pairs (stage, micro-batch); at most {p + 2} are allowed")
    if idle > 1.5 * (p - 1):
        wrong.append(f"each rank idles for {idle:g} units; at most {1.5 * (p - 1):g} are allowed")
    return wrong


def load(file):
    sys.path.insert(0, str(ROOT / "step06_pp"))           # for `from schedules import Action`
    return load_module(file).v_half


def main():
    if not FILE.exists():
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(FIRST)
    v_half, shown, wrong = load(FILE), FILE.relative_to(ROOT), []
    for p, m in CASES:
        try:
            events, kept, idle = judge(v_half, p, m)
        except (ValueError, RuntimeError) as error:       # not a schedule, or one that waits for itself
            sys.exit(f"{shown}: {p} ranks, {m} micro-batches: {error}")
        if (p, m) == CASES[0]:
            draw(events, FILE.with_suffix(".png"), f"{p} ranks, {m} micro-batches")
        found = refused(kept, idle, p)
        wrong += found
        print(f"{p} ranks, {m} micro-batches: {'; '.join(found) or f'keeps {max(kept)} pairs, idles for {idle:g} units'}")
    print(f"Not yet. Edit {shown} and try again." if wrong else "This is V-half.")


if __name__ == "__main__":
    main()
