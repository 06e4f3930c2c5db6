"""A virtual clock: how long would a training step take if products and links had a speed, and nothing else cost anything?

    python tests/support/clock.py 4 4 --tp 4                     # step 4 on four ranks, for several speeds of the links
    python tests/support/clock.py 4 --table                      # the table in step 4's README

On two cores nobody can see what a collective costs beside a product: all ranks share them, and memory is the network. So the real
trainer runs once, on real ranks, and each rank notes what it does, in order: so many FLOPs of matrix products, an operation started
(its group, its bytes), a wait for one. Then the notes are played back. A product takes its FLOPs. An operation begins when all its
ranks have started it and their links are free, and takes its bytes on the wire times a number that we choose: the FLOPs that a
device computes while its link moves one byte. A wait lasts until the operation is over. What a rank does not compute, it waits.

Time is counted in FLOPs, so that it is the same on every machine. A rank has one link, which sends and receives at the same time;
all links have one speed. A wait is booked on the operation that is waited for, though another one may hold the link.
"""
import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import cases
from harness import shared_pool
from steps import full_name

# functions of torch.distributed: each starts operations, and waits for them unless it is told not to
STARTERS = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "isend", "irecv"]
SPEEDS = [0, 10, 25, 50, 100]                             # FLOPs that a device computes while its link moves one byte
SLOWER = [0, 100, 250, 500, 1000]                         # of links, for what sends less
MODEL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
             head_dim=16, vocab_size=64)
EXPERTS = dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
MODELS = {6: dict(num_hidden_layers=8), 7: EXPERTS}       # for stages, and for ranks to have experts
FLAGS = "--seq_len 256 --global_batch_size 16 --micro_batch_size 2 --steps 3 --lr 1e-6 --dtype float32"
# of each step, on four ranks
LAYOUTS = {2: ["--dp_mode naive", "--dp_mode overlap", "--bucket_mb 0.5", "--bucket_mb 25"],
           3: ["--zero 0 --bucket_mb 0.5", "--zero 1", "--zero 2", "--zero 3", "--zero 3 --zero_shard 2"],
           4: ["--tp 2", "--tp 4", "--tp 4 --sp off", "--tp 4 --recompute full"],
           5: ["--cp 4 --cp_mode zigzag", "--cp 4 --cp_mode ring", "--cp 4 --cp_mode allgather", "--cp 4 --cp_mode ulysses"],
           6: [f"--pp 4 --schedule {name}" for name in ("afab", "1f1b", "interleaved", "zerobubble", "dualpipe")],
           7: ["--ep 1", "--ep 2", "--ep 4", "--ep 4 --zero 3"]}


class Operation(NamedTuple):
    """As one rank sees it. The others find it by its key: the n-th of its kind in its group, or between two ranks."""
    key: tuple
    ranks: tuple                                          # of all that take part
    wire: float                                           # bytes that this rank sends, or receives if that is more
    dimension: str


# ------------------------------------------------------------------------------------------------ on every rank
def flops(op, args):
    if op._opname in ("mm", "bmm"):
        return 2 * args[0].numel() * args[1].shape[-1]
    if op._opname in ("addmm", "baddbmm"):
        return 2 * args[1].numel() * args[2].shape[-1]
    if op._opname == "_grouped_mm":
        return 2 * args[0].numel() * args[1].shape[-1]
    if op._opname == "_scaled_dot_product_flash_attention_for_cpu":
        return attention_flops(2, *args[:2], causal=True in args[4:5])
    if op._opname == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return attention_flops(5, *args[1:3], causal=True in args[7:8])            # one of the two again, and four
    return 0


def attention_flops(products, q, k, causal):              # [batch, heads, seq, head_dim]
    length = k.shape[2]
    return products * 2 * q.numel() * ((length + 1) / 2 if causal else length)


class Waiting:
    """Stands for the Work of an operation, and notes when it is waited for."""

    def __init__(self, work, numbers, notes):
        self.work, self.numbers, self.notes = work, numbers, notes

    def wait(self):
        self.notes.extend(("wait", number) for number in self.numbers)
        return self.work.wait()

    def is_completed(self):
        return self.work.is_completed()


