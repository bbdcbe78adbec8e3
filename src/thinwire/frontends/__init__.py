"""Where gradients come from: `attach.py` makes the wire of a DistributedDataParallel, `ddp.py` and `auto.py`
(with `lookout.py`) are it; on a GPU it is that of `stream.py`, EXPERIMENTAL.
"""
