"""--checkpoint DIR --save_every N --keep K --resume: a stopped or killed run goes on, even in another layout.

    DIR/step_00000200/rank_00003.safetensors     what rank 3 wrote: boxes of weights in full precision, and of
                                                 Adam's averages
    DIR/step_00000200/index.json                 the step, balance biases, shapes, which file has which box of
                                                 which tensor, digests of the files, of what model and data

Names are those of the Hugging Face checkpoint, and a box says where in the whole tensor it begins. Nothing in
it depends on how many ranks wrote it: whoever reads takes what overlaps with its own part. There is no random
state to keep: initial weights follow from seed and name, step t's data from t, and nothing else is drawn.

A folder is written as step_00000200.tmp and renamed when all are done: by that name it is whole (folders.py).
"""
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
from collections import defaultdict
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from agreement import agree
from checkpoint import header
from config import NO_MATTER, refuse
from folders import create, damage, file_of, lock, newest, older, own, read_index
from moe import on_disk
from parts import my_part, whole_shape
from zero import Unit

KINDS = {"weight": "", "exp_avg": ".exp_avg", "exp_avg_sq": ".exp_avg_sq"}         # and how their names end


class Checkpoints:
    def __init__(self, model, optimizer, balance, tokens, mesh, args):
        self.model, self.optimizer, self.balance, self.args = model, optimizer, balance, args
        self.pp, self.writer = mesh.get_group("pp"), None
        self.facts = facts(balance.config, tokens, args)
        self.signals = hear_signals() if args.checkpoint else []
        self.boxes = {param: boxes(name, param) for name, param in model.named_parameters()}
        pieces = defaultdict(list)                        # what this rank optimizes of a unit, or a parameter
        for i, piece in enumerate(optimizer.params):
            pieces[getattr(piece, "unit", piece)].append(i)
        units = dict.fromkeys(getattr(param, "unit", param) for param in model.parameters())
        self.blocks = {unit: pieces[unit] for unit in units}

    @torch.no_grad()
    def after(self, step):
        """After every step: saves if it is time. True: it is the end, as a signal said."""
        if not self.args.checkpoint:
            return False
        told = torch.tensor(float(max(self.signals, default=0)), device=self.args.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)       # one rank may have heard the signal before another
        if told or (step + 1) % self.args.save_every == 0 or step + 1 == self.args.steps:
            self.save(step + 1)
        told = told if step + 1 < self.args.steps else 0  # after the last there is --save to do
        if told and dist.get_rank() == 0:
            print(f"told to end ({signal.Signals(int(told)).name}) after step {step + 1}; "
                  "--resume goes on from there", flush=True)
        return bool(told)

    # ---------------------------------------------------------------------------------------- saving
    def save(self, steps):
        folder, rank = os.path.join(self.args.checkpoint, f"step_{steps:08d}"), dist.get_rank()
        if rank == 0:
            for left in own(self.args.checkpoint, "[.]tmp"):                       # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            os.makedirs(folder + ".tmp")
        self.writer = self.writer or self.share_out()     # its exchange is the barrier that others wait in
        dist.barrier()
        with create(folder + ".tmp", file_of(rank)) as out:
            shapes = {name + end: shape for unit in self.blocks for end in KINDS.values()
                      for _, _, name, shape in self.mine(unit)}
            out.write(header(shapes, self.optimizer.masters[0].dtype))
            for unit in self.blocks:
                for kind in KINDS:
                    self.write(unit, kind, out)
        biases, every = self.all_biases(), [None] * dist.get_world_size()
        dist.all_gather_object(every, (out.digest.hexdigest(), out.finite))        # all have written
        if not all(finite for _, finite in every):
            refuse(f"step {steps}: some weights are not finite any more: "
                   f"stopped, nothing saved{newest(self.args)}", status=3)
        if rank == 0:
            digests = {file_of(writer): digest for writer, (digest, _) in enumerate(every)}
            where = defaultdict(list)
            for (name, begin), writer in self.writer.items():
                where[name].append((file_of(writer), begin))
            index = dict(steps=steps, biases=biases, shapes=self.shapes, boxes=where, digests=digests,
                         facts=self.facts)
            with create(folder + ".tmp", "index.json") as out:
                out.write(json.dumps(index).encode())
            os.rename(folder + ".tmp", folder)
            self.forget_old_ones()

    def write(self, unit, kind, out):
        whole = self.gather(unit, kind)                   # no other block is whole
        for param, expert, *_ in self.mine(unit):
            value = in_files(self.boxes[param], whole[param])[expert]
            out.finite = out.finite and bool(value.isfinite().all())
            out.write(value.cpu().contiguous().view(torch.uint8).numpy().data)

    def share_out(self):
        """{(name, where a box begins): who writes it}: of those that have it, whoever has least to write."""
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
        return [(param, i, name, shape) for param, i, name, begin, shape, _ in every
                if self.writer[name, begin] == dist.get_rank()]

    def gather(self, unit, kind):
        """{parameter: this rank's part in full precision, or of Adam's average}, from all ZeRO's slices."""
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
            adam.update(step=torch.zeros((), device=master.device),
                        exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
        return {"weight": master, **adam}

    def all_biases(self):
        layers, experts = self.balance.config.num_hidden_layers, self.balance.bias.shape[1]
        biases = torch.zeros(layers, experts, device=self.args.device)
        biases[self.my_layers()] = self.balance.bias
        dist.all_reduce(biases, group=self.pp)
        return biases.tolist()

    def my_layers(self):
        return [int(layer) for layer in self.model.model.layers][:len(self.balance.bias)]

    def forget_old_ones(self):
        for folder in own(self.args.checkpoint)[:-self.args.keep]:
            try:
                os.rename(folder, folder + ".tmp")        # half deleted it must not look whole
                shutil.rmtree(folder + ".tmp")
            except OSError as error:                      # not worth a run
                print(f"--keep: {folder} cannot be deleted ({error})", flush=True)

    # ---------------------------------------------------------------------------------------- going on
    @torch.no_grad()
    def load(self):
        """The number of steps that are done already; weights and optimizer are as they were then."""
        if not self.args.checkpoint:
            return 0
        self.lock = lock(self.args.checkpoint, self) if dist.get_rank() == 0 else None
        folder, newer = self.choose()
        index, problem = read_index(folder) if folder else (None, None)
        agree("checkpoint", folder or f"no checkpoint in {self.args.checkpoint}")
        if dist.get_rank() == 0 and self.args.resume:
            print(f"resuming from {folder}" if folder else
                  f"--resume: nothing in {self.args.checkpoint} yet, starting at the beginning", flush=True)
        if folder:
            problem = problem or damage(folder, index, dist.get_rank(), dist.get_world_size())
            problem = problem or self.read_all(index, folder)
            if problem:
                refuse(f"--resume: {folder} is damaged: {problem}; " + older(folder))
            digest = hashlib.sha256(json.dumps(index).encode()).hexdigest()
            agree("resumed", f"{folder} with index {digest[:16]}")
        for path in newer if dist.get_rank() == 0 else []:         # one would be taken for this run's newest
            names = (f"{path}.aside{number or ''}" for number in itertools.count())
            os.rename(path, next(name for name in names if not os.path.exists(name)))
        return index["steps"] if folder else 0

    def choose(self):
        """The checkpoint to go on from, and those that are newer."""
        there, wanted = own(self.args.checkpoint), self.args.resume
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
            wanted = wanted and "newest"                  # what was done since the first start counts
        if there and not wanted:
            refuse(f"--checkpoint {self.args.checkpoint}: {os.path.basename(there[-1])} is in there already; "
                   "--resume goes on from it, a run of its own takes another directory")
        if wanted in (None, "newest"):
            return (there[-1] if there else None), []
        path = os.path.join(self.args.checkpoint, wanted)
        if path not in there:
            names = ", ".join(map(os.path.basename, there))
            refuse(f"--resume {wanted}: not in {self.args.checkpoint}; there are {names or 'none'}")
        return path, there[there.index(path) + 1:]

    def read_all(self, index, folder):
        """What is wrong with it, if anything is."""
        files, steps = {}, index["steps"]
        if dist.get_rank() == 0 and steps >= self.args.steps:
            print(f"{steps} steps are done, of --steps {self.args.steps}: nothing is left to do", flush=True)
        try:
            self.check(index, folder)
            for unit in self.blocks:
                for kind, end in KINDS.items():
                    parts = {param: self.read(param, end, index, folder, files) for param in params_of(unit)}
                    self.scatter(unit, kind, parts)
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        for i, (param, master) in enumerate(zip(self.optimizer.params, self.optimizer.masters)):
            self.state(i)["step"].fill_(steps)
            param.data.copy_(master)
        self.balance.bias.copy_(torch.tensor(index["biases"])[self.my_layers()])

    def check(self, index, folder):
        """Whether it is of this model and of this data."""
        model, layers = self.args.model, self.balance.config.num_hidden_layers
        if len(index["biases"]) != layers:
            refuse(f"--resume: {folder} has {len(index['biases'])} layers, --model {model} {layers}")
        for name, _, _, whole in (box for of_param in self.boxes.values() for box in of_param):
            if name not in index["boxes"]:
                refuse(f"--resume: {folder} has no {name}; is it a run of --model {model}?")
            if index["shapes"][name] != list(whole):
                refuse(f"--resume: {name} is {index['shapes'][name]} in {folder}, "
                       f"{list(whole)} in --model {model}")
        for name, value in self.facts.items():
            if index["facts"].get(name) != value:
                refuse(f"--resume: {folder} is of a run with {name} {index['facts'].get(name)}, "
                       f"this one has {value}")

    def read(self, param, end, index, folder, files):
        """This rank's part of a tensor, from all boxes that overlap with it."""
        part = torch.full(param.shape, math.nan, dtype=self.optimizer.masters[0].dtype)
        for (name, begin, shape, _), into in zip(self.boxes[param], in_files(self.boxes[param], part)):
            for file, box in index["boxes"][name]:
                if file not in files:
                    files[file] = safe_open(os.path.join(folder, file), framework="pt")
                stored = files[file].get_slice(name + end)                         # nothing is read yet
                low = [max(a, b) for a, b in zip(begin, box)]
                high = [min(a + n, b + m) for a, n, b, m in zip(begin, shape, box, stored.get_shape())]
                if all(l < h for l, h in zip(low, high)):
                    to, of = (tuple(slice(l - o, h - o) for l, h, o in zip(low, high, origin))
                              for origin in (begin, box))
                    into[to] = stored[of]
            if into.isnan().any():                        # nothing that is not finite is ever saved
                raise ValueError(f"the boxes do not cover {name + end}")
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


def in_files(boxes, tensor):
    """A parameter's tensor as the files have it: of experts one by one."""
    return tensor.unbind() if ".experts." in boxes[0][0] else [tensor]


def boxes(name, param):
    """[(name on disk, where this rank's part begins, its shape, the whole tensor's)], one for each expert."""
    meta = torch.empty_like(param, device="meta")         # ZeRO may have taken the memory away
    meta.placement = param.placement
    return [(name, tuple(part.start or 0 for part in my_part(one)), one.shape, tuple(whole_shape(one)))
            for name, one in on_disk(name, meta)]


def facts(config, tokens, args):
    """What decides the numbers of a run, or where in the data it is, and what must not change under it."""
    sample = hashlib.sha256(tokens[::len(tokens) // 1000 + 1].astype("int64").tobytes()).hexdigest()[:16]
    model = {name: value for name, value in asdict(config).items() if name not in NO_MATTER}
    balance = args.balance if config.num_local_experts else None
    return dict(seq_len=args.seq_len, global_batch_size=args.global_batch_size,
                data=f"{len(tokens)} tokens, {sample}", balance=balance, **model)


def hear_signals():
    """A list that notes what tells the run to end: Slurm (SIGTERM), a closed terminal, Ctrl-C (only once)."""
    heard = []

    def hear(number, frame):
        heard.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:              # nohup's
            signal.signal(number, hear)
    return heard
