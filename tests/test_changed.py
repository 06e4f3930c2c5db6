"""dev/changed.py chooses the tests of what has changed by the rules in its docstring, the closest first."""
import re
import shutil
import subprocess
import sys

import pytest
from changed import TEST, chosen_for
from steps import ROOT, clean_environment, repository_files

TESTS = [name for name in repository_files() if TEST.fullmatch(name)]


@pytest.mark.parametrize("changed, wanted", [
    ("step04_tp_sp/tensor_parallel.py", "step04 steps"),
    ("step03_zero/README.md", "readmes"),
    ("step06_pp/by_hand.py", "by_hand"),
    ("docs/wild.md", "readmes wild"),
    ("tools/plan/costs.py", "plan"),
    ("exercises/hangs/hang3.py", "hangs"),
    ("exercises/extensions/muon.patch", "extensions"),
    ("dev/carry.py", "carry"),
    ("tests/test_wild.py", "wild"),
    ("tests/support/plants.py", "prove"),
    ("exercises/ladder/test_ladder05.py", "ladder05")])
def test_a_file_selects_its_tests(changed, wanted):
    assert (ROOT / changed).is_file()
    assert sorted(TEST.fullmatch(test)[1] for test in chosen_for(changed, TESTS)) == wanted.split()


def test_a_module_of_the_tests_selects_those_that_import_it_at_once_or_not():
    chosen = {TEST.fullmatch(test)[1] for test in chosen_for("tests/support/operations.py", TESTS)}
    # observe.py imports operations.py
    assert "import operations" not in (ROOT / "tests/test_step05.py").read_text()
    assert {"step05", "tools"} <= chosen and not {"readmes", "carry", "changed"} & chosen


@pytest.mark.parametrize("changed", ["tools/steps.py", "tests/support/fixtures.py", "tests/conftest.py", "pyproject.toml"])
def test_a_file_that_no_rule_knows_selects_all(changed):
    assert (ROOT / changed).is_file() and chosen_for(changed, TESTS) == TESTS != []


@pytest.fixture
def repository(tmp_path):
    for name in ("Makefile", "dev/changed.py", "tools/steps.py", "pyproject.toml", ".gitignore"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("tests/support", "step01_single_gpu", "step02_dp"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("step01", "step02", "steps", "other", "alone"):
        test = "import os\ndef test(): assert not {'CHANGED', 'BASE'} & os.environ.keys()\n"
        (tmp_path / f"tests/test_{name}.py").write_text(test)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder, *command):
    who = ["-c", "user.name=reader", "-c", "user.email=reader@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *command], cwd=folder, check=True)


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a commit")


def make_test(folder, *words):
    """Return the exit status, the output, and the names of the chosen tests, in order."""
    command = ["make", "-s", "test", "CHANGED=1", *words, f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True)
    return done.returncode, done.stdout, re.findall(r"^tests/test_(\w+)\.py: ", done.stderr, re.MULTILINE)


def test_make_test_runs_the_tests_of_what_has_changed_in_order(repository):
    assert make_test(repository) == (0, "", [])
    for step in ("step01_single_gpu", "step02_dp"):
        (repository / step / "train.py").write_text("new\n")
    (repository / "tests/test_other.py").write_text("def test(): assert False\n")
    status, said, chosen = make_test(repository)
    assert status == 2 and "1 failed, 3 passed" in said and chosen == ["other", "steps", "step01", "step02"]
    commit(repository)
    assert make_test(repository)[2] == []
    assert make_test(repository, "BASE=HEAD^")[2] == ["other", "steps", "step01", "step02"]
    status, said, chosen = make_test(repository, "BASE=nowhere")
    assert status == 2 and said == "" and chosen == []
