"""How long a training step takes: physics of the hardware, with constants that were fitted to runs on H100.

The runs are those of a production trainer, nanotron (tests/data); tools/bench/fit_plan.py fits, and prints
the table TIME. What was seen of it alone, and is not expected of this trainer, is in nanotron.py.
"""
import math
from typing import NamedTuple

from costs import BF16, FLOAT32, dense_layer, expert_layer, kv_parts, parameters, product_widths, repeated
from trainer import bubble, make, simulate


# ---------------------------------------------------------------------- hardware, from datasheets
class Gpu(NamedTuple):
    flops: float                     # bfloat16, dense, per second
    hbm: float                       # bytes per second of its memory
    memory: float                    # GiB
    nvlink: float                    # bytes per second to other GPUs of the node, one direction
    watts: float = 700
    clock: float = 1.0               # of the datasheet's, if it may not take all its power


GPUS = {"a100": Gpu(312e12, 2.0e12, 80, 300e9, 400), "h100": Gpu(989.5e12, 3.35e12, 80, 450e9),
        "h200": Gpu(989.5e12, 4.8e12, 141, 450e9), "b200": Gpu(2250e12, 8.0e12, 180, 900e9, 1000)}
NETWORKS = {"infiniband": 50e9, "ethernet": 12.5e9}      # bytes per second per GPU: 400 and 100 Gbit/s


def at_power(gpu, watts):
    """A GPU that may not take all its power: what it takes grows with the clock's third power."""
    clock = (watts / gpu.watts) ** (1 / 3)
    return gpu._replace(flops=gpu.flops * clock, clock=clock)


