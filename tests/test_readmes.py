"""The READMEs and docs/ do what they say: blocks run, hunks are in the diff, links lead somewhere."""
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from layouts import every_other

from readme import (DOCS, PAGES, PLANNER, PROVE, READMES, TABLE, block_problems, blocks, broken_anchors, broken_links,
                    diff_problems, diffs_of, planted_table, to_run, with_files, with_tables)
from steps import BORDER, LESSON, ROOT, STEPS, SUPPORT, copy_repository, full_name, pairs, run, step_files


def test_the_repository_and_every_step_have_a_readme():
    assert READMES == ["README.md", *(f"{step}/README.md" for step in STEPS), PLANNER, PROVE]
    assert {"FAQ.md", "glossary.md", "proof.md", "rounding.md", "words.md", "workshop/README.md"} <= {one[5:] for one in DOCS}


def runs_something(page):
    return any(map(to_run, blocks((ROOT / page).read_text())))


@pytest.mark.slow
@pytest.mark.parametrize("readme", [READMES[0], *every_other(filter(runs_something, [*READMES[1:], *DOCS]))])
def test_blocks_run(readme, tmp_path):
    copy_repository(tmp_path)
    status, output = run([sys.executable, "dev/readme.py", "--run", readme], tmp_path, timeout=900)
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
def test_tables_are_those_of_their_sources(page):
    text = (ROOT / page).read_text()
    assert with_tables(text, page) == text, "make readme writes them"


@pytest.mark.parametrize("step", STEPS)
def test_the_table_of_files_is_what_make_diff_shows(step):
    text = (ROOT / step / "README.md").read_text()
    assert with_tables(text, f"{step}/README.md") == text, "make readme writes the rows in order"
    rows = [row.strip("| ").split(" | ") for row in TABLE.search((ROOT / step / "README.md").read_text())[1].splitlines()]
    assert [row[0].strip("[`").partition("`")[0] for row in rows] == [*LESSON[step], f"*{BORDER}*", *SUPPORT[step]]
    assert all(len(row) == 2 and len(row[1]) > 5 for row in rows if BORDER not in row[0]), "what does each of them hold?"


def test_the_front_page_names_the_new_files():
    text = (ROOT / "README.md").read_text()
    for old, new in pairs():
        row = text.split(f"| [{new.name}]({new.name}) |")[1].split("\n")[0]
        assert row.split("|")[1].strip() == ", ".join(sorted({*step_files(new)} - {*step_files(old)}))


@pytest.mark.parametrize("step", STEPS)
def test_a_readme_has_its_parts(step):
    text = (ROOT / step / "README.md").read_text()
    assert all(f"\n## {name}\n" in text for name in ("Break it", "Exercises", "Check yourself", "Second reading"))


@pytest.mark.parametrize("step", STEPS)
def test_what_is_shown_of_by_hand_is_in_it(step):
    shown = re.findall(r"^<!-- of by_hand.py -->\n```text\n(.*?)^```$", (ROOT / step / "README.md").read_text(), re.M | re.S)
    file = (ROOT / step / "by_hand.py").read_text() if shown else ""
    assert [excerpt for excerpt in shown if "\n" + excerpt not in file] == []


