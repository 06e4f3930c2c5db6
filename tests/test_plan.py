"""The planner: its exact part beside dry runs of the trainer, its seconds beside the simulator's and published runs."""
import json
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

import fit_own
import nanotron_runs
import planned
import published
import pytest
import torch
import transformers
from steps import ROOT, on_page, step_dir

STEP, PLANNER = step_dir("step08_5d"), ROOT / "tools/plan"
sys.path[:0] = [str(STEP), str(PLANNER)]
import config
import costs
import explain
import models
import plan
import schedules
import speed
import trainer
import trainers
from costs import Layout
from metrics import active_parameter_count
from model import Llama
from pipeline_parallel import local_stages, stage_boundaries

CONSTANTS = trainers.constants_of(trainers.load_constants(None))


def run(*flags):
    return subprocess.run([sys.executable, PLANNER, *map(str, flags)], capture_output=True, text=True, timeout=300)


def test_it_runs_without_torch_wherever_it_is_copied_to_with_what_it_needs(tmp_path):
    for folder in (STEP, PLANNER):
        copy = tmp_path / "copy" / folder.relative_to(ROOT)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", "figures"))
    (tmp_path / "copy/tools/simulate").mkdir(parents=True)
    shutil.copy(ROOT / "tools/simulate/gpus.py", tmp_path / "copy/tools/simulate")
    for words in (["--config", "tp=2"], ["--html", "plan.html", "--model", "llama-1b", "--config", "tp=2"]):
        command = [sys.executable, "-X", "importtime", "copy/tools/plan", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
        assert done.returncode == 0 and {"plan", "costs", "trainer"} <= loaded, done.stderr
        assert not {"torch", "numpy", "config", "schedules"} & loaded
    text = (tmp_path / "plan.html").read_text()           # all that the page needs is in it
    asked = json.loads(re.search(r"^const asked = (.*);$", text, re.M)[1])
    assert asked["state"]["tp"] == 2 and asked["state"]["model"] == "llama-1b" and "const plan = " in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|src=", text)


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


# ------------------------------------------------------------------------------------------- beside what was measured
def test_published_runs():
    """Check the published runs that nothing was fitted to: four of five are inside their interval, A100s are as fast as published
    in the median, and half of Megatron's runs are within 15%."""
    judged = [run for run in planned.published() if not run["fitted"]]
    inside = statistics.fmean(run["low"] <= run["published"] <= run["high"] for run in judged)
    assert len(judged) > 40 and 0.75 <= inside <= 0.90, inside
    ratio = lambda some: [run["planned"] / run["published"] for run in judged if some(run)]
    assert 0.95 <= statistics.median(ratio(lambda run: run["gpu"].lower() == "a100")) <= 1.05
    assert statistics.median(abs(one - 1) for one in ratio(lambda run: run["model"].startswith("gpt-"))) <= 0.15
    assert statistics.median(abs(one - 1) for one in ratio(lambda run: True)) <= 0.08


def test_runs_of_2026(capsys):
    """Check the errors on the page, and the runs that chose no constant: experts are within 12% in the median, and four of five are
    inside their interval; Megatron's dense runs are all inside."""
    published.of_2026()
    printed = capsys.readouterr().out
    assert on_page(published.PAGE, "of_2026").endswith(printed)
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()]
    found = {name: (float(error.rstrip("%")), float(inside.rstrip("%"))) for name, _, _, error, _, inside in rows[2:]}
    assert found["MoE"][0] <= 12 and found["MoE"][1] >= 80 and found["tp, pp"][0] <= 6 and found["tp, pp"][1] == 100


def test_the_table_of_published_runs():
    """Compare docs/predictions.md with what `python dev/bench/published.py --write published` would write."""
    assert on_page(published.PAGE, "published").endswith("\n".join(planned.table()) + "\n")


def test_the_answer_in_the_readme():
    """Compare the answer, except for how many layouts were tried: every new schedule adds some."""
    tried = re.compile(r"of [\d,]+ layouts")
    assert tried.sub("", on_page(planned.README, "query")) == tried.sub("", planned.answer())


def test_the_memory_that_can_be_used():
    """Check gpus.py's comment on USABLE with the published runs that succeeded, on GPUs of 80 GB."""
    held = sorted(float(row["mem_gb"]) for row in nanotron_runs.load() if row["status"] == "ok")
    assert held[-2] < speed.GPUS["h100"].usable < held[-1] and held[-2] == 69.8


