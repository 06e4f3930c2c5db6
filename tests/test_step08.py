"""Step 8: every layout of all dimensions at once trains as one process does; a run that was stopped or killed can resume under any
layout."""
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from unittest.mock import patch

import cases
import layouts
import pytest
import torch
from harness import Refused, assert_same_run, assert_same_tensors, relative
from jobs import assert_refused, check_job, main_job, told_job
from layouts import SCHEDULES, Layout, all_of_a_world, rest
from observe import check
from prove.processes import torchrun
from safetensors.torch import save_file
from steps import step_dir

STEP = "step08_5d"
SHAPES = {"dense": "dense-9", "moe": "top2-9"}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    return {kind: f"{cases.make(folder / kind, **cases.shape(shape))} --dtype float64" for kind, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def one_process(pool, flags):
    """Return {kind: the run that others are compared with}. A run is made when it is first asked for."""
    class Runs(dict):
        def __missing__(self, kind):
            return self.setdefault(kind, pool.train(STEP, f"{flags[kind]} --micro_batch_size 6"))
    return Runs()


# ------------------------------------------------------------------------------------- all layouts
def of_kind(kind, world, more):
    balance = "" if kind == "dense" else " --balance bias"
    return Layout(STEP, world, SHAPES[kind], "adamw", f"--dtype float64 {more}{balance}")


EIGHT = [of_kind(kind, 8, more) for kind, more in all_of_a_world(8)]
SIXTEEN = [of_kind("moe", 16, f"--dp 2 --tp 2 --cp 2 --pp 2 --ep {ep} " + rest(random.Random(i), 2, 2, 2, 2, stage, schedule))
           for i, (ep, stage, schedule) in enumerate(itertools.product([1, 2, 4, 8], [0, 1, 2, 3], SCHEDULES))]
SIXTEEN = [layout._replace(shape="top2-5") for layout in SIXTEEN]                  # four stages: more layers would show nothing new


@pytest.mark.parametrize("layout", [*layouts.every_layout(8),
    pytest.param(Layout(STEP, 4, "dense-2-kv2", "adamw", "--dtype float64 --recompute none --micro_batch_size 6 --tp 4 --sp on"),
                 id="shared heads", marks=slow),
    pytest.param(SIXTEEN[34], id="sixteen ranks", marks=slow)])
def test_layout(pool, layout):
    check(pool, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", EIGHT, ids=str)
def test_every_layout_of_eight_ranks(pool, layout):
    check(pool, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", SIXTEEN, ids=str)
def test_all_dimensions_at_once_in_every_way(pool, layout):
    check(pool, layout)


# ------------------------------------------------------------------------------------- stopping and resuming
SAVED = [(1, "--micro_batch_size 6"), (8, "--tp 2 --pp 2 --ep 2 --zero 3 --schedule dualpipe --micro_batch_size 3"),
         (4, "--ep 2 --zero 2 --micro_batch_size 3"), (8, "--tp 8 --micro_batch_size 24"),
         (6, "--pp 3 --zero 1 --micro_batch_size 3 --schedule zerobubble"),
         (8, "--cp 2 --ep 8 --zero 3 --zero_shard 4 --micro_batch_size 3")]
RESUMED = [(2, "--ep 2 --zero 3 --micro_batch_size 6"), (8, "--tp 4 --pp 2 --sp off --schedule interleaved --micro_batch_size 6"),
           (1, "--micro_batch_size 12"), (8, "--tp 2 --cp 2 --ep 8 --zero 1 --micro_batch_size 6"),
           (8, "--pp 8 --micro_batch_size 3"), (6, "--ep 1 --zero 2 --zero_shard 3 --micro_batch_size 4")]
PAIRS = list(itertools.product(SAVED, RESUMED))


@pytest.fixture(scope="module")
def saved(pool, flags, tmp_path_factory):
    """Return a function that makes a checkpoint after two of four steps, by telling the run to end then. Each is made once."""
    made = {}

    def saved(world, more, kind="moe"):
        if (more, kind) not in made:
            folder = made[more, kind] = tmp_path_factory.mktemp("saved")
            argv = f"{flags[kind]} {more} --checkpoint {folder}".split()
            pool.call(told_to_end_job, STEP, world=world, argv=argv, rank=world - 1, at=1)
        return made[more, kind]
    return saved


def assert_goes_on(pool, flags, one_process, folder, tmp_path, world, more, kind="moe", done=2):
    shutil.copytree(folder, tmp_path / "copy")
    trained = pool.train(STEP, f"{flags[kind]} {more} --checkpoint {tmp_path / 'copy'} --resume", world=world)
    one = one_process[kind]
    assert f"resuming from {tmp_path / 'copy'}/step_{done:08d}" in trained.output
    assert [line["step"] for line in trained.lines] == list(range(done, 4)), trained.output
    for ours, theirs in zip(trained.losses + trained.grad_norms, one.losses[done:] + one.grad_norms[done:]):
        assert relative(ours, theirs) < 1e-9
    assert_same_tensors(trained.weights, one.weights, 1e-9)


SOME = random.Random(3).sample(PAIRS, 6)[:4]              # the first shows planted mistakes


@slow
@pytest.mark.parametrize("first, second", SOME)
def test_goes_on_under_another_layout(pool, flags, one_process, saved, tmp_path, first, second):
    assert_goes_on(pool, flags, one_process, saved(*first), tmp_path, *second)


@pytest.mark.sweep
@pytest.mark.parametrize("first, second", PAIRS)
def test_goes_on_from_any_layout_under_any_other(pool, flags, one_process, saved, tmp_path, first, second):
    assert_goes_on(pool, flags, one_process, saved(*first), tmp_path, *second)


@slow
def test_a_dense_model_goes_on_too(pool, flags, one_process, saved, tmp_path):
    folder = saved(8, "--tp 4 --zero 2 --micro_batch_size 6", "dense")
    assert_goes_on(pool, flags, one_process, folder, tmp_path, 8, "--tp 2 --pp 2 --zero 3 --micro_batch_size 6", "dense")


def test_bfloat16_goes_on_to_the_bit(pool, flags, tmp_path):
    """Check that masters and moments are saved in float32: a bfloat16 weight would have lost what small steps added."""
    base = f"{flags['moe'].replace('float64', 'bfloat16')} --micro_batch_size 6 --ep 2 --zero 1"
    whole = pool.train(STEP, f"{base} --checkpoint {tmp_path} --save_every 2", world=2)
    shutil.rmtree(tmp_path / "step_00000004")
    again = pool.train(STEP, f"{base} --checkpoint {tmp_path} --resume", world=2)
    assert again.losses == whole.losses[2:] and again.grad_norms == whole.grad_norms[2:]
    assert all(torch.equal(again.weights[name], whole.weights[name]) for name in whole.weights)


@slow
@pytest.mark.parametrize("world, more", [SAVED[1], (4, "--ep 2 --micro_batch_size 3")], ids=["zero 3", "replicas"])
def test_every_element_is_written_once_and_by_all_ranks(pool, flags, saved, world, more):
    from safetensors import safe_open
    folder = saved(world, more) / "step_00000002"
    files, stored = sorted(folder.glob("*.safetensors")), {}
    assert [file.name for file in folder.iterdir() if file not in files] == ["index.json"] and len(files) == world
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():
                name = key.partition("[")[0]
                stored[name] = stored.get(name, 0) + opened.get_tensor(key).numel()
    weights = pool.train(STEP, f"{flags['moe']} --steps 0").weights
    assert sum(stored.pop(name) for name in list(stored) if name == "balance.bias") > 0
    numbers = sum(weight.numel() for weight in weights.values())
    for end in (".weight", ".exp_avg", ".exp_avg_sq"):    # saved once, however many ranks had it
        assert sum(size for name, size in stored.items() if name.endswith(end)) == numbers
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.5 * min(sizes), sizes


def boxes_job(draws):
    """Split a tensor at random into parts and the parts into runs, save these, and load them under another split. Return the draws
    that did not come back."""
    import random
    from types import SimpleNamespace

    import torch.distributed as dist
    from boxes import boxes, fill
    dist.init_process_group("gloo")
    wrong = []

    def cut(draw, whole, fresh):
        dim, parts = draw.choice([(dim, n) for dim, size in enumerate(whole.shape) for n in range(1, size + 1) if size % n == 0])
        state, truth = {}, []
        for index, part in enumerate(whole.chunk(parts, dim)):
            part = part.contiguous()
            placement = SimpleNamespace(shards=[SimpleNamespace(dim=dim, num_shards=parts, index=index)])
            param = SimpleNamespace(shape=part.shape, dim=part.dim, placement=placement)
            ends = sorted([0, part.numel(), *(draw.randrange(part.numel() + 1) for _ in range(draw.randrange(4)))])
            for first, last in zip(ends, ends[1:]):
                if first < last:
                    run = part.flatten()[first:last].clone()
                    truth.append((run, run.clone()))
                    state |= boxes(param=param, name="w", start=first, elements=run.zero_() if fresh else run)
        return state, truth
    for seed in range(draws):
        draw = random.Random(seed)
        whole = torch.randn([draw.randrange(1, 6) for _ in range(draw.randrange(1, 4))])
        with tempfile.TemporaryDirectory() as folder:
            (saved, _), (state, truth) = cut(draw, whole, False), cut(draw, whole, True)
            keys = sorted(saved)
            for i in range(3):
                save_file({key: saved[key] for key in keys[i::3]}, f"{folder}/{i}")
            left = fill(state, [f"{folder}/{i}" for i in range(3)])
            if left or not all(torch.equal(run, before) for run, before in truth):
                wrong.append(seed)
            if len(keys) > 2 and not fill(state, [f"{folder}/{i}" for i in range(2)]):
                wrong.append((seed, "a file is missing and nothing was said"))
    return wrong


def test_boxes_come_back_under_any_other_cut(pool):
    assert pool.call(boxes_job, STEP, draws=200) == [[]]


@slow
def test_the_newest_are_kept_and_the_log_goes_on(pool, flags, tmp_path):
    log, base = tmp_path / "log", f"{flags['dense']} --micro_batch_size 6 --checkpoint {tmp_path / 'c'} --save_every 1 --keep 2"
    pool.call(main_job, STEP, world=2, argv=f"{base} --log_file {log}".split())
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step_00000003", "step_00000004"]
    whole = log.read_text().splitlines()
    shutil.rmtree(tmp_path / "c" / "step_00000004")
    pool.call(main_job, STEP, world=4, argv=f"{base} --log_file {log} --resume".split())
    again = log.read_text().splitlines()
    assert again[:3] == whole[:3] and [json.loads(line)["step"] for line in again] == [0, 1, 2, 3]
    assert relative(json.loads(again[3])["loss"], json.loads(whole[3])["loss"]) < 1e-9


def test_a_torn_checkpoint_is_not_picked_up(pool, flags, one_process, saved, tmp_path):
    folder = shutil.copytree(saved(*SAVED[2]), tmp_path / "torn")
    torn = shutil.copytree(folder / "step_00000002", folder / "step_00000003.tmp")
    (torn / "index.json").unlink()
    assert_goes_on(pool, flags, one_process, folder, tmp_path, *RESUMED[0])
    assert torn.name not in os.listdir(tmp_path / "copy"), "what a killed run left behind is cleared away"


def saving_job(argv):
    """Train. Return for each save the most memory that it takes in new storages, and the bytes of what this rank saves."""
    import train
    from resume import Checkpoints
    from watch import Storages
    peaks, save = [], Checkpoints.save

    def watched(self, steps):
        seen, state = Storages(), self.state()
        for box in state.values():                        # these exist already
            seen.note(box, "optimizer states")
        before = len(seen.events)
        with seen:
            save(self, steps)
        alive = most = 0
        for _, _, change in seen.events[before:]:
            alive += change
            most = max(most, alive)
        peaks.append((most, sum(box.nbytes for box in state.values())))
    Checkpoints.save = watched
    try:
        train.main(argv)
    finally:
        Checkpoints.save = save
    return peaks


@slow
@pytest.mark.parametrize("more", ["--zero 3", "--zero 1", "--tp 2 --zero 2"])
def test_saving_takes_no_memory(pool, flags, tmp_path, more):
    argv = f"{flags['dense']} --steps 2 --micro_batch_size 3 --checkpoint {tmp_path} {more}".split()
    for peaks in pool.call(saving_job, STEP, world=4, argv=argv):
        # the ranks exchange the keys of all boxes; this model is so small that the keys are a tenth of it
        assert peaks and all(0 < most < state / 8 for most, state in peaks), peaks


# ------------------------------------------------------------------------------------- faults
def nan_job(argv, at):
    import train
    own, calls = train.pipeline_parallel.Pipeline.forward_backward, itertools.count()

    def forward_backward(self, micro_batches):
        return own(self, micro_batches) * (float("nan") if next(calls) == at else 1)
    train.pipeline_parallel.Pipeline.forward_backward = forward_backward
    try:
        train.main(argv)
    except SystemExit as stopped:
        return stopped.code
    finally:
        train.pipeline_parallel.Pipeline.forward_backward = own


def test_a_loss_of_nan_stops_the_run_and_saves_nothing(pool, flags, tmp_path):
    argv = f"{flags['dense']} --micro_batch_size 6 --checkpoint {tmp_path} --save_every 1 --keep 9".split()
    assert pool.call(nan_job, STEP, world=2, argv=argv, at=2) == [3, 3]
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000001", "step_00000002"]
    assert "error: step 3: loss nan, grad norm" in pool.output
    assert "Traceback" not in pool.output


def clocked_job(argv):
    """Train, and save after each step, with a clock on which a step takes a second and a save a minute."""
    import metrics
    import train
    clock, train_step, save = [0], train.train_step, train.resume.Checkpoints.save

    def step(*arguments):
        clock[0] += 1
        return train_step(*arguments)

    def slow_save(*arguments):
        clock[0] += 60
        save(*arguments)
    with (patch.object(metrics.time, "perf_counter", lambda: clock[0]), patch.object(train, "train_step", step),
          patch.object(train.resume.Checkpoints, "save", slow_save)):
        train.main(argv)


def test_the_time_of_a_save_is_not_that_of_a_step(pool, flags, tmp_path):
    log = tmp_path / "log"
    pool.call(clocked_job, STEP, argv=f"{flags['dense']} --micro_batch_size 6 --steps 3 --checkpoint {tmp_path / 'c'} "
                                      f"--save_every 1 --log_file {log}".split())
    lines = [json.loads(line) for line in lines_of(log)]
    assert len(lines) == 3 and len({line["tokens_per_s"] for line in lines}) == 1
    assert lines[0]["tokens_per_s"] == lines[0]["tokens"]


def told_to_end_job(argv, rank, at):
    """Train, but send one rank SIGTERM in the middle of a step. Every rank must end with the status of a process killed by it."""
    assert told_job(argv, signal.SIGTERM, rank, at) == 143


@pytest.mark.parametrize("more", ["--zero 1 --micro_batch_size 6", pytest.param("--tp 2 --ep 2 --micro_batch_size 6", marks=slow)])
def test_told_to_end_it_saves_and_ends(pool, flags, one_process, tmp_path, more):
    argv = f"{flags['moe']} {more} --checkpoint {tmp_path / 'c'}".split()
    pool.call(told_to_end_job, STEP, world=4, timeout=40, argv=argv, rank=2, at=1)
    assert "stopped by SIGTERM after step 2" in pool.output and "step 3/4" not in pool.output
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step_00000002"]
    assert_goes_on(pool, flags, one_process, tmp_path / "c", tmp_path, *RESUMED[0])


def start(tmp_path, command):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "output", "a") as output:
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=output, start_new_session=True)


def lines_of(log):
    return [line for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []


def wait_until(condition, process, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and process.poll() is None, "it did not get that far"
        time.sleep(0.01)


def ranks_of(process):
    """Return the process ids of torchrun's workers, in the order in which they started."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()
    return sorted(int(pid) for pid in children)


def end(process):
    for pid in ranks_of(process) if process.poll() is None else []:                # torchrun gives each a session of its own
        os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import train
own, calls = train.pipeline_parallel.Pipeline.forward_backward, []

def forward_backward(self, micro_batches):
    calls.append(micro_batches)
    if len(calls) == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return own(self, micro_batches)
train.pipeline_parallel.Pipeline.forward_backward = forward_backward
train.main(sys.argv[2:])
"""


@slow
def test_torchrun_starts_a_killed_job_again_and_passes_a_signal_on(pool, flags, tmp_path):
    log, script, folder = tmp_path / "log", tmp_path / "killed.py", tmp_path / "c"
    script.write_text(KILLED)
    base = f"{flags['dense']} --micro_batch_size 6 --lr_schedule constant"
    words = f"{base} --steps 300 --checkpoint {folder} --save_every 2 --resume --zero 2 --log_file {log}".split()
    process = start(tmp_path, torchrun(2, "--max-restarts", 2, script, step_dir(STEP), *words))
    try:
        wait_until(lambda: len(lines_of(log)) >= 8, process)
        process.terminate()
        process.wait(timeout=60)
    finally:
        end(process)
    output = (tmp_path / "output").read_text()
    assert f"resuming from {folder}/step_00000004" in output
    losses = [json.loads(line)["loss"] for line in lines_of(log)]
    assert f"stopped by SIGTERM after step {len(losses)}" in output, output[-2000:]
    assert max(os.listdir(folder)) == f"step_{len(losses):08d}"
    one = pool.train(STEP, f"{base} --steps {len(losses)}", weights=False)
    assert all(relative(a, b) < 1e-9 for a, b in zip(losses, one.losses, strict=True))


def killed_at_random(pool, flags, tmp_path, draw):
    """Kill a run at a random moment, while it saves after every step, and check that its checkpoints are usable."""
    log, folder = tmp_path / "log", tmp_path / "c"
    more = f"--checkpoint {folder} --save_every 1 --zero {draw.choice([0, 1, 3])} --log_file {log}"
    process = start(tmp_path, torchrun(2, step_dir(STEP) / "train.py", *f"{flags} --micro_batch_size 6 {more}".split()))
    try:
        wait_until(lambda: len(lines_of(log)) >= 2, process)
        time.sleep(draw.random() * 0.4)
        logged = len(lines_of(log))
        os.kill(draw.choice(ranks_of(process)), signal.SIGKILL)
        killed = time.monotonic()
        assert process.wait(timeout=60) == 1
        assert time.monotonic() - killed < 45, "the others waited"
    finally:
        end(process)
    steps = max(int(name[5:]) for name in os.listdir(folder) if re.fullmatch("step_[0-9]{8}", name))
    assert logged - 1 <= steps, "only the last step may be lost"
    again = pool.train(STEP, f"{flags} --micro_batch_size 3 --checkpoint {folder} --resume --steps {steps + 2}", world=2,
                       weights=False)
    assert [line["step"] for line in again.lines] == [steps, steps + 1]
    one = pool.train(STEP, f"{flags} --micro_batch_size 6 --steps {steps + 2}", weights=False)
    assert all(relative(a, b) < 1e-9 for a, b in zip(again.losses, one.losses[steps:]))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.sweep if seed else slow) for seed in range(50)])
