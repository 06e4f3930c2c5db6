"""tools/simulate: what it says about a run without running it is what a real run shows."""
import json
import re
import sys

import pytest
import toy
from harness import Refused
from jobs import storage_bytes
from programs import run_program
from simulate.kernels import Kernel
from simulate.play import Player
from steps import NAMES, ROOT, full_name, text_of
from toy import operation, record_job

STEP = "step08_5d"
SHAPE = "--device cpu --seq_len 64 --global_batch_size 16 --steps 2"
LAYOUTS = [                                               # for 8 ranks
    "--model tiny --dtype float32 --tp 2 --pp 2 --zero 1 --micro_batch_size 2",
    "--model tiny --dtype bfloat16 --zero 3 --recompute full --micro_batch_size 1",
    "--model tiny --dtype float32 --pp 4 --schedule interleaved --zero 2 --micro_batch_size 1",
    "--model tiny --dtype bfloat16 --tp 4 --cp 2 --recompute selective --micro_batch_size 16",
    "--model tiny --dtype float32 --cp 4 --tp 2 --sp off --cp_mode allgather --dp_mode naive --micro_batch_size 8",
    ("--model tiny --dtype bfloat16 --pp 2 --schedule dualpipe --cp 2 --cp_mode ulysses --zero 3 --zero_shard 2 "
     "--micro_batch_size 2"),
    "--model tiny-moe --dtype float32 --pp 2 --ep 4 --schedule zerobubble --micro_batch_size 1",
    "--model tiny-moe --dtype bfloat16 --ep 8 --zero 2 --balance aux --micro_batch_size 2",
    "--model tiny-moe --dtype bfloat16 --tp 2 --cp 2 --pp 2 --ep 2 --schedule afab --zero 1 --recompute full --micro_batch_size 8",
    "--model tiny-moe --dtype float32 --cp 4 --cp_mode ring --tp 2 --ep 4 --zero 3 --micro_batch_size 8",
    "--model tiny-moe --dtype bfloat16 --tp 4 --ep 2 --zero 2 --schedule zerobubble --pp 2 --micro_batch_size 4",
    "--model tiny-moe --dtype float32 --tp 4 --ep 8 --sp off --balance aux --recompute selective --micro_batch_size 4"]
ALONE = ["--model tiny", "--model tiny-moe --balance aux"]


# ---------------------------------------------------------------------------------------------- on every rank
def real_job(argv):
    """Train for real, except that a router gives every expert the same number of tokens. Return the recorded second step."""
    import contextlib
    from unittest.mock import patch

    import torch
    import train
    from simulate.record import recorded

    def state(seen, model, optimizer, mesh):
        states = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
        seen.state = {"parameters": storage_bytes([*model.parameters(), *optimizer.params]),
                      "gradients": storage_bytes(optimizer.grads),
                      "optimizer states": storage_bytes(states + optimizer.masters * (seen.args.dtype is torch.bfloat16))}
    finished = lambda work: work.wait() or True           # gloo reports a send as completed only after its wait()
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(patch("torch.distributed.Work.is_completed", finished))
        if hasattr(train, "balance"):
            from balance import LoadBalancer
            choose = LoadBalancer.choose

            def choose_evenly(self, i, logits):
                selected, logits = choose(self, i, logits)
                return selected.copy_((torch.arange(selected.numel()) % logits.shape[-1]).view_as(selected)), logits
            replaced.enter_context(patch("balance.LoadBalancer.choose", choose_evenly))
        steps = replaced.enter_context(recorded(state))
        train.main(argv)
    return steps[1]


# ---------------------------------------------------------------------------------------------- against reality
@pytest.mark.parametrize("layout", [
    pytest.param(layout, marks=pytest.mark.sweep if i in (1, 3, 4, 6, 8) else pytest.mark.slow)
    for i, layout in enumerate(LAYOUTS)])
def test_says_what_is_seen_in_a_real_run(pool, layout):
    assert_what_is_seen(pool, STEP, layout)


@pytest.mark.parametrize("step, layout", [
    pytest.param("step02_dp", "--model tiny --dtype float32 --dp_mode overlap --micro_batch_size 1", marks=pytest.mark.slow),
    pytest.param("step03_zero", "--model tiny --dtype bfloat16 --zero 3 --zero_shard 4 --micro_batch_size 2",
                 marks=pytest.mark.slow),
    pytest.param("step05_cp", "--model tiny --dtype float32 --cp 2 --tp 2 --zero 2 --recompute selective --micro_batch_size 4",
                 marks=pytest.mark.slow)])
def test_says_it_of_steps_without_a_pipeline(pool, step, layout):
    assert_what_is_seen(pool, step, layout)


