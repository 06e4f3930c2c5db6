"""Pipeline schedules. A schedule is data: for every rank, the list of what it does, in order.

    python schedules.py --schedule 1f1b --pp 4 --micro_batches 8              # shows one

    F  forward of one micro-batch through one stage        I  the gradient of the stage's input
    B  both parts of backward, I and then W                W  the gradient of the stage's weights

From such lists everything else follows: what is sent to whom and when (`programs`), how long it takes
(`simulate`), how many activations are kept (`in_flight`), the picture (`draw`). The executor in
pipeline_parallel.py runs any of them.
"""
import argparse
from collections import Counter
from typing import NamedTuple


class Action(NamedTuple):
    kind: str
    stage: int
    micro_batch: int
    with_next: bool = False                               # one piece of work with the action after it

    def __str__(self):
        return f"{self.kind}{self.micro_batch}"


class Event(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


# ---------------------------------------------------------------------------------- the schedules of one rank
def by_turns(forwards, backwards, ahead):
    """So many forwards ahead; then a backward and a forward by turns; then the backwards that are left."""
    actions = forwards[:ahead]
    for i, backward in enumerate(backwards):
        actions += backward + forwards[ahead + i:ahead + i + 1]
    return actions


def afab(rank, ranks, m):
    """All forwards, all backwards."""
    forwards, backwards = [Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)]
    return by_turns(forwards, backwards, ahead=m)


def one_f_one_b(rank, ranks, m):
    """No more ahead than there are ranks from here to the end, so that a backward can follow each forward."""
    forwards, backwards = [Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)]
    return by_turns(forwards, backwards, ahead=ranks - rank)


