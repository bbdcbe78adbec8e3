"""Recurrence SS and the event timeline: against hand-made cases, and against each other where both apply."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.profiles import tries
from thinwire.planner import side_stream, timeline


def finish(compute, vectors) -> float:
    return side_stream.finish_time(np.array(compute, float), np.array(vectors, float))


DENSE = lambda ser: (0.0, 0.0, 0.0, ser)  # noqa: E731


def test_recurrence_by_hand():
    assert finish([1, 1], [DENSE(3), DENSE(1)]) == 5  # 1 + 3 + 1
    assert finish([1, 5], [DENSE(3), DENSE(1)]) == 7  # the second waits for backward alone
    # Compressing the first delays the second: ready at 1 and 1 + 2 + 1, stream until 3.5, then until 4 + 1.
    assert finish([1, 1], [(1, 0, 2, 1.5), DENSE(1)]) == 5
    # On the processor it delays nobody: 1 + 2 (processor) + 0.5, while backward ends at 2.
    assert finish([1, 1], [(0, 2, 0, 0.5), DENSE(1)]) == 4.5
    # Two on the processor wait for each other: 3, then 5, then 0.5.
    assert finish([1, 1], [(0, 2, 0, 0.5), (0, 2, 0, 0.5)]) == 5.5
    # Codec after the last collective delays the end of backward.
    assert finish([1, 1], [(0, 0, 4, 0.5), DENSE(0)]) == 6


def test_times_of_each_chain():
    found = side_stream.schedule(np.array([1.0, 1.0]), np.array([(1, 0, 2, 1.5), DENSE(1)], float))
    assert found.tolist() == [[1, 2, 3.5], [4, 4, 5]]


def bubble(compute, vectors) -> int:
    return side_stream.last_bubble(np.array(compute, float), np.array(vectors, float))


def test_a_bubble_is_a_time_without_any_chain():
    assert bubble([1, 1, 1], [DENSE(5), DENSE(1), DENSE(1)]) == 0
    assert bubble([1, 5, 1], [DENSE(2), DENSE(9), DENSE(1)]) == 1
    # The stream waits for the lead of a tensor that is ready: its chain is in progress.
    assert bubble([1, 1], [DENSE(1), (3, 0, 3, 1)]) == 0


def test_events_by_hand():
    # Decoding of the first (2 to 3) interrupts the backward of the second, which then ends at 4.
    found = timeline.run([1, 2], [[("comm", 1), ("gpu", 1)], [("comm", 1)]])
    assert found.ready == [1, 4]
    assert found.spans == [[(1, 2), (2, 3)], [(4, 5)]]
    assert found.seconds == 5
    # Compression on the processor goes on beside backward, one after the other with one worker.
    chains = [[("cpu", 3), ("comm", 1)], [("cpu", 3), ("comm", 1)]]
    assert timeline.run([1, 1], chains).seconds == 8
    assert timeline.run([1, 1], chains, cpu_workers=2).seconds == 6
    # Two links work at once: the second chain's first part beside the first one's second.
    chains = [[("intra", 2), ("inter", 2)], [("intra", 2), ("inter", 2)]]
    assert timeline.run([1, 0], chains).seconds == 7
    assert timeline.run([1, 0], [[("comm", 4)], [("comm", 4)]]).seconds == 9


def test_in_order_a_link_waits_for_the_earlier_tensor():
    chains = [[("cpu", 5), ("comm", 1)], [("comm", 3)]]
    assert timeline.run([1, 1], chains).spans[1] == [(2, 5)]
    assert timeline.run([1, 1], chains, in_order=True).spans[1] == [(7, 10)]


SECONDS = st.integers(0, 64).map(lambda n: n / 8)  # sums of eighths are exact
TENSORS = st.lists(st.tuples(SECONDS, SECONDS, st.sampled_from(["gpu", "cpu", ""]), SECONDS), min_size=1, max_size=7)


@settings(max_examples=tries(300))
@given(TENSORS)
def test_both_agree_where_codecs_only_lead(tensors):
    """One collective a tensor and nothing decoded: there is no overlap that the recurrence leaves out."""
    compute = [c for c, _, _, _ in tensors]
    vectors, chains = [], []
    for _, lead, device, comm in tensors:
        vectors.append(
            (lead, 0, lead, comm) if device == "gpu" else (0, lead, 0, comm) if device == "cpu" else DENSE(comm)
        )
        chains.append(([(device, lead)] if device else []) + [("comm", comm)])
    assert timeline.run(compute, chains, in_order=True).seconds == finish(compute, vectors)
    if all(device != "cpu" for _, _, device, _ in tensors):
        assert timeline.run(compute, chains).seconds == finish(compute, vectors)


@settings(max_examples=tries(300))
@given(st.lists(st.tuples(SECONDS, st.lists(SECONDS, min_size=1, max_size=3)), min_size=1, max_size=7))
def test_both_agree_without_codecs(tensors):
    """A link that always has the next piece of something is never idle, in whatever order it takes them."""
    compute = [c for c, _ in tensors]
    chains = [[("comm", piece) for piece in pieces] for _, pieces in tensors]
    assert timeline.run(compute, chains).seconds == finish(compute, [DENSE(sum(pieces)) for _, pieces in tensors])


@settings(max_examples=tries(200))
@given(TENSORS, st.data())
def test_the_recurrence_rises_with_every_duration(tensors, data):
    compute = np.array([c for c, _, _, _ in tensors])
    vectors = np.array([(a, 0, a, b) if d == "gpu" else (0, a, 0, b) for _, a, d, b in tensors])
    before = finish(compute, vectors)
    index = data.draw(st.integers(0, len(tensors) - 1))
    which = data.draw(st.integers(0, 4))
    if which == 4:
        compute[index] += 1
    else:
        vectors[index, which] += 1
    assert finish(compute, vectors) >= before


def test_no_tensors_take_no_time():
    assert timeline.run([], []).seconds == 0
