"""Is my trainer right? Train it under a layout and on one process, compare every number, and say what a difference looks like.

    python tools/prove ADAPTER.py --world 4 --flags "tp=2 pp=2"

An adapter is a file with three functions; tools/prove/adapters/template.py explains them. Exit status 0: all is equal, 1: it is
not, 2: it cannot run, 3: this tool has a bug of its own.
"""
import argparse
import ast
import importlib.util
import itertools
import json
import math
import shlex
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])                         # the folder in which prove is a package
from prove import CannotRun

STEPS, MOST_RANKS, MOST_LAYOUTS = 4, 64, 10**5


def refuse(message):
    raise CannotRun(message)


def flags_of(text):
    """Read 'tp=2 mode=ddp' as a dict; whole numbers become ints."""
    flags = {}
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}; write name=value, as in \"tp=2 pp=2\"") from None
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise argparse.ArgumentTypeError(f"{word}: not a flag; write name=value, as in \"tp=2 pp=2\"")
        flags[key] = int(value) if value.lstrip("-").isdecimal() else value
    return flags


def layout_of(text):
    """Read '4 tp=2 pp=2', the number of ranks and flags."""
    world, _, flags = text.partition("#")[0].strip().partition(" ")
    try:
        found = int(world), flags_of(flags)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: not a layout; write the number of ranks, then flags: 4 tp=2 pp=2") from None
    if not 1 <= found[0] <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{found[0]} ranks: must be from 1 to {MOST_RANKS}")
    return found


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="prove", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = refuse
    add = parser.add_argument
    add("adapter", metavar="ADAPTER.py", nargs="?", help="a file with build, step and parts")
    add("--list", action="store_true", help="list the adapters that come with this tool, and what they need")
    add("--world", type=int, default=2, help="ranks of the layout (2)")
    add("--flags", type=flags_of, default={}, metavar='"tp=2 pp=2"', help="what makes the layout, and should change no number")
    add("--both", type=flags_of, default={}, metavar='"layers=8"', help="what the layout and one process have in common")
    add("--layouts", metavar="FILE", help="many layouts: a line has the number of ranks, then flags: 4 tp=2 pp=2")
    add("--sweep", metavar='"tp=1,2 acc=1,4"', help="layouts in which every two values meet, on --world ranks")
    add("--self_test", action="store_true", help="plant three mistakes in the layout, too, and say whether they are seen")
    add("--resume", type=layout_of, metavar='"2 tp=2"', help="resume the layout from what this one saved after two steps")
    add("--same_rows", action="store_true", help="make all sequences of a batch equal, for losses other than sums over tokens")
    add("--dtype", choices=["float64", "float32", "bfloat16"], default="float64", help="dtype that build has to use (float64)")
    add("--mask", action="store_true", help="give some targets no loss (-100), a different number in each sequence")
    add("--unforgiving", action="store_true", help="make results of asynchronous operations NaN until they are waited for (gloo)")
    add("--seconds", type=int, default=120, help="seconds that one run may take before the ranks' stacks are shown (120)")
    add("--json", metavar="FILE", help="write what was found there, too")
    args = parser.parse_args(argv)
    if args.list:
        return args
    if args.adapter is None:
        refuse("ADAPTER.py: missing; --list shows those that exist, and tools/prove/adapters/template.py is one to start from")
    if not Path(args.adapter).is_file():
        refuse(f"ADAPTER.py {args.adapter}: no such file; copy tools/prove/adapters/template.py")
    if args.layouts and not Path(args.layouts).is_file():
        refuse(f"--layouts {args.layouts}: no such file")
    for name, most in (("world", MOST_RANKS), ("seconds", 86400)):
        if not 1 <= getattr(args, name) <= most:
            refuse(f"--{name} {getattr(args, name)}: must be from 1 to {most}")
    if args.json:
        try:
            open(args.json, "a").close()
        except OSError as error:
            refuse(f"--json {args.json}: cannot be written ({error.strerror})")
    return args


def layouts_of(args):
    if args.sweep:
        return [(args.world, flags) for flags in pairwise(args.sweep)]
    if not args.layouts:
        return [(args.world, args.flags)]
    try:
        lines = Path(args.layouts).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"--layouts {args.layouts}: cannot be read as text ({error}); write a layout a line, such as 4 tp=2 pp=2")
    found = []
    for number, line in enumerate(lines, 1):
        if line.partition("#")[0].strip():
            try:
                found.append(layout_of(line))
            except argparse.ArgumentTypeError as error:
                refuse(f"--layouts {args.layouts}, line {number}: {error}")
    return found or refuse(f"--layouts {args.layouts}: has no layout")


