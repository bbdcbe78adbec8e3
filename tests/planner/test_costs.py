"""Costs of chains against the formulas of the specification, by hand."""

import numpy as np
import pytest

from tests.planner.test_searches import DGC, HALF, SIGN
from thinwire.chains import tree
from thinwire.errors import PlanError
from thinwire.planner.costs import durations
from thinwire.planner.network import Network, parse_bytes_per_second
from thinwire.planner.options import Menu

NETWORK = Network(4, 2, intra=1e9, inter=1e8, intra_latency=1e-6, inter_latency=1e-5)
N = 2**21


def seconds(chain, codec=None, elements=N):
    return [spent for _, spent in durations(tree.parse(chain), elements, codec, NETWORK)]


def test_dense_chains():
    size = 4 * N
    assert seconds("fAR") == pytest.approx([14e-5 + 14 / 8 * size / 1e8])
    assert seconds("A") == pytest.approx(
        [
            1e-6 + size / 2 / 1e9,  # reduce-scatter inside a node of two
            6e-5 + 6 / 4 * (size / 2) / (1e8 / 2),  # half of it, by two GPUs that share the card
            1e-6 + size / 2 / 1e9,
        ]
    )
    assert seconds("iR eAR iB") == pytest.approx([1e-6 + size / 1e9, 6e-5 + 6 / 4 * size / 1e8, 1e-6 + size / 1e9])


def test_sparse_chains():
    payload = 0.08 * N
    encode, decode, reduce, gather, end = seconds("B", DGC)[1], *seconds("B", DGC)[3:4], *seconds("B", DGC)[::2]
    assert encode == pytest.approx(356e-6)  # 2^20 elements after the scatter: still the floor
    assert decode == pytest.approx(34e-6 * (0.93 + 0.07 * 4 / 8))  # four messages, of eight
    assert reduce == end == pytest.approx(1e-6 + 2 * N / 1e9)
    assert gather == pytest.approx(3e-5 + 3 * (payload / 2) / (1e8 / 2))
    # Above the floor in proportion; messages of all eight ranks.
    assert seconds("J", DGC) == pytest.approx([2 * 356e-6, 7e-5 + 7 * payload / 1e8, 2 * 34e-6])


def test_a_first_step_that_is_not_decoded_carries_all_messages_on():
    plain, decoded = seconds("comp fA2Ac fAGc dec", SIGN), seconds("K", SIGN)
    message = N / 8 / 8 + 4
    assert decoded[4] == pytest.approx(7e-5 + 7 * message / 1e8)
    assert plain[2] == pytest.approx(7e-5 + 7 * 8 * message / 1e8)


def test_summed_payloads_and_the_processor():
    assert seconds("comp fARc dec", HALF) == pytest.approx([8e-6, 14e-5 + 14 / 8 * 2 * N / 1e8, 44e-6])
    slow = seconds("comp@cpu fAGc dec", DGC)[0]
    assert slow == pytest.approx(4 * N * 356 / 390 / 2.5e9)


def test_few_options_are_left():
    menu = Menu([DGC], NETWORK, cpu=True)
    assert len(menu.options) == 4341
    table = menu.table([100.0, 1e6, 1e8])
    counts = np.diff(table.offsets)
    assert counts[0] == 1
    assert (counts < 80).all()
    vectors = menu.vectors(np.array([1e6]))[:, 0]
    kept = table.vector[table.rows(1)]
    for vector in vectors:  # each is beaten or kept
        lead = kept[:, 0] <= vector[0] + np.where(kept[:, 1] == 0, vector[1], 0)
        assert (lead & (kept[:, 1] <= vector[1]) & (kept[:, 2:] <= vector[2:]).all(axis=1)).any()


def test_a_cap_on_compressions():
    assert max(o.leaf.compressions for o in Menu([DGC], NETWORK, max_compressions=1).options) == 1
    assert len(Menu([DGC], NETWORK, cpu=False).options) == 174


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100gbit", 12.5e9), ("300gbyte/s", 300e9), ("25 Gbit/s", 3.125e9), ("2.5mbit", 312500.0), ("1gbps", None)],
)
def test_rates(text, rate):
    if rate is not None:
        assert parse_bytes_per_second(text) == rate
        return
    with pytest.raises(PlanError, match="like '100gbit' or '300gbyte/s'"):
        parse_bytes_per_second(text)
