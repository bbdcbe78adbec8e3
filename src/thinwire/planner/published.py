"""Reads the backward profiles and codec times published by the authors of Espresso (nine models, one V100).

The data are not part of thinwire. The format of the file is

    {"models": {name: {"tensors": [[tensor name, elements, microseconds since the previous one was ready], ...]}},
     "codec_us": {name: {"one_level": [encode + decode, decode], ...} or [encode + decode, decode]}}
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import msgspec

from ..codecs import parse
from ..codecs.names import name_of
from ..errors import CodecTextError, PlanError, ProfileError
from ..ranges import Amount, Elements
from .costs import GpuCodec
from .profile import load_struct

REFERENCE_MESSAGES = 8
"""Published decode times are for one message from each of the paper's eight machines."""


_OURS_OF = {
    "fp16": "cast(dtype='fp16')",
    "random_k": "",
    "dgc": "dgc(density={density})",
    "efsignsgd": "sign",
    "onebit": "",
}
_PUBLISHED_OF = {"cast": "fp16", "randomk": "random_k", "dgc": "dgc", "sign": "efsignsgd"}


class PublishedTensor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    elements: Elements
    microseconds: Amount


class _Model(msgspec.Struct, frozen=True):
    tensors: tuple[PublishedTensor, ...]


class _Times(msgspec.Struct, frozen=True):
    one_level: tuple[Amount, Amount]


class Published(msgspec.Struct, frozen=True):
    """The content of the file."""

    models: dict[str, _Model]
    codec_us: dict[str, Any] = {}

    @staticmethod
    def load(path: str | Path) -> Published:
        return load_struct(path, Published, "file of backward profiles", ProfileError)

    def model(self, name: str) -> tuple[PublishedTensor, ...]:
        if name not in self.models:
            close = difflib.get_close_matches(name, self.models, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ProfileError(f"there is no profile of {name!r}{hint} There are: {', '.join(self.models)}")
        tensors = self.models[name].tensors
        if not tensors:
            raise ProfileError(f"the profile of {name!r} has no tensors")
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ProfileError(f"{name!r}: a tensor is listed twice")
        return tensors

    def codec(self, text: str, density: float = 0.01) -> GpuCodec:
        """A codec with its published times, by the paper's name (dgc, random_k, efsignsgd, onebit, fp16) or thinwire's.

        For the paper's codecs, `density` is the fraction of elements sent; its `random_k` gathers values and indices like
        all sparse codecs, while thinwire's `randomk` sums values only.
        """
        wanted, ours, summed = text.strip(), "", False
        if wanted in _OURS_OF:
            ours = _OURS_OF[wanted].format(density=density)
        else:
            codec = parse(wanted)
            known = _PUBLISHED_OF.get(name_of(codec))
            if known is None:
                raise PlanError(
                    f"what {text!r} costs on a GPU is not known: no published times exist, and thinwire has not been measured "
                    f"on GPUs. Known are {', '.join(_OURS_OF)}, and by these thinwire's dgc, sign, cast and randomk"
                )
            wanted, ours, summed = known, wanted, name_of(codec) in ("cast", "randomk")
            share = getattr(codec, "density", density)
            if not isinstance(share, float | int):
                raise CodecTextError(f"{text!r}: a plan needs one density, not a schedule")
            density = float(share)
        if not 0.0 < density <= 1.0:
            raise PlanError(f"the density must be above 0 and at most 1, not {density}")
        both, decode = self._times(wanted)
        bytes_per_element, fixed = {"fp16": (2.0, 0.0), "efsignsgd": (0.125, 4.0), "onebit": (0.125, 8.0)}.get(
            wanted, (density * (4 if summed else 8), 0.0)
        )
        sparse = wanted in ("dgc", "random_k")
        touched = REFERENCE_MESSAGES * density
        return GpuCodec(
            name=text,
            codec=ours,
            encode=1e-6 * (both - decode),
            decode=1e-6 * decode,
            by_message=touched / (1 + touched) if sparse else 1.0,
            bytes_per_element=bytes_per_element,
            bytes_fixed=fixed,
            summed=summed or wanted == "fp16",
            messages=1 if summed or wanted == "fp16" else REFERENCE_MESSAGES,
        )

    def _times(self, name: str) -> tuple[float, float]:
        times = self.codec_us.get(name)
        if times is None:
            raise PlanError(f"what {name!r} costs on a GPU is not known: the file of profiles has no times of it")
        try:
            if isinstance(times, dict):
                both, decode = msgspec.convert(times, _Times).one_level
            else:
                both, decode = msgspec.convert(times, tuple[Amount, Amount])
        except msgspec.ValidationError as problem:
            raise ProfileError(f"the times of {name!r} are not [encode + decode, decode]: {problem}") from None
        if not 0 < decode < both:
            raise ProfileError(f"the times of {name!r}: decode alone takes {decode} us, with encode {both}")
        return both, decode
