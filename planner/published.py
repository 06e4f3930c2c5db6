"""Runs that other teams published, of their own trainers: --predict takes a file of them too.

What a source does not say is assumed here, and stated beside each prediction.
"""
import math

import costs
import speed
import trust
from costs import Layout
from models import PRESETS
from plan import RECOMPUTE, SCHEDULES, impossible
from speed import GPUS, Cluster
from trainer import refuse

KEYS = ("source", "model", "gpus", "gpu", "dp", "tp", "cp", "pp", "fsdp_stage", "schedule", "seq_len",
        "sequences_per_step", "micro_batch", "recompute")
PREDICTED = ("pred_tok_s_gpu", "pred_low", "pred_high", "pred_tflops", "pred_mem_gb", "pred_oom",
             "provenance", "assumed")
NEEDED = ("gpus", "seq_len", "sequences_per_step")
NUMBERS = (*NEEDED, "dp", "tp", "cp", "pp", "micro_batch", "stages_per_rank", "gpu_memory_gib", "power_w")
MOST = 10**7                                              # of any of them
CHOICES = dict(model=tuple(PRESETS), gpu=tuple(GPUS), fsdp_stage=("", "0", "1", "2", "3", "fsdp"),
               schedule=("", *SCHEDULES), recompute=("", *RECOMPUTE), compile=("", "yes", "no"))
HBM = {("h100", 96): 2.4e12}                              # the H100 of 96 GB has HBM2e
COMPILED = dict(memory=0.4, loss=0.5)                    # by judgement: a chain of passes becomes one or two
TRAINER = 0.10                                            # what another trainer may be off by, by judgement


def predict(row, time=speed.USUAL):
    """The row's predictions, and the assumptions made. What that trainer holds nobody knows: no memory."""
    assumed = []
    c, l, cluster = run_of(row, assumed)
    k = dict(time)
    if row.get("compile") == "yes":
        said = "compiled: {memory} of the bytes, {loss} of the loss's"
        assumed.append(said.format(**COMPILED))
        k |= {name: k[name] * share for name, share in COMPILED.items()}
    again = None
    if l.recompute == "selective" and "torchtitan" in row["source"]:
        assumed.append("selective: every second product runs again")
        again = 0.5
    times = speed.Times(c, l, cluster, k, gathers_again=False, again=again)
    if row.get("precision", "bfloat16") != "bfloat16":
        assumed.append(f"{row['precision']} predicted as bfloat16: a bound from below")
    stages = costs.our_stages(c, Layout(pp=l.pp))
    step = sum(speed.step_seconds(c, l, cluster, stages, k, times).values())
    tokens = l.dp * l.micro_batch * l.accumulation * l.seq_len / step / l.gpus
    off = [math.copysign(math.hypot(x, TRAINER), x) for x in trust.off_by(c, l, cluster)]
    return dict(
        pred_tok_s_gpu=round(tokens, 1), pred_low=round(tokens * math.exp(off[0]), 1),
        pred_high=round(tokens * math.exp(off[1]), 1),
        pred_tflops=round(tokens * costs.flops_per_token(c, l.seq_len, causal=True) / 1e12, 1),
        pred_mem_gb="", pred_oom="", provenance=trust.provenance(c, l, cluster), assumed="; ".join(assumed))


def run_of(row, assumed):
    """(model, layout, cluster)"""
    def number(name, otherwise):
        if row.get(name):
            return int(row[name])
        assumed.append(f"{name} {otherwise}")
        return otherwise
    c, gpu = PRESETS[row["model"]], GPUS[row["gpu"].lower()]
    memory = int(row.get("gpu_memory_gib") or gpu.memory)
    gpu = gpu._replace(memory=memory, hbm=HBM.get((row["gpu"].lower(), memory), gpu.hbm))
    watts = number("power_w", gpu.watts)
    if watts != gpu.watts:
        assumed.append(f"{watts} W: clocks as the cube root of the power")
        gpu = speed.gpus.at_power(gpu, watts)
    dp, tp, cp, pp = (int(row[name] or 1) for name in ("dp", "tp", "cp", "pp"))
    micro_batch, virtual = number("micro_batch", 1), 2
    if row["schedule"] == "interleaved":
        virtual = number("stages_per_rank", -(-c.num_hidden_layers // pp))
    # `fsdp` keeps what it gathered, and gradients until the last micro-batch: it sends what ZeRO-1 does
    zero = {"3": 3, "fsdp": 1, "2": 2, "1": 1}.get(row["fsdp_stage"], 0)
    accumulation = max(1, round(int(row["sequences_per_step"]) / dp / micro_batch))
    l = Layout(dp=dp, tp=tp, cp=cp, pp=pp, zero=zero, schedule=row["schedule"] or "1f1b", virtual=virtual,
               micro_batch=micro_batch, accumulation=accumulation, seq_len=int(row["seq_len"]),
               recompute=row["recompute"] or "none")
    return c, l, Cluster(int(row["gpus"]), gpu)


def measured(row):
    """Tokens per second and GPU, as published or out of its FLOPs, which count half of attention."""
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"])
    flops = costs.flops_per_token(PRESETS[row["model"]], int(row["seq_len"]), causal=True)
    return float(row["tflops_per_gpu"]) * 1e12 / flops


def check(row, where):
    for name, known in CHOICES.items():
        value = row.get(name, "")
        if (value.lower() if name == "gpu" else value) not in known:
            refuse(f"{where}: {name} {value!r} is not known; it is one of {', '.join(filter(None, known))}")
    for name in NUMBERS:
        value = row.get(name, "")
        left_out = value == "" and name not in NEEDED
        if not left_out and not (value.isdecimal() and len(value) < 10 and 1 <= int(value) <= MOST):
            refuse(f"{where}: {name} {value!r} must be a whole number from 1 to {MOST:,}")
    c, l, _ = run_of(row, [])
    if l.gpus != int(row["gpus"]):
        refuse(f"{where}: dp({l.dp}) x tp({l.tp}) x cp({l.cp}) x pp({l.pp}) = {l.gpus} != "
               f"gpus({row['gpus']})")
    # its two ends may be stages of their own, which this trainer's are not: 126 layers in 128 stages
    most = -(-c.num_hidden_layers // l.pp)
    if l.schedule == "interleaved" and l.virtual > most:
        refuse(f"{where}: stages_per_rank {l.virtual} is more than {c.num_hidden_layers} layers / pp({l.pp})")
    if why := impossible(c, l._replace(virtual=min(l.virtual, c.num_hidden_layers // l.pp))):
        refuse(f"{where}: {why}")
