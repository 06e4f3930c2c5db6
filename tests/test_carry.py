"""dev/carry.py carries changes from step to step and into the extensions, and names what it cannot carry."""
import shutil
import subprocess
import sys

import pytest
from steps import NAMES, ROOT

FIRST, SECOND, THIRD = NAMES[:3]
TRAIN = "".join(f"line {number}\n" for number in range(1, 31))
EXTENSION = "exercises/extensions/more.patch"
PATCH = f"""step: 1
what: a new file, and a line that uses it
--- /dev/null
+++ b/{FIRST}/extra.py
@@ -0,0 +1,2 @@
+one
+two
--- a/{FIRST}/train.py
+++ b/{FIRST}/train.py
@@ -23,6 +23,7 @@
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
    """Make a repository of three steps and an extension. same.py is the same in all steps; from step 2 on, train.py has one more
    line."""
    for name in ("dev/carry.py", "tools/steps.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for number, step in enumerate((FIRST, SECOND, THIRD)):
        (tmp_path / step / "figures").mkdir(parents=True)
        (tmp_path / step / "same.py").write_text("one\ntwo\n")
        (tmp_path / step / "old.py").write_text("old\n")
        (tmp_path / step / "README.md").write_text(step)
        (tmp_path / step / "figures/fits.png").write_text(step)
        (tmp_path / step / "train.py").write_text(TRAIN.replace("line 20\n", "line 20\n" + "added\n" * (number > 0)))
    (tmp_path / EXTENSION).parent.mkdir(parents=True)
    (tmp_path / EXTENSION).write_text(PATCH)
    (tmp_path / ".gitignore").write_text("__pycache__\n/out/\n")
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


def test_a_change_reaches_all_later_steps_once(repository):
    assert carry(repository) == (0, "")
    edit(repository / FIRST / "same.py", "two", "TWO")
    edit(repository / FIRST / "train.py", "line 13\n", "line thirteen\n")
    edit(repository / SECOND / "train.py", "line 16\n", "line sixteen\n")
    edit(repository / FIRST / "README.md", "step", "STEP")
    (repository / FIRST / "new.py").write_text("new\n")
    (repository / SECOND / "own.py").write_text("second\n")
    (repository / FIRST / "own.py").write_text("first\n")
    (repository / FIRST / "old.py").unlink()
    before = everything(repository)
    status, said = carry(repository, "--check")
    assert status == 1 and everything(repository) == before
    assert carry(repository) == (0, said) and f"{FIRST}/train.py -> {SECOND}/train.py: merged\n" in said
    assert texts(repository, "same.py") == ["one\nTWO\n"] * 3 and texts(repository, "new.py") == ["new\n"] * 3
    assert texts(repository, "old.py") == [None] * 3 and texts(repository, "own.py") == ["first\n", "second\n", "second\n"]
    assert texts(repository, "README.md") == [FIRST.replace("step", "STEP"), SECOND, THIRD]
    first, second, third = texts(repository, "train.py")
    assert "line thirteen\n" in first and "line sixteen\n" not in first and second == third
    assert all(text in second for text in ("line thirteen\n", "line sixteen\n", "line 20\nadded\nline 21\n"))
    after = everything(repository)
    assert carry(repository, "--check")[0] == carry(repository)[0] == 0 and everything(repository) == after


def test_base_carries_what_was_committed_without_it(repository):
    edit(repository / FIRST / "train.py", "line 13\n", "line thirteen\n")
    commit(repository)
    assert carry(repository) == (0, "")
    assert carry(repository, "--base", "HEAD^")[0] == 0 and all("line thirteen\n" in text for text in texts(repository, "train.py"))
    status, output = carry(repository, "--base", "nowhere")
    assert status == 2 and output.endswith("--base nowhere: no such commit\n")


def test_a_conflict_is_marked_resolved_by_hand_and_carried_on(repository):
    for number, word in ((14, "fourteen"), (20, "twenty")):                  # step 2 adds a line next to line 20
        edit(repository / FIRST / "train.py", f"line {number}\n", f"line {word}\n")
    edit(repository / FIRST / "same.py", "two", "TWO")
    status, output = carry(repository)
    assert status == 1 and f"{FIRST}/train.py -> {SECOND}/train.py: conflict at {SECOND}/train.py:20\n" in output
    first, second, third = texts(repository, "train.py")
    lines = second.splitlines()
    assert lines[19].startswith("<<<<<<< ") and lines[26].startswith(">>>>>>> ") and {"line twenty", "added"} < set(lines[19:26])
    assert texts(repository, "same.py") == ["one\nTWO\n"] * 3 and "line fourteen\n" in second and "line fourteen\n" in third
    before = everything(repository)
    status, output = carry(repository)
    assert status == 1 and f"{SECOND}/train.py:20" in output and everything(repository) == before
    resolved = "\n".join([*lines[:19], "line twenty", "added", *lines[27:], ""])
    (repository / SECOND / "train.py").write_text(resolved)
    assert carry(repository)[0] == 0 and texts(repository, "train.py")[1:] == [resolved] * 2
    assert carry(repository, "--check") == (0, "")


def test_a_line_edited_again_after_a_carry_needs_a_commit_or_a_fresh_start(repository):
    edit(repository / FIRST / "same.py", "two", "TWO")
    assert carry(repository)[0] == 0
    edit(repository / FIRST / "same.py", "TWO", "deux")
    status, output = carry(repository)
    assert status == 1
    start_over = output.partition("To carry afresh: git ")[2].splitlines()[0]
    git(repository, *start_over.split())
    assert carry(repository)[0] == 0 and texts(repository, "same.py") == ["one\ndeux\n"] * 3
    commit(repository)
    edit(repository / FIRST / "same.py", "deux", "zwei")
    assert carry(repository)[0] == 0 and texts(repository, "same.py") == ["one\nzwei\n"] * 3


def test_a_patch_follows_its_context_and_its_lines(repository):
    edit(repository / FIRST / "train.py", "line 23\n", "line twenty-three\n")
    edit(repository / FIRST / "train.py", "line 1\n", "line 0\nline 1\n")
    status, output = carry(repository)
    assert status == 0 and f"{EXTENSION}: merged\n" in output
    rebased = PATCH.replace("line 23", "line twenty-three").replace("-23,6 +23,7", "-24,6 +24,7")
    assert (repository / EXTENSION).read_text() == rebased
    git(repository, "apply", "--check", EXTENSION)
    assert carry(repository, "--check") == (0, "")


def test_a_conflict_in_a_patch_is_edited_in_a_folder_and_carried_back(repository):
    edit(repository / FIRST / "train.py", "line 25\nline 26\n", "line 25\nimport other\nline 26\n")
    status, output = carry(repository)
    assert status == 1 and f"{EXTENSION}: conflict at out/carry/more/b/{FIRST}/train.py:26; edit it there" in output
    assert carry(repository)[0] == carry(repository, "--check")[0] == 1 and (repository / EXTENSION).read_text() == PATCH
    file = repository / "out/carry/more/b" / FIRST / "train.py"
    file.write_text(TRAIN.replace("line 25\n", "line 25\nimport other, extra\n"))
    assert carry(repository)[0] == 0 and not file.exists() and carry(repository, "--check") == (0, "")
    assert "-import other\n+import other, extra\n" in (repository / EXTENSION).read_text()
    git(repository, "apply", EXTENSION)
    assert (repository / FIRST / "extra.py").read_text() == "one\ntwo\n"


def test_a_patch_that_does_not_apply_is_named_also_after_the_commit(repository):
    edit(repository / FIRST / "train.py", "line 24\nline 25\nline 26\n", "")
    commit(repository)
    for flags in ([], ["--check"]):
        status, output = carry(repository, *flags)
        assert status == 1 and output.startswith(f"{EXTENSION}: does not apply to {FIRST}/") and "BASE=REV" in output
    status, output = carry(repository, "--base", "HEAD^")
    assert status == 1 and f"{EXTENSION}: conflict at out/carry/more/b/{FIRST}/train.py" in output


def test_this_repository_has_nothing_to_carry():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository")
    assert carry(ROOT, "--check") == (0, "")
