"""Profiler: measures backward, the links between ranks, and the costs of codecs on the gradients of a running job."""
