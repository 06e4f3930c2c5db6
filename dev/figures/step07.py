"""Make this step's pictures, and the tables between its `<!-- measured: ... -->` marks, from runs.

    python dev/figures/step07.py          (about ten minutes on two cores, most of it three trainings)
    python dev/figures/step07.py drawn    (only the pictures that need no run)

The runs come first, in one torchrun of this file per number of ranks; rank 0 writes what all ranks saw in each.
"""
import contextlib
import os
import re
import sys

from common import bytes_of, do_runs, paths_of, put_into_pages, seen_in_runs

STEP, FIGURES = paths_of(7)

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

import balance as balancing
import config
import ledger
import metrics
import model
import moe
import train
from watch import Storages, replaced_profiler

RANKS, LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, SEQ = 4, 8, 8, 2, 64, 96, 32
STEPS = 200                                               # of a training run that shows the balance
BALANCES = ["none", "bias", "aux"]
OF_EXPERTS = LAYERS * EXPERTS * 3 * HIDDEN * INTERMEDIATE                          # parameters
with torch.device("meta"):
    OTHERS = sum(param.numel() for param in model.Llama(config.PRESETS["tiny-moe"]).parameters()) - OF_EXPERTS
ROW = HIDDEN * 4                                          # bytes


def flags(more, batch=16, micro_batch=4):
    batch = f"--global_batch_size {batch} --micro_batch_size {micro_batch}"
    return f"--model tiny-moe --seq_len {SEQ} {batch} {more} --steps 2"


def long_flags(balance):
    return f"--model tiny-moe --steps {STEPS} --balance {balance}"


#        flags, sequences in the global batch, sequences in a micro-batch
WIRE = [("--ep 1", 16, 4), ("--ep 2", 16, 4), ("--ep 4", 16, 4), ("--ep 4", 64, 4), ("--zero 3", 64, 4)]
MEMORY = ["--ep 1", "--ep 4", "--ep 2 --zero 3"]
RUNS = {2: [("balance", long_flags(balance)) for balance in BALANCES],
        RANKS: list(dict.fromkeys([*(("watch", flags(*run)) for run in WIRE),
                                   *(("watch", flags(more)) for more in MEMORY)]))}
SEEN = {}                                                 # by (kind of run, flags): what every rank saw


# ---------------------------------------------------------------------------------------------- inside a rank
def one_run(kind, argv):
    """Run the trainer; return a list with what each rank saw."""
    seen, ranks, models, balances, batches = {}, [], [], [], []
    kept = dict(batches=train.batches, ledger=train.ledger, Metrics=train.Metrics)

    class Quiet(metrics.Metrics):
        def log(self, step, loss, grad_norm, lr, balance):
            seen.setdefault("losses", []).append(float(loss))
            seen.setdefault("norms", []).append(float(grad_norm))
            seen.setdefault("balance", []).append(float(balance))

    class Noting(balancing.LoadBalancer):
        def __init__(self, model, *arguments):
            super().__init__(model, *arguments)
            models.append(model)
            balances.append(self)

        def update(self):
            if kind != "balance":
                return super().update()
            counts = self.tokens_per_expert.clone()
            dist.all_reduce(counts, group=self.stage_group)
            seen.setdefault("counts", []).append(counts.tolist())
            return super().update()
    def noted_batches(*arguments):
        for step, micro_batches in kept["batches"](*arguments):
            batches.append(micro_batches)
            yield step, micro_batches
        if kind == "balance":
            seen["without_bias"] = without_bias(models[0], balances[0], batches[-10:])
        ranks.extend([None] * dist.get_world_size())
        dist.all_gather_object(ranks, seen)               # before the processes part
    train.Metrics, balancing.LoadBalancer, train.batches = Quiet, Noting, noted_batches
    noted = replaced_profiler(watch(seen)) if kind == "watch" else contextlib.nullcontext()
    with noted:
        train.main(argv.split())
    balancing.LoadBalancer = Noting.__base__
    for name, value in kept.items():
        setattr(train, name, value)
    return ranks


