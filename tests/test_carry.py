"""dev/carry.py carries changes from step to step and into the patches, and loses nothing on the way."""
import shutil
import subprocess
import sys

import pytest
from steps import NAMES, ROOT

FIRST, SECOND, THIRD = NAMES[:3]
TRAIN = "".join(f"line {number}\n" for number in range(1, 31))
MISTAKE, EXTENSION = "exercises/mistakes/step01_wrong.patch", "exercises/extensions/more.patch"
PATCH = f"""test: tests/test_step01.py::test_it
loss: nothing to see
--- a/{FIRST}/train.py
+++ b/{FIRST}/train.py
@@ -4,7 +4,7 @@
 line 4
 line 5
 line 6
-line 7
+line seven
 line 8
 line 9
 line 10
"""
NEW_FILE = f"""step: 1
what: a new file, and a line that uses it
--- /dev/null
+++ b/{FIRST}/extra.py
@@ -0,0 +1,2 @@
+one
+two
--- a/{FIRST}/train.py
+++ b/{FIRST}/train.py
@@ -23,6 +23,7 @@ line 22
 line 23
 line 24
 line 25
+import extra
 line 26
 line 27
 line 28
"""


@pytest.fixture
def repository(tmp_path):
    """Make a repository of three steps and two patches. same.py is the same in all steps; from step 2 on, train.py has one more
    line."""
    for name in ("dev/carry.py", "dev/three_way.py", "tools/steps.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for number, step in enumerate((FIRST, SECOND, THIRD)):
        (tmp_path / step / "figures").mkdir(parents=True)
        (tmp_path / step / "same.py").write_text("one\ntwo\n")
        (tmp_path / step / "old.py").write_text("old\n")
        (tmp_path / step / "README.md").write_text(step)
        (tmp_path / step / "figures/fits.png").write_text(step)
        (tmp_path / step / "train.py").write_text(TRAIN.replace("line 20\n", "line 20\n" + "added\n" * (number > 0)))
    for name, text in ((MISTAKE, PATCH), (EXTENSION, NEW_FILE)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder, *command):
    who = ["-c", "user.name=reader", "-c", "user.email=reader@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder, *options):
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a commit", *options)


def carry(folder, *flags):
    done = subprocess.run([sys.executable, "dev/carry.py", *flags], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def edit(path, old, new):
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def texts(folder, name):
    return [(folder / step / name).read_text() if (folder / step / name).exists() else None for step in (FIRST, SECOND, THIRD)]


def everything(folder):
    """Return all files outside .git, and what git thinks of them."""
    files = (path for path in folder.rglob("*") if path.is_file() and not {".git", "__pycache__"} & set(path.parts))
    said = {command: git(folder, *command.split()) for command in ("status --porcelain", "show-ref")}
    return {path: path.read_bytes() for path in files} | said


# ---------------------------------------------------------------------------------------------------- from step to step
def test_takes_a_change_through_all_later_steps(repository):
    edit(repository / FIRST / "same.py", "two", "TWO")
    edit(repository / FIRST / "train.py", "line 13\n", "line thirteen\n")
    edit(repository / SECOND / "train.py", "line 16\n", "line sixteen\n")
    edit(repository / FIRST / "README.md", "step", "STEP")
    edit(repository / FIRST / "figures/fits.png", "step", "STEP")
    (repository / FIRST / "new.py").write_text("new\n")
    (repository / FIRST / "old.py").unlink()
    status, output = carry(repository)
    assert status == 0 and len(output.splitlines()) == 8
    assert f"{FIRST}/new.py -> {SECOND}/new.py: new\n" in output and f"{FIRST}/train.py -> {SECOND}/train.py: merged\n" in output
    assert texts(repository, "same.py") == ["one\nTWO\n"] * 3
    assert texts(repository, "new.py") == ["new\n"] * 3
    assert texts(repository, "old.py") == [None] * 3 and "old.py" not in git(repository, "ls-tree", "-r", "refs/worktree/carry")
    for name in ("README.md", "figures/fits.png"):
        assert texts(repository, name) == [FIRST.replace("step", "STEP"), SECOND, THIRD]
    first, second, third = texts(repository, "train.py")
    assert "line thirteen\n" in first and "line sixteen\n" not in first and second == third
    assert all(text in second for text in ("line thirteen\n", "line sixteen\n", "line 20\nadded\nline 21\n"))
    assert carry(repository) == (0, "") and carry(repository, "--check") == (0, "")


def test_a_later_steps_own_file_is_left_alone(repository):
    (repository / FIRST / "new.py").write_text("first\n")
    (repository / SECOND / "new.py").write_text("second\n")
    status, output = carry(repository)
    assert status == 0 and f"{SECOND}/new.py: left alone" in output
    assert texts(repository, "new.py") == ["first\n", "second\n", "second\n"]


def test_check_says_what_carry_does_and_writes_nothing(repository):
    edit(repository / FIRST / "train.py", "line 5\n", "line five\n")
    before = everything(repository)
    status, said = carry(repository, "--check")
    assert status == 1 and everything(repository) == before
    assert carry(repository) == (0, said) and f"{MISTAKE}: merged\n" in said
    edit(repository / FIRST / "train.py", "line 13\n", "line X\n")
    edit(repository / FIRST / "train.py", "line 10\n", "line 10\nline 10.5\n")           # merges, and moves the conflict
    edit(repository / SECOND / "train.py", "line 13\n", "line Y\n")
    before = everything(repository)
    status, said = carry(repository, "--check")
    assert status == 1 and everything(repository) == before and f"conflict at {SECOND}/train.py:13\n" in said


def test_base_carries_what_was_committed_without_it(repository):
    edit(repository / FIRST / "train.py", "line 13\n", "line thirteen\n")
    commit(repository)
    assert carry(repository) == (0, "")
    status, output = carry(repository, "--base", "HEAD^")
    assert status == 0 and all("line thirteen\n" in text for text in texts(repository, "train.py"))
    assert carry(repository, "--base", "HEAD^") == (0, "")


def test_misuse_has_a_status_of_its_own(repository):
    status, output = carry(repository, "--base", "nowhere")
    assert status == 2 and output.endswith("--base nowhere: no such commit\n")
    assert carry(repository, "--merged", "x")[0] == 2


# ------------------------------------------------------------------------------------------------------------ conflicts
def test_two_conflicts_are_marked_resolved_by_hand_and_carried_on(repository):
    for number, word in ((14, "fourteen"), (20, "twenty")):
        edit(repository / FIRST / "train.py", f"line {number}\n", f"line {word}\n")
    edit(repository / FIRST / "same.py", "two", "TWO")
    edit(repository / SECOND / "same.py", "two", "zwei")
    edit(repository / SECOND / "train.py", "line 20\n", "line XX\n")
    third = texts(repository, "train.py")[2]
    index = git(repository, "ls-files", "--stage")
    status, output = carry(repository)
    assert status == 1 and git(repository, "ls-files", "--stage") == index
    assert f"{FIRST}/same.py -> {SECOND}/same.py: conflict at {SECOND}/same.py:2-8\n" in output
    assert f"{FIRST}/train.py -> {SECOND}/train.py: conflict at {SECOND}/train.py:20-27\n" in output
    lines = (repository / SECOND / "train.py").read_text().splitlines()
    assert lines[19].startswith("<<<<<<< ") and lines[26].startswith(">>>>>>> ")
    assert "line fourteen" in lines and {"line twenty", "line XX"} < set(lines[19:27])            # the other hunk is merged
    assert texts(repository, "train.py")[2] == third

    before = everything(repository)
    for flags in ([], ["--check"]):
        status, output = carry(repository, *flags)
        assert status == 1 and len(output.splitlines()) == 1 and everything(repository) == before
        assert f"{SECOND}/same.py:2" in output and f"{SECOND}/train.py:20" in output
    (repository / SECOND / "same.py").write_text("one\nzwei\nTWO\n")
    assert carry(repository)[0] == 1, "one file is still marked"
    resolved = "\n".join([*lines[:19], "line twenty XX", *lines[27:], ""])
    (repository / SECOND / "train.py").write_text(resolved)
    status, output = carry(repository)
    assert status == 0 and "conflict" not in output
    assert texts(repository, "train.py")[1:] == [resolved] * 2 and texts(repository, "same.py")[1:] == ["one\nzwei\nTWO\n"] * 2
    assert carry(repository, "--check") == (0, "")


@pytest.mark.parametrize("marker", ["<<<<<<< ours", "||||||| base", "=======", ">>>>>>> theirs"])
def test_a_marker_that_was_forgotten_is_refused(repository, marker):
    edit(repository / THIRD / "train.py", "line 3\n", f"line 3\n{marker}\n")
    edit(repository / FIRST / "same.py", "two", "TWO")
    before = everything(repository)
    status, output = carry(repository)
    assert status == 1 and f"{THIRD}/train.py:4" in output and everything(repository) == before


def test_a_conflict_resolved_for_the_later_step_does_not_come_back(repository):
    edit(repository / FIRST / "train.py", "line 20\n", "line twenty\n")
    edit(repository / SECOND / "train.py", "line 20\n", "line XX\n")
    commit(repository)
    edit(repository / FIRST / "train.py", "line twenty\n", "line 2 x 10\n")
    assert carry(repository)[0] == 1
    git(repository, "checkout", f"{SECOND}/train.py")
    assert carry(repository) == (0, "") and "line XX\n" in texts(repository, "train.py")[1]


# ----------------------------------------------------------------------------------------------- since the last carry
def test_a_line_can_be_edited_twice_before_a_commit(repository):
    edit(repository / FIRST / "train.py", "line 20\n", "line twenty\n")
    assert carry(repository)[0] == 1                      # a conflict with the line that step 2 adds next to it
    (repository / SECOND / "train.py").write_text(TRAIN.replace("line 20\n", "line twenty\nadded\n"))
    assert carry(repository)[0] == 0
    for old, new in (("line 13\n", "line thirteen\n"), ("line thirteen\n", "line 12 + 1\n"), ("line 12 + 1\n", "line 13\n")):
        edit(repository / FIRST / "train.py", old, new)
        status, output = carry(repository)
        assert status == 0 and all(new in text and text.count("\n") >= 30 for text in texts(repository, "train.py")), output


def test_a_commit_beside_the_steps_keeps_the_last_carry_and_one_of_the_steps_ends_it(repository):
    edit(repository / FIRST / "train.py", "line 13\n", "line thirteen\n")
    assert carry(repository)[0] == 0
    (repository / "notes.md").write_text("notes\n")
    git(repository, "add", "notes.md")
    git(repository, "commit", "-qm", "notes")
    edit(repository / FIRST / "train.py", "line thirteen\n", "line 12 + 1\n")
    assert carry(repository)[0] == 0 and all("line 12 + 1\n" in text for text in texts(repository, "train.py"))
    commit(repository)
    commit(repository, "--amend")
    edit(repository / FIRST / "same.py", "two", "TWO")
    commit(repository)                                    # a change that is not meant for the later steps
    edit(repository / SECOND / "same.py", "one", "ONE")
    assert carry(repository)[0] == 0 and texts(repository, "same.py") == ["one\nTWO\n", "ONE\ntwo\n", "ONE\ntwo\n"]
    edit(repository / FIRST / "train.py", "line 12 + 1\n", "line 13\n")
    assert carry(repository)[0] == 0 and all("line 13\n" in text for text in texts(repository, "train.py"))


def test_what_is_checked_out_is_undone_in_the_first_step_and_carried_again_into_a_later_one(repository):
    edit(repository / FIRST / "train.py", "line 13\n", "line thirteen\n")
    assert carry(repository)[0] == 0
    carried = texts(repository, "train.py")
    git(repository, "checkout", f"{SECOND}/train.py")
    assert carry(repository)[0] == 0 and texts(repository, "train.py") == carried
    git(repository, "checkout", f"{FIRST}/train.py")
    assert carry(repository)[0] == 0 and git(repository, "status", "--porcelain") == ""
    edit(repository / FIRST / "train.py", "line 20\n", "line twenty\n")
    assert carry(repository)[0] == 1
    git(repository, "checkout", ".")
    assert carry(repository) == (0, "") and git(repository, "status", "--porcelain") == ""


# ------------------------------------------------------------------------------------------------------------- patches
def test_a_patch_follows_its_context_and_its_lines(repository):
    edit(repository / FIRST / "train.py", "line 5\n", "line five\n")
    edit(repository / FIRST / "train.py", "line 1\n", "line 0\nline 1\n")
    status, output = carry(repository)
    assert status == 0 and f"{MISTAKE}: merged\n" in output and f"{EXTENSION}: merged\n" in output
    assert (repository / MISTAKE).read_text() == PATCH.replace("line 5", "line five").replace("-4,7 +4,7", "-5,7 +5,7")
    assert (repository / EXTENSION).read_text() == NEW_FILE.replace("-23,6 +23,7", "-24,6 +24,7")
    for name in (MISTAKE, EXTENSION):
        git(repository, "apply", "--check", name)
    edit(repository / FIRST / "train.py", "line five\n", "line 4 + 1\n")       # once more, before the commit
    assert carry(repository)[0] == 0
    assert (repository / MISTAKE).read_text() == PATCH.replace("line 5", "line 4 + 1").replace("-4,7 +4,7", "-5,7 +5,7")


def test_a_patch_that_needs_no_change_keeps_every_byte(repository):
    short = PATCH.replace("-4,7 +4,7", "-6,3 +6,3").replace(" line 4\n line 5\n", "").replace(" line 9\n line 10\n", "")
    (repository / MISTAKE).write_text(short)
    edit(repository / FIRST / "train.py", "line 13\n", "line thirteen\n")
    edit(repository / SECOND / "train.py", "line 4\n", "line four\n")
    before = (repository / EXTENSION).read_bytes()
    status, output = carry(repository)
    assert status == 0 and "patch" not in output
    assert (repository / MISTAKE).read_text() == short and (repository / EXTENSION).read_bytes() == before


def test_a_patch_of_a_new_file_survives_and_one_whose_file_is_there_now_is_named(repository):
    edit(repository / FIRST / "train.py", "line 26\n", "line 20 + 6\n")
    (repository / FIRST / "extra.py").write_text("another\n")
    status, output = carry(repository)
    assert status == 1 and f"{EXTENSION}: does not merge at {FIRST}/train.py:25" not in output
    assert f"{EXTENSION}: does not merge: {FIRST}/extra.py was made or deleted\n" in output
    assert (repository / EXTENSION).read_text().startswith(NEW_FILE[:NEW_FILE.index("--- a/")])


def test_a_patch_that_does_not_merge_is_named_with_its_place_until_it_does(repository):
    edit(repository / FIRST / "train.py", "line 7\n", "line VII\n")
    edit(repository / FIRST / "train.py", "line 1\n", "line 0\nline 1\n")
    for _ in range(2):
        status, output = carry(repository)
        assert status == 1 and f"{MISTAKE}: does not merge at {FIRST}/train.py:8\n" in output
        assert carry(repository, "--check")[0] == 1
        assert (repository / MISTAKE).read_text() == PATCH
    (repository / MISTAKE).write_text(PATCH.replace("-line 7", "-line VII").replace("-4,7 +4,7", "-5,7 +5,7"))
    assert carry(repository) == (0, "")


def test_a_patch_whose_change_the_step_has_now_is_named(repository):
    edit(repository / FIRST / "train.py", "line 7\n", "line seven\n")
    status, output = carry(repository)
    assert status == 1 and f"{MISTAKE}: {FIRST}/train.py has this change already\n" in output
    assert (repository / MISTAKE).read_text() == PATCH


def test_a_patch_that_never_applied_is_named_and_left_alone(repository):
    (repository / MISTAKE).write_text(PATCH.replace("line 4", "line four"))
    commit(repository)
    assert carry(repository) == (0, ""), "its file has not changed"
    edit(repository / FIRST / "train.py", "line 5\n", "line five\n")
    status, output = carry(repository)
    assert status == 1 and f"{MISTAKE}: does not apply to {FIRST}/train.py, neither as it is nor as it was\n" in output
    assert (repository / MISTAKE).read_text() == PATCH.replace("line 4", "line four")


def test_a_patch_behind_a_conflict_waits_for_it(repository):
    of_second = PATCH.replace(FIRST, SECOND)
    (repository / MISTAKE).write_text(of_second)
    edit(repository / FIRST / "train.py", "line 5\n", "line five\n")
    edit(repository / SECOND / "train.py", "line 5\n", "line V\n")
    status, output = carry(repository)
    assert status == 1 and MISTAKE not in output
    (repository / SECOND / "train.py").write_text(TRAIN.replace("line 5\n", "line five V\n"))
    assert carry(repository)[0] == 0
    assert (repository / MISTAKE).read_text() == of_second.replace("line 5", "line five V")


# ------------------------------------------------------------------------------------------------- the READMEs' tables
def test_tables_are_written_after_a_carry_and_not_before_its_end(repository):
    (repository / "dev/readme.py").write_text("print('tables written')\n")
    edit(repository / FIRST / "same.py", "two", "TWO")
    assert "tables written" not in carry(repository, "--check")[1]
    assert carry(repository)[1].endswith("tables written\n")
    edit(repository / SECOND / "same.py", "TWO", "zwei")
    edit(repository / FIRST / "same.py", "TWO", "deux")
    status, output = carry(repository)
    assert status == 1 and "tables written" not in output
