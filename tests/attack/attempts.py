"""What a hostile user does, one attempt a function: attempt(draw, folder, house) -> (verdict, what was seen).

`draw` is a random.Random, `folder` an empty directory, `house` makes and keeps what several attempts need. Each attempt knows what
the contract promises for it, and compares numbers and files, not only exit codes.
"""
import resource
import shutil
import signal
import socket
import sys
import threading
import time

import numpy as np
import runs
from runs import CLEAR, ENDLESS, FINE, LOST, SILENT, UNCLEAR, judged, start
from steps import NAMES, ROOT

DATA_FLAGS = {1: dict(lr=("1e-3", "2e-3"), seed=("1", "2"), warmup=("1", "2"), weight_decay=("0", "0.5"), grad_clip=("0", "0.01"),
                      seq_len=("16", "8"), global_batch_size=("4", "8"), steps=("3", "4"), lr_schedule=("constant", "cosine"),
                      dtype=("float32", "float64"), recompute=("none", "full")),
              2: dict(dp_mode=("naive", "bucket"), bucket_mb=("0.001", "0.01")), 3: dict(zero=("1", "3")),
              4: dict(sp=("on", "off")), 7: dict(balance=("bias", "aux"))}
JUNK = ["0", "-1", "nan", "inf", "1e400", "", " ", "2.5", "٣", "x" * 3000, "../..", "/dev/null", "/dev/full", "--lr", "99999999",
        "1_0", "0x10", "None", "ü", "\n", "/", "1e-300"]


def flags_of(draw, step):
    """A flag that changes numbers, and two values of it."""
    table = {name: values for since, some in DATA_FLAGS.items() if since <= step for name, values in some.items()}
    name = draw.choice(sorted(table))
    return name, draw.sample(table[name], 2)


def two_nodes(step, folders, flags):
    """Two torchruns of a rank each, as two machines start them."""
    with socket.socket() as any_free:
        any_free.bind(("127.0.0.1", 0))
        port = any_free.getsockname()[1]
    return [start(step, flags[i], folders[i], ranks=1, launcher=["--nnodes", "2", "--node_rank", str(i), "--master_addr",
                                                                 "127.0.0.1", "--master_port", str(port)]) for i in (0, 1)]


# ------------------------------------------------------------------------------------- ranks that differ
def nodes_with_other_flags(draw, folder, house):
    step = draw.randint(2, 8)
    name, values = flags_of(draw, step)
    what = f"step {step}, two nodes, --{name} {values[0]} and {values[1]}"
    both = two_nodes(step, [folder, folder], [f"{runs.TINY} --{name} {value}" for value in values])
    return judged([run.end(90) for run in both], what, may_pass=False)


def nodes_with_other_data(draw, folder, house):
    step, folders = draw.randint(2, 8), [folder / "a", folder / "b"]
    for i, node in enumerate(folders):
        node.mkdir()
        np.save(node / "tokens.npy", np.random.default_rng(i).integers(0, 256, 3000))
    both = two_nodes(step, folders, [f"{runs.TINY} --dataset tokens.npy"] * 2)
    return judged([run.end(90) for run in both], f"step {step}, two nodes, each with a tokens.npy of its own", may_pass=False)


def a_node_that_dies(draw, folder, house):
    step, victim, late = draw.randint(2, 8), draw.randint(0, 1), draw.uniform(0, 5)
    both = two_nodes(step, [folder, folder], [f"{runs.TINY} --steps 100000"] * 2)
    both[0].process.stdout.readline()                     # before they have met, a node that is gone is one that is late
    time.sleep(late)
    target = draw.choice(["all", "a rank"])
    pids = both[victim].workers() + [both[victim].process.pid] * (target == "all")
    for pid in pids:
        runs.kill(pid, signal.SIGKILL)
    ends = [run.end(90) for run in both]
    for run in both:
        run.sweep()
    what = f"step {step}, two nodes, {target} of node {victim} killed after {late:.1f} s"
    if any(end.status is None for end in ends):
        return ENDLESS, what
    return (SILENT, what) if all(end.status == 0 for end in ends) else (CLEAR, what)


