"""Exercises: a step without its technique, for the reader to put back, rung by rung.

    python exercises/exercise.py 4                 # copy step 4 to exercise/step04, without the function bodies of its technique
    python exercises/exercise.py 4 FROM=3          # the same, but keep our code for the rungs before the third
    python exercises/exercise.py 4 LEVEL=blank     # copy step 3 instead, and add only signatures and docstrings
    python exercises/exercise.py 4 restart         # start again (FROM and LEVEL work here, too); the old folder becomes step04.1
    python exercises/exercise.py 4 check           # test up to the first red rung, and show what it wants; RUNG=5: only that
    python exercises/exercise.py 4 watch           # check whenever you save a file
    python exercises/exercise.py 4 hint            # show the next hint for that rung; there are three
    python exercises/exercise.py 4 solution        # compare your functions with ours, in that rung; if all are green, in all

If your ranks wait for each other for ever, they are stopped after half a minute, and the rung stays red (PATIENCE=SECONDS changes
the limit).

exercises/ladder/test_ladder04.py has a test for each rung, marked `rung`, which names the functions to write and the hints.
"""
import ast
import difflib
import importlib
import itertools
import json
import linecache
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from prove.processes import frames
from refuse import refuse, run_and_exit
from steps import NAMES, NOT_IN_DIFF, PYTHONPATH, ROOT, STEPS

LADDER = ROOT / "exercises/ladder"
RED = 3                                                   # the exit status when a rung is not green yet, which is not an error
NO_LESSON = shutil.ignore_patterns(*NOT_IN_DIFF)
NOTE = """# A note to coding assistants

This folder is an exercise. Whoever works here wants to learn how the technique works by writing it.
Explain ideas, ask what they expect to happen, help to read error messages, and point to `make hint STEP={number}`.
Do not write the bodies of the functions that raise NotImplementedError, and do not copy them from the repository.
"""
MAKEFILE = """# make check, and the others, in this folder as at the top of the repository
check hint solution watch restart:
\t@$(MAKE) --no-print-directory -C ../.. $@ STEP={number}

.PHONY: check hint solution watch restart
"""


def rung(write, hints):
    """Mark a test of a ladder. write: {file: the functions to be written in it}; hints: three paragraphs."""
    paragraphs = [" ".join(hint.split()) for hint in hints.strip().split("\n\n")]

    def mark(test):
        test.rung = dict(write=write, hints=paragraphs)
        return test
    return mark


def rungs(number):
    """Return the tests of a step's ladder, in order."""
    sys.path += [path for path in PYTHONPATH if path not in sys.path]
    module = importlib.import_module(f"test_ladder{number:02d}")
    return [value for value in vars(module).values() if hasattr(value, "rung")]


# ------------------------------------------------------------------------------------------------ taking out
def find(tree, name):
    """Return the node of the function `name` or `Class.name` of a module."""
    node = tree
    for part in name.split("."):
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part)
    return node


