"""Compilation of loops over memory with numba (the extra ``fast``); an ImportError without it.

torch runs one operation at a time, with intermediate results passing through the caches; a compiled
loop does all operations at once. A module of loops compiles for about a second. The result is kept
beside the module, or in the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., None])

#: Allows sums in any order, without which they are not vectorised; NaN stays NaN.
ANY_ORDER = {"reassoc", "contract", "nsz"}


def array(dtype: Any, dimensions: int = 1, written: bool = False) -> Any:
    """Return the type of a contiguous array, read-only unless ``written``."""
    return numba.types.Array(dtype, dimensions, "C", readonly=not written)


def compiled(*arguments: Any, **options: Any) -> Callable[[Loop], Loop]:
    """Compile a function for arguments of these types at once; it runs without Python's GIL."""
    signature = numba.void(*arguments)

    def decorate(function: Loop) -> Loop:
        try:
            loop = numba.njit(signature, nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no folder for the cache
            loop = numba.njit(signature, nogil=True, **options)(function)
        return cast(Loop, loop)

    return decorate
