"""How long a test waits on the clock."""

CEILING = 300.0
"""Seconds for what takes a few on an idle machine: only a program that hangs, and ranks that tests.ranks does not watch."""