def take_out(source, names, rung_number):
    """Replace the bodies of these functions: each keeps its docstring and raises NotImplementedError. Return the new source."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    for node in sorted((find(tree, name) for name in names), key=lambda node: -node.lineno):
        body = node.body
        kept = ast.get_docstring(node) is not None
        start = body[0].end_lineno if kept else body[0].lineno - 1
        if not kept:                                      # a comment before the first statement is part of the answer
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
    """Copy the step, and take out what the rungs after the first `done` ask for."""
    shutil.copytree(ROOT / NAMES[number - 1], folder, ignore=NO_LESSON)
    for i, test in enumerate(rungs(number), 1):
        for file, names in test.rung["write"].items():
            if i > done:
                (folder / file).write_text(take_out((folder / file).read_text(), names, i))


# ------------------------------------------------------------------------------------------------ a blank level's signatures
def copy_blank(number, folder):
    """Copy the step before, and add skeletons of what the rungs ask for and that step lacks: whole files, and functions at the end
    of existing files. Return the names of the new files."""
    shutil.copytree(ROOT / NAMES[number - 2], folder, ignore=NO_LESSON)
    wanted = {}
    for i, test in enumerate(rungs(number), 1):
        for file, names in test.rung["write"].items():
            wanted.setdefault(file, {}).update(dict.fromkeys(names, i))
    new = [file for file in wanted if not (folder / file).exists()]
    ours = {file: (ROOT / NAMES[number - 1] / file).read_text() for file in new}
    others = "".join(skeleton(ours[file], wanted[file]) for file in new)
    for file in new:
        (folder / file).write_text(skeleton(ours[file], wanted[file], imported_from(file.removesuffix(".py"), others)))
    for file in new:
        (folder / file).write_text(without_unknown_imports((folder / file).read_text(), folder))
    for file in wanted.keys() - set(new):
        ours, path = (ROOT / NAMES[number - 1] / file).read_text(), folder / file
        for name, i in wanted[file].items():
            if not source_of(path, name):
                path.write_text(path.read_text() + "\n\n" + function_without_body(ours, name, i))
    return new


def function_without_body(source, name, rung_number):
    source = take_out(source, [name], rung_number)
    node, lines = find(ast.parse(source), name), source.splitlines(keepends=True)
    return "".join(lines[slice(*span(node, lines))])


def imported_from(module, source):
    return {alias.name for node in ast.parse(source).body if isinstance(node, ast.ImportFrom) and node.module == module
            for alias in node.names}


def skeleton(source, wanted, used=()):
    """Keep the functions {name: rung} of a file without their bodies, __init__ of their classes, the names `used` by other files,
    and whatever all these use from the rest."""
    for name, i in wanted.items():
        source = take_out(source, [name], i)
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    roots = {name.split(".")[0] for name in wanted}
    kept, left_out = set(), set()
    todo = [node for node in tree.body if getattr(node, "name", None) in roots | set(used)]
    while todo:
        node = todo.pop()
        kept.add(node)
        if isinstance(node, ast.ClassDef) and node.name in roots:
            names = {"__init__", *(name.split(".")[1] for name in wanted if name.startswith(f"{node.name}."))}
            left_out |= {part for part in node.body if isinstance(part, ast.FunctionDef) and part.name not in names}
        used = {n.id for part in parts_of(node, left_out) for n in ast.walk(part) if isinstance(n, ast.Name)}
        todo += [other for other in tree.body if other not in kept and used & bound(other)]
    drop, text = {line for node in left_out for line in range(*span(node, lines))}, ""
    for node in tree.body:
        if node in kept or node is tree.body[0] and isinstance(node, ast.Expr):    # the docstring
            space = 2 if isinstance(node, ast.FunctionDef | ast.ClassDef) else not isinstance(node, ast.Import | ast.ImportFrom)
            body = "".join(lines[i] for i in range(*span(node, lines)) if i not in drop)
            text += "\n" * (space * bool(text)) + body.rstrip() + "\n"
    return re.sub(r"\n{3,}(?= )", "\n\n", text)        # where methods were left out


def parts_of(node, left_out):
    """Return a node in a list; or of a class its bases, its decorators and the body, without the methods that are left out."""
    if not isinstance(node, ast.ClassDef):
        return [node]
    return [*node.bases, *node.decorator_list, *(part for part in node.body if part not in left_out)]


def bound(node):
    """Return the names that a top-level statement binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign):
        return {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return {getattr(node, "name", None)}


def span(node, lines):
    """Return a node's first line, counting decorators and the comments right above it, and the line after its last."""
    start = min([node.lineno, *(n.lineno for n in getattr(node, "decorator_list", []))]) - 1
    while start and lines[start - 1].lstrip().startswith("#") and "-----" not in lines[start - 1]:
        start -= 1
    return start, node.end_lineno


def without_unknown_imports(source, folder):
    """Remove the imports of names that other files of the folder do not have."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.ImportFrom):
            path = folder / f"{node.module}.py"
            ours = (ROOT / NAMES[-1] / path.name).exists()
            there = set().union(*map(bound, ast.parse(path.read_text()).body)) if path.exists() else set()
            known = [alias for alias in node.names if not ours or alias.name in there]
            if known != node.names:
                node.names = known
                lines[node.lineno - 1:node.end_lineno] = [ast.unparse(node) + "\n"] if known else []
    return "".join(lines)


# ------------------------------------------------------------------------------------------------ the reader's commands
def number_of(text):
    if not text.isdecimal() or not 2 <= int(text) <= len(NAMES):
        refuse(f"STEP={text}: must be a step from 2 to {len(NAMES)}; step 1 has no technique to write")
    if int(text) > len(STEPS):
        refuse(f"STEP={text}: this repository has only {len(STEPS)} steps")
    return int(text)


def start(number, folder, blank, first):
    shown = folder.relative_to(ROOT)
    if folder.exists():
        print(f"{shown} already exists, and was not changed; make restart STEP={number} renames it and starts again")
    else:
        print(f"{shown} is {make(number, folder, blank, first)}")
    print(f"Edit {shown}/*.py. Then, here or in {shown}:\n"
          f"    make check STEP={number}       test rung by rung; make watch STEP={number} does so whenever you save\n"
          f"    make hint STEP={number}        if you are stuck\n"
          f"    EXERCISE={number}={shown} make test STEP={number}        the tests of step {number}, except the long ones")


def restart(number, folder, blank, first):
    old = next(old for n in itertools.count(1) if not (old := folder.with_name(f"{folder.name}.{n}")).exists())
    folder.rename(old)
    print(f"{folder.relative_to(ROOT)} was renamed to {old.relative_to(ROOT)}")
    start(number, folder, blank, first)


def make(number, folder, blank, first):
    """Create the folder, completely or not at all. Return what it is, in words."""
    folder.parent.mkdir(exist_ok=True)
    before, step = NAMES[number - 2], NAMES[number - 1]
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        new = Path(temporary) / folder.name
        if not has_ladder(number):
            shutil.copytree(ROOT / before, new, ignore=NO_LESSON)
            said = f"a copy of {before}"
        elif blank:
            said = f"a copy of {before}, with empty functions for the rungs; new files: {', '.join(copy_blank(number, new))}"
        else:
            copy(number, new, first - 1)
            said = f"a copy of {step}, without the bodies of {sum(map(count, rungs(number)[first - 1:]))} functions"
        (new / "AGENTS.md").write_text(NOTE.format(number=number))
        (new / "Makefile").write_text(MAKEFILE.format(number=number))
        if first > 1:
            remember(new, rung=first)
        new.rename(folder)
    return said


def has_ladder(number):
    return (LADDER / f"test_ladder{number:02d}.py").exists()


def count(test):
    return sum(map(len, test.rung["write"].values()))


def title(test):
    return test.__name__.removeprefix("test_").replace("_", " ")


# ------------------------------------------------------------------------------------------------ check
def check(number, folder, only):
    ladder = rungs(number)
    first, last = (only, only) if only else (1, len(ladder))
    if not climb(number, folder, first, last):
        sys.exit(RED)
    if not only:
        print(f"All {len(ladder)} rungs are green. {all_tests(number, folder)}")


def climb(number, folder, first, last):
    """Climb from one rung to the next, up to the first that is not green. Return whether all are."""
    ladder = rungs(number)
    import fixtures
    from patched import run_tests
    os.chdir(ROOT / "tests")
    signal.signal(signal.SIGINT, lambda *_: (fixtures.shared_pool().stop(), os._exit(130)))     # pytest would call it a failure
    for i in range(first, last + 1):
        begun, test = time.monotonic(), ladder[i - 1]
        verdict = run_tests([f"{LADDER}/test_ladder{number:02d}.py::{test.__name__}"], (number, folder), "--tb=short")
        if verdict.failed or not verdict.passed:
            mine = {file: [name for other in ladder[:i] for name in other.rung["write"].get(file, [])] for file in files_of(ladder)}
            print(f"{i:>3} of {len(ladder)}  {title(test)}: not yet\n\n{wanted(test)}\n\n{what_came(verdict, folder, mine)}\n\n"
                  f"make hint STEP={number}   or, to compare your code with ours, make solution STEP={number}", flush=True)
            remember(folder, rung=i)
            return False
        print(f"{i:>3} of {len(ladder)}  {title(test)}: green, {time.monotonic() - begun:.1f} s", flush=True)
        remember(folder, rung=max(memory(folder)["rung"], i + 1) if first > 1 else i + 1)
    return True


def files_of(ladder):
    return {file for test in ladder for file in test.rung["write"]}


def all_tests(number, folder):
    return f"To run the step's tests, except the long ones: EXERCISE={number}={folder.relative_to(ROOT)} make test STEP={number}"


def watch(number, folder):
    """Check again from the current rung whenever a file is saved. The process that workers are forked from stays, with torch
    loaded."""
    ladder, seen = rungs(number), None
    from harness import shared_pool
    print(f"Checking whenever you save a file in {folder.relative_to(ROOT)}; Ctrl-C ends it.", flush=True)
    while True:
        now = saved(folder)
        if now == seen:
            time.sleep(0.1)
            continue
        seen = now
        first = min(memory(folder)["rung"], len(ladder))
        shared_pool().stop()                              # they have imported what was there before
        if climb(number, folder, first, len(ladder)):
            print(f"The last rung is green. To check all of them again: make check STEP={number}", flush=True)


def saved(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("*.py") if path.exists()}


# ------------------------------------------------------------------------------------------------ what a red rung says
MOST = 2000                                               # characters of a reason: the rest is cut off
# the parts in which equal messages of several ranks differ: an object's address, and the rank and the time before an error of gloo
OF_ONE_RANK = r" at 0x[0-9a-f]+|\[rank\d+\]:\[\w\d{4} [\d:.]+ [^]]*\] "
NOT_IN_GROUP = "is not in the group, whose rank 0 is rank 1 here"        # what a job returns on rank 0 if it is in no group


def what_came(verdict, folder, mine):
    """Say why the rung is red, where each rank stood if one waited for another, and what the reader's functions printed."""
    from harness import shared_pool
    last, error = shared_pool().last, last_error(verdict.text)
    from_ranks = last and re.match(r"(harness\.)?(JobFailed|Refused)\b", error)
    reason = of_ranks(last, folder, mine) if from_ranks else error or verdict.why or "no test ran"
    if len(reason) > MOST:
        reason = f"{reason[:MOST]} ... (and {len(reason) - MOST:,} characters more)"
    said = [("came:    ", reason)]
    if printed := what_was_printed(last):
        said.append(("printed: ", printed))
    return "\n\n".join(title + text.replace("\n", "\n         ") for title, text in said)


def last_error(text):
    """Return the last exception of a test, as pytest shows it, without what pytest adds about the values of an assert."""
    block = []
    for before, line in itertools.pairwise(["", *text.splitlines()]):
        if line.startswith("E  "):
            block = (block if before.startswith("E  ") else []) + [re.sub(r"^E {3}", "", line)]
    end = next((i for i, line in enumerate(block) if i and re.match(r"\s*(assert |\+ +where )", line)), None)
    return textwrap.dedent("\n".join(block[:end])).strip()


def of_ranks(last, folder, mine):
    """Return the ranks' errors. Those caused by another rank's failure, and waiting, count only if there are no others."""
    errors = {}
    for rank, (kind, result, printed) in sorted(last.answers.items()):
        if kind == "error":
            text = re.sub(OF_ONE_RANK, "", of_traceback(result, folder, mine))
            errors.setdefault(text, []).append(rank)
        elif kind == "exit" and result:
            refused = [line for line in printed.splitlines() if line.startswith("error:")]
            errors.setdefault("\n".join(refused) or f"ended with exit status {result}", []).append(rank)
    real = {text: ranks for text, ranks in errors.items() if not re.search("by peer|Connection reset|Broken pipe", text)}
    if real:
        world = len(last.stood) + sum(result != NOT_IN_GROUP for _, result, _ in last.answers.values())
        return "\n".join((f"rank {', '.join(map(str, ranks))}: " if len(ranks) < world else "") + text
                         for text, ranks in real.items())
    patience = f", or loop for ever (for {last.timeout} s)" if last.stood else ""
    return "\n".join([f"ranks wait for something that never comes{patience}:",
                      *(f"rank {rank} {text}" for rank, text in sorted(where_each_stood(last, folder, mine).items()))])


def where_each_stood(last, folder, mine):
    stood = {rank: f"waits: {place(frames(stack)[::-1], folder, mine, code=True)}" for rank, stack in last.stood.items()}
    for rank, (kind, result, _) in last.answers.items():
        if kind == "error" and "Traceback" in result:
            stood[rank] = f"waited until another rank ended: {place(frames(result), folder, mine, code=True)}"
        else:
            ended = NOT_IN_GROUP if result == NOT_IN_GROUP else "had ended"
            stood[rank] = ended if kind == "ok" else f"ended: {died(result, folder, mine)}"
    return stood


def of_traceback(text, folder, mine):
    """Return the last exception and its message, after the place where it was raised."""
    if text.startswith("the process died"):
        return died(text, folder, mine)
    text = re.split(r"^Traceback \(most recent call last\):\n", text, flags=re.M)[-1]
    message = re.search(r"^\S.*", text, re.M | re.S)
    where = place(frames(text), folder, mine)
    return f"{where}: " * bool(where) + (message[0].strip() if message else text.strip())


def died(text, folder, mine):
    """Describe a process that died without an exception, or exited with a status."""
    first, _, stack = str(text).partition("\n")
    where = place(frames(stack)[::-1], folder, mine, code=True)
    why = " (gloo aborts if the tensors of two ranks differ in size)" if "exit code -6" in first else ""
    return f"{first}{why}{', at ' * bool(where)}{where}"


def place(calls, folder, mine, code=False):
    """Return the innermost of the calls that is in a function the reader wrote, or else in the folder, or else in a test."""
    here = [(Path(file).name, line) for file, line, _ in calls if Path(file).parent == folder]
    named = [(file, line, name) for file, line in here if (name := function_at(folder / file, line, mine.get(file, [])))]
    if named:
        file, line, name = named[-1]
        inner = "" if here[-1] == (file, line) or code else f" (in {here[-1][0]}:{here[-1][1]}, which it calls)"
        said = f"{file}:{line} in {name}{inner}"
    elif here:
        file, line = here[-1]
        said = f"{file}:{line}"
    else:
        tests = [(file, line) for file, line, _ in calls if Path(file).parent == LADDER]
        if not tests or not code:
            return ""
        file, line = tests[-1]
        said = f"in the test, {Path(file).name}:{line}"
    linecache.checkcache()
    return f"{said}: {linecache.getline(str(folder / file), line).strip()}" if code else said


def function_at(path, line, names):
    """Return which of these functions of a file contains this line."""
    try:
        tree = ast.parse(path.read_text())
    except SyntaxError:
        return None
    for name in names:
        try:
            node = find(tree, name)
        except StopIteration:
            continue
        if node.lineno <= line <= node.end_lineno:
            return name


def what_was_printed(last):
    """Return the last lines that each rank printed, without refusals."""
    shown = {rank: [line for line in text.splitlines() if line.strip() and not line.startswith("error:")][-10:]
             for rank, text in (last.printed if last else {}).items()}
    return "\n".join(f"rank {rank}: {line}" for rank, lines in shown.items() for line in lines)


# ------------------------------------------------------------------------------------------------ what is wanted, hints, ours
def wanted(test):
    places = "; ".join(f"{', '.join(names)} in {file}" for file, names in test.rung["write"].items())
    return f"write:   {places}\n{wrapped('wanted:  ', ' '.join(test.__doc__.split()))}"


def wrapped(title, text):
    return textwrap.fill(text, 120, initial_indent=title, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)


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
        refuse(f"{path.relative_to(ROOT)} is not what make check wrote; delete it to start at the first rung")
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
        print(wrapped(f"hint {i + 1} of {len(test.rung['hints'])}: ", test.rung["hints"][i]) + "\n")
    remember(folder, hints=hints | {str(now): shown})


def solution(number, folder):
    """Show how the functions of the current rung differ from ours; once all rungs are green, those of all rungs."""
    ladder, now = rungs(number), memory(folder)["rung"]
    tests = ladder if now > len(ladder) else [present(number, folder)[1]]
    for file, name in [(file, name) for test in tests for file, names in test.rung["write"].items() for name in names]:
        theirs, ours = source_of(folder / file, name), source_of(ROOT / NAMES[number - 1] / file, name)
        sys.stdout.writelines(difflib.unified_diff(theirs, ours, f"yours/{file}: {name}", f"ours/{file}: {name}", n=100))


def main():
    os.environ.setdefault("PATIENCE", "30")               # seconds after which ranks that wait for each other are stopped
    number = number_of(sys.argv[1] if sys.argv[1:] else "")
    given = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
    given = {key: value for key, value in given.items() if value}              # make passes empty values for what nobody has set
    what, *more = [word for word in sys.argv[2:] if "=" not in word] or ["exercise"]
    folder = ROOT / f"exercise/step{number:02d}"
    commands = dict(exercise=start, restart=restart, check=check, watch=watch, hint=hint, solution=solution)
    takes = dict(exercise=("LEVEL", "FROM"), restart=("LEVEL", "FROM"), check=("RUNG",)).get(what, ())
    if what not in commands:
        refuse(f"{what}: unknown command; choose from {', '.join(commands)}")
    if more:
        refuse(f"{more[0]}: not understood; write a rung as RUNG=5, and a start as FROM=3 or LEVEL=blank")
    if unknown := [key for key in given if key not in takes]:
        refuse(f"{unknown[0]}=: make {what} does not take this; leave it out")
    if given.get("LEVEL", "blank") != "blank":
        refuse(f"LEVEL={given['LEVEL']}: must be blank")
    if "LEVEL" in given and "FROM" in given:
        refuse(f"FROM={given['FROM']}: LEVEL=blank always starts at the first rung; leave out one of the two")
    if what != "exercise" and not folder.exists():
        refuse(f"exercise/step{number:02d} does not exist; run make exercise STEP={number} first")
    if what in ("exercise", "restart"):
        return commands[what](number, folder, "LEVEL" in given, rung_of(given, "FROM", number) or 1)
    if not has_ladder(number):
        refuse(f"STEP={number}: has no ladder, so there are no rungs to check")
    memory(folder)                                        # refuse a broken file before anything runs
    commands[what](number, folder, *([rung_of(given, "RUNG", number)] if what == "check" else []))


def rung_of(given, key, number):
    """Return the rung's number that was given, or None."""
    if key not in given:
        return None
    last = len(rungs(number)) if has_ladder(number) else 0
    if not given[key].isdecimal() or not 1 <= int(given[key]) <= last:
        refuse(f"{key}={given[key]}: must be a rung of step {number}, 1 to {last}")
    return int(given[key])


if __name__ == "__main__":
    run_and_exit(main)
