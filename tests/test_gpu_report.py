"""make gpu: its report, on the CPU and of made-up results."""
import json
import re
import sys
import time
from pathlib import Path

import gpu
import pytest
import torch
from programs import run_program
from steps import NAMES, ROOT, run


def report(folder, parts, *flags, timeout):
    """Return (exit status, output, report.json, report.md) of a run that may take long and whose report goes to the folder."""
    code = (f"import sys, gpu; from pathlib import Path; gpu.OUT = Path(sys.argv.pop(1)); gpu.MINUTES = gpu.ROW = {timeout // 60}; "
            f"gpu.PARTS = dict.fromkeys({parts}, gpu.MINUTES); gpu.main()")
    program = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); {code}"]
    status, output = run([*program, folder, "--device", "cpu", *flags], folder, timeout)
    return status, output, json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


# ------------------------------------------------------------------------------------------------ on the CPU
@pytest.mark.slow
def test_one_step_is_reported(tmp_path):
    status, output, found, text = report(tmp_path, list(gpu.PARTS), "--only", "step02", timeout=1500)
    rows = found["steps"]["rows"]
    assert status == 0 and [row["step"] for row in rows] == [NAMES[1]], output
    assert all(row["status"] == "ok" and row["tokens_per_s"] > 0 and row["simulated_gib"] > 0 for row in rows)
    assert [found[part]["status"] for part in gpu.PARTS] == ["ok"] * len(gpu.PARTS), output + text
    assert "not a report on a GPU" in text and f"{rows[0]['tokens_per_s']:,.0f}" in text and torch.__version__ in text


@pytest.mark.sweep
def test_all_parts_on_the_cpu(tmp_path):
    """Check that everything runs, so that on GPUs only what GPUs do can go wrong."""
    status, output, found, text = report(tmp_path, list(gpu.PARTS), timeout=6000)
    assert status == 0 and [found[part]["status"] for part in gpu.PARTS] == ["ok"] * len(gpu.PARTS), output + text
    assert {row["step"] for row in found["steps"]["rows"]} == set(NAMES)
    losses = [row["losses"][0] for row in found["steps"]["rows"] if row["kind"] == "dense"]
    assert max(losses) - min(losses) < 1e-4
    assert set(found["collectives"]["bus_gb_per_s"]) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send/recv"}
    outcomes = [one["outcome"] for one in found["tests"]["tests"].values()]
    assert outcomes.count("passed") > outcomes.count("failed") == outcomes.count("not reached") == 0
    assert "No test failed." in text and all(name in text for name in ("all_reduce", *NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("model", [gpu.LADDER["dense"][-1], gpu.LADDER["experts"][-1]], ids=["dense", "experts"])
def test_the_steps_take_the_models_that_are_no_presets(tmp_path, monkeypatch, model):
    monkeypatch.setattr(gpu, "OUT", tmp_path)
    flags = ["--ep" if "num_local_experts" in model else "--tp", "2", "--global_batch_size", "2", "--micro_batch_size", "1"]
    status, output = run_program(["tools/simulate", "7", "2", "--model", gpu.model_flag(model), *flags], ROOT, timeout=300)
    assert status == 0 and "tokens/s/GPU" in output, output


def test_what_takes_too_long_is_ended_and_what_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "OUT", tmp_path)
    (tmp_path / "logs").mkdir()

    def execute(seconds, program):
        return gpu.execute("log", [sys.executable, "-c", program], time.monotonic() + seconds)
    asleep = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert execute(1, asleep) == "did not end in time"
    assert execute(300, "raise ValueError('no such thing')") == "ValueError: no such thing"
    assert execute(300, "") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "finds no GPU" in err


# ------------------------------------------------------------------------------------------------ made-up results
MACHINE = dict(status="ok", gpus=[dict(name="Tesla T4", capability="7.5", memory_gib=14.5)] * 2, torch="2.13.0+cu126", cuda="12.6",
               nccl="2.29", driver="575.1", dtype="float32", kernels_for=["sm_75"], product_flops=4e12, links="GPU0 GPU1 PHB",
               python="3.12.1", cpus=8)
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


def test_a_report_can_be_written_whatever_failed():
    failed = dict(status="failed", reason="made up")
    text = gpu.written(MADE_UP | dict(machine=MACHINE | failed | dict(product_flops=None), collectives=failed,
                                      steps=dict(rows=[], **failed), tests=dict(tests={}, **failed)))
    assert all(f"| {part} | failed made up |" in text for part in gpu.PARTS)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_step_has_a_command(ranks):
    found = gpu.commands(ranks)
    assert {step for step, _, _ in found} == set(NAMES) and {many for _, many, _ in found} <= {1, ranks}


@pytest.mark.parametrize("memory_gib, chosen", [(14.5, "llama-16"), (22, "qwen3-0.6b"), (79, "llama-1b"), (4, None)])
def test_the_first_model_that_fits_is_taken(tmp_path, monkeypatch, memory_gib, chosen):
    """Check it with stand-ins for the simulator's numbers."""
    peaks = {"llama-1b": 30, "qwen3-0.6b": 15, "llama-16": 6}
    monkeypatch.setattr(gpu, "OUT", tmp_path)
    monkeypatch.setattr(gpu, "simulated", lambda report, step, ranks, flags, until: dict(
        peak_bytes=peaks[Path(flags[1]).name] * 2**30, flops=1e12))
    size = gpu.size_that_fits(dict(device="cuda", machine=MACHINE | dict(gpus=[dict(memory_gib=memory_gib)])), "dense", 0)
    assert size is None if chosen is None else Path(size["flags"][1]).name == chosen
