"""Report what the steps do on this machine's GPUs: what is equal, what fails, and how fast it is.

    python tools/gpu.py                       # or make gpu: every part, within 20 minutes, on 1, 2, 4 or 8 of the GPUs
    python tools/gpu.py --only step04         # again, but only the commands and tests that have this in their names
    python tools/gpu.py --device cpu          # the same parts on two processes over gloo, with tiny sizes, to see that they work

It has four parts, each with its own time limit, and a part that fails does not end the others:

    machine         GPUs, driver, versions, links, and the speed of a large matrix product
    collectives     bus bandwidth by message size (dev/bench/bench_collectives.py)
    steps           each step's trainer, in the largest size of LADDER that fits: tokens/s, MFU, memory beside tools/simulate
    tests           tests/test_gpus.py on these GPUs, in a few training steps: is every layout equal to one process?

The report is out/gpu/report.md, ready to be posted in an issue, and out/gpu/report.json. Both are rewritten after every part.
"""
import argparse
import collections
import datetime
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from steps import NAMES, ROOT, clean_environment, end, step_dir

# shares of the time that the parts may take; the tests come last and get what is left
PARTS = {"machine": 0.06, "collectives": 0.1, "steps": 0.45, "tests": 1}
ROW = 0.12                                                # the same for one trainer
AT_END = 20                                               # seconds to end processes and to write the report

#         model, layers (None: all of them); the first whose training step on one GPU fits into ROOM is taken
LADDER = {"dense": [("llama-1b", None), ("qwen3-0.6b", None), ("qwen3-0.6b", 14), ("qwen3-0.6b", 8)],
          "experts": [("experts", 16), ("experts", 8), ("experts", 2)]}
EXPERTS = dict(hidden_size=1024, intermediate_size=3584, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
               vocab_size=32000)                          # changes to mixtral-8x7b's config
ON_CPU = {"dense": [("tiny", None)], "experts": [("tiny-moe", None)]}
ROOM = 0.85                                               # share of a GPU's memory that the simulated peak may take
SECONDS = 2                                               # for a training step on one GPU, at EFFICIENCY times a product's speed
EFFICIENCY = 0.4
WARM_UP, STEPS, TEST_STEPS = 2, 6, 4
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory", re.I)
OWN_LOGS = re.compile(r"(machine|collectives|simulate|tests|\d\d_step\d\d_\w+)\.(txt|jsonl)")


def refuse(message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ------------------------------------------------------------------------------------------------ processes
class Clock:
    def __init__(self, minutes):
        self.begin, self.total = time.monotonic(), 60 * minutes

    def left(self):
        return self.begin + self.total - AT_END - time.monotonic()

    def say(self, text):
        seconds = int(time.monotonic() - self.begin)
        print(f"[{seconds // 60:2}:{seconds % 60:02}] {text}", flush=True)


def start(command, log, limit, env, tick=lambda: None):
    """Run a command, its output going to a file. Return its exit status, or None if it was ended at the time limit."""
    deadline = time.monotonic() + limit
    with open(log, "w") as file:
        child = subprocess.Popen([*map(str, command)], stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=ROOT, env=env,
                                 start_new_session=True)
    try:
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            tick()
        return child.poll()
    finally:
        if child.poll() is None:
            end(child)


def reason(status, log, limit):
    """Return in one line why a command failed."""
    if status is None:
        return f"did not end within {limit:.0f} s"
    text = Path(log).read_text(errors="replace")
    said = [line for line in text.splitlines() if re.search(r"^(\[rank\d+\]: )?(error:|[\w.]*(Error|Exception)\b)", line)]
    said = said or text.splitlines()[-1:] or [f"exit status {status}"]
    return ("out of memory: " if OUT_OF_MEMORY.search(text) else "") + said[0][:300]


def read_lines(path):
    """Return the JSON lines of a file that another process may still be writing."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def printed_by(*command):
    """Return what a command prints, or None if there is no such command or it fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=30, text=True, cwd=ROOT).strip()
    except (OSError, subprocess.SubprocessError):
        return None


