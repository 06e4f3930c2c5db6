"""Print the test files for the changes since a commit, the closest first, as pytest arguments: python dev/changed.py [REV]

A changed test file stands for itself, a file of a step for tests/test_steps.py and tests/test_stepNN.py, and a page for
tests/test_readmes.py. Any file also stands for tests/test_NAME.py, where NAME is the name of the file or of a folder that it is in:
tools/plan/costs.py for test_plan.py. A module of tests/support stands for the tests that import it, at once or through another such
module. A file that no rule knows selects all tests. Each choice and its reason are printed to stderr.
"""
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from steps import NAMES, ROOT, repository_files

SUPPORT = Path("tests/support")
TEST = re.compile(r"(?:tests|exercises/ladder)/test_(\w+)\.py")


def changed_since(revision):
    """Return the files that differ from a revision, and the untracked ones."""
    commands = ["diff", "--name-only", "--no-renames", revision], ["ls-files", "--others", "--exclude-standard"]
    found = [subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in commands]
    return "".join(found).splitlines()


def importing(modules, files):
    """Return the files that import one of the modules."""
    imports = re.compile(rf"^\s*(?:from|import) (?:.*\b)?(?:{'|'.join(modules)})\b", re.MULTILINE)
    return [file for file in files if imports.search((ROOT / file).read_text())]


def chosen_for(changed, tests):
    """Return the tests of a changed file: those of its name and folders, or all."""
    path = Path(changed)
    if changed == "tools/steps.py":                       # everything uses it
        return tests
    if path.parent == SUPPORT and path.suffix == ".py":
        modules, found = set(), {path.stem}
        while found > modules:
            modules, others = found, sorted((ROOT / SUPPORT).glob("*.py"))
            found = modules | {other.stem for other in importing(modules, others)}
        return not importing(modules, ["tests/conftest.py"]) and importing(modules, tests) or tests
    names = {path.stem, *path.parts[1:-1]}
    if path.suffix == ".md":
        names.add("readmes")
    elif path.parts[0] in NAMES and not names & {"figures", "by_hand"}:
        names |= {"steps", path.parts[0].split("_")[0]}
    by_name = [test for test in tests if test.startswith("tests/") and TEST.fullmatch(test)[1] in names]
    return [changed] if changed in tests else by_name or tests


def main(revision="HEAD"):
    try:
        changed = changed_since(revision)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error.stderr.strip().splitlines()[0]}")
    if not changed:
        print(f"nothing has changed since {revision}", file=sys.stderr)
    tests = [name for name in repository_files() if TEST.fullmatch(name)]
    by = {test: [name for name in changed if test in chosen_for(name, tests)] for test in tests}
    # first what was edited, then whether the steps differ only where they should, then the earliest step
    order = sorted(tests, key=lambda test: (test not in changed, test != "tests/test_steps.py", "/test_step" not in test, test))
    for test in filter(by.get, order):
        print(test, end=" ")
        print(f"{test}: {by[test][0]}" + f" and {len(by[test]) - 1} more" * (len(by[test]) > 1), file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
