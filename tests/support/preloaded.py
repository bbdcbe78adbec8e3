"""What the server that forks the ranks has imported: each rank begins with it, and none waits for it. No kernel runs here."""

import importlib

for name in (
    "hypothesis",
    "numba",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "thinwire.ddp.attach",
    "tests.leaks",
    "tests.models",
):
    importlib.import_module(name)
