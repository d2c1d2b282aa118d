"""How a configuration bears whatever happens: the worst over the scenarios of a run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rayhive.metrics.aggregate import CONDITIONS, KEY, objectives_known
from rayhive.metrics.group import Row
from rayhive.metrics.rows import NO_FAULTS


def mark_robustness(
    rows: Sequence[Row], objectives: Mapping[str, str], by: Sequence[str] = ()
) -> None:
    """Set the robustness columns of every row, the same in all rows of a configuration.

    Let f(c, s) be the first objective of configuration c under scenario s, and "worse" be more of
    it if it is minimised, less if it is maximised.

    * ``worst_case``: the worst f(c, s) over the scenarios s of the run.
    * ``worst_retention``: the least ``retention`` over them.
    * ``regret``: the largest ``|f(c, s) - f(best, s)|`` over them, where best is the best
      configuration under s; 0 for a configuration that is the best under each (minimax regret,
      Savage 1951).

    Only rows with the same workload, peers and link are compared. A configuration that lacks a
    scenario, or of which a replicate under one failed or was invalid, or an objective is not known
    of all its replicates, has None: its worst case was not seen. ``worst_retention`` asks for a
    retention under every scenario that breaks something, whatever became of the objective.

    Args:
        rows: Folded rows, changed in place.
        objectives: Column to ``minimize`` or ``maximize``; the first counts.
        by: What makes a configuration; by default every setting.
    """
    places = [name for name in CONDITIONS if name != "scenario"]
    identity = [name for name in (by or KEY) if name != "scenario"]
    for arena in _groups(rows, places):
        scenarios = {str(row["scenario"]) for row in arena}
        if scenarios == {NO_FAULTS}:
            continue
        teams = _groups(arena, identity)
        whole = [team for team in teams if _is_whole(team, scenarios)]
        for team in whole:
            _mark(team, worst_retention=_least(team))
        if objectives:
            name, direction = next(iter(objectives.items()))
            _mark_objective(whole, name, 1.0 if direction == "minimize" else -1.0)


def _groups(rows: Sequence[Row], names: Sequence[str]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[json.dumps([row.get(name) for name in names])].append(row)
    return list(groups.values())


def _is_whole(team: Sequence[Row], scenarios: set[str]) -> bool:
    return {row["scenario"] for row in team} == scenarios and all(
        row["n"] and not row["n_failed"] for row in team
    )


def _least(team: Sequence[Row]) -> float | None:
    found = [row["retention"] for row in team if row["scenario"] != NO_FAULTS]
    known = [value for value in found if isinstance(value, (int, float))]
    return min(known) if known and len(known) == len(found) else None


def _mark_objective(teams: Sequence[Sequence[Row]], name: str, sign: float) -> None:
    known = [team for team in teams if all(objectives_known(row, [name]) for row in team)]
    costs = [{row["scenario"]: sign * float(row[name] or 0.0) for row in team} for team in known]
    if not costs:
        return
    best = {scenario: min(cost[scenario] for cost in costs) for scenario in costs[0]}
    for team, cost in zip(known, costs, strict=True):
        regret = max(cost[scenario] - best[scenario] for scenario in best)
        _mark(team, worst_case=sign * max(cost.values()), regret=regret)


def _mark(team: Sequence[Row], **values: float | None) -> None:
    for row in team:
        row.update(values)