def assert_what_is_seen(pool, step, layout):
    ranks = 0, 2, 5, 7                                    # in every dimension of two, the first and the last
    answers = pool.call(record_job, step, world=8, timeout=300, argv=f"{SHAPE} {layout}".split(), ranks=ranks)
    dry = [answers[rank] for rank in ranks]
    # gloo's threads may release a tensor late, and then too much is measured
    for last_try in (False, False, True):
        answers = pool.call(real_job, step, world=8, timeout=300, argv=f"{SHAPE} {layout}".split())
        real = [answers[rank] for rank in ranks]
        if last_try or all(map(same_memory, dry, real)):
            break
    for rank, said, seen in zip(ranks, dry, real):
        for kind in ("parameters", "gradients", "optimizer states"):
            assert said.between[kind] == seen.between[kind] == seen.state[kind] > 0, f"{kind}, rank {rank}"
            assert said.most[kind] == seen.most[kind], f"{kind}, rank {rank}"
        assert calls_and_payload(said) == calls_and_payload(seen) != {}, f"rank {rank}"
        assert said.flops == seen.flops, f"rank {rank}"
        assert [action.name for action in said.actions] == [action.name for action in seen.actions]
        assert [*in_order(said)] == [*in_order(seen)], f"rank {rank}"
        assert same_memory(said, seen), f"rank {rank}: said {said.most}, {said.peak}; seen {seen.most}, {seen.peak}"


def in_order(seen):
    """Yield what is computed, started and waited for, except copies, because gloo makes some of its own, and a router's sorting,
    because it runs other kernels when there is no data."""
    for what, value, *more in seen.notes:
        if what == "compute":
            kernel = seen.kernels[value]
            if kernel.flops or kernel.name != "copy_" and "moe" not in seen.args.model:
                yield kernel
        elif what == "start":
            yield seen.operations[value]
        elif what != "host waits":
            yield what, value


def calls_and_payload(seen):
    return {what: sizes[:2] for what, sizes in seen.sent.items()}


def same_memory(said, seen):
    """Tell whether activations agree within 2%, and the total at the peak within 5%: there, gloo releases some gradients late."""
    return (said.most["activations"] == pytest.approx(seen.most["activations"], rel=0.02) and
            sum(said.peak.values()) == pytest.approx(sum(seen.peak.values()), rel=0.05))


# flags with which a step must hold, compute and send the same as step 8
ALIKE = {1: ["", "--dtype float32 --device cpu --recompute full"],
         2: ["--dp 2", "--dp 2 --dp_mode overlap --device cpu"],
         3: ["--zero 1", "--zero 3 --zero_shard 2 --recompute selective"],
         4: ["--tp 2 --zero 1 --micro_batch_size 4", "--tp 2 --sp off --device cpu"],
         5: ["--cp 2 --tp 2 --zero 2", "--cp 2 --cp_mode allgather --recompute full --zero 3"],
         6: ["--pp 2 --schedule zerobubble --tp 2"],
         7: ["--model tiny-moe --ep 2 --pp 2 --zero 1"]}


@pytest.mark.parametrize("step", [pytest.param(step, marks=[pytest.mark.slow] * (step != 3)) for step in ALIKE])
def test_a_step_has_what_step_8_has(pool, step):
    for flags in ALIKE[step]:
        world = 1 if step == 1 else 4 if "dp 2" not in flags else 2
        argv = f"--seq_len 64 --global_batch_size 16 {flags}".split()
        ranks = {0, world - 1}
        early, late = (pool.call(record_job, folder, world=world, argv=argv, ranks=ranks) for folder in (NAMES[step - 1], STEP))
        for one, other in ((early[rank], late[rank]) for rank in ranks):
            theirs = sizes_of(other)
            if step == 2:                                 # its gradients are whole, so it need not sum the norm over two ranks
                theirs = [(calls - 1, payload - 4, wire - 4) for calls, payload, wire in theirs]
            assert (one.flops, one.place, sizes_of(one)) == (other.flops, other.place, theirs), flags
            scalars = 8 if step < 6 else 0                # bytes of the loss, which the Pipeline adds up from step 6 on
            for ours, theirs in ((one.between, other.between), (one.most, other.most), (one.peak, other.peak)):
                assert {**ours, "activations": 0, "rest": 0} == {**theirs, "activations": 0, "rest": 0}, flags
                for kind in ("activations", "rest"):
                    assert abs(theirs[kind] - ours[kind]) <= scalars, (flags, kind)


def sizes_of(seen):
    """Return the sizes of what goes over the wire: in one process, step 8 has collectives that go nowhere, and step 1 has none."""
    return [sizes for sizes in seen.sent.values() if sizes[2]]


