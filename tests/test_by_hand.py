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
SLOW = ["step02", "step03"]                               # each of their ranks imports torch._dynamo, for AdamW


def test_every_step_has_one():
    assert {f"{step}/by_hand.py" for step in STEPS} <= set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_checks_its_own_results(program):
    text = (ROOT / program).read_text()
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text))) or "assert_close" in text


@pytest.mark.parametrize("program", [pytest.param(one, marks=pytest.mark.slow if one[:6] in SLOW else []) for one in PROGRAMS])
def test_runs_alone(program, tmp_path):
    """Run the program in a folder that has only its step's by_hand programs: it uses no file of the trainer. test_readmes.py runs
    those of TEACHER, too, and starts Python anew."""
    for path in (ROOT / program).parent.glob("by_hand*.py"):
        shutil.copy(path, tmp_path)
    file = Path(program).name
    status, output = run_program([file], tmp_path, 120) if program in TEACHER else run([sys.executable, file], tmp_path, 120)
    assert status == 0 and output.strip(), output
