"""The ladder of step 6: layers in stages, and micro-batches in the order of a list. Each test is a rung; exercise.py explains how
to use them."""
from types import SimpleNamespace

import layouts
import pytest
from exercise import rung
from observe import check

STEP = "step06_pp"


# ------------------------------------------------------------------------------------------------ lists
def lists_job(cases):
    """Return {(name, ranks, m, stages per rank): for each rank the actions (kind, stage, micro-batch), its idle time in units (for
    lists that deadlock, where), and how many micro-batches of a stage it holds at most}."""
    import schedules
    found = {}
    for case in cases:
        lists = schedules.make(*case)
        actions = [as_tuples(of_rank) for of_rank in lists]
        try:
            idle = schedules.bubble(schedules.simulate(lists))
        except (RuntimeError, LookupError) as stuck:
            idle = str(stuck)
        found[case] = actions, idle, [schedules.max_in_flight(of_rank) for of_rank in lists]
    return found


def in_words(case):
    name, ranks, m, stages = case
    each = f", {stages} stages each" if stages > 1 else ""
    return f"{name}, {ranks} ranks{each}, {m} micro-batches"


def assert_runs(case, lists, idle):
    """Check that each rank does F, I and W, or F and B, of its stages once for each micro-batch, and that none waits for ever."""
    _, ranks, m, stages = case
    for rank, actions in enumerate(lists):
        done = [(part, *what) for kind, *what in actions for part in ("IW" if kind == "B" else kind)]
        for before, after in ("FI", "IW"):                # no message enforces this
            early = [what for kind, *what in done[::-1] if kind == before and (after, *what) in done[:done.index((before, *what))]]
            assert not early, (f"{in_words(case)}, rank {rank}: {after} comes before {before} of (stage, micro-batch) {early[-1]}"
                               f"{timelines(case, lists)}")
        wanted = {(part, stage, i) for part in "FIW" for stage in range(rank, ranks * stages, ranks) for i in range(m)}
        left, more = sorted(wanted - set(done)), sorted(x for x in set(done) if x not in wanted or done.count(x) > 1)
        assert not left and not more, (f"{in_words(case)}, of rank {rank}'s list (kind, stage, micro-batch; B is I and W): "
                                       f"missing {left[:4]}, more than once or not its own {more[:4]}{timelines(case, lists)}")
    assert not isinstance(idle, str), f"{in_words(case)}: {idle}{timelines(case, lists)}"


def assert_lists(pool, name, expected):
    """Check lists. expected: {(ranks, m): the list of each rank as text}; a rank's stage has its number."""
    import re
    found, = pool.call(plain_job, STEP, name=name, cases=list(expected))
    for (ranks, m), lists in found.items():
        for rank, actions in enumerate(lists):
            right = [(action[0], rank, int(action[1:])) for action in re.findall(r"\w+", expected[ranks, m][rank])]
            came = " ".join(f"{kind}{i}" for kind, _, i in actions)
            assert came.split() == expected[ranks, m][rank].split(), \
                f"{ranks} ranks, {m} micro-batches: rank {rank} does {came}, not {expected[ranks, m][rank]}" \
                + timelines((name, ranks, m), lists)
            assert actions == right, f"rank {rank} of {ranks}: its actions need stage {rank}, not {sorted({a[1] for a in actions})}"


def plain_job(name, cases):
    import schedules
    return {(ranks, m): [as_tuples(actions) for actions in schedules.make(name, ranks, m)] for ranks, m in cases}


def timelines(case, lists):
    """Draw the lists as they run, in units of time, or say where they get stuck; then draw ours."""
    from puzzle06 import ours
    from schedule import text
    schedules = ours()

    def drawn(lists):
        try:
            return text(schedules.simulate([[schedules.Action(*action) for action in actions] for actions in lists]))
        except (RuntimeError, LookupError, TypeError, ValueError) as error:        # lists may contain anything
            return f"cannot be drawn: {error}"
    return "\n".join(["", "yours:", drawn(lists), "wanted:", drawn(schedules.make(*case))])


def as_tuples(actions):
    import schedules
    other = [action for action in actions if not isinstance(action, schedules.Action)]
    assert not other, f"a rank's list must contain only Actions; it contains {other[0]}"
    return [tuple(action) for action in actions]


@rung({"schedules.py": ["afab"]}, hints="""
    AFAB is "all forwards, all backwards". The list says what one rank computes, in order. What does a rank with one stage compute
    if there are three micro-batches?

    `Action("F", rank, i)` is the forward of micro-batch i, `Action("B", rank, i)` its backward: the rank's only stage has the
    rank's number.

    `[Action("F", rank, i) for i in range(m)] + [Action("B", rank, i) for i in range(m)]`. (Ours calls warmup_steady_cooldown with
    num_warmup=m, which returns the same list.)""")
def test_all_forwards_all_backwards(pool):
    """Write `afab(rank, num_ranks, m)`. It returns the list of one rank's actions for m micro-batches: F of each, in order, then B
    of each, in the same order. Each rank has one stage, whose number is the rank's."""
    assert_lists(pool, "afab", {(1, 1): ["F0 B0"], (2, 3): ["F0 F1 F2 B0 B1 B2"] * 2})


