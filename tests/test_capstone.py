"""The capstone can be done: a solution earns every certificate, each is refused for mistakes, and signatures are kept in order."""
import ast
import json
import sys

import certify
import pytest
from capstone_mistakes import MISTAKES, PAIRS, SOLUTIONS, planted
from certify import CERTIFICATES, COPIED, HAVE, SOURCE, beyond
from programs import run_program
from prove.__main__ import flags_of, layout_of
from steps import ROOT, copy_repository, run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Give the reader's folder, which make capstone has just made, in an empty repository."""
    monkeypatch.setattr(certify, "ROOT", tmp_path)
    monkeypatch.setattr(certify, "FOLDER", tmp_path / "exercise/capstone")
    monkeypatch.chdir(tmp_path)
    certify.main(["capstone"])
    return certify.FOLDER


@pytest.fixture
def judged(monkeypatch):
    """Replace the judge: yield {name: why it is refused}, and a list of those that were judged."""
    refused, asked = {}, []

    def judge(name):
        asked.append(name)
        if name in refused:
            return refused[name], None
        return None, dict(digest=certify.digest(name), date="2000-01-01", seconds=1.0)
    monkeypatch.setattr(certify, "judge", judge)
    return refused, asked


def states(capsys, *words):
    """Run make certify. Return its status and {certificate: what the table says of it}."""
    capsys.readouterr()
    status = certify.main(words)
    lines = [line for line in capsys.readouterr().out.rpartition("\n\n")[2].splitlines() if line.startswith(" ")]
    return status, {line.split()[1]: line[16:28].strip() for line in lines}


# ------------------------------------------------------------------------------------------- the reader's folder
def test_the_folder_is_copied_once(folder, capsys):
    assert sorted(path.name for path in folder.iterdir()) == sorted([*COPIED, "AGENTS.md", "Makefile"])
    (folder / "trainer.py").write_text("mine = 1\n")
    certify.main(["capstone"])
    assert "was not changed" in capsys.readouterr().out and (folder / "trainer.py").read_text() == "mine = 1\n"


def test_the_trainer_has_the_adapters_functions_without_bodies():
    functions = [node for node in ast.parse((SOURCE / "trainer.py").read_text()).body if isinstance(node, ast.FunctionDef)]
    template = ast.parse((ROOT / "tools/prove/adapters/template.py").read_text())
    arguments = {node.name: [arg.arg for arg in node.args.args] for node in template.body if isinstance(node, ast.FunctionDef)}
    assert {node.name: [arg.arg for arg in node.args.args] for node in functions} == \
        {name: names for name, names in arguments.items() if name != "loaded"}
    for node in functions:
        assert ast.get_docstring(node) and ast.unparse(node.body[1:]) == f"raise NotImplementedError('{node.name}')"


@pytest.mark.parametrize("words, message", [
    (["NAME=none"], "NAME=none: unknown certificate; choose from dp, "), (["NAME=dp", "ALL=1"], "leave out NAME or ALL"),
    (["STEP=3"], "STEP: not understood"), (["judge"], "judge: not understood")])
def test_refuses_in_one_line(folder, words, message, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit):
        certify.main(words)
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize("text", ["{", "[]", '{"dp": 1}', '{"dp": {"date": "2000-01-01"}}'])
def test_refuses_certificates_that_it_has_not_written(folder, judged, text, capsys):
    (folder / "certificates.json").write_text(text)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        certify.main([])
    said = capsys.readouterr().err
    assert "exercise/capstone/certificates.json is not what make certify wrote" in said and said.count("\n") == 1
    assert not judged[1] and (folder / "certificates.json").read_text() == text


def test_refuses_before_there_is_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(certify, "FOLDER", tmp_path / "none")
    with pytest.raises(SystemExit):
        certify.main([])
    assert capsys.readouterr().err.endswith("does not exist; run make capstone first\n")


# ------------------------------------------------------------------------------------------- signatures
def test_certificates_are_judged_in_order(folder, judged, capsys):
    refused, asked = judged
    first, second, third, *_ = CERTIFICATES
    assert states(capsys)[1][first] == "2000-01-01" and states(capsys)[1][third] == "next"
    refused[third] = "why"
    for _ in range(2):
        status, state = states(capsys)
        assert status == certify.NOT_EARNED and state[second] == "2000-01-01" and state[third] == "next"
    assert states(capsys, "NAME=resume") == (0, state | {"resume": "2000-01-01"})
    assert asked == [first, second, third, third, "resume"]


