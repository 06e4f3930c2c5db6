"""GPUs, and the time that they take for a kernel and for a transfer between them. All facts about GPUs are in this file."""
import math
from collections import Counter
from typing import NamedTuple


class Kernel(NamedTuple):
    name: str
    kind: str                                             # product, attention or memory
    dtype: str
    flops: int
    bytes: int                                            # read and written
    shape: tuple = ()                                     # for products: how many, and each one's rows, columns, inner


class Gpu(NamedTuple):
    bfloat16: float                                       # FLOPs per second of dense products, for each dtype
    float32: float
    float64: float
    float8: float                                         # 0: not supported
    hbm: float                                            # bytes per second to and from its memory
    memory: float                                         # GiB
    multiprocessors: int
    nvlink: float                                         # bytes per second to the other GPUs of its node, in one direction
    watts: float
    product: float                                        # share of the peak that a large product reaches in training: fitted
    attention: tuple                                      # share of the peak that FlashAttention-2 reaches, forward and backward
    node: int = 8                                         # GPUs that NVLink connects
    float4: float = 0                                     # as above, of NVFP4; a GPU that has it also has MXFP8, at float8's speed
    clock: float = 1.0                                    # share of the datasheet's clock, for a GPU with a power limit

    @property
    def usable(self):
        return self.memory * USABLE

    def peak(self, dtype):
        return self.clock * getattr(self, dtype.split("_")[0], self.bfloat16)          # float8_e4m3fn: float8


def at_power(gpu, watts):
    """Return the GPU with a power limit. The clock goes with the cube root of the power."""
    return gpu._replace(clock=(watts / gpu.watts) ** (1 / 3))


# Peak, memory, NVLink and watts are from the makers' datasheets of the SXM (AMD: OAM) modules: without sparsity, float32 without
# TF32, and NVLink as half of the figure for both directions. Multiprocessors are from the architecture white papers. The h800 is an
# H100 with 400 GB/s of NVLink. The v100 is the 32 GB one; its bfloat16 is float16, since it has no bfloat16. The rtx4090's products
# accumulate in float32 (Ada's white paper); it has no NVLink, so PCIe 4.0 stands in. The gb200 is one of the two GPUs of a
# superchip; of the 72 in an NVL72, published runs use 64; so is the gb300. The b300 is one of the eight GPUs of an
# HGX B300; for it and the gb300, a node's or a rack's figures in NVIDIA's datasheets are divided by its GPUs. The mi300x has seven
# links of Infinity Fabric, 64 GB/s each way, and the mi355x seven of 76.8 GB/s (AMD's datasheets); its MXFP4 is not NVFP4. The
# numbers of the h800, v100, rtx4090, gb200 and mi300x are not from the makers' papers, but from other pages that repeat them.
# Attention is for causal heads of 128 and 8k to 16k tokens. For the H100 it is from the FlashAttention-3 paper (arXiv 2407.08608),
# figures 5 and 6, where version 2 reaches 335 TFLOPS forward (causal) and 322 backward (not causal); we take a tenth off the
# latter, as the causal mask costs in forward. For the A100 it is about what the FlashAttention-2 paper (arXiv 2307.08691) shows,
# not read off the figures. Other GPUs have the shares of the one that is most like them.
GPUS = {
    "a100": Gpu(312e12, 19.5e12, 19.5e12, 0, 2.039e12, 80, 108, 300e9, 400, 0.76, (0.64, 0.56)),
    "h100": Gpu(989.5e12, 66.9e12, 66.9e12, 1979e12, 3.35e12, 80, 132, 450e9, 700, 0.66, (0.335, 0.29)),
    "h200": Gpu(989.5e12, 66.9e12, 66.9e12, 1979e12, 4.8e12, 141, 132, 450e9, 700, 0.66, (0.335, 0.29)),
    "h800": Gpu(989.5e12, 66.9e12, 1e12, 1979e12, 3.35e12, 80, 132, 200e9, 700, 0.66, (0.335, 0.29)),
    "b200": Gpu(2250e12, 75e12, 37e12, 4500e12, 7.7e12, 180, 148, 900e9, 1000, 0.66, (0.335, 0.29), float4=9000e12),
    "gb200": Gpu(2500e12, 80e12, 40e12, 5000e12, 8e12, 186, 148, 900e9, 1200, 0.66, (0.335, 0.29), 64, 10000e12),
    "b300": Gpu(2250e12, 75e12, 1.2e12, 4500e12, 7.7e12, 270, 148, 900e9, 1100, 0.66, (0.335, 0.29), float4=13500e12),
    "gb300": Gpu(2500e12, 80e12, 1.3e12, 5000e12, 8e12, 279, 148, 900e9, 1400, 0.82, (0.335, 0.29), 64, 15000e12),
    "v100": Gpu(125e12, 15.7e12, 7.8e12, 0, 0.9e12, 32, 80, 150e9, 300, 0.76, (0.64, 0.56)),
    "rtx4090": Gpu(165.2e12, 82.6e12, 1.3e12, 330.3e12, 1.008e12, 24, 128, 32e9, 450, 0.76, (0.64, 0.56)),
    "mi300x": Gpu(1307.4e12, 163.4e12, 163.4e12, 2614.9e12, 5.3e12, 192, 304, 448e9, 750, 0.66, (0.335, 0.29)),
    "mi355x": Gpu(2516.6e12, 157.3e12, 78.6e12, 5033.2e12, 8e12, 288, 256, 537.6e9, 1400, 0.66, (0.335, 0.29))}