@rung({"schedules.py": ["one_f_one_b"]}, hints="""
    A backward frees the memory of its forward, so it should come as early as it can. The last rank can do B0 right after F0. Rank
    0 waits for its first backward while micro-batch 0 travels to the last rank and back. How many micro-batches must it have in
    flight, so that every rank on the way is busy?

    From `rank` to the last there are `num_ranks - rank` ranks. That many forwards come first: the warm-up. Then a backward and a
    forward alternate, as long as there are forwards, and then come the remaining backwards.

    `warmup_steady_cooldown(forwards, backwards, num_warmup)` puts a list together in this way. Take the forwards and backwards of
    AFAB (each backward in a list of its own: `[[Action("B", rank, i)] for i in range(m)]`), and num_warmup=num_ranks - rank.""")
def test_one_forward_one_backward(pool):
    """Write `one_f_one_b(rank, num_ranks, m)`. It returns the list of 1F1B. First come as many forwards as there are ranks from
    this one to the last, counting both (or all m, if m is smaller). Then B and F alternate. The remaining backwards come last. You
    may call warmup_steady_cooldown; its `backwards` is a list of lists, [[B0], [B1], ...]."""
    assert_lists(pool, "1f1b", {
        (2, 3): ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"],
        (3, 2): ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"],
        (3, 4): ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]})


def follows_job():
    import schedules
    from schedules import Action, Event
    messages = {}
    for kind in "FBIW":
        for stage in range(3):
            action = Action(kind, stage, 5)
            both = schedules.receives(action, 2), schedules.sends(action, 2)
            messages[kind, stage] = [message and tuple(message) for message in both]
    F, B = Action("F", 0, 0), Action("B", 0, 0)
    by_hand = [Event(1, F, 10, 16), Event(0, F, 11, 12), Event(0, B, 13, 15)]
    return messages, schedules.bubble(by_hand)


@rung({"schedules.py": ["receives", "sends", "bubble"]}, hints="""
    F of a stage receives the output that F of the stage before has sent, but the first stage gets the tokens. B and I receive
    the gradient from the stage after, but the last stage has the loss. Does anybody wait for W? As for the bubble: a rank idles
    whenever it is not busy, between the first start of any rank and the last end of any rank.

    A Message contains the stage of its sender. So F of stage 1 receives Message(True, 0, i) and sends Message(True, 1, i); B or I
    of stage 1 receives Message(False, 2, i) and sends Message(False, 1, i). `last` is the number of the last stage. The bubble is
    a list with a number for each rank.

    receives: F with stage > 0: Message(True, action.stage - 1, action.micro_batch); I or B with stage < last: Message(False,
    action.stage + 1, ...). sends: F with stage < last, Message(True, action.stage, ...); I or B with stage > 0, Message(False,
    action.stage, ...). Else None. bubble: add end - start to the events' rank in a Counter; length = largest end - smallest
    start; [length - busy[rank] for rank in sorted(busy)].""")
def test_who_waits_for_whom(pool):
    """Write `receives(action, last)`, which returns the Message that an action waits for, and `sends(action, last)`, which returns
    the one that it sends. Each returns None if there is none. A Message contains the number of the stage that sends it. Write
    `bubble(events)`, which returns for each rank how long it idles between the first start and the last end of all events. With
    these, `simulate` can tell you what a schedule costs: with 1F1B on four ranks, every rank idles for 9 units."""
    (messages, by_hand), = pool.call(follows_job, STEP)
    there, back = [(True, 0, 5), (True, 1, 5)], [(False, 1, 5), (False, 2, 5)]
    right = {("F", 0): [None, there[0]], ("F", 1): there, ("F", 2): [there[1], None], ("W", 0): [None] * 2, ("W", 1): [None] * 2,
             ("W", 2): [None] * 2}
    for kind in "BI":
        right |= {(kind, 0): [back[0], None], (kind, 1): [back[1], back[0]], (kind, 2): [None, back[1]]}
    for (kind, stage), came in messages.items():
        for name, message, wanted in zip(("receives", "sends"), came, right[kind, stage]):
            assert message == wanted, \
                f"{kind} of stage {stage} of 0 to 2, micro-batch 5, {name} (forward, sender, micro-batch) {wanted}, not {message}"
    assert by_hand == [3, 0], ("rank 0 works from 11 to 12 and from 13 to 15, rank 1 from 10 to 16, so the whole "
                               f"step takes from 10 to 16. So they idle for [3, 0], not {by_hand}")
    cases = [(name, ranks, 8, 1) for name in ("afab", "1f1b") for ranks in (2, 4)]
    for case, (lists, idle, kept) in pool.call(lists_job, STEP, cases=cases)[0].items():
        assert_runs(case, lists, idle)
        ranks = case[1]
        right = [3 * (ranks - 1)] * ranks
        assert idle == right, f"{in_words(case)}: the ranks idle {idle} units, not (num_ranks - 1)(F + I + W) = {right}"
        right = [8] * ranks if case[0] == "afab" else [ranks - rank for rank in range(ranks)]
        assert kept == right, f"{in_words(case)}: the ranks hold {kept} micro-batches, not {right}"


def stages_job(sizes, layouts):
    """Return stage_boundaries for models whose layers' matrices are 40 numbers wide, and local_stages of each rank."""
    import pipeline_parallel
    shape = dict(hidden_size=8, num_attention_heads=5, num_key_value_heads=2, head_dim=2, intermediate_size=4)
    first, mine = {}, {}
    for layers, vocab_size, stages in sizes:
        config = SimpleNamespace(num_hidden_layers=layers, vocab_size=vocab_size, **shape)
        first[layers, vocab_size, stages] = pipeline_parallel.stage_boundaries(config, stages)
    for schedule, pp, stages_per_rank in layouts:
        args = SimpleNamespace(schedule=schedule, pp=pp, stages_per_rank=stages_per_rank)
        mine[schedule, pp] = [pipeline_parallel.local_stages(SimpleNamespace(get_local_rank=place_in_pp(rank)), args)
                              for rank in range(pp)]
    return first, mine


