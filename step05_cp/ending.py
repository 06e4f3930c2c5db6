"""Ending in one line, without a traceback: when the disk is full, on Ctrl-C, when nobody reads the output."""
import contextlib
import os
import signal
import sys

from config import refuse


@contextlib.contextmanager
def ends_well():
    """Around main."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)          # Ctrl-C ends it, as it ends any program
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")                          # of paths it cannot show
    try:
        yield
    except (OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):            # | head: the rest is not to be written at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        refuse(str(error) or "out of memory")
