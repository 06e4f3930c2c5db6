"""Copy this file, fill in three functions, and ask whether your trainer trains to the same numbers as one process:

    python tools/prove mine.py --world 4 --flags "tp=2 pp=2"

Every rank calls these functions in torchrun's environment (RANK, WORLD_SIZE, ...). One process, the judge, should be plain: no
pipeline, no accumulation. It gets only the flags of --both. Nothing here may need RANK or a GPU while it is imported: the ranks are
forked from a process that has imported this file.
"""
from collections.abc import Iterator

import torch

BATCH, SEQ, VOCAB = 8, 16, 64                             # of the global batch: sequences, tokens in each, size of the vocabulary


def build(flags: dict) -> object:
    """Set up torch.distributed, the model and the optimizer; return whatever step and parts need.

    flags has "dtype", such as "float64", and what --both and --flags say: {"dtype": "float64", "tp": 2}. Dropout must be off.
    """


def step(run: object, inputs: torch.Tensor, targets: torch.Tensor) -> tuple:
    """Train one step on the global batch, [batch, seq] each; return its loss and gradient norm, before clipping.

    Cut out this rank's part as your trainer would. Return None for what this rank does not know. When step returns, gradients must
    still be there, as they were before clipping; zero them at the beginning of the next step.
    """


def parts(run: object) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None, dict | list | None]]:
    """Yield (name, weight, gradient, where) of everything that this rank holds: the memory itself, not a copy.

    Names are the same under every layout, and in the order of forward. where says which part of the whole this is: None for all of
    it, {0: 1} for the second of equal parts along dimension 0, [32, 0] for the offsets in it. A DTensor knows, so None will do.
    """


# The rest is optional.

def place(run: object) -> dict:
    """Return this rank's coordinates, {"tp": 0, "pp": 1}: then a report says tp rather than ranks 0 and 1."""


def modules(run: object) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name, module), named alike under every layout: then a report says where a forward or backward pass goes wrong."""


def save(run: object, folder: str) -> None:
    """Write a checkpoint of weights and optimizer, as your trainer does. All ranks call it, for --resume."""


def load(run: object, folder: str) -> None:
    """Restore what save wrote, perhaps under another layout. All ranks call it, after build."""


def loaded(run: object) -> None:
    """Do what follows a change of the weights in parts, such as copying float32 masters into bfloat16 weights."""