def place_in_pp(rank):
    def get_local_rank(name):
        assert name == "pp", f"a rank's stages follow from its rank in the group pp, not in {name}"
        return rank
    return get_local_rank


@rung({"pipeline_parallel.py": ["stage_boundaries", "local_stages"]}, hints="""
    The first stage has the embedding and the last one the head, and each of these counts as `ends` layers. So divide a row of ends
    + layers + ends into equal pieces. Where in this row does stage i begin, and which layer is that? Which stages does a rank
    have? A micro-batch visits all ranks before it comes to a rank's next stage. Only in dualpipe does it go down the ranks and
    then back.

    A layer's matrices have hidden * width elements, with width = (2 heads + 2 kv_heads) head_dim + 3 intermediate_size. The
    embedding has hidden * vocab_size. So ends = vocab_size / width. Stage i begins at (layers + 2 ends) i / num_stages - ends,
    rounded to the nearest whole number. Then make sure that each stage has at least one layer.

    `stage_boundaries`: for i in range(num_stages + 1), first = floor((layers + 2 * ends) * i / num_stages - ends + 0.5), and then
    max(i, min(layers - num_stages + i, first)). `local_stages`: with num_stages = args.pp * args.stages_per_rank and rank =
    mesh.get_local_rank("pp"), `list(range(rank, num_stages, args.pp))`; with dualpipe (whose Schedule is v_shaped) `[rank,
    num_stages - 1 - rank]`.""")
def test_which_layers_a_rank_has(pool):
    """Write `stage_boundaries(config, num_stages)`. It returns a list of the number of each stage's first layer, and at the end the
    number of layers. The stages are to be equal in size; embedding and head count as layers, by the size of their matrices (ignore
    norms); and each stage has at least one layer. Write `local_stages(mesh, args)`. It returns the list of the stages of this rank,
    out of pp * stages_per_rank: with dualpipe one on the way down and one on the way back, and otherwise every pp-th stage. The
    rank's number is mesh.get_local_rank("pp")."""
    first = {(6, 40, 4): [0, 1, 3, 5, 6], (8, 80, 4): [0, 1, 4, 7, 8], (7, 40, 3): [0, 2, 5, 7], (6, 40, 3): [0, 2, 4, 6],
             (8, 4, 4): [0, 2, 4, 6, 8], (4, 4000, 4): [0, 1, 2, 3, 4], (40, 400, 4): [0, 5, 20, 35, 40],
             (300, 1600, 4): [0, 55, 150, 245, 300]}
    mine = {("1f1b", 3, 1): [[0], [1], [2]], ("interleaved", 3, 2): [[0, 3], [1, 4], [2, 5]],
            ("interleaved", 2, 3): [[0, 2, 4], [1, 3, 5]], ("dualpipe", 3, 2): [[0, 5], [1, 4], [2, 3]]}
    (found_first, found_local), = pool.call(stages_job, STEP, sizes=list(first), layouts=list(mine))
    for (layers, vocab, stages), expected in first.items():
        found = found_first[layers, vocab, stages]
        assert found == expected, (f"{layers} layers, each 40 times hidden in size, embedding and head {vocab} times hidden, in "
                                   f"{stages} stages: the boundaries are {found}, not {expected}")
    for (schedule, pp, each), expected in mine.items():
        found = found_local[schedule, pp]
        assert found == expected, f"{schedule}, pp {pp}, {each} stages on each rank: the ranks have {found}, not {expected}"


# ------------------------------------------------------------------------------------------------ a small pipeline
class Put:
    """What a backward puts into the queue for W."""
    done = 0

    def __call__(self):
        Put.done += 1


def small_pipeline(weights):
    """Make a Pipeline with only what running it needs. Stage s multiplies by weights[s], and its I puts something into the queue.
    There are two micro-batches of one number: 3 and 1. The head takes the squared difference from the target, and the batch has two
    sequences of two tokens."""
    import pipeline_parallel
    import torch
    pipeline = object.__new__(pipeline_parallel.Pipeline)
    weights = [torch.nn.Parameter(torch.tensor(weight)) for weight in weights]
    queue = pipeline.queue = []                           # the linears were given this very list
    seen = pipeline.seen = []                             # the positions that stages were given

    def stage(weight):
        def multiply(x, positions):
            seen.append(positions)
            y = weight * x
            y.register_hook(lambda grad: queue.append(Put()))
            return y
        return multiply
    pipeline.stages, pipeline.last = {s: stage(weight) for s, weight in enumerate(weights)}, len(weights) - 1
    pipeline.args = SimpleNamespace(global_batch_size=2, seq_len=2, tp=2, dtype=torch.float64, device="cpu")

    def lm_head(y, targets):
        assert not targets.requires_grad, "self.model.lm_head takes the last stage's output first, then the targets"
        return (y - targets).square().sum()
    pipeline.model = SimpleNamespace(lm_head=lm_head)
    pipeline.shape, pipeline.loss = (1, 1, 1), torch.zeros((), dtype=torch.float64)
    pipeline.fwd_cache, pipeline.weight_grad_queues = {}, {}
    pipeline.ready, pipeline.recv_handles, pipeline.send_handles = {}, {}, []

    def number(x):
        return torch.full((1, 1, 1), x, dtype=torch.float64)
    pipeline.micro_batches = [(number(x), f"those of {i}", number(target)) for i, x, target in ((0, 3.0, 58.0), (1, 1.0, 17.0))]
    return pipeline, weights


