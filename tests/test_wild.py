"""The planted mistakes and tests that docs/wild.md names exist."""
import re

from patched import planted_mistakes
from steps import ROOT

TEXT = (ROOT / "docs/wild.md").read_text()
STORIES = [part for part in TEXT.split("## Twins")[0].split("\n### ")[1:]]


def test_each_net_is_that_of_its_mistake():
    assert STORIES
    for story in STORIES:
        found = re.search(r"Net: `(\w+)`, by `(tests/[^`]+)`", story)
        assert planted_mistakes()[found[1]]["test"] == found[2], found[1]
