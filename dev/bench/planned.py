"""Predict runs that other teams published with their own trainers, with the planner.

    python dev/bench/planned.py              # a table of the runs, and one of the errors
    python dev/bench/planned.py --readme     # write the planner's answer into its README

The runs are tests/data/published_speeds.csv and published_runs.csv; dev/bench/published.py compares both tools with
published_unseen.csv. This module assumes what a source does not say, and states it beside each prediction. Memory is not predicted,
because we cannot know what another trainer holds.
"""
import csv
import re
import statistics
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/plan"))
import costs                                               # noqa: E402
import speed                                               # noqa: E402
import trainers                                            # noqa: E402
import trust                                               # noqa: E402
from models import PRESETS, Model                          # noqa: E402
from plan import SCHEDULES                                 # noqa: E402
from speed import GPUS                                     # noqa: E402
from steps import replace_on_page                          # noqa: E402

DATA = ROOT / "tests/data"
SHAPE = dict(vocab="vocab_size", hidden="hidden_size", intermediate="intermediate_size", layers="num_hidden_layers",
             heads="num_attention_heads", kv_heads="num_key_value_heads", head_dim="head_dim", experts="num_local_experts",
             experts_chosen="num_experts_per_tok")


DEEPSEEK_V3 = Model(129280, 7168, 2048, 61, 128, 128, 160, num_local_experts=256, num_experts_per_tok=8, shared_experts=1,
                    dense_layers=3, dense_size=18432, latent=(1536, 512, 128, 64, 128))


