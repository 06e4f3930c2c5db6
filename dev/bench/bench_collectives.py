"""Measure the bus bandwidth of the collectives, by message size: gloo on the CPU, NCCL where every rank has a GPU.

    torchrun --standalone --nproc_per_node 4 dev/bench/bench_collectives.py [--out bandwidth.png]

Bus bandwidth is the rate at which a ring loads each link: the bytes that each rank sends by the formula (ledger.py of
step 2), divided by the time. So if it differs between collectives or group sizes, the amount of data is not the reason.
Without torchrun it starts two ranks.
"""
import argparse
import json
import os
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated")
SIZES = [2**k for k in range(12, 27, 2)]                  # payload in bytes, 4 KiB to 64 MiB; on GPUs one more


def collectives(n, rank):
    """Return {name: (function of the whole tensor and one rank's part of it, bytes sent per byte of payload)}."""
    def send_recv(whole, part):                           # to the next rank in the ring, from the previous one
        sends = [dist.P2POp(dist.isend, whole, (rank + 1) % n),
                 dist.P2POp(dist.irecv, send_recv.buffer[:len(whole)], (rank - 1) % n)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
    send_recv.buffer = torch.empty(SIZES[-1] // 4, device=DEVICE)
    return {"all_reduce": (lambda whole, part: dist.all_reduce(whole), 2 * (n - 1) / n),
            "all_gather": (lambda whole, part: dist.all_gather_into_tensor(whole, part), (n - 1) / n),
            "reduce_scatter": (lambda whole, part: dist.reduce_scatter_tensor(part, whole), (n - 1) / n),
            "all_to_all": (lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole), (n - 1) / n),
            "send/recv": (send_recv, 1)}


def seconds(call, whole, part):
    """Return the slowest rank's time, the median over rounds."""
    rounds = []
    for _ in range(max(5, min(40, 2**24 // whole.nbytes)) + 2):
        dist.barrier()
        start = time.perf_counter()
        call(whole, part)
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        rounds.append(time.perf_counter() - start)
    slowest = torch.tensor(rounds[2:], device=DEVICE)     # the first two warm up
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def draw(table, title, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(7.5, 3.8))
    for name, speeds in table.items():
        axes.plot(SIZES, speeds, "o-", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, map(size_name, SIZES))
    axes.set(title=title, xlabel="payload", ylabel="bus bandwidth, GB/s", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def size_name(size):
    return f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB"


def main():
    n, rank, table = dist.get_world_size(), dist.get_rank(), {}
    for name, (call, sent) in collectives(n, rank).items():
        table[name] = []
        for size in SIZES:
            part = torch.ones(size // 4 // n, device=DEVICE)
            table[name].append(sent * part.nbytes * n / seconds(call, torch.ones(len(part) * n, device=DEVICE), part) / 1e9)
        if rank == 0 and JSON:                            # after each, in case the next one hangs
            with open(JSON, "w") as file:
                json.dump(dict(backend=dist.get_backend(), ranks=n, sizes=SIZES, bus_gb_per_s=table), file)
    if rank == 0:
        print("| payload | " + " | ".join(table) + " |\n|" + "---|" * (len(table) + 1))
        for size, *row in zip(SIZES, *table.values()):
            print(f"| {size_name(size)} | " + " | ".join(f"{speed:.2g}" for speed in row) + " |")
        if OUT:
            draw(table, f"{dist.get_backend()}, {n} ranks", OUT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", help="a picture of the table")
    parser.add_argument("--json", help="a file for the same numbers")
    parser.add_argument("--sizes", type=int, help="how many message sizes to measure, from the smallest up")
    args = parser.parse_args()
    OUT, JSON = args.out, args.json
    if "RANK" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        os.execv(sys.executable, [*torchrun, *sys.argv])
    local = int(os.environ["LOCAL_RANK"])
    DEVICE = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if DEVICE == "cuda":
        torch.cuda.set_device(local)
        SIZES.append(2**28)
    SIZES = SIZES[:args.sizes]
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    main()
    dist.destroy_process_group()
