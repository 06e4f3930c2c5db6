"""replicas.patch: groups of ranks with a whole model each; one group may die and come back while the others train on.

With `--zero_shard 2`, six ranks hold three replicas of the model, and one dead rank ends all six. Here each replica is a world of
two ranks, with a torchrun of its own. Replicas share only the sum of gradients, so they can go on without one.

**One step.** The living replicas *join*: they are the quorum. Each trains on its share of the batch, rank i of each sums gradients
with rank i of the others, and all *vote*. If every rank of the quorum has the sum, all update. If one has died, all drop their
gradients, join again, and repeat the step. So nobody applies half a step. A process without a model, the lighthouse, collects the
ranks' questions. It sees a death at once, because the system closes a dead process's connection.

**Which batch?** The share of the dead is left out, as in torchft, and the sum is divided by the number of targets that counted. The
living replicas could train on that share, too, but 12 sequences do not divide among 5 replicas, and every step would take longer.
By hand: three replicas have 4 targets each, and their gradients add up to 4, 8 and 12. The mean is 24 / 12 = 2. Without the second
replica it is 16 / 8 = 2; divided by the planned 12, it would be 1.33.

**Coming back.** A new process has initial weights. Its rank i takes weights, AdamW's moments and the step from rank i of a living
replica; no disk is read. Then it trains that step with the others. If all replicas that have the weights die, the run ends in one
line: starting again at step 1 would look like training.

**Kill one.** The lighthouse prints the processes of each replica. `kill -9` or `kill -STOP` one, and watch the loss. A death costs
the others one repeated step. A rank that hangs costs up to three times `--timeout`: once in the sum, twice at the lighthouse.

**In the field.** torchft forms the quorum during forward, lets a returning replica contribute zeros until it has the weights, and
can abort NCCL's collectives. FT-HSDP (arXiv 2602.00277, about 100,000 GPUs) controls the all-reduce from the CPU while GPUs move
the data, and a replica catches up without blocking the others. It reports stalls of 3 minutes instead of 10, and 80% of the time
spent on training instead of 44%. Here all replicas wait for the one that catches up, and the lighthouse must not die.

**Break it.** Two mistakes are planted below, and both are silent. *The planned count*: the division by 12 above. The logged
loss shrinks, which looks like progress, and AdamW hides the factor from the weights. *Weights only*: the returning replica begins
with moments of zero, so from then on replicas differ. The comparison with one process, on the batches that counted, sees both.
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
from types import SimpleNamespace
from unittest.mock import patch

import cases
import pytest
import torch
from harness import assert_same_run, assert_same_tensors, relative
from jobs import assert_refused, ledger_rows
from prove.processes import LOOPBACK, environment, new_store
from safetensors.torch import load_file
from steps import PYTHONPATH, ROOT, clean_environment, step_dir

STEP, ONE = "step03_zero", "step01_single_gpu"
G = 12                                                    # sequences of a batch of all replicas
PATIENCE = 1500                                           # seconds until a run counts as hung; no test measures time
TIMEOUT = 60                                              # so that a busy machine does not make a rank look dead
# where a rank can die: before it asks or hears, in a group, in the middle of a transfer, of a sum, of an update
MOMENTS = ("join", "joined", "connect", "connected", "transfer", "forward", "backward", "sum", "summing", "vote", "voted",
           "decided", "norm", "update", "updated")


# ------------------------------------------------------------------------------------- on a rank
def on_rank(trainer, replica, rank, ranks, port, folder, argv, mistake):
    """Train as torchrun would start it, and write a digest of the state at the end. Die at the moment that the test names."""
    os.environ.update(environment(rank, ranks, port) | dict(GLOO_SOCKET_IFNAME=LOOPBACK, HF_HUB_OFFLINE="1"))
    output = open(folder / f"said {replica} {rank}", "a", buffering=1)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = sys.stderr = output
    torch.set_num_threads(1)
    sys.path[:0] = [str(trainer), *PYTHONPATH]
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
        self.context, self.alive, self.dead, self.deaths = multiprocessing.get_context("forkserver"), {}, set(), 0
        self.allowed = lambda step, living: step + 1

    def history(self):
        return [json.loads(line) for line in (self.folder / "history").read_text().split("\n")[:-1]]         # whole lines

    def said_by(self, replica, rank=0):
        return (self.folder / f"said {replica} {rank}").read_text()

    def start(self, replica):
        store = new_store()
        for rank in range(self.num_ranks):
            # step_dir here, because the forkserver may be older than the variable that step_dir reads
            arguments = step_dir(STEP), replica, rank, self.num_ranks, store.port, self.folder, self.argv, self.mistake
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
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

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
            while self.alive or self.dead:
                assert time.monotonic() < deadline, "\n".join(["hung", *self.said[-30:]])
                multiprocessing.connection.wait([process.sentinel for process, _ in self.alive.values()], 0.02)
                for replica in {who[0] for who, (process, _) in self.alive.items() if not process.is_alive()}:
                    self.bury(replica)
                for replica in [*self.dead]:              # a step without it comes first, if somebody is there
                    missed = any(replica not in line["members"] for line in self.history()[-1:])
                    if missed or not self.lighthouse.living() or self.lighthouse.end:
                        self.dead.remove(replica)
                        if not self.lighthouse.end:
                            self.start(replica)
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
            # else it would fail again and again: it refuses its flags, or cannot start
            assert process.exitcode not in (1, 2) or replica in self.lighthouse.seen, self.said_by(replica)
            process.kill()
            process.join()
            del self.alive[who]
        if not all(ended):
            self.deaths += 1
            self.dead.add(replica)


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
        elif self.done < self.kills and (history := run.history())[self.every * self.done:]:
            whole = set(history[-1]["members"]) & set(run.lighthouse.living())
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


def one_process(pool, run, steps):
    """Train one process on what counted in the run. Return its losses and weights."""
    history, log, save = run.history(), run.folder / "log", run.folder / "one"
    assert [line["step"] for line in history] == list(range(steps))
    argv = f"{base(pool, steps)} --micro_batch_size {G} --log_file {log} --save {save}"
    pool.call(replay_job, ONE, argv=argv.split(), members=[line["members"] for line in history], replicas=run.replicas)
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()], load_file(save / "model.safetensors")


def assert_same_as_one_process(pool, run, steps):
    """Compare losses and weights; and, to the last bit, the states of all replicas with each other."""
    losses, weights = one_process(pool, run, steps)
    history = run.history()
    assert len(losses) == steps and max(map(relative, [line["loss"] for line in history], losses)) < 1e-9
    assert_same_tensors(load_file(run.folder / "save/model.safetensors"), weights, 1e-9)
    for rank in range(run.num_ranks):
        states = {run.folder.joinpath(f"state {replica} {rank}").read_text() for replica in history[-1]["members"]}
        assert len(states) == 1, f"rank {rank}: replicas differ"


# ------------------------------------------------------------------------------------- deaths
@pytest.mark.parametrize("replicas, ranks, kills, more", [
    pytest.param(2, 1, 2, "--zero 1", id="quick"),
    pytest.param(3, 2, 12, "--zero 3", id="zero-3", marks=pytest.mark.slow),
    pytest.param(2, 2, 9, "--zero 2 --micro_batch_size 1", id="zero-2", marks=pytest.mark.slow),
    pytest.param(4, 1, 9, "--micro_batch_size 3", id="no-zero", marks=pytest.mark.slow)])
def test_ranks_die_at_random_moments(pool, tmp_path, replicas, ranks, kills, more):
    """Kill ranks, thirty in all, at moments of MOMENTS and at any. The steps that counted must be those of one process."""
    every = 4
    steps = every * (kills + 1)
    run = Replicas(tmp_path, base(pool, steps, more), replicas, ranks)
    killer = Killer(run, random.Random(kills), kills, every)
    run.run(killer)
    assert killer.done == kills and run.deaths >= kills, (killer.kinds, run.said)
    assert_same_as_one_process(pool, run, steps)
    assert any(len(line["members"]) < replicas for line in run.history())
    assert any("takes weights" in line for line in run.said)


# ------------------------------------------------------------------------------------- nobody dies
def test_without_a_death_it_is_zero_shard(pool, tmp_path):
    """Compare replicas of two ranks, each a world of its own, with one world and --zero_shard 2; and the bytes that they send."""
    flags = base(pool, 4, "--zero 3 --micro_batch_size 1 --ledger")
    run = Replicas(tmp_path, flags, 2, 2).run()
    one = pool.train(ROOT / STEP, f"{flags} --zero_shard 2", 4)
    assert max(map(relative, [line["loss"] for line in run.history()], one.losses)) < 1e-9
    assert_same_tensors(load_file(tmp_path / "save/model.safetensors"), one.weights, 1e-9)
    calls, payload, formula, _ = ledger_rows(run.said_by(0))["replicas", "all_reduce"]
    in_one_world = ledger_rows(one.output)["replicate", "all_reduce"]
    numbers_of_padding = 2 * in_one_world[1] - 8 * sum(tensor.numel() for tensor in one.weights.values())
    assert calls == 1 and payload == formula and 0 <= in_one_world[1] + 8 - payload <= numbers_of_padding


def test_alone_it_is_the_step_itself(pool):
    flags = f"{base(pool, 4)} --zero 2"
    assert_same_run(pool.train(STEP, flags, 2), pool.train(ROOT / STEP, flags, 2), 0)


# ------------------------------------------------------------------------------------- a rank that hangs, and a quorum of none
@pytest.mark.slow
def test_a_rank_that_hangs_is_left_out(pool, tmp_path):
    """Stop a rank: the others go on without its replica. When it wakes up, it ends in one line, and comes back as a new process."""
    run = Replicas(tmp_path, base(pool, 8, "--zero 3 --micro_batch_size 1"), 2, 2, timeout=15)
    stopped, bury = [], run.bury

    def bury_when_awake(replica):
        """Let the rank wake up and say why it ends, even if the other one of its replica has ended before."""
        if len(stopped) == 2:
            stopped[0].join(TIMEOUT)
            bury(replica)

    def during():
        history = run.history()
        if len(history) == 2 and not stopped:
            stopped.append(run.alive[1, 0][0])
            os.kill(stopped[0].pid, signal.SIGSTOP)
        if len(stopped) == 1 and history[-1]["members"] == [0]:
            stopped.append("awake")
            os.kill(stopped[0].pid, signal.SIGCONT)
    # two steps of both; then, without replica 1, two; then the others of both
    allowed = {0: (0, 2), 1: (4, 4), 2: (4, 8)}           # by those who live
    run.allowed = lambda step, living: allowed[len(stopped)][len(living) - 1]
    run.bury = bury_when_awake
    run.run(during)
    assert "replica 1, rank 0 does not answer" in run.said
    assert run.history()[-1]["members"] == [0, 1]
    assert run.said_by(1).count("error: ") == 1 and "closed the connection" in run.said_by(1) and "Traceback" not in run.said_by(1)
    assert_same_as_one_process(pool, run, 8)


def test_a_quorum_of_none_ends_the_run_in_a_line(pool, tmp_path):
    """Kill all at once. Whoever comes then finds nobody with the weights, and must not begin again at step 1."""
    run, killed = Replicas(tmp_path, base(pool, 1000), 2, 1), []

    def during():
        if len(run.history()) >= 2 and not killed:
            killed.extend(process for process, _ in run.alive.values())
            for process in killed:
                process.kill()
    run.run(during)
    step = len(run.history())
    line = f"no living replica has the weights after step {step}; start the run again"
    assert run.lighthouse.end == line
    for replica in (0, 1):
        errors = [said for said in run.said_by(replica).splitlines() if "rror" in said and "votes no" not in said]
        assert len(errors) == 1 and errors[0].endswith(line) and "Traceback" not in run.said_by(replica)


# ------------------------------------------------------------------------------------- two mistakes
@pytest.mark.parametrize("mistake", ["planned", "weights only"])
def test_a_mistake_stays_silent(pool, tmp_path, mistake):
    """Plant it. The loss per target that counted looks the same; the weights are not those of one process."""
    run = Replicas(tmp_path, base(pool, 8), 2, 1, mistake)
    killer = Killer(run, random.Random(0), 1, 4)
    killer.moments = ["join"]
    run.run(killer)
    losses, weights = one_process(pool, run, 8)
    counted = [run.replicas / len(line["members"]) if mistake == "planned" else 1 for line in run.history()]
    assert max(counted) > 1 or mistake != "planned"
    worst = max(relative(line["loss"] * factor, loss) for line, factor, loss in zip(run.history(), counted, losses))
    assert worst < 0.05
    with pytest.raises(AssertionError, match="of its norm"):
        assert_same_tensors(load_file(tmp_path / "save/model.safetensors"), weights, 1e-4)
    states = {(tmp_path / f"state {replica} 0").read_text() for replica in (0, 1)}
    assert len(states) == (1 if mistake == "planned" else 2)


# ------------------------------------------------------------------------------------- flags, and the reader's command
def test_refused(pool, tmp_path):
    assert_refused(pool, STEP, 1, "--replicas 3", "--global_batch_size 16: must be a multiple of replicas 3; choose 15 or 18")
    assert_refused(pool, STEP, 1, "--replicas 2", "--replicas 2: requires --lighthouse; lighthouse.py prints what to give")
    assert_refused(pool, STEP, 1, "--replica 1", "--replica 1: must be below replicas 1; number them from 0")
    assert_refused(pool, STEP, 1, "--lighthouse here", "--lighthouse here: must be HOST:PORT, which lighthouse.py prints")


@pytest.mark.slow
def test_the_command_of_the_header(pool, tmp_path):
    """Start replicas with torchrun, kill a rank, and see it come back while the loss goes on; end with Ctrl-C."""
    command = [sys.executable, step_dir(STEP) / "lighthouse.py", "2", sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node", "1", step_dir(STEP) / "train.py", *base(pool, 1000000).split()]
    environment = clean_environment() | dict(GLOO_SOCKET_IFNAME=LOOPBACK)
    child = subprocess.Popen(command, env=environment, start_new_session=True, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
    watchdog = threading.Timer(PATIENCE, child.kill)
    watchdog.start()
    lines, pids = [], {}
    try:
        for line in child.stdout:
            lines.append(line)
            if there := re.match(r"replica (\d) is there: processes (\d+)$", line):
                pids.setdefault(int(there[1]), []).append(int(there[2]))
            if line.startswith("step 3/"):
                os.kill(pids[1][0], signal.SIGKILL)
            if len(pids.get(1, ())) == 2 and line.startswith("step ") and line.endswith("replicas [0, 1]\n"):
                break
        else:
            pytest.fail("".join(lines))
        child.send_signal(signal.SIGINT)
        rest = child.stdout.read()
        assert child.wait() == 1 and "Traceback" not in rest, rest
    finally:
        watchdog.cancel()
        child.kill()
    text = "".join(lines)
    assert "replica 1 takes weights, optimizer states and the step from replica 0\n" in text and "Traceback" not in text
    assert re.search(r"^step \d+/1000000  loss [\d.]+  replicas \[0\]$", text, re.M)
    steps = [int(step) for step in re.findall(r"^step (\d+)/", text, re.M)]
    assert steps == list(range(1, len(steps) + 1))
