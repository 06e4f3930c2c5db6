"""--checkpoint DIR --save_every N --keep K --resume: a run that was stopped, or killed, goes on, also under another layout.

    DIR/step_00000200/rank_00003.safetensors     what rank 3 wrote: boxes of weights in full precision, and of Adam's averages
    DIR/step_00000200/index.json                 the step, the balance biases, shapes, and which file has which box of which tensor

Names are those of the Hugging Face checkpoint, and a box says where in the whole tensor it begins. So nothing in a
checkpoint depends on how many ranks wrote it: whoever reads takes what overlaps with its own part. There is no random
state to keep: initial weights follow from seed and name, step t's data from t, and nothing else is drawn.

A folder is written as step_00000200.tmp and renamed when all ranks are done: under its final name it is whole.
"""
import contextlib
import json
import math
import os
import shutil
import signal
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open

from checkpoint import header, on_disk
from config import refuse
from tensor_parallel import my_part, whole_shape
from zero import Unit

KINDS = {"weight": "", "exp_avg": ".exp_avg", "exp_avg_sq": ".exp_avg_sq"}         # and the ends of their names


class Checkpoints:
    def __init__(self, model, optimizer, balance, mesh, args):
        self.model, self.optimizer, self.balance, self.args = model, optimizer, balance, args
        self.pp, self.writer, self.told_to_end = mesh.get_group("pp"), None, False
        self.boxes = {param: boxes(name, param) for name, param in model.named_parameters()}
        pieces = defaultdict(list)                        # of a ZeRO unit, or a parameter: what this rank optimizes of it
        for i, piece in enumerate(optimizer.params):
            pieces[getattr(piece, "unit", piece)].append(i)
        units = dict.fromkeys(getattr(param, "unit", param) for param in model.parameters())
        self.blocks = {unit: pieces[unit] for unit in units}
        if args.checkpoint:
            signal.signal(signal.SIGTERM, lambda *_: setattr(self, "told_to_end", True))      # Slurm's, before it kills

    @torch.no_grad()
    def after(self, step, loss, grad_norm):
        """After every step: stops at a loss that is none, saves if it is time. True: it is the end, as a signal said."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            newest = newest_checkpoint(self.args.checkpoint)
            stop(f"step {step + 1}: loss {float(loss)}, gradient norm {float(grad_norm)}: stopped, nothing saved"
                 + (f"; the newest checkpoint is {newest}" if newest else ""))
        if not self.args.checkpoint:
            return False
        told = torch.tensor(float(self.told_to_end), device=self.args.device)
        dist.all_reduce(told)                             # one rank may have heard the signal before another
        if told or (step + 1) % self.args.save_every == 0 or step + 1 == self.args.steps:
            self.save(step + 1)
        if told and dist.get_rank() == 0:
            print(f"told to end (SIGTERM) after step {step + 1}; --resume goes on from there", flush=True)
        return bool(told)

    # ---------------------------------------------------------------------------------------- saving
    def save(self, steps):
        folder, rank = os.path.join(self.args.checkpoint, f"step_{steps:08d}"), dist.get_rank()
        if rank == 0:
            shutil.rmtree(folder + ".tmp", ignore_errors=True)
            os.makedirs(folder + ".tmp")
        self.writer = self.writer or self.share_out()     # its exchange is the barrier that others wait in
        dist.barrier()
        with create(folder + ".tmp", f"rank_{rank:05d}.safetensors") as out:
            shapes = {name + end: shape for unit in self.blocks for end in KINDS.values() for _, _, name, shape in self.mine(unit)}
            out.write(header(shapes, self.optimizer.masters[0].dtype))
            for unit in self.blocks:
                for kind in KINDS:
                    self.write(unit, kind, out)
        biases = self.all_biases()
        dist.barrier()                                    # all have written
        if rank == 0:
            where = defaultdict(list)
            for (name, begin), writer in self.writer.items():
                where[name].append((f"rank_{writer:05d}.safetensors", begin))
            with create(folder + ".tmp", "index.json") as out:
                out.write(json.dumps(dict(steps=steps, biases=biases, shapes=self.shapes, boxes=where)).encode())
            os.rename(folder + ".tmp", folder)
            self.forget_old_ones()

    def write(self, unit, kind, out):
        whole = self.gather(unit, kind)                   # no other block is whole
        for param, expert, *_ in self.mine(unit):
            value = whole[param][expert] if param.dim() == 3 else whole[param]
            out.write(value.cpu().contiguous().view(torch.uint8).numpy().data)

    def share_out(self):
        """{(name, where a box begins): who writes it}: of the ranks that have it the one with the least to write so far."""
        every, have = [None] * dist.get_world_size(), defaultdict(list)
        dist.all_gather_object(every, [box for of_param in self.boxes.values() for box in of_param])
        for rank, held in enumerate(every):
            for box in held:
                have[box].append(rank)
        self.shapes = {name: whole for name, _, _, whole in have}
        writer, load = {}, [0] * len(every)
        for (name, begin, shape, _), ranks in have.items():
            writer[name, begin] = min(ranks, key=load.__getitem__)
            load[writer[name, begin]] += math.prod(shape)
        return writer

    def mine(self, unit):
        """What of a unit this rank writes."""
        every = ((param, i, *box) for param in params_of(unit) for i, box in enumerate(self.boxes[param]))
        return [(param, i, name, shape) for param, i, name, begin, shape, _ in every if self.writer[name, begin] == dist.get_rank()]

    def gather(self, unit, kind):
        """{parameter: this rank's part of it, in full precision, or of Adam's average}, from all that ZeRO cut it up for."""
        pieces = [self.state(i)[kind].flatten() for i in self.blocks[unit]]
        if not isinstance(unit, Unit):
            return {unit: pieces[0].view(unit.shape)}
        piece = torch.cat([*pieces, unit.grad_slice.new_zeros(0)])
        piece = F.pad(piece, (0, len(unit.grad_slice) - len(piece)))               # after the last parameter
        flat = piece.new_empty(unit.shard.size() * len(piece))
        dist.all_gather_into_tensor(flat, piece, group=unit.shard)
        return unit.views(flat)

    def state(self, i):
        """Of piece i: the master weight, and what Adam keeps (made here if no step has been taken)."""
        master = self.optimizer.masters[i]
        adam = self.optimizer.adamw.state[master]
        if not adam:
            adam.update(step=torch.zeros((), device=master.device), exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
        return {"weight": master, **adam}

    def all_biases(self):
        biases = torch.zeros(self.balance.config.num_hidden_layers, self.balance.bias.shape[1], device=self.args.device)
        biases[self.my_layers()] = self.balance.bias
        dist.all_reduce(biases, group=self.pp)
        return biases.tolist()

    def my_layers(self):
        return [int(layer) for layer in self.model.model.layers][:len(self.balance.bias)]

    def forget_old_ones(self):
        for folder in sorted(whole_checkpoints(self.args.checkpoint))[:-self.args.keep]:
            os.rename(folder, folder + ".tmp")            # half deleted it must not look whole
        for name in os.listdir(self.args.checkpoint):
            if name.endswith(".tmp"):
                shutil.rmtree(os.path.join(self.args.checkpoint, name))

    # ---------------------------------------------------------------------------------------- going on
    @torch.no_grad()
    def load(self):
        """The number of steps that are done already; weights and optimizer are as they were then."""
        folder = newest_checkpoint(self.args.checkpoint) if self.args.resume else None
        if dist.get_rank() == 0 and self.args.resume:
            print(f"resuming from {folder}" if folder else f"--resume: nothing in {self.args.checkpoint} yet, starting at the beginning", flush=True)
        if not folder:
            if there := not self.args.resume and newest_checkpoint(self.args.checkpoint):
                refuse(f"--checkpoint {self.args.checkpoint}: {os.path.basename(there)} is in there already; --resume goes on from it, "
                       "a run of its own takes another directory")
            return 0
        with open(os.path.join(folder, "index.json")) as file:
            index = json.load(file)
        if dist.get_rank() == 0 and index["steps"] >= self.args.steps:
            print(f"{index['steps']} steps are done, of --steps {self.args.steps}: nothing is left to do", flush=True)
        layers, files = self.balance.config.num_hidden_layers, {}
        if len(index["biases"]) != layers:
            refuse(f"--resume: {folder} has {len(index['biases'])} layers, --model {self.args.model} {layers}")
        for unit in self.blocks:
            for kind, end in KINDS.items():
                self.scatter(unit, kind, {param: self.read(param, end, index, folder, files) for param in params_of(unit)})
        for i, (param, master) in enumerate(zip(self.optimizer.params, self.optimizer.masters)):
            self.state(i)["step"].fill_(index["steps"])
            param.data.copy_(master)
        self.balance.bias.copy_(torch.tensor(index["biases"])[self.my_layers()])
        return index["steps"]

    def read(self, param, end, index, folder, files):
        """This rank's part of a tensor, from all boxes that overlap with it."""
        part = torch.empty(param.shape, dtype=self.optimizer.masters[0].dtype)
        for (name, begin, shape, whole), into in zip(self.boxes[param], part.unbind() if part.dim() == 3 else [part]):
            if name not in index["boxes"]:
                refuse(f"--resume: {folder} has no {name}; is it a run of --model {self.args.model}?")
            if index["shapes"][name] != list(whole):
                refuse(f"--resume: {name} is {index['shapes'][name]} in {folder}, {list(whole)} in --model {self.args.model}")
            for file, box in index["boxes"][name]:
                if file not in files:
                    files[file] = safe_open(os.path.join(folder, file), framework="pt")
                stored = files[file].get_slice(name + end)                         # nothing is read yet
                low = [max(a, b) for a, b in zip(begin, box)]
                high = [min(a + n, b + m) for a, n, b, m in zip(begin, shape, box, stored.get_shape())]
                if all(l < h for l, h in zip(low, high)):
                    to, of = (tuple(slice(l - o, h - o) for l, h, o in zip(low, high, origin)) for origin in (begin, box))
                    into[to] = stored[of]
        return part

    def scatter(self, unit, kind, parts):
        """The opposite of gather, without sending: every rank has read all."""
        if not isinstance(unit, Unit):
            return self.state(self.blocks[unit][0])[kind].copy_(parts[unit])
        flat = torch.cat([part.flatten() for part in parts.values()])[unit.mine]
        for i in self.blocks[unit]:
            piece = self.state(i)[kind]
            piece.copy_(flat[:piece.numel()].view(piece.shape))
            flat = flat[piece.numel():]


def params_of(unit):
    return unit.params if isinstance(unit, Unit) else [unit]


def boxes(name, param):
    """[(name on disk, where this rank's part begins in the whole tensor, its shape, the whole's)], one for each expert."""
    meta = torch.empty_like(param, device="meta")         # ZeRO may have taken the memory away
    meta.shards = param.shards
    return [(name, tuple(part.start or 0 for part in my_part(one)), one.shape, tuple(whole_shape(one))) for name, one in on_disk(name, meta)]


@contextlib.contextmanager
def create(folder, name):
    """A file that is on the disk when it is closed."""
    with open(os.path.join(folder, name), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def whole_checkpoints(folder):
    return [entry.path for entry in os.scandir(folder) if entry.name.startswith("step_") and not entry.name.endswith(".tmp")] if os.path.isdir(folder) else []


def newest_checkpoint(folder):
    return max(whole_checkpoints(folder), default=None) if folder else None


def stop(message):
    if dist.get_rank() == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(3)
