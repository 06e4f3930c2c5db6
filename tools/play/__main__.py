"""Play a program of several ranks line by line, in a browser: what each rank runs, what its tensors become, what it waits for.

    python tools/play step05_cp/by_hand.py                                   # a program that starts its ranks itself
    python tools/play --ranks 4 step03_zero/train.py --zero 3 --steps 1      # one that torchrun would start; its flags follow it
    python tools/play --ranks 4 exercises/hangs/hang2.py                     # a function main(rank, world), as in the hang lab

The program runs as always, and prints what it always prints. Beside it, every rank is recorded (record.py) from the moment at which
it joins the process group. Then the recording is written as one HTML file, which needs nothing else. If the program hangs, it is
ended after --seconds, and the last picture shows where each rank is and which rank it waits for.
"""
import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from prove.processes import environment, new_store
from refuse import refuse

GRACE = 3                                                 # seconds that the other ranks get after one has failed
MAIN = ("import sys; sys.path.insert(0, '{folder}'); import {module}, torch.distributed as dist; dist.init_process_group('gloo'); "
        "{module}.main(dist.get_rank(), dist.get_world_size())")


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="play", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = refuse
    add = parser.add_argument
    add("program", metavar="FILE.py", type=Path, help="the program; what follows are its own arguments")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    add("--ranks", type=int, help="start it with torchrun on so many ranks; without this, it starts its ranks itself")
    add("--also", action="append", default=[], metavar="FILE.py", help="another file whose lines are recorded, such as zero.py")
    add("--out", type=Path, help="where to write the page (out/play/NAME.html)")
    add("--seconds", type=int, default=60, help="end the program after so long: it may hang (60)")
    args = parser.parse_args(argv)
    for file in (args.program, *map(Path, args.also)):
        if not file.is_file():
            refuse(f"{file}: no such file")
        try:
            file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            refuse(f"{file}: cannot be read as text ({error}); give a Python program in UTF-8")
    if args.ranks is not None and not 1 <= args.ranks <= 16:
        refuse(f"--ranks {args.ranks}: must be from 1 to 16")
    if args.seconds < 1:
        refuse(f"--seconds {args.seconds}: must be at least 1")
    return args


def run(args, folder):
    """Run the program with its ranks recorded into the folder. Return whether it ended by itself, and well."""
    files = [os.path.realpath(file) for file in (args.program, *args.also)]
    path = os.pathsep.join(filter(None, [str(HERE / "hook"), os.environ.get("PYTHONPATH")]))
    marked = os.environ | dict(PYTHONPATH=path, PLAY_FOLDER=folder, PLAY_FILES=os.pathsep.join(files), PLAY_TOOLS=str(HERE.parent))
    marked.setdefault("OMP_NUM_THREADS", "1")
    words = [sys.executable, files[0], *args.arguments]
    if args.ranks and has_only_main(args.program):
        words = [sys.executable, "-c", MAIN.format(folder=Path(files[0]).parent, module=args.program.stem)]
    store = new_store() if args.ranks else None
    environments = [environment(rank, args.ranks, store.port) for rank in range(args.ranks or 0)] or [{}]
    children = [subprocess.Popen(words, env=marked | own, start_new_session=True) for own in environments]
    deadline = time.monotonic() + args.seconds
    try:
        while None in (ends := [child.poll() for child in children]) and time.monotonic() < deadline:
            if any(ends):                                 # one has failed; the others may wait for it
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.05)
        return not any(end != 0 for end in ends)
    finally:
        for end in (signal.SIGSTOP, signal.SIGKILL):      # stop all of them first, or some would see others die
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, end)
        for child in children:
            child.wait()


def has_only_main(program):
    """Tell whether a program defines main(rank, world), and leaves it to others to call it."""
    text = program.read_text()
    return "\ndef main(rank, world" in text and "\nmain(" not in text and "__main__" not in text and "start_processes" not in text


def merged(folder):
    """Return all ranks' events in the order of time, [rank, kind, ...], and the number of ranks. A later group's run follows."""
    found = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                when, *event = json.loads(line)
            except ValueError:                            # the last line of a rank that was killed
                continue
            found.append((when, int(path.stem), event))
    found.sort(key=lambda one: one[0])
    return [[rank, *event] for _, rank, event in found], max((rank for _, rank, _ in found), default=-1) + 1


def page(events, ranks, program, others, ended):
    """Return the HTML page. Lines of code and values that occur often are kept once."""
    strings, number = [], {}

    def once(text):
        if text not in number:
            number[text] = len(strings)
            strings.append(text)
        return number[text]
    files = {os.path.realpath(file): Path(file).read_text().splitlines() for file in (program, *others)}
    names, short = [*files], []
    for rank, kind, *rest in events:
        if kind in ("line", "call"):
            rest[1] = names.index(rest[1])
        if kind == "line":
            rest[3] = {name: once(value) for name, value in rest[3].items()}
        short.append([rank, kind[0], *rest])
    data = dict(name=Path(program).name, files=[Path(name).name for name in names], code=[*files.values()], ranks=ranks,
                strings=strings, events=short, ended=ended)
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (HERE / "player.html").read_text().replace("/*DATA*/null", text)


def main(argv=None):
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        ended = run(args, folder)
        events, ranks = merged(Path(folder))
    if not events:
        refuse(f"{args.program}: no rank has called init_process_group" + "; does torchrun have to start it? Try --ranks 4"
               * (args.ranks is None))
    out = args.out or Path("out/play") / f"{args.program.resolve().parent.name}_{args.program.stem}.html"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(events, ranks, args.program, args.also, ended))
    except OSError as error:
        refuse(f"--out {out}: cannot be written ({error.strerror}); choose another name")
    print(f"{out}: {len(events):,} events of {ranks} ranks, {out.stat().st_size / 1000:.0f} kB"
          + "; the program did not end well" * (not ended))
    return 0


if __name__ == "__main__":
    sys.exit(main())
