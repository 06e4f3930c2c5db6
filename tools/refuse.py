"""Refuse a request that a tool cannot fulfil."""
import sys


def refuse(message):
    """Say in one line what is wrong and what to do, and exit with status 2."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)
