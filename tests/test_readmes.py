"""The READMEs do what they say: blocks run, hunks are in the diff, links lead somewhere, counts are counts."""
import sys

import pytest

from readme import (PLANNER, READMES, block_problems, blocks, break_table, broken_links, diff_problems, diffs_of, to_run,
                    diff_size, main_path_words, with_diff_sizes, with_line_counts)
from steps import ROOT, STEPS, copy_repository, pairs, run


def test_the_repository_and_every_step_have_a_readme():
    assert READMES == ["README.md", *(f"{step}/README.md" for step in STEPS), PLANNER]


@pytest.mark.slow
@pytest.mark.parametrize("readme", READMES)
def test_blocks_run(readme, tmp_path):
    copy_repository(tmp_path)
    status, output = run([sys.executable, "tests/readme.py", "--run", readme], tmp_path, timeout=900)
    assert status == 0, output[-5000:]


@pytest.mark.parametrize("readme", READMES)
def test_blocks_are_of_a_known_kind(readme):
    assert block_problems((ROOT / readme).read_text()) == []


@pytest.mark.parametrize("readme", READMES)
def test_hunks_are_in_the_diff(readme):
    assert diff_problems((ROOT / readme).read_text(), diffs_of(readme)) == []


@pytest.mark.parametrize("readme", READMES)
def test_links_and_pictures_exist(readme):
    assert broken_links((ROOT / readme).read_text(), (ROOT / readme).parent) == []


@pytest.mark.parametrize("readme", READMES)
def test_line_counts(readme):
    text = (ROOT / readme).read_text()
    assert with_line_counts(text, (ROOT / readme).parent) == text, "python tests/readme.py writes the real ones"


def test_diff_sizes():
    text = (ROOT / "README.md").read_text()
    assert with_diff_sizes(text) == text, "python tests/readme.py writes the real ones"
    for _, new in pairs():
        size = diff_size(*next(pair for pair in pairs() if pair[1] == new))[1]
        assert size in text.split(f"[{new.name}]({new.name})")[1].split("\n")[0]


@pytest.mark.parametrize("step", STEPS)
def test_the_main_path_is_read_in_three_quarters_of_an_hour(step):
    text = (ROOT / step / "README.md").read_text()
    assert 1000 < main_path_words(text) <= 3000
    assert all(f"\n## {name}\n" in text for name in ("Break it", "Exercises", "Check yourself", "Second reading"))


# ------------------------------------------------------------------------------- that the checks above can fail
def run_readme(tmp_path, text):
    (tmp_path / "step").mkdir()
    (tmp_path / "step/helper.py").write_text("three = 3\n")
    (tmp_path / "step/README.md").write_text(text)
    return run([sys.executable, ROOT / "tests/readme.py", "--run", "step/README.md"], tmp_path, timeout=60)


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


def test_line_counts_are_written(tmp_path):
    (tmp_path / "model.py").write_text("1\n2\n3\n")
    table = "| file | lines | what |\n|---|--:|---|\n| [`model.py`](model.py) | {} | 17 heads |\n| `model.py` | {} | |\n"
    other = "| model.py | 99 |\n"
    assert with_line_counts(table.format(17, "?") + "\n" + other, tmp_path) == table.format(3, 3) + "\n" + other


def test_words_of_the_main_path():
    text = ("# A step\n\nTwo words, [one more](there.md).\n\n| a | b |\n|---|---|\n\n"
            "```python\nx = 1\n```\n<!-- no -->\n<details>no</details>\n")
    assert main_path_words(text + "## Break it\n\nno\n") == main_path_words(text) == 8


def test_break_table():
    text = ("# x\n## Break it\n\n| break | test |\n|---|---|\n| `step01_a`: no decay | `t` |\n| bare | t |\n\n"
            "## Next\n| a |\n|---|\n| `b` |\n")
    assert break_table(text) == ["step01_a", "bare"] and break_table("# none\n") == []
