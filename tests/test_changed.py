"""dev/changed.py: the tests that a change can touch are chosen, others are left out, and each choice has a reason."""
import shutil
import subprocess
import sys

import pytest
from changed import chosen, named
from steps import NAMES, ROOT, clean_environment, repository_files

FILES = repository_files()


def reached_by(*changed):
    return short(chosen(changed, FILES))


def short(tests):
    """Return the names of test files without their folders, as 'step04', 'ladder04', 'plan'."""
    return [name.rsplit("/test_", 1)[1].removesuffix(".py") for name in tests]


# changed, tests that have to run, tests that need not
@pytest.mark.parametrize("changed, wanted, others", [
    ("step04_tp_sp/tensor_parallel.py", "step04 steps readmes ladder04 ladders simulate extensions by_hand",
     "step03 step05 step08 ladder05 plan_page carry"),
    ("step08_5d/config.py", "step08 ladder08 plan plan_page simulate nothing_lost", "step05 ladder07"),
    ("step06_pp/by_hand.py", "by_hand readmes", "step06 plan ladders"),
    ("step03_zero/README.md", "readmes extensions", "step03 ladder03 hunt"),
    ("docs/FAQ.md", "readmes extensions", "step01 plan tools"),
    ("tools/plan/costs.py", "plan plan_page playbook ladder08", "step08 hangs"),
    ("tools/simulate/play.py", "simulate plan step03", "step01 hangs"),
    ("tests/support/observe.py", "step02 step08 ladder02", "wild carry"),
    ("tests/support/fixtures.py", "step01 wild ladder08", "carry"),
    ("exercises/ladder/test_ladder05.py", "ladder05 ladders", "ladder04 step05"),
    ("exercises/extensions/muon.patch", "extensions", "step03 ladders"),
    ("exercises/mistakes/step01_not_causal.patch", "steps hunt", "step01 ladder02"),
    ("exercises/hangs/hang3.py", "hangs", "ladders"),
    ("docs/workshop/pair.sh", "workshop", "readmes"),
    ("dev/carry.py", "carry steps", "step01 plan"),
    ("docs/wild.md", "wild readmes", "workshop"),
    ("dev/site/build.py", "site tools", "plan"),
    ("tests/test_wild.py", "wild", "workshop"),
    ("requirements.txt", "step01 plan ladder02", "carry")])
def test_a_changed_file_reaches_the_tests_that_depend_on_it(changed, wanted, others):
    found = set(reached_by(changed))
    assert changed in FILES and {"steps", *wanted.split()} <= found and not found & set(others.split())


def test_a_string_names_a_path_a_folder_or_how_a_path_begins():
    def all_named(text):
        return set(named(text, FILES))
    hangs = {f"exercises/hangs/hang{number}.py" for number in range(1, 9)}
    assert all_named("exercises/hangs/hang*") == hangs < all_named("cat exercises/hangs") and all_named("hangs") == set()
    assert all_named("make it by tools/plot.py --out x") == {"tools/plot.py"} and all_named("step05_cp") == {"step05_cp"}


def test_all_steps_together_reach_all_their_tests_smallest_first():
    found = reached_by(*(f"{step}/model.py" for step in NAMES))
    assert found[:9] == [*(f"step0{number}" for number in range(1, 9)), "steps"]
    assert len(found) == len(set(found)) and {f"ladder0{number}" for number in range(2, 9)} < set(found)


def test_a_reason_names_the_way():
    found = chosen(["tools/plan/costs.py"], FILES)
    assert found["tests/test_plan.py"] == "imports tools/plan/costs.py"
    assert found["exercises/ladder/test_ladder08.py"] == "imports exercises/puzzle08.py, which imports tools/plan/costs.py"
    assert chosen(["tests/test_wild.py"], FILES)["tests/test_wild.py"] == "has changed itself"
    assert chosen(["docs/FAQ.md", "docs/proof.md"], FILES)["tests/test_playbook.py"] == "reads docs/FAQ.md (and 1 more)"


def test_a_module_that_is_gone_reaches_those_that_import_it():
    gone = "tests/support/observe.py"
    assert short(chosen([gone], [file for file in FILES if file != gone])) == reached_by(gone)


@pytest.fixture
def repository(tmp_path):
    """One module, two tests that import it and one that does not, committed."""
    for name in ("Makefile", "dev/changed.py", "tools/steps.py", "tests/pytest.ini", ".gitignore"):
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
    (repository / "notes.txt").write_text("notes\n")
    assert make_test(repository) == (0, "", "no test depends on what has changed since HEAD\n")
    with (repository / "tests/support/answer.py").open("a") as file:
        file.write("question = None\n")
    status, said, why = make_test(repository)
    assert status == 0 and "2 passed, 2 deselected" in said
    assert why == "".join(f"tests/test_{name}.py: imports tests/support/answer.py\n" for name in ("answer", "environment"))
    commit(repository)
    assert make_test(repository)[1] == ""
    assert "2 passed, 2 deselected" in make_test(repository, "BASE=HEAD^")[1]
    (repository / "tests/support/answer.py").unlink()
    assert make_test(repository)[0] == 2, "the test cannot import it"


def test_an_untracked_test_runs_and_a_wrong_base_is_refused(repository):
    (repository / "tests/test_new.py").write_text("def test_new(): assert False\n")
    status, said, why = make_test(repository)
    assert status == 2 and "1 failed" in said and why.startswith("tests/test_new.py: has changed itself\n")
    status, said, why = make_test(repository, "BASE=nowhere")
    assert status == 2 and said == "" and "--base nowhere: no such commit\n" in why
