"""The layouts that the tests train.

    python tests/support/layouts.py step05_cp                      # print the layouts of a step
    python tests/support/layouts.py step05_cp FILE                 # compare the layouts of a file, one a line, with one process
    python tests/support/layouts.py step05_cp "4 dense-2 sgd --dtype float64 --cp 4 --cp_mode ring --micro_batch_size 6" ...
    python tests/support/layouts.py --write                        # after a change of FACTORS: write tests/data/layouts.txt anew

A layout chooses a value for every factor below. All combinations would be millions of runs. But almost every fault shows as soon
as the wrong two values meet, whatever the others are. So step 8 trains every pair of values in some layout (a covering array), and
every triple of ZeRO x tp x pp. Steps 2 to 7 share most of their files, byte for byte, with a neighbour. So they train only every
value and, where the two can meet, every value together with their own technique (their dimension at 2, or ZeRO-2). A value or pair
without dtype counts only in a layout in float64, because only float64 is compared to 1e-9.

Some layouts have names, below. The others are in tests/data/layouts.txt, and test_layouts.py checks that nothing is missing.
`make sweep` draws layouts at random.
"""
import functools
import itertools
import os
import random
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from cases import FAMILIES
from steps import NAMES, ROOT, full_name, load_module

SCHEDULES = load_module(ROOT / "step06_pp/schedules.py").SCHEDULES

#                      from step, values
FACTORS = {"dtype":         (1, ["float64", "float32", "bfloat16"]),
           "optimizer":     (1, ["adamw", "sgd"]),
           "recompute":     (1, ["none", "selective", "full"]),
           "micro_batches": (1, ["one", "few", "many"]),
           "family":        (1, list(FAMILIES)),
           "dp":            (2, [1, 2, 3, 4]),
           "zero":          (3, [0, 1, 2, 3]),
           "shard":         (3, ["all", "part"]),
           "dp_mode":       (2, ["naive", "overlap", "bucket", "bucket --bucket_mb 0.02"]),
           "tp":            (4, [1, 2, 4]),
           "sp":            (4, ["on", "off"]),
           "cp":            (5, [1, 2, 4]),
           "cp_mode":       (5, ["zigzag", "ring", "allgather", "ulysses"]),
           "pp":            (6, [1, 2, 4]),
           "schedule":      (6, list(SCHEDULES)),
           "ep":            (7, [1, 2, 4]),
           "experts":       (7, ["dense", "top1", "top2", "top4"]),
           "balance":       (7, ["bias", "aux", "none"])}
MESH = ("dp", "tp", "cp", "pp")
# Up to four ranks, or eight split along three dimensions: larger meshes show nothing that these do not.
MESHES = [mesh for mesh in itertools.product(*(FACTORS[name][1] for name in MESH))
          if (world := mesh[0] * mesh[1] * mesh[2] * mesh[3]) <= 4 or world == 8 and max(mesh) == 2]
TRIPLE = "zero", "tp", "pp"
ALONE = {"dp": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "zero": 0, "experts": "dense", "family": "llama"}  # before a step has them


class Layout(NamedTuple):
    step: str
    world: int
    shape: str                                            # as in cases.py: dense-3, top2-3-qk
    optimizer: str
    flags: str

    def __str__(self):
        return f"{self.world} {self.shape} {self.optimizer} {self.flags}"

    def flag(self, name, default=None):
        words = self.flags.split()
        return words[words.index(f"--{name}") + 1] if f"--{name}" in words else default

    def number(self, name):
        """Return a degree, or the ZeRO stage; dp is what the other degrees leave of the world."""
        if name == "dp":
            return self.world // (self.number("tp") * self.number("cp") * self.number("pp"))
        return int(self.flag(name, 0 if name == "zero" else 1))


TABLE = ROOT / "tests/data/layouts.txt"                   # a line for each layout: its step and str(layout)


def parse(step, line):
    world, shape, optimizer, flags = line.split(maxsplit=3)
    return Layout(step, int(world), shape, optimizer, flags)


