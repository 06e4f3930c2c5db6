"""Predict how long a training step takes. The simulator (tools/simulate/gpus.py) knows what a GPU and a link can do,
and this module only adds up the times. Another trainer, or your own cluster, differs by an overlay: a few factors on the sums.
"""
import math
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import costs
from costs import BF16, FLOAT32, Layout, expert_layer, kv_width, product_widths
from trainer import SCHEDULES, bubble, fail, make, simulate

sys.path.append(str(Path(__file__).resolve().parents[1]))
from simulate import gpus                                                           # noqa: E402
from simulate.gpus import GPUS, NETWORKS, Gpu, Kernel                               # noqa: E402


class Cluster(NamedTuple):
    gpus: int
    gpu: Gpu = GPUS["h100"]
    network: float = NETWORKS["infiniband"]
    gpus_per_node: int = 8

    @property
    def nodes(self):
        return -(-self.gpus // self.gpus_per_node)

    def hardware(self, k=None):
        """Return the simulator's cluster, its links changed as the overlay says."""
        k = k or USUAL
        gpu = self.gpu._replace(nvlink=self.gpu.nvlink * k["nvlink"])
        return gpus.Cluster(gpu, self.gpus_per_node, self.network * k["network"], taken=k["taken"])


def full_nodes(gpus, gpu, network, gpus_per_node):
    """Return a cluster; refuse one whose last node is not full."""
    if gpus > gpus_per_node and gpus % gpus_per_node:
        fail(f"--gpus {gpus}: must be a multiple of --gpus_per_node {gpus_per_node}, or at most that")
    return Cluster(gpus, gpu, network, gpus_per_node)


# ---------------------------------------------------------------------- overlays
USUAL = dict(                     # changes nothing
    product=1.0,                  # seconds of a layer's products, relative to the simulator's
    shape=1.0,                    # seconds that products lose to their tiles
    attention=1.0,                # seconds of attention
    memory=1.0, loss=1.0,         # bytes of all other kernels: a layer's; the loss's
    optimizer=1.0,                # bytes of the update
    nvlink=1.0, network=1.0,      # speed of NVLink, and of a network card
    tp_shown=1.0,                 # share of tp's collectives that is waited for
    pp_shown=1.0,                 # share of the messages between stages that is waited for
    ep_shown=1.0,                 # share of the tokens' way to their experts and back that is waited for
    ep_by_node=0.0,               # 1: a token is sent once to each node and rank that it must reach; 0: once per expert
    overlap=1.0,                  # share of the last micro-batch that gradient sums can hide behind
    taken=gpus.TAKEN,             # share of the kernels' speed that a hidden collective takes on NVLink
    gathers_again=1.0,            # 1: tp gathers again for W what it did not keep; 0: it keeps it
    gradient_bytes=4.0)           # of each gradient that is reduced
NOTHING = (0.0, 0.0, 0.0)

# The kinds of time in a step. The first six are work, by what bounds it; the others are mostly waits.
KINDS = dict(
    products="the model's matrix products, at the data sheet's peak",
    kernels="what large matrix products lose against that peak",
    shape="what products of this layout's shapes lose against large ones",
    attention="flash attention", memory="norms, rotary, SwiGLU, residuals, softmax, all bound by memory",
    recompute="the part of forward that runs again", launch="the GPU waits for Python",
    imbalance="ranks of pp with less work wait for the one with most",
    bubble="idle while the pipeline fills and empties", tp="the collectives of tp that nothing hides",
    cp="transfers in the ring that attention does not hide", ep="tokens sent to their experts and back",
    pp="messages between stages", dp="traffic of dp and ZeRO that nothing hides, and how it slows the work beside it",
    optimizer="the update")


# ---------------------------------------------------------------------- a training step
def step_seconds(c, l, cluster, stages, k=USUAL, times=None):
    """Return the seconds of a training step on the average rank, by kind. Pass times if they are known already."""
    seconds, windows = of_micro_batches(c, l, cluster, stages, k, times or Times(c, l, cluster, k))
    return seconds | data_parallel_seconds(c, l, cluster, stages[0], k, *windows)


class Times:
    """The times of a layer and of the head, {kind: (F, I, W)}: the same for every schedule and ZeRO stage.
    again: the share of forward's products that another trainer computes twice."""
    def __init__(self, c, l, cluster, k, again=None):
        raw = layer_work(c, cluster.hardware(), l.micro_batch, l.tokens, l.seq_len, l.tp, l.cp, l.ep, l.busiest)
        self.layer = layer_times(c, l, cluster, k, raw, again)
        self.head = head_times(c, l, cluster, k)
        self.of_layer, self.of_head = (sum(map(sum, part.values())) for part in (self.layer, self.head))
        ends = BF16 * 6 * c.vocab_size * c.hidden_size / l.tp     # its gradient is made, and accumulated
        self.embedding, = moved([ends], cluster, k["memory"])
        self.F, self.I, self.W = map(sum, zip(*self.layer.values()))
        forward, backward = raw.count
        self.launches = gpus.ISSUE * (forward + backward + forward * (l.recompute != "none"))


def of_micro_batches(c, l, cluster, stages, k, times):
    """Return the seconds of everything before dp sums gradients, by kind. Return also for how long that sum can hide
    after every micro-batch, and after the last."""
    host = [stage.layers * times.launches for stage in stages]
    seconds, *windows = pipeline_seconds(c, l, stages, k, times, host)
    if l.pp > 1:                                          # each micro-batch waits for a message there and one back
        once, sent = send(cluster, k, BF16 * l.tokens * c.hidden_size / l.tp, 2, l.dp * l.cp * l.tp)
        seconds["pp"] = k["pp_shown"] * 2 * (l.accumulation + l.pp - 1) * l.stages_per_rank * (once + sent)
    return seconds, windows


def pipeline_seconds(c, l, stages, k, times, host):
    """Return the seconds of all micro-batches on the average rank, with the wait for the slowest rank and the bubble.

    Return also how long the first rank works on one micro-batch, and for how long its gradients become ready at the end.
    host is each rank's seconds of Python.
    """
    m = l.accumulation
    gpu = [stage.layers * times.of_layer + stage.head * times.of_head + stage.embedding * times.embedding
           for stage in stages]
    busy = [soft_max(works, python) for works, python in zip(gpu, host)]           # both work at the same time
    mean = sum(busy) / l.pp
    seconds = {kind: m * c.num_hidden_layers / l.pp * sum(parts) for kind, parts in times.layer.items()}
    for kind, parts in times.head.items():
        seconds[kind] += m / l.pp * sum(parts)
    seconds["memory"] += m / l.pp * times.embedding
    seconds["launch"] = m * (mean - sum(gpu) / l.pp)
    seconds["imbalance"] = m * (max(busy) - mean)
    if l.pp == 1:
        return seconds, busy[0], busy[0]
    seconds["bubble"] = idle_share(l, times.F, times.I, times.W) * (sum(busy) - max(busy))
    v = 1 if SCHEDULES[l.schedule].v_shaped else l.stages_per_rank
    return seconds, busy[0], busy[0] * (1 + min(m, l.pp) * (v - 1)) / v


def idle_share(l, F, I, W):
    """Return the bubble as a share of 1F1B's, (p - 1)(F + I + W), from the schedule's formula or else from a simulation.

    The formulas agree exactly with schedules.py's simulator, except DualPipe's, which is within 2% of a step.
    """
    formulas = costs.FORMULAS.get(l.schedule)
    idle = formulas and formulas.idle(l, F, I, W)
    if idle is None:
        whole = F + I + W
        return simulated_idle(l.schedule, l.pp, l.accumulation, l.stages_per_rank, *(
            round(part / whole * 50) / 50 for part in (F, I, W))) / (l.pp - 1)
    return idle / (F + I + W)


def simulated_idle(schedule, p, m, v, F, I, W):
    """Simulate a schedule and return its idle time, in units of F + I + W.

    With long pipelines, a search would take minutes. But idle time grows linearly with the ranks, if the micro-batches do,
    so it is extrapolated from two short pipelines. Once a pipeline is full, more micro-batches add no idle time.
    """
    per_rank = min(m / p, 3)
    if p <= 8:
        return simulated(schedule, p, round(per_rank * p), v, F, I, W)
    short, longer = (simulated(schedule, ranks, round(per_rank * ranks), v, F, I, W) for ranks in (4, 8))
    return longer + (longer - short) * (p - 8) / 4


@lru_cache(maxsize=4096)
def simulated(schedule, p, m, v, F, I, W):
    m = max(m, SCHEDULES[schedule].min_micro_batches(p), 1)
    events = simulate(make(schedule, p, m, v), F / v, I / v, W / v)
    return bubble(events)[0] / (F + I + W)


# ---------------------------------------------------------------------- a layer's kernels
# The products of narrow experts are slower: NARROW / intermediate_size of their time is added. Chosen by the runs of Qwen3-30B-A3B
# with torchtitan and prime-rl in tests/data/published_2026.csv.
NARROW = 1250


class Work(NamedTuple):
    """The work of a layer on a micro-batch, for (F, I, W): seconds of its products, as they are and at the peak; seconds
    of attention; bytes of all other kernels. count is the number of kernels in forward and in backward."""
    products: tuple
    ideal: tuple
    attention: tuple
    bytes: tuple
    count: tuple


def multiplied(hardware, shapes):
    """Return the seconds of products for (F, I, W), as they are and at the peak.

    shapes has, for each kind of product, how many there are, and each one's rows, inner and columns. Forward makes
    [rows, columns], I [rows, inner] and W [inner, columns], all with 2 FLOPs per row and weight.
    """
    seconds, ideal = [0.0] * 3, 0.0
    for many, rows, inner, columns in shapes:
        flops = 2 * many * rows * inner * columns
        ideal += flops / hardware.gpu.peak("bfloat16")
        moved = BF16 * many * (rows * inner + inner * columns + rows * columns)
        of = (rows, columns, inner), (rows, inner, columns), (columns, inner, rows)
        for part, shape in enumerate(of):
            whole = (many, *(math.ceil(size) for size in shape))
            seconds[part] += hardware.kernel(Kernel("mm", "product", "bfloat16", flops, moved, whole))
    return tuple(seconds), (ideal,) * 3


@lru_cache(maxsize=4096)
def layer_work(c, hardware, micro_batch, t, seq_len, tp, cp, ep, balance=1.0):
    """Return a layer's Work. The bytes that its kernels read and write were counted in a recording (tools/simulate)."""
    h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim / tp, kv_width(c, tp)
    i, chosen = c.intermediate_size / tp, max(1, c.num_experts_per_tok) * balance
    shapes = [(1, t, *of) for of in costs.attention_products(c, Layout(tp=tp))]
    shapes += [(1, t, *of) for of in ((h, i), (h, i), (i, h))] * (c.shared_experts if c.num_local_experts else 1)
    if c.num_local_experts:
        shapes.append((1, t / tp, h, c.num_local_experts))
    seconds, ideal = multiplied(hardware, shapes)
    if c.num_local_experts:                               # whole, and with a part of the tokens
        mine, wide = c.num_local_experts // ep, c.intermediate_size
        rows = max(1, t / tp * chosen / mine)
        of_experts, best = multiplied(hardware, [(mine, rows, *of) for of in ((h, wide), (h, wide), (wide, h))])
        seconds = tuple(a + b * (1 + NARROW / wide) for a, b in zip(seconds, of_experts))
        ideal = tuple(map(sum, zip(ideal, best)))
    attention = [hardware.kernel(Kernel(name, "attention", "bfloat16", products * t * q * seq_len, 0))
                 for name, products in (("attention", 2), ("attention backward", 5))]        # the causal half
    gathered = (tp > 1) * costs.regions(c)
    copies = (micro_batch > 1) * gathered                 # a gathered tensor is put in order
    forward = 20 * h / tp + 36 * (q + kv) + 10 * i * chosen + 8 * h * copies
    backward = 24 * h / tp + 46 * (q + kv) + 18 * i * chosen + (12 + 4 * gathered + 12 * copies) * h
    count = [28 + 2 * copies, 50 + 4 * copies]
    sums = 10 * h * (2 * q + 2 * kv)                      # a bfloat16 gradient added to a float32 sum
    if c.num_local_experts:                               # rows go to their experts and back
        far = ep > 1
        forward += (14 * chosen + 2 + 8 * chosen * far) * h / tp
        backward += (18 + 23 * chosen + 16 * chosen * far) * h / tp
        sums += 14 * mine * 3 * h * c.intermediate_size
        count[0] += 30 + 12 * far
        count[1] += 22 + 4 * far
    else:
        backward += 6 * h
        sums += 10 * 3 * h * i
    if cp > 1:                                            # the outputs of blocks of keys are merged, their gradients added
        forward += 20 * q * cp
        backward += 27 * q * cp
        count[0] += 14 * (cp - 1)
        count[1] += 11 * (cp - 1)
    return Work(seconds, ideal, (*attention, 0.0), (t * forward, t * backward, sums), tuple(count))


def layer_times(c, l, cluster, k, raw, again):
    """Return {kind: (F, I, W)}, the seconds of a layer for a micro-batch."""
    times = split_products(raw.products, raw.ideal, cluster, k["product"], k["shape"])
    times["attention"] = tuple(k["attention"] * s for s in raw.attention)
    times["memory"] = moved(raw.bytes, cluster, k["memory"])
    times["recompute"] = 0.0, forward_again(c, l, times, again), 0.0
    times["cp"] = cp_times(c, l, cluster, k, times["attention"]) if l.cp > 1 else NOTHING
    times["ep"] = ep_times(c, l, cluster, k) if l.ep > 1 else NOTHING
    times["tp"] = tp_times(c, l, cluster, k, raw) if l.tp > 1 else NOTHING
    return times


def split_products(taken, ideal, cluster, longer, shape):
    """Split the products' seconds: those at the peak, what a large product loses to it, what these lose to a large one."""
    large, peak = longer / cluster.gpu.product, min(1.0, longer)                  # fewer bits have a higher peak
    kernels = tuple(best * (large - peak) for best in ideal)
    over_large = [max(0.0, s - best / cluster.gpu.product) for s, best in zip(taken, ideal)]
    return dict(products=tuple(peak * best for best in ideal), kernels=kernels, shape=tuple(longer * shape * s for s in over_large))


def moved(bytes, cluster, share):
    return tuple(share * one / (cluster.gpu.hbm * gpus.MEMORY) for one in bytes)


def head_times(c, l, cluster, k):
    """Return {kind: (F, I, W)} for the head and the loss, which works in chunks: each chunk adds to the head's gradient. In
    a pipeline they are part of backward."""
    h, words, t = c.hidden_size, c.vocab_size / l.tp, l.tokens
    chunks = math.ceil(t / costs.chunk(c, l))
    softmax = (28 if l.tp == 1 else 52) * t * words
    kernels = 0.0, softmax, (28 + 10 * chunks) * words * h
    products = split_products(*multiplied(cluster.hardware(), [(1, t, h, words)]), cluster, 1, k["shape"])
    return products | dict(memory=moved(kernels, cluster, k["loss"]))


def forward_again(c, l, times, again):
    products = sum(times[kind][0] for kind in ("products", "kernels", "shape"))
    if again:
        return again * products
    if l.recompute == "none":
        return 0.0
    share = costs.repeated(c, l) / sum(product_widths(c, l))
    return share * products + times["memory"][0] + times["attention"][0] * (l.recompute == "full")


# ---------------------------------------------------------------------- what travels
def send(cluster, k, wire, ranks, stride, what="send"):
    """Return (latency, seconds) of a collective or message among ranks that are `stride` apart."""
    neighbours, nodes = span(cluster, ranks, stride)
    return cluster.hardware(k).travel(what, wire, ranks, math.ceil(nodes), neighbours)[:2]


def span(cluster, ranks, stride):
    """Return how many of these ranks are in a node, and how many nodes they span. Each GPU has a network card, and a
    ring uses those of its GPUs in the node where it has fewest."""
    node = min(cluster.gpus_per_node, cluster.gpus)
    neighbours = max(1, math.gcd(ranks * stride, node) // stride)
    return (ranks, 1) if ranks <= neighbours else (neighbours, ranks / neighbours)


def share_taken(cluster, k, ranks, stride):
    """Return the share of the kernels' speed that a ring among these ranks takes."""
    neighbours, nodes = span(cluster, ranks, stride)
    _, seconds, _ = (hardware := cluster.hardware(k)).travel("all_gather", 1.0, ranks, math.ceil(nodes), neighbours)
    return hardware.share_taken(1 / seconds)


def under(seconds, work, taken):
    """Return the seconds that a transfer behind work costs: what remains to wait for, and what it takes from that work."""
    return exposed(seconds, work) + taken * min(seconds, work)


def tp_times(c, l, cluster, k, raw):
    """Return tp's seconds for (F, I, W): halves of an all-reduce, into and out of each region.

    In backward this trainer reduces behind W, and gathers the input again behind I.
    """
    wire = BF16 * l.tokens * c.hidden_size * (l.tp - 1) / l.tp
    once, seconds = send(cluster, k, wire, l.tp, 1, "all_gather")
    half, regions = k["tp_shown"] * (once + seconds), costs.regions(c)
    again = (regions + 1) * half * (l.recompute != "none")
    if not k["gathers_again"]:
        return 2 * regions * half, 2 * regions * half + again, 0.0
    qkv, _, up, _ = (width / sum(product_widths(c, l)) for width in product_widths(c, l))
    taken = share_taken(cluster, k, l.tp, 1)
    hidden = [under(half, share * raw.products[part], taken) for share in (qkv, up)[:regions] for part in (1, 2)]
    return 2 * regions * half, regions * half + again + sum(hidden), 0.0


def cp_times(c, l, cluster, k, attention):
    """Return cp's seconds for (F, I, W). A hop of the ring hides behind attention to one block; the last hop home does not."""
    kv = 2 * l.tokens * kv_width(c, l.tp)
    hops, forward, backward = l.cp - 1, attention[0] / l.cp, attention[1] / l.cp
    once, seconds = send(cluster, k, BF16 * kv, l.cp, l.tp)
    there = hops * exposed(once + seconds, forward)
    both = once + (1 + FLOAT32 / BF16) * seconds
    again = there if l.recompute == "full" else 0.0
    return there, again + hops * exposed(both, backward) + once + FLOAT32 / BF16 * seconds, 0.0


def ep_times(c, l, cluster, k):
    """Return ep's seconds for (F, I, W): counts, then tokens to their experts and back."""
    once, seconds = (k["ep_shown"] * part for part in tokens_to_experts(c, l, cluster, k))
    seconds *= l.busiest                                  # the busiest rank receives that much more, and all wait for it
    return 3 * once + 2 * seconds, (2 * once + 2 * seconds) * (1 if l.recompute == "none" else 2), 0.0


def tokens_to_experts(c, l, cluster, k, stride=1):
    """Return (latency, seconds) of a layer's tokens on their way to their experts.

    This trainer sends a row per expert. DeepEP and HybridEP send a token over the network once to each node that has one of
    its experts; there, NVLink takes it on, once to each rank. Both ways are busy at the same time.
    """
    token, nodes = BF16 * l.tokens / l.tp * c.hidden_size, math.ceil(span(cluster, l.ep, stride)[1])
    if not k["ep_by_node"]:
        return send(cluster, k, token * max(1, c.num_experts_per_tok) * (l.ep - 1) / l.ep, l.ep, stride, "all_to_all")
    to_others = lambda groups: token * reached(c, groups) * (groups - 1) / groups
    hardware = cluster.hardware(k)
    once, inside, _ = hardware.travel("all_to_all", to_others(l.ep), l.ep, 1, l.ep)
    if nodes == 1:
        return once, inside
    once, outside, _ = hardware.travel("send", to_others(nodes), 2, 2, 1)
    return once, max(inside, outside)


def reached(c, groups):
    """Return in how many of these groups, which share the experts evenly, a token's experts are on average."""
    experts, chosen = c.num_local_experts, c.num_experts_per_tok
    return groups * (1 - math.comb(experts - experts // groups, chosen) / math.comb(experts, chosen))


# ---------------------------------------------------------------------- once a step
def data_parallel_seconds(c, l, cluster, stage, k, each, last):
    """Return the seconds of reducing gradients, of what ZeRO gathers, and of the update.

    Reduction hides behind the backward of `each` micro-batch, or of the `last`. Experts' gradients are reduced among the
    ranks that have the same experts. Whatever lengthens the last backward does so on every rank of pp in turn, since
    each waits for the next one's.
    """
    ranks = l.dp * l.cp
    experts = stage.layers * bool(c.num_local_experts) * expert_layer(c, l)
    others = costs.parameters(c, l, stage) - experts
    parts = [(others, ranks, l.tp), (experts, l.expert_ranks, l.ep)]         # number of ranks that hold them, stride between those
    updated = sum(held / (copies if l.zero else 1) for held, copies, _ in parts)
    seconds = dict(dp=0.0, optimizer=moved([50 * updated], cluster, k["optimizer"])[0])
    rings = [(copies, stride) for held, copies, stride in parts if held and copies > 1]
    if not rings:
        return seconds
    taken, reduced = share_taken(cluster, k, *rings[0]), k["gradient_bytes"]
    byte = sum(ring_seconds(cluster, k, held, copies, stride) for held, copies, stride in parts)
    end = stage.embedding * ring_seconds(cluster, k, c.vocab_size * c.hidden_size / l.tp, ranks, l.tp)
    layer = max(0.0, byte - end * (1 + stage.head)) / max(1, stage.layers)
    last_units = end + layer * (l.zero > 0)               # their gradients come last, so nothing hides them
    units = stage.layers + stage.embedding + stage.head
    latency = units * ring_seconds(cluster, k, 0, *rings[0])
    window, forward, m = k["overlap"] * last * 2 / 3, k["overlap"] * last / 3, l.accumulation
    slices = m * (4 + 12 / ranks)                         # bytes: zeroed, and accumulated
    sums = (0, 4, slices, slices)[l.zero]
    seconds["dp"] += moved([sums * (others + experts)], cluster, k["memory"])[0]
    if l.zero < 2:                                        # ZeRO-1 sends half of an all-reduce
        halves = reduced * (1 if l.zero else 2)
        behind = halves * (byte - last_units) + latency
        seconds["dp"] += l.pp * taken * min(behind, window) + exposed(behind, window) + halves * last_units
    else:                                                 # reduced after every micro-batch; ZeRO-3 gathers again
        again = BF16 * byte + latency if l.zero == 3 and l.pp == 1 else 0.0
        hidden = again + reduced * (byte - last_units / m) + latency
        seconds["dp"] += (m + l.pp - 1) * under(hidden, k["overlap"] * each * 2 / 3, taken) + reduced * last_units
    if l.zero:                                            # the new weights are gathered unit by unit behind forward
        times = m if l.zero == 3 and l.pp == 1 else 1
        seconds["dp"] += times * (under(BF16 * (byte - last_units) + latency, forward, taken) + BF16 * last_units)
    return seconds


def ring_seconds(cluster, k, held, ranks, stride):
    """Return the seconds to send one byte per parameter once round the ranks that hold it; if none, the latency alone."""
    once, seconds = send(cluster, k, held * (ranks - 1) / ranks, ranks, stride, "all_gather")
    return seconds if held else once


def soft_max(a, b):
    """Return the larger of two times that overlap, and a bit more if they are close."""
    top = max(a, b)
    return top * ((a / top) ** 8 + (b / top) ** 8) ** (1 / 8) if top else 0.0


def exposed(seconds, hidden):
    """Return how much of a transfer is left to wait for behind work; smoothly, since a network is not that punctual."""
    width = 0.05 * seconds + 1e-6
    x = (seconds - hidden) / width
    return width * math.log1p(math.exp(x)) if x < 50 else seconds - hidden
