"""Take from the trainer what the planner needs: its presets, its checks, its schedules and their simulation.

config.py imports torch, for the names of its types and to look for a GPU, and that takes seconds. The planner
needs neither, so this module executes config.py and schedules.py without their imports of torch and of messages.py, and of
each technique only the function check.
"""
import ast
import math
from pathlib import Path
from types import SimpleNamespace

STEP = Path(__file__).resolve().parents[2] / "step08_5d"
LEFT_OUT = ("torch", "messages")
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
    """Raise Refused. The trainer's own fail would end the program, but the planner goes on to the next layout."""
    raise Refused(message)


def check_of(technique):
    """Return the function with which a technique refuses layouts."""
    tree = ast.parse((STEP / f"{technique}.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", None) == "check"]
    names = globals() | dict(math=math, schedules=SimpleNamespace(SCHEDULES=globals()["SCHEDULES"]))
    exec(compile(tree, technique, "exec"), names)
    return names["check"]


CHECKS = [check_of(name) for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")]
