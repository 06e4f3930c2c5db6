"""Explain a layout in words: what each knob does, why the second is not first, how to run it."""
import math
import shlex

import costs
import plan
import trust
from costs import DEFAULT_SCHEDULE
from plan import MEMORY_ERROR, RECOMPUTE, evaluate, fits, limit
from speed import KINDS, Cluster, Times, span
from trainer import SCHEDULES, make, simulate
from trainers import ABOUT

COLUMNS = ("dp", "tp", "cp", "pp", "ep", "zero", "schedule", "mbs", "acc", "batch", "recompute")
KNOBS = ("tp", "cp", "pp", "ep", "zero", "schedule", "v", "mbs", "recompute")       # of the page; dp is what is left
BUILTIN = 460_000                                         # tokens: the trainer's builtin text has at least this many
EQUAL = 0.03                                              # layouts closer than this are not told apart
SLURM_HOST = '"$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500"'


def schedule_of(l):
    if l.pp == 1:
        return "-"
    return f"{l.schedule} {l.virtual}" if SCHEDULES[l.schedule].or_more else l.schedule


def row_of(l):
    cells = {name: getattr(l, plan.NAMES.get(name, name)) for name in COLUMNS}
    return [*(cells | dict(schedule=schedule_of(l))).values()]


def table(question, candidates):
    def cells(values):
        widths = dict(schedule=14, recompute=10)
        return "".join(f" {value:>{widths.get(name, 5)}}" for name, value in zip(COLUMNS, values))
    yield cells(COLUMNS) + f"{'GiB':>7}{'step, s':>9}{'tokens/s/GPU':>14}{'four of five':>17}  known by"
    for one in candidates:
        between = "{:,.0f} to {:,.0f}".format(*interval(question, one))
        numbers = f"{one.held:>7.1f} {one.step:>8.2f} {one.tokens_per_s:>13,.0f} {between:>16}"
        yield cells(row_of(one.layout)) + numbers + f"  {provenance(question, one.layout)}"


def provenance(question, l):
    return trust.provenance(question.c, l, question.cluster, question.constants["trainer"])


def interval(question, one):
    return trust.interval(question.c, one.layout, question.cluster, one.tokens_per_s, question.constants["precision"])


def name_of(l):
    cut = [f"{name} {getattr(l, name)}" for name in ("dp", "tp", "cp", "pp", "ep") if getattr(l, name) > 1]
    cut += [f"ZeRO-{l.zero}"] * (l.zero > 0) + [schedule_of(l)] * (l.pp > 1)
    cut += [f"recompute {l.recompute}"] * (l.recompute != "none")
    return ", ".join([*cut, f"{l.micro_batch} x {l.accumulation}"])


def mfus(c, one, cluster):
    """Return the MFU in each convention. metrics.py, and so the trainer's log, uses the first."""
    found = {}
    for causal, attention in enumerate(("all of attention", "causal half")):
        for left_out, ends in enumerate(("embedding counted", "embedding not counted")):
            flops = costs.flops_per_token(c, one.layout.seq_len, causal, not left_out)
            found[f"{attention}, {ends}"] = one.tokens_per_s * flops / cluster.gpu.bfloat16
    return found


def known_by(question, l):
    unseen = ", ".join(trust.unmeasured(question.c, l))
    return trust.MEANS[provenance(question, l)].format(unseen)


def two_answers(question, search):
    """Yield lines about the fastest layout by estimate, the safest, and what to measure before trusting the fastest."""
    dense = question.c._replace(num_local_experts=0)      # experts do not tell layouts of one model apart
    fastest, safest = search.fastest(), search.first(lambda l: not trust.unmeasured(dense, l))
    same = fastest is safest
    for what, one in (("fastest by estimate" + ", and safest" * same, fastest), ("safest", None if same else safest)):
        if one:
            low, high = interval(question, one)
            yield (f"{what}: {name_of(one.layout)}: {one.tokens_per_s:,.0f} tokens/s/GPU "
                   f"({low:,.0f} to {high:,.0f}), {one.held:.1f} GiB; {known_by(question, one.layout)}")
    if safest and not same:
        gain, known = fastest.tokens_per_s / safest.tokens_per_s - 1, trust.of_layout(safest.layout)
        new = [name for name in trust.of_layout(fastest.layout) if name not in known]
        yield (f"The fastest is {gain:.1%} faster, but what is new in it is {', '.join(new) or 'its degrees'}. Before you "
               "trust that, measure a few steps of both, on as many nodes as one replica needs.")


