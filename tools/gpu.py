"""Report what the steps do on this machine's GPUs: what is equal, what fails, and how fast it is (docs/gpus.md).

    python tools/gpu.py                       # or make gpu: within 20 minutes, on 1, 2, 4 or 8 of the GPUs
    python tools/gpu.py --only step04         # again, but only the commands and tests that have this in their names
    python tools/gpu.py --device cpu          # the same on two processes over gloo, with tiny sizes, to see that it works

The report is out/gpu/report.md, ready to be posted in an issue, and out/gpu/report.json. Both are written after each part.
"""
import argparse
import collections
import datetime
import functools
import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time

from prove.processes import torchrun
from refuse import refuse
from simulate.gpus import GPUS
from steps import NAMES, ROOT, clean_environment, end

OUT = ROOT / "out/gpu"
MINUTES = 19.5                                            # for all parts; half a minute more is to end processes
PARTS = {"machine": 1, "collectives": 2, "steps": 9, "tests": MINUTES}             # minutes; the tests get what is left
ROW = 2.5                                                 # minutes for one trainer

SHAPE = dict(hidden_size=1024, intermediate_size=3584, num_attention_heads=16, num_key_value_heads=8, head_dim=64, vocab_size=32000)
EXPERTS = dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
# presets, or configs; the first whose simulated peak on one GPU takes at most ROOM of its memory is trained
LADDER = {"dense": ["llama-1b", "qwen3-0.6b", SHAPE | dict(model_type="llama", num_hidden_layers=16)],
          "experts": [SHAPE | EXPERTS | dict(num_hidden_layers=layers) for layers in (16, 8, 2)]}
ON_CPU = {"dense": ["tiny"], "experts": ["tiny-moe"]}
ROOM = 0.85
WARM_UP, STEPS, TEST_STEPS = 2, 6, 4


def say(text):
    print(f"[{datetime.datetime.now():%H:%M:%S}] {text}", flush=True)


# ------------------------------------------------------------------------------------------------ processes
def log(name, kind="txt"):
    return OUT / "logs" / f"{name}.{kind}"


def execute(name, command, until, **env):
    """Run a command, its output going to the log of this name. Return in one line why it failed, or nothing."""
    with open(log(name), "w") as file:
        child = subprocess.Popen([*map(str, command)], stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=ROOT,
                                 env=clean_environment() | env, start_new_session=True)
    try:
        status = child.wait(max(0, until - time.monotonic()))
        return reason(log(name).read_text(errors="replace"), status) if status else None
    except subprocess.TimeoutExpired:
        return "did not end in time"
    finally:
        if child.poll() is None:
            end(child)


def reason(text, status):
    """Return the first line in which a program says what went wrong, or else its last line."""
    said = re.findall(r"^(?:\[rank\d+\]: )?(?:error:|[\w.]*(?:Error|Exception)\b).*", text, re.M)
    return (said or text.splitlines()[-1:] or [f"exit status {status}"])[0][:300]


def result(failed, **found):
    """Return what a part or a row has found, and its status."""
    return found | (dict(status="failed", reason=failed) if failed else dict(status="ok"))


def printed_by(*command):
    """Return what a command prints, or nothing if there is no such command or it fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, cwd=ROOT).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# ------------------------------------------------------------------------------------------------ machine
def look(device):
    """Return what torch sees of this machine. Refuse to go on if it should see a GPU and sees none."""
    import torch
    gpus = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count() if device == "cuda" else 0)]
    if device == "cuda" and not gpus:
        why = "this torch is built for CPUs" if torch.version.cuda is None else "is there a driver, and is it new enough for torch?"
        refuse(f"torch {torch.__version__} finds no GPU ({why}); --device cpu runs the same parts over gloo, with tiny sizes")
    return dict(
        gpus=[dict(name=gpu.name, capability=f"{gpu.major}.{gpu.minor}", memory_gib=gpu.total_memory / 2**30) for gpu in gpus],
        dtype="bfloat16" if gpus and min(gpu.major for gpu in gpus) >= 8 else "float32",
        torch=torch.__version__, cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        kernels_for=torch.cuda.get_arch_list() if gpus else [], python=platform.python_version(), cpus=os.cpu_count())


def machine(report, until):
    found = report["machine"]
    found["driver"] = printed_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    found["links"] = printed_by("nvidia-smi", "topo", "-m") if len(found["gpus"]) > 1 else ""
    failed = execute("product", [sys.executable, __file__, "product", report["device"], found["dtype"]], until)
    return result(failed, **found, product_flops=None if failed else float(log("product").read_text().split()[-1]))


def print_product_flops(device, dtype):
    """Measure the FLOPs per second of a large matrix product. This is a process of its own: it takes memory, and it may fail."""
    import torch
    from torch.utils.benchmark import Timer
    size = 8192 if dtype == "bfloat16" else 4096 if device == "cuda" else 512
    a = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    print(2 * size**3 / Timer("a @ a", globals=dict(a=a)).blocked_autorange().median)


# ------------------------------------------------------------------------------------------------ collectives
def collectives(report, until):
    if report["ranks"] == 1:
        return dict(status="not run", reason="one GPU has nobody to send to")
    path, few = log("collectives", "json"), ["--sizes", 5] * (report["device"] == "cpu")
    failed = execute("collectives", torchrun(report["ranks"], "dev/bench/bench_collectives.py", "--json", path, *few), until)
    return result(failed, **(json.loads(path.read_text()) if path.exists() else {}))


# ------------------------------------------------------------------------------------------------ steps
def commands(n):
    """Return (step, ranks, flags): step 1 on one GPU, the others with their own technique over all of them."""
    mixed = {1: "", 2: "--zero 1 --recompute selective", 4: "--tp 2 --pp 2", 8: "--tp 2 --pp 2 --zero 1"}[n]
    flags = ["", "--zero 3", f"--tp {n}", f"--cp {n}", f"--pp {n}", f"--ep {n}", mixed]
    return [(NAMES[0], 1, ""), (NAMES[0], 1, "--compile"),
            *((name, n, more if n > 1 else "") for name, more in zip(NAMES[1:], flags))]


def model_flag(model):
    """Return a preset's name, or the folder to which this writes a config."""
    if isinstance(model, str):
        return model
    folder = OUT / f"{model['model_type']}-{model['num_hidden_layers']}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    return os.path.relpath(folder, ROOT)


