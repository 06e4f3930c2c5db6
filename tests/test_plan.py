"""The planner: its constants are compared with the runs that they were fitted to, its exact part with the trainer's own files."""
import csv
import json
import math
import os
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers

import fit_plan
from fit_plan import DATA, NODES, ROOT

STEP, PLANNER = ROOT / "step08_5d", ROOT / "tools/plan"
sys.path[:0] = [str(STEP), str(PLANNER)]
import config
import costs
import explain
import measured
import models
import nanotron
import plan
import published
import schedules
import speed
import trainer
import trainers
import trust
from costs import Layout
from metrics import active_parameter_count
from model import Llama
from pipeline_parallel import stage_boundaries, local_stages
from steps import copy_repository
from steps import run as steps_run

TINY, MOE = models.PRESETS["tiny"], models.PRESETS["tiny-moe"]
CONSTANTS = trainers.constants_of(dict(time=speed.USUAL, slack=1.0))


def run(*flags):
    return subprocess.run([sys.executable, PLANNER, *map(str, flags)], capture_output=True, text=True, timeout=300)


# ------------------------------------------------------------------------------------------- a folder of its own
def test_it_runs_without_torch_wherever_it_is_copied_to_with_what_it_needs(tmp_path):
    for folder in (STEP, PLANNER):
        copy = tmp_path / "copy" / folder.relative_to(ROOT)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", "figures"))
    (tmp_path / "copy/tools/simulate").mkdir(parents=True)
    shutil.copy(ROOT / "tools/simulate/gpus.py", tmp_path / "copy/tools/simulate")
    for words in (["--config", "tp=2"], ["--html", "plan.html", "--config", "tp=2"]):
        command = [sys.executable, "-X", "importtime", "copy/tools/plan", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
        assert done.returncode == 0 and {"plan", "costs", "trainer"} <= loaded, done.stderr
        assert not {"torch", "numpy", "config", "schedules"} & loaded
    assert (tmp_path / "plan.html").exists()


def test_what_it_reads_of_the_trainer_is_the_trainers():
    for name, preset in config.PRESETS.items():
        shape = models.PRESETS[name]._asdict()
        fields = {field for field in shape if hasattr(preset, field)}
        assert fields >= {"vocab_size", "intermediate_size", "num_hidden_layers", "head_dim", "num_local_experts", "qk_norm"}
        assert {field: shape[field] for field in fields} == {field: getattr(preset, field) for field in fields}
    assert plan.SCHEDULES.keys() == schedules.SCHEDULES.keys() and models.TRAINED == (*config.FAMILIES,)
    for name, row in schedules.SCHEDULES.items():
        here = plan.SCHEDULES[name]
        assert here.min_micro_batches(4) == row.min_micro_batches(4) and here[1:-1] == row[1:-1]


@pytest.mark.parametrize("name", config.PRESETS)
def test_a_presets_parameters_are_the_models(name):
    with torch.device("meta"):
        params = dict(Llama(config.PRESETS[name]).named_parameters())
    c, l = models.PRESETS[name], Layout()
    total = sum(param.numel() for param in params.values())
    assert costs.model_parameters(c) == costs.parameters(c, l, costs.our_stages(c, l)[0]) == total
    assert costs.model_parameters(c, active=True) == active_parameter_count(config.PRESETS[name])
    block = {key.removeprefix("model.layers.0."): param.numel() for key, param in params.items() if "layers.0." in key}
    assert [size for size, _ in costs.block_tensors(c, l)] == [size for key, size in block.items() if ".experts." not in key]


# ------------------------------------------------------------------------------------------- the fit
@pytest.fixture(scope="module")
def rows():
    return fit_plan.load()


@pytest.fixture(scope="module")
def fitted(rows):
    return fit_plan.fit_all(rows, start=(nanotron.TIME, nanotron.MEMORY))


def test_the_constants_are_those_that_the_fit_gives(fitted):
    assert fitted[2] == pytest.approx(speed.USABLE, rel=0.05)
    for known, found in zip((nanotron.TIME, nanotron.MEMORY), fitted):
        assert set(known) == set(found)
        assert {name: found[name] / known[name] for name in known} == pytest.approx(dict.fromkeys(known, 1.0), rel=0.05)


def test_constants_are_judged_as_they_were_fitted_and_as_the_planner_predicts(rows):
    judged = fit_plan.predictions(rows, (nanotron.TIME, nanotron.MEMORY, speed.USABLE))
    assert judged == [{**row, **nanotron.predict(row)} for row in rows]
    assert fit_plan.score(judged)["tok median"] == pytest.approx(0.045, abs=0.002)


@pytest.fixture(scope="module")
def folds(rows, fitted):
    return fit_plan.leave_out(rows, fitted)


@pytest.mark.slow
def test_each_number_of_nodes_is_predicted_by_the_others(rows, folds):
    held_out = []
    for nodes in NODES:
        held_out += fit_plan.predictions([row for row in rows if int(row["nodes"]) == nodes], folds[nodes])
    result = fit_plan.score(held_out)
    assert result["runs"] == 667
    assert result["mem median"] <= 0.0445 and result["mem mean"] <= 0.0685 and result["oom"] >= 0.966
    assert result["tok median"] <= 0.053 and result["tok mean"] <= 0.105 and result["rank corr"] >= 0.965
    clear = fit_plan.score([row for row in held_out if row["code"] == "new" or row["status"] != "ok"])
    assert clear["tok median"] <= 0.049 and clear["tok mean"] <= 0.078
    assert result["regret"] <= 0.052                          # the aim was 0.01; it is missed because of one disturbed run
    others = fit_plan.score(fit_plan.undisturbed(held_out))
    assert others["runs"] == 666 and others["regret"] <= 0.012 and others["worst"] <= 0.05


def test_published_runs():
    """Check the published runs that nothing was fitted to: four of five are inside their interval, A100s are as fast as published
    in the median, and half of Megatron's runs are within 15%."""
    judged = [run for run in fit_plan.planned() if not run["fitted"]]
    inside = statistics.fmean(run["low"] <= run["published"] <= run["high"] for run in judged)
    assert len(judged) > 40 and 0.75 <= inside <= 0.90, inside
    ratio = lambda some: [run["planned"] / run["published"] for run in judged if some(run)]
    assert 0.95 <= statistics.median(ratio(lambda run: run["gpu"].lower() == "a100")) <= 1.05
    assert statistics.median(abs(one - 1) for one in ratio(lambda run: run["model"].startswith("gpt-"))) <= 0.15
    assert statistics.median(abs(one - 1) for one in ratio(lambda run: True)) <= 0.08


def test_interleaving_gains_what_was_published():
    """Compare torchtitan's 405B with and without interleaving."""
    without, interleaved = (run["planned"] for run in fit_plan.planned() if run["model"] == "llama-405b" and run["gpus"] == "512")
    assert interleaved / without == pytest.approx(1.28, abs=0.05)


def test_llama_3s_own_layout_fits_its_own_kind_of_trainer():
    c, l = models.PRESETS["llama-405b"], Layout(dp=128, tp=8, pp=16, zero=1, schedule="interleaved", virtual=4, seq_len=8192,
                                                accumulation=16)
    held = [sum(plan.memory(c, l._replace(wide=wide)).values()) for wide in (4, 2)]
    assert held[1] < plan.limit(speed.Cluster(16384)) < held[0]


@pytest.mark.parametrize("model, wide, peak", [("llama-1b", 4, 50.36), ("llama-1b", 3, 45.87), ("qwen3-0.6b", 4, 36.60),
                                               ("qwen3-0.6b", 3, 33.54)])
def test_memory_is_that_of_an_h200(model, wide, peak):
    """Compare with the peaks that docs/gpus.md reports; 3 wide tensors are saved with --compile."""
    planned = sum(plan.memory(models.PRESETS[model], Layout(micro_batch=4, accumulation=4, seq_len=4096, wide=wide)).values())
    assert planned == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("layout, gpu, limit", [
    ("dp=8,zero=3,recompute=selective", "h100", 0.1), ("tp=2,zero=1,acc=4", "a100", 0.1), ("tp=2,pp=2,zero=1,acc=4", "h100", 0.1),
    ("cp=4,zero=1", "h100", 0.1), ("zero=0,acc=2", "a100", 0.1)])
def test_its_seconds_are_the_simulators(pool, tmp_path, layout, gpu, limit):
    """Compare with the simulator, for a layout of 8 GPUs. Both use the same facts and differ only in how they add up waits."""
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["dense"], "hidden_size": 4096, "intermediate_size": 14336}))
    c, cluster = models.load(str(tmp_path)), speed.Cluster(8, speed.GPUS[gpu])
    l = plan.parse_config(layout, c, cluster, 8192, 8)
    flags = shlex.split(explain.train_flags(str(tmp_path), l, 1, 1e-3))
    simulated, = pool.call(simulated_job, "step08_5d", world=1, timeout=300, argv=flags, gpu=gpu)
    planned = sum(speed.step_seconds(c, l, cluster, costs.our_stages(c, l)).values())
    assert planned == pytest.approx(simulated, rel=limit)


