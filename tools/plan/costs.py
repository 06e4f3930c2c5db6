"""Compute what a layout holds and sends in this trainer: parameters, memory, payloads.

Everything is exact except the memory that comes and goes. Tests compare all of it with a dry run (tools/simulate).
"""
import math
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import trainer
from trainer import SCHEDULES

GIB = 2**30
BF16, FLOAT32, INT64 = 2, 4, 8                            # bytes per number


# ---------------------------------------------------------------------- layouts
class Layout(NamedTuple):
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
    virtual: int = 2                                      # stages per rank, for schedules that take any number
    wide: int = 4                                         # tensors that an MLP saves; torch.compile: 3, Megatron's kernels: 2
    whole_logits: bool = False                            # another trainer's loss, which is not made in chunks
    balance: float = 1.0                                  # tokens that come to the busiest rank of ep, divided by the mean

    @property
    def gpus(self):
        return self.dp * self.tp * self.cp * self.pp

    @property
    def batch(self):
        """Return the number of sequences in a training step."""
        return self.dp * self.micro_batch * self.accumulation

    @property
    def tokens(self):
        """Return how many of a micro-batch's tokens a rank has."""
        return self.micro_batch * self.seq_len // self.cp

    @property
    def busiest(self):
        """Return `balance`, or 1 if every rank has all experts."""
        return self.balance if self.ep > 1 else 1.0

    @property
    def expert_ranks(self):
        """Return how many ranks hold the same experts: ep is folded into dp x cp x tp."""
        return self.dp * self.cp * self.tp // self.ep

    @property
    def stages_per_rank(self):
        row = SCHEDULES[self.schedule]
        return self.virtual if row.or_more else row.stages_per_rank


DEFAULT_SCHEDULE = Layout().schedule


class Stage(NamedTuple):
    layers: int
    embedding: bool
    head: bool
    each: tuple = ()                                      # the layers in each of the rank's stages


def stage_boundaries(c, stages):
    """Return each stage's first layer. This is pipeline_parallel.py's function, which would need torch."""
    layers, ends = c.num_hidden_layers, c.vocab_size / layer_width(c)
    even = [math.floor((layers + 2 * ends) * stage / stages - ends + 0.5) for stage in range(stages + 1)]
    return [max(stage, min(layers - stages + stage, first)) for stage, first in enumerate(even)]


def local_stages(l, rank):
    """Return the stages of a rank of pp, as pipeline_parallel.py does."""
    stages = l.pp * l.stages_per_rank
    if SCHEDULES[l.schedule].v_shaped:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, l.pp))


def our_stages(c, l):
    """Return for each rank of pp what it holds, with all its stages taken together."""
    return stages_of(c, Layout(pp=l.pp, schedule=l.schedule, virtual=l.virtual))


@lru_cache(maxsize=1024)
def stages_of(c, l):
    first = stage_boundaries(c, l.pp * l.stages_per_rank)
    last, held = len(first) - 2, [local_stages(l, rank) for rank in range(l.pp)]
    sizes = [tuple(first[s + 1] - first[s] for s in mine) for mine in held]
    return tuple(Stage(sum(each), 0 in mine, last in mine, each) for mine, each in zip(held, sizes))


# ---------------------------------------------------------------------- parameters on a rank
def attention_products(c, l=Layout()):
    """Return (inner, columns) of each attention matrix on a rank; the output projection comes last.

    Latent attention first projects to a small q, and to a small k and v. tp does not cut those two matrices.
    """
    h, heads = c.hidden_size, c.num_attention_heads // l.tp
    q, kv = heads * c.head_dim, kv_width(c, l.tp)
    if not c.latent:
        return [(h, q), (h, kv), (h, kv), (q, h)]
    of_q, of_kv, plain, turned, v = c.latent
    made = [(h, of_q), (of_q, heads * (plain + turned))] if of_q else [(h, heads * (plain + turned))]
    return [*made, (h, of_kv + turned), (of_kv, heads * (plain + v)), (heads * v, h)]


