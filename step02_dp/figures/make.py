"""Makes, from runs, this README's pictures and the tables between its `<!-- measured: ... -->` marks.

    python step02_dp/figures/make.py        (about three minutes on two cores)
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time

STEP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIGURES = os.path.join(STEP, "figures")
sys.path.insert(0, STEP)
os.environ["OMP_NUM_THREADS"] = "1"

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import config
import mesh
import optimizer
import train
from data_parallel import data_parallel, make_buckets

# 7.9M parameters: 31.6 MB of float32 gradients in 75 tensors
SHAPE = dict(model_type="llama", vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=8,
             num_attention_heads=8, num_key_value_heads=4, head_dim=32, rms_norm_eps=1e-5,
             rope_theta=500000.0, max_position_embeddings=4096)
MODES = {"naive": "naive", "overlap": "overlap", "bucket": "bucket --bucket_mb 4"}
BUCKETS = [0.25, 1, 4, 25, 100]
SEQ_LEN, TOKENS, ROUNDS = 64, [64, 128, 256], 4          # tokens: of one step on one rank


def run(ranks, flags):
    """Runs the trainer under torchrun; returns what it printed, and its log lines."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log.jsonl")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc_per_node", str(ranks), os.path.join(STEP, "train.py"), *flags.split(),
                   "--log_file", log]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
        with open(log) as lines:
            return output, [json.loads(line) for line in lines]


# ------------------------------------------------------------------------------------------------ the picture
def spans_of(trace):
    """(start, end) in ms of backward, all-reduces (by thread) and optimizer, from the start of backward."""
    with open(trace) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    reduces = [e for e in events if e["name"] == "gloo:all_reduce"]
    loss = max(reduces, key=lambda e: e["ts"])            # the last is the loss's
    backward = [e for e in events if e["name"].startswith("autograd::engine")]
    adamw = next(e for e in events if e["name"].startswith("Optimizer.step"))
    start = min(e["ts"] for e in backward)
    span = lambda es: ((min(e["ts"] for e in es) - start) / 1e3,
                       (max(e["ts"] + e["dur"] for e in es) - start) / 1e3)
    threads = sorted({e["tid"] for e in reduces})
    return dict(backward=span(backward), optimizer=span([adamw]),
                reduces=[(threads.index(e["tid"]), *span([e])) for e in reduces if e is not loss])


def overlap_picture(folder):
    """A training step of each mode, rank 0 of 2, from the start of backward: of three traces the shortest."""
    traces = {}
    for mode, flags in MODES.items():
        for _ in range(3):
            run(2, f"--model {folder} --seq_len {SEQ_LEN} --micro_batch_size 4 --global_batch_size 8 "
                   f"--steps 5 --dp_mode {flags} --profile {folder}")
            spans = spans_of(os.path.join(folder, "trace_rank0.json"))
            if mode not in traces or spans["optimizer"][1] < traces[mode]["optimizer"][1]:
                traces[mode] = spans
    figure, panels = plt.subplots(3, 1, figsize=(11, 5.2), sharex=True)
    for (mode, flags), axes in zip(MODES.items(), panels):
        spans = traces[mode]
        for name, color in (("backward", "#6aa56e"), ("optimizer", "#a9a9a9")):
            begin, end = spans[name]
            axes.broken_barh([(begin, end - begin)], (1.1, 0.8), color=color)
            axes.text(end if name == "optimizer" else begin, 1.5, f" {name}", va="center", fontsize=9)
        for thread, begin, end in spans["reduces"]:
            axes.broken_barh([(begin, end - begin)], (0.1 + 0.4 * (1 - thread), 0.38), facecolor="#d9a441",
                             edgecolor="white", linewidth=0.5 * (end - begin > 3))
        over, done = spans["backward"][1], max(end for *_, end in spans["reduces"])
        axes.axvspan(over, max(over, done), color="#c8605a", alpha=0.2, linewidth=0)
        late = f"{max(0, done - over):.0f} ms of them after backward"
        axes.set(title=f"--dp_mode {flags}: {len(spans['reduces'])} all-reduces, {late}", yticks=[0.5, 1.5],
                 yticklabels=["network\n(2 threads)", "compute"], ylim=(0, 2))
        axes.title.set_fontsize(10)
    panels[-1].set(xlabel="ms", xlim=(0, None))
    figure.tight_layout()
    figure.savefig(os.path.join(FIGURES, "overlap.png"), dpi=110)


