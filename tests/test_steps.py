"""Adjacent steps differ only where the later one declares it; the planted mistakes apply."""
import ast
import re
import shutil
import subprocess
import sys

import pytest
from patched import edits, planted_mistakes
from steps import CHANGES, NAMES, ROOT, STEPS, pairs, repository_files, step_dir, step_files

PACKAGES = {"torch", "transformers", "datasets", "flash_attn", "matplotlib",
            "numpy", "safetensors", "huggingface_hub", "tokenizers", "tqdm"}
PLANNER = "tools/plan"


# ------------------------------------------------------------------------------- what differs is what is declared
def undeclared(old, new, declared):
    """Return where the folders of two adjacent steps disagree with the later one's declaration."""
    before, after = set(step_files(old)), set(step_files(new))
    same = {name for name in before & after if (old / name).read_bytes() == (new / name).read_bytes()}
    different = (before | after) - same
    return ([f"{new.name}/{name} differs from {old.name} and is not declared" for name in sorted(after & different - declared)]
            + [f"{new.name}/{name} is gone and not declared" for name in sorted(before - after - declared)]
            + [f"{new.name}/{name} is declared and does not differ" for name in sorted(declared - different)])


def test_adjacent_steps_differ_only_where_declared():
    assert STEPS and STEPS == NAMES[:len(STEPS)]
    assert list(CHANGES) == STEPS
    assert [problem for old, new in pairs() for problem in undeclared(old, new, set(CHANGES[new.name]))] == []


def test_an_undeclared_difference_is_seen(two_folders):
    old, new = two_folders
    (old / "gone.py").write_text("x\n")
    (new / "fresh.py").write_text("x\n")
    (new / "figures").mkdir()
    (new / "figures/fits.png").write_text("x\n")
    (new / "README.md").write_text("x\n")
    declared = {"same.py", "changed.py"}
    assert undeclared(old, new, declared) == ["new/fresh.py differs from old and is not declared",
                                              "new/gone.py is gone and not declared",
                                              "new/same.py is declared and does not differ"]
    assert undeclared(old, new, {"changed.py", "fresh.py", "gone.py"}) == []
    assert undeclared(old, new, {"fresh.py", "gone.py"}) == ["new/changed.py differs from old and is not declared"]


@pytest.fixture
def two_folders(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "same.py").write_text("import torch\n")
        (folder / "changed.py").write_text(f"name = {folder.name!r}\n")
    return old, new


# ------------------------------------------------------------------------------------ no noise in what differs
def essence(line):
    """Return a line without its spaces and its comment; for a comment, its words; '' if there is nothing to read."""
    code = re.sub(r"(^|\s)#.*", "", line)
    text = "".join((code if code.strip() else line.strip().lstrip("#")).split())
    return text if re.search(r"\w", text) and text not in ("else:", "try:", "finally:") else ""


def changed_lines(old, new):
    """Return the removed and the added lines of a file, as {essence: (number, line)}."""
    output = subprocess.run(["diff", "-U0", old, new], capture_output=True, text=True).stdout
    removed, added = {}, {}
    for line in output.splitlines()[2:]:
        if line.startswith("@@"):
            old_number, new_number = (int(start) for start in re.match(r"@@ -(\d+)\S* \+(\d+)", line).groups())
        elif line.startswith("-"):
            removed[essence(line[1:])] = old_number, line[1:].strip()
            old_number += 1
        elif line.startswith("+"):
            added[essence(line[1:])] = new_number, line[1:].strip()
            new_number += 1
    return removed, added


def moved(old, new):
    """Return the lines that a diff shows although they were only moved, re-indented or re-commented."""
    removed, added = changed_lines(old, new)
    return [f"{new}: line {removed[text][0]} of before comes back as line {added[text][0]}: {added[text][1]}"
            for text in removed.keys() & added.keys() - {""}]


def test_no_line_is_merely_moved_reindented_or_recommented():
    noise = [line for old, new in pairs() for name in sorted({*CHANGES[new.name]} & set(step_files(old)) & set(step_files(new)))
             for line in moved(old / name, new / name)]
    assert noise == []


@pytest.mark.parametrize("after, noisy", [
    ("b = 2\na = f(1)  # one\n}\n", True),                            # moved
    ("if x:\n    a = f(1)  # one\nb = 2\n}\n", True),                 # re-indented
    ("a = f(1)  # uno\nb = 2\n}\n", True),                            # re-commented
    ("# a = f(1)\nb = 2\n}\n", True),                                 # commented out
    ("a = f( 1 )  # one\nb = 2\n}\n", True),                          # re-formatted
    ("a = f(2)  # one\nb = 2\n\nc = 3\n}\n", False),
    ("x = {\n}\na = f(1)  # one\nb = 2\n", False)])                   # a brace that moves is no noise
