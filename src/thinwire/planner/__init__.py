"""The planner: cost models, step time predictions, plan search; profile files (its input) and plan files (its output)."""

SEARCHES = ("fp32", "all", "myopic", "espresso", "exact", "joint")
"""Searches on published GPU costs; see `simulation.Simulation.search`."""

SLACK = 0.02
"""Relative step time that a plan may give away, compared with the fastest, to lose less of the gradient."""