@torch.no_grad()
def without_bias(of, balance, batches):
    """Run the last batches again after the training: with the bias as trained, and with experts chosen by the scores alone.

    Return both losses, the share of choices that change, and the range of the bias."""
    losses, choices, bias = [], [], balance.bias.clone()
    for biased in (True, False):
        chosen, loss, tokens = [], torch.zeros(()), 0
        balance.bias.copy_(bias if biased else torch.zeros_like(bias))
        for i, layer in enumerate(balance.layers):
            def noted_choose(logits, i=i):
                selected, logits = balance.choose(i, logits)
                chosen.append(selected)
                return selected, logits
            layer.choose = noted_choose
        for inputs, positions, targets in (micro_batch for batch in batches for micro_batch in batch):
            loss += of(inputs, positions, targets)
            tokens += targets.numel()
        sums = torch.tensor([float(loss), tokens], dtype=torch.float64)
        dist.all_reduce(sums)
        losses.append(float(sums[0] / sums[1]))
        choices.append(torch.cat([selected.flatten(0, 1) for selected in chosen]))
    there = (choices[1].unsqueeze(-1) == choices[0].unsqueeze(-2)).any(-1).double().mean()
    dist.all_reduce(there)
    return dict(losses=losses, changed=1 - float(there) / dist.get_world_size(),
                bias=[float(bias.min()), float(bias.max())])


def persistent(of, optimizer):
    """Return the bytes that stay from step to step: the experts' by kind, and all others."""
    experts = [param for name, param in of.named_parameters() if ".experts." in name]
    rest = [param for name, param in of.named_parameters() if ".experts." not in name]

    def gradients(params):
        if not hasattr(params[0], "unit"):                # gradients may share a flat buffer with others: count one by one
            size = lambda grads: sum(grad.nbytes for grad in grads)
            return [param.main_grad for param in params], lambda grad: grad.data_ptr(), size
        units = list(dict.fromkeys(param.unit for param in params))
        grads = [t for unit in units for t in (unit.flat_grad, unit.grad_shard) if t is not None]
        return grads, lambda grad: grad.untyped_storage()._cdata, bytes_of

    def weights(params):
        units = dict.fromkeys(param.unit for param in params if hasattr(param, "unit"))
        return [t for unit in units for t in (unit.flat_param, unit.param_shard)] or params
    (grads, which, size), (other_grads, _, _) = gradients(experts), gradients(rest)
    mine, states = {which(grad) for grad in grads}, [[], []]
    for master, grad in zip(optimizer.masters, optimizer.grads):
        states[which(grad) in mine] += [t for t in optimizer.adamw.state[master].values() if t.dim()]
    others = bytes_of(weights(rest)) + size(other_grads) + bytes_of(states[0])
    return dict(weights=bytes_of(weights(experts)), gradients=size(grads), states=bytes_of(states[1]),
                others=others)


class Ledger(ledger.Ledger):
    counts = 0                                            # bytes of the all-to-alls that tell how many rows will come

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._opname == "alltoall_base_" and not args[4]:
            self.counts += args[1].nbytes
        return super().__torch_dispatch__(op, types, args, kwargs)


def watch(seen):
    """Note in the last training step the bytes sent and the bytes alive. Return a context manager for each step."""
    live = Storages()

    @contextlib.contextmanager
    def noted_step(step, of, optimizer, args):
        if step < args.steps - 1:
            yield
            return
        live.tag_state(of, optimizer)
        seen["persistent"], first = persistent(of, optimizer), len(live.events)
        with live:
            yield
        alive = peak = 0
        for i, (_, _, size) in enumerate(live.events):
            alive += size
            peak = max(peak, alive) if i >= first else 0
        seen["peak"] = peak

    @contextlib.contextmanager
    def noted_ledger(step, of, mesh, args, techniques):
        if step < args.steps - 1:
            yield
            return
        with Ledger(mesh) as sent:
            yield
        expected = {}
        for group, collective, size in ledger.expected_traffic(of, mesh, args, techniques):
            key = f"{sent.name(group)} {collective}"
            expected[key] = expected.get(key, 0) + size
        names = lambda counter: {" ".join(key): n for key, n in counter.items()}
        seen.update(payload=names(sent.payload), wire=names(sent.wire),
                    formula={key: n for key, n in expected.items() if n}, counts_sent=sent.counts)
    train.ledger = noted_ledger
    return noted_step