def test_noise_is_seen(tmp_path, after, noisy):
    (tmp_path / "old").write_text("a = f(1)  # one\nb = 2\n}\n")
    (tmp_path / "new").write_text(after)
    assert bool(moved(tmp_path / "old", tmp_path / "new")) == noisy


# ------------------------------------------------------------------------------------------------- self-contained
def imports(path):
    """Yield the top-level names of all modules that a file imports, including inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield "." if node.level else node.module.split(".")[0]


def foreign_imports(folder, packages=PACKAGES):
    own = {name.removesuffix(".py") for name in step_files(folder)}
    known = own | packages | sys.stdlib_module_names
    return [f"{folder.name}/{name} imports {module}" for name in step_files(folder) if name.endswith(".py")
            for module in imports(folder / name) if module not in known]


def test_steps_import_only_their_own_files_and_the_packages():
    assert [problem for step in STEPS for problem in foreign_imports(ROOT / step)] == []
    assert foreign_imports(ROOT / PLANNER, packages={"transformers", "simulate"}) == []
    assert "plan.py" in step_files(ROOT / PLANNER)
    reaching_out = [f"{folder}/{name}" for folder in [*STEPS, PLANNER] for name in step_files(ROOT / folder)
                    if "sys.path" in (ROOT / folder / name).read_text()]
    assert reaching_out == [f"{PLANNER}/speed.py"]        # it uses tools/simulate, which alone knows what a GPU does


def test_a_foreign_import_is_seen(two_folders):
    old, new = two_folders
    (new / "same.py").write_text("import os, torch.nn\nfrom changed import name\n")
    assert foreign_imports(new) == []
    (new / "same.py").write_text(
        "def f():\n    from step02_dp.mesh import Mesh\n    from .changed import name\n    import pandas\n")
    assert foreign_imports(new) == ["new/same.py imports step02_dp", "new/same.py imports .", "new/same.py imports pandas"]


def test_exercise_takes_the_place_of_one_step(monkeypatch, tmp_path):
    monkeypatch.setenv("EXERCISE", f"4={tmp_path}")
    assert step_dir(4) == step_dir("04") == step_dir("step04") == step_dir("step04_tp_sp") == tmp_path
    assert step_dir(3) == ROOT / "step03_zero"
    monkeypatch.delenv("EXERCISE")
    assert step_dir(4) == ROOT / "step04_tp_sp"


# ------------------------------------------------------------------------------------ nothing specific to one machine
MACHINE = re.compile(r"(?<![\w.~>}])/(work|root|home|Users)/|pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.org"
                     r"|debian\.org|anaconda\.org")


def test_no_path_of_a_machine_and_no_registry_host():
    found = [f"{name}:{number}: {line.strip()}" for name in repository_files() if not name.endswith(".png")
             for number, line in enumerate((ROOT / name).read_text(errors="replace").splitlines(), 1) if MACHINE.search(line)]
    assert found == []


def test_machine_paths_and_hosts_are_seen():
    seen = ["cd /" + "work/main", "'/" + "root/x'", "/" + "home/me", "pypi" + ".org", "https://files.python" + "hosted.org"]
    assert all(MACHINE.search(text) for text in seen)
    assert not any(MACHINE.search(text) for text in ("4=/path/to/folder", "./work/x", "network/work/x"))


# ------------------------------------------------------------------------------------------------------ planted mistakes
@pytest.mark.parametrize("step", STEPS)
def test_the_old_text_of_every_planted_mistake_occurs_exactly_once(step):
    here = {name: mistake for name, mistake in planted_mistakes().items() if name.startswith(step[:6])}
    places = [(name, ROOT / step, edit) for name, mistake in here.items() for edit in edits(mistake)]
    places += [(name, ROOT / STEPS[-1], edit) for name, mistake in here.items() if "prove" in mistake
               for edit in edits(mistake, step8=True)]
    assert here and all((ROOT / mistake["test"].split("::")[0]).is_file() for mistake in here.values())
    assert [f"{name}: {folder.name}/{edit['file']}" for name, folder, edit in places
            if (folder / edit["file"]).read_text().count(edit["old"]) != 1 or edit["new"] == edit["old"]] == []


# ------------------------------------------------------------------------------------- each step is complete
@pytest.mark.parametrize("step", STEPS)
def test_copied_alone_it_trains(pool, tmp_path, step):
    shutil.copytree(step_dir(step), tmp_path / step, ignore=shutil.ignore_patterns("__pycache__", "README.md", "figures"))
    world = 1 if step == STEPS[0] else 2
    pool.train(tmp_path / step, "--steps 1", world=world, weights=False)
    assert "step 1/1" in pool.output