def simulated_job(argv, gpu):
    from simulate import gpus
    from simulate.play import Player
    from simulate.ranks import Ranks, look
    from simulate.record import record
    ranks = Ranks(look(argv, 8, 0), 0)
    recordings = {rank: record(argv, 8, rank) for rank in ranks.recorded}
    return Player(recordings, gpus.Cluster(gpus.GPUS[gpu]), ranks.stands_for, ranks.stage_of).play().seconds


def test_empty_stages_are_seen(rows):
    empty = [row for row in rows if nanotron.benchmark_run(row)[3] is None]
    assert len(empty) == 75 and {row["status"] for row in empty} == {"failed"}


# ------------------------------------------------------------------------------------------- the exact part
def flops(c, l, stage):
    """Return the FLOPs of a rank in a training step: matrix products take 6 per weight and token, and causal attention, which
    computes its scores twice, takes 7 products of [seq, seq], halved. Recomputation repeats a part of forward."""
    tokens, h = l.tokens * l.accumulation, c.hidden_size
    scores = tokens * l.seq_len * c.num_attention_heads * c.head_dim // l.tp * stage.layers
    layer = 6 * sum(costs.product_widths(c, l)) + 2 * costs.repeated(c, l)
    weights = stage.layers * layer + stage.head * 6 * c.vocab_size // l.tp
    return tokens * h * weights + (9 if l.recompute == "full" else 7) * scores


@pytest.mark.parametrize("model", config.PRESETS)
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_layers_per_stage(model, stages):
    assert costs.stage_boundaries(models.PRESETS[model], stages) == stage_boundaries(config.PRESETS[model], stages)


@pytest.mark.parametrize("schedule", plan.SCHEDULES)
@pytest.mark.parametrize("pp, m", [(2, 4), (4, 8), (4, 16), (3, 7)])
def test_what_a_schedule_keeps(schedule, pp, m):
    l = Layout(pp=pp, schedule=schedule, accumulation=m)
    lists = schedules.make(schedule, pp, m, l.stages_per_rank)
    in_flight = [schedules.max_in_flight(actions) for actions in lists]
    assert [costs.in_flight(l, rank) * l.stages_per_rank for rank in range(pp)] == in_flight
    for rank in range(pp):
        mesh = SimpleNamespace(get_local_rank=lambda name: rank)
        args = SimpleNamespace(pp=pp, stages_per_rank=l.stages_per_rank, schedule=schedule)
        assert costs.local_stages(l, rank) == local_stages(mesh, args)


@pytest.mark.parametrize("schedule", plan.SCHEDULES)
def test_without_formulas_lists_are_counted_and_simulated(monkeypatch, schedule):
    """Check that a schedule without formulas is planned from its lists, and that formulas give the memory and the bubble of the
    lists."""
    draw, asked = random.Random(3), []
    while len(asked) < 60:
        c = models.PRESETS[draw.choice(["llama-8b", "llama-70b", "qwen3-8b", "qwen3-30b-a3b"])]
        l = Layout(dp=4, tp=draw.choice([1, 4]), pp=draw.choice([2, 4, 8, 16]), zero=draw.choice([0, 1, 2, 3]), schedule=schedule,
                   virtual=draw.choice([2, 3]), recompute=draw.choice(plan.RECOMPUTE), accumulation=draw.choice([4, 8, 13, 32, 64]))
        if plan.impossible(c, l) is None:
            asked.append((c, l))

    def found():
        for c, l in asked:
            stages, times = costs.our_stages(c, l), speed.Times(c, l, speed.Cluster(l.gpus), speed.USUAL)
            held = [sum(costs.our_memory(c, l, rank, stage).values()) for rank, stage in enumerate(stages)]
            idle = speed.idle_share(l, times.F, times.I, times.W) * (l.pp - 1) / l.accumulation      # relative to the step's work
            yield [costs.in_flight(l, rank) for rank in range(l.pp)], held, sum(plan.memory(c, l).values()) * costs.GIB, idle
    by_formula = list(found())
    monkeypatch.delitem(costs.FORMULAS, schedule, raising=False)
    for (kept, held, fullest, idle), (counted, followed, fullest_of_all, simulated) in zip(by_formula, found()):
        assert kept == counted and idle == pytest.approx(simulated, abs=0.025)
        assert followed == pytest.approx(held, rel=0.02) and fullest_of_all == max(followed)
        assert fullest == pytest.approx(max(held), rel=1e-12)


def test_what_is_timed_is_the_default_and_what_is_better():
    """Check that AFAB is not timed: it idles as long as 1F1B and keeps more."""
    first, *others = plan.worth_timing()
    assert first == costs.DEFAULT_SCHEDULE == "1f1b" and first not in others
    assert {"interleaved", "zerobubble", "dualpipe"} <= {*others} <= plan.SCHEDULES.keys() - {"afab"}


def persists(l, c=TINY, number=costs.BF16):
    kinds = costs.our_memory(c, l, 0, costs.our_stages(c, l)[0], number)
    return tuple(kinds[kind] for kind in ("parameters", "gradients", "optimizer states"))


def test_zero_cuts_what_step_3_says():
    parameters = 427_072                                  # the table in step03_zero/README.md, bfloat16 and float32
    assert costs.model_parameters(TINY) == costs.parameters(TINY, Layout(), costs.our_stages(TINY, Layout())[0]) == parameters
    assert persists(Layout(dp=4)) == (854_144, 1_708_288, 5_124_864)
    assert persists(Layout(dp=4, zero=1)) == (854_144, 1_708_288, 1_281_216)
    assert persists(Layout(dp=4, zero=2)) == (854_144, 427_072, 1_281_216)
    assert persists(Layout(dp=4, zero=3)) == (213_536, 427_072, 1_281_216)
    assert persists(Layout(dp=4, zero=3), number=4) == (427_072, 427_072, 854_144)
    assert sum(persists(Layout(dp=3, zero=3), number=4)) >= 16 * parameters / 3                     # units are padded


def test_tp_cuts_what_step_4_says():
    """Compare the parameters of a layer, and the numbers that it keeps per token, with step04_tp_sp/README.md."""
    assert [costs.dense_layer(TINY, Layout(tp=tp)) for tp in (1, 2, 4, 8)] == [49_280, 24_704, 12_416, 6_784]
    for tp, numbers in ((1, 1354), (2, 677), (4, 338.5), (8, 177.25)):
        l = Layout(tp=tp, seq_len=64)
        assert costs.kept(TINY, l, number=4, fused_norm=False) == 64 * 4 * numbers


def test_recomputation_keeps_what_step_1_says():
    c = TINY._replace(hidden_size=128, num_attention_heads=8, head_dim=16, num_key_value_heads=4, intermediate_size=192)
    # plus 4 bytes for each head and each norm
    for mode, expected in (("none", 4864 + 40), ("selective", 2304 + 32), ("full", 256)):
        assert costs.kept(c, Layout(seq_len=1, recompute=mode), costs.BF16, fused_norm=False) == expected


def test_memory_falls_with_every_degree():
    c = models.PRESETS["llama-8b"]
    def need(**cut):
        return sum(plan.memory(c, Layout(**{**dict(dp=8, accumulation=8), **cut})).values())
    assert need() > need(zero=1) > need(zero=2) > need(zero=3)
    assert need() > need(tp=2) > need(tp=4) and need(zero=1) > need(zero=1, cp=2)
    assert need() > need(pp=2) > need(pp=4)
    assert need(micro_batch=2) > need() > need(recompute="selective") > need(recompute="full")
    m = models.PRESETS["mixtral-8x7b"]
    assert plan.memory(m, Layout(dp=8))["parameters"] > 4 * plan.memory(m, Layout(dp=8, ep=8))["parameters"]


WIDE = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
            vocab_size=64000)
SHAPES = {"dense": dict(model_type="llama", **WIDE), "qk_norm": dict(model_type="qwen3", head_dim=256, **WIDE),
          "moe": dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, **WIDE)}


# The order is fixed, so that a new schedule does not change the drawn layouts. Not every layout is within the limits of the dry-run
# test: of other layouts, about one in twenty was off by more, mostly rank 0 of a pipeline with ZeRO-2 or 3, by up to -9%.
DRAWN = ("1f1b", "interleaved", "zerobubble", "dualpipe", "afab")


