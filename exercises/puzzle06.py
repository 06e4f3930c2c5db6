"""A puzzle for step 6: write a schedule by hand.

    python exercises/puzzle06.py            # judge exercise/puzzle06.txt; create it first if it does not exist

Three ranks have one stage each, and there are four micro-batches. F, I and W take one unit of time each; B is I and W. The file has
a line for each rank, with its actions in order, such as F0 F1 I0 W0 ... A rank keeps a micro-batch from F to W. The gradient
leaves after I, and messages take no time. At first the file contains 1F1B, where each rank idles for 6 units and the ranks keep
3, 2 and 1 micro-batches, 6 in all. You can do better: lists exist for each column of this table.

    kept, by all ranks together     3   4   5   6   7   9
    idle, each rank                16  10   5   4   3   2

No list idles less without keeping more; `least_idle` tries all of them.
"""
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from schedule import text
from steps import ROOT, load_module

FILE = ROOT / "exercise/puzzle06.txt"
RANKS, M = 3, 4
ONE_F_ONE_B = "F0 F1 F2 B0 F3 B1 B2 B3\nF0 F1 B0 F2 B1 F3 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3\n"


def ours():
    """Load schedules.py of step 6."""
    return load_module(ROOT / "step06_pp/schedules.py")


def read(lists, schedules):
    lines = [line.split() for line in lists.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        for word in line:
            if word[0] not in "FBIW" or not word[1:].isdigit() or int(word[1:]) >= M:
                raise ValueError(f"{word!r} on rank {number}: an action is F, B, I or W, then a micro-batch, 0 to {M - 1}")
        done = sorted(kind + word[1:] for word in line for kind in word[0].replace("B", "IW"))
        wanted = sorted(f"{kind}{i}" for kind in "FIW" for i in range(M))
        if done != wanted:
            raise ValueError(f"rank {number} does {' '.join(done)}, and should do each of {' '.join(wanted)} once (B is I and W)")
    if len(lines) != RANKS:
        raise ValueError(f"{len(lines)} lines, not {RANKS}: one for each rank")
    return [[schedules.Action(word[0], rank, int(word[1:])) for word in line] for rank, line in enumerate(lines)]


def judge(lists):
    """Return the timeline, how long each rank idles, and how many micro-batches each keeps."""
    schedules = ours()
    lists = read(lists, schedules)
    events = schedules.simulate(lists)
    return text(events), schedules.bubble(events)[0], [schedules.max_in_flight(actions) for actions in lists]


def least_idle(kept):
    """Return the least idle time if rank r keeps at most kept[r] micro-batches. A state counts the F, I and W that each rank has
    done."""
    for idle in itertools.count():
        states = {((0, 0, 0),) * RANKS}
        for time in range(1, 3 * M + idle + 1):
            states = {after for state in states for after in itertools.product(*(
                moves(state, rank, kept[rank], time, idle) for rank in range(RANKS)))}
        if states:
            return idle


def moves(state, rank, kept, time, idle):
    """Yield what a rank can have done after the next unit of time, without idling longer than `idle`."""
    F, I, W = state[rank]
    if F < M and F - W < kept and (rank == 0 or F < state[rank - 1][0]):
        yield F + 1, I, W
    if I < F and (rank == RANKS - 1 or I < state[rank + 1][1]):
        yield F, I + 1, W
    if W < I:
        yield F, I, W + 1
    if F + I + W >= time - idle:
        yield F, I, W


def main():
    if not FILE.exists():
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(ONE_F_ONE_B)
    shown = FILE.relative_to(ROOT)
    try:
        timeline, idle, kept = judge(FILE.read_text())
    except (ValueError, RuntimeError) as error:           # not a schedule, or one that waits for itself
        sys.exit(f"{shown}: {error}")
    best = least_idle(kept)
    print(f"{timeline}\n\neach rank idles {idle} units; the ranks keep {kept}, {sum(kept)} micro-batches in all")
    print("No schedule idles less without keeping more." if idle == best else
          f"{best} units are possible without keeping more. Edit {shown} and try again.")


if __name__ == "__main__":
    main()
