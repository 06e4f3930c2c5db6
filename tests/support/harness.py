"""Worker processes that start once and then run hundreds of short jobs, for any step and any number of ranks.

    pool.train("step03_zero", "--zero 3 --dp 4", world=4)    # a whole training run: losses, norms, weights, output
    pool.call(function, "step02_dp", world=2, **arguments)   # a function of a test file, on every rank

Each job sees what torchrun would give it (RANK, WORLD_SIZE, a store) and the modules of one step directory. A rank
that fails reports its own traceback. If a job hangs, the pool ends it after `timeout` seconds and replaces the workers.

A worker is forked from a process that has already imported torch, so it starts at once. It freezes the objects that were imported
before the fork: otherwise each gc.collect(), and a job calls it twice, would traverse a million of torch's objects.
"""
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from prove.processes import Processes, environment, new_store
from steps import PYTHONPATH, step_dir


class JobFailed(AssertionError):
    pass


class Refused(JobFailed):
    """Raised when a run ends with exit status 2 on every rank: it refused its flags."""


# ---------------------------------------------------------------------------------------------- inside a worker
PATIENCE = int(os.environ.get("PATIENCE", 300))           # seconds until a job counts as hung; no test measures time
PRELOADED = ["transformers.models.auto", "transformers.models.llama.configuration_llama",
             "transformers.models.mixtral.configuration_mixtral", "transformers.models.qwen3.configuration_qwen3",
             "transformers.models.qwen3_moe.configuration_qwen3_moe",
             "torch", "torch._dynamo", "torch.distributed.device_mesh", "torch.utils.checkpoint", "torch.utils.flop_counter",
             "torch._refs", "torch._decomp.decompositions", "torch.optim.adamw", "numpy", "safetensors.torch", "pytest"]


def worker(rank, notes, pipe, more_environment):
    import torch
    os.environ.update(more_environment, HF_HUB_OFFLINE="1")
    gc.freeze()
    torch.set_num_threads(1)
    sys.path += PYTHONPATH                                # the functions that jobs call are there
    modules = {}                                          # step directory: its modules, kept from job to job
    hooked, register = [], torch.Tensor.register_post_accumulate_grad_hook
    torch.Tensor.register_post_accumulate_grad_hook = lambda param, hook: hooked.append(param) or register(param, hook)
    pipe.send("ready")
    for port, world, folder, function, arguments in iter(pipe.recv, None):
        os.environ.update(environment(rank, world, port))
        output = open(f"{notes}/{rank}.job", "w+", buffering=1, encoding="utf-8", newline="\n")  # for the test, if it hangs
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), step_modules(folder, modules):
                module, name = function
                result = ("ok", getattr(importlib.import_module(module), name)(**arguments))
        except SystemExit as stop:
            result = ("exit", stop.code)
        except BaseException:
            result = ("error", traceback.format_exc())
        answer(pipe, result, output)
        # Wait until every rank is through: another may still be connecting to this rank's process group. But after an error, or
        # after five seconds, go on at once, because another rank may be waiting for this one for ever.
        through = result[0] == "error" or pipe.poll(5) and pipe.recv()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for param in hooked:                              # a cycle that Python cannot see; it would keep gloo's threads alive
            param._post_accumulate_grad_hooks.clear()
        hooked.clear()
        gc.collect()
        through or pipe.recv()


def answer(pipe, result, output):
    output.seek(0)
    printed = output.read()
    try:
        pipe.send((*result, printed))
    except Exception as error:                            # it cannot be pickled: an open file, say, or a function
        pipe.send(("error", f"what it returned cannot be sent to the test: {type(error).__name__}: {error}", printed))


@contextlib.contextmanager
def step_modules(folder, kept):
    """Make `import train` find the train.py of this folder. Put its modules away afterwards: other folders use the same names."""
    names = {file[:-3] for file in os.listdir(folder) if file.endswith(".py")}
    sys.path.insert(0, folder)
    sys.modules.update(kept.get(folder, {}))
    try:
        yield
    finally:
        sys.path.remove(folder)
        kept[folder] = {name: sys.modules.pop(name) for name in names if name in sys.modules}