# ------------------------------------------------------------------------------------- two runs that share
def two_runs_share(draw, folder, house):
    step = draw.choice([1, 4, 8])
    what = draw.choice(["save", "log_file", "save and log_file"] + ["checkpoint"] * (step == 8))
    shared = " ".join(f"--{name} {folder / name}" for name in what.split(" and "))
    both = []
    for seed in (1, 2):
        both.append(start(step, f"{runs.TINY} --seed {seed} {shared}", folder))
        time.sleep(draw.choice([0, 0, 1]))
    ends = [run.end(120) for run in both]
    said = f"step {step}, two runs share --{what}"
    verdict = judged(ends, said)
    if verdict[0] in (FINE, CLEAR) and "save" in what and not any(
            runs.same_model(place, house.model(step, seed)) for place in [folder / "save"] for seed in (1, 2)):
        return LOST, f"{said}: no whole model of either is there"
    if verdict[0] in (FINE, CLEAR) and "log_file" in what:
        losses = runs.losses(folder / "log_file")
        if not any(runs.same(losses, house.losses(step, f"{runs.TINY} --seed {seed}")) for seed in (1, 2)):
            return LOST, f"{said}: the log is neither's"
    return verdict


def a_folder_of_others(draw, folder, house):
    step, save = draw.randint(1, 8), folder / "save"
    save.mkdir()
    names = draw.sample(["notes.txt", "model.pt", "config.yaml", "tokenizer.json", ".hidden", "sub/x.bin", "README.md"], 3)
    for name in names:
        (save / name).parent.mkdir(exist_ok=True)
        (save / name).write_text(name)
    end = start(step, f"{runs.TINY} --save {save}", folder, ranks=1 if step == 1 else 2).end(120)
    what = f"step {step}, --save into a folder with {names}"
    if any(not (save / name).exists() or (save / name).read_text() != name for name in names):
        return LOST, what
    return judged([end], what, right=runs.same_model(save, house.model(step, 42)))


# ------------------------------------------------------------------------------------- outputs
def an_output_that_ends(draw, folder, house):
    step, lines = draw.choice([1, 3, 8]), draw.randint(0, 8)
    more = draw.choice(["", "--ledger", "--profile p"] if step > 1 else ["", "--profile p"])
    more += f" --checkpoint {folder / 'checkpoint'}" if step == 8 and draw.random() < .5 else ""
    full, unbuffered = draw.random() < .4, draw.choice(["", "1"])
    flags = f"{runs.TINY} {more} --save {folder / 'save'} --log_file {folder / 'log'}"
    run = start(step, flags, folder, ranks=1 if step == 1 else 2, out=open("/dev/full", "w") if full else None,
                PYTHONUNBUFFERED=unbuffered)
    if not full:
        for _ in range(lines):
            run.process.stdout.readline()
        run.process.stdout.close()
    status = run.wait(120)
    what = f"step {step} {more}, output {'full' if full else f'closed after {lines} lines'}, unbuffered: {bool(unbuffered)}"
    if status is None:
        return ENDLESS, what
    if not runs.same_model(folder / "save", house.model(step, 42)) or len(runs.losses(folder / "log")) != 3:
        return LOST, f"{what}: status {status}, no whole model or log"
    return FINE, what


def a_full_disk(draw, folder, house):
    step, size = draw.choice([1, 5, 8]), draw.choice([1, 1000, 30_000, 100_000, 300_000])
    shutil.copytree(house.model(step, 1), folder / "save")
    more = f"--log_file {folder / 'log'}" * draw.randint(0, 1)
    more += f" --checkpoint {folder / 'checkpoint'}" * (step == 8)
    end = start(step, f"{runs.TINY} --save {folder / 'save'} {more}", folder,
                before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))).end(120)
    what = f"step {step} {more}, no file may be longer than {size} bytes"
    if not any(runs.same_model(folder / "save", house.model(step, seed)) for seed in (1, 42)):
        return LOST, what
    return judged([end], what, by_itself=step < 8)


# ------------------------------------------------------------------------------------- checkpoints and models
def resumed_with_another_flag(draw, folder, house):
    shutil.copytree(house.checkpoint(), folder / "checkpoint")
    name, values = flags_of(draw, 8)
    layout = draw.choice([(1, ""), (2, "--tp 2"), (2, "--zero 3"), (2, "--pp 2"), (2, "--cp 2")])
    value = draw.choice(values)
    flags = f"{runs.TINY} --steps 6 --{name} {value}"
    end = start(8, f"{flags} {layout[1]} --resume --checkpoint {folder / 'checkpoint'} --log_file {folder / 'log'}", folder,
                ranks=layout[0]).end(120)
    what = f"resumed with --{name} {value} {layout[1]}"
    usual = runs.same(runs.losses(folder / "log"), house.losses(8, f"{runs.TINY} --steps 6")[4:])
    return judged([end], what, right=usual or name in end.text.replace("learning rate", "lr"))


