"""Step 6: every schedule trains as one process does; its lists are complete, meet on the network, and cost what the table says."""
import json
import re
import sys
from collections import deque
from unittest.mock import patch

import cases
import layouts
import pytest
import torch
import toy
from harness import assert_same_run
from jobs import assert_loads, assert_refused, ledger_rows, traced_job
from layouts import Layout
from observe import check
from rendezvous import rendezvous
from steps import ROOT, load_module, run, step_dir

STEP, BASELINE = "step06_pp", "step01_single_gpu"


def load_schedules():
    """Load schedules.py for the test process itself, apart from the modules of jobs."""
    return load_module(step_dir(STEP) / "schedules.py")


SCHEDULES = load_schedules().SCHEDULES
EXACT = "--dtype float64 --recompute none"
slow = pytest.mark.slow


def special(name, world, shape, more):
    return pytest.param(Layout(STEP, world, shape, "adamw", f"{EXACT} {more}"), id=name, marks=slow)


@pytest.mark.parametrize("layout", [*layouts.every_layout(6),
    special("three stages each", 2, "dense-9", "--micro_batch_size 4 --pp 2 --schedule interleaved --stages_per_rank 3"),
    special("no pipeline", 2, "dense-2", "--micro_batch_size 3 --zero 3 --schedule afab"),          # then any schedule is 1f1b
    special("eight stages", 8, "dense-9", "--micro_batch_size 3 --pp 8 --schedule zerobubble"),
    special("rounds of two lengths", 4, "dense-9", "--micro_batch_size 4 --pp 4 --schedule interleaved")])
def test_layout(pool, layout):
    check(pool, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [
    Layout(STEP, 8, "dense-9", "adamw", f"{EXACT} --micro_batch_size {size} --pp {pp} --schedule {schedule} {more}")
    for size, pp, schedule, more in [
        (3, 8, "1f1b", ""), (3, 8, "afab", ""), (1, 4, "interleaved", "--zero 2"), (1, 4, "dualpipe", "--zero 3"),
        (2, 4, "zerobubble", "--tp 2 --sp on --recompute full"), (2, 4, "dualpipe", "--cp 2 --cp_mode zigzag --zero 1"),
        (1, 2, "1f1b", "--dp_mode overlap"), (2, 2, "zerobubble", "--tp 2 --sp off --zero 1")]], ids=str)
