"""The adapter for tools/prove: one process trains with one_process.py, more ranks with the trainer.py in the folder TRAINER.

Each rank also measures what the certificates limit, and writes it to the folder MEASURED: how many numbers it keeps between two
steps, and how much of the batch and of a sequence it reads.
"""
import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import model
import one_process
from one_process import BATCH, SEQ, VOCAB  # noqa: F401, prove asks for them

for name in ("model", "one_process", "trainer"):          # the reader's trainer.py may import the reader's model.py
    sys.modules.pop(name, None)
sys.path[0] = os.environ["TRAINER"]
trainer = importlib.import_module("trainer")
built, weights, measured = {}, {}, {}                     # storages after build, {"bytes": of all weights}, what is measured


def used():
    return one_process if os.environ["WORLD_SIZE"] == "1" else trainer


def storages():
    """Return {address: storage} of all floating-point numbers that this rank has made and that are alive."""
    found = {}
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    for tensor in [*tensors, *(tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None)]:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_floating_point() and tensor.device.type == "cpu":
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
    return found


def build(flags):
    gc.freeze()                                           # what this process was forked with is not the trainer's
    run = used().build(flags)
    built.update(storages())
    with torch.device("meta"):
        whole = model.Model(model.Config(experts=flags.get("experts", 0)))
    weights["bytes"] = sum(param.numel() for param in whole.parameters()) * getattr(torch, flags["dtype"]).itemsize
    return run


def step(run, inputs, targets):
    path = Path(os.environ["MEASURED"], os.environ["RANK"])
    if used() is one_process or path.exists():            # it has been measured in an earlier run
        return used().step(run, inputs, targets)
    if "keeps" not in measured:
        return measure_kept(run, inputs, targets)
    # in the first step, torch's pipelines also run a micro-batch of nothing, to learn its shapes
    calls = [torch.empty(0, 0)]

    def note(module, args, result):                       # after the module, whose weight a pre-hook may have gathered
        forward = torch._C._current_graph_task_id() == -1         # and not recomputation
        has_weight = hasattr(module, "weight") or module._parameters and not module._modules
        if forward and args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.int64 and has_weight:
            calls.append(args[0])
    handle = torch.nn.modules.module.register_module_forward_hook(note)
    result = trainer.step(run, inputs, targets)
    handle.remove()
    read = [tokens.numel() / inputs.numel() for tokens in calls]
    measured.update(reads=sum(read), at_once=max(read), length=max(tokens.shape[-1] for tokens in calls) / inputs.shape[1])
    path.write_text(json.dumps(measured))
    return result


def measure_kept(run, inputs, targets):
    # since build, prove has copied the weights. To hold the copies keeps their addresses from being used again
    of_prove = {address: storage for address, storage in storages().items() if address not in built}
    result = trainer.step(run, inputs, targets)
    gc.collect()
    kept = sum(storage.nbytes() for address, storage in storages().items() if address not in of_prove)
    measured["keeps"] = kept / weights["bytes"]
    return result


def parts(run):
    return used().parts(run)


def optional(name, run):
    try:
        return getattr(used(), name, lambda run: None)(run)
    except NotImplementedError:
        return None


def place(run):
    return optional("place", run)


def modules(run):
    return optional("modules", run)


def save(run, folder):
    trainer.save(run, folder)


def load(run, folder):
    trainer.load(run, folder)


if hasattr(trainer, "loaded"):
    def loaded(run):
        if used() is trainer:
            trainer.loaded(run)
