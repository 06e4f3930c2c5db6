"""What the planner takes from the trainer: its presets, what it refuses, its schedules and their simulation.

All of it is written once, in step08_5d's config.py and schedules.py. config.py imports torch, for the
names of its types and to look for a GPU, and that import takes seconds. The planner needs neither, so the two
files are run here without what they import of torch and of each other. A config.json the trainer has read by
transformers, which imports torch too; what that would say of it is said here.
"""
import ast
from pathlib import Path
from types import SimpleNamespace

STEP = Path(__file__).resolve().parent.parent / "step08_5d"
FILES = [STEP / "schedules.py", STEP / "config.py"]
LEFT_OUT = ("torch", "schedules", "messages")
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
    """In place of the trainer's, which ends the program: the planner's server goes on."""
    raise Refused(message)


NUMBERS = dict(rms_norm_eps=float, initializer_range=float, max_position_embeddings=int)


def as_transformers_reads(raw):
    """A config.json's content as from_hugging_face (config.py) takes it, or a ValueError."""
    for name, kind in NUMBERS.items():
        if type(raw.get(name, kind())) is not kind:
            raise ValueError(f"{name} is {raw[name]!r}, and not of type {kind.__name__}")
    older = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {})}
    rope = dict(raw.get("rope_parameters") or older)
    rope.setdefault("rope_type", rope.get("type", "default"))
    if type(rope["rope_theta"]) not in (int, float):
        raise ValueError(f"rope_theta is {rope['rope_theta']!r}, and no number")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if raw["model_type"] == "llama" and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return SimpleNamespace(**{**raw, "rope_parameters": rope})
