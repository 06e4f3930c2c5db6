"""The one way to print, and the one way to refuse. (A stand-in: the house brings its own.)"""
import os
import sys

from config import refuse  # noqa: F401


def say(line):
    """By rank 0. Survives an output that nobody reads any more."""
    if os.environ.get("RANK", "0") == "0":
        try:
            print(line, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
