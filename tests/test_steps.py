"""Adjacent steps differ only where the later one declares it, and without noise; the planted mistakes apply; .ci/run leaves out no
test."""
import ast
import fnmatch
import re
import shutil
import subprocess
import sys

import pytest
from patched import edits, planted_mistakes
from steps import CHANGES, NAMES, PROJECT, ROOT, STEPS, pairs, repository_files, step_dir, step_files

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


def test_lines_fit_side_by_side():
    assert [f"{path.relative_to(ROOT)}:{number}" for step in STEPS for path in (ROOT / step).glob("*.py")
            for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 110] == []


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


# ------------------------------------------------------------------------------------ nothing specific to one machine
MACHINE = re.compile(r"(?<![\w.~>}])/(work|root|home|Users)/|pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.org"
                     r"|debian\.org|anaconda\.org")


def test_no_path_of_a_machine_and_no_registry_host():
    found = [f"{name}:{number}: {line.strip()}" for name in repository_files() if not name.endswith(".png")
             for number, line in enumerate((ROOT / name).read_text(errors="replace").splitlines(), 1) if MACHINE.search(line)]
    assert found == []


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
    shutil.copytree(step_dir(step), tmp_path / step, ignore=shutil.ignore_patterns("__pycache__", "*.md", "figures"))
    world = 1 if step == STEPS[0] else 2
    pool.train(tmp_path / step, "--steps 1", world=world, weights=False)
    assert "step 1/1" in pool.output


# ------------------------------------------------------------------------------------- no test is left out
def test_every_test_is_in_one_part_of_what_a_push_runs():
    """Check that .ci/run runs the quick tests of all files, and the slow ones of each file in one part."""
    run, options = (ROOT / ".ci/run").read_text(), PROJECT["tool"]["pytest"]["ini_options"]
    assert "make test ;;" in run and "not slow and not sweep" in options["addopts"] and '-m "slow and not sweep"' in run
    every = {path.relative_to(ROOT).as_posix() for folder in options["testpaths"] for path in (ROOT / folder).rglob("test_*.py")}
    taken = []
    for words in re.findall(r"^    \w+\) slow (.*) ;;$", run, re.M):
        places = [word for word in words.split() if not word.startswith("--ignore-glob=")]
        ignored = [word.partition("=")[2] for word in words.split() if word not in places]
        taken += [name for name in every if any(fnmatch.fnmatch(name, place) or name.startswith(f"{place}/") for place in places)
                  and not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)]
    assert sorted(taken) == sorted(every)
