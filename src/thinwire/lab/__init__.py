"""What a job on this machine can be tried on: an emulated cluster, workloads, benchmarks."""
