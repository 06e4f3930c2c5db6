"""Live storages by kind: what a rank holds, seen as it comes and goes."""
import contextlib
import weakref
from unittest.mock import patch

import torch

from simulate.kernels import tensors

KINDS = ["parameters", "optimizer states", "gradients", "activations", "rest"]


class Memory:
    """events: (when, storage number, bytes gained or lost), where `now` says when; kinds: what each storage turned out to be."""
    def __init__(self, now):
        self.now, self.events, self.kinds = now, [], []
        self.alive = {}                                   # by address: number, size, and what tells when it ends

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
        """Storages that are given back and taken again (step 3): no operation tells."""
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
    """A row per event: when, and the bytes of each kind alive then."""
    alive, rows = dict.fromkeys(KINDS, 0), []
    for when, number, size in events:
        alive[kinds[number]] += size
        rows.append((when, *alive.values()))
    return rows