def three_stages_job():
    """Run three stages in one process. Return the micro-batches' activations, the gradients that are sent back, and what is
    left."""
    pipeline, weights = small_pipeline([2.0, 5.0, 2.0])
    there, back, queue = [], [], pipeline.queue
    for i in range(2):
        x = None
        for stage in range(3):
            x = pipeline.forward(stage, i, x)
            assert not x.requires_grad, "forward's result goes to another rank, without its history: detach it"
            there.append(x.item())
    of_each = ["those of 0"] * 3 + ["those of 1"] * 3
    assert pipeline.seen == of_each, f"stages were given the positions {pipeline.seen}, not those of their micro-batch, {of_each}"
    assert pipeline.loss == 0, \
        "leave head and loss to input_gradient: if F computes them, they are kept until I, with a gradient as large as the head"
    for i in range(2):
        grad = None
        for stage in (2, 1, 0):
            grad = pipeline.input_gradient(stage, i, grad)
            back.append(grad if grad is None else grad.item())
    assert pipeline.queue is queue, "empty self.queue, but do not put another list in its place: the linears hold the old one"
    assert not pipeline.loss.requires_grad, \
        "detach the loss before you add it to self.loss: its history would keep all activations in memory"
    deferred = {key: len(queue) for key, queue in pipeline.weight_grad_queues.items()}
    left = len(pipeline.fwd_cache), len(pipeline.queue), deferred
    return there, back, [weight.grad.item() for weight in weights], pipeline.loss.item(), *left


@rung({"pipeline_parallel.py": ["Pipeline.forward", "Pipeline.head_and_loss", "Pipeline.input_gradient"]}, hints="""
    A message has numbers but no history, so autograd stops where one stage ends. In the next stage it begins again, with the
    tensor that was received. In backward, the gradient that was received is that of the stage's output, and the gradient of the
    stage's input is sent on. So what must a stage keep of a micro-batch between its F and its I?

    `forward`: the first stage gets None for x and takes the micro-batch's inputs; for others call `x.requires_grad_()`. Keep x and
    y in self.fwd_cache[stage, i]; return y.detach(). `input_gradient`: pop both from self.fwd_cache; `torch.autograd.backward(y,
    grad)`; return x.grad. On the last stage y is not the loss yet: `head_and_loss(i, y)` computes it.

    forward: `inputs, positions, _ = self.micro_batches[i]`; `y = self.stages[stage](x, positions)`. head_and_loss: `loss =
    self.model.lm_head(y, targets) / (self.args.global_batch_size * self.args.seq_len)` and `self.loss += loss.detach()`.
    input_gradient calls it if stage == self.last. After backward: `self.weight_grad_queues[stage, i] = self.queue[:]` and
    `self.queue.clear()`, so that weight_gradient finds what W has to compute.""")
def test_from_stage_to_stage_and_back(pool):
    """Write `forward(stage, i, x)`. It runs micro-batch i through a stage, keeps in self.fwd_cache what backward needs, and returns
    the output without its history. The first stage gets None for x and takes the micro-batch's inputs instead:
    self.micro_batches[i] is (inputs, positions, targets), as in step 5's loop. Write `input_gradient(stage, i, grad)`. It runs
    backward, starting from the gradient of the output, or on the last stage from the loss, and returns the gradient of the stage's
    input. Move what backward has put into self.queue to self.weight_grad_queues[stage, i]. Write `head_and_loss(i, y)`. It computes
    the loss of the micro-batch, which is the head's divided by the number of tokens of the global batch, and adds it to
    self.loss."""
    (there, back, grads, loss, kept, queue, deferred), = pool.call(three_stages_job, STEP)
    begin = "Stages multiply by 2, 5 and 2; micro-batches 3 and 1 with targets 58 and 17."
    assert there == [6, 30, 60, 2, 10, 20], f"{begin} The stages' outputs are [6, 30, 60, 2, 10, 20], not {there}"
    assert loss == 3.25, f"{begin} The loss is (2² + 3²) / (2 sequences of 2 tokens) = 3.25, not {loss}"
    assert back == [2, 10, None, 3, 15, None], \
        f"{begin} The gradients of the stages' inputs, from the last stage, are [2, 10, None, 3, 15, None], not {back}"
    assert grads == [45, 18, 45], f"{begin} The gradients of the weights are [45, 18, 45], not {grads}"
    assert kept == 0, f"after backward self.fwd_cache still has {kept} entries: their memory is not freed"
    right = {(stage, i): 1 for stage in range(3) for i in range(2)}
    assert (queue, deferred) == (0, right), \
        (f"each backward put one thing into self.queue. So the lists in self.weight_grad_queues should have the lengths {right}, "
         f"not {deferred}, and self.queue should be empty; it has {queue} entries")


LISTS = ["F00 F01 B00 B01", "F10 F20 F11 F21 B20 B10 B21 B11", "F30 B30 F31 B31"]   # kind, stage, micro-batch


