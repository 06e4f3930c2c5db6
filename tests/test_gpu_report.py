"""make gpu: its report, on the CPU and of made-up results."""
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import gpu
import pytest
import torch
from steps import NAMES, ROOT, clean_environment, run


def report(folder, *flags, timeout=1500):
    status, output = run([sys.executable, ROOT / "tools/gpu.py", "--device", "cpu", "--out", folder, *flags], folder, timeout)
    return status, output, json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


# ------------------------------------------------------------------------------------------------ on the CPU
def test_one_step_is_reported(tmp_path):
    status, output, found, text = report(tmp_path, "--parts", "steps", "--only", "step02")
    rows = found["steps"]["rows"]
    assert status == 0 and [row["step"] for row in rows] == [NAMES[1]], output
    assert all(row["status"] == "ok" and row["tokens_per_s"] > 0 and row["simulated_gib"] > 0 for row in rows)
    assert "not a report on a GPU" in text and f"{rows[0]['tokens_per_s']:,.0f}" in text and torch.__version__ in text


@pytest.mark.slow
def test_all_parts_on_the_cpu(tmp_path):
    """Check that everything runs, so that on GPUs only what GPUs do can go wrong."""
    status, output, found, text = report(tmp_path, "--minutes", "100", timeout=6000)
    assert status == 0 and [found[part]["status"] for part in gpu.PARTS] == ["ok"] * len(gpu.PARTS), output + text
    assert {row["step"] for row in found["steps"]["rows"]} == set(NAMES)
    losses = [row["losses"][0] for row in found["steps"]["rows"] if row["kind"] == "dense"]
    assert max(losses) - min(losses) < 1e-4
    assert set(found["collectives"]["bus_gb_per_s"]) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send/recv"}
    outcomes = [one["outcome"] for one in found["tests"]["tests"].values()]
    assert outcomes.count("passed") > outcomes.count("failed") == outcomes.count("not reached") == 0
    assert "No test failed." in text and all(name in text for name in ("all_reduce", *NAMES))


