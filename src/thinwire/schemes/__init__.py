"""How it is sent: `collective.py` says what a collective is, `world.py` carries it out, on `torch.distributed`
(`pair.py` for most of what two ranks do) or in memory.
"""