def run_job():
    """Run a pipeline of three ranks, with stages 1 and 2 on the second. Return what `forward_backward` returns, this rank's
    gradients of weights, and what is left. In the first of two calls, no send completes before it is waited for."""
    from unittest.mock import patch

    import schedules
    import torch
    import torch.distributed as dist
    from prove.unforgiving import Work, noted, unforgiving

    def refused(*args, **kwargs):
        raise AssertionError("dist.send and dist.recv wait at once; dist.isend and dist.irecv return a handle to wait for")
    dist.init_process_group("gloo")
    pipeline, weights = small_pipeline([2.0, 5.0, 2.0, 1.0])
    pipeline.group = dist.new_group(range(1, 4))
    dist.barrier()                                        # no group may end while others still connect
    if dist.get_rank() == 0:
        return None
    rank = pipeline.group.rank()
    lists = [[schedules.Action(kind, int(stage), int(i)) for kind, stage, i in text.split()] for text in LISTS]
    pipeline.program, Put.done = schedules.add_send_recv(lists, rank), 0
    pipeline.loss, ran, compute = None, [], pipeline.compute

    def noted_compute(action):
        ran.append(f"{action.kind}{action.stage}{action.micro_batch}")
        compute(action)
    pipeline.compute = noted_compute
    with patch.object(dist, "send", refused), patch.object(dist, "recv", refused), unforgiving():
        with patch.object(Work, "is_completed", lambda work: False):
            losses = [pipeline.forward_backward(pipeline.micro_batches).item()]
        ran.clear()
        with noted(pipeline) as did:
            losses.append(pipeline.forward_backward(pipeline.micro_batches).item())
    names = "fwd_cache", "weight_grad_queues", "ready", "recv_handles", "send_handles"
    left = [name for name in names if getattr(pipeline, name)]
    program = [kind if kind != "compute" else f"{what.kind}{what.stage}{what.micro_batch}" for kind, what, _ in pipeline.program]
    pipeline.program, wide = [], []
    for pipeline.args.dtype in (torch.bfloat16, torch.float64):
        wide.append(str(pipeline.forward_backward([]).dtype))
    return losses, [weight.grad and weight.grad.item() for weight in weights], " ".join(ran), left, Put.done, did, program, wide


@rung({"pipeline_parallel.py": ["Pipeline.wait_for", "Pipeline.forward_backward"]}, hints="""
    A program is a list of (kind, what, peer). "send": self.ready[what] is the message that an action has computed. "receive":
    allocate its memory and start the transfer now; wait for it when an action needs it. "compute": self.compute(what) does
    the rest. Where do you wait for each transfer?

    receive: `dist.irecv(buffer, group=self.group, group_src=peer)` returns a handle; put (handle, buffer) into
    self.recv_handles[what]. send: `dist.isend(tensor, group=self.group, group_dst=peer)` returns one too; keep it with its tensor
    in self.send_handles until it has completed. `wait_for(message)` returns what is in self.ready, if this rank has computed it;
    otherwise it waits for the handle in self.recv_handles.

    wait_for: `if message in self.ready: return self.ready.pop(message)`; else `handle, tensor = self.recv_handles.pop(message);
    handle.wait(); return tensor`. forward_backward: set self.micro_batches, self.loss (a zero, float32 or wider), self.fwd_cache,
    weight_grad_queues, ready and recv_handles = {}, send_handles = []; go through self.program (buffer: torch.empty(self.shape,
    dtype=self.args.dtype, device=self.args.device)); before each isend keep only the entries of self.send_handles whose
    is_completed() is false; at the end wait for all handles in self.send_handles and clear it; return self.loss /
    self.args.tp.""")
def test_running_a_list(pool):
    """Write `forward_backward(micro_batches)`. It does what self.program says, one entry after the other, and returns this rank's
    loss divided by tp. It begins with a loss of zero, in float32, or in args.dtype if that is wider, and with self.fwd_cache,
    weight_grad_queues, ready and recv_handles empty. Wait no earlier than necessary: for a receive in `wait_for`, when an action
    needs it, and for sends at the end of forward_backward. Before each send, drop the earlier sends that have completed, with their
    tensors, and leave self.send_handles empty at the end. Write `wait_for(message)`. It returns the tensor that an action needs.
    Either this rank has computed it (self.ready), or it is receiving it (self.recv_handles)."""
    answers = pool.call(run_job, STEP, world=4)[1:]
    begin = ("A pipeline of ranks 1, 2 and 3 of the world (they are self.group, and peer is a place in it): stages multiply by 2 "
             "(on its first rank), 5 and 2 (on the second) and 1 (on the third); micro-batches 3 and 1 with targets 58 and 17")
    for rank, (losses, grads, ran, left, worked_off, did, program, wide) in enumerate(answers):
        right = [0.0, 0.0, 1.625][rank]
        assert losses == [right] * 2, \
            f"{begin}: the loss is 3.25, tp is 2; two calls returned {losses} on rank {rank}, not {[right] * 2}"
        right = [[90, None, None, None], [None, 36, 90, None], [None, None, None, 180]][rank]
        assert grads == right, f"{begin}: after two calls, rank {rank}'s weights have the gradients {grads}, not {right}"
        assert ran == LISTS[rank], f"the last call on rank {rank} did (kind, stage, micro-batch) {ran}, not {LISTS[rank]}"
        assert not left, f"after forward_backward, on rank {rank}, something is left in self.{', self.'.join(left)}"
        steps = [what for what in did if not what.startswith("wait")]
        assert steps == program, f"rank {rank} did {steps}, but self.program is {program}"
        waits = " ".join(what.replace("wait for a receive", "<") for what in did if what[0] in "FB" or what.endswith("a receive"))
        right = ["F00 F01 < B00 < B01", "< F10 F20 < F11 F21 < B20 B10 < B21 B11", "< F30 B30 < F31 B31"][rank]
        assert waits == right, f"wait for a receive (<) when an action needs it: rank {rank} did {waits}, not {right}"
        early = [following for what, following in zip(did, did[1:]) if what == "wait for a send" and following[0] in "FB"]
        assert not early, f"wait for sends at the end, to compute meanwhile; rank {rank} waited before {early[0]}"
        assert wide == ["torch.float32", "torch.float64"], \
            f"with weights in bfloat16 and in float64 the loss must be added up in float32 and in float64, not in {wide}"
        right = [4, 8, 4][rank]
        assert worked_off == right, f"W of rank {rank} had {worked_off} things to do in two calls, not {right}"


