"""Wrong answers, on every rung of a ladder: none may be green.

    python tools/wrong.py 3                     # at least 40 for step 3, drawn by a fixed seed from what a learner gets wrong
    python tools/wrong.py 3 --rung 2            # of one rung, all that can be made
    python tools/wrong.py 3 --only 17           # one of them once more

Each is a small fault in a function that the rung wants, made in the right answer: a call left out, a group or a dimension taken for
another, one off, a factor left out, arguments exchanged, the order turned, a copy or a wait forgotten, a list for a tuple, nothing
done at all. All rungs up to it are right. One that is green and yet right (the same numbers by another way) is listed in
tests/data/right_after_all.txt with its reason.
"""
import argparse
import ast
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("PATIENCE", "40")

from break_it import run_tests
from exercise import LADDER, copy, find, rungs
from mutate import GROUPS, replaced, sites
from steps import NAMES, PYTHONPATH, ROOT

sys.path += PYTHONPATH
RIGHT = ROOT / "tests/data/right_after_all.txt"
COPIES = ("clone", "contiguous", "detach", "abs", "sort", "float", "double")


def faults(function):
    """(kind, node, new node) of everything that can be wrong in a function."""
    yield from ((kind, node, new) for kind, node, new in sites(function) if node is not function)
    first = function.args.args[:1]
    if first and first[0].arg == "self":
        first = function.args.args[1:2]
    body = [ast.Return(ast.Name(first[0].arg))] if first else [ast.Pass()]
    yield "nothing done", function, ast.FunctionDef(function.name, function.args, body, function.decorator_list)
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv)):
            yield "factor left out", node, node.left
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            yield "sign", node, ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
        if isinstance(node, ast.For):
            turned = ast.Call(ast.Name("reversed"), [ast.Call(ast.Name("list"), [node.iter], [])], [])
            yield "order", node.iter, turned
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            yield "list for a tuple", node.value, ast.List(node.value.elts, ast.Load())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COPIES:
            yield "copy", node, node.func.value
        if isinstance(node, ast.Call):
            for i, keyword in enumerate(node.keywords):
                if keyword.arg in ("group", "async_op", "dtype", "dim", "op"):
                    yield "argument left out", node, ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1:])
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in GROUPS:
            for other in sorted({*GROUPS} - {node.slice.value}):
                yield "group", node.slice, ast.Constant(other)
        if isinstance(node, ast.If):
            yield "condition", node.test, ast.Constant(True)
            yield "condition", node.test, ast.Constant(False)


def made(number, only_rung=None):
    """(rung from 0, file, line, kind, before, after, new text), at least 40 of a step, kinds and rungs by turns."""
    found, draw = {}, random.Random(number)
    for i, test in enumerate(rungs(number)):
        for file, names in test.rung["write"].items():
            source = (ROOT / NAMES[number - 1] / file).read_text()
            for name in names:
                function = find(ast.parse(source), name)
                for kind, node, new in faults(function):
                    before, after = ast.get_source_segment(source, node), ast.unparse(ast.fix_missing_locations(new))
                    if node is function:
                        pad = " " * function.col_offset
                        after = after.replace("\n", "\n" + pad)
                    text = replaced(source, node, after)
                    try:
                        compile(text, file, "exec")
                    except SyntaxError:
                        continue
                    if ast.dump(ast.parse(text)) != ast.dump(ast.parse(source)):
                        found.setdefault((i, kind), []).append((i, file, node.lineno, kind, " ".join(before.split()), after, text))
    for some in found.values():
        draw.shuffle(some)
    order = []
    while any(found.values()):
        order += [some.pop() for _, some in sorted(found.items()) if some]
    if only_rung is not None:
        return [fault for fault in order if fault[0] == only_rung]
    return order


def key(number, fault):
    i, file, line, kind, before, after, _ = fault
    return f"{number}.{i + 1} {file} {kind}: {before[:70]} -> {' '.join(after.split())[:70]}"


def right_after_all():
    lines = RIGHT.read_text().splitlines() if RIGHT.exists() else []
    return {line.split("  # ")[0] for line in lines if line and not line.startswith("#")}


def tried(number, fault):
    """Whether the rung is green with it."""
    i, file, *_, text = fault
    test = rungs(number)[i]
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder, NAMES[number - 1])
        copy(number, mine, i + 1)
        whole, wrong = (mine / file).read_text(), text
        if whole != (ROOT / NAMES[number - 1] / file).read_text():                 # later rungs are taken out of it
            wrong = with_later_ones_taken_out(number, i, file, text)
        (mine / file).write_text(wrong)
        verdict = run_tests([f"{LADDER}/test_ladder{number:02d}.py::{test.__name__}"], (number, mine))
    return not verdict.failed and verdict.passed > 0


def with_later_ones_taken_out(number, i, file, text):
    from exercise import take_out
    for j, test in enumerate(rungs(number)):
        if j > i and file in test.rung["write"]:
            text = take_out(text, test.rung["write"][file], j + 1)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=int, choices=range(2, len(NAMES) + 1))
    parser.add_argument("--rung", type=int)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--only", type=int, nargs="+")
    args = parser.parse_args()
    every = made(args.step, args.rung and args.rung - 1)
    chosen = args.only or range(len(every) if args.rung else min(args.count, len(every)))
    os.chdir(ROOT / "tests")
    known, green, began = right_after_all(), [], time.monotonic()
    for k in chosen:
        name = key(args.step, every[k])
        if name in known:
            print(f"{k:4} right    {name}")
            continue
        is_green = tried(args.step, every[k])
        green += [name] if is_green else []
        print(f"{k:4} {'GREEN' if is_green else 'red':8} {name}", flush=True)
    print(f"step {args.step}: {len(chosen)} wrong answers, {len(green)} green, {time.monotonic() - began:.0f} s")
    return 1 if green else 0


if __name__ == "__main__":
    sys.exit(main())