# ------------------------------------------------------------------------------- commands that need GPUs
STUB = '#!/bin/bash\nprintf "%q " "${0##*/}" "$@" >> "$RECORD"; echo >> "$RECORD"\n'
REFUSED = """
import json, os, sys
root, refused = sys.argv[1], []
for step, world, flags in json.load(sys.stdin):
    for name, module in list(sys.modules.items()):        # those of the step before
        if (getattr(module, "__file__", None) or "").startswith(f"{root}/step0"):
            del sys.modules[name]
    sys.path[0] = f"{root}/{step}"
    import config
    config.check_outputs = lambda args: None
    os.environ["WORLD_SIZE"] = str(world)
    try:
        args = config.parse_args(flags)
        config.check(args, config.load_config(args))
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


def test_commands_that_are_not_run_here_would_not_be_refused(tmp_path):
    """Check that the steps know the flags and accept the layouts on that many ranks. The blocks of a page are one session."""
    not_run = ("no, needs a GPU", "no, needs a cluster")
    sessions = ["".join(block.text for block in blocks((ROOT / page).read_text())
                        if block.language == "bash" and block.directive in not_run) for page in PAGES]
    commands = trainings(called(sessions, tmp_path))
    assert len(commands) >= 10 and {step for step, _, _ in commands} == set(STEPS)
    assert refused(commands) == []


# ------------------------------------------------------------------------------- the checks above can fail
def test_commands_that_would_be_refused_are_seen(tmp_path):
    text = ('run() { torchrun --standalone --nproc_per_node "$1" "$2/train.py" "${@:3}"; }\nB="--model llama-1b"\n'
            "run 8 step04_tp_sp $B --tp 8\nrun 8 step04_tp_sp $B --tp 3\npython step01_single_gpu/train.py --tp 2\n"
            "torchrun --nnodes 2 --nproc_per_node 8 step02_dp/train.py --dp 8\nls\n"
            "python tools/simulate 8 16 --rank 3 --tp 8\npython tools/simulate 8 16 --pp 5 --rank 3")
    commands = trainings(called([text], tmp_path))
    assert [command[:2] for command in commands] == [("step04_tp_sp", 8), ("step04_tp_sp", 8), ("step01_single_gpu", 1),
                                                     ("step02_dp", 16), ("step08_5d", 16), ("step08_5d", 16)]
    first, second, third, fourth = refused(commands)
    assert "--tp 3" in first and "--tp 2" in second and "--dp 8" in third and "world size, 16" in third and "pp 5" in fourth


def run_readme(tmp_path, text, *directive):
    (tmp_path / "step").mkdir()
    (tmp_path / "step/helper.py").write_text("three = 3\n")
    (tmp_path / "step/README.md").write_text(text)
    return run([sys.executable, ROOT / "dev/readme.py", "--run", "step/README.md", *directive], tmp_path, timeout=60)


def test_blocks_share_a_folder_and_a_namespace(tmp_path):
    status, output = run_readme(tmp_path, """
```bash
echo 4 > four
python -c 'import sys; print("this python:", sys.prefix)'
```
```python
from helper import three
seven = three + int(open("four").read())
```
  <!-- run: no, needs a GPU -->

  ```bash
  exit 1
  ```
```python
print("seven is", seven)
```
""")
    assert status == 0 and "seven is 7" in output and f"this python: {sys.prefix}" in output, output


@pytest.mark.parametrize("directive, status", [("no, needs spmd_types", 0), ("no, needs a hub", 1)])
def test_blocks_that_need_something_run_alone(tmp_path, directive, status):
    text = "```bash\nfalse\n```\n<!-- run: no, needs spmd_types -->\n```python\nprint('its own')\n```\n"
    got, output = run_readme(tmp_path, text, directive)
    assert got == status and ("its own" in output) == (status == 0), output


@pytest.mark.parametrize("block", ["```bash\nfalse\ntrue\n```", "```python\nassert False\n```"])
def test_a_failing_block_is_seen(tmp_path, block):
    status, output = run_readme(tmp_path, f"```bash\ntrue\n```\n\n{block}\n")
    assert status == 1 and "README.md, line 5" in output, output


@pytest.mark.parametrize("text", [
    "```bash\n", "<!-- run: no, needs a GPU -->\nwords\n```bash\n```\n",
    "<!-- run: no, needs a GPU -->\n<!-- run: add --steps 3 -->\n```bash\n```\n", "<!-- run: no, needs a GPU -->\n"])
def test_a_block_without_an_end_or_a_stray_directive_is_seen(text):
    with pytest.raises(ValueError):
        blocks(text)


def test_unknown_kinds_of_blocks_are_seen():
    assert block_problems("```bash\n```\n<!-- run: add --steps 3 -->\n```bash\n```\n```text\n```\n```\n```\n") == []
    assert len(block_problems("```yaml\n```\n<!-- run: no, too slow -->\n```bash\n```\n")) == 2


def test_flags_are_added_where_train_py_runs():
    text = """<!-- run: add --steps 3 -->
