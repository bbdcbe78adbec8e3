"""Pages and traces out of the journals of runs and the results of benchmarks."""