@pytest.mark.slow
def test_flops_are_those_of_the_products(pool):
    """Check the FLOPs of a token: six per weight of a matrix, and attention's seven products (two in forward, five in backward), of
    which a causal kernel computes half."""
    layers, hidden, tokens, seq = 8, 64, 4 * 128, 128
    weights = layers * (2 * hidden * hidden + 2 * hidden * 32 + 3 * hidden * 192) + 256 * hidden
    seen = pool.call(record_job, STEP, argv=["--seq_len", "128", "--global_batch_size", "4"])[0]
    assert seen.flops == 6 * weights * tokens + layers * 7 * 2 * tokens * seq * hidden // 2


@pytest.mark.slow
def test_norms_keep_less_with_the_kernels_of_cuda(pool):
    """Check that norms keep less on CUDA, where a single kernel keeps only its input. On the CPU, a float32 copy of the input
    and the normalized input are kept."""
    argv = "--dtype bfloat16 --seq_len 64 --global_batch_size 2".split()
    cpu, cuda = (pool.call(record_job, STEP, argv=[*argv, "--device", device])[0] for device in ("cpu", "auto"))
    assert (cpu.sent, cpu.flops, cpu.between) == (cuda.sent, cuda.flops, cuda.between)
    assert 0 < cuda.most["activations"] < cpu.most["activations"]


# ---------------------------------------------------------------------------------------------- nobody waits for the device
def waits_job(argv, ranks):
    """Return the operations of a training step whose results the host would have to wait for if the device were a GPU."""
    import contextlib
    from unittest.mock import patch

    import torch
    from simulate.record import record
    from watch import Watch
    aten, asked = torch.ops.aten, []
    waits = {aten.bincount.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.equal.default,
             aten._local_scalar_dense.default}

    def note(op, args, kwargs):
        to_host = op == aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu")
        picks = op == aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1])
        repeats = op == aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if op in waits or to_host or picks or repeats:
            asked.append(op)

    @contextlib.contextmanager
    def ledger_and_waits(*args):                          # the last one in the loop's `with`, so it sees only the step
        with Watch(note):
            yield
    with patch("train.ledger", ledger_and_waits):
        record(argv, ranks, ranks // 2)
    return set(map(str, asked))


@pytest.mark.parametrize("layout", [*ALONE, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS)])
def test_the_host_waits_only_for_the_counts_of_rows(pool, layout):
    """Check that a GPU always has something to do within a step, except at all-to-alls, whose buffers the host must allocate. The
    log comes after the step."""
    ranks = 1 if layout in ALONE else 8
    argv = f"--seq_len 64 --global_batch_size 16 {layout}".split()
    assert pool.call(waits_job, STEP, argv=argv, ranks=ranks) == [{"aten._to_copy.default"} if "--ep" in layout else set()]


# ---------------------------------------------------------------------------------------------- what it prints
KEYS = {"step_seconds", "tokens_per_s_per_gpu", "mfu", "peak_bytes", "exposed", "bubble", "between_bytes", "flops", "sent"}


def printed(words, timeout=300):
    """Run the command. Return what it prints, and its table of memory: {kind: MiB between steps, at the peak, at most}."""
    status, output = run_program(["tools/simulate", *words.split()], ROOT, timeout)
    assert status == 0, output
    number = r" +([\d,]+\.\d\d)"
    rows = re.findall(f"^([a-z][a-z ]*?){number}{number}(?:{number})?$", output, re.MULTILINE)
    return output, {kind: [float(value.replace(",", "")) for value in values if value] for kind, *values in rows}


@pytest.mark.slow
def test_prints_what_a_rank_would_take():
    output, memory = printed("8 8 --rank 7 --tp 2 --pp 2 --micro_batch_size 2 --zero 1 --details")
    assert output.startswith("rank 7 of 8: pp 1 of 2, dp 1 of 2, cp 0 of 1, tp 1 of 2\n")
    assert "tiny, bfloat16, a training step of 4 micro-batches of 2 x 128 tokens" in output
    assert list(memory) == ["parameters", "optimizer states", "gradients", "activations", "rest", "all"]
    for column in (0, 1):
        assert memory["all"][column] == pytest.approx(sum(row[column] for kind, row in memory.items() if kind != "all"), abs=0.04)
    assert re.search(r"the peak is in [FB]\d of stage 1, action \d of 8", output)
    assert "FLOPs, " in output and "for each of the 1,024 tokens that this rank works on" in output
    assert "simulated on 8 h100: " in output and "bubble: a rank stands idle for " in output
    assert re.search(r"the longest waits: \w+ in \w+\.py:\d+ [\d.]+ s; ", output)
    sent = {tuple(line.split()[:2]): line.split()[2:] for line in output[output.index("\ndimension") + 1:].splitlines()[1:]}
    hidden_states = 2 * 128 // 2 * 64 * 2                 # bytes of a rank's part of a micro-batch
    assert sent["pp", "send"] == ["4", f"{4 * hidden_states:,}", f"{4 * hidden_states:,}"]
    assert {("shard", "all_gather"), ("shard", "reduce_scatter"), ("tp", "all_gather"), ("tp", "reduce_scatter")} <= sent.keys()
    assert "step 1/1" not in output                       # no line of a step, as there is no loss


