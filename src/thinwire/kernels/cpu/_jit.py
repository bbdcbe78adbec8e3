"""The decorator that compiles CPU kernels.

`@kernel` compiles on first call for the types it is given and caches the result on disk.  No signatures are fixed, so
that `NUMBA_BOUNDSCHECK=1` checks every access.  No fast-math: results must equal the reference bit for bit.  No
Numba threads: a kernel releases the interpreter lock, and the caller's threads run it concurrently.

The disk cache checks only the file that defines a kernel.  A kernel therefore only calls kernels of the same file: after an
edit to another file the old machine code would stay in use.  (`_masks`, `_tiles`, `_streams`, `_halves`, `_bytes` and
`_llvm` are the exceptions: after an edit there, remove the cached `*.nbi` and `*.nbc`.)
"""

from collections.abc import Callable
from typing import ParamSpec, TypeAlias, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int32]
Offsets: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function over NumPy arrays and scalars; it keeps its static type."""
    compiled: Callable[Parameters, Result] = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return compiled
