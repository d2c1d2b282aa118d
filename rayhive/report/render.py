"""Results table of a run folder as text, in any of the output formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from rayhive.columns import Row, Value, group_columns
from rayhive.errors import ConfigError, Problem, unknown
from rayhive.metrics.aggregate import is_censored
from rayhive.report.formats import FORMATS
from rayhive.report.frames import configuration_types
from rayhive.report.results import Results, load_results
from rayhive.report.table_notes import damage_note


def results_text(
    folder: str | Path,
    format: str = "table",
    by: Sequence[str] = (),
    sort: str | None = None,
    console_width: int = 100,
    color: bool = False,
    complain: Callable[[str], None] | None = None,
) -> str:
    """Return the results table of a run folder.

    Args:
        folder: The run folder.
        format: ``table``, ``md``, ``csv``, ``json`` or ``latex``.
        by: Configuration columns; replicates that agree in these make one row, whatever their
            other settings. Scenario, workload, code, peers and link always tell rows apart.
        sort: Column to sort by, with ``-`` in front for descending; empty cells come last. By
            default rows are in the order of trials.
        console_width: Width of the ``table`` in characters.
        color: Whether the ``table`` may use a terminal's bold.
        complain: Called with a text for each damaged replicate, for formats without notes.

    Raises:
        ConfigError: ``folder`` is no run folder, or the format or a column is unknown. All
            problems are reported together.
    """
    problems = list(_problems(format, by, sort))
    results: Results | None = None
    try:
        results = load_results(folder, by)
    except ConfigError as error:
        problems += error.problems
    if problems or results is None:
        raise ConfigError(problems)
    if complain is not None and format in ("csv", "json"):
        for text in results.damaged:
            complain(damage_note(text))
    rows = sorted_rows(results.folded, sort) if sort else list(results.folded)
    return FORMATS[format](results, rows, console_width, color)


def _problems(format: str, by: Sequence[str], sort: str | None) -> list[Problem]:
    groups = [column.name for column in group_columns("configuration")]
    problems = [unknown("--by", name, groups) for name in by if name not in groups]
    if format not in FORMATS:
        problems.append(unknown("--format", format, FORMATS))
    columns = tuple(configuration_types())
    if sort is not None and sort.removeprefix("-") not in columns:
        problems.append(unknown("--sort", sort.removeprefix("-"), columns))
    return problems


def sorted_rows(rows: Sequence[Row], sort: str) -> list[Row]:
    """Return rows sorted by a column, ``-COLUMN`` for descending.

    Lower bounds, of rows in which not all replicates reached the target, come after the known
    values. Empty cells come last.
    """
    name = sort.removeprefix("-")
    full = [row for row in rows if row[name] is not None]
    empty = [row for row in rows if row[name] is None]
    known = [row for row in full if not is_censored(row, name)]
    bounds = [row for row in full if is_censored(row, name)]
    ordered = (
        sorted(part, key=lambda row: _rank(row[name]), reverse=sort != name)
        for part in (known, bounds)
    )
    return [*chain(*ordered), *empty]


def _rank(value: Value) -> tuple[float, str]:
    return (0.0, value) if isinstance(value, str) else (float(value or 0), "")