# ------------------------------------------------------------------------------------------------ shorter bubbles
@rung({"schedules.py": ["interleaved"]}, hints="""
    A bubble is as long as num_ranks - 1 stages, so shorter stages make it shorter. A rank has several, num_ranks apart. A round of
    num_ranks micro-batches goes through the first stage of the rank, then through the second, and so on; then the next round
    begins. In which order do backwards go through the stages?

    forwards: for each round, for each stage, for each micro-batch of the round. backwards: the same with the stages reversed.
    Then call warmup_steady_cooldown again. How many forwards come before the first backward? On the last rank, a whole round goes
    through each stage but the last, and then the first micro-batch through the last. Each rank before it needs two forwards more
    per rank in between: one for the way there, one back.

    `stages = range(rank, num_ranks * stages_per_rank, num_ranks)`, `rounds = [range(m * i // n, m * (i + 1) // n) for i in
    range(n)]` with n = m // num_ranks, sorted by length, the longest first, `forwards = [Action("F", stage, i) for batch in rounds
    for stage in stages for i in batch]`, backwards with reversed(stages) and each in a list of its own; num_warmup =
    (stages_per_rank - 1) * len(rounds[0]) + 2 * (num_ranks - 1 - rank) + 1.""")
def test_several_stages_on_a_rank(pool):
    """Write `interleaved(rank, num_ranks, m, stages_per_rank)`: rank r has the stages r, r + num_ranks, r + 2 num_ranks ... The
    bubble should be as long as 1F1B's, but in stages, which are shorter: 3 (num_ranks - 1) units of a stage, if m is a multiple of
    num_ranks. For that, rank r may hold stages_per_rank * num_ranks + num_ranks - 1 - 2 r micro-batches of a stage, or fewer. The
    lists must also run with any other m above num_ranks. For these, use m // num_ranks rounds, as equal as possible, the longest
    first; which micro-batches are in which round does not matter. On two ranks with two stages and two micro-batches, rank 1 does
    F0 F1 of stage 1, F0 of stage 3, B0 of it, F1, B1, then B0 B1 of stage 1."""
    cases = [("interleaved", ranks, m, stages) for ranks, m, stages in ((2, 2, 2), (2, 4, 2), (4, 8, 2), (2, 6, 3), (4, 16, 3))]
    no_multiple = [("interleaved", ranks, m, stages) for ranks, m, stages in ((2, 5, 2), (4, 9, 2), (4, 5, 3), (4, 9, 3))]
    for case, (lists, idle, kept) in pool.call(lists_job, STEP, cases=cases + no_multiple)[0].items():
        assert_runs(case, lists, idle)
        _, ranks, m, stages = case
        if case in no_multiple:                           # they only have to run
            continue
        units = 3 * (ranks - 1)
        assert idle == [units] * ranks, \
            f"{in_words(case)}: the ranks idle {idle} units of a stage, not {units} each{timelines(case, lists)}"
        most = [min(m * stages, (stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1) for rank in range(ranks)]
        enough = all(k <= n for k, n in zip(kept, most))
        assert enough, \
            f"{in_words(case)}: the ranks hold {kept} micro-batches of a stage, and need only {most}{timelines(case, lists)}"


def split_job():
    """Defer the weight gradients of two linears with the same input, and run two micro-batches. Return the outputs, the gradients
    after I, the length of the queue, and the gradients after each W."""
    from unittest.mock import patch

    import tensor_parallel
    import torch
    import torch.utils.checkpoint
    import zero_bubble
    from torch import nn
    from torch.multiprocessing.reductions import StorageWeakRef
    linears, queue, fired = [nn.Linear(2, size, bias=False) for size in (1, 2)], [], []
    for linear, weight in zip(linears, ([[2.0, 3.0]], [[1.0, 0.0], [0.0, 1.0]])):
        linear.weight.data = torch.tensor(weight)
        linear.weight.register_post_accumulate_grad_hook(lambda param: fired.append(len(param)))
    grad, x = torch.tensor([[[1.0], [10.0]]]), torch.tensor([[[3.0, 4.0], [5.0, 6.0]]])
    product = zero_bubble.linear_weight_grad(grad, x).tolist()
    assert product == [[53, 64]], \
        f"linear_weight_grad of the tokens [3, 4], [5, 6] with gradients 1, 10 is 1 [3, 4] + 10 [5, 6] = [[53, 64]], not {product}"
    products = zero_bubble.defer_weight_grads(linears, queue)
    inputs = [torch.tensor([[[1.0, 10.0]]], requires_grad=True), torch.tensor([[[4.0, 5.0]]], requires_grad=True)]
    outputs = [products(x) for x in inputs]
    values = [[y.flatten().tolist() for y in pair] for pair in outputs]
    assert not queue, "F must put nothing into the queue: the next I, of another micro-batch, would take it"
    for factor, (a, b) in zip((1, 100), outputs):
        (factor * a.sum() + 2 * factor * b.sum()).backward()
    after_I = [x.grad.flatten().tolist() for x in inputs], [linear.weight.grad for linear in linears], len(queue)
    after_W = []
    for compute in queue:
        compute()
        after_W.append([linear.weight.grad.tolist() for linear in linears])
    kept = []                                             # the storages that F allocates with --recompute full

    def layer(x):
        x = x * 1
        kept.append(StorageWeakRef(x.untyped_storage()))
        return products(x)[0]
    out = torch.utils.checkpoint.checkpoint(layer, inputs[0], use_reentrant=False)
    assert out.requires_grad and kept[0].expired(), \
        "x is kept from F to I, so --recompute saves nothing: let DeferWeightGrads save x, so that autograd can recompute it"
    comm = (lambda x, group: lambda: 7 * x), None, None                # gather returns a function that waits
    with patch.object(tensor_parallel, "enter_region", lambda x, comm: 7 * x), \
            patch.object(zero_bubble, "enter_region", lambda x, comm: 7 * x, create=True):
        y, = zero_bubble.defer_weight_grads(linears[1:], queue, comm)(inputs[0])
    y.sum().backward()
    linears[1].weight.grad = None
    queue[-1]()
    fired.pop()
    assert (y.tolist(), linears[1].weight.grad.tolist()) == ([[[7, 70]]], [[7, 70]] * 2), \
        "with a comm, x first goes through DeferWeightGrads, then through enter_region(x, comm) to the linears"
    return values, after_I, after_W, fired


@rung({"schedules.py": ["zero_bubble"], "zero_bubble.py": ["linear_weight_grad", "defer_weight_grads"]}, hints="""
    The stage before waits for I, but nobody waits for W until the optimizer. So a rank may put W where it would idle. Where does
    1F1B idle, and which rank idles longest at the end? To get I without W, hide the weights from autograd, and later compute their
    gradient yourself. What do you need for that product?

    `zero_bubble`: 1F1B, where rank r does I of micro-batch i and right after it W of micro-batch i - r, if i >= r; at the end come
    the remaining r W. For y = x Wᵀ the weight's gradient is the output's gradient, transposed, times x, both flattened to [tokens,
    ...]. In `defer_weight_grads`, multiply by `linear.weight.detach()`, and call keep_grad for each output, which stores its
    gradient when backward has computed it. The backward of `DeferWeightGrads.apply` puts a function that computes W into the
    queue.

    zero_bubble: backwards = [[Action("I", rank, i)] + [Action("W", rank, i - rank)] * (i >= rank) ...], warmup_steady_cooldown
    with num_warmup=num_ranks - rank, plus the W of range(max(0, m - rank), m). linear_weight_grad: grad.flatten(0, -2).T @
    x.flatten(0, -2). defer_weight_grads returns products(x): grads = {}; x = DeferWeightGrads.apply(x, grads, comm,
    linear_weight_grad, queue); if comm: x = enter_region(x, comm); outputs = [F.linear(x, linear.weight.detach()) ...]; for each
    linear and its y: keep_grad(y, linear, grads); return outputs. (Ours returns torch.compiler.disable(products), for
    --compile.)""")
def test_weights_can_wait(pool):
    """Write `zero_bubble(rank, num_ranks, m)`. It returns a list with I and W instead of B. Each rank may idle for num_ranks - 1
    units, where 1F1B idles for 3 (num_ranks - 1), and for one unit more for each micro-batch that m is below num_ranks. It may hold
    at most num_ranks micro-batches. Write `linear_weight_grad(grad, x)`. It returns the gradient of a linear's weight, [outputs,
    inputs], from the gradient of its output, [batch, seq, outputs], and its input, [batch, seq, inputs]. Write
    `defer_weight_grads(linears, queue, comm)`. It returns a function of x that returns the list of the linears' outputs. Their
    backward computes only the gradient of x, and for each call of the function puts one function into the queue, which computes W:
    accumulate_weight_grads, with x and, in grads, the gradient of each linear's output. (DeferWeightGrads does that, and keep_grad
    stores a gradient.) With tp there is a comm: then x goes through enter_region(x, comm) before the linears."""
    cases = [("zerobubble", ranks, m, 1) for ranks, m in ((2, 2), (2, 5), (3, 4), (4, 8), (4, 2))]
    for case, (lists, idle, kept) in pool.call(lists_job, STEP, cases=cases)[0].items():
        assert_runs(case, lists, idle)
        _, ranks, m, _ = case
        units = ranks - 1 + max(0, ranks - m)
        assert idle == [units] * ranks, f"{in_words(case)}: the ranks idle {idle} units, not {units} each{timelines(case, lists)}"
        assert max(kept) <= ranks, \
            f"{in_words(case)}: the ranks hold {kept} micro-batches, and need only {ranks}{timelines(case, lists)}"
    (values, (inputs, weights, queued), after_W, fired), = pool.call(split_job, STEP)
    begin = "Linears with the weights [[2, 3]] and [[1, 0], [0, 1]]:"
    right = [[[32], [1, 10]], [[23], [4, 5]]]
    assert values == right, f"{begin} from the inputs [1, 10] and [4, 5] they make {right}, not {values}"
    assert inputs == [[4, 5], [400, 500]], \
        f"{begin} if the outputs' gradients are 1 and 2, and then 100 and 200, those of x are [[4, 5], [400, 500]], not {inputs}"
    assert weights == [None, None], "I has computed the gradients of the weights too: detach the weights"
    assert queued == 2, f"after I of two micro-batches the queue has {queued} entries, not 2: one for each call of the function"
    right = [[[[1, 10]], [[2, 20]] * 2], [[[401, 510]], [[802, 1020]] * 2]]
    assert after_W == right, f"the gradients of the weights after the first W and after the second are {after_W}, not {right}"
    assert sorted(fired) == [1, 1, 2, 2], "each W must call the hooks of each weight once"


def traffic_job(layouts):
    """Return {(pp, dp, cp, tp, sp): the bytes of traffic on each rank of pp}, for 24 sequences of 16 tokens, hidden 5,
    float32."""
    import torch
    import pipeline_parallel
    model, found = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(hidden_size=5))), {}
    for pp, dp, cp, tp, sp in layouts:
        args = SimpleNamespace(pp=pp, dp=dp, cp=cp, tp=tp, sp=sp, schedule="1f1b", stages_per_rank=1, dtype=torch.float32,
                               seq_len=16, global_batch_size=24, micro_batch_size=3)
        meshes = [SimpleNamespace(get_local_rank=lambda name, rank=rank: rank, get_group=str) for rank in range(pp)]
        sent = [pipeline_parallel.traffic(model, mesh, args) for mesh in meshes]
        groups = {group for of_rank in sent for group, *_ in of_rank} - {"pp"}
        assert not groups, f'the group of an entry is {groups.pop()}, not mesh.get_group("pp")'
        found[pp, dp, cp, tp, sp] = [[size for *_, size in of_rank] for of_rank in sent]
    return found


