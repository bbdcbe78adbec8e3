"""Buckets, in any order and cut, fill the groups of a layout and get their means back."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs import parse
from thinwire.engine.layout import Layout, build, describe
from thinwire.engine.packing import Packer
from thinwire.errors import ExchangeError

SIZES = {"a": 30, "small": 3, "b": 20, "c": 50}
START = dict(zip(SIZES, (0, 100, 200, 300), strict=True))


def layout_of(codec: str, *buckets: tuple[str, ...]) -> Layout:
    tensors = [[describe(name, torch.empty(SIZES[name])) for name in names] for names in buckets]
    return build(tensors, parse(codec), min_elements=10)


def bucket_of(*names: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    parts = [torch.arange(START[name], START[name] + SIZES[name], dtype=torch.float32) for name in names]
    return torch.cat(parts).to(dtype)


def test_a_bucket_that_is_a_group_is_not_copied() -> None:
    packer, buffer = Packer(layout_of("topk(density=0.5)", ("a", "b"))), bucket_of("a", "b")
    _, complete = packer.arrive(("a", "b"), buffer)
    assert complete == [0]
    assert packer.gradient(0).data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("codec", ["topk(density=0.5)", "randomblock(ratio=2)", "dense"])
@pytest.mark.parametrize(
    "cut", [(("a", "small", "b", "c"),), (("a",), ("small", "b"), ("c",)), (("c", "b"), ("a", "small"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_comes_back_to_its_place(
    codec: str, cut: tuple[tuple[str, ...], ...], dtype: torch.dtype
) -> None:
    """Each group is multiplied by two: whatever the buckets are, so is each of their elements."""
    tensors = [[describe(name, torch.empty(SIZES[name], dtype=dtype)) for name in ("a", "small", "b", "c")]]
    layout = build(tensors, parse(codec), min_elements=10)
    packer, complete = Packer(layout), list[int]()
    buffers = {names: bucket_of(*names, dtype=dtype) for names in cut}
    expected = {names: 2 * buffer for names, buffer in buffers.items()}
    for names, buffer in buffers.items():
        complete += packer.arrive(names, buffer)[1]
    assert sorted(complete) == list(range(len(layout.groups)))
    finished = 0
    for index in complete:
        packer.gradient(index).mul_(2.0)
        packer.riders[index].mul_(2.0)
        finished += len(packer.finish(index))
    assert finished == len(cut)
    for names, buffer in buffers.items():
        assert torch.equal(buffer, expected[names])


def test_a_codec_sees_zeros_where_small_tensors_were() -> None:
    packer = Packer(layout_of("randomblock(ratio=2)", ("a", "small", "b")))
    packer.arrive(("a", "small", "b"), bucket_of("a", "small", "b"))
    hole = packer.gradient(0)[SIZES["a"] : SIZES["a"] + SIZES["small"]]
    assert not hole.any()
    assert packer.riders[0].tolist() == [100.0, 101.0, 102.0]


def test_a_group_is_complete_with_its_last_tensor() -> None:
    packer = Packer(layout_of("topk(density=0.5)", ("a", "b"), ("c",)))
    assert packer.arrive(("b",), bucket_of("b"))[1] == []
    assert packer.arrive(("c",), bucket_of("c"))[1] == [1]
    bucket, complete = packer.arrive(("a",), bucket_of("a"))
    assert complete == [0]
    assert packer.finish(1)[0].plan.slots == {1: 1}
    assert packer.finish(0)[-1] is bucket


def test_unused_tensors_are_known_until_their_group_ends() -> None:
    packer = Packer(layout_of("topk(density=0.5)", ("a", "b")))
    packer.arrive(("a", "b"), bucket_of("a", "b"), ["b"])
    assert packer.unused == {0: ["b"]}
    packer.finish(0)
    assert packer.unused == {}


def test_what_does_not_fit_is_refused() -> None:
    packer = Packer(layout_of("dense", ("a",)))
    with pytest.raises(ExchangeError, match="'b' is not in the layout"):
        packer.arrive(("b",), bucket_of("b"))
    with pytest.raises(ExchangeError, match="a bucket has 20 elements where its tensors have 30"):
        packer.arrive(("a",), bucket_of("b"))