# of its GiB: CUDA, NCCL's communicators and fragmentation take the rest. Of nanotron's published runs on GPUs of 80 GB
# (tests/data), all that succeeded but one held at most 69.8 GiB.
USABLE = 70.5 / 80
NETWORKS = {"infiniband": 50e9, "ethernet": 12.5e9}      # bytes per second per GPU, each way: 400 and 100 Gbit/s
# constants were fitted to runs on these; of the others, published_2026.csv has runs on h200, b200, gb200, b300 and gb300, some of
# which chose gb300's `product`
TESTED = "a100", "h100"

# Fitted, with the `product` of A100 and H100, to the rows of tests/data/published_runs.csv that are marked as fitted.
MEMORY = 0.90                                             # share of the memory's speed that a kernel that only moves data reaches
TAKEN = 0.50                                              # share of their speed that kernels lose while a collective fills NVLink

ISSUE = 6e-6                                              # seconds that Python takes to launch a kernel: assumed
NETWORK = 0.80                                            # share of the network's speed that a ring reaches: assumed
NVLINK = 0.80                                             # the same for NVLink: assumed
SLOWEST = 0.30            # share of TAKEN that even a slow collective takes; this and the next are chosen with published_unseen.csv
ALL_TO_ALL = 0.60         # share of a ring's speed that an all-to-all reaches between nodes, where it sends many small messages
START = 4e-6                                              # seconds that a kernel takes at least: assumed, like the rest
LATENCY = {"nvlink": (12e-6, 1.5e-6), "network": (20e-6, 5e-6)}                    # of a collective: once, and for each hop
TILES = {(128, 256): 1.0, (128, 128): 0.92, (64, 128): 0.72, (64, 64): 0.45}       # of a product: efficiency of each size


class Cluster(NamedTuple):
    gpu: Gpu
    gpus_per_node: int = 8
    network: float = NETWORKS["infiniband"]               # bytes per second of a GPU's network card
    issue: float = ISSUE
    taken: float = TAKEN

    def kernel(self, kernel):
        """Return the seconds that a kernel takes on the device."""
        moved = kernel.bytes / (self.gpu.hbm * MEMORY)
        if kernel.kind == "product":
            return max(self.product(kernel), moved, START)
        if kernel.kind == "attention":
            efficiency = self.gpu.attention[kernel.name.endswith("backward")]
            return max(kernel.flops / (self.gpu.peak(kernel.dtype) * efficiency), moved, START)
        return max(moved, START)

    def product(self, kernel):
        """Return the seconds of a product: its tiles run in waves of one per multiprocessor, and the last wave may be partial."""
        many, rows, columns, inner = kernel.shape
        one = self.gpu.peak(kernel.dtype) * self.gpu.product / self.gpu.multiprocessors     # FLOPs per second
        seconds = []
        for (high, wide), efficiency in TILES.items():
            tiles = many * min(math.ceil(rows / a) * math.ceil(columns / b) for a, b in ((high, wide), (wide, high)))
            waves = math.ceil(tiles / self.gpu.multiprocessors)
            seconds.append(waves * 2 * high * wide * inner / (one * efficiency))
        return min(seconds)

    def share_taken(self, rate):
        """Return the share of their speed that kernels lose while a collective sends `rate` bytes per second."""
        return self.taken * (SLOWEST + (1 - SLOWEST) * min(1.0, rate / (self.gpu.nvlink * NVLINK)))

    def transfer(self, operation):
        """Return (seconds before the first byte, seconds for all bytes, which link) of a collective or message."""
        nodes = Counter(rank // self.gpus_per_node for rank in operation.ranks)
        return self.travel(operation.what, operation.wire, len(operation.ranks), len(nodes), min(nodes.values()))

    def travel(self, what, wire, ranks, nodes, fewest):
        """Return the same, given the number of ranks, of nodes, and of ranks on the node that has fewest."""
        if ranks == 1:
            return 0.0, 0.0, "nvlink"
        inside, outside = self.gpu.nvlink * NVLINK, self.network * NETWORK
        link = "nvlink" if nodes == 1 else "network"
        once, hop = LATENCY[link]
        if what in ("send", "receive"):
            return once, wire / (inside if nodes == 1 else min(inside, outside)), link
        if nodes == 1:
            return once + hop * (ranks - 1), wire / inside, link
        if what == "all_to_all":                          # network cards take what leaves the node, NVLink the rest
            leaves = (ranks - fewest) / max(1, ranks - 1)
            return once, wire * max(leaves / outside / ALL_TO_ALL, (1 - leaves) / inside), link
        # a ring enters and leaves a node once for each of its GPUs there, each time through another network card
        hops = nodes + LATENCY["nvlink"][1] / hop * (ranks - nodes)
        return once + hop * min(hops, 64), wire / min(inside, fewest * outside), link
