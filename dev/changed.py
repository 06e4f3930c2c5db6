"""Print the test files that changes since a commit can affect, as pytest arguments: python dev/changed.py [REV]

A test is affected by what it imports, directly or not, and by every file or folder that these modules name; a test of one step by
that step and no other. The tests of the steps come first. The reason for each choice is printed to stderr.
"""
import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from steps import NAMES, PYTHONPATH, ROOT, repository_files

# names from tools/steps.py: a test that uses one covers all steps
ANY_STEP = re.compile(r"\b(STEPS|NAMES\[|CHANGES|pairs|step_dir|copy_repository)")


def changed_since(revision):
    """Return the files that differ from a revision, and the untracked ones."""
    commands = ["diff", "--name-only", "--no-renames", revision], ["ls-files", "--others", "--exclude-standard"]
    found = [subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in commands]
    return "".join(found).split()


@cache
def modules_of(test):
    """Return the text of a test and of all repository modules that it or its conftest.py imports, directly or not."""
    conftest = ROOT / test.split("/")[0] / "conftest.py"
    folders, texts, todo = [ROOT, *map(Path, PYTHONPATH)], {}, [ROOT / test, *[conftest] * conftest.is_file()]
    while todo:
        path = todo.pop()
        texts[str(path.relative_to(ROOT))] = text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            paths = [folder / f"{name.replace('.', '/')}.py" for name in names for folder in [path.parent, *folders]]
            todo += [one for one in paths if one.is_file() and str(one.relative_to(ROOT)) not in texts and one not in todo]
    return texts


def touches(changed, test, texts):
    """Return whether a change to this file can affect a test that imports these modules."""
    step, of_one_step = changed.split("/")[0], re.search(r"test_(?:step|ladder)(\d\d)", test)
    if step in NAMES and of_one_step:
        return step == NAMES[int(of_one_step[1]) - 1]
    if test == "tests/test_steps.py" or changed in ("requirements.txt", "pyproject.toml"):      # test_steps.py reads every file
        return True
    everything = "\n".join(text for name, text in texts.items() if name != "tools/steps.py")
    folder = changed.rpartition("/")[0]
    return (changed in texts or changed in everything or "/" in folder and folder in everything
            or step in NAMES and bool(step in texts[test] or ANY_STEP.search(texts[test]))
            or not (ROOT / changed).exists() and bool(re.search(rf"\b(from|import) {re.escape(Path(changed).stem)}\b", everything))
            or changed.endswith(".md") and "from readme import" in everything)


def main(revision="HEAD"):
    try:
        changed = changed_since(revision)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error.stderr.strip().splitlines()[0]}")
    tests = [name for name in repository_files() if re.fullmatch(r"(tests|exercises/ladder)/test_\w+\.py", name)]
    if not changed:
        print(f"nothing has changed since {revision}", file=sys.stderr)
    tests.sort(key=lambda name: (not name.startswith("tests/test_step0"), name))
    for test in tests:
        texts = modules_of(test)
        by = [name for name in changed if touches(name, test, texts)]
        if by:
            print(test, end=" ")
            print(f"{test}: {by[0]}" + f" and {len(by) - 1} more" * (len(by) > 1), file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
