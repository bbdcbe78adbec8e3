"""Costs, timelines, searches, and the two files between them: what was measured (profile) and what to do (plan)."""
