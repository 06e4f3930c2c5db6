"""Asynchronous checkpoints: files hold the state at the time of the save, though training goes on; a kill costs no complete one.

    python exercises/extend.py async_checkpoint
    EXERCISE=8=exercise/async_checkpoint PYTHONPATH=tools:tests/support:tests \\
        python exercises/extensions/async_checkpoint.py                           # how long training is held up
"""
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import cases
import pytest
import torch
from harness import JobFailed, assert_same_tensors, relative
from jobs import assert_refused, main_job
from layouts import Layout
from observe import check
from safetensors.torch import load_file
from steps import PYTHONPATH, ROOT, STEPS, run, step_dir

STEP = STEPS[-1]
AS_IT_IS = ROOT / STEP                                    # the step without the patch
LAYOUTS = [(1, "dense-2", ""), (2, "dense-2", "--zero 3"), (4, "dense-2", "--tp 2 --pp 2"), (4, "top2-2", "--ep 2 --cp 2 --zero 2")]
IDS = [f"{world} {shape} {more}" for world, shape, more in LAYOUTS]


def flags(pool, shape, more=""):
    made = pool.once(("async", shape), lambda: cases.make(pool.folder() / f"async-{shape}", **cases.shape(shape)))
    return f"{made} --dtype float64 --micro_batch_size 3 {more}"


def folders(directory):
    return sorted(directory.glob("step_????????"))