@pytest.mark.parametrize("model, wide, peak", [("llama-1b", 4, 50.36), ("llama-1b", 3, 45.87), ("qwen3-0.6b", 4, 36.60),
                                               ("qwen3-0.6b", 3, 33.54)])
def test_memory_is_that_of_an_h200(model, wide, peak):
    """Compare with the peaks that docs/gpus.md reports; 3 wide tensors are saved with --compile."""
    planned = sum(plan.memory(models.PRESETS[model], Layout(micro_batch=4, accumulation=4, seq_len=4096, wide=wide)).values())
    assert planned == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("layout, gpu, limit", [
    ("dp=8,zero=3,recompute=selective", "h100", 0.1), ("tp=2,zero=1,acc=4", "a100", 0.1), ("tp=2,pp=2,zero=1,acc=4", "h100", 0.1),
    ("cp=4,zero=1", "h100", 0.1), ("zero=0,acc=2", "a100", 0.1), ("tp=2,ep=8,zero=1", "h100", 0.1),
    ("tp=4,ep=2,zero=1,recompute=selective", "h100", 0.1)])
def test_its_seconds_are_the_simulators(pool, tmp_path, layout, gpu, limit):
    """Compare with the simulator, for a layout of 8 GPUs. Both use the same facts and differ only in how they add up waits."""
    shape = SHAPES["moe" if "ep" in layout else "dense"]
    (tmp_path / "config.json").write_text(json.dumps({**shape, "hidden_size": 4096, "intermediate_size": 14336}))
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


