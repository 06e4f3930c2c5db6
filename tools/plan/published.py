"""Predict runs that other teams published, with their own trainers: --predict takes a file of these too. This module
assumes what a source does not say, and states it beside each prediction.
"""
import costs
import speed
import trainers
import trust
from costs import DEFAULT_SCHEDULE
from models import PRESETS, Model
from plan import RECOMPUTE, SCHEDULES, impossible
from speed import GPUS
from trainer import fail

KEYS = ("source", "model", "gpus", "gpu", "dp", "tp", "cp", "pp", "fsdp_stage", "schedule", "seq_len",
        "sequences_per_step", "micro_batch", "recompute")
NEEDED = ("gpus", "seq_len", "sequences_per_step")
SHAPE = dict(vocab="vocab_size", hidden="hidden_size", intermediate="intermediate_size",
             layers="num_hidden_layers", heads="num_attention_heads", kv_heads="num_key_value_heads",
             head_dim="head_dim")
EXPERTS = dict(experts="num_local_experts", experts_chosen="num_experts_per_tok")      # a model may have none
NUMBERS = (*NEEDED, "dp", "tp", "cp", "pp", "ep", "micro_batch", "stages_per_rank", "gpu_memory_gib", "power_w",
           "gpus_per_node", *SHAPE, *EXPERTS)
MOST = 10**7                                              # for each of these numbers
CHOICES = dict(gpu=tuple(GPUS), fsdp_stage=("", "0", "1", "2", "3", "fsdp"), schedule=("", *SCHEDULES),
               recompute=("", *RECOMPUTE, "every second"), compile=("", "yes", "no"),
               trainer=("", *trainers.TRAINERS), precision=("", "bfloat16", "float8"),
               gradients=("", "float32", "bfloat16"), attention=("", "flash2", "cudnn"))


