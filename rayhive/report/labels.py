"""Names of configurations and conditions, for charts and sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayhive.columns import Row, conditions


def condition_text(row: Row, rows: Iterable[Row], without: Sequence[str] = ()) -> str:
    """Return the conditions of a row that differ within some rows; empty if none do.

    Args:
        row: One of the rows.
        rows: The rows.
        without: Conditions to leave out.
    """
    rows = list(rows)
    names = [name for name in conditions() if len({each.get(name) for each in rows}) > 1]
    shown = [name for name in names if name not in without]
    return ", ".join(f"{condition_label(name)} {row.get(name) or 'none'}" for name in shown)


def condition_label(name: str) -> str:
    """Return the name of a condition in a sentence."""
    return {"peers": "peers:", "link": "link:", "code": "code"}.get(name, name)


def labels(rows: Sequence[Row]) -> list[str]:
    """Return names of configurations, made distinct by their number where two are equal."""
    return distinct([str(row["configuration"]) for row in rows])


def distinct(names: Sequence[str]) -> list[str]:
    """Return names, those that are equal with their number."""
    return [f"{name} ({n})" if names.count(name) > 1 else name for n, name in enumerate(names, 1)]
