"""Where gradients come from: `ddp.py` takes them from DistributedDataParallel."""
