"""How much do the tests catch? Makes small faults in step 8's technique files, one at a time, and runs its tests until one fails.

    python tools/mutate.py                      # 150, drawn by a fixed seed: hours; goes on where it was stopped
    python tools/mutate.py --number 20          # the first 20 of them
    python tools/mutate.py --list               # what they are, without running anything
    python tools/mutate.py --only 7 12          # these
    python tools/mutate.py --again              # those once more that no test saw

Faults are made mechanically: a comparison turned, a constant off by one, a statement left out, a wait or a hook left out, two
arguments exchanged, a group of ranks replaced by another. Left out is what only prints. out/mutants.csv has what became of each.
"""
import argparse
import ast
import csv
import os
import random
import sys
import tempfile
import time

os.environ.setdefault("PATIENCE", "60")                   # a mutant that hangs is caught, and shall not cost five minutes

from break_it import copy_of, run_tests
from steps import PYTHONPATH, ROOT, step_dir

sys.path += PYTHONPATH
import layouts

STEP = "step08_5d"
FILES = ["data_parallel.py", "zero.py", "tensor_parallel.py", "context_parallel.py", "pipeline_parallel.py", "schedules.py",
         "expert_parallel.py", "moe.py", "parts.py", "boxes.py", "resume.py"]
ONLY_SHOWS = {"__str__"}
RESULTS = ROOT / "out/mutants.csv"
TURNED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
          ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
GROUPS = ["tp", "cp", "dp", "pp"]
# tests of step 8's files that are not in its own test file
ELSEWHERE = {"boxes.py": ["test_nothing_lost.py"], "resume.py": ["test_nothing_lost.py"],
             "zero.py": ["test_step03.py", "-k", "two_blocks"],
             "tensor_parallel.py": ["test_step04.py", "-k", "by_itself"],
             "pipeline_parallel.py": ["test_step06.py", "-k", "gradient_in_W"]}
LISTS = "lists or check_finds or waits_for_itself or bubbles or in_flight or follows_its_list or shows_a_schedule"


# ------------------------------------------------------------------------------------------- making them
def sites(tree):
    """(kind, node, new node) of everything that can be changed in a file."""
    for node in walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
            yield "comparison", node, ast.Compare(node.left, [TURNED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield "constant", node, ast.Constant(node.value + 1)
        if isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            yield "arguments", node, ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("get_group", "get_local_rank") and node.args and node.args[0].value in GROUPS):
            for other in sorted({*GROUPS} - {node.args[0].value}):
                yield "group", node.args[0], ast.Constant(other)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "data_mesh":
            for other in ("dp", "cp"):
                yield "group", node, ast.Subscript(node.args[0], ast.Constant(other))
        if isinstance(node, ast.Attribute) and node.attr in ("shard", "replicate") and isinstance(node.ctx, ast.Load):
            yield "group", node, ast.Attribute(node.value, {"shard": "replicate", "replicate": "shard"}[node.attr], node.ctx)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            yield "wait or hook" if "wait" in called or "hook" in called else "statement", node, ast.Pass()
        if isinstance(node, ast.AugAssign) or isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name):
            yield "statement", node, ast.Pass()


def walk(node):
    """As ast.walk, but not into what only shows."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef)) or child.name not in ONLY_SHOWS:
            yield from walk(child)


def mutants():
    """(file, line, kind, before, after, the whole new text) of all, in an order drawn once: kinds by turns, so that each has its
    share."""
    by_kind = {}
    for name in FILES:
        source = (step_dir(STEP) / name).read_text()
        for kind, node, new in sites(ast.parse(source)):
            before, after = ast.get_source_segment(source, node), ast.unparse(new)
            text = replaced(source, node, after)
            by_kind.setdefault(kind, []).append((name, node.lineno, kind, " ".join(before.split()), after, text))
    draw = random.Random(0)
    for kind in sorted(by_kind):
        draw.shuffle(by_kind[kind])
    order = []
    while any(by_kind.values()):
        order += [by_kind[kind].pop() for kind in sorted(by_kind) if by_kind[kind]]
    return order


def replaced(source, node, after):
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1
    head, tail = lines[first][:node.col_offset], lines[last][node.end_col_offset:]
    return b"".join([*lines[:first], head, after.encode(), tail, *lines[last + 1:]]).decode()


# ------------------------------------------------------------------------------------------- running the tests
def tests_for(file):
    """Of step 8's layouts those that use the file, the small ones first: they are tried before all the tests."""
    if file in ("boxes.py", "resume.py"):                 # no layout does
        return ["test_step08.py", "-k", "not test_layout"]
    flags = {"zero.py": "--zero ", "tensor_parallel.py": "--tp ", "context_parallel.py": "--cp ", "pipeline_parallel.py": "--pp ",
             "schedules.py": "--pp ", "expert_parallel.py": "--ep ", "data_parallel.py": "--dp_mode "}
    drawn = [layout for layout in layouts.drawn(8) if flags.get(file, "") in layout.flags]
    return [f"test_step08.py::test_layout[{layout}]" for layout in sorted(drawn, key=lambda layout: layout.world)[:24]]


def try_one(mutant):
    """(the test that failed, why), or two times '' if all passed."""
    name, _, _, _, _, text = mutant
    runs = [(STEP, tests_for(name)), (STEP, ["test_step08.py", "-k", "not sixteen"])]       # whose patience ends on a busy machine
    if name in ELSEWHERE:
        runs.insert(1, (STEP, ELSEWHERE[name]))
    if name == "schedules.py":                            # of whose lists step 6's tests have more to say
        runs.insert(0, ("step06_pp", ["test_step06.py", "-k", LISTS]))
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(STEP, folder)
        (copy / name).write_text(text)
        for step, tests in runs:
            verdict = run_tests(tests, (step, copy))
            if verdict.failed:
                break
    return verdict.failed, verdict.why


def results():
    if not RESULTS.exists():
        return {}
    with open(RESULTS, newline="") as file:
        return {int(row["number"]): row for row in csv.DictReader(file)}


def write(done):
    RESULTS.parent.mkdir(exist_ok=True)
    with open(RESULTS, "w", newline="") as file:
        table = csv.DictWriter(file, ["number", "file", "line", "kind", "before", "after", "seen by", "how", "seconds"])
        table.writeheader()
        table.writerows(done[number] for number in sorted(done))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=150)
    parser.add_argument("--only", type=int, nargs="+")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    every, done = mutants(), results()
    chosen = args.only or range(min(args.number, len(every)))
    os.chdir(ROOT / "tests")
    for number in chosen:
        file, line, kind, before, after, _ = every[number]
        print(f"{number:4} {file}:{line} {kind}: {before[:60]} -> {after[:60]}", end="\n" if args.list else ": ", flush=True)
        if args.list:
            continue
        if number in done and not args.only and not (args.again and not done[number]["seen by"]):
            print(done[number]["seen by"] or "SURVIVED")
            continue
        start = time.monotonic()
        seen_by, how = try_one(every[number])
        done[number] = dict(zip(["number", "file", "line", "kind", "before", "after", "seen by", "how", "seconds"],
                                [number, file, line, kind, before, after, seen_by, how[:200], round(time.monotonic() - start)]))
        write(done)
        print(seen_by or "SURVIVED", flush=True)
    if not args.list:
        seen = [bool(done[number]["seen by"]) for number in chosen]
        print(f"{sum(seen)} of {len(seen)} seen")


if __name__ == "__main__":
    main()
