"""Pareto front of a study's objectives, and how sure it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rayhive.columns import Column, Row, in_group
from rayhive.metrics.aggregate import comparable, is_candidate
from rayhive.metrics.group import MetricGroup
from rayhive.metrics.posterior import front_probabilities
from rayhive.metrics.seeds import differences, holm, seed_values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Adjusted p-value up to which a difference is significant.
SIGNIFICANCE = 0.05


#: Most configurations that a cell lists.
NAMED = 20


class Pareto(MetricGroup):
    """Membership of the Pareto front, and its certainty.

    Only rows under the same conditions (scenario, workload, code, peers, link) are compared. A row
    is no candidate if an objective is unknown, or known of only some replicates because the rest
    missed the target or failed.

    * ``pareto``: whether the row is a candidate that no other candidate dominates. A row dominates
      another if it is at least as good in every objective and better in one. None without
      objectives.
    * ``pareto_probability``: probability that this holds for the true means, given the replicates
      (:mod:`rayhive.metrics.posterior`). None if the row is no candidate, or if the spread of an
      objective is not known.
    * ``not_separable``: number of other candidates of which no objective differs significantly, by
      Student's t for the pairs of equal seeds (differences of logarithms on a log scale), with
      Holm's adjustment over all pairs of candidates and all objectives.
      None without other candidates.
    * ``not_separable_from``: the configurations of these rows, separated by ``; ``,
      the first 20.
    """

    columns = (
        *in_group(
            "replication",
            Column(
                "pareto",
                "Whether no other configuration is better in every objective",
                type="flag",
                stage="run",
                in_table=False,  # a star in the first column
            ),
            Column("pareto_probability", "Probability of being on the Pareto front", stage="run"),
            Column(
                "not_separable",
                "Rows from which it cannot be told apart",
                type="count",
                stage="run",
            ),
        ),
        Column("not_separable_from", "Configurations of these rows", type="text", stage="run"),
    )

    def rank(self, rows: Sequence[Row], objectives: Mapping[str, str], by: Sequence[str]) -> None:
        """Set the columns in every row."""
        for row in rows:
            row["pareto"] = None if not objectives else False
        for candidates in candidate_groups(rows, objectives):
            _mark_front(candidates, objectives)
            shares = front_probabilities(candidates, objectives)
            for row, share in zip(candidates, shares or (), strict=shares is not None):
                row["pareto_probability"] = share
            if len(candidates) > 1:
                _separate(candidates, objectives, by)


def candidate_groups(rows: Sequence[Row], objectives: Mapping[str, str]) -> Iterator[list[Row]]:
    """Yield the rows that are compared with each other: all objectives known, equal conditions."""
    left = [row for row in rows if objectives and is_candidate(row, objectives)]
    while left:
        yield [row for row in left if comparable(left[0], row)]
        left = [row for row in left if not comparable(left[0], row)]


def _separate(rows: Sequence[Row], objectives: Mapping[str, str], by: Sequence[str]) -> None:
    """Set the columns about rows that cannot be told apart."""
    apart = separable(rows, tuple(objectives))
    columns = by or ["configuration"]
    names = [" ".join(str(row.get(column)) for column in columns) for row in rows]
    for row, line in zip(rows, apart, strict=True):
        others = [
            n for n, o, yes in zip(names, rows, line, strict=True) if not yes and o is not row
        ]
        row["not_separable"] = len(others)
        row["not_separable_from"] = _listed(others) or None


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
    return "; ".join([*names[:NAMED], *more])


def separable(rows: Sequence[Row], names: Sequence[str]) -> NDArray[np.bool_]:
    """Return row x row: whether an objective of the two differs significantly."""
    import numpy as np

    count = len(rows)
    p_values = np.full((len(names), count, count), np.nan)
    for place, name in enumerate(names):
        values = seed_values(rows, name)
        for index in range(count):
            p_values[place, index, index + 1 :] = differences(values, index).p_values()[index + 1 :]
    adjusted = holm(p_values.ravel()).reshape(p_values.shape)
    upper = (adjusted <= SIGNIFICANCE).any(axis=0)
    return np.asarray(upper | upper.T)


def _mark_front(rows: Sequence[Row], objectives: Mapping[str, str]) -> None:
    import numpy as np

    costs = np.array([_costs(row, objectives) for row in rows])
    for row, mine in zip(rows, costs, strict=True):
        dominating = (costs <= mine).all(axis=1) & (costs < mine).any(axis=1)
        row["pareto"] = not dominating.any()


def _costs(row: Row, objectives: Mapping[str, str]) -> list[float]:
    signs = {name: 1 if way == "minimize" else -1 for name, way in objectives.items()}
    return [sign * float(row[name] or 0.0) for name, sign in signs.items()]
