"""Number of replicates that shows a wanted difference, from a given or a measured spread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rayhive.columns import find_column
from rayhive.errors import ConfigError, Problem
from rayhive.metrics.groups.pareto import candidate_groups
from rayhive.metrics.posterior import residuals_spread
from rayhive.metrics.power import LEVEL, replicates_needed, shown_effect
from rayhive.metrics.seeds import seed_values
from rayhive.report.results import Results


@dataclass(frozen=True)
class ReplicatesNeeded:
    """Replicates that one objective needs.

    Attributes:
        objective: The objective.
        difference: Wanted difference of two rows, as a share of the smaller value.
        spread: Standard deviation between replicates of one row, as a share of the value; on a log
            scale that of the logarithms. None if it is not known; what follows from it is None.
        source: Origin of the spread, or the reason for which it is not known.
        one_pair: Replicates for one comparison of two rows; None if it takes too many.
        comparisons: Comparisons of a baseline with the other rows, over all objectives.
        all_rows: Replicates for one of these, at the level that Holm's adjustment begins with.
        shown: Difference that the planned replicates show of two rows; None for one replicate.
    """

    objective: str
    difference: float
    spread: float | None
    source: str
    one_pair: int | None
    comparisons: int
    all_rows: int | None
    shown: float | None


def share(key: str, value: str | float) -> float:
    """Return a share that was given as 0.1 or ``10%``.

    Raises:
        ConfigError: It is no positive number.
    """
    text = str(value).strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(Problem(key, value, "a positive share, as in 10% or 0.1"))
    return found


def unknown_spread(folder: Path) -> ConfigError:
    """Return the error for a study without a past run."""
    allowed = f"a spread such as 5%, or --from DIR, a past run of the study; {folder} is none"
    return ConfigError(Problem("--spread", None, allowed))


def spread_in(results: Results | None, name: str) -> tuple[float | None, str]:
    """Return the spread of an objective in a past run, and its origin.

    It is the standard deviation of the residuals of rows and seeds
    (:func:`rayhive.metrics.posterior.residuals_spread`), pooled over all rows, but baselines, of
    which every replicate has the objective; on a linear scale of values divided by their row's
    mean.

    Returns:
        The spread and its origin; None and the reason if no two replicates of a row have the
        objective, or if all agree.
    """
    import numpy as np

    column = find_column(name)
    squares, freedom, rows = 0.0, 0, 0
    folded = [] if results is None else [r for r in results.folded if r["baseline"] is None]
    for group in candidate_groups(folded, {name: "minimize"}):
        values = seed_values(group, name)
        if column is not None and not column.log:
            means = np.nanmean(values.values, axis=1, keepdims=True)
            values = replace(values, values=values.values / np.where(means == 0, np.nan, means))
        found = residuals_spread([values])
        if found is not None:
            squares += float(found.covariance[0, 0]) * found.freedom
            freedom, rows = freedom + found.freedom, rows + len(group)
    run = "" if results is None else results.name
    if not freedom or not squares:
        return None, f"the replicates of {run} show no spread; --spread PERCENT gives one"
    source = f"measured in {run}: {rows} rows"
    return math.sqrt(squares / freedom), source


def needed(
    spreads: Mapping[str, tuple[float | None, str]], difference: float, planned: int, rivals: int
) -> list[ReplicatesNeeded]:
    """Return the replicates that each objective needs.

    Args:
        spreads: Objective -> spread between replicates, and its origin.
        difference: Wanted difference, as a share of the smaller value.
        planned: Replicates of the study.
        rivals: Rows that are compared with a baseline row.
    """
    comparisons = rivals * len(spreads)
    found = []
    for name, (spread, source) in spreads.items():
        column = find_column(name)
        log = column is not None and column.log
        if spread is None:
            unknown = (None, comparisons, None, None)
            found.append(ReplicatesNeeded(name, difference, None, source, *unknown))
            continue
        deviation = spread * math.sqrt(2)  # of the difference of two rows
        effect = (math.log1p(difference) if log else difference) / deviation
        shown = shown_effect(planned)
        least = None if shown is None else shown * deviation
        found.append(
            ReplicatesNeeded(
                objective=name,
                difference=difference,
                spread=spread,
                source=source,
                one_pair=replicates_needed(effect),
                comparisons=comparisons,
                all_rows=replicates_needed(effect, LEVEL / comparisons),
                shown=math.expm1(least) if log and least is not None else least,
            )
        )
    return found
