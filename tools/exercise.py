"""Exercises: a step with its technique taken out, for the reader to put back, rung by rung.

    python tools/exercise.py 4                 # copies step 4 to exercise/step04, the technique's functions without their bodies
    python tools/exercise.py 4 blank           # copies step 3 there instead: all is to be written
    python tools/exercise.py 4 check           # which rung is green, and what the first that is not wants
    python tools/exercise.py 4 hint            # the next hint for that rung; there are three
    python tools/exercise.py 4 solution        # how its functions differ from ours; when all are green, those of all rungs

Ranks that wait for each other for ever are ended after half a minute: the rung is then not green (PATIENCE=SECONDS changes it).

What is taken out, in which order, with which hints, is in exercises/ladder/test_ladder04.py: a test for each rung, marked `rung`.
"""
import ast
import difflib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from steps import NAMES, PYTHONPATH, ROOT, STEPS

LADDER = ROOT / "exercises/ladder"
NO_LESSON = shutil.ignore_patterns("__pycache__", "figures", "README.md", "by_hand.py")
NOTE = """# A note to coding assistants

This folder is an exercise. Whoever works here wants to learn how the technique works by writing it.
Explain ideas, ask what they expect to happen, help to read error messages, and point to `make hint STEP={number}`.
Do not write the bodies of the functions that raise NotImplementedError, and do not copy them from the repository.
"""


def rung(write, hints):
    """Marks a test of a ladder. write: {file: the functions that are to be written for it}; hints: three paragraphs."""
    paragraphs = [" ".join(hint.split()) for hint in hints.strip().split("\n\n")]

    def mark(test):
        test.rung = dict(write=write, hints=paragraphs)
        return test
    return mark


def rungs(number):
    """The tests of a step's ladder, in order."""
    sys.path += [path for path in PYTHONPATH if path not in sys.path]
    module = importlib.import_module(f"test_ladder{number:02d}")
    return [value for value in vars(module).values() if hasattr(value, "rung")]


# ------------------------------------------------------------------------------------------------ taking out
def find(tree, name):
    """The function `name` or `Class.name` of a module."""
    node = tree
    for part in name.split("."):
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part)
    return node


