"""Where gradients come from: `attach.py` makes the wire of a DistributedDataParallel, `ddp.py` and `auto.py` are it."""
