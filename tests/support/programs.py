"""Run Python programs in processes that have already imported torch: they are forked from where the pool's workers come from.

    status, output = run_program(["tools/simulate", "8", "4", "--tp", "2"], ROOT, timeout=60)
    (status, output), (status1, output1) = run_ranks(2, ["step02_dp/train.py", "--steps", "1"], ROOT, timeout=60)

A program that forgets an import may still run here. So one test of each program starts it with steps.run.
"""
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path

from harness import PRELOADED
from prove.processes import environment, new_store
from steps import ROOT, clean_environment


def of_this_repository(path):
    return f"{path}/".startswith(f"{ROOT}/") and not path.startswith(sys.prefix)


def program(words, cwd, environment, output):
    """Become the program, with its own folder, environment, output and arguments, and without the modules of the tests."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate((os.devnull, output, output)):
        os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, closefd=False) for number, mode in enumerate("raa"))
    sys.stderr.reconfigure(line_buffering=True)
    for name, module in list(sys.modules.items()):
        if of_this_repository(getattr(module, "__file__", None) or ""):
            del sys.modules[name]
    first = "" if os.path.isdir(words[0]) else os.path.dirname(os.path.abspath(words[0]))    # run_path adds a folder by itself
    more = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *more, *(path for path in sys.path if path and not of_this_repository(path))]
    sys.argv, sys.dont_write_bytecode = words, True
    runpy.run_path(words[0], run_name="__main__")


def run_programs(words, cwd, timeout, environments):
    """Run the program once in each of these environments, at the same time; return (exit status, output) of each."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")                     # as Pool.start does, for what is preloaded
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    words, found = [*map(str, words)], []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(environments))]
        for output in outputs:
            output.touch()
        children = [context.Process(target=program, args=(words, str(cwd), clean_environment() | more, str(output)))
                    for more, output in zip(environments, outputs)]
        for child in children:
            child.start()                                 # the first one waits until all is preloaded
        deadline = time.monotonic() + timeout
        for child, output in zip(children, outputs):
            child.join(max(0, deadline - time.monotonic()))
            if child.exitcode is None:
                with contextlib.suppress(ProcessLookupError):      # it has no group of its own yet
                    os.killpg(child.pid, signal.SIGKILL)
                child.kill()
                child.join()
                output.write_text(f"did not end within {timeout} seconds: {' '.join(words)}\n{output.read_text()}")
            found.append((child.exitcode, output.read_text()))
    return found


def run_program(words, cwd, timeout, **environment):
    """Run a program; return its exit status and all its output, as steps.run does."""
    return run_programs(words, cwd, timeout, [environment])[0]


def run_ranks(world, words, cwd, timeout):
    """Run a program on `world` ranks, as torchrun does, but do not end the others if one fails."""
    store = new_store()
    return run_programs(words, cwd, timeout, [environment(rank, world, store.port) for rank in range(world)])
