"""Wrong answers, on every rung of a ladder: none may be green.

    python tools/wrong.py 3                     # those that are written down for step 3, and 48 that are made
    python tools/wrong.py 3 --rung 2            # of one rung, all that are written down or can be made
    python tools/wrong.py 3 --only 17           # one of them once more
    make wrong STEP=3                           # the first; without STEP, all steps

Written down, in exercises/wrong/step03.txt, are answers as somebody gives them who has not understood something. Made are small
faults in a function that the rung wants, by a fixed seed: a call left out, a group or a dimension taken for another, one off, a
factor left out, arguments exchanged, the order turned, a copy or a wait forgotten, a list for a tuple, nothing done at all. All
rungs up to it are right. One that is green and yet right (the same numbers by another way) is listed in
tests/data/right_after_all.txt with its reason.

A written one begins with its rung and what is wrong, and goes on with lines of our answer, after -, and what stands there instead,
after +:

    1 the mean, not the sum
    -            dist.all_reduce(param.main_grad, group=group)
    +            dist.all_reduce(param.main_grad, group=group)
    +            param.main_grad /= group.size()
"""
import argparse
import ast
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("PATIENCE", "40")

from break_it import run_tests
from exercise import LADDER, copy, find, rungs, take_out, what_came
from mutate import GROUPS, replaced, sites
from steps import NAMES, PYTHONPATH, ROOT

sys.path += PYTHONPATH
RIGHT = ROOT / "tests/data/right_after_all.txt"
WRITTEN = ROOT / "exercises/wrong"
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


def written(number):
    """Those of exercises/wrong, as `made` returns them, but without what was before and after."""
    path, found = WRITTEN / f"step{number:02d}.txt", []
    for part in re.split(r"^(?=\d)", path.read_text() if path.exists() else "", flags=re.MULTILINE)[1:]:
        head, *lines = part.splitlines()
        i, kind = head.split(" ", 1)
        before, after = ("\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
        found.append((int(i) - 1, *exchanged(number, int(i) - 1, kind, before, after)))
    return found


def exchanged(number, i, kind, before, after):
    """What is written once in the functions of a rung, exchanged."""
    found = []
    for file, names in rungs(number)[i].rung["write"].items():
        source = (ROOT / NAMES[number - 1] / file).read_text()
        lines, tree = source.splitlines(), ast.parse(source)
        for node in (find(tree, name) for name in names):
            begin, end = node.lineno - 1, node.end_lineno
            function = "\n".join(lines[begin:end])
            found += [(file, begin, end, source, function)] * f"\n{function}\n".count(f"\n{before}\n")
    assert len(found) == 1, f"step {number}, rung {i + 1}, {kind}: {len(found)} places have\n{before}"
    (file, begin, end, source, function), = found
    head, tail = f"\n{function}\n".split(f"\n{before}\n")
    new, line = f"{head}\n{after}\n{tail}"[1:-1], begin + 1 + head.count("\n")
    text = "\n".join([*source.splitlines()[:begin], new, *source.splitlines()[end:]]) + "\n"
    compile(text, file, "exec")
    return file, line, kind, "", "", text


def made(number):
    """(rung from 0, file, line, kind, before, after, new text), kinds and rungs by turns."""
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
    return order


def key(number, fault):
    i, file, line, kind, before, after, _ = fault
    changed = f": {before[:70]} -> {' '.join(after.split())[:70]}" if before else ""         # of those that are made
    return f"{number}.{i + 1} {file} {kind}{changed}"


def right_after_all():
    lines = RIGHT.read_text().splitlines() if RIGHT.exists() else []
    return {line.split("  # ")[0] for line in lines if line and not line.startswith("#")}


def tried(number, fault):
    """What make check says of it; nothing, if the rung is green."""
    i, file, *_, text = fault
    ladder = rungs(number)
    for j, test in enumerate(ladder[i + 1:], i + 2):
        if file in test.rung["write"]:
            text = take_out(text, test.rung["write"][file], j)
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder, NAMES[number - 1])
        copy(number, mine, i + 1)
        (mine / file).write_text(text)
        verdict = run_tests([f"{LADDER}/test_ladder{number:02d}.py::{ladder[i].__name__}"], (number, mine))
        assert verdict.failed or verdict.passed, f"no test ran: {key(number, fault)}"
        return what_came(verdict, mine, ladder[i].rung["write"]) if verdict.failed else ""


def tried_all(number, chosen):
    """Prints what came of {number: wrong answer}; how many were green."""
    known, green, began = right_after_all(), 0, time.monotonic()
    for k, fault in chosen.items():
        name, said, why = key(number, fault), "right", ""
        if name not in known:
            why = " ".join(tried(number, fault).split())
            said, green = ("red", green) if why else ("GREEN", green + 1)
        print(f"{k:4} {said:6} {name}" + f"\n            {why[:250]}" * bool(why), flush=True)
    print(f"step {number}: {len(chosen)} wrong answers, {green} green, {time.monotonic() - began:.0f} s")
    return green


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=int, nargs="?", choices=range(2, len(NAMES) + 1))
    parser.add_argument("--rung", type=int)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--only", type=int, nargs="+")
    args = parser.parse_args()
    os.chdir(ROOT / "tests")
    green = 0
    for number in [args.step] if args.step else range(2, len(NAMES) + 1):
        every = dict(enumerate(written(number) + made(number)))
        chosen = args.only or range(len(every) if args.rung else len(written(number)) + args.count)
        green += tried_all(number, {k: every[k] for k in chosen if k in every and args.rung in (None, every[k][0] + 1)})
    return 1 if green else 0


if __name__ == "__main__":
    sys.exit(main())
