"""How it is sent: `world.py` has the collectives, on `torch.distributed` or in memory."""
