"""GPUs, and how long they take: for a kernel, and for what travels between them. The one place for facts about GPUs."""
import math
from collections import Counter
from typing import NamedTuple


class Gpu(NamedTuple):
    peak: dict                                            # FLOPs per second of dense products, by dtype
    hbm: float                                            # bytes per second of its memory
    memory: float                                         # GiB
    multiprocessors: int
    nvlink: float                                         # bytes per second to the others of its node, in one direction
    watts: int
    product: float                                        # of the peak, what a large product reaches in training: fitted
    attention: tuple                                      # of the peak, what FlashAttention-2 reaches, forward and backward


def peaks(bfloat16, float32, float64):
    return dict(bfloat16=bfloat16 * 1e12, float32=float32 * 1e12, float64=float64 * 1e12)


# peak, memory, NVLink, watts: NVIDIA's datasheets of the SXM modules (without sparsity; float32 without TF32; half of the
# NVLink that is given for both directions). multiprocessors: NVIDIA's architecture white papers.
# attention, of heads of 128, causal, 8k to 16k tokens: H100 of the FlashAttention-3 paper (arXiv 2407.08608), figures 5 and 6,
# where version 2 makes 335 TFLOPS forward and, not causal, 322 backward, of which a tenth is taken as it is forward; A100 of the
# FlashAttention-2 paper (arXiv 2307.08691), figures 5 and 6. For H200 and B200 H100's shares are taken, there and in product.
GPUS = {
    "a100": Gpu(peaks(312, 19.5, 19.5), 2.039e12, 80, 108, 300e9, 400, 0.80, (0.64, 0.56)),
    "h100": Gpu(peaks(989.5, 66.9, 66.9), 3.35e12, 80, 132, 450e9, 700, 0.62, (0.335, 0.29)),
    "h200": Gpu(peaks(989.5, 66.9, 66.9), 4.8e12, 141, 132, 450e9, 700, 0.62, (0.335, 0.29)),
    "b200": Gpu(peaks(2250, 75, 37), 7.7e12, 180, 148, 900e9, 1000, 0.62, (0.335, 0.29))}

# Fitted, with `product` of H100 and A100, to the four rows of tests/data/published_runs.csv that are marked so.
MEMORY = 0.75                                             # of the memory's speed, what a kernel that only moves data reaches
NETWORK = 0.80                                            # of the network's speed, what a ring reaches

ISSUE = 6e-6                                              # seconds of the host for one kernel, in Python
NVLINK = 0.80                                             # of NVLink's speed: 360 of 450 GB/s in NVIDIA's nccl-tests on 8 H100
START = 4e-6                                              # seconds: what a kernel takes at least
LATENCY = {"nvlink": (12e-6, 1.5e-6), "network": (20e-6, 5e-6)}                    # of a collective: once, and for each hop
TILES = {(128, 256): 1.0, (128, 128): 0.92, (64, 128): 0.72, (64, 64): 0.45}       # of a product: what each reaches


class Cluster(NamedTuple):
    gpu: Gpu
    gpus_per_node: int = 8
    network: float = 50e9                                 # bytes per second of a GPU's network card
    issue: float = ISSUE

    def kernel(self, kernel):
        """Seconds on the device."""
        moved = kernel.bytes / (self.gpu.hbm * MEMORY)
        if kernel.kind == "product":
            return max(self.product(kernel), moved, START)
        if kernel.kind == "attention":
            efficiency = self.gpu.attention[kernel.name.endswith("backward")]
            return max(kernel.flops / (self.peak(kernel) * efficiency), moved, START)
        return max(moved, START)

    def peak(self, kernel):
        return self.gpu.peak.get(kernel.dtype, self.gpu.peak["bfloat16"])

    def product(self, kernel):
        """Its tiles, as many at a time as there are multiprocessors. The last time there may be fewer."""
        many, rows, columns, inner = kernel.shape
        one = self.peak(kernel) * self.gpu.product / self.gpu.multiprocessors     # FLOPs per second
        seconds = []
        for (high, wide), efficiency in TILES.items():
            tiles = many * min(math.ceil(rows / a) * math.ceil(columns / b) for a, b in ((high, wide), (wide, high)))
            waves = math.ceil(tiles / self.gpu.multiprocessors)
            seconds.append(waves * 2 * high * wide * inner / (one * efficiency))
        return min(seconds)

    def transfer(self, operation):
        """(seconds before the first byte, seconds for all, which link) of a collective or message."""
        nodes = Counter(rank // self.gpus_per_node for rank in operation.ranks)
        if len(operation.ranks) == 1:
            return 0.0, 0.0, "nvlink"
        inside = self.gpu.nvlink * NVLINK
        link = "nvlink" if len(nodes) == 1 else "network"
        once, hop = LATENCY[link]
        if operation.what in ("send", "receive"):
            return once, operation.wire / min(inside, self.network * NETWORK if link == "network" else inside), link
        if link == "nvlink":
            return once + hop * (len(operation.ranks) - 1), operation.wire / inside, link
        fewest, ranks = min(nodes.values()), len(operation.ranks)
        if operation.what == "all_to_all":                # each card takes what leaves the node, NVLink the rest
            leaves = (ranks - fewest) / max(1, ranks - 1)
            return once, operation.wire * max(leaves / (self.network * NETWORK), (1 - leaves) / inside), link
        # a ring enters and leaves a node once for each of its GPUs there, each time by another card
        hops = len(nodes) + LATENCY["nvlink"][1] / hop * (ranks - len(nodes))
        return once + hop * min(hops, 64), operation.wire / min(inside, fewest * self.network * NETWORK), link
