"""Chains of compressions and collectives that exchange one group: `tree.py` has their notation, `chain.py` runs one.

One file per collective; each docstring gives rounds and bytes.
"""
