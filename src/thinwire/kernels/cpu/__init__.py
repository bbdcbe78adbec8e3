"""CPU kernels, compiled by Numba on first use: NumPy arrays in, NumPy arrays out, one thread each."""
