"""A short campaign of hostile attempts by command line, of those that take few processes."""
import sys

import pytest
from steps import ROOT, run

SHORT = ["a_folder_of_others", "an_output_that_ends", "a_full_disk", "a_damaged_checkpoint", "a_damaged_model", "killed",
         "a_value_that_is_none", "a_strange_environment", "from_a_strange_place", "told_to_end", "a_tool_misused",
         "nodes_with_other_flags"]


@pytest.mark.slow
def test_nothing_is_silent_or_lost_or_without_end(tmp_path):
    _, output = run([sys.executable, "tests/attack", "--seed", "7", "--count", "12", "--only", ",".join(SHORT)], ROOT, timeout=600)
    *attempts, last = output.splitlines()
    verdicts = [line.split()[1] for line in attempts]
    assert len(verdicts) == 12 and last.startswith("12 attempts in "), output
    assert not {"silent", "lost", "endless"} & set(verdicts), output