@pytest.mark.parametrize("change", ["trainer.py", "model.py", "more.py", "row"])
def test_a_certificate_is_stale_when_what_it_was_for_has_changed(folder, judged, capsys, change, monkeypatch):
    _, asked = judged
    assert states(capsys)[1]["dp"] == "2000-01-01"
    if change == "row":
        monkeypatch.setitem(CERTIFICATES, "dp", CERTIFICATES["dp"] | {"layout": "8 dp=8"})
    else:
        with (folder / change).open("a") as file:
            file.write("# changed\n")
    (folder / "notes.txt").write_text("not code\n")
    status, state = states(capsys)
    assert state["dp"] == "stale" and state["accumulate"] == "2000-01-01" and asked == ["dp", "accumulate"]


def test_all_are_judged_again_and_signatures_withdrawn(folder, judged, capsys):
    refused, asked = judged
    assert states(capsys, "ALL=1")[0] == 0 and asked == [*CERTIFICATES]
    assert states(capsys) == (0, dict.fromkeys(CERTIFICATES, "2000-01-01")) and asked == [*CERTIFICATES]
    refused["tp"] = "why"
    (folder / "trainer.py").write_text("mine = 1\n")
    assert set(states(capsys, "NAME=dp")[1].values()) == {"stale", "2000-01-01"}
    status, state = states(capsys, "ALL=1")
    assert status == certify.NOT_EARNED and state == dict.fromkeys(CERTIFICATES, "2000-01-01") | {"tp": "next"}
    assert "tp" not in json.loads((folder / "certificates.json").read_text())


def test_a_certificate_names_torchs_own_parts(folder):
    assert certify.imported() == []
    (folder / "more.py").write_text("from torch.distributed.fsdp import fully_shard\nimport torch.distributed.device_mesh\n"
                                    "from torch.distributed import tensor\n")
    assert certify.imported() == ["torch.distributed.fsdp", "torch.distributed.tensor"]


# ------------------------------------------------------------------------------------------- the certificates
def test_the_table_can_be_read():
    for name, row in CERTIFICATES.items():
        assert {"asks", "layout", "step"} <= {*row} <= {"asks", "layout", "step", "both", "options", "exactly", "limits"}
        world, flags = layout_of(row["layout"])
        assert 1 < world <= 4 and flags and flags_of(row.get("both", "")).keys() <= {"experts"}
        assert {*row.get("exactly", {}), *row.get("limits", {})} <= {*HAVE} and "exactly" in row or name == "resume"


@pytest.mark.parametrize("name, found, message", [
    ("zero3", dict(holds=[1, 1], reads=[.25, .25], keeps=[4, 4]), "a rank holds 100% of the weights, more than 26%"),
    ("zero1", dict(reads=[.25, .25], keeps=[2.5, 4]), "a rank keeps 4 numbers for each weight, more than 3"),
    ("tp", dict(holds=[1, 1], reads=[1, 1], keeps=[4, 4]), "a rank holds 100% of the weights, more than 60%"),
    ("tp", dict(holds=[.5, .5], reads=[.5, .5], keeps=[2, 2]), "a rank reads 50% of the tokens, not 100%"),
    ("cp", dict(reads=[.25, .25], length=[1, 1]), "a rank reads 100% of a sequence, not 25%"),
    ("cp", dict(reads=[0, 0], length=[0, 0]), "no rank calls an embedding"),
    ("cp", dict(reads=[.25, .25], length=[.25, .25]), None)])
def test_a_rank_may_have_its_share_only(name, found, message):
    said = beyond(CERTIFICATES[name], found)
    assert said is None if message is None else said.startswith(message) and "\n" not in said


