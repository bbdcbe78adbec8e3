"""The decorator that compiles CPU kernels.

`@kernel` compiles on first call for the types it is given and caches the result on disk, in `kernels.cache.folder()`. No
signatures are fixed, so that `NUMBA_BOUNDSCHECK=1` checks every access. No fast-math: results must equal the reference
bit for bit. No Numba threads: a kernel releases the interpreter lock, and the caller's threads run it concurrently.
"""

import pickle
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
from numba.core import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.registry import CPUDispatcher
from numpy.typing import NDArray

from thinwire.kernels import cache
from thinwire.log import logger

Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int32]
Offsets: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function over NumPy arrays and scalars; it keeps its static type."""
    # Nobody calls a kernel from C, and that wrapper takes a tenth of the time.
    options = {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": None, "no_cfunc_wrapper": True}
    compiled: Callable[Parameters, Result] = _Kernel(function, targetoptions=options)
    return compiled


class _Kernel(CPUDispatcher):
    def __init__(self, function: Any, *others: Any, **options: Any) -> None:
        super().__init__(function, *others, **options)
        self._cache = _Cache(function)  # type: ignore[no-untyped-call]

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """As Numba's, without a version of its own for each constant: a counter that begins at 0 would have two."""
        unliteral: Any = types.unliteral
        kws = {name: unliteral(kind) for name, kind in kws.items()}
        return super().get_call_template(tuple(unliteral(kind) for kind in args), kws)


class _Place:
    """Where Numba finds the files of one kernel. Everything that they depend on stands in the name of the folder."""

    def get_cache_path(self) -> str:
        return str(cache.folder())

    def get_source_stamp(self) -> str:
        return cache.folder().name

    def ensure_cache_path(self) -> None:
        cache.folder().mkdir(parents=True, exist_ok=True)


class _Files(CompileResultCacheImpl):
    def __init__(self, function: Any) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Place()
        self._filename_base = f"{function.__module__.removeprefix('thinwire.')}.{function.__qualname__}"


class _Cache(FunctionCache):
    """Numba's cache, for several processes at once, and with nothing in it that could stop a training."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found, observer = self._found(sig, target_context), cache.observer
        if found is None and observer is not None:
            observer.miss()
            found = self._found(sig, target_context)
            if found is None:
                observer.compiles(self._py_func.__name__)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            with cache.locked("index"):  # Numba reads an index, adds a line, writes it
                self._save(sig, data)
        except OSError as error:
            logger.debug("%s is not kept on disk: %s", self._py_func.__name__, error)

    def _save(self, sig: Any, data: Any) -> None:
        save: Any = super().save_overload
        try:
            save(sig, data)
        except (EOFError, ValueError, TypeError, pickle.UnpicklingError):  # of an index that is damaged
            self.flush()  # type: ignore[no-untyped-call]
            save(sig, data)

    def _found(self, sig: Any, target_context: Any) -> Any:
        load: Any = super().load_overload
        try:
            return load(sig, target_context)
        except Exception as error:  # of any kind: a damaged file can end in each, and is compiled again
            logger.debug("%s is compiled again: %s: %s", self._py_func.__name__, type(error).__name__, error)
            return None
