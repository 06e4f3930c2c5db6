"""Your trainer. tools/prove calls these functions on every rank, in torchrun's environment (RANK, WORLD_SIZE, ...).

one_process.py has the same functions for one process. Write what the next certificate needs, and let `make certify` judge it.
"""
from collections.abc import Iterator

import torch


def build(flags: dict) -> object:
    """Set up torch.distributed (gloo), the model and the optimizer under a layout; return whatever the other functions need.

    flags has "dtype", such as "float64", and those of dp, tp, cp, pp, ep, zero, acc and experts that the certificate names:
    {"dtype": "float64", "tp": 2, "dp": 2}. Raise NotImplementedError for those that you have not written yet. Nothing may be
    started while this file is imported: the ranks are forked from a process that has imported it.
    """
    raise NotImplementedError("build")


def step(run: object, inputs: torch.Tensor, targets: torch.Tensor) -> tuple:
    """Train one step on the global batch, of which every rank is given all: [batch, seq] each. Cut out this rank's part.

    Return the loss of the global batch and the norm of its gradient; None for what this rank does not know. Do not clip. The
    gradients must still be there when step returns, so zero them when it begins.
    """
    raise NotImplementedError("step")


def parts(run: object) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None, dict | list | None]]:
    """Yield (name, weight, gradient, where) of everything that this rank holds: the memory itself, not a copy.

    The judge writes the initial weights of the one process into it, after build and before the first step.

    Names are those of model.py. where says which part of the whole this is: None for all of it, {0: 1} for the second of equal
    parts along dimension 0, [32, 0] for the offsets in it. A DTensor knows, so None will do.

    The gradient is that of the global batch. If ZeRO-1 has reduce-scattered it, gather it again for the whole weight; or yield
    this rank's part of both, and gather the weights in a function loaded(run), which the judge calls when it has written them.
    """
    raise NotImplementedError("parts")


# These two make a diagnosis more exact.

def place(run: object) -> dict:
    """Return this rank's coordinates, {"tp": 0, "pp": 1}: then a diagnosis says tp rather than ranks 0 and 1."""
    raise NotImplementedError("place")


def modules(run: object) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name, module), with the names of model.py: then a diagnosis says where a forward pass goes wrong."""
    raise NotImplementedError("modules")


# Only the last certificate needs these two.

def save(run: object, folder: str) -> None:
    """Write a checkpoint of the weights and the optimizer's states. All ranks call it."""
    raise NotImplementedError("save")


def load(run: object, folder: str) -> None:
    """Restore what save wrote under another layout, on another number of ranks. All ranks call it, after build."""
    raise NotImplementedError("load")
