"""Print the test files that the files changed since HEAD can touch, as arguments for pytest, and on stderr why each was chosen.

    python dev/changed.py              # uncommitted and untracked files
    python dev/changed.py --base REV   # since REV

A test depends on what it imports, and on what it or its imports name: 'tools/plan' in a string stands for all files beneath it.
tests/test_step04.py and exercises/ladder/test_ladder04.py depend on step 4 and on no other step that they do not name.
"""
import argparse
import ast
import functools
import re
import subprocess
import sys
from collections import deque
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from steps import NAMES, PYTHONPATH, ROOT, in_diff, repository_files

TESTS = ("tests/test_*.py", "exercises/ladder/test_*.py")                     # what make test runs
EVERY_STEP = {"STEPS", "NAMES", "CHANGES", "LESSON", "SUPPORT", "pairs"}       # who imports these from steps.py
SOME_STEP = {"step_dir", "full_name"}                                          # or these, and names no step, means all of them
# what a test reads and does not name
READS = {"tests/test_*.py": ["requirements.txt", "tests/pytest.ini", "tests/conftest.py"],
         "exercises/ladder/test_*.py": ["requirements.txt", "tests/pytest.ini", "exercises/conftest.py"],
         "tests/test_readmes.py": ["*.md", "*.png", "*.svg"],
         "tests/test_playbook.py": ["*.md"],
         "tests/test_ladders.py": ["exercises/ladder/*.py"],
         "tests/test_tools.py": ["Makefile"],
         "tests/test_steps.py": ["*"]}
# these make repositories of their own, and need no more of this one
ALONE = {"tests/test_carry.py": ["dev/carry.py", "dev/three_way.py", "tools/steps.py"],
         "tests/test_changed.py": ["dev/changed.py", "tools/steps.py", "Makefile"]}
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?|\w+\.\w+|step0\d_\w+")


# ------------------------------------------------------------------------------------------------ what a file depends on
def strings(nodes):
    """Return the strings of a module that are not docstrings; of an f-string what comes before its first value, and a *."""
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    left_out = parts | {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    plain = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = {node.value for node in plain if id(node) not in left_out}
    return found | {node.values[0].value + "*" * (len(node.values) > 1) for node in nodes
                    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant)}


def named(text, files):
    """Return the files that a string names: a path, all beneath a folder, all that begin with what an f-string begins with."""
    for path in PATH.findall(text):
        if path in NAMES:
            yield path
        elif text == f"{path}*":
            yield from (file for file in files if "/" in path and file.startswith(path))
        elif path in files and path != "README.md":       # most often that of another folder
            yield path
        elif "/" in path:
            yield from (file for file in files if file.startswith(f"{path.rstrip('/')}/"))


def imported(nodes, texts, name, files):
    """Return the files that a module imports: from its own folder, those on everybody's path, and those that it names."""
    folders = [str(Path(name).parent), *(str(Path(folder).relative_to(ROOT)) for folder in PYTHONPATH)]
    folders += [text for text in texts if "/" in text and len(text) < 100 and (ROOT / text).is_dir()]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for module in modules:
        paths = [f"{folder}/{module.replace('.', '/')}".removeprefix("./") for folder in folders]
        yield from [f"{path}.py" for path in paths if f"{path}.py" in files][:1]


def steps_of(nodes, texts, name):
    """Return the steps that a module asks tools/steps.py for without naming them; a test of one step has this one."""
    if own := re.search(r"/test_(?:step|ladder)(\d\d)", name):
        return NAMES[int(own[1]) - 1:int(own[1])]
    asked = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "steps" for alias in node.names}
    some = asked & SOME_STEP and not texts & set(NAMES)
    return NAMES if asked & EVERY_STEP or some else []


def depends_on(name, files):
    """Return what a file depends on, {path or step: how}."""
    found = {path: "reads" for pattern, reads in READS.items() if fnmatch(name, pattern)
             for path in files for read in reads if fnmatch(path, read)}
    if not (ROOT / name).is_file() or name == "tools/steps.py":                # it knows all and depends on nothing
        return found
    if name == "Makefile" or name.endswith(".sh"):
        return found | {path: "runs" for path in named((ROOT / name).read_text(), files)}
    if name.endswith(".py"):
        nodes = list(ast.walk(ast.parse((ROOT / name).read_text())))
        texts = strings(nodes)
        found |= {path: "names" for text in sorted(texts) for path in named(text, files)}
        found |= {step: "runs" for step in steps_of(nodes, texts, name)}
        found |= {path: "imports" for path in imported(nodes, texts, name, files)}
    if name.startswith(("tools/plan/", "tests/test_plan")):                    # what they simulate is of step 8, which they name
        found.pop("tools/simulate/__main__.py", None)
    return found


@functools.cache
def graph_of(files):
    """Return what each file outside the steps depends on, {file: {path or step: how}}."""
    files = dict.fromkeys(files)
    return {name: depends_on(name, files) for name in files if name.split("/")[0] not in NAMES}


# -------------------------------------------------------------------------------------------------- what a change touches
def reached(test, graph):
    """Return all that a test depends on, {path or step: the words that lead there}. Its own step alone, if it is of one step."""
    if test in ALONE:
        return {path: f"runs {path}" for path in ALONE[test]}
    of_one_step = re.search(r"/test_(?:step|ladder)\d\d", test)
    words, todo = {test: ""}, deque([test])
    while todo:
        here = todo.popleft()
        for path, how in graph.get(here, {}).items():
            # The test says which step its helpers take. What another test reads does not count, nor tests that a tool runs.
            others = (how == "reads" or how != "imports" and of_one_step or path in NAMES and here.startswith("tests/support/")
                      or how == "names" and "/test_" in path)
            if path not in words and (here == test or not others):
                words[path] = f"{words[here]}, which {how} {path}" if words[here] else f"{how} {path}"
                todo.append(path)
    return words


def touches(changed, test, words):
    """Return why a changed file touches a test; None if it does not."""
    if changed == test:
        return "has changed itself"
    if changed in words:
        return words[changed]
    step, _, name = changed.partition("/")
    if step in words and (in_diff(name) or Path(name).name in (ROOT / test).read_text()):
        return words[step].replace(step, changed) if words[step].endswith(step) else words[step]


def chosen(changed, files):
    """Return the tests that the changed files can touch, quick ones of the first steps first, and why, {test: words}."""
    files = tuple(sorted({*files, *changed}))
    graph = graph_of(files)
    tests = [name for name in files if any(fnmatch(name, pattern) for pattern in TESTS) and (ROOT / name).is_file()]
    tests.sort(key=lambda name: (not name.startswith("tests/test_step0"), name != "tests/test_steps.py", name))
    found = {}
    for test in tests:
        words = reached(test, graph)
        reasons = [reason for name in changed if (reason := touches(name, test, words))]
        if reasons:
            found[test] = min(reasons, key=len) + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")
    return found


def changed_since(base):
    commands = (["diff", "--name-only", "--no-renames", "--relative", base], ["ls-files", "--others", "--exclude-standard"])
    done = [subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True) for command in commands]
    return sorted({name for one in done for name in one.stdout.splitlines()}) if not done[0].returncode else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", metavar="REV")
    base = parser.parse_args().base
    changed = changed_since(base)
    if changed is None:
        parser.error(f"--base {base}: no such commit")
    found = chosen(changed, repository_files())
    said = [f"{test}: {words}" for test, words in found.items()]
    none = f"no test depends on what has changed since {base}" if changed else f"nothing has changed since {base}"
    print(*said or [none], sep="\n", file=sys.stderr)
    print(*found)


if __name__ == "__main__":
    main()
