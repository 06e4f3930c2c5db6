"""How long a training step takes: physics of the hardware, with constants that were fitted to thousands of runs on H100.

The runs are those of a production trainer, NANOTRON (tests/data); tests/fit_plan.py fits, and prints the table TIME. What was
seen of it alone is marked so, and left out for this trainer.
"""
import math
from typing import NamedTuple

from costs import BF16, FLOAT32, dense_layer, expert_layer, kv_parts, parameters, repeated


# ------------------------------------------------------------------------------------------- hardware, from datasheets
class Gpu(NamedTuple):
    flops: float                                          # bfloat16, dense, per second
    hbm: float                                            # bytes per second of its memory
    memory: float                                         # GiB
    nvlink: float                                         # bytes per second to other GPUs of the node, one direction


GPUS = {"a100": Gpu(312e12, 2.0e12, 80, 300e9), "h100": Gpu(989.5e12, 3.35e12, 80, 450e9),
        "h200": Gpu(989.5e12, 4.8e12, 141, 450e9), "b200": Gpu(2250e12, 8.0e12, 180, 900e9)}
NETWORKS = {"infiniband": 50e9, "ethernet": 12.5e9}       # bytes per second per GPU: 400 and 100 Gbit/s


class Cluster(NamedTuple):
    gpus: int
    gpu: Gpu = GPUS["h100"]
    network: float = NETWORKS["infiniband"]
    gpus_per_node: int = 8

    @property
    def nodes(self):
        return -(-self.gpus // self.gpus_per_node)


USABLE = 70.5                                             # [F] GiB of an 80 GB GPU: beyond it runs fail, for memory is in pieces and others hold some

# Fitted on 641 runs, by tests/fit_plan.py, which prints this table. [P] physics: the datasheet's or a known number is near it.
# [F] fudge: nobody knows why it is so large, or it stands for many small things.
TIME = dict(
    gemm_efficiency=0.604,                                # [P] of the peak, what a large matrix product reaches
    head_efficiency=0.903,                                # [F] the head's, the largest product of all; more than any reaches: loss_bytes has taken of its time
    wave_tail=0.186,                                      # [P] waves of tiles lost per product: the last wave does not fill the GPU
    elementwise_bytes=430.0,                              # [F] per token and hidden, read and written by norms, rotary, SwiGLU, residuals
    loss_bytes=131.0,                                     # [F] per token and word of the vocabulary, by softmax in float32
    launch=0.00437,                                       # [P] s per layer: Python and kernel launches, both directions, with tp; half of it without
    nvlink_efficiency=0.847,                              # [P] of the datasheet
    network_efficiency=0.959,                             # [P] of the datasheet, on two nodes
    congestion=0.18,                                      # [F] the network's speed falls with (nodes / 2) to this power
    hop=5.16e-5,                                          # [P] s, a step of a tp ring that leaves the node: the latency of the network and its software
    stall_hop=0.000281,                                   # [F] s, of NANOTRON only: a step of a tp ring when pp crosses nodes
    stall_node=5.65e-5,                                   # [F] s, the same, per rank of tp and node that its ring leaves for
    stage=0.00526,                                        # [F] s per micro-batch, of NANOTRON only: when pp crosses nodes
    fill_launch=0.388,                                    # [F] share of launch and stall that is left while a pipeline fills and empties
    overlap=0.388,                                        # [P] share of the last micro-batch behind which gradients are reduced; backward is 2/3
    gather_efficiency=0.273,                              # [F] of the network: ZeRO-1 gathers weights tensor by tensor
    gather_hop=6.88e-6,                                   # [P] s per tensor and rank of dp: the latency of these gathers
    unhidden_efficiency=0.0689,                           # [F] of the network: NANOTRON reduces without ZeRO and with pp after the step
    optimizer_bytes=89.3,                                 # [F] per parameter that a rank updates, read and written; 40 would do
    jitter=0.0146,                                        # [F] per doubling of the nodes: everybody waits for the slowest
    step=0.0411)                                          # [F] s per step, whatever it is
ATTENTION_EFFICIENCY = 0.45                               # of the peak: flash attention, forward and backward
ACCUMULATE_BYTES = 10                                     # per parameter and micro-batch: a bfloat16 gradient added to a float32 sum
TILE = 132 * 128 * 256                                    # numbers that all multiprocessors of an H100 make at a time


# ------------------------------------------------------------------------------------------- time
def soft_max(a, b, sharpness=5):
    """The larger of two times that overlap, and a bit more where they are alike."""
    top = max(a, b)
    return top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1 / sharpness) if top else 0.0