def train_job(argv, optimizer="adamw"):
    import torch
    import train
    from prove.unforgiving import unforgiving
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()              # the last job's
    with contextlib.ExitStack() as replaced:
        if optimizer == "sgd":
            steps = int(argv[len(argv) - argv[::-1].index("--steps")])
            replaced.enter_context(patch.object(torch.optim, "AdamW", lambda groups, **_: SummedGradients(groups, steps)))
        if not torch.cuda.is_available():
            replaced.enter_context(unforgiving())
        train.main(argv)


class SummedGradients:
    """An 'optimizer' that does plain gradient descent and, in the last step, replaces the weights by the sum of all gradients.
    --save then writes these sums, whole and by name, whatever the layout is."""

    def __init__(self, groups, steps):
        self.param_groups, self.state, self.left = groups, {}, steps
        self.sums = {param: param.new_zeros(param.shape) for group in groups for param in group["params"]}

    def step(self):
        import torch
        self.left -= 1
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    self.sums[param] += param.grad
                    param.copy_(param - group["lr"] * param.grad if self.left else self.sums[param])


# ---------------------------------------------------------------------------------------------- in the test process
class Pool:
    def __init__(self, size=16, **environment):
        self.size, self.made, self.last = size, {}, None
        method = "spawn" if "CUDA_VISIBLE_DEVICES" in environment else "forkserver"           # CUDA does not work after a fork
        self.ranks = Processes(worker, method, [environment], PRELOADED)

    def start(self, world):
        """Start workers until there are `world` of them. This happens outside the job, so it does not count towards its timeout."""
        assert world <= self.size, f"{world} ranks, but the pool has {self.size}"
        os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")                 # the preloaded modules read them on import
        there = len(self.ranks.pipes)
        self.ranks.start(world)
        for pipe in self.ranks.pipes[there:]:
            assert pipe.poll(300) and pipe.recv() == "ready", "a worker did not start within 300 s"

    def stop(self):
        self.ranks.end()

    def call(self, function, step, world=1, timeout=PATIENCE, **arguments):
        """Run function(**arguments) on ranks 0 .. world-1. Return their results."""
        self.start(world)
        store = new_store()
        module = "harness" if function.__module__ == "__main__" else function.__module__
        folder = step if isinstance(step, Path) else step_dir(step)                # one of the eight steps, or any folder
        job = (store.port, world, str(folder), (module, function.__name__), arguments)
        for pipe in self.ranks.pipes[:world]:
            pipe.send(job)
        answers = self.collect(world, timeout, f"{function.__name__}({arguments}) of {step}, world {world}")
        self.output = answers[0][2]
        return [result for _, result, _ in answers]

    def collect(self, world, timeout, what):
        answers = self.ranks.collect(world, timeout, grace=3)
        for rank, (kind, status, *_) in answers.items():
            if kind == "died":
                said = f"the process died, exit code {status}\n{self.ranks.stack(rank)}"
                answers[rank] = "error", said, self.ranks.read(rank, "job")
        bad = {rank: answer for rank, answer in sorted(answers.items()) if answer[0] != "ok"}
        stood = {rank: self.ranks.stack(rank) for rank in range(world) if rank not in answers}
        printed = {rank: answers[rank][2] if rank in answers else self.ranks.read(rank, "job") for rank in range(world)}
        self.last = SimpleNamespace(answers=answers, stood=stood, printed=printed, timeout=timeout)
        if stood or any(answer[0] == "error" for answer in bad.values()):
            self.stop()                                   # after an error a CUDA context is unusable
        for pipe in self.ranks.pipes[:world]:
            pipe.send("through")
        if all(answer[:2] == ("exit", 2) for answer in bad.values()) and len(bad) == world:
            raise Refused(answers[0][2])
        where = "".join(f"\n--- rank {rank} stood here:\n{stack}" for rank, stack in stood.items())
        if bad:
            said = "\n".join(f"--- rank {rank}: {a[1]}\n{a[2][-2000:]}" for rank, a in bad.items())
            raise JobFailed(f"{what}\n{said}{where}")
        if stood:
            raise JobFailed(f"{what}: no answer from ranks {[*stood]} within {timeout} s{where}")
        return [answers[rank] for rank in range(world)]

    def train(self, step, flags, world=1, timeout=PATIENCE, weights=True, optimizer="adamw", job=train_job):
        """Run train.py once. With optimizer="sgd", the `weights` that come back are the summed gradients. `answers` has what the
        job returned on each rank."""
        from safetensors.torch import load_file
        folder = tempfile.mkdtemp()
        try:
            log, save = os.path.join(folder, "log.jsonl"), os.path.join(folder, "save")
            argv = shlex.split(flags) + ["--log_file", log] + (["--save", save] if weights else [])
            answers = self.call(job, step, world, timeout, argv=argv, optimizer=optimizer)
            if "--compile" in argv:
                self.stop()                               # torch.compile leaves objects behind that slow down every gc.collect()
            with open(log) as file:
                lines = [json.loads(line) for line in file]
            tensors = load_file(os.path.join(save, "model.safetensors")) if weights else {}
        finally:
            shutil.rmtree(folder)
        return SimpleNamespace(lines=lines, weights=tensors, output=self.output, answers=answers,
                               losses=[line["loss"] for line in lines], grad_norms=[line["grad_norm"] for line in lines])

    def once(self, key, make):
        """Call make() the first time that this key comes up. Return the same result every time."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def folder(self):
        """Return a folder for files that are made once and last as long as the pool."""
        return Path(self.once("folder", tempfile.TemporaryDirectory).name)

    def reference(self, step, flags, optimizer="adamw"):
        """Return a run of one process. It is made once."""
        return self.once((str(step_dir(step)), flags, optimizer), lambda: self.train(step, flags, optimizer=optimizer))


@functools.cache
def shared_pool():
    """Return this process's only pool, however often pytest is called in the process."""
    pool = Pool()
    # left alone, Python would send the workers SIGTERM, and step 8 does not end on that
    atexit.register(pool.stop)
    return pool


