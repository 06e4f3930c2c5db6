"""Follow the live storages of a rank, by kind, as they come and go."""
import contextlib
import weakref
from unittest.mock import patch

import torch

from simulate.kernels import tensors

KINDS = ["parameters", "optimizer states", "gradients", "activations", "rest"]


class Memory:
    """The storages seen so far. events: (when, storage number, bytes gained or lost); kinds: the kind of each storage.

    `now` says when an event happens. The kind of a storage may become known only later.
    """
    def __init__(self, now):
        self.now, self.events, self.kinds = now, [], []
        self.alive = {}                                   # by address: number, size, and the weakref that reports when it is freed

    def note(self, tensor, kind):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = len(self.kinds), storage.nbytes(), weakref.ref(storage, lambda _: self.end(key))
            self.events.append((self.now(), len(self.kinds), storage.nbytes()))
            self.kinds.append(kind)
        elif kind in KINDS[:3]:
            self.kinds[self.alive[key][0]] = kind

    def note_all(self, values, kind):
        for tensor in tensors([values]):
            self.note(tensor, kind)

    def tag_state(self, model, optimizer):
        self.note_all([*model.parameters(), *optimizer.params], "parameters")
        self.note_all(optimizer.grads, "gradients")
        for master in optimizer.masters:
            if master.dtype != optimizer.params[0].dtype:  # bfloat16: the float32 copy is the optimizer's
                self.note(master, "optimizer states")
            self.note_all([*optimizer.adamw.state.get(master, {}).values()], "optimizer states")

    def end(self, key):
        number, size, _ = self.alive.pop(key)
        self.events.append((self.now(), number, -size))

    @contextlib.contextmanager
    def resizes(self):
        """Note storages that are freed and allocated again by resize_ (step 3), which dispatches no operation."""
        resize = torch.UntypedStorage.resize_

        def noted(storage, size):
            number, before, end = self.alive.get(storage._cdata, (None, 0, None))
            resize(storage, size)
            if number is not None and size != before:
                self.alive[storage._cdata] = number, size, end
                self.events.append((self.now(), number, size - before))
        with patch.object(torch.UntypedStorage, "resize_", noted):
            yield


def timeline(events, kinds):
    """Return a row per event: its time, and the bytes of each kind that are alive then."""
    alive, rows = dict.fromkeys(KINDS, 0), []
    for when, number, size in events:
        alive[kinds[number]] += size
        rows.append((when, *alive.values()))
    return rows
