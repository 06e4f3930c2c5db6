"""replicas.patch: TEXT
"""
import asyncio
import contextlib
import hashlib
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import cases
import pytest
import torch
from harness import assert_same_run, assert_same_tensors, relative, train_job
from jobs import assert_refused, ledger_rows
from prove.processes import LOOPBACK, environment, new_store
from safetensors.torch import load_file
from steps import PYTHONPATH, ROOT, clean_environment, step_dir

STEP, ONE = "step03_zero", "step01_single_gpu"
G = 12                                                    # sequences of a batch of all replicas
PATIENCE = 1500                                           # seconds until a run counts as hung; a dead peer costs up to TIMEOUT
TIMEOUT = 10
# where a rank can die: before it asks or hears, in a group, in the middle of a transfer, of a sum, of an update
MOMENTS = ("join", "joined", "connect", "connected", "transfer", "forward", "backward", "sum", "summing", "vote", "voted", "decided",
           "norm", "update", "updated")


# ------------------------------------------------------------------------------------- on a rank
def on_rank(replica, rank, ranks, port, folder, argv, mistake):
    """Train as torchrun would start it, and write a digest of the state at the end. Die at the moment that the test names."""
    os.environ.update(environment(rank, ranks, port) | dict(GLOO_SOCKET_IFNAME=LOOPBACK, HF_HUB_OFFLINE="1"))
    output = open(folder / f"said {replica} {rank}", "a", buffering=1)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = sys.stderr = output
    torch.set_num_threads(1)
    sys.path[:0] = [str(step_dir(STEP)), *PYTHONPATH]
    import quorum
    import train

    def moment(name):
        with contextlib.suppress(OSError):
            plan = json.loads((folder / "plan").read_text())
            if [replica, rank] == plan["who"] and (name == plan["moment"] or made and made[0].step >= plan["by"]):
                os.kill(os.getpid(), signal.SIGKILL)
    made = []
    with dying_at(moment, quorum, train, made), planted(mistake, quorum):
        train.main([*argv, "--replica", str(replica)])
    if made[0].members:
        state = b"".join(tensor.numpy().tobytes() for tensor in made[0].state())
        (folder / f"state {replica} {rank}").write_text(hashlib.sha256(state).hexdigest())


def around(moment, function, before, after):
    def wrapped(*args, **kwargs):
        moment(before)
        result = function(*args, **kwargs)
        moment(after)
        return result
    return wrapped


@contextlib.contextmanager
def dying_at(moment, quorum, train, made):
    """Call moment(name) at each of MOMENTS."""
    class Group:
        def __init__(self, group):
            self.group = group

        def __getattr__(self, name):
            return getattr(self.group, name)

        def allreduce(self, tensors):
            moment("sum")
            work = self.group.allreduce(tensors)
            moment("summing")
            return work

    class Dying(quorum.Quorum):
        def __init__(self, *args):
            made.append(self)
            super().__init__(*args)

        def ask(self, **question):
            vote = "yes" in question
            moment("vote" if vote else "join")
            answers = self.answers
            self.answers = SimpleNamespace(readline=lambda: (vote and moment("voted"), answers.readline())[1])
            answer = super().ask(**question)
            self.answers = answers
            moment("decided" if vote else "joined")
            return answer

        def connect(self, answer):
            moment("connect")
            super().connect(answer)
            self.group = Group(self.group)
            moment("connected")

        def state(self):
            tensors = super().state()
            for number, tensor in enumerate(tensors):
                if number == len(tensors) // 2:
                    moment("transfer")
                yield tensor
    with (patch.object(quorum, "Quorum", Dying),
          patch.object(train, "forward_backward", around(moment, train.forward_backward, "forward", "backward")),
          patch.object(train.Optimizer, "clip_grad_norm", around(moment, train.Optimizer.clip_grad_norm, "norm", "norm")),
          patch.object(train.Optimizer, "step", around(moment, train.Optimizer.step, "update", "updated"))):
        yield


def planted(mistake, quorum):
    """Plant a mistake: divide by the planned number of targets, or take weights, but not the optimizer states."""
    if mistake == "planned":
        return patch.object(quorum.Quorum, "num_targets", lambda self: self.args.replicas * self.args.global_batch_size
                            * self.args.seq_len)
    if mistake == "weights only":
        state = quorum.Quorum.state
        return patch.object(quorum.Quorum, "state", lambda self: list(state(self))[::4])
    return contextlib.nullcontext()


