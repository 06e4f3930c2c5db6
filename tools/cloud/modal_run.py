"""Run `make gpu` on Modal, from the repository's folder: GPUS=T4:2 modal run tools/cloud/modal_run.py

Before that, `pip install modal` and `modal setup`. GPUS may be L4:2, A100-80GB:8, H100:8 and others; without it you get two T4s. It
uploads this checkout, so it needs no address. Modal bills by the second. As read in November 2026, a T4 costs about 0.6 dollars an
hour and an H100 about 4, each: check the price. The timeout below ends a run after half an hour. (The name
modal.py would hide the package.)
"""
import os
from pathlib import Path

import modal

NOT_SENT = [".git", ".venv", "out", "exercise", "**/__pycache__", "**/*.png"]
image = (modal.Image.debian_slim(python_version="3.11").apt_install("make", "git", "gcc", "g++")       # a compiler for --compile
         .pip_install_from_requirements("requirements.txt").add_local_dir(".", "/steps", ignore=NOT_SENT))
app = modal.App("gpu-report", image=image)


@app.function(gpu=os.environ.get("GPUS", "T4:2"), timeout=1800)
def report():
    import subprocess
    subprocess.run("PYTHON=python make gpu", shell=True, cwd="/steps")
    return {name: Path("/steps/out/gpu", name).read_text() for name in ("report.md", "report.json")}


@app.local_entrypoint()
def main():
    for name, text in report.remote().items():
        Path(name).write_text(text)
        print(f"wrote {name}")
