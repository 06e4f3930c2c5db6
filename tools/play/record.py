"""Record what one rank does: which line it runs, what its variables become, what it sends, receives and waits for.

The recorder starts when the process calls init_process_group. Every event is one JSON line in PLAY_FOLDER/RANK.jsonl, written at
once, because a program that hangs is killed:

    [time, "line", depth, file, line, {name: value that is new}]     the rank is about to run this line
    [time, "call", depth, file, line, name of the function]     and     [time, "return", depth]
    [time, "start", number, what, key, peers, bytes]     a collective or message is issued; key is equal on the ranks that take part
    [time, "wait", number]     the rank waits for it from here; for a blocking call, at once
    [time, "end", number]     the rank knows that it is complete
    [time, "full"]     no more is recorded
"""
import functools
import inspect
import json
import os
import sys
import time
from pathlib import Path

MOST_EVENTS, MOST_NUMBERS = 20_000, 24
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
               "reduce_scatter_single", "all_to_all", "all_to_all_single", "broadcast", "reduce", "scatter", "gather", "barrier",
               "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
MESSAGES = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
INLINE = "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"                      # belong to the function around them


class Recorder:
    """The recorder of this process; there is one, because sys.settrace is there once for a thread."""

    def __init__(self, dist):
        self.dist, self.file, self.number, self.inside, self.events = dist, None, 0, 0, 0
        self.traced = set(os.environ["PLAY_FILES"].split(os.pathsep))
        self.counts, self.known = {}, {}

    # ------------------------------------------------------------------------------------------- events
    def start(self):
        if self.file is None:
            self.file = os.open(Path(os.environ["PLAY_FOLDER"], f"{self.dist.get_rank()}.jsonl"), os.O_WRONLY | os.O_CREAT, 0o644)
            for frame in reversed([*self.traced_frames(sys._getframe())]):         # those that already run
                self.on_event(frame, "call", None)
                frame.f_trace = self.on_event
            sys.settrace(self.on_event)

    def traced_frames(self, frame):
        while frame:
            if frame.f_code.co_filename in self.traced and frame.f_code.co_name not in INLINE:
                yield frame
            frame = frame.f_back

    def write(self, *event):
        self.events += 1
        if self.events <= MOST_EVENTS:
            os.write(self.file, (json.dumps([time.monotonic_ns() // 1000, *event]) + "\n").encode())
        elif self.events == MOST_EVENTS + 1:
            os.write(self.file, (json.dumps([time.monotonic_ns() // 1000, "full"]) + "\n").encode())
            sys.settrace(None)

    def on_event(self, frame, kind, value):
        if frame.f_code.co_filename not in self.traced or frame.f_code.co_name in INLINE or self.inside:
            return None
        depth = sum(1 for _ in self.traced_frames(frame)) - 1
        if kind == "call":
            self.known.pop(depth, None)
            self.write("call", depth, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        elif kind == "line":
            self.write("line", depth, frame.f_code.co_filename, frame.f_lineno, self.changed(frame, depth))
        elif kind == "return":
            self.write("return", depth)
        return self.on_event

    def changed(self, frame, depth):
        """Return the variables of a frame whose value has changed since its last line."""
        known, found = self.known.setdefault(depth, {}), {}
        self.inside += 1                                  # showing a tensor may run functions of the program
        for name, value in list(frame.f_locals.items()):
            shown = show(value)
            if shown is not None and known.get(name) != shown:
                found[name] = known[name] = shown
        self.inside -= 1
        return found

    # ------------------------------------------------------------------------------------------- collectives and messages
    def issued(self, what, key, peers, bytes_sent):
        """Note that an operation begins. What is the n-th on one rank is the n-th on the others."""
        count = self.counts[key] = self.counts.get(key, -1) + 1
        self.number += 1
        self.write("start", self.number, what, f"{key} {count}", peers, bytes_sent)
        return self.number

    def wrap(self, name, real):
        signature = inspect.signature(real)

        @functools.wraps(real)
        def call(*args, **kwargs):
            if self.file is None or self.inside:
                return real(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            number = self.issued(name, *self.what(name, given.arguments))
            if name not in ("isend", "irecv") and not given.arguments.get("async_op"):
                self.write("wait", number)
            self.inside += 1                              # what torch calls inside is one operation
            try:
                result = real(*args, **kwargs)
            finally:
                self.inside -= 1
            if hasattr(result, "wait"):
                return Handle(self, number, result)
            self.write("end", number)
            return result
        return call

    def what(self, name, given):
        """Return (key, ranks that take part, bytes) of a call."""
        dist, group = self.dist, given.get("group") or self.dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        numbers = sum(t.nbytes for t in tensors(given.values()))
        if name not in MESSAGES:
            return "group " + ",".join(map(str, ranks)), ranks, numbers
        peer = given.get(MESSAGES[name])
        if peer is None:
            peer = dist.get_global_rank(group, given[f"group_{MESSAGES[name]}"])
        me = dist.get_rank()
        ends = [me, peer] if MESSAGES[name] == "dst" else [peer, me]
        return f"message {ends[0]}>{ends[1]}", ends, numbers


class Handle:
    """What an asynchronous operation returns. Its wait is noted."""

    def __init__(self, recorder, number, work):
        self.recorder, self.number, self.work = recorder, number, work

    def wait(self, *args, **kwargs):
        if self.number is not None:
            self.recorder.write("wait", self.number)
        result = self.work.wait(*args, **kwargs)
        self.end()
        return result

    def is_completed(self):
        completed = self.work.is_completed()
        if completed:
            self.end()
        return completed

    def end(self):
        if self.number is not None:
            self.recorder.write("end", self.number)
            self.number = None

    def __getattr__(self, name):
        return getattr(self.work, name)


def tensors(values):
    import torch
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def show(value, most=MOST_NUMBERS):
    """Write a small value as the player shows it; None for what it leaves out."""
    import torch
    if value is None or isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else None
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
            return None
        shape = f"[{', '.join(map(str, value.shape))}]"
        return show(value.detach().tolist(), most) if value.numel() <= most else shape
    if isinstance(value, list | tuple | range) and len(value) <= most:
        parts = [show(one, most // max(1, len(value))) for one in value]
        text = None if None in parts else f"({', '.join(parts)})" if isinstance(value, tuple) else f"[{', '.join(parts)}]"
        return text if text is not None and len(text) <= 200 else None
    return None


def install(module):
    """Replace the functions of torch.distributed by ones that are noted. Begin when a process group exists."""
    import types
    recorder = Recorder(module)
    for name in (*COLLECTIVES, *MESSAGES):
        if isinstance(getattr(module, name, None), types.FunctionType):
            setattr(module, name, recorder.wrap(name, getattr(module, name)))
    init = module.init_process_group

    @functools.wraps(init)
    def init_process_group(*args, **kwargs):
        init(*args, **kwargs)
        recorder.start()
    module.init_process_group = init_process_group