# ------------------------------------------------------------------------------------------------ the runs
def run_all():
    """Fill SEEN with what the ranks saw in each run."""
    for world, runs in RUNS.items():
        SEEN.update(zip(runs, seen_in_runs(os.path.abspath(__file__), "rank", world, runs, timeout=2400)))
    for (kind, argv), ranks in SEEN.items():
        if kind != "watch":
            continue
        for key in ranks[0]["formula"]:                   # for an all-to-all, only the sum over ranks is known
            of = lambda what: [seen[what].get(key, 0) for seen in ranks]
            measured, expected = of("payload"), of("formula")
            assert sum(measured) == sum(expected), (argv, key, measured, expected)
            assert measured == expected or "all_to_all" in key, (argv, key, measured, expected)


def watched(more, batch=16, micro_batch=4):
    return SEEN["watch", flags(more, batch, micro_batch)]


def wire(seen, *names):
    return sum(n for key, n in seen["wire"].items() if key.split()[1] in names)


def dispatched(seen):
    return sum(n for key, n in seen["payload"].items() if "all_to_all" in key)


def mean(ranks, get):
    return sum(map(get, ranks)) / len(ranks)


def degree(more, name):
    found = re.search(rf"--{name} (\d+)", more)
    return int(found[1]) if found else 1


def wire_table():
    rows = ["| run | tokens of a rank | micro-batches | all-to-all, bytes of a rank: formula "
            "| measured, mean | on the wire with the counts, mean "
            "| weights and gradients on the wire | in all |",
            "|---|---|---|---|---|---|---|---|"]
    for more, batch, micro_batch in WIRE:
        ranks, ep = watched(more, batch, micro_batch), degree(more, "ep")
        tokens, m = batch // RANKS * SEQ, batch // RANKS // micro_batch
        formula, counts = (4 * LAYERS * TOP_K * tokens * ROW, LAYERS * EXPERTS * 8 * m) if ep > 1 else (0, 0)
        sent = mean(ranks, lambda seen: dispatched(seen) - seen["counts_sent"])
        assert sent == formula and all(seen["counts_sent"] == counts for seen in ranks)
        parameters = mean(ranks, lambda seen: wire(seen, "all_reduce", "all_gather", "reduce_scatter"))
        there = mean(ranks, lambda seen: wire(seen, "all_to_all"))
        if "zero" not in more:                            # besides, a few numbers are sent: norm, loss, load
            by_hand = 2 * 4 * (OTHERS * 3 / 4 + OF_EXPERTS / ep * (1 - ep / RANKS))
            assert by_hand <= parameters < by_hand + 2000, (more, by_hand, parameters)
        product = f"4 x {LAYERS} x {TOP_K} x {tokens} x {ROW} = " if ep > 1 else ""
        rows.append(f"| `{more}` | {tokens} | {m} | {product}{formula:,} | {sent:,.0f} | {there:,.0f} "
                    f"| {parameters:,.0f} | {there + parameters:,.0f} |")
    return rows


