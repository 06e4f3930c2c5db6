"""Name numbers, factors, ranks and parameters in few words."""
import fractions
import itertools
import math
import re


def ranges(numbers):
    """Write sorted numbers as '0 to 3, 6'."""
    found = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        found.append(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)))
    return ", ".join(found)


class Words:
    """Names for factors, for groups of ranks and for sets of parameters, in the words of the layout."""

    def __init__(self, run, names, flags, world, batch, near):
        self.run, self.names, self.near, self.places = run, names, near, run.places
        # dimensions of the mesh, other whole numbers among the flags, and the number of micro-batches of such a size
        mesh = {dim: len({place[dim] for place in self.places}) for dim in self.places[0]}
        counts = {flag: value for flag, value in flags.items() if type(value) is int and flag not in mesh}
        pieces = {f"batch/{flag}": batch // value for flag, value in counts.items() if value and batch % value == 0}
        sizes = mesh | counts | pieces | ({} if world in mesh.values() else {"ranks": world})
        self.sizes = {name: size for name, size in sizes.items() if size > 1}

    def times(self, c):
        """Write 2.0 as '2 times the right ones (dp)'."""
        if abs(c - 1) < self.near:
            return "right"
        big, simple = max(c, 1 / c) if c > 0 else math.nan, fractions.Fraction(c).limit_denominator(64)
        readable = min(simple.numerator, simple.denominator) <= 16
        text = f"{simple}" if readable and abs(simple - c) < self.near * abs(c) else f"{c:.5g}"
        for count, root in ((1, 1), (2, 1), (1, 0.5)):
            names = [" x ".join(of) for of in itertools.combinations((n for n in self.sizes if count == 1 or "/" not in n), count)
                     if abs(math.prod(self.sizes[n] for n in of) ** root - big) < self.near * big]
            if names:
                return f"{text} times the right ones ({'1/' * (c < 1)}{'root of ' * (root < 1)}{' or '.join(names[:3])})"
        return f"{text} times the right ones"

    def along(self, groups):
        """Name the dimension along which groups of ranks lie apart."""
        dims = [dim for dim in self.places[0]
                if len({frozenset(self.places[r][dim] for r in ranks) for ranks in groups}) == len(groups)]
        return " or ".join(dims) or f"ranks {' | '.join(ranges(ranks) for ranks in groups)}"

    def ranks(self, ranks):
        """Name a set of ranks by a coordinate that they alone have: 'pp 1'."""
        first = self.places[min(ranks)]
        common = [f"{dim} {at}" for dim, at in first.items()
                  if {r for r, place in enumerate(self.places) if place[dim] == at} == {*ranks}]
        return " or ".join(common) or f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"

    def which(self, names):
        """Describe a set of parameters in few words."""
        def kind(name):
            return re.sub(r"\.\d+\.", ".*.", name)

        def kinds(of):
            return [*dict.fromkeys(map(kind, of))]
        cut_off = [k for k in kinds(names) if not all(name in names for name in self.names if kind(name) == k)]
        rest = [k for k in kinds(self.names) if k not in kinds(names)]
        layers = {int(n) for name in names for n in re.findall(r"\.(\d+)\.", name)} if cut_off else set()
        if layers and all((".*." in k) == (k in kinds(names)) for k in kinds(self.names)):
            rest = []                                     # all of these layers
        most = len(rest) < len(kinds(names))
        few = [k.removesuffix(".weight") for k in (rest if most else kinds(names))]
        text = "all parameters" + " but " * bool(few) if most else ""
        text += ", ".join(few[:4]) + f" and {len(few) - 4} more" * (len(few) > 4)
        of = {name: {rank for held in boxes.values() for rank in held} for name, boxes in self.run.boxes(-1, "weights").items()}
        holders = set().union(*(of[name] for name in names))
        if not 0 < len(holders) < len(self.places):
            stage = ""
        elif {name for name in self.names if of[name] <= holders} == {*names}:
            return f"all parameters of {self.ranks(holders)}"
        else:
            stage = f" ({self.ranks(holders)})"
        return text + f" of layer{'s' * (len(layers) > 1)} {ranges(layers)}" * bool(layers) + stage
