"""Bytes that the link of one rank carries, by the formula of each collective.

What is sent is counted in *link bytes* everywhere: what a rank sends or receives, whichever is more. Where a job has a real
interface they are read from its counters, headers of packets included; elsewhere, as on `LocalWorld`, they follow from what the
rank hands over to each collective, by these formulas. Both are what a ring puts on each link, and two ranks by a swap.
"""


def all_reduce(size: float, ranks: int) -> float:
    """Of a sum, mean or maximum of `size` bytes over so many ranks: a reduce-scatter and an all-gather of pieces."""
    return 2 * (ranks - 1) * size / ranks


def all_gather(size: float, ranks: int) -> float:
    """Of an all-gather to which each of so many ranks contributes `size` bytes."""
    return float((ranks - 1) * size)


def dense(elements: int, ranks: int) -> float:
    """Of an uncompressed step, an fp32 all-reduce: what "times smaller" compares with."""
    return all_reduce(4 * elements, ranks)