def simulated(report, step, ranks, flags, until, rank=0):
    """Return what tools/simulate predicts, or nothing if it fails."""
    path, gpu = log("simulate", "json"), known_gpu(report)
    command = ["tools/simulate", NAMES.index(step) + 1, ranks, "--rank", rank, "--json", path, *(["--gpu", gpu] if gpu else [])]
    failed = execute("simulate", [sys.executable, *command, *flags], until, CUDA_VISIBLE_DEVICES="")
    return None if failed else json.loads(path.read_text())


def known_gpu(report):
    """Return the simulator's name of this GPU, or None if it does not know it."""
    names = [gpu["name"].replace(" ", "").lower() for gpu in report["machine"]["gpus"][:1]]
    return max((key for key in GPUS for name in names if key in name), key=len, default=None)


def size_that_fits(report, kind, until):
    """Return the flags of the largest model that fits, and its FLOPs per token, or nothing if none fits."""
    on_cpu, dtype, step = report["device"] == "cpu", report["machine"]["dtype"], "step07_ep" if kind == "experts" else NAMES[0]
    seq_len, batch = (128, 8) if on_cpu else (2048, 16) if dtype == "bfloat16" else (512, 8)     # float32 is slow
    room = ROOM * 2**30 * min((gpu["memory_gib"] for gpu in report["machine"]["gpus"]), default=math.inf)
    for model in (ON_CPU if on_cpu else LADDER)[kind]:
        flags = ["--model", model_flag(model), "--dtype", dtype, "--device", report["device"], "--seq_len", seq_len,
                 "--global_batch_size", batch, "--micro_batch_size", 1]
        predicted = simulated(report, step, 1, flags, until)
        if predicted and predicted["peak_bytes"] < room:
            return dict(flags=[*map(str, flags)], flops_per_token=predicted["flops"] / (seq_len * batch))


def steps(report, until):
    size, rows = functools.cache(lambda kind: size_that_fits(report, kind, until)), []
    for step, ranks, more in commands(report["ranks"]):
        if report["only"] in f"{step} {more}":
            row = dict(step=step, ranks=ranks, flags=more, kind="experts" if step == "step07_ep" else "dense")
            row |= train(report, row, size(row["kind"]), min(until, time.monotonic() + 60 * ROW))
            rows.append(row)
            speed = f"{row['tokens_per_s']:,.0f} tokens/s" if row["status"] == "ok" else row["reason"]
            say(f"{step} {more} on {ranks}: {row['status']}, {speed}")
    failed = sum(row["status"] != "ok" for row in rows)
    return result(f"{failed} of {len(rows)} did not run" if failed else not rows and "no step has this name", rows=rows)


