"""Compare what the ranks of a layout have seen with what one process has seen, and say how large rounding can be."""
import collections
import math
from typing import NamedTuple

import torch

from prove import CannotRun
from prove.ranks import cut

EXACT = 1e-9                                              # in float64, everything above this is more than rounding
ROUNDINGS = 30                                            # rounding: up to this many times what one rounding of every weight does


class Row(NamedTuple):
    """One training step: how far apart, or what the limits are, or whether it is beyond them."""
    loss: object
    norm: object
    gradients: object                                     # {name: number}
    weights: object


class Run:
    """What the ranks of one launch have seen."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.steps = len(ranks[0]["steps"])
        self.places = [seen["place"] for seen in ranks]

    def numbers(self, step, kind):
        """Return the "loss" or "norm" of the ranks that know it."""
        return [seen["steps"][step][kind] for seen in self.ranks if seen["steps"][step][kind] is not None]

    def check_finite(self):
        for number, step in enumerate((step for seen in self.ranks for step in seen["steps"]), 1):
            tensors = [(f"{kind[:-1]} of {name}", tensor) for kind in ("gradients", "weights") for name, _, tensor in step[kind]]
            for what, value in [("loss", step["loss"]), ("norm", step["norm"]), *tensors]:
                if value is not None and not torch.as_tensor(value).isfinite().all():
                    raise CannotRun(f"step {number}: its {what} is NaN or infinite, which nothing can be compared with")

    def boxes(self, step, kind):
        """Return {name: {(offsets, shape): {rank: tensor}}} of "gradients" or "weights"; of step -1, the weights before all."""
        found = collections.defaultdict(lambda: collections.defaultdict(dict))
        for rank, seen in enumerate(self.ranks):
            for name, offsets, tensor in seen["own"] if step < 0 else seen["steps"][step][kind]:
                found[name][offsets, tuple(tensor.shape)][rank] = tensor.double()
        return found

    def whole(self, step, kind):
        """Return {name: tensor}: what one process holds, or what the first holder of every box of a layout has, put together."""
        found = {}
        for name, of in self.boxes(step, kind).items():
            shape = [max(offsets[dim] + size[dim] for offsets, size in of) for dim in range(len(next(iter(of))[0]))]
            found[name] = torch.zeros(shape, dtype=torch.float64)
            for (offsets, size), held in of.items():
                cut(found[name], offsets, size).copy_(next(iter(held.values())))
        return found


def activity(run, one, tokens):
    """Return what every rank did: its share of the numbers, its share of the tokens in step 1, and its collectives in all steps."""
    numbers = sum(tensor.numel() for tensor in one.whole(0, "weights").values())
    steps = [[step for step in seen["steps"] if step] for seen in run.ranks]
    return dict(holds=[sum(tensor.numel() for _, _, tensor in seen["own"]) / numbers for seen in run.ranks],
                reads=[first["read"] / tokens for first, *_ in steps],
                issues=[sum(step["issued"] for step in of_rank) for of_rank in steps])


def relative(a, b):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    distance = float((a - b).norm() / b.norm().clamp(min=1e-30))
    return math.inf if math.isnan(distance) else distance


def numbers_held(boxes):
    return sum(math.prod(shape) for _, shape in boxes)


def distances(run, one, step):
    """Return a Row of relative differences, each that of the worst rank; NaN, which exceeds no limit, if one side has no number."""
    row = [max((relative(a, b) for a in run.numbers(step, kind) for b in one.numbers(step, kind)), default=math.nan)
           for kind in ("loss", "norm")]
    for kind in ("gradients", "weights"):
        found, whole = run.boxes(step, kind), one.whole(step, kind)
        for name in whole:
            held, wanted = numbers_held(found.get(name, ())), whole[name].numel()
            if held < wanted:
                raise CannotRun(f"parts: of {name} one process holds {wanted:,} numbers, all ranks together {held:,}")
        row.append({name: max(relative(tensor, cut(whole[name], *box)) for box, of in found[name].items() for tensor in of.values())
                    for name in whole})
    return Row(*row)


def limits(nudged, one, least, scale=1.0):
    """Yield a Row for every step: what can still be rounding, judged by a run whose weights were nudged by one rounding."""
    for step in range(one.steps):
        loss, norm, gradients, weights = distances(nudged, one, step)
        # a norm moves at most as far as the gradients, and two norms may be equal by chance
        norm = max(norm, relative(*(torch.cat([tensor.flatten() for tensor in side.whole(step, "gradients").values()])
                                    for side in (nudged, one))))
        # a number that was logged in float32 is as exact as float32
        logged = [1e-6 if all(x == float(torch.tensor(x).float()) for x in one.numbers(step, kind)) else least
                  for kind in ("loss", "norm")]
        # the nudge may have moved a gradient near zero, or a weight that AdamW moves by it, by less than rounding can
        usual = sorted(gradients.values())[-1 if step else len(gradients) // 2], max(weights.values())
        yield Row(*(max(floor, ROUNDINGS * far * scale) for floor, far in zip(logged, (loss, norm))),
                  *({name: max(least, ROUNDINGS * max(far, middle) * scale) for name, far in of.items()}
                    for of, middle in zip((gradients, weights), usual)))


def beyond(row, limit):
    return Row(*(any(x[name] > most[name] for name in x) if isinstance(x, dict) else x > most for x, most in zip(row, limit)))


def worst(row):
    return Row(*(max(x.values()) if isinstance(x, dict) else x for x in row))
