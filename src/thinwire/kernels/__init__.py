"""Inner loops: `reference` (plain torch, the oracle) and `cpu` (compiled by Numba on first use, cached on disk).

`kernels.micro` is `kernels.cpu.micro`, imported when it is first used, so that `import thinwire` does not import Numba.
"""

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "adacomp", "basic", "blocks", "blockwise", "coding", "laplace", "laplace_fit", "laplace_search", "lowrank", "micro",
    "sidco", "sliced", "updates",
]  # fmt: skip

if TYPE_CHECKING:
    from .cpu import (
        adacomp,
        basic,
        blocks,
        blockwise,
        coding,
        laplace,
        laplace_fit,
        laplace_search,
        lowrank,
        micro,
        sidco,
        sliced,
        updates,
    )
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = module = importlib.import_module(f"{__name__}.cpu.{name}")
        return module