@pytest.mark.slow
def test_of_step_1_there_is_one_process_and_no_bytes(tmp_path):
    output, memory = printed(f"1 1 --json {tmp_path}/seen.json --details")
    assert output.startswith("rank 0 of 1\ntiny, bfloat16") and "dimension" not in output and "bubble" not in output
    assert re.search(r"the peak is in backward of micro-batch \d: 0\.\d of the 70\.5 GiB that can be used: fits", output)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen.keys() == KEYS and seen["sent"] == []
    assert f"{seen['flops']:.4e} FLOPs" in output
    assert memory["all"] == [round(seen[name] / 2**20, 2) for name in ("between_bytes", "peak_bytes")]


@pytest.mark.slow
def test_numbers_for_programs(tmp_path):
    output, _ = printed(f"8 4 --tp 2 --zero 1 --json {tmp_path}/seen.json --details")
    sent = {(one.pop("dimension"), one.pop("collective")): one for one in json.loads((tmp_path / "seen.json").read_text())["sent"]}
    assert ("tp", "all_gather") in sent
    for (dimension, collective), one in sent.items():
        row = f"{one['calls']:,} {one['payload_bytes']:,} {one['wire_bytes']:,.0f}".replace(" ", " +")
        assert re.search(f"^{dimension} +{collective} +{row}$", output, re.MULTILINE)


@pytest.mark.parametrize("words, message", [
    ("8 12 --tp 8", "pp 1 x dp 1 x cp 1 x tp 8: must equal the world size, 12"),
    ("9 1", "STEP 9: must be a step, 1 to 8"),
    ("1 2", "RANKS 2: must be at least 1, and for step 1 exactly 1"), ("8 0", "RANKS 0: must be at least 1"),
    ("3 1000001", "RANKS 1000001: must be at most 1,000,000"),
    ("8 many", "argument RANKS: invalid int value: 'many'"), ("8", "the following arguments are required: RANKS"),
    ("8 8 --rank 8", "--rank 8: must be from 0 to 7"), ("8 8 --rank -1", "--rank -1: must be from 0 to 7"),
    ("3 8 --rank 3 --tp 2", "unrecognized arguments: --tp 2"),
    ("8 8 --rank 5 --attention flash", "--attention flash: not in a dry run; choose sdpa"),
    ("8 8 --network 0", "--network 0: both must be positive"), ("8 8 --gpu p100", "invalid choice: 'p100'"),
    ("8 8 --json nowhere/seen.json", "nowhere/seen.json: cannot be written (No such file or directory)"),
    *((f"8 8 --rank 2 {flag}", f"leave out {flag.split()[0]}") for flag in (
        "--save out", "--log_file out", "--profile out", "--checkpoint out", "--resume", "--init_from out"))])
def test_refused_in_one_line(pool, words, message):
    """Run the command in a worker, because a process of its own would take longer to start."""
    with pytest.raises(Refused) as refused:
        pool.call(command_job, STEP if words[0] == "9" else NAMES[int(words[0]) - 1], words=words.split())
    said = str(refused.value).strip()
    assert said.splitlines()[-1].startswith("error: ") and message in said and said.count("error: ") == 1
    assert "Traceback" not in said


def command_job(words):
    import runpy
    from unittest.mock import patch
    with patch.object(sys, "argv", ["simulate", *words]), patch.object(sys, "path", ["", *sys.path]):
        runpy.run_path(str(ROOT / "tools/simulate"), run_name="__main__")


@pytest.mark.sweep
@pytest.mark.parametrize("more", ["--seq_len 8192 --global_batch_size 2048", "--cp 16 --seq_len 131072 --global_batch_size 128"])
def test_a_large_model_on_16384_ranks(more):
    output, memory = printed(f"8 16384 --model llama-405b --tp 8 --pp 16 --zero 1 --micro_batch_size 1 {more}", timeout=900)
    hidden, mlp, kv, vocabulary = 16384, 53248, 1024, 128256
    layer = (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp) // 8 + 2 * hidden
    weights = vocabulary * hidden // 8 + 7 * layer        # the first stage: the embedding counts as one of its eight
    assert memory["parameters"] == [pytest.approx(2 * weights / 2**20, abs=0.01)] * 3
    assert memory["gradients"] == [pytest.approx(4 * weights / 2**20, abs=0.01)] * 3
    assert memory["optimizer states"][0] == pytest.approx(12 * weights / 128 / 2**20, abs=0.01)
    assert "simulated on 16,384 h100: " in output


# ---------------------------------------------------------------------------------------------- playing notes
def played(flops_per_byte, *ranks, **how):
    return Player(dict(enumerate(ranks)), toy.Toy(flops_per_byte), **how).play()


