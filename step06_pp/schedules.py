"""Pipeline schedules. A schedule is data: for every rank, the list of what it does, in order. Rank 2 of 4, in
1F1B: F0 F1 B0 F2 B1 F3 B2 B3.

    F  forward of one micro-batch through one stage        I  the gradient of the stage's input
    B  both parts of backward, I and then W                W  the gradient of the stage's weights

From such lists everything else follows: how many activations are kept (`in_flight`), how long it takes
(`simulate`, `bubble`), what is sent to whom and when (`program`). The executor in pipeline_parallel.py runs
any of them; tools/schedule.py draws them.
"""
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple


class Action(NamedTuple):
    kind: str                                             # F, B, I or W
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind}{self.micro_batch}"


# ---------------------------------------------------------------------------------- the schedules of one rank
def warmup_steady_cooldown(forwards, backwards, num_warmup):
    """So many forwards ahead; then a backward and a forward by turns; then the backwards that are left."""
    actions = forwards[:num_warmup]
    for i, backward in enumerate(backwards):
        actions += backward + forwards[num_warmup + i:num_warmup + i + 1]
    return actions


def afab(rank, ranks, m):
    """All forwards, all backwards."""
    forwards = [Action("F", rank, i) for i in range(m)]
    backwards = [[Action("B", rank, i)] for i in range(m)]
    return warmup_steady_cooldown(forwards, backwards, num_warmup=m)


def one_f_one_b(rank, ranks, m):
    """No more ahead than there are ranks from here to the end, so that a backward can follow each forward."""
    forwards = [Action("F", rank, i) for i in range(m)]
    backwards = [[Action("B", rank, i)] for i in range(m)]
    return warmup_steady_cooldown(forwards, backwards, num_warmup=ranks - rank)