def a_damaged_checkpoint(draw, folder, house):
    shutil.copytree(house.checkpoint(), folder / "checkpoint")
    files = [path for path in (folder / "checkpoint").rglob("*") if path.is_file() and path.name != ".lock"]
    file = draw.choice(sorted(files))
    how = runs.damage(draw, file)
    flags = f"{runs.TINY} --steps 6 --resume --checkpoint {folder / 'checkpoint'} --log_file {folder / 'log'}"
    end = start(8, flags, folder).end(120)
    losses = runs.losses(folder / "log")
    right = bool(losses) and runs.same(losses, house.losses(8, f"{runs.TINY} --steps 6")[-len(losses):])
    return judged([end], f"{file.relative_to(folder)} {how}, resumed", right=right)


def a_damaged_model(draw, folder, house):
    step = draw.randint(1, 8)
    shutil.copytree(house.model(step, 1), folder / "model")
    file = draw.choice(sorted((folder / "model").iterdir()))
    how = runs.damage(draw, file)
    flags = f"{runs.TINY} --init_from {folder / 'model'} --model {folder / 'model'} --log_file {folder / 'log'}"
    end = start(step, flags, folder).end(120)
    right = runs.same(runs.losses(folder / "log"), house.losses(step, f"{runs.TINY} --init_from {house.model(step, 1)} "
                                                                      f"--model {house.model(step, 1)}"))
    harmless = how.startswith("byte")                     # another number is another model: the format has no digests
    return judged([end], f"step {step}, --init_from with {file.name} {how}", right=right or harmless)


# ------------------------------------------------------------------------------------- flags, environment, place
def a_value_that_is_none(draw, folder, house):
    step, value = draw.randint(1, 8), draw.choice(JUNK)
    name = draw.choice([name for name in runs.flags(step) if name != "steps"])
    end = start(step, [*runs.TINY.split(), f"--{name}={value}"], folder, ranks=draw.choice([1, 1, 2]) if step > 1 else 1).end(60)
    return judged([end], f"step {step}, --{name}={value[:20]!r}")


def a_layout_that_may_not_go(draw, folder, house):
    step, ranks = draw.randint(2, 8), draw.randint(2, 4)
    degrees = [name for since, name in ((2, "dp"), (4, "tp"), (5, "cp"), (6, "pp"), (7, "ep")) if since <= step]
    flags = " ".join(f"--{name} {draw.choice([1, 2, 2, 3, 4])}" for name in draw.sample(degrees, min(2, len(degrees))))
    model = draw.choice(["", "--model tiny-moe"]) if step >= 7 else ""
    plain = f"{runs.TINY} {model}"
    end = start(step, f"{plain} {flags} --log_file {folder / 'log'}", folder, ranks=ranks).end(120)
    right = end.status != 0 or runs.same(runs.losses(folder / "log"), house.losses(step, plain))
    return judged([end], f"step {step}, {ranks} ranks, {model} {flags}", right=right)


def a_strange_environment(draw, folder, house):
    step = draw.randint(1, 8)
    name = draw.choice(["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS",
                        "PYTHONOPTIMIZE", "TORCHELASTIC_RESTART_COUNT", "CUDA_VISIBLE_DEVICES", "HOME", "TMPDIR", "LANG",
                        "PYTHONIOENCODING", "PYTHONHASHSEED", "COLUMNS"])
    value = draw.choice(["", "abc", "-1", "0", "1", "3", "99999", "/nowhere"])
    ranks = draw.choice([1, 2]) if step > 1 else 1
    may_wait = name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    run = start(step, f"{runs.TINY} --log_file {folder / 'log'}", folder, ranks=ranks, **{name: value})
    end = run.end(40 if may_wait else 120)
    right = end.status != 0 or runs.same(runs.losses(folder / "log"), house.losses(step, runs.TINY))
    if end.status is None and may_wait:
        return CLEAR, f"step {step}, {name}={value!r}: waits for ranks that were promised"
    if end.status and name not in ("HOME", "TMPDIR") and (value in end.text or "Fatal Python error" in end.text):
        return CLEAR, f"step {step}, {name}={value!r}: Python's, torch's or the launcher's own refusal"
    return judged([end], f"step {step}, {ranks} ranks, {name}={value!r}", right=right)


def from_a_strange_place(draw, folder, house):
    step = draw.randint(1, 8)
    place = folder / draw.choice(["a b", "ü", "-x", "'quoted'", "x" * 100, "train.py", "[0-9]*"])
    shutil.copytree(ROOT / NAMES[step - 1], place)
    if draw.random() < .3:
        (folder / "link").symlink_to(place)
        place = folder / "link"
    options = draw.choice([[], ["-O"], ["-OO"], ["-B"], ["-s"]])
    end = start(step, f"{runs.TINY} --log_file {folder / 'log'}", folder, script=place / "train.py", options=options).end(120)
    right = runs.same(runs.losses(folder / "log"), house.losses(step, runs.TINY))
    return judged([end], f"step {step} from {place.name[:20]!r}, python {options}", right=right)


