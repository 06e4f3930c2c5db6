"""GPUs, and how long they take: for a kernel, and for what travels between them. The one place for facts about GPUs."""
import math
from collections import Counter
from typing import NamedTuple


class Kernel(NamedTuple):
    name: str
    kind: str                                             # product, attention or memory
    dtype: str
    flops: int
    bytes: int                                            # read and written
    shape: tuple = ()                                     # of products: how many, and each one's rows, columns, inner


class Gpu(NamedTuple):
    bfloat16: float                                       # FLOPs per second of dense products, by dtype
    float32: float
    float64: float
    float8: float                                         # 0: it has none
    hbm: float                                            # bytes per second of its memory
    memory: float                                         # GiB
    multiprocessors: int
    nvlink: float                                         # bytes per second to the others of its node, in one direction
    watts: float
    product: float                                        # of the peak, what a large product reaches in training: fitted
    attention: tuple                                      # of the peak, what FlashAttention-2 reaches, forward and backward
    clock: float = 1.0                                    # of the datasheet's, where it may not take all its power

    def peak(self, dtype):
        return self.clock * getattr(self, dtype.split("_")[0], self.bfloat16)          # float8_e4m3fn: float8


def at_power(gpu, watts):
    """A GPU that may not take all its power: what it takes grows with the clock's third power."""
    return gpu._replace(clock=(watts / gpu.watts) ** (1 / 3))


# peak, memory, NVLink, watts: the makers' datasheets of the SXM (AMD: OAM) modules, without sparsity; float32 without TF32; half
# of the NVLink that is given for both directions. multiprocessors: their architecture white papers. h800: an H100 with 400 GB/s of
# NVLink. v100: of 32 GB, float16, for it has no bfloat16. rtx4090: products that add up in float32 (Ada's white paper); no NVLink,
# PCIe 4.0 in its place. gb200: one of two GPUs of a superchip. mi300x: seven links of Infinity Fabric, 64 GB/s each way.
# These five were not read off their makers' papers, but from pages of others that repeat them.
# attention, of heads of 128, causal, 8k to 16k tokens: H100 of the FlashAttention-3 paper (arXiv 2407.08608), figures 5 and 6,
# where version 2 makes 335 TFLOPS forward and, not causal, 322 backward, of which a tenth is taken as it is forward; A100: about
# what the FlashAttention-2 paper (arXiv 2307.08691) shows, not read off. Others have the shares of the GPU that is most like them.
GPUS = {
    "a100": Gpu(312e12, 19.5e12, 19.5e12, 0, 2.039e12, 80, 108, 300e9, 400, 0.78, (0.64, 0.56)),
    "h100": Gpu(989.5e12, 66.9e12, 66.9e12, 1979e12, 3.35e12, 80, 132, 450e9, 700, 0.66, (0.335, 0.29)),
    "h200": Gpu(989.5e12, 66.9e12, 66.9e12, 1979e12, 4.8e12, 141, 132, 450e9, 700, 0.66, (0.335, 0.29)),
    "h800": Gpu(989.5e12, 66.9e12, 1e12, 1979e12, 3.35e12, 80, 132, 200e9, 700, 0.66, (0.335, 0.29)),
    "b200": Gpu(2250e12, 75e12, 37e12, 4500e12, 7.7e12, 180, 148, 900e9, 1000, 0.66, (0.335, 0.29)),
    "gb200": Gpu(2500e12, 80e12, 40e12, 5000e12, 8e12, 186, 148, 900e9, 1200, 0.66, (0.335, 0.29)),
    "v100": Gpu(125e12, 15.7e12, 7.8e12, 0, 0.9e12, 32, 80, 150e9, 300, 0.78, (0.64, 0.56)),
    "rtx4090": Gpu(165.2e12, 82.6e12, 1.3e12, 330.3e12, 1.008e12, 24, 128, 32e9, 450, 0.78, (0.64, 0.56)),
    "mi300x": Gpu(1307.4e12, 163.4e12, 163.4e12, 2614.9e12, 5.3e12, 192, 304, 448e9, 750, 0.66, (0.335, 0.29))}
