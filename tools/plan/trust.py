"""Say how far an answer can be trusted: whether runs like it were measured (the README explains the four words), and
how far off it may be. Four of five runs should lie in the interval; docs/predictions.md says how many do.
"""
import math

import costs
from costs import DEFAULT_SCHEDULE
from speed import NETWORKS, gpus as simulated
from trainer import SCHEDULES

MEANS = {
    "measured": "this trainer was measured doing the same",
    "elsewhere": "other trainers were measured doing the same",
    "extrapolated": "runs like it were measured, but of another size or on other hardware",
    "physics only": "no constant was fitted to runs with {}"}

# Intervals (low, high) for the logarithm of measured over predicted. ALONE is for dp and ZeRO alone in another trainer (six of
# seven fitted runs lie in it), MORE for what else a layout has: tp and pp from the fitted runs, cp low because of torchtitan's
# runs with cp 4 and 8, which are slower than we can explain, the others by judgement.
ALONE = (-0.13, 0.07)
MORE = dict(
    tp=(0.12, 0.12), pp=(0.08, 0.10), selective=(0.05, 0.05), full=(0.03, 0.03),
    cp=(0.30, 0.20), ep=(0.20, 0.20), experts=(0.20, 0.20), float8=(0.12, 0.15), mxfp8=(0.12, 0.15), nvfp4=(0.20, 0.20),
    bfloat16=(0, 0), GPU=(0.25, 0.15),
    network=(0.10, 0.05)) | {"ZeRO-2": (0.10, 0.05)}
SEEN_SCHEDULES = (DEFAULT_SCHEDULE, "interleaved")         # in the runs to which something was fitted
UNSEEN = ("cp", "ep", "experts", "ZeRO-2", *(name for name in SCHEDULES if name not in SEEN_SCHEDULES))      # in none of them
PER_DOUBLING = dict(parameters=0.02, nodes=0.02, sequence=0.03)                    # beyond the sizes that the runs had
RUNS = dict(parameters=(1e9, 4.7e11), nodes=(1, 2048), sequence=(2048, 8192))      # the sizes that they had: from, to

# The layouts and GPUs that count as measured for each trainer, from its runs in tests/data
DID = dict(
    megatron=lambda l, gpu: gpu == "h100" and l.zero == 1 and l.recompute == "none",
    torchtitan=lambda l, gpu: gpu in simulated.TESTED and l.zero == 3 and l.pp == 1)


def of_layout(l):
    found = ["tp"] * (l.tp > 1) + ["pp"] * (l.pp > 1) + [l.schedule] * (l.pp > 1 and l.schedule != DEFAULT_SCHEDULE)
    found += [l.recompute] * (l.recompute != "none") + ["ZeRO-2"] * (l.zero == 2)
    return found + ["cp"] * (l.cp > 1) + ["ep"] * (l.ep > 1)


def of_schedule(row):
    """Return a schedule's interval, like those of MORE, by how difficult the schedule is."""
    if row.v_shaped:
        return 0.15, 0.15
    if row.split_backward:
        return 0.12, 0.12
    return (0.08, 0.08) if row.stages_per_rank > 1 else (0.05, 0.05)


def unmeasured(c, l):
    """Return the names of the layout's and model's features that no run had to which something was fitted."""
    return [name for name in of_layout(l) + ["experts"] * bool(c.num_local_experts) if name in UNSEEN]


def beyond(c, l, cluster):
    """Return {name: (low, high)} for sizes beyond RUNS, untested GPUs, and networks other than 50 GB/s in nodes of eight."""
    sizes = dict(parameters=costs.model_parameters(c), nodes=cluster.nodes, sequence=l.seq_len)
    doublings = {name: max(math.log2(size / RUNS[name][1]), math.log2(RUNS[name][0] / size))
                 for name, size in sizes.items()}
    found = {name: (PER_DOUBLING[name] * count,) * 2 for name, count in doublings.items() if count > 0}
    if name_of(cluster.gpu) not in simulated.TESTED:
        found["GPU"] = MORE["GPU"]
    if cluster.nodes > 1 and (cluster.network, cluster.gpus_per_node) != (NETWORKS["infiniband"], 8):
        found["network"] = MORE["network"]
    return found


def name_of(gpu):
    told_by = lambda one: (one.bfloat16, one.nvlink, one.memory)
    return next((name for name, one in simulated.GPUS.items() if told_by(one) == told_by(gpu)), "")


def provenance(c, l, cluster, trainer="this"):
    if unmeasured(c, l):
        return "physics only"
    if beyond(c, l, cluster):
        return "extrapolated"
    return "measured" if trainer in DID and DID[trainer](l, name_of(cluster.gpu)) else "elsewhere"


def off_by(c, l, cluster, experts=True, precision="bfloat16"):
    """Return how far off a prediction may be, (low, high) as logarithms. Errors of different causes add as squares.

    With experts, include the error that a model's experts add. All its layouts have that error, so it must not rank them.
    """
    names = of_layout(l) + [precision] + ["experts"] * bool(c.num_local_experts and experts)
    more = MORE | {l.schedule: of_schedule(SCHEDULES[l.schedule])}
    causes = [ALONE, *(more[name] for name in names), *beyond(c, l, cluster).values()]
    low, high = (math.hypot(*side) for side in zip(*causes))
    return -low, high


def interval(c, l, cluster, tokens_per_s, precision="bfloat16"):
    return tuple(tokens_per_s * math.exp(x) for x in off_by(c, l, cluster, precision=precision))


def held_back(c, l, cluster, tokens_per_s, known=None):
    """Return the speed by which a layout is ranked: the low end of its interval.

    known caches the factors of layouts with the same features.
    """
    names, known = tuple(of_layout(l)), {} if known is None else known
    if names not in known:
        known[names] = math.exp(off_by(c, l, cluster, experts=False)[0])
    return tokens_per_s * known[names]