def exposed(seconds, hidden):
    """What is left of a transfer behind work, smoothly: a network is not that punctual."""
    width = 0.15 * seconds + 1e-6
    x = (seconds - hidden) / width
    return width * math.log1p(math.exp(x)) if x < 50 else seconds - hidden


def link(cluster, k, ranks, stride):
    """Bytes per second of a ring over ranks that are so far apart, and whether it leaves the node."""
    neighbours, inside = max(1, cluster.gpus_per_node // stride), cluster.gpu.nvlink * k["nvlink_efficiency"]
    if ranks <= neighbours:
        return inside, False
    slower = max(1, cluster.nodes / 2) ** -k["congestion"]                         # each GPU has a network card, a ring has those of all its GPUs
    return min(inside, neighbours * cluster.network * k["network_efficiency"] * slower), True


def product_seconds(cluster, k, rows, inner, columns, efficiency):
    """A matrix product, forward and backward: 6 FLOPs per row and weight, and the last wave of tiles fills the GPU in part."""
    waves = rows * columns / TILE
    return 6 * rows * inner * columns / (cluster.gpu.flops * efficiency * waves / (waves + k["wave_tail"]))


def layer_seconds(c, l, cluster, k):
    """A layer, one micro-batch, forward and backward, by what it is spent on."""
    t, h, gpu = l.tokens, c.hidden_size, cluster.gpu
    experts = max(1, c.num_experts_per_tok)
    weights = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim + 3 * experts * c.intermediate_size
    products = product_seconds(cluster, k, t, weights, h / l.tp, k["gemm_efficiency"])
    padded = -(-c.head_dim // 64) * 64                    # flash attention has kernels for 64 and 128
    attention = 6 * t * l.seq_len * c.num_attention_heads * padded / l.tp / (gpu.flops * ATTENTION_EFFICIENCY)
    memory = (t * k["elementwise_bytes"] * h / l.tp + ACCUMULATE_BYTES * (dense_layer(c, l) + bool(c.num_local_experts) * expert_layer(c, l))) / gpu.hbm
    some = products / 3 * repeated(c, l) * l.tp / weights                           # selective repeats products that tp made short
    again = {"none": 0, "selective": 0.25 * memory + some, "full": (products + attention + memory) / 3}[l.recompute]
    seconds, forwards = dict(compute=products + attention + memory + again, tp=0.0, cp=0.0, ep=0.0), 1 if l.recompute == "none" else 2
    if l.tp > 1:                                          # two regions, in and out, forward and backward: 8 halves of an all-reduce
        speed, leaves = link(cluster, k, l.tp, 1)
        halves = 5 + 3 * forwards
        seconds["tp"] = halves * (BF16 * t * h * (l.tp - 1) / l.tp / speed + leaves * (l.tp - 1) * k["hop"])
    if l.cp > 1:                                          # a hop of the ring is hidden behind attention with one block
        speed, _ = link(cluster, k, l.cp, l.tp)
        kv = 2 * t * c.num_key_value_heads * c.head_dim / kv_parts(c, l)
        seconds["cp"] = exposed((forwards * BF16 + BF16 + FLOAT32) * (l.cp - 1) * kv / speed, attention)
    if l.ep > 1:                                          # nothing to hide behind
        speed, leaves = link(cluster, k, l.ep, l.tp)
        seconds["ep"] = 2 * (forwards + 1) * BF16 * t * experts * h * (l.ep - 1) / l.ep / (min(speed, cluster.network * k["network_efficiency"]) if leaves else speed)
    return seconds


def step_seconds(c, l, cluster, stages, k=TIME, nanotron=False):
    """A training step, split into what the slowest rank of a pipeline spends it on."""
    one, h = layer_seconds(c, l, cluster, k), c.hidden_size
    crosses = l.pp > 1 and cluster.nodes > 1
    launch = k["launch"] * (1 if l.tp > 1 else 0.5)
    if nanotron and crosses:
        launch += 8 * (k["stall_hop"] * (l.tp - 1) + k["stall_node"] * l.tp * max(0, l.tp / cluster.gpus_per_node - 1))
    head = product_seconds(cluster, k, l.tokens, h, c.vocab_size / l.tp, k["head_efficiency"]) + ACCUMULATE_BYTES * c.vocab_size * h / l.tp / cluster.gpu.hbm
    loss = l.tokens * c.vocab_size / l.tp * k["loss_bytes"] / cluster.gpu.hbm
    gpu = [s.layers * sum(one.values()) + s.head * head + s.loss * loss for s in stages]
    host = [s.layers * launch + k["stage"] * (nanotron and crosses) for s in stages]
    busy = [soft_max(g, o) for g, o in zip(gpu, host)]
    filling = [soft_max(g, o * k["fill_launch"]) for g, o in zip(gpu, host)]
    slowest = max(range(l.pp), key=lambda rank: busy[rank])
    m, layers = l.accumulation, stages[slowest].layers
    ends = stages[slowest].head * head + stages[slowest].loss * loss
    idle = {"afab": 1, "1f1b": 1, "interleaved": 1 / l.stages_per_rank, "zerobubble": 1 / 3, "dualpipe": 1 / 6}[l.schedule]
    seconds = {name: m * layers * one[name] for name in ("tp", "cp", "ep")}
    seconds["compute"] = m * (layers * one["compute"] + ends)
    seconds["launch"] = m * (busy[slowest] - gpu[slowest])
    seconds["bubble"] = idle * (sum(filling) - max(filling)) if l.pp > 1 else 0.0
    if not nanotron and l.pp > 1:                         # 1F1B waits for a message there and back; nanotron's are in its stall
        speed, _ = link(cluster, k, l.pp, l.dp * l.cp * l.tp)
        seconds["pp"] = 2 * m * l.stages_per_rank * BF16 * l.tokens * h / l.tp / speed
    seconds |= data_parallel_seconds(c, l, cluster, stages[0], k, busy[0] if l.pp == 1 else filling[0], nanotron)
    slower = 1 + k["jitter"] * math.log2(cluster.nodes)
    return {name: s * (1 if name in ("dp", "optimizer", "other") else slower) for name, s in seconds.items()}


def data_parallel_seconds(c, l, cluster, stage, k, last, nanotron):
    """Gradients are reduced behind the last micro-batch's backward; what ZeRO gathers; the update. Experts among those ranks that have the same."""
    ranks, experts = l.dp * l.cp, stage.layers * bool(c.num_local_experts) * expert_layer(c, l)
    parts = [(parameters(c, l, stage) - experts, ranks, l.tp), (experts, ranks // l.ep, l.tp * l.ep)]
    updated = sum(held / (copies if l.zero else 1) for held, copies, _ in parts)
    seconds = dict(dp=0.0, optimizer=updated * k["optimizer_bytes"] / cluster.gpu.hbm, other=k["step"])
    if ranks == 1:
        return seconds
    links = [link(cluster, k, copies, stride) for _, copies, stride in parts]
    leaves = links[0][1]
    byte = sum(held * (copies - 1) / copies / speed for (held, copies, _), (speed, out) in zip(parts, links))    # of each parameter, once round
    reduce = FLOAT32 * byte * (1 if l.zero else 2)
    if nanotron and l.zero == 0 and l.pp > 1 and leaves:
        seconds["dp"] += FLOAT32 * byte * k["network_efficiency"] / k["unhidden_efficiency"]
    latency = k["gather_hop"] * ranks * (stage.layers + 2)                         # of a ring through all units
    if l.zero < 2:
        seconds["dp"] += exposed(reduce, k["overlap"] * last)
    if l.zero == 2:                                       # after every micro-batch
        seconds["dp"] += l.accumulation * exposed(reduce + latency, k["overlap"] * last)
    if l.zero in (1, 2):                                  # the new weights: NANOTRON tensor by tensor, OURS unit by unit behind the next forward
        slow = k["gather_efficiency"] / k["network_efficiency"] if leaves and nanotron else 1
        gather = BF16 * byte / slow
        seconds["dp"] += gather + k["gather_hop"] * ranks * (6 * stage.layers + 2) if nanotron else exposed(gather + latency, k["overlap"] * last / 2)
    if l.zero == 3:                                       # gathered twice and reduced: behind forward too, as well as reducing behind backward goes
        gathers = 1 if l.pp > 1 else 2 * l.accumulation
        moved = gathers * (BF16 * byte + latency) + l.accumulation * (reduce + latency)
        seconds["dp"] += exposed(moved, 1.5 * k["overlap"] * l.accumulation * last)
    return seconds
