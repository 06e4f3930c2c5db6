"""tools/prove has no false alarm, names what is planted in step08_5d and elsewhere, and says what is wrong with an adapter."""
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from layouts import in_table
from patched import not_in, planted_mistakes
from plants import STEPS, judged, table_of
from programs import run_program
from prove import CannotRun
from prove.__main__ import listed, main, pairwise
from prove.causes import CAUSES
from prove.compare import Row, Run, limits
from prove.diagnose import Diagnosis
from prove.ranks import watch
from prove.trace import Seen, trace, trace_back
from prove.words import Words, ranges
from steps import ROOT, clean_environment, load_module, run

from readme import with_tables

PROVE, ADAPTERS = ROOT / "tools/prove", ROOT / "tools/prove/adapters"
README, DIAGNOSES = ((PROVE / name).read_text() for name in ("README.md", "DIAGNOSES.md"))


def prove(adapter, tmp_path, *flags, layouts="", run=run_program, **environment):
    """Run the tool. Return its exit status, output, and what it wrote for programs."""
    if layouts:
        (tmp_path / "layouts").write_text(layouts)
        flags = [*flags, "--layouts", tmp_path / "layouts"]
    status, output = run([PROVE, adapter, *flags, "--json", tmp_path / "said.json"], tmp_path, timeout=1800, **environment)
    written = (tmp_path / "said.json").read_text() if (tmp_path / "said.json").exists() else ""
    said = json.loads(written or "[]")                    # empty if the run with one process failed
    return status, output, said


def equal(result):
    return result["status"] == 0 and result["largest"] < 1e-9 and result["exact"]


# ------------------------------------------------------------------------------------------- no false alarm
def test_right_layouts_of_step_8_are_equal(tmp_path):
    layouts = "4 tp=2 pp=2 micro_batch_size=2\n4 zero=3 cp=2   # FSDP and rings\n"
    status, output, said = prove(ADAPTERS / "step08.py", tmp_path, layouts=layouts)
    assert status == 0 and len(said) == 2 and all(map(equal, said)), output
    assert output.count("\nEQUAL to ") == 2 and "warning" not in output
    assert "a rank holds 25% of the numbers, reads 0% to 100% of the tokens, and issues " in output


