"""How far an answer can be trusted: whether runs like it were measured, and how far off it may be.

measured      it does what the runs of tests/data do: H100, dense, sequences of 4,096, dp, tp and pp with
              ZeRO-0 or 1 and 1F1B, on up to 32 nodes of 8, models of 1B to 8B, batches of 16 to 4,096
extrapolated  the same, of another size: other models, more nodes, other sequences, other GPUs
physics only  it has something that no run had

The interval is meant to hold for four of five runs.
"""
import math

import costs
from speed import GPUS, NETWORKS

# Errors of predictions by constants that were fitted to other numbers of nodes, as logarithms of measured
# over predicted: the middle four fifths of them, a little widened (tools/bench/fit_plan.py prints these)
MEASURED = {"tp to 8": (-0.08, 0.08), "tp to 8, pp": (-0.14, 0.12), "tp 16 and more": (-0.18, 0.12)}

# By judgement, as logarithms. What one doubling beyond the runs may add
PER_DOUBLING = dict(parameters=0.02, nodes=0.03, sequence=0.03, batch=0.03)
OTHER_GPU = 0.10                                          # another ratio of its peak to its memory and links
OTHER_NETWORK = 0.05
# What each thing that no run had may be off by, seen as a gain or a loss of the whole step
UNMEASURED = dict(
    interleaved=0.10, zerobubble=0.15, dualpipe=0.20, afab=0.05, selective=0.10, full=0.10, zero2=0.10,
    zero3=0.15, cp=0.20, ep=0.30)
EXPERTS = 0.20                                            # of a model: the same for all of its layouts
RUNS = dict(parameters=(1e9, 9e9), nodes=(1, 32), sequence=(4096, 4096), batch=(16, 4096))      # from, to


def unmeasured(c, l):
    """The names of what no run had."""
    return of_layout(l) + ["experts"] * bool(c.num_local_experts)


def of_layout(l):
    found = [l.schedule] * (l.pp > 1 and l.schedule != "1f1b") + [l.recompute] * (l.recompute != "none")
    return found + [f"zero{l.zero}"] * (l.zero > 1) + ["cp"] * (l.cp > 1) + ["ep"] * (l.ep > 1)


def beyond(c, l, cluster):
    """{what: logarithm that it may be off by} of sizes that no run had."""
    batch = l.dp * l.micro_batch * l.accumulation
    sizes = dict(parameters=costs.model_parameters(c), nodes=cluster.nodes, sequence=l.seq_len, batch=batch)
    doublings = {name: max(math.log2(size / RUNS[name][1]), math.log2(RUNS[name][0] / size))
                 for name, size in sizes.items()}
    found = {name: PER_DOUBLING[name] * count for name, count in doublings.items() if count > 0}
    if cluster.gpu != GPUS["h100"]:
        found["GPU"] = OTHER_GPU
    if cluster.nodes > 1 and (cluster.network, cluster.gpus_per_node) != (NETWORKS["infiniband"], 8):
        found["network"] = OTHER_NETWORK
    return found


def provenance(c, l, cluster):
    if unmeasured(c, l):
        return "physics only"
    return "extrapolated" if beyond(c, l, cluster) else "measured"


def kind_of(tp, pp):
    if tp > 8:
        return "tp 16 and more"
    return "tp to 8, pp" if pp > 1 else "tp to 8"


def off_by(c, l, cluster, experts=True):
    """(low, high) as logarithms. Errors of different causes add as squares. experts: with what a model's may
    add, which is no reason to prefer a layout of it to another."""
    causes = [UNMEASURED[name] for name in of_layout(l)] + list(beyond(c, l, cluster).values())
    causes += [EXPERTS] * bool(c.num_local_experts and experts)
    more = sum(x**2 for x in causes)
    return tuple(math.copysign(math.sqrt(x**2 + more), x) for x in MEASURED[kind_of(l.tp, l.pp)])


def interval(c, l, cluster, tokens_per_s):
    return tuple(tokens_per_s * math.exp(x) for x in off_by(c, l, cluster))


def held_back(c, l, cluster, tokens_per_s, known=None):
    """What a layout is ranked by. One that does something that no run did counts with the low end of its
    interval, so that it leads only by more than what it may be off by. known: what was found for others of
    the cluster."""
    names = tuple(of_layout(l))
    if not names:
        return tokens_per_s
    known, kind = {} if known is None else known, (names, kind_of(l.tp, l.pp))
    if kind not in known:
        known[kind] = math.exp(off_by(c, l, cluster, experts=False)[0])
    return tokens_per_s * known[kind]
