"""How long a training step takes: physics of the hardware, with constants that were fitted to runs on H100.

The runs are those of a production trainer, nanotron (tests/data); tests/fit_plan.py fits, and prints the
table TIME. What was seen of it alone, and is not expected of this trainer, is in nanotron.py.
"""
import math
from typing import NamedTuple

from costs import BF16, FLOAT32, dense_layer, expert_layer, kv_parts, parameters, repeated


# ---------------------------------------------------------------------- hardware, from datasheets
class Gpu(NamedTuple):
    flops: float                     # bfloat16, dense, per second
    hbm: float                       # bytes per second of its memory
    memory: float                    # GiB
    nvlink: float                    # bytes per second to other GPUs of the node, one direction


GPUS = {"a100": Gpu(312e12, 2.0e12, 80, 300e9), "h100": Gpu(989.5e12, 3.35e12, 80, 450e9),
        "h200": Gpu(989.5e12, 4.8e12, 141, 450e9), "b200": Gpu(2250e12, 8.0e12, 180, 900e9)}
NETWORKS = {"infiniband": 50e9, "ethernet": 12.5e9}      # bytes per second per GPU: 400 and 100 Gbit/s


class Cluster(NamedTuple):
    gpus: int
    gpu: Gpu = GPUS["h100"]
    network: float = NETWORKS["infiniband"]
    gpus_per_node: int = 8

    @property
    def nodes(self):
        return -(-self.gpus // self.gpus_per_node)


# ---------------------------------------------------------------------- what was fitted
# By tests/fit_plan.py on 641 runs. [P] physics: the datasheet's or a known number is near it. [F] fudge:
# nobody knows why it is so large, or it stands for many small things.
USABLE = 70.5                     # [F] GiB of an 80 GB GPU: memory is in pieces, and others hold some
TIME = dict(
    gemm_efficiency=0.604,        # [P] of the peak, what a large matrix product reaches
    head_efficiency=0.903,    # [F] the head's; more than any product reaches, loss_bytes has some of its time
    wave_tail=0.186,              # [P] waves of tiles lost per product: the last wave does not fill the GPU
    elementwise_bytes=430.0,      # [F] per token and hidden, of norms, rotary, SwiGLU, residuals
    loss_bytes=131.0,             # [F] per token and word of the vocabulary, by softmax in float32
    launch=0.00437,              # [P] s per layer with tp: Python and launches, both directions; half without
    nvlink_efficiency=0.847,      # [P] of the datasheet
    network_efficiency=0.959,     # [P] of the datasheet, on two nodes
    congestion=0.18,              # [F] the network's speed falls with (nodes / 2) to this power
    hop=5.16e-5,                  # [P] s, the latency of a step of a tp ring that leaves the node
    fill_launch=0.388,            # [F] share of launch that is left while a pipeline fills and empties
    overlap=0.388,             # [P] of the last micro-batch: gradients are reduced behind it; backward is 2/3
    gather_hop=6.88e-6,           # [P] s per rank and gather or reduction of ZeRO: its latency
    optimizer_bytes=89.3,         # [F] per parameter that a rank updates, read and written; 40 would do
    jitter=0.0146,                # [F] per doubling of the nodes: everybody waits for the slowest
    step=0.0411)                  # [F] s per step, whatever it is
ATTENTION_EFFICIENCY = 0.45       # of the peak: flash attention, forward and backward
ACCUMULATE_BYTES = 10             # per parameter and micro-batch: a bfloat16 gradient added to a float32 sum
TILE = 132 * 128 * 256            # numbers that all multiprocessors of an H100 make at a time


# ---------------------------------------------------------------------- a training step
def step_seconds(c, l, cluster, stages, k=TIME):
    """A training step, split into what the slowest rank of a pipeline spends it on."""
    launch = launch_seconds(l, k)
    seconds, last = pipeline_seconds(c, l, cluster, stages, k, [stage.layers * launch for stage in stages])
    if l.pp > 1:                                          # 1F1B waits for a message there and back
        speed, _ = link(cluster, k, l.pp, l.dp * l.cp * l.tp)
        messages = 2 * l.accumulation * l.stages_per_rank
        seconds["pp"] = messages * BF16 * l.tokens * c.hidden_size / l.tp / speed
    seconds |= data_parallel_seconds(c, l, cluster, stages[0], k, last)
    return with_jitter(seconds, cluster, k)


def launch_seconds(l, k):
    return k["launch"] * (1 if l.tp > 1 else 0.5)


def with_jitter(seconds, cluster, k):
    slower = 1 + k["jitter"] * math.log2(cluster.nodes)
    return {name: s * (1 if name in ("dp", "optimizer", "other") else slower) for name, s in seconds.items()}


def pipeline_seconds(c, l, cluster, stages, k, host):
    """All micro-batches on the slowest rank and the bubble, by what they are spent on; and how long the first
    rank works on the last micro-batch. host: for each rank, what Python and launches take of a micro-
    batch."""
    one, m, h = layer_seconds(c, l, cluster, k), l.accumulation, c.hidden_size
    head = product_seconds(cluster, k, l.tokens, h, c.vocab_size / l.tp, k["head_efficiency"])
    head += ACCUMULATE_BYTES * c.vocab_size * h / l.tp / cluster.gpu.hbm
    loss = l.tokens * c.vocab_size / l.tp * k["loss_bytes"] / cluster.gpu.hbm
    gpu = [stage.layers * sum(one.values()) + stage.head * head + stage.loss * loss for stage in stages]
    busy = [soft_max(works, python) for works, python in zip(gpu, host)]           # at the same time
    filling = [soft_max(works, python * k["fill_launch"]) for works, python in zip(gpu, host)]
    slowest = max(range(l.pp), key=lambda rank: busy[rank])
    layers = stages[slowest].layers
    ends = stages[slowest].head * head + stages[slowest].loss * loss
    seconds = {name: m * layers * one[name] for name in ("tp", "cp", "ep")}
    seconds["compute"] = m * (layers * one["compute"] + ends)
    seconds["launch"] = m * (busy[slowest] - gpu[slowest])
    of_1f1b = dict(interleaved=1 / l.stages_per_rank, zerobubble=1 / 3, dualpipe=1 / 6)
    idle = of_1f1b.get(l.schedule, 1)
    seconds["bubble"] = idle * (sum(filling) - max(filling)) if l.pp > 1 else 0.0
    return seconds, busy[0] if l.pp == 1 else filling[0]


# ---------------------------------------------------------------------- a layer
def layer_seconds(c, l, cluster, k):
    """A layer, one micro-batch, forward and backward, by what it is spent on."""
    t, h, gpu = l.tokens, c.hidden_size, cluster.gpu
    experts = max(1, c.num_experts_per_tok)
    weights = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    weights += 3 * experts * c.intermediate_size
    products = product_seconds(cluster, k, t, weights, h / l.tp, k["gemm_efficiency"])
    padded = -(-c.head_dim // 64) * 64                    # flash attention has kernels for 64 and 128
    scores = 6 * t * l.seq_len * c.num_attention_heads * padded / l.tp
    attention = scores / (gpu.flops * ATTENTION_EFFICIENCY)
    held = dense_layer(c, l) + bool(c.num_local_experts) * expert_layer(c, l)
    memory = (t * k["elementwise_bytes"] * h / l.tp + ACCUMULATE_BYTES * held) / gpu.hbm
    short = products / 3 * repeated(c, l) * l.tp / weights                         # that tp made so
    forward = (products + attention + memory) / 3
    again = {"none": 0, "selective": 0.25 * memory + short, "full": forward}[l.recompute]
    forwards = 1 if l.recompute == "none" else 2
    seconds = dict(compute=products + attention + memory + again, tp=0.0, cp=0.0, ep=0.0)
    if l.tp > 1:                                          # in and out of two regions, forward and backward
        speed, leaves = link(cluster, k, l.tp, 1)
        halves = 5 + 3 * forwards                         # of all-reduces
        latency = leaves * (l.tp - 1) * k["hop"]
        seconds["tp"] = halves * (BF16 * t * h * (l.tp - 1) / l.tp / speed + latency)
    if l.cp > 1:                                 # a hop of the ring is hidden behind attention with one block
        speed, _ = link(cluster, k, l.cp, l.tp)
        kv = 2 * t * c.num_key_value_heads * c.head_dim / kv_parts(c, l)
        there_and_back = forwards * BF16 + BF16 + FLOAT32
        seconds["cp"] = exposed(there_and_back * (l.cp - 1) * kv / speed, attention)
    if l.ep > 1:                                          # nothing to hide behind
        speed, leaves = link(cluster, k, l.ep, l.tp)
        speed = min(speed, cluster.network * k["network_efficiency"]) if leaves else speed
        seconds["ep"] = 2 * (forwards + 1) * BF16 * t * experts * h * (l.ep - 1) / l.ep / speed
    return seconds


def product_seconds(cluster, k, rows, inner, columns, efficiency):
    """A matrix product, forward and backward: 6 FLOPs per row and weight. The last wave of tiles fills the
    GPU in part."""
    waves = rows * columns / TILE
    return 6 * rows * inner * columns / (cluster.gpu.flops * efficiency * waves / (waves + k["wave_tail"]))


# ---------------------------------------------------------------------- once a step
def data_parallel_seconds(c, l, cluster, stage, k, last):
    """Gradients are reduced behind the last micro-batch's backward; what ZeRO gathers; the update. Experts
    are reduced among those ranks that have the same."""
    ranks = l.dp * l.cp
    experts = stage.layers * bool(c.num_local_experts) * expert_layer(c, l)
    others = parameters(c, l, stage) - experts
    parts = [(others, ranks, l.tp), (experts, ranks // l.ep, l.tp * l.ep)]   # held by how many, how far apart
    updated = sum(held / (copies if l.zero else 1) for held, copies, _ in parts)
    seconds = dict(dp=0.0, optimizer=updated * k["optimizer_bytes"] / cluster.gpu.hbm, other=k["step"])
    if ranks == 1:
        return seconds
    byte = sum(ring_seconds(cluster, k, held, copies, stride) for held, copies, stride in parts)
    reduce = FLOAT32 * byte * (1 if l.zero else 2)
    latency = k["gather_hop"] * ranks * (stage.layers + 2)                       # of a ring through all units
    if l.zero < 2:
        seconds["dp"] += exposed(reduce, k["overlap"] * last)
    if l.zero == 2:                                       # after every micro-batch
        seconds["dp"] += l.accumulation * exposed(reduce + latency, k["overlap"] * last)
    if l.zero in (1, 2):                               # the new weights, unit by unit behind the next forward
        seconds["dp"] += exposed(BF16 * byte + latency, k["overlap"] * last / 2)
    if l.zero == 3:                                       # gathered twice and reduced: behind forward too
        gathers = 1 if l.pp > 1 else 2 * l.accumulation
        moved = gathers * (BF16 * byte + latency) + l.accumulation * (reduce + latency)
        seconds["dp"] += exposed(moved, 1.5 * k["overlap"] * l.accumulation * last)
    return seconds


# ---------------------------------------------------------------------- the network, and what hides what
def link(cluster, k, ranks, stride):
    """Bytes per second of a ring over ranks that are so far apart, and whether it leaves the node. Each GPU
    has a network card; a ring has those of all its GPUs in a node."""
    neighbours = max(1, cluster.gpus_per_node // stride)
    inside = cluster.gpu.nvlink * k["nvlink_efficiency"]
    if ranks <= neighbours:
        return inside, False
    slower = max(1, cluster.nodes / 2) ** -k["congestion"]
    return min(inside, neighbours * cluster.network * k["network_efficiency"] * slower), True


def ring_seconds(cluster, k, held, ranks, stride):
    """One byte of each parameter held, once round the ranks that have it."""
    speed, _ = link(cluster, k, ranks, stride)
    return held * (ranks - 1) / ranks / speed


def soft_max(a, b, sharpness=5):
    """The larger of two times that overlap, and a bit more where they are alike."""
    top = max(a, b)
    return top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1 / sharpness) if top else 0.0


def exposed(seconds, hidden):
    """What is left of a transfer behind work, smoothly: a network is not that punctual."""
    width = 0.15 * seconds + 1e-6
    x = (seconds - hidden) / width
    return width * math.log1p(math.exp(x)) if x < 50 else seconds - hidden
