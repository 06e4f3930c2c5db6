"""Write the answer to a question as a page for a browser (--html FILE). The page only draws: it holds the whole table, and a report
on each layout in it and on each layout that a knob of the best one leads to.
"""
import json
import os
from pathlib import Path

import costs
import explain
import plan
from speed import KINDS, Times
from trainer import make, simulate
from trainers import ABOUT

HERE = Path(__file__).resolve().parent
SHOWN = 16                                                # the most ranks that the timeline shows
DEGREES = [2**i for i in range(9)]


def write(question, config, path):
    """Write the page about the layout `config`, or about the best one. Links lead to the READMEs, from wherever the page lies."""
    chosen = question.evaluate(config) if config else None                        # what is refused is refused before the search
    search = question.search()
    best = search.best()
    words, shown = [explain.nothing_fits(question)], chosen or (best or [None])[0]
    if best:
        words = [*explain.two_answers(question, search), *explain.wanted(question, best[0])]
        words += [explain.why_not("The second", *best[:2])] if len(best) > 1 else []
    stops = stops_of(question, shown.layout) if shown else {}
    others = [one for of in stops.values() for stop in of if (one := stop.pop("layout")) and one != shown.layout]
    reports = [report(question, one) for one in [*filter(None, [shown]), *best, *(question.timed(l) for l in others)]]
    data = dict(
        heading=list(explain.heading(question)), timed=len(search.ordered), equal=explain.how_many_are_equal(best), words=words,
        best=[row(question, one) for one in best], stops=stops, shown=shown and config_of(shown.layout),
        reports={one["config"]: one for one in reports}, kinds=KINDS, about=ABOUT[question.constants["trainer"]],
        columns=explain.COLUMNS, root=os.path.relpath(HERE.parents[1], Path(path).resolve().parent) + "/")
    text = (HERE / "page.html").read_text(encoding="utf-8")
    Path(path).write_text(text.replace("/*DATA*/null", json.dumps(data).replace("<", "\\u003c")), encoding="utf-8")


def row(question, one):
    l = one.layout
    return dict(config=config_of(l), name=explain.name_of(l), cells=explain.row_of(l), held=one.held,
                step=one.step, tokens_per_s=one.tokens_per_s, interval=explain.interval(question, one),
                known=explain.known_by(question, l), provenance=explain.provenance(question, l))


def config_of(l):
    """Return the layout as --config takes it."""
    names = ["dp", "tp", "cp", "pp", "ep", "zero", *["schedule", "v"] * (l.pp > 1), "mbs", "acc", "recompute"]
    return ",".join(f"{name}={getattr(l, plan.NAMES.get(name, name))}" for name in names)


def report(question, one):
    c, cluster, l = question.c, question.cluster, one.layout
    turns = [{name: value for name, value in turn.items() if name != "layout"}
             for turn in explain.turned(c, one, cluster, question.constants)]
    return explain.as_json(question, one) | row(question, one) | dict(
        ranks=[plan.memory(c, l, question.constants["slack"], rank) for rank in range(l.pp)], whole=cluster.gpu.memory,
        gpus_per_node=cluster.gpus_per_node, mfu=explain.mfus(c, one, cluster), turns=turns, timeline=timeline(question, one),
        sent=[(*what, size) for what, size in costs.sent(c, l).items()])


def timeline(question, one):
    """Return the schedule's events with this layout's F, I and W, for some of its micro-batches and ranks."""
    l = one.layout
    times = Times(question.c, l, question.cluster, question.constants["time"])
    every = -(-l.pp // SHOWN)                             # draw one rank in this many
    m = min(l.accumulation, 3 * l.pp + 2 if every == 1 else 2 * l.pp)
    share = question.c.num_hidden_layers / l.pp / l.stages_per_rank
    F, I, W = (share * seconds for seconds in (times.F, times.I, times.W))
    events = simulate(make(l.schedule, l.pp, m, l.stages_per_rank), F, I, W)
    after = {name: one.seconds.get(name, 0) for name in ("dp", "optimizer")}
    not_drawn = (l.accumulation - m) * (times.F + times.I + times.W) * share * l.stages_per_rank
    drawn = [(rank, action.kind, action.stage // l.pp, action.micro_batch, round(start, 6), round(end, 6))
             for rank, action, start, end in events if rank % every == 0]
    return dict(ranks=l.pp, every=every, shown=m, of=l.accumulation, not_drawn=not_drawn, after=after, events=drawn)


def stops_of(question, l):
    """Return for each knob its values, and the layout that each leads to, or why it is impossible."""
    values = dict(tp=DEGREES[:6], cp=DEGREES, pp=DEGREES[:8], ep=DEGREES[:7], zero=[0, 1, 2, 3],
                  schedule=plan.SCHEDULES, virtual=plan.stages_to_choose(l.schedule), micro_batch=DEGREES[:6],
                  recompute=plan.RECOMPUTE)
    if l.pp == 1 or not plan.SCHEDULES[l.schedule].or_more:
        del values["virtual"]
    if l.pp == 1:
        values["schedule"] = [l.schedule]

    def stop(knob, value):
        changed = plan.changed_to(l, question.cluster.gpus, l.batch, **{knob: value})
        why = changed if isinstance(changed, str) else plan.impossible(question.c, changed, question.constants)
        return dict(value=value, why=why, config="" if why else config_of(changed), layout=None if why else changed)
    return {knob: [stop(knob, value) for value in dict.fromkeys([*of, getattr(l, knob)])] for knob, of in values.items()}