# ------------------------------------------------------------------------------------- in the test
class Replicas:
    """Replicas that are forked from a process with torch, a lighthouse in a thread, and somebody who kills."""

    def __init__(self, folder, argv, replicas, ranks, mistake=None, timeout=TIMEOUT):
        spec = importlib.util.spec_from_file_location("lighthouse", step_dir(STEP) / "lighthouse.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.say = lambda line: self.said.append(line)
        test = self

        class Held(module.Lighthouse):
            def form(self, living):
                """Wait for the test, which lets steps pass one by one."""
                if self.step < test.allowed(self.step, living):
                    super().form(living)
        self.folder, self.replicas, self.num_ranks, self.mistake, self.said = folder, replicas, ranks, mistake, []
        self.argv = [*argv.split(), "--save", str(folder / "save"), "--replicas", str(replicas), "--lighthouse"]
        self.lighthouse = Held(replicas, timeout, open(folder / "history", "w"))
        self.context, self.alive, self.deaths, self.deadline = multiprocessing.get_context("forkserver"), {}, 0, None
        self.allowed = lambda step, living: step + 1

    def history(self):
        return [json.loads(line) for line in (self.folder / "history").read_text().splitlines()]

    def said_by(self, replica, rank=0):
        return (self.folder / f"said {replica} {rank}").read_text()

    def start(self, replica):
        store = new_store()
        for rank in range(self.num_ranks):
            arguments = replica, rank, self.num_ranks, store.port, self.folder, self.argv, self.mistake
            process = self.context.Process(target=on_rank, args=arguments, daemon=True)
            process.start()
            self.alive[replica, rank] = process, store

    def serve(self, loop):
        """Run the lighthouse in this thread until the loop stops. Look again now and then: the test may have changed its mind."""
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(asyncio.start_server(self.lighthouse.listen, "127.0.0.1", 0))
        self.argv.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

        def again():
            self.lighthouse.decide()
            loop.call_later(0.02, again)
        loop.call_soon(again)
        self.serving.set()
        loop.run_forever()
        server.close()

    def run(self, during=lambda: None):
        """Train to the end, starting each replica again that dies. Call `during` now and then."""
        loop, self.serving = asyncio.new_event_loop(), threading.Event()
        thread = threading.Thread(target=self.serve, args=(loop,))
        thread.start()
        self.serving.wait()
        deadline = time.monotonic() + PATIENCE
        try:
            for replica in range(self.replicas):
                self.start(replica)
            while self.alive:
                assert time.monotonic() < deadline, "\n".join(["hung", *self.said[-30:]])
                multiprocessing.connection.wait([process.sentinel for process, _ in self.alive.values()], 0.02)
                for replica in {who[0] for who, (process, _) in self.alive.items() if not process.is_alive()}:
                    self.bury(replica)
                during()
        finally:
            for process, _ in self.alive.values():
                process.kill()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
        return self

    def bury(self, replica):
        """Do as torchrun does: if one of a replica's ranks failed, end the others, and start all again."""
        ranks = {who: process for who, (process, _) in self.alive.items() if who[0] == replica}
        ended = [process.exitcode == 0 for process in ranks.values() if not process.is_alive()]
        if all(ended) and len(ended) < len(ranks):
            return                                        # the others are about to end, too
        for who, process in ranks.items():
            process.kill()
            process.join()
            del self.alive[who]
        if not all(ended):
            self.deaths += 1
            if not self.lighthouse.end:
                self.start(replica)


class Killer:
    """Kills ranks one after the other. There is always a replica that has the weights and is not to die, so the run goes on."""

    def __init__(self, run, draw, kills, every):
        self.run, self.draw, self.kills, self.every = run, draw, kills, every
        self.done, self.victim, self.kinds, self.when = 0, None, [], 0
        self.moments = draw.sample(MOMENTS * 2, k=kills - kills // 3) + ["any"] * (kills // 3)
        draw.shuffle(self.moments)
        run.allowed = self.allowed

    def allowed(self, step, living):
        """Let no step begin that is too far: the next kill must come first, and those who died must return."""
        far = self.every * (self.done + 1) if self.done < self.kills else 10**9
        return far if len(living) == self.run.replicas else min(far, self.when + 2)

    def __call__(self):
        run = self.run
        if self.victim:
            process = self.process
            if self.kinds[-1] == "any" and time.monotonic() > self.at:
                process.kill()
            if process.exitcode is not None:
                (run.folder / "plan").unlink(missing_ok=True)
                self.done, self.victim, self.when = self.done + 1, None, run.lighthouse.step
        elif self.done < self.kills:
            counted = run.history()[-1:]
            whole = set(counted[0]["members"] if counted else range(run.replicas)) & set(run.lighthouse.living())
            victim = self.draw.randrange(run.replicas), self.draw.randrange(run.num_ranks)
            if victim in run.alive and whole - {victim[0]} and run.alive[victim][0].is_alive():
                self.victim, (self.process, _) = victim, run.alive[victim]
                self.kinds.append(self.moments[self.done])
                self.at = time.monotonic() + self.draw.random() / 4
                if self.kinds[-1] != "any":
                    plan = dict(who=victim, moment=self.kinds[-1], by=self.every * self.done + self.every - 2)
                    (run.folder / "new plan").write_text(json.dumps(plan))
                    os.rename(run.folder / "new plan", run.folder / "plan")


def base(pool, steps, more=""):
    flags = pool.once("replicas", lambda: cases.make(pool.folder() / "replicas", **cases.shape("dense-2")))
    return f"{flags} --dtype float64 --lr_schedule constant --global_batch_size {G} --steps {steps} {more}"


def replay_job(argv, members, replicas):
    """Train one process of step 1 on the shares that counted."""
    import train

    def batches(tokens, config, args):
        whole = args.global_batch_size
        for step in range(args.steps):
            (inputs, positions, targets), = micro_batches(tokens, config, args, step)
            rows = torch.arange(whole).reshape(replicas, -1)[members[step]].flatten()
            args.global_batch_size = len(rows)            # what its loss is divided by
            yield step, [(inputs[rows], positions, targets[rows])]
            args.global_batch_size = whole
    from data import micro_batches
    with patch.object(train, "batches", batches):
        train.main(argv)


def assert_same_as_one_process(pool, run, steps, tolerance=1e-9):
    """Compare losses and weights; and, to the last bit, the states of all replicas with each other."""
    history = run.history()
    assert [line["step"] for line in history] == list(range(steps))
    one = run.folder / "one"
    argv = f"{base(pool, steps)} --micro_batch_size {G} --log_file {run.folder}/log --save {one}"
    pool.call(replay_job, ONE, argv=argv.split(), members=[line["members"] for line in history], replicas=run.replicas)
    losses = [json.loads(line)["loss"] for line in (run.folder / "log").read_text().splitlines()]
    assert len(losses) == steps and max(map(relative, [line["loss"] for line in history], losses)) < tolerance
    assert_same_tensors(load_file(run.folder / "save/model.safetensors"), load_file(one / "model.safetensors"), tolerance)
    for rank in range(run.num_ranks):
        states = {run.folder.joinpath(f"state {replica} {rank}").read_text() for replica in history[-1]["members"]}
        assert len(states) == 1, f"rank {rank}: replicas differ"


# ------------------------------------------------------------------------------------- deaths
@pytest.mark.parametrize("replicas, ranks, kills, more", [
    pytest.param(2, 1, 2, "--zero 1", id="quick"),
    pytest.param(3, 2, 12, "--zero 3", id="zero-3", marks=pytest.mark.slow),
    pytest.param(2, 2, 9, "--zero 2 --micro_batch_size 1", id="zero-2", marks=pytest.mark.slow),
    pytest.param(4, 1, 9, "", id="no-zero", marks=pytest.mark.slow)])
def test_ranks_die_at_random_moments(pool, tmp_path, replicas, ranks, kills, more):
    """Kill ranks, thirty in all, at moments of MOMENTS and at any. The steps that counted must be those of one process."""
    draw, every, number = random.Random(kills), 4, kills
    steps = every * (kills + 2)
    run = Replicas(tmp_path, base(pool, steps, more), replicas, ranks)
    killer = Killer(run, draw, number, every)
    run.run(killer)
    assert killer.done == kills and run.deaths >= kills, (killer.kinds, run.said)
    assert_same_as_one_process(pool, run, steps)
    assert any(len(line["members"]) < replicas for line in run.history())
    assert sum("takes weights" in line for line in run.said) >= kills // 2
