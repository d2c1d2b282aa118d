"""``rayhive results``: the table of a run folder as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from rayhive.columns import CONFIGURATION
from rayhive.errors import ConfigError, Problem, unknown
from rayhive.metrics.aggregate import is_censored
from rayhive.metrics.group import Row, Value
from rayhive.report.formats import FORMATS
from rayhive.report.frames import configuration_columns
from rayhive.report.results import Results, load_results
from rayhive.report.table_model import damage_note

#: Columns that rows can be grouped by.
BY: tuple[str, ...] = tuple(column.name for column in CONFIGURATION)


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
            other settings. Scenario, workload, peers and link always tell rows apart.
        sort: A column to sort by, with ``-`` in front for descending; empty cells come last. By
            default rows stand in the order of trials.
        console_width: Width of the ``table`` in characters.
        color: Whether the ``table`` may use a terminal's bold.
        complain: Called with each thing that is wrong with the run, where the format has no place
            for notes.

    Raises:
        ConfigError: ``folder`` is no run, or a format or column is not known; all at once.
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
    problems = [unknown("--by", name, BY) for name in by if name not in BY]
    if format not in FORMATS:
        problems.append(unknown("--format", format, FORMATS))
    if sort is not None and sort.removeprefix("-") not in configuration_columns():
        problems.append(unknown("--sort", sort.removeprefix("-"), configuration_columns()))
    return problems


def sorted_rows(rows: Sequence[Row], sort: str) -> list[Row]:
    """Return rows in the order of a column, ``-COLUMN`` for descending, empty cells last.

    Times to a target that not all replicates reached are lower bounds: they come behind the others.
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
