"""The CUDA path. EXPERIMENTAL: its logic is tested with CPU tensors, but it has never run on a GPU."""
