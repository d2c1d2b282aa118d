"""Values of rows by the seed of their replicates, and differences at equal seeds.

Replicates of different configurations share their seeds, and run in blocks of one seed. The effect
of a seed on parameters and data is common to all configurations, so the difference of two rows at
equal seeds varies less than either row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from rayhive.columns import Column, FoldedRow, Row, find_column
from rayhive.metrics.folds import (
    RestrictedMean,
    event_times,
    is_exact,
    restriction,
    some_censored,
)
from rayhive.metrics.stats import CONFIDENCE
from rayhive.timeline import FINISHED, UNKNOWN

#: Relative difference below which computed values count as equal.
ROUNDING = 1e-12
#: Unit of columns of bytes.
BYTES = "B"

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class SeedValues:
    """Values of one column.

    Attributes:
        column: The column.
        seeds: Seeds, in ascending order.
        values: Row x seed: the mean over the row's replicates of that seed, NaN where there is
            none.
        exact: For each row, whether equal replicates are equal for a reason.
        log: Whether the values are logarithms.
    """

    column: Column
    seeds: tuple[int, ...]
    values: Array
    exact: tuple[bool, ...]
    log: bool

    @property
    def cost(self) -> float:
        """1 if smaller values are better, -1 if larger ones are."""
        return -1.0 if self.column.better == "maximize" else 1.0

    @property
    def by_factors(self) -> SeedValues:
        """These values as logarithms if they are bytes, and all are positive.

        Bytes vary by factors between rows, and their spread grows with the value. One spread for
        all rows therefore needs logarithms.
        """
        import numpy as np

        there = self.values[np.isfinite(self.values)]
        if self.log or self.column.unit != BYTES or not (there > 0).all():
            return self
        return replace(self, values=np.log(self.values), log=True)


def seed_values(rows: Sequence[Row], name: str) -> SeedValues:
    """Return the values of a column of folded rows, by seed.

    Times to an event that a replicate did not see are cut at the same time in every row
    (:class:`rayhive.metrics.folds.RestrictedMean`). Other values are those of the replicates that
    finished; logarithms if the column is on a log scale. Rows without replicates, and rows with a
    value that has no logarithm or is censored, are NaN: a mean of the others would be that of the
    lucky ones.

    Raises:
        KeyError: There is no such column.
    """
    import numpy as np

    column = find_column(name)
    if column is None:
        raise KeyError(name)
    members = [row.replicates.ran if isinstance(row, FoldedRow) else () for row in rows]
    found = [_values(column, ran) for ran in members]
    cut = _common_cut(column, members)
    seeds = sorted({seed for pairs in found for seed, _ in pairs})
    values = np.full((len(rows), len(seeds)), np.nan)
    for index, pairs in enumerate(found):
        if column.log and any(value <= 0 for _, value in pairs):
            continue
        by_seed = defaultdict[int, list[float]](list)
        for seed, value in pairs:
            value = min(value, cut)
            by_seed[seed].append(math.log(value) if column.log else value)
        for seed, several in by_seed.items():
            values[index, seeds.index(seed)] = math.fsum(several) / len(several)
    values[~np.isfinite(values)] = np.nan
    exact = tuple(is_exact(column, [r for r in ran if r["state"] in FINISHED]) for ran in members)
    return SeedValues(column, tuple(seeds), values, exact, column.log)


def _values(column: Column, ran: Sequence[Row]) -> list[tuple[int, float]]:
    """Return seed and value of every replicate that counts; of an event, the time observed.

    Empty if every replicate failed: nothing is known of the event then.
    """
    if some_censored(column, ran):
        return []
    pairs = []
    for row in ran:
        value = row[column.name] if row["state"] in FINISHED else None
        if isinstance(column.fold, RestrictedMean) and row["state"] not in UNKNOWN:
            times = event_times([row], column.name, column.fold.limit)
            value = times[0].seconds if times else None
        if isinstance(value, (int, float)) and row["seed"] is not None:
            pairs.append((int(row["seed"]), float(value)))
    return [] if all(value == math.inf for _, value in pairs) else pairs


def _common_cut(column: Column, members: Sequence[Sequence[Row]]) -> float:
    if not isinstance(column.fold, RestrictedMean):
        return math.inf
    everyone = [row for ran in members for row in ran]
    times = event_times(everyone, column.name, column.fold.limit)
    return math.inf if times is None else restriction(times)


@dataclass(frozen=True)
class Differences:
    """Paired differences of one row to every row: its value less the other's, at equal seeds.

    Attributes:
        pairs: Number of common seeds.
        mean: Mean difference, of logarithms on a log scale; NaN without common seeds.
        error: Standard error of the mean; NaN if it is not known. 0 if both values are exact.
    """

    pairs: Array
    mean: Array
    error: Array

    def p_values(self) -> Array:
        """Return two-sided p-values of Student's t for pairs; NaN if the error is not known."""
        import numpy as np
        from scipy.special import stdtr  # takes long to import

        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(self.mean == 0, 0.0, np.abs(self.mean) / self.error)
        found = 2 * stdtr(np.maximum(self.pairs - 1, 1), -t)
        return np.where(np.isnan(self.error), np.nan, found)

    def half_widths(self, confidence: float = CONFIDENCE) -> Array:
        """Return half of each interval's width; NaN if the error is not known."""
        import numpy as np
        from scipy.special import stdtrit

        return np.asarray(self.error * stdtrit(np.maximum(self.pairs - 1, 1), (1 + confidence) / 2))


def differences(values: SeedValues, index: int) -> Differences:
    """Return the paired differences of the row at ``index`` to all rows.

    Differences that agree exactly have an error of 0 if both rows are exact. Otherwise they can
    agree by chance, and their error is not known.
    """
    import numpy as np

    delta = values.values[index] - values.values
    there = np.isfinite(delta)
    pairs = there.sum(axis=1).astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(there, delta, 0.0).sum(axis=1) / pairs
        squares = (np.where(there, delta - mean[:, None], 0.0) ** 2).sum(axis=1)
        error = np.sqrt(squares / (pairs - 1) / pairs)
    low = np.where(there, delta, np.inf).min(axis=1, initial=np.inf)
    high = np.where(there, delta, -np.inf).max(axis=1, initial=-np.inf)
    largest = np.where(np.isfinite(values.values), np.abs(values.values), 0.0).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        same = (high - low <= ROUNDING * largest) & (pairs > 1)
    exact = np.array(values.exact) & values.exact[index]
    error = np.where(same, np.where(exact, 0.0, np.nan), error)
    error[pairs < 2] = np.nan
    return Differences(pairs, np.where(same, low, mean), error)


def holm(p_values: Array) -> Array:
    """Return p-values adjusted by Holm's step-down procedure; NaN is no test and stays NaN.

    An adjusted value of at most 0.05 is significant so that the chance of any false one among all
    tests is at most 5 % (Holm, Scandinavian Journal of Statistics 6, 1979).
    """
    import numpy as np

    adjusted = np.full_like(p_values, np.nan)
    tested = np.flatnonzero(np.isfinite(p_values))
    order = tested[np.argsort(p_values[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * p_values[order]), 1.0)
    return adjusted
