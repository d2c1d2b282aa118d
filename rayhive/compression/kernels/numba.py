"""Compiles loops over memory with numba, the extra ``fast``; without it importing this fails.

What torch does operation by operation, with what lies between them going through the caches each
time, is one loop here. A module of loops takes about a second to compile, once: the result is kept
beside the module, or in the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., None])

#: Sums may be taken in any order, or they would not be vectorised; NaN stays NaN.
ANY_ORDER = {"reassoc", "contract", "nsz"}


def array(dtype: Any, dimensions: int = 1, written: bool = False) -> Any:
    """Return the type of a contiguous array that is read, or also written."""
    return numba.types.Array(dtype, dimensions, "C", readonly=not written)


def compiled(*arguments: Any, **options: Any) -> Callable[[Loop], Loop]:
    """Compile a function of arguments of these types now; it runs without Python's lock."""
    signature = numba.void(*arguments)

    def decorate(function: Loop) -> Loop:
        try:
            loop = numba.njit(signature, nogil=True, cache=True, **options)(function)
        except RuntimeError:  # there is no folder to keep it in
            loop = numba.njit(signature, nogil=True, **options)(function)
        return cast(Loop, loop)

    return decorate
