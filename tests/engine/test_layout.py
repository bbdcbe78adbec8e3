"""How buckets are cut into groups."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

import thinwire
from thinwire.codecs import Codec
from thinwire.engine.layout import Exclude, Layout, TensorInfo, build, describe, excludes, kinds_of
from thinwire.engine.packing import Packer
from thinwire.errors import CodecTextError, ExchangeError

TOPK = thinwire.TopK(0.01)
RIDES = thinwire.RandomBlock(8)


def tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorInfo:
    return describe(name, torch.empty(shape, dtype=dtype))


def text(layout: Layout) -> list[str]:
    """One line a group: name, codec without arguments, dtype, and each slot as name@offset, with its role if special."""
    lines = []
    for group in layout.groups:
        roles = {"coded": "", "ride": " rides", "elsewhere": " elsewhere"}
        slots = ", ".join(f"{slot.name}@{slot.offset}{roles[slot.role]}" for slot in group.slots)
        lines.append(f"{group.name} [{group.codec.split('(')[0]} {group.dtype} {group.elements}]: {slots}")
    return lines


def cut(buckets: list[list[TensorInfo]], codec: Codec, exclude: Exclude = (), min_elements: int = 10) -> list[str]:
    layout = build(buckets, codec, exclude=exclude, min_elements=min_elements)
    assert msgspec.json.decode(msgspec.json.encode(layout), type=Layout) == layout
    return text(layout)


def test_small_tensors_are_holes_that_travel_elsewhere() -> None:
    assert cut([[tensor("a", 20), tensor("b", 3), tensor("c", 5, 6)], [tensor("d", 9), tensor("e", 10)]], TOPK) == [
        "group 0 [topk float32 53]: a@0, b@20 elsewhere, c@23",
        "group 1 [topk float32 19]: d@0 elsewhere, e@9",
        "small tensors [dense float32 12]: b@0, d@3",
    ]


def test_small_tensors_ride_where_the_codec_sums() -> None:
    layout = build([[tensor("a", 20), tensor("b", 3), tensor("c", 4)]], RIDES, min_elements=10)
    assert text(layout) == ["group 0 [randomblock float32 27]: a@0, b@20 rides, c@23 rides"]
    info = layout.groups[0].info()
    assert info.tail == 3 + 4 + 1, "and last the flag for values that are not finite"
    assert [(p.name, p.offset, p.elements) for p in info.parameters] == [("a", 0, 20)]


@pytest.mark.parametrize("codec", [TOPK, RIDES])
def test_a_bucket_of_small_tensors_alone(codec: Codec) -> None:
    assert cut([[tensor("a", 3), tensor("b", 4)], [tensor("c", 30)], [tensor("d", 1)]], codec)[1:] == [
        "small tensors [dense float32 8]: a@0, b@3, d@7"
    ]
    assert cut([[tensor("a", 3)]], codec) == ["small tensors [dense float32 3]: a@0"]


def test_a_large_excluded_tensor_ends_a_run() -> None:
    buckets = [[tensor("a", 20), tensor("b", 3), tensor("big", 40), tensor("c", 2), tensor("d", 30)]]
    assert cut(buckets, TOPK, ["big"]) == [
        "group 0 [topk float32 23]: a@0, b@20 elsewhere",
        "group 1 [dense float32 40]: big@0",
        "group 2 [topk float32 32]: c@0 elsewhere, d@2",
        "small tensors [dense float32 5]: b@0, c@3",
    ]
    assert cut(buckets, RIDES, ["big"]) == [
        "group 0 [randomblock float32 23]: a@0, b@20 rides",
        "group 1 [dense float32 40]: big@0",
        "group 2 [randomblock float32 32]: c@0 rides, d@2",
    ]


def test_excluded_tensors_at_both_ends_and_side_by_side() -> None:
    buckets = [[tensor("x", 40), tensor("y", 40), tensor("s", 2), tensor("z", 40)]]
    assert cut(buckets, TOPK, ["x", "y", "z"]) == [
        "group 0 [dense float32 40]: x@0",
        "group 1 [dense float32 40]: y@0",
        "group 2 [dense float32 40]: z@0",
        "small tensors [dense float32 2]: s@0",
    ]


def test_small_excluded_tensors_are_holes() -> None:
    assert cut([[tensor("a", 20), tensor("b", 3)]], TOPK, ["b"], 10) == [
        "group 0 [topk float32 23]: a@0, b@20 elsewhere",
        "small tensors [dense float32 3]: b@0",
    ]


def test_dtypes_have_small_groups_of_their_own() -> None:
    half = torch.bfloat16
    buckets = [
        [tensor("a", 20), tensor("b", 3)],
        [tensor("c", 20, dtype=half), tensor("d", 4, dtype=half)],
    ]
    assert cut(buckets, TOPK) == [
        "group 0 [topk float32 23]: a@0, b@20 elsewhere",
        "group 1 [topk bfloat16 24]: c@0, d@20 elsewhere",
        "small tensors (float32) [dense float32 3]: b@0",
        "small tensors (bfloat16) [dense bfloat16 4]: d@0",
    ]


def test_codecs_without_residual_take_small_tensors_too() -> None:
    assert cut([[tensor("a", 20), tensor("b", 3)]], thinwire.Cast()) == ["group 0 [cast float32 23]: a@0, b@20"]
    assert cut([[tensor("a", 20), tensor("b", 3)]], thinwire.Cast(), ["b"])[1:] == [
        "small tensors [dense float32 3]: b@0"
    ]


def test_dense_takes_buckets_as_they_are() -> None:
    assert cut([[tensor("a", 20), tensor("b", 3)], [], [tensor("c", 0)]], thinwire.Dense(), ["a"]) == [
        "group 0 [dense float32 23]: a@0, b@20",
        "group 1 [dense float32 0]: c@0",
    ]


def test_zero_size_tensors() -> None:
    assert cut([[tensor("a", 0, 3), tensor("b", 20)]], TOPK) == [
        "group 0 [topk float32 20]: a@0 elsewhere, b@0",
        "small tensors [dense float32 0]: a@0",
    ]
    assert cut([[tensor("a", 0, 3)]], TOPK, min_elements=0) == ["group 0 [topk float32 0]: a@0"]
    assert cut([], TOPK) == []


def test_layout_names_its_codecs_by_text() -> None:
    layout = build(
        [[tensor("a", 20), tensor("b", 30)]], thinwire.TopK(0.25, values="fp16"), exclude="b", min_elements=1
    )
    assert layout.codecs() == [thinwire.TopK(0.25, values="fp16"), thinwire.Dense()]
    strange = msgspec.json.decode(msgspec.json.encode(layout).replace(b"topk(", b"tpk("), type=Layout)
    with pytest.raises(CodecTextError, match="tpk"):
        strange.codecs()


def test_exclude_is_patterns_or_a_function() -> None:
    assert excludes("*.bias", "0.bias")
    assert not excludes("*.bias", "0.weight"), "a text is one pattern, not a list of letters"
    assert excludes(["x", "0.*"], "0.weight")
    assert not excludes((), "0.weight")
    assert excludes(lambda name: name.endswith("t"), "0.weight")


def test_layer_kinds() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.LSTM(4, 4), nn.Embedding(5, 4), nn.LayerNorm(4))
    kinds = kinds_of(model)
    assert (kinds["0.weight"], kinds["0.bias"], kinds["1.weight"]) == ("conv", "vector", "dense")
    assert (kinds["2.weight_ih_l0"], kinds["2.bias_ih_l0"]) == ("recurrent", "vector")
    assert (kinds["3.weight"], kinds["4.weight"]) == ("embedding", "vector")
    assert set(kinds) == dict(model.named_parameters()).keys()


# -- putting groups together out of what arrives -------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d", "big", "e")
SIZES = (20, 3, 30, 0, 25, 4)


@pytest.mark.parametrize("codec", [TOPK, RIDES], ids=str)
@pytest.mark.parametrize(
    "pieces",
    [
        [NAMES],
        [(name,) for name in NAMES],
        [(name,) for name in reversed(NAMES)],
        [("e", "big"), ("d",), ("c", "a"), ("b",)],
        [("a", "b", "c"), ("d", "big", "e")],
        [NAMES[::-1]],
    ],
    ids=["one bucket", "single", "reversed", "any order", "two", "one bucket, reversed"],
)
def test_groups_are_the_same_however_the_tensors_arrive(codec: Codec, pieces: list[tuple[str, ...]]) -> None:
    layout = build(
        [[tensor(name, size) for name, size in zip(NAMES, SIZES, strict=True)]],
        codec,
        exclude=["big"],
        min_elements=10,
    )
    values = {
        name: torch.arange(size, dtype=torch.float32) + 100 * place + 1
        for place, (name, size) in enumerate(zip(NAMES, SIZES, strict=True))
    }
    assembly = Packer(layout)
    for _ in range(2):
        buffers = [torch.cat([values[name] for name in names]) for names in pieces]
        complete = []
        for names, buffer in zip(pieces, buffers, strict=True):
            complete += assembly.arrive(names, buffer)[1]
        assert sorted(complete) == list(range(len(layout.groups)))
        for index, group in enumerate(layout.groups):
            gradient = assembly.gradient(index)
            ridden = [values[slot.name] for slot in group.slots if slot.role == "ride"]
            for slot in group.slots:
                expected = values[slot.name] if slot.role == "coded" else torch.zeros(slot.elements)
                assert torch.equal(gradient[slot.offset : slot.offset + slot.elements], expected), slot.name
            assert torch.equal(assembly.riders[index], torch.cat([*ridden, torch.empty(0)]))
            gradient *= 2
            assembly.riders[index] *= 2
        finished = [bucket for index in complete for bucket in assembly.finish(index)]
        assert len(finished) == len(pieces)
        for names, buffer in zip(pieces, buffers, strict=True):
            assert torch.equal(buffer, 2 * torch.cat([values[name] for name in names]))


def test_a_whole_group_is_not_copied() -> None:
    assembly = Packer(build([[tensor("a", 20), tensor("b", 30)]], TOPK, min_elements=10))
    buffer = torch.ones(50)
    assembly.arrive(("a", "b"), buffer)
    assert assembly.gradient(0).data_ptr() == buffer.data_ptr()


def test_what_does_not_fit_the_layout_is_refused() -> None:
    assembly = Packer(build([[tensor("a", 20)]], TOPK, min_elements=10))
    with pytest.raises(ExchangeError, match="'z' is not in the layout"):
        assembly.arrive(("z",), torch.zeros(20))
    with pytest.raises(ExchangeError, match="21 elements where its tensors have 20"):
        assembly.arrive(("a",), torch.zeros(21))
