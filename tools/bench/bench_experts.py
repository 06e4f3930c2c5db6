"""The layer of experts of step 7 with grouped products and with a loop over the experts: python tools/bench/bench_experts.py

Forward and backward of moe.MoE, one process, one thread, random tokens; rounds of the two alternate, and the number
to read is the median of the ratios within a round.
"""
import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
from steps import step_dir

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 512, 1024, 8, 2, 2048


def grouped(x, weight, counts):
    return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))


def loop(x, weight, counts):
    return torch.cat([F.linear(rows, one) for rows, one in zip(x.split(counts.tolist()), weight)])


def seconds(layer, x):
    start = time.perf_counter()
    layer(x).sum().backward()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    args = parser.parse_args()
    sys.path.insert(0, str(step_dir("step07_ep")))
    import config
    import moe
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = config.ModelConfig(256, HIDDEN, INTERMEDIATE, 1, 8, 8, 64, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    for dtype in (torch.bfloat16, torch.float32):
        layer = moe.MoE(shape).to(dtype)
        for param in layer.parameters():
            torch.nn.init.normal_(param, std=0.05)
        x, ratios, own = torch.randn(1, args.tokens, HIDDEN, dtype=dtype, requires_grad=True), [], []
        for i in range(args.rounds + 1):
            taken = {}
            for product in (grouped, loop)[::1 if i % 2 else -1]:
                moe.grouped_product = product
                taken[product] = seconds(layer, x)
            ratios.append(taken[loop] / taken[grouped])
            own.append(taken[grouped])
        print(f"{dtype}: grouped products {statistics.median(ratios[1:]):.2f} times as fast as the loop "
              f"({1000 * statistics.median(own[1:]):.0f} ms, forward and backward)")


if __name__ == "__main__":
    main()
