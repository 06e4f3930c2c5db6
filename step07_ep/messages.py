"""How the program prints, how it fails, and how one line says why it ended."""
import contextlib
import os
import signal
import sys
import traceback

from safetensors import SafetensorError

RANK = int(os.environ.get("RANK") or 0)                   # torchrun sets it; a single process is rank 0


def print0(line, file=None):
    if RANK == 0:
        print(line, file=file, flush=True)


def fail(message, status=2):
    """Exit with an error. Whoever catches the exit prints the message, once for all ranks."""
    error = SystemExit(status)
    error.message = message
    raise error


@contextlib.contextmanager
def clean_exit():
    """Print one line for whatever ends the run: rank 0 after fail(), the failing rank after an exception.

    If the exception may be a bug in this program, Python's traceback follows.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)          # let Ctrl-C kill the process, without a traceback
    try:
        yield
    except SystemExit as error:
        if getattr(error, "message", None):
            print0(f"error: {error.message}", sys.stderr)
        raise
    except Exception as error:
        here = os.path.dirname(os.path.abspath(__file__))
        ours = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) == here]
        where = f"rank {RANK}, {os.path.basename(ours[-1].filename)}:{ours[-1].lineno}"
        print(f"error: {where}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, (OSError, MemoryError, SafetensorError)):     # no bug here, so no traceback
            raise SystemExit(2)
        raise
