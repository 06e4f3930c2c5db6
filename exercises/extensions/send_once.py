"""Tests of send_once.patch: a run equals one process, and no token travels twice to the same rank, or to the same node.

The formula for the bytes is a mean over random choices. So it is exact only where every choice is the same, or does not matter:
with one expert per token, or all eight. Elsewhere, the test counts from what the routers select. (tools/simulate has no data to
choose experts by, so it cannot run with --send_once.)
"""
from types import SimpleNamespace
from unittest.mock import patch

import cases
import observe
import pytest
import torch
from harness import assert_same_run, train_job
from jobs import assert_refused
from layouts import Layout
from observe import case, check
from steps import ROOT
from test_step07 import STEP

EXACT = "--dtype float64"
NODES = "--ranks_per_node 2"
LAYOUTS = [
    (2, "top2-2", "--recompute full --micro_batch_size 6 --ep 2 --cp 2 --cp_mode zigzag --zero 3 --balance aux"),
    (2, "top8-2", "--recompute selective --micro_batch_size 6 --ep 2 --tp 2 --sp on --balance bias"),
    (4, "top4-2", f"--recompute none --micro_batch_size 6 --ep 4 {NODES} --zero 2 --balance aux"),
    (4, "top1-2", f"--recompute full --micro_batch_size 6 --ep 4 {NODES} --zero 1 --balance bias"),
    (4, "top8-2", f"--recompute full --micro_batch_size 6 --ep 4 {NODES} --tp 2 --sp off --balance aux"),
    (4, "top2-3-qk", "--recompute selective --micro_batch_size 3 --ep 2 --tp 2 --sp on --zero 1 --balance bias"),
    (4, "top2-2", "--recompute none --micro_batch_size 6 --ep 2 --dp_mode overlap --balance none"),
    (8, "top4-2", "--recompute none --micro_batch_size 3 --ep 8 --zero 3 --zero_shard 4 --balance bias"),
    (8, "top2-2", f"--recompute full --micro_batch_size 6 --ep 8 {NODES} --tp 4 --sp on --zero 3 --balance aux"),
    (8, "top4-2", "--recompute none --micro_batch_size 6 --ep 8 --ranks_per_node 4 --cp 2 --cp_mode ulysses --balance bias")]
PIPELINES = [
    ("afab", 2, "--ep 2 --recompute full --zero 2"), ("zerobubble", 2, "--ep 2 --recompute full --zero 2"),
    ("zerobubble", 2, "--ep 2 --recompute none"), ("dualpipe", 4, "--ep 2 --recompute none --dp_mode overlap")]
LAYOUTS += [(4, f"top2-{layers}", f"--micro_batch_size 3 --pp 2 --schedule {schedule} --balance bias {more}")
            for schedule, layers, more in PIPELINES]
LAYOUTS += [(8, "top4-4", f"--micro_batch_size 3 --pp 2 --schedule dualpipe --balance aux --ep 4 {NODES} --tp 2 --sp off "
                          "--recompute full --zero 1")]


