"""What a layout costs, by arithmetic: parameters, memory, FLOPs, bytes on the wire, time. No GPU, no torch.

There are two trainers. OURS is the one in this directory: what it holds and sends is exact, for its own lines say so.
NANOTRON is a production trainer that was measured on thousands of H100 (tests/data): what it holds differs in a few named
things. Time is physics of the hardware, with constants that were fitted to those runs by tests/fit_plan.py.
"""
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

GIB = 2**30
BF16, FLOAT32 = 2, 4                                      # bytes of a number


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
MEMORY = dict(                                            # of NANOTRON; OURS needs none but `usable`
    parameter_bytes=5.73,                                 # [P] weights 2, float32 gradients 4
    bucket_bytes=1.63,                                    # [P] with dp: a bfloat16 copy of the gradients, 2
    optimizer_bytes=12.6,                                 # [P] float32 master and two moments, 12
    hidden_bytes=31.9,                                    # [F] kept per token, layer and hidden: inputs of norms, products, attention, in part in float32
    mlp_bytes=5.77,                                       # [P] per token, layer and intermediate: gate, up and product, 6
    embedding_bytes=1.9,                                  # [P] per token and hidden on the first stage of several
    logit_bytes=8.98,                                     # [P] per token and word: bfloat16 and float32 logits and a gradient, 10
    old_logit_bytes=3.02,                                 # [P] with accumulation: the logits of the micro-batch before are still there, 2
    gathered=0.831,                                       # [P] of the two inputs per layer that tp gathers, kept whole when pp is 1; 1 is all
    gathered_pp=0.891,                                    # [F] the same in a pipeline, of all micro-batches in flight but two
    base=0.23,                                            # [F] GiB
    usable=70.5)                                          # [F] GiB of an 80 GB GPU: beyond it runs fail, for memory is in pieces and others hold some
ATTENTION_EFFICIENCY = 0.45                               # of the peak: flash attention, forward and backward
ACCUMULATE_BYTES = 10                                     # per parameter and micro-batch: a bfloat16 gradient added to a float32 sum
LARGEST_KEPT_TP = 16                                      # [F] in groups of 32 nobody was seen to keep what tp gathers
TILE = 132 * 128 * 256                                    # numbers that all multiprocessors of an H100 make at a time


# ------------------------------------------------------------------------------------------- layouts
@dataclass(frozen=True)
class Layout:
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    micro_batch: int = 1
    accumulation: int = 1
    seq_len: int = 4096
    recompute: str = "none"

    @property
    def gpus(self):
        return self.dp * self.tp * self.cp * self.pp

    @property
    def tokens(self):
        """Of a micro-batch, on a rank."""
        return self.micro_batch * self.seq_len // self.cp

    @property
    def stages_per_rank(self):
        return 2 if self.schedule in ("interleaved", "dualpipe") else 1


class Stage(NamedTuple):
    layers: int
    embedding: bool
    head: bool
    loss: bool


def layer_width(c):
    """Parameters of a layer's matrices, over hidden."""
    return 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim + 3 * c.intermediate_size * max(1, c.num_local_experts)


def first_layers(c, stages):
    """pipeline_parallel.py's, for which torch is needed."""
    layers, ends = c.num_hidden_layers, c.vocab_size / layer_width(c)
    even = [math.floor((layers + 2 * ends) * stage / stages - ends + 0.5) for stage in range(stages + 1)]
    return [max(stage, min(layers - stages + stage, first)) for stage, first in enumerate(even)]


def my_stages(l, rank):
    """pipeline_parallel.py's, of a rank of pp."""
    stages = l.pp * l.stages_per_rank
    return [rank, stages - 1 - rank] if l.schedule == "dualpipe" else list(range(rank, stages, l.pp))


def our_stages(c, l):
    """What the ranks of pp hold, each with all its stages together."""
    first = first_layers(c, l.pp * l.stages_per_rank)
    last, held = len(first) - 2, [my_stages(l, rank) for rank in range(l.pp)]
    return [Stage(sum(first[s + 1] - first[s] for s in mine), 0 in mine, last in mine, last in mine) for mine in held]


