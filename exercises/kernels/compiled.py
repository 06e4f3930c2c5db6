"""Show what torch.compile makes of step 1's block on this CPU: its kernels, and how many products it leaves to the library.

    python exercises/kernels/compiled.py           # needs a C++ compiler; takes a minute
"""
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from torch._inductor.utils import run_and_get_code

sys.path.insert(0, str(Path(__file__).parents[2] / "step01_single_gpu"))
from config import PRESETS
from model import Block, rotary_tables

PRODUCTS = r"^ *extern_kernels\.(\w+)\(|= torch\.ops\.aten\.(_scaled_dot_product\w+)\.default\("


def written():
    """Compile the block. Return the generated code of forward and of backward."""
    config = PRESETS["tiny"]
    torch.manual_seed(0)
    block, x = Block(config), torch.randn(2, 128, config.hidden_size, requires_grad=True)
    cos, sin = rotary_tables(torch.arange(128), config, x.dtype)
    compiled = torch.compile(block)
    _, code = run_and_get_code(lambda: compiled(x, cos, sin).sum().backward())
    return code


def lines():
    for name, code in zip(("forward", "backward"), written()):
        body = code[code.index("def call("):]
        yield name
        yield from (f"    {kernel}" for kernel in re.findall(r"^ *(cpp_fused_\w+)\(", body, re.MULTILINE))
        calls = Counter("".join(call) for call in re.findall(PRODUCTS, body, re.MULTILINE))
        yield f"    and the library's {', '.join(f'{n} x {call}' for call, n in calls.items())}"


if __name__ == "__main__":
    print("\n".join(lines()))
