"""What the planner takes from the trainer: its presets, how it reads a model's shape, what it refuses.

All of it is written once, in config.py and schedules.py, one folder up. config.py imports torch, for the names of its types and
to look for a GPU, and that import takes seconds; the planner needs neither. So the two files are run here without their
imports of torch and of each other.
"""
import ast
from pathlib import Path
from types import SimpleNamespace

STEP = Path(__file__).resolve().parent.parent
FILES = [STEP / "schedules.py", STEP / "config.py"]
torch = SimpleNamespace(bfloat16="bfloat16", float32="float32")        # what the checks that are called here ask of it


def is_left_out(node):
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
    return "torch" in names or "schedules" in names


def definitions(path):
    """The file's syntax tree without these imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not is_left_out(node)]
    return tree


for path in FILES:
    exec(compile(definitions(path), path, "exec"))
