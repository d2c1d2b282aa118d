"""Comparison of one configuration with the baselines of a study, in sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from rayhive.columns import Row, find_column
from rayhive.metrics.aggregate import comparable, is_censored, ran
from rayhive.metrics.rows import NO_FAULTS
from rayhive.report.differences import Difference, difference_text, differences_to
from rayhive.report.numbers import number_text
from rayhive.report.results import Results
from rayhive.report.table import missed_text
from rayhive.report.table_notes import count_text
from rayhive.timeline import FINISHED

#: Beginning of the reason of a failure, and the name of an error around its text.
_PEER, _WRAPPED = re.compile(r"^peer-[\d.]+: "), re.compile(r"^\w+\((['\"])(.*)\1\)$")


def baseline_lines(results: Results, row: Row, place: str = "") -> Iterator[str]:
    """Yield a sentence for each baseline that ran under the conditions of a row.

    Args:
        results: The results.
        row: The row of a configuration.
        place: The conditions in words, to follow the name of the baseline.
    """
    for base in results.folded:
        if base["baseline"] is not None and comparable(row, base):
            yield f"Against {base['configuration']}{place}: {_compared(results, row, base)}."


def _compared(results: Results, row: Row, base: Row) -> str:
    reason = _reason(results, base)
    if not base["n"]:
        text = f"none of its {count_text(ran(base), 'replicate')} finished{reason}"
        return f"{text}{_without_faults(results, row, base)}"
    names = tuple(results.objectives)
    found = differences_to(row, base, names)
    parts = [_part(each) for each in found if each.value is not None]
    lacking = [each.column for each in found if each.value is None and base[each.column] is None]
    if lacking:
        parts.append(f"it has no {' and no '.join(lacking)}")
    if base["n_failed"]:
        parts.append(f"{base['n_failed']} of its {ran(base)} replicates failed{reason}")
    return "; ".join(parts) or "no seed in common"


def _without_faults(results: Results, row: Row, base: Row) -> str:
    """Return what a baseline that faults ended measured without them; empty if it did not."""
    twin = next(
        (
            each
            for each in results.folded
            if each["baseline"] == base["baseline"]
            and each["scenario"] == NO_FAULTS != base["scenario"]
            and comparable({**each, "scenario": base["scenario"]}, base)
        ),
        None,
    )
    if twin is None or not twin["n"]:
        return ""
    parts = []
    for name in results.objectives:
        column = find_column(name)
        unit = f" {column.unit}" if column is not None and column.unit else ""
        parts.append(f"{name} {_value(twin, name)} (here {_value(row, name)}{unit} with faults)")
    return f"; without faults it has {' and '.join(parts)}"


def _part(found: Difference) -> str:
    """Return both values of a column and their difference."""
    doubt = ", one seed" if found.pairs < 2 else "" if found.significant else ", may be equal"
    column = find_column(found.column)
    unit = f" {column.unit}" if column is not None and column.unit else ""
    mine, theirs = (_value(row, found.column) for row in (found.row, found.baseline))
    return f"{found.column} {mine} instead of {theirs}{unit} ({difference_text(found)}{doubt})"


def _value(row: Row, name: str) -> str:
    column = find_column(name)
    value = row[name]
    if isinstance(value, (int, float)):
        return f"{'≥ ' if is_censored(row, name) else ''}{number_text(value)}"
    return (None if column is None else missed_text(row, column)) or "not known"


def _reason(results: Results, base: Row) -> str:
    """Return the most frequent reason of the failures of a baseline; empty without one."""
    reasons = Counter(
        _WRAPPED.sub(r"\2", _PEER.sub("", str(row["stop_reason"])))
        for row in results.rows
        if row["baseline"] == base["baseline"]
        and comparable(row, base)
        and row["state"] not in FINISHED
        and row["stop_reason"]
    )
    return f": {reasons.most_common(1)[0][0]}" if reasons else ""
