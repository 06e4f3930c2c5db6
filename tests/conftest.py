import os
from collections import defaultdict

import pytest
import torch

from harness import Pool

# The tests compare with one process to the last digits, on the CPU, with gloo, as many ranks as it takes. What a GPU does is
# seen by test_gpus.py; all others, and what they start, do not see it.
GPUS, VISIBLE = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()


def pytest_addoption(parser):
    parser.addoption("--part", choices=["quick", "rest", "all"], default="all", help="quick: some minutes' worth of every kind; rest: the others")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """quick: not the slow tests; and of a test that trains under many layouts only the one in the middle."""
    part, cases = config.getoption("--part"), defaultdict(list)
    for item in items:
        cases[item.module, item.originalname].append(item)
    quick = set()
    for same in cases.values():
        many = "pool" in same[0].fixturenames
        quick |= {item for item in (same[len(same) // 2:][:1] if many else same) if not item.get_closest_marker("slow")}
    kept = {"quick": quick, "rest": set(items) - quick, "all": set(items)}[part]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