def predict(row):
    """Return the row's predictions, and the assumptions made. Memory is not predicted, since we cannot know what that
    trainer holds. If a source leaves out the micro-batch, assume the fastest: a team that publishes has looked for it."""
    if row.get("micro_batch"):
        return predict_one(row, [])
    each, pp = int(row["sequences_per_step"]) // int(row["dp"] or 1), int(row["pp"] or 1)
    if row.get("trainer") == "torchtitan" and pp > 1:     # torchtitan's default
        row = {**row, "micro_batch": str(max(1, each // pp)), "stages_per_rank": "2"}
        return predict_one(row, ["as many micro-batches as ranks of pp, 2 stages per rank"])
    tried = [predict_one({**row, "micro_batch": str(size)}, [f"micro_batch {size}, the fastest"])
             for size in (1, 2, 4, 8) if each % size == 0]
    return max(tried, key=lambda one: one["pred_tok_s_gpu"])


def predict_one(row, assumed):
    c, l, cluster = run_of(row, assumed)
    trainer, float8 = row.get("trainer") or "this", row.get("precision") == "float8"
    compiled, async_tp = row.get("compile") == "yes", row.get("async_tp") == "yes"
    k = trainers.overlay(trainer, compiled, float8, async_tp, row["gpu"].lower())
    k |= dict(gradient_bytes=2.0) if row.get("gradients") == "bfloat16" else {}
    if row.get("attention"):
        k["attention"] = trainers.CUDNN if row["attention"] == "cudnn" and row["gpu"] in trainers.HOPPER else 1.0
    again = None
    if row["recompute"] == "every second" or l.recompute == "selective" and trainer == "torchtitan":
        assumed.append("selective: every second product runs again")
        again = 0.5
    times = speed.Times(c, l, cluster, k, again=again)
    stages = costs.our_stages(c, costs.Layout(pp=l.pp))
    step = sum(speed.step_seconds(c, l, cluster, stages, k, times).values())
    tokens = l.batch * l.seq_len / step / l.gpus
    low, high = trust.interval(c, l, cluster, tokens, float8)
    return dict(
        pred_tok_s_gpu=round(tokens, 1), pred_low=round(low, 1), pred_high=round(high, 1),
        pred_tflops=round(tokens * costs.flops_per_token(c, l.seq_len, causal=True) / 1e12, 1),
        pred_mem_gb="", pred_oom="", provenance=trust.provenance(c, l, cluster, trainer),
        assumed="; ".join(assumed))


def model_of(row):
    if row["model"] in PRESETS:
        return PRESETS[row["model"]]
    return Model(**{field: int(row.get(name) or 0) for name, field in (SHAPE | EXPERTS).items()})


def run_of(row, assumed):
    def number(name, otherwise):
        if row.get(name):
            return int(row[name])
        assumed.append(f"{name} {otherwise}")
        return otherwise
    c, gpu = model_of(row), GPUS[row["gpu"].lower()]
    gpu = gpu._replace(memory=int(row.get("gpu_memory_gib") or gpu.memory))
    of_96 = row["gpu"].lower() == "h100" and gpu.memory == 96      # this one has HBM2e
    if hbm := row.get("hbm_tb_s") or "2.4" * of_96:
        gpu = gpu._replace(hbm=float(hbm) * 1e12)
    watts = number("power_w", gpu.watts)
    if watts != gpu.watts:
        assumed.append(f"{watts} W: clocks as the cube root of the power")
        gpu = speed.gpus.at_power(gpu, watts)
    dp, tp, cp, pp, ep = (int(row.get(name) or 1) for name in ("dp", "tp", "cp", "pp", "ep"))
    micro_batch, virtual = number("micro_batch", 1), 2
    schedule = row["schedule"] or DEFAULT_SCHEDULE
    if SCHEDULES[schedule].or_more:
        virtual = number("stages_per_rank", min(4, -(-c.num_hidden_layers // pp)))
    # `fsdp` keeps gathered weights, and whole gradients until the last micro-batch, so it sends what ZeRO-1 does
    zero = {"3": 3, "fsdp": 1, "2": 2, "1": 1}.get(row["fsdp_stage"], 0)
    accumulation = max(1, round(int(row["sequences_per_step"]) / dp / micro_batch))
    l = costs.Layout(
        dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, schedule=schedule, virtual=virtual,
        micro_batch=micro_batch, accumulation=accumulation, seq_len=int(row["seq_len"]),
        recompute=(row["recompute"] or "none").replace("every second", "selective"))
    network, node = float(row.get("network_gb_s") or 50) * 1e9, int(row.get("gpus_per_node") or 8)
    return c, l, speed.Cluster(int(row["gpus"]), gpu, network, node)


def check(row, where):
    for name, known in CHOICES.items():
        value = row.get(name, "")
        if (value.lower() if name == "gpu" else value) not in known:
            fail(f"{where}: {name} {value!r} is unknown; choose from {', '.join(filter(None, known))}")
    if row.get("precision") == "float8" and not GPUS[row["gpu"].lower()].float8:
        fail(f"{where}: gpu {row['gpu']} cannot multiply in 8 bits")
    for name in NUMBERS:
        value = row.get(name, "")
        left_out = value == "" and name not in NEEDED
        if not left_out and not (value.isdecimal() and len(value) < 10 and 1 <= int(value) <= MOST):
            fail(f"{where}: {name} {value!r} must be a whole number from 1 to {MOST:,}")
    for name in ("hbm_tb_s", "network_gb_s"):
        try:
            known = 0 < float(row.get(name) or 1) < MOST
        except ValueError:
            known = False
        if not known:
            fail(f"{where}: {name} {row[name]!r} must be a positive number")
    if row["model"] not in PRESETS and not all(row.get(name) for name in SHAPE):
        fail(f"{where}: model {row['model']!r} is unknown; choose from {', '.join(PRESETS)}, or fill in "
             f"{', '.join(SHAPE)}")
    c, l, _ = run_of(row, [])
    if l.gpus != int(row["gpus"]):
        fail(f"{where}: dp({l.dp}) x tp({l.tp}) x cp({l.cp}) x pp({l.pp}) = {l.gpus} != "
             f"gpus({row['gpus']})")
    # another trainer's ends may be stages of their own, unlike this one's: 126 layers in 128 stages
    most = -(-c.num_hidden_layers // l.pp)
    if SCHEDULES[l.schedule].or_more and l.virtual > most:
        fail(f"{where}: stages_per_rank {l.virtual} is more than {c.num_hidden_layers} layers / pp({l.pp})")
    if why := impossible(c, l._replace(virtual=min(l.virtual, c.num_hidden_layers // l.pp))):
        fail(f"{where}: {why}")
