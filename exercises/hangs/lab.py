"""Runs that hang, and what a cluster would tell you of them: where each rank stands, and what it called last.

    make hang N=3                                         # or: python exercises/hangs/lab.py 3; N from 1 to 8
    make hang N=3 ANSWER="2 hang3.py:14"                  # which rank, and which line of it, is to blame
    make hang N=3 ANSWER=hint                             # the next hint
"""
import contextlib
import faulthandler
import functools
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
RANKS = 4
QUIET, LONGEST, AGAIN = 3, 15, 12                         # seconds: nothing moved; a first look at the latest; a second one
COLLECTIVES = ["all_reduce", "all_gather_into_tensor", "all_to_all_single", "barrier"]
NOT_SHOWN = ("lab.py", "c10d_logger.py", "process.py", "forkserver.py", "spawn.py", "popen_", "<string>")
MESSAGES = ["send", "recv", "isend", "irecv"]


# ------------------------------------------------------------------------------------------- on every rank
def recorded(name, function, note, numbers):
    """A function of torch.distributed that notes what it is called with, in the words of PyTorch's flight recorder."""
    import torch
    import torch.distributed as dist

    @functools.wraps(function)
    def call(*args, **kwargs):
        group = kwargs.get("group")
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        of = "world" if group in (None, dist.group.WORLD) else f"{group.group_name} of ranks {' '.join(map(str, ranks))}"
        counted = "p2p_seq_id" if name in MESSAGES else "collective_seq_id"
        numbers[counted, of] = numbers.get((counted, of), 0) + 1
        sizes = [list(arg.shape) for arg in args if torch.is_tensor(arg)]
        peer = {"peer": args[1]} if name in MESSAGES else {}
        entry = {counted: numbers[counted, of], "profiling_name": f"gloo:{name}", "process_group": of, "sizes": sizes, **peer}
        note(entry | {"state": "started"})
        result = function(*args, **kwargs)
        if name in ("isend", "irecv"):                    # over when it is waited for
            wait = result.wait
            result = Waited(lambda: (wait(), note(entry | {"state": "completed"})))
        else:
            note(entry | {"state": "completed"})
        return result
    return call


class Waited:
    def __init__(self, wait):
        self.wait = wait