# ------------------------------------------------------------------------------------------- timing the modes
def timing_worker(rank, port, folder, results):
    """Times forward and backward, and the wait for the sum after it, in rounds in which all take turns.

    Both are the fastest round's: on a machine that others use too, all else is their doing."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.set_num_threads(1)
    the_mesh, contestants, seconds = None, {}, {}
    for name, flags in {"alone": "naive", "naive": "naive", "overlap": "overlap",
                        **{mb: f"bucket --bucket_mb {mb}" for mb in BUCKETS}}.items():
        args = config.parse_args(f"--model {folder} --seq_len {SEQ_LEN} --micro_batch_size 1 "
                                 f"--global_batch_size 2 --dp_mode {flags}".split())
        args.dp = 2
        the_mesh = the_mesh or mesh.start_mesh(args)
        model = train.build_model(config.load_config(args), args)
        optimizer.accumulate_gradients(model.parameters())
        sum_gradients = data_parallel(model.parameters(), the_mesh.get_group("dp"), args)
        contestants[name] = model, sum_gradients if name != "alone" else lambda: None, args
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))

    def timed(what, compute, finish):
        dist.barrier()
        start = time.perf_counter()
        compute()
        middle = time.perf_counter()
        finish()
        slower = 1e3 * torch.tensor([middle - start, time.perf_counter() - middle])
        dist.all_reduce(slower, op=dist.ReduceOp.MAX)
        seconds.setdefault(what, []).append(slower)

    for _ in range(ROUNDS + 1):
        timed("network", lambda: None, lambda: [dist.all_reduce(part) for part in flat.split(25 * 2**18)])
        for tokens in TOKENS:
            rows = torch.randint(0, 4096, (tokens // SEQ_LEN, SEQ_LEN + 1))
            batch = [(rows[:, :-1], torch.arange(SEQ_LEN), rows[:, 1:])]           # of that many tokens
            for name, (model, finish, args) in contestants.items():
                if tokens == 128 or name in ("alone", "naive", "overlap", 4):
                    timed((tokens, name), lambda: train.forward_backward(model, batch, args), finish)
                    for param in model.parameters():
                        param.main_grad.zero_()
    if rank == 0:
        results.put({what: torch.stack(times[1:]).amin(0).tolist() for what, times in seconds.items()})
    dist.destroy_process_group()


def timing_tables(folder):
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(timing_worker, args=(29671 + os.getpid() % 500, folder, results), nprocs=2)
    ms = results.get()
    network = ms["network"][1]
    modes = ["| tokens per rank | compute | network | compute / network | wait: naive | overlap "
             "| bucket (4 MiB) |", "|" + "---|" * 7]
    for tokens in TOKENS:
        compute = ms[tokens, "alone"][0]
        modes.append(f"| {tokens:,} | {compute:.0f} ms | {network:.0f} ms | {compute / network:.1f} | "
                     + " | ".join(f"{ms[tokens, name][1]:.1f} ms" for name in ("naive", "overlap", 4)) + " |")
    sizes = ["| `--bucket_mb` | all-reduces | wait |", "|---|---|---|"]
    args = config.parse_args(["--model", folder])
    for mb in BUCKETS:
        model = train.build_model(config.load_config(args), args)
        optimizer.accumulate_gradients(model.parameters())
        sizes.append(f"| {mb} | {len(make_buckets(list(model.parameters()), mb * 2**20))} "
                     f"| {ms[128, mb][1]:.1f} ms |")
    return dict(modes=modes, buckets=sizes)


# ------------------------------------------------------------------------------------------- the other tables
def same_table():
    rows = ["| ranks (dp) | micro-batch | accumulation | loss of the 4th step, float64 |",
            "|---|---|---|---|"]
    for dp, micro in ((1, 16), (1, 2), (2, 8), (2, 2), (4, 1)):
        loss = run(dp, f"--steps 4 --dtype float64 --micro_batch_size {micro}")[1][-1]["loss"]
        rows.append(f"| {dp} | {micro} | {16 // dp // micro} | {loss:.14f} |")
    return rows


def ledger_block():
    lines = ["```text"]
    for flags in ("naive", "bucket", "bucket --bucket_mb 0.5"):
        output, _ = run(2, f"--steps 2 --ledger --dp_mode {flags}")
        table = re.search(r"^dimension.*\n(?:\w+ +\w+ .*\n)+", output, re.M)[0]
        lines += [f"--dp_mode {flags}", *table.splitlines(), ""]
    return lines[:-1] + ["```"]


def bfloat16_table():
    """Real gradients of single sequences, added one after the other as a ring does."""
    args = config.parse_args("--global_batch_size 64 --micro_batch_size 1".split())
    args.dp = 1
    shape = config.load_config(args)
    model = train.build_model(shape, args)
    grads = []
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="0")
    one = next(train.batches(train.load_tokens(args, shape.vocab_size), mesh.start_mesh(args), args))
    for inputs, positions, targets in one:
        model(inputs, positions, targets).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    dist.destroy_process_group()
    rows = ["| ranks | error of the sum in float32 | in bfloat16 |", "|---|---|---|"]
    for ranks in (2, 8, 64):
        exact = sum(g.double() for g in grads[:ranks])
        summed = lambda dtype: sum(g.to(dtype) for g in grads[:ranks])
        error = lambda dtype: float((summed(dtype).double() - exact).norm() / exact.norm())
        rows.append(f"| {ranks} | {error(torch.float32):.0e} | {error(torch.bfloat16):.1%} |")
    return rows


def bandwidth_table():
    bench = os.path.join(os.path.dirname(STEP), "tests", "bench_collectives.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               bench, "--out", os.path.join(FIGURES, "bandwidth.png")]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return [line for line in output.splitlines() if line.startswith("|")]


def put_into_readme(tables):
    path = os.path.join(STEP, "README.md")
    with open(path) as file:
        text = file.read()
    for name, rows in tables.items():
        text, found = re.subn(rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)",
                              lambda m: m[1] + "\n".join(rows) + "\n" + m[2], text, flags=re.S)
        assert found == 1, f"README.md has {found} tables of the name {name}"
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(SHAPE, file)
        overlap_picture(folder)
        tables = timing_tables(folder)
    put_into_readme(dict(tables, same=same_table(), ledger=ledger_block(), bfloat16=bfloat16_table(),
                         bandwidth=bandwidth_table()))
