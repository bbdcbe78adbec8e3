"""How every CPU kernel is compiled.

`@kernel` compiles on first call for the types it is given and caches the result on disk.  No signatures are fixed, so
that `NUMBA_BOUNDSCHECK=1` checks every access.  No fast-math: results must equal the reference bit for bit.  No
threads of Numba's own: a kernel releases the interpreter lock, and the caller's threads run it side by side.

The disk cache looks only at the file that a kernel stands in.  A kernel therefore calls kernels of its own file only:
an edit to another file would leave the old machine code in use.  (`_masks`, `_tiles`, `_streams` and `_halves` are the
exceptions: after an edit there, remove the cached `*.nbi` and `*.nbc`.)
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function over NumPy arrays and scalars; it keeps its type for the type checker."""
    compiled: Callable[Parameters, Result] = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return compiled