@pytest.mark.slow
@rung({"pipeline_parallel.py": ["traffic"]}, hints="""
    The ledger compares the bytes sent with what `expected_traffic` returns. A stage sends activations to the stage after it, and
    gradients to the stage before. Which neighbours of this rank's stages are on another rank? Each rank counts only what it sends.

    Stage s sends F's output to s + 1 and I's or B's to s - 1, if there is such a stage, and if it is not on the same rank: the two
    stages of dualpipe's last rank are neighbours. In a step, a stage sends each neighbour as much as the activations of all tokens
    of the rank: its part of the batch (dp) and of the sequence (cp), which sequence parallelism divides by tp as well.

    messages = how many of the neighbours (s - 1 and s + 1 of all s in local_stages(mesh, args)) are 0 <= n < num_stages and not in
    local_stages. Without any, return []. tokens = args.global_batch_size // args.dp * args.seq_len // args.cp, and // args.tp if
    args.sp == "on"; bytes = messages * tokens * model.model.config.hidden_size * args.dtype.itemsize; return
    `[(mesh.get_group("pp"), "send", bytes)]`.""")
@pytest.mark.parametrize("shape, schedule", [
    ("dense-3", "1f1b"), ("dense-5", "interleaved"), ("dense-3", "zerobubble"), ("dense-5", "dualpipe")])