```bash
python a/train.py            # a comment
torchrun --nproc_per_node 2 a/train.py --dp 2 \\
    --steps 50 | tail -1
python b/train.py --lr 1 > out && cat out
make run
ls a
```
"""
    assert " ".join(to_run(blocks(text)[0]).split()) == (
        "python a/train.py --steps 3 # a comment torchrun --nproc_per_node 2 a/train.py --dp 2 --steps 50 --steps 3 | tail -1 "
        "python b/train.py --lr 1 --steps 3 > out && cat out make run FLAGS=\"--steps 3\" ls a")


def test_a_hunk_that_is_not_in_the_diff_is_seen():
    real = ["--- a/train.py", "+++ b/train.py", "@@ -1,3 +1,4 @@", " one", "-two", "+2", "+2.5", " three", "@@ -9 +9 @@", "+nine"]
    def problems(hunk):
        return diff_problems(f"```diff\n{hunk}\n```\n", [["+other"], real])
    assert problems("--- a/train.py\n+++ b/train.py\n one\n-two\n+2") == []
    assert problems("-two\n...\n+nine") == [] and problems("@@ -9 +9 @@\n+nine") == []
    assert len(problems("-two\n+2.5")) == 1                       # a line between them is left out
    assert len(problems("+2\n+2.50")) == len(problems("+nin")) == len(problems("nine")) == 1
    assert len(diff_problems("```diff\n+x\n```\n", [])) == 1


def test_broken_links_are_seen(tmp_path):
    (tmp_path / "there.png").touch()
    text = ("![a](there.png) [b](there.png#part) [c](#part) [d](https://example.com/x) `[e](code)` <img src=\"there.png\">\n"
            "```text\n[f](block)\n```\n[g](gone.md) <img width=3 src=\"lost.png\">")
    assert broken_links(text, tmp_path) == ["gone.md", "lost.png"]


def test_broken_anchors_are_seen(tmp_path):
    (tmp_path / "step").mkdir()
    (tmp_path / "step/README.md").write_text(
        "## Run it, twice\n### `Enter` and [g](x.md)\n<a id=\"old\"></a>\n```\n# no heading\n```\n")
    text = "# Here\n[a](#here) [b](#there) " + " ".join(
        f"[c](step{name}#{place})" for name in ("", "/README.md") for place in ("run-it-twice", "enter-and-g", "old", "no-heading"))
    (tmp_path / "README.md").write_text(text)
    assert broken_anchors(text, tmp_path / "README.md") == ["#there", "step#no-heading", "step/README.md#no-heading"]


def test_files_are_put_in_order():
    head = "# Code\n\n| file | what it holds |\n|---|---|\n"
    rows = {name: f"| {shown} | of {name} |\n" for name, shown in
            {"b.py": "b.py", "a.py": "[`a.py`](a.py)", "job.sh": "`job.sh`"}.items()}
    gone, text = "| gone.py | was there |\n", head + rows["b.py"] + "{}" + rows["job.sh"] + rows["a.py"] + "\n| job.sh | x |\n"
    border = f"| *{BORDER}* | |\n"
    wanted = head + rows["a.py"] + rows["b.py"] + border + "| new.py | ? |\n" + rows["job.sh"] + "\n| job.sh | x |\n"
    for before in (text.format(gone), text.format(border), wanted):
        assert with_files(before, ["a.py", "b.py"], ["new.py", "job.sh"]) == wanted
    assert border not in with_files(text.format(""), ["a.py", "b.py", "job.sh"], [])
    assert with_files("none\n", ["a.py"], []) == "none\n"


def test_planted_table():
    text = ("# x\n## Break it\n\n| break | test |\n|---|---|\n| `step01_a` | no decay |\n| bare | t |\n\n"
            "## Next\n| a |\n|---|\n| `step01_b` | t |\n")
    assert planted_table(text) == ["step01_a"] and planted_table("# none\n") == []
