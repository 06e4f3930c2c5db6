"""Planted mistakes through tools/prove: how many does it see, name, place?

    python tests/support/plants.py [NAME ...] [--json FILE]       # all, or those whose names contain NAME

A plant is a mistake of exercises/mistakes.toml, planted in a copy of step 8, or one of planted_torch.py. Each says which causes of
tools/prove/causes.py would name it rightly, and which places are right. `judged` compares these with what the prover said.
"""
import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tools", "exercises", "tests/support")]
ADAPTERS = ROOT / "tools/prove/adapters"
sys.path.append(str(ADAPTERS))
from patched import planted_copy, planted_mistakes


class Plant(SimpleNamespace):
    """Name, layout (the number of ranks, flags), what both have, and what a right diagnosis says: causes, a pattern of places."""


def plant(layout, causes="", place="", both="", **options):
    world, _, flags = layout.partition(" ")
    return Plant(world=int(world), flags=flags, causes=set(filter(None, re.split(r", *", causes))), place=place, both=both,
                 options=options)


STEPS = {name: plant(**mistake["prove"]) for name, mistake in planted_mistakes().items() if "prove" in mistake}


def prove(adapter, one, seconds=120):
    """Return what tools/prove says of a plant."""
    from prove import CannotRun
    from prove.__main__ import flags_of
    from prove.trial import Baseline, Trial
    args = SimpleNamespace(both=flags_of(one.both), dtype="float64", mask=False, same_rows=False, unforgiving=False,
                           seconds=seconds)
    args.__dict__.update(one.options)
    try:
        return Trial(Baseline(adapter, args), one.world, flags_of(one.flags)).prove()
    except CannotRun as error:
        return dict(status=2, cannot=str(error))


def judged(one, said):
    """Return "named", "placed", "seen" or "never"."""
    if said["status"] == 0:
        return ("named" if one.causes == {"copies"} else "seen") if said.get("copies") else "never"
    if said["status"] == 2:
        return "named" if "cannot" in one.causes and re.search(one.place, said["cannot"]) else "seen"
    text = f"{said['place']} {said['seen']}"
    in_place = not one.place or bool(re.search(one.place, text))
    if said["cause"] in one.causes and in_place:
        return "named"
    return "placed" if one.place and in_place and said["place"] else "seen"


def run(names):
    """Yield (name, verdict, what was said)."""
    from planted_torch import TORCH
    from prove.__main__ import load_adapter
    os.environ["OMP_NUM_THREADS"] = "1"
    adapters = {}

    def adapter(path):
        return adapters.setdefault(path, None) or adapters.update({path: load_adapter(path)}) or adapters[path]
    for name, one in [*STEPS.items(), *TORCH.items()]:
        if names and not any(part in name for part in names):
            continue
        if name in STEPS:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["STEP"] = str(planted_copy(name, folder, "step08_5d"))
                said = prove(adapter(ADAPTERS / "step08.py"), one)
        else:
            said = prove(adapter(ROOT / "tests/support/planted_torch.py"), one)
        yield name, judged(one, said), said


def table_of(found):
    """Return the rows of the table on the tool's page."""
    rows = []
    for label, begins in [(f"step {k}", f"step0{k}_") for k in range(2, 8)] + [("torch's own", "torch_")]:
        of = [one["verdict"] for name, one in sorted(found.items()) if name.startswith(begins)]
        counts = [of.count(verdict) for verdict in ("named", "placed", "seen", "never")]
        rows.append("| " + " | ".join(map(str, [label, len(of), *counts])) + " |")
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json")
    args, found = parser.parse_args(), {}
    for name, verdict, said in run(args.names):
        found[name] = dict(verdict=verdict, said=said)
        text = said.get("seen") or said.get("cannot") or said.get("note") or ""
        print(f"{name:40} {verdict:7} {said.get('cause', '')}: {text[:230]}", flush=True)
    if not args.names:
        print(*table_of(found), sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    import torch
    torch.set_num_threads(1)
    main()