def test_your_own_constants(tmp_path):
    """Fit runs of a cluster on which the layers' products take twice as long and everything needs a tenth more memory."""
    slow, cluster = dict(time={**speed.USUAL, "product": 2.0}, slack=1.1), speed.Cluster(8)
    runs = []
    for l in [Layout(dp=dp, tp=8 // dp, zero=zero, micro_batch=size, accumulation=4)
              for dp in (8, 4, 2) for zero in (0, 1) for size in (1, 2, 4)]:
        one = plan.evaluate(models.PRESETS["llama-1b"], l, cluster, slow)
        runs.append((models.PRESETS["llama-1b"], l, one.tokens_per_s, one.held))
    found = fit_own.fit(runs, cluster)
    assert found["slack"] == pytest.approx(1.1)
    for c, l, seen, _ in runs:
        assert plan.evaluate(c, l, cluster, found).tokens_per_s == pytest.approx(seen, rel=0.1)
    (tmp_path / "own.json").write_text(json.dumps(found))
    assert trainers.load_constants(tmp_path / "own.json") == found


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
    import ledger
    import train
    from simulate.record import record
    found = {}

    def note(seen, model, optimizer, mesh):
        names, seen.formula = ledger.Ledger(mesh), Counter()     # what the trainer's own formulas say
        for group, collective, size in ledger.expected_traffic(model, mesh, seen.args, train.TECHNIQUES):
            seen.formula[names.name(group), collective] += size
        seen.tensors = sum(len(group["params"]) for group in optimizer.adamw.param_groups)
    for i in range(int(os.environ["RANK"]), len(layouts), int(os.environ["WORLD_SIZE"])):
        l, _, _, rank = layouts[i]
        seen = record(shlex.split(explain.train_flags(model, l, 1, 1e-3)), l.gpus, rank, note)
        payload = {what: sizes[1] for what, sizes in seen.sent.items()}
        found[i] = seen.between, sum(seen.peak.values()), seen.flops, payload, seen.formula, seen.tensors
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
    """Compare the planner with dry runs, and both with the techniques' own formulas. QK-norm is tested in layouts that the dense
    model has as well: only the norms differ."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[kind]))
    c = models.load(str(tmp_path))
    layouts, errors, missed = drawn(c, count, random.Random(seed)), [], {}
    answers = pool.call(dry_runs_job, "step08_5d", world=2, timeout=900, model=str(tmp_path), layouts=layouts)
    seen = {i: one for answer in answers for i, one in answer.items()}
    for i, (l, pp, dp, rank) in enumerate(layouts):
        between, peak, multiplied, payload, formula, tensors = seen[i]
        stage = costs.our_stages(c, l)[pp]
        said = costs.our_memory(c, l, pp, stage)
        kept = between["parameters"], between["gradients"], between["optimizer states"]
        assert kept == (said["parameters"], said["gradients"], said["optimizer states"] + 4 * tensors), l
        assert multiplied == flops(c, l, stage), l
        scalars = {("", "all_reduce"): 4 + 4 + 8 * bool(c.num_local_experts)}       # loss, norm, balance
        said_sent = by_collective(costs.sent(c, l, pp, part=dp * l.cp + l.cp - 1)) + Counter(scalars)
        assert by_collective(payload) == by_collective(formula) == said_sent, l
        errors.append(sum(said.values()) / peak - 1)
        if not -plan.MEMORY_ERROR < errors[-1] < 0.06:
            missed[explain.train_flags("model", l, 1, 1e-3), rank] = round(errors[-1], 3)
    of_both = {(l.ep > l.tp) - (l.ep < l.tp) for l, *_ in layouts if min(l.ep, l.tp) > 1}
    assert of_both == {-1, 0, 1} or kind != "moe"         # ep below, equal to and above tp
    assert len(errors) == count and statistics.fmean(map(abs, errors)) < 0.012
    assert not missed


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


@pytest.mark.parametrize("groups", [2, 4, 16])
def test_a_token_goes_once_to_each_node(groups):
    """Compare the nodes that a token must reach with random choices, and check what they send."""
    draw, c = random.Random(1), models.PRESETS["qwen3-30b-a3b"]
    hit = [len({expert * groups // 128 for expert in draw.sample(range(128), 8)}) for _ in range(5000)]
    assert speed.reached(c, groups) == pytest.approx(statistics.fmean(hit), rel=0.01)
    l, cluster = Layout(dp=8 * groups, ep=8 * groups), speed.Cluster(8 * groups)
    by_expert, by_node = (speed.tokens_to_experts(c, l, cluster, {**speed.USUAL, "ep_by_node": way})[1] for way in (0, 1))
    rows = l.tokens * c.hidden_size * 2 / (cluster.network * speed.gpus.NETWORK)
    assert by_node == pytest.approx(rows * (groups - 1) / groups * speed.reached(c, groups)) and by_node < by_expert


@pytest.mark.parametrize("gpu, precision, share", [
    ("h100", "float8", 0.6), ("gb200", "mxfp8", 0.6), ("gb200", "nvfp4", 0.15 + 0.85 * 0.35), ("a100", "bfloat16", 1)])
def test_products_in_fewer_bits(gpu, precision, share):
    """Check a product's seconds beside bfloat16's, and that only a layer's products become faster."""
    c, l, cluster = models.PRESETS["llama-8b"], Layout(dp=8, zero=1), speed.Cluster(8, speed.GPUS[gpu])
    known, wide = trainers.load_constants(None), ("attention", "memory", "dp", "optimizer")
    fewer, usual = (plan.evaluate(c, l, cluster, trainers.constants_of(known, precision=one, gpu=gpu)).seconds
                    for one in (precision, "bfloat16"))
    assert trainers.product_seconds(precision, speed.GPUS[gpu]) == pytest.approx(share)
    assert [fewer[kind] for kind in wide[:2]] == [usual[kind] for kind in wide[:2]] and min(fewer.values()) >= 0
    assert fewer["products"] <= usual["products"]


def test_one_rank_has_most_tokens():
    """Check that a rank with twice the tokens takes as long as all ranks with twice the choices, and that --balance needs ep."""
    c, l, cluster = models.PRESETS["qwen3-30b-a3b"], Layout(dp=8, ep=8, zero=1, accumulation=4), speed.Cluster(8)
    even, uneven, twice = (plan.evaluate(c._replace(num_experts_per_tok=chosen), l._replace(balance=balance), cluster, CONSTANTS)
                           for chosen, balance in ((8, 1.0), (8, 2.0), (16, 1.0)))
    assert even.step < uneven.step < even.step * 2 and uneven.step == pytest.approx(twice.step, rel=0.01)
    assert even.held < uneven.held < twice.held           # the choices' outputs are kept where they were routed
    dense = plan.evaluate(models.PRESETS["llama-1b"], Layout(dp=8, balance=2.0), cluster, CONSTANTS)
    assert dense.step == plan.evaluate(models.PRESETS["llama-1b"], Layout(dp=8), cluster, CONSTANTS).step


# ------------------------------------------------------------------------------------------- the answer
def test_no_layout_is_refused_by_the_trainer(monkeypatch):
    import train
    c, cluster = models.PRESETS["tiny-moe"], speed.Cluster(16)
    seen = [one.layout for one in plan.timed(c, cluster, 4096, 64, CONSTANTS)]
    assert len(seen) > 500
    monkeypatch.setenv("WORLD_SIZE", "16")
    for l in seen[::37]:
        words = shlex.split(shlex.split(explain.command("tiny-moe", l, cluster))[-1])
        args = config.parse_args([*words[words.index("step08_5d/train.py") + 1:], "--device", "cpu"], train.TECHNIQUES)
        config.check(args, config.PRESETS["tiny-moe"], train.TECHNIQUES)
        assert args.dp * args.tp * args.cp * args.pp == 16 and args.ep == l.ep and args.zero == l.zero
        assert args.stages_per_rank == l.stages_per_rank and (args.steps, args.lr) == (1000, 3e-4)


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


def test_what_is_printed():
    question = "--model", "llama-8b", "--gpus", 16, "--global_batch_tokens", "1e6"
    first, found = run(*question), run(*question, "--details")
    assert found.returncode == 0 and first.stdout.count("\n") <= 25, found.stderr
    for part in ("this model needs at least ", "one notch", "payload of the first GPU", "sbatch --nodes 2 ",
                 "python tools/simulate 8 16 --rank "):
        assert part in found.stdout, part
    said = run("--model", "llama-405b")
    assert "no layout fits: the nearest, tp 8, " in said.stdout and "this model needs at least 128 GPUs" in said.stdout


def test_json():
    """Check that the layouts of a search all fit, best first, and that --config answers in the same form."""
    one = json.loads(run("--gpus", 64, "--config", "tp=2,zero=1,mbs=2", "--json").stdout)
    assert one["fits"] and one["tp"] == 2 and one["interval"][0] < one["tokens_per_s_per_gpu"] < one["interval"][1]
    assert one["mfu"] == pytest.approx(
        one["tokens_per_s_per_gpu"] * costs.flops_per_token(models.PRESETS["llama-8b"], 4096) / 989.5e12, rel=1e-3)
    several = json.loads(run("--gpus", 16, "--model", "llama-1b", "--json").stdout)
    ranked = [each["ranked_by"] for each in several]
    assert len(several) > 3 and set(several[0]) == set(one) and ranked == sorted(ranked, reverse=True)
    assert all(each["fits"] and each["command"] for each in several)


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


@pytest.mark.parametrize("flags, message", {
    "--gpus 12": "must be a multiple of --gpus_per_node 8", "--network carrier-pigeon": "infiniband",
    "--model nowhere-7b": "presets are", "--network 50": "from 1e+06", "--config tp=3": "!= gpus(8)",
    "--config pp=2,schedule=interleaved,v=100": "only 32 layers; use v=16 or less", "--config ep=2": "the model has none",
    "--config dp=8,acc=3,schedule=gpipe": "must be one of", "--html /nowhere/x.html": "No such file or directory",
    "--constants README.md": "did not write this file", "--fp8 --gpu a100": "cannot multiply in 8 bits",
    "--nvfp4": "h100: cannot multiply in nvfp4", "--fp8 --mxfp8 --gpu b200": "not allowed with argument",
    "--balance 0.9": "must be from 1"}.items())
def test_refused(flags, message):
    said = run(*flags.split())
    assert said.returncode == 2 and said.stdout == ""
    assert said.stderr.startswith("error: ") and said.stderr.count("\n") == 1 and message in said.stderr


# ------------------------------------------------------------------------------------------- other models
LLAMA = dict(model_type="llama", **WIDE)


@pytest.mark.parametrize("raw, message", [
    ([], "must be a mapping"), ({**LLAMA, "model_type": "gpt2"}, "model_type 'gpt2'"),
    ({**LLAMA, "hidden_size": 0}, "hidden_size 0"),
    ({**LLAMA, "num_key_value_heads": 5}, "must be a multiple of num_key"), ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({**LLAMA, "vocab_size": 10**30}, "vocab_size")])
def test_a_config_that_is_wrong(raw, message):
    with pytest.raises(trainer.Refused, match=re.escape(message)):
        models.read(raw, "it")


def test_shapes_that_are_nearly_a_llamas():
    plain = models.read(LLAMA, "it")
    qwen2, qwen3, mistral = (models.read({**LLAMA, "model_type": kind, "tie_word_embeddings": True}, "it")
                             for kind in ("qwen2", "qwen3", "mistral"))
    assert costs.model_parameters(qwen2) == costs.model_parameters(plain) + 8 * (16 + 2 * 4) * 128            # biases of q, k and v
    assert costs.model_parameters(qwen3) == costs.model_parameters(plain) + 8 * 2 * 128
    assert costs.model_parameters(mistral) == costs.model_parameters(plain)
    for model in (qwen2, qwen3, mistral):
        assert costs.parameters(model, Layout(), costs.our_stages(model, Layout())[0]) == costs.model_parameters(model)
        assert any("NOT TRAINABLE HERE" in note for note in model.notes) == (model is not qwen3)


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
