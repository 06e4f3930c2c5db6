"""A network without any buffer, for the programs of schedules.py. NCCL's buffer holds only small messages, so a program that
hangs here may hang on a GPU.

`programs` has one list for each rank, of ("send", message, peer), ("receive", message, peer) and ("compute", action, None).
"""
from collections import deque


def rendezvous(programs, receives):
    """Run the programs. Return what is left when nothing can move any more: an empty list if no program hangs.

    A rank's sends and receives wait in a queue. A message moves only when it is at the head of the queue on both sides. Pass
    receives(action, last) from the step's schedules.py.
    """
    last = max(action.stage for program in programs for kind, action, _ in program if kind == "compute")
    from_others = [{what for kind, what, _ in program if kind == "receive"} for program in programs]
    left, queues, done = [deque(program) for program in programs], [deque() for _ in programs], set()

    def may_go_on(rank):
        kind, action, _ = left[rank][0]
        wanted = receives(action, last) if kind == "compute" else None
        return wanted in done or wanted not in from_others[rank]

    to_try = deque(range(len(programs)))
    while to_try:
        rank = to_try.popleft()
        while left[rank] and may_go_on(rank):
            if left[rank][0][0] != "compute":
                queues[rank].append(left[rank][0])
            left[rank].popleft()
        if queues[rank]:
            kind, what, peer = queues[rank][0]
            other = "receive" if kind == "send" else "send"
            if queues[peer] and queues[peer][0] == (other, what, rank):
                queues[rank].popleft()
                queues[peer].popleft()
                done.add(what)
                to_try.extend((rank, peer))
    waiting = [(rank, step) for rank, program in enumerate(left) for step in program]
    return waiting + [(rank, step) for rank, queue in enumerate(queues) for step in queue]
