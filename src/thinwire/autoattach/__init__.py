"""Attaching to the DDP modules of an unchanged script."""