TESTED = "a100", "h100"                                   # of the others no published run has been compared

# Fitted, with `product` of A100 and H100, to the rows of tests/data/published_runs.csv that are marked so.
MEMORY = 0.90                                             # of the memory's speed, what a kernel that only moves data reaches
TAKEN = 0.50                                              # of their speed, what kernels lose while a collective runs beside them

ISSUE = 6e-6                                              # seconds of the host for one kernel, in Python: assumed
NETWORK = 0.80                                            # of the network's speed, what a ring reaches: assumed
NVLINK = 0.80                                             # of NVLink's speed; this and what follows is assumed, not fitted
START = 4e-6                                              # seconds: what a kernel takes at least
LATENCY = {"nvlink": (12e-6, 1.5e-6), "network": (20e-6, 5e-6)}                    # of a collective: once, and for each hop
TILES = {(128, 256): 1.0, (128, 128): 0.92, (64, 128): 0.72, (64, 64): 0.45}       # of a product: what each reaches


class Cluster(NamedTuple):
    gpu: Gpu
    gpus_per_node: int = 8
    network: float = 50e9                                 # bytes per second of a GPU's network card
    issue: float = ISSUE
    taken: float = TAKEN

    def kernel(self, kernel):
        """Seconds on the device."""
        moved = kernel.bytes / (self.gpu.hbm * MEMORY)
        if kernel.kind == "product":
            return max(self.product(kernel), moved, START)
        if kernel.kind == "attention":
            efficiency = self.gpu.attention[kernel.name.endswith("backward")]
            return max(kernel.flops / (self.gpu.peak(kernel.dtype) * efficiency), moved, START)
        return max(moved, START)

    def product(self, kernel):
        """Its tiles, as many at a time as there are multiprocessors. The last time there may be fewer."""
        many, rows, columns, inner = kernel.shape
        one = self.gpu.peak(kernel.dtype) * self.gpu.product / self.gpu.multiprocessors     # FLOPs per second
        seconds = []
        for (high, wide), efficiency in TILES.items():
            tiles = many * min(math.ceil(rows / a) * math.ceil(columns / b) for a, b in ((high, wide), (wide, high)))
            waves = math.ceil(tiles / self.gpu.multiprocessors)
            seconds.append(waves * 2 * high * wide * inner / (one * efficiency))
        return min(seconds)

    def transfer(self, operation):
        """(seconds before the first byte, seconds for all, which link) of a collective or message."""
        nodes = Counter(rank // self.gpus_per_node for rank in operation.ranks)
        return self.travel(operation.what, operation.wire, len(operation.ranks), len(nodes), min(nodes.values()))

    def travel(self, what, wire, ranks, nodes, fewest):
        """The same, by how many ranks it has, on how many nodes, and where it has fewest."""
        if ranks == 1:
            return 0.0, 0.0, "nvlink"
        inside, outside = self.gpu.nvlink * NVLINK, self.network * NETWORK
        link = "nvlink" if nodes == 1 else "network"
        once, hop = LATENCY[link]
        if what in ("send", "receive"):
            return once, wire / (inside if nodes == 1 else min(inside, outside)), link
        if nodes == 1:
            return once + hop * (ranks - 1), wire / inside, link
        if what == "all_to_all":                          # each card takes what leaves the node, NVLink the rest
            leaves = (ranks - fewest) / max(1, ranks - 1)
            return once, wire * max(leaves / outside, (1 - leaves) / inside), link
        # a ring enters and leaves a node once for each of its GPUs there, each time by another card
        hops = nodes + LATENCY["nvlink"][1] / hop * (ranks - nodes)
        return once + hop * min(hops, 64), wire / min(inside, fewest * outside), link
