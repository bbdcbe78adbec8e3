"""Reference kernels in plain torch, the oracle of the tests: names and results are those of the compiled ones."""
