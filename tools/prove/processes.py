"""Start ranks on this machine, and learn what became of each: what it answered, what it printed, where it is.

    with Processes(function, "fork", arguments) as ranks:
        ranks.start(4)                                    # each calls function(rank, folder, pipe, *arguments)
        answers = ranks.collect(4, seconds=60, grace=1)   # {rank: what it sent through its pipe, or ("died", exit status)}
        texts = {rank: ranks.stack(rank) for rank in range(4) if rank not in answers}

This needs nothing but torch, because tools/prove must also work when tools/ is copied alone.
"""
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

STACK = getattr(signal, "SIGRTMIN", signal.SIGUSR1)       # asks a rank for its stack; Slurm and trainers use SIGUSR1
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def torchrun(world, *words):
    """Return the command that runs a program on `world` ranks, as a reader would start it."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world), *map(str, words)]


# ------------------------------------------------------------------------------------------- on a rank
def on_rank(function, rank, folder, pipe, arguments, all_threads):
    stack = open(f"{folder}/{rank}.stack", "w")
    faulthandler.enable(stack)
    faulthandler.register(STACK, stack, all_threads=all_threads)
    sys.stdout = sys.stderr = open(f"{folder}/{rank}.out", "a", buffering=1, encoding="utf-8")
    os.dup2(sys.stdout.fileno(), 1)                       # what C++ prints goes there, too
    os.dup2(sys.stdout.fileno(), 2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    threading.Thread(target=end_with_parent, daemon=True).start()
    function(rank, folder, pipe, *arguments)
    while True:                                           # others may still talk to this rank; the parent ends it
        time.sleep(1)


def end_with_parent():
    multiprocessing.parent_process().join()               # it may be killed, and then cannot end its ranks
    os._exit(1)


def environment(rank, world, port):
    """Return what torchrun would give this rank. If there are more ranks than GPUs, they share."""
    import torch
    gpus = torch.cuda.device_count()
    shared = dict(NCCL_HOSTID=str(rank // gpus)) if gpus else {}       # NCCL refuses two ranks of one host on one GPU
    return dict(RANK=str(rank), LOCAL_RANK=str(rank % (gpus or rank + 1)), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", **shared)


# ------------------------------------------------------------------------------------------- in the process that starts them
def new_store():
    """Return a store through which ranks find each other. In a used one they would find the addresses of an earlier run.

    It listens on this machine only, because anyone who can reach it can make the ranks unpickle anything; TCPStore alone would
    listen on all interfaces.
    """
    from torch.distributed import TCPStore
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class Processes:
    """A process for each rank, started by this method of multiprocessing. Their output and stacks go to files in a folder."""

    def __init__(self, function, method, arguments=(), preload=(), all_threads=False):
        self.context = multiprocessing.get_context(method)
        if method == "forkserver":
            self.context.set_forkserver_preload([*preload])
        self.function, self.arguments, self.all_threads = function, arguments, all_threads
        self.processes, self.pipes, self.folder = [], [], tempfile.TemporaryDirectory()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        self.folder.cleanup()

    def start(self, world):
        """Start ranks until there are `world` of them."""
        for rank in range(len(self.processes), world):
            ours, theirs = self.context.Pipe()
            arguments = self.function, rank, self.folder.name, theirs, self.arguments, self.all_threads
            self.processes.append(self.context.Process(target=on_rank, args=arguments, daemon=True))
            self.pipes.append(ours)
            self.processes[-1].start()
            theirs.close()                                # so that ours ends when the rank does

    def end(self):
        for process, pipe in zip(self.processes, self.pipes):
            process.kill()
            process.join()
            pipe.close()
        self.processes, self.pipes = [], []

    def collect(self, world, seconds, grace):
        """Return {rank: what it sent} for the first `world` ranks, in the order in which it came. A rank sends a tuple. If this
        begins with "error", or the rank dies, the others may be waiting for it for ever, and get only `grace` seconds more."""
        answers, deadline = {}, time.monotonic() + seconds
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:world])}
        while waiting and (ready := multiprocessing.connection.wait(waiting, max(0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(10)
                    answers[rank] = "died", self.processes[rank].exitcode
                if answers[rank][0] in ("error", "died"):
                    deadline = min(deadline, time.monotonic() + grace)
        return answers

    def read(self, rank, name):
        """Return what a rank has written to a file of this name so far: "out" is what it printed, "stack" its stacks."""
        path = Path(self.folder.name, f"{rank}.{name}")
        return path.read_text(errors="replace") if path.exists() else ""

    def stack(self, rank):
        """Return where a rank is, innermost call first, as faulthandler writes it; for a dead one, where it crashed."""
        process, deadline = self.processes[rank], time.monotonic() + 30
        if process.is_alive():
            os.kill(process.pid, STACK)
        while not self.read(rank, "stack").endswith(("in <module>\n", "  ...\n")) and process.is_alive() \
                and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.read(rank, "stack")


def frames(text):
    """Return [(file, line, function)] from a traceback, or from what faulthandler writes."""
    return [(file, int(line), function) for file, line, function in re.findall(r'File "([^"]+)", line (\d+)(?:,? in (\S+))?', text)]
