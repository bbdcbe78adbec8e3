"""The hot loops for the CPU, compiled by Numba on first use: NumPy arrays in, NumPy arrays out, one thread each."""
