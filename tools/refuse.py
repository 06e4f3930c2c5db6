"""Refuse a request that a tool cannot fulfil."""
import sys


def refuse(message):
    """Say in one line what is wrong and what to do, and exit with status 2."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def run_and_exit(main, *arguments):
    """Run a program of the exercises, and exit with the status that it returns."""
    try:
        sys.exit(main(*arguments))
    except OSError as error:                              # no git, or a folder that cannot be written
        refuse(error)
    except KeyboardInterrupt:
        sys.exit(130)