def test_killed_at_any_moment_it_can_go_on(pool, flags, tmp_path, seed):
    killed_at_random(pool, f"{flags['dense']} --steps 300 --lr_schedule constant", tmp_path, random.Random(seed))


# ------------------------------------------------------------------------------------- what can go wrong
@pytest.mark.parametrize("more, message", [
    ("--resume", "--resume: requires --checkpoint DIR"),
    ("--checkpoint {here} --save_every 0", "argument --save_every: must be at least 1 and below 100000000, but is 0"),
    ("--checkpoint {here} --keep 0", "argument --keep: must be at least 1 and below 100000000, but is 0"),
    ("--checkpoint /proc/nowhere", "--checkpoint /proc/nowhere: cannot be written to")])
def test_bad_flags_are_refused(pool, flags, tmp_path, more, message):
    assert_refused(pool, STEP, 2, f"{flags['dense']} {more.format(here=tmp_path)}", message)


def mounted_job(argv):
    """Check the flags as if every directory were a mount point."""
    with patch("os.path.ismount", lambda path: True):
        check_job(argv)


def test_a_mount_point_cannot_be_saved_to(pool, flags, tmp_path):
    assert_refused(pool, STEP, 1, f"{flags['dense']} --save {tmp_path / 'model'}", "is a mount point", job=mounted_job)