def how_many_are_equal(best):
    """Say how many of the first layouts are equal: the low ends of their intervals are within 3%."""
    equal = sum(one.held_back >= (1 - EQUAL) * best[0].held_back for one in best)
    return f"; the first {equal} are equal, within {EQUAL:.0%}" if equal > 1 else ""


def wanted(question, one):
    """Yield a line about the days, GPU-hours and dollars for the tokens."""
    tokens, price = question.training
    if tokens:
        hours = tokens / one.tokens_per_s / 3600
        yield (f"{tokens:.3g} tokens: {hours / question.cluster.gpus / 24:,.1f} days, {hours:,.0f} GPU-hours"
               + f", ${hours * price:,.0f} at ${price:g} a GPU-hour" * bool(price))


def search_in_words(question, search, best):
    """Yield lines about what a search found; best are its best layouts."""
    if not best:
        yield nothing_fits(question)
        return
    yield from two_answers(question, search)
    yield from wanted(question, best[0])
    if len(best) > 1:
        yield why_not("The second", best[0], best[1])


def nothing_fits(question):
    """Say how much memory is missing, which layout comes nearest, and how many GPUs would be enough."""
    found = plan.nearest(question.c, question.cluster, question.seq_len, question.constants)
    if found is None:
        return "no layout fits: none uses exactly this many GPUs"
    held, l = found
    if fits(held, question.cluster):
        return f"no layout both fits and reaches the batch; {name_of(l)} fits, but with another batch"
    return (f"no layout fits: the nearest, {name_of(l)}, needs {held:.1f} GiB, and {limit(question.cluster):.1f} can be used; "
            f"{fewest(question)}")


def fewest(question):
    """Say how many GPUs would be enough."""
    count = plan.fewest_gpus(question.c, question.cluster, question.seq_len, question.constants)
    if count == math.inf:
        return "no power of two up to 65,536 GPUs is enough for this model"
    return f"this model needs at least {count:,} GPU{'s' * (count > 1)}, counting in powers of two"


def why_not(what, best, second):
    """Say in one sentence, made from the numbers, why the second layout is not first."""
    more = {name: second.seconds.get(name, 0) - best.seconds.get(name, 0) for name in KINDS}
    named = sorted(more.items(), key=lambda item: -abs(item[1]))[:3]
    named.append(("all else", sum(more.values()) - sum(s for _, s in named)))
    said = ", ".join(f"{name} {s:+.2f} s" for name, s in named if abs(s) >= 0.005)
    gain = second.tokens_per_s / best.tokens_per_s - 1
    if abs(gain) < 0.0005:
        return f"{what}, {name_of(second.layout)}, is just as fast, but the first is simpler or closer to runs that were measured."
    if gain <= 0:
        return f"{what}, {name_of(second.layout)}, is {-gain:.1%} slower: {said or 'many small differences'}."
    first, other = (1 - one.held_back / one.tokens_per_s for one in (best, second))
    has = ", ".join(trust.of_layout(second.layout)) or "its size"
    return (f"{what}, {name_of(second.layout)}, should be {gain:.1%} faster ({said}), but with {has} it may "
            f"be {other:.0%} slower than that, and the first only {first:.0%}. Layouts are ranked by these lower speeds.")