def noted_job(argv):
    """Trains three steps; returns what this rank did in the last two: the last may wait for what the other has started."""
    import ledger
    import torch.distributed as dist
    import train
    from torch.distributed import distributed_c10d
    notes, operations, seen_of = [], [], Counter()

    class Notes(ledger.Ledger):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            starts = op.namespace == "c10d" and op._opname in (*ledger.COLLECTIVES, "recv_")
            if starts:
                operations.append(self.operation(op, args))
                notes.append(("start", len(operations) - 1))
            elif (work := flops(op, args)) and notes and notes[-1][0] == "compute":
                notes[-1] = ("compute", notes[-1][1] + work)
            elif work:
                notes.append(("compute", work))
            before = sum(self.wire.values())
            result = super().__torch_dispatch__(op, types, args, kwargs)
            if starts:
                sent = sum(self.wire.values()) - before
                operations[-1] = operations[-1]._replace(wire=max(sent, self.received(op, args)))
            return result

        def operation(self, op, args):
            group = ledger.group_of(args)
            ranks, me = tuple(dist.get_process_group_ranks(group)), dist.get_rank()
            if op._opname in ("send", "recv_"):
                ranks = (me, ranks[args[2]]) if op._opname == "send" else (ranks[args[2]], me)
            what = group.group_name, ranks, "send" if op._opname == "recv_" else op._opname
            key = *what, seen_of[what]
            seen_of[what] += 1
            return Operation(key, ranks, 0, self.name(group))

        def received(self, op, args):
            """Bytes from other ranks, where these may be more than what is sent: of an uneven all-to-all."""
            if op._opname != "alltoall_base_" or not args[3]:
                return 0
            return args[0].nbytes * (1 - args[3][ledger.group_of(args).rank()] / max(1, sum(args[3])))

    def noting(function):
        def call(*args, **kwargs):
            first = len(operations)
            work = function(*args, **kwargs)
            if work is None:
                notes.extend(("wait", number) for number in range(first, len(operations)))
                return None
            return Waiting(work, range(first, len(operations)), notes)
        return call

    @contextlib.contextmanager
    def on_every_rank(step, model, mesh, args):
        if step == 0:
            yield
            return
        with Notes(mesh), contextlib.ExitStack() as replaced:
            for name in STARTERS:
                call = noting(getattr(dist, name))
                for module in (dist, distributed_c10d):   # the latter for batch_isend_irecv
                    replaced.enter_context(patch.object(module, name, call))
            yield
        notes.append(("end of step", step))

    with patch.object(train, "ledger", on_every_rank):
        train.main(argv)
    while notes[-1][0] != "end of step":                  # what comes after the last one
        notes.pop()
    return notes, operations


# ------------------------------------------------------------------------------------------------ played back
class Played(NamedTuple):
    """The last step, from the end of the one before, which there may not be."""
    time: float                                           # of the slowest rank
    compute: list                                         # of each rank
    waited: Counter                                       # by dimension, the mean over ranks