def kv_width(c, tp):
    """Return the columns of k on a rank; v has as many. If there are more ranks than heads, neighbours share one."""
    return c.num_key_value_heads * c.head_dim // min(tp, c.num_key_value_heads)


def block_tensors(c, l):
    """Return (parameters, group that sums their gradients once more) of a block's tensors, in order, without the experts."""
    h, i = c.hidden_size, c.intermediate_size // l.tp
    of_all = "tp" * (l.tp > 1)
    same_heads = "kv_heads" * (l.tp > c.num_key_value_heads)
    groups = ["", same_heads, same_heads, ""] if not c.latent else [""] * 5
    matrices = list(zip(attention_products(c, l), groups))
    attention = [(inner * columns, group) for (inner, columns), group in matrices]
    if c.attention_bias:
        attention += [(columns, group) for (_, columns), group in matrices[:3]]
    attention += [(c.head_dim, of_all)] * 2 * c.qk_norm
    attention += [(rank, of_all) for rank in c.latent[:2]]
    mlp = [(h * i, "")] * 3
    if c.num_local_experts:
        mlp = [(c.num_local_experts * h, of_all)] + [(h * i, "")] * 3 * c.shared_experts
    if c.dense_layers:                                    # use the average layer
        share = 1 - c.dense_layers / c.num_hidden_layers
        mlp = [(round(share * size), group) for size, group in mlp]
        mlp.append((round((1 - share) * 3 * h * c.dense_size / l.tp), ""))
    return [(h, of_all), *attention, (h, of_all), *mlp]


@lru_cache(maxsize=4096)
def dense_layer(c, l):
    """Return the parameters of a layer on a rank, without its experts."""
    return sum(size for size, _ in block_tensors(c, l))


def expert_layer(c, l):
    """Return the expert parameters of the average layer. In the models that this trainer takes, every layer has experts.

    tp does not cut them.
    """
    mine = c.num_local_experts // l.ep * 3 * c.hidden_size * c.intermediate_size
    return mine * (c.num_hidden_layers - c.dense_layers) // c.num_hidden_layers


def units(c, l, stage):
    """Return ZeRO's units, as (parameters, shards, number of such units)."""
    ends, ranks = c.vocab_size * c.hidden_size // l.tp, l.dp * l.cp
    first = [(ends, ranks, 1)] * stage.embedding
    blocks = [(block_unit(c, l), ranks, stage.layers)]
    last = [(ends + c.hidden_size, ranks, 1)] * stage.head
    experts = [(expert_layer(c, l), l.expert_ranks, stage.layers)] * experts_apart(c, l)
    return [*first, *blocks, *last, *experts]


def experts_apart(c, l):
    """Return whether a block's experts are a unit of their own: other ranks hold the same experts than the same attention."""
    return c.num_local_experts > 0 and l.tp * l.ep > 1


def block_unit(c, l):
    """Return the parameters of the unit that a block's norms are in."""
    return dense_layer(c, l) + (0 if experts_apart(c, l) else expert_layer(c, l))


def parameters(c, l, stage):
    return sum(size * count for size, _, count in units(c, l, stage))


def model_parameters(c, active=False):
    """Return the parameters of the whole model; with active, only those that are active for a token."""
    experts = c.num_experts_per_tok if active else c.num_local_experts
    layer = experts * 3 * c.hidden_size * c.intermediate_size
    layer += dense_layer(c._replace(dense_layers=0), Layout())
    dense = c._replace(dense_layers=0, num_local_experts=0, intermediate_size=c.dense_size)
    of_layers = (c.num_hidden_layers - c.dense_layers) * layer + c.dense_layers * dense_layer(dense, Layout())
    return (2 * c.vocab_size + 1) * c.hidden_size + of_layers


def flops_per_token(c, seq_len, causal=False, embedding=True):
    """Return FLOPs per token: 6 per parameter that is active for it, and attention's two [seq, seq] products, forward and backward.

    metrics.py counts all of them, and the embedding, which multiplies nothing. With causal, count half of attention.
    """
    met = model_parameters(c, active=True) - (0 if embedding else c.vocab_size * c.hidden_size)
    scores = c.num_hidden_layers * c.num_attention_heads * c.head_dim * seq_len
    return 6 * met + (6 if causal else 12) * scores


