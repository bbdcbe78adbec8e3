"""Measures a job where it runs: its backward, the links between its ranks, and what codecs cost on its gradients."""