def play(of_ranks, flops_per_byte):
    """of_ranks: what noted_job returned on each rank."""
    count = len(of_ranks)
    now, computed, waited, at = [0.0] * count, [0.0] * count, [Counter() for _ in of_ranks], [0] * count
    ends = [(0.0, 0.0, Counter())] * count                # of the step before: when, and what had been computed and waited
    sends, receives = [0.0] * count, [0.0] * count        # until when a rank's link is taken, in each direction
    started, ended = {}, {}                               # by key: {rank: when}; when it is over
    wire, ranks_of = {}, {}                               # the bytes of the rank that has most

    def advance(rank):
        """Until it is done, or waits for what has not begun."""
        notes, operations = of_ranks[rank]
        while at[rank] < len(notes):
            what, value = notes[at[rank]]
            if what == "compute":
                now[rank] += value
                computed[rank] += value
            elif what == "start":
                operation = operations[value]
                started.setdefault(operation.key, {})[rank] = now[rank]
                wire[operation.key] = max(wire.get(operation.key, 0), operation.wire)
                ranks_of[operation.key] = operation.ranks
            elif what == "end of step":
                if at[rank] < len(notes) - 1:
                    ends[rank] = now[rank], computed[rank], waited[rank].copy()
            elif operations[value].key not in ended:
                return
            else:
                end = ended[operations[value].key]
                waited[rank][operations[value].dimension] += max(0, end - now[rank])
                now[rank] = max(now[rank], end)
            at[rank] += 1

    def links(key, ranks):
        """Those that an operation takes: of a message one direction at each end."""
        if key[2] == "send":
            return [(sends, ranks[0]), (receives, ranks[1])]
        return [(lane, rank) for rank in ranks for lane in (sends, receives)]

    while True:
        for rank in range(count):
            advance(rank)
        # All ranks that still wait do so for operations that have not begun: nothing that is started later can begin before the
        # first of those that can begin now.
        can = {}
        for key, since in started.items():
            ranks = ranks_of[key]
            if set(since) == set(ranks):
                can[key] = max(*since.values(), *(lane[rank] for lane, rank in links(key, ranks)))
        if not can:
            break
        key = min(can, key=can.get)
        ended[key] = can[key] + wire[key] * flops_per_byte
        for lane, rank in links(key, ranks_of[key]):
            lane[rank] = ended[key]
        del started[key]
    assert at == [len(notes) for notes, _ in of_ranks], f"ranks wait for ever: {started}"
    before, done, spent = zip(*ends)
    mean = sum((mine - its for mine, its in zip(waited, spent)), Counter())
    return Played(max(now) - max(before), [a - b for a, b in zip(computed, done)],
                  Counter({name: time / count for name, time in mean.items()}))


def run(pool, step, world, flags, **model):
    """What each rank of a training run notes; flags come after those of a small model and a short run."""
    with tempfile.TemporaryDirectory() as folder:
        base = cases.make(Path(folder) / "case", tokens=256 * 64, **{**MODEL, **model})
        return pool.call(noted_job, step, world, argv=f"{base} {FLAGS} {flags}".split())


# ------------------------------------------------------------------------------------------------ tables
def over_products(of_ranks, flops_per_byte):
    """A step's time as a multiple of the mean rank's products, and what of it was waiting, by dimension."""
    played = play(of_ranks, flops_per_byte)
    mean = sum(played.compute) / len(played.compute)
    return played.time / mean, {name: time / mean for name, time in played.waited.items()}


def row(of_ranks, speeds, *first):
    """The step's time for each speed, and at the slowest what is waited for."""
    times, waits = zip(*(over_products(of_ranks, speed) for speed in speeds))
    longest = sorted((-share, name) for name, share in waits[-1].items() if share >= 0.005)
    cells = [*first, *(f"{time:.2f}" for time in times), ", ".join(f"{name} {-share:.2f}" for share, name in longest)]
    return f"| {' | '.join(cells)} |"


def speeds_of(number):
    return SLOWER if number in (2, 3, 6) else SPEEDS


def table(pool, number):
    """The one in a step's README."""
    speeds = speeds_of(number)
    yield f"| on four ranks; FLOPs per byte: | {' | '.join(map(str, speeds))} | waiting, at {speeds[-1]} |"
    yield "|---" * (len(speeds) + 2) + "|"
    for flags in LAYOUTS[number]:
        yield row(run(pool, full_name(number), 4, flags, **MODELS.get(number, {})), speeds, f"`{flags}`")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", help="3, or step03_zero, or a folder with a trainer")
    parser.add_argument("world", nargs="?", type=int, default=4)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--experts", action="store_true", help="a model with a mixture of experts")
    args, flags = parser.parse_known_args()
    step = Path(args.step).resolve() if Path(args.step).is_dir() else full_name(args.step)
    if args.table:
        print(*table(shared_pool(), int(args.step)), sep="\n")
        return
    number = int(args.step) if args.step.isdecimal() else None
    model = MODELS.get(number, EXPERTS if args.experts else {})
    of_ranks = run(shared_pool(), step, args.world, " ".join(flags), **model)
    for speed in speeds_of(number):
        time, waits = over_products(of_ranks, speed)
        said = ", ".join(f"{share:.2f} for {name}" for name, share in sorted(waits.items()) if share >= 0.005)
        print(f"{speed:>4} FLOPs per byte: {time:.2f} times the products; waiting {said or 'less than 0.01'}")


if __name__ == "__main__":
    from clock import main                                # by this name the workers find noted_job
    main()
