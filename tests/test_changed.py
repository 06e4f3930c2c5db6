"""dev/changed.py chooses every test that a change can affect, and leaves out most others."""
import re
import shutil
import subprocess
import sys

import pytest
from changed import modules_of, touches
from steps import ROOT, clean_environment, repository_files

TESTS = [name for name in repository_files() if re.fullmatch(r"(tests|exercises/ladder)/test_\w+\.py", name)]


def affected_by(changed):
    """Return the names of the affected tests, such as 'step04', 'ladder04', 'plan'."""
    return {test.rsplit("/test_", 1)[1].removesuffix(".py") for test in TESTS if touches(changed, test, modules_of(test))}


# the changed file, tests that must run, tests that must be left out
@pytest.mark.parametrize("changed, wanted, others", [
    ("step04_tp_sp/tensor_parallel.py",
     "step04 steps readmes ladder04 ladders simulate extensions by_hand",
     "step03 step05 step08 ladder05"),
    ("step08_5d/config.py", "step08 ladder08 plan simulate nothing_lost", "step05 ladder07"),
    ("step06_pp/by_hand.py", "by_hand readmes", "step05 step07 hangs"),
    ("step03_zero/README.md", "readmes extensions", "step04 hangs"),
    ("docs/FAQ.md", "readmes extensions", "step01 plan"),
    ("tools/plan/costs.py", "plan ladder08", "step08 hangs"),
    ("tools/prove/causes.py", "prove readmes", "hangs carry"),
    ("step08_5d/zero.py", "prove step08", "step05 hangs"),
    ("tools/simulate/play.py", "simulate plan step03", "step01 hangs"),
    ("tests/support/observe.py", "step02 step08 ladder02", "wild carry"),
    ("tests/support/fixtures.py", "step01 wild ladder08", ""),
    ("exercises/ladder/test_ladder05.py", "ladder05 ladders", "step05"),
    ("exercises/extensions/muon.patch", "extensions", "step03 ladders"),
    ("exercises/mistakes/step01_not_causal.patch", "steps hunt", "step01"),
    ("exercises/hangs/hang3.py", "hangs", "ladders"),
    ("docs/workshop/pair.sh", "workshop", ""),
    ("dev/carry.py", "carry steps", "step01 plan"),
    ("docs/wild.md", "wild readmes", ""),
    ("dev/site/build.py", "site", "plan"),
    ("tests/test_wild.py", "wild", "workshop"),
    ("requirements.txt", "step01 plan ladder02", "")])
def test_a_changed_file_reaches_the_tests_that_depend_on_it(changed, wanted, others):
    found = affected_by(changed)
    assert (ROOT / changed).is_file() and {"steps", *wanted.split()} <= found and not found & set(others.split())


@pytest.fixture
def repository(tmp_path):
    """Make and commit a repository that has one module, two tests that import it, and one that does not."""
    for name in ("Makefile", "dev/changed.py", "tools/steps.py", "pyproject.toml", ".gitignore"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests/support").mkdir()
    (tmp_path / "tests/support/answer.py").write_text("answer = 42\n")
    (tmp_path / "tests/test_answer.py").write_text(
        "import pytest\nfrom answer import answer\ndef test_answer(): assert answer == 42\n"
        "@pytest.mark.slow\ndef test_slow(): assert False\n@pytest.mark.sweep\ndef test_long(): assert False\n")
    (tmp_path / "tests/test_environment.py").write_text(
        "import answer, os\ndef test_environment(): assert not {'CHANGED', 'BASE'} & os.environ.keys()\n")
    (tmp_path / "tests/test_nothing.py").write_text("def test_nothing(): assert False\n")
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
    command = ["make", "-s", "test", "CHANGED=1", *words, f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_make_test_runs_what_has_changed_and_no_more(repository):
    assert make_test(repository) == (0, "", "nothing has changed since HEAD\n")
    with (repository / "tests/support/answer.py").open("a") as file:
        file.write("question = None\n")
    status, said, why = make_test(repository)
    assert status == 0 and "2 passed, 2 deselected" in said
    assert why == "".join(f"tests/test_{name}.py: tests/support/answer.py\n" for name in ("answer", "environment"))
    commit(repository)
    assert make_test(repository)[1] == ""
    assert "2 passed, 2 deselected" in make_test(repository, "BASE=HEAD^")[1]


def test_a_module_that_is_gone_reaches_the_tests_that_import_it(repository):
    (repository / "tests/support/answer.py").unlink()
    status, said, why = make_test(repository)
    assert status == 2 and "tests/test_answer.py: tests/support/answer.py\n" in why and "No module named 'answer'" in said


def test_tests_of_the_steps_come_first(repository):
    for name in ("step02", "alone", "step01"):
        (repository / f"tests/test_{name}.py").write_text("def test(): pass\n")
    why = make_test(repository)[2]
    assert [line.split(":")[0][11:-3] for line in why.splitlines() if line.startswith("tests/")] == ["step01", "step02", "alone"]


def test_an_untracked_test_runs_and_a_wrong_base_is_refused(repository):
    (repository / "tests/test_new.py").write_text("def test_new(): assert False\n")
    status, said, why = make_test(repository)
    assert status == 2 and "1 failed" in said and why.startswith("tests/test_new.py: tests/test_new.py\n")
    status, said, why = make_test(repository, "BASE=nowhere")
    assert status == 2 and said == "" and "nowhere" in why