# ---------------------------------------------------------------------------------------------- comparing two runs
def relative(a, b):
    return abs(a - b) / max(abs(b), 1e-30)


def assert_same_run(run, reference, tolerance, what="", weights=True):
    """Compare losses and gradient norms, step by step, by their relative errors, and weights (or gradients) by ||difference|| /
    ||reference|| of each tensor."""
    assert len(run.losses) == len(reference.losses) > 0, what
    for step in range(len(reference.losses)):             # a wrong norm comes before the losses that follow from it
        for name in ("losses", "grad_norms"):
            a, b = getattr(run, name)[step], getattr(reference, name)[step]
            difference = f"{what}: {name}[{step}] {a!r}, reference {b!r}"
            assert relative(a, b) <= tolerance, difference + why(run.weights, reference.weights, tolerance, what)
    if weights:
        assert_same_tensors(run.weights, reference.weights, tolerance, what)


def assert_same_tensors(tensors, reference, tolerance, what=""):
    assert tensors.keys() == reference.keys() and tensors, f"{what}: {tensors.keys() ^ reference.keys()}"
    worst = max(tensors, key=lambda name: distance(tensors[name], reference[name]))
    error = distance(tensors[worst], reference[worst])
    assert error <= tolerance, f"{what}: {worst} differs by {error:.2e} of its norm{why(tensors, reference, tolerance, what)}"


def why(tensors, reference, tolerance, what):
    """Say what the prover sees in the tensors of a run that differs, if it has the same ones."""
    # no import statement: dev/changed.py would run every test after a change in the prover, which changes only this message
    in_words = importlib.import_module("prove.diagnose").in_words
    flags = {name: int(value) for name, value in re.findall(r"--(\w+) (\d+)", what)}
    found = in_words(tensors, reference, tolerance, flags) if tensors.keys() == reference.keys() else ""
    return f". Among tensors, {found}" * bool(found)


def distance(a, b):
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))
