"""Say what the first difference looks like, and which row of the table of causes (causes.py) that is.

Nothing here knows a trainer. Gradients are compared with multiples of the right ones, with each other, and with the gradients that
each sequence alone gives; activations are compared row by row.
"""
import collections
import contextlib
import fractions
import functools
import itertools
import math
from typing import NamedTuple

import torch

from prove.causes import CAUSES
from prove.compare import Run, relative
from prove import CannotRun
from prove.ranks import Job, cut
from prove.trace import trace, trace_back
from prove.words import Words, ranges


class Look(NamedTuple):
    """What one wrong tensor looks like. `kind` is a cause, or "factor" or "shares", which are causes only together with others."""
    kind: str
    text: str
    factor: float = 1.0


class Finding(NamedTuple):
    cause: str
    seen: str
    looks: dict = {}                                      # {name of a parameter: Look}
    place: str = ""                                       # the name of a module or parameter

    @property
    def means(self):
        return CAUSES[self.cause].means


def multiple(a, b, limit):
    """Return c if a is c x b, up to rounding or to a millionth of their difference, since float32 rounds the two differently."""
    c = float((a * b).sum() / (b * b).sum().clamp(min=1e-60))
    return c if relative(a, c * b) <= max(limit, 1e-6 * min(1.0, relative(a, b))) or float(a.norm()) == 0 else None