def interleaved(rank, ranks, m, stages_per_rank):
    """1F1B with several stages on each rank, `ranks` apart; rounds of about `ranks` micro-batches."""
    stages = range(rank, ranks * stages_per_rank, ranks)
    count = m // ranks
    rounds = [range(m * i // count, m * (i + 1) // count) for i in range(count)]
    rounds.sort(key=len, reverse=True)                   # so that the forwards ahead are enough for any round
    forwards = [Action("F", stage, i) for batch in rounds for stage in stages for i in batch]
    backwards = [[Action("B", stage, i)] for batch in rounds for stage in reversed(stages) for i in batch]
    ahead = (stages_per_rank - 1) * len(rounds[0]) + 2 * (ranks - 1 - rank) + 1
    return by_turns(forwards, backwards, ahead)


def zero_bubble(rank, ranks, m):
    """ZB-H1: 1F1B whose W comes `rank` micro-batches after its I, where 1F1B would wait."""
    backwards = [[Action("I", rank, i)] + [Action("W", rank, i - rank)] * (i >= rank) for i in range(m)]
    actions = by_turns([Action("F", rank, i) for i in range(m)], backwards, ahead=ranks - rank)
    return actions + [Action("W", rank, i) for i in range(max(0, m - rank), m)]


def dualpipe(rank, ranks, m):
    """DualPipeV: a rank has stage 0 of the way there, stage 1 of the way back; F of one is paired with B of
    the other."""
    after, pairs = ranks - 1 - rank, m - 2 * ranks + rank + 1
    fill = ["F0"] * (2 * after)                           # the way to the last rank and back
    turn = ["F0", "F1"] * (rank + 1)                      # the first micro-batches come back
    first_losses = ["I1", "W", "F1"] * after              # and have their loss; W waits for nobody
    steady = ["F0+", "B1", "F1+", "B0"] * pairs           # +: paired with the next
    if after == 0:
        steady[0] = "F0"                                  # (the last rank's first B1 is waited for)
    no_new_ones = ["B1", "F1+", "B0"] * after
    ends = ["1", "0"] * (rank + 1)                        # backward only, of both stages by turns:
    last_both = ["B" + stage for stage in ends[:rank + 1]]
    last_inputs = ["I" + stage for stage in ends[rank + 1:]]                       # others wait for these
    put_off = ["W", "I0"] * after + ["W"] * (rank + 1)    # and W fills the end
    moves = fill + turn + first_losses + steady + no_new_ones + last_both + last_inputs + put_off

    stages, done, waiting, actions = (rank, 2 * ranks - 1 - rank), Counter(), [], []
    for move in moves:
        if move == "W":                                   # the oldest that is not done
            actions.append(Action("W", *waiting.pop(0)))
            continue
        kind, stage = move[0], stages[int(move[1])]
        what = stage, done[kind == "F", stage]
        done[kind == "F", stage] += 1
        actions.append(Action(kind, *what, with_next=move.endswith("+")))
        if kind == "I":
            waiting.append(what)
    return actions


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b, "interleaved": interleaved, "zerobubble": zero_bubble,
             "dualpipe": dualpipe}


def make(name, ranks, m, stages_per_rank=1):
    """The lists of all ranks."""
    more = [stages_per_rank] if name == "interleaved" else []
    return [SCHEDULES[name](rank, ranks, m, *more) for rank in range(ranks)]


def least(name, ranks):
    """So many micro-batches it takes at least."""
    return {"interleaved": ranks, "dualpipe": 2 * ranks}.get(name, 1)


# -------------------------------------------------------------------------------- what follows from the lists
class Message(NamedTuple):
    """What F sends to the stage after its own, and I or B to the stage before."""
    forward: bool
    stage: int                                            # the sender's
    micro_batch: int

    @property
    def receiver(self):
        return self.stage + (1 if self.forward else -1)


def needs(action, last):
    """The message that an action waits for, whether from another rank or from its own."""
    if action.kind == "F" and action.stage > 0:
        return Message(True, action.stage - 1, action.micro_batch)
    if action.kind in "IB" and action.stage < last:
        return Message(False, action.stage + 1, action.micro_batch)


def gives(action, last):
    if action.kind == "F" and action.stage < last:
        return Message(True, action.stage, action.micro_batch)
    if action.kind in "IB" and action.stage > 0:
        return Message(False, action.stage, action.micro_batch)


def rank_of_stage(schedule):
    return {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}


def simulate(schedule, F=1, I=1, W=1, message=0, pairs=False):
    """The events in the order in which they start. Stages take F, I, W each; pairs: an F with the B after it
    is one action, which needs all that either needs before it starts, and gives at its end what either
    gives."""
    rank_of, seconds = rank_of_stage(schedule), {"F": F, "I": I, "W": W, "B": I + W}
    last, arrived, events = max(rank_of), {}, []          # arrived: {message: {rank: when}}
    at, free = [0] * len(schedule), [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions):
                size = 2 if pairs and actions[at[rank]].with_next else 1
                group = actions[at[rank]:at[rank] + size]
                wanted = [needs(action, last) for action in group if needs(action, last)]
                if not all(what in arrived for what in wanted):
                    break
                came = []
                for sender, time in map(arrived.get, wanted):
                    came.append(time + message if sender != rank else time)
                start = max([free[rank], *came])
                free[rank] = start + sum(seconds[action.kind] for action in group)
                for action in group:
                    events.append(Event(rank, action, start, start + seconds[action.kind]))
                    start += seconds[action.kind]
                    if gives(action, last):
                        arrived[gives(action, last)] = rank, free[rank]
                at[rank] += size
                progress = True
    stuck = [f"rank {rank} waits with {actions[at[rank]]}"
             for rank, actions in enumerate(schedule) if at[rank] < len(actions)]
    if stuck:
        raise RuntimeError(f"the schedule waits for itself: {'; '.join(stuck)}")
    return sorted(events, key=lambda event: (event.start, event.rank))


def bubble(events):
    """Idle time of every rank, from the first start to the last end."""
    busy = Counter()
    for event in events:
        busy[event.rank] += event.end - event.start
    whole = max(event.end for event in events) - min(event.start for event in events)
    return [whole - busy[rank] for rank in sorted(busy)]


def in_flight(actions):
    """The most (stage, micro-batch)es of which a rank at some moment keeps something: from F until W."""
    kept = most = 0
    for action in actions:
        kept += {"F": 1, "W": -1, "B": -1, "I": 0}[action.kind]
        most = max(most, kept)
    return most


def programs(schedule):
    """Every rank's list with its sends and receives put in: ("send", message, peer), ("receive", message,
    peer), ("compute", action, None).

    A network like nccl's takes what a rank sends and receives one by one, and a send is over only when the
    other side is at its receive. Then the safe order is one that all ranks agree on: all messages of the
    pipeline in the order of their simulated sending. The first message in that order that is not over can
    always be sent, since what leads to it came before. That holds for any time per message. With none, many
    are sent at the same moment, and ties would put some first that nobody waits for yet.
    """
    rank_of = rank_of_stage(schedule)
    last, order = max(rank_of), {}
    for event in sorted(simulate(schedule, message=0.75), key=lambda event: (event.end, event.rank)):
        what = gives(event.action, last)
        if what and rank_of[what.stage] != rank_of[what.receiver]:
            order[what] = len(order)

    def program(rank, actions):
        peers = {what: (rank_of[what.stage], rank_of[what.receiver]) for what in order}
        mine = [what for what in order if rank in peers[what]]
        steps = []

        def post(through):                                # all that comes before it, and it
            while through in mine:
                what = mine.pop(0)
                sender, receiver = peers[what]
                steps.append(("send", what, receiver) if sender == rank else ("receive", what, sender))
        for action, following in zip(actions, [*actions[1:], None]):
            post(needs(action, last))
            if following and mine and mine[0] == needs(following, last):    # under way during this one
                post(mine[0])
            steps.append(("compute", action, None))
            post(gives(action, last))
        return steps
    return [program(rank, actions) for rank, actions in enumerate(schedule)]


def rendezvous(programs):
    """Runs the programs on a network without any buffer: what a rank sends and receives waits in a queue, and
    moves only when it is at the head of the queue on both sides. Returns what is left when nothing moves any
    more: nothing, if all is well."""
    left, queues, done = [list(program) for program in programs], [[] for _ in programs], set()
    last = max(action.stage for program in programs for kind, action, _ in program if kind == "compute")
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(left):
            while program and may_go_on(program[0], rank, programs, done, last):
                step = program.pop(0)
                if step[0] != "compute":
                    queues[rank].append(step)
                progress = True
        for rank, queue in enumerate(queues):
            if queue and queue[0][0] == "send":
                _, what, peer = queue[0]
                if queues[peer] and queues[peer][0] == ("receive", what, rank):
                    queue.pop(0)
                    queues[peer].pop(0)
                    done.add(what)
                    progress = True
    waiting = [(rank, step) for rank, program in enumerate(left) for step in program]
    return waiting + [(rank, step) for rank, queue in enumerate(queues) for step in queue]


def may_go_on(step, rank, programs, done, last):
    kind, action, _ = step
    if kind != "compute":
        return True
    what = needs(action, last)
    return what is None or what in done or ("receive", what) not in {step[:2] for step in programs[rank]}


# ------------------------------------------------------------------------------------------- to look at
def text(events):
    """A row per rank, a column per unit of time; ' marks a rank's second stage, '' its third."""
    local = local_stages(events)
    rows = {rank: "" for rank in sorted(local)}
    for event in events:
        label = f"{event.action}{chr(39) * local[event.rank].index(event.action.stage)}"
        row, width = rows[event.rank].ljust(round(5 * event.start)), round(5 * (event.end - event.start))
        rows[event.rank] = row + label.ljust(width)
    return "\n".join(f"rank {rank} | {row.rstrip()}" for rank, row in rows.items())


def local_stages(events):
    stages = {}
    for event in events:
        stages.setdefault(event.rank, set()).add(event.action.stage)
    return {rank: sorted(of_rank) for rank, of_rank in stages.items()}


def draw(events, path, title):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    colours = {"F": "#4878a8", "B": "#d9a441", "I": "#d9a441", "W": "#6aa56e"}
    local, ranks = local_stages(events), 1 + max(event.rank for event in events)
    start, end = min(event.start for event in events), max(event.end for event in events)
    figure, axes = plt.subplots(figsize=(14, 0.8 + 0.45 * ranks))
    for rank, action, begin, finish in events:
        nth = local[rank].index(action.stage)
        alpha = 1 - 0.35 * nth / max(1, len(local[rank]) - 1)
        axes.barh(rank, finish - begin, left=begin - start, height=0.9, color=colours[action.kind],
                  alpha=alpha, edgecolor="white", linewidth=0.6)
        if (finish - begin) / (end - start) > 0.012:      # room for a number
            axes.text((begin + finish) / 2 - start, rank, action.micro_batch, ha="center", va="center",
                      fontsize=7, color="white" if nth == 0 else "black")
    labels = [f"rank {rank}" for rank in range(ranks)]
    axes.set(yticks=range(ranks), yticklabels=labels, xlim=(0, end - start), title=title)
    axes.invert_yaxis()
    patches = [plt.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in "FBW"]
    meanings = ["F forward", "B or I backward, of the input", "W of the weights"]
    axes.legend(patches, meanings, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description="shows a schedule: timeline, picture, bubble, what it keeps")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--stages_per_rank", type=int, default=2, help="of interleaved")
    parser.add_argument("--picture", default="schedule.png")
    args = parser.parse_args()
    if min(args.pp, args.stages_per_rank) < 1 or args.micro_batches < least(args.schedule, args.pp):
        parser.error(f"pp and stages_per_rank must be at least 1, micro_batches with this schedule at least "
                     f"{least(args.schedule, args.pp)}")
    schedule = make(args.schedule, args.pp, args.micro_batches, args.stages_per_rank)
    events = simulate(schedule)
    print(text(events))
    print(f"idle, of {max(event.end for event in events)} units: {bubble(events)}")
    print(f"kept at most, micro-batches of a stage: {[in_flight(actions) for actions in schedule]}")
    draw(events, args.picture, f"{args.schedule}: {args.pp} ranks, {args.micro_batches} micro-batches")
    print(f"the picture is in {args.picture}")


if __name__ == "__main__":
    main()
