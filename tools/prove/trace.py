"""Find the module where a forward pass goes wrong, by its activations.

A layout may hold any rows of an activation, in any order, and a part of its columns. So each row of a rank is looked up among the
rows of one process. Rows that are nowhere in one process are wrong.
"""
import torch

from prove.words import ranges


class Seen:
    """What became of one module's input or output: which rows are right, and which rows of one process no rank has."""

    def __init__(self, of_ranks, right, exactness):
        self.wrong_ranks, self.missing, self.known, self.any_right_there = [], set(), False, False
        found = set()
        for rank, rows in enumerate(of_ranks):
            places = None if rows is None or right is None else look_up(rows, right, exactness)
            if places is not None:
                self.known = True
                found |= {place for place in places if place is not None}
                if None in places:
                    self.wrong_ranks.append(rank)
                    self.any_right_there |= places.count(None) < len(rows)
        if self.known:
            self.missing = {*range(len(right))} - found
            self.total = len(right)

    @property
    def right(self):
        return self.known and not self.wrong_ranks


def look_up(rows, right, exactness):
    """Return for every row the place of an equal row of one process, or None; return None if columns cannot be compared."""
    width, whole = rows.shape[1], right.shape[1]
    if width > whole or whole % width:
        return None
    best = None
    for start in range(0, whole, width):
        part = right[:, start:start + width]
        distance = torch.cdist(rows, part, compute_mode="donot_use_mm_for_euclid_dist")
        nearest, place = distance.min(1)
        fits = nearest <= exactness * part.norm(dim=1)[place].clamp(min=1e-30)
        places = [int(p) if fine else None for p, fine in zip(place, fits)]
        # equal rows, as of the same token at the start of two sequences, count as all found
        same = {j for i, fine in enumerate(fits) if fine
                for j in (distance[i] <= exactness * part.norm(dim=1).clamp(min=1e-30)).nonzero().flatten().tolist()}
        places += sorted(same - {place for place in places if place is not None})
        if best is None or places.count(None) < best.count(None):
            best = places
    # a part of the columns in another order than one process has them: nothing fits, and nothing is known
    return None if width < whole and best.count(None) == len(rows) else best


def joined(calls, which):
    tensors = [call[which] for call in calls if call[which] is not None]
    return torch.cat(tensors) if tensors and len({tensor.shape[1] for tensor in tensors}) == 1 else None


def trace(run, one, shape, exactness, words):
    """Return (cause, module, text), module "" if all activations are right; None if there are none to compare."""
    of_ranks = [seen["steps"][-1]["activations"] for seen in run.ranks]
    right = one.ranks[0]["steps"][-1]["activations"]
    names = [name for name in right if any(name in seen for seen in of_ranks)]     # in the order in which forward leaves them

    def rows(name, which):
        return [joined(of[name], which) if name in of else None for of in of_ranks], joined(right[name], which)

    def seen(name, which):
        return Seen(*rows(name, which), exactness)
    outputs = {name: seen(name, 1) for name in names}
    if not any(output.known for output in outputs.values()):
        return None
    place, sentence = descend("", names, outputs, seen)
    if place is None:
        last = [output for output in outputs.values() if output.known][-1]
        if last.missing:
            return "other data", "", f"the loss: no rank computes {rows_in_words(last, shape)}"
        return "end of forward", "", "the loss; all activations are right"
    text = f"the forward pass goes wrong at {place}, {sentence}" + where(outputs.get(place), shape, words, len(of_ranks))
    given, (shares, whole) = seen(place, 0), rows(place, 1)
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