class Cluster(NamedTuple):
    gpus: int
    gpu: Gpu = GPUS["h100"]
    network: float = NETWORKS["infiniband"]
    gpus_per_node: int = 8

    @property
    def nodes(self):
        return -(-self.gpus // self.gpus_per_node)


# ---------------------------------------------------------------------- what was fitted
# By tools/bench/fit_plan.py, 641 runs. [P] physics: the datasheet's or a known number is near it. [F] fudge:
# nobody knows why it is so large, or it stands for many small things. These runs cannot tell less efficient
# products from longer passes over memory, nor network, congestion and overlap from one another.
USABLE = 70.5                     # [F] GiB of an 80 GB GPU: memory is in pieces, and others hold some
TIME = dict(
    gemm_efficiency=0.558,        # [P] of the peak, what a large matrix product reaches
    head_efficiency=0.757,        # [P] of the peak, the head's product, which is larger still
    wave_tail=0.418,              # [P] waves of tiles lost per product: the last wave does not fill the GPU
    elementwise_bytes=337.0,      # [F] per token and hidden, of norms, rotary, SwiGLU, residuals
    loss_bytes=78.6,              # [P] per token and word of the vocabulary, by softmax in float32
    launch=0.00444,               # [P] s per layer with tp: Python and launches, all directions; half without
    nvlink_efficiency=0.943,      # [P] of the datasheet
    pair_efficiency=0.609,        # [P] the same of two GPUs: NCCL has the switch help larger groups only
    network_efficiency=0.811,     # [P] of the datasheet, between two nodes
    congestion=0.17,              # [F] a ring takes so much longer with each doubling of its nodes beyond two
    hop=5.73e-5,                  # [P] s, the latency of a step of a tp ring that leaves the node
    fill_launch=0.365,            # [F] share of launch that is left while a pipeline fills and empties
    overlap=0.451,                # [P] of the last micro-batch: sums of gradients hide behind it
    gather_hop=6.27e-6,           # [P] s per rank and gather or reduction of ZeRO: its latency
    optimizer_bytes=91.6,         # [F] per parameter that a rank updates, read and written; 40 would do
    step=0.063)                   # [F] s per step, whatever it is
ATTENTION_EFFICIENCY = 0.45       # of the peak: flash attention, forward and backward
ACCUMULATE_BYTES = 10             # per parameter and micro-batch: a bfloat16 gradient added to a float32 sum
TILE = 132 * 128 * 256            # numbers that all multiprocessors of an H100 make at a time

NOTHING = (0.0, 0.0, 0.0)

# What a step is spent on. The first five are work, by what bounds it; then what is waited for.
KINDS = dict(
    products="matrix products that the model needs, at the datasheet's peak",
    kernels="what a large matrix product loses to that peak",
    shape="what a product of this layout's shape loses to a large one",
    attention="flash attention", memory="norms, rotary, SwiGLU, residuals, softmax: bound by memory",
    recompute="the part of forward that runs again", launch="the GPU waits for Python",
    imbalance="ranks of pp with less to do wait for the one with most",
    bubble="the pipeline fills and empties", tp="tp's collectives",
    cp="what attention does not hide of cp's ring", ep="tokens to their experts and back",
    pp="messages between stages", dp="what backward does not hide of dp and ZeRO", optimizer="the update",
    other="what every step takes")


# ---------------------------------------------------------------------- a training step
def step_seconds(c, l, cluster, stages, k=TIME, times=None):
    """A training step on the average rank, by what it is spent on. times: of a layer and of the head, where
    they are known."""
    of_pipeline = of_micro_batches(c, l, cluster, stages, k, times or Times(c, l, cluster, k))
    return with_data_parallel(c, l, cluster, stages, k, *of_pipeline)


class Times:
    """What a layer and the head take, {kind: (F, I, W)}: the same for every schedule and ZeRO stage.
    gathers_again: this trainer does not keep the inputs that tp gathers, and gathers them again for W."""
    def __init__(self, c, l, cluster, k, gathers_again=True, again=None):
        self.layer, self.head = layer_times(c, l, cluster, k, gathers_again), head_times(c, l, cluster, k)
        if again:                                         # what another trainer computes twice, as a share
            kinds = ("products", "kernels", "shape")
            self.layer["recompute"] = 0.0, again * sum(self.layer[kind][0] for kind in kinds), 0.0
        self.of_layer, self.of_head = (sum(map(sum, part.values())) for part in (self.layer, self.head))
        self.F, self.I, self.W = map(sum, zip(*self.layer.values()))


def of_micro_batches(c, l, cluster, stages, k, times):
    """All that happens before gradients are summed over dp; and how long that sum can hide: after every
    micro-batch, and after the last."""
    launch = launch_seconds(l, k)
    seconds, *windows = pipeline_seconds(c, l, stages, k, times, [stage.layers * launch for stage in stages])
    if l.pp > 1:                                          # 1F1B waits for a message there and back
        messages = 2 * l.accumulation * l.stages_per_rank
        to_next, _ = link(cluster, k, 2, l.dp * l.cp * l.tp)
        seconds["pp"] = messages * BF16 * l.tokens * c.hidden_size / l.tp / to_next
    return seconds, windows


def with_data_parallel(c, l, cluster, stages, k, seconds, windows):
    return seconds | data_parallel_seconds(c, l, cluster, stages[0], k, *windows)


def launch_seconds(l, k):
    again = {"none": 0, "selective": 1 / 6, "full": 1 / 3}[l.recompute]            # forward is a third of it
    return k["launch"] * (1 if l.tp > 1 else 0.5) * (1 + again)


def pipeline_seconds(c, l, stages, k, times, host):
    """All micro-batches on the average rank, the wait for the slowest and the bubble; how long the first rank
    works on a micro-batch; and for how long its gradients become ready at the end. host: what Python takes
    of each rank's micro-batch."""
    m = l.accumulation
    gpu = [stage.layers * times.of_layer + stage.head * times.of_head for stage in stages]
    busy = [soft_max(works, python) for works, python in zip(gpu, host)]           # at the same time
    mean = sum(busy) / l.pp
    seconds = {kind: m * c.num_hidden_layers / l.pp * sum(parts) for kind, parts in times.layer.items()}
    for kind, parts in times.head.items():
        seconds[kind] += m / l.pp * sum(parts)
    seconds["launch"] = m * (mean - sum(gpu) / l.pp)
    seconds["imbalance"] = m * (max(busy) - mean)
    if l.pp == 1:
        return seconds, busy[0], busy[0]
    filling = [soft_max(works, python * k["fill_launch"]) for works, python in zip(gpu, host)]
    seconds["bubble"] = idle_share(l, times.F, times.I, times.W) * (sum(filling) - max(filling))
    each, v = filling[0], l.stages_per_rank
    if l.schedule == "interleaved":                       # a rank's later stages are done before it is
        return seconds, each, each * (1 + min(m, l.pp) * (v - 1)) / v
    return seconds, each, each


def idle_share(l, F, I, W):
    """The bubble as a share of 1F1B's, (p - 1)(F + I + W). Each is what schedules.py's simulator finds, and
    exact, but for DualPipe: to 2% of a step."""
    p, m = l.pp, l.accumulation
    if p == 1:
        return 0.0
    idle = (p - 1) * (F + I + W)
    if l.schedule == "interleaved":
        idle /= l.stages_per_rank
    if l.schedule == "zerobubble":
        idle = (p - 1) * max(F, I, F + I - W)
        if m < p:                                         # some W have nothing to fill: no formula is known
            idle = bubble(simulate(make("zerobubble", p, m), F, I, W))[0]
    if l.schedule == "dualpipe":                          # a stage is half of a rank
        idle = max((p - 1) * F, (p - 1) * (F + I - W), (p - 1) * (2 * I - W) - F) / 2
    return idle / ((p - 1) * (F + I + W))


# ---------------------------------------------------------------------- a layer, and the head
def layer_times(c, l, cluster, k, gathers_again):
    """{kind: (F, I, W)}, the seconds of a layer and micro-batch."""
    t, h, gpu = l.tokens, c.hidden_size, cluster.gpu
    shapes = [(t, inner, columns) for inner, columns in products(c, l)]
    times = matrix_products(gpu, k, shapes, "gemm_efficiency")
    scores = attention_seconds(c, l, gpu)
    times["attention"] = 2 / 7 * scores, 5 / 7 * scores, 0.0
    held = dense_layer(c, l) + bool(c.num_local_experts) * expert_layer(c, l)
    passes = t * k["elementwise_bytes"] * h / l.tp / gpu.hbm
    times["memory"] = passes / 3, 2 / 3 * passes, ACCUMULATE_BYTES * held / gpu.hbm
    times["recompute"] = 0.0, forward_again(c, l, times, passes), 0.0
    times["tp"] = tp_times(c, l, cluster, k, gathers_again) if l.tp > 1 else NOTHING
    times["cp"] = cp_times(c, l, cluster, k, scores) if l.cp > 1 else NOTHING
    times["ep"] = ep_times(c, l, cluster, k) if l.ep > 1 else NOTHING
    return times


def head_times(c, l, cluster, k):
    """The same of the head and the loss."""
    t, words = l.tokens, c.vocab_size / l.tp
    times = matrix_products(cluster.gpu, k, [(t, c.hidden_size, words)], "head_efficiency")
    softmax = t * words * k["loss_bytes"] / cluster.gpu.hbm
    accumulate = ACCUMULATE_BYTES * words * c.hidden_size / cluster.gpu.hbm
    return {**times, "memory": (softmax / 2, softmax / 2, accumulate)}


def products(c, l):
    """(inner, columns) of a layer's matrix products on a rank: q, k, v; their output; gate and up; down."""
    q, kv = c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
    h, i = c.hidden_size, c.intermediate_size * max(1, c.num_experts_per_tok)
    return [(h, q / l.tp + kv / kv_parts(c, l)), (q / l.tp, h), (h, 2 * i / l.tp), (i / l.tp, h)]


def matrix_products(gpu, k, shapes, efficiency):
    """Forward makes [rows, columns], I [rows, inner] and W [inner, columns], all with 2 FLOPs per row and
    weight. The last wave of tiles fills the GPU in part."""
    ideal, tail = 0.0, [0.0, 0.0, 0.0]
    for rows, inner, columns in shapes:
        seconds = 2 * rows * inner * columns / gpu.flops
        ideal += seconds
        for part, made in enumerate((rows * columns, rows * inner, inner * columns)):
            tail[part] += seconds / k[efficiency] * k["wave_tail"] * TILE / made
    lost = ideal * (1 / k[efficiency] - 1)
    return dict(products=(ideal,) * 3, kernels=(lost,) * 3, shape=tuple(tail))


def attention_seconds(c, l, gpu):
    """Forward and backward: 2 products of [seq, seq] and 5, of which the causal mask leaves half. Flash
    attention has kernels for heads of 64 and of 128."""
    padded = -(-c.head_dim // 64) * 64
    scores = 6 * l.tokens * l.seq_len * c.num_attention_heads * padded / l.tp
    return scores / (gpu.flops * ATTENTION_EFFICIENCY)


def forward_again(c, l, times, passes):
    if l.recompute == "full":
        return sum(times[kind][0] for kind in ("products", "kernels", "shape", "attention", "memory"))
    if l.recompute == "none":
        return 0.0
    of_all = repeated(c, l) / sum(product_widths(c, l))   # products that tp made too short to keep
    return 0.25 * passes + of_all * sum(times[kind][0] for kind in ("products", "kernels", "shape"))


def tp_times(c, l, cluster, k, gathers_again):
    """Halves of an all-reduce: into and out of two regions, forward and backward."""
    speed, nodes = link(cluster, k, l.tp, 1)
    half = BF16 * l.tokens * c.hidden_size * (l.tp - 1) / l.tp / speed
    if nodes > 1:
        half += (l.tp - 1) * k["hop"]
    again = 3 * (l.recompute != "none")
    once_more = gathers_again * (1 if c.num_local_experts else 2)
    return 4 * half, (4 + again) * half, once_more * half


def cp_times(c, l, cluster, k, scores):
    """A hop of the ring is hidden behind attention with one block. It is a message of one GPU to the next, by
    one network card."""
    speed, nodes = link(cluster, k, l.cp, l.tp)
    speed = speed if nodes == 1 else min(speed, cluster.network * k["network_efficiency"])
    kv = 2 * l.tokens * c.num_key_value_heads * c.head_dim / kv_parts(c, l) * (l.cp - 1) / speed
    forward = exposed(BF16 * kv, 2 / 7 * scores)
    again = forward if l.recompute != "none" else 0.0
    return forward, again + exposed((BF16 + FLOAT32) * kv, 5 / 7 * scores), 0.0


def ep_times(c, l, cluster, k):
    """Tokens to their experts and back. Nothing hides it."""
    speed, nodes = link(cluster, k, l.ep, l.tp)
    speed = speed if nodes == 1 else min(speed, cluster.network * k["network_efficiency"])
    rows = l.tokens * max(1, c.num_experts_per_tok) * c.hidden_size
    there_and_back = 2 * BF16 * rows * (l.ep - 1) / l.ep / speed
    return there_and_back, there_and_back * (1 if l.recompute == "none" else 2), 0.0


# ---------------------------------------------------------------------- once a step
def data_parallel_seconds(c, l, cluster, stage, k, each, last):
    """Gradients are reduced behind backward: of `each` micro-batch, or of the `last`; what ZeRO gathers; the
    update. Experts are reduced among those ranks that have the same."""
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
    if l.zero < 2:                                        # an all-reduce is two halves, each with its latency
        seconds["dp"] += exposed(reduce + latency * (1 if l.zero else 2), k["overlap"] * last)
    if l.zero == 2:                                       # after every micro-batch
        seconds["dp"] += l.accumulation * exposed(reduce + latency, k["overlap"] * each)
    if l.zero in (1, 2):                               # the new weights, unit by unit behind the next forward
        seconds["dp"] += exposed(BF16 * byte + latency, k["overlap"] * last / 2)
    if l.zero == 3:                # gathered behind forward; again, and reduced, behind backward
        gather, reduce = BF16 * byte + latency, reduce + latency
        again = gather if l.pp == 1 else 0.0              # in a pipeline weights stay from first to last
        seconds["dp"] += (1 if l.pp > 1 else l.accumulation) * exposed(gather, k["overlap"] * last / 2)
        seconds["dp"] += l.accumulation * exposed(again + reduce, k["overlap"] * each)
    return seconds


# ---------------------------------------------------------------------- the network, and what hides what
def link(cluster, k, ranks, stride):
    """Bytes per second of a ring over ranks that are so far apart, and how many nodes it spans. Each GPU has
    a network card; a ring has those of its GPUs in the node where it has fewest."""
    node = min(cluster.gpus_per_node, cluster.gpus)
    neighbours = max(1, math.gcd(ranks * stride, node) // stride)
    inside = cluster.gpu.nvlink * k["pair_efficiency" if ranks == 2 else "nvlink_efficiency"]
    if ranks <= neighbours:
        return inside, 1
    return min(inside, neighbours * cluster.network * k["network_efficiency"]), ranks / neighbours


def ring_seconds(cluster, k, held, ranks, stride):
    """One byte of each parameter held, once round the ranks that have it. A ring over more nodes meets more
    switches, and others on them: it was seen to slow with the logarithm of the nodes that it spans."""
    speed, nodes = link(cluster, k, ranks, stride)
    slower = 1 + k["congestion"] * max(0, math.log2(nodes / 2))
    return held * (ranks - 1) / ranks / speed * slower


def soft_max(a, b, sharpness=5):
    """The larger of two times that overlap, and a bit more where they are alike."""
    top = max(a, b)
    return top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1 / sharpness) if top else 0.0


def exposed(seconds, hidden):
    """What is left of a transfer behind work, smoothly: a network is not that punctual."""
    width = 0.15 * seconds + 1e-6
    x = (seconds - hidden) / width
    return width * math.log1p(math.exp(x)) if x < 50 else seconds - hidden