# ------------------------------------------------------------------------------------------------ machine
def look(device, path):
    """Write what torch sees of this machine. This is a process of its own, because CUDA's context takes memory."""
    import torch
    gpus = range(torch.cuda.device_count() if device == "cuda" else 0)
    has = all(torch.cuda.get_device_capability(gpu) >= (8, 0) for gpu in gpus) and len(gpus) > 0
    found = dict(
        gpus=[dict(name=torch.cuda.get_device_name(gpu), capability="{}.{}".format(*torch.cuda.get_device_capability(gpu)),
                   memory_gib=torch.cuda.get_device_properties(gpu).total_memory / 2**30) for gpu in gpus],
        torch=torch.__version__, cuda=torch.version.cuda, dtype="bfloat16" if has else "float32",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        kernels_for=torch.cuda.get_arch_list() if gpus else [], python=platform.python_version(), cpus=os.cpu_count())
    Path(path).write_text(json.dumps(found))              # so that this is known, even if the product fails
    found["product_flops"] = product_flops(device, getattr(torch, found["dtype"]))
    Path(path).write_text(json.dumps(found))


def product_flops(device, dtype):
    """Measure the FLOPs per second of a large matrix product."""
    import torch
    size = 8192 if dtype == torch.bfloat16 else 4096 if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / statistics.median(times[2:])


def machine(run, limit):
    path = run.out / "machine.json"
    status = start([sys.executable, __file__, "look", run.device, path], run.log("machine"), limit, run.env)
    found = json.loads(path.read_text()) if path.exists() else {}
    found["driver"] = (printed_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split("\n")[0]
    found["links"] = printed_by("nvidia-smi", "topo", "-m") if len(found.get("gpus", [])) > 1 else None
    if status != 0:
        return found | dict(status="failed", reason=reason(status, run.log("machine"), limit))
    run.say(f"a product in {found['dtype']}: {found['product_flops'] / 1e12:,.3g} TFLOP/s")
    return found | dict(status="ok")


# ------------------------------------------------------------------------------------------------ collectives
def collectives(run, limit):
    if run.ranks == 1:
        return dict(status="not run", reason="one GPU has nobody to send to")
    path = run.out / "collectives.json"
    path.unlink(missing_ok=True)
    command = [*torchrun(run.ranks), ROOT / "dev/bench/bench_collectives.py", "--json", path]
    status = start(command + ["--sizes", 5] * (run.device == "cpu"), run.log("collectives"), limit, run.env)
    found = json.loads(path.read_text()) if path.exists() else {}
    for name, speeds in found.get("bus_gb_per_s", {}).items():
        run.say(f"{name}: {max(speeds):,.3g} GB/s")
    return found | (dict(status="ok") if status == 0 else
                    dict(status="failed", reason=reason(status, run.log("collectives"), limit)))


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]


# ------------------------------------------------------------------------------------------------ steps
def commands(n):
    """Return (step, ranks, flags): each step on one GPU or, on several, with its own technique over all of them."""
    if n == 1:
        return [(NAMES[0], 1, ""), (NAMES[0], 1, "--compile"), *((name, 1, "") for name in NAMES[1:])]
    mixed = {2: "--zero 1 --recompute selective", 4: "--tp 2 --pp 2", 8: "--tp 2 --pp 2 --zero 1"}[n]
    flags = ["", "--zero 3", f"--tp {n}", f"--cp {n}", f"--pp {n}", f"--ep {n}", mixed]
    return [(NAMES[0], 1, ""), (NAMES[0], 1, "--compile"), *((name, n, more) for name, more in zip(NAMES[1:], flags))]


def model_flag(model, layers, out):
    """Return a preset's name, or a folder with the config of one with fewer layers."""
    if not layers:
        return model
    path = out / f"{model}-{layers}"
    code = ("import config, json, os, sys, torch; preset, layers, changes, path = sys.argv[1:]; "
            "shape = config.to_hugging_face(config.PRESETS[preset], torch.float32); "
            "shape.update(dict(json.loads(changes), num_hidden_layers=int(layers), layer_types=None)); shape.save_pretrained(path)")
    preset, changes = ("mixtral-8x7b", EXPERTS) if model == "experts" else (model, {})
    subprocess.run([sys.executable, "-c", code, preset, str(layers), json.dumps(changes), path], check=True, capture_output=True,
                   cwd=step_dir(NAMES[-1]), env=clean_environment())
    return os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path)


