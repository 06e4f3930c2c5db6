"""--checkpoint DIR --save_every N --keep K --resume: a stopped or killed run goes on, even in another layout.

    DIR/step_00000200/rank_00003.safetensors     what rank 3 wrote: boxes (boxes.py) of weights in full
                                                 precision, of Adam's averages, of the balance biases
    DIR/step_00000200/index.json                 the step, digests of the files, which run it is

There is no random state to keep: initial weights follow from seed and name, step t's data from t, and nothing
else is drawn. A folder is written as step_00000200.tmp and renamed when all is in it: so it is whole.
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

from boxes import boxes, fill, assign_writers
from config import NOT_ARCHITECTURE, ModelConfig
from mesh import all_gather_object, dataset_digest, together
from messages import fail, print0

DEFAULTS = {field.name: field.default for field in fields(ModelConfig)} | dict(qk_norm=False)


class Checkpoints:
    def __init__(self, model, optimizer, balance, tokens, args):
        self.model, self.optimizer, self.balance, self.args = model, optimizer, balance, args
        self.run = fingerprint(balance.config, tokens, args)
        self.signals = install_signal_handlers() if args.checkpoint else []
        self.mine = None                                  # the keys of the boxes that this rank writes

    def state(self):
        """{key: box} of all that this rank has to save, or to fill."""
        names, state = {param: name for name, param in self.model.named_parameters()}, {}
        for piece, master in zip(self.optimizer.params, self.optimizer.masters):
            param, first = getattr(piece, "origin", (piece, 0))                   # ZeRO's slice, or all
            adam = self.optimizer.adamw.state[master]
            if not adam:                                  # no step has been taken
                adam.update(step=torch.zeros((), device=master.device),
                            exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
            state |= boxes(names[param], param, first, master)
            for average in ("exp_avg", "exp_avg_sq"):
                state |= boxes(f"{names[param]}.{average}", param, first, adam[average])
        biases = zip(self.model.model.layers, self.balance.bias)                   # of a dense model none
        return state | {f"balance.bias[{layer}, 0]": bias.unsqueeze(0) for layer, bias in biases}

    # ------------------------------------------------------------------------------------------- saving
    def save_if_due(self, step):
        """After every step. True: the run ends here, as a signal said."""
        if not self.args.checkpoint:
            return False
        stop_signal = torch.tensor(max(self.signals, default=0), device=self.args.device)
        dist.all_reduce(stop_signal, op=dist.ReduceOp.MAX)         # one rank may hear it before another
        last = step + 1 == self.args.steps
        if stop_signal or last or (step + 1) % self.args.save_every == 0:
            self.save(step + 1)
        if not stop_signal or last:                       # after the last there is --save to do
            return False
        print0(f"told to end ({signal.Signals(int(stop_signal)).name}) after step {step + 1}; "
            "--resume goes on from there")
        return True

    def save(self, steps):
        folder, state = Path(self.args.checkpoint, f"step_{steps:08d}.tmp"), self.state()
        self.mine = assign_writers(state) if self.mine is None else self.mine
        digests = all_gather_object(together(self.write, folder, state))
        together(self.finish, folder, dict(digests))

    def write(self, folder, state):
        if not all(box.isfinite().all() for box in state.values()):
            fail("some weights are not finite any more: stopped, nothing saved; checkpoints there: "
                   f"{names(list_checkpoints(self.args))}", 3)
        file = folder / f"rank_{dist.get_rank():05d}.safetensors"
        with fail_on_io_error(folder, self.args):
            folder.mkdir(exist_ok=True)
            save_file({key: state[key].cpu() for key in self.mine}, file)
            return file.name, digest(file)

    def finish(self, folder, digests):
        """By rank 0, when all have written."""
        if dist.get_rank() > 0:
            return
        with fail_on_io_error(folder, self.args):
            index = dict(steps=int(folder.stem[5:]), digests=digests, run=self.run)
            (folder / "index.json").write_text(json.dumps(index))
            digest(folder / "index.json")
            folder.rename(folder.with_suffix(""))
            os.sync()                                     # of the folders, too, before older ones go
        for old in list_checkpoints(self.args)[:-self.args.keep]:
            # half deleted it must not look whole; what cannot be deleted is not worth a run
            shutil.rmtree(old.rename(old.with_suffix(".tmp")), ignore_errors=True)

    # ------------------------------------------------------------------------------------------- going on
    def load(self):
        """The number of steps that are done already; weights and optimizer are as they were then."""
        if not self.args.checkpoint:
            return 0
        chosen = [together(self.choose)]
        dist.broadcast_object_list(chosen, src=0)
        if chosen[0] is None:
            return 0
        together(self.check, *chosen[0])
        together(self.restore, *chosen[0])
        folder, _ = chosen[0]
        for newer in list_checkpoints(self.args) if dist.get_rank() == 0 else ():
            if newer > folder:                            # it would be taken for this run's newest
                newer.rename(f"{newer}.aside_{time.time_ns()}")
        return int(folder.name[5:])

    def choose(self):
        """By rank 0: the checkpoint to go on from, with its index; None if there is none yet."""
        if dist.get_rank() > 0:
            return None
        self.lock = lock(self.args.checkpoint)
        for left in list_checkpoints(self.args, ".tmp"):               # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        there, wanted, where = list_checkpoints(self.args), self.args.resume, self.args.checkpoint
        if there and not wanted:
            fail(f"--checkpoint {where}: {there[-1].name} is in there already; --resume goes on from it, "
                   "a run of its own takes another directory")
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            wanted = wanted and "newest"                  # what was done since the first start counts
        found = [path for path in there if wanted in (path.name, "newest")]
        if wanted not in (None, "newest") and not found:
            fail(f"--resume {wanted}: not in {where}; there are {names(there)}")
        if wanted:
            print0(f"resuming from {found[-1]}" if found else
                f"--resume: nothing in {where} yet, starting at the beginning")
        return (found[-1], index_of(found[-1])) if found else None

    def check(self, folder, index):
        """Fail unless the checkpoint is intact and belongs to this run."""
        problem = find_corruption(folder, index, dist.get_rank(), dist.get_world_size())
        if problem:
            fail(f"--resume: {folder} is damaged: {problem}; {suggest_intact(folder, self.args)}")
        for name in self.run | index["run"]:              # older checkpoints lack newer fields: the default
            then, now = (run.get(name, DEFAULTS.get(name)) for run in (index["run"], self.run))
            if then != now:
                fail(f"--resume: {folder} was saved with {name} {then}, but this run has {now}")

    @torch.no_grad()
    def restore(self, folder, index):
        unfilled = fill(self.state(), [folder / name for name in index["digests"]])
        if unfilled:
            fail(f"--resume: {folder} is damaged: it has not all of {unfilled}; {suggest_intact(folder, self.args)}")
        steps = int(folder.name[5:])
        for param, master in zip(self.optimizer.params, self.optimizer.masters):
            self.optimizer.adamw.state[master]["step"].fill_(steps)
            param.data.copy_(master)
        if steps >= self.args.steps:
            print0(f"{steps} steps are done, of --steps {self.args.steps}: nothing is left to do")


def fingerprint(config, tokens, args):
    """Return the settings that determine a run's losses and its place in the data: they must not change."""
    flags = ("seq_len", "global_batch_size", "weight_decay", "grad_clip", "warmup", "lr_schedule", "seed")
    left_out = ("family", *NOT_ARCHITECTURE)              # sizes and qk_norm say all of a family
    model = {name: value for name, value in asdict(config).items() if name not in left_out}
    balance = args.balance if config.num_local_experts else None
    return {name: vars(args)[name] for name in flags} | model | dict(
        qk_norm=config.qk_norm, balance=balance, data=dataset_digest(tokens),
        dtype=str(args.dtype).removeprefix("torch."))


