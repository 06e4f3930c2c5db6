"""Show a pipeline schedule: its timeline, how long the ranks idle, how many micro-batches they keep, and a picture.

    python tools/schedule.py --schedule 1f1b --pp 4 --micro_batches 8
    python tools/schedule.py --page schedules.html       # a page on which you change all of it

`as_it_runs` records what a step's Pipeline really does, as events that can be shown in the same ways.
"""
import argparse
import sys
import time
from pathlib import Path

from refuse import refuse

ROOT = Path(__file__).resolve().parents[1]


def text(events):
    """Return the timeline: a row per rank, five columns per unit of time; ' marks a rank's second stage, '' its third."""
    local = local_stages(events)
    rows = {rank: "" for rank in sorted(local)}
    for event in events:
        label = f"{event.action}{chr(39) * local[event.rank].index(event.action.stage)}"
        row, width = rows[event.rank].ljust(round(5 * event.start)), round(5 * (event.end - event.start))
        rows[event.rank] = row + label.ljust(width)
    return "\n".join(f"rank {rank} | {row.rstrip()}" for rank, row in rows.items())


def local_stages(events):
    stages = {}
    for event in events:
        stages.setdefault(event.rank, set()).add(event.action.stage)
    return {rank: sorted(of_rank) for rank, of_rank in stages.items()}


def draw(events, path, title):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    colours = {"F": "#4878a8", "B": "#d9a441", "I": "#d9a441", "W": "#6aa56e"}
    local, ranks = local_stages(events), 1 + max(event.rank for event in events)
    start, end = min(event.start for event in events), max(event.end for event in events)
    figure, axes = plt.subplots(figsize=(14, 0.8 + 0.45 * ranks))
    for rank, action, begin, finish in events:
        nth = local[rank].index(action.stage)
        alpha = 1 - 0.35 * nth / max(1, len(local[rank]) - 1)
        axes.barh(rank, finish - begin, left=begin - start, height=0.9, color=colours[action.kind],
                  alpha=alpha, edgecolor="white", linewidth=0.6)
        if (finish - begin) / (end - start) > 0.012:      # wide enough for a number
            axes.text((begin + finish) / 2 - start, rank, action.micro_batch, ha="center", va="center",
                      fontsize=7, color="white" if nth == 0 else "black")
    labels = [f"rank {rank}" for rank in range(ranks)]
    axes.set(yticks=range(ranks), yticklabels=labels, xlim=(0, end - start), title=title)
    axes.invert_yaxis()
    patches = [plt.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in "FBW"]
    meanings = ["F forward", "B or I backward, of the input", "W of the weights"]
    axes.legend(patches, meanings, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=130, bbox_inches="tight", format=Path(path).suffix[1:])
    plt.close(figure)


def as_it_runs(pipeline):
    """Return a list to which this Pipeline adds an event after each action. An event starts when the awaited message
    has arrived, and ends when the action is done (on CUDA: when the host has launched it)."""
    from schedules import Event
    events, compute, wait_for, rank = [], pipeline.compute, pipeline.wait_for, pipeline.group.rank()
    start = 0.0

    def waited(message):
        nonlocal start
        tensor = wait_for(message)
        start = time.perf_counter()
        return tensor

    def computed(action):
        nonlocal start
        start = time.perf_counter()
        compute(action)
        events.append(Event(rank, action, start, time.perf_counter()))
    pipeline.wait_for, pipeline.compute = waited, computed
    return events


def page(step):
    """Return an HTML page that computes with the step's schedules.py, and needs nothing else."""
    sys.path.append(str(ROOT / "tools/plan"))
    import to_js
    wanted = ["make", "simulate", "bubble", "max_in_flight"]
    made = to_js.script({"schedules": to_js.parse(ROOT / step / "schedules.py")}, [f"schedules.{name}" for name in wanted])
    text = (ROOT / "tools/schedule.html").read_text()
    return text.replace("/*FILE*/", f"{step}/schedules.py").replace("/*SCHEDULES*/", made.replace("</", "<\\/"))


def main():
    parser = argparse.ArgumentParser(description="Show a pipeline schedule: its timeline, how long ranks idle, what they keep.")
    parser.error = refuse
    parser.add_argument("--step", default="step08_5d", help="the step whose schedules.py to use (step08_5d)")
    parser.add_argument("--schedule", default="1f1b", help="the schedule to show (1f1b)")
    parser.add_argument("--pp", type=int, default=4, help="ranks of the pipeline (4)")
    parser.add_argument("--micro_batches", type=int, default=8, help="micro-batches per training step (8)")
    parser.add_argument("--stages_per_rank", type=int, help="pipeline stages per rank (what the schedule needs)")
    parser.add_argument("--picture", default="schedule.png", help="the picture to draw (schedule.png)")
    parser.add_argument("--page", metavar="FILE", help="instead write a page for a browser, on which you change all of this")
    args = parser.parse_args()
    if not (ROOT / args.step / "schedules.py").is_file():
        refuse(f"--step {args.step}: has no schedules.py; choose step06_pp, step07_ep or step08_5d")
    if args.page:
        try:
            Path(args.page).write_text(page(args.step))
        except OSError as error:
            refuse(f"--page {args.page}: cannot be written ({error.strerror}); choose another name")
        return print(f"the page is in {args.page}")
    sys.path.insert(0, str(ROOT / args.step))
    import schedules
    if args.schedule not in schedules.SCHEDULES:
        refuse(f"--schedule {args.schedule}: unknown schedule; choose from {', '.join(schedules.SCHEDULES)}")
    row = schedules.SCHEDULES[args.schedule]
    stages, least = args.stages_per_rank or row.stages_per_rank, row.min_micro_batches(max(1, args.pp))
    if stages < row.stages_per_rank or stages > row.stages_per_rank and not row.or_more:
        refuse(f"--stages_per_rank {stages}: must be {row.stages_per_rank}{' or more' * row.or_more} "
               f"with --schedule {args.schedule}")
    if args.pp < 1 or args.micro_batches < least:
        refuse(f"--pp {args.pp}, --micro_batches {args.micro_batches}: must be at least 1, and at least {least}")
    schedule = schedules.make(args.schedule, args.pp, args.micro_batches, stages)
    events = schedules.simulate(schedule)
    print(text(events))
    print(f"idle, of {max(event.end for event in events)} units: {schedules.bubble(events)}")
    print(f"kept at most, micro-batches of a stage: {[schedules.max_in_flight(actions) for actions in schedule]}")
    try:
        draw(events, args.picture, f"{args.schedule}: {args.pp} ranks, {args.micro_batches} micro-batches")
    except (OSError, ValueError) as error:                # the path cannot be written, or its suffix is not an image format
        refuse(f"--picture {args.picture}: {error}")
    print(f"the picture is in {args.picture}")


if __name__ == "__main__":
    main()