def test_a_collective_waits_for_the_slowest_and_takes_its_bytes():
    fast = toy.rank(("compute", 10), ("start", 0), ("wait", 0), ("compute", 1), operations=[operation(5)])
    slow = toy.rank(("compute", 30), ("start", 0), ("wait", 0), ("compute", 1), operations=[operation(5)])
    found = played(2, fast, slow)
    assert found.seconds == 30 + 2 * 5 + 1 and found.computing == {0: 11, 1: 31}
    assert found.waited == {0: {("dp", "train.py:1"): 40 - 10}, 1: {("dp", "train.py:1"): 40 - 30}}
    assert found.idle == {}                               # nobody waited for a rank of another stage


def test_for_other_stages_it_is_the_bubble():
    fast = toy.rank(("compute", 10), ("start", 0), ("wait", 0), operations=[operation(5, dimension="world")])
    slow = toy.rank(("compute", 30), ("start", 0), ("wait", 0), operations=[operation(5, dimension="world")])
    assert played(2, fast, slow, stage_of=lambda rank: rank).idle == {0: 20, 1: 0}


@pytest.mark.parametrize("work, time", [(100, 107), (4, 17)])
def test_what_is_computed_meanwhile_hides_it(work, time):
    both = toy.rank(("start", 0), ("compute", work), ("wait", 0), ("compute", 7), operations=[operation(5)])
    assert played(2, both, both).seconds == time


def test_a_communicator_does_one_thing_after_the_other():
    both = toy.rank(("start", 0), ("start", 1), ("wait", 0), ("compute", 100), ("wait", 1), operations=[operation(5), operation(8)])
    found = played(1, both, both)
    assert found.seconds == 5 + 100 and [event.end for event in found.events if event.name == "all_gather"] == [5, 5, 13, 13]


def test_two_communicators_share_a_link():
    """Send 5 and 8 bytes: when the first transfer ends, at 10, 5 bytes of each have gone. Then the second has the whole link."""
    operations = [operation(5), operation(8, dimension="tp")]
    both = toy.rank(("start", 0), ("start", 1), ("wait", 0), ("wait", 1), operations=operations)
    found = played(1, both, both)
    assert [event.end for event in found.events if event.name == "all_gather"] == [10, 10, 13, 13]


def test_messages_in_both_directions_travel_together():
    there, back = (operation(5, ranks, "send", "pp")._replace(grouped=True) for ranks in ((0, 1), (1, 0)))
    came = [one._replace(what="receive") for one in (there, back)]
    notes = ("start", 0), ("start", 1), ("wait", 0), ("wait", 1)
    assert played(1, toy.rank(*notes, operations=[there, came[1]]), toy.rank(*notes, operations=[back, came[0]])).seconds == 5


def test_a_message_is_sent_when_both_ends_have_started_it():
    first = toy.rank(("start", 0), ("compute", 2), ("wait", 0), operations=[operation(5, what="send", dimension="pp")])
    last = toy.rank(("compute", 10), ("start", 0), ("wait", 0), operations=[operation(5, what="receive", dimension="pp")])
    assert played(1, first, last).seconds == 15


def test_one_stands_for_its_peers():
    """Play one rank for a ring of four that all do the same: each receives from the one before it and sends to the next."""
    ends = (operation(5, (0, 1), "send", "cp"), operation(5, (3, 0), "receive", "cp"))
    operations = [end._replace(grouped=True) for end in ends]
    alone = toy.rank(("start", 0), ("start", 1), ("compute", 3), ("wait", 0), ("wait", 1), operations=operations)
    assert played(1, alone, stands_for=lambda _: 0).seconds == 5


def test_ranks_that_wait_for_ever_are_an_error():
    with pytest.raises(RuntimeError, match="for ever"):
        played(1, toy.rank(("start", 0), ("wait", 0), operations=[operation(1)]), toy.rank(operations=[]))


def test_the_host_runs_ahead_and_is_waited_for():
    """Launch three kernels of length 1, one every 2; then one of length 10. Meanwhile the host launches two more, so these begin at
    once."""
    from simulate.gpus import GPUS, Cluster

    class Slow(Cluster):
        def kernel(self, kernel):
            return kernel.flops
    one = toy.rank(*[("compute", 1)] * 3, ("compute", 10), *[("compute", 1)] * 2, operations=[])
    found = Player({0: one}, Slow(GPUS["h100"], issue=2)).play()
    assert found.seconds == 8 + 10 + 2 and found.host == {0: 2 + 1 + 1 + 1}