def on_rank(rank, number, folder):
    stacks = open(f"{folder}/{rank}.stack", "w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    sys.stdout = sys.stderr = open(f"{folder}/{rank}.out", "w", buffering=1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    calls, numbers = open(f"{folder}/{rank}.calls", "w", buffering=1), {}

    def note(entry):
        print(json.dumps(entry), file=calls)
    for name in COLLECTIVES + MESSAGES:
        setattr(dist, name, recorded(name, getattr(dist, name), note, numbers))
    importlib.import_module(f"hang{number}").main(rank, RANKS)
    note({"state": "ended"})
    while True:                                           # the launcher waits for the others
        signal.pause()


# ------------------------------------------------------------------------------------------- looking
def calls_of(folder, rank):
    path = Path(folder, f"{rank}.calls")
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def last_calls(folder, rank, count=4):
    """The newest state of each call, as the flight recorder has it."""
    newest = {}
    for call in calls_of(folder, rank):
        newest[json.dumps({key: value for key, value in call.items() if key != "state"})] = call
    return list(newest.values())[-count:]


def stack_of(folder, rank, pid):
    """The innermost frames of each thread, as py-spy dump shows them."""
    path = Path(folder, f"{rank}.stack")
    with contextlib.suppress(ProcessLookupError):         # it has died, and its output says of what
        os.kill(pid, signal.SIGUSR1)
    before, text, deadline = None, "", time.monotonic() + 5
    while (not text or text != before) and time.monotonic() < deadline:
        time.sleep(0.1)
        before, text = text, path.read_text()
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', text.split("Current thread")[-1])
    frames = [(Path(file).name, line, name) for file, line, name in frames]
    return [f"{file}:{line} in {name}" for file, line, name in frames if not file.startswith(NOT_SHOWN)]


def moved(folder):
    return [Path(folder, f"{rank}.calls").stat().st_size if Path(folder, f"{rank}.calls").exists() else 0 for rank in range(RANKS)]


@contextlib.contextmanager
def running(number, folder):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    processes = [context.Process(target=on_rank, args=(rank, number, folder), daemon=True) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def look(number):
    """Starts the ranks; two looks at them, the first when nothing has moved for a while: (per rank its stack, calls, output; what
    has moved since)"""
    with tempfile.TemporaryDirectory() as folder, running(number, folder) as processes:
        began, seen, since = time.monotonic(), None, time.monotonic()
        while not all(moved(folder)) or time.monotonic() - since < QUIET and time.monotonic() - began < LONGEST:
            if moved(folder) != seen:
                seen, since = moved(folder), time.monotonic()
            if time.monotonic() - began > 120:
                sys.exit("error: the ranks did not start within two minutes")
            time.sleep(0.1)
        ranks = []
        for rank, process in enumerate(processes):
            out = Path(folder, f"{rank}.out").read_text()
            ranks.append((stack_of(folder, rank, process.pid), last_calls(folder, rank), out))
        first, deadline = moved(folder), time.monotonic() + AGAIN
        while moved(folder) == first and time.monotonic() < deadline:
            time.sleep(0.2)
        return ranks, [after > before for before, after in zip(first, moved(folder))]


def show(number, ranks, since):
    print(f"exercises/hangs/hang{number}.py on {RANKS} ranks does not come to its end.\n")
    for rank, (stack, calls, out) in enumerate(ranks):
        print(f"--- rank {rank} stands here, the innermost call first")
        print(*(f"    {frame}" for frame in stack[:5]), sep="\n")
        for line in out.splitlines()[-3:]:
            print(f"    it has printed: {line}")
    print("\nwhat each rank called last")
    for rank, (_, calls, _) in enumerate(ranks):
        for call in calls:
            words = [f"{key} {value}" for key, value in call.items()]
            print(f"    rank {rank}:  {'  '.join(words)}")
    went_on = [str(rank) for rank, has in enumerate(since) if has]
    said = f"ranks {', '.join(went_on)} have called something since" if went_on else "nothing has moved"
    print(f"\na second look, {AGAIN} s later at the most: {said}")


# ------------------------------------------------------------------------------------------- judging
def lines_of(number, texts):
    """Line numbers of a program's lines that hold one of these texts."""
    lines = (HERE / f"hang{number}.py").read_text().splitlines()
    return [i for i, line in enumerate(lines, 1) if any(text in line for text in texts)]


def judge(number, answer):
    """(right, what to say)"""
    from answers import ANSWERS
    found = re.fullmatch(r"(slow )?(\d+) (?:hang\d\.py:)?(\d+)", answer.strip())
    if not found:
        return False, f"error: an answer is a rank and a line, \"2 hang{number}.py:14\"; with \"slow \" before it if nothing hangs"
    slow, rank, line = bool(found[1]), int(found[2]), int(found[3])
    wanted = ANSWERS[number]
    if slow != wanted.get("slow", False):
        return False, "no: " + ("it hangs" if slow else "does it hang? look at the two looks")
    if rank not in wanted["ranks"]:
        return False, f"no: rank {rank} waits for another"
    if not any(abs(line - right) <= 1 for right in lines_of(number, wanted["lines"])):
        return False, f"the rank is right, line {line} is not: neither what has to change nor where it stands (one off would do)"
    return True, "yes. " + wanted["why"]


def hint(number, given=None):
    from answers import ANSWERS
    notes = Path(given or tempfile.gettempdir(), f"hang{number}.hints")
    seen = int(notes.read_text()) if notes.exists() else 0
    notes.write_text(str(seen + 1))
    hints = ANSWERS[number]["hints"]
    return "\n".join(f"hint {i + 1}: {text}" for i, text in enumerate(hints[:seen + 1]))


def main(words):
    number = int(words[0]) if words and words[0] in "12345678" and len(words[0]) == 1 else None
    if number is None or len(words) > 2:
        print('error: make hang N=1 to N=8, and ANSWER="2 hang1.py:14" or ANSWER=hint', file=sys.stderr)
        return 2
    answer = words[1] if len(words) == 2 else ""
    if answer == "hint":
        print(hint(number))
    elif answer:
        right, said = judge(number, answer)
        print(said)
        return 0 if right else 3
    else:
        show(number, *look(number))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
