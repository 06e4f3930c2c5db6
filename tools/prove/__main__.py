"""Is my trainer right? Train it under a layout and on one process, compare every number, and say what a difference looks like.

    python tools/prove ADAPTER.py --world 4 --flags "tp=2 pp=2"

An adapter is a file with three functions; tools/prove/adapters/template.py explains them. Exit status 0: all is equal, 1: it is
not, 2: it cannot run, 3: this tool has a mistake of its own.
"""
import argparse
import contextlib
import importlib.util
import json
import shlex
import sys
import time
import traceback
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])                         # tools/, in which prove is a package
from refuse import refuse

STEPS, MOST_RANKS = 4, 64


def flags_of(text):
    """Read 'tp=2 mode=ddp' as a dict; whole numbers become ints."""
    flags = {}
    for word in shlex.split(text, comments=True):
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise argparse.ArgumentTypeError(f"{word}: not a flag; write name=value, as in \"tp=2 pp=2\"")
        flags[key] = int(value) if value.lstrip("-").isdecimal() else value
    return flags


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="prove", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = refuse
    add = parser.add_argument
    add("adapter", metavar="ADAPTER.py", help="a file with build, step and parts")
    add("--world", type=int, default=2, help="ranks of the layout (2)")
    add("--flags", type=flags_of, default={}, metavar='"tp=2 pp=2"', help="what makes the layout, and should change no number")
    add("--both", type=flags_of, default={}, metavar='"layers=8"', help="what the layout and one process have in common")
    add("--layouts", metavar="FILE", help="many layouts: a line has the number of ranks, then flags: 4 tp=2 pp=2")
    add("--dtype", choices=["float64", "float32", "bfloat16"], default="float64", help="dtype that build has to use (float64)")
    add("--mask", action="store_true", help="give some targets no loss (-100), a different number in each sequence")
    add("--unforgiving", action="store_true", help="make results of asynchronous operations NaN until they are waited for (gloo)")
    add("--seconds", type=int, default=120, help="seconds that one run may take before the ranks' stacks are shown (120)")
    add("--json", metavar="FILE", help="write what was found there, too")
    args = parser.parse_args(argv)
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
    if not args.layouts:
        return [(args.world, args.flags)]
    found = []
    try:
        lines = Path(args.layouts).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"--layouts {args.layouts}: cannot be read as text ({error}); write a layout a line, such as 4 tp=2 pp=2")
    for number, line in enumerate(lines, 1):
        world, _, flags = line.partition("#")[0].strip().partition(" ")
        if world:
            try:
                found.append((int(world), flags_of(flags)))
            except (ValueError, argparse.ArgumentTypeError) as error:
                refuse(f"--layouts {args.layouts}, line {number}: {error}; write the number of ranks, then flags: 4 tp=2 pp=2")
            if not 1 <= found[-1][0] <= MOST_RANKS:
                refuse(f"--layouts {args.layouts}, line {number}: {found[-1][0]} ranks: must be from 1 to {MOST_RANKS}")
    return found or refuse(f"--layouts {args.layouts}: has no layout")


def load_adapter(path):
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
    for name in ("BATCH", "SEQ", "VOCAB"):
        value = getattr(adapter, name, 1)
        if type(value) is not int or value < 1:
            refuse(f"{path}: {name} is {value!r}; it must be a whole number from 1")
    return adapter


def in_bfloat16(gradients):
    """Say whether one process computes in bfloat16 on the way: then all numbers of some gradient fit into it."""
    return any(len(tensor.unique()) > 8 and tensor.equal(tensor.bfloat16().double()) for tensor in gradients)


