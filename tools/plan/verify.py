"""Compare the planner with the simulator, which runs a layout's own code (--verify): how long does a step take?"""
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import costs
import explain
import speed
from trainer import fail

TOOL = Path(__file__).resolve().parents[1] / "simulate"
ONE = dict(tp=("tp",), cp=("cp",), ep=("ep",))            # {dimension: names of its waits}, the same in both
OURS = dict(ONE, dp=("dp",), pp=("bubble", "imbalance", "pp"))
THEIRS = dict(ONE, dp=("dp", "dp_cp", "shard", "replicate", "expert_dp", "ep_shard", "ep_copies"),
              pp=("pp", "world"))


def beside_the_simulator(question, one):
    """Return the comparison in one line. Both use only as many micro-batches as fill the pipeline twice."""
    l = one.layout._replace(accumulation=min(one.layout.accumulation, max(2, 2 * one.layout.pp)))
    stages, k = costs.our_stages(question.c, l), question.constants["time"]
    seconds = speed.step_seconds(question.c, l, question.cluster, stages, k)
    report = simulated(l.gpus, explain.hardware(question) + explain.train_flags(question.model, l, steps=1))
    here, there = sum(seconds.values()), report["step_seconds"]
    ours, theirs = waits(seconds, OURS), waits(report["exposed"], THEIRS)
    ours["computing"] = here - sum(ours.values())
    theirs["computing"] = there - sum(report["exposed"].values())
    most = max(ours, key=lambda name: abs(ours[name] - theirs[name]))
    return (f"simulated: {explain.name_of(l)}: {there:.3f} s a step, {here:.3f} here "
            f"({here / there - 1:+.1%}); most apart: {most}, {theirs[most]:.3f} s and {ours[most]:.3f} here")


def waits(seconds, names):
    return {dimension: sum(seconds.get(name, 0) for name in of) for dimension, of in names.items()}


def simulated(gpus, flags):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        command = [sys.executable, TOOL, 8, gpus, "--json", file, *shlex.split(flags)]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip() or "the simulator ended"
            fail(f"--verify: {why.splitlines()[-1]}")
        return json.loads(file.read_text())
