"""Helpers that all makers of figures share: find a step's code and pictures, run under torchrun, put tables into a page."""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from prove import processes
from steps import PYTHONPATH, ROOT, full_name, replace_on_page

sys.path += PYTHONPATH
from jobs import storage_bytes as bytes_of                # noqa: F401  counts every storage once

matplotlib.use("Agg")
PICTURES = ROOT / "docs/figures"                          # for the front page and docs/


def paths_of(number):
    """Return a step's folder and that of its pictures. Make the step's modules importable."""
    step = ROOT / full_name(number)
    sys.path.insert(0, str(step))
    return step, step / "figures"


def put_into_pages(folder, tables):
    """Write each table into the page of the folder that has its marks, between them."""
    for name, rows in tables.items():
        pages = [page for page in folder.glob("*.md") if f"<!-- measured: {name} -->" in page.read_text()]
        assert len(pages) == 1, f"{folder.name} has {len(pages)} pages with a table of the name {name}"
        replace_on_page(pages[0], name, "\n".join([*rows, ""]))


def torchrun(world, *words, **how):
    """Run a program on `world` ranks, with one thread each."""
    return subprocess.run(processes.torchrun(world, *words), env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, **how)


def seen_by_ranks(file, word, world, jobs, timeout):
    """Run `file word OUT JOBS` under torchrun; return what its ranks write into OUT, for each job."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seen.json")
        torchrun(world, file, word, out, json.dumps(jobs), timeout=timeout)
        return json.loads(out.read_text())


def seen_in_runs(file, word, world, runs, timeout):
    """Do the same with runs of the trainer, which do_runs executes."""
    stores = [processes.new_store() for _ in runs]
    return seen_by_ranks(file, word, world, [(*run, store.port) for run, store in zip(runs, stores)], timeout)


def do_runs(do, out, runs):
    """Call do(*run) for each run, on every rank. Rank 0 writes what its calls returned."""
    seen = []
    for *run, port in json.loads(runs):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        seen.append(do(*run))
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(seen))
