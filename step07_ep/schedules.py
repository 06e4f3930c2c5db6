"""Pipeline schedules. A schedule is data: for every rank, the list of what it computes, in order. In 1F1B
with four micro-batches, for example, rank 2 of 4 computes F0 F1 B0 F2 B1 F3 B2 B3.

    F   forward of one micro-batch through one stage      I   the gradient of the stage's input
    B   the whole backward, I and then W                  W   the gradients of its linears' weights

Everything else follows from these lists: how many activations a rank keeps (`max_in_flight`), how long a step
takes (`simulate`, `bubble`), which rank sends what to which, and when (`add_send_recv`).
torch.distributed.pipelining uses such lists if ranks have several stages. tools/schedule.py draws ours.
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


# -------------------------------------------------------- schedules with an unsplit backward: one rank's list
def warmup_steady_cooldown(forwards, backwards, num_warmup):
    """Put num_warmup forwards first; then alternate backward and forward; then finish the backwards."""
    actions = forwards[:num_warmup]
    for i, backward in enumerate(backwards):
        actions += backward + forwards[num_warmup + i:num_warmup + i + 1]
    return actions


def afab(rank, num_ranks, m):
    """List all forwards, then all backwards (GPipe)."""
    forwards = [Action("F", rank, i) for i in range(m)]
    backwards = [[Action("B", rank, i)] for i in range(m)]
    return warmup_steady_cooldown(forwards, backwards, num_warmup=m)


def one_f_one_b(rank, num_ranks, m):
    """List num_ranks - rank forwards (the warm-up), then a backward and a forward in turn (1F1B).

    (Megatron counts one warm-up forward fewer: its steady phase begins with a forward.)
    """
    forwards = [Action("F", rank, i) for i in range(m)]
    backwards = [[Action("B", rank, i)] for i in range(m)]
    return warmup_steady_cooldown(forwards, backwards, num_warmup=num_ranks - rank)


def interleaved(rank, num_ranks, m, stages_per_rank):
    """List 1F1B for several stages per rank, num_ranks apart. A round has num_ranks micro-batches or more."""
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    num_rounds = m // num_ranks
    rounds = [range(m * i // num_rounds, m * (i + 1) // num_rounds) for i in range(num_rounds)]
    rounds.sort(key=len, reverse=True)                    # the warm-up must be long enough for every round
    forwards = [Action("F", stage, i) for round_ in rounds for stage in stages for i in round_]
    backwards = [[Action("B", stage, i)] for round_ in rounds for stage in reversed(stages) for i in round_]
    # The last rank must run a round's forwards on all its stages but one before the round's first micro-batch
    # can start backward. An earlier rank needs two more forwards for each rank after it, because the
    # micro-batch travels there and back.
    num_warmup = (stages_per_rank - 1) * len(rounds[0]) + 2 * (num_ranks - 1 - rank) + 1
    return warmup_steady_cooldown(forwards, backwards, num_warmup)


# -------------------------------------------------------------------------------- what follows from the lists
def max_in_flight(actions):
    """Return the largest number of (stage, micro-batch) pairs that a rank holds at once, from F to B or W."""
    in_flight = most = 0
    for action in actions:
        in_flight += {"F": 1, "W": -1, "B": -1, "I": 0}[action.kind]
        most = max(most, in_flight)
    return most


class Message(NamedTuple):
    """What F sends to the next stage, or B and I to the previous one."""
    forward: bool
    stage: int                                            # the sender's
    micro_batch: int

    @property
    def receiver(self):
        return self.stage + (1 if self.forward else -1)


def receives(action, last):
    """Return the message that an action waits for, from another rank or its own; None if there is none."""
    if action.kind == "F" and action.stage > 0:
        return Message(True, action.stage - 1, action.micro_batch)
    if action.kind in "IB" and action.stage < last:
        return Message(False, action.stage + 1, action.micro_batch)


def sends(action, last):
    """Return the message that an action sends, to another rank or its own; None if there is none."""
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
    """Return the events of a training step, in the order in which they start.

    F, I and W are how long these actions take, in any unit; B takes I + W. An action starts when its rank is
    free and its message has arrived; a message from one rank to another takes `message`.
    """
    duration = {"F": F, "I": I, "W": W, "B": I + W}
    rank_of = rank_of_stage(schedule)
    last = max(rank_of)
    remaining = [deque(actions) for actions in schedule]
    free = [0] * len(schedule)                            # when each rank becomes free
    arrived = {None: 0}                                 # when each message arrives; None: nothing to wait for
    events = []
    to_try = deque(range(len(schedule)))                  # ranks that may be able to continue
    while to_try:
        rank = to_try.popleft()
        while remaining[rank] and receives(remaining[rank][0], last) in arrived:
            action = remaining[rank].popleft()
            start = max(free[rank], arrived[receives(action, last)])
            free[rank] = start + duration[action.kind]
            events.append(Event(rank, action, start, free[rank]))
            sent = sends(action, last)
            if sent:
                receiver = rank_of[sent.receiver]
                arrived[sent] = free[rank] + (message if receiver != rank else 0)
                to_try.append(receiver)
    stuck = [f"rank {rank} waits before {actions[0]}" for rank, actions in enumerate(remaining) if actions]
    if stuck:
        raise RuntimeError(f"the schedule deadlocks: {'; '.join(stuck)}")
    return sorted(events, key=lambda event: (event.start, event.rank))


def bubble(events):
    """Return each rank's idle time, between the first start and the last end of any rank."""
    busy = Counter()
    for event in events:
        busy[event.rank] += event.end - event.start
    length = max(event.end for event in events) - min(event.start for event in events)
    return [length - busy[rank] for rank in sorted(busy)]


