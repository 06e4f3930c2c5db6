"""The extensions apply, their step's README mentions them, and their tests pass."""
import re
import sys

import pytest
from extend import FOLDER, apply, patches, run_its_tests
from patched import read_header
from steps import ROOT, copy_repository, full_name, run, text_of

NAMES = list(patches())
EXTENDED = [pytest.param(patch, id=name) for name, patch in patches().items()]
# a push runs the tests of these, make sweep those of the others
ASKED_FOR = {"async_checkpoint", "diloco", "documents", "held_out", "muon", "ring_tp"}


@pytest.mark.parametrize("patch", EXTENDED)
def test_it_is_a_patch_on_its_step(patch, tmp_path):
    said = read_header(patch)
    assert list(said) == ["step", "what", "when", "run", "effect"]
    folder = apply(patch, tmp_path)
    for file in folder.glob("*.py"):
        compile(file.read_text(), file.name, "exec")
    # the other lines are the step's: one that is too long is test_steps.py's matter, not one of every extension
    assert [line for line in patch.read_text().splitlines() if len(line) > 1 + 110 and line.startswith("+")] == []


@pytest.mark.parametrize("patch", EXTENDED)
def test_the_readmes_tell_of_it(patch):
    assert f"make extend NAME={patch.stem}" in text_of(full_name(read_header(patch)["step"]))


def test_each_patch_has_tests_and_each_test_a_patch():
    assert [path.stem for path in sorted(FOLDER.glob("*.py"))] == sorted(NAMES) != []


@pytest.mark.parametrize("patch", [pytest.param(patch, id=name, marks=pytest.mark.slow if name in ASKED_FOR else pytest.mark.sweep)
                                   for name, patch in patches().items()])
def test_its_tests_pass(patch, monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    verdict = run_its_tests(patch)
    assert verdict.passed and not verdict.failed, f"{verdict.failed}: {verdict.why}\n{verdict.text}"


def test_a_copy_to_play_with(tmp_path):
    copy_repository(tmp_path)
    status, output = run([sys.executable, "exercises/extend.py"], tmp_path, timeout=60)
    assert status == 0 and all(re.search(rf"^{name} .*\n +if .*\n +\S", output, re.M) for name in NAMES), output
    first = NAMES[0]
    status, output = run([sys.executable, "exercises/extend.py", first], tmp_path, timeout=60)
    assert status == 0 and (tmp_path / "exercise" / first / "train.py").exists(), output
    again = run([sys.executable, "exercises/extend.py", first], tmp_path, timeout=60)
    assert again[0] == 0 and "was not changed" in again[1]
    status, output = run([sys.executable, "exercises/extend.py", "none"], tmp_path, timeout=60)
    assert status == 2 and output.count("\n") == 1 and first in output
