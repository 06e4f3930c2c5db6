"""Checkpoints: a run that was stopped or killed resumes from its last one, even under another layout.

With --checkpoint DIR, a checkpoint is a folder in DIR:

    DIR/step_00000200/rank_00003.safetensors   the boxes (boxes.py) that rank 3 wrote: of the master weights,
                                               of Adam's moments, of the load balancer's biases
    DIR/step_00000200/index.json               the number of steps, a digest of each file, the run's settings

Nothing random needs saving: the seed and a parameter's name determine its initial value, the number of a step
determines its batch, and a run draws no other random numbers. The ranks write into step_00000200.tmp, and
rank 0 renames it when all files are complete. Renaming is atomic, so a folder without .tmp is complete, no
matter when the run was killed.
"""
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from boxes import assign_writers, boxes, fill
from config import NOT_ARCHITECTURE, ModelConfig, at_least, check_writable
from mesh import all_gather_object, dataset_digest, fail_together
from messages import fail, print0

# the values of settings that did not exist yet when an older version of this trainer saved a checkpoint
DEFAULTS = {field.name: field.default for field in fields(ModelConfig)} | dict(qk_norm=False)


class Checkpoints:
    """Saves a run's checkpoints when they are due, and resumes from one."""

    def __init__(self, model, optimizer, balance, tokens, args):
        self.model, self.optimizer, self.balance, self.args = model, optimizer, balance, args
        self.run = fingerprint(balance.config, tokens, args)
        self.signals = install_signal_handlers() if args.checkpoint else []
        self.local_keys = None                            # the keys of the boxes that this rank writes

    def state(self):
        """Return {key: box}: everything this rank has to save or to fill, as views of its memory."""
        param_names, state = {param: name for name, param in self.model.named_parameters()}, {}
        for sharded_param, master in zip(self.optimizer.params, self.optimizer.masters):
            # without ZeRO the optimizer updates the parameter itself, starting at its first element
            param, start = getattr(sharded_param, "origin", (sharded_param, 0))
            adam_state = self.optimizer.adamw.state[master]
            if not adam_state:                            # AdamW does not allocate it before its first step
                adam_state.update(step=torch.zeros((), device=master.device),
                                  exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
            state |= boxes(param_names[param], param, start, master)
            for average in ("exp_avg", "exp_avg_sq"):
                state |= boxes(f"{param_names[param]}.{average}", param, start, adam_state[average])
        biases = zip(self.model.model.layers, self.balance.bias)                   # a dense model has none
        return state | {f"balance.bias[{layer}, 0]": bias.unsqueeze(0) for layer, bias in biases}

    # ------------------------------------------------------------------------------------------- saving
    def save_if_due(self, step):
        """Save if a checkpoint is due after this step. Return True if a signal told the run to stop here.

        All ranks must call this after every step.
        """
        if not self.args.checkpoint:
            return False
        stop_signal = torch.tensor(max(self.signals, default=0), device=self.args.device)
        dist.all_reduce(stop_signal, op=dist.ReduceOp.MAX)         # one rank may receive it before another
        is_last = step + 1 == self.args.steps
        if stop_signal or is_last or (step + 1) % self.args.save_every == 0:
            self.save(step + 1)
        if not stop_signal or is_last:                    # after the last step, train.py still has to --save
            return False
        print0(f"stopped by {signal.Signals(int(stop_signal)).name} after step {step + 1}; "
               "use --resume to continue")
        return True

    def save(self, steps):
        """Write the checkpoint of a run that has done this many steps. All ranks must call this."""
        folder, state = Path(self.args.checkpoint, f"step_{steps:08d}.tmp"), self.state()
        if self.local_keys is None:                       # the boxes never change, so ranks agree only once
            self.local_keys = assign_writers(state)
        digests = all_gather_object(self.write(folder, state))
        self.finish(folder, dict(digests))

    @fail_together()
    def write(self, folder, state):
        """Write this rank's boxes to a file. Return the file's name and its digest."""
        if not all(box.isfinite().all() for box in state.values()):
            fail(f"--checkpoint {self.args.checkpoint}: {folder.stem} is not saved, because weights or "
                 "optimizer states are not finite; available checkpoints: "
                 f"{join_names(list_checkpoints(self.args))}", 3)
        path = folder / f"rank_{dist.get_rank():05d}.safetensors"
        with fail_on_io_error(folder, self.args):
            folder.mkdir(exist_ok=True)
            save_file({key: state[key].cpu() for key in self.local_keys}, path)
            return path.name, digest(path)

    @fail_together()
    def finish(self, folder, digests):
        """Complete the checkpoint on rank 0 when all ranks have written; delete the oldest beyond --keep."""
        if dist.get_rank() > 0:
            return
        with fail_on_io_error(folder, self.args):
            index = dict(steps=steps_of(folder), digests=digests, run=self.run,
                         planned_steps=self.args.steps)
            (folder / "index.json").write_text(json.dumps(index))
            digest(folder / "index.json")                 # forces it to disk
            folder.rename(folder.with_suffix(""))
            os.sync()                                     # the rename too, before older checkpoints go
        for outdated in list_checkpoints(self.args)[:-self.args.keep]:
            # A kill may leave a half-deleted folder: rename it first, so that it does not look complete.
            # And a folder that cannot be deleted is no reason to end the run.
            shutil.rmtree(outdated.rename(outdated.with_suffix(".tmp")), ignore_errors=True)

    # ------------------------------------------------------------------------------------------- resuming
    def load(self):
        """Restore weights and optimizer states from a checkpoint, if the run is to resume from one.

        Return the number of steps that are already done. All ranks must call this.
        """
        if not self.args.checkpoint:
            return 0
        choice = [self.choose()]
        dist.broadcast_object_list(choice, src=0)
        if choice[0] is None:
            return 0
        folder, index = choice[0]
        self.check(folder, index)
        self.restore(folder, index)
        for path in list_checkpoints(self.args) if dist.get_rank() == 0 else ():
            if path > folder:                             # --resume would take it for this run's newest
                path.rename(f"{path}.aside_{time.time_ns()}")
        return steps_of(folder)

    @fail_together()
    def choose(self):
        """Choose the checkpoint to resume from, on rank 0. Return (folder, index), or None to start anew."""
        if dist.get_rank() > 0:
            return None
        directory, resume = self.args.checkpoint, self.args.resume
        self.lock_file = open(Path(directory, ".lock"), "a")       # kept open: closing it would unlock it
        lock(self.lock_file, f"--checkpoint {directory}")
        for unfinished in list_checkpoints(self.args, ".tmp"):     # a killed run left them
            shutil.rmtree(unfinished, ignore_errors=True)
        checkpoints = list_checkpoints(self.args)
        if checkpoints and not resume:
            fail(f"--checkpoint {directory}: already contains {checkpoints[-1].name}; "
                 "add --resume to continue from it, or choose another directory")
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            # after a restart by torchrun there may be newer checkpoints than the one that --resume names
            resume = resume and "newest"
        candidates = [path for path in checkpoints if resume in (path.name, "newest")]
        if resume not in (None, "newest") and not candidates:
            fail(f"--resume {resume}: not found in {directory}; "
                 f"available checkpoints: {join_names(checkpoints)}")
        if resume:
            print0(f"resuming from {candidates[-1]}" if candidates else
                   f"--resume: {directory} contains no checkpoint yet; starting from the beginning")
        return (candidates[-1], index_of(candidates[-1])) if candidates else None

    @fail_together()
    def check(self, folder, index):
        """Fail unless the checkpoint is intact and belongs to this run. Warn if the learning rate jumps."""
        problem = find_corruption(folder, index, dist.get_rank(), dist.get_world_size())
        if problem:
            fail(f"--resume {folder.name}: corrupt ({problem}); {suggest_intact(folder, self.args)}")
        for name in self.run | index["run"]:
            saved, current = (run.get(name, DEFAULTS.get(name)) for run in (index["run"], self.run))
            if saved != current:
                fail(f"--resume {folder.name}: saved with {name} {saved}, but this run has {current}; "
                     "use the same value, or start a new run in another --checkpoint directory")
        steps, planned_steps = self.args.steps, index.get("planned_steps", self.args.steps)
        if self.args.lr_schedule == "cosine" and steps_of(folder) < steps != planned_steps:
            print0(f"--steps {steps}: saved with --steps {planned_steps}, so the learning rate continues on "
                   f"another cosine; use --steps {planned_steps} to stay on the old one")

    @torch.no_grad()
    @fail_together()
    def restore(self, folder, index):
        """Fill weights and optimizer states from the files of the checkpoint."""
        incomplete = fill(self.state(), [folder / name for name in index["digests"]])
        if incomplete:
            fail(f"--resume {folder.name}: corrupt (elements of {incomplete} are missing); "
                 f"{suggest_intact(folder, self.args)}")
        steps = steps_of(folder)
        for param, master in zip(self.optimizer.params, self.optimizer.masters):
            self.optimizer.adamw.state[master]["step"].fill_(steps)
            param.data.copy_(master)                      # rounds; in float32 they are the same memory
        if steps >= self.args.steps:
            print0(f"--steps {self.args.steps}: {steps} steps are already done; nothing is left to train")


def fingerprint(config, tokens, args):
    """Return the settings that must stay the same when a run resumes. (--lr and --steps may change.)"""
    flags = ("seq_len", "global_batch_size", "weight_decay", "grad_clip", "warmup", "lr_schedule", "seed")
    left_out = ("family", *NOT_ARCHITECTURE)              # the sizes and qk_norm say all that family would
    model = {name: value for name, value in asdict(config).items() if name not in left_out}
    balance = args.balance if config.num_local_experts else None
    return {name: vars(args)[name] for name in flags} | model | dict(
        qk_norm=config.qk_norm, balance=balance, data=dataset_digest(tokens),
        dtype=str(args.dtype).removeprefix("torch."))


def install_signal_handlers():
    """Handle the signals that tell the run to stop. Return the list to which the handler appends them.

    Slurm sends SIGTERM, a terminal that closes sends SIGHUP, and Ctrl-C sends SIGINT. After any of them,
    Ctrl-C kills the process at once.
    """
    signals = []

    def handler(number, frame):
        signals.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # nohup makes the process ignore SIGHUP, so leave that as it is. A script makes its background jobs
        # ignore SIGINT: handle it anyway.
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
    return signals


# ------------------------------------------------------------------------------------------- on disk
def list_checkpoints(args, suffix=""):
    """Return the complete checkpoints, oldest first; with the suffix .tmp, the incomplete ones."""
    return sorted(Path(args.checkpoint).glob("step_" + "[0-9]" * 8 + suffix))


def steps_of(folder):
    return int(folder.stem.removeprefix("step_"))


def join_names(folders):
    """Format the names of folders for a message."""
    return ", ".join(folder.name for folder in folders) or "none"


@contextlib.contextmanager
def fail_on_io_error(folder, args):
    """Fail with one line if the checkpoint cannot be written: a disk may be full."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        fail(f"--checkpoint {args.checkpoint}: {folder.stem} cannot be written ({error}); "
             f"available checkpoints: {join_names(list_checkpoints(args))}")


def lock(file, flag):
    """Lock an open file, or fail if another run has locked it. `flag` names it in the message.

    The lock lasts until the file is closed or the process ends, even if it is killed.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"{flag}: another run is using it; choose another name")
    except OSError as error:
        print0(f"warning: {flag}: this file system does not support locks ({error}); "
               "make sure that no other run uses the same name")