def nanotron_stages(c, l):
    """It gives blocks to a stage until that has more than its share. Of the ends only the head counts, so the last ranks may get nothing."""
    cost = layer_width(c)
    blocks = [("layers", cost)] * c.num_hidden_layers + [("norm", 0), ("head", c.vocab_size), ("cast", 0), ("loss", 0)]
    whole, so_far, stages = sum(size for _, size in blocks), 0, [defaultdict(int, embedding=1)]
    for name, size in blocks:
        stages[-1][name] += 1
        so_far += size
        if so_far > whole * len(stages) / l.pp and len(stages) < l.pp:
            stages.append(defaultdict(int))
    if len(stages) < l.pp or not stages[-1]:
        return None
    return [Stage(s["layers"], bool(s["embedding"]), bool(s["head"]), bool(s["loss"])) for s in stages]


def in_flight(l, rank=0):
    """Micro-batches, of all of a rank's layers, that it keeps at the worst moment (step 6's README has the table)."""
    p, m, v = l.pp, l.accumulation, l.stages_per_rank
    return {"afab": m, "1f1b": min(m, p - rank), "zerobubble": min(m, p), "dualpipe": min(2 * m, 2 * p + 1) / 2,
            "interleaved": min(m * v, 2 * (p - 1 - rank) + (v - 1) * -(-m // max(1, m // p)) + 1) / v}[l.schedule]


# ------------------------------------------------------------------------------------------- parameters on a rank
def kv_parts(c, l):
    return min(l.tp, c.num_key_value_heads)               # more ranks than heads: neighbours have the same one


def dense_layer(c, l):
    """Parameters of a layer on a rank, without its experts."""
    h, d = c.hidden_size, c.head_dim
    attention = 2 * h * c.num_attention_heads * d // l.tp + 2 * h * c.num_key_value_heads * d // kv_parts(c, l)
    mlp = c.num_local_experts * h if c.num_local_experts else 3 * h * c.intermediate_size // l.tp
    return attention + mlp + 2 * h


def expert_layer(c, l):
    return c.num_local_experts // l.ep * 3 * c.hidden_size * c.intermediate_size // l.tp


def units(c, l, stage):
    """What ZeRO cuts as one: (parameters, slices, how many of them)."""
    ends, ranks = c.vocab_size * c.hidden_size // l.tp, l.dp * l.cp
    cut = [(ends, ranks, 1)] * stage.embedding + [(dense_layer(c, l), ranks, stage.layers)] + [(ends + c.hidden_size, ranks, 1)] * stage.head
    return cut + [(expert_layer(c, l), ranks // math.gcd(ranks, l.ep), stage.layers)] * bool(c.num_local_experts)


def parameters(c, l, stage):
    return sum(size * count for size, _, count in units(c, l, stage))


def model_parameters(c, active=False):
    """Of the whole model; active: those that a token meets."""
    h, d, experts = c.hidden_size, c.head_dim, c.num_experts_per_tok if active else c.num_local_experts
    layer = 2 * h * (c.num_attention_heads + c.num_key_value_heads) * d + 3 * h * c.intermediate_size * max(1, experts) + 2 * h + h * c.num_local_experts
    return 2 * c.vocab_size * h + c.num_hidden_layers * layer + h


def flops_per_token(c, seq_len):
    """As metrics.py: 6 per parameter, and attention's two products of [seq, seq]."""
    return 6 * model_parameters(c, active=True) + 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * seq_len


def flops(c, l, stage):
    """Of a rank in a training step, without recomputation: matrix products, 6 per weight and token, and causal attention, which makes its
    scores twice: 7 products of [seq, seq], halved."""
    tokens, h, q = l.tokens * l.accumulation, c.hidden_size, c.num_attention_heads * c.head_dim
    attention = 2 * h * q // l.tp + 2 * h * c.num_key_value_heads * c.head_dim // kv_parts(c, l)
    mlp = 3 * h * c.intermediate_size // l.tp * max(1, c.num_experts_per_tok) + h * c.num_local_experts
    scores = 7 * tokens * l.seq_len * q // l.tp * stage.layers
    return 6 * tokens * (stage.layers * (attention + mlp) + stage.head * c.vocab_size * h // l.tp) + scores


# ------------------------------------------------------------------------------------------- memory
def our_memory(c, l, rank, stage, number=BF16, fused_norm=True):
    """Bytes by kind. What persists is exact; so is what a layer keeps; buffers are the largest that live at a time."""
    master = 12 if number == BF16 else 8                  # float32 copy of the weights, two moments
    slices = [(-(-size // ranks) * ranks, -(-size // ranks), size, count) for size, ranks, count in units(c, l, stage)]
    padded, cut, plain = (sum(piece[i] * piece[3] for piece in slices) for i in range(3))
    largest, layer = max(piece[0] for piece in slices), kept(c, l, number, fused_norm)
    again = kept(c, replace(l, recompute="none"), number, fused_norm) - layer      # the layer in backward has all its activations once more
    memory = dict(
        weights=number * (cut if l.zero == 3 else padded if l.zero else plain),
        gradients=FLOAT32 * (cut if l.zero >= 2 else padded if l.zero else plain),
        optimizer=master * (cut if l.zero else plain),
        activations=stage.layers * in_flight(l, rank) * layer + again,
        loss=stage.head * loss_memory(c, l, number), buffers=0)
    if l.zero == 3:                                       # two units whole at a time; a pipeline keeps them all through the step
        memory["buffers"] += number * (padded if l.pp > 1 else min(padded, 2 * largest))
    if l.zero >= 2:
        memory["buffers"] += 2 * FLOAT32 * largest
    return memory


def kept(c, l, number, fused_norm):
    """Bytes that a layer keeps for backward of one micro-batch."""
    q, kv = c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
    h, i, heads, times = c.hidden_size, c.intermediate_size, c.num_attention_heads, max(1, c.num_experts_per_tok)
    if l.recompute == "full":
        return l.tokens / l.tp * number * h
    inside = number * (2 * q / l.tp + kv / kv_parts(c, l)) + FLOAT32 * heads / l.tp
    if l.recompute == "selective":                        # what matrix products and attention made; two are sums that are not reduced yet
        return l.tokens * (inside + number * (2 * times * i / l.tp + h / l.tp + h + times * h))
    norms = 2 * h * number if fused_norm else 4 * h * FLOAT32
    mlp = number * 4 * times * i / l.tp
    if c.num_local_experts:                               # the gathered input, each choice's row in and out, and the router's scores
        mlp += number * h * (l.tp > 1) + number * 2 * times * h + FLOAT32 * c.num_local_experts
    return l.tokens * (inside + mlp + (norms + 2 * h * number + 2 * FLOAT32) / l.tp)


def loss_memory(c, l, number):
    """loss.py: one chunk's logits, and in float32 again once or, with tp, thrice; the head's gradient in float32; that of its input."""
    words = c.vocab_size // l.tp
    chunk = min(l.tokens, max(1, 2**27 // words)) * words
    return chunk * (number + FLOAT32 * (3 if l.tp > 1 else 1)) + FLOAT32 * words * c.hidden_size + 2 * number * l.tokens * c.hidden_size


def nanotron_memory(c, l, rank, stage, k=MEMORY):
    """Bytes by kind. Few of its runs are alike to the byte: its allocator's holes are in the fitted constants."""
    held, copies = our_parameters_tied(c, l, stage), l.dp if l.zero else 1
    flight = in_flight(l, rank)
    gathered = 0 if not 1 < l.tp <= LARGEST_KEPT_TP else k["gathered"] if l.pp == 1 else k["gathered_pp"] * max(0, flight - 2)
    layer = flight * (k["hidden_bytes"] * c.hidden_size + k["mlp_bytes"] * c.intermediate_size) / l.tp + 2 * BF16 * gathered * c.hidden_size
    return dict(weights=BF16 * held, gradients=(k["parameter_bytes"] - BF16 + k["bucket_bytes"] * (l.dp > 1)) * held,
                optimizer=k["optimizer_bytes"] * held / copies, activations=stage.layers * l.tokens * layer,
                loss=stage.head * (k["logit_bytes"] + k["old_logit_bytes"] * (l.accumulation > 1)) * l.tokens * c.vocab_size / l.tp,
                buffers=k["base"] * GIB + k["embedding_bytes"] * stage.embedding * (l.pp > 1) * flight * l.tokens * c.hidden_size / l.tp)


def our_parameters_tied(c, l, stage):
    """The smaller benchmarked models use one matrix for both ends: once on a rank that has both, else on either."""
    once = stage.embedding and stage.head and getattr(c, "tied", False)
    return parameters(c, l, stage) - once * c.vocab_size * c.hidden_size // l.tp


# ------------------------------------------------------------------------------------------- on the wire, of OURS
def sent(c, l, rank=0, number=BF16, sp=True):
    """Payload bytes of one training step on a rank of pp, {(dimension, collective): bytes}, as the files' own formulas; without
    recomputation, single numbers, and what ZeRO leaves of the norms' gradients to sum over tp (it depends on the slice)."""
    out, m, stage, mine = defaultdict(int), l.accumulation, our_stages(c, l)[rank], my_stages(l, rank)
    tokens, layers, ends = l.tokens * m, stage.layers, stage.embedding + stage.head
    stream = number * tokens * c.hidden_size              # of all micro-batches, [batch, seq, hidden]
    for size, ranks, count in units(c, l, stage):
        padded = -(-size // ranks) * ranks
        if l.zero == 0:
            out["dp", "all_reduce"] += FLOAT32 * size * count
        else:
            times, again = (m, max(0, count - 1)) if l.zero == 3 and l.pp == 1 else (1, 0)         # in backward, of all blocks but the last
            out["dp", "reduce_scatter"] += FLOAT32 * padded * count * (m if l.zero > 1 else 1)
            out["dp", "all_gather"] += number * padded * (count + again) * times
    if l.tp > 1:
        inputs = 1 if c.num_local_experts else 2          # that are gathered again in backward: attention's, and the MLP's if it is dense
        out["tp", "all_gather"] += ((4 + inputs) * layers + ends) * stream * sp
        out["tp", "reduce_scatter"] += (4 * layers + ends) * stream * sp
        out["tp", "all_reduce"] += 3 * stage.head * tokens * FLOAT32 + (0 if sp else (4 * layers + ends) * stream)
        norms = (2 * layers + stage.head) * c.hidden_size * sp + layers * c.num_local_experts * c.hidden_size
        shared = (l.tp > c.num_key_value_heads) * layers * 2 * c.hidden_size * c.head_dim
        out["tp", "all_reduce"] += FLOAT32 * norms * (l.zero == 0)
        out["kv_heads", "all_reduce"] += FLOAT32 * shared * (l.zero == 0)
    if l.cp > 1:                                          # zigzag: keys and values twice round, and their float32 gradients
        kv = 2 * tokens * layers * c.num_key_value_heads * c.head_dim // kv_parts(c, l)
        out["cp", "send"] += (2 * (l.cp - 1) * number + l.cp * FLOAT32) * kv
    if l.pp > 1:
        borders = sum(0 <= other < l.pp * l.stages_per_rank and other not in mine for stage in mine for other in (stage - 1, stage + 1))
        out["pp", "send"] += borders * stream // (l.tp if sp else 1)
    if l.ep > 1:                                          # there and back, forward and backward, of all tokens' choices
        out["ep", "all_to_all"] += 4 * layers * c.num_experts_per_tok * stream
    return {key: size for key, size in out.items() if size}


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
    products = product_seconds(cluster, k, t, weights / h * h, h / l.tp, k["gemm_efficiency"])
    padded = -(-c.head_dim // 64) * 64                    # flash attention has kernels for 64 and 128
    attention = 6 * t * l.seq_len * c.num_attention_heads * padded / l.tp / (gpu.flops * ATTENTION_EFFICIENCY)
    memory = (t * k["elementwise_bytes"] * h / l.tp + ACCUMULATE_BYTES * (dense_layer(c, l) + bool(c.num_local_experts) * expert_layer(c, l))) / gpu.hbm
    again = {"none": 0, "selective": 0.25 * memory, "full": (products + attention + memory) / 3}[l.recompute]
    seconds = dict(compute=products + attention + memory + again, tp=0.0, cp=0.0, ep=0.0)
    if l.tp > 1:                                          # two regions, in and out, forward and backward: 8 halves of an all-reduce
        speed, leaves = link(cluster, k, l.tp, 1)
        halves = 8 if l.recompute == "none" else 11
        seconds["tp"] = halves * (BF16 * t * h * (l.tp - 1) / l.tp / speed + leaves * (l.tp - 1) * k["hop"])
    if l.cp > 1:                                          # a hop of the ring is hidden behind attention with one block
        speed, _ = link(cluster, k, l.cp, l.tp)
        kv = 2 * t * c.num_key_value_heads * c.head_dim / kv_parts(c, l)
        seconds["cp"] = exposed((2 * BF16 + FLOAT32) * (l.cp - 1) * kv / speed, attention)
    if l.ep > 1:                                          # nothing to hide behind
        speed, leaves = link(cluster, k, l.ep, l.tp)
        seconds["ep"] = 4 * BF16 * t * experts * h * (l.ep - 1) / l.ep / (min(speed, cluster.network * k["network_efficiency"]) if leaves else speed)
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
    """Gradients are reduced behind the last micro-batch's backward; what ZeRO gathers; the update."""
    held, ranks = (our_parameters_tied if nanotron else parameters)(c, l, stage), l.dp * l.cp
    seconds = dict(dp=0.0, optimizer=held / (ranks if l.zero else 1) * k["optimizer_bytes"] / cluster.gpu.hbm, other=k["step"])
    if ranks == 1:
        return seconds
    speed, leaves = link(cluster, k, ranks, l.tp)
    share = (ranks - 1) / ranks
    reduce = FLOAT32 * held * share * (1 if l.zero else 2) / speed
    if nanotron and l.zero == 0 and l.pp > 1 and leaves:
        seconds["dp"] += FLOAT32 * held * share / (speed * k["unhidden_efficiency"] / k["network_efficiency"])
    latency = k["gather_hop"] * ranks * (stage.layers + 2)                         # of a ring through all units
    if l.zero < 2:
        seconds["dp"] += exposed(reduce, k["overlap"] * last)
    if l.zero == 2:                                       # after every micro-batch
        seconds["dp"] += l.accumulation * exposed(reduce + latency, k["overlap"] * last)
    if l.zero in (1, 2):                                  # the new weights: NANOTRON tensor by tensor, OURS unit by unit behind the next forward
        slow = k["gather_efficiency"] / k["network_efficiency"] if leaves and nanotron else 1
        gather = BF16 * held * share / (speed * slow)
        seconds["dp"] += gather + k["gather_hop"] * ranks * (6 * stage.layers + 2) if nanotron else exposed(gather + latency, k["overlap"] * last / 2)
    if l.zero == 3:                                       # gathered twice and reduced: behind forward too, as well as reducing behind backward goes
        gathers = 1 if l.pp > 1 else 2 * l.accumulation
        moved = gathers * (BF16 * held * share / speed + latency) + l.accumulation * (reduce + latency)
        seconds["dp"] += exposed(moved, 1.5 * k["overlap"] * l.accumulation * last)
    return seconds
