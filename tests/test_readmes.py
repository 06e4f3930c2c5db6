"""The READMEs and docs/ do what they say: blocks run, hunks are in the diff, links lead somewhere."""
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from patched import planted_mistakes

from readme import (DOCS, FROM, PAGES, READMES, block_problems, blocks, broken_anchors, broken_links, diff_problems, diffs_of,
                    mistake_table, to_run, with_tables)
from steps import ROOT, STEPS, clean_environment, copy_repository, full_name, pairs, run, step_files, text_of


def runs_something(page):
    return any(map(to_run, blocks((ROOT / page).read_text())))


@pytest.mark.slow
@pytest.mark.parametrize("readme", list(filter(runs_something, [*READMES, *DOCS])))
def test_blocks_run(readme, tmp_path):
    """Run a page's blocks with a torchrun that forks its ranks, but those of steps 2 and 8 with torch's own."""
    copy_repository(tmp_path)
    path = clean_environment()["PATH"]
    path = path if readme in ("step02_dp/README.md", "step08_5d/README.md") else f"{ROOT / 'tests/support/bin'}:{path}"
    status, output = run(["env", f"PATH={path}", sys.executable, "dev/readme.py", "--run", readme], tmp_path, timeout=900)
    assert status == 0, output[-5000:]


@pytest.mark.parametrize("readme", PAGES)
def test_blocks_are_of_a_known_kind(readme):
    assert block_problems((ROOT / readme).read_text()) == []


@pytest.mark.parametrize("readme", PAGES)
def test_hunks_are_in_the_diff(readme):
    assert diff_problems((ROOT / readme).read_text(), diffs_of(readme)) == []


@pytest.mark.parametrize("readme", PAGES)
def test_links_and_pictures_exist(readme):
    text = (ROOT / readme).read_text()
    assert broken_links(text, (ROOT / readme).parent) == [] and broken_anchors(text, ROOT / readme) == []


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_what_make_readme_writes(page):
    text = (ROOT / page).read_text()
    assert with_tables(text, page) == text and "| ? |" not in text, "run make readme, and say what each new file holds"


def test_every_planted_mistake_is_on_one_page():
    found = [found for page in PAGES for found in FROM.finditer((ROOT / page).read_text())]
    marks = [one[3] for one in found if one[2] == "exercises/mistakes.toml"]
    assert sorted(marks) == ["reported elsewhere", *(f"step {k}, {kind}" for k in range(1, len(STEPS) + 1)
                                                    for kind in ("featured", "others"))]
    rows = "".join(mistake_table(mark) for mark in marks if mark != "reported elsewhere")
    assert sorted(re.findall(r"^\| `(\w+)` \|", rows, re.M)) == sorted(planted_mistakes())


def test_every_flag_of_other_trainers_is_on_the_page_of_names():
    names = tomllib.loads((ROOT / "docs/names.toml").read_text())
    shown = [found[3] for found in FROM.finditer((ROOT / "docs/names.md").read_text()) if found[2] == "docs/names.toml"]
    assert sorted(shown) == sorted({flag["table"] for flag in names["flag"]})
    known = {*names["trainers"], "table", "technique", "mistake"}
    assert [flag["here"] for flag in names["flag"] if flag.keys() - known] == []


def test_the_front_page_names_the_new_files():
    text = (ROOT / "README.md").read_text()
    for old, new in pairs():
        row = text.split(f"| [{new.name}]({new.name}) |")[1].split("\n")[0]
        assert row.split("|")[1].strip() == ", ".join(sorted({*step_files(new)} - {*step_files(old)}))


@pytest.mark.parametrize("step", STEPS)
def test_what_is_shown_of_by_hand_is_in_it(step):
    shown = re.findall(r"^<!-- of by_hand.py -->\n```text\n(.*?)^```$", text_of(step), re.M | re.S)
    file = (ROOT / step / "by_hand.py").read_text() if shown else ""
    assert [excerpt for excerpt in shown if "\n" + excerpt not in file] == []


# ------------------------------------------------------------------------------- commands that need GPUs
STUB = '#!/bin/bash\nprintf "%q " "${0##*/}" "$@" >> "$RECORD"; echo >> "$RECORD"\n'
REFUSED = """
import json, os, sys
root, refused = sys.argv[1], []
for step, world, flags in json.load(sys.stdin):
    for name, module in list(sys.modules.items()):        # those of another step
        file = getattr(module, "__file__", None) or ""
        if file.startswith(f"{root}/step0") and not file.startswith(f"{root}/{step}/"):
            del sys.modules[name]
    sys.path[0] = f"{root}/{step}"
    import config
    import train
    config.check_outputs = lambda args: None
    os.environ["WORLD_SIZE"] = str(world)
    try:
        args = config.parse_args(flags, train.TECHNIQUES)
        config.check(args, config.load_config(args), train.TECHNIQUES)
    except SystemExit as end:
        refused.append(f"{step} on {world}: {' '.join(flags)}: {end.message}")
print(json.dumps(refused))
"""


