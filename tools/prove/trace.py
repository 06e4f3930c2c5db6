"""Find the module where a forward pass goes wrong, by its activations, or a backward pass, by their gradients.

A layout may hold any rows of an activation, in any order, and a part of its columns. So each row of a rank is looked up among the
rows of one process. Rows that are nowhere in one process are wrong. In backward, the activations are right, and say which row of
one process the gradient of each row has to equal.
"""
import itertools

import torch

from prove.words import ranges


class Seen:
    """What became of one module's input or output: which rows are right, and which rows of one process no rank has."""

    def __init__(self, of_ranks, right, exactness):
        self.wrong_ranks, self.missing, self.known, self.any_right_there = [], set(), False, False
        found = set()
        for rank, rows in enumerate(of_ranks):
            part = None if rows is None or right is None else look_up(rows, right, exactness)
            if part is not None:
                self.known, equal = True, part[1]
                found |= {*equal.any(0).nonzero().flatten().tolist()}              # equal rows, as of equal tokens, are all found
                if not equal.any(1).all():
                    self.wrong_ranks.append(rank)
                    self.any_right_there |= bool(equal.any())
        if self.known:
            self.missing = {*range(len(right))} - found
            self.total = len(right)

    @property
    def right(self):
        return self.known and not self.wrong_ranks


def look_up(rows, right, exactness):
    """Return where these columns begin in one process, and [rows, its rows]: which are equal; None if they cannot be compared."""
    width, whole = rows.shape[1], right.shape[1]
    if width > whole or whole % width:
        return None
    parts = []
    for start in range(0, whole, width):
        part = right[:, start:start + width]
        distance = torch.cdist(rows, part, compute_mode="donot_use_mm_for_euclid_dist")
        parts.append((start, distance <= exactness * part.norm(dim=1).clamp(min=1e-30)))
    start, equal = max(parts, key=lambda part: part[1].any(1).sum())
    # a part of the columns in another order than one process has them: nothing fits, and nothing is known
    return None if width < whole and not equal.any() else (start, equal)


class Gradients:
    """What became of the gradient of one module's output: which rows of one process are wrong, and on which ranks.

    A row is right if every rank that has it has `factor` times the right one, or if this is what their rows add up to: a layout may
    reduce gradients later.
    """
    def __init__(self, of_ranks, right, exactness, factor=1.0):
        value, gradient = right
        allowed = max(exactness, 1e-5)                    # many trainers compute the loss in float32
        self.partial, self.factors, self.total, self.missing, wrong_ranks = False, [], len(value), set(), set()
        found = [(rank, rows[1], look_up(rows[0], value, exactness)) for rank, rows in enumerate(of_ranks) if rows]
        found = [(rank, mine, *part) for rank, mine, part in found if part]
        self.known = bool(found) and all(equal.any(1).all() for *_, equal in found)            # the activations are right
        held = {}                                         # {columns: those of equal rows, sums of ranks' rows, their number, wrong}
        for rank, mine, start, equal in found if self.known else ():
            columns = slice(start, start + mine.shape[1])
            part = gradient[:, columns]
            self.factors += factors(mine, part, equal)
            if (start, columns.stop) not in held:         # equal rows have the number of the first
                same = look_up(value[:, columns], value[:, columns], exactness)[1].int().argmax(1)
                held[start, columns.stop] = same, torch.zeros_like(part), torch.zeros(len(part)), {}
            same, total, number, wrong = held[start, columns.stop]
            at = same[equal.int().argmax(1)]
            total.index_add_(0, at, mine)
            number.index_add_(0, at, torch.ones(len(at)))
            distance = torch.cdist(mine, factor * part, compute_mode="donot_use_mm_for_euclid_dist")
            for row in at[~((distance <= allowed * norms(factor * part)) & equal).any(1)].tolist():
                wrong.setdefault(row, set()).add(rank)
        for (start, stop), (same, total, number, wrong) in held.items():
            part = factor * gradient[:, start:stop]
            for row, ranks in wrong.items():
                equal = same == row
                copies, wanted = int(number[row]) // int(equal.sum()), part[equal].sum(0)
                counts = (n for n in range(1, copies + 1) if copies % n == 0)
                if any((total[row] - n * wanted).norm() <= allowed * copies * norms(part)[equal].sum() for n in counts):
                    self.partial = True
                else:
                    self.missing |= {*equal.nonzero().flatten().tolist()}
                    wrong_ranks |= ranks
        self.wrong_ranks = sorted(wrong_ranks)

    @property
    def right(self):
        return self.known and not self.missing


