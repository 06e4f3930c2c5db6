"""Describe the steps and the repository for the tests and the tools: plain data, with only the standard library."""
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

NAMES = ["step01_single_gpu", "step02_dp", "step03_zero", "step04_tp_sp",
         "step05_cp", "step06_pp", "step07_ep", "step08_5d"]
# the folders of the code of tests, tools and exercises, for programs that pytest does not start
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONPATH = [str(ROOT / folder) for folder in PROJECT["tool"]["pytest"]["ini_options"]["pythonpath"]]
STEPS = sorted(path.name for path in ROOT.glob("step0?_*") if path.is_dir())       # the steps that exist

# The files that a step changes or adds, relative to the step before it, in reading order: first the lesson, then the files that
# only support it, for a second reading. `make diff`, the READMEs' tables of files and the tests all read these lists.
BORDER = "support, for a second reading"                  # the line between the two
LESSON = {
    "step01_single_gpu": ["train.py", "model.py", "loss.py", "optimizer.py", "recompute.py"],
    "step02_dp": ["train.py", "data_parallel.py", "data.py"],
    "step03_zero": ["train.py", "zero.py", "placement.py", "optimizer.py"],
    "step04_tp_sp": ["train.py", "tensor_parallel.py", "placement.py", "shards.py", "recompute.py"],
    "step05_cp": ["train.py", "context_parallel.py", "data.py", "mesh.py"],
    "step06_pp": ["train.py", "pipeline_parallel.py", "schedules.py", "zero_bubble.py", "zero.py"],
    "step07_ep": ["train.py", "moe.py", "expert_parallel.py", "balance.py", "model.py", "placement.py", "zero.py"],
    "step08_5d": ["train.py", "boxes.py", "resume.py"],
}
SUPPORT = {
    "step01_single_gpu": ["weights.py", "data.py", "config.py", "metrics.py", "profiling.py", "messages.py"],
    "step02_dp": ["mesh.py", "ledger.py", "config.py", "metrics.py"],
    "step03_zero": ["data_parallel.py", "weights.py"],
    "step04_tp_sp": ["weights.py"],
    "step05_cp": ["recompute.py"],
    "step06_pp": ["weights.py", "recompute.py"],
    "step07_ep": ["data_parallel.py", "zero_bubble.py", "tensor_parallel.py", "pipeline_parallel.py", "recompute.py", "weights.py",
                  "config.py", "metrics.py"],
    "step08_5d": ["disk.py", "zero.py", "weights.py", "config.py", "messages.py", "metrics.py", "slurm.sh"],
}
CHANGES = {step: [*LESSON[step], *SUPPORT[step]] if step != "step01_single_gpu" else [] for step in LESSON}

MADE_BY_RUNNING = {".git", ".venv", "__pycache__", ".pytest_cache", "exercise", "out"}


def full_name(step):
    """Return the full name of a step, such as 'step04_tp_sp', given 4, '4', 'step04' or the name itself."""
    prefix = f"step{int(step):02d}_" if str(step).isdecimal() else str(step)
    return next(name for name in NAMES if name.startswith(prefix))


def step_dir(step):
    """Return the folder of a step's code. EXERCISE=4=folder replaces step 4 by the reader's own folder."""
    number, _, folder = os.environ.get("EXERCISE", "").partition("=")
    if folder and full_name(number) == full_name(step):
        return Path(folder).resolve()
    return ROOT / full_name(step)


def load_module(path):
    """Load a Python file as a module of its own: no import finds it, and it replaces no module of the same name."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pairs():
    """Return the folders of each step and the next, in pairs."""
    return [(ROOT / old, ROOT / new) for old, new in zip(STEPS, STEPS[1:])]


NOT_IN_DIFF = ("__pycache__", "figures", "*.md", "by_hand*")         # what `make diff` leaves out of a step


def in_diff(name):
    """Return whether `make diff` shows this file of a step."""
    return not any(fnmatch(part, pattern) for part in Path(name).parts for pattern in NOT_IN_DIFF)


def pages_of(step):
    """List the chapters and the lab of a step, as paths from ROOT."""
    names = (str(path.relative_to(ROOT)) for path in (ROOT / step).glob("*.md"))
    return sorted(names, key=lambda name: ("README" not in name, "LAB" in name, name))         # chapters first


def text_of(step):
    """Return the text of all pages of a step."""
    return "\n".join((ROOT / name).read_text() for name in pages_of(step))


def on_page(page, name):
    """Return what stands on a page between <!-- measured: NAME -->, which it must have once, and <!-- end -->."""
    places = re.findall(rf"<!-- measured: {name} -->\n(.*?)<!-- end -->", page.read_text(), re.S)
    assert len(places) == 1, f"{page.name} has {len(places)} places for {name}"
    return places[0]


def replace_on_page(page, name, new):
    """Put `new` there instead."""
    mark = f"<!-- measured: {name} -->\n"
    page.write_text(page.read_text().replace(mark + on_page(page, name), mark + new))


def step_files(folder):
    """List the files of a step that belong to its diff, relative to its folder."""
    names = (str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    return sorted(filter(in_diff, names))


def repository_files(root=ROOT):
    """List the tracked files and the new ones that git does not ignore; without git, all files but those left by running."""
    if (root / ".git").exists():
        command = ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"]
        names = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())
    else:
        names = {str(path.relative_to(root)) for path in root.rglob("*")}
    return sorted(name for name in names if (root / name).is_file() and not MADE_BY_RUNNING & set(Path(name).parts))


def copy_repository(target, root=ROOT):
    for name in repository_files(root):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name)


def clean_environment():
    """Return an environment with this interpreter's commands first, one thread, no hub, and no variables of the calling make."""
    left_out = ("EXERCISE", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    path = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    return env | dict(PATH=path, PYTHON=sys.executable, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1",
                      HF_HUB_OFFLINE="1")


def run(command, cwd, timeout):
    """Run a command; return its exit status and all its output. End one that hangs, with all the processes it started."""
    child = subprocess.Popen(command, cwd=cwd, env=clean_environment(), start_new_session=True, text=True,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = child.communicate(timeout=timeout)
        return child.returncode, output
    except subprocess.TimeoutExpired:
        end(child)
        return 124, f"did not end within {timeout} seconds: {' '.join(map(str, command))}"


def end(child):
    """End a process, politely first: torchrun's workers are in sessions of their own, and only torchrun can end them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(timeout=10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
