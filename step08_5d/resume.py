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
import json
import os
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from boxes import assign_writers, boxes, fill
from config import FAMILIES, NOT_ARCHITECTURE, at_least, check_writable
from disk import (check_save, digest, fail_on_io_error, find_corruption, find_wrong_file, index_of,
                  join_names, list_checkpoints, lock, only_model_files, steps_of, suggest_intact)
from mesh import all_gather_object, dataset_digest, fail_together
from messages import RANK, fail, print0

# of the fields of a model and its family, those that do not say what is computed
NO_SETTING = {"family", "config_class", "fields", "only_supported", "renamed", *NOT_ARCHITECTURE}


class Checkpoints:
    """Saves a run's checkpoints when they are due, and resumes from one."""

    def __init__(self, model, optimizer, balancer, tokens, args):
        self.model, self.optimizer, self.balancer, self.args = model, optimizer, balancer, args
        self.run = fingerprint(balancer.config, tokens, args)
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
        biases = zip(self.model.model.layers, self.balancer.bias)                  # a dense model has none
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
            with contextlib.suppress(OSError):            # save_file lets only its owner read the file
                path.chmod(folder.stat().st_mode & 0o666)
            return path.name, digest(path)

    @fail_together()
    def finish(self, folder, digests):
        """Complete the checkpoint on rank 0 when all ranks have written; delete the oldest beyond --keep."""
        if dist.get_rank() > 0:
            return
        for _ in range(60):                               # a network file system may show new files late
            problem = find_wrong_file(folder, digests)
            if not problem:
                break
            time.sleep(1)
        if problem:                                       # a rank wrote elsewhere, or a file was left over
            fail(f"--checkpoint {self.args.checkpoint}: {folder.stem}: {problem}; all ranks must write to "
                 "the same directory, and no other program may write there")
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
            try:
                shutil.rmtree(outdated.rename(outdated.with_suffix(".tmp")), ignore_errors=True)
            except OSError as error:
                print0(f"warning: --keep {self.args.keep}: {outdated} cannot be deleted ({error})")

    # ------------------------------------------------------------------------------------------- resuming
    def load(self):
        """Restore weights and optimizer states from a checkpoint, if the run is to resume from one.

        Return the number of steps that are already done. All ranks must call this.
        """
        choice = [None]
        if self.args.checkpoint:
            choice = [self.choose()]
            dist.broadcast_object_list(choice, src=0)
        if choice[0] is None:
            self.claim_save(0)
            return 0
        folder, index = choice[0]
        self.check(folder, index)
        self.claim_save(steps_of(folder))
        self.restore(folder, index)
        return steps_of(folder)

    @fail_together()
    def claim_save(self, steps):
        """Lock --save on rank 0 until the run ends, so that no other run overwrites its model.

        If nothing is left to train and --save holds the model, exit with status 0. (torchrun or Slurm may
        restart a run that has just saved its model.)
        """
        save = self.args.save
        if RANK > 0 or not save:
            return
        self.save_lock = open(os.path.realpath(save) + ".lock", "a")
        lock(self.save_lock, f"--save {save}")
        if steps >= self.args.steps and "config.json" in os.listdir(save) and only_model_files(save):
            print0(f"--save {save}: all {steps} steps are done, and the model is saved")
            os.remove(self.save_lock.name)
            raise SystemExit(0)
        if os.listdir(save):
            fail(f"--save {save}: must be empty; choose a new or an empty directory")

    @fail_together()
    def choose(self):
        """Choose the checkpoint to resume from, on rank 0. Return (folder, index), or None to start anew."""
        if dist.get_rank() > 0:
            return None
        directory = self.args.checkpoint
        self.lock_file = open(Path(directory, ".lock"), "a")       # kept open: closing it would unlock it
        lock(self.lock_file, f"--checkpoint {directory}")
        for unfinished in list_checkpoints(self.args, ".tmp"):     # a killed run left them
            shutil.rmtree(unfinished, ignore_errors=True)
        checkpoints = list_checkpoints(self.args)
        if checkpoints and not self.args.resume:
            fail(f"--checkpoint {directory}: already contains {checkpoints[-1].name}; "
                 "add --resume to continue from it, or choose another directory")
        if checkpoints:
            print0(f"resuming from {checkpoints[-1]}")
            return checkpoints[-1], index_of(checkpoints[-1])
        if self.args.resume:
            print0(f"--resume: {directory} contains no checkpoint yet; starting from the beginning")

    @fail_together()
    def check(self, folder, index):
        """Fail unless the checkpoint is intact and belongs to this run. Warn if the learning rate jumps."""
        problem = find_corruption(folder, index, dist.get_rank(), dist.get_world_size())
        if problem:
            fail(f"--resume: {folder.name} is corrupt ({problem}); {suggest_intact(folder, self.args)}")
        for name in self.run | index["run"]:
            saved, current = index["run"].get(name), self.run.get(name)
            if saved != current:
                fail(f"--resume: {folder.name} was saved with {name} {saved}, but this run has {current}; "
                     "use the same value, or start a new run in another --checkpoint directory")
        steps, planned_steps = self.args.steps, index["planned_steps"]
        if self.args.lr_schedule == "cosine" and steps_of(folder) < steps != planned_steps:
            print0(f"--steps {steps}: saved with --steps {planned_steps}, so the learning rate continues on "
                   f"another cosine; use --steps {planned_steps} to stay on the old one")

    @torch.no_grad()
    @fail_together()
    def restore(self, folder, index):
        """Fill weights and optimizer states from the files of the checkpoint."""
        incomplete = fill(self.state(), [folder / name for name in index["digests"]])
        if incomplete:
            fail(f"--resume: {folder.name} is corrupt (elements of {incomplete} are missing); "
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
    model = asdict(config) | FAMILIES[config.family]._asdict()
    balance = args.balance if config.num_local_experts else None
    return {name: vars(args)[name] for name in flags} | dict(
        {name: value for name, value in model.items() if name not in NO_SETTING}, balance=balance,
        data=dataset_digest(tokens), dtype=str(args.dtype).removeprefix("torch."))


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


# ------------------------------------- config.py calls flags, defaults, check; ledger.py calls traffic
def flags(add):
    add("--checkpoint", metavar="DIR", help="directory for checkpoints to resume from")
    add("--save_every", type=at_least(1), default=100, help="training steps between two checkpoints")
    add("--keep", type=at_least(1), default=2, help="how many of the newest checkpoints to keep")
    add("--resume", action="store_true",
        help="continue from the newest checkpoint in --checkpoint, if there is one")


def check(args, config):
    if args.resume and not args.checkpoint:
        fail("--resume: requires --checkpoint DIR, the directory to resume from")
    if args.checkpoint:
        check_writable("checkpoint", args.checkpoint)
    if args.save and RANK == 0:
        check_save(args)


def traffic(model, mesh, args):
    return []                                             # saving sends nothing within a training step