def test_a_real_step_waits_for_its_bytes(pool):
    """Check that ranks with equal parts of the batch wait only for communication, and that its time grows with its bytes."""
    recordings = toy.run(pool, NAMES[1], 2, "--dp_mode naive", num_hidden_layers=1)
    found = [toy.play(recordings, speed) for speed in (0, 10, 20)]
    assert found[0].seconds == found[0].computing[0] == found[0].computing[1] > 1e8
    weights = 2 * 64 * 128 + 128 * (2 * 128 + 2 * 64 + 3 * 384 + 2) + 128
    per_rank = 4 * (weights + 1)                          # an all-reduce over two ranks sends as many bytes; and the loss
    assert [one.seconds - found[0].seconds for one in found[1:]] == [10 * per_rank, 20 * per_rank]
    overlap = toy.run(pool, NAMES[1], 2, "--dp_mode overlap", num_hidden_layers=1)
    assert toy.play(overlap, 20).seconds < found[2].seconds and toy.play(overlap, 0).seconds == found[0].seconds


def test_a_pipeline_alone_is_what_its_schedule_says(pool):
    """Compare with schedules.py: F, I and W take 1 each, and messages take no time."""
    (found,) = pool.call(pipelines_job, NAMES[5])
    assert found and all(played == said for played, said in found.values()), found


def pipelines_job():
    """Return {schedule: (its seconds and each rank's idle time when its notes are played, the same by schedules.py)}."""
    import schedules
    found = {}
    for name, row in schedules.SCHEDULES.items():
        lists = schedules.make(name, 4, max(8, row.min_micro_batches(4)), row.stages_per_rank)
        last = max(action.stage for actions in lists for action in actions)
        ranks = [toy.notes_of_program(schedules, rank, schedules.add_send_recv(lists, rank), last) for rank in range(4)]
        played = Player(dict(enumerate(ranks)), toy.Toy(0.0), stage_of=lambda rank: rank).play()
        events = schedules.simulate(lists)
        found[name] = ((played.seconds, [played.seconds - played.computing[rank] for rank in range(4)]),
                       (max(event.end for event in events), schedules.bubble(events)))
    return found


# ---------------------------------------------------------------------------------------------- on GPUs
def test_a_product_takes_whole_waves_of_tiles():
    from simulate.gpus import GPUS, Cluster
    h100 = Cluster(GPUS["h100"])

    def seconds(rows, columns):
        return h100.kernel(Kernel("mm", "product", "bfloat16", 2 * rows * columns * 8192, 0, (1, rows, columns, 8192)))
    full = seconds(128 * 12, 256 * 11)                    # 132 tiles, one for each multiprocessor
    assert seconds(128 * 12, 256 * 11 - 255) == full < seconds(128 * 12 + 1, 256 * 11)
    assert seconds(128 * 24, 256 * 11) == pytest.approx(2 * full)


def test_a_product_in_8_bits_takes_half():
    from simulate.gpus import GPUS, Cluster

    def seconds(gpu, dtype):
        return Cluster(gpu).kernel(Kernel("_scaled_mm", "product", dtype, 2 * 2**42, 3 * 2**28, (1, 2**14, 2**14, 2**14)))
    assert {name for name, gpu in GPUS.items() if not gpu.float8} == {"a100", "v100"}
    for name, gpu in GPUS.items():
        if gpu.float8:
            half = seconds(gpu, "float8_e4m3fn")
            assert half == seconds(gpu, "float8_e5m2") == pytest.approx(seconds(gpu, "bfloat16") / 2, rel=1e-3), name
            assert half == pytest.approx(2 * 2**42 / (gpu.product * gpu.float8), rel=0.05), name        # the last wave is not full


@pytest.mark.parametrize("ranks, seconds, link", [
    (range(8), 8e9 / (0.8 * 450e9), "nvlink"),            # within one node
    (range(16), None, "network"),                         # two nodes, all eight cards of each
    (range(0, 64, 8), None, "network")])                  # one GPU of each node, and its card
def test_a_ring_is_as_fast_as_its_slowest_link(ranks, seconds, link):
    from simulate import gpus
    cards = {16: 8, 8: 1}[len(ranks)]
    seconds = seconds or 8e9 / min(0.8 * 450e9, cards * gpus.NETWORK * 50e9)
    found = gpus.Cluster(gpus.GPUS["h100"]).transfer(operation(8e9, tuple(ranks)))
    assert found[1:] == (pytest.approx(seconds), link)