def test_another_cosine_is_announced(pool, flags, tmp_path):
    """Resume with another --steps: the learning rate jumps, and one line says so."""
    def resumed(name, more):
        folder = shutil.copytree(tmp_path / "saved", tmp_path / name)
        return pool.train(STEP, f"{base} --checkpoint {folder} --resume {more}", weights=False)
    base = f"{flags['dense']} --micro_batch_size 12 --warmup 0"
    first = pool.train(STEP, f"{base} --checkpoint {tmp_path / 'saved'} --steps 3", weights=False)
    notice = ("--steps 6: saved with --steps 3, so the learning rate continues on another cosine; use --steps 3 to stay on "
              "the old one")
    other = resumed("other", "--steps 6")
    assert other.output.splitlines().count(notice) == 1, other.output
    assert other.lines[0]["lr"] > 2 * first.lines[-1]["lr"]
    assert "another cosine" not in resumed("done", "--steps 3").output


def test_the_same_cosine_and_a_constant_rate_need_no_notice(pool, flags, tmp_path):
    for name, before, after in (("same", "--steps 3 --save_every 1 --keep 9", "--steps 3"),
                                ("constant", "--steps 2 --lr_schedule constant", "--steps 3 --lr_schedule constant")):
        base = f"{flags['dense']} --micro_batch_size 12 --checkpoint {tmp_path / name}"
        pool.train(STEP, f"{base} {before}", weights=False)
        shutil.rmtree(tmp_path / name / "step_00000003", ignore_errors=True)
        trained = pool.train(STEP, f"{base} {after} --resume", weights=False)
        assert len(trained.lines) == 1 and "another cosine" not in trained.output