READERS = """
import json, os, sys
folder, source = sys.argv[1:]
sys.path.insert(0, source)
os.environ.update(TRAINER=folder, MEASURED=folder, RANK="0", WORLD_SIZE="2")
import torch
import torch.nn.functional as F
from torch import nn
import judge
class Gathers(nn.Module):                                 # its own weight, in forward
    def __init__(self):
        super().__init__()
        self.shard = nn.Embedding(64, 2).weight
    def forward(self, tokens):
        return F.embedding(tokens, self.shard * 1)
class Positions(nn.Module):
    def forward(self, tokens):
        return tokens * 1.0
plain, gathered = nn.Embedding(64, 2), nn.Embedding(64, 2)
gathered.shard = gathered._parameters.pop("weight")       # a hook gathers its weight
gathered.register_forward_pre_hook(lambda module, args: setattr(module, "weight", module.shard * 1))
gathered.register_forward_hook(lambda module, args, out: delattr(module, "weight"))
ways = dict(plain=plain, gathered=gathered, inside=nn.Sequential(gathered), gathers=Gathers(), positions=Positions(),
            function=lambda tokens: F.embedding(tokens, plain.weight))
for name, embed in ways.items():
    judge.trainer.step = lambda run, inputs, targets: embed(inputs.chunk(4)[0])
    judge.measured["keeps"] = 1
    judge.step(None, *[torch.zeros(judge.BATCH, judge.SEQ, dtype=torch.int64)] * 2)
    with open(f"{folder}/0") as file:
        ways[name] = json.load(file)["reads"]
    os.remove(f"{folder}/0")
print(json.dumps(ways))
"""


def test_the_judge_sees_what_an_embedding_reads(tmp_path):
    (tmp_path / "trainer.py").write_text("")
    status, output = run([sys.executable, "-c", READERS, tmp_path, SOURCE], tmp_path, timeout=120)
    assert status == 0, output
    assert json.loads(output) == dict(plain=.25, gathered=.25, inside=.25, gathers=.25, positions=0, function=0)


def test_every_certificate_is_refused_for_three_mistakes():
    for name in CERTIFICATES:
        assert sum(pair.startswith(f"{name}/") for pair in PAIRS) >= 3, name
    for name, one in MISTAKES.items():
        assert {*one["refused"].split()} <= {*CERTIFICATES}
        compile(planted(name), name, "exec")              # which also checks that it is there once


# ------------------------------------------------------------------------------------------- solutions
def judged_for_real(tmp_path, solution, *words):
    """Run make certify on a solution. Return its status, output, and what was signed."""
    mine = tmp_path / "exercise/capstone"
    if not mine.exists():
        copy_repository(tmp_path)
        assert run([sys.executable, "exercises/certify.py", "capstone"], tmp_path, timeout=60)[0] == 0
        (mine / "trainer.py").write_text((SOLUTIONS / f"{solution}.py").read_text())
    status, output = run_program(["exercises/certify.py", *words], tmp_path, timeout=900)
    signed = json.loads((mine / "certificates.json").read_text())
    assert all(one["largest_difference"] < 1e-9 for one in signed.values())
    assert all(bool(one["parts_of_torch"]) == (solution == "of_torch") for one in signed.values())
    return status, output, {*signed}


@pytest.mark.sweep
def test_a_solution_earns_all_certificates(tmp_path):
    """Check it with self-tests. A push runs them for two certificates, below, and the rest of what a certificate asks for all."""
    status, output, signed = judged_for_real(tmp_path, "collectives", "ALL=1")
    assert status == 0 and signed == {*CERTIFICATES}, output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "pp"])
def test_a_solution_of_torchs_parts_earns(name, tmp_path):
    status, output, signed = judged_for_real(tmp_path, "of_torch", f"NAME={name}")
    assert status == 0 and signed == {name}, output


@pytest.mark.sweep
def test_a_solution_of_torchs_parts_earns_what_it_can(tmp_path):
    status, output, signed = judged_for_real(tmp_path, "of_torch", "ALL=1")
    assert {*CERTIFICATES} - signed == {"cp", "ep", "cp_zero3"} and status == certify.NOT_EARNED, output
    assert all("NotImplementedError: cp, ep" in line for line in output.splitlines() if " refused: " in line)


def refused_for(pairs):
    status, output = run_program(["tests/support/capstone_mistakes.py", *pairs], ROOT, timeout=1800)
    assert status == 0, output
    return json.loads("{" + output.rpartition("\n{")[2])


@pytest.mark.slow
def test_every_certificate_is_earned_by_the_solution_and_refused_for_a_mistake():
    pairs = list({pair.partition("/")[0]: pair for pair in PAIRS}.values())
    verdicts = refused_for([f"{name}/" for name in CERTIFICATES] + pairs)
    assert {verdicts.pop(f"{name}/") for name in CERTIFICATES} == {None}, verdicts
    assert [*verdicts] == pairs and all(verdicts.values()), verdicts


@pytest.mark.sweep
def test_every_mistake_is_refused():
    verdicts = refused_for([])
    assert [*verdicts] == PAIRS and all(verdicts.values()), verdicts