def message_order(schedule):
    """Return all messages between ranks, in the order in which a simulation sends them.

    NCCL runs the messages between two ranks one by one, and a send may not end before the other rank has
    reached its receive. If all ranks post their messages in one common order, they cannot deadlock: the first
    message that has not ended can always be sent, because all that it depends on comes before it. This holds
    however long the messages take. The simulation lets each take 0.75: with 0, many would be sent at the same
    time, and the tie-break could put a message first that no rank is waiting for yet.
    """
    rank_of = rank_of_stage(schedule)
    last = max(rank_of)
    by_end = sorted(simulate(schedule, message=0.75), key=lambda event: (event.end, event.rank))
    sent = [sends(event.action, last) for event in by_end]
    return [message for message in sent if message and rank_of[message.stage] != rank_of[message.receiver]]


def add_send_recv(schedule, rank):
    """Return a rank's list with its sends and receives added.

    The entries are ("send", message, peer), ("receive", message, peer) and ("compute", action, None).
    """
    rank_of = rank_of_stage(schedule)
    last = max(rank_of)
    to_post = deque()                                     # in the common order
    for message in message_order(schedule):
        if rank_of[message.stage] == rank:
            to_post.append(("send", message, rank_of[message.receiver]))
        elif rank_of[message.receiver] == rank:
            to_post.append(("receive", message, rank_of[message.stage]))
    not_posted = {message for _, message, _ in to_post}
    program = []

    def post_through(message):
        """Post all messages up to this one, and this one."""
        while message in not_posted:
            program.append(to_post.popleft())
            not_posted.remove(program[-1][1])

    actions = schedule[rank]
    for action, following in zip(actions, [*actions[1:], None]):
        post_through(receives(action, last))
        if following and to_post and to_post[0][1] == receives(following, last):
            post_through(to_post[0][1])                  # the next message travels while this action computes
        program.append(("compute", action, None))
        post_through(sends(action, last))
    return program


# --------------------------------------------- part two: schedules that split backward (zero_bubble.py)
def zero_bubble(rank, num_ranks, m):
    """List ZB-H1: 1F1B with each W `rank` micro-batches after its I. The last W fill 1F1B's idle end."""
    forwards = [Action("F", rank, i) for i in range(m)]
    backwards = [[Action("I", rank, i)] + [Action("W", rank, i - rank)] * (i >= rank) for i in range(m)]
    remaining = [Action("W", rank, i) for i in range(max(0, m - rank), m)]
    return warmup_steady_cooldown(forwards, backwards, num_warmup=num_ranks - rank) + remaining


def dualpipe(rank, num_ranks, m):
    """List DualPipeV: each rank holds a stage on the V's way down, called 0 here, and one on its way up, 1.

    In DualPipe's step 4, an F of one stage is next to a B of the other. DualPipe runs the two at the same
    time, to hide their communication; the executor here runs one after the other. A W belongs to the oldest I
    that has none yet. The numbers of the steps are DualPipeV's (https://github.com/deepseek-ai/DualPipe).
    """
    ranks_after = num_ranks - 1 - rank
    step_1 = ["F0"] * (2 * ranks_after)                   # until micro-batch 0 comes back
    step_2 = ["F0", "F1"] * (rank + 1)                    # until its gradient comes
    step_3 = ["I1", "W", "F1"] * ranks_after
    step_4 = ["F0", "B1", "F1", "B0"] * (m - 2 * num_ranks + rank + 1)             # the steady phase
    step_5 = ["B1", "F1", "B0"] * ranks_after             # no new micro-batches
    stages = ["1", "0"] * (rank + 1)
    step_6 = ["B" + stage for stage in stages[:rank + 1]] + ["I" + stage for stage in stages[rank + 1:]]
    step_7 = ["W", "I0"] * ranks_after
    step_8 = ["W"] * (rank + 1)

    stage_of = {"0": rank, "1": 2 * num_ranks - 1 - rank}
    next_forward = {"0": count(), "1": count()}           # the next micro-batch of each stage
    next_backward = {"0": count(), "1": count()}
    without_W = deque()
    actions = []
    for name in step_1 + step_2 + step_3 + step_4 + step_5 + step_6 + step_7 + step_8:
        if name == "W":
            actions.append(without_W.popleft()._replace(kind="W"))
            continue
        kind, which = name
        i = next(next_forward[which] if kind == "F" else next_backward[which])
        actions.append(Action(kind, stage_of[which], i))
        if kind == "I":
            without_W.append(actions[-1])
    return actions


# --------------------------------------------------------------------------------------------- all schedules
class Schedule(NamedTuple):
    """All that the trainer, the tools and the tests know about a schedule."""
    actions: Callable                                     # (rank, num_ranks, m) -> that rank's list
    stages_per_rank: int = 1
    or_more: bool = False                                 # more are allowed; actions gets stages_per_rank too
    v_shaped: bool = False                                # rank r holds stages r and last - r
    split_backward: bool = False                          # into I and W
    min_micro_batches: Callable = lambda num_ranks: 1


SCHEDULES = {
    "afab": Schedule(afab),
    "1f1b": Schedule(one_f_one_b),
    "interleaved": Schedule(interleaved, stages_per_rank=2, or_more=True,
                            min_micro_batches=lambda num_ranks: num_ranks),
    "zerobubble": Schedule(zero_bubble, split_backward=True),
    "dualpipe": Schedule(dualpipe, stages_per_rank=2, v_shaped=True, split_backward=True,
                         min_micro_batches=lambda num_ranks: 2 * num_ranks),
}


def make(name, num_ranks, m, stages_per_rank=1):
    """Return the lists of all ranks, for m micro-batches."""
    schedule = SCHEDULES[name]
    more = [stages_per_rank] if schedule.or_more else []
    return [schedule.actions(rank, num_ranks, m, *more) for rank in range(num_ranks)]