def predict(row):
    """Return a row's prediction, its interval, and the assumptions made. If a source leaves out the micro-batch, assume the
    fastest: a team that publishes has looked for it."""
    if row.get("micro_batch"):
        return predict_one(row, [])
    each, pp = int(row["sequences_per_step"]) // int(row["dp"] or 1), int(row["pp"] or 1)
    if row.get("trainer") == "torchtitan" and pp > 1:     # torchtitan's default
        row = {**row, "micro_batch": str(max(1, each // pp)), "stages_per_rank": "2"}
        return predict_one(row, ["as many micro-batches as ranks of pp, 2 stages per rank"])
    tried = [predict_one({**row, "micro_batch": str(size)}, [f"micro_batch {size}, the fastest"])
             for size in (1, 2, 4, 8) if each % size == 0]
    return max(tried, key=lambda one: one["planned"])


def predict_one(row, assumed):
    c, l, cluster = run_of(row, assumed)
    trainer, precision = row.get("trainer") or "this", row.get("precision") or "bfloat16"
    compiled, async_tp = row.get("compile") == "yes", row.get("async_tp") == "yes"
    k = trainers.overlay(trainer, compiled, precision, async_tp, row["gpu"].lower())
    k |= dict(gradient_bytes=2.0) if row.get("gradients") == "bfloat16" else {}
    if row.get("attention"):
        k["attention"] = trainers.CUDNN if row["attention"] == "cudnn" and row["gpu"] in trainers.HOPPER else 1.0
    if row.get("bf16_layers"):
        k["product"] = trainers.product_seconds(precision, GPUS[row["gpu"]], float(row["bf16_layers"]))
    if row.get("dispatcher"):
        k["ep_by_node"] = float(row["dispatcher"] != "alltoall")
    if row.get("ep_overlap"):
        k["ep_shown"] = trainers.EP_SHOWN if row["ep_overlap"] == "yes" else 1.0
    again = None
    if row["recompute"] == "every second" or l.recompute == "selective" and trainer == "torchtitan":
        assumed.append("selective: every second product runs again")
        again = 0.5
    with experts_cut() if row.get("etp") not in (None, "", "1") else nullcontext():
        times, stages = speed.Times(c, l, cluster, k, again=again), costs.our_stages(c, costs.Layout(pp=l.pp))
        step = sum(speed.step_seconds(c, l, cluster, stages, k, times).values())
    planned = l.batch * l.seq_len / step / l.gpus
    low, high = trust.interval(c, l, cluster, planned, precision)
    return dict(planned=round(planned, 1), low=round(low, 1), high=round(high, 1), assumed="; ".join(assumed))


@contextmanager
def experts_cut():
    """Let tp cut the experts, as trainers did before folding: a group of ep takes every tp-th rank. Each rank of tp sends its part
    of the rows, which tp then gathers."""
    whole, folded = costs.expert_layer, speed.tokens_to_experts
    cut = lambda c, l: whole(c, l) // l.tp

    def apart(c, l, cluster, k):
        once, seconds = folded(c, l, cluster, k, l.tp)
        rows = speed.BF16 * l.tokens * c.num_experts_per_tok * c.hidden_size
        return once, seconds + sum(speed.send(cluster, k, rows * (l.tp - 1) / l.tp, l.tp, 1, "all_gather"))
    with (patch.object(costs, "expert_layer", cut), patch.object(speed, "expert_layer", cut),
          patch.object(speed, "tokens_to_experts", apart),
          patch.object(costs.Layout, "expert_ranks", property(lambda l: l.dp * l.cp // l.ep))):
        yield


def model_of(row):
    known = PRESETS | {"deepseek-v3": DEEPSEEK_V3}
    return known.get(row["model"]) or Model(**{field: int(row.get(name) or 0) for name, field in SHAPE.items()})


def run_of(row, assumed):
    def number(name, otherwise):
        if row.get(name):
            return int(row[name])
        assumed.append(f"{name} {otherwise}")
        return otherwise
    c, gpu = model_of(row), GPUS[row["gpu"].lower()]
    gpu = gpu._replace(memory=int(row.get("gpu_memory_gib") or gpu.memory))
    of_96 = row["gpu"].lower() == "h100" and gpu.memory == 96                      # this one has HBM2e
    if hbm := row.get("hbm_tb_s") or "2.4" * of_96:
        gpu = gpu._replace(hbm=float(hbm) * 1e12)
    watts = number("power_w", gpu.watts)
    if watts != gpu.watts:
        assumed.append(f"{watts} W: clocks as the cube root of the power")
        gpu = speed.gpus.at_power(gpu, watts)
    dp, tp, cp, pp, ep = (int(row.get(name) or 1) for name in ("dp", "tp", "cp", "pp", "ep"))
    micro_batch, virtual, schedule = number("micro_batch", 1), 2, row["schedule"] or costs.DEFAULT_SCHEDULE
    if SCHEDULES[schedule].or_more:
        virtual = number("stages_per_rank", min(4, -(-c.num_hidden_layers // pp)))
    # `fsdp` keeps gathered weights, and whole gradients until the last micro-batch, so it sends what ZeRO-1 does
    zero = {"3": 3, "fsdp": 1, "2": 2, "1": 1}.get(row["fsdp_stage"], 0)
    l = costs.Layout(
        dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, schedule=schedule, virtual=virtual, micro_batch=micro_batch,
        accumulation=max(1, round(int(row["sequences_per_step"]) / dp / micro_batch)), seq_len=int(row["seq_len"]),
        recompute=(row["recompute"] or "none").replace("every second", "selective"))
    network, node = float(row.get("network_gb_s") or 50) * 1e9, int(row.get("gpus_per_node") or 8)
    return c, l, speed.Cluster(int(row["gpus"]), gpu, network, node)


# ------------------------------------------------------------------------------------------- published runs
def read(name):
    with open(DATA / name, newline="") as file:
        return list(csv.DictReader(file))


def published():
    """Yield every published run but the unseen ones, with its measured speed, the planner's prediction and its interval."""
    simulated = [of_a_simulated_run(row) for row in read("published_runs.csv")]
    others = [row for row in read("published_speeds.csv") if "table 1" not in row["source"]]       # table 1 is among the simulated
    for row in simulated + others:
        yield dict(row, published=measured_speed(row), simulated=row in simulated, **predict(row))


def of_a_simulated_run(run):
    """Turn a row of published_runs.csv, all of which are ZeRO-3 alone, into one of published_speeds.csv."""
    batch = int(run["gpus"]) * int(run["micro_batch"]) * int(run["accumulation"])
    return dict(run, dp=run["gpus"], tp="", cp="", pp="", fsdp_stage="3", schedule="", sequences_per_step=str(batch),
                power_w=run["watts"], precision="bfloat16", head_dim=str(int(run["hidden"]) // int(run["heads"])),
                trainer="torchtitan" if "torchtitan" in run["source"] else "this", tflops_per_gpu="")


def measured_speed(row):
    """Return the tokens per second per GPU, as published or computed from the FLOPs, which count half of attention."""
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"])
    return float(row["tflops_per_gpu"]) * 1e12 / costs.flops_per_token(model_of(row), int(row["seq_len"]), causal=True)


def table():
    """Yield the lines of a table of the runs, and of one of their errors."""
    yield "| run | published | planned | | four of five |"
    yield "|---|---|---|---|---|"
    runs = list(published())
    for run in runs:
        if run["simulated"]:                              # these are in the simulator's table
            continue
        cut = "".join(f", {name} {run[name]}" for name in ("tp", "pp") if run[name] not in ("", "1"))
        more = ", " + run["schedule"] if run["schedule"] else ""
        more += ", compiled" * (run["compile"] == "yes") + ", float8" * (run["precision"] == "float8")
        more += ", asynchronous tp" * (run["async_tp"] == "yes" and run["trainer"] == "torchtitan")
        more += ", fitted" * bool(run["fitted"])
        yield (f"| {run['trainer']}: {run['model']}, {int(run['gpus']):,} {run['gpu']}{cut}{more} | {run['published']:,.0f} | "
               f"{run['planned']:,.0f} | {run['planned'] / run['published'] - 1:+.0%} | {run['low']:,.0f} to {run['high']:,.0f} |")
    yield ""
    kinds = {"all": lambda run: True, "A100": lambda run: run["gpu"].lower() == "a100",
             "Megatron's GPTs": lambda run: "gpt-" in run["model"],
             "ZeRO-3 alone, H100": lambda run: run["gpu"].lower() == "h100" and run["tp"] in ("", "1") and run["pp"] in ("", "1")}
    yield "| not fitted | runs | planned / published, median | error, median | inside the interval |"
    yield "|---|---|---|---|---|"
    for kind, is_one in kinds.items():
        some = [run for run in runs if not run["fitted"] and is_one(run)]
        ratios = [run["planned"] / run["published"] for run in some]
        inside = statistics.fmean(run["low"] <= run["published"] <= run["high"] for run in some)
        error = statistics.median(abs(one - 1) for one in ratios)
        yield f"| {kind} | {len(some)} | {statistics.median(ratios):.2f} | {error:.0%} | {inside:.0%} |"


# ------------------------------------------------------------------------------------------- the planner's README
README = ROOT / "tools/plan/README.md"


def answer():
    """Return what the first command of the README prints, as a block of code."""
    words = re.search(r"^python tools/plan (.*)$", README.read_text(), re.M)[1]
    done = subprocess.run([sys.executable, README.parent, *words.split()], capture_output=True, text=True, check=True)
    return "\n".join(["```text", *map(str.rstrip, done.stdout.splitlines()), "```\n"])


def main(argv):
    if argv != ["--readme"]:
        return print("\n".join(table()))
    replace_on_page(README, "query", answer())


if __name__ == "__main__":
    main(sys.argv[1:])
