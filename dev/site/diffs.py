"""Tell the site's pages about the code: each changed file of a step as rows, where a page shows a piece of it, and what else
touches a row: a rung of the ladder, a planted mistake. Only the standard library is used."""
import ast
import subprocess
import sys
from collections import namedtuple
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "dev"), str(ROOT / "exercises")]

import diff
from patched import edits, planted_mistakes
from readme import blocks, hunks
from steps import LESSON, STEPS, pages_of

Row = namedtuple("Row", "kind text old new")              # kind: ' ', '-' or '+'; its line number before and after
Card = namedtuple("Card", "number page line file first last")  # a page's hunk: its block's line, and the rows that it shows
Mark = namedtuple("Mark", "kind label title where")


def before(step):
    index = STEPS.index(step)
    return STEPS[index - 1] if index else None


@cache
def changed(step):
    """Return {file: its rows} for the lesson, and for what supports it, in the order of `make diff`. In step 1 all is new."""
    if not before(step):
        names = [path.name for path in (ROOT / step).glob("*.py") if not path.name.startswith("by_hand")]
        lesson = [name for name in LESSON[step] if name in names]
        return [{name: rows(None, step, name) for name in part} for part in (lesson, sorted({*names} - {*lesson}))]
    return [{name: rows(before(step), step, name) for name in part} for part in diff.changed_files(before(step), step)]


@cache
def rows(old, new, name):
    """Return a file as its whole diff. The rows without '-' are the file; those without '+' are the file of the step before."""
    if not old or not (ROOT / old / name).exists():
        return [Row("+", line, None, number) for number, line in enumerate((ROOT / new / name).read_text().splitlines(), 1)]
    command = ["diff", "-U1000000", str(ROOT / old / name), str(ROOT / new / name)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[3:]
    found, at = [], {"-": 0, "+": 0}
    for line in lines:
        kind = line[0]
        for side in at:
            at[side] += kind in (side, " ")
        found.append(Row(kind, line[1:], at["-"] if kind != "+" else None, at["+"] if kind != "-" else None))
    return found


@cache
def functions(step, name):
    """Return (name, line of def, last line) for each function and method of a step's file; a nested one comes after its outer."""
    if not name.endswith(".py"):
        return []
    found = []

    def visit(node, prefix):
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                found.append((prefix + child.name, child.lineno, child.end_lineno))
                visit(child, f"{prefix}{child.name}.")
    visit(ast.parse((ROOT / step / name).read_text()), "")
    return found


@cache
def function_at(step, name, new):
    """Return the line of the def of the function that contains line `new` of the new file, or None."""
    return next((start for _, start, end in functions(step, name) if start <= new <= end), None)


@cache
def cards(step):
    """Return a card for each hunk of a step's pages. If a hunk is twice in the diff, take the next place after the last card."""
    found, last = [], ("", -1)
    for page in pages_of(step):
        for block in blocks((ROOT / page).read_text()):
            for hunk in hunks(block.text) if block.language == "diff" else []:
                places = occurrences(step, hunk)
                if not places:
                    raise ValueError(f"{page}, line {block.line}: not in the diff: {hunk[0]}")
                file, first = min(places, key=lambda place: (place[0] != last[0], place[1] < last[1]))
                found.append(Card(len(found) + 1, page, block.line, file, first, first + len(hunk) - 1))
                last = file, first
    return found


def html_of(page):
    """Return the file name of a step's page in the site."""
    return Path(page).name.replace("README.md", "index.md").replace(".md", ".html")


def occurrences(step, hunk):
    wanted = [line.rstrip() for line in hunk]
    found = []
    for part in changed(step):
        for name, lines in part.items():
            text = [(row.kind + row.text).rstrip() for row in lines]
            found += [(name, i) for i in range(len(text)) if text[i:i + len(wanted)] == wanted]
    return found


@cache
def rungs(step):
    """Return [(number, name of the test, {file: functions})] for a step's ladder. Parse it, since importing would need torch."""
    path = ROOT / f"exercises/ladder/test_ladder{step[4:6]}.py"
    body = ast.parse(path.read_text()).body if path.exists() else []
    named = {node.targets[0].id: node.value for node in body if isinstance(node, ast.Assign) and hasattr(node.targets[0], "id")}

    def value(expression):
        names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)} & {*named}
        return eval(compile(ast.Expression(expression), path, "eval"), {name: value(named[name]) for name in names})
    found = []
    for node in body:
        for mark in getattr(node, "decorator_list", []):
            if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "rung":
                found.append((len(found) + 1, node.name, value(mark.args[0])))
    return found


@cache
def mistakes(step):
    """Return (name, file, line) for each line of the step's files that a planted mistake changes."""
    found = []
    for name, mistake in planted_mistakes().items():
        for edit in edits(mistake) if name.startswith(step[:6]) else []:
            above = (ROOT / step / edit["file"]).read_text().partition(edit["old"])[0].count("\n")
            pieces = edit["old"].splitlines(), edit["new"].splitlines()
            for kind, first, last, *_ in SequenceMatcher(None, *pieces, autojunk=False).get_opcodes():
                if kind != "equal":                       # what is only added marks the line before it
                    found += [(name, edit["file"], max(above + line, 1)) for line in range(first + 1, last + 1) or [first]]
    return found


@cache
def marks(step, name):
    """Return {index of a row: marks}: a page shows it, a rung wants its function, a planted mistake touches it."""
    found, lines = {}, next(part[name] for part in changed(step) if name in part)
    index_of = {row.new: index for index, row in enumerate(lines) if row.new}

    def add(index, mark):
        if mark not in found.setdefault(index, []):
            found[index].append(mark)
    for card in cards(step):
        if card.file == name:
            add(card.first, Mark("said", f"§{card.number}", "the lesson shows this", f"{html_of(card.page)}#card-{card.number}"))
    starts = {function: start for function, start, _ in functions(step, name)}
    for number, test, write in rungs(step):
        for function in write.get(name, []):
            if function in starts:
                add(index_of[starts[function]], Mark("rung", f"rung {number}", f"the ladder wants {function}: {test}",
                                                     "LAB.html#the-ladder"))
    for mistake, file, line in mistakes(step):
        if file == name and line in index_of:
            add(index_of[line], Mark("mistake", "mistake", f"planted mistake: {mistake}", "LAB.html#break-it"))
    return found