def pairwise(text):
    """Return layouts in which every two values of two flags meet: 'tp=1,2 acc=1,4' as dicts. Each adds as many pairs as it can."""
    try:
        values = {key: [flags_of(f"{key}={value}")[key] for value in str(of).split(",")] for key, of in flags_of(text).items()}
    except (KeyError, argparse.ArgumentTypeError) as error:
        refuse(f"--sweep {text}: {error}")
    if not values or math.prod(map(len, values.values())) > MOST_LAYOUTS:
        refuse(f"--sweep {text}: write some values of some flags, as in \"tp=1,2 acc=1,4\"")
    rows = [dict(zip(values, row)) for row in itertools.product(*values.values())]
    covers = [{*itertools.combinations(row.items(), min(2, len(row)))} for row in rows]
    missing, chosen = set().union(*covers), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(covers[i] & missing))
        chosen.append(rows[best])
        missing -= covers[best]
    return chosen


def load_adapter(path, resume=False):
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(f"adapter_{Path(path).stem}", path)
    adapter = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(adapter)
    except SystemExit as error:
        refuse(f"{path}: calls sys.exit({error.code!r}) when it is imported; move that under if __name__ == '__main__'")
    except Exception:
        refuse(f"{path}: cannot be imported\n{traceback.format_exc(limit=-3)}")
    missing = [name for name in ("build", "step", "parts") if not callable(getattr(adapter, name, None))]
    if missing:
        refuse(f"{path}: has no function {', '.join(missing)}; tools/prove/adapters/template.py shows what it does")
    if resume:
        missing = [name for name in ("save", "load") if not callable(getattr(adapter, name, None))]
        if missing:
            refuse(f"--resume: {path} has no function {', '.join(missing)}; tools/prove/adapters/template.py shows what it does")
    for name in ("BATCH", "SEQ", "VOCAB"):
        value = getattr(adapter, name, 1)
        if type(value) is not int or value < 1:
            refuse(f"{path}: {name} is {value!r}; it must be a whole number from 1")
    return adapter


def in_parallel(holds, reads, issues, steps):
    """Yield what the ranks did, and a warning if it looks as if they did nothing in parallel."""
    def of_ranks(values, style):
        return " to ".join(dict.fromkeys(format(value, style) for value in (min(values), max(values))))
    read = f", reads {of_ranks(reads, '.0%')} of the tokens," * any(reads)
    yield (f"a rank holds {of_ranks(holds, '.0%')} of the numbers{read} "
           f"and issues {of_ranks(issues, ',')} collectives in {steps} steps")
    if len(holds) > 1 and min(holds) >= 1:
        yield "warning: every rank holds all of the numbers" + (
            ", as in DDP; if the flags should shard them, they had no effect" if any(issues) else
            " and issues no collective: nothing ran in parallel, so EQUAL says nothing about this layout")


def lines_of(adapter, said):
    flags = " ".join(f"{key}={value}" for key, value in said["flags"].items())
    resumed = f", resumed from {said['resumed']}" if said.get("resumed") else ""
    yield f"{adapter}: {flags} on {said['world']} ranks{resumed}, beside one process, {STEPS} steps in {said['dtype']}"
    if "cannot" in said:
        yield f"CANNOT RUN: {said['cannot']}"
        return
    yield "largest relative difference, and what could still be rounding"
    yield " " * 10 + "".join(f"{what:20}" for what in said["steps"][0]).rstrip()
    for k, (far, most) in enumerate(zip(said["steps"], said["limits"]), 1):
        if far["weights"] is None:                        # not trained, because --resume divides the steps between two layouts
            continue
        yield f"step {k}    " + "".join(f"{'-':<20}" if far[what] is None else f"{far[what]:<8.0e} {most[what]:<10.0e} "
                                        for what in far).rstrip()
    if said["note"]:
        yield f"note: {said['note']}"
    if not said["status"]:
        yield from in_parallel(**said["activity"], steps=sum(far["weights"] is not None for far in said["steps"]))
        inside = f"; something on the way computes in {said['inside']}" * (said["inside"] != said["dtype"])
        if said["dtype"] != "float64" or said["inside"] == "bfloat16":
            yield (f"EQUAL, as far as {said['inside']} can tell: differences of up to {said['largest']:.0e} could be rounding"
                   + inside)
        else:
            yield f"EQUAL to {said['largest']:.0e}{inside}"
        return
    yield f"APART, first in step {said['step']}: {said['seen']}\nusually: {said['means']}"
    if len(said["looks"]) > 1:
        yield "weights:" if said["seen"].startswith("the weights") else "gradients:"
        for text, names in sorted(said["looks"].items(), key=lambda item: -len(item[1]))[:6]:
            yield f"    {len(names):3} parameters, such as {names[-1]}: {text}"


