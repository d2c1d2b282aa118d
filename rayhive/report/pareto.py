"""The Pareto front of a study's objectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rayhive.metrics.aggregate import CONDITIONS, objectives_known
from rayhive.metrics.group import Row


def mark_front(rows: Sequence[Row], objectives: Mapping[str, str]) -> None:
    """Set ``pareto`` of every row: whether no other row dominates it.

    A row dominates another if it is at least as good in every objective and better in one. Only
    rows under the same conditions (scenario, workload, peers, link) are compared. A row that lacks
    an objective, or knows it of only some of its replicates because the others missed the target
    or failed, is not on the front and dominates nobody. Without objectives there is no front:
    ``pareto`` is None.

    Args:
        rows: Folded rows, changed in place.
        objectives: Column to ``minimize`` or ``maximize``.
    """
    known = [row for row in rows if objectives and objectives_known(row, objectives)]
    for row in rows:
        row["pareto"] = None if not objectives else False
    for row in known:
        rivals = [other for other in known if other is not row and comparable(row, other)]
        row["pareto"] = not any(_dominates(other, row, objectives) for other in rivals)


def comparable(a: Row, b: Row) -> bool:
    """Return whether two rows were measured under the same conditions."""
    return all(a.get(name) == b.get(name) for name in CONDITIONS)


def _dominates(a: Row, b: Row, objectives: Mapping[str, str]) -> bool:
    costs, others = _costs(a, objectives), _costs(b, objectives)
    return costs != others and all(x <= y for x, y in zip(costs, others, strict=True))


def _costs(row: Row, objectives: Mapping[str, str]) -> list[float]:
    return [_signed(row[name], direction) for name, direction in objectives.items()]


def _signed(value: object, direction: str) -> float:
    number = float(value)  # type: ignore[arg-type]
    return number if direction == "minimize" else -number


def describe(objectives: Mapping[str, str]) -> Iterable[str]:
    """Yield each objective with its direction, in words."""
    for name, direction in objectives.items():
        yield f"{name} ({direction})"
