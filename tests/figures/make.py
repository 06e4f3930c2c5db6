"""Draws curves.png of the README: one training run, laid out in several ways.    python tests/figures/make.py"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))
from steps import ROOT

RUNS = {"one process": ("step01_single_gpu", 1, ""), "dp 4": ("step02_dp", 4, ""), "dp 4, ZeRO-1": ("step03_zero", 4, "--zero 1"),
        "dp 4, ZeRO-3": ("step03_zero", 4, "--zero 3"), "dp 4, ZeRO-3 in pairs": ("step03_zero", 4, "--zero 3 --zero_shard 2")}

with tempfile.TemporaryDirectory() as folder:
    logs = []
    for name, (step, world, flags) in RUNS.items():
        logs.append(os.path.join(folder, f"{name}.jsonl"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world), ROOT / step / "train.py"]
        subprocess.run([*command, *flags.split(), "--log_file", logs[-1]], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    subprocess.run([sys.executable, TESTS / "plot.py", *logs, "--out", TESTS / "figures/curves.png"], check=True)