def report(adapter, said):
    return "\n".join(lines_of(adapter, said))


def listed():
    """Yield a line for each adapter that comes with the tool: what it runs, and what to install. (Importing it would need that.)"""
    for path in sorted(Path(__file__).with_name("adapters").glob("*.py")):
        tree = ast.parse(path.read_text())
        needs = next((ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
                      and getattr(node.targets[0], "id", "") == "NEEDS"), "")
        if path.name != "template.py":
            yield f"{path.name:22} {ast.get_docstring(tree).splitlines()[0]}" + f" Needs {needs}." * bool(needs)


def cannot(args, world, flags, error):
    if isinstance(error, CannotRun):
        return dict(world=world, flags=flags, dtype=args.dtype, status=2, cannot=str(error))
    mistake = f"a mistake in this tool, not in the trainer\n{traceback.format_exc()}"
    return dict(world=world, flags=flags, dtype=args.dtype, status=3, cannot=mistake)


def proved(args, baseline, world, flags):
    """Yield what there is to say of a layout; with --resume, first of the one that saves, and then of the one that resumes."""
    from prove.ranks import How
    from prove.trial import Trial
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.resume:
                half = STEPS // 2
                saves = Trial(baseline, *args.resume, range(half), How(save=folder)).prove()
                yield saves
                if saves["status"]:
                    return
                said = Trial(baseline, world, flags, range(half, STEPS), How(load=folder)).prove()
                yield said | dict(resumed=f"{args.resume[0]} ranks with "
                                          + " ".join(f"{key}={value}" for key, value in args.resume[1].items()))
            else:
                yield Trial(baseline, world, flags).prove()
        except Exception as error:                        # the other layouts still run
            yield cannot(args, world, flags, error)


def self_test(args, baseline, world, flags):
    """Yield (a line on each of three planted mistakes, whether it was seen)."""
    from prove.plants import PLANTS
    from prove.ranks import How
    from prove.trial import Trial
    for name, what in PLANTS.items():
        trial = Trial(baseline, world, flags, how=How(plant=name))
        try:
            said = trial.prove()
        except CannotRun as error:                        # the trainer itself has seen it
            yield f"planted: {what}\n    seen: the run ends with {str(error).splitlines()[0]}", True
            continue
        if not any(seen["planted"] for seen in trial.run.ranks):
            yield f"planted: {what}\n    not possible here: no rank did this where it can be replaced", True
        elif said["status"]:
            yield f"planted: {what}\n    seen in step {said['step']}: {said['seen']}", True
        else:
            yield (f"planted: {what}\n    NOT SEEN: so EQUAL says nothing about such a mistake; do parts and step return "
                   "what the trainer uses?"), False


def main(argv=None):
    args = parse_args(argv)
    if args.list:
        print("\n".join(listed()))
        return 0
    warnings.filterwarnings("ignore", category=FutureWarning)
    layouts, adapter = layouts_of(args), load_adapter(args.adapter, args.resume)
    import torch

    from prove.trial import Baseline
    torch.set_num_threads(1)
    results = []
    try:
        baseline = Baseline(adapter, args)
    except CannotRun as error:
        refuse(f"one process cannot run. {error}")
    for world, flags in layouts:
        for said in proved(args, baseline, world, flags):
            results.append(said)
            print(report(args.adapter, said), flush=True)
        for line, seen in self_test(args, baseline, world, flags) if args.self_test and not said["status"] else ():
            results[-1]["status"] = max(results[-1]["status"], int(not seen))
            print(line, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    return max(result["status"] for result in results)


def run():
    """Run the command line: what the console script calls."""
    try:
        sys.exit(main())
    except CannotRun as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        traceback.print_exc()
        sys.exit(3)                                       # Python would say 1, which means that something differs


if __name__ == "__main__":
    run()
