"""Runs by command line, as a user starts them, and what is compared after them."""
import functools
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from steps import NAMES, ROOT, clean_environment, repository_files

# kept: it was done, or refused in a line; or not: wrong as if right, something gone, no end, no line
FINE, CLEAR, SILENT, LOST, ENDLESS, UNCLEAR = "fine", "clear", "silent", "lost", "endless", "unclear"
TINY = "--seq_len 16 --global_batch_size 4 --micro_batch_size 1 --lr 1e-3 --lr_schedule constant --dtype float32 --steps 3"
# torchrun's own words after a rank has ended
LAUNCHERS = re.compile(r"^Traceback \(most recent call last\):\n(?:(?!^Traceback).*\n)*?.*ChildFailedError: ?\n", re.MULTILINE)


class Run:
    def __init__(self, command, folder, out=None, before=None, **environment):
        self.folder = Path(folder)
        env = clean_environment() | dict(OMP_NUM_THREADS="1") | environment
        self.process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, text=True, errors="replace",
                                        stdin=subprocess.DEVNULL, stdout=out or subprocess.PIPE, stderr=subprocess.STDOUT,
                                        preexec_fn=before)

    def end(self, limit):
        """Its status and what it printed; status None: it had not ended."""
        try:
            text, _ = self.process.communicate(timeout=limit)
            return SimpleNamespace(status=self.process.returncode, text=text or "")
        except subprocess.TimeoutExpired:
            self.sweep()
            return SimpleNamespace(status=None, text="")

    def wait(self, limit):
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.sweep()

    def workers(self):
        """The ranks that a torchrun has started."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def sweep(self):
        """Ends whatever is left of it; how many processes that were."""
        left = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "cwd") == str(self.folder.resolve()) and int(path.name) != os.getpid():
                    left.append(int(path.name))
            except OSError:
                pass
        for pid in left:
            kill(pid, signal.SIGKILL)
        return len(left)


def start(step, flags, folder, ranks=1, launcher=(), script=None, options=(), **more):
    """One process as `python train.py`, several as torchrun starts them."""
    script = script or ROOT / NAMES[step - 1] / "train.py"
    words = flags if isinstance(flags, list) else shlex.split(flags)
    if ranks == 1 and not launcher:
        return Run([sys.executable, *options, script, *words], folder, **more)
    launcher = launcher or ["--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc_per_node", str(ranks), script, *words]
    return Run(command, folder, **more)


def kill(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def judged(ends, what, right=True, may_pass=True, torchrun_says=False, by_itself=False):
    """What the contract says of runs that ended so: a result that is right, or one clear line. Where nothing was to be refused
    (`by_itself`) a line that names rank and place may have its traceback."""
    if any(end.status is None for end in ends):
        return ENDLESS, what
    if all(end.status == 0 for end in ends):
        return (FINE, what) if right and may_pass else (SILENT, what)
    text = LAUNCHERS.sub("", "".join(end.text for end in ends if end.status))
    said = [line for line in text.splitlines() if "error: " in line]
    clear = ("Traceback" not in text or by_itself) and (said or torchrun_says and "Signal" in text)
    return (CLEAR, f"{what}: {said[:1]}") if clear else (UNCLEAR, f"{what}: status {[end.status for end in ends]}: {text[:900]}")


def losses(log):
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")] if log.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


def same(mine, reference):
    return len(mine) == len(reference) > 0 and all(abs(a - b) < 1e-4 * abs(b) for a, b in zip(mine, reference))


def same_model(folder, reference):
    try:
        mine, theirs = (load_file(place / "model.safetensors") for place in (folder, reference))
    except Exception:
        return False
    return (folder / "config.json").exists() and mine.keys() == theirs.keys() and all(
        torch.allclose(mine[name], theirs[name], rtol=1e-2, atol=1e-3) for name in mine)


def damage(draw, file):
    """Does something to a file, and says what."""
    how = draw.choice(["cut", "empty", "byte", "zeros", "gone", "folder", "fifo", "text", "longer"])
    data = file.read_bytes()
    file.unlink()
    if how in ("folder", "fifo"):
        file.mkdir() if how == "folder" else os.mkfifo(file)
        return f"a {how}"
    at = draw.randrange(len(data) or 1)
    made = dict(cut=data[:at], empty=b"", byte=data[:at] + bytes([draw.randrange(256)]) + data[at + 1:], zeros=bytes(len(data)),
                text=b"not this", longer=data + b"x" * 9)
    if how != "gone":
        file.write_bytes(made[how])
    return f"{how} at {at} of {len(data)}" if how in ("cut", "byte") else how


@functools.cache
def flags(step):
    text = Run([sys.executable, ROOT / NAMES[step - 1] / "train.py", "--help"], ROOT).end(60).text
    names = [line.split()[0][2:].rstrip(",") for line in text.splitlines() if line.startswith("  --")]
    assert "lr" in names, text
    return names


def digest_of_repository():
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in repository_files())).hexdigest()


class House:
    """Models, checkpoints and losses that attempts compare with, made by plain runs and once."""

    def __init__(self, folder):
        self.folder = folder
        self.known = {}

    def losses(self, step, flags):
        key = ("losses", "mixtral" if "moe" in flags else step if "balance" in flags else 1, flags)
        if key not in self.known:
            log = self.folder / f"log_{len(self.known)}"
            self.made(start(step, f"{flags} --log_file '{log}'", self.folder))
            self.known[key] = losses(log)
        return self.known[key]

    def model(self, step, seed):
        """What three steps of any step give."""
        save = self.folder / f"model_{seed}"
        if not save.exists():
            self.made(start(1, f"{TINY} --seed {seed} --save '{save}'", self.folder))
        return save

    def checkpoint(self):
        save = self.folder / "checkpoint"
        if not save.exists():
            self.made(start(8, f"{TINY} --steps 4 --checkpoint '{save}' --save_every 2", self.folder))
        return save

    @staticmethod
    def made(run):
        end = run.end(300)
        assert end.status == 0, end.text
