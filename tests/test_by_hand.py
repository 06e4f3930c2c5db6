"""stepNN/by_hand*.py shows the technique alone, from step 2 on with real ranks, in one short file that checks its own results."""
import ast
import shutil
import sys
from pathlib import Path

import pytest
from programs import run_program
from steps import ROOT, STEPS, run

PROGRAMS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("step0*/by_hand*.py"))
TEACHER = (ROOT / "docs/workshop/teacher.md").read_text()


def test_every_step_has_one():
    assert {f"{step}/by_hand.py" for step in STEPS} <= set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_checks_its_own_results(program):
    text = (ROOT / program).read_text()
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text))) or "assert_close" in text


@pytest.mark.parametrize("program", PROGRAMS)
def test_runs_alone(program, tmp_path):
    """Run the program in a folder that has only its step's by_hand programs: it uses no file of the trainer. If TEACHER has
    the step's by_hand.py, test_readmes.py starts that as a reader does, and forking is enough here."""
    for path in (ROOT / program).parent.glob("by_hand*.py"):
        shutil.copy(path, tmp_path)
    file, forked = Path(program).name, f"{Path(program).parent}/by_hand.py" in TEACHER
    status, output = run_program([file], tmp_path, 120) if forked else run([sys.executable, file], tmp_path, 120)
    assert status == 0 and output.strip(), output
