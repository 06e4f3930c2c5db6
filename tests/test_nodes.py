"""A run on several nodes: two torchruns on this machine, with one rank each. Whoever dies, the run ends as if nobody had."""
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from programs import run_program
from steps import clean_environment, end, step_dir

STEP, STEPS = "step08_5d", 60
FLAGS = f"--steps {STEPS} --seq_len 32 --global_batch_size 8 --zero 2 --save_every 3 --resume"


class Node:
    """A torchrun, and the rank that it has started."""

    def __init__(self, number, folder, port, restarts=9, **env):
        self.output = folder / f"node{number}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "1",
                   "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1",
                   "--rdzv_conf", f"is_host={1 - number}", "--max-restarts", str(restarts), str(step_dir(STEP) / "train.py"),
                   *FLAGS.split(), "--checkpoint", str(folder / "c"), "--log_file", str(folder / "log")]
        with open(self.output, "a") as file:
            self.agent = subprocess.Popen(command, cwd=folder, env=clean_environment() | env, stdout=file, stderr=file,
                                          start_new_session=True)

    def rank(self):
        """Return the process id of the rank that runs now, or None."""
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.agent.pid)], capture_output=True, text=True).stdout
        return int(children.split()[0]) if children.strip() else None


def losses(log):
    return [json.loads(line)["loss"] for line in log.read_bytes().splitlines()] if log.exists() else []


def wait_for(steps, log, nodes, seconds=600):
    deadline = time.monotonic() + seconds
    while len(losses(log)) < steps:
        assert time.monotonic() < deadline, f"no step after {len(losses(log))}: " + "\n".join(
            node.output.read_text()[-1500:] for node in nodes)
        time.sleep(0.05)


@pytest.fixture
def nodes(tmp_path):
    """Return a function that starts node 0 or 1. All nodes end with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []

    def start(number, **more):
        started.append(Node(number, tmp_path, port, **more))
        return started[-1]
    yield start
    for node in started:
        end(node.agent)


@pytest.mark.parametrize("killed", [pytest.param((1, 0), marks=pytest.mark.slow),
                                    pytest.param((1, 0, 1, 1, 0), marks=pytest.mark.sweep)], ids=len)
def test_killed_ranks_come_back_and_a_replacement_node_can_join(pool, nodes, tmp_path, killed):
    log, two = tmp_path / "log", [nodes(number, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") for number in (0, 1)]
    for kill, number in enumerate(killed):
        wait_for(10 * kill + 5, log, two)
        os.kill(two[number].rank(), signal.SIGKILL)
    wait_for(10 * len(killed) + 5, log, two)
    os.kill(two[1].rank(), signal.SIGKILL)
    end(two[1].agent)
    two[1] = nodes(1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert [node.agent.wait(timeout=600) for node in two] == [0, 0]
    undisturbed = pool.train(STEP, FLAGS.replace("--save_every 3 --resume", ""), world=2, weights=False)
    assert losses(log) == undisturbed.losses


@pytest.mark.slow
def test_torchruns_that_share_their_store_with_the_ranks_are_refused(nodes):
    two = [nodes(number, restarts=1) for number in (0, 1)]
    assert [node.agent.wait(timeout=600) for node in two] == [1, 1]
    said = two[0].output.read_text()
    assert "error: --max-restarts on several nodes: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for each torchrun" in said
    assert "Traceback" not in said.split("torch/distributed/elastic")[0], said


@pytest.mark.slow
@pytest.mark.parametrize("env, message", [
    (dict(RANK="abc", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"), "invalid literal for int"),
    (dict(WORLD_SIZE="2"), "RANK expected"),
    (dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="in use"), "address already in use")])
def test_ranks_that_cannot_meet_say_so_in_one_line(tmp_path, env, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if env.get("MASTER_PORT") == "in use":
            env = env | dict(MASTER_PORT=str(taken.getsockname()[1]))
        status, output = run_program([step_dir(STEP) / "train.py"], tmp_path, timeout=120, **env)
    assert status == 2 and output.count("\n") == 1 and message in output, output
    assert "error: rank 0, mesh.py:" in output and "the ranks cannot meet (" in output