# ------------------------------------------------------------------------------------- killed, told to end
def killed(draw, folder, house):
    step, late = draw.randint(2, 8), draw.uniform(3, 12)
    shutil.copytree(house.model(step, 1), folder / "save")
    more = f" --checkpoint {folder / 'checkpoint'} --save_every 1" * (step == 8)
    run = start(step, f"{runs.TINY} --steps {draw.choice([3, 100000])} --save {folder / 'save'}{more}", folder, ranks=2)
    time.sleep(late)
    while not (victims := run.workers()) and run.process.poll() is None:           # a busy machine has not come so far
        time.sleep(0.1)
    if victims:
        runs.kill(draw.choice(victims), signal.SIGKILL)
    end = run.end(90)
    left = run.sweep()
    what = f"step {step}, a rank killed after {late:.1f} s"
    if left:
        return ENDLESS, f"{what}: processes are left"
    three = house.model(step, 42)
    if not any(runs.same_model(folder / "save", model) for model in (three, house.model(step, 1))):
        return LOST, what
    return judged([end], what, may_pass=not victims or runs.same_model(folder / "save", three), torchrun_says=True,
                  by_itself=True)


def told_to_end(draw, folder, house):
    step, late = draw.choice([1, 2, 8]), draw.uniform(0, 9)
    number = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    shutil.copytree(house.model(step, 1), folder / "save")
    more = f" --checkpoint {folder / 'checkpoint'}" * (step == 8)
    run = start(step, f"{runs.TINY} --steps 100000 --save {folder / 'save'}{more}", folder, ranks=1 if step == 1 else 2)
    time.sleep(late)
    runs.kill(run.process.pid, number)
    again = threading.Timer(20, runs.kill, (run.process.pid, number))
    if number == signal.SIGINT and not run.workers():     # an import of torch's may swallow a Ctrl-C: a user gives another
        again.start()
    end = run.end(90)
    again.cancel()
    left = run.sweep()
    what = f"step {step}, {signal.Signals(number).name} after {late:.1f} s"
    if end.status is None or left:
        return ENDLESS, what
    return (CLEAR, what) if runs.same_model(folder / "save", house.model(step, 1)) else (LOST, what)


def stopped_for_a_while(draw, folder, house):
    step = draw.randint(2, 8)
    run = start(step, f"{runs.TINY} --steps 3 --log_file {folder / 'log'}", folder, ranks=2)
    time.sleep(draw.uniform(2, 7))
    for pid in run.workers()[:1]:
        runs.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(1, 4))
        runs.kill(pid, signal.SIGCONT)
    end = run.end(120)
    return judged([end], f"step {step}, a rank stopped for a while", right=runs.same(runs.losses(folder / "log"),
                                                                                     house.losses(step, runs.TINY)))


# ------------------------------------------------------------------------------------- tools
TOOLS = ["tools/plot.py", "tools/diff.py", "tools/exercise.py", "tools/simulate", "planner", "tools/extend.py", "tools/schedule.py"]
WRITERS = ["tools/carry.py", "tools/readme.py", "tools/break_it.py", "tools/sweep.py"]         # of a word that is none they say so
WORDS = ["8", "2", "check", "hint", "--out", "--gpu", "h100", "--model", "tiny", "--json", "--pp", "step01_single_gpu"]


def a_tool_misused(draw, folder, house):
    (folder / "bad.jsonl").write_text(draw.choice(["", "{", "[]\n", '{"step": 0}\n', '{"step": 0, "loss": "x"}\n', "\0\n"]))
    tool = draw.choice(TOOLS + WRITERS)
    words = [draw.choice([*JUNK, *WORDS, str(folder / "bad.jsonl"), str(folder / "out.json")]) for _ in range(draw.randint(1, 4))]
    if tool in WRITERS:
        words = ["--no-such-flag", *words]
    before = runs.digest_of_repository()
    end = runs.Run([sys.executable, tool, *words], ROOT).end(120)
    what = f"{tool} {' '.join(word[:20] for word in words)!r}"
    if runs.digest_of_repository() != before:
        return LOST, f"{what}: the repository was changed"
    if "Traceback" in end.text or end.status is None:
        return (ENDLESS if end.status is None else UNCLEAR), f"{what}: {end.text[-300:]}"
    return (CLEAR if end.status else FINE), what


ATTEMPTS = [nodes_with_other_flags, nodes_with_other_data, a_node_that_dies, two_runs_share, a_folder_of_others,
            an_output_that_ends, a_full_disk, resumed_with_another_flag, a_damaged_checkpoint, a_damaged_model,
            a_value_that_is_none, a_layout_that_may_not_go, a_strange_environment, from_a_strange_place, killed,
            told_to_end, stopped_for_a_while, a_tool_misused]