# ------------------------------------------------------------------------------------- equal to one process, and the bytes
def counted_job(argv, optimizer):
    """Do as observed_job does, with a formula that counts: for each choice of experts by a token of this rank, the ranks or nodes
    that have one of them. (Where a row is sent on, another rank sends it. assert_sent adds up the ranks.)"""
    import balance
    import dispatch_once
    import train
    calls, choose, train_step = [], balance.LoadBalancer.choose, train.train_step

    def noting_choose(self, i, logits):
        selected_experts, logits = choose(self, i, logits)
        calls.append(selected_experts.flatten(0, 1).tolist())
        return selected_experts, logits

    def noting_step(*arguments):
        calls.clear()
        return train_step(*arguments)

    def counted_traffic(model, mesh, args):
        layers, config = dispatch_once.moe_layers(model), model.model.config
        if not args.send_once:
            return []
        ep, experts, hidden = args.ep, config.num_local_experts, config.hidden_size
        forwards = 1 if args.recompute == "none" else 2   # in recomputation, the routers choose again
        nodes = ep // (args.ranks_per_node or ep)
        # receivers; and the numbers that a rank sends before its rows, for each of the receivers that it sends to
        hops = [(ep, ep * (1 + experts // ep))]
        if args.ranks_per_node:
            hops = [(nodes, nodes * (1 + ep // nodes + experts // nodes)), (ep, ep // nodes * (1 + experts // ep))]
        found = []
        for group, (receivers, counts) in zip(layers[0].apply_experts.groups, hops, strict=True):
            width = experts // receivers
            rows = sum(len({expert // width for expert in token}) for call in calls for token in call)
            assert rows % forwards == 0
            there, back = rows * (hidden + width), rows // forwards * hidden
            gradients = rows // forwards * (hidden + hidden + width)
            found.append((group, "all_to_all", (there + back + gradients) * args.dtype.itemsize + 8 * counts * len(calls)))
        return found
    with patch.object(balance.LoadBalancer, "choose", noting_choose), patch.object(train, "train_step", noting_step), \
            patch.object(dispatch_once, "traffic", counted_traffic):
        return observe.observed_job(argv, optimizer)


def check_bytes(pool, layout):
    """Do as check does. Let only a formula that is exact speak for the bytes of the rows."""
    job = observe.observed_job if layout.shape.startswith(("top1-", "top8-")) else counted_job
    with patch.object(observe, "observed_job", job):
        check(pool, layout)


@pytest.mark.parametrize("world, shape, flags", LAYOUTS, ids=[f"{shape} {flags}" for _, shape, flags in LAYOUTS])
def test_trains_as_one_process(pool, world, shape, flags):
    """Check the weights, the bytes, that operations meet, and that nothing is read before it was waited for."""
    check_bytes(pool, Layout(STEP, world, shape, "adamw", f"{EXACT} {flags} --send_once"))


@pytest.mark.parametrize("world, dtype, optimizer, flags", [
    (2, "float64", "sgd", "--ep 2"), (4, "float64", "sgd", f"--ep 4 {NODES} --zero 2"),
    (4, "float64", "sgd", "--ep 2 --pp 2 --schedule zerobubble"),
    (4, "float32", "sgd", f"--ep 4 {NODES}"), (2, "bfloat16", "adamw", "--ep 2 --zero 1")])
def test_sums_of_gradients_and_dtypes(pool, world, dtype, optimizer, flags):
    """Compare the sums of the gradients, with SGD except in bfloat16: AdamW would hide a factor."""
    more = f"--dtype {dtype} --recompute none --micro_batch_size 6 {flags} --balance bias --send_once"
    check_bytes(pool, Layout(STEP, world, "top2-2", optimizer, more))


def test_without_the_flag_it_is_the_step_itself(pool):
    """Compare to the last bit."""
    flags = f"{case(pool, 'top2-2')} --micro_batch_size 6 --ep 2 --steps 2"
    here, there = (pool.train(step, flags, world=2) for step in (STEP, ROOT / STEP))
    assert here.losses == there.losses and here.grad_norms == there.grad_norms
    assert here.weights.keys() == there.weights.keys() and all(map(torch.equal, here.weights.values(), there.weights.values()))


# ------------------------------------------------------------------------------------- what travels
TOKENS, HIDDEN, EXPERTS = 12, 5, 32


def choices(rank, kind, top_k=4):
    """Return what a rank's tokens select, and with what logits, [1, tokens, top_k]."""
    draw = torch.Generator().manual_seed(rank)
    selected = torch.rand(1, TOKENS, EXPERTS, generator=draw).topk(top_k).indices
    logits = torch.randn(1, TOKENS, top_k, generator=draw, dtype=torch.float64)
    if kind == "one rank":                                # four experts, all on one of four or eight ranks
        selected = torch.arange(8, 12).expand(1, TOKENS, top_k)
    if kind == "last expert":
        selected, logits = torch.full((1, TOKENS, 1), EXPERTS - 1), logits[..., :1]
    if kind == "weights of 0":
        logits[..., rank % top_k] = -1e4
    return selected, logits


def dispatch_job(ranks_per_node, kind):
    """Send this rank's tokens to experts and back. Return the rows that it sent, as (hop, receiver, token); for what the CPU had
    to wait; and the errors of the output, and of the gradients of x, of the logits and of the experts."""
    import dispatch_once
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import TorchDispatchMode
    dist.init_process_group("gloo")
    rank, ep = dist.get_rank(), dist.get_world_size()
    args = SimpleNamespace(send_once=True, ep=ep, ranks_per_node=ranks_per_node)
    moe = SimpleNamespace(gate=SimpleNamespace(out_features=EXPERTS))
    with patch.object(dispatch_once, "moe_layers", lambda model: [moe]):
        dispatch_once.apply(None, init_device_mesh("cpu", (1, ep), mesh_dim_names=("expert_dp", "ep")), args)

    selected, logits = choices(rank, kind)
    draw = torch.Generator().manual_seed(rank + 100)
    x = torch.rand(1, TOKENS, HIDDEN, generator=draw, dtype=torch.float64)
    x[0, :, 0] = torch.arange(TOKENS) + TOKENS * rank     # so that a row says which token it is
    scale = torch.rand(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    leaves = [x.requires_grad_(), logits.requires_grad_(), scale.requires_grad_()]
    weights = logits.softmax(-1)
    expected = (torch.sin(x.unsqueeze(-2) * scale[selected]) * weights.unsqueeze(-1)).sum(-2)
    out_grad = torch.rand(expected.shape, generator=draw, dtype=torch.float64)
    expected_grads = torch.autograd.grad(expected, leaves, out_grad, retain_graph=True)
    dist.all_reduce(expected_grads[2])

    rows, waits, all_to_all_single, tolist = [], [], dist.all_to_all_single, torch.Tensor.tolist
    own = slice(rank * EXPERTS // ep, (rank + 1) * EXPERTS // ep)

    def experts(x, tokens_per_expert):
        return torch.sin(x * scale[own].repeat_interleave(tokens_per_expert, 0, output_size=len(x)))

    def noting_exchange(output, input, output_splits=None, input_splits=None, group=None, **more):
        if input_splits and input.shape[1] > HIDDEN:      # x and weights; what comes back is narrower
            to = dist.get_process_group_ranks(group)
            receivers = [receiver for receiver, number in zip(to, input_splits) for _ in range(number)]
            tokens = input[:, 0].round().int()
            rows.extend((moe.apply_experts.groups.index(group), *row) for row in zip(receivers, tolist(tokens)))
        return all_to_all_single(output, input, output_splits, input_splits, group=group, **more)

    class Waits(TorchDispatchMode):
        """Notes operations whose result the CPU reads, or whose size depends on data."""
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags:
                if (kwargs or {}).get("output_size") is None:
                    waits.append(op.name())
            return op(*args, **(kwargs or {}))

    def noting_tolist(tensor):
        waits.append("tolist")
        return tolist(tensor)
    with patch.object(dist, "all_to_all_single", noting_exchange), patch.object(torch.Tensor, "tolist", noting_tolist), Waits():
        out = moe.apply_experts(experts, x, selected, weights)
    grads = torch.autograd.grad(out, leaves, out_grad)
    expected_grads[2][:own.start], expected_grads[2][own.stop:] = 0, 0
    results = zip((out, *grads), (expected, *expected_grads))
    return rows, waits, [float((a - b).norm() / b.norm().clamp(min=1)) for a, b in results]


@pytest.mark.parametrize("kind", ["random", "one rank", "last expert", "weights of 0"])
@pytest.mark.parametrize("world, ranks_per_node", [(4, 0), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)])
def test_a_token_travels_once(pool, world, ranks_per_node, kind):
    """Record all rows of a layer, forward. Check which ranks and nodes get which token, and the gradients."""
    per_rank = pool.call(dispatch_job, STEP, world=world, ranks_per_node=ranks_per_node, kind=kind)
    needed = set()                                        # (rank, token)
    for rank in range(world):
        selected, logits = choices(rank, kind)
        needed |= {(expert * world // EXPERTS, t + TOKENS * rank) for t in range(TOKENS)
                   for expert, weight in zip(selected[0, t].tolist(), logits.softmax(-1)[0, t].tolist()) if weight}
    assert len(needed) == world * TOKENS or kind in ("random", "weights of 0")
    size = ranks_per_node or 1
    hops = [], []
    for rank, (rows, waits, errors) in enumerate(per_rank):
        assert waits == ["tolist"] and max(errors) < 1e-12, (rank, waits, errors)
        for hop, receiver, token in rows:
            hops[hop].append((receiver, token))
            if ranks_per_node and hop == 0:
                assert receiver % size == rank % size, "it goes to the rank in the same position"
            if hop == 1:
                assert receiver // size == rank // size, "it stays in the node"
    last = hops[1] if ranks_per_node else hops[0]
    assert len(last) == len(set(last)) and set(last) == needed
    nodes = [(receiver // size, token) for receiver, token in hops[0]]
    assert len(nodes) == len(set(nodes)) and set(nodes) == {(rank // size, token) for rank, token in needed}


ALONG_EP = "--micro_batch_size 3 --recompute none --balance none --ep 8"


def rows_per_token(pool, flags):
    """Train with top 8 of 64 experts on eight ranks. Return how many rows a token needs for the way there, and how many of them go
    from one half of the ranks to the other; and the bytes of all rows."""
    base = pool.once("64 experts", lambda: cases.make(pool.folder() / "64", **cases.shape("top8-2") | dict(num_local_experts=64)))
    run = pool.train(STEP, f"{base} --steps 1 {ALONG_EP} {flags}", 8, weights=False, job=counted_job)
    every = across = 0
    for rank, (operations, _) in enumerate(run.answers):
        for _, ranks, what, _, splits, _ in operations:
            if what == "alltoall_base_" and splits:
                every += sum(splits[0])
                across += sum(number for to, number in zip(ranks, splits[0]) if to // 4 != rank // 4)
    sent = [tuple(map(sum, zip(*(sent[what] for _, sent in run.answers)))) for what in run.answers[0][1] if what[1] == "all_to_all"]
    assert all(seen == counted for seen, counted in sent)
    ways = 4 * 2 * 24 * 16                                # there and back, in forward and backward; layers, and the batch's tokens
    return every / ways, across / ways, sum(seen for seen, _ in sent)


def test_fewer_rows_and_bytes(pool):
    """Compare with the means over random choices: 8 (1 - C(56, 8) / C(64, 8)) ranks per token, and 2 (1 - C(32, 8) / C(64, 8))
    nodes. Half of them are the other half's."""
    before, once, nodes = (rows_per_token(pool, flags) for flags in ("", "--send_once", "--send_once --ranks_per_node 4"))
    assert before[:2] == (8, pytest.approx(4, rel=0.1))
    assert once[:2] == (pytest.approx(5.43, rel=0.05), pytest.approx(2.72, rel=0.1))
    assert nodes[:2] == (pytest.approx(5.43 + 2.00, rel=0.05), pytest.approx(1.00, rel=0.05))
    assert once[2] < 0.8 * before[2]


# ------------------------------------------------------------------------------------- the breaks
def wrong_job(argv, optimizer, wrong_sum):
    """Train with another sum of what a rank's experts return."""
    import dispatch_once

    def weighted_sum(experts, tokens_per_expert, num_rows, x, weights):
        copies = dispatch_once.Copies(weights != 0, num_rows)
        return wrong_sum(copies, experts(copies.copy(x), tokens_per_expert), weights)
    with patch.object(dispatch_once, "weighted_sum", weighted_sum):
        train_job(argv, optimizer)


def weights_twice_job(argv, optimizer):
    wrong_job(argv, optimizer, lambda copies, out, weights: copies.sum(out * copies.select(weights.unsqueeze(-1)) ** 2))


def sum_before_weights_job(argv, optimizer):
    wrong_job(argv, optimizer, lambda copies, out, weights: copies.sum(out) * weights.sum(1, keepdim=True))


def weights_without_gradient_job(argv, optimizer):
    wrong_job(argv, optimizer, lambda copies, out, weights: copies.sum(out * copies.select(weights.detach().unsqueeze(-1))))


@pytest.mark.parametrize("job, seen_in", [(weights_twice_job, "losses"), (sum_before_weights_job, "losses"),
                                          (weights_without_gradient_job, "grad_norms")])
def test_one_process_sees_the_mistake(pool, job, seen_in):
    base = f"{case(pool, 'top2-2')} {EXACT} --balance none --micro_batch_size 6"
    run = pool.train(STEP, f"{base} --ep 2 --send_once", 2, job=job)
    with pytest.raises(AssertionError, match=rf"{seen_in}\[0\]"):
        assert_same_run(run, pool.reference(STEP, base), 1e-9)


# ------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize("world, flags, message", [
    (2, "--send_once", "--send_once: requires --ep 2 or more; with --ep 1 no token travels"),
    (2, "--ep 2 --ranks_per_node 2", "--ranks_per_node 2: requires --send_once"),
    (4, "--ep 4 --send_once --ranks_per_node 3", "--ranks_per_node 3: must divide ep 4; choose from 1, 2, 4")])
def test_refused(pool, world, flags, message):
    assert_refused(pool, STEP, world, f"{case(pool, 'top2-2')} --micro_batch_size 1 {flags}", message)