def test_more_ranks(pool, layout):
    check(pool, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", [name for name, row in SCHEDULES.items() if row.stages_per_rank == 2])
def test_eight_ranks_of_two_stages(pool, tmp_path, schedule):
    base = f"{cases.make(tmp_path, **cases.shape('dense-17'))} --dtype float64 --micro_batch_size 1 --steps 2"
    assert_same_run(pool.train(STEP, f"{base} --pp 8 --schedule {schedule}", world=8), pool.train(BASELINE, base), 1e-9, schedule)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_number_of_micro_batches(pool, flags, schedule, pp):
    """Train with every number from the fewest to 4 pp, not only with multiples of something."""
    layers = 9 if pp == 4 else 5
    for count in range(SCHEDULES[schedule].min_micro_batches(pp), 4 * pp + 1):
        base = f"{flags[layers]} --dtype float64 --global_batch_size {count} --micro_batch_size 1 --steps 2"
        trained = pool.train(STEP, f"{base} --pp {pp} --schedule {schedule}", world=pp)
        assert_same_run(trained, pool.train(BASELINE, base), 1e-9, f"{schedule}, {count} micro-batches")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    return {layers: cases.make(folder / str(layers), **cases.shape(f"dense-{layers}")) for layers in (3, 5, 8, 9)}


@slow
@pytest.mark.parametrize("more, graphs", [("--recompute full", 3), pytest.param("", 1, marks=pytest.mark.sweep)])
def test_compile(pool, flags, more, graphs):
    base = f"{flags[3]} --steps 3 --micro_batch_size 6"
    trained = pool.train(STEP, f"{base} --pp 2 --schedule zerobubble --compile {more}", world=2, timeout=200, job=traced_job)
    assert min(trained.answers) >= graphs
    assert_same_run(trained, pool.train(BASELINE, base), 1e-4, weights=False)


@slow
def test_loads_a_checkpoint_and_saves_one(pool, flags, tmp_path):
    base = f"{flags[5]} --micro_batch_size 3 --dtype float64"
    assert_loads(pool, STEP, tmp_path, base, (8, "--pp 2 --tp 2 --schedule dualpipe --zero 3"))


# ------------------------------------------------------------------------------------- the lists
@pytest.fixture(scope="module")
def schedules():
    return load_schedules()


def programs(schedules, lists):
    return [schedules.add_send_recv(lists, rank) for rank in range(len(lists))]


def every_case():
    for name, row in SCHEDULES.items():
        for p in (2, 4, 8):
            for m in range(row.min_micro_batches(p), min(4 * p, 2 * 8 + 1) + 1):            # full rounds, and all that are not full
                for v in range(row.stages_per_rank, row.stages_per_rank + 1 + row.or_more):
                    yield name, p, m, v


# Closed forms for v stages on each of p ranks: the idle time if a rank's whole share takes F, I and W (None where no formula is
# known), and the number of pairs (stage, micro-batch) that rank r keeps. A schedule without an entry is compared with nothing.
IDLE = {
    "afab": lambda p, m, v, F, I, W: (p - 1) * (F + I + W),
    "1f1b": lambda p, m, v, F, I, W: (p - 1) * (F + I + W),
    "interleaved": lambda p, m, v, F, I, W: (p - 1) * (F + I + W) / v,
    "zerobubble": lambda p, m, v, F, I, W: (p - 1) * max(F, I, F + I - W) if m >= p else None,
    "dualpipe": lambda p, m, v, F, I, W: (p - 1) * (F + I - W) / v if F >= I >= W else None,
}
KEPT = {
    "afab": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: min(m, p - r),
    "interleaved": lambda p, m, v, r: min(m * v, 2 * (p - 1 - r) + (v - 1) * -(-m // (m // p)) + 1),
    "zerobubble": lambda p, m, v, r: min(m, p),
    "dualpipe": lambda p, m, v, r: 2 * p + 1,
}


def test_lists_are_complete_and_meet(schedules):
    """Check that each stage runs F, I and W once for each micro-batch, and that nobody waits for ever on a network without
    buffers."""
    for name, p, m, v in every_case():
        lists = schedules.make(name, p, m, v)
        done = sorted((kind, action.stage, action.micro_batch) for actions in lists for action in actions
                      for kind in ("IW" if action.kind == "B" else action.kind))
        assert done == sorted((kind, stage, i) for kind in "FIW" for stage in range(p * v) for i in range(m)), (name, p, m, v)
        of_ranks = programs(schedules, lists)
        assert rendezvous(of_ranks, schedules.receives) == [], (name, p, m, v)
        for actions, program in zip(lists, of_ranks):
            assert [what for step, what, _ in program if step == "compute"] == actions


def test_the_check_finds_what_hangs(schedules):
    """Receive just before use and send just after: that order comes to mind first, but it hangs on a network without buffers."""
    lists = schedules.make("interleaved", 2, 4, 2)
    rank_of, last = schedules.rank_of_stage(lists), 3

    def naive(rank, actions):
        for action in actions:
            wanted, given = schedules.receives(action, last), schedules.sends(action, last)
            if wanted and rank_of[wanted.stage] != rank:
                yield "receive", wanted, rank_of[wanted.stage]
            yield "compute", action, None
            receiver = given and rank_of[given.receiver]
            if given and receiver != rank:
                yield "send", given, receiver
    assert rendezvous([list(naive(rank, actions)) for rank, actions in enumerate(lists)], schedules.receives)
    of_ranks = programs(schedules, lists)
    of_ranks[0].remove(next(step for step in of_ranks[0] if step[0] == "receive"))
    assert rendezvous(of_ranks, schedules.receives)


def test_no_message_waits_behind_one_that_nobody_needs_yet(schedules):
    """Play the programs on links where a message takes half as long as the F of a rank's share. They must be as fast as if each
    message left when it was made, to within one message. Skip V-shaped ones: their two directions share every link, so they are
    slower."""
    for name, row in SCHEDULES.items():
        if row.v_shaped:
            continue
        p, m, v = 4, 16, row.stages_per_rank
        lists, message = schedules.make(name, p, m, v), v / 2
        of_ranks = {rank: toy.notes_of_program(schedules, rank, program, p * v - 1)
                    for rank, program in enumerate(programs(schedules, lists))}
        events = schedules.simulate(lists, message=message)
        late = toy.play(of_ranks, message).seconds - max(event.end for event in events)
        assert 0 <= late <= message, name                 # two that leave at the same time slow each other down


def test_a_list_that_waits_for_itself_is_seen(schedules):
    lists = schedules.make("1f1b", 2, 2)
    lists[0].reverse()
    with pytest.raises(RuntimeError, match="rank 0 waits before B1"):
        schedules.simulate(lists)


@pytest.mark.parametrize("F, I, W", [(5, 4, 3), *(pytest.param(*case, marks=slow) for case in [
    (1, 1, 1), (7, 7, 2), (4, 4, 4), (2, 3, 5), (3, 5, 1)])])
def test_bubbles(schedules, F, I, W):
    """Compare the idle time with the formula's, where a stage takes F, I and W units of time."""
    for name, p, m, v in every_case():
        idle = schedules.bubble(schedules.simulate(schedules.make(name, p, m, v), F, I, W))
        expected = IDLE[name](p, m, v, F, I, W) if name in IDLE else None
        if expected is not None:
            assert idle == pytest.approx([v * expected] * p), (name, p, m, v)


@pytest.mark.parametrize("name", SCHEDULES)
def test_four_times_the_micro_batches_are_four_times_the_work(schedules, monkeypatch, name):
    """Count the work of making a rank's program: messages are looked up, not searched for."""
    looked = []

    class Counted(schedules.Message):
        def __eq__(self, other):
            looked.append(1)
            return tuple(self) == tuple(other or ())

        def __hash__(self):
            looked.append(1)
            return hash(tuple(self))

    def work(m):
        looked.clear()
        schedules.add_send_recv(schedules.make(name, 4, m, SCHEDULES[name].stages_per_rank), 1)
        return len(looked)
    monkeypatch.setattr(schedules, "Message", Counted)
    assert work(256) < 5 * work(64)


def test_activations_in_flight(schedules):
    for name, p, m, v in every_case():
        kept = [schedules.max_in_flight(actions) for actions in schedules.make(name, p, m, v)]
        if name in KEPT:
            assert kept == [KEPT[name](p, m, v, r) for r in range(p)], (name, p, m, v)


def repeat(p, m, steps, turns, room=None):
    """Return lists for a V that repeats one block of F and I every six half units. F takes steps[0] half units from a rank to the
    next on the way down and steps[1] on the way up, I steps[2] and steps[3]. W follows its I; with `room` it fills a gap, or makes
    room for an F."""
    last, time, block = 2 * p - 1, 0, []
    for stage in range(last + 1):
        block.append((time, "F", stage))
        time += turns[1] if stage == last else turns[0] if stage == p - 1 else steps[stage >= p]
    for stage in reversed(range(last + 1)):
        block.append((time, "I", stage))
        time += turns[2] if stage == p else steps[2 + (stage < p)]
    schedules, lists = load_schedules(), [[] for _ in range(p)]
    left = [deque(schedules.Action(kind, stage, i) for _, kind, stage, i in sorted(
        (time + 6 * i, kind, stage, i) for time, kind, stage in block if stage in (rank, last - rank) for i in range(m)))
        for rank in range(p)]
    if room is None:
        return [[each for action in actions for each in ([action, action._replace(kind="W")] if action.kind == "I" else [action])]
                for actions in left]
    arrived, without_W, held = {None}, [deque() for _ in range(p)], [0] * p
    while any(left) or any(without_W):
        sent = set()
        for rank in range(p):
            following = left[rank][0] if left[rank] else None
            if following and schedules.receives(following, last) in arrived and (following.kind == "I" or held[rank] < room):
                lists[rank].append(left[rank].popleft())
                held[rank] += following.kind == "F"
                without_W[rank].extend([following._replace(kind="W")] * (following.kind == "I"))
                sent.add(schedules.sends(following, last))
            elif without_W[rank]:
                lists[rank].append(without_W[rank].popleft())
                held[rank] -= 1
        arrived |= sent
    return lists


def test_the_puzzle_v_half(schedules):
    """Check that V-half fits the puzzle's bounds and meets on the network, and that wrong schedules are refused."""
    import puzzle06_v_half as puzzle

    def judged(lists, p, m):
        _, kept, idle = puzzle.judge(lambda rank, p, m: lists[rank], p, m)
        return kept, idle, puzzle.refused(kept, idle, p)

    for p, m in puzzle.CASES + [(2, 2), (4, 9), (6, 6), (8, 61)]:
        lists = repeat(p, m, (1, 2, 1, 2), (4, 2, 4), room=p + 2)
        kept, idle, wrong = judged(lists, p, m)
        assert (max(kept), idle, wrong) == (p + 2, 1.5 * p - 2.5 + (p == 2) / 2, []), (p, m)
        assert rendezvous(programs(schedules, lists), schedules.receives) == []
    lists = repeat(4, 8, (1, 2, 1, 2), (4, 2, 4), room=6)                          # below, the third wrong one is V-min

    keeps, idles = "pairs (stage, micro-batch); at most 6", "units; at most 4.5"
    for wrong, saying in [(schedules.make("dualpipe", 4, 8), [f"rank 0 keeps 9 {keeps} are allowed"]),
                          (repeat(4, 8, (1, 2, 1, 2), (4, 2, 4)), [f"each rank idles for 5.5 {idles} are allowed"]),
                          (repeat(4, 8, (1, 1, 1, 1), (1, 1, 1), room=4), [f"each rank idles for 5.5 {idles} are allowed"])]:
        assert judged(wrong, 4, 8)[2] == saying

    def edited(rank, edit):
        return [edit(list(actions)) if r == rank else actions for r, actions in enumerate(lists)]

    def W_first(actions):
        i, w = (next(j for j, action in enumerate(actions) if action == (kind, 4, 3)) for kind in "IW")
        actions[i], actions[w] = actions[w], actions[i]
        return actions

    Action = schedules.Action
    for wrong, saying in [
            (schedules.make("interleaved", 4, 8, 2), "rank 0 does F0 of stage 4: its stages are 0 and 7"),
            (edited(1, lambda actions: actions[:-1]), "rank 1 does W7 of stage 1 0 times instead of once"),
            (edited(2, lambda actions: [*actions, Action("B", 2, 5)]), "rank 2 does I5 of stage 2 2 times instead of once"),
            (edited(3, W_first), "rank 3 does not do F3, I3, W3 of stage 4 in this order"),
            (edited(0, lambda actions: [Action("F", 0, 8), *actions]), "rank 0 does F8: an action is F, B, I or W, then"),
            (edited(0, lambda actions: sorted(actions, key=lambda action: "IFW".index(action.kind))), "rank 0 does not do F0, I0"),
            (edited(1, lambda actions: sorted(actions, key=lambda action: action.stage != 6)), "deadlocks: rank 0 waits before")]:
        with pytest.raises((ValueError, RuntimeError), match=re.escape(saying)):
            judged(wrong, 4, 8)


def test_the_puzzle_begins_with_a_schedule(tmp_path):
    import puzzle06_v_half as puzzle
    file = tmp_path / "v_half.py"
    file.write_text(puzzle.FIRST)
    with patch.dict(sys.modules), patch.object(sys, "path", [*sys.path]):
        _, kept, idle = puzzle.judge(puzzle.load(file), 4, 8)
    assert kept == [16] * 4 and idle == 9 and len(puzzle.refused(kept, idle, 4)) == 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_row_is_true_of_its_lists(schedules, name):
    """Check the stages of a rank, whether backward is split, and that the fewest micro-batches that the row names are enough."""
    row = SCHEDULES[name]
    for p in (1, 2, 4):
        m = row.min_micro_batches(p)
        lists = schedules.make(name, p, m, row.stages_per_rank)
        last = p * row.stages_per_rank - 1
        for rank, actions in enumerate(lists):
            held = [rank, last - rank] if row.v_shaped else [*range(rank, last + 1, p)]
            assert sorted({action.stage for action in actions}) == held
        assert any(action.kind in "IW" for actions in lists for action in actions) == row.split_backward


def torch_lists(name, p, m):
    """Return the lists of torch's schedule of the same name, made without a process group or a model."""
    from types import SimpleNamespace

    from torch.distributed.pipelining import schedules as theirs
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    lists = []
    for rank in range(p):
        if name == "interleaved":
            one = object.__new__(theirs.ScheduleInterleaved1F1B)
            one.number_of_rounds, one.n_local_stages, one.pp_group_size, one._n_microbatches = m // p, 2, p, m
            one.microbatches_per_round = m // one.number_of_rounds
        elif name == "dualpipe":
            one = object.__new__(theirs.ScheduleDualPipeV)
            one.pp_group_size, one._n_microbatches = p, m
        else:
            one = object.__new__(theirs.ScheduleGPipe if name == "afab" else theirs.Schedule1F1B)
            one._num_stages, one._n_microbatches, one._stage = p, m, SimpleNamespace(stage_index=rank)
            one._stage_index, one.rank = rank, rank
        if name in ("interleaved", "dualpipe"):
            actions = one._calculate_single_rank_operations(rank)
        else:
            actions = one._get_pipeline_order()[rank]
        flat = [sub for action in actions if action for sub in (getattr(action, "sub_actions", None) or [action])]
        lists.append([(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in flat
                      if a.computation_type.name in kinds])
    return lists


@pytest.mark.parametrize("name", ["afab", "1f1b", "interleaved", "dualpipe"])
def test_lists_are_those_of_torch(schedules, name):
    for p in (2, 4, 8):
        for m in (2 * p, 3 * p, 4 * p):
            ours = [[tuple(action) for action in actions] for actions in schedules.make(name, p, m, 2)]
            theirs = torch_lists(name, p, m)
            # torch 2.13 lists the last rank's F one too high, though it does not run it like that
            if name == "1f1b":
                theirs[-1] = [(kind, stage, i - (kind == "F" and theirs[-1][0][2])) for kind, stage, i in theirs[-1]]
            assert ours == theirs, (name, p, m)


# ------------------------------------------------------------------------------------- a run does what the list says
def watched_job(argv):
    """Train. Return for this rank: the actions as they ran, those of the list, how often hooks fired per parameter, the FLOPs, how
    many entries are left in the pipeline's queues, the most bytes that forward passes had saved for backward at one time, and the
    parameters whose gradients came in an I."""
    import pipeline_parallel
    import train
    from torch.utils.flop_counter import FlopCounterMode
    seen, fired, in_I = {}, {}, set()
    Pipeline, ran = pipeline_parallel.Pipeline, []
    step, one, only_I = Pipeline.forward_backward, Pipeline.compute, Pipeline.input_gradient
    alive, peak = {}, [0]                                 # {storage: [how often it is saved, bytes]}

    class Saved:
        def __init__(self, tensor):
            self.tensor, self.key = tensor, tensor.untyped_storage()._cdata
            if self.key not in seen["parameters"]:
                alive.setdefault(self.key, [0, tensor.untyped_storage().nbytes()])[0] += 1
            peak[0] = max(peak[0], sum(size for _, size in alive.values()))

        def __del__(self):
            if self.key in alive:
                alive[self.key][0] -= 1
                if alive[self.key][0] == 0:
                    del alive[self.key]

    def watched(self, micro_batches):
        seen["parameters"] = {param.untyped_storage()._cdata for param in self.model.parameters()}
        with FlopCounterMode(display=False) as flops, torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            loss = step(self, micro_batches)
        listed = [tuple(what) for kind, what, _ in self.program if kind == "compute"]
        left = len(self.queue) + len(self.fwd_cache) + len(self.weight_grad_queues) + len(self.ready) + len(self.recv_handles)
        seen.update(listed=listed, flops=flops.get_total_flops(), left=left)
        return loss

    def noted(self, action):
        ran.append(tuple(action))
        one(self, action)

    def I_alone(self, *arguments):
        before = dict(fired)
        grad = only_I(self, *arguments)
        in_I.update(name for name in fired if fired[name] != before.get(name, 0))
        return grad

    def made(model, *rest):
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: fired.__setitem__(name, fired.get(name, 0) + 1))
        return Pipeline(model, *rest)
    with patch.multiple(Pipeline, forward_backward=watched, compute=noted, input_gradient=I_alone), \
            patch.object(train.pipeline_parallel, "Pipeline", made):
        train.main(argv)
    return ran, seen["listed"], fired, seen["flops"], seen["left"], peak[0], in_I


@pytest.fixture(scope="module")
def watched(pool, flags):
    """Return {schedule: what watched_job saw on 4 ranks}. The model's stages are equal except for a tiny embedding and head."""
    base = f"{flags[8]} --micro_batch_size 2 --steps 1 --pp 4"
    return {schedule: pool.call(watched_job, STEP, world=4, argv=f"{base} --schedule {schedule}".split())
            for schedule in SCHEDULES}


@slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_follows_its_list(watched, schedule):
    for ran, listed, fired, _, left, *_ in watched[schedule]:
        assert ran == listed and left == 0
        assert set(fired.values()) == {12}                # each gradient is accumulated once per micro-batch, so hooks fire once
    parameters = [name for _, _, fired, *_ in watched[schedule] for name in fired]
    assert len(parameters) == len(set(parameters)) == 8 * 9 + 3


@slow
@pytest.mark.parametrize("step", [STEP, "step08_5d"])
def test_a_weight_has_its_gradient_in_W(pool, flags, step):
    """Check that in I, gradients come only for norms and for what has no W: the embedding, and the head, whose gradient the loss
    makes."""
    argv = f"{flags[8]} --micro_batch_size 2 --steps 1 --pp 2 --schedule zerobubble".split()
    for *_, in_I in pool.call(watched_job, step, world=2, argv=argv):
        products = {name for name in in_I if name.endswith("_proj.weight")}
        assert in_I and not products, products


@slow
def test_nothing_is_computed_twice(watched):
    total = {schedule: sum(flops for _, _, _, flops, *_ in ranks) for schedule, ranks in watched.items()}
    assert len(set(total.values())) == 1, total


@slow
def test_memory_follows_what_is_in_flight(watched, schedules):
    """Compare what forward passes save with afab's 12 micro-batches, for schedules that do not split backward, and on the ranks
    without embedding or head."""
    lists = {name: schedules.make(name, 4, 12, row.stages_per_rank) for name, row in SCHEDULES.items()}
    afab = watched["afab"][1][5] / 12
    for name in [name for name, row in SCHEDULES.items() if not row.split_backward]:
        for rank in (1, 2):
            size = afab / SCHEDULES[name].stages_per_rank
            assert watched[name][rank][5] / size == pytest.approx(schedules.max_in_flight(lists[name][rank]), rel=0.1), (name, rank)


def most_alive_job(argv):
    """Train. Return the most bytes of operations' results that are alive in the pipeline's step, without those from before it."""
    import train
    from watch import Storages

    class Watched(train.pipeline_parallel.Pipeline):
        def forward_backward(self, micro_batches):
            with Storages() as live:
                live.note_all([*self.model.parameters()], "parameters")
                live.events.clear()
                loss = super().forward_backward(micro_batches)
            most.append(max(sum(row[1:]) for row in live.timeline()))
            return loss
    most, kept = [], train.pipeline_parallel.Pipeline
    train.pipeline_parallel.Pipeline = Watched
    try:
        train.main(argv)
    finally:
        train.pipeline_parallel.Pipeline = kept
    return most[0]


@slow
def test_more_micro_batches_keep_no_more(pool, flags):
    """Check zero bubble: the number in flight stays the same, and each weight's gradient is added up at once."""
    few, many = (pool.call(most_alive_job, STEP, world=2, argv=(
        f"{flags[8]} --steps 1 --pp 2 --schedule zerobubble --micro_batch_size {size} --global_batch_size {count * size}").split())
        for size, count in ((2, 4), (2, 12)))
    for rank in range(2):
        assert many[rank] == pytest.approx(few[rank], rel=0.1), rank


# ------------------------------------------------------------------------------------- what is sent
@slow
def test_zero_3_gathers_once_a_step(pool, flags):
    trained = pool.train(STEP, f"{flags[5]} --steps 2 --ledger --micro_batch_size 2 --pp 2 --zero 3", world=4, weights=False)
    calls, payload, formula, _ = ledger_rows(trained.output)["shard", "all_gather"]
    assert calls <= 4 and payload == formula              # embedding or head, and its two or three layers


# ------------------------------------------------------------------------------------- what can go wrong
@pytest.mark.parametrize("world, more, message", [
    (2, "--pp 3", "pp 3 x dp 1 x cp 1 x tp 1: must equal the world size, 2; leave --dp out and choose pp x cp x tp from 1, 2"),
    (8, "--pp 8",
     "--pp 8: with stages_per_rank 1 there are 8 stages, but only 5 layers (num_hidden_layers); pp x stages_per_rank can be 5 at "
     "most"),
    (4, "--pp 4 --schedule interleaved",
     "--pp 4: with stages_per_rank 2 there are 8 stages, but only 5 layers (num_hidden_layers); pp x stages_per_rank can be 5 at "
     "most"),
    (2, "--pp 2 --schedule dualpipe --micro_batch_size 8",
     "--schedule dualpipe: requires 4 micro-batches or more with pp 2, but global_batch_size 24 / dp 1 / "
     "micro_batch_size 8 = 3; use --global_batch_size 32"),
    (2, "--pp 2 --schedule interleaved --micro_batch_size 24", "--schedule interleaved: requires 2 micro-batches or more with"),
    (1, "--stages_per_rank 2 --schedule interleaved", "--stages_per_rank 2: with --pp 1, use 1"),
    (2, "--pp 2 --stages_per_rank 2", "--stages_per_rank 2: --schedule 1f1b requires 1"),
    (2, "--pp 2 --schedule dualpipe --stages_per_rank 3", "--stages_per_rank 3: --schedule dualpipe requires 2"),
    (2, "--pp 2 --schedule interleaved --stages_per_rank 1", "--stages_per_rank 1: --schedule interleaved requires 2 or more"),
    (2, "--pp 0", "argument --pp: must be at least 1 and below 100000000, but is 0"),
    (2, "--pp 2 --schedule chimera", "invalid choice: 'chimera'")])
def test_bad_layouts_are_refused(pool, flags, world, more, message):
    assert_refused(pool, STEP, world, f"{flags[5]} {more}", message)


@slow
def test_it_shows_a_schedule(tmp_path):
    command = [sys.executable, ROOT / "tools/schedule.py", "--step", step_dir(STEP), "--schedule", "zerobubble", "--pp", "3"]
    status, output = run([*command, "--micro_batches", "4"], tmp_path, 300)
    assert status == 0, output
    assert "rank 2 |           F0   I0   F1   I1   F2   I2   W0   F3   I3   W1   W2   W3" in output
    assert (tmp_path / "schedule.png").stat().st_size > 1000


@slow
def test_the_trace_shows_the_actions(pool, flags, tmp_path):
    """Check that the trace has the actions of the list, for zerobubble on the first of two ranks, with two micro-batches."""
    more = "--steps 5 --micro_batch_size 12 --pp 2 --schedule zerobubble"
    pool.train(STEP, f"{flags[3]} {more} --profile {tmp_path}", world=2, weights=False)
    events = json.loads((tmp_path / "trace_rank0.json").read_text())["traceEvents"]
    spans = sorted((event["ts"], event["name"]) for event in events
                   if event.get("cat") == "user_annotation" and " of stage " in event["name"])
    assert [name for _, name in spans] == [f"{action} of stage 0" for action in ("F0", "F1", "I0", "W0", "I1", "W1")]