def train(report, row, size, until):
    """Run a trainer. Return its status, its speed, and its memory beside the simulator's."""
    if time.monotonic() >= until:
        return dict(status="not reached", reason="the part's time had run out")
    if not size:
        return result("no model fits, or tools/simulate failed: see logs/simulate.txt")
    step, ranks, flags = row["step"], row["ranks"], [*size["flags"], *row["flags"].split()]
    name, program = (step + row["flags"]).replace(" ", ""), [f"{step}/train.py", *flags, "--steps", str(STEPS), "--lr", "1e-4"]
    command = [sys.executable, *program] if ranks == 1 else torchrun(ranks, *program)
    failed = execute(name, [*command, "--log_file", log(name, "jsonl")], until)
    found = dict(command=shlex.join(["python", *command[1:]]))
    if failed:
        return result(failed, **found)
    lines = [json.loads(line) for line in log(name, "jsonl").read_text().splitlines()]
    speed, mfu = (statistics.median(line[key] or 0 for line in lines[WARM_UP:]) for key in ("tokens_per_s", "mfu"))
    product = report["machine"]["product_flops"]
    return result(None, **found, tokens_per_s=speed, mfu=mfu or None, peak_gib=max(line["peak_memory_gib"] for line in lines),
                  of_product=speed / ranks * size["flops_per_token"] / product if product else None,
                  losses=[line["loss"] for line in lines], **predictions(report, step, ranks, flags, until))


def predictions(report, step, ranks, flags, until):
    """Return what the simulator says of such a run. Pipeline stages hold different amounts, the first and the last the most."""
    several = sorted({0, ranks - 1}) if "--pp" in flags else [0]
    predicted = [simulated(report, step, ranks, flags, until, rank) for rank in several]
    if not all(predicted):
        return {}
    speed = predicted[0]["tokens_per_s_per_gpu"] * ranks if known_gpu(report) else None
    return dict(simulated_gib=max(one["peak_bytes"] for one in predicted) / 2**30, simulated_tokens_per_s=speed)


# ------------------------------------------------------------------------------------------------ tests
def tests(report, until):
    heard, only = log("tests", "jsonl"), report["only"]
    wanted = "not compile" + f" and {only}" * bool(only)  # compiling would take most of the time
    failed = execute("tests", [sys.executable, "-m", "pytest", "-p", "gpu", "-p", "no:cacheprovider", "-k", wanted,
                               "tests/test_gpus.py"], until, GPU_TESTS_ON=report["device"], GPU_TEST_STEPS=str(TEST_STEPS),
                     GPU_TEST_RANKS=str(report["ranks"]), GPU_REPORT=str(heard), PYTHONPATH=str(ROOT / "tools"))
    lines = heard.read_text().splitlines() if heard.exists() else []
    results = {one["test"]: one for one in map(json.loads, lines)}    # a later line says what became of the test
    counts = collections.Counter(one["outcome"] for one in results.values())
    counted = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    say(f"tests: {counted or failed}")
    return result(None if counts["passed"] and not failed else counted or failed, tests=results)


# pytest calls these two in the process of the tests (-p gpu)
def pytest_collection_finish(session):
    for item in session.items:
        note(item.nodeid, "not reached")


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed" and report.when == "setup":
        message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        note(report.nodeid, report.outcome, " / ".join(lines[:2] + lines[-1:])[:500])


def note(test, outcome, reason=""):
    with open(os.environ["GPU_REPORT"], "a") as file:
        file.write(json.dumps(dict(test=test.partition("::")[2], outcome=outcome, reason=reason)) + "\n")


# ------------------------------------------------------------------------------------------------ report
def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows), ""]


def folded(title, lines):
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def written(report):
    """Return the report as text for an issue."""
    gpus = report["machine"]["gpus"]
    names = collections.Counter(gpu["name"] for gpu in gpus) or {"CPU": report["ranks"]}
    lines = ["# " + ", ".join(f"{many} x {name}" for name, many in names.items()), "",
             f"Made by `make gpu` on {report['date']}, revision {report['revision']}, in {report['seconds'] / 60:.0f} minutes, on "
             f"{report['ranks']} of {len(gpus)} GPUs." if report["device"] == "cuda" else
             f"Made by `tools/gpu.py --device cpu` on {report['date']}, revision {report['revision']}: this is **not a report on a "
             "GPU**; it only shows that the programs work.", ""]
    lines += table(["part", "result"], [[part, f"{report[part]['status']} {report[part].get('reason', '')}".strip()]
                                        for part in PARTS if part in report])
    for part, text in dict(machine=machine_text, tests=tests_text, steps=steps_text, collectives=collectives_text).items():
        lines += text(report[part]) if part in report else []
    return "\n".join(lines)


def machine_text(found):
    rows = [[gpu["name"], gpu["capability"], f"{gpu['memory_gib']:.1f}"] for gpu in found["gpus"]]
    versions = ", ".join(f"{name} {found[name] or 'none'}" for name in ("torch", "cuda", "nccl", "driver", "python", "cpus"))
    lines = ["## Machine", "", *(table(["GPU", "capability", "memory, GiB"], rows) if rows else []),
             f"{versions}; {found['dtype']} by default; torch has kernels for {', '.join(found['kernels_for']) or 'the CPU'}", ""]
    if found["product_flops"]:
        lines += [f"A large matrix product in {found['dtype']}: {found['product_flops'] / 1e12:,.3g} TFLOP/s.", ""]
    return lines + (["```text", found["links"], "```", ""] if found["links"] else [])