def test_trace_plot_and_numbers(tmp_path):
    """Check that the trace is what Perfetto reads, that nothing in a stream overlaps, and that waiting and computing add up."""
    files = f"--json {tmp_path}/j.json --trace {tmp_path}/t.json --plot {tmp_path}/p.png"
    output, _ = printed(f"6 4 --pp 2 --zero 1 --micro_batch_size 2 --network 10 --gpus_per_node 2 {files}")
    seen, trace = (json.loads((tmp_path / name).read_text()) for name in ("j.json", "t.json"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG") and seen.keys() == KEYS
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert all(event.keys() >= {"name", "pid", "tid", "ts", "dur", "args"} for event in events if event["ph"] == "X")
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "actions", "pp"} <= {*names.values()}
    streams = {}
    for event in events:
        if event["ph"] == "X" and names[event["pid"], event["tid"]] in ("compute", "actions"):
            start, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)         # ns, as Perfetto reads them
            streams.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    for spans in streams.values():
        spans.sort()
        assert all(after[0] >= before[1] for before, after in zip(spans, spans[1:]))
    assert {event["name"] for event in events if names.get((event["pid"], event.get("tid"))) == "actions"} >= {
        "F0 of stage 0", "B3 of stage 1"}
    links = {(names[event["pid"], event["tid"]], event["args"]["at"]) for event in events if event["ph"] == "X"}
    links = {one for one in links if one[0] not in ("compute", "actions")}
    assert links == {("pp", "network"), ("world", "network"), ("shard", "nvlink")}
    most = max(event["args"]["GiB"] for event in events if event["ph"] == "C" and event["pid"] == 0)
    assert most * 2**30 == pytest.approx(seen["peak_bytes"])
    assert seen["step_seconds"] * 1e6 == pytest.approx(max(event["ts"] + event["dur"] for event in events if event["ph"] == "X"))
    tokens = 16 * 128 / seen["step_seconds"] / 4
    assert seen["tokens_per_s_per_gpu"] == pytest.approx(tokens) and 0 < seen["bubble"] < 1
    assert 0 < sum(seen["exposed"].values()) < seen["step_seconds"] and {"pp", "world"} <= seen["exposed"].keys()
    assert f"tokens/s/GPU, MFU {seen['mfu']:.1%}" in output


# ------------------------------------------------------------------------------------------- the READMEs' gains
LLAMA_1B = "--model llama-1b --seq_len 4096 --global_batch_size 64 --recompute selective"
LLAMA_3B = "--model llama-3b --seq_len 4096 --global_batch_size 2 --micro_batch_size 1"
LLAMA_8B = "--model llama-8b --dtype bfloat16 --micro_batch_size 1"
ZERO = f"{LLAMA_8B} --seq_len 4096 --global_batch_size 16 --recompute full"
TP = "--zero 3 --model llama-70b --dtype bfloat16 --seq_len 8192 --global_batch_size 64 --micro_batch_size 1"
CP = f"--zero 3 {LLAMA_8B} --seq_len 131072 --recompute full"
PP = f"--pp 8 {LLAMA_8B} --seq_len 4096 --global_batch_size 32"
EP = "--model mixtral-8x7b --pp 4 --ep 8 --zero 1 --seq_len 4096 --global_batch_size 256 --micro_batch_size 1 --recompute selective"
ALL = f"{LLAMA_8B} --seq_len 4096 --global_batch_size 64 --recompute selective"
GAINS = [
    (f"1 1 {LLAMA_1B} --micro_batch_size 2 --recompute none", "| none | {peak_gib:.1f} GiB | {s:.2f} s | {mfu:.1%} |"),
    (f"1 1 {LLAMA_1B} --micro_batch_size 2", "| selective | {peak_gib:.1f} GiB | {s:.2f} s | {mfu:.1%} |"),
    (f"1 1 {LLAMA_1B} --micro_batch_size 2 --recompute full", "| full | {peak_gib:.1f} GiB | {s:.2f} s | {mfu:.1%} |"),
    (f"1 1 {LLAMA_3B}", "That is {peak_gib:.0f} GiB in all"),
    (f"1 1 {LLAMA_3B} --recompute full", "its 75 GiB become {peak_gib:.0f} GiB with `--recompute full`"),
    (f"2 1 {LLAMA_1B} --micro_batch_size 2", "| 1 | | {s:.2f} s | |"),
    (f"2 8 {LLAMA_1B} --micro_batch_size 2 --dp_mode naive", "| 8 | naive | {s:.3f} s | {dp:.0%} |"),
    (f"2 8 {LLAMA_1B} --micro_batch_size 2 --dp_mode bucket", "| 8 | bucket | {s:.3f} s | under 1% |"),
    (f"2 64 {LLAMA_1B} --micro_batch_size 1 --dp_mode naive", "| 64 | naive | {s:.3f} s | {dp:.0%} |"),
    (f"2 64 {LLAMA_1B} --micro_batch_size 1 --dp_mode bucket", "| 64 | bucket | {s:.3f} s | under 1% |"),
    (f"3 8 {ZERO} --zero 0", "| 0 | {between_gib:.0f} GiB | {peak_gib:.0f} GiB: does not fit | ({s:.2f} s) |"),
    (f"3 8 {ZERO} --zero 1", "| 1 | {between_gib:.0f} GiB | {peak_gib:.0f} GiB | {s:.2f} s |"),
    (f"3 8 {ZERO} --zero 2", "| 2 | {between_gib:.0f} GiB | {peak_gib:.0f} GiB | {s:.2f} s |"),
    (f"3 8 {ZERO} --zero 3", "| 3 | {between_gib:.0f} GiB | {peak_gib:.0f} GiB | {s:.2f} s |"),
    (f"4 64 {TP} --tp 1", "| `--tp 1` | {activations_gib:.1f} GiB | {peak_gib:.1f} GiB: does not fit |"),
    (f"4 64 {TP} --tp 8 --sp off", "| `--tp 8 --sp off` | {activations_gib:.1f} GiB | {peak_gib:.1f} GiB: does not fit |"),
    (f"4 64 {TP} --tp 8 --sp on", "| `--tp 8 --sp on` | {activations_gib:.1f} GiB | {peak_gib:.1f} GiB |"),
    (f"5 8 {CP} --global_batch_size 8 --cp 1", "| all memory | {peak_gib:.0f} GiB: too much |"),
    (f"5 8 {CP} --global_batch_size 4 --cp 2", "| {peak_gib:.0f} GiB |;| {s:.0f} s |"),
    (f"5 8 {CP} --global_batch_size 2 --cp 4", "| {peak_gib:.0f} GiB |;| {s:.0f} s |"),
    (f"5 8 {CP} --global_batch_size 1 --cp 8", "| {peak_gib:.0f} GiB |;| {s:.0f} s |"),
    (f"6 8 {PP} --schedule afab", "| `afab` | {activations_gib:.0f} GiB | {s:.1f} s | {bubble:.0%} |"),
    (f"6 8 {PP} --schedule 1f1b", "| `1f1b` | {activations_gib:.0f} GiB | {s:.1f} s | {bubble:.0%} |"),
    (f"6 8 {PP} --schedule zerobubble", "| `zerobubble` | {activations_gib:.0f} GiB | {s:.1f} s | {bubble:.0%} |"),
    (f"6 8 {PP} --schedule interleaved", "| `interleaved` | {activations_gib:.0f} GiB | {s:.1f} s | {bubble:.0%} |"),
    (f"7 32 {EP} --gpus_per_node 8", "| near: a node holds the 8 ranks of ep | {s:.2f} | {speed:,.0f} | {ep:.1%} |"),
    (f"7 32 {EP} --gpus_per_node 1", "| far: each of them is on a different node | {s:.2f} | {speed:,.0f} | {ep:.1%} |"),
    (f"8 8 {ALL} --zero 3", "--zero 3 {s:.2f} s a step {speed:,.0f} tokens/s/GPU {peak_gib:.1f} GiB waiting for dp {dp:.1%}"),
    (f"8 8 {ALL} --tp 2 --pp 4", "--tp 2 --pp 4 {s:.2f} s {speed:,.0f} {peak_gib:.1f} GiB waiting for pp {pp:.1%}, tp {tp:.1%}"),
    (f"8 8 {ALL} --tp 8", "--tp 8 {s:.2f} s {speed:,.0f} {peak_gib:.1f} GiB waiting for tp {tp:.1%}")]
