"""Tests of expert_chunks.patch: with rows sent in chunks, a run equals one process, waits late, and keeps the order of calls."""
import json
from types import SimpleNamespace

import cases
import pytest
import torch
import toy
from harness import assert_same_run
from jobs import assert_refused
from layouts import Layout
from observe import check
from safetensors.torch import load_file
from steps import ROOT
from test_step07 import STEP, routed_job

EXACT = "--dtype float64"
LAYOUTS = [
    (2, "top2-2", "--recompute full --micro_batch_size 6 --ep 2 --cp 2 --cp_mode zigzag --zero 3 --balance aux --expert_chunks 3"),
    (4, "top4-2", "--recompute none --micro_batch_size 6 --ep 4 --zero 2 --balance aux --expert_chunks 3"),
    (4, "top2-2", "--recompute selective --micro_batch_size 6 --ep 2 --tp 2 --sp on --zero 1 --balance bias --expert_chunks 2"),
    (4, "top2-2", "--recompute full --micro_batch_size 6 --ep 4 --cp 2 --cp_mode zigzag --balance bias --expert_chunks 2"),
    (4, "top1-2", "--recompute none --micro_batch_size 6 --ep 2 --dp_mode overlap --balance none --expert_chunks 3"),
    (8, "top2-2", "--recompute none --micro_batch_size 6 --ep 8 --cp 2 --cp_mode zigzag --zero 2 --balance bias --expert_chunks 2")]
PIPELINES = [
    ("afab", 2, "--recompute full --zero 2 --expert_chunks 2"), ("1f1b", 2, "--recompute none --zero 3 --expert_chunks 3"),
    ("interleaved", 4, "--recompute none --expert_chunks 2"), ("zerobubble", 2, "--recompute full --zero 2 --expert_chunks 3"),
    ("dualpipe", 4, "--recompute none --dp_mode overlap --expert_chunks 2")]
LAYOUTS += [(4, f"top2-{layers}", f"--micro_batch_size 3 --pp 2 --schedule {schedule} --ep 2 --balance bias {more}")
            for schedule, layers, more in PIPELINES]


@pytest.mark.parametrize("world, shape, flags", LAYOUTS, ids=[flags for *_, flags in LAYOUTS])
def test_trains_as_one_process(pool, world, shape, flags):
    """Check the weights, the bytes against the formula, that operations meet, and that nothing is read before it was waited for."""
    check(pool, Layout(STEP, world, shape, "adamw", f"{EXACT} {flags}"))


@pytest.mark.parametrize("flags", ["--ep 2 --expert_chunks 3", "--ep 2 --pp 2 --schedule zerobubble --expert_chunks 2"])
def test_sums_of_gradients(pool, flags):
    world = 4 if "--pp" in flags else 2
    check(pool, Layout(STEP, world, "top2-2", "sgd", f"{EXACT} --recompute none --micro_batch_size 6 {flags} --balance bias"))


def trained(pool, folder, world, argv, bias):
    folder.mkdir(parents=True)
    pool.call(routed_job, STEP, world=world, argv=argv.split(), bias=bias, folder=str(folder))
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return SimpleNamespace(losses=[line["loss"] for line in lines], grad_norms=[line["grad_norm"] for line in lines],
                           weights=load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("world, bias, flags", [
    (2, [9.0, 5] + [0] * 6, "--ep 2 --expert_chunks 2 --zero 3"),                  # rank 1 has no row
    (4, [0] * 6 + [5, 9.0], "--ep 2 --pp 2 --schedule zerobubble --expert_chunks 3 --recompute full"),            # rank 0 has none
    (2, [0] * 8, "--ep 2 --expert_chunks 9 --seq_len 4")])                         # 8 rows: the first chunk is empty on all ranks
def test_experts_ranks_and_chunks_without_rows(pool, tmp_path, world, bias, flags):
    case = cases.make(tmp_path / "case", **cases.shape("top2-2"))
    base = f"{case} {EXACT} --balance none --global_batch_size 4 --micro_batch_size 1"
    one = trained(pool, tmp_path / "one", 1, f"{base} {'--seq_len 4' if '--seq_len 4' in flags else ''}", bias)
    assert_same_run(trained(pool, tmp_path / "chunks", world, f"{base} {flags}", bias), one, 1e-9, flags)


@pytest.mark.parametrize("flags", ["--ep 2 --tp 2", "--ep 2 --pp 2 --schedule zerobubble --recompute full"])
def test_what_travels_behind_work_is_not_waited_for(pool, flags):
    """Play the run back: only the first chunk's way out and the last one's way back may be exposed."""
    exposed = {}
    for chunks in (1, 2, 4):
        more = f"{flags} --expert_chunks {chunks} --lr 0 --seq_len 64 --global_batch_size 4 --micro_batch_size 1"
        notes = toy.run(pool, STEP, 4, more, **toy.EXPERTS, num_hidden_layers=2)
        exposed[chunks] = toy.waited(toy.play(notes, 100), "ep") - toy.waited(toy.play(notes, 0), "ep")
    assert exposed[2] < 0.6 * exposed[1] and exposed[4] < 0.4 * exposed[1], exposed


def test_one_chunk_is_the_step_itself(pool, tmp_path):
    """Compare to the last bit."""
    flags = f"{cases.make(tmp_path, **cases.shape('top2-2'))} --micro_batch_size 6 --ep 2 --steps 2"
    here, there = (pool.train(step, flags, world=2) for step in (STEP, ROOT / STEP))
    assert here.losses == there.losses and here.grad_norms == there.grad_norms
    assert here.weights.keys() == there.weights.keys() and all(map(torch.equal, here.weights.values(), there.weights.values()))


@pytest.mark.parametrize("flags, message", [
    ("--expert_chunks 2", "--expert_chunks 2: requires --ep 2 or more; with --ep 1 no row travels"),
    ("--ep 2 --expert_chunks 0", "--expert_chunks: must be at least 1 and below 100000000, but is 0")])
def test_refused(pool, tmp_path, flags, message):
    assert_refused(pool, STEP, 2, f"{cases.make(tmp_path, **cases.shape('top2-2'))} --micro_batch_size 1 {flags}", message)