def simulated(run, step, ranks, flags, limit, rank=0):
    """Return what tools/simulate predicts, or nothing if it fails."""
    path, log = run.out / "simulated.json", run.log("simulate")
    path.unlink(missing_ok=True)
    gpu = ["--gpu", run.gpu] if run.gpu else []
    command = [sys.executable, ROOT / "tools/simulate", NAMES.index(step) + 1, ranks, "--rank", rank, *gpu, "--json", path]
    status = start([*command, *flags], log, limit, run.env | {"CUDA_VISIBLE_DEVICES": ""})
    return json.loads(path.read_text()) if status == 0 else None


def size_that_fits(run, kind, step, limit):
    """Return the flags of the largest model that fits, with a batch that one GPU can train on in SECONDS, and FLOPs per token."""
    product = run.report["machine"].get("product_flops") or 1e12
    least, seq_len = (max(2, run.ranks), 2048) if run.device == "cuda" else (8, 128)

    def predict():
        return simulated(run, step, 1, [*flags, "--seq_len", seq_len, "--global_batch_size", least], limit)
    for model, layers in LADDER[kind] if run.device == "cuda" else ON_CPU[kind]:
        flags = ["--model", model_flag(model, layers, run.out), "--dtype", run.dtype, "--device", run.device,
                 "--micro_batch_size", 1]
        batch, predicted = least, predict()
        if predicted and run.device == "cuda" and predicted["between_bytes"] < ROOM * run.memory:
            flops = predicted["flops"] / (seq_len * least)
            tokens = SECONDS * EFFICIENCY * product / flops
            while seq_len > 512 and tokens < least * seq_len:
                seq_len, predicted = seq_len // 2, None
            while 2 * batch * seq_len <= tokens:
                batch *= 2
            predicted = predicted or predict()
        if predicted and (run.device == "cpu" or predicted["peak_bytes"] < ROOM * run.memory):
            return [*flags, "--seq_len", seq_len, "--global_batch_size", batch], predicted["flops"] / (seq_len * least)
    raise RuntimeError(f"no model of LADDER fits, or tools/simulate fails: see {run.log('simulate')}")


def steps(run, limit):
    end_of_part, sizes, rows = time.monotonic() + limit, {}, []
    chosen = [row for row in commands(run.ranks) if run.only in f"{row[0]} {row[2]}"]
    for number, (step, ranks, more) in enumerate(chosen):
        row = dict(step=step, ranks=ranks, flags=more, kind="experts" if step == "step07_ep" else "dense")
        rows.append(row)
        left = end_of_part - time.monotonic()
        if left < 10:
            row.update(status="not reached", reason="the part's time had run out")
            continue
        try:
            if row["kind"] not in sizes:
                sizes[row["kind"]] = size_that_fits(run, row["kind"], step, left)
            size, flops = sizes[row["kind"]]
            row.update(train(run, row, [*map(str, size), *more.split()], flops, min(left, ROW * run.clock.total), number))
        except (RuntimeError, subprocess.CalledProcessError) as error:
            row.update(status="failed", reason=str(error))
        speed = f"{row['tokens_per_s']:,.0f} tokens/s, {row['peak_gib']:.2f} GiB" if row["status"] == "ok" else row["reason"]
        run.say(f"{step} {more} on {ranks}: {row['status']}, {speed}")
    failed = [row for row in rows if row["status"] != "ok"]
    if failed or not rows:
        return dict(status="failed", reason=f"{len(failed)} of {len(rows)} did not run", rows=rows)
    return dict(status="ok", rows=rows)


