"""Joint distribution of what the true objectives of rows may be, given their replicates.

Replicates of one seed are a block: y = row + seed + residual, a randomised complete block design
(Box, Hunter and Hunter, *Statistics for Experimenters*, chapter 4). The residuals have one
covariance of the objectives for all rows, of logarithms on a log scale and of bytes. With a
non-informative prior the true means then have a multivariate t-distribution around the measured
ones (Gelman et al., *Bayesian Data Analysis*, section 3.6). Pooling is what makes few replicates
useful: of 11 rows with 2 seeds the spread has 10 degrees of freedom, that of one pair has 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rayhive.columns import Row
from rayhive.metrics.seeds import BYTES, SeedValues, seed_values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float64]

#: Most draws, and the fewest for a large table. A share of 4,000 draws has an error of at most
#: 0.8 percentage points.
DRAWS, FEWEST = 4000, 250
#: Comparisons of two rows in one draw that a table affords.
_AFFORDED = 200_000_000
#: Seed of the draws: equal data give equal probabilities.
_SEED = 17


def front_probabilities(rows: Sequence[Row], objectives: Mapping[str, str]) -> list[float] | None:
    """Return for each row the probability that no other row dominates it in the true objectives.

    Args:
        rows: Rows of which every objective is known, under equal conditions.
        objectives: Column to ``minimize`` or ``maximize``.

    Returns:
        The probabilities; None if the spread of an objective is not known.
    """
    import numpy as np

    costs = draws(rows, objectives)
    if costs is None:
        return None
    by_objective = np.ascontiguousarray(np.moveaxis(costs, 2, 0))  # objective x draw x row
    shares = []
    for index in range(len(rows)):
        as_good, better = np.True_, np.False_
        for line in by_objective:
            mine = line[:, index : index + 1]
            as_good, better = as_good & (line <= mine), better | (line < mine)
        dominated = np.asarray(as_good & better).any(axis=1)
        shares.append(1 - int(np.count_nonzero(dominated)) / len(costs))
    return shares


def draws(rows: Sequence[Row], objectives: Mapping[str, str]) -> Array | None:
    """Return draws of the true objectives.

    Bytes and counts that agree exactly over the replicates of every row are taken as known.

    Args:
        rows: Rows of which every objective is known, under equal conditions.
        objectives: Column to ``minimize`` or ``maximize``.

    Returns:
        Draw x row x objective, smaller is better, logarithms on a log scale and of bytes. None if
        the spread of an objective is not known: without two replicates of a seed or row, or if all
        of them agree by chance.
    """
    import numpy as np

    if not rows or not objectives:
        return None
    found = [seed_values(rows, name).by_factors for name in objectives]
    varying = [n for n, values in enumerate(found) if not _is_whole(values) or _varies(values)]
    varying = varying or list(range(len(found)))
    spread = residuals_spread([found[n] for n in varying])
    if spread is None:
        return None
    covariance, freedom, sizes = spread
    centre = np.stack([np.nanmean(values.values, axis=1) for values in found], axis=1)
    afforded = _AFFORDED / (len(rows) ** 2 * len(found))
    count = int(min(max(afforded, FEWEST), DRAWS))
    generator = np.random.default_rng(_SEED)
    noise = generator.multivariate_normal(
        np.zeros(len(varying)), covariance, size=(count, len(rows)), method="svd"
    )
    stretch = np.sqrt(freedom / generator.chisquare(freedom, size=(count, 1, 1)))
    drawn = np.repeat(centre[None], count, axis=0)
    drawn[:, :, varying] += noise * stretch / np.sqrt(sizes)[None, :, None]
    signs = np.array([1.0 if way == "minimize" else -1.0 for way in objectives.values()])
    return np.asarray(signs * drawn)


def _is_whole(values: SeedValues) -> bool:
    """Return whether the values are bytes or counts, of which equal ones are no coincidence."""
    return values.column.unit == BYTES or values.column.type == "count"


def _varies(values: SeedValues) -> bool:
    """Return whether the replicates of a row differ."""
    import numpy as np

    if not values.seeds:
        return False
    spread = np.nanmax(values.values, axis=1) - np.nanmin(values.values, axis=1)
    return bool(spread.any())


def residuals_spread(found: Sequence[SeedValues]) -> tuple[Array, int, Array] | None:
    """Return the residuals' covariance, its degrees of freedom, and the replicates of each row.

    Residuals are values less those of their row and, with common seeds, less those of their seed.

    Args:
        found: Values of one column each, of the same rows.

    Returns:
        Covariance of the columns; None without two replicates of a row, or if the values of a
        column agree by chance.
    """
    import numpy as np

    seeds = sorted(set.intersection(*(set(values.seeds) for values in found)))
    if not seeds:
        return None
    places: list[list[int]] = [[values.seeds.index(seed) for seed in seeds] for values in found]
    cells: Array = np.stack([v.values[:, at] for v, at in zip(found, places, strict=True)], axis=2)
    there = np.asarray(np.isfinite(cells).all(axis=2))  # row x seed
    if not there.any(axis=1).all():
        return None
    common = there.all(axis=0)
    if common.sum() > 1 and len(cells) > 1:
        table = cells[:, common]
        table = table - table.mean(axis=1, keepdims=True)
        residuals = (table - table.mean(axis=0)).reshape(-1, len(found))
        freedom = (len(cells) - 1) * (int(common.sum()) - 1)
    else:
        lines = [line[seen] for line, seen in zip(cells, there, strict=True)]
        residuals = np.concatenate([line - line.mean(axis=0) for line in lines])
        freedom = int(there.sum()) - len(cells)
    if freedom < 1:
        return None
    covariance = residuals.T @ residuals / freedom
    by_chance = [not all(values.exact) for values in found]
    if (by_chance & (np.diag(covariance) == 0)).any():
        return None
    return covariance, freedom, there.sum(axis=1).astype(float)
