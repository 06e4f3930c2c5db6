"""Show a run that hangs as you would see it on a cluster: where each rank is, and what it called last.

    make hang N=3                                         # or: python exercises/hangs/lab.py 3
    make hang N=3 ANSWER="2 hang3.py:14"                  # your answer: the rank and the line that are to blame
    make hang N=3 ANSWER="slow 2 hang3.py:14"             # the same, if nothing hangs but this rank holds up the others
    make hang N=3 ANSWER=hint                             # the next hint; a wrong answer shows it as well

exercises/hangs/README.md explains how to read the output.
"""
import contextlib
import functools
import importlib
import itertools
import json
import re
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tools"))
from prove.processes import Processes, frames
from refuse import refuse

HINTS = HERE.parent.parent / "exercise/hangs"             # counts the hints shown; exercise/ belongs to the reader
RANKS, NUMBERS = 4, range(1, 10)
# A run counts as hung when no rank has called anything for QUIET beats of each rank's heart. A beat takes a fifth of a second, and
# longer if the machine is busy: then a rank needs longer for its next call, too.
BEAT, QUIET, LATEST, AGAIN = 0.2, 20, 40, 30              # seconds; in beats: quiet, latest first look, pause before the next
LIMIT = 180                                               # seconds, after which everything is stopped
#          arguments: output, input, peer
CALLS = {"all_reduce": (0, 0, None), "all_gather_into_tensor": (0, 1, None), "reduce_scatter_tensor": (0, 1, None),
         "all_to_all_single": (0, 1, None), "barrier": (None, None, None),
         "send": (None, 0, 1), "isend": (None, 0, 1), "recv": (0, None, 1), "irecv": (0, None, 1)}
FIELDS = ["collective_seq_id", "p2p_seq_id", "profiling_name", "process_group", "input_sizes", "output_sizes", "state"]


# ------------------------------------------------------------------------------------------- on every rank
class Recorder:
    """Records each call of torch.distributed, in the fields of PyTorch's flight recorder: when it starts and when it completes."""

    def __init__(self, file):
        self.file, self.records, self.numbers = file, itertools.count(), {}

    def note(self, entry, state):
        print(json.dumps(entry | {"state": state}), file=self.file)

    def wrap(self, name, function):
        import torch.distributed as dist
        message = CALLS[name][2] is not None

        @functools.wraps(function)
        def call(*args, group=None, **kwargs):
            group = group or dist.group.WORLD
            members = dist.get_process_group_ranks(group)
            counter = "p2p_seq_id" if message else "collective_seq_id"
            number = self.numbers[counter, *members] = self.numbers.get((counter, *members), 0) + 1
            sizes = [[] if i is None else list(args[i].shape) for i in CALLS[name][:2]]
            way = {"send": " ->", "recv": " <-"}[name[-4:]] + str(args[1]) if message else ""
            entry = {"record_id": next(self.records), counter: number, "profiling_name": f"gloo:{name}{way}",
                     "process_group": "world" if len(members) == RANKS else "ranks " + ",".join(map(str, members)),
                     "output_sizes": sizes[0], "input_sizes": sizes[1]}
            self.note(entry, "started")
            result = function(*args, group=group, **kwargs)
            if name not in ("isend", "irecv"):
                self.note(entry, "completed")
                return result
            return Waited(result, lambda: self.note(entry, "completed"))           # completed once it is waited for
        return call


class Waited:
    def __init__(self, work, over):
        self.work, self.over = work, over

    def wait(self):
        self.work.wait()
        self.over()


def heart(file):
    """Beat in a separate thread, so that the heart goes on while the main thread waits in a collective."""
    while True:
        time.sleep(BEAT)
        print(end=".", file=file, flush=True)


def run_program(rank, folder, pipe, number):
    calls, beats = (open(f"{folder}/{rank}.{name}", "w", buffering=1) for name in ("calls", "beats"))
    threading.Thread(target=heart, args=(beats,), daemon=True).start()
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    recorder = Recorder(calls)
    for name in CALLS:
        setattr(dist, name, recorder.wrap(name, getattr(dist, name)))
    importlib.import_module(f"hang{number}").main(rank, RANKS)


# ------------------------------------------------------------------------------------------- looking at them
class Run(Processes):
    """The ranks of a program, each in its own process."""

    def __init__(self, number):
        super().__init__(run_program, "forkserver", (number,), ["torch", "torch.distributed"], all_threads=True)
        self.deadline = time.monotonic() + LIMIT
        self.start(RANKS)

    def calls(self, rank):
        """Return the newest state of each call."""
        whole, _, _ = self.read(rank, "calls").rpartition("\n")                    # the last line may be incomplete
        entries = map(json.loads, whole.splitlines())
        return list({entry["record_id"]: entry for entry in entries}.values())

    def moved(self):
        return [len(self.read(rank, "calls")) for rank in range(RANKS)]

    def beats(self):
        """Return the fewest beats of any living rank."""
        living = [len(self.read(rank, "beats")) for rank, process in enumerate(self.processes) if process.is_alive()]
        return min(living, default=float("inf"))

    def wait(self, until):
        while not until():
            if time.monotonic() > self.deadline:
                sys.exit(f"error: the ranks did not come to rest within {LIMIT} s; try again when this machine is less busy")
            time.sleep(BEAT / 2)

    def wait_for_quiet(self):
        """Wait until no rank has called anything for a while; if they go on calling, wait a limited time."""
        self.wait(lambda: all(self.moved()))
        began, since, seen = self.beats(), self.beats(), self.moved()

        def quiet():
            nonlocal since, seen
            if self.moved() != seen:
                since, seen = self.beats(), self.moved()
            return self.beats() - since >= QUIET or self.beats() - began >= LATEST or self.beats() == float("inf")
        self.wait(quiet)

    def stands(self, rank):
        """Return each thread's frames, the innermost first, as py-spy dump shows them; for a dead process, those that it left."""
        found = []
        for text in re.split(r"^(?:Current t|T)hread ", self.stack(rank), flags=re.M)[1:]:
            calls = frames(text)
            functions = [function for _, _, function in calls]
            if "on_rank" in functions:                    # the main thread; below are the launcher's own frames
                calls = calls[:functions.index("on_rank")]
            if not {"heart", "end_with_parent"} & {*functions}:
                found += [(function, file, line) for file, line, function in calls
                          if not file.endswith(("lab.py", "c10d_logger.py"))]
        return found


