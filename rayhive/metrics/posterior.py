"""Joint distribution of what the true objectives of rows may be, given their replicates.

Replicates of one seed are a block: y = row + seed + residual, a randomised complete block design
(Box, Hunter and Hunter, *Statistics for Experimenters*, chapter 4). The residuals have one
covariance of the objectives for all rows, of logarithms on a log scale and of bytes. With a
non-informative prior the true means then have a multivariate t-distribution around the measured
ones (Gelman et al., *Bayesian Data Analysis*, section 3.6). Pooling is what makes few replicates
useful: of 11 rows with 2 seeds the spread has 10 degrees of freedom, that of one pair has 1. A row
that lacks a seed is compared by least squares of the same model, not by its mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rayhive.columns import Row
from rayhive.metrics.seeds import BYTES, ROUNDING, SeedValues, seed_values

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

    costs = posterior(rows, objectives).draws
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


@dataclass(frozen=True)
class Posterior:
    """Joint distribution of the true objectives of rows.

    Objectives are costs: smaller is better. They are logarithms on a log scale and of bytes.

    Attributes:
        centre: Row x objective: the means, as if every row had the same seeds.
        draws: Draw x row x objective; None if the spread of an objective is not known: without two
            replicates of a seed or row, or if all of them agree by chance.
    """

    centre: Array
    draws: Array | None


def posterior(rows: Sequence[Row], objectives: Mapping[str, str]) -> Posterior:
    """Return the joint distribution of the true objectives of rows.

    Bytes and counts that agree exactly over the replicates of every row are taken as known.

    Args:
        rows: Rows of which every objective is known, under equal conditions.
        objectives: Column to ``minimize`` or ``maximize``.
    """
    import numpy as np

    if not rows or not objectives:
        return Posterior(np.zeros((len(rows), len(objectives))), None)
    signs = np.array([1.0 if way == "minimize" else -1.0 for way in objectives.values()])
    found = [seed_values(rows, name).by_factors for name in objectives]
    centre = np.stack([_row_means(values) for values in found], axis=1)
    varying = [n for n, values in enumerate(found) if not _is_whole(values) or _varies(values)]
    varying = varying or list(range(len(found)))
    spread = residuals_spread([found[n] for n in varying])
    if spread is None:
        return Posterior(signs * centre, None)
    centre[:, varying] = spread.centre
    afforded = _AFFORDED / (len(rows) ** 2 * len(found))
    count = int(min(max(afforded, FEWEST), DRAWS))
    generator = np.random.default_rng(_SEED)
    noise = generator.multivariate_normal(
        np.zeros(len(varying)), spread.covariance, size=(count, len(rows)), method="svd"
    )
    stretch = np.sqrt(spread.freedom / generator.chisquare(spread.freedom, size=(count, 1, 1)))
    drawn = np.repeat(centre[None], count, axis=0)
    drawn[:, :, varying] += spread.errors(noise) * stretch
    return Posterior(signs * centre, np.asarray(signs * drawn))


def _row_means(values: SeedValues) -> Array:
    """Return the mean of each row; NaN for one without values."""
    import numpy as np

    there = np.isfinite(values.values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, values.values, 0.0).sum(axis=1) / there.sum(axis=1))


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


@dataclass(frozen=True)
class Spread:
    """Means of rows, and their errors.

    Attributes:
        covariance: Covariance of the columns in one replicate.
        freedom: Its degrees of freedom.
        centre: Row x column: means; of rows with different seeds, those of the model.
        root: Factor of each row, or row x row, that makes independent residuals of one replicate
            for each row into errors of the means.
    """

    covariance: Array
    freedom: int
    centre: Array
    root: Array

    def errors(self, residuals: Array) -> Array:
        """Return errors of the means for residuals, draw x row x column."""
        import numpy as np

        if self.root.ndim == 1:
            return np.asarray(residuals * self.root[None, :, None])
        return np.asarray(np.einsum("rs,dsc->drc", self.root, residuals, optimize=True))


def residuals_spread(found: Sequence[SeedValues]) -> Spread | None:
    """Return the means of rows, and the spread of their residuals.

    With two common seeds, residuals are values less those of their row and seed (a row that lacks
    a seed is compared by the others, in the least squares of the model); else those of their row.

    Args:
        found: Values of one column each, of the same rows.

    Returns:
        None without two replicates of a row, or if the values of a column agree by chance.
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
    sizes = there.sum(axis=1).astype(float)
    if there.all(axis=0).sum() > 1 and len(cells) > 1:
        centre, residuals, freedom, root = _of_model(cells, there)
    else:
        lines = [line[seen] for line, seen in zip(cells, there, strict=True)]
        centre = np.stack([line.mean(axis=0) for line in lines])
        residuals = np.concatenate([line - line.mean(axis=0) for line in lines])
        freedom, root = int(sizes.sum()) - len(cells), 1 / np.sqrt(sizes)
    if freedom < 1:
        return None
    covariance = residuals.T @ residuals / freedom
    by_chance = [not all(values.exact) for values in found]
    largest = np.nanmax(np.abs(np.where(there[:, :, None], cells, 0.0)), axis=(0, 1))
    if (by_chance & (np.diag(covariance) <= (ROUNDING * largest) ** 2)).any():
        return None
    return Spread(covariance, freedom, centre, root)


def _of_model(cells: Array, there: NDArray[np.bool_]) -> tuple[Array, Array, int, Array]:
    """Return means, residuals, degrees of freedom and root of the model row + seed + residual.

    Args:
        cells: Row x seed x column.
        there: Row x seed: whether there is a value.
    """
    import numpy as np

    if there.all():
        centre = cells.mean(axis=1)
        table = cells - centre[:, None]
        residuals = (table - table.mean(axis=0)).reshape(-1, cells.shape[2])
        freedom = (there.shape[0] - 1) * (there.shape[1] - 1)
        return centre, residuals, freedom, np.full(len(cells), there.shape[1] ** -0.5)
    rows, seeds = np.nonzero(there)
    design = np.zeros((len(rows), sum(there.shape)))
    design[np.arange(len(rows)), rows] = 1.0
    design[np.arange(len(rows)), there.shape[0] + seeds] = 1.0
    values, solve = cells[rows, seeds], np.linalg.pinv(design)
    effects = solve @ values
    # the mean of a row over all seeds: its effect, and the mean effect of a seed
    mean = np.hstack([np.eye(there.shape[0]), np.full(there.shape, 1 / there.shape[1])])
    scale = mean @ solve
    variances, axes = np.linalg.eigh(scale @ scale.T)
    root = axes * np.sqrt(np.maximum(variances, 0.0))
    freedom = len(rows) - (sum(there.shape) - 1)  # the common seeds connect all rows
    return mean @ effects, values - design @ effects, freedom, root