def norms(rows):
    """Return the size of each row, against which rounding is judged; a row near zero is as exact as others."""
    size = rows.norm(dim=1)
    return (size + size.mean() / 10).clamp(min=1e-30)


def factors(rows, right, equal):
    """Return c of every row that is c times the right one."""
    square = right.square().sum(1).clamp(min=1e-60)
    c = rows @ right.T / square
    cosine = (c.square() * square / rows.square().sum(1, keepdim=True).clamp(min=1e-60)).where(equal, 0)
    best, place = cosine.max(1)
    return c.gather(1, place[:, None]).flatten()[best > 1 - 1e-6].tolist()


def joined(calls, which):
    tensors = [call[which] for call in calls if call[which] is not None]
    return torch.cat(tensors) if tensors and len({tensor.shape[1] for tensor in tensors}) == 1 else None


def same_rows(a, b):
    return a is not None and b is not None and torch.equal(a, b)


def recorded(run, one):
    """Return what every rank and one process have recorded, and the modules, in the order in which forward leaves them."""
    of_ranks, right = ([seen["steps"][-1]["activations"] for seen in side.ranks] for side in (run, one))
    return of_ranks, right[0], [name for name in right[0] if any(name in seen for seen in of_ranks)]


def trace_back(run, one, shape, exactness, words):
    """Return (module, text), module "" if the gradients of all activations are right; None if there are none to compare."""
    of_ranks, right, names = recorded(run, one)
    points, factor = {}, None
    for name in reversed(names):
        ours, theirs = with_gradients(right, name), [with_gradients(of, name) for of in of_ranks]
        if ours and factor is None:                       # accumulation and dp may scale what backward begins with
            found = sorted(Gradients(theirs, ours, exactness).factors)
            factor = found[len(found) // 2] if found else None
        point = ours and Gradients(theirs, ours, exactness, factor or 1.0)
        points |= {name: point} if point and point.known else {}

    def takes(name):
        """Return the modules whose input is this module's output."""
        return [other for other in names if other != name and same_rows(joined(right[other], 0), joined(right[name], 1))
                and not any(call[1] is not None and call[2] is None for call in right[other])]       # as for a rotary table

    def right_below(name):
        """Tell whether a module around this one has an input with the right gradient: then this one only has another form."""
        around = {other for other in names if name.startswith(f"{other}.")}
        return any(point.right and around & {*takes(other)} for other, point in points.items())
    if 2 * len(points) <= sum(with_gradients(right, name) is not None for name in names):
        return None                                       # most activations are not those of one process
    first = next((name for name, point in points.items() if not point.right and not right_below(name)), None)
    if first is None:
        return "", ""
    passed = [*itertools.takewhile(lambda name: name != first, points)]
    partial = [*itertools.takewhile(lambda name: points[name].partial, reversed(passed))]
    place, text = between(partial[-1] if partial else first, passed, right, takes)
    if partial:
        text = f"in the backward of {place}: that of its input is a partial sum on each rank, and is not added up as it should be"
    elif not any(place in of_ranks[rank] for rank in points[first].wrong_ranks):
        place, text = first, f"between {takes(first)[-1]} and {first}, which lie on different ranks"
    return place, f"the gradients go wrong {text}{where(points[first], shape, words, len(of_ranks))}"


def with_gradients(of, name):
    """Return the rows of a module's output, and those of its gradient; None if they are not known."""
    calls = [call for call in of.get(name, ()) if call[2] is not None]
    rows = joined(calls, 1), joined(calls, 2)
    return None if any(part is None for part in rows) else rows


def between(first, passed, right, takes):
    """Return the place where backward goes wrong, if it first does so at this module's output, and what is to say of it."""
    users = takes(first)
    outer = [name for name in users if not any(name.startswith(f"{other}.") for other in users)]
    if users:
        place, known = outer[0], "that of its output is right, " * (outer[0] in passed)
        inner = [name[len(place) + 1:] for name in users if name.startswith(f"{place}.")]      # a residual passes by
        begins = f", which begins with {', '.join(inner[:3])}" * bool(inner)
        return place, f"in the backward of {place}{begins}: {known}that of its input is wrong"
    around = [name for name in right if first.startswith(f"{name}.")]
    if not passed or not around:
        return first, f"before they come to {first}: that of its output is wrong"
    place = max(around, key=len)
    beside = [name for name in passed if same_rows(joined(right[first], 0), joined(right[name], 0))]
    later = [name for name in reversed(passed) if name.startswith(f"{place}.") and name not in beside]
    first, then = (name[len(place) + 1:].partition(".")[0] for name in (first, (later or [f"{place}.its end"])[0]))
    return place, f"in the backward of {place}, between {first} and {then}"


def trace(run, one, shape, exactness, words):
    """Return (cause, module, text), module "" if all activations are right; None if there are none to compare."""
    of_ranks, right, names = recorded(run, one)

    def rows(name, which):
        return [joined(of[name], which) if name in of else None for of in of_ranks], joined(right[name], which)

    def seen(name, which):
        return Seen(*rows(name, which), exactness)
    outputs = {name: seen(name, 1) for name in names}
    if not any(output.known for output in outputs.values()):
        return None

    def elsewhere(place):
        """Return the module on other ranks whose output is the input of this one, if that output is right; otherwise None."""
        senders = (name for name in names if same_rows(joined(right[name], 1), joined(right[place], 0)) and outputs[name].right)
        return next((name for name in senders if not any(name in of and place in of for of in of_ranks)), None)
    place, sentence = descend("", names, outputs, seen)
    if place is None:
        known = [name for name in names if outputs[name].known]
        if not outputs[known[-1]].missing:
            return "end of forward", "", "the loss; all activations are right"
        lost = rows_in_words(outputs[known[-1]], shape)
        first = next(name for name in known if outputs[name].missing)
        if (sender := elsewhere(first)) and not outputs[sender].missing:
            return "sent", first, f"the loss: from {first} on, no rank computes {lost}, though on other ranks {sender} does"
        return "other data", "", f"the loss: no rank computes {lost}"
    wrong_for, given, (shares, whole) = where(outputs.get(place), shape, words, len(of_ranks)), seen(place, 0), rows(place, 1)
    if given.known and not given.right and (sender := elsewhere(place)):
        return "sent", place, f"the forward pass goes wrong between {sender} and {place}, on different ranks{wrong_for}"
    text = f"the forward pass goes wrong at {place}, {sentence}{wrong_for}"
    if all(share is not None and whole is not None and share.shape == whole.shape for share in shares) and len(shares) > 1 \
            and (sum(shares) - whole).norm() <= exactness * whole.norm():
        return "partial sum", place, text + "; the sum over the ranks is right"
    owns = any(f"{place}.{name}" in words.names for name in ("weight", "bias"))
    # All ranks run the same code, so if only some are wrong, their weights are. That can happen even in the first step: a rank
    # may not compute with the weights that were written into it.
    stale = owns and given.right and not outputs[place].any_right_there and len(outputs[place].wrong_ranks) < len(of_ranks)
    return "other weights" if stale else "forward", place, text


def descend(parent, names, outputs, seen):
    """Return the innermost module whose output is the first to be wrong, and what is to say of it."""
    inside = [name for name in names if name.startswith(f"{parent}." if parent else "") and name != parent]
    children = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
    wrong = [name for name in children if outputs[name].known and not outputs[name].right]
    if not parent:                                        # what comes right again later was only kept in another form
        last_right = max((children.index(name) for name in children if outputs[name].right), default=-1)
        wrong = [name for name in wrong if children.index(name) > last_right]
    if not wrong:
        return None, ""
    place = wrong[0]
    given = seen(place, 0)
    if given.known and not given.right and children.index(place) > 0 and parent:
        return parent, f"between {children[children.index(place) - 1].rsplit('.', 1)[-1]} and {place.rsplit('.', 1)[-1]}"
    inner, sentence = descend(place, names, outputs, seen)
    if inner:
        return inner, sentence
    return place, "which gets the right input" if given.right else "whose output is the first that is wrong"


def rows_in_words(output, shape):
    batch, seq = shape
    if output.total != batch * seq and len(output.missing) == output.total:
        return "all rows"
    if output.total != batch * seq:
        return f"{len(output.missing)} of {output.total} rows"
    sequences, positions = {row // seq for row in output.missing}, {row % seq for row in output.missing}
    if len(sequences) * len(positions) != len(output.missing):
        return f"{len(output.missing)} of {output.total} tokens"
    texts = ([f"sequences {ranges(sequences)}"] if len(sequences) < batch else [],
             [f"positions {ranges(positions)} of {seq}"] if len(positions) < seq else [])
    return " and ".join(sum(texts, [])) or "all tokens"


def where(output, shape, words, world):
    """Return the tokens that are wrong, and the ranks, where it is not all of them."""
    if output is None or not output.missing:
        return ""
    text = rows_in_words(output, shape)
    ranks = f" on {words.ranks(output.wrong_ranks)}" if 0 < len(output.wrong_ranks) < world else ""
    return f", for {text}{ranks}"
