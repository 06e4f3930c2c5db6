"""What a run says: one way to print, one way to refuse, and one line for whatever ends it."""
import contextlib
import os
import signal
import sys
import traceback

RANK = int(os.environ.get("RANK") or 0)                   # which of the processes this is; torchrun sets it


def print0(line, to=None):
    """Rank 0 prints. An output that nobody reads any more (| head, a closed terminal) costs no run."""
    to = to or sys.stdout
    try:
        print(line, file=to, flush=True) if RANK == 0 else None
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), to.fileno())


def fail(message, status=2):
    """Ends a run that cannot go on. It is not printed yet: other ranks may have to end as well."""
    end = SystemExit(status)
    end.message = message
    raise end


@contextlib.contextmanager
def clean_exit():
    """Around main. Rank 0 says what all refuse; a rank that fails says where and why."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)          # Ctrl-C ends it, as it ends any program
    try:
        yield
    except SystemExit as end:
        if getattr(end, "message", None):
            print0(f"error: {end.message}", sys.stderr)
        raise
    except Exception as error:
        here = os.path.dirname(os.path.abspath(__file__))
        ours = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) == here]
        where = f"rank {RANK}, {os.path.basename(ours[-1].filename)}:{ours[-1].lineno}"
        print(f"error: {where}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, (OSError, MemoryError)):     # not this program's mistake: no traceback
            raise SystemExit(2)
        raise