def digest(path):
    """Force a file to disk. Return its SHA-256."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())                           # writes out what the system still has in memory
        return hashlib.file_digest(file, "sha256").hexdigest()


def index_of(folder):
    """Return the contents of index.json, or None if it is missing or corrupt."""
    path = folder / "index.json"
    with contextlib.suppress(Exception):                  # a corrupt file may raise anything
        index = json.loads(path.read_text()) if path.is_file() else {}             # a pipe would block
        types = [type(index[name]) for name in ("steps", "digests", "run")]
        if types == [int, dict, dict] and index["steps"] == steps_of(folder):
            return index


def find_corruption(folder, index, rank=0, world_size=1):
    """Return what is wrong with a checkpoint, or None if it is intact. Each rank reads some of the files."""
    if index is None or index != index_of(folder):
        return "index.json is missing or corrupt, or differs between ranks"
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for name in sorted(present ^ index["digests"].keys()):
        return f"{name} is " + ("not listed in index.json" if name in present else "missing")
    for name in sorted(present)[rank::world_size]:
        if digest(folder / name) != index["digests"][name]:
            return f"{name} has changed since it was written"


def suggest_intact(folder, args):
    """Return what to do about a corrupt checkpoint: resume from the newest intact one before it, if any."""
    for path in reversed(list_checkpoints(args)):
        if path < folder and not find_corruption(path, index_of(path)):
            return f"use --resume {path.name}, which is older and intact"
    return "no older checkpoint is intact, so start a new run in another --checkpoint directory"


def log_size_to_keep(name, args):
    """Return how many bytes of a log a resumed run keeps: the lines of the steps already done."""
    size = 0
    with open(name, "rb") as log:
        for number, line in enumerate(log, 1):
            try:
                # a killed run may have left half a line
                if not line.endswith(b"\n") or json.loads(line)["step"] >= args.first_step:
                    break
            except (ValueError, LookupError, TypeError):
                fail(f"--log_file {name}: line {number} is not from a training log; remove it, or choose "
                     "another name")
            size += len(line)
    return size


# ------------------------------------- config.py calls flags, defaults, check; ledger.py calls traffic
def flags(add):
    add("--checkpoint", metavar="DIR", help="directory for checkpoints to resume from")
    add("--save_every", type=at_least(1), default=100, help="training steps between two checkpoints")
    add("--keep", type=at_least(1), default=2, help="how many of the newest checkpoints to keep")
    add("--resume", nargs="?", const="newest", metavar="NAME",
        help="continue from the checkpoint NAME in --checkpoint; without NAME, from the newest, if any")


def check(args, config):
    if args.resume and not args.checkpoint:
        fail("--resume: requires --checkpoint DIR, the directory to resume from")
    if args.checkpoint:
        check_writable("checkpoint", args.checkpoint)


def traffic(model, mesh, args):
    return []                                             # saving sends nothing within a training step
