"""Shapes and sizes of PowerSGD factors, in pure Python for averagers and predictions.

PowerSGD is Vogels, Karimireddy and Jaggi, arXiv 1905.13727: a gradient matrix of n rows and m
columns travels as factors P (n by r) and Q (m by r), algorithm 1; tensors with one dimension
travel as they are. How tensors become matrices, and which are worth it, follows hivemind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rayhive.errors import ConfigError, Problem, unknown
from rayhive.spec.axes.min_compression_ratio import MinCompressionRatio

#: The default of hivemind's PowerSGD averager.
DEFAULT_MIN_COMPRESSION_RATIO: float = MinCompressionRatio.default
#: Most power iterations of a round; each costs two all-reduces.
MAX_ITERATIONS = 8
#: Codec of factors in a group without a codec. Any P will do that all peers share, and errors of Q
#: are fed back.
FACTOR_CODEC = "scaled_float16"
FACTOR_CODECS = ("none", "float16", FACTOR_CODEC)
#: Ways to make the columns of P orthonormal, see :mod:`rayhive.compression.powersgd.kernels`.
ORTHOGONALISATIONS = ("gram_schmidt", "qr")

Shape = Sequence[int]


def matrix_dims(shape: Shape) -> tuple[int, ...]:
    """Return ``shape`` merged into at most two dimensions, as hivemind merges it.

    Of all neighbours, the two whose product is smallest become one, the first of equals first,
    until two dimensions are left: a convolution (out, in, 3, 3) is a matrix (out, 9 in).
    """
    dims = list(shape)
    while len(dims) > 2:
        products = [left * right for left, right in pairwise(dims)]
        at = products.index(min(products))
        dims[at : at + 2] = [products[at]]
    return tuple(dims)


def factor_rank(shape: Shape, rank: int) -> int:
    """Return the rank of a tensor's factors: no matrix has more than min(n, m)."""
    return min(rank, *matrix_dims(shape))


def compressed_tensors(
    shapes: Sequence[Shape], rank: int | None, min_compression_ratio: float | None = None
) -> tuple[int, ...]:
    """Return the indices of the tensors that PowerSGD factorises.

    A tensor is factorised when it has more than one dimension and the fraction that its factors
    save, 1 - r(n + m)/nm, is at least ``min_compression_ratio``. As the ratio is not negative
    this implies r < min(n, m): whatever is factorised has the rank that was asked for.

    Raises:
        ConfigError: The rank is below 1 or the ratio negative.
    """
    if rank is None:
        return ()
    problems = option_problems(rank, min_compression_ratio)
    if problems:
        raise ConfigError(problems)
    ratio = _ratio(min_compression_ratio)
    return tuple(i for i, shape in enumerate(shapes) if _saving(shape, rank) >= ratio)


def phase_names(iterations: int = 1) -> tuple[str, ...]:
    """Return the names of a round's all-reduces: P and Q, then P2 and Q2, and so on."""
    numbers = ("", *map(str, range(2, iterations + 1)))
    return tuple(f"{factor}{number}" for number in numbers for factor in "PQ")


def option_problems(
    rank: Any,
    min_compression_ratio: Any = None,
    *,
    num_iters_per_step: Any = 1,
    start_compressing_after_num_steps: Any = 0,
    orthogonalisation: Any = ORTHOGONALISATIONS[0],
    factor_codec: Any = FACTOR_CODEC,
) -> list[Problem]:
    """Return every mistake in PowerSGD's options; an absent ratio is the default."""
    ratio = _ratio(min_compression_ratio)
    problems = []
    if not _whole(rank, 1):
        problems.append(Problem("powersgd_rank", rank, "at least 1, or null for no PowerSGD"))
    if not (isinstance(ratio, (int, float)) and ratio >= 0):
        problems.append(Problem("min_compression_ratio", ratio, "a fraction saved, not negative"))
    if not _whole(num_iters_per_step, 1, MAX_ITERATIONS):
        allowed = f"a whole number from 1 to {MAX_ITERATIONS}"
        problems.append(Problem("num_iters_per_step", num_iters_per_step, allowed))
    if not _whole(start_compressing_after_num_steps, 0):
        key, allowed = "start_compressing_after_num_steps", "a whole number of rounds, at least 0"
        problems.append(Problem(key, start_compressing_after_num_steps, allowed))
    if orthogonalisation not in ORTHOGONALISATIONS:
        problems.append(unknown("orthogonalisation", orthogonalisation, ORTHOGONALISATIONS))
    if factor_codec not in FACTOR_CODECS:
        problems.append(unknown("factor_codec", factor_codec, FACTOR_CODECS))
    return problems


def _whole(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _ratio(min_compression_ratio: Any) -> Any:
    return DEFAULT_MIN_COMPRESSION_RATIO if min_compression_ratio is None else min_compression_ratio


def _saving(shape: Shape, rank: int) -> float:
    """Return the fraction of elements that the factors save; negative when there are none."""
    if len(shape) < 2 or not math.prod(shape):
        return -1.0
    return 1 - rank * sum(matrix_dims(shape)) / math.prod(shape)