LONG = (EP, "--tp 2 --pp 4", "--tp 8", "--cp 4", "--cp 8", "--schedule afab", "--schedule zerobubble", "--schedule interleaved")


@pytest.mark.parametrize("command, cells", [
    pytest.param(*row, id=" ".join(row[0].split()[:2] + row[0].split()[-4:]),
                 marks=pytest.mark.sweep if any(long in row[0] for long in LONG) else pytest.mark.slow) for row in GAINS])
def test_what_a_readme_says_a_step_gains(command, cells, tmp_path):
    _, memory = printed(f"{command} --json {tmp_path}/seen.json")
    seen = json.loads((tmp_path / "seen.json").read_text())
    shares = {name: seconds / seen["step_seconds"] for name, seconds in seen["exposed"].items()}
    values = dict(shares, s=seen["step_seconds"], speed=seen["tokens_per_s_per_gpu"], mfu=seen["mfu"], bubble=seen["bubble"],
                  peak_gib=seen["peak_bytes"] / 2**30, peak_gb=seen["peak_bytes"] / 1e9,
                  between_gb=seen["between_bytes"] / 1e9, between_gib=seen["between_bytes"] / 2**30,
                  activations_gb=memory["activations"][2] * 2**20 / 1e9, activations_gib=memory["activations"][2] / 2**10)
    text = " ".join(text_of(full_name(command[0])).split())
    for said in cells.format(**values).split(";"):
        assert said in text


def test_a_rank_may_hold_nothing_but_padding():
    """On so many ranks, the last rank's shards have no element of any parameter, and the optimizer has an empty one."""
    printed("8 460 --rank 459 --model tiny --pp 2 --zero 1 --global_batch_size 230 --micro_batch_size 1")
