"""Columns of the default table, which is one block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayhive.columns import Row

#: Columns that say most about a run in which nothing is compared.
_ALONE = ("retention", "recover_p50_s", "final_loss", "samples_per_s", "time_to_target_s")
#: Numbers of replicates without a result, shown where there are some.
COUNTS = ("n_failed", "n_pruned", "n_skipped", "n_lost")
#: Most numbers in a row of such a run.
_NUMBERS = 4


def brief_columns(objectives: Iterable[str], rows: Sequence[Row]) -> list[str]:
    """Return the names of the columns of the default table.

    The objectives, under faults the retention, the number of replicates, and the certainty. If
    nothing is compared, other numbers stand in place of the certainty.

    Args:
        objectives: The objectives of the study.
        rows: Rows of the table.
    """
    counts = ["n", *(name for name in COUNTS if any(row[name] for row in rows))]
    if any(row["not_separable"] is not None for row in rows):
        faulted = ["retention"] if any(row["retention"] is not None for row in rows) else []
        names = [*objectives, *faulted, *counts, "pareto_probability", "not_separable"]
        return list(dict.fromkeys(names))
    known = [name for name in _ALONE if any(row[name] is not None for row in rows)]
    numbers = dict.fromkeys((*objectives, *known))
    return [*list(numbers)[:_NUMBERS], *counts]
