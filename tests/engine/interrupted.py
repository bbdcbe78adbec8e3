"""One rank that waits in backward for a peer that does not come, and gets Ctrl-C: run by `test_interrupt.py`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import thinwire
from tests.models import train, wrapped


def main(rank: int, store: str, codec: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    ddp = wrapped()
    thinwire.attach(ddp, codec, min_elements=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, optimizer, range(4))
    if rank == 1:
        time.sleep(100)  # ended by the test

    def press() -> None:
        print(f"pressed {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(1.0, press).start()
    train(ddp, optimizer, range(4, 8))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