def tests_text(found):
    by_name, outcomes = collections.defaultdict(list), ("passed", "failed", "skipped", "not reached")
    for name, one in found["tests"].items():
        by_name[name.partition("[")[0].removeprefix("test_").replace("_", " ")].append(one["outcome"])
    failed = [f"- `{name}`: {one['reason']}" for name, one in found["tests"].items() if one["outcome"] == "failed"]
    passed = [f"- `{name}`" for name, one in found["tests"].items() if one["outcome"] == "passed"]
    return ["## What is equal to one process", "", f"`tests/test_gpus.py`, {TEST_STEPS} training steps a run. In float64, losses, "
            "gradient norms and weights must be equal up to rounding; in bfloat16, losses must be close.", "",
            *table(["test", *outcomes], [[name, *(str(all_of.count(outcome)) for outcome in outcomes)]
                                         for name, all_of in by_name.items()]),
            *(["**Failed:**", "", *failed] if failed else ["No test failed."]), "", *folded("All that passed", passed)]


def steps_text(found):
    columns = {"tokens_per_s": ("tokens/s", ",.0f"), "mfu": ("MFU", ".1%"), "of_product": ("of a product", ".1%"),
               "simulated_tokens_per_s": ("simulated tokens/s", ",.0f"), "peak_gib": ("peak GiB", ".2f"),
               "simulated_gib": ("simulated GiB", ".2f")}
    rows = []
    for row in found["rows"]:
        cells = ["" if row.get(key) is None else format(row[key], form) for key, (_, form) in columns.items()]
        cells += [f"{row['losses'][at]:.4f}" for at in (0, -1)] if row["status"] == "ok" else ["", ""]
        if row["status"] != "ok":
            cells[0] = f"{row['status']}: {row['reason']}".replace("|", "/")
        rows.append([row["step"], str(row["ranks"]), f"`{row['flags']}`" if row["flags"] else "", *cells])
    return ["## How fast, and in how much memory", "",
            *table(["step", "GPUs", "flags", *(name for name, _ in columns.values()), "first loss", "last loss"], rows),
            "Tokens per second are for all GPUs together. *MFU* is the trainer's, for GPUs whose peak it knows. *Of a product* "
            "compares the FLOPs that the simulator counts with the product measured above. All rows but those of step 7 train "
            "the same model on the same batches, so their first losses must agree. On a CPU, the peak is the memory of the "
            "whole process, and the simulator's that of its tensors.", "",
            *folded("Commands", ["```text", *(row["command"] for row in found["rows"] if "command" in row), "```"])]


def collectives_text(found):
    speeds = found.get("bus_gb_per_s")
    if not speeds:
        return []
    sizes = [f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB" for size in found["sizes"]]
    return [f"## Collectives: bus bandwidth in GB/s, {found['backend']}, {found['ranks']} ranks", "", *table(
        ["payload", *speeds], [[size, *(f"{column[row]:.3g}" for column in speeds.values())] for row, size in enumerate(sizes)])]


# ------------------------------------------------------------------------------------------------ all parts
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", metavar="NAME", help="only steps and tests with this in their names")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts; the tests get what the others leave")
    args = parser.parse_args()
    begin, found = time.monotonic(), look(args.device)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shutil.rmtree(OUT / "logs", ignore_errors=True)
    (OUT / "logs").mkdir(parents=True)
    revision = printed_by("git", "describe", "--always", "--dirty", "--exclude", "*") or "unknown"
    ranks = max(ranks for ranks in (1, 2, 4, 8) if ranks <= (len(found["gpus"]) or 2))
    report = dict(date=datetime.date.today().isoformat(), revision=revision, device=args.device, ranks=ranks, only=args.only,
                  machine=found)
    for part, minutes in PARTS.items():
        say(f"== {part}: its output goes to {OUT / 'logs'}")
        report[part] = globals()[part](report, min(begin + 60 * args.minutes, time.monotonic() + 60 * minutes))
        report["seconds"] = time.monotonic() - begin
        (OUT / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (OUT / "report.md").write_text(written(report))
    failed = [part for part in PARTS if report[part]["status"] == "failed"]
    say(f"{'failed in ' + ', '.join(failed) if failed else 'nothing failed'}; the report is {OUT / 'report.md'}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    try:
        print_product_flops(*sys.argv[2:]) if sys.argv[1:2] == ["product"] else main()
    except KeyboardInterrupt:
        sys.exit(130)
