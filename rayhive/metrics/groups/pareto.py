"""Pareto front of a study's objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayhive.columns import Column, Row, in_group
from rayhive.metrics.aggregate import comparable, objectives_known
from rayhive.metrics.group import MetricGroup


class Pareto(MetricGroup):
    """Membership of the Pareto front.

    * ``pareto``: whether no other row dominates the row. A row dominates another if it is at least
      as good in every objective and better in one. Only rows under the same conditions (scenario,
      workload, code, peers, link) are compared. A row is neither on the front nor dominates others
      if an objective is unknown, or known of only some replicates because the rest missed the
      target or failed. None without objectives.
    """

    columns = in_group(
        "replication",
        Column(
            "pareto",
            "Whether no other configuration is better in every objective",
            type="flag",
            stage="run",
            in_table=False,  # a star in the first column
        ),
    )

    def rank(self, rows: Sequence[Row], objectives: Mapping[str, str], by: Sequence[str]) -> None:
        """Set ``pareto`` in every row."""
        known = [row for row in rows if objectives and objectives_known(row, objectives)]
        for row in rows:
            row["pareto"] = None if not objectives else False
        for row in known:
            rivals = [other for other in known if other is not row and comparable(row, other)]
            row["pareto"] = not any(_dominates(other, row, objectives) for other in rivals)


def _dominates(a: Row, b: Row, objectives: Mapping[str, str]) -> bool:
    costs, others = _costs(a, objectives), _costs(b, objectives)
    return costs != others and all(x <= y for x, y in zip(costs, others, strict=True))


def _costs(row: Row, objectives: Mapping[str, str]) -> list[float]:
    signs = {name: 1 if way == "minimize" else -1 for name, way in objectives.items()}
    return [sign * float(row[name] or 0.0) for name, sign in signs.items()]
