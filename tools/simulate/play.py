"""Play the ranks' notes: every rank computes, starts operations and waits for them in its own order, and each takes simulated time.

The code's own waits decide what overlaps, and so do streams, as on a GPU with NCCL:
- a rank has one stream for kernels. Python runs ahead and launches one kernel after another; where launching takes longer than the
  kernels themselves, the device waits for the host.
- each communicator (a process group, or two ranks that send to each other) has its own stream. An operation begins there when all
  its ranks have started it, and the operations before it in the same stream are over.
- a rank has two links, NVLink and a network card, and each can send and receive at the same time. Transfers that use a link at the
  same time share it.
- a wait makes the stream of kernels wait, not the host. A collective takes part of the GPU from the kernels that run meanwhile:
  the faster it sends, the more it takes. The kernels' loss is added at the wait for the collective.
"""
import heapq
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from functools import cache
from itertools import count
from typing import NamedTuple


class Event(NamedTuple):
    rank: int
    stream: str                                           # compute or actions, or the dimension of a communicator
    name: str
    start: float
    end: float
    about: str                                            # the layer, the line that waits, or a transfer's link
    action: str = ""                                      # such as "F3 of stage 0"


class Transfer:
    """A collective or a message, with all its ranks."""
    def __init__(self, operation, needs, queues):
        self.operation, self.needs, self.queues = operation, needs, queues
        self.started, self.paid = {}, set()               # {(rank, end): time of its start}; ranks whose kernels it has slowed
        self.ready = self.end = None                      # time when it could begin; time when it was over