def test_a_training_run(pool, shape, schedule):
    """Write `traffic(model, mesh, args)`. It returns a list of what this rank sends in a step: one entry,
    (mesh.get_group("pp"), "send", bytes), or none if it sends nothing. This must equal the ledger's bytes, with dp, cp and tp, too.
    Four steps on two ranks must give the losses, gradient norms and weights of one process."""
    one = 24 * 16 * 5 * 4                                 # to one neighbour
    right = {(1, 1, 1, 1, "on"): [[]], (3, 1, 1, 1, "on"): [[one], [2 * one], [one]],
             (2, 2, 1, 1, "on"): [[one // 2]] * 2, (2, 1, 2, 1, "on"): [[one // 2]] * 2,
             (2, 1, 1, 2, "on"): [[one // 2]] * 2, (2, 1, 1, 2, "off"): [[one]] * 2}
    for case, found in pool.call(traffic_job, STEP, layouts=list(right))[0].items():
        where = "24 sequences of 16 tokens, hidden 5, float32, pp {}, dp {}, cp {}, tp {}, --sp {}".format(*case)
        assert found == right[case], f"{where}: the bytes of traffic on each rank of pp are {right[case]}, not {found}"
    flags = f"--dtype float64 --recompute none --micro_batch_size 6 --pp 2 --schedule {schedule}"
    check(pool, layouts.Layout(STEP, 2, shape, "adamw", flags))


# ------------------------------------------------------------------------------------------------ no rung: puzzle06.py
def test_the_puzzle():
    """Check that the puzzle judges 1F1B and ZB-H1 correctly, and that its table has the least idle time for each total number
    kept."""
    import itertools
    import re

    import puzzle06
    assert puzzle06.judge(puzzle06.ONE_F_ONE_B)[1:] == (6, [3, 2, 1])
    zero_bubble = puzzle06.ours().make("zerobubble", 3, 4)
    assert puzzle06.judge("\n".join(" ".join(map(str, actions)) for actions in zero_bubble))[1:] == (2, [3, 3, 3])
    with pytest.raises(RuntimeError, match="rank 0 waits before B1"):
        puzzle06.judge("F0 B1 F1 F2 F3 B0 B2 B3\n" + "F0 F1 F2 F3 B0 B1 B2 B3\n" * 2)
    with pytest.raises(ValueError, match="rank 1 does F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2, and should"):
        puzzle06.judge("F0 F1 F2 F3 B0 B1 B2 B3\nF0 F1 F2 F3 B0 B1 B2 I3")
    kept, idle = (map(int, re.findall(r"\d+", line)) for line in re.findall("^    (?:kept|idle), .*", puzzle06.__doc__, re.M))
    found = {limits: puzzle06.least_idle(limits) for limits in itertools.product((1, 2, 3), repeat=3)}
    least = {total: min(found[limits] for limits in found if sum(limits) <= total) for total in range(3, 10)}
    assert dict(zip(kept, idle)) == {total: units for total, units in least.items() if units != least.get(total - 1)}