def called(texts, folder):
    """Return what shell blocks call, as lists of words. The programs are stubs that only record how they are called."""
    for name in ("torchrun", "python", "pip", "make", "srun", "sbatch"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "called"), "HOME": str(folder)}
    for text in texts:
        subprocess.run(["bash", "-c", text], cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [shlex.split(line) for line in (folder / "called").read_text().splitlines()]


def trainings(calls):
    """Return (step, number of ranks, flags) for each call of a train.py, and for each simulated one."""
    found = []
    for words in calls:
        if "tools/simulate" in words:
            step, world, *flags = words[words.index("tools/simulate") + 1:]
            flags = [flag for flag in flags if flag != "--details"]
            for own in {"--rank", "--json"} & set(flags):
                del flags[flags.index(own):flags.index(own) + 2]
            found.append((full_name(step), int(world), flags))
        script = next((word for word in words if word.endswith("/train.py")), None)
        if script:
            before = [*words[:words.index(script)], "--nnodes", "1", "--nproc_per_node", "1"]
            world = [int(before[before.index(name) + 1]) for name in ("--nnodes", "--nproc_per_node")]
            found.append((Path(script).parent.name, world[0] * world[1], words[words.index(script) + 1:]))
    return found


def refused(commands):
    done = subprocess.run([sys.executable, "-c", REFUSED, ROOT], input=json.dumps(commands), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BAD = """
run() { torchrun --standalone --nproc_per_node "$1" "$2/train.py" "${@:3}"; }
B="--model llama-1b"
run 8 step04_tp_sp $B --tp 8
run 8 step04_tp_sp $B --tp 3
python step01_single_gpu/train.py --tp 2
torchrun --nnodes 2 --nproc_per_node 8 step02_dp/train.py --dp 8
python tools/simulate 8 16 --rank 3 --tp 8
python tools/simulate 8 16 --pp 5 --rank 3
"""


def test_commands_that_are_not_run_here_would_not_be_refused(tmp_path):
    """Check that the steps know the flags and accept the layouts on that many ranks, and that commands which would be refused are
    seen. The blocks of a page are one session."""
    not_run = ("no, needs a GPU", "no, needs a cluster")
    sessions = ["".join(block.text for block in blocks((ROOT / page).read_text())
                        if block.language == "bash" and block.directive in not_run) for page in PAGES]
    commands = trainings(called(sessions, tmp_path))
    assert len(commands) >= 10 and {step for step, _, _ in commands} == set(STEPS)
    bad = trainings(called([BAD], tmp_path))[len(commands):]
    assert [world for _, world, _ in bad] == [8, 8, 1, 16, 16, 16]
    said = refused([*commands, *bad])
    assert len(said) == 4, said
    assert all(one in line for one, line in zip(("--tp 3", "--tp 2", "world size, 16", "pp 5"), said)), said


@pytest.mark.parametrize("block", ["```bash\nfalse\ntrue\n```", "```python\nassert False\n```"])
def test_a_failing_block_is_seen(tmp_path, block):
    (tmp_path / "README.md").write_text(f"```bash\ntrue\n```\n\n{block}\n")
    status, output = run([sys.executable, ROOT / "dev/readme.py", "--run", "README.md"], tmp_path, timeout=60)
    assert status == 1 and "README.md, line 5" in output, output


def test_a_hunk_that_is_not_in_the_diff_is_seen():
    real = ["--- a/train.py", "+++ b/train.py", "@@ -1,3 +1,4 @@", " one", "-two", "+2", "+2.5", " three", "@@ -9 +9 @@", "+nine"]
    def problems(hunk):
        return diff_problems(f"```diff\n{hunk}\n```\n", [["+other"], real])
    assert problems("--- a/train.py\n+++ b/train.py\n one\n-two\n+2") == []
    assert problems("-two\n...\n+nine") == [] and problems("@@ -9 +9 @@\n+nine") == []
    assert len(problems("-two\n+2.5")) == 1                       # a line between them is left out
    assert len(problems("+2\n+2.50")) == len(problems("+nin")) == len(problems("nine")) == 1
    assert len(diff_problems("```diff\n+x\n```\n", [])) == 1
