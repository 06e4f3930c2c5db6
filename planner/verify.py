"""--verify: the simulator runs a layout's own code, and both say how long it takes."""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import costs
import explain
import speed
from trainer import refuse

TOOL = Path(__file__).resolve().parents[1] / "tools/simulate"
WAITS = dict(pp=("bubble", "imbalance", "pp"), tp=("tp",), cp=("cp",), ep=("ep",), dp=("dp",))       # theirs, and ours
NAMES = dict(dp=("dp", "dp_cp", "shard", "replicate", "expert_dp", "ep_shard", "ep_copies"), pp=("pp", "world"))


def beside_the_simulator(question, args, one):
    """In one line. Both take as few micro-batches as fill the pipeline twice."""
    l = one.layout._replace(accumulation=min(one.layout.accumulation, max(2, 2 * one.layout.pp)))
    cluster, k = question.cluster, question.constants["time"]
    ours = speed.step_seconds(question.c, l, cluster, costs.our_stages(question.c, l), k)
    theirs = simulated(explain.train_flags(question.model, l, steps=1), args, cluster)
    waits = {name: (sum(ours.get(kind, 0) for kind in kinds), sum(theirs["exposed"].get(n, 0) for n in NAMES.get(name, (name,))))
             for name, kinds in WAITS.items()}
    both = dict(computing=(sum(ours.values()) - sum(a for a, _ in waits.values()),
                           theirs["step_seconds"] - sum(theirs["exposed"].values())), **waits)
    name, (a, b) = max(both.items(), key=lambda item: abs(item[1][0] - item[1][1]))
    return (f"simulated: {explain.name_of(l)}: {theirs['step_seconds']:.3f} s a step, {sum(ours.values()):.3f} here "
            f"({sum(ours.values()) / theirs['step_seconds'] - 1:+.1%}); most apart is {name}, {b:.3f} s and {a:.3f} here")


def simulated(flags, args, cluster):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        said = ["--gpu", args.gpu, "--gpus_per_node", cluster.gpus_per_node, "--network", cluster.network / 1e9, "--json", file]
        command = [sys.executable, TOOL, 8, cluster.gpus, *said, *flags.split()]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        if done.returncode:
            refuse(f"--verify: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'the simulator ended'}")
        return json.loads(file.read_text())