def drawn(c, count, draw):
    """Draw layouts of up to 64 ranks, and a rank of each: the last one in cp, because in a ring it keeps the most."""
    found = []
    while len(found) < count:
        cluster = speed.Cluster(draw.choice([8, 16, 32, 64]))
        mesh = draw.choice([mesh for mesh in plan.meshes(c, cluster, 8192) if mesh.tp <= 8])
        l = mesh._replace(zero=draw.choice([0, 1, 2, 3]) if mesh.dp * mesh.cp > 1 else 0,
                          schedule=draw.choice(DRAWN) if mesh.pp > 1 else "1f1b", recompute=draw.choice(plan.RECOMPUTE),
                          micro_batch=draw.choice([1, 2]), accumulation=draw.choice([1, 2, 4]), virtual=2 + len(found) % 2)
        if plan.impossible(c, l) is None:
            rank = draw.randrange(l.pp), draw.randrange(l.dp)
            found.append((l, *rank, rank[0] * (l.gpus // l.pp) + rank[1] * l.cp * l.tp + (l.cp - 1) * l.tp))
    return found


def dry_runs_job(model, layouts):
    """Record this worker's share of the layouts. Return what one rank of each layout sees."""
    from simulate.record import record
    found = {}

    def note(seen, model, optimizer, mesh):
        seen.tensors = sum(len(group["params"]) for group in optimizer.adamw.param_groups)
    for i in range(int(os.environ["RANK"]), len(layouts), int(os.environ["WORLD_SIZE"])):
        l, _, _, rank = layouts[i]
        seen = record(shlex.split(explain.train_flags(model, l, 1, 1e-3)), l.gpus, rank, note)
        payload = {what: sizes[1] for what, sizes in seen.sent.items()}
        found[i] = seen.between, sum(seen.peak.values()), seen.flops, payload, seen.tensors
    return found


def by_collective(payload):
    """Add up payloads that the ledger cannot tell apart, because groups of the same ranks share a name in it. Only tp, and pp among
    the sends, keep their names; all-reduces become one sum."""
    found = Counter()
    for (dimension, collective), size in payload.items():
        told = dimension if collective == "send" or dimension == "tp" and collective != "all_reduce" else ""
        found["cp" if collective == "send" and dimension != "pp" else told, collective] += size
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind, count, seed", [
    ("moe", 22, 22), *(pytest.param(*case, marks=pytest.mark.sweep) for case in [("dense", 28, 28), ("qk_norm", 12, 28)])])
def test_what_a_dry_run_sees(pool, tmp_path, kind, count, seed):
    """Compare the planner with dry runs. QK-norm is tested in layouts that the dense model has as well: only the norms differ."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[kind]))
    c = models.load(str(tmp_path))
    layouts, errors, missed = drawn(c, count, random.Random(seed)), [], {}
    answers = pool.call(dry_runs_job, "step08_5d", world=2, timeout=900, model=str(tmp_path), layouts=layouts)
    seen = {i: one for answer in answers for i, one in answer.items()}
    for i, (l, pp, dp, rank) in enumerate(layouts):
        between, peak, multiplied, payload, tensors = seen[i]
        stage = costs.our_stages(c, l)[pp]
        said = costs.our_memory(c, l, pp, stage)
        kept = between["parameters"], between["gradients"], between["optimizer states"]
        assert kept == (said["parameters"], said["gradients"], said["optimizer states"] + 4 * tensors), l
        assert multiplied == flops(c, l, stage), l
        scalars = {("", "all_reduce"): 4 + 4 + 8 * bool(c.num_local_experts)}       # loss, norm, balance
        assert by_collective(payload) == by_collective(costs.sent(c, l, pp, part=dp * l.cp + l.cp - 1)) + Counter(scalars), l
        errors.append(sum(said.values()) / peak - 1)
        if not -plan.MEMORY_ERROR < errors[-1] < 0.06:
            missed[explain.train_flags("model", l, 1, 1e-3), rank] = round(errors[-1], 3)
    assert len(errors) == count and statistics.fmean(map(abs, errors)) < 0.012
    assert not missed


def test_payloads_by_hand():
    stream = 4 * 32 * 64 * 2                              # 4 sequences of 32 tokens in bfloat16
    l = dict(micro_batch=2, accumulation=2, seq_len=32)
    assert costs.sent(TINY, Layout(**l)) == {("dp", "all_reduce"): 4 * 427_072}
    assert costs.sent(TINY, Layout(dp=4, zero=1, **l)) == {("dp", "reduce_scatter"): 4 * 427_072, ("dp", "all_gather"): 2 * 427_072}
    rest = 427_072 - 2 * 256 * 64 - 64 - 49_280           # stage 3 gathers all but the ends and the last block once more
    assert costs.sent(TINY, Layout(dp=4, zero=3, **l)) == {
        ("dp", "reduce_scatter"): 2 * 4 * 427_072, ("dp", "all_gather"): 2 * 2 * (427_072 + rest)}
    tp = costs.sent(TINY, Layout(tp=2, **l))
    assert tp["tp", "all_gather"] == (6 * 8 + 2) * stream and tp["tp", "reduce_scatter"] == (4 * 8 + 2) * stream
    assert tp["tp", "all_reduce"] == 3 * 4 * 32 * 4 + 4 * 17 * 64
    cp = costs.sent(TINY, Layout(cp=4, **l))["cp", "send"]
    assert cp == 8 * (2 * 3 * 2 + 4 * 4) * 2 * 4 * 8 * (4 * 32 // 4)                # step 5: (2 (c - 1) e + c x) K in each layer
    borders = [[costs.sent(TINY, Layout(pp=4, schedule=s, **{**l, "accumulation": 8}), r)["pp", "send"] // (4 * stream)
                for r in range(4)] for s in ("1f1b", "interleaved", "dualpipe")]
    assert borders == [[1, 2, 2, 1], [3, 4, 4, 3], [2, 4, 4, 2]]                    # step 6's table
    tokens, counts = 4 * 8 * 2 * stream, 2 * 8 * 8 * 8    # counts: how many tokens come, for 8 experts, in 8 layers, twice
    assert costs.sent(MOE, Layout(dp=4, ep=4, **l))["ep", "all_to_all"] == tokens + counts


def test_flops_follow_the_rule_of_six():
    c = models.PRESETS["llama-8b"]
    stage = costs.our_stages(c, Layout())[0]
    products = 6 * (costs.model_parameters(c) - c.vocab_size * c.hidden_size - 65 * c.hidden_size)  # no embedding, no norms
    scores = 7 * 32 * 4096 * 4096
    assert flops(c, Layout(), stage) == 4096 * (products + scores)


def test_experts_are_reduced_among_their_copies():
    """Check dp 64 with ep 8, where every eighth rank has the same experts: each of their rings leaves the node by one network
    card."""
    cluster, k = speed.Cluster(64), speed.USUAL
    network, nvlink = cluster.network * speed.gpus.NETWORK, cluster.gpu.nvlink * speed.gpus.NVLINK
    assert speed.ring_seconds(cluster, k, 1e9, 8, 8) == pytest.approx(1e9 * 7 / 8 / network)
    assert speed.ring_seconds(cluster, k, 1e9, 64, 1) == pytest.approx(1e9 * 63 / 64 / min(8 * network, nvlink))
    c, l = models.PRESETS["mixtral-8x7b"], Layout(dp=64, ep=8)
    stage = costs.our_stages(c, l)[0]
    near, far = (speed.data_parallel_seconds(c, l._replace(ep=ep), cluster, stage, k, 0, 0)["dp"] for ep in (1, 8))
    assert far == pytest.approx(near, rel=0.25)           # an eighth of the experts, at an eighth of the speed


# ------------------------------------------------------------------------------------------- the search
@pytest.mark.slow
def test_all_layouts_of_1024_gpus():
    """Check how many layouts the search looks at, one by one. This is a count, not a time."""
    c, cluster = models.PRESETS["llama-8b"], speed.Cluster(1024)
    search = plan.Search(c, cluster, 4096, 1024, CONSTANTS)
    assert 10_000 < len(search.ordered) < 50_000
    layouts = [one.layout for one in search.ordered]
    assert all(l.gpus == 1024 and l.dp * l.micro_batch * l.accumulation == 1024 for l in layouts)
    ranked = [float(f"{one.held_back:.4g}") for one in search.ordered]             # among equals, the simplest comes first
    assert ranked == sorted(ranked, reverse=True)
    best = search.best()
    assert len(best) == 8 and all(plan.fits(one.held, cluster) for one in best)


def test_the_batch_is_the_same_for_all():
    asked = (1024, 64), (976.6, 64), (488.3, 512), (61, 1024), (1, 8), (976, 48)
    assert [plan.batch_near(wanted, gpus) for wanted, gpus in asked] == [1024, 1024, 512, 64, 1, 960]


@pytest.mark.parametrize("model, gpus, seq_len", [
    ("llama-1b", 64, 4096), ("llama-8b", 64, 8192), ("llama-70b", 256, 4096), ("mixtral-8x7b", 64, 4096)])
def test_what_is_unmeasured_leads_by_more_than_it_may_be_off(model, gpus, seq_len):
    c, cluster = models.PRESETS[model], speed.Cluster(gpus)
    best = plan.Search(c, cluster, seq_len, 512, CONSTANTS).best()
    ranked = [one.held_back for one in best]
    assert ranked == pytest.approx([one.tokens_per_s * math.exp(trust.off_by(c, one.layout, cluster, experts=False)[0])
                                    for one in best], rel=1e-6)
    assert max(ranked) <= ranked[0] * 1.001
    assert len({one.layout.dp * one.layout.micro_batch * one.layout.accumulation for one in best}) == 1


def test_what_is_taken_off_is_said_of_both():
    """Check that the explanation says of both layouts how much lower than computed they are ranked: dp with ZeRO alone is slower by
    estimate, but ranks before a layout whose kind was never measured."""
    c, cluster = models.PRESETS["llama-70b"], speed.Cluster(64)
    best = plan.evaluate(c, Layout(dp=64, zero=3, recompute="full", micro_batch=4), cluster, CONSTANTS)
    other = plan.evaluate(c, Layout(dp=4, tp=4, pp=4, zero=1, schedule="zerobubble", accumulation=64), cluster, CONSTANTS)
    assert best.tokens_per_s < other.tokens_per_s and best.held_back > other.held_back
    low = [100 * (1 - math.exp(trust.off_by(c, one.layout, cluster)[0])) for one in (other, best)]
    said = explain.why_not("X", best, other)
    assert [float(x) for x in re.findall(r"(\d+)%(?! faster)", said.split("(")[1])] == pytest.approx(low, abs=0.5)
    assert low[0] > low[1] > 10


def test_how_it_is_known():
    def said(model, gpus, **degrees):
        trainer = degrees.pop("trainer", "this")
        return trust.provenance(models.PRESETS[model], Layout(dp=gpus, **degrees), speed.Cluster(gpus), trainer)
    assert {said("llama-8b", 256), said("llama-70b", 64, zero=3), said("llama-8b", 64, trainer="megatron")} == {"elsewhere"}
    assert {said("llama-8b", 64, trainer="megatron", zero=1), said("llama-8b", 64, trainer="torchtitan", zero=3)} == {"measured"}
    assert {said("llama-8b", 2**15), said("tiny", 8), said("llama-8b", 8, seq_len=65536)} == {"extrapolated"}
    assert {said("mixtral-8x7b", 64), said("llama-8b", 64, cp=2), said("llama-8b", 64, zero=2)} == {"physics only"}
    narrow, wide = (trust.off_by(models.PRESETS[name], Layout(dp=64), speed.Cluster(64)) for name in ("llama-8b", "mixtral-8x7b"))
    assert wide[0] < narrow[0] < 0 < narrow[1] < wide[1]


@pytest.mark.slow
def test_what_is_said_to_fit_fits_on_every_rank():
    """Draw 10,000 layouts and check all ranks of each: the search checks only those that may be the fullest."""
    draw, said, looked_at = random.Random(8), Counter(), 0
    while looked_at < 10_000:
        c = models.PRESETS[draw.choice(["llama-8b", "llama-70b", "mixtral-8x7b"])]
        cluster = speed.Cluster(draw.choice([16, 64, 256, 512]))
        mesh = draw.choice(list(plan.meshes(c, cluster, 4096)))
        for _ in range(100):
            m = draw.choice([1, 2, 4, 8, 16, 32, 64])
            l = mesh._replace(zero=draw.choice([0, 1, 2, 3]) if mesh.dp * mesh.cp > 1 else 0,
                              schedule=draw.choice(DRAWN),
                              virtual=draw.choice([2, 4]), recompute=draw.choice(plan.RECOMPUTE),
                              micro_batch=draw.choice([1, 2, 4]), accumulation=m)
            if plan.impossible(c, l):
                continue
            looked_at += 1
            stages = costs.our_stages(c, l)
            worst = max(sum(costs.our_memory(c, l, rank, stages[rank]).values()) for rank in range(l.pp)) / costs.GIB
            assert sum(plan.memory(c, l).values()) == pytest.approx(worst, rel=1e-12)       # memory() looks at some ranks only
            said[worst * (1 + plan.MEMORY_ERROR) <= plan.limit(cluster)] += 1
    assert min(said.values()) > 1000


# ------------------------------------------------------------------------------------------- the bubble
def test_the_bubble_is_the_simulators():
    draw, worst = random.Random(6), Counter()
    for _ in range(300):
        c = models.PRESETS[draw.choice(["llama-1b", "llama-8b", "llama-70b", "llama-405b"])]
        schedule, p = draw.choice([*plan.SCHEDULES]), draw.choice([2, 3, 4, 6, 8])
        m = max(schedules.SCHEDULES[schedule].min_micro_batches(p), draw.choice([1, 2, p - 1, p, 2 * p + 1, 4 * p, 6 * p]))
        l = Layout(pp=p, tp=draw.choice([1, 8]), schedule=schedule, accumulation=m, seq_len=draw.choice([2048, 8192, 131072]),
                   recompute=draw.choice(plan.RECOMPUTE), virtual=draw.choice([2, 3, 5]))
        times = speed.Times(c, l, speed.Cluster(8 * p), speed.USUAL)
        F, I, W = (of / l.stages_per_rank for of in (times.F, times.I, times.W))
        events = schedules.simulate(schedules.make(schedule, p, m, l.stages_per_rank), F, I, W)
        whole = max(event.end for event in events)
        idle = speed.idle_share(l, times.F, times.I, times.W) * (p - 1) * (times.F + times.I + times.W)
        worst[schedule] = max(worst[schedule], abs(statistics.fmean(schedules.bubble(events)) - idle) / whole)
    assert worst.keys() == plan.SCHEDULES.keys() and max(worst.values()) <= 0.03, worst
    assert max(worst[name] for name in ("1f1b", "afab", "interleaved")) < 1e-9


def test_a_stages_times_are_its_shape():
    """Check that attention's backward has 5/2 of its forward's FLOPs, at its own share of the peak, and that full
    recomputation adds a forward pass."""
    c, cluster = models.PRESETS["llama-8b"], speed.Cluster(8)
    plain, again = (speed.Times(c, Layout(recompute=mode), cluster, speed.USUAL) for mode in ("none", "full"))
    down = 4096 * 14336 / (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)         # not recomputed, as nobody needs its output
    assert 1 - down < (again.I - plain.I) / plain.F < 1 and (again.F, again.W) == (plain.F, plain.W)
    forward, backward = cluster.gpu.attention
    assert plain.layer["attention"][1] / plain.layer["attention"][0] == pytest.approx(5 / 2 * forward / backward)
    products = sum(sum(plain.layer[kind]) for kind in ("products", "kernels", "shape"))
    ideal = 6 * 4096 * 4096 * sum(costs.product_widths(c, Layout())) / cluster.gpu.peak("bfloat16")
    assert 1 < products * cluster.gpu.product / ideal < 1.1


def test_a_ring_slows_with_the_nodes_that_it_spans():
    """Check that the same ring costs the same in a larger cluster, and the same collective costs the same in every ZeRO stage."""
    k, l = speed.USUAL, Layout(dp=8, tp=8)
    c = models.PRESETS["llama-8b"]
    stage = costs.our_stages(c, l)[0]
    few, many = (speed.data_parallel_seconds(c, l, speed.Cluster(gpus), stage, k, 0, 0)["dp"] for gpus in (64, 4096))
    assert few == many
    congested = nanotron.OTHERWISE | nanotron.TIME
    longer = [speed.ring_seconds(speed.Cluster(8192), congested, 1e9, ranks, 8) * ranks / (ranks - 1) for ranks in (2, 4, 8, 16)]
    steps = [b - a for a, b in zip(longer, longer[1:])]
    assert steps == pytest.approx([steps[0]] * 3) and steps[0] > 0
    none, one, two = (speed.data_parallel_seconds(c, l._replace(zero=zero, accumulation=1), speed.Cluster(64), stage, k, 0, 0)["dp"]
                      for zero in (0, 1, 2))
    assert one == pytest.approx(two, rel=0.01)            # except for the buffers that stage 2 allocates
    assert none > one                                     # ZeRO gathers bfloat16, an all-reduce float32
    beyond = Layout(dp=4, tp=16)
    here, there = (speed.Times(c, beyond, speed.Cluster(gpus), k).layer["tp"] for gpus in (64, 4096))
    assert here == there


@pytest.mark.parametrize("ranks, stride, gpus, nodes, neighbours", [
    (8, 1, 64, 1, 8), (2, 4, 64, 1, 2), (16, 1, 64, 2, 8), (8, 8, 64, 8, 1), (3, 1, 24, 3, 1), (6, 1, 24, 3, 2),
    (3, 1, 3, 1, 3), (3, 2, 6, 1, 3)])
def test_a_ring_that_does_not_fill_nodes_leaves_them(ranks, stride, gpus, nodes, neighbours):
    """Check for example tp 3 on nodes of eight, where ranks 6, 7 and 8 are on two nodes."""
    cluster = speed.Cluster(gpus)
    assert speed.span(cluster, ranks, stride) == (neighbours, nodes)
    _, found = speed.send(cluster, speed.USUAL, 1e9, ranks, stride, "all_gather")
    nvlink, network = cluster.gpu.nvlink * speed.gpus.NVLINK, cluster.network * speed.gpus.NETWORK
    assert found == pytest.approx(1e9 / (min(neighbours * network, nvlink) if nodes > 1 else nvlink))


@pytest.mark.parametrize("model", ["llama-8b", "llama-70b", "llama-405b"])
def test_no_more_is_hidden_than_there_is_work(model):
    """Check that the part of ZeRO's communication that nobody waits for takes no longer than the micro-batches that hide it."""
    c, k, draw, seen = models.PRESETS[model], speed.USUAL, random.Random(5), set()
    for _ in range(300):
        schedule, v = draw.choice([("1f1b", 2), ("interleaved", 2), ("interleaved", 8), ("dualpipe", 2)])
        l = Layout(dp=draw.choice([8, 256]), tp=8, pp=draw.choice([2, 4]), zero=draw.choice([2, 3]), schedule=schedule, virtual=v,
                   accumulation=draw.choice([8, 16]), micro_batch=1)
        cluster = speed.Cluster(l.gpus)
        stages = costs.our_stages(c, l)
        seconds, windows = speed.of_micro_batches(c, l, cluster, stages, k, speed.Times(c, l, cluster, k))
        sent, waited = (speed.data_parallel_seconds(c, l, cluster, stages[0], k, *some)["dp"] for some in ([0, 0], windows))
        assert sent - waited <= 1.5 * (l.accumulation + l.pp - 1) * windows[0] * k["overlap"] * 1.01
        seen.add(sent - waited > l.accumulation * windows[0] * k["overlap"] / 4)
    assert True in seen                                   # some of the layouts hide a lot


def test_seconds_add_up():
    """Check that the parts of a step have names, and that the slowest rank's time is the average plus the imbalance."""
    c, cluster = models.PRESETS["llama-8b"], speed.Cluster(64)
    l = Layout(dp=4, tp=2, pp=8, zero=1, accumulation=16)
    seconds = plan.evaluate(c, l, cluster, CONSTANTS).seconds
    assert set(seconds) <= set(speed.KINDS) and min(seconds.values()) >= 0
    times, stages = speed.Times(c, l, cluster, speed.USUAL), costs.our_stages(c, l)
    busy = [stage.layers * times.of_layer + stage.head * times.of_head + stage.embedding * times.embedding for stage in stages]
    slowest = max(speed.soft_max(gpu, stage.layers * times.launches) for gpu, stage in zip(busy, stages))
    work = sum(s for name, s in seconds.items() if name not in ("bubble", "pp", "dp", "optimizer", "other"))
    assert work == pytest.approx(16 * slowest)


def test_mfu_in_each_convention():
    c, cluster = models.PRESETS["llama-8b"], speed.Cluster(8)
    one = plan.evaluate(c, Layout(dp=8), cluster, CONSTANTS)
    found = explain.mfus(c, one, cluster)
    per_token = [6 * costs.model_parameters(c) + scores * 32 * 4096 * 4096 - ends * 6 * 128256 * 4096
                 for scores in (12, 6) for ends in (0, 1)]
    assert list(found.values()) == pytest.approx([one.tokens_per_s * flops / 989.5e12 for flops in per_token])


def test_no_layout_is_refused_by_the_trainer(monkeypatch):
    c, cluster = MOE, speed.Cluster(16)
    seen = [one.layout for one in plan.timed(c, cluster, 4096, 64, CONSTANTS)]
    assert len(seen) > 500
    monkeypatch.setenv("WORLD_SIZE", "16")
    for l in seen[::37]:
        words = shlex.split(shlex.split(explain.command("tiny-moe", l, cluster))[-1])
        args = config.parse_args([*words[words.index("step08_5d/train.py") + 1:], "--device", "cpu"])
        config.check(args, config.PRESETS["tiny-moe"])
        assert args.dp * args.tp * args.cp * args.pp == 16 and args.ep == l.ep and args.zero == l.zero
        assert args.stages_per_rank == l.stages_per_rank and (args.steps, args.lr) == (1000, 3e-4)


def test_commands():
    one = explain.command("llama-8b", Layout(dp=4, tp=2), speed.Cluster(8))
    assert one == ("torchrun --standalone --nproc_per_node 8 step08_5d/train.py --model llama-8b --seq_len 4096 "
                   "--global_batch_size 4 --micro_batch_size 1 --steps 1000 --lr 0.0003 --dp 4 --tp 2")
    assert explain.command("llama-8b", Layout(dp=4, tp=2, wide=3), speed.Cluster(8)) == f"{one} --compile"
    words = shlex.split(explain.command("my models/70b", Layout(dp=8, tp=8, pp=8), speed.Cluster(512)))
    assert words[:8] == "sbatch --nodes 64 --ntasks-per-node 1 --gpus-per-node 8 --wrap".split() and len(words) == 9
    assert "--nnodes 64 --nproc_per_node 8 " in words[8] and "my models/70b" in shlex.split(words[8])


@pytest.mark.slow
def test_the_command_and_its_dry_run_run(tmp_path):
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model/config.json").write_text(json.dumps({**SHAPES["dense"], "num_hidden_layers": 2}))
    flags = "--gpus", 4, "--global_batch_tokens", "8k", "--seq_len", 512, "--config", "tp=2,zero=1"
    said = json.loads(run("--model", tmp_path / "a model", *flags, "--json").stdout)
    words = shlex.split(said["dry_run"])
    command = [sys.executable, *words[1:], "--device", "cpu", "--dtype", "bfloat16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "a training step of 8 micro-batches of 1 x 512" in done.stdout, done.stderr
    assert said["command"].startswith("torchrun --standalone --nproc_per_node 4 step08_5d/train.py ")
    assert f"--model '{tmp_path}/a model'" in said["command"]


@pytest.mark.slow
def test_what_is_printed_as_fitting_fits_in_a_dry_run(pool, tmp_path):
    """Draw 20 layouts that just fit, and make a dry run of the rank of each that should need most."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["dense"]))
    c, draw, layouts = models.load(str(tmp_path)), random.Random(20), []
    for _ in range(20):
        cluster = speed.Cluster(draw.choice([8, 16, 32]))
        search = plan.Search(c, cluster, 8192, 64, CONSTANTS)
        fit = [one.layout for one in search.ordered if one.layout.tp <= 8 and search.fits(one)]
        full = sorted(fit, key=lambda l: -sum(plan.memory(c, l).values()))
        l = draw.choice(full[:max(1, len(full) // 10)])
        words = shlex.split(explain.dry_run(c, str(tmp_path), l))
        layouts.append((l, 0, 0, int(words[words.index("--rank") + 1])))
    answers = pool.call(dry_runs_job, "step08_5d", world=2, timeout=900, model=str(tmp_path), layouts=layouts)
    seen = {i: one for answer in answers for i, one in answer.items()}
    assert len(seen) == 20
    for i, (_, peak, *_) in seen.items():
        assert peak / costs.GIB <= plan.limit(speed.Cluster(8)), layouts[i]


def test_what_is_printed():
    question = "--model", "llama-8b", "--gpus", 16, "--global_batch_tokens", "1e6"
    first, found = run(*question), run(*question, "--details")
    assert found.returncode == 0 and first.stdout.count("\n") <= 25 and "one notch" not in first.stdout, found.stderr
    for part in ("layouts that were timed", "this model needs at least ", "all layouts have the same batch: 256 sequences",
                 "The second, ", "fastest by estimate, and safest: ", "one notch", "MFU ", "(causal half, embedding not counted)",
                 "sbatch --nodes 2 ", "python tools/simulate 8 16 --rank "):
        assert part in found.stdout, part
    longest = run("--model", "mixtral-8x7b", "--gpus", 128, "--gpu", "gb200", "--trainer", "megatron", "--tokens", "1e12")
    assert longest.stdout.count("\n") <= 25 and "safest: " in longest.stdout and "GPU-hours" in longest.stdout
    said = run("--model", "mixtral-8x7b", "--gpus", 64, "--config", "dp=32,tp=2,ep=4,zero=1,mbs=1,recompute=full", "--details")
    assert said.returncode == 0 and "physics only" not in said.stdout
    assert "no constant was fitted to runs with ep, experts" in said.stdout and "ep 8" in said.stdout


def test_every_notch_is_one_notch():
    """Check that the table says about a turned knob what the planner says about that layout."""
    c, cluster = models.PRESETS["llama-8b"], speed.Cluster(64)
    best = plan.evaluate(c, Layout(dp=8, tp=4, pp=2, zero=1, micro_batch=2, accumulation=16), cluster, CONSTANTS)
    turns = list(explain.turned(c, best, cluster, CONSTANTS))
    assert {turn["knob"] for turn in turns} == {"dp", "tp", "cp", "pp", "zero", "schedule", "mbs", "recompute"}
    for turn in turns:
        if "why" in turn:
            continue
        l = turn["layout"]
        assert l.dp * l.micro_batch * l.accumulation == 256 and (turn["knob"] == "dp" or l.gpus == 64)
        one = plan.evaluate(c, l, cluster._replace(gpus=l.gpus), CONSTANTS)
        assert (turn["held"], turn["step"]) == (one.held, one.step)
        knobs = "tp", "cp", "pp", "zero", "schedule", "micro_batch", "recompute"
        assert sum(getattr(l, name) != getattr(best.layout, name) for name in knobs) <= 1


def test_json():
    one = json.loads(run("--gpus", 64, "--config", "tp=2,zero=1,mbs=2", "--json").stdout)
    assert one["notes"] == [] and one["fits"] and one["tp"] == 2 and one["provenance"] == "elsewhere"
    assert one["interval"][0] < one["tokens_per_s_per_gpu"] < one["interval"][1]
    flops = costs.flops_per_token(models.PRESETS["llama-8b"], 4096)
    assert one["mfu"] == pytest.approx(one["tokens_per_s_per_gpu"] * flops / 989.5e12, rel=1e-3)
    several = json.loads(run("--gpus", 16, "--model", "llama-1b", "--json").stdout)
    assert len(several) > 3 and set(several[0]) == set(one)
    ranked = [each["ranked_by"] for each in several]
    assert ranked == sorted(ranked, reverse=True) and all(each["fits"] and each["command"] for each in several)


def test_the_tables_of_the_planners_readme(rows):
    """Compare the tables, except for how many layouts were tried: every new schedule adds some."""
    text = fit_plan.README.read_text() + fit_plan.PROOF.read_text()
    tried = re.compile(r"of [\d,]+ layouts")
    for name, content in fit_plan.readme_tables(rows, which=("query", "published")).items():
        assert tried.sub("", fit_plan.between(text, name)) == tried.sub("", content + "\n"), name


@pytest.mark.slow
def test_the_cases_in_step_8s_readme(tmp_path):
    """Check that the README quotes the planner word for word. `python dev/figures/step08.py cases` writes the quotes."""
    copy_repository(tmp_path)
    readme = tmp_path / "step08_5d/README.md"
    before = readme.read_text()
    for text in (before, before.replace("llama-70b, 70.55B parameters", "llama-70b, some parameters")):
        readme.write_text(text)
        status, output = steps_run([sys.executable, "dev/figures/step08.py", "cases"], tmp_path, timeout=300)
        assert status == 0 and readme.read_text() == before, output


@pytest.mark.slow
def test_the_plans_in_the_planners_readme(rows):
    """Check the plans, which `python dev/bench/fit_plan.py --readme` writes."""
    assert fit_plan.between(fit_plan.README.read_text(), "plans") == fit_plan.readme_tables(rows, which=("plans",))["plans"] + "\n"


@pytest.mark.slow
def test_the_errors_in_the_planners_readme(rows, fitted, folds):
    """Compare the numbers, which may differ in the last digit: a fit ends where it no longer helps."""
    held_out = [row for nodes in NODES
                for row in fit_plan.predictions([row for row in rows if int(row["nodes"]) == nodes], folds[nodes])]
    said = fit_plan.between(fit_plan.README.read_text(), "held out")
    found = "\n".join(fit_plan.held_out_table(rows, fitted, held_out)) + "\n"
    numbers = lambda text: [float(x) for x in re.findall(r"[0-9.]+(?=%)", text)]
    assert re.sub(r"[0-9.]+%", "%", said) == re.sub(r"[0-9.]+%", "%", found)
    assert numbers(said) == pytest.approx(numbers(found), abs=0.11)


def test_more_bandwidth_is_not_slower():
    c, l = models.PRESETS["llama-8b"], Layout(dp=8, tp=8, zero=1, accumulation=4)
    def seconds(**own):
        cluster = speed.Cluster(64)._replace(**own)
        return sum(plan.evaluate(c, l, cluster, CONSTANTS).seconds.values())
    assert seconds(network=12.5e9) > seconds() > seconds(network=400e9)
    assert seconds(gpu=speed.GPUS["a100"]) > seconds() > seconds(gpu=speed.GPUS["b200"])


# ------------------------------------------------------------------------------------------- files in and out
def test_predict(tmp_path, rows):
    few, out = tmp_path / "in.csv", tmp_path / "out.csv"
    big = dict(model="80B", nodes=64, dp=8, tp=8, pp=8, zero=1, mbs=1, grad_acc=32)
    measured.write_csv(few, [*rows[:5], big], nanotron.KEYS)
    assert run("--predict", few, "--out", out).returncode == 0
    with open(out) as file:
        got = list(csv.DictReader(file))
    assert list(got[0]) == [*nanotron.KEYS, *nanotron.PREDICTED] and len(got) == 6
    for row in got:
        assert 0 < float(row["pred_mem_gb"]) < 1000 and 0 < float(row["pred_tok_s_gpu"]) < 1e5 and row["pred_oom"] in "01"
    assert abs(float(got[0]["pred_tok_s_gpu"]) / float(rows[0]["tok_s_gpu"]) - 1) < 0.1


def test_your_own_constants(tmp_path):
    """Fit runs of a cluster on which the layers' products take twice as long and everything needs a tenth more memory."""
    slow = dict(time={**speed.USUAL, "product": 2.0}, slack=1.1)
    results, constants, cluster = tmp_path / "results.csv", tmp_path / "own.json", speed.Cluster(8)
    runs = []
    for l in [Layout(dp=dp, tp=8 // dp, zero=z, micro_batch=b, accumulation=4)
              for dp in (8, 4, 2) for z in (0, 1) for b in (1, 2, 4)]:
        one = plan.evaluate(models.PRESETS["llama-1b"], l, cluster, slow)
        knobs = {name: getattr(l, name) for name in ("dp", "tp", "cp", "pp", "ep", "zero", "schedule", "seq_len", "recompute")}
        runs.append(dict(model="llama-1b", gpus=8, mbs=l.micro_batch, grad_acc=4, status="ok", tok_s_gpu=one.tokens_per_s,
                         mem_gib=sum(one.memory.values()), **knobs))
    measured.write_csv(results, runs, measured.RESULTS)
    assert run("--fit", results, "--constants", constants).returncode == 0
    found = json.loads(constants.read_text())
    assert found["slack"] == pytest.approx(1.1)
    for row in runs:
        l = Layout(dp=row["dp"], tp=row["tp"], zero=row["zero"], micro_batch=row["mbs"], accumulation=4)
        assert plan.evaluate(models.PRESETS["llama-1b"], l, cluster, found).tokens_per_s == pytest.approx(row["tok_s_gpu"], rel=0.1)
    assert run("--model", "llama-1b", "--gpus", 8, "--constants", constants).returncode == 0


REFUSED = {
    "--gpus 0": "must be a whole number from 1", "--gpus 12": "must be a multiple of --gpus_per_node 8",
    "--gpu h300": "invalid choice",
    "--network carrier-pigeon": "infiniband", "--model nowhere-7b": "presets are", "--global_batch_tokens nan": "is not a number",
    "--seq_len 4x": "is not a number", "--seq_len 1.5": "whole number", "--gpus 1e9": "whole number from 1 to",
    "--global_batch_tokens 1e30": "must be from 1 to", "--port 70000": "0 to 65535", "--config dp=3": "= 3 != gpus(8)",
    "--config dp=2,tp=4,mbs=0": "at least 1", "--config tp=3": "!= gpus(8)",
    "--config pp=2,schedule=interleaved,v=100": "pp(2) x v(100) = 200 stages, but only 32 layers; use v=16 or less",
    "--html /nowhere/x.html": "No such file or directory",
    "--config speed=9": "is not NAME=VALUE with a known name",
    "--config tp=8,zero=7": "one of 0, 1, 2, 3", "--config pp=8,schedule=dualpipe,acc=4": "16 micro-batches or more",
    "--config ep=2": "the model has none", "--predict nofile.csv --out x.csv": "No such file", "--predict {data}": "needs --out",
    "--fit {data} --constants x.json": "no column gpus", "--constants {data}": "not a file that --fit wrote",
    "--fp8 --gpu a100": "--gpu a100: cannot multiply in 8 bits; leave out --fp8"}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(flags):
    said = run(*flags.format(data=DATA).split())
    assert said.returncode == 2 and said.stdout == ""
    assert said.stderr.startswith("error: ") and said.stderr.count("\n") == 1 and REFUSED[flags] in said.stderr


LLAMA = dict(model_type="llama", **WIDE)
QWEN, DEEPSEEK = ({**LLAMA, "model_type": kind} for kind in ("qwen3_moe", "deepseek_v3"))
BAD_CONFIGS = [
    ([], "must be a mapping"), ({**LLAMA, "model_type": "gpt2"}, "model_type 'gpt2'"), ({**LLAMA, "model_type": None}, "None"),
    ({**LLAMA, "vocab_size": "abc"}, "expected int, got str (value: 'abc')"), ({**LLAMA, "hidden_size": 0}, "hidden_size 0"),
    ({**LLAMA, "hidden_size": 2048.0}, "'hidden_size' expected int"), ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers -1"),
    ({**LLAMA, "num_hidden_layers": True}, "got bool"), ({**LLAMA, "num_key_value_heads": 5}, "must be a multiple of num_key"),
    ({**LLAMA, "num_attention_heads": 12}, "hidden size (2048) is not a multiple"), ({**LLAMA, "head_dim": "x"}, "head_dim"),
    ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"), ({**LLAMA, "hidden_act": ["silu"] * 99}, "expected str, got list"),
    ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings"), ({**LLAMA, "mlp_bias": True}, "mlp_bias True"),
    ({**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4}, "must be from 1 to num_local_experts 2"),
    ({**LLAMA, "vocab_size": 10**30}, "vocab_size"), ({**LLAMA, "num_key_value_heads": [8]}, "with value [8]"),
    ({**LLAMA, "rope_scaling": "abc"}, "transformers could not read"), ({**LLAMA, "rms_norm_eps": "x"},
    "'rms_norm_eps' expected float"),
    ({**LLAMA, "vocab_size": 10**8}, "below 100,000,000"),
    ({**QWEN, "decoder_sparse_step": 0}, "decoder_sparse_step 0 must"),
    ({**QWEN, "moe_intermediate_size": -1}, "intermediate_size -1"),
    ({**DEEPSEEK, "first_k_dense_replace": 999}, "first_k_dense_replace 999 must be from 0 to num_hidden_layers"),
    ({**DEEPSEEK, "kv_lora_rank": -1}, "kv_lora_rank -1"), ({**DEEPSEEK, "qk_nope_head_dim": -1}, "qk_nope_head_dim -1"),
    ({**LLAMA, "model_type": "qwen2", "use_sliding_window": "no"}, "use_sliding_window")]


@pytest.mark.parametrize("raw, message", BAD_CONFIGS, ids=[message for _, message in BAD_CONFIGS])
def test_a_config_that_is_wrong(raw, message):
    with pytest.raises(trainer.Refused) as refused:
        models.read(raw, "it")
    assert message in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("text", ["{", '{"a": 1}} '])
def test_a_config_that_is_no_json(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    said = run("--model", tmp_path, "--config", "tp=2")
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and "valid JSON" in said.stderr


def test_shapes_that_are_nearly_a_llamas():
    plain = models.read(LLAMA, "it")
    more = {"sliding_window": 4096, "tie_word_embeddings": True}
    qwen2, qwen3, mistral = (models.read({**LLAMA, "model_type": kind, **more}, "it") for kind in ("qwen2", "qwen3", "mistral"))
    assert "planned as a Llama with biases of q, k and v; this trainer itself takes model_type" in qwen2.notes[1]
    assert {note.split(" only")[0].split("takes model_type ")[1] for note in (qwen2.notes[1], mistral.notes[1])} == {
        ", ".join(config.FAMILIES)}
    vectors = 8 * (16 + 2 * 4) * 128                      # layers x heads of q, k and v x head_dim
    assert costs.model_parameters(qwen2) == costs.model_parameters(plain) + vectors
    assert costs.model_parameters(qwen3) == costs.model_parameters(plain) + 8 * 2 * 128
    assert costs.model_parameters(mistral) == costs.model_parameters(plain)
    for model in (qwen2, qwen3, mistral):
        assert costs.parameters(model, Layout(), costs.our_stages(model, Layout())[0]) == costs.model_parameters(model)
        assert any("trained untied" in note for note in model.notes)
        assert any("NOT TRAINABLE HERE" in note for note in model.notes) == (model is not qwen3)
    assert any("sliding_window" in note for note in mistral.notes) and not any("sliding_window" in note for note in qwen2.notes)
    assert plain.notes == ()


@pytest.mark.parametrize("text, message", [
    ("", "not a file that --fit wrote"), ("[]", "not a file that --fit wrote"), ('{"time": 3, "slack": 1}',
    "not a file that --fit wrote"),
    ('{"time": {}, "slack": null}', "not a file that --fit wrote"), ('{"time": {"launch": "x"}, "slack": 1}', "launch"),
    ('{"time": {"launch": -1}, "slack": 1}', "launch"), ('{"time": {"speed": 1}, "slack": 1}', "unknown constant speed"),
    ('{"time": {"product": 0}, "slack": 1}', "product"),
    ('{"time": {"hop": NaN}, "slack": 1}', "hop"), ('{"time": {}, "slack": 0}', "slack")])
def test_constants_that_are_wrong(tmp_path, text, message):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(trainer.Refused, match=message):
        measured.load_constants(str(tmp_path / "mine.json"))


RUN = dict(model="llama-1b", gpus=8, dp=8, tp=1, cp=1, pp=1, ep=1, zero=1, schedule="1f1b", mbs=1, grad_acc=4, seq_len=4096,
           recompute="none", status="ok", tok_s_gpu=1e4, mem_gib=30)


@pytest.mark.parametrize("change, message", [
    (dict(tok_s_gpu=""), "line 2"), (dict(mem_gib="nan"), "positive"), (dict(dp="x"), "must be a number"),
    (dict(zero=7), "zero from 0 to 3"), (dict(schedule="gpipe"), "gpipe"), (dict(model="nowhere-7b"), "nowhere-7b"),
    (dict(tp=3), "--tp 3: must divide num_attention_heads 32"), (dict(status="failed"), "no row has status ok")])
def test_results_that_are_wrong(tmp_path, change, message):
    path = tmp_path / "in.csv"
    measured.write_csv(path, [{**RUN, **change}], measured.RESULTS)
    said = run("--fit", path, "--constants", tmp_path / "mine.json")
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and message in said.stderr
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize("text", ["", "a,b\n", "model,nodes\n1B\n", "\x00\x01", "model,nodes\n1B,1,2,3\n"])
def test_files_that_are_no_tables(tmp_path, text):
    (tmp_path / "in.csv").write_text(text)
    said = run("--predict", tmp_path / "in.csv", "--out", tmp_path / "out.csv")
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and "in.csv" in said.stderr


@pytest.mark.parametrize("change, message", [
    (dict(model="gpt"), "'gpt' is unknown"), (dict(gpus="9"), "!= gpus(9)"), (dict(dp="x"), "whole number"),
    (dict(gpu="TPU"), "is unknown"), (dict(precision="float16"), "'float16' is unknown"),
    (dict(precision="float8", gpu="A100"), "gpu A100 cannot multiply in 8 bits")])
def test_published_runs_that_are_refused(tmp_path, change, message):
    rows = fit_plan.load_published()
    measured.write_csv(tmp_path / "in.csv", [{**rows[0], **change}], list(rows[0]))
    said = run("--predict", tmp_path / "in.csv", "--out", tmp_path / "out.csv")
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and message in said.stderr and "line 2" in said.stderr


def test_a_file_of_published_runs(tmp_path):
    rows = fit_plan.load_published()
    measured.write_csv(tmp_path / "in.csv", rows, list(rows[0]))
    assert run("--predict", tmp_path / "in.csv", "--out", tmp_path / "out.csv").returncode == 0
    with open(tmp_path / "out.csv") as file:
        got = list(csv.DictReader(file))
    added = "pred_tok_s_gpu pred_low pred_high pred_tflops pred_mem_gb pred_oom provenance assumed".split()
    assert list(got[0]) == [*rows[0], *added] and len(got) == len(rows)


def test_the_benchmarked_trainer_with_more_of_zero():
    """Check that with stages 2 and 3, which that trainer did not have, it would hold less and not be faster."""
    row = dict(model="8B", nodes=8, dp=64, tp=1, pp=1, mbs=1, grad_acc=4)
    found = [nanotron.predict({**row, "zero": zero}) for zero in range(4)]
    held = [one["pred_mem_gb"] for one in found]
    assert held == sorted(held, reverse=True) and len(set(held)) == 4
    assert found[3]["pred_tok_s_gpu"] <= found[2]["pred_tok_s_gpu"]


@pytest.mark.parametrize("change, message", [
    (dict(model="7B"), "model must be one of"), (dict(nodes=2), "!= 8 x nodes(2)"), (dict(mbs="x"), "whole numbers"),
    (dict(mbs=0), "must be from 1 to"), (dict(zero=4), "zero from 0 to 3")])
def test_rows_that_are_refused(tmp_path, change, message):
    path = tmp_path / "in.csv"
    measured.write_csv(path, [{**dict(model="1B", nodes=1, dp=8, tp=1, pp=1, zero=0, mbs=1, grad_acc=1), **change}], nanotron.KEYS)
    done = run("--predict", path, "--out", tmp_path / "out.csv")
    said = done.stderr
    assert done.returncode == 2 and said.count("\n") == 1 and "line 2" in said and message in said
    assert not (tmp_path / "out.csv").exists()


# ------------------------------------------------------------------------------------------- what is refused in one line
@pytest.mark.parametrize("change, message", [
    (dict(dp="0"), "dp '0' must be"), (dict(micro_batch="0"), "micro_batch '0'"), (dict(micro_batch="-2"), "micro_batch '-2'"),
    (dict(seq_len="0"), "seq_len '0'"), (dict(seq_len="-5"), "seq_len '-5'"), (dict(power_w="0"), "power_w '0'"),
    (dict(power_w="-500"), "power_w '-500'"), (dict(gpu_memory_gib="-1"), "gpu_memory_gib '-1'"),
    (dict(sequences_per_step="-16"), "sequences_per_step '-16'"), (dict(seq_len=""), "seq_len ''"),
    (dict(gpus="1" * 30), "gpus '111"),
    *((dict(hbm_tb_s=bad), f"hbm_tb_s '{bad}' must be a positive number") for bad in ("abc", "nan", "-1", "0", "inf")),
    (dict(schedule="gpipe", dp="4", pp="2"), "schedule 'gpipe' is unknown"), (dict(recompute="some"), "recompute 'some'"),
    (dict(fsdp_stage="9"), "fsdp_stage '9'"), (dict(fsdp_stage="x"), "fsdp_stage 'x'"), (dict(compile="maybe"), "compile 'maybe'"),
    (dict(seq_len="8193", dp="1", tp="8"), "--seq_len 8193: must be a multiple of tp 8"),
    (dict(gpus="64", dp="1", pp="64"), "--pp 64: with stages_per_rank 1 there are 64 stages, but only 32 layers"),
    (dict(dp="4", pp="2", schedule="interleaved", stages_per_rank="99"), "stages_per_rank 99 is more than 32 layers / pp(2)")])
def test_a_published_run_that_is_wrong(change, message):
    row = fit_plan.load_published()[2]
    published.check(row, "line 4")
    with pytest.raises(trainer.Refused, match=re.escape(message)) as refused:
        published.check({**row, **change}, "line 4")
    assert str(refused.value).startswith("line 4: ")


def test_published_runs_that_ran_are_not_said_to_run_out_of_memory():
    """Check that no memory is predicted for them: what this trainer would hold says nothing about theirs."""
    for row in fit_plan.load_published():
        published.check(row, "it")
        said = published.predict(row)
        assert said["pred_mem_gb"] == said["pred_oom"] == ""


@pytest.mark.parametrize("change", [dict(nodes=10**20, dp=8 * 10**20), dict(grad_acc=10**9), dict(dp=-8, tp=-1)])
def test_a_benchmarked_run_that_is_too_large(change):
    row = dict(model="1B", nodes=1, dp=8, tp=1, pp=1, zero=0, mbs=1, grad_acc=1)
    nanotron.check(row, "it")
    with pytest.raises(trainer.Refused, match="must be from 1 to 1,000,000"):
        nanotron.check({**row, **change}, "it")


@pytest.mark.parametrize("change, why", [
    (dict(attention_bias=True), "attention_bias is True; only False is supported"),
    (dict(sliding_window=4096), "sliding_window is 4096; only None is supported"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type is 'yarn'; only 'default' and 'llama3' are supported"),
    (dict(model_type="qwen2"), f"model_type is 'qwen2'; supported: {', '.join(config.FAMILIES)}")])
def test_a_shape_that_is_planned_and_not_trained(tmp_path, change, why):
    """Check that the model says why, in the trainer's own words."""
    raw = {**LLAMA, **change}
    model = models.read(raw, "it")
    assert model.untrained == why and models.read(LLAMA, "it").untrained == ""
    assert any(why in note for note in model.notes) == (raw["model_type"] == "llama")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(SystemExit) as end:
        config.read_config("--model", str(tmp_path))
    assert f"({why})" in end.value.message


def test_of_a_hub_id_the_config_alone_is_asked_for(monkeypatch, tmp_path):
    asked = []
    config = SimpleNamespace(get_config_dict=lambda name: asked.append(name) or (LLAMA, {}))
    with monkeypatch.context() as patched:
        patched.setattr("transformers.PretrainedConfig", config)
        assert models.load("some/model") == models.read(LLAMA, "it") and asked == ["some/model"]
    monkeypatch.setitem(sys.modules, "transformers", None)                         # as if it were not installed
    with pytest.raises(trainer.Refused, match=r"--model no/where: its config.json could not be read .*the presets are tiny"):
        models.load("no/where")
    with pytest.raises(trainer.Refused, match="is a file; give its directory: --model " + re.escape(str(tmp_path))):
        (tmp_path / "config.json").write_text("{}")
        models.load(str(tmp_path / "config.json"))


FINE = dict(
    qwen3_moe=dict(num_hidden_layers=6, mlp_only_layers=[1], decoder_sparse_step=3, moe_intermediate_size=768, hidden_size=1024),
    deepseek_v3=dict(num_hidden_layers=5, hidden_size=1024, vocab_size=4096))


@pytest.mark.parametrize("kind, size", [
    ("qwen3_moe", {}), ("qwen3_moe", dict(norm_topk_prob=True)), ("deepseek_v3", {}), ("qwen3_moe", FINE["qwen3_moe"]),
    ("deepseek_v3", FINE["deepseek_v3"]),
    ("deepseek_v3", dict(FINE["deepseek_v3"], q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=0))])
def test_experts_that_are_small_or_shared_and_latent_attention(kind, size):
    """Compare the parameters with transformers', including DeepSeek-V3's own 671B, and check a rank's share of them."""
    raw = dict(model_type=kind, **size)
    theirs = transformers.AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    total, c = sum(param.numel() for param in model.parameters()), models.read(raw, "it")
    said = "NOT TRAINABLE HERE" if kind not in config.FAMILIES else f"refuses it: {c.untrained}"
    assert costs.model_parameters(c) == total
    assert any(said in note for note in c.notes) == ("norm_topk_prob" not in size)
    l = Layout(dp=16, pp=2, ep=16, zero=1)
    held = [costs.parameters(c, l._replace(ep=ep), stage) for ep in (1, 16) for stage in costs.our_stages(c, l)]
    assert sum(held[:2]) == pytest.approx(total, rel=1e-6)
    experts = (c.num_hidden_layers - c.dense_layers) * 3 * c.num_local_experts * c.hidden_size * c.intermediate_size
    assert sum(held[:2]) - sum(held[2:]) == pytest.approx(experts * 15 / 16, rel=1e-6)
    one = plan.evaluate(c, l._replace(accumulation=4), speed.Cluster(32), CONSTANTS)
    assert one.step > 0 and one.seconds["ep"] > 0 and explain.train_flags("DIR", l)


def test_deepseek_v3_is_planned(tmp_path):
    """Check that 37B of its 671B parameters are active for a token, and that the answer says that it cannot be trained here."""
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="deepseek_v3")))
    said = run("--model", tmp_path, "--gpus", 2048, "--config", "pp=16,ep=64,zero=1,recompute=full", "--global_batch_tokens", "60M")
    assert "671.03B parameters" in said.stdout and "NOT TRAINABLE HERE: planned as a Llama with 256 experts" in said.stdout
    assert "\n# the trainer refuses this: model_type is 'deepseek_v3'" in said.stdout, said.stderr
    c = models.load(str(tmp_path))
    assert costs.model_parameters(c, active=True) == pytest.approx(37.5e9, rel=0.01)
    heads = 128 * (192 + 128) * 4096                      # scores and their products with v, causal, forward and backward
    assert costs.flops_per_token(c, 4096, causal=True) - 6 * costs.model_parameters(c, active=True) == 3 * 61 * heads


BEYOND = {
    "--gpus 1e400": "whole number from 1 to 131,072", "--seq_len 1e400": "whole number from 1 to",
    "--memory 1e308": "from 0.1 to 100000",
    "--network 1e-300 --gpus 16 --config zero=3": "from 1e+06 to 1e+15", "--network nan": "from 1e+06", "--flops inf": "to 1e+18",
    "--power 0": "from 1 to 100000", "--global_batch_tokens 0.5": "must be from 1 to",
    "--global_batch_tokens 60G --seq_len 1": "at most 50,000,000 sequences"}


@pytest.mark.parametrize("flags", BEYOND)
def test_numbers_beyond_reason(flags):
    said = run(*flags.split())
    assert said.returncode == 2 and said.stdout == "" and said.stderr.startswith(f"error: {flags.split()[0]} ")
    assert said.stderr.count("\n") == 1 and BEYOND[flags] in said.stderr


def test_what_was_asked_is_said_again():
    """Check that the answer repeats the batch that was asked for, as well as the batch that it became; and that the answer for one
    layout has the search's first lines, with its own batch."""
    small = run("--model", "tiny", "--gpus", 1, "--global_batch_tokens", 100)
    assert "1 sequences of 4,096 = 4,096 tokens; you asked for 100" in small.stdout
    one = run("--gpus", 64, "--config", "tp=2,mbs=2")
    lines = one.stdout.splitlines()
    assert lines[0] == "llama-8b, 8.03B parameters, on 64 x h100; this model needs at least 4 GPUs, counting in powers of two"
    assert lines[1:3] == ["its batch: 1,024 sequences of 4,096 = 4,194,304 tokens; you asked for 4,000,000", ""]
    other = run("--gpus", 16, "--gpu", "a100", "--network", "25e9", "--gpus_per_node", 4, "--config", "tp=2").stdout
    simulator = "python tools/simulate 8 16 --rank 0 --gpu a100 --gpus_per_node 4 --network 25.0 --model llama-8b "
    assert simulator in other and "python tools/simulate 8 64 --rank 0 --model llama-8b " in one.stdout


def test_nothing_fits_for_programs():
    said = run("--model", "llama-405b", "--json")
    assert said.returncode == 0 and json.loads(said.stdout) == []
    assert said.stderr.startswith("no layout fits: the nearest, tp 8, ") and "this model needs at least 128 GPUs" in said.stderr