def train(run, row, flags, flops, limit, number):
    """Run a trainer. Return its status, its speed, and its memory beside the simulator's."""
    ranks, name = row["ranks"], f"{number:02}_{row['step']}"
    log, lines = run.log(name), run.out / "logs" / f"{name}.jsonl"
    lines.unlink(missing_ok=True)
    program = os.path.relpath(step_dir(row["step"]) / "train.py", ROOT)
    launcher = [sys.executable] if ranks == 1 else torchrun(ranks)
    status = start([*launcher, program, *flags, "--steps", STEPS, "--lr", 1e-4, "--log_file", lines], log, limit, run.env)
    shown = ["torchrun", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else ["python"]
    found, steps = dict(command=shlex.join([*shown, program, *flags, "--steps", str(STEPS), "--lr", "1e-4"])), read_lines(lines)
    if status != 0 or len(steps) <= WARM_UP:
        return found | dict(status="failed", reason=reason(status, log, limit), training_steps=len(steps))
    speed = statistics.median(line["tokens_per_s"] for line in steps[WARM_UP:])
    found.update(status="ok", tokens_per_s=speed, peak_gib=max(line["peak_memory_gib"] for line in steps),
                 mfu=steps[-1]["mfu"] and statistics.median(line["mfu"] for line in steps[WARM_UP:]),
                 losses=[line["loss"] for line in steps])
    product = run.report["machine"].get("product_flops")
    found["of_product"] = speed / ranks * flops / product if product else None
    several = {0, ranks - 1} if "--pp" in row["flags"] else {0}        # ranks of different stages hold different amounts
    predicted = [simulated(run, row["step"], ranks, flags, limit, rank) for rank in sorted(several)]
    if all(predicted):
        found["simulated_gib"] = max(one["peak_bytes"] for one in predicted) / 2**30
        found["simulated_tokens_per_s"] = predicted[0]["tokens_per_s_per_gpu"] * ranks if run.gpu else None
    return found


# ------------------------------------------------------------------------------------------------ tests
def tests(run, limit):
    heard, seen, said = run.out / "tests.jsonl", [], [time.monotonic()]
    heard.unlink(missing_ok=True)
    wanted = "not compile" + f" and {run.only}" * bool(run.only)      # compiling would take most of the time
    command = [sys.executable, "-m", "pytest", "-p", "gpu", "-p", "no:cacheprovider", "-k", wanted, "tests/test_gpus.py"]
    env = run.env | dict(GPU_TESTS_ON=run.device, GPU_TEST_STEPS=str(TEST_STEPS), GPU_TEST_RANKS=str(run.ranks),
                         GPU_REPORT=str(heard), PYTHONPATH=str(ROOT / "tools"))

    def tick():
        if time.monotonic() > said[0] + 20:
            seen[:] = read_lines(heard)
            run.say(f"tests: {counted(seen)}")
            said[0] = time.monotonic()
    status = start(command, run.log("tests"), limit, env, tick)
    seen = read_lines(heard)
    collected = next((one["collected"] for one in seen if "collected" in one), [])
    results = {one["test"]: {key: one[key] for key in ("outcome", "reason")} for one in seen if "test" in one}
    results |= {name: dict(outcome="not reached", reason="") for name in collected if name not in results}
    run.say(f"tests: {counted(seen)}")
    found = dict(tests=results)
    if status is None:
        return found | dict(status="failed", reason=reason(status, "", limit))
    ran = [one for one in results.values() if one["outcome"] == "passed"]
    return found | (dict(status="ok") if status == 0 and ran else
                    dict(status="failed", reason="no test ran" if not ran else "see the tests that failed"))


def counted(seen):
    counts = collections.Counter(one["outcome"] for one in seen if "test" in one)
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none has ended so far"


# pytest calls these two in the process of the tests (-p gpu)
def pytest_collection_finish(session):
    note(collected=[item.nodeid.partition("::")[2] for item in session.items])


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed" and report.when == "setup":
        text = report.longrepr[2] if report.skipped else getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        lines = [line.strip() for line in str(text).splitlines() if line.strip()]
        note(test=report.nodeid.partition("::")[2], outcome=report.outcome, reason=" / ".join(lines[:2] + lines[-1:])[:500])


def note(**what):
    if "GPU_REPORT" in os.environ:
        with open(os.environ["GPU_REPORT"], "a") as file:
            file.write(json.dumps(what) + "\n")


# ------------------------------------------------------------------------------------------------ report
def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows), ""]


def number(value, form=",.0f"):
    return "" if value is None else format(value, form)


def written(report):
    """Return the report as text for an issue."""
    found = report["machine"]
    names = collections.Counter(gpu["name"] for gpu in found.get("gpus", [])) or {"CPU": report["ranks"]}
    what = ", ".join(f"{many} x {name}" for name, many in names.items())
    lines = [f"# {what}", "", f"Made by `make gpu` on {report['date']}, revision {report['revision']}, "
             f"in {report['seconds'] / 60:.0f} minutes, on {report['ranks']} of {max(1, len(found.get('gpus', [])))} GPUs."
             if report["device"] == "cuda" else f"Made by `tools/gpu.py --device cpu` on {report['date']}, revision "
             f"{report['revision']}: this is **not a report on a GPU**; it only shows that the programs work.", ""]
    lines += table(["part", "result"], [[part, f"{report[part]['status']} {report[part].get('reason', '')}".strip()]
                                        for part in PARTS if part in report])
    parts = machine_text, tests_text, steps_text, collectives_text
    for part, text in zip(("machine", "tests", "steps", "collectives"), parts):
        lines += text(report[part]) if part in report and (part != "machine" or found.get("torch")) else []
    return "\n".join(lines)


