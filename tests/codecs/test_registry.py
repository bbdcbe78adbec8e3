"""Names of codecs, and their text form."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import thinwire
from thinwire.codecs import CODECS, parse, register
from thinwire.errors import CodecTextError


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("dense", thinwire.Dense()),
        ("dense()", thinwire.Dense()),
        (" topk ", thinwire.TopK()),
        ("topk(0.05)", thinwire.TopK(0.05)),
        ("topk(density=0.05)", thinwire.TopK(0.05)),
        ("topk( 0.05 , values = 'fp16' )", thinwire.TopK(0.05, values="fp16")),
        ("cast('fp16')", thinwire.Cast("fp16")),
        ('cast(dtype="bf16")', thinwire.Cast("bf16")),
    ],
)
def test_parse(text: str, codec: thinwire.Codec) -> None:
    assert parse(text) == codec
    assert parse(str(codec)) == codec


def test_defaults_are_left_out_of_the_text() -> None:
    assert str(thinwire.TopK()) == "topk"
    assert str(thinwire.TopK(0.25)) == "topk(density=0.25)"
    assert str(thinwire.TopK(values="bf16")) == "topk(values='bf16')"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("topkk", "there is no codec 'topkk'; did you mean 'topk'?"),
        ("zzz", "there is no codec 'zzz'; known: "),
        ("", "'' is not a codec: expected a name with arguments"),
        ("topk(", "is not a codec"),
        ("topk(0.1", "is not a codec"),
        ("topk 0.1", "is not a codec"),
        ("3", "is not a codec"),
        ("a.b(1)", "is not a codec"),
        ("topk(0.1)(2)", "is not a codec"),
        ("[topk]", "is not a codec"),
        ("topk(density=0.1, density=0.2)", "argument 'density' is given twice"),
        ("topk(0.1, density=0.2)", "argument 'density' is given twice"),
        ("topk(densty=0.1)", "topk has no argument 'densty'; it has: density"),
        ("dense(1)", "dense takes at most 0 arguments"),
        ("topk(1, 2, 3, 4, 5, 6)", "topk takes at most"),
        ("topk(density=x)", "the value of 'density' is not a number"),
        ("topk(density=__import__('os').getpid())", "the value of 'density' is not a number"),
        ("topk(*[0.1])", "the value of 'density' is not a number"),
        ("topk(**{'density': 0.1})", "no argument None"),
        ("topk(density=0)", "density must be above 0"),
        ("topk(density='a lot')", "topk"),
        ("topk(density=None)", "topk"),
        ("topk(values='int3')", "values must be one of"),
        ("cast(dtype='fp8')", "dtype must be one of bf16, fp16, not 'fp8'"),
        ("topk(density=" + "(" * 500 + "1" + ")" * 500 + ")", "is not"),
        ("topk\0", "is not a codec"),
    ],
)
def test_errors_quote_the_text(text: str, complaint: str) -> None:
    with pytest.raises(CodecTextError) as caught:
        parse(text)
    assert complaint in str(caught.value)
    assert repr(text) in str(caught.value)


@dataclass(frozen=True)
class Custom(thinwire.TopK):
    extra: int = 3


def test_register() -> None:
    with pytest.raises(CodecTextError, match=r"Custom is not registered: thinwire.register\('custom', Custom\)"):
        str(Custom())
    register("custom", Custom)
    try:
        register("custom", Custom)
        assert parse(str(Custom(0.5, extra=4))) == Custom(0.5, extra=4)
        with pytest.raises(ValueError, match="'custom' is taken by Custom"):
            register("custom", thinwire.Dense)
        with pytest.raises(ValueError, match="'topk' is taken by TopK"):
            register("topk", Custom)
        with pytest.raises(ValueError, match="must be an identifier, not 'top-k'"):
            register("top-k", Custom)
    finally:
        del CODECS["custom"]
