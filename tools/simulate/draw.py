"""--trace and --plot: what was played, for Perfetto and as a picture."""
import json

from simulate.memory import timeline

COLOURS = {"F": "#9ec5e8", "B": "#3f76ad", "I": "#3f76ad", "W": "#6aa56e", "wait": "#d9534f", "other": "#a9a9a9"}
MEANING = {"F": "forward", "B": "backward (I: of inputs)", "W": "backward, of weights", "other": "optimizer and the rest",
           "wait": "waiting"}
DIMENSIONS = ["#c9a227", "#8064a2", "#e08e45", "#4f9d9d", "#b05c8a", "#7a7a3a"]
ROWS, POINTS = 8, 1600


def trace(result, path):
    """Processes are ranks, threads are streams, and memory is a counter."""
    events, threads = [], {}
    for rank in result.recordings:
        events.append(dict(ph="M", name="process_name", pid=rank, args=dict(name=f"rank {rank}: {label(result, rank)}")))
        for when, size in held(result, rank):
            events.append(dict(ph="C", name="memory", pid=rank, ts=when * 1e6, args=dict(GiB=size / 2**30)))
    for one in result.played.events:
        thread = threads.setdefault((one.rank, one.stream), len(threads))
        events.append(dict(ph="X", name=one.name, pid=one.rank, tid=thread, ts=one.start * 1e6, dur=(one.end - one.start) * 1e6,
                           args=dict(at=one.about)))
    for (rank, stream), thread in threads.items():
        events.append(dict(ph="M", name="thread_name", pid=rank, tid=thread, args=dict(name=stream)))
    path.write_text(json.dumps(dict(traceEvents=events, displayTimeUnit="ms")))


def label(result, rank):
    return ", ".join(f"{name} {place}" for name, (place, size) in result.recordings[rank].mesh.items() if size > 1) or "alone"


def held(result, rank):
    """(when, bytes), where they change."""
    seen, times = result.recordings[rank], [0.0, *result.played.times[rank]]
    return [(times[min(when, len(times) - 1)], sum(kinds)) for when, *kinds in timeline(seen.events, seen.kinds)]


def plot(result, path, gpu):
    """A row for each rank that was played: kernels and waits, the links, and below them the memory."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    ranks = [*result.recordings]
    ranks = ranks[::-(-len(ranks) // ROWS)]
    whole = result.played.seconds
    unit, scale = ("ms", 1e3) if whole < 1 else ("s", 1)
    dimensions = sorted({one.stream for one in result.played.events} - {"compute", "actions"})
    colours = dict(zip(dimensions, DIMENSIONS * 2))
    figure = Figure(figsize=(12, 1.2 + 1.5 * len(ranks)), layout="constrained")
    rows = figure.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0]
    most = max(size for rank in ranks for _, size in held(result, rank)) / 2**30
    for axes, rank in zip(rows, ranks):
        mine = [one for one in result.played.events if one.rank == rank]
        for colour, spans in by_colour([one for one in mine if one.stream == "compute"], whole).items():
            axes.broken_barh([(start * scale, (end - start) * scale) for start, end in spans], (2.05, 0.9), color=colour, lw=0)
        for one in mine:
            if one.stream == "actions" and one.end - one.start > whole / 70:
                axes.text((one.start + one.end) / 2 * scale, 2.5, one.name.split()[0], ha="center", va="center", fontsize=6)
                axes.axvline(one.start * scale, 0.69, 0.98, color="white", lw=0.5)
        for i, dimension in enumerate(dimensions):
            spans = merged([(one.start, one.end) for one in mine if one.stream == dimension], whole)
            height = 0.9 / len(dimensions)
            axes.broken_barh([(start * scale, (end - start) * scale) for start, end in spans],
                             (1.05 + i * height, height * 0.9), color=colours[dimension], lw=0)
        when, sizes = zip(*held(result, rank))
        axes.fill_between([w * scale for w in when], [size / 2**30 / most * 0.9 for size in sizes], step="post", color="#d8d8d8")
        peak = max(range(len(sizes)), key=sizes.__getitem__)
        axes.annotate(f"{sizes[peak] / 2**30:.1f} GiB", (when[peak] * scale, 0.9 * sizes[peak] / 2**30 / most), fontsize=7,
                      xytext=(2, -8), textcoords="offset points")
        axes.set(xlim=(0, whole * scale), ylim=(0, 3), yticks=[0.45, 1.5, 2.5], yticklabels=["memory", "links", "computes"])
        axes.set_title(f"rank {rank}: {label(result, rank)}", loc="left", fontsize=8)
        axes.tick_params(labelsize=7, left=False)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel(f"{unit}, simulated", fontsize=8)
    handles = [Patch(color=COLOURS[kind], label=meaning) for kind, meaning in MEANING.items()]
    handles += [Patch(color=colours[dimension], label=f"{dimension} on a link") for dimension in dimensions]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(f"{result.args.model} on {result.count:,} {gpu}: {whole * scale:,.4g} {unit} a step, MFU {result.mfu:.1%}",
                    fontsize=10)
    figure.savefig(path, dpi=130)


def by_colour(events, whole):
    spans = {}
    for one in events:
        kind = "wait" if one.name.startswith("wait for") else one.action[:1] if one.action else "other"
        spans.setdefault(COLOURS.get(kind, COLOURS["other"]), []).append((one.start, one.end))
    return {colour: merged(found, whole) for colour, found in spans.items()}


def merged(spans, whole):
    """As the picture shows them: gaps of less than a point are closed."""
    found = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] < whole / POINTS:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found