def test_what_takes_too_long_is_ended(tmp_path):
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    ticks = []
    status = gpu.start([sys.executable, "-c", program], tmp_path / "log", 3, clean_environment(), lambda: ticks.append(1))
    assert status is None and ticks and gpu.reason(status, tmp_path / "log", 3) == "did not end within 3 s"
    status = gpu.start([sys.executable, "-c", "raise ValueError('no such thing')"], tmp_path / "log", 300, clean_environment())
    assert status == 1 and gpu.reason(status, tmp_path / "log", 300) == "ValueError: no such thing"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so():
    done = subprocess.run([sys.executable, ROOT / "tools/gpu.py"], env=clean_environment() | {"CUDA_VISIBLE_DEVICES": ""},
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and "finds no GPU" in done.stderr


# ------------------------------------------------------------------------------------------------ made-up results
MACHINE = dict(status="ok", gpus=[dict(name="Tesla T4", capability="7.5", memory_gib=14.5)] * 2, torch="2.13.0+cu126", cuda="12.6",
               nccl="2.29", driver="575.1", dtype="float32", kernels_for=["sm_75"], product_flops=4e12, links="GPU0 GPU1 PHB")
ROW = dict(step="step03_zero", ranks=2, flags="--zero 3", kind="dense", status="ok", command="torchrun x", tokens_per_s=1234.5,
           mfu=None, of_product=0.31, simulated_tokens_per_s=None, peak_gib=7.125, simulated_gib=7.0, losses=[5.5, 5.25])
MADE_UP = dict(date="2026-01-02", revision="abc", device="cuda", ranks=2, seconds=600, machine=MACHINE,
               collectives=dict(status="ok", backend="nccl", ranks=2, sizes=[4096, 2**28], bus_gb_per_s=dict(all_reduce=[1, 5.75])),
               steps=dict(status="failed", reason="1 of 2 did not run", rows=[ROW, ROW | dict(status="failed", reason="no | end")]),
               tests=dict(status="failed", reason="see", tests={
                   "test_a_technique_on_many_ranks[x]": dict(outcome="passed", reason=""),
                   "test_a_technique_on_many_ranks[y]": dict(outcome="failed", reason="losses[1] differ"),
                   "test_dimensions_mixed[z]": dict(outcome="not reached", reason="")}))


def test_a_report_names_what_was_equal_what_failed_and_how_fast():
    text = gpu.written(MADE_UP)
    assert text.startswith("# 2 x Tesla T4\n") and "not a report on a GPU" not in text
    assert "| a technique on many ranks | 1 | 1 | 0 | 0 |" in text and "| dimensions mixed | 0 | 0 | 0 | 1 |" in text
    assert "- `test_a_technique_on_many_ranks[y]`: losses[1] differ" in text and "- `test_a_technique_on_many_ranks[x]`" in text
    assert "| step03_zero | 2 | `--zero 3` | 1,234 |  | 31.0% |  | 7.12 | 7.00 | 5.5000 | 5.2500 |" in text
    assert "failed: no / end" in text and "| 256 MiB | 5.75 |" in text and "GPU0 GPU1 PHB" in text
    widths = {re.sub(r"\\\|", "", line).count("|") for line in text.split("## How fast")[1].split("\n\n")[1].splitlines()}
    assert len(widths) == 1, "all rows of the table have the same number of cells"


@pytest.mark.parametrize("part", ["machine", "collectives", "steps", "tests"])
def test_a_report_can_be_written_whatever_failed(part):
    def fails(run, limit):
        raise ZeroDivisionError("made up")
    fails.__name__ = part
    found = gpu.of_part(SimpleNamespace(say=print), fails, 100)
    text = gpu.written(MADE_UP | {part: found})
    assert f"| {part} | failed ZeroDivisionError: made up |" in text


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_step_has_a_command(ranks):
    found = gpu.commands(ranks)
    assert {step for step, _, _ in found} == set(NAMES) and {many for _, many, _ in found} <= {1, ranks}


@pytest.mark.parametrize("memory_gib, product, chosen", [(14.5, 4e12, "qwen3-0.6b-"), (22, 60e12, "qwen3-0.6b"),
                                                         (79, 6e14, "llama-1b")])
def test_the_size_goes_by_memory_and_speed(tmp_path, monkeypatch, memory_gib, product, chosen):
    """Check it with stand-ins for the simulator's numbers: 16 bytes a parameter, and 4 MiB a token."""
    parameters = {"llama-1b": 1.5e9, "qwen3-0.6b": 0.75e9, "qwen3-0.6b-14": 0.53e9, "qwen3-0.6b-8": 0.43e9}

    def predicted(run, step, ranks, flags, limit, rank=0):
        get = {flags[i]: flags[i + 1] for i in range(0, len(flags), 2)}
        count, tokens = parameters[get["--model"]], get["--seq_len"] * get["--global_batch_size"]
        return dict(between_bytes=16 * count, peak_bytes=16 * count + 2**22 * get["--seq_len"], flops=6 * count * tokens)
    monkeypatch.setattr(gpu, "simulated", predicted)
    monkeypatch.setattr(gpu, "model_flag", lambda model, layers, out: f"{model}-{layers}" if layers else model)
    here = SimpleNamespace(device="cuda", dtype="float32", ranks=2, memory=memory_gib * 2**30, out=tmp_path,
                           report=dict(machine=dict(product_flops=product)), log=str)
    flags, flops = gpu.size_that_fits(here, "dense", NAMES[0], 100)
    get = dict(zip(flags[::2], flags[1::2]))
    assert get["--model"].startswith(chosen) and get["--global_batch_size"] >= here.ranks
    seconds = flops * get["--seq_len"] * get["--global_batch_size"] / (gpu.EFFICIENCY * product)
    assert seconds <= gpu.SECONDS or get["--seq_len"] == 512 and get["--global_batch_size"] == here.ranks


@pytest.mark.slow
@pytest.mark.parametrize("model, layers", [("qwen3-0.6b", 8), ("experts", 2)])
def test_a_model_of_fewer_layers_is_one_that_the_steps_take(tmp_path, model, layers):
    folder = gpu.model_flag(model, layers, tmp_path)
    status, output = run([sys.executable, ROOT / "tools/simulate", "7", "2", "--model", folder, "--ep" if model == "experts" else
                          "--tp", "2", "--global_batch_size", "2", "--micro_batch_size", "1"], ROOT, 300)
    assert status == 0 and "tokens/s/GPU" in output, output
