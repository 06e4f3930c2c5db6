"""What the planner takes from the trainer: its presets, what it refuses, its schedules and their simulation.

config.py imports torch, for the names of its types and to look for a GPU, and that takes seconds. The planner
needs neither: config.py and schedules.py are run here without what they import of torch and of each other.
"""
import ast
from pathlib import Path
from types import SimpleNamespace

STEP = Path(__file__).resolve().parents[2] / "step08_5d"
LEFT_OUT = ("torch", "schedules", "messages")
torch = SimpleNamespace(bfloat16="bfloat16")    # all that the planner's checks ask of it


def is_left_out(node):
    imports = isinstance(node, (ast.Import, ast.ImportFrom))
    return imports and (getattr(node, "module", None) or node.names[0].name) in LEFT_OUT


class Refused(Exception):
    """Bad input, in one line."""


for path in (STEP / "schedules.py", STEP / "config.py"):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not is_left_out(node)]
    exec(compile(tree, path, "exec"))


def fail(message):
    """In place of the trainer's, which ends the program: the planner's server goes on."""
    raise Refused(message)
