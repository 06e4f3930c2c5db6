import os
import signal

import pytest
import torch
from harness import shared_pool

# The tests run on the CPU with gloo, on as many ranks as they need, and compare with one process to the last digits. Only
# test_gpus.py uses GPUs. All other tests, and the programs that they start, do not see them.
GPUS, VISIBLE = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Now and then torch asks a name server who is connecting, even if it is this machine. A lost answer would cost five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# A background job of a shell ignores Ctrl-C, and a job under nohup ignores the end of its terminal. Its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def pool():
    return shared_pool()