def machine_text(found):
    rows = [[gpu["name"], gpu["capability"], f"{gpu['memory_gib']:.1f}"] for gpu in found["gpus"]]
    lines = ["## Machine", ""] + (table(["GPU", "capability", "memory, GiB"], rows) if rows else [])
    versions = {name: found.get(name) or "none" for name in ("torch", "cuda", "nccl", "driver", "python", "cpus")}
    lines += [", ".join(f"{name} {value}" for name, value in versions.items()) + f"; {found['dtype']} by default; torch has "
              f"kernels for {', '.join(found['kernels_for']) or 'the CPU'}", ""]
    if found.get("product_flops"):
        lines += [f"A large matrix product in {found['dtype']}: {found['product_flops'] / 1e12:,.3g} TFLOP/s.", ""]
    return lines + (["```text", found["links"], "```", ""] if found.get("links") else [])


def tests_text(found):
    by_name = {}
    for name, one in found["tests"].items():
        by_name.setdefault(name.partition("[")[0].removeprefix("test_").replace("_", " "), []).append(one["outcome"])
    outcomes = "passed", "failed", "skipped", "not reached"
    lines = ["## What is equal to one process", "", f"`tests/test_gpus.py`, {TEST_STEPS} training steps a run. In float64, losses, "
             "gradient norms and weights must be equal up to rounding; in bfloat16, losses must be close.", ""]
    lines += table(["test", *outcomes], [[name, *(str(all_of.count(outcome)) for outcome in outcomes)]
                                         for name, all_of in by_name.items()])
    failed = [f"- `{name}`: {one['reason']}" for name, one in found["tests"].items() if one["outcome"] == "failed"]
    lines += ["**Failed:**", "", *failed, ""] if failed else ["No test failed.", ""]
    passed = [f"- `{name}`" for name, one in found["tests"].items() if one["outcome"] == "passed"]
    return lines + ["<details><summary>All that passed</summary>", "", *passed, "", "</details>", ""]


def steps_text(found):
    lines = ["## How fast, and in how much memory", ""]
    lines += table(["step", "GPUs", "flags", "tokens/s", "MFU", "of a product", "simulated tokens/s", "peak GiB", "simulated GiB",
                    "first loss", "last loss"],
                   [[row["step"], str(row["ranks"]), f"`{row['flags']}`" if row["flags"] else "", *(
                       [number(row["tokens_per_s"]), number(row["mfu"], ".1%"), number(row["of_product"], ".1%"),
                        number(row.get("simulated_tokens_per_s")), number(row["peak_gib"], ".2f"),
                        number(row.get("simulated_gib"), ".2f"), *(number(row["losses"][at], ".4f") for at in (0, -1))]
                       if row["status"] == "ok" else [f"{row['status']}: {row['reason']}".replace("|", "/"), *[""] * 7])]
                    for row in found["rows"]])
    lines += ["Tokens per second are for all GPUs together. *MFU* is the trainer's, for GPUs whose peak it knows. *Of a product* "
              "compares the FLOPs that the simulator counts with the product measured above. All rows but those of step 7 train "
              "the same model on the same batches, so their first losses must agree. On a CPU, the peak is the memory of the "
              "whole process, and the simulator's that of its tensors.", "", "<details><summary>Commands</summary>", "", "```text",
              *(row["command"] for row in found["rows"] if "command" in row), "```", "", "</details>", ""]
    return lines