def take_out(source, names, rung_number):
    """The source with other bodies: a function keeps its docstring and raises."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    for node in sorted((find(tree, name) for name in names), key=lambda node: -node.lineno):
        body = node.body
        kept = ast.get_docstring(node) is not None
        start = body[0].end_lineno if kept else body[0].lineno - 1
        if not kept:                                      # a comment before the first statement is a part of the answer
            start = max(n.end_lineno for n in ast.walk(node.args) if hasattr(n, "end_lineno")) if node.args.args else node.lineno
            while not lines[start - 1].split("#")[0].rstrip().endswith(":"):
                start += 1
        indent = " " * body[0].col_offset
        lines[start:node.end_lineno] = [f'{indent}raise NotImplementedError("rung {rung_number}: {node.name}")\n']
    return "".join(lines)


def source_of(path, name):
    text = path.read_text()
    try:
        node = find(ast.parse(text), name)
    except (SyntaxError, StopIteration):
        return []
    return text.splitlines(keepends=True)[node.lineno - 1:node.end_lineno]


def copy(number, folder, done=0):
    """The step, without what is to be written for all rungs after the first `done`."""
    shutil.copytree(ROOT / NAMES[number - 1], folder, ignore=NO_LESSON)
    for i, test in enumerate(rungs(number), 1):
        for file, names in test.rung["write"].items():
            if i > done:
                (folder / file).write_text(take_out((folder / file).read_text(), names, i))


# ------------------------------------------------------------------------------------------------ the reader's commands
def refuse(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def number_of(text):
    if not text.isdecimal() or not 2 <= int(text) <= len(NAMES):
        refuse(f"which step? STEP=N, N from 2 to {len(NAMES)}; step 1 has no technique to take out")
    if int(text) > len(STEPS):
        refuse(f"step {text} is not there; there are {len(STEPS)}")
    return int(text)


def start(number, blank):
    folder = ROOT / f"exercise/step{number:02d}"
    shown = folder.relative_to(ROOT)
    if folder.exists():
        print(f"{shown} is there already and stays as it is")
    else:
        print(f"{shown} is {make(number, folder, blank)}")
    print(f"Edit {shown}/*.py; then see how far it is:\n"
          f"    make check STEP={number}       rung by rung; make hint STEP={number} if you are stuck\n"
          f"    EXERCISE={number}={shown} make test STEP={number}        all tests of step {number}")


def make(number, folder, blank):
    """The folder all at once, or none; says what it is."""
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        new = Path(temporary) / folder.name
        if blank or not (LADDER / f"test_ladder{number:02d}.py").exists():
            shutil.copytree(ROOT / NAMES[number - 2], new, ignore=NO_LESSON)
            said = f"a copy of {NAMES[number - 2]}"
        else:
            copy(number, new)
            said = f"a copy of {NAMES[number - 1]}, without the bodies of {sum(map(count, rungs(number)))} functions"
        (new / "AGENTS.md").write_text(NOTE.format(number=number))
        new.rename(folder)
    return said


def count(test):
    return sum(map(len, test.rung["write"].values()))


def title(test):
    return test.__name__.removeprefix("test_").replace("_", " ")


def check(number, folder):
    os.environ.setdefault("PATIENCE", "30")               # seconds after which ranks that wait for each other are ended
    from break_it import run_tests
    ladder = rungs(number)
    os.chdir(ROOT / "tests")
    for i, test in enumerate(ladder, 1):
        begun = time.monotonic()
        verdict = run_tests([f"{LADDER}/test_ladder{number:02d}.py::{test.__name__}"], (number, folder), "--tb=short")
        if verdict.failed or not verdict.passed:
            print(f"{i:>3} of {len(ladder)}  {title(test)}: not yet\n\n{wanted(test)}\n\ncame:    {what_came(verdict, folder)}\n\n"
                  f"make hint STEP={number}   or, to see how ours differs, make solution STEP={number}")
            remember(folder, rung=i)
            sys.exit(1)
        print(f"{i:>3} of {len(ladder)}  {title(test)}: green, {time.monotonic() - begun:.1f} s", flush=True)
    remember(folder, rung=len(ladder) + 1)
    print(f"All {len(ladder)} rungs are green. {all_tests(number, folder)}")


def all_tests(number, folder):
    return f"All tests of the step: EXERCISE={number}={folder.relative_to(ROOT)} make test STEP={number}"


def what_came(verdict, folder):
    """The last error that a rank, or the test, has met, and the line of the reader's that it came from."""
    text = verdict.text or verdict.why or "no test ran"
    lines = [re.sub(r"^E  +", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if not re.match(r"[\w.]*JobFailed: \w+\(", line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed|Refused)\b.*:", line)]
    errors.sort(key=lambda error: "by peer" in error)      # what the others meet when a rank is gone comes last
    places = re.findall(rf'File "{re.escape(str(folder))}/(\S+)", line (\d+)', text)
    place = "{}:{}: ".format(*places[-1]) if places else ""
    return place + (errors[0] if errors else verdict.why)[:400]


def wanted(test):
    places = "; ".join(f"{', '.join(names)} in {file}" for file, names in test.rung["write"].items())
    text = " ".join(test.__doc__.split())
    return f"write:   {places}\nwanted:  {text}"


def memory(folder):
    path = folder / ".rung.json"
    if not path.exists():
        return {"rung": 1, "hints": {}}
    try:
        known = json.loads(path.read_text())
        numbers = [known["rung"], *known["hints"].values()]
    except (ValueError, KeyError, TypeError, AttributeError):
        numbers = [None]
    if not all(type(number) is int and number > 0 for number in numbers):
        refuse(f"{path.relative_to(ROOT)} is not as make check and make hint leave it; without it they begin anew")
    return known


def remember(folder, **changes):
    (folder / ".rung.json").write_text(json.dumps(memory(folder) | changes))


def present(number, folder, when=""):
    ladder, now = rungs(number), memory(folder)["rung"]
    if now > len(ladder):
        print(f"All rungs are green{when}. {all_tests(number, folder)}")
        sys.exit(0)
    print(f"rung {now} of {len(ladder)}, {title(ladder[now - 1])}{when}\n{wanted(ladder[now - 1])}\n")
    return now, ladder[now - 1]


def hint(number, folder):
    now, test = present(number, folder, ", as of your last make check")
    hints = memory(folder)["hints"]
    shown = min(hints.get(str(now), 0) + 1, len(test.rung["hints"]))
    for i in range(shown):
        print(f"hint {i + 1} of {len(test.rung['hints'])}: {test.rung['hints'][i]}\n")
    remember(folder, hints=hints | {str(now): shown})


def solution(number, folder):
    """Of the present rung; of all when all are green."""
    ladder, now = rungs(number), memory(folder)["rung"]
    tests = ladder if now > len(ladder) else [present(number, folder)[1]]
    for file, name in [(file, name) for test in tests for file, names in test.rung["write"].items() for name in names]:
        theirs, ours = source_of(folder / file, name), source_of(ROOT / NAMES[number - 1] / file, name)
        sys.stdout.writelines(difflib.unified_diff(theirs, ours, f"yours/{file}: {name}", f"ours/{file}: {name}", n=100))


def main():
    number = number_of(sys.argv[1] if sys.argv[1:] else "")
    what, folder = "".join(sys.argv[2:3]), ROOT / f"exercise/step{number:02d}"
    if what not in ("", "blank", "check", "hint", "solution"):
        refuse(f"LEVEL={what}: there is LEVEL=blank")
    if what in ("", "blank"):
        start(number, what == "blank")
    elif not (LADDER / f"test_ladder{number:02d}.py").exists():
        refuse(f"step {number} has no ladder")
    elif not folder.exists():
        refuse(f"no exercise/step{number:02d}: make exercise STEP={number} makes it")
    else:
        memory(folder)                                    # a broken one is refused before anything runs
        {"check": check, "hint": hint, "solution": solution}[what](number, folder)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:                              # a folder that cannot be written
        refuse(error)