def memory_table():
    rows = ["| run | experts' weights: formula | measured | gradients | optimizer states | everything else "
            "that persists | peak of all memory, the highest |",
            "|---|---|---|---|---|---|---|"]
    for more in MEMORY:
        ranks, cut = watched(more), degree(more, "ep") * degree(more, "tp")
        seen, zero = ranks[0]["persistent"], degree(more, "zero") if "zero" in more else 0
        assert all(other["persistent"] == seen for other in ranks)
        by_stage = [4 * OF_EXPERTS // (RANKS if zero >= stage else cut) for stage in (3, 2, 1)]
        weights, gradients, states = seen["weights"], seen["gradients"], seen["states"]
        assert [weights, gradients, states // 2] == by_stage and states % 2 == 0, (more, seen, by_stage)
        divisor = f" / {OF_EXPERTS * 4 // by_stage[0]}" if by_stage[0] < OF_EXPERTS * 4 else ""
        peak = max(other["peak"] for other in ranks)
        rows.append(f"| `{more}` | 4 x {OF_EXPERTS:,}{divisor} = {by_stage[0]:,} | {weights:,} | {gradients:,} | {states:,} "
                    f"| {seen['others']:,} | {peak / 2**20:.1f} MiB |")
    return rows


def balance_table():
    rows = ["```text", "--balance   1st step   highest   last 20 steps   loss of these"]
    for balance in BALANCES:
        seen = SEEN["balance", long_flags(balance)][0]
        load, loss = seen["balance"], sum(seen["losses"][-20:]) / 20
        rows.append(f"{balance:9} {load[0]:10.2f} {max(load):9.2f} {sum(load[-20:]) / 20:15.2f} {loss:15.3f}")
    return [*rows, "```"]


def saved_table():
    seen = SEEN["balance", long_flags("bias")][0]["without_bias"]
    return ["| after 200 steps, experts selected by | loss on the last 10 batches | tokens' choices that differ |",
            "|---|---|---|",
            f"| score + bias | {seen['losses'][0]:.3f} | |",
            f"| the score alone | {seen['losses'][1]:.3f} | {seen['changed']:.0%} |"]


# ----------------------------------------------------------------------------------------------- the pictures
EXPERT_COLORS = ["#4878a8", "#9cc3e4", "#d9a441", "#f0d9a8"]


def layer_picture():
    """Draw one token's way through moe.MoE on one device: four experts, each one matrix, top_k 2.

    The tensors are those of the README's first block. A reader gets the printed y from the printed numbers."""
    torch.manual_seed(269893)
    x, router, weights = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4, 4, 4)
    layer = moe.MoE(config.ModelConfig(256, 4, 4, 1, 1, 1, 4, num_local_experts=4, num_experts_per_tok=TOP_K))
    layer.gate.weight = torch.nn.Parameter(router)
    del layer.experts
    layer.experts = lambda rows, counts: moe.grouped_product(rows, weights, counts)
    with torch.no_grad():
        a, y = x[0], layer(x.unsqueeze(0))[0, 0]
        logits = layer.gate(a)
    chosen = logits.topk(TOP_K).indices.tolist()
    routing = logits[chosen].softmax(-1).tolist()
    outs = [weights[expert] @ a for expert in chosen]
    assert chosen == [0, 2] and torch.allclose(routing[0] * outs[0] + routing[1] * outs[1], y, atol=1e-6)
    shown = lambda values, digits=2: torch.tensor([round(float(value), digits) for value in values], dtype=torch.float64)
    assert torch.equal(shown(shown(logits[chosen], 1).softmax(-1)), shown(routing))
    products = shown(routing)[:, None] * torch.stack([shown(out) for out in outs])
    assert torch.equal(shown(products.sum(0)), shown(y))

    figure, axes = plt.subplots(figsize=(11.5, 5.4))
    usual = {"facecolor": "white", "edgecolor": "#333333"}
    box = lambda x, y, w, h, **kind: axes.add_patch(plt.Rectangle((x, y), w, h, lw=1.2, **usual | kind))
    centred = {"ha": "center", "va": "center", "fontsize": 13}
    words = lambda x, y, text, **kind: axes.text(x, y, text, **centred | kind)

    def arrow(start, end, **kind):
        look = {"color": "#333333", "lw": 1.6, "shrinkA": 0, "shrinkB": 0, **kind}
        axes.annotate("", xy=end, xytext=start, arrowprops=dict(arrowstyle="-|>", **look))

    def vector(x, y, values, name):
        for i, value in enumerate(values.tolist()):
            box(x, y - i * 0.42, 0.95, 0.42, facecolor="#f4f4f4")
            words(x + 0.475, y - i * 0.42 + 0.2, f"{value:.2f}", fontsize=12)
        words(x + 0.475, y + 0.72, name, weight="bold")
    vector(0, 2.6, a, "token a: x")
    box(1.75, 4.4, 2.6, 2.3)                              # the router's four logits, as bars
    words(3.05, 7.0, "router: logits = x @ router.T", weight="bold")
    zero, unit = 5.4, 0.36
    axes.plot([1.85, 4.25], [zero, zero], color="#999999", lw=0.8)
    for expert, value in enumerate(logits.tolist()):
        left = 1.95 + expert * 0.6
        color = EXPERT_COLORS[expert] if expert in chosen else "#dddddd"
        box(left, zero, 0.44, value * unit, facecolor=color)
        words(left + 0.22, zero + value * unit + (0.2 if value > 0 else -0.22), f"{value:.1f}", fontsize=12)
    words(3.05, 4.15, "one logit for each expert", fontsize=12, color="#555555")
    arrow((0.475, 3.75), (1.75, 5.6), connectionstyle="arc3,rad=-0.15")
    words(5.75, 6.1, "the two highest:", fontsize=12)
    words(5.75, 5.62, "experts 0 and 2", fontsize=12)
    words(8.55, 6.1, "softmax of these two logits:", fontsize=12)
    words(8.55, 5.62, f"weights {routing[0]:.2f} and {routing[1]:.2f}", fontsize=12)
    arrow((4.35, 5.85), (4.75, 5.85))
    arrow((6.75, 5.85), (7.05, 5.85))
    for expert in range(4):
        y0 = 3.1 - expert * 1.15
        if expert in chosen:
            box(3.0, y0, 1.75, 0.8, facecolor=EXPERT_COLORS[expert])
            words(3.875, y0 + 0.4, f"expert {expert}", color="white", weight="bold")
            arrow((0.95, 2.18), (3.0, y0 + 0.4))
        else:
            box(3.0, y0, 1.75, 0.8, facecolor="#f4f4f4", edgecolor="#bbbbbb", linestyle="--")
            words(3.875, y0 + 0.4, f"expert {expert}", color="#777777")
    for place, (expert, out) in enumerate(zip(chosen, outs)):
        y0 = 3.5 - expert * 1.15
        vector(5.55, y0 + 0.35 - place * 0.75, out, f"$E_{expert}$(x)")
        arrow((4.75, y0), (5.55, y0 - 0.05 - place * 0.75))
        end = (8.35, 1.72 if place == 0 else 1.18)
        arrow((6.5, y0 - 0.05 - place * 0.75), end)
        at = (8.3, 2.6) if place == 0 else (7.6, 0.3)
        words(*at, f"times {routing[place]:.2f}", fontsize=12)
    arrow((8.55, 5.35), (8.35, 2.85), color="#999999", linestyle="--")
    axes.add_patch(plt.Circle((8.62, 1.45), 0.36, facecolor="white", edgecolor="#333333", lw=1.2))
    words(8.62, 1.43, "+", fontsize=18)
    arrow((8.98, 1.45), (9.75, 1.45))
    vector(9.75, 1.87, y, "y")
    words(3.875, -0.8, "experts 1 and 3: no work for this token", fontsize=12, color="#555555")
    first = [float(values[0]) for values in (shown(routing), *map(shown, outs), shown(routing[1:]), shown(y))]
    words(8.85, -0.55, "{0:.2f} × {1:.2f}  +  {3:.2f} × {2:.2f}  =  {4:.2f}".format(*first), fontsize=12, color="#555555")
    axes.set(xlim=(-0.4, 10.9), ylim=(-1.1, 7.35))
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    figure.savefig(os.path.join(FIGURES, "layer.png"), dpi=130)
    plt.close(figure)


def dispatch_picture():
    """Draw two ranks with two experts each, three tokens each, top_k 2. The choices are by_hand.py's."""
    chosen = [[(0, 2), (3, 0), (2, 1)], [(1, 2), (2, 3), (2, 0)]]
    rows = [[(f"{'abc' if rank == 0 else 'xyz'}"[t], e) for t, pair in enumerate(tokens) for e in pair]
            for rank, tokens in enumerate(chosen)]
    by_expert = [sorted(some, key=lambda row: row[1]) for some in rows]
    received = [[row for some in by_expert for row in some if row[1] // 2 == rank] for rank in (0, 1)]
    sorted_again = [sorted(some, key=lambda row: row[1]) for some in received]
    stages = [("1  route: top_k\ncopies of a token", rows), ("2  sort\nby expert", by_expert),
              ("4  received: by\nrank, by expert", received), ("5  by expert:\ncomputed", sorted_again),
              ("put back:\nby rank", received), ("6  received back:\nby expert", by_expert)]
    figure, axes = plt.subplots(figsize=(14, 6.1))
    place, low = {}, -6.9                                 # where rank 1 begins

    def box(column, y, height, name, expert=None):
        color, edge = (EXPERT_COLORS[expert], "#444444") if expert is not None else ("#f4f4f4", "#222222")
        axes.add_patch(plt.Rectangle((column * 2, y), 0.8, height, facecolor=color, edgecolor=edge, lw=0.8))
        axes.text(column * 2 + 0.4, y + height / 2, name, ha="center", va="center", fontsize=14,
                  color="white" if expert in (0, 2) else "black")
    for column, (title, ranks) in enumerate(stages):
        axes.text(column * 2 + 0.4, 0.75, title, ha="center", va="bottom", fontsize=14)
        for rank, some in enumerate(ranks):
            for i, (token, expert) in enumerate(some):
                place[column, token, expert] = -i * 0.72 + rank * low
                box(column, place[column, token, expert], 0.6, f"{token}{expert}", expert)
    axes.text(len(stages) * 2 + 0.4, 0.75, "weighted\nsum", ha="center", va="bottom", fontsize=14)
    for rank, some in enumerate(rows):                    # one box for each token
        for i, token in enumerate(dict.fromkeys(token for token, _ in some)):
            y = -i * 1.44 - 0.72 + rank * low
            box(len(stages), y, 1.32, token)
            for _, expert in (row for row in some if row[0] == token):
                place[len(stages), token, expert] = y + 0.36
    for column in range(len(stages)):
        for some in rows:
            for token, expert in some:
                a, b = place[column, token, expert], place[column + 1, token, expert]
                wire = column in (1, 4)
                axes.plot([column * 2 + 0.83, column * 2 + 1.97], [a + 0.3, b + 0.3],
                          color="#444444" if wire else "#bbbbbb", lw=1.4 if wire else 0.9, zorder=0)
    for column in (1, 4):
        axes.text(column * 2 + 1.4, -12.3, "all-to-all", ha="center", va="center", fontsize=15, weight="bold")
    style = dict(arrowstyle="-|>", color="#c8605a", lw=1.6)         # the counts are sent before the first rows
    axes.annotate("", (2.55, -6.3), (2.55, -4.0), arrowprops=style)
    axes.annotate("", (2.25, -4.0), (2.25, -6.3), arrowprops=style)
    axes.text(2.1, -5.0, "3  counts", ha="right", va="center", fontsize=14, color="#c8605a")
    axes.text(2.7, -4.65, "2 1", ha="left", va="center", fontsize=13, color="#c8605a")
    axes.text(2.12, -5.95, "1 1", ha="right", va="center", fontsize=13, color="#c8605a")
    for rank in (0, 1):
        name = f"rank {rank}\nexperts\n{2 * rank} and {2 * rank + 1}"
        axes.text(-0.25, -1.5 + rank * low, name, ha="right", va="center", fontsize=14)
    axes.text(-1.75, -12.3, "a2: token a, for expert 2", ha="left", va="center", fontsize=14)
    axes.set(xlim=(-1.8, 13.3), ylim=(-12.7, 2.2))
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "dispatch.png"), dpi=110)


def experts_picture():
    """Draw each expert's tokens in each layer, relative to the mean, at the start and over the last 20 steps."""
    runs = {balance: torch.tensor(SEEN["balance", long_flags(balance)][0]["counts"]).double()
            for balance in BALANCES}
    share = lambda counts: counts / counts.mean(-1, keepdim=True)
    panels = [("step 1", share(runs["none"][0]))]
    for balance, counts in runs.items():
        panels.append((f"--balance {balance}\nlast 20 steps", share(counts[-20:].mean(0))))
    figure, axes = plt.subplots(1, 4, figsize=(14, 4.6), sharey=True)
    for panel, (title, shares) in zip(axes, panels):
        image = panel.imshow(shares, cmap="RdBu_r", norm=matplotlib.colors.TwoSlopeNorm(1.0, 0.0, 4.0),
                             aspect="equal")
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                value = float(shares[layer, expert])
                panel.text(expert, layer, f"{value:.1f}", ha="center", va="center", fontsize=8.5,
                           color="white" if value > 2.8 or value < 0.25 else "black")
        panel.set(title=title, xlabel="expert")
        panel.set_xticks(range(EXPERTS))
    axes[0].set_ylabel("layer")
    axes[0].set_yticks(range(LAYERS))
    figure.colorbar(image, ax=axes, label="tokens of an expert / mean", shrink=0.62, pad=0.015,
                    ticks=[0, 0.5, 1, 2, 3, 4])
    figure.savefig(os.path.join(FIGURES, "experts.png"), dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        do_runs(one_run, *sys.argv[2:])
    else:
        layer_picture()
        dispatch_picture()
        if sys.argv[1:2] != ["drawn"]:
            run_all()
            experts_picture()
            put_into_pages(STEP, dict(wire=wire_table(), memory=memory_table(),
                                                   balance=balance_table(), saved=saved_table()))
