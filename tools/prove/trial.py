"""Train one process, and layouts beside it, on the same weights and data; say which numbers lie apart."""
import contextlib
import time

import torch

from prove.__main__ import STEPS
from prove.causes import CAUSES
from prove.compare import EXACT, Row, Run, activity, beyond, distances, limits, worst
from prove.diagnose import Diagnosis, drawn_copies
from prove.ranks import How, Job, launch


def in_bfloat16(gradients):
    """Say whether one process computes in bfloat16 on the way: then all numbers of some gradient fit into it."""
    return any(len(tensor.unique()) > 8 and tensor.equal(tensor.bfloat16().double()) for tensor in gradients)


class Baseline:
    """One process: its weights, its run, the run with nudged weights, and the data. All layouts share it."""

    def __init__(self, adapter, args):
        self.adapter, self.both, self.dtype, self.mask = adapter, args.both | {"dtype": args.dtype}, args.dtype, args.mask
        self.seconds, self.known, self.unforgiving, self.same_rows = args.seconds, {}, contextlib.nullcontext, args.same_rows
        if args.unforgiving:
            from prove.unforgiving import unforgiving
            self.unforgiving = unforgiving
        batch, seq, vocab = (getattr(adapter, name, usual) for name, usual in (("BATCH", 8), ("SEQ", 16), ("VOCAB", 64)))
        draw = torch.Generator().manual_seed(0)
        stream = torch.randint(vocab, (STEPS * batch * seq + 1,), generator=draw)
        self.inputs, self.targets = stream[:-1].view(STEPS, batch, seq), stream[1:].view(STEPS, batch, seq).clone()
        if args.mask:
            self.targets[torch.arange(seq) >= torch.randint(seq // 2 + 1, seq + 1, (STEPS, batch, 1), generator=draw)] = -100
        if args.same_rows:
            self.inputs, self.targets = (rows[:, :1].repeat(1, batch, 1) for rows in (self.inputs, self.targets))
        self.own = Run(launch(adapter, 1, self.both, [], self.seconds)).whole(-1, "weights")
        # norms of ones, or biases of zeros, would hide too much
        self.start = {name: weight + 0.1 * torch.randn(weight.shape, generator=draw) * (weight.flatten().diff() == 0).all()
                      for name, weight in self.own.items()}
        self.one = self.launch_one(self.jobs(self.start))
        self.in_bfloat16 = in_bfloat16(self.one.whole(0, "gradients").values())
        # one rounding of every weight. In float64 it is float32's, and compare() scales its effect down to that of float64's
        self.eps = torch.finfo(torch.float32 if args.dtype == "float64" else getattr(torch, args.dtype)).eps
        signs = {name: 2 * torch.randint(2, weight.shape, generator=draw) - 1 for name, weight in self.start.items()}
        self.nudged = self.launch_one(self.jobs({name: w * (1 + self.eps * signs[name]) for name, w in self.start.items()}))

    def jobs(self, weights):
        return [Job(None if k else weights, self.inputs[k], self.targets[k]) for k in range(STEPS)]

    def launch_one(self, jobs):
        run = Run(launch(self.adapter, 1, self.both, jobs, self.seconds))
        run.check_finite()                                # beside NaN, wrong numbers cannot be told from right ones
        return run


class Trial:
    """One layout beside the baseline."""

    def __init__(self, baseline, world, flags, steps=range(STEPS), how=How()):
        self.baseline, self.world, self.flags, self.steps, self.how = baseline, world, flags, steps, how

    def __getattr__(self, name):
        return getattr(self.baseline, name)

    def launch(self, jobs, how=None):
        how = how or How(plant=self.how.plant)
        return Run(launch(self.adapter, self.world, self.both | self.flags, jobs, self.seconds, self.unforgiving, how))

    def train(self):
        """Run the layout's own steps. Those that it does not train are None."""
        jobs = self.jobs(self.start)[self.steps.start:self.steps.stop]
        run = self.launch(jobs, self.how)
        for seen in run.ranks:
            seen["steps"][:0] = [None] * self.steps.start
        return run

    def compare(self):
        """Run the layout. Set the differences and their limits; return for every step which are beyond the limits."""
        self.run = self.train()
        nothing = Row(0.0, 0.0, dict.fromkeys(self.start, 0.0), dict.fromkeys(self.start, 0.0))
        self.far = [distances(self.run, self.one, step) if step in self.steps else nothing for step in range(STEPS)]
        exact, self.inside = self.dtype == "float64", self.dtype
        float64 = 2.0**-29                                # the rounding of float64 as a fraction of that of float32
        self.limits = [*limits(self.nudged, self.one, EXACT if exact else 8 * self.eps, float64 if exact else 1.0)]
        for lower in ["float32"] * exact + ["bfloat16"] * self.in_bfloat16:        # something may compute in it
            rounded = [*limits(self.nudged, self.one, 8 * torch.finfo(getattr(torch, lower)).eps)]
            first, limit, wider = (rows[self.steps.start] for rows in (self.far, self.limits, rounded))
            noise = beyond(first, limit)
            # a gradient that is wrong by no more than rounding says so, even if others are wrong by more
            some = any(limit.gradients[name] < far <= wider.gradients[name] for name, far in first.gradients.items())
            if any(noise[:3]) and (some or not any(beyond(first, wider)[:3])):
                self.limits, self.inside = rounded, lower
        self.exact = self.inside == "float64"
        self.exactness = 1e-7 if self.exact else 5e-2 if self.inside == "bfloat16" else 1e-4
        return [beyond(*rows) for rows in zip(self.far, self.limits)]

    def prove(self):
        """Return what there is to say, as a dict."""
        began = time.monotonic()
        apart = self.compare()
        different, copied = ([], []) if self.how.load else drawn_copies(self.run, self.own)
        said = dict(world=self.world, flags=self.flags, dtype=self.dtype, status=int(any(map(any, apart))), note="",
                    limits=[worst(row)._asdict() for row in self.limits],
                    steps=[{what: far if far == far and step in self.steps else None
                            for what, far in worst(row)._asdict().items()} for step, row in enumerate(self.far)])
        said["largest"] = max(far for step in said["steps"] for far in step.values() if far is not None)
        said["activity"] = activity(self.run, self.one, self.inputs[0].numel())
        if different:
            said["note"] = ("left alone, the layout starts from other weights than one process: "
                            f"{len(different)} of {len(self.own)} parameters")
        if copied:
            said["copies"] = len(copied)
            said["note"] += (f"; {len(copied)} parts are copies of others, such as {copied[0]}\n"
                             f"usually: {CAUSES['copies at the start'].means}")
        if said["status"]:
            step, found = Diagnosis(self, self.run, self.one, self.limits, apart).find()
            groups = {}
            for name, look in found.looks.items():
                groups.setdefault(look.text, []).append(name)
            said |= dict(step=step + 1, cause=found.cause, seen=found.seen, means=found.means, place=found.place, looks=groups)
        said["inside"], said["exact"], said["seconds"] = self.inside, self.exact, time.monotonic() - began
        return said
