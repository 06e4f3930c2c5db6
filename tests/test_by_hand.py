"""stepNN/by_hand*.py shows the technique alone, from step 2 on with real ranks, in one short file that checks its own results."""
import ast
import shutil
import sys
from pathlib import Path

import pytest
from steps import ROOT, STEPS, run

LIBRARY = sys.stdlib_module_names | {"torch", "by_hand"}
PROGRAMS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("step0*/by_hand*.py"))
QUICK = ["step01", "step04", "step07", "step08"]          # the others take longer; in 5 and 6, spawned processes import torch again


def test_every_step_has_one():
    assert {f"{step}/by_hand.py" for step in STEPS} <= set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_uses_no_file_of_the_trainer(program):
    text = (ROOT / program).read_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 110 and "argv" not in text
    imported = {name.partition(".")[0] for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))
                for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])}
    assert imported & {"torch", "by_hand"} and imported <= LIBRARY
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text))) or "assert_close" in text


@pytest.mark.parametrize("program", [pytest.param(one, marks=[] if one[:6] in QUICK else pytest.mark.slow) for one in PROGRAMS])
def test_runs_alone(program, tmp_path):
    """Run the program in a folder that has only its step's by_hand programs."""
    for path in (ROOT / program).parent.glob("by_hand*.py"):
        shutil.copy(path, tmp_path)
    status, output = run([sys.executable, Path(program).name], tmp_path, timeout=120)
    assert status == 0 and output.strip(), output


LARGE = """
import torch
from by_hand import run
results = run(lambda rank, ranks: torch.full((100_000,), rank).tolist(), 4)
assert [result == [rank] * 100_000 for rank, result in enumerate(results)] == [True] * 4
"""


def test_results_may_be_larger_than_a_pipe(tmp_path):
    """Check step 2's run(), because the READMEs and exercises call it with the reader's own functions."""
    shutil.copy(ROOT / "step02_dp/by_hand.py", tmp_path)
    status, output = run([sys.executable, "-c", LARGE], tmp_path, timeout=60)
    assert status == 0, output