def assert_whole(folder):
    index = json.loads((folder / "index.json").read_text())
    for name, digest in index["digests"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, f"{folder / name} is not whole"


def states(folder):
    """Return {name: whole tensor} of the weights and both of Adam's moments, from all boxes."""
    boxes, ends, tensors = [], {}, {}
    for file in folder.glob("*.safetensors"):
        for key, box in load_file(file).items():
            name, begin = key.split("[")[0], json.loads(key[key.index("["):])
            boxes.append((name, begin, box))
            last = [b + n for b, n in zip(begin, box.shape)]
            ends[name] = [max(pair) for pair in zip(ends.get(name, last), last)]
    for name, begin, box in boxes:
        whole = tensors.setdefault(name, torch.full(ends[name], torch.nan, dtype=torch.float64))
        whole[tuple(slice(b, b + n) for b, n in zip(begin, box.shape))] = box
    return tensors


# ------------------------------------------------------------------------------------- jobs
@contextlib.contextmanager
def late(more=0):
    """Delay the start of each file until the weights have changed (by one update plus `more`), or until the main thread waits.
    Yield the list of how many updates late each file was."""
    from async_save import Snapshot
    from optimizer import Optimizer
    from resume import Checkpoints
    update, publish, write_file = Optimizer.step, Checkpoints.publish, Snapshot.write_file
    now = SimpleNamespace(updates=0, waited_for=False)
    late_by = []

    def counted(self, lr):
        update(self, lr)
        now.updates += 1

    def announced(self):
        now.waited_for = self.in_flight is not None
        publish(self)
        now.waited_for = False

    def begun_late(self, file):
        steps = int(file.parent.stem[5:])
        while now.updates <= steps + more and not now.waited_for:
            time.sleep(0.001)
        late_by.append(now.updates - steps)
        return write_file(self, file)
    with (patch.object(Optimizer, "step", counted), patch.object(Checkpoints, "publish", announced),
          patch.object(Snapshot, "write_file", begun_late)):
        yield late_by


def late_job(argv, job=main_job, forget=False, uneven=False, **more):
    import async_save

    def no_copy(self, key, box):
        self.tensors[key] = box
    with late(uneven * int(os.environ["RANK"])) as late_by:
        with patch.object(async_save.Snapshot, "copy", no_copy) if forget else contextlib.nullcontext():
            job(argv, **more)
    return late_by


def silent_job(argv):
    """Return for each file whether a thread other than the main one writes it. Return also the collectives that these threads call,
    of which there should be none, and how many operations they run."""
    import async_save
    import train
    from operations import Recorder
    from watch import Watch
    write_file, recorder, threads, operations = async_save.Snapshot.write_file, Recorder(), [], []

    def note(op, args, kwargs):
        operations.append(str(op))
        recorder.note(op, args)

    def watched(self, file):
        threads.append(threading.current_thread() is not threading.main_thread())
        with Watch(note):
            torch.zeros(1)                                # an operation that must be seen
            return write_file(self, file)
    with patch.object(async_save.Snapshot, "write_file", watched):
        train.main(argv)
    return threads, recorder.operations, len(operations)


GONE = """
import os, sys
import async_save, train
write_file = async_save.Snapshot.write_file
gone = os.environ["RANK"] == "1"
async_save.Snapshot.write_file = lambda self, file: write_file(self, file.parent / "gone" / file.name if gone else file)
train.main(sys.argv[1:])
"""


def memory_job(argv):
    """Return for each save: the bytes of the copy, whether it reuses the memory of the one before, the peak of what saving takes
    besides, the bytes of the state; and the checkpoints that exist afterwards."""
    import train
    from resume import Checkpoints
    from watch import Storages
    seen, save = [], Checkpoints.save

    def watched(self, steps):
        memory, state, copies = Storages(), self.state(), self.snapshot.tensors
        for box in state.values():                        # what is there already
            memory.note(box, "optimizer states")
        for tensor in copies.values():
            memory.note(tensor, "rest")
        there = len(memory.events)
        before = [copy.data_ptr() for copy in copies.values()]
        with memory:
            save(self, steps)
        size = sum(copy.untyped_storage().nbytes() for copy in copies.values())
        alive = most = 0
        for _, _, change in memory.events[there:]:
            alive += change
            most = max(most, alive)
        again = before == [copy.data_ptr() for copy in copies.values()]
        kept = sorted(path.name for path in Path(self.args.checkpoint).glob("step_????????"))
        seen.append((size, again, most - (0 if again else size), sum(box.nbytes for box in state.values()), kept))
    with patch.object(Checkpoints, "save", watched):
        train.main(argv)
    return seen


MOMENTS = {"train": 8, "copy": 100, "write": 4, "flush": 4, "meet": 40, "rename": 3, "delete": 2, "make": 4}  # the highest number


def killed_job(argv, rank, moment, number, after, noted):
    """Kill one rank right before or after the given call of the kind `moment`, in whichever thread makes it."""
    import async_save
    import train
    calls, write = itertools.count(1), async_save.Snapshot.write
    owner, name = {"train": (train.pipeline_parallel.Pipeline, "forward_backward"), "copy": (async_save.Snapshot, "copy"),
                   "write": (async_save, "save_file"),
                   "flush": (os, "fsync"), "meet": (torch.distributed, "all_gather_object"), "rename": (os, "rename"),
                   "delete": (shutil, "rmtree"), "make": (os, "mkdir")}[moment]
    function = getattr(owner, name)

    def counted(*arguments, **named):
        die = int(os.environ["RANK"]) == rank and next(calls) == number
        if die and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return function(*arguments, **named)
        finally:                                          # also when another rank has made the folder first
            if die:
                os.kill(os.getpid(), signal.SIGKILL)

    def noting(self, state, file):
        with open(noted, "a") as begun:
            begun.write(file.parent.stem[5:] + "\n")
        return write(self, state, file)
    with patch.object(owner, name, counted), patch.object(async_save.Snapshot, "write", noting):
        train.main(argv)


# ------------------------------------------------------------------------------------- nothing else changes
@pytest.mark.parametrize("world, shape, more", LAYOUTS[1:], ids=IDS[1:])
def test_trains_as_one_process_while_it_saves(pool, tmp_path, world, shape, more):
    """Check losses, norms and weights; what every rank sends; and that all ranks' operations meet."""
    saving = f"--checkpoint {tmp_path / 'c'} --save_every 1 --async_save"
    more += " --sp on" if shape.startswith("dense") else " --balance bias"
    check(pool, Layout(STEP, world, shape, "adamw", f"--dtype float64 --recompute none --micro_batch_size 3 {more} {saving}"))
    assert [path.name for path in folders(tmp_path / "c")] == ["step_00000003", "step_00000004"]


def test_the_thread_sends_nothing(pool, tmp_path):
    for threads, sent, operations in pool.call(silent_job, STEP, world=2, argv=flags(
            pool, "dense-2", f"--zero 1 --checkpoint {tmp_path} --save_every 1 --async_save").split()):
        assert threads == 4 * [True] and sent == [] and operations > 0


def test_ranks_whose_threads_end_in_different_steps_publish_in_the_same(pool, tmp_path):
    argv = flags(pool, "dense-2", f"--zero 1 --steps 8 --checkpoint {tmp_path} --save_every 4 --async_save").split()
    assert pool.call(late_job, STEP, world=2, timeout=60, argv=argv, uneven=True) == [[1, 0], [2, 0]]
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000004", "step_00000008"]


# ------------------------------------------------------------------------------------- what is written
@pytest.fixture(scope="module")
def at_once(pool):
    """Return a function that makes the checkpoints after each of four steps, as the step without the patch saves them, on first
    use."""
    def make(world, shape, more):
        folder = pool.folder() / f"async at once {world} {shape} {more}"
        if not folder.exists():
            argv = [*flags(pool, shape, f"{more} --save_every 1 --keep 9 --checkpoint").split(), str(folder)]
            pool.call(main_job, AS_IT_IS, world=world, argv=argv)
        return folder
    return make


def contents(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("world, shape, more", LAYOUTS, ids=IDS)
def test_the_files_are_those_of_the_synchronous_save_to_the_byte(pool, at_once, tmp_path, world, shape, more):
    argv = flags(pool, shape, f"{more} --save_every 1 --keep 9 --checkpoint {tmp_path} --async_save").split()
    assert pool.call(late_job, STEP, world=world, argv=argv) == world * [[1, 1, 1, 0]], "training had not gone on"
    written, expected = contents(tmp_path), contents(at_once(world, shape, more))
    assert written.keys() == expected.keys() and len(written) == 4 * (world + 1) + 1               # and the lock
    assert all(written[name] == expected[name] for name in expected)


def test_without_the_copy_it_would_be_seen(pool, at_once, tmp_path):
    argv = flags(pool, "dense-2", f"--save_every 1 --keep 9 --checkpoint {tmp_path} --async_save").split()
    pool.call(late_job, STEP, argv=argv, forget=True)
    written, expected = contents(tmp_path), contents(at_once(*LAYOUTS[0]))
    assert [name for name in sorted(expected) if name.endswith("s") and written[name] != expected[name]] == [
        f"step_0000000{step}/rank_00000.safetensors" for step in (1, 2, 3)]
    for folder in folders(tmp_path):                      # and no digest would tell
        assert_whole(folder)


# ------------------------------------------------------------------------------------- going on
@pytest.mark.parametrize("first, second", [(1, 2), (3, 3)])
def test_a_resumed_run_is_the_run_that_was_not_stopped(pool, at_once, tmp_path, first, second):
    world, shape, more = LAYOUTS[first]
    base = f"--checkpoint {tmp_path} --save_every 2 --async_save"
    whole = pool.reference(STEP, flags(pool, shape))
    pool.train(STEP, flags(pool, shape, f"{more} {base}"), world=world, weights=False)
    shutil.rmtree(tmp_path / "step_00000004")
    world, _, more = LAYOUTS[second]
    again = pool.train(STEP, flags(pool, shape, f"{more} {base} --resume"), world=world)
    assert [line["step"] for line in again.lines] == [2, 3]
    for ours, theirs in zip(again.losses + again.grad_norms, whole.losses[2:] + whole.grad_norms[2:]):
        assert relative(ours, theirs) < 1e-9
    assert_same_tensors(again.weights, whole.weights, 1e-9)
    assert_same_tensors(states(tmp_path / "step_00000004"), states(at_once(1, shape, "") / "step_00000004"), 1e-9)


def test_killed_at_random_moments_nothing_is_lost_but_the_save_under_way(pool, tmp_path):
    """Kill one run with SIGKILL twelve times, and resume it under another layout each time: at its end it must equal the run that
    nobody killed."""
    draw, log, newest = random.Random(8), tmp_path / "log", 0
    layouts = itertools.cycle([(1, ""), (2, "--zero 3"), (2, "--tp 2"), (1, ""), (2, "--pp 2")])
    base = flags(pool, "dense-2", f"--steps 80 --lr_schedule constant --checkpoint {tmp_path / 'c'} --save_every 2 --async_save")
    moments = [*MOMENTS, *draw.sample(list(MOMENTS), 4)]
    draw.shuffle(moments)
    for attempt, (moment, (world, more)) in enumerate(zip(moments, layouts)):
        kill = dict(rank=draw.randrange(world) if moment in ("train", "copy", "write", "flush", "meet") else 0, moment=moment,
                    number=draw.randint(1, MOMENTS[moment]), after=draw.random() < 0.5, noted=str(tmp_path / f"noted {attempt}"))
        with pytest.raises(JobFailed, match="the process died"):
            pool.call(killed_job, STEP, world=world, argv=f"{base} --resume {more} --log_file {log}".split(), **kill)
        noted = Path(kill["noted"])
        begun = sorted({newest, *map(int, noted.read_text().split() if noted.exists() else ())})
        there = folders(tmp_path / "c")
        newest = int(there[-1].name[5:]) if there else 0
        assert newest in begun[-2:], f"{kill}: {begun} were begun, {newest} is there"
        for folder in there:
            assert_whole(folder)
    assert 4 < newest < 70
    base = base.replace("--steps 80", f"--steps {newest + 4}")
    pool.call(main_job, STEP, world=2, argv=f"{base} --resume --zero 2 --log_file {log}".split())
    one = flags(pool, "dense-2", f"--steps {newest + 4} --lr_schedule constant --checkpoint {tmp_path / 'one'}")
    whole = pool.train(AS_IT_IS, one, weights=False)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(newest + 4))
    assert all(relative(line["loss"], loss) < 1e-9 for line, loss in zip(lines, whole.losses))
    last = f"step_{newest + 4:08d}"
    assert_same_tensors(states(tmp_path / "c" / last), states(tmp_path / "one" / last), 1e-9)


# ------------------------------------------------------------------------------------- the end of a run
# Import jobs of other tests where they are run: a worker that replaces a killed one imports everything above.
def test_told_to_end_it_waits_for_what_it_writes(pool, tmp_path):
    from test_step08 import told_to_end_job
    argv = flags(pool, "dense-2", f"--checkpoint {tmp_path} --save_every 1 --async_save").split()
    pool.call(late_job, STEP, world=2, argv=argv, job=told_to_end_job, rank=1, at=1)
    assert "stopped by SIGTERM after step 2" in pool.output and "step 3/4" not in pool.output
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000001", "step_00000002"]


def test_a_loss_of_nan_does_not_cost_the_checkpoint_under_way(pool, tmp_path):
    from test_step08 import nan_job
    argv = flags(pool, "dense-2", f"--checkpoint {tmp_path} --save_every 2 --async_save").split()
    pool.call(late_job, STEP, world=2, argv=argv, job=nan_job, at=2)
    assert "error: step 3: loss nan" in pool.output and pool.output.count("error: ") == 1 and "Traceback" not in pool.output
    assert "stopping without saving" in pool.output
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000002"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk_ends_the_run_in_a_line(pool, tmp_path, world):
    from test_nothing_lost import disk_full_job, refused
    base = flags(pool, "dense-2", f"--checkpoint {tmp_path} --async_save --save_every 1")
    pool.call(main_job, STEP, world=world, argv=f"{base} --steps 2".split())
    line = refused(pool, STEP, f"{base} --resume", disk_full_job, world=world, bytes=100_000)
    assert "cannot be written (" in line and "File too large" in line
    assert "available checkpoints: step_00000001, step_00000002" in line
    assert [path.name for path in folders(tmp_path)] == ["step_00000001", "step_00000002"]
    assert_whole(tmp_path / "step_00000002")


def test_a_folder_that_is_gone_on_one_rank_ends_all_in_a_line(pool, tmp_path):
    """Use separate processes: the pool's live on after a failure, and so does whoever waits for one of them."""
    (tmp_path / "gone.py").write_text(GONE)
    argv = flags(pool, "dense-2", f"--checkpoint {tmp_path / 'c'} --async_save --save_every 2").split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", tmp_path / "gone.py"]
    status, output = run(["env", f"PYTHONPATH={step_dir(STEP)}", *torchrun, *argv], tmp_path, timeout=120)
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 1 and len(said) == 1 and "failed in" not in output, output
    assert output.count("Traceback (most recent call last)") == 1, output          # torchrun's own, which is always there
    assert said[0].startswith(f"error: rank 1: --checkpoint {tmp_path / 'c'}: ")
    assert "cannot be written (" in said[0] and "No such file" in said[0]
    assert folders(tmp_path / "c") == []


# ------------------------------------------------------------------------------------- memory, --keep, flags
def test_in_the_hosts_memory_is_one_copy_of_what_a_rank_writes(pool, tmp_path):
    argv = flags(pool, "dense-2", f"--zero 3 --checkpoint {tmp_path} --save_every 1 --keep 1 --async_save").split()
    for rank, saves in enumerate(pool.call(memory_job, STEP, world=2, argv=argv)):
        file = (tmp_path / "step_00000004" / f"rank_{rank:05d}.safetensors").read_bytes()
        tensors = len(file) - 8 - int.from_bytes(file[:8], "little")
        assert [copy for copy, *_ in saves] == 4 * [tensors]
        assert [again for _, again, *_ in saves] == [False, True, True, True]
        # as in the synchronous save: it checks one box at a time, and exchanges keys
        assert all(0 < most < state / 8 for *_, most, state, _ in saves), saves
        assert all(len(kept) <= 1 for *_, kept in saves)
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000004"]


def test_without_a_directory_it_is_refused(pool):
    assert_refused(pool, STEP, 2, "--async_save", "--async_save: requires --checkpoint DIR, the directory to save to")


# ------------------------------------------------------------------------------------- how long training is held up
SHAPE = dict(model_type="llama", vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=8,
             num_attention_heads=8, num_key_value_heads=4, head_dim=32, rms_norm_eps=1e-5, rope_theta=500000.0)
WAYS, EVERY, ROUNDS = ("none", "synchronous", "asynchronous"), 6, 7


def bench_job(argv):
    """Change the way of saving every six steps. Return {way: [(seconds the loop waits for checkpoints, seconds of six steps)]}."""
    import train
    from resume import Checkpoints
    save_if_due, seconds, begun = Checkpoints.save_if_due, {way: [] for way in WAYS}, []

    def timed(self, step):
        turn, at = divmod(step + 1, EVERY)                # a turn begins with the save
        way, start = WAYS[turn % 3], time.perf_counter()
        if at == 0 or not begun:
            seconds[WAYS[(turn - 1) % 3]].append((self.waited, start - begun.pop())) if begun else None
            self.waited = 0
            begun.append(start)
        self.args.async_save, self.args.save_every = way == "asynchronous", EVERY if way != "none" else 10**6
        told = save_if_due(self, step)
        self.waited += time.perf_counter() - start
        return told
    with patch.object(Checkpoints, "save_if_due", timed):
        train.main(argv)
    return seconds


def main():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        argv = f"--model {folder} --seq_len 128 --global_batch_size 2 --steps {EVERY * 3 * (ROUNDS + 1)} --checkpoint {folder}/c"
        code = f"import json; from async_checkpoint import bench_job; print('\\nresult', json.dumps(bench_job({argv.split()})))"
        environment = os.pathsep.join([str(step_dir(STEP)), *PYTHONPATH])
        status, output = run(["env", f"PYTHONPATH={environment}", sys.executable, "-c", code], folder, 900)
        assert status == 0, output
        size = sum(path.stat().st_size for path in Path(folder, "c").glob("step_*/*.safetensors")) / 2
    seconds = {way: turns[-ROUNDS:] for way, turns in json.loads(output.split("result ")[1]).items()}
    waited = {way: [turn[0] for turn in turns] for way, turns in seconds.items()}
    whole = {way: [turn[1] for turn in turns] for way, turns in seconds.items()}
    more = {way: [with_save - without for with_save, without in zip(whole[way], whole["none"])] for way in WAYS}
    print(f"a checkpoint of {size / 1e6:.0f} MB; medians of {ROUNDS} turns of {EVERY} steps")
    for way in WAYS:
        print(f"{way:>14}: the loop waits {statistics.median(waited[way]):.3f} s, "
              f"all steps take {statistics.median(whole[way]):.2f} s")
    for what, times in (("the loop waits", waited), ("all that a save costs, slower steps too", more)):
        ratios = [thread / at_once for thread, at_once in zip(times["asynchronous"], times["synchronous"])]
        print(f"{what}: asynchronous / synchronous {statistics.median(ratios):.3f} (of {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
