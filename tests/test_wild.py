"""The patches and tests that docs/wild.md names exist."""
import re

from steps import ROOT

TEXT = (ROOT / "docs/wild.md").read_text()
MISTAKES = ROOT / "exercises/mistakes"
STORIES = [part for part in TEXT.split("## Twins")[0].split("\n### ")[1:]]


def test_each_net_is_that_of_its_patch():
    assert STORIES
    for story in STORIES:
        found = re.search(r"Net: `(\w+)`, by `(tests/[^`]+)`", story)
        assert (MISTAKES / f"{found[1]}.patch").read_text().startswith(f"test: {found[2]}\n"), found[1]


def test_twins_are_patches():
    named = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert named and named == sorted(named)
    assert all((MISTAKES / f"{name}.patch").exists() for name in named)
