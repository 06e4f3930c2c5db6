"""Take from the trainer what the planner needs: its presets, its checks, its schedules and their simulation.

config.py imports torch, for the names of its types and to look for a GPU, and that takes seconds. The planner
needs neither, so this module executes config.py and schedules.py without their imports of torch and of messages.py, and of
each technique only the function check.
"""
import ast
import math                                               # noqa: F401
from pathlib import Path
from types import SimpleNamespace

STEP = Path(__file__).resolve().parents[2] / "step08_5d"
LEFT_OUT = ("torch", "messages")
TECHNIQUES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
torch = SimpleNamespace(bfloat16="bfloat16")    # the planner's checks need no more of torch


class Refused(Exception):
    """An input was refused; the message is one line."""


def is_left_out(node):
    imports = isinstance(node, (ast.Import, ast.ImportFrom))
    return imports and (getattr(node, "module", None) or node.names[0].name) in LEFT_OUT


def part(name):
    """Return what the planner takes of a file of the trainer, as a tree. A technique's check gets a name of its own."""
    tree = ast.parse((STEP / f"{name}.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not is_left_out(node)]
    if name in TECHNIQUES:
        tree.body = [node for node in tree.body if getattr(node, "name", None) == "check"]
        tree.body[0].name = f"check_{name}"
    return tree


PARTS = {name: part(name) for name in ("schedules", "config", *TECHNIQUES)}
for name, tree in PARTS.items():
    exec(compile(tree, STEP / f"{name}.py", "exec"))
schedules = SimpleNamespace(SCHEDULES=globals()["SCHEDULES"])             # as pipeline_parallel.py calls it
CHECKS = [globals()[f"check_{name}"] for name in TECHNIQUES]


def fail(message):
    """Raise Refused. The trainer's own fail would end the program, but the planner goes on to the next layout."""
    raise Refused(message)
