"""stepNN/by_hand.py: the technique alone, on real ranks, in one short file that ends in a comparison with one process."""
import ast
import shutil
import sys

import pytest
from steps import ROOT, STEPS, run

LIBRARY = sys.stdlib_module_names | {"torch"}
QUICK = ["step01", "step04", "step07", "step08"]          # of the others each of four processes imports much


@pytest.mark.parametrize("step", STEPS)
def test_uses_no_file_of_the_trainer(step):
    text = (ROOT / step / "by_hand.py").read_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 110 and "argv" not in text
    imported = {name.partition(".")[0] for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))
                for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])}
    assert "torch" in imported and imported <= LIBRARY
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text))) or "assert_close" in text


@pytest.mark.parametrize("step", [pytest.param(step, marks=[] if step[:6] in QUICK else pytest.mark.slow) for step in STEPS])
def test_runs_alone(step, tmp_path):
    shutil.copy(ROOT / step / "by_hand.py", tmp_path)
    status, output = run([sys.executable, "by_hand.py"], tmp_path, timeout=120)
    assert status == 0 and output.strip(), output


LARGE = """
import torch
from by_hand import run
results = run(lambda rank, ranks: torch.full((100_000,), rank).tolist(), 4)
assert [result == [rank] * 100_000 for rank, result in enumerate(results)] == [True] * 4
"""


def test_results_may_be_larger_than_a_pipe(tmp_path):
    """By step 2's run(), which the READMEs and exercises use for functions of the reader's own."""
    shutil.copy(ROOT / "step02_dp/by_hand.py", tmp_path)
    status, output = run([sys.executable, "-c", LARGE], tmp_path, timeout=60)
    assert status == 0, output
