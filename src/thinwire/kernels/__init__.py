"""The hot loops: `reference` (plain torch, the oracle) and `cpu` (Numba, compiled on first use, cached on disk)."""