def notches(c, l):
    """Yield (knob, new value, layout or why there is none) for each knob turned one notch either way.

    What tp, cp and pp gain, dp loses. Only dp changes the number of GPUs.
    """
    def turn(gpus=l.gpus, **changed):
        return plan.changed_to(l, gpus, l.batch, **changed)

    def to(name, values):
        return [(name, str(value), turn(**{plan.NAMES.get(name, name): value})) for value in values]

    def either_way(name):
        size = getattr(l, plan.NAMES.get(name, name))
        return to(name, [2 * size, size // 2] if size > 1 else [2])
    for dp in [2 * l.dp] + [l.dp // 2] * (l.dp % 2 == 0):
        gpus = l.gpus // l.dp * dp
        yield "dp", f"{dp}, with {gpus:,} GPUs", turn(gpus)
    for name in ["tp", "cp", "pp"] + ["ep"] * bool(c.num_local_experts):
        yield from either_way(name)
    yield from to("zero", [zero for zero in (l.zero + 1, l.zero - 1) if 0 <= zero <= 3])
    if l.pp > 1:
        for schedule in sorted(SCHEDULES, key=lambda name: name != DEFAULT_SCHEDULE):
            v = l.stages_per_rank if schedule == l.schedule else 2
            for virtual in (max(2, v // 2), 2 * v) if SCHEDULES[schedule].or_more else [2]:
                other = l._replace(schedule=schedule, virtual=virtual)
                if (schedule, other.stages_per_rank) != (l.schedule, l.stages_per_rank):
                    yield "schedule", schedule_of(other), other
    yield from either_way("mbs")
    yield from to("recompute", [mode for mode in RECOMPUTE if mode != l.recompute])


def turned(c, best, cluster, constants):
    """Yield for one notch of each knob what it does, or why it is impossible."""
    for knob, to, l in notches(c, best.layout):
        said = dict(knob=knob, to=to, layout=l)
        why = l if isinstance(l, str) else plan.impossible(c, l, constants)
        if why:
            yield dict(said, why=why)
            continue
        one = evaluate(c, l, cluster._replace(gpus=l.gpus), constants)
        yield dict(said, held=one.held, step=one.step, tokens_per_s=one.tokens_per_s,
                   fits=fits(one.held, cluster), more=one.held - best.held,
                   faster=one.tokens_per_s / best.tokens_per_s - 1)


def knobs(c, best, cluster, constants):
    yield f"{'one notch':<26}{'GiB':>8}{'change':>9}{'step, s':>9}{'tokens/s/GPU':>14}{'change':>8}"
    for turn in turned(c, best, cluster, constants):
        name = f"{turn['knob']} {turn['to']}"
        if "why" in turn:
            yield f"{name:<26}  impossible: {turn['why']}"
        else:
            memory = f"{turn['held']:>8.1f}{turn['more']:>+9.1f}"
            speed = f"{turn['step']:>9.2f}{turn['tokens_per_s']:>14,.0f}{turn['faster']:>+8.1%}"
            yield f"{name:<26}{memory}{speed}{'' if turn['fits'] else '  does not fit'}"


def heading(question, what="all layouts have the same batch", batch=None):
    batch, seq_len = batch or question.batch, question.seq_len
    billions = costs.model_parameters(question.c) / 1e9
    yield (f"{question.model}, {billions:.2f}B parameters, on {question.cluster.gpus:,} x {question.gpu}; "
           f"{fewest(question)}")
    yield from question.c.notes
    if question.c.num_local_experts:
        balance = question.constants["layout"]["balance"]
        each = f"the busiest rank's experts are assumed to get {balance:g} times the mean number of tokens" if balance > 1 else (
            "every expert is assumed to get the same number of tokens")
        yield f"{each}; trainers that launch small experts singly are far slower"
    yield (f"{what}: {batch:,} sequences of {seq_len:,} = {batch * seq_len:,} tokens; you "
           f"asked for {question.sequences * seq_len:,.0f}")


def one_in_brief(question, one):
    """Yield the lines that describe one layout: what it holds, how fast it is, where its time goes."""
    c, constants, l = question.c, question.constants, one.layout
    yield name_of(l)
    kinds, (low, high) = ", ".join(f"{kind} {size:.1f}" for kind, size in one.memory.items()), interval(question, one)
    verdict = "fits" if fits(one.held, question.cluster) else "DOES NOT FIT"
    yield (f"the fullest GPU holds {one.held:.1f} of the {limit(question.cluster):.1f} GiB that can be used, and "
           f"{MEMORY_ERROR:.0%} must stay free: {verdict} ({kinds})")
    (counted, mfu), *_ = mfus(c, one, question.cluster).items()
    yield (f"{one.tokens_per_s:,.0f} tokens/s/GPU with {ABOUT[constants['trainer']]}, MFU {mfu:.1%} ({counted}); four runs of five "
           f"should reach {low:,.0f} to {high:,.0f}: {known_by(question, l)}")
    most = sorted(one.seconds.items(), key=lambda item: -item[1])
    yield f"a step of {one.step:.2f} s: " + ", ".join(f"{name} {s / one.step:.0%}" for name, s in most if s >= 0.01 * one.step)
    yield from wanted(question, one)


def one_in_detail(question, one):
    """Yield what --details adds about one layout."""
    sent = "  ".join(f"{dim} {kind} {size / 1e9:.2f}" for (dim, kind), size in costs.sent(question.c, one.layout).items())
    yield f"payload of the first GPU's messages in a step, GB: {sent or 'nothing'}"
    yield "MFU " + "; ".join(f"{mfu:.1%} ({name})" for name, mfu in mfus(question.c, one, question.cluster).items())
    yield from ["", f"a step of {one.step:.2f} s, as the average GPU spends it"]
    yield from (f"{name:>12}{s:>9.3f} s{s / one.step:>7.1%}  {KINDS[name]}"
                for name, s in one.seconds.items() if s >= 0.0005 * one.step)
    yield from ["", *knobs(question.c, one, question.cluster, question.constants)]


def commands(question, one):
    """Return the commands that train with a layout, and that simulate it."""
    c, l, trainer = question.c, one.layout, question.constants["trainer"]
    why = c.untrained or "the builtin text is shorter than a sequence; add --dataset" * (l.seq_len > BUILTIN)
    not_it = [f"# this trainer's command, whose speed is not that of {ABOUT[trainer]}"] * (trainer != "this")
    bfloat16 = question.constants["precision"] == "bfloat16"
    not_it += ["# this trainer multiplies in bfloat16: an extension of step 4 has float8"] * (not bfloat16)
    return [*[f"# the trainer refuses this: {why}"] * bool(why), *not_it,
            "# " * bool(why) + command(question.model, l, question.cluster),
            "# " * bool(c.untrained) + dry_run(c, question.model, l, hardware(question))]


# ---------------------------------------------------------------------- to draw it
WIRE = dict(all_reduce=2, all_gather=1, reduce_scatter=1, all_to_all=1)      # of a payload, how many (n - 1)/n go over the link


def transfers(question, one):
    """Return for each dimension what the first GPU sends in a step, to whom and over which link; how long the link needs for
    that; and for how long the step waits for it."""
    l, cluster, found = one.layout, question.cluster, {}
    held = (l.dp * l.cp, l.tp) if l.dp * l.cp > 1 else (l.expert_ranks, l.ep)             # by experts alone
    rings = dict(dp=held, tp=(l.tp, 1), cp=(l.cp, l.tp), pp=(2, l.dp * l.cp * l.tp), ep=(l.ep, 1))
    for (dimension, what), payload in costs.sent(question.c, l).items():
        dimension = "tp" if dimension == "kv_heads" else dimension
        ranks, stride = rings[dimension]
        if ranks == 1:
            continue
        neighbours, nodes = span(cluster, ranks, stride)
        wire = payload * WIRE[what] * (ranks - 1) / ranks if what in WIRE else payload
        _, seconds, link = cluster.hardware(question.constants["time"]).travel(what, wire, ranks, math.ceil(nodes), neighbours)
        row = found.setdefault(dimension, dict(ranks=l.pp if dimension == "pp" else ranks, stride=stride, link=link, bytes=0,
                                               alone=0.0, waits=one.seconds.get(dimension, 0.0)))
        row["bytes"] += payload
        row["alone"] += seconds
    return {dimension: row | dict(hidden=max(0.0, 1 - row["waits"] / row["alone"])) for dimension, row in found.items()}


def timeline(question, one, most_ranks=16):
    """Return the schedule's events with this layout's F, I and W, for some of its micro-batches and ranks."""
    l = one.layout
    times = Times(question.c, l, question.cluster, question.constants["time"])
    every = -(-l.pp // most_ranks)                        # draw one rank in this many
    m = min(l.accumulation, 3 * l.pp + 2 if every == 1 else 2 * l.pp)
    share = question.c.num_hidden_layers / l.pp / l.stages_per_rank
    F, I, W = (share * seconds for seconds in (times.F, times.I, times.W))
    events = simulate(make(l.schedule, l.pp, m, l.stages_per_rank), F, I, W)
    not_drawn = (l.accumulation - m) * (times.F + times.I + times.W) * share * l.stages_per_rank
    drawn = [(rank, action.kind, action.stage // l.pp, action.micro_batch, start, end)
             for rank, action, start, end in events if rank % every == 0]
    return dict(every=every, shown=m, not_drawn=not_drawn, events=drawn)


# ---------------------------------------------------------------------- to run it
def train_flags(model, l, steps=1000, lr=3e-4):
    flags = ["--model", model, "--seq_len", l.seq_len, "--global_batch_size", l.batch,
             "--micro_batch_size", l.micro_batch, "--steps", steps, "--lr", lr]
    for name in ("dp", "tp", "cp", "pp", "ep", "zero", "schedule", "recompute"):
        if getattr(l, name) != costs.Layout._field_defaults[name]:
            flags += [f"--{name}", getattr(l, name)]
    if SCHEDULES[l.schedule].or_more and l.pp > 1:
        flags += ["--stages_per_rank", l.virtual]
    flags += ["--compile"] * (l.wide == 3)                # a compiled MLP saves three tensors
    return shlex.join(map(str, flags))


def command(model, l, cluster):
    if cluster.nodes == 1:
        train = f"step08_5d/train.py {train_flags(model, l)}"
        return f"torchrun --standalone --nproc_per_node {cluster.gpus} {train}"
    each = cluster.gpus_per_node                          # the rendezvous is on the job's first node
    job = (f"srun torchrun --nnodes {cluster.nodes} --nproc_per_node {each} --rdzv_backend c10d --rdzv_id $SLURM_JOB_ID "
           f"--rdzv_endpoint {SLURM_HOST} step08_5d/train.py {train_flags(model, l)}")
    return f"sbatch --nodes {cluster.nodes} --ntasks-per-node 1 --gpus-per-node {each} --wrap {shlex.quote(job)}"


def hardware(question):
    """Return the tools/simulate flags that describe the cluster, where they differ from the usual ones."""
    flags, cluster = f"--gpu {question.gpu} " * (question.gpu != "h100"), question.cluster
    flags += f"--gpus_per_node {cluster.gpus_per_node} " * (cluster.gpus_per_node != cluster.gpu.node)
    return flags + f"--network {cluster.network / 1e9:g} " * (cluster.network != Cluster(1).network)


def dry_run(c, model, l, more=""):
    """Return the command of a dry run of the rank that needs most: in its stage, the last of cp, which keeps the most in a ring."""
    rank = plan.fullest(c, l) * (l.gpus // l.pp) + (l.cp - 1) * l.tp
    return f"python tools/simulate 8 {l.gpus} --rank {rank} {more}{train_flags(model, l)}"


def as_json(question, one):
    c, cluster, l = question.c, question.cluster, one.layout
    low, high = interval(question, one)
    found = mfus(c, one, cluster)
    return dict(
        model=question.model, notes=c.notes, gpus=cluster.gpus, fits=fits(one.held, cluster),
        memory_gib=round(one.held, 2), limit_gib=limit(cluster),
        tokens_per_s_per_gpu=round(one.tokens_per_s, 1), step_s=one.step,
        mfu=next(iter(found.values())), mfu_by_convention=found,
        provenance=provenance(question, l), unmeasured=trust.unmeasured(c, l),
        interval=[round(low, 1), round(high, 1)], ranked_by=round(one.held_back, 1), **l._asdict(),
        stages_per_rank=l.stages_per_rank, global_batch_size=l.batch, memory=one.memory, seconds=one.seconds,
        transfers=transfers(question, one),
        command=command(question.model, l, cluster),
        dry_run=dry_run(c, question.model, l, hardware(question)))