class Player:
    """Plays recordings, {rank: its notes}. stands_for(rank) returns the recorded rank that has the same notes."""
    def __init__(self, recordings, cluster, stands_for=lambda rank: rank, stage_of=lambda rank: 0):
        self.of, self.cluster, self.stage_of = recordings, cluster, stage_of
        self.stand_for = cache(lambda ranks: tuple(map(stands_for, ranks)))
        self.takes = {rank: [cluster.kernel(kernel) for kernel in one.kernels] for rank, one in recordings.items()}
        self.now, self.issued, self.at = ({rank: 0 for rank in recordings} for _ in range(3))
        self.clock, self.transfers, self.numbers = 0.0, {}, Counter()
        self.mine = {rank: {} for rank in recordings}     # a rank's transfers, by the number of the operation
        self.action = {rank: ("", 0.0) for rank in recordings}                     # the action that it is in, and since when
        self.queues = defaultdict(deque)                  # {(communicator, rank): transfers, in the order it started them}
        self.to_begin, self.order = [], count()           # a heap
        self.active, self.busy = {}, Counter()            # {transfer: seconds left if it were alone}, {lane: transfers in it}
        # The results: when each note was done; what happened; and the seconds of each rank. `idle` is the part of `waited` in
        # which a rank of another stage had not got that far.
        self.times, self.events = {rank: [] for rank in recordings}, []
        self.kernels = {rank: ([], []) for rank in recordings}                     # start of each; seconds of all before it
        self.computing, self.host, self.idle, self.waited = Counter(), Counter(), Counter(), defaultdict(Counter)

    def play(self):
        for rank in self.of:
            self.advance(rank)
        while self.to_begin or self.active:
            begin = self.to_begin[0][0] if self.to_begin else float("inf")
            left = {transfer: seconds * self.slowed(transfer) for transfer, seconds in self.active.items()}
            first = min(left, key=left.get, default=None)
            end = self.clock + left[first] if left else float("inf")
            then = min(begin, end)
            for transfer in self.active:
                self.active[transfer] -= (then - self.clock) / self.slowed(transfer)
            self.clock = then
            if end <= begin:
                self.finish(first)
            else:
                _, _, transfer = heapq.heappop(self.to_begin)
                self.active[transfer] = transfer.alone
                self.busy.update(transfer.lanes)
        stuck = {rank: one.notes[self.at[rank]] for rank, one in self.of.items() if self.at[rank] < len(one.notes)}
        if stuck:
            raise RuntimeError(f"ranks wait for each other for ever: {stuck}")
        self.seconds = max(self.now.values())
        return self

    def advance(self, rank):
        """Play a rank's notes until they end, or until one waits for an operation that is not over."""
        notes, times = self.of[rank].notes, self.times[rank]
        while self.at[rank] < len(notes):
            what, value, *more = notes[self.at[rank]]
            if what == "compute":
                self.compute(rank, value, *more)
            elif what == "start":
                self.start(rank, value)
            elif what == "wait" and not self.wait(rank, self.mine[rank][value], *more):
                return
            elif what == "begin":
                self.action[rank] = value, self.now[rank]
            elif what == "end":
                self.events.append(Event(rank, "actions", value, self.action[rank][1], self.now[rank], ""))
                self.action[rank] = "", 0.0
            elif what == "host waits":
                self.issued[rank] = max(self.issued[rank], self.now[rank])
            times.append(self.now[rank])
            self.at[rank] += 1

    def compute(self, rank, number, layer):
        self.issued[rank] += self.cluster.issue
        start = max(self.now[rank], self.issued[rank])
        self.host[rank] += start - self.now[rank]
        self.now[rank] = start + self.takes[rank][number]
        for of_all, one in zip(self.kernels[rank], (start, self.computing[rank])):
            of_all.append(one)
        self.computing[rank] += self.takes[rank][number]
        kernel, (action, _) = self.of[rank].kernels[number], self.action[rank]
        self.events.append(Event(rank, "compute", kernel.name, start, self.now[rank], layer, action))

    def start(self, rank, number):
        operation = self.of[rank].operations[number]
        ends = self.stand_for(operation.ranks)
        message = operation.what in ("send", "receive")
        what = (operation.dimension, *ends) if message else (operation.dimension, operation.what, *sorted(set(ends)))
        key = *what, self.numbers[rank, operation.what, what]
        self.numbers[rank, operation.what, what] += 1
        if key not in self.transfers:
            needs = {(ends[0], "send"), (ends[1], "receive")} if message else {(one, operation.what) for one in ends}
            communicator = (operation.dimension, *sorted(what[1:] if message else what[2:]))
            queues = [] if operation.grouped else [(communicator, one) for one in sorted(set(ends))]
            self.transfers[key] = Transfer(operation, needs, queues)
        transfer = self.mine[rank][number] = self.transfers[key]
        if operation.wire > transfer.operation.wire:      # it takes as long as the rank with the most to send needs
            transfer.operation = operation
        self.issued[rank] += self.cluster.issue
        transfer.started[rank, operation.what] = max(self.now[rank], self.issued[rank])
        if transfer.queues:
            self.queues[transfer.queues[0][0], rank].append(transfer)
        self.try_to_begin(transfer)

    def wait(self, rank, transfer, site):
        if transfer.end is None:
            return False
        waited = transfer.end - self.now[rank]
        if waited > 0:
            dimension = transfer.operation.dimension
            self.waited[rank][dimension, site] += waited
            if len({self.stage_of(one) for one, _ in transfer.needs}) > 1:
                self.idle[rank] += waited if dimension == "pp" else max(0, transfer.ready - self.now[rank])
            self.events.append(Event(rank, "compute", f"wait for {dimension}", self.now[rank], transfer.end, site))
            self.now[rank] = transfer.end
        hidden = self.computed(rank, transfer.end) - self.computed(rank, transfer.ready)
        collective = transfer.operation.what not in ("send", "receive")
        if hidden > 0 and collective and rank not in transfer.paid:                # kernels that ran meanwhile had less of the GPU
            rate = transfer.operation.wire / max(transfer.alone, 1e-12)
            lost, start = hidden * self.cluster.share_taken(rate), self.now[rank]
            transfer.paid.add(rank)                       # a wait may be noted twice: by a function, and by one that it calls
            self.now[rank] += lost
            self.computing[rank] += lost
            self.events.append(Event(rank, "compute", f"slowed by {transfer.operation.dimension}", start, start + lost, site))
        return True

    def computed(self, rank, when):
        """Return how many seconds this rank's kernels had run by then."""
        starts, before = self.kernels[rank]
        i = bisect_right(starts, when) - 1
        return 0.0 if i < 0 else min(before[i] + when - starts[i], before[i + 1] if i + 1 < len(before) else self.computing[rank])

    def try_to_begin(self, transfer):
        """Begin a transfer if all its ranks have started it, and the transfers before it in their streams are over."""
        come = transfer.started.keys() == transfer.needs and transfer.ready is None
        if come and all(self.queues[queue][0] is transfer for queue in transfer.queues):
            transfer.ready = max(self.clock, *transfer.started.values())
            latency, transfer.alone, link = self.cluster.transfer(transfer.operation)
            both = [(rank, end) for rank, _ in transfer.needs for end in ("send", "receive")]
            message = transfer.operation.what in ("send", "receive")
            transfer.lanes = [(link, *end) for end in (transfer.needs if message else both)]
            heapq.heappush(self.to_begin, (transfer.ready + latency, next(self.order), transfer))

    def slowed(self, transfer):
        return max(self.busy[lane] for lane in transfer.lanes)

    def finish(self, transfer):
        transfer.end, operation = self.clock, transfer.operation
        del self.active[transfer]
        self.busy.subtract(transfer.lanes)
        for queue in transfer.queues:
            self.queues[queue].popleft()
        for queue in transfer.queues:
            if self.queues[queue]:
                self.try_to_begin(self.queues[queue][0])
        for rank in {rank for rank, _ in transfer.needs}:
            if len(operation.ranks) > 1:                  # with one rank nothing travels
                link = transfer.lanes[0][0]
                self.events.append(Event(rank, operation.dimension, operation.what, transfer.ready, transfer.end, link))
            self.advance(rank)
