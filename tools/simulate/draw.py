"""Show what was played: as a trace for Perfetto (--trace) and as a picture (--plot)."""
import json

from watch import timeline

COLOURS = {
    "F": ("#4878a8", "forward"), "B": ("#d9a441", "backward (I: of inputs)"), "W": ("#6aa56e", "backward, of weights"),
    "other": ("#a9a9a9", "optimizer and the rest"), "wait": ("#d9534f", "waiting")}
DIMENSIONS = ["#8064a2", "#4f9d9d", "#b05c8a", "#7a7a3a", "#5b3a29", "#1f1f1f"]
ROWS, POINTS = 8, 1600


def trace(result, path):
    """Write a trace for Perfetto, in which processes are ranks, threads are streams, and memory is a counter."""
    events, threads = [], {}
    for rank in result.recordings:
        events.append(dict(ph="M", name="process_name", pid=rank, args=dict(name=f"rank {rank}: {label(result, rank)}")))
        events += [dict(ph="C", name="memory", pid=rank, ts=when * 1e6, args=dict(GiB=n / 2**30)) for when, n in held(result, rank)]
    for one in result.played.events:
        thread = threads.setdefault((one.rank, one.stream), len(threads))
        start, end = round(one.start * 1e9), round(one.end * 1e9)                  # Perfetto drops events that overlap by rounding
        events.append(dict(ph="X", name=one.name, pid=one.rank, tid=thread, ts=start / 1e3, dur=(end - start) / 1e3,
                           args=dict(at=one.about)))
    for (rank, stream), thread in threads.items():
        events.append(dict(ph="M", name="thread_name", pid=rank, tid=thread, args=dict(name=stream)))
    path.write_text(json.dumps(dict(traceEvents=events, displayTimeUnit="ms")))


def label(result, rank):
    return ", ".join(f"{name} {place}" for name, (place, size) in result.recordings[rank].mesh.items() if size > 1) or "alone"


def held(result, rank):
    seen, times = result.recordings[rank], [0.0, *result.played.times[rank]]
    return [(times[min(when, len(times) - 1)], sum(kinds)) for when, *kinds in timeline(seen.events, seen.kinds)]


def plot(result, path, gpu):
    """Draw a row for each of up to eight recorded ranks: kernels and waits, the links, and below them the memory."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    ranks = [*result.recordings][::-(-len(result.recordings) // ROWS)]
    whole = result.played.seconds
    dimensions = sorted({one.stream for one in result.played.events} - {"compute", "actions"})
    colours = dict(zip(dimensions, DIMENSIONS * 2))
    figure = Figure(figsize=(12, 1.2 + 1.5 * len(ranks)), layout="constrained")
    rows = figure.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0]
    most = max(size for rank in ranks for _, size in held(result, rank))
    kind_of = lambda one: "wait" if one.name.startswith("wait for") else one.action[:1].replace("I", "B") or "other"
    for axes, rank in zip(rows, ranks):
        mine = [one for one in result.played.events if one.rank == rank]
        for kind, (colour, _) in COLOURS.items():
            bars(axes, [one for one in mine if one.stream == "compute" and kind_of(one) == kind], 2.05, 0.9, colour, whole)
        for one in mine:
            if one.stream == "actions" and one.end - one.start > whole / 70:
                axes.text((one.start + one.end) / 2, 2.5, one.name.split()[0], ha="center", va="center", fontsize=6)
        height = 0.9 / max(1, len(dimensions))
        for i, dimension in enumerate(dimensions):
            of_it = [one for one in mine if one.stream == dimension]
            bars(axes, of_it, 1.05 + i * height, height * 0.9, colours[dimension], whole, least=0.7)
        when, sizes = zip(*held(result, rank))
        axes.fill_between(when, [0.9 * size / most for size in sizes], step="post", color="#d8d8d8")
        peak = max(range(len(sizes)), key=sizes.__getitem__)
        axes.annotate(f"{sizes[peak] / 2**30:.1f} GiB", (when[peak], 0.9 * sizes[peak] / most), (2, -8), fontsize=7,
                      textcoords="offset points")
        axes.set(xlim=(0, whole), ylim=(0, 3), yticks=[0.45, 1.5, 2.5], yticklabels=["memory", "links", "computes"])
        axes.set_title(f"rank {rank}: {label(result, rank)}", loc="left", fontsize=8)
    rows[-1].set_xlabel("s, simulated", fontsize=8)
    handles = [Patch(color=colour, label=meaning) for colour, meaning in COLOURS.values()]
    handles += [Patch(color=colours[dimension], label=f"{dimension} on a link") for dimension in dimensions]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(f"{result.args.model} on {result.count:,} {gpu}: {whole:,.4g} s a step, MFU {result.mfu:.1%}", fontsize=10)
    figure.savefig(path, dpi=130)


def bars(axes, events, bottom, height, colour, whole, least=0):
    """Draw the events as bars. Close gaps narrower than a point, since there are so many; least keeps short messages visible."""
    spans = []
    for one in sorted(events, key=lambda one: one.start):
        if spans and one.start - spans[-1][1] < whole / POINTS:
            spans[-1][1] = max(spans[-1][1], one.end)
        else:
            spans.append([one.start, one.end])
    axes.broken_barh([(start, end - start) for start, end in spans], (bottom, height), color=colour, lw=least)