def look(number):
    """Return each rank's state (stack, calls, output, exit code), and each rank's last call a while later."""
    with Run(number) as run:
        run.wait_for_quiet()
        ranks = []
        for rank, process in enumerate(run.processes):
            calls = run.calls(rank)
            ranks.append(dict(stack=run.stands(rank), calls=calls, out=run.read(rank, "out"), exit=process.exitcode))
        began, seen = run.beats(), run.moved()
        run.wait(lambda: run.beats() - began >= AGAIN or run.moved() != seen or run.beats() == float("inf"))
        run.wait(lambda: run.beats() - began >= AGAIN / 3 or run.beats() == float("inf"))
        return ranks, [run.calls(rank)[-1] for rank in range(RANKS)]


def show(number, ranks, later):
    print(f"exercises/hangs/hang{number}.py on {RANKS} ranks: the training has stopped.\n")
    for rank, found in enumerate(ranks):
        print(f"rank {rank}" + (f": the process has ended, exit code {found['exit']}" if found["exit"] is not None else ""))
        for function, file, line in found["stack"]:
            print(f"    {function} ({Path(file).name}:{line})")
        for line in printed(number, found["out"]):
            print(f"    printed: {line[:150]}")
    print("\nthe last calls of each rank")
    print_calls((rank, entry) for rank, found in enumerate(ranks) for entry in found["calls"][-4:])
    print("\nthe last call of each rank, at a second look some seconds later")
    print_calls(enumerate(later))


def printed(number, text):
    """Return the last lines that a rank printed; of a traceback, only the places in the program and the error."""
    lines = [re.sub(r'^  File ".*/(hang\d.py)", line (\d+),', r"\1:\2", line) for line in text.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith(("  File", "    "))][-5:]


def print_calls(calls):
    rows = [["rank", *FIELDS], *([str(rank), *(str(entry.get(field, "")) for field in FIELDS)] for rank, entry in calls)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


# ------------------------------------------------------------------------------------------- judging
def lines_of(number):
    """Return the line that has to change, and the lines where the rank waits or that lead there. Each counts, and so do its
    neighbours."""
    from answers import ANSWERS
    lines = (HERE / f"hang{number}.py").read_text().splitlines()
    return [i for i, line in enumerate(lines, 1) if any(text in line for text in ANSWERS[number]["lines"])]


def judge(number, answer):
    """Return (whether the answer is right, what to say), with None if it is not in the form of an answer."""
    from answers import ANSWERS
    found = re.fullmatch(rf"(slow )?\s*([0-9]{{1,4}})\s+(?:hang{number}\.py:)?([0-9]{{1,6}})", answer.strip())
    if not found or int(found[2]) >= RANKS:
        return None, (f'ANSWER="{answer}": must be a rank, 0 to {RANKS - 1}, and a line, such as "2 hang{number}.py:14"; '
                      'put "slow " before it if nothing hangs')
    wanted, rank, line = ANSWERS[number], int(found[2]), int(found[3])
    if bool(found[1]) != wanted.get("slow", False):
        return False, "no: " + ("it really hangs" if found[1] else "does it really hang? compare the two looks")
    if rank not in wanted["ranks"]:
        return False, f"no: rank {rank} is not to blame"
    if not any(abs(line - right) <= 1 for right in lines_of(number)):
        return False, f"no: the rank is right, but line {line} and its neighbours are not to blame"
    return True, f"yes. {wanted['why']}\nTo watch it line by line: make play N={number}"


def hint(number):
    """Return the hints so far, and one more."""
    from answers import ANSWERS
    notes, hints = HINTS / f"hang{number}.hints", ANSWERS[number]["hints"]
    shown = min(len(notes.read_text()) if notes.exists() else 0, len(hints) - 1) + 1
    HINTS.mkdir(parents=True, exist_ok=True)
    notes.write_text("." * shown)
    return "\n".join(f"hint {i} of {len(hints)}: {text}" for i, text in enumerate(hints[:shown], 1))


def main(words):
    number, answer = [*words, "", ""][:2]
    if not re.fullmatch("[1-9]", number) or len(words) > 2:
        refuse(f"N={number}: must be a program, 1 to {NUMBERS[-1]}")
    number = int(number)
    if not answer:
        show(number, *look(number))
        print(f'\nWhich rank and line? make hang N={number} ANSWER="RANK hang{number}.py:LINE"; if nothing hangs, "slow RANK ..."')
        return 0
    if answer == "hint":
        print(hint(number))
        return 0
    right, said = judge(number, answer)
    if right is None:
        refuse(said)
    print(said if right else f"{said}\n{hint(number)}")
    if right:
        (HINTS / f"hang{number}.hints").unlink(missing_ok=True)
    return 0 if right else 3


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    try:
        with contextlib.suppress(BrokenPipeError):
            sys.exit(main(sys.argv[1:]))
    except OSError as error:                              # a folder that cannot be written
        refuse(error)
    except KeyboardInterrupt:
        sys.exit(130)