class Baseline:
    """One process: its weights, its run, the run with nudged weights, and the data. All layouts share it."""

    def __init__(self, adapter, args):
        import torch

        from prove.compare import Run
        from prove.ranks import launch
        self.adapter, self.both, self.dtype, self.mask = adapter, args.both | {"dtype": args.dtype}, args.dtype, args.mask
        self.seconds, self.known, self.unforgiving = args.seconds, {}, contextlib.nullcontext
        if args.unforgiving:
            from unforgiving import unforgiving
            self.unforgiving = unforgiving
        batch, seq, vocab = (getattr(adapter, name, usual) for name, usual in (("BATCH", 8), ("SEQ", 16), ("VOCAB", 64)))
        draw = torch.Generator().manual_seed(0)
        stream = torch.randint(vocab, (STEPS * batch * seq + 1,), generator=draw)
        self.inputs, self.targets = stream[:-1].view(STEPS, batch, seq), stream[1:].view(STEPS, batch, seq).clone()
        if args.mask:
            self.targets[torch.arange(seq) >= torch.randint(seq // 2 + 1, seq + 1, (STEPS, batch, 1), generator=draw)] = -100
        self.own = Run(launch(adapter, 1, self.both, [], self.seconds)).whole(-1, "weights")
        # norms of ones, or biases of zeros, would hide too much
        self.start = {name: weight + 0.1 * torch.randn(weight.shape, generator=draw) * (weight.flatten().diff() == 0).all()
                      for name, weight in self.own.items()}
        self.one = self.launch_one(self.jobs(self.start))
        self.in_bfloat16 = in_bfloat16(self.one.whole(0, "gradients").values())
        # one rounding of every weight. In float64 it is float32's, and compare() scales its effect down to that of float64's
        self.eps = torch.finfo(torch.float32 if args.dtype == "float64" else getattr(torch, args.dtype)).eps
        signs = {name: 2 * torch.randint(2, weight.shape, generator=draw) - 1 for name, weight in self.start.items()}
        self.nudged = self.launch_one(self.jobs({name: w * (1 + self.eps * signs[name]) for name, w in self.start.items()}))

    def jobs(self, weights):
        from prove.ranks import Job
        return [Job(None if k else weights, self.inputs[k], self.targets[k]) for k in range(STEPS)]

    def launch_one(self, jobs):
        from prove.compare import Run
        from prove.ranks import launch
        run = Run(launch(self.adapter, 1, self.both, jobs, self.seconds))
        run.check_finite()                                # beside NaN, wrong numbers cannot be told from right ones
        return run


class Trial:
    """One layout beside the baseline."""

    def __init__(self, baseline, world, flags):
        self.baseline, self.world, self.flags = baseline, world, flags

    def __getattr__(self, name):
        return getattr(self.baseline, name)

    def launch(self, jobs):
        from prove.compare import Run
        from prove.ranks import launch
        return Run(launch(self.adapter, self.world, self.both | self.flags, jobs, self.seconds, self.unforgiving))

    def compare(self):
        """Run the layout. Set the differences and their limits; return for every step which are beyond the limits."""
        import torch

        from prove.compare import EXACT, beyond, distances, limits
        self.run = self.launch(self.jobs(self.start))
        self.far = [distances(self.run, self.one, step) for step in range(STEPS)]
        exact, self.inside = self.dtype == "float64", self.dtype
        float64 = 2.0**-29                                # the rounding of float64 as a fraction of that of float32
        self.limits = [*limits(self.nudged, self.one, EXACT if exact else 8 * self.eps, float64 if exact else 1.0)]
        for lower in ["float32"] * exact + ["bfloat16"] * self.in_bfloat16:        # something may compute in it
            rounded = [*limits(self.nudged, self.one, 8 * torch.finfo(getattr(torch, lower)).eps)]
            noise = beyond(self.far[0], self.limits[0])
            # a gradient that is wrong by no more than rounding says so, even if others are wrong by more
            some = any(self.limits[0].gradients[name] < far <= rounded[0].gradients[name]
                       for name, far in self.far[0].gradients.items())
            if any(noise[:3]) and (some or not any(beyond(self.far[0], rounded[0])[:3])):
                self.limits, self.inside = rounded, lower
        self.exact = self.inside == "float64"
        self.exactness = 1e-7 if self.exact else 5e-2 if self.inside == "bfloat16" else 1e-4
        return [beyond(*rows) for rows in zip(self.far, self.limits)]

    def prove(self):
        """Return what there is to say, as a dict."""
        from prove.compare import activity, worst
        from prove.diagnose import Diagnosis, drawn_copies
        began = time.monotonic()
        apart = self.compare()
        different, copied = drawn_copies(self.run, self.own)
        said = dict(world=self.world, flags=self.flags, dtype=self.dtype, status=int(any(map(any, apart))), note="",
                    limits=[worst(row)._asdict() for row in self.limits],
                    steps=[{what: None if far != far else far for what, far in worst(row)._asdict().items()} for row in self.far])
        said["largest"] = max(far for step in said["steps"] for far in step.values() if far is not None)
        said["activity"] = activity(self.run, self.one, self.inputs[0].numel())
        if different:
            said["note"] = ("left alone, the layout starts from other weights than one process: "
                            f"{len(different)} of {len(self.own)} parameters")
        if copied:
            from prove.causes import CAUSES
            said["copies"] = len(copied)
            said["note"] += (f"; {len(copied)} parts are copies of others, such as {copied[0]}\n"
                             f"usually: {CAUSES['copies at the start'].means}")
        if said["status"]:
            step, found = Diagnosis(self, self.run, self.one, self.limits, apart).find()
            groups = {}
            for name, look in found.looks.items():
                groups.setdefault(look.text, []).append(name)
            said |= dict(step=step + 1, cause=found.cause, seen=found.seen, means=found.means, place=found.place, looks=groups)
        said["inside"], said["exact"], said["seconds"] = self.inside, self.exact, time.monotonic() - began
        return said


def in_parallel(holds, reads, issues):
    """Yield what the ranks did, and a warning if it looks as if they did nothing in parallel."""
    def of_ranks(values, style):
        return " to ".join(dict.fromkeys(format(value, style) for value in (min(values), max(values))))
    read = f", reads {of_ranks(reads, '.0%')} of the tokens," * any(reads)
    yield (f"a rank holds {of_ranks(holds, '.0%')} of the numbers{read} "
           f"and issues {of_ranks(issues, ',')} collectives in {STEPS} steps")
    if len(holds) > 1 and min(holds) >= 1:
        yield "warning: every rank holds all of the numbers" + (
            ", as in DDP; if the flags should shard them, they had no effect" if any(issues) else
            " and issues no collective: nothing ran in parallel, so EQUAL says nothing of this layout")


def report(adapter, said):
    flags = " ".join(f"{key}={value}" for key, value in said["flags"].items())
    print(f"{adapter}: {flags} on {said['world']} ranks, beside one process, {STEPS} steps in {said['dtype']}")
    if "cannot" in said:
        return print(f"CANNOT RUN: {said['cannot']}")
    print("largest relative difference, and what could still be rounding\n" + " " * 10
          + "".join(f"{what:20}" for what in said["steps"][0]).rstrip())
    for k, (far, most) in enumerate(zip(said["steps"], said["limits"]), 1):
        print(f"step {k}    " + "".join(f"{'-':<20}" if far[what] is None else f"{far[what]:<8.0e} {most[what]:<10.0e} "
                                        for what in far).rstrip())
    if said["note"]:
        print(f"note: {said['note']}")
    if not said["status"]:
        print("\n".join(in_parallel(**said["activity"])))
        inside = f"; something on the way computes in {said['inside']}" * (said["inside"] != said["dtype"])
        if said["dtype"] != "float64" or said["inside"] == "bfloat16":
            return print(f"EQUAL, as far as {said['inside']} can tell: differences of up to {said['largest']:.0e} could be rounding"
                         + inside)
        return print(f"EQUAL to {said['largest']:.0e}{inside}")
    print(f"APART, first in step {said['step']}: {said['seen']}\nusually: {said['means']}")
    if len(said["looks"]) > 1:
        print("weights:" if said["seen"].startswith("the weights") else "gradients:")
        for text, names in sorted(said["looks"].items(), key=lambda item: -len(item[1]))[:6]:
            print(f"    {len(names):3} parameters, such as {names[-1]}: {text}")


def main(argv=None):
    args = parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    layouts, adapter = layouts_of(args), load_adapter(args.adapter)
    import torch

    from prove.ranks import CannotRun
    torch.set_num_threads(1)
    results = []
    try:
        baseline = Baseline(adapter, args)
    except CannotRun as error:
        refuse(f"one process cannot run. {error}")
    for world, flags in layouts:
        try:
            results.append(Trial(baseline, world, flags).prove())
        except CannotRun as error:
            results.append(dict(world=world, flags=flags, dtype=args.dtype, status=2, cannot=str(error)))
        except Exception:                                 # the other layouts still run
            cannot = f"a mistake in this tool, not in the trainer\n{traceback.format_exc()}"
            results.append(dict(world=world, flags=flags, dtype=args.dtype, status=3, cannot=cannot))
        report(args.adapter, results[-1])
        sys.stdout.flush()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    return max(result["status"] for result in results)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        traceback.print_exc()
        sys.exit(3)                                       # Python would say 1, which means that something differs
