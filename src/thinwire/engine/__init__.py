"""Runs a step: layout, order, threads, futures, failure, guard, statistics; `Exchange` and `Wire`."""
