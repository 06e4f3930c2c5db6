"""The planted mistakes and tests that docs/wild.md names exist, and the programs of exercises/wild show what they say they show."""
import importlib.metadata
import re
import subprocess

import pytest
from patched import planted_mistakes
from prove.processes import torchrun
from steps import ROOT, clean_environment

TEXT = (ROOT / "docs/wild.md").read_text()
STORIES = TEXT.split("\n## ")[1].split("\n### ")[1:]


def test_each_net_is_that_of_its_mistake():
    assert len(STORIES) == 10
    nets = re.findall(r"Net: `(\w+)`, by\s+`(tests/[^`]+)`", TEXT)
    assert len(nets) >= 10 and all("Net: `" in story for story in STORIES)
    for name, test in nets:
        assert planted_mistakes()[name]["test"] == test, name


HUGGING_FACE = dict(transformers="5.24.0", accelerate="1.15.0")
SHOWS = {                                                 # a program and its arguments: what it needs, its ranks, what it prints
    "divided_twice.py": (dict(torch="2.13.0"), 1, "reduced in float16: 0.25\n"),
    "mean_of_means.py": ({"ai2-olmo-core": "3.0.0"}, 2, "off from the mean over 18 targets by 0.9\n"),
    "router_loss.py": (HUGGING_FACE, 2, "2 ranks, 8 micro-batches: the auxiliary loss moves the router by 0.0293"),
    "stage_clips_alone.py": (dict(deepspeed="0.19.8"), 2, "that of both 0.99649, and DeepSpeed's 0.54362"),
    "tp_gradients.py qwen3 4": (HUGGING_FACE, 2, "model.layers.0.self_attn.q_norm.weight: off by "),
    "tp_gradients.py apertus 1": (HUGGING_FACE, 2, "model.layers.0.mlp.act_fn.alpha_p: off by "),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", SHOWS)
def test_a_program_without_the_tool_shows_the_mistake(program):
    needs, ranks, shown = SHOWS[program]
    for package, version in needs.items():
        try:
            found = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != version:
            pytest.skip(f"pip install {package}=={version}")
    file, *arguments = program.split()
    command = torchrun(ranks, ROOT / "exercises/wild" / file, *arguments)
    environment = clean_environment() | dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    done = subprocess.run(command, text=True, capture_output=True, timeout=600, env=environment)
    assert shown in done.stdout, done.stdout + done.stderr
