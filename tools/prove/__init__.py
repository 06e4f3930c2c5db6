"""Compare a trainer under a layout with one process, in tests of your own:

    import prove

    @prove.layouts("adapter.py", "4 tp=2 pp=2", "2 dp=2 acc=4", known={"2 tp=2 acc=4": "not reduced"})
    def test_equals_one_process(said):
        pass

This makes one test for each layout. It passes if every number is equal; a layout in `known` has to differ, for this cause (a key of
causes.CAUSES), so the test fails when the difference goes away or becomes another. `said` is what --json would write.
"""
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


class CannotRun(Exception):
    """Raised with a message for the user: the adapter, the trainer or the flags do not work."""


@functools.cache
def said_of(adapter, layouts, options):
    """Run the tool on all layouts, once, in a process of its own. Return {layout: (what was said, the report)}."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "layouts").write_text("\n".join(layouts) + "\n")
        environment = os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]),
                                                                                 os.environ.get("PYTHONPATH")])))
        done = subprocess.run([sys.executable, "-m", "prove", adapter, "--layouts", f"{folder}/layouts", "--json", f"{folder}/said",
                               *options], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        written = Path(folder, "said").read_text() if Path(folder, "said").exists() else ""
        return dict(zip(layouts, json.loads(written))) if written else dict.fromkeys(layouts, dict(status=2, cannot=done.stdout))


def layouts(adapter, *wanted, known=None, **options):
    """Return a decorator that makes one test for each layout. Options are the tool's flags: mask=True, both="layers=8"."""
    import pytest
    known = known or {}
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]

    def decorate(test):
        path = Path(test.__code__.co_filename).parent / adapter

        @pytest.mark.parametrize("layout", [*wanted, *known])
        def compared(layout):
            from prove.__main__ import report
            said = said_of(str(path), (*wanted, *known), tuple(words))[layout]
            if layout in known and said.get("cause") != known[layout]:
                pytest.fail(f"expected to differ, with the cause {known[layout]!r}\n{report(adapter, said)}", pytrace=False)
            if layout not in known and said["status"]:
                pytest.fail(report(adapter, said), pytrace=False)
            test(said)
        compared.__name__, compared.__doc__ = test.__name__, test.__doc__
        return compared
    return decorate
