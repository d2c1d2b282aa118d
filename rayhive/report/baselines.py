"""Comparison of one configuration with the baselines of a study, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rayhive.columns import Row
from rayhive.metrics.aggregate import comparable, ran
from rayhive.report.differences import Difference, difference_text, differences_to
from rayhive.report.results import Results


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
    if not base["n"]:
        return f"none of its {ran(base)} replicates finished"
    names = tuple(results.objectives)
    found = differences_to(row, base, names)
    parts = [_part(each) for each in found if each.value is not None]
    lacking = [each.column for each in found if each.value is None and base[each.column] is None]
    if lacking:
        parts.append(f"it has no {' and no '.join(lacking)}")
    if base["n_failed"]:
        parts.append(f"{base['n_failed']} of its {ran(base)} replicates failed")
    return ", ".join(parts) or "no seed in common"


def _part(found: Difference) -> str:
    doubt = " (one seed)" if found.pairs < 2 else "" if found.significant else " (may be equal)"
    return f"{found.column} {difference_text(found)}{doubt}"
