"""Take from the trainer what the planner needs: its presets, its checks, its schedules and their simulation.

config.py imports torch, for the names of its types and to look for a GPU, and that takes seconds. The planner
needs neither, so this module executes config.py and schedules.py without their imports of torch, of messages.py and of
each other.
"""
import ast
from pathlib import Path
from types import SimpleNamespace

STEP = Path(__file__).resolve().parents[2] / "step08_5d"
LEFT_OUT = ("torch", "schedules", "messages")
torch = SimpleNamespace(bfloat16="bfloat16")    # the planner's checks need no more of torch


def is_left_out(node):
    imports = isinstance(node, (ast.Import, ast.ImportFrom))
    return imports and (getattr(node, "module", None) or node.names[0].name) in LEFT_OUT


class Refused(Exception):
    """An input was refused; the message is one line."""


for path in (STEP / "schedules.py", STEP / "config.py"):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not is_left_out(node)]
    exec(compile(tree, path, "exec"))


def fail(message):
    """Raise Refused. The trainer's own fail would end the program, and the planner's server must go on."""
    raise Refused(message)
