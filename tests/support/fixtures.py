import os
import signal

import pytest
import torch
from harness import shared_pool

# The tests compare with one process to the last digits, on the CPU, with gloo, as many ranks as it takes. What a GPU does is
# seen by test_gpus.py; all others, and what they start, do not see it.
GPUS, VISIBLE = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Now and then torch asks a name server who it is that connects, even of this machine. A lost answer would cost five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# A job in a shell's background ignores Ctrl-C, one under nohup the end of its terminal, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def pool():
    return shared_pool()