def collectives_text(found):
    if "bus_gb_per_s" not in found:
        return []
    sizes = [f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB" for size in found["sizes"]]
    speeds = found["bus_gb_per_s"]
    return [f"## Collectives: bus bandwidth in GB/s, {found['backend']}, {found['ranks']} ranks", ""] + table(
        ["payload", *speeds], [[size, *(f"{column[row]:.3g}" for column in speeds.values())] for row, size in enumerate(sizes)])


# ------------------------------------------------------------------------------------------------ all parts
class Run:
    """What all parts share."""

    def __init__(self, args, gpus):
        self.out, self.device, self.only, self.clock = Path(args.out).resolve(), args.device, args.only, Clock(args.minutes)
        self.ranks = 2 ** int(math.log2(min(8, gpus))) if args.device == "cuda" else 2
        try:
            (self.out / "logs").mkdir(parents=True, exist_ok=True)
            for log in (self.out / "logs").iterdir():
                OWN_LOGS.fullmatch(log.name) and log.unlink()              # anything else there is the user's
            self.log("machine").touch()
        except OSError as error:
            refuse(f"--out {args.out}: cannot be written ({error.strerror}); choose another directory")
        self.env = clean_environment() | ({"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {})
        self.say = self.clock.say
        revision = printed_by("git", "describe", "--always", "--dirty", "--exclude", "*") or "unknown"
        self.report = dict(date=datetime.date.today().isoformat(), revision=revision, device=self.device, ranks=self.ranks)

    def log(self, name):
        return self.out / "logs" / f"{name}.txt"

    def know(self, found):
        """Keep what the other parts need to know of the machine."""
        from simulate.gpus import GPUS
        self.dtype = found.get("dtype", "float32")
        self.memory = min((gpu["memory_gib"] for gpu in found.get("gpus", [])), default=0) * 2**30
        name = found["gpus"][0]["name"].replace(" ", "").lower() if found.get("gpus") else ""
        self.gpu = max((key for key in GPUS if key in name), key=len, default=None)

    def write(self):
        self.report["seconds"] = time.monotonic() - self.clock.begin
        (self.out / "report.json").write_text(json.dumps(self.report, indent=1) + "\n")
        (self.out / "report.md").write_text(written(self.report))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=20, help="minutes that all parts together may take (20)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS),
                        help="only these parts; machine always runs")
    parser.add_argument("--only", default="", metavar="NAME", help="only steps and tests with this in their names")
    parser.add_argument("--out", default=ROOT / "out/gpu", metavar="DIR", help="directory for the report (out/gpu)")
    args = parser.parse_args()
    if not 1 <= args.minutes < 1e4:
        refuse(f"--minutes {args.minutes:g}: must be at least 1 and below 10,000")
    if not str(args.out):
        refuse("--out '': names no directory; leave it out to get out/gpu")
    import torch
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    if args.device == "cuda" and not gpus:
        why = "this torch is built for CPUs" if torch.version.cuda is None else "is there a driver, and is it new enough for torch?"
        refuse(f"torch {torch.__version__} finds no GPU ({why}); --device cpu runs the same parts over gloo, with tiny sizes")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = Run(args, gpus)
    run.say(f"{gpus} GPUs, of which {run.ranks} are used" if gpus else f"on the CPU: {run.ranks} processes over gloo")
    try:
        for part, share in PARTS.items():
            if part in args.parts or part == "machine":
                run.say(f"== {part}")
                run.report[part] = of_part(run, globals()[part], min(share * run.clock.total, run.clock.left()))
                part == "machine" and run.know(run.report[part])
                run.write()
    except KeyboardInterrupt:
        run.write()
        print(f"stopped; what was done is in {run.out / 'report.md'}", file=sys.stderr)
        raise SystemExit(130)
    failed = [part for part in PARTS if run.report.get(part, {}).get("status") == "failed"]
    run.say(f"{'failed in ' + ', '.join(failed) if failed else 'nothing failed'}; the report is {run.out / 'report.md'}")
    raise SystemExit(1 if failed else 0)


def of_part(run, part, limit):
    """Run a part. If it fails, even through a bug in this program, return why: the other parts go on."""
    if limit < 10:
        return dict(status="failed", reason="no time was left") | (dict(rows=[]) if part is steps else
                                                                   dict(tests={}) if part is tests else {})
    try:
        found = part(run, limit)
    except Exception as error:
        found = dict(status="failed", reason=f"{type(error).__name__}: {error}") | dict(rows=[], tests={})
    if found["status"] != "ok":
        run.say(f"{part.__name__}: {found['status']}, {found['reason']}")
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["look"]:
        look(*sys.argv[2:])
    else:
        main()
