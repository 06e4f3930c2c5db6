"""What the planner takes from the trainer: its presets, what it refuses, its schedules and their simulation.

All of it is written once, in step08_5d's config.py and schedules.py. config.py imports torch, for the
names of its types and to look for a GPU, and that import takes seconds. The planner needs neither, so the two
files are run here without what they import of torch and of each other.
"""
import ast
from pathlib import Path
from types import SimpleNamespace

STEP = Path(__file__).resolve().parent.parent / "step08_5d"
FILES = [STEP / "schedules.py", STEP / "config.py"]
LEFT_OUT = ("torch", "schedules")
torch = SimpleNamespace(bfloat16="bfloat16")    # all that the planner's checks ask of it


def imported(node):
    """The module that a line imports, if it is such a line."""
    if isinstance(node, ast.Import):
        return node.names[0].name
    if isinstance(node, ast.ImportFrom):
        return node.module


def definitions(path):
    """The file's syntax tree without these imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if imported(node) not in LEFT_OUT]
    return tree


class Refused(Exception):
    """Bad input, in one line."""


for path in FILES:
    exec(compile(definitions(path), path, "exec"))


def refuse(message):
    """In place of config.py's, which ends the program: the planner's server goes on."""
    raise Refused(message)
