"""Robustness of a configuration: its worst values over the scenarios of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rayhive.columns import Column, Row, conditions, find_column, in_group
from rayhive.metrics.aggregate import objectives_known, row_key, rows_by, unfinished
from rayhive.metrics.group import MetricGroup
from rayhive.metrics.rows import NO_FAULTS
from rayhive.metrics.worst import regret_bounds, worst_bounds

_worst = partial(Column, stage="run", bounded=True)


class Robustness(MetricGroup):
    """Worst values over the scenarios, equal in all rows of a configuration.

    Let f(c, s) be the first objective of configuration c under scenario s. Larger values are worse
    if it is minimised, smaller values if it is maximised. If it is relative to the twin, as
    ``retention`` is, the scenarios are those with faults.

    * ``worst_case``: the worst f(c, s) over the scenarios s of the run.
    * ``worst_retention``: the smallest ``retention`` over the scenarios with faults.
    * ``regret``: the largest ``|f(c, s) - f(best, s)|`` over the scenarios, where best is the best
      configuration under s. 0 for a configuration that is the best under every scenario (minimax
      regret, Savage 1951).

    ``worst_case``, ``worst_retention`` and ``regret`` have simultaneous 95 % intervals: with
    probability 0.95 all the means and differences that they are the worst of lie in their own
    intervals, which are so much wider (Bonferroni). For ``regret`` these are Student's intervals of
    differences at equal seeds; on a log scale of ratios, times the interval of f(c, s). The bounds
    are None if one of them is not known, as with one replicate.

    Only rows with the same workload, code, peers and link are compared. All three are None for a
    configuration that lacks a scenario or has a failed, invalid or pruned replicate under one;
    ``worst_case`` and ``regret`` also if the objective is not known of every replicate.
    """

    columns = in_group(
        "robustness",
        _worst("worst_case", "Worst value of the first objective over the scenarios"),
        _worst("worst_retention", "Smallest retention over the scenarios"),
        _worst("regret", "Largest distance to a scenario's best configuration"),
    )

    def rank(self, rows: Sequence[Row], objectives: Mapping[str, str], by: Sequence[str]) -> None:
        """Set the columns of every configuration that is known under all scenarios."""
        places = [name for name in conditions() if name != "scenario"]
        identity = [name for name in (by or row_key()) if name != "scenario"]
        for compared in rows_by(rows, places):
            scenarios = {str(row["scenario"]) for row in compared}
            if scenarios == {NO_FAULTS}:
                continue
            configurations = rows_by(compared, identity)
            complete = [group for group in configurations if _is_complete(group, scenarios)]
            for group in complete:
                _set(group, worst_retention=_worst_retention(group))
                faulted = [row for row in group if row["scenario"] != NO_FAULTS]
                _set(group, **_bounds("worst_retention", *worst_bounds(faulted, "retention", -1.0)))
            if objectives:
                name, direction = next(iter(objectives.items()))
                _set_objective(complete, name, 1.0 if direction == "minimize" else -1.0)


def _is_complete(group: Sequence[Row], scenarios: set[str]) -> bool:
    return {row["scenario"] for row in group} == scenarios and all(
        row["n"] and not unfinished(row) and not row.get("n_skipped") for row in group
    )


def _worst_retention(group: Sequence[Row]) -> float | None:
    found = [row["retention"] for row in group if row["scenario"] != NO_FAULTS]
    known = [value for value in found if isinstance(value, (int, float))]
    return min(known) if known and len(known) == len(found) else None


def _set_objective(groups: Sequence[Sequence[Row]], name: str, sign: float) -> None:
    scored = [(group, _with_value(group, name)) for group in groups]
    known = [pair for pair in scored if all(objectives_known(row, [name]) for row in pair[1])]
    costs = [{row["scenario"]: sign * float(row[name] or 0.0) for row in rows} for _, rows in known]
    if not costs:
        return
    best = {scenario: min(cost[scenario] for cost in costs) for scenario in costs[0]}
    for (group, rows), cost in zip(known, costs, strict=True):
        regret = max(cost[scenario] - best[scenario] for scenario in best)
        _set(group, worst_case=sign * max(cost.values()), regret=regret)
        _set(group, **_bounds("worst_case", *worst_bounds(rows, name, sign)))
    bounds = regret_bounds([rows for _, rows in known], name, sign)
    for (group, _), (low, high) in zip(known, bounds, strict=True):
        regret = float(group[0]["regret"] or 0.0)
        if low is not None and high is not None and not low <= regret <= high:
            low = high = None  # the means are over other seeds than the pairs
        _set(group, **_bounds("regret", low, high))


def _with_value(group: Sequence[Row], name: str) -> list[Row]:
    """Return the rows that can have a column: without faults there is no twin to compare with."""
    column = find_column(name)
    of_twins = column is not None and column.stage == "twin"
    return [row for row in group if not of_twins or row["scenario"] != NO_FAULTS]


def _bounds(name: str, low: float | None, high: float | None) -> dict[str, float | None]:
    return {f"{name}_low": low, f"{name}_high": high}


def _set(group: Sequence[Row], **values: float | None) -> None:
    for row in group:
        row.update(values)