@slow
def test_a_resumed_run_has_a_ledger_and_a_profile_too(pool, flags, saved, tmp_path):
    shutil.copytree(saved(*SAVED[0]), tmp_path / "c")
    argv = (f"{flags['moe']} --micro_batch_size 6 --ep 2 --checkpoint {tmp_path / 'c'} --resume --steps 8 --ledger "
            f"--profile {tmp_path / 'profile'}")
    pool.call(main_job, STEP, world=2, argv=argv.split())
    assert "all_to_all" in pool.output
    assert set(os.listdir(tmp_path / "profile")) == {f"trace_rank{rank}.json" for rank in range(2)}
    pool.call(main_job, STEP, argv=argv.replace("--ep 2", "").split())
    assert "--steps 8: 8 steps are already done; nothing is left to train" in pool.output


def test_a_run_of_its_own_leaves_other_checkpoints_alone(pool, flags, saved, tmp_path):
    shutil.copytree(saved(*SAVED[0]), tmp_path / "c")
    there = sorted(os.listdir(tmp_path / "c"))
    with pytest.raises(Refused) as refused:
        pool.call(main_job, STEP, world=2, argv=f"{flags['moe']} --micro_batch_size 6 --checkpoint {tmp_path / 'c'}".split())
    assert f"already contains {there[-1]}; add --resume to continue from it" in str(refused.value)
    assert sorted(os.listdir(tmp_path / "c")) == there


def test_nothing_to_resume_is_a_beginning(pool, flags, one_process, tmp_path):
    trained = pool.train(STEP, f"{flags['moe']} --micro_batch_size 6 --checkpoint {tmp_path / 'new'} --resume")
    assert "starting from the beginning" in trained.output
    assert_same_run(trained, one_process["moe"], 1e-9)