class Diagnosis:
    def __init__(self, trial, run, one, limits, apart):
        self.trial, self.run, self.one, self.limits, self.apart = trial, run, one, limits, apart
        self.names = [*trial.start]
        self.near = 1e-2 if trial.inside == "bfloat16" else 1e-4      # two factors are equal
        self.words = Words(run, self.names, trial.both | trial.flags, trial.world, len(trial.inputs[0]), self.near)

    def find(self):
        """Return the first step with a difference, and the Finding."""
        step = next(k for k, row in enumerate(self.apart) if any(row))
        row = self.apart[step]
        self.words.sizes["targets"] = int((self.trial.targets[step] >= 0).sum())
        if row.loss:
            return step, self.loss(step, row)
        if row.gradients:
            return step, self.gradients(step, self.looks(step, "gradients"))
        return step, self.norm(step) if row.norm else self.update(step)

    # ------------------------------------------------------------------------------------------- one tensor
    def looks(self, step, kind):
        """Return {name: Look} of the tensors that are wrong."""
        held, right = self.run.boxes(step, kind), self.one.whole(step, kind)
        basis = self.shares_of_sequences(step) if kind == "gradients" and not self.trial.same_rows else None
        before = (self.one.whole(step - 1, kind) if step else self.trial.start) if kind == "weights" else None
        limits = getattr(self.limits[step], kind)
        found = {name: self.look(name, right[name], held[name], limits[name], basis, before and before[name])
                 for name in self.names}
        found = {name: look for name, look in found.items() if look}
        if basis:                                         # what has too few numbers to be explained alone may have enough together
            small = [name for name, look in found.items() if look.kind in ("gradients", "gradients in part")
                     and look.text != "not finite" and right[name].numel() < 2 * len(basis[0])]
            first = {name: {box: next(iter(copies.values())) for box, copies in held[name].items()} for name in small}
            if small and (together := self.fit(first, right, max(limits[name] for name in small), *basis)):
                found |= dict.fromkeys(small, together)
        return found

    def look(self, name, right, held, limit, basis, before):
        wrong = {box: {rank for rank, tensor in copies.items() if relative(tensor, cut(right, *box)) > limit}
                 for box, copies in held.items()}
        wrong = {box: ranks for box, ranks in wrong.items() if ranks}
        if not wrong:
            return None
        if not all(torch.isfinite(tensor).all() for copies in held.values() for tensor in copies.values()):
            return Look("gradients", "not finite")
        if found := self.not_updated(held, wrong, limit, before):
            return found
        for box, ranks in wrong.items():
            if found := self.copies_that_differ(held[box], cut(right, *box), ranks, limit, are_shares=before is None):
                return found
        first = {box: next(iter(copies.values())) for box, copies in held.items()}
        return (self.times_a_factor(right, held, first, wrong, limit) or self.sum_of_parts(right, held, first, wrong, limit)
                or self.low_precision(right, first) or basis and self.fit({name: first}, {name: right}, limit, *basis)
                or self.only_in_part(right, held, first, wrong, limit))

    def not_updated(self, held, wrong, limit, before):
        if before is None or not all(relative(held[box][rank], cut(before, *box)) <= limit for box in wrong for rank in wrong[box]):
            return None
        ranks = {rank for box in wrong for rank in wrong[box]}
        some = any(len(wrong[box]) < len(held[box]) for box in wrong)
        return Look("not updated", "as before the update" + f" on {self.words.ranks(ranks)}" * some)

    def times_a_factor(self, right, held, first, wrong, limit):
        factors = [multiple(tensor, cut(right, *box), limit) for box, tensor in first.items()]
        # a factor has to explain the difference, not only to be allowed by a limit that is as large
        if None in factors or any(relative(first[box], factor * cut(right, *box)) > 0.1 * relative(first[box], cut(right, *box))
                                  for box, factor in zip(first, factors) if box in wrong):
            return None
        if max(factors) - min(factors) <= self.near * max(map(abs, factors)):
            return Look("factor", self.words.times(factors[0]), factors[0]) if factors[0] else Look("zero gradients", "zero")
        if 0 in factors or len(wrong) < len(held):
            return None
        said = [f"{factor:.3g} on {self.words.ranks([*held[box]])}" for factor, box in zip(factors, held)]
        return Look("scaled apart", f"right but for a factor, which is {', '.join(said[:4])}")

    def sum_of_parts(self, right, held, first, wrong, limit):
        every = {box: sum(cut(right, *other) for other in held if other[1] == box[1]) for box in wrong}
        factors = [multiple(first[box], every[box], limit) for box in wrong]
        if len(held) == 1 or None in factors or 0 in factors:
            return None
        return Look("others' gradients", "the sum of those of different parts, " + self.words.times(factors[0]), factors[0])

    def low_precision(self, right, first):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            lower = torch.finfo(dtype).bits < torch.finfo(getattr(torch, self.trial.dtype)).bits
            fits = all(torch.equal(tensor, tensor.to(dtype).double()) for tensor in first.values())
            near = all(relative(tensor, cut(right, *box)) < 16 * torch.finfo(dtype).eps for box, tensor in first.items())
            if lower and fits and near and not torch.equal(right, right.to(dtype).double()):
                return Look("low precision", f"numbers of {str(dtype).removeprefix('torch.')}, and the right ones are not")
        return None

    def copies_that_differ(self, copies, right, wrong, limit, are_shares):
        distinct = []                                     # (tensor, ranks that have it)
        for rank, tensor in copies.items():
            alike = [ranks for other, ranks in distinct if relative(tensor, other) <= limit]
            alike[0].append(rank) if alike else distinct.append((tensor, [rank]))
        if len(distinct) == 1:
            return None
        over = self.words.along([ranks for _, ranks in distinct])
        if not are_shares:                                # these are weights
            return Look("weights drift", f"copies differ over {over}; they are wrong on {self.words.ranks(wrong)}")
        c = multiple(sum(tensor for tensor, _ in distinct), right, limit)
        if c:
            return Look("not reduced", f"not reduced over {over}; the sum of the ranks' shares is {self.words.times(c)}")
        if len(wrong) < len(copies):
            return Look("gradients in part", f"right on some ranks, wrong on {self.words.ranks(wrong)}")
        return Look("reduced in part", f"copies differ over {over}, and their sum is wrong")

    def only_in_part(self, right, held, first, wrong, limit):
        if len(wrong) < len(held):
            ranks = sorted(rank for ranks in wrong.values() for rank in ranks)
            return Look("gradients in part", f"wrong only in the parts of {self.words.ranks(ranks)}")
        rows = [relative(row, right_row) <= limit for box, tensor in first.items() if tensor.dim() > 1
                for row, right_row in zip(tensor, cut(right, *box))]
        if len(held) == 1 and 0 < sum(rows) < len(rows):
            text = ranges([i for i, fine in enumerate(rows) if not fine])
            return Look("gradients in part", f"wrong only in rows {text} of {len(rows)}" if len(text) < 40 else
                        f"right only in {sum(rows)} of {len(rows)} rows")
        return Look("gradients", "wrong, no multiple of the right ones")

    # ------------------------------------------------------------------------------------------- what each sequence alone gives
    def weights_before(self, step):
        return self.one.whole(step - 1, "weights") if step else self.trial.start

    def shares_of_sequences(self, step):
        """Return [(label, {name: gradient})] of every sequence alone, in this step and in the one before it."""
        known, key = self.trial.known, (step, self.pieces())
        if key not in known:
            known[key] = basis = []
            for at in (step, step - 1)[:1 + bool(step)]:
                labels, jobs = zip(*self.alone(at))
                with contextlib.suppress(CannotRun):      # not every trainer takes such targets
                    alone = self.trial.launch_one(jobs)
                    basis += [((at, *label), alone.whole(k, "gradients")) for k, label in enumerate(labels)]
        return known[key], step

    def pieces(self):
        """Return into how many pieces a sequence is cut: with masked targets, ranks may count these apart."""
        seq = self.trial.inputs.shape[-1]
        sizes = [n for name, n in self.words.sizes.items() if seq % n == 0 and n <= 8 and not name.startswith("batch/")]
        return max(sizes, default=1) if self.trial.mask else 1

    def alone(self, step):
        """Yield the jobs that give the gradient of one sequence each; with masked targets, of a part of one."""
        inputs, targets, weights = self.trial.inputs[step], self.trial.targets[step], self.weights_before(step)
        batch, seq = inputs.shape
        pieces = self.pieces()
        for i, piece in itertools.product(range(batch), range(pieces)):
            columns = torch.arange(seq).chunk(pieces)[piece]
            kept = torch.full_like(targets[i], -100)
            kept[columns] = targets[i][columns]
            if (kept >= 0).any():
                yield (i, piece), Job(weights, inputs[i].expand(batch, seq), kept.expand(batch, seq))

    def fit(self, first, right, limit, basis, step):
        """Look for a sum of the sequences' gradients that gives these ones."""
        size = {name: right[name].norm().clamp(min=1e-30) for name in first}       # none may hide a smaller one

        def flat(of):
            return torch.cat([cut(of[name], *box).flatten() / size[name] for name, boxes in first.items() for box in boxes])
        columns = [(label, flat(gradients)) for label, gradients in basis]
        theirs = torch.cat([tensor.flatten() / size[name] for name, boxes in first.items() for tensor in boxes.values()])
        ours = flat(right)
        if len(columns) * 2 > len(theirs) or not columns:
            return None
        now = [i for i, (label, _) in enumerate(columns) if label[0] == step]
        matrix = torch.stack([column for _, column in columns], 1)
        usual = torch.linalg.lstsq(matrix[:, now], ours[:, None], driver="gelsd").solution.flatten()
        shares = torch.linalg.lstsq(matrix, theirs[:, None], driver="gelsd").solution.flatten()
        # norms that compute in float32 round a sequence alone differently from the same sequence in the batch
        unexplained = max(relative(matrix[:, now] @ usual, ours), relative(matrix @ shares, theirs))
        if unexplained > min(max(10 * limit, 1e-5), 0.1 * relative(theirs, ours)) or (usual <= 0).any():
            return None
        ratios = {columns[i][0]: float(shares[i] / usual[k]) for k, i in enumerate(now)}
        older = {columns[i][0]: float(shares[i] / usual.mean()) for i in range(len(columns)) if i not in now}
        if any(abs(share) > self.near for share in older.values()):
            whose = {label[1] for label, share in older.items() if abs(share) > self.near}
            which = "" if len(whose) == len(self.trial.inputs[step]) else f" (of sequences {ranges(whose)})"
            return Look("not zeroed", f"they contain the gradients of the step before{which}")
        return self.describe_shares(ratios, step)

    def describe_shares(self, ratios, step):
        """Describe how much each sequence counts: {(step, sequence, piece): how many times what it should}."""
        targets = self.trial.targets[step]
        counts = {label: int((targets[label[1]].chunk(self.pieces())[label[2]] >= 0).sum()) for label in ratios}
        groups = collections.defaultdict(list)
        for label, ratio in ratios.items():
            groups[next((other for other in groups if abs(other - ratio) < 1e-3), round(ratio, 3))].append(label)
        total = sum(counts.values())
        held = [ratio * sum(counts[label] for label in labels) / total for ratio, labels in groups.items()]
        if len(groups) == 1:                              # a factor, which float32 has hidden in the single numbers
            factor = next(iter(groups))
            return Look("factor", self.words.times(factor), factor) if abs(factor - 1) > self.near else None
        for number in range(2, len(ratios) + 1):          # try this many groups, all with the same weight
            says = [share * number for share in held]
            if self.trial.mask and all(say > 0.5 and abs(say - round(say)) < 0.01 for say in says):
                return Look("mean of means", f"those of a mean of {number} means, each over its own number of targets")
        if len(groups) > 4:
            return Look("shares", "those of a batch in which sequences count differently: "
                        + ", ".join(f"{ratio:.3g}" for ratio in ratios.values()))
        said = [f"{ranges({label[1] for label in labels})} {self.how_often(ratio)}" for ratio, labels in groups.items()]
        return Look("shares", f"those of a batch in which sequences {', '.join(said)}")

    def how_often(self, ratio):
        if abs(ratio) < 1e-3:
            return "are missing"
        return f"count {fractions.Fraction(ratio).limit_denominator(64)} times" if abs(ratio - 1) > 1e-3 else "count once"

    # ------------------------------------------------------------------------------------------- the loss
    def loss(self, step, row):
        theirs, right, limit = self.run.numbers(step, "loss"), self.one.numbers(step, "loss")[0], self.limits[step].loss
        c = theirs[0] / right
        looks = self.looks(step, "gradients") if row.gradients else {}
        if not looks and math.isfinite(c):
            differ = max(theirs) - min(theirs) > limit * abs(right)
            if differ and any(relative(sum(theirs) / n, right) <= limit for n in {1, len(theirs)}):
                return Finding("log of one rank", "the logged loss: each rank has that of its own share; together they are right")
            simple = self.words.times(c)
            if "(" in simple or abs(fractions.Fraction(c).limit_denominator(16) - c) < self.near * abs(c):
                return Finding("log times a factor", f"the logged loss, {simple}; gradients are right".replace(" ones", " one"))
            return Finding("log of something else", "the logged loss, no simple multiple of the right one; gradients are right")
        texts, kinds = {look.text for look in looks.values()}, {look.kind for look in looks.values()}
        all_wrong = len(looks) == len(self.names)
        if all_wrong and kinds == {"factor"} and len(texts) == 1:
            return Finding("loss times a factor", f"the loss and all gradients are {texts.pop()}", looks)
        if "mean of means" in kinds:
            return Finding("mean of means", "the loss and the gradients are " + self.most_common(looks, "mean of means"), looks)
        if "shares" in kinds and len({look.text for look in looks.values() if look.kind == "shares"}) == 1:
            return Finding("other data", "the loss and the gradients are " + self.most_common(looks, "shares"), looks)
        return self.known_state(step, theirs[0], limit, looks) or self.forward(step, looks)

    def most_common(self, looks, kind):
        return collections.Counter(look.text for look in looks.values() if look.kind == kind).most_common(1)[0][0]

    def known_state(self, step, loss, limit, looks):
        """Look for a state of one process that gives this loss: older weights, other targets, sequences in parts."""
        inputs, targets = self.trial.inputs[step], self.trial.targets[step]
        batch, seq = inputs.shape
        weights, lengths = self.weights_before(step), sorted({n for n in self.words.sizes.values() if seq % n == 0})
        tries = []
        if step:
            tries.append(("old weights", "the loss is that of the weights before the last update",
                          Job(self.weights_before(step - 1), inputs, targets)))
        for n in lengths:
            home = targets.clone()
            home[:, seq // n - 1::seq // n] = inputs[:, ::seq // n]
            tries.append(("targets at home", f"the loss is that of targets shifted within each of {n} parts of a sequence",
                          Job(weights, inputs, home)))
        for n in lengths:
            tries.append(("attends alone", f"the loss is that of sequences of which each of {n} parts attends only to itself",
                          Job(weights, inputs.reshape(batch * n, -1), targets.reshape(batch * n, -1))))
        for cause, seen, job in tries:
            with contextlib.suppress(CannotRun):          # not every trainer takes other lengths
                if relative(loss, self.trial.launch_one([job]).numbers(0, "loss")[0]) <= limit:
                    return Finding(cause, seen, looks)
        return None

    def forward(self, step, looks):
        """Compare activations, if the adapter shows modules."""
        found = trace(*self.watched(step))
        if found is None:
            return Finding("loss", "the loss and the gradients", looks)
        cause, place, text = found
        return Finding(cause, text, looks, place)

    @functools.cache
    def watched(self, step):
        """Train up to this step again, record activations and their gradients there, and return what trace and trace_back take."""
        steps = [0, 0] if step == 0 else [*range(step + 1)]                        # a pipeline's first step looks for shapes, too
        jobs = [Job(self.trial.start if k == 0 else None, self.trial.inputs[k], self.trial.targets[k], watched=i == len(steps) - 1)
                for i, k in enumerate(steps)]
        return (self.trial.launch(jobs), self.trial.launch_one(jobs), self.trial.inputs[step].shape, self.trial.exactness,
                self.words)

    # ------------------------------------------------------------------------------------------- gradients
    def gradients(self, step, looks):
        place = [*looks][-1]                              # backward comes here first
        first, kinds, texts = looks[place], {look.kind for look in looks.values()}, {look.text for look in looks.values()}
        which, late = self.words.which([*looks]), "; in step 1 they are right" if step else ""
        all_wrong = len(looks) == len(self.names)
        if kinds == {"factor"} and len(texts) == 1 and all_wrong:
            for norm in self.one.numbers(step, "norm"):
                for factor, text in ((norm, "times the right ones, and that is their norm"),
                                     (1 / max(norm, 1e-30), "times the right ones, and that is 1 / their norm")):
                    if abs(first.factor - factor) < self.near * factor:
                        return Finding("clipped or not", f"the gradients of {which} are {factor:.5g} {text}{late}", looks)
        if kinds == {"factor"} and len(texts) == 1:
            if not all_wrong and (found := self.backward(step, looks, late)):
                return found
            cause = "all gradients times a factor" if all_wrong else "some gradients times a factor"
            return Finding(cause, f"the gradients of {which} are {first.text}{late}", looks, "" if all_wrong else place)
        if kinds == {"factor"}:
            simple = all(abs(fractions.Fraction(look.factor).limit_denominator(16) - look.factor) < self.near * abs(look.factor)
                         for look in looks.values())
            return Finding("some gradients times a factor" if simple else "scaled apart",
                           f"the gradients of {which} are right up to factors, which differ{late}", looks, place)
        if "not zeroed" in kinds:
            return Finding("not zeroed", f"the gradients of {which}: {self.most_common(looks, 'not zeroed')}", looks, place)
        if "shares" in kinds or "mean of means" in kinds:
            kind = "shares" if "shares" in kinds else "mean of means"
            return Finding("gradients of some data" if kind == "shares" else kind,
                           f"the gradients of {which} are {self.most_common(looks, kind)}{late}", looks, place)
        if len(kinds) == 1 and first.kind not in ("gradients", "gradients in part", "reduced in part"):
            return Finding(first.kind, f"the gradients of {which}: {first.text}{late}", looks, place)
        if all_wrong and kinds == {"gradients"}:          # the loss may hardly show what is wrong with the forward pass
            found = self.forward(step, looks)
            if found.place:
                return found
        if found := self.backward(step, looks, late):
            return found
        before = self.names[:self.names.index(place) + 1]
        if found is None and not all_wrong and len(looks) > 0.7 * len(before):
            return Finding("backward", f"the gradients go wrong at {place} on the way back: {first.text}{late}", looks, place)
        cause = first.kind if first.kind in CAUSES else "gradients"
        text = f"the gradients of {which}: {first.text}"
        if cause == "gradients" and found is not None:
            cause, text = "gradients of weights", text + "; those of all activations are right"
        return Finding(cause, text + late, looks, place)

    def backward(self, step, looks, late):
        """Compare the gradients of activations. Return a Finding, "" if they are right, None if there are none to compare."""
        found = None if self.trial.how.load else trace_back(*self.watched(step))  # watched() does not resume
        return found and found[0] and Finding("backward", found[1] + late, looks, found[0])

    # ------------------------------------------------------------------------------------------- the norm
    def norm(self, step):
        theirs, right = (side.numbers(step, "norm") for side in (self.run, self.one))
        if not math.isfinite(theirs[0]):
            return Finding("norm", "the gradient norm is not finite, though the gradients are right")
        held, gradients = self.run.boxes(step, "gradients"), self.one.whole(step, "gradients")
        for rank, norm in enumerate(theirs):
            own = sum(float(tensor.double().square().sum()) for _, _, tensor in self.run.ranks[rank]["steps"][step]["gradients"])
            if relative(own ** 0.5, norm) < self.near and max(theirs) - min(theirs) > self.near * norm:
                return Finding("norm of one rank", "the gradient norm: every rank has that of what it holds itself")
        for dim in self.words.places[0]:
            squares = collections.Counter()
            for copies in (copies for of in held.values() for copies in of.values()):
                for at in {self.words.places[rank][dim] for rank in copies}:
                    squares[at] += float(next(iter(copies.values())).square().sum())
            whose = {at for at, square in squares.items() for norm in theirs
                     if relative(square ** 0.5, norm) < self.near < relative(square ** 0.5, right[0])}
            if len(whose) == 1 and max(theirs) - min(theirs) <= self.near * theirs[0]:
                return Finding("norm of a part", f"the gradient norm: it is that of what {dim} {whose.pop()} holds")
        groups = collections.defaultdict(list)
        for name in self.names:
            groups[max(map(len, held[name].values()))].append(name)
        for names in (self.names, *groups.values()):
            square = float(sum(gradients[name].square().sum() for name in names))
            c = 1 + (theirs[0] ** 2 - right[0] ** 2) / square
            simple = fractions.Fraction(c).limit_denominator(64)
            if c > 0 and abs(simple - c) < self.near * c and 1 in (simple.numerator, simple.denominator):
                counted = f"the squares of {self.words.which(names)} are {self.words.times(float(simple))}"
                return Finding("norm counts", f"the gradient norm: {counted}")
        return Finding("norm", f"the gradient norm is {theirs[0] / right[0]:.5g} times the right one")

    # ------------------------------------------------------------------------------------------- the update
    def update(self, step):
        before, right = self.weights_before(step), self.one.whole(step, "weights")
        theirs, looks = self.run.whole(step, "weights"), self.looks(step, "weights")
        which = self.words.which([*looks])
        looked = [name for name in looks if right[name].numel() > 1]

        def off(name, start):
            return relative(theirs[name] - start[name], right[name] - before[name])
        own = self.run.whole(-1, "weights")
        if step == 0 and all(off(name, own) < 1e-2 < off(name, before) for name in looks):
            return Finding("own weights", f"the weights of {which} have moved as they should, but from those that the layout drew",
                           looks)
        if {look.kind for look in looks.values()} == {"not updated"}:
            return Finding("not updated", f"the weights of {which} are {next(iter(looks.values())).text}", looks, [*looks][0])
        if "weights drift" in {look.kind for look in looks.values()}:
            return Finding("weights drift", f"the weights of {which}: {self.most_common(looks, 'weights drift')}", looks)
        decayed = [multiple(theirs[name] - right[name], before[name].double(), 1e-3) for name in looked]
        moved = [multiple(theirs[name] - before[name], right[name] - before[name], 1e-3) for name in looked]
        for cause, text, factors in (("decay", "are off by {:.3g} of themselves", decayed),
                                     ("update times a factor", "have moved {:.3g} times as far", moved)):
            if factors and None not in factors and max(factors) - min(factors) <= 1e-2 * abs(max(factors)):
                said = f"the weights of {which} {text.format(factors[0])}; gradients and norm are right"
                if factors[0] and abs(factors[0] - 1) > 1e-2:
                    return Finding(cause, said, looks)
        first = next(iter(looks.values()))
        return Finding("update", f"the weights of {which}: {first.text}; gradients and norm are right", looks)


def in_words(tensors, right, limit, flags):
    """Say what differs between two sets of whole tensors, of unknown origin: 'norm: 2 times the right ones (tp)'."""
    run = Run([dict(place={}, steps=[], own=[(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()])])
    words, groups = Words(run, [*right], flags, 1, 1, 1e-4), collections.defaultdict(list)
    for name in right:
        a, b = tensors[name].double(), right[name].double()
        if relative(a, b) > limit:
            c = multiple(a, b, limit)
            groups["no multiple of the right ones" if c is None else words.times(c) if c else "zero"].append(name)
    return "; ".join(f"{words.which(names)}: {look}" for look, names in groups.items())


# ------------------------------------------------------------------------------------------- the weights that a layout draws itself
def drawn_copies(run, own):
    """Return what is to say of the weights that a layout draws itself: (parameters that differ from one process, copies)."""
    different, first, copies = set(), {}, []
    for name, of in run.boxes(-1, "weights").items():
        for box, held in of.items():
            tensor, right = next(iter(held.values())), cut(own[name], *box)
            if relative(tensor, right) > 1e-6:
                different.add(name)
            twin = first.setdefault((box[1], tensor.numpy().tobytes()), (name, box))
            if tensor.numel() and tensor.min() < tensor.max() and not torch.equal(cut(own[twin[0]], *twin[1]), right):
                copies.append(f"{name}{[*box[0]]} of {twin[0]}{[*twin[1][0]]}")
    return different, copies