def install_signal_handlers():
    """A list that notes what tells the run to end: Slurm (SIGTERM), a closed terminal, Ctrl-C (only once)."""
    heard = []

    def hear(number, frame):
        heard.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:              # nohup's
            signal.signal(number, hear)
    return heard


# ------------------------------------------------------------------------------------------- on the disk
def list_checkpoints(args, ending=""):
    """This trainer's checkpoints, oldest first; or, with an ending, those that are not whole."""
    return sorted(Path(args.checkpoint).glob("step_" + "[0-9]" * 8 + ending))


def names(folders):
    return ", ".join(folder.name for folder in folders) or "none"


@contextlib.contextmanager
def fail_on_io_error(folder, args):
    try:
        yield
    except (OSError, SafetensorError) as error:
        fail(f"--checkpoint: {folder} cannot be written ({error}); checkpoints there: {names(list_checkpoints(args))}")


def lock(folder):
    """Of two runs in a directory the second is refused. The system lets go when a run's process ends."""
    file = open(Path(folder, ".lock"), "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"--checkpoint {folder}: another run is training there; take another directory")
    except OSError as error:
        print0(f"--checkpoint {folder}: this file system has no locks ({error}); let no other run use it")
    return file


def digest(path):
    """Of what is on the disk, not only on its way there."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def index_of(folder):
    """What index.json says; None if there is none, or if it is damaged."""
    with contextlib.suppress(Exception):                  # a file may hold anything
        index = json.loads((folder / "index.json").read_text()) if (folder / "index.json").is_file() else {}
        kinds = [type(index[name]) for name in ("steps", "digests", "run")]
        if kinds == [int, dict, dict] and index["steps"] == int(folder.name[5:]):
            return index


def find_corruption(folder, index, rank=0, ranks=1):
    """What is wrong with a checkpoint, of whose files each rank reads its share; None if nothing is."""
    if index is None or index != index_of(folder):
        return "index.json is missing or damaged, or some ranks see another one"
    there = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for name in sorted(there ^ index["digests"].keys()):
        return f"{name} is " + ("not in its index" if name in there else "missing")
    for name in sorted(there)[rank::ranks]:
        if digest(folder / name) != index["digests"][name]:
            return f"{name} is not as it was written"


def suggest_intact(folder, args):
    """Which checkpoint is to be had in place of a damaged one."""
    for path in reversed(list_checkpoints(args)):
        if path < folder and not find_corruption(path, index_of(path)):
            return f"--resume {path.name} takes an older one, which is whole"
    return "there is no older one that is whole"


def log_size_to_keep(name, args):
    """How many bytes of a log stay when its run goes on: the lines of the steps that are done."""
    size = 0
    with open(name, "rb") as log:
        for line in log:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= args.first_step:
                break
            size += len(line)
    return size