def product_widths(c, l):
    """Return, in units of hidden, how many weights a layer's matrix products use for a token on a rank.

    The first number is for all of attention's products but the last, the second for that last one; the other two are the
    same for the MLP. A rank of tp sends its part of the tokens through a router and whole experts.
    """
    *qkv, out = (inner * columns // c.hidden_size for inner, columns in attention_products(c, l))
    down = c.intermediate_size * experts_met(c) / l.tp
    return sum(qkv), out, 2 * down + c.num_local_experts / l.tp, down


def experts_met(c):
    return max(1, c.num_experts_per_tok) + c.shared_experts


def most_met(c, l):
    """Return experts_met for the tokens that come to the busiest rank."""
    return max(1, c.num_experts_per_tok) * l.busiest + c.shared_experts


def regions(c):
    """Return how many regions of tp a layer has: attention is one, and so is an MLP, or what every token goes through."""
    return 2 if c.shared_experts or not c.num_local_experts else 1


def layer_width(c):
    """Return the sum of product_widths without the router, as pipeline_parallel.py counts a layer."""
    return sum(product_widths(c, Layout())) - c.num_local_experts


def repeated(c, l):
    """Return the part of product_widths that recomputation repeats. The MLP's last product is repeated only with experts,
    whose outputs are weighted."""
    qkv, out, up, down = product_widths(c, l)
    down = down * bool(c.num_local_experts)
    if l.recompute == "none":
        return 0
    if l.recompute == "full":
        return qkv + out + up + down
    out_kept, down_kept = keeps_last_products(c, l)
    return out * (not out_kept) + down * (not down_kept)


def keeps_last_products(c, l):
    """Return whether --recompute selective keeps the last product of attention, and that of the MLP.

    It does if the product's inner size is at least hidden. tp cuts attention and MLP, but no expert.
    """
    heads = c.num_attention_heads * c.head_dim // l.tp
    return heads >= c.hidden_size, c.intermediate_size // (1 if c.num_local_experts else l.tp) >= c.hidden_size


# ---------------------------------------------------------------------- memory
def our_memory(c, l, rank, stage, number=BF16, fused_norm=True):
    """Return bytes by kind, at the moment when their sum is largest."""
    most = max(moments(c, l, rank, stage, number, fused_norm), key=lambda moment: sum(moment.values()))
    return {**persistent(c, l, stage, number), **most}


def persistent(c, l, stage, number=BF16):
    """Return persistent bytes by kind. The optimizer's counters, 4 bytes per tensor, are left out."""
    master = 12 if number == BF16 else 8                  # float32 copy of the weights, two moments
    held = units(c, l, stage)
    plain = sum(size * count for size, _, count in held)
    cut = sum(-(-size // ranks) * count for size, ranks, count in held)          # a shard of each, rounded up
    padded = sum(-(-size // ranks) * ranks * count for size, ranks, count in held)
    whole = padded if l.zero else plain
    return {"parameters": number * (cut if l.zero == 3 else whole), "gradients": FLOAT32 * (cut if l.zero >= 2 else whole),
            "optimizer states": master * (cut if l.zero else plain)}


def moments(c, l, rank, stage, number, fused_norm):
    """Yield the bytes that come and go, by kind, at the moments of a backward pass when they may be most.

    Those are when backward is in the head, in the first block, in the next one, and in the embedding.
    """
    h, ends, unit = c.hidden_size, c.vocab_size // l.tp * c.hidden_size, block_unit(c, l)
    block = dense_layer(c, l) + expert_layer(c, l)
    row, cut = SCHEDULES[l.schedule], FLOAT32 * (l.zero >= 2)
    split = row.split_backward
    layer, whole = kept(c, l, number, fused_norm), kept(c, l._replace(recompute="none"), number, fused_norm)
    stream = number * l.tokens * h / l.tp
    output = stream + 2 * FLOAT32 * c.head_dim * l.seq_len / l.cp              # a stage's output; and rotary tables
    before_norm = stage.head * (stream + FLOAT32 * l.tokens / l.tp)                # the last norm's input
    # three terms: an MLP's tensors in backward; what tp has gathered there and will scatter; the gradient of a matrix
    inside = 2 * number * l.tokens * c.intermediate_size / l.tp * most_met(c, l)
    inside += 2 * number * l.tokens * h * (l.tp > 1)
    inside += number * h * c.intermediate_size * (c.num_local_experts / l.ep if c.num_local_experts else 1 / l.tp)
    # ZeRO-3 has whole weights, in a pipeline those of all units. From ZeRO-2 on, the unit in backward has whole
    # gradients, and so has the one before it, whose reduce-scatter is under way (with ep or tp, a block's experts
    # are one unit, all else another). Where W is delayed, norms get their gradients before it, so all units with
    # norms have some.
    all_weights = number * sum(size * count for size, _, count in units(c, l, stage)) if l.pp > 1 else 0
    at_head, in_block, at_start = 0, 0, 0
    if l.zero == 3:
        whole_units = block + ends, 2 * block, block
        at_head, in_block, at_start = [all_weights or number * size for size in whole_units]
    grads, others = cut * block, cut * unit * (stage.layers - 1) * split
    last = ends if stage.embedding or stage.head and split else unit         # the last unit of the micro-batch before
    last_micro_batch = cut * (l.accumulation > 1) * last
    for layers, stages, delayed, at_end in in_backward(l, rank, stage):
        alive = layers * layer + stages * output + delayed * noted(c, l, number) + before_norm
        again = whole - layer if layers else 0         # a layer in backward has all its activations again
        if stage.head and layers and at_end:
            buffers = at_head + last_micro_batch + (grads + others) * (delayed > 0)
            yield dict(activations=alive, loss=loss_memory(c, l, number), buffers=buffers)
        buffers = in_block + inside + grads + others + cut * stage.head * ends
        yield dict(activations=alive + again, loss=0, buffers=buffers)
        if layers and stage.layers > 1:
            buffers = in_block + inside + grads + max(others, cut * unit)
            yield dict(activations=alive + again - layer, loss=0, buffers=buffers)
        buffers = at_start + number * ends + cut * (ends + unit) + (grads + others) * split
        if stage.embedding and stages:
            yield dict(activations=alive - layers / stages * layer - output, loss=0, buffers=buffers)
        if stage.embedding and delayed and not row.v_shaped:
            # an I whose W is still to come also ends like this; `unit` is its ZeRO unit
            yield dict(activations=alive, loss=0, buffers=buffers - grads)


# A rank's list of actions determines what it keeps. A search asks for this thousands of times, so a schedule may
# have formulas for it.
def in_flight(l, rank=0):
    """Return how many micro-batches a rank keeps for all its layers at the worst moment, as in step 6's table."""
    if l.schedule in FORMULAS:
        return FORMULAS[l.schedule].in_flight(l, rank)
    return counted_in_flight(l.schedule, l.pp, l.accumulation, l.stages_per_rank, rank)


def in_backward(l, rank, stage):
    """Return a list of the moments of a rank that may need the most memory.

    Each moment is the layers and the stages that wait for backward, and the layers that wait for W alone, all counted
    once per micro-batch; and whether the head may be next.
    """
    if l.schedule in FORMULAS:
        return FORMULAS[l.schedule].in_backward(l, rank, stage)
    return counted_moments(l.schedule, l.pp, l.accumulation, l.stages_per_rank, rank, stage.each)


def list_of_rank(schedule, p, m, v, rank):
    row = SCHEDULES[schedule]
    return row.actions(rank, p, m, *[v] * row.or_more)


@lru_cache(maxsize=4096)
def counted_in_flight(schedule, p, m, v, rank):
    return trainer.max_in_flight(list_of_rank(schedule, p, m, v, rank)) / v


@lru_cache(maxsize=4096)
def counted_moments(schedule, p, m, v, rank, each):
    """Compute in_backward from any schedule's list: look before each I or B, and after it if its W is still to come.

    Leave out moments that another one exceeds or equals in everything.
    """
    l = Layout(pp=p, schedule=schedule, virtual=v)
    layers, last = dict(zip(local_stages(l, rank), each)), p * v - 1
    waiting, delayed, found = dict.fromkeys(layers, 0), dict.fromkeys(layers, 0), set()

    def note(stage):
        found.add((sum(count * layers[s] for s, count in waiting.items()), sum(waiting.values()),
                   sum(count * layers[s] for s, count in delayed.items()), stage == last))
    for kind, stage, _ in list_of_rank(schedule, p, m, v, rank):
        if kind == "F":
            waiting[stage] += 1
        elif kind == "W":
            delayed[stage] -= 1
        else:
            note(stage)
            waiting[stage] -= 1
            delayed[stage] += SCHEDULES[schedule].split_backward
            note(stage)
            delayed[stage] -= delayed[stage] > 0 and kind == "B"
    more = lambda one, other: one != other and all(a >= b for a, b in zip(one, other))
    return [one for one in found if not any(more(other, one) for other in found)]


def whole_micro_batches(l, rank, stage):
    most = in_flight(l, rank)
    return [(most * stage.layers, most, 0, True)]


def zero_bubble_moments(l, rank, stage):
    """Return in_backward's moments for a schedule in which W comes `rank` micro-batches after I."""
    p, m, layers, most = l.pp, l.accumulation, stage.layers, in_flight(l, rank)
    waiting, delayed = min(m, p - rank), min(m, rank + 1)
    most_waiting = waiting * layers, waiting, (most - waiting) * layers, True
    most_delayed = (most - delayed) * layers, most - delayed, delayed * layers, True
    return [most_waiting, most_delayed]


def dualpipe_moments(l, rank, stage):
    """Return in_backward's moments for DualPipe: B is an I and its W, and at the end W is delayed."""
    layers, most, after = stage.layers, in_flight(l, rank), l.pp - 1 - rank
    at_end = after / 2 * layers, after, (rank + 1) / 2 * layers, False
    after_one = (most - 0.5) * layers, 2 * most - 1, layers / 2, True
    return [(most * layers, 2 * most, 0, True), after_one, at_end]


def interleaved_in_flight(l, rank):
    v = l.stages_per_rank
    ahead = 2 * (l.pp - 1 - rank) + (v - 1) * round_size(l) + 1
    return min(l.accumulation * v, ahead) / v


def interleaved_moments(l, rank, stage):
    """Return in_backward's moments for interleaved 1F1B. Which of the rank's stages wait changes every round."""
    m, v, size = l.accumulation, l.stages_per_rank, round_size(l)
    ahead, found = round(in_flight(l, rank) * v), []
    starts = [size * i for i in range(v + 1)]
    for backwards in [*starts, *(size - ahead % size + start for start in starts)]:
        forwards = min(ahead + backwards, m * v)
        done = [of_stage(v - 1 - i, backwards, size, v) for i in range(v)]
        waiting = [of_stage(i, forwards, size, v) - done[i] for i in range(v)]
        waiting_layers = sum(n * count for n, count in zip(waiting, stage.each))
        found.append((waiting_layers, sum(waiting), 0, backwards % (size * v) < size))
    return found


def round_size(l):
    """Return how many micro-batches interleaved 1F1B sends through a rank's stages in one round."""
    return -(-l.accumulation // max(1, l.accumulation // l.pp))


def of_stage(i, done, size, v):
    """Return how many of the first `done` forwards are stage i's, in rounds of `size` through each of v stages."""
    return done // (size * v) * size + min(size, max(0, done % (size * v) - i * size))


class Formulas(NamedTuple):
    """Closed forms for a schedule, so that the planner need not count its lists and simulate them."""
    in_flight: Callable                                   # (layout, rank)
    in_backward: Callable                                 # (layout, rank, stage)
    # (layout, F, I, W) -> idle time divided by p - 1, or None if no formula is known: with very few micro-batches,
    # some W find no gap to fill
    idle: Callable


FORMULAS = {
    "afab": Formulas(lambda l, rank: l.accumulation, whole_micro_batches, lambda l, F, I, W: F + I + W),
    "1f1b": Formulas(lambda l, rank: min(l.accumulation, l.pp - rank), whole_micro_batches,
                     lambda l, F, I, W: F + I + W),
    "interleaved": Formulas(interleaved_in_flight, interleaved_moments,
                            lambda l, F, I, W: (F + I + W) / l.stages_per_rank),
    "zerobubble": Formulas(lambda l, rank: min(l.accumulation, l.pp), zero_bubble_moments,
                           lambda l, F, I, W: max(F, I, F + I - W) if l.accumulation >= l.pp else None),
    "dualpipe": Formulas(lambda l, rank: min(2 * l.accumulation, 2 * l.pp + 1) / 2, dualpipe_moments,
                         # a stage is half of a rank
                         lambda l, F, I, W: max(F, F + I - W, 2 * I - W - F / (l.pp - 1)) / 2),
}


def kept(c, l, number, fused_norm):
    """Return the bytes that a layer keeps for the backward of one micro-batch."""
    q, kv = c.num_attention_heads * c.head_dim, 2 * kv_width(c, l.tp)
    h, i, heads = c.hidden_size, c.intermediate_size, c.num_attention_heads
    times, most = experts_met(c), most_met(c, l)
    if l.recompute == "full":
        return l.tokens / l.tp * number * h
    inside = number * (2 * q / l.tp + kv) + FLOAT32 * heads / l.tp
    if l.recompute == "selective":                # the outputs of products and of attention, for every hop of the ring
        ring = (l.cp - 1) * (number * q + FLOAT32 * heads) / l.tp
        out, down = keeps_last_products(c, l)
        products = 2 * most * i / l.tp + h / l.tp + h * out + most * h * down / (l.tp if c.num_local_experts else 1)
        return l.tokens * (inside + ring + number * products)
    inside += number * 2 * sum(c.latent[:2])              # before and after their norms
    norms = 2 * h * number if fused_norm else 4 * h * FLOAT32
    if c.qk_norm:                                         # each head's q and k before the norm, and its divisor
        q_and_k = q / l.tp + kv / 2
        inside += (number if fused_norm else 2 * FLOAT32) * q_and_k + FLOAT32 * q_and_k / c.head_dim
    mlp = number * l.wide * most * i / l.tp
    if c.num_local_experts:                               # each choice's rows in and out, and the router's scores
        mlp += (number * (most + times) * h + FLOAT32 * c.num_local_experts) / l.tp
    outputs = 0 if l.wide == 2 else 2 * h * number        # the norms' outputs
    return l.tokens * (inside + mlp + (norms + outputs + 2 * FLOAT32) / l.tp)


def noted(c, l, number):
    """Return the bytes that a layer keeps from I to W: its products' inputs, and the gradients of their outputs."""
    h, q = c.hidden_size, c.num_attention_heads * c.head_dim
    attention = h / l.tp + 2 * q / l.tp + 2 * kv_width(c, l.tp) + h
    mlp = 3 * c.intermediate_size / l.tp + (2 * h / l.tp if c.num_local_experts else h / l.tp + h)
    return number * l.tokens * (attention + mlp * most_met(c, l))


def chunk(c, l):
    """Return the number of tokens whose logits loss.py makes at a time."""
    rows = max(1, 2**27 // (c.vocab_size // l.tp))
    return min(l.tokens, rows - rows % 128 if rows > 128 else rows)


def loss_memory(c, l, number):
    """Return the bytes of loss.py's forward: a chunk's logits, twice in float32 (compiled: once), and the gradients of the head and
    its input."""
    words, rows = c.vocab_size // l.tp, chunk(c, l)
    if l.whole_logits:                                    # and in float32 three times: themselves, their softmax, their gradients
        return l.tokens * (words * (number + 3 * FLOAT32) + 2 * number * c.hidden_size)
    copies = (l.tp == 1 and number == BF16) + (l.tokens > rows)
    logits = rows * words * ((1 + (l.wide == 4)) * FLOAT32 + number * copies)
    most = max(logits, number * words * c.hidden_size + 2 * rows * words)
    both = FLOAT32 * words + number * l.tokens * (1 + (l.tp > 1))
    return both * c.hidden_size + most


# ---------------------------------------------------------------------- what is sent
def sent(c, l, rank=0, part=0):
    """Return {(dimension, collective): payload bytes in one training step} for a rank of pp; with ZeRO, for the one with shard
    `part`. Leave out sums of single numbers, and assume that every expert gets the same number of tokens."""
    out, m, stage = defaultdict(int), l.accumulation, our_stages(c, l)[rank]
    tokens, layers, again = l.tokens * m, stage.layers, l.recompute != "none"
    ends = stage.embedding + stage.head
    head = [(c.hidden_size, "tp"), (c.vocab_size // l.tp * c.hidden_size, "")]
    stream = BF16 * tokens * c.hidden_size                # [batch, seq, hidden], of all micro-batches together
    for size, ranks, count in units(c, l, stage):
        padded = -(-size // ranks) * ranks
        if l.zero == 0:
            out["dp", "all_reduce"] += FLOAT32 * size * count
        else:
            # ZeRO-3 without a pipeline gathers in every micro-batch, and all blocks but the last again in backward
            times, twice = (m, max(0, count - 1)) if l.zero == 3 and l.pp == 1 else (1, 0)
            out["dp", "reduce_scatter"] += FLOAT32 * padded * count * (m if l.zero > 1 else 1)
            out["dp", "all_gather"] += BF16 * padded * (count + twice) * times
    if l.tp > 1:                                          # a region's input is gathered again in backward
        of_layer = regions(c)
        out["tp", "all_gather"] += ((3 + again) * of_layer * layers + ends) * stream
        out["tp", "reduce_scatter"] += ((2 * of_layer + again) * layers + ends) * stream
        out["tp", "all_reduce"] += 3 * stage.head * tokens * FLOAT32
        for tensors, count in ((block_tensors(c, l), layers), (head, stage.head)):
            for group, size in summed(tensors, l, part).items():
                out[group, "all_reduce"] += FLOAT32 * count * size
    if l.cp > 1:                            # zigzag: keys and values go round twice; their float32 gradients once, a hop further
        kv = 2 * tokens * layers * kv_width(c, l.tp)
        out["cp", "send"] += ((2 + again) * (l.cp - 1) * BF16 + l.cp * FLOAT32) * kv
    if l.pp > 1:
        mine = local_stages(l, rank)
        neighbours = [other for stage in mine for other in (stage - 1, stage + 1) if other not in mine]
        borders = sum(0 <= other < l.pp * l.stages_per_rank for other in neighbours)
        out["pp", "send"] += borders * stream // l.tp
    counts = INT64 * layers * c.num_local_experts
    if l.ep > 1:             # rows of its tokens' choices, there and back, forward and backward; and their counts
        rows = layers * c.num_experts_per_tok * stream // l.tp
        out["ep", "all_to_all"] += (4 + 2 * again) * rows + (1 + again) * m * counts
    out["dp", "all_reduce"] += counts                     # each expert's number of tokens, for the balance
    return {key: size for key, size in out.items() if size}


def summed(tensors, l, part):
    """Return {group: number of a unit's parameters whose gradients it sums}; with ZeRO, of those in one shard."""
    whole = sum(size for size, _ in tensors)
    cut = -(-whole // (l.dp * l.cp))
    first, last = (part * cut, part * cut + cut) if l.zero else (0, whole)
    start = 0
    found = defaultdict(int)
    for size, group in tensors:
        if group:
            found[group] += max(0, min(start + size, last) - max(start, first))
        start += size
    return found