RIGHT = {"torch_dp": "2 mode=ddp acc=2\n2 mode=fsdp acc=2\n4 mode=fsdp\n", "torch_tp": "2 tp=2\n2 tp=2 sp=1\n",
         "torch_pp": "2 pp=2 acc=4\n2 pp=2 acc=2 schedule=ScheduleGPipe\n"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("adapter", RIGHT)
def test_right_layouts_of_torch_are_equal(adapter, dtype, tmp_path):
    flags = ["--dtype", dtype] + ["--mask"] * (adapter == "torch_dp") + ["--unforgiving"] * (adapter == "torch_dp")
    status, output, said = prove(ADAPTERS / f"{adapter}.py", tmp_path, *flags, layouts=RIGHT[adapter])
    assert status == 0 and said and (dtype == "float32" or all(map(equal, said))), output


@pytest.mark.slow
def test_dense_layouts_of_step_8_are_equal(tmp_path):
    (tmp_path / "many.py").write_text(
        "import step08\nfrom step08 import *\nBATCH = step08.BATCH = 24\n"
        "step08.SHAPE |= dict(hidden_size=40, intermediate_size=56, num_attention_heads=8, head_dim=6)\n")
    lines = {}
    for layout in in_table(8):
        kind, layers, *more = layout.shape.split("-")
        if kind == "dense" and layout.world > 1 and set(more) <= {"qk"}:
            flags = dict(zip(layout.flags.split()[::2], layout.flags.split()[1::2])) | {"--kv": "4", "--layers": layers}
            flags.pop("--dtype"), flags.pop("--ep", 0)
            both = " ".join([f"layers={layers}", "kv=4", "qk=1" if more else "qk=0"])
            line = " ".join(f"{key.lstrip('-')}={value}" for key, value in flags.items() if key not in ("--kv", "--layers"))
            lines.setdefault(both, []).append(f"{layout.world} {line}\n")
    assert lines
    for both, layouts in lines.items():
        status, output, said = prove(tmp_path / "many.py", tmp_path, "--both", both, layouts="".join(layouts),
                                     PYTHONPATH=str(ADAPTERS))
        assert status == 0 and all(map(equal, said)), output


TWICE, UNREDUCED, FACTOR = "gradients of some data", "not reduced", "some gradients times a factor"
SCALED = "all gradients times a factor"
PEERS = [                                                 # adapter, its flags, {layout: the cause by which it is known to differ}
    ("hf_native", "", {"2 tp=2": "", "2 fsdp=2 acc=2": "", "4 tp=2 fsdp=2": "", "2 tp=2 acc=4": TWICE}),
    ("hf_native", "--both model=qwen3_moe", {"2 tp=2 ep=2": "", "2 fsdp=2 ep=2": FACTOR}),
    ("hf_native", "--both model=glm4_moe", {"2 tp=2": UNREDUCED}),
    ("hf_native", "--both model=apertus", {"2 tp=2": UNREDUCED}),
    ("hf_native", "--both model=phi", {"2 tp=2": UNREDUCED}),
    ("hf_trainer", "--mask", {"2": "", "2 acc=2": "", "4 tp=2 fsdp=2": "", "2 tp=2 acc=2": TWICE}),
    ("hf_accelerate", "--both clip=0.3", {"2 acc=2": "", "2 fsdp=2 acc=2": "", "4 fsdp=2 replicas=2": "", "2 tp=2 acc=2": TWICE}),
    ("hf_accelerate", "--mask", {"2 acc=2": "mean of means"}),
    ("ds_zero", "--dtype float32 --both clip=0.3", {"2 zero=0 acc=2": "",
                                                    "2 zero=1 acc=2": "", "2 zero=2": "", "2 zero=3 acc=2": ""}),
    ("ds_pipe", "--dtype float32 --both clip=0.3", {"2 pp=2 acc=4": "norm of a part", "2 pp=2 acc=4 zero=1": "",
                                                    "4 pp=2 acc=2 zero=1": ""}),
    ("ds_pipe", "--dtype float32 --both 'clip=0.3 tied=1'", {"2 pp=2 acc=4": "norm of a part", "2 pp=2 acc=4 zero=1": ""}),
    ("of_olmo_core", "--both clip=0.3", {"2 dp=2 acc=2": "", "2 dp=2 kind=ddp": "", "4 dp=4 kind=hsdp": "", "4 dp=2 tp=2": ""}),
    ("of_olmo_core", "--mask --dtype float32", {"2 dp=2": "mean of means"}),
    ("of_olmo_core", "--dtype float32 --both clip=0.3", {"4 dp=2 tp=2": ""}),
    ("of_torchtitan_03", "--mask", {"2 fsdp=2 acc=2": "", "2 ddp=2": "", "4 fsdp=2 tp=2": ""}),
    ("torch_pp", "--both layers=4", {"2 pp=2 acc=4 schedule=Interleaved1F1B": "", "2 pp=2 acc=4 schedule=ZBVZeroBubble": "",
                                     "2 pp=2 acc=4 schedule=DualPipeV mean=0": "", "2 pp=2 acc=4 scale=0": SCALED,
                                     "2 pp=2 acc=4 schedule=Interleaved1F1B mean=0 scale=1": SCALED}),
]


@pytest.mark.slow
@pytest.mark.parametrize("adapter, flags, layouts", PEERS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_it_says_of_other_trainers(adapter, flags, layouts, tmp_path):
    if lacking := lacks(ADAPTERS / f"{adapter}.py"):
        pytest.skip(f"pip install {lacking}")
    status, output, said = prove(ADAPTERS / f"{adapter}.py", tmp_path, *shlex.split(flags), layouts="\n".join(layouts))
    assert [one.get("cause", "") for one in said] == [*layouts.values()], output
    assert [one["status"] for one in said] == [int(bool(cause)) for cause in layouts.values()], output


def lacks(adapter):
    """Return what an adapter needs and this machine lacks, in the pinned version or in any."""
    for need in re.search(r'^NEEDS = "(.*)"', adapter.read_text(), re.M)[1].split(", "):
        package, _, version = need.partition("==")
        try:
            if version not in ("", importlib.metadata.version(package)):
                return need
        except importlib.metadata.PackageNotFoundError:
            return need


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("PICOTRON"), reason="PICOTRON=folder names a checkout of picotron")
def test_what_it_says_of_picotron_at_59714b1(tmp_path):
    _, output, said = prove(ADAPTERS / "of_picotron.py", tmp_path, layouts="2 dp=2\n2 tp=2\n2 pp=2\n2 pp=2 acc=4\n")
    assert [result["status"] for result in said] == [0, 0, 0, 1], output
    assert said[3]["cause"] == "all gradients times a factor" and "4 times the right ones (acc)" in output
    assert said[1]["copies"] == 28 and said[2]["copies"] == 14
    _, output, said = prove(ADAPTERS / "of_picotron.py", tmp_path, "--world", "2", "--flags", "cp=2", "--dtype", "float32")
    assert said[0]["cause"] == "not reduced" and "over cp" in output


@pytest.mark.slow
@pytest.mark.skipif(bool(lacks(ADAPTERS / "of_torchtitan.py")), reason="pip install torchtitan==0.2.2")
def test_what_it_says_of_torchtitan_0_2_2(tmp_path):
    layouts = "2 fsdp=2 acc=2\n2 tp=2\n4 ddp=2 fsdp=2\n2 ddp=2\n2 pp=2\n"
    _, output, said = prove(ADAPTERS / "of_torchtitan.py", tmp_path, layouts=layouts)
    assert [result["status"] for result in said] == [0, 0, 0, 1, 1], output
    assert {result["cause"] for result in said[3:]} == {"all gradients times a factor"}
    assert "1/2 times the right ones (1/dp_replicate" in output and "128 times the right ones (targets)" in output


# ------------------------------------------------------------------------------------------- planted mistakes


def verdicts(names, tmp_path):
    words = [ROOT / "tests/support/plants.py", *names, "--json", tmp_path / "plants.json"]
    status, output = run_program(words, tmp_path, timeout=7200)
    assert status == 0, output
    return json.loads((tmp_path / "plants.json").read_text())


def test_a_wrong_forward_of_a_patched_step_has_a_place(tmp_path):
    found = verdicts(["step05_merge_without_rescaling"], tmp_path)["step05_merge_without_rescaling"]
    assert found["verdict"] == "placed" and found["said"]["place"] == "model.layers.0.self_attn"
    assert "for positions 4 to 15 of 16" in found["said"]["seen"]


def test_every_planted_mistake_of_steps_2_to_7_is_tried_or_changes_no_number():
    names = {name for name in planted_mistakes() if "step02" <= name < "step08"}
    assert {*STEPS} | {*not_in("prove")} == names and not {*STEPS} & {*not_in("prove")}


@pytest.mark.sweep
def test_the_table_of_planted_mistakes_is_what_comes_out(tmp_path):
    found = verdicts([], tmp_path)
    assert [row for row in table_of(found) if row not in DIAGNOSES] == []
    for verdict in ("seen", "never"):
        unnamed = [name for name, one in found.items() if one["verdict"] == verdict]
        assert [name for name in unnamed if f"`{name}`" not in DIAGNOSES] == [], "the page names what has no name"


def test_the_page_counts_all_that_is_tried():
    rows = re.findall(r"^\| (?:step \d|torch's own) \|(.*)\|$", DIAGNOSES, re.M)
    of_torch = (ROOT / "tests/support/planted_torch.py").read_text().count("\n@planted(")
    numbers = [[int(n) for n in row.split("|")] for row in rows]
    assert len(numbers) == 7 and all(total == sum(rest) for total, *rest in numbers)
    assert sum(total for total, *_ in numbers[:6]) == len(STEPS) and numbers[6][0] == of_torch


def test_a_verdict_can_be_each_of_four():
    one = STEPS["step04_entering_not_reduced"]
    said = dict(status=1, cause="backward", place="model.layers.3.x", seen="")
    assert judged(one, said) == "named" and judged(one, said | dict(cause="norm")) == "placed"
    assert judged(one, said | dict(place="model.layers.1.x")) == "seen" and judged(one, dict(status=0)) == "never"


# ------------------------------------------------------------------------------------------- the table of causes
def test_the_page_shows_the_table_of_causes():
    assert with_tables(DIAGNOSES, "tools/prove/DIAGNOSES.md") == DIAGNOSES, "python dev/readme.py writes the table"
    assert all(f"| {cause.looks} | {cause.means} |" in DIAGNOSES for cause in CAUSES.values())


def test_every_cause_can_be_said():
    """Check that the table has every cause that the code names, and that the code names every cause of the table."""
    code = "".join((PROVE / name).read_text() for name in ("diagnose.py", "trace.py", "trial.py"))
    named = set(re.findall(r'(?:Finding|Look)\("([^"]+)"', code)) - {"factor", "shares"}
    assert named <= {*CAUSES} and [name for name in CAUSES if f'"{name}"' not in code and f"'{name}'" not in code] == []


# ------------------------------------------------------------------------------------------- what is wrong with an adapter
TOY = '''
import os, time
from types import SimpleNamespace
import torch
import torch.distributed as dist
BATCH, SEQ, VOCAB = 4, 4, 8

class Linear(torch.nn.Linear):
    inside = torch.float64

    def forward(self, x):
        return torch.nn.functional.linear(x.to(self.inside), self.weight.to(self.inside), self.bias.to(self.inside)).to(x.dtype)

def build(flags):
    dist.init_process_group("gloo")
    Linear.inside = getattr(torch, flags.get("inside", flags["dtype"]))
    torch.manual_seed(flags.get("how") == "masters")
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 4), Linear(4, VOCAB)).to(getattr(torch, flags["dtype"]))
    run = SimpleNamespace(model=model, adamw=torch.optim.AdamW(model.parameters(), lr=0.01), how=flags.get("how"))
    run.masters = [param.detach().clone() for param in model.parameters()]
    return None if run.how == "nothing" else run

def parts(run):
    if run.how == "three":
        yield "0.weight", run.model[0].weight, None
    for name, param in run.model.named_parameters():
        if run.how == "forget" and name == "1.bias":
            continue
        weight = param.detach().clone() if run.how == "copy" else param
        where = {"outside": {1: 1}, "negative": {0: -1}}.get(run.how)
        if run.how == "twice":
            yield name, weight, param.grad, where
        yield "module." * (run.how == "prefix") + name, weight, param.grad, where

def step(run, inputs, targets):
    last = dist.get_rank() == dist.get_world_size() - 1
    if run.how == "hang" and last:
        while True:
            time.sleep(0.1)
    if run.how in ("die", "leave") and last:
        os._exit(7 if run.how == "die" else 1)
    if run.how == "raise" and last:
        raise ValueError("what a rank says")
    run.adamw.zero_grad()
    rank, world = (0, 1) if run.how == "idle" else (dist.get_rank(), dist.get_world_size())
    mine = slice(0 if run.how == "same data" else rank, None, world)
    logits = run.model(inputs[mine]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, targets[mine].flatten()) * (2 if run.how == "doubled" else 1)
    if run.how == "balance":
        loss = loss + logits.softmax(-1).mean(0).square().sum()
    loss.backward()
    for param in run.model.parameters():
        if run.how not in ("alone", "idle"):
            dist.all_reduce(param.grad)
            param.grad /= 1 if run.how == "summed" else world
        if run.how in ("bfloat16", "float32"):
            param.grad.copy_(param.grad.to(getattr(torch, run.how)))
        if run.how == "clipped":
            param.grad /= param.grad.norm()
    if run.how == "zeroed":
        run.model[0].weight.grad.zero_()
    loss = loss.detach()
    norm = torch.nn.utils.get_total_norm([param.grad for param in run.model.parameters()])
    if run.how == "clipped at 1":
        for param in run.model.parameters():
            param.grad /= norm
    if run.how not in ("own log", "idle"):
        dist.all_reduce(loss)
        loss /= world
    for group in run.adamw.param_groups:
        group["lr"] = 0.02 if run.how == "learning rate" else 0.01
        group["weight_decay"] = 0.2 if run.how == "decay" else 0.01
    before = [param.detach().clone() for param in run.model.parameters()]
    if run.how != "frozen":
        run.adamw.step()
    if run.how == "masters":
        for param, master, old in zip(run.model.parameters(), run.masters, before):
            param.data.copy_(master.add_(param.data - old))
    if run.how == "drift" and last:
        run.model[1].weight.data.mul_(1.001)
    if run.how == "infinite":
        run.model[0].weight.grad[0] = torch.inf
    if run.how == "cleared":
        run.adamw.zero_grad()
    loss, norm = loss * (3 if run.how == "log" else 1), {"word": "much", "norm": norm * 2**0.5}.get(run.how, norm)
    return [loss, norm] if run.how == "list" else (loss, norm)

def place(run):
    return {"dp": dist.get_rank()}

def save(run, folder):
    if dist.get_rank() == 0:
        torch.save([run.model.state_dict(), run.adamw.state_dict()], f"{folder}/all")
    dist.barrier()

def load(run, folder):
    model, adamw = torch.load(f"{folder}/all")
    run.model.load_state_dict(model)
    if run.how != "no states":
        run.adamw.load_state_dict(adamw)

def modules(run):
    return run.model.named_modules()
'''
CAUSE = {"summed": "all gradients times a factor", "alone": "not reduced", "same data": "other data",
         "doubled": "loss times a factor",
         "bfloat16": "low precision", "clipped": "scaled apart", "zeroed": "zero gradients", "own log": "log of one rank",
         "log": "log times a factor", "norm": "norm counts", "learning rate": "update times a factor", "decay": "decay",
         "masters": "own weights", "clipped at 1": "clipped or not", "frozen": "not updated", "drift": "weights drift"}
SAID = {"hang": "did not finish", "die": "rank 1 died with exit status 7", "leave": "rank 1 died with exit status 1",
        "raise": "ValueError: what a rank says",
        "nothing": "build: returns None", "three": "yields a tuple of 3; it must yield (name, weight, gradient, where)",
        "forget": "parts: of 1.bias one process holds 8 numbers, all ranks together 0",
        "copy": "yield the memory itself, not a copy",
        "outside": "begins at [0, 4] in 0.weight", "prefix": "names must be the same under every layout",
        "negative": "has where {0: -1}; its numbers must be whole", "twice": "yields 0.weight[0, 0] twice",
        "list": "step: returns list; it must return (loss, gradient norm)", "word": "returns a norm of type str"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.py").write_text(TOY)
    layouts = "2\n" + "".join(f"2 'how={how}'\n" for how in [*CAUSE, *SAID])
    status, output, said = prove(folder / "toy.py", folder, "--seconds", 20, layouts=layouts)
    assert status == 2 and equal(said[0]), output
    return {result["flags"]["how"]: result for result in said[1:]}


@pytest.mark.slow
def test_causes_are_named(toy):
    assert {how: toy[how].get("cause", toy[how]) for how in CAUSE} == CAUSE


@pytest.mark.slow
def test_a_layout_that_cannot_run_says_why_and_keeps_no_other_from_running(toy):
    assert {how: toy[how].get("cannot") for how in SAID if SAID[how] not in toy[how].get("cannot", "")} == {}


@pytest.mark.slow
def test_ranks_that_hang_show_where_they_stand(toy):
    text = toy["hang"]["cannot"]
    assert re.search(r"rank 0: distributed_c10d\.py:\d+ all_reduce < toy\.py:\d+ step", text)
    assert re.search(r"rank 1: toy\.py:\d+ step", text)


@pytest.mark.parametrize("how, said", [("infinite", "its gradient of 0.weight is NaN or infinite"),
                                       ("cleared", "no part has a gradient")])
def test_one_process_that_cannot_be_compared_with_is_refused(tmp_path, how, said):
    (tmp_path / "toy.py").write_text(TOY)
    status, output, _ = prove(tmp_path / "toy.py", tmp_path, "--both", f"how={how}", "--world", 2)
    assert status == 2 and said in output and "EQUAL" not in output and "Traceback" not in output, output


def test_ranks_that_do_nothing_in_parallel_are_equal_with_a_warning(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    status, output, said = prove(tmp_path / "toy.py", tmp_path, "--flags", "how=idle")
    assert status == 0 and said[0]["activity"] == dict(holds=[1, 1], reads=[1, 1], issues=[0, 0])
    assert "a rank holds 100% of the numbers, reads 100% of the tokens, and issues 0 collectives" in output
    assert "warning: every rank holds all of the numbers and issues no collective: nothing ran in parallel" in output


@pytest.mark.slow
def test_a_loss_that_is_no_sum_over_sequences_is_compared_on_equal_rows(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    flags = "--both", "how=balance"
    assert prove(tmp_path / "toy.py", tmp_path, *flags)[0] == 1
    status, output, said = prove(tmp_path / "toy.py", tmp_path, *flags, "--same_rows")
    assert status == 0 and equal(said[0]), output


def test_a_layout_resumes_what_another_has_saved(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    status, output, said = prove(tmp_path / "toy.py", tmp_path, "--world", 4, "--resume", "2")
    assert status == 0 and [one["world"] for one in said] == [2, 4] and all(map(equal, said)), output
    assert output.count("\nstep ") == 4 and "collectives in 2 steps" in output
    status, output, said = prove(tmp_path / "toy.py", tmp_path, "--flags", "'how=no states'", "--resume", "2")
    assert status == 1 and [one["status"] for one in said] == [0, 1] and said[1]["step"] == 3, output
    assert said[1]["cause"] == "update times a factor" or said[1]["cause"] == "update", output


BLIND = TOY.replace("yield \"module.\" * (run.how == \"prefix\") + name, weight, param.grad, where",
                    "yield name, weight, torch.ones_like(weight), where").replace(
    "run.adamw.step()", "pass").replace("return [loss, norm]", "return (None, None) or [loss, norm]").replace(
    "else (loss, norm)", "else (None, None)")


@pytest.mark.slow
def test_mistakes_planted_in_the_users_own_run_are_seen_or_said_to_be_not(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    status, output, _ = prove(tmp_path / "toy.py", tmp_path, "--self_test")
    assert status == 0 and output.count("\nplanted: ") == output.count("\n    seen in step 1: ") == 3, output
    assert "sequences 0, 2 count once, 1, 3 count 1/2 times" in output and "not reduced over dp" in output
    (tmp_path / "blind.py").write_text(BLIND)
    status, output, _ = prove(tmp_path / "blind.py", tmp_path, "--self_test")
    assert status == 1 and "EQUAL" in output and output.count("NOT SEEN") == 3, output


@pytest.mark.slow
@pytest.mark.parametrize("adapter, flags, sees", [
    ("torch_dp", "mode=ddp", "not reduced over dp"), ("torch_dp", "mode=fsdp", "the gradients of"),
    ("torch_tp", "tp=2", "goes wrong at model.embed_tokens"),
    ("step08", "zero=2", "sequences 0 to 3 count once, 4 to 7 are missing"), ("torch_pp", "pp=2 acc=4", "not possible here")])
def test_the_planted_mistakes_reach_trainers_that_call_c10d_in_other_ways(tmp_path, adapter, flags, sees):
    status, output, _ = prove(ADAPTERS / f"{adapter}.py", tmp_path, "--flags", flags, "--self_test")
    assert status == 0 and "NOT SEEN" not in output and sees in output.split("planted: ")[3], output


@pytest.mark.slow
@pytest.mark.parametrize("adapter, saved, resumed", [("torch_dp", "2 mode=ddp acc=2", "mode=fsdp"),
                                                     ("step08", "2 pp=2", "tp=2 zero=1")])
def test_checkpoints_of_real_trainers_are_resumed(tmp_path, adapter, saved, resumed):
    status, output, said = prove(ADAPTERS / f"{adapter}.py", tmp_path, "--world", 4, "--flags", resumed, "--resume", saved)
    assert status == 0 and len(said) == 2 and all(map(equal, said)), output


def test_every_two_values_meet_in_a_sweep():
    layouts = pairwise("tp=1,2 acc=1,4 zero=0,1,2,3 schedule=afab,1f1b")
    assert len(layouts) < 12
    assert {(one["tp"], one["schedule"]) for one in layouts} == {*itertools.product((1, 2), ("afab", "1f1b"))}
    assert {(one["acc"], one["zero"]) for one in layouts} == {*itertools.product((1, 4), range(4))}
    assert pairwise("tp=1,2") == [dict(tp=1), dict(tp=2)]


def test_the_adapters_are_listed_with_what_they_need():
    lines = [*listed()]
    assert len(lines) == len([*ADAPTERS.glob("*.py")]) - 1
    assert any(line.startswith("of_torchtitan.py ") and line.endswith("Needs torchtitan==0.2.2.") for line in lines)


OF_PYTEST = '''
import prove

@prove.layouts("toy.py", "2 how=right", "2 how=doubled", known={"2 how=alone": "not reduced", "2 how=summed": "decay"}, seconds=60)
def test_equals_one_process(said):
    assert said["world"] == 2
'''


@pytest.mark.slow
def test_pytest_has_one_test_a_layout_and_knows_what_differs(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "test_mine.py").write_text(OF_PYTEST)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"], cwd=tmp_path, text=True,
                          capture_output=True, env=clean_environment() | dict(PYTHONPATH=str(PROVE.parent)))
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"_ test_equals_one_process\[2 how=doubled\] _", done.stdout)
    assert "the loss and all gradients are 2 times the right ones" in done.stdout
    assert "expected to differ, with the cause 'decay'" in done.stdout


@pytest.mark.slow
def test_it_installs_with_a_command_of_its_own(tmp_path):
    shutil.copytree(PROVE, tmp_path / "prove", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", "site",
                    "./prove"], cwd=tmp_path, check=True)
    (tmp_path / "toy.py").write_text(TOY)
    environment = clean_environment() | dict(PYTHONPATH=str(tmp_path / "site"), OMP_NUM_THREADS="1")
    done = subprocess.run(["site/bin/prove", "toy.py"], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0 and "\nEQUAL to " in done.stdout, done.stdout + done.stderr


def test_pieces_of_sequences_without_a_target_do_not_disturb(tmp_path):
    (tmp_path / "toy.py").write_text(TOY.replace("BATCH, SEQ, VOCAB = 4, 4, 8", "BATCH, SEQ, VOCAB = 8, 16, 64"))
    status, output, said = prove(tmp_path / "toy.py", tmp_path, "--mask", layouts="2 cp=8\n2 cp=2\n4 acc=1\n8\n")
    assert status == 1 and [one["cause"] for one in said] == ["mean of means"] * 4, output
    assert [f"a mean of {n} means" in one["seen"] for n, one in zip((2, 2, 4, 8), said)] == [True] * 4, output


@pytest.mark.parametrize("inside, flags, says", [
    ("bfloat16", "", "EQUAL, as far as bfloat16 can tell"),
    ("float32", "how=zeroed", "the gradients of 0: zero")])
def test_one_layer_in_low_precision_neither_is_a_mistake_nor_hides_one(tmp_path, inside, flags, says):
    (tmp_path / "toy.py").write_text(TOY)
    status, output, said = prove(tmp_path / "toy.py", tmp_path, "--both", f"inside={inside}", "--flags", flags)
    assert says in output and status == bool(flags) and len(said[0].get("looks", {})) <= 1, output


def test_gradients_in_low_precision_do_not_hide_a_mistake(tmp_path):
    (tmp_path / "toy.py").write_text(TOY.replace("BATCH, SEQ, VOCAB = 4, 4, 8", "BATCH, SEQ, VOCAB = 8, 16, 64"))
    status, output, said = prove(tmp_path / "toy.py", tmp_path, "--mask", "--flags", "how=float32")
    assert status == 1 and said[0]["cause"] == "mean of means", output


def test_a_crash_of_the_tool_is_no_difference_and_keeps_no_other_layout_from_running(capsys, monkeypatch, tmp_path):
    def prove(trial):
        if trial.world == 2:
            raise IndexError("planted")
        return dict(world=trial.world, flags={}, dtype="float64", status=2, cannot="nothing to run")
    monkeypatch.setattr("prove.trial.Baseline", lambda *_: None)
    monkeypatch.setattr("prove.trial.Trial.prove", prove)
    (tmp_path / "layouts").write_text("2\n3\n")
    assert main([str(ADAPTERS / "template.py"), "--layouts", str(tmp_path / "layouts"), "--json", str(tmp_path / "said")]) == 3
    assert [one["status"] for one in json.loads((tmp_path / "said").read_text())] == [3, 2]
    output = capsys.readouterr().out
    assert "CANNOT RUN: a mistake in this tool" in output and "IndexError: planted" in output


STRIDED = '''
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
BATCH, SEQ, VOCAB = 4, 4, 8

def build(flags):
    """A gate and an up projection in one matrix, of which each rank holds a half of both."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    embed, both, down = torch.randn(VOCAB, 4).double(), torch.randn(4, 8).double(), torch.randn(4, VOCAB).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    both = distribute_tensor(both, mesh, [_StridedShard(1, split_factor=2)])
    return SimpleNamespace(embed=embed.requires_grad_(), both=both.requires_grad_(), down=down.requires_grad_())

def step(run, inputs, targets):
    rank, world, weights = dist.get_rank(), dist.get_world_size(), (run.embed, run.both, run.down)
    for weight in weights:
        weight.grad = None
    gate, up = (run.embed[inputs] @ run.both.to_local()).chunk(2, -1)
    partial = gate.sigmoid() * up @ run.down.chunk(world)[rank]
    dist.all_reduce(whole := partial.detach().clone())
    loss = torch.nn.functional.cross_entropy((partial + whole - partial.detach()).flatten(0, 1), targets.flatten())
    loss.backward()
    for grad in (run.embed.grad, run.down.grad):
        dist.all_reduce(grad)
    for weight in weights:
        weight.data -= 0.1 * weight.grad
    return loss.detach(), None

def parts(run):
    return ((name, getattr(run, name), getattr(run, name).grad, None) for name in ("embed", "both", "down"))
'''


def test_a_strided_shard_of_a_dtensor_is_more_than_one_block(tmp_path):
    (tmp_path / "strided.py").write_text(STRIDED)
    status, output, said = prove(tmp_path / "strided.py", tmp_path)
    assert status == 0 and equal(said[0]), output
    assert re.search(r"^step 1    \S+ +1e-09 +-  ", output, re.M) and said[0]["steps"][0]["norm"] is None, "it returns no norm"


def refused(*argv):
    with pytest.raises(CannotRun) as end:
        main([*map(str, argv)])
    return str(end.value)


def test_flags_that_cannot_work_are_refused(tmp_path):
    (tmp_path / "empty.py").write_text("def build(flags): pass\n")
    (tmp_path / "none").write_text("# nothing\n")
    (tmp_path / "words").write_text("tp=2\n")
    template = ADAPTERS / "template.py"
    assert "no such file; copy" in refused(tmp_path / "x.py")
    assert "--world 0: must be from 1 to 64" in refused(template, "--world", 0)
    assert 'tp: not a flag; write name=value' in refused(template, "--flags", "tp")
    assert "has no layout" in refused(template, "--layouts", tmp_path / "none")
    assert "line 1" in refused(template, "--layouts", tmp_path / "words")
    for text, message in (("-1", "line 1: -1 ranks: must be from 1 to 64"), ("999 tp=2", "999 ranks"), ("\udcff", "as text")):
        (tmp_path / "wrong").write_text(text, errors="surrogateescape")
        assert message in refused(template, "--layouts", tmp_path / "wrong")
    assert "has no function step, parts" in refused(tmp_path / "empty.py")
    assert "--sweep tp: " in refused(template, "--sweep", "tp")
    assert "4x: not a layout; write the number of ranks" in refused(template, "--resume", "4x")
    (tmp_path / "three.py").write_text("build = step = parts = print\n")
    assert "has no function save, load" in refused(tmp_path / "three.py", "--resume", "2 tp=2")
    status, output, _ = prove(tmp_path / "x.py", tmp_path)
    assert status == 2 and output.startswith("error: ADAPTER.py ") and "Traceback" not in output


def test_the_template_has_every_function_and_every_adapter_the_three():
    for path in ADAPTERS.glob("*.py"):
        functions = set(re.findall(r"\b(build|step|parts)\b", path.read_text()))
        assert {"build", "step", "parts"} <= functions, path.name
    template = load_module(ADAPTERS / "template.py")
    names = "build", "step", "parts", "place", "modules", "save", "load", "loaded"
    assert all(getattr(template, name).__annotations__ for name in names)


# ------------------------------------------------------------------------------------------- in words
def words(places, holds=lambda place, name: True, **flags):
    names = ["embed.weight", "layers.0.a.weight", "layers.0.b.weight", "layers.1.a.weight", "layers.1.b.weight"]
    tensor = torch.ones(1)
    own = [[(name, (0,), tensor) for name in names if holds(place, name)] for place in places]
    run = Run([dict(place=place, steps=[], own=of) for place, of in zip(places, own)])
    return Words(run, names, flags, len(places), 8, 1e-4)


def test_factors_ranks_and_names_have_words():
    of = words([dict(tp=0, pp=0), dict(tp=1, pp=0), dict(tp=0, pp=1), dict(tp=1, pp=1)], acc=4)
    assert of.times(4) == "4 times the right ones (acc or ranks)"
    assert of.times(0.5) == "1/2 times the right ones (1/tp or pp or batch/acc)" and of.times(1) == "right"
    assert of.times(2**0.5) == "1.4142 times the right ones (root of tp or pp or batch/acc)"
    assert of.times(3.3) == "33/10 times the right ones" and of.times(49 / 36) == "1.3611 times the right ones"
    assert of.along([[0, 2], [1, 3]]) == "tp" and of.ranks({2, 3}) == "pp 1" and of.ranks({0, 3}) == "ranks 0, 3"
    assert of.ranks({1}) == "rank 1"
    assert of.which(["layers.0.a.weight", "layers.1.a.weight"]) == "layers.*.a"
    assert of.which(["layers.1.b.weight"]) == "layers.*.b of layer 1"
    assert of.which([f"layers.{i}.{name}.weight" for i in (0, 1) for name in "ab"]) == "all parameters but embed"
    stages = words([dict(pp=0), dict(pp=1)], lambda place, name: ("1" in name) == place["pp"])
    assert stages.which(["layers.1.a.weight", "layers.1.b.weight"]) == "all parameters of pp 1"
    assert stages.which(["layers.0.a.weight", "layers.0.b.weight"]) == "all parameters of layer 0 (pp 0)"
    assert ranges([0, 1, 2, 3, 6, 8, 9]) == "0 to 3, 6, 8, 9"


def test_a_norm_of_what_one_stage_holds_is_named():
    def ranks(norms, of):
        return Run([dict(place=dict(pp=pp, tp=tp, cp=0), own=of[pp], steps=[dict(norm=norm, weights=of[pp], gradients=of[pp])])
                    for norm, (pp, tp) in zip(norms, itertools.product(range(2), repeat=2))])
    first, second = [("a", (0,), torch.tensor([3.0]))], [("b", (0,), torch.tensor([4.0]))]
    trial = SimpleNamespace(start=dict(a=0, b=0), inside="float64", both={}, flags={}, world=4, inputs=torch.zeros(1, 2, 4))

    def find(norm):
        return Diagnosis(trial, ranks([norm] * 4, [first, second]), ranks([5.0], [first + second]), None, None).norm(0)
    found = find(3.0)
    assert find(5.0003).cause == "norm", "a little more than the whole is not what cp 0 holds"
    assert found.cause == "norm of a part" and found.seen == "the gradient norm: it is that of what pp 0 holds"


class Residual(torch.nn.Module):
    """A residual block. A rank of two has half of `up` and `down`, adds the other's half in forward, and nothing in backward."""

    def __init__(self, residual, rank=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, up, down, self.head = (cls(*size).double() for cls, *size in (
            (torch.nn.Embedding, 8, 4), (torch.nn.Linear, 4, 6), (torch.nn.Linear, 6, 4), (torch.nn.Linear, 4, 8)))
        self.residual, self.up, self.down = residual, up, down
        if rank is not None:
            self.up, self.down, half = torch.nn.Linear(4, 3), torch.nn.Linear(3, 4), slice(3 * rank, 3 * rank + 3)
            self.up.weight.data, self.up.bias.data = up.weight.data[half], up.bias.data[half]
            self.down.weight.data, self.down.bias.data = down.weight.data[:, half], down.bias.data
            self.down.register_forward_hook(lambda *_: _[2] + (down(up(self.x).relu()) - _[2]).detach())

    def forward(self, tokens):
        self.x = self.embed(tokens)
        return self.head(self.down(self.up(self.x).relu()) + self.x * self.residual)


@pytest.mark.parametrize("residual, place", [(0, ""), (1, "up")])
def test_a_wrong_backward_has_a_place_and_a_sum_that_is_still_partial_is_not_wrong(residual, place):
    tokens, targets = torch.arange(8).view(2, 4), torch.arange(8).flip(0)

    def seen(model, scale):
        with watch(SimpleNamespace(modules=lambda run: run.named_modules()), model, True) as activations:
            (torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets) * scale).backward()
        return dict(place={}, own=[], steps=[dict(activations=activations)])
    run, one = Run([seen(Residual(residual, rank), 4) for rank in range(2)]), Run([seen(Residual(residual), 1)])
    found, text = trace_back(run, one, (2, 4), 1e-7, words([dict(tp=0), dict(tp=1)]))
    assert found == place and ("in the backward of up: that of its output is right" in text) == bool(place)


@pytest.mark.parametrize("arrives, cause, text", [
    ([0, 1, 2, 3], "end of forward", "the loss; all activations are right"),
    ([0, 1, 1, 3], "sent", "from second.up on, no rank computes sequences 1 and positions 0 of 2, though"),
    ([0, 1, 2, None], "sent", "between first and second.up, on different ranks, for sequences 1 and positions 1 of 2 on pp 1")])
def test_what_is_sent_to_a_stage_is_told_from_what_the_stage_computes(arrives, cause, text):
    rows = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))       # between modules

    def calls(*modules):
        return dict(place={}, own=[], steps=[dict(activations={name: [(given, gives, None)] for name, given, gives in modules})])

    def second(received):
        inside = torch.stack([received @ weight for weight in rows[1:]])
        return [("second.up", received, inside[0]), ("second.down", inside[0], inside[1]), ("second", received, inside[1])]
    sent = rows[0]
    got = torch.stack([torch.zeros(4, dtype=torch.float64) if at is None else sent[at] for at in arrives])
    run = Run([calls(("first", sent, sent)), calls(*second(got))])
    found = trace(run, Run([calls(("first", sent, sent), *second(sent))]), (2, 2), 1e-7, words([dict(pp=0), dict(pp=1)]))
    assert found[0] == cause and text in found[2], found


def test_a_norm_that_is_equal_by_chance_does_not_set_its_limit():
    def of(*gradient):
        part = [("a", (0,), torch.tensor(gradient))]
        return Run([dict(place={}, own=part, steps=[dict(loss=1.0, norm=5.0, gradients=part, weights=part)])])
    limit, = limits(of(3.001, 3.999), of(3.0, 4.0), 1e-6)
    assert limit.norm > 1e-3


def test_small_gradients_are_explained_together():
    draw = torch.Generator().manual_seed(0)
    alone = [{name: torch.randn(6, generator=draw, dtype=torch.float64) for name in "abcd"} for _ in range(8)]
    counts = [4.0] * 4 + [2.0] * 4

    def one_rank(counts):
        gradients = [(name, (0,), sum(count * of[name] for count, of in zip(counts, alone))) for name in "abcd"]
        return Run([dict(place={}, own=gradients, steps=[dict(weights=gradients, gradients=gradients)])])
    trial = SimpleNamespace(start=dict.fromkeys("abcd"), dtype="float64", inside="float64", both={}, flags={}, world=1, mask=False,
                            same_rows=False,
                            inputs=torch.zeros(1, 8, 4), targets=torch.zeros(1, 8, 4),
                            known={(0, 1): [((0, i, 0), of) for i, of in enumerate(alone)]})
    limits = [Row(1e-9, 1e-9, dict.fromkeys("abcd", 1e-9), dict.fromkeys("abcd", 1e-9))]
    looks = Diagnosis(trial, one_rank(counts), one_rank([1.0] * 8), limits, None).looks(0, "gradients")
    assert {look.text for look in looks.values()} == {
        "those of a batch in which sequences 0 to 3 count 4 times, 4 to 7 count 2 times"} and [*looks] == [*"abcd"]


def test_rows_of_activations_are_found_whatever_their_order_and_columns():
    right = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert Seen([right[[3, 4, 5]], right[[2, 0, 1]]], right, 1e-7).right
    assert Seen([right[:, :2], right[:, 2:]], right, 1e-7).right
    half = Seen([right[[0, 1]], right[[0, 1]]], right, 1e-7)
    assert half.right and half.missing == {2, 3, 4, 5}
    wrong = Seen([right, right + (torch.arange(6) == 2)[:, None]], right, 1e-7)
    assert not wrong.right and wrong.wrong_ranks == [1]
    assert not Seen([None, right[:, :3]], right, 1e-7).known


def test_the_other_tests_say_why(capsys):
    """Check what make test and make check show of tensors that differ."""
    from harness import assert_same_tensors
    right = {f"model.layers.{i}.{name}.weight": torch.arange(1.0, 5.0) for i in (0, 1) for name in ("norm", "up_proj")}
    twice = {name: tensor * (2 if "norm" in name else 1) for name, tensor in right.items()}
    assert_same_tensors(right, right, 1e-9)
    with pytest.raises(AssertionError, match=r"model\.layers\.\*\.norm: 2 times the right ones \(tp\)"):
        assert_same_tensors(twice, right, 1e-9, "4 dense-2 sgd --tp 2 --zero 1")


MY_MODEL = '''
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class MyModel(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Embedding(64, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 64))

    def forward(self, inputs, targets):
        return torch.nn.functional.cross_entropy(super().forward(inputs).flatten(0, 1), targets.flatten())
'''


def as_a_user_does(words, folder, timeout):
    """Start Python anew, with a copy of the tool: it must import all that it needs."""
    return run([sys.executable, folder / "copy/prove", *map(str, words[1:])], folder, timeout)


def test_the_adapter_on_the_page_and_tools_are_all_of_it(tmp_path):
    """Check that nothing else of this repository is needed: somebody may copy tools/prove alone."""
    shutil.copytree(PROVE, tmp_path / "copy/prove")
    (shown,) = re.findall(r"```text\n(def build\(.*?)```", README, re.S)
    (tmp_path / "mine.py").write_text(MY_MODEL + shown)
    status, output, said = prove(tmp_path / "mine.py", tmp_path, "--world", 2, run=as_a_user_does)
    assert status == 0 and equal(said[0]), output
    assert "a rank holds 100% of the numbers, reads 50% of the tokens, and issues " in output
    assert "warning: every rank holds all of the numbers, as in DDP" in output