# ------------------------------------------------------------------------------------------- one row
def factors(step):
    return [name for name, (since, _) in FACTORS.items() if since <= step]


def fits(row, mesh):
    """Tell whether the values chosen so far are possible with these degrees."""
    dp, tp, cp, pp = mesh
    chosen = row.get
    return (chosen("dp", dp) == dp and chosen("tp", tp) == tp and chosen("cp", cp) == cp and chosen("pp", pp) == pp
            and (tp > 1 or chosen("sp") is None) and (cp > 1 or chosen("cp_mode") is None)
            and (pp > 1 or chosen("schedule") is None)
            and (dp * cp > 1 or not (chosen("dp_mode") or chosen("zero") or chosen("shard")))
            and (dp * cp == 4 or chosen("shard") != "part")
            and dp * cp * tp % chosen("ep", 1) == 0
            and (chosen("micro_batches") is None or counts(chosen("micro_batches"), dp, pp, chosen("schedule"))))


@functools.cache
def counts(kind, dp, pp, schedule):
    """Return the micro-batch counts of this kind that divide the batch and that the schedule accepts."""
    low, high = {"one": (1, 1), "few": (2, 4), "many": (5, 24)}[kind]
    least = SCHEDULES[schedule].min_micro_batches(pp) if schedule else 1
    return [n for n in range(max(low, least), high + 1) if 24 // dp % n == 0]


def stages(row):
    """Return the number of pipeline stages."""
    return row["pp"] * (SCHEDULES[row["schedule"]].stages_per_rank if "schedule" in row else 1)


def agree(row):
    """Tell whether the values chosen so far are possible together, whatever the degrees are."""
    chosen = row.get
    _, with_experts = FAMILIES[chosen("family", "llama")]
    return not (chosen("dp_mode") and (chosen("zero") or chosen("shard")) or chosen("shard") and not chosen("zero", 1)
                or chosen("experts") == "dense" and (chosen("balance") or chosen("ep", 1) > 1)
                or with_experts is None and (chosen("experts", "dense") != "dense" or chosen("balance") or chosen("ep", 1) > 1)
                or chosen("dtype") == "bfloat16" and chosen("optimizer") == "sgd")


def meshes(row, step):
    """Return the degrees that a row can have. A dimension that the step does not have yet is 1."""
    row = row | {name: ALONE[name] for name in MESH if FACTORS[name][0] > step}
    return [mesh for mesh in MESHES if agree(row) and fits(row, mesh)]


def complete(row, step, draw):
    """Return the row with a value drawn for every factor that applies. Values that it has already stay."""
    row = row | dict(zip(MESH, draw.choice(meshes(row, step))))
    mesh = [row[name] for name in MESH]
    for name in [name for name in factors(step) if name not in row]:
        values = [value for value in FACTORS[name][1] if agree(row | {name: value}) and fits(row | {name: value}, mesh)]
        if values:
            row[name] = draw.choice(values)
    return {name: row[name] for name in factors(step) if name in row}


def layout_of(row, step, draw):
    full = ALONE | row
    dp, tp, cp, pp, schedule = full["dp"], full["tp"], full["cp"], full["pp"], full.get("schedule")
    possible = counts(row["micro_batches"], dp, pp, schedule)
    count = draw.choice(possible) if row["micro_batches"] == "few" else possible[0]
    shard = [n for n in (1, 2) if dp * cp > n] if full.get("shard") == "part" else None
    words = [f"--dtype {row['dtype']} --recompute {row['recompute']} --micro_batch_size {24 // dp // count}"]
    words += [f"--dp_mode {full['dp_mode']}"] if "dp_mode" in full else []
    words += [f"--zero {full['zero']}"] if full["zero"] else []
    words += [f"--zero_shard {draw.choice(shard)}"] if shard else []
    words += [f"--tp {tp} --sp {full['sp']}"] if tp > 1 else []
    words += [f"--cp {cp} --cp_mode {full['cp_mode']}"] if cp > 1 else []
    words += [f"--pp {pp} --schedule {schedule}"] if pp > 1 else []
    words += [f"--ep {full['ep']}"] if full["ep"] > 1 else []
    words += [f"--balance {full['balance']}"] if "balance" in full else []
    number = stages(full)
    shape = f"{full['experts']}-{number + 1}" + f"-{full['family']}" * (full["family"] != "llama")
    return Layout(NAMES[step - 1], dp * tp * cp * pp, shape, row["optimizer"], " ".join(words))


# ------------------------------------------------------------------------------------------- arrays
def covered(row):
    """Return the values, the pairs and the triple that a row covers."""
    triple = [(name, row[name]) for name in TRIPLE if name in row]
    found = [*itertools.combinations(row.items(), 1), *itertools.combinations(row.items(), 2), *itertools.combinations(triple, 3)]
    return {frozenset(values) for values in found if row["dtype"] == "float64" or any(name == "dtype" for name, _ in values)}


def every(step):
    """Return all values of a step's factors, alone and where the step's own dimension is 2; for step 8, all pairs and triples."""
    groups = [*itertools.combinations(factors(step), 2), TRIPLE] if step == 8 else itertools.combinations(factors(step), 1)
    found = {frozenset(zip(names, values)) for names in groups
             for values in itertools.product(*(FACTORS[name][1] for name in names))}
    own = {(name, 2) for name in ("dp", "zero", "tp", "cp", "pp", "ep") if FACTORS[name][0] == step}
    return found | {values | own for values in found if dict(own).keys().isdisjoint(dict(values))}


def wanted(step):
    return {values for values in every(step) if meshes(dict(values), step)}


def cost(row):
    """Estimate how long a run takes: what all ranks compute, in layers and micro-batches, and what starting them costs."""
    full = ALONE | row
    layers = 1 + stages(full)
    passes = {"one": 1, "few": 3, "many": 6}[row["micro_batches"]] * {"none": 2, "full": 3, "selective": 4}[row["recompute"]]
    return full["dp"] * full["tp"] * full["cp"] * (layers * passes + 20)


def array(step, draw):
    """Return rows that cover what the step wants and its named layouts do not. This is greedy: of many drawn rows, take the one
    that covers most for its cost. At the end, drop rows that the others make superfluous."""
    rows, missing = [], wanted(step).difference(*(covered(filled(row, step)) for row in NAMED[step].values()))
    needed = frozenset(missing)
    while missing:
        target = dict(draw.choice(sorted(missing, key=lambda values: sorted(map(str, values)))))
        drawn = [complete({"dtype": "float64"} | target, step, draw) for _ in range(100)]
        rows.append(max(drawn, key=lambda row: len(missing & covered(row)) / cost(row)))
        missing -= covered(rows[-1])
    for row in sorted(rows, key=cost, reverse=True):
        others = [other for other in rows if other is not row]
        if needed <= set().union(*map(covered, others)):
            rows = others
    return rows


def write():
    """Write the table: for each step, the cheapest of eight arrays."""
    lines = []
    for step in NAMED:
        draw = random.Random(step)
        rows = min((array(step, draw) for _ in range(8)), key=lambda rows: sum(map(cost, rows)))
        lines += [f"{NAMES[step - 1]} {layout_of(row, step, draw)}\n" for row in rows]
    TABLE.write_text("".join(lines))


# ------------------------------------------------------------------------------------------- named layouts
USUAL = dict(dtype="float64", optimizer="adamw", recompute="none", micro_batches="few", family="llama", zero=0, shard="all",
             dp_mode="bucket", sp="on", cp_mode="zigzag", schedule="1f1b", experts="dense", balance="bias", dp=1, tp=1, cp=1, pp=1,
             ep=1)
# `make test` runs these: for every dimension of every step, one layout where it is above 1. Planted mistakes name some of them.
QUICK = {2: {"overlap": dict(dp=2, dp_mode="overlap"),
             "buckets": dict(dp=3, dp_mode="bucket --bucket_mb 0.02", recompute="full", family="qk")},
         3: {"zero 1": dict(dp=2, zero=1),
             "zero 2": dict(dp=3, zero=2, recompute="selective"),
             "zero 3": dict(dp=2, zero=3, recompute="full"),
             "hybrid": dict(dp=4, zero=2, shard="part", optimizer="sgd", family="qk")},
         4: {"sp on": dict(tp=2),
             "sp off": dict(tp=2, dp=2, sp="off", zero=1, recompute="full"),
             "QK-norm, sp off": dict(tp=2, sp="off", optimizer="sgd", family="qk")},
         5: {"zigzag": dict(cp=4),
             "ulysses": dict(cp=2, tp=2, cp_mode="ulysses", recompute="selective", family="qk"),
             "allgather": dict(cp=2, dp=2, cp_mode="allgather", zero=3)},
         6: {"1f1b": dict(pp=2, dp=2, zero=2),
             "zerobubble": dict(pp=2, tp=2, schedule="zerobubble", family="qk"),
             "dualpipe": dict(pp=2, cp=2, schedule="dualpipe", recompute="full")},
         7: {"ep": dict(dp=2, ep=2, experts="top2", zero=1),
             "ep and tp": dict(dp=2, ep=4, tp=2, experts="top2", balance="aux", family="qk", zero=2),
             "ep and tp, sp off": dict(ep=2, tp=2, sp="off", experts="top2", recompute="full"),
             "ep and pp": dict(cp=2, ep=2, pp=2, experts="top2", schedule="zerobubble")},
         8: {"experts of two stages": dict(dp=2, ep=2, pp=2, experts="top2", zero=2, schedule="dualpipe"),
             "tp and cp": dict(tp=2, cp=2, zero=3, recompute="full", family="qk")}}
# Others, some of which planted mistakes name. With sgd, the weights at the end show the sums of all gradients.
NAMED = {2: {"naive": dict(dp=2, dp_mode="naive", optimizer="sgd"),
             "gradients": dict(dp=3, dp_mode="bucket", optimizer="sgd")},
         3: {"gradients": dict(dp=4, zero=3, optimizer="sgd", micro_batches="one")},
         4: {"gradients": dict(tp=2, optimizer="sgd"),
             "gradients, sp off": dict(tp=2, sp="off", optimizer="sgd")},
         5: {f"gradients, {mode}": dict(cp=2, dp=2, cp_mode=mode, optimizer="sgd")
             for mode in ("zigzag", "ring", "allgather", "ulysses")},
         6: {f"gradients, {schedule}": dict(pp=2, schedule=schedule, optimizer="sgd") for schedule in SCHEDULES}
            | {"a V on four ranks": dict(pp=4, schedule="dualpipe", micro_batches="many", optimizer="sgd")},
         7: {"gradients, ep": dict(dp=4, ep=2, experts="top2", zero=2, optimizer="sgd"),
             "gradients, ep and tp": dict(dp=2, tp=2, ep=4, experts="top2", optimizer="sgd"),
             "gradients, tp alone": dict(tp=2, sp="off", experts="top2", optimizer="sgd"),
             "four of eight": dict(dp=4, ep=4, experts="top4")},
         8: {}}
NAMED = {step: QUICK[step] | NAMED[step] for step in QUICK}


def filled(row, step):
    """Return a named row, with the usual value for each factor that it does not mention and that the trainer reads. This asks none
    of the rules above, so a wrong rule makes test_layouts.py red and no other file."""
    full = USUAL | row
    read = {"sp": full["tp"] > 1, "cp_mode": full["cp"] > 1, "schedule": full["pp"] > 1, "shard": full["zero"] > 0,
            "dp_mode": full["zero"] == 0 and full["dp"] * full["cp"] > 1, "balance": full["experts"] != "dense"}
    return {name: full[name] for name in factors(step) if read.get(name, True)}


def named(step):
    """Return {name: layout}."""
    return {name: layout_of(filled(row, step), step, random.Random(0)) for name, row in NAMED[step].items()}


def in_table(step):
    lines = (line.split(maxsplit=1) for line in TABLE.read_text().splitlines())
    return [parse(name, line) for name, line in lines if name == NAMES[step - 1]]


def drawn(step, seed, count=100):
    draw = random.Random(f"{seed} {step}")
    return [layout_of(complete({}, step, draw), step, draw) for _ in range(count)]


def every_layout(step):
    """Return the layouts for pytest. `make test` runs the quick ones; `make sweep`, which sets SEED, draws a hundred more."""
    import pytest
    slow, seed = pytest.mark.slow, os.environ.get("SEED")
    return ([pytest.param(layout, id=name, marks=() if name in QUICK[step] else slow) for name, layout in named(step).items()]
            + [pytest.param(layout, id=str(layout), marks=slow) for layout in in_table(step)]
            + [pytest.param(layout, id=str(layout), marks=pytest.mark.sweep) for layout in (drawn(step, seed) if seed else [])])


# ------------------------------------------------------------------------------------------- for the sweeps
def all_of_a_world(world):
    """Return every valid (dp, tp, cp, pp, ep) of a world, as ("dense" or "moe", flags). A fixed seed draws the other flags."""
    found, draw = [], random.Random(world)
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for dp, tp, cp, pp in itertools.product(sizes, repeat=4):
        if dp * tp * cp * pp != world:
            continue
        for ep in [n for n in (1, 2, 4, 8) if dp * cp * tp % n == 0]:
            found += [("moe", f"--dp {dp} --tp {tp} --cp {cp} --pp {pp} --ep {ep} {rest(draw, dp, tp, cp, pp)}")]
        found += [("dense", f"--dp {dp} --tp {tp} --cp {cp} --pp {pp} {rest(draw, dp, tp, cp, pp)}")]
    return found


def rest(draw, dp, tp, cp, pp, stage=None, schedule=None):
    stage = draw.choice([0, 1, 2, 3]) if stage is None else stage
    sizes = [n for n in range(1, dp * cp + 1) if dp * cp % n == 0]
    shard = f"--zero_shard {draw.choice(sizes)}" if stage and draw.random() < 0.3 else ""
    schedule = schedule or draw.choice([name for name, row in SCHEDULES.items() if row.stages_per_rank * pp <= 8])
    least = SCHEDULES[schedule].min_micro_batches(pp)
    micro_batch = draw.choice([n for n in (1, 2, 3, 6, 12, 24) if 24 % dp == 0 and 24 // dp % n == 0 and 24 // dp // n >= least])
    mode = draw.choice(["zigzag", "ring", "allgather"] + ["ulysses"] * (8 // tp % cp == 0))
    fits = cp * tp * 2 <= 16                              # 16 tokens: each cp rank has an early and a late chunk, split over tp
    sp = draw.choice(["on", "off"]) if fits or mode in ("ring", "ulysses") and cp * tp <= 16 else "off"
    return (f"--zero {stage} {shard} --schedule {schedule} --micro_batch_size {micro_batch} --cp_mode {mode} --sp {sp} "
            f"--recompute {draw.choice(['none', 'none', 'selective', 'full'])} "
            f"--dp_mode {draw.choice(['naive', 'overlap', 'bucket'])}")


def main(name, *given):
    if name == "--write":
        return write()
    step = full_name(name)
    if not given:
        number = NAMES.index(step) + 1
        return print(*named(number).values(), *in_table(number), sep="\n")
    from harness import shared_pool
    from observe import check
    lines, failed = [], 0
    for one in given:
        lines += Path(one).read_text().splitlines() if Path(one).is_file() else [one]
    for layout in [parse(step, line) for line in lines if line.strip()]:
        try:
            check(shared_pool(), layout)
            print(f"as one process: {layout}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"NOT as one process: {layout}\n{error}", flush=True)
    return failed and f"{failed} of {len(lines)} layouts failed"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