def interleaved(rank, ranks, m, stages_per_rank):
    """1F1B with several stages on each rank, `ranks` apart; rounds of about `ranks` micro-batches."""
    stages = range(rank, ranks * stages_per_rank, ranks)
    number = m // ranks
    rounds = [range(m * i // number, m * (i + 1) // number) for i in range(number)]
    rounds.sort(key=len, reverse=True)                   # so that the forwards ahead are enough for any round
    forwards = [Action("F", stage, i) for batch in rounds for stage in stages for i in batch]
    backwards = [[Action("B", stage, i)] for batch in rounds for stage in reversed(stages) for i in batch]
    # On the last rank a round goes through all stages but the last, and there its first micro-batch can turn
    # back. A rank before it does two more for each rank between: one on the way there, one on the way back.
    num_warmup = (stages_per_rank - 1) * len(rounds[0]) + 2 * (ranks - 1 - rank) + 1
    return warmup_steady_cooldown(forwards, backwards, num_warmup)


def zero_bubble(rank, ranks, m):
    """ZB-H1: 1F1B whose W comes `rank` micro-batches after its I, where 1F1B would wait."""
    forwards = [Action("F", rank, i) for i in range(m)]
    backwards = [[Action("I", rank, i)] + [Action("W", rank, i - rank)] * (i >= rank) for i in range(m)]
    left = [Action("W", rank, i) for i in range(max(0, m - rank), m)]
    return warmup_steady_cooldown(forwards, backwards, num_warmup=ranks - rank) + left


def dualpipe(rank, ranks, m):
    """DualPipeV: a rank has a stage of the way there, here 0, and one of the way back, here 1. In the steady
    phase an F of one stands beside a B of the other. DualPipe runs the two at once, to hide transfers; the
    executor here runs one after the other. W is of the oldest I that has none yet."""
    after = ranks - 1 - rank
    pairs = m - 2 * ranks + rank + 1
    fill = ["F0"] * (2 * after)                           # the way to the last rank and back
    turn = ["F0", "F1"] * (rank + 1)                      # the first micro-batches come back
    first_losses = ["I1", "W", "F1"] * after              # and have their loss; W waits for nobody
    steady = ["F0", "B1", "F1", "B0"] * pairs
    no_new_ones = ["B1", "F1", "B0"] * after
    ends = ["1", "0"] * (rank + 1)                        # backward only, of both stages by turns:
    last_both = ["B" + stage for stage in ends[:rank + 1]]
    last_inputs = ["I" + stage for stage in ends[rank + 1:]]                       # others wait for these
    put_off = ["W", "I0"] * after + ["W"] * (rank + 1)    # and W fills the end
    moves = fill + turn + first_losses + steady + no_new_ones + last_both + last_inputs + put_off

    stages = {"0": rank, "1": 2 * ranks - 1 - rank}
    forwards = {"0": count(), "1": count()}               # of each stage the next micro-batch
    backwards = {"0": count(), "1": count()}
    without_W = deque()
    actions = []
    for move in moves:
        if move == "W":
            actions.append(without_W.popleft()._replace(kind="W"))
            continue
        kind, which = move
        i = next(forwards[which] if kind == "F" else backwards[which])
        actions.append(Action(kind, stages[which], i))
        if kind == "I":
            without_W.append(actions[-1])
    return actions


class Schedule(NamedTuple):
    """All that the trainer, the tools and the tests know about a schedule."""
    actions: Callable                                     # (rank, ranks, m) -> that rank's actions
    stages_per_rank: int = 1
    or_more: bool = False                                 # stages_per_rank may be larger: a fourth argument
    v_shaped: bool = False                                # rank r holds stages r and last - r
    split_backward: bool = False                          # into I and W
    min_micro_batches: Callable = lambda ranks: 1


SCHEDULES = {
    "afab": Schedule(afab),
    "1f1b": Schedule(one_f_one_b),
    "interleaved": Schedule(interleaved, stages_per_rank=2, or_more=True,
                            min_micro_batches=lambda ranks: ranks),
    "zerobubble": Schedule(zero_bubble, split_backward=True),
    "dualpipe": Schedule(dualpipe, stages_per_rank=2, v_shaped=True, split_backward=True,
                         min_micro_batches=lambda ranks: 2 * ranks),
}


def make(name, ranks, m, stages_per_rank=1):
    """Return the lists of all ranks."""
    more = [stages_per_rank] if SCHEDULES[name].or_more else []
    return [SCHEDULES[name].actions(rank, ranks, m, *more) for rank in range(ranks)]


# -------------------------------------------------------------------------------- what follows from the lists
def max_in_flight(actions):
    """The most (stage, micro-batch)es of which a rank at some moment keeps something: from F until W."""
    kept = most = 0
    for action in actions:
        kept += {"F": 1, "W": -1, "B": -1, "I": 0}[action.kind]
        most = max(most, kept)
    return most


class Message(NamedTuple):
    """What F sends to the stage after its own, and I or B to the stage before."""
    forward: bool
    stage: int                                            # the sender's
    micro_batch: int

    @property
    def receiver(self):
        return self.stage + (1 if self.forward else -1)


def receives(action, last):
    """The message that an action waits for, whether from another rank or from its own."""
    if action.kind == "F" and action.stage > 0:
        return Message(True, action.stage - 1, action.micro_batch)
    if action.kind in "IB" and action.stage < last:
        return Message(False, action.stage + 1, action.micro_batch)


def sends(action, last):
    if action.kind == "F" and action.stage < last:
        return Message(True, action.stage, action.micro_batch)
    if action.kind in "IB" and action.stage > 0:
        return Message(False, action.stage, action.micro_batch)


def rank_of_stage(schedule):
    return {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}


class Event(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


def simulate(schedule, F=1, I=1, W=1, message=0):
    """The events in the order in which they start. Stages take F, I, W each; an action starts when its rank
    is free and what it receives is there, which takes `message` from one rank to another."""
    seconds = {"F": F, "I": I, "W": W, "B": I + W}
    rank_of = rank_of_stage(schedule)
    last = max(rank_of)
    left = [deque(actions) for actions in schedule]
    free = [0] * len(schedule)
    there = {None: 0}                                     # when a message is; None: who receives none
    events = []
    to_try = deque(range(len(schedule)))                  # ranks that may be able to go on
    while to_try:
        rank = to_try.popleft()
        while left[rank] and receives(left[rank][0], last) in there:
            action = left[rank].popleft()
            start = max(free[rank], there[receives(action, last)])
            free[rank] = start + seconds[action.kind]
            events.append(Event(rank, action, start, free[rank]))
            sent = sends(action, last)
            if sent:
                receiver = rank_of[sent.receiver]
                there[sent] = free[rank] + (message if receiver != rank else 0)
                to_try.append(receiver)
    stuck = [f"rank {rank} waits with {actions[0]}" for rank, actions in enumerate(left) if actions]
    if stuck:
        raise RuntimeError(f"the schedule waits for itself: {'; '.join(stuck)}")
    return sorted(events, key=lambda event: (event.start, event.rank))


def bubble(events):
    """Idle time of every rank, from the first start to the last end."""
    busy = Counter()
    for event in events:
        busy[event.rank] += event.end - event.start
    length = max(event.end for event in events) - min(event.start for event in events)
    return [length - busy[rank] for rank in sorted(busy)]


def message_order(schedule):
    """All messages from rank to rank, in one order for all ranks: that of their simulated sending.

    A network like nccl's takes what a rank sends and receives one by one, and a send is over only when the
    other side is at its receive. Then the safe order is one that all ranks agree on: its first message that
    is not over can always be sent, since what leads to it came before. That holds for any time per message.
    With none, many are sent at the same moment, and ties would put some first that nobody waits for yet.
    """
    rank_of = rank_of_stage(schedule)
    last = max(rank_of)
    by_end = sorted(simulate(schedule, message=0.75), key=lambda event: (event.end, event.rank))
    sent = [sends(event.action, last) for event in by_end]
    return [message for message in sent if message and rank_of[message.stage] != rank_of[message.receiver]]


def add_send_recv(schedule, rank):
    """A rank's list with its sends and receives put in: ("send", message, peer), ("receive", message, peer),
    ("compute", action, None)."""
    rank_of = rank_of_stage(schedule)
    last = max(rank_of)
    mine = deque()                                        # what is not posted yet, in the order of all ranks
    for message in message_order(schedule):
        if rank_of[message.stage] == rank:
            mine.append(("send", message, rank_of[message.receiver]))
        elif rank_of[message.receiver] == rank:
            mine.append(("receive", message, rank_of[message.stage]))
    not_posted = {message for _, message, _ in mine}
    steps = []

    def post(through):                                    # all that comes before it, and it
        while through in not_posted:
            steps.append(mine.popleft())
            not_posted.remove(steps[-1][1])

    actions = schedule[rank]
    for action, following in zip(actions, [*actions[1:], None]):
        post(receives(action, last))
        if following and mine and mine[0][1] == receives(following, last):
            post(mine[0][1])                              # one receive ahead: under way during this action
        steps.append(("compute", action, None))
        post(sends(action, last))
    return steps
