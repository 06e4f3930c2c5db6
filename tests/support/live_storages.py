"""Memory, event by event, for tests, figures and benchmarks that need more detail than --profile's picture."""
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ["parameters", "optimizer states", "gradients", "activations", "rest"]


class LiveStorages(TorchDispatchMode):
    """A dispatch mode that sees the result of every operation and, through weak references, when a storage is freed.

    `events` are (seconds, storage number, bytes gained or lost). `kinds` says what each storage turned out to be.
    """

    def __init__(self):
        super().__init__()
        self.events, self.kinds, self.numbers = [], [], weakref.WeakKeyDictionary()
        self.resized = {}                # {storage that ZeRO-3 frees and allocates again: its current size}

    def note(self, tensor, kind):
        storage = tensor.untyped_storage()
        if storage not in self.numbers:
            number, size = len(self.kinds), storage.nbytes()
            self.numbers[storage] = number
            self.kinds.append(kind)
            self.events.append((time.perf_counter(), number, size))
            end = weakref.finalize(storage, lambda: self.events.append((time.perf_counter(), number, -size)))
            end.atexit = False
        elif kind in ("parameters", "optimizer states", "gradients"):
            self.kinds[self.numbers[storage]] = kind

    def note_resized(self, tensor, kind):
        self.note(tensor, kind)
        self.resized.setdefault(tensor.untyped_storage(), tensor.untyped_storage().nbytes())

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        for storage, size in self.resized.items():        # no dispatched operation resizes them
            if storage.nbytes() != size:
                self.events.append((time.perf_counter(), self.numbers[storage], storage.nbytes() - size))
                self.resized[storage] = storage.nbytes()
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):          # grad is disabled in backward, the loss, the optimizer
                self.note(tensor, "activations" if torch.is_grad_enabled() else "rest")
        return result

    def timeline(self):
        """Return a row per event: the seconds since the first one, and the bytes of each kind that are alive then."""
        alive, rows, start = dict.fromkeys(KINDS, 0), [], self.events[0][0]
        for seconds, number, size in list(self.events):
            alive[self.kinds[number]] += size
            rows.append((seconds - start, *alive.values()))
        return rows


def tag_state(memory, model, optimizer):
    for param in (*model.parameters(), *optimizer.params):
        memory.note_resized(param, "parameters")
    for grad in optimizer.grads:
        memory.note(grad, "gradients")
    for master, state in zip(optimizer.masters, map(optimizer.adamw.state.get, optimizer.masters)):
        if master.dtype != optimizer.params[0].dtype:     # in bfloat16, the optimizer owns the float32 copy
            memory.note(master, "optimizer states")
        for tensor in (state or {}).values():
            memory.note(tensor, "optimizer states")
