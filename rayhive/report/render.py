"""Results table as text, in any of the output formats."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rayhive.columns import Row, Value, group_columns
from rayhive.errors import ConfigError, Problem, unknown
from rayhive.metrics.aggregate import is_censored
from rayhive.report.markup import latex_text, markdown_text
from rayhive.report.results import Results, configuration_types, load_results
from rayhive.report.table import build_table, damage_note
from rayhive.report.text_table import table_text

#: Output formats: a table for a terminal, and the table or all columns for other programs.
FORMATS = ("table", "md", "csv", "json", "latex")


def results_text(
    source: str | Path | Results,
    format: str = "table",
    by: Sequence[str] = (),
    sort: str | None = None,
    console_width: int = 100,
    color: bool = False,
    complain: Callable[[str], None] | None = None,
) -> str:
    """Return the results table of a run folder.

    Args:
        source: The run folder, or its results.
        format: ``table``, ``md``, ``csv``, ``json`` or ``latex``.
        by: Configuration columns; replicates that agree in these make one row, whatever their
            other settings. Scenario, workload, code, peers and link always tell rows apart.
        sort: Column to sort by, with ``-`` in front for descending; empty cells come last. By
            default rows are in the order of trials.
        console_width: Width of the ``table`` in characters.
        color: Whether the ``table`` may use a terminal's bold.
        complain: Called with a text for each damaged replicate, for formats without notes.

    Raises:
        ConfigError: The folder is no run folder, or the format or a column is unknown. All
            problems are reported together.
    """
    problems = list(_problems(format, by))
    try:
        results = source if isinstance(source, Results) else load_results(source)
    except ConfigError as error:
        problems += [*_unknown_sort(sort, ()), *error.problems]
        raise ConfigError(problems) from None
    problems += _unknown_sort(sort, results.folded)
    if problems:
        raise ConfigError(problems)
    results = replace(results, by=tuple(by))
    rows = sorted_rows(results.folded, sort) if sort else list(results.folded)
    if format in ("csv", "json"):
        if complain is not None:
            for text in results.damaged:
                complain(damage_note(text))
        return csv_text(rows) if format == "csv" else json_text(rows)
    table = build_table(results, rows)
    if format == "table":
        return table_text(table, console_width, color)
    return markdown_text(table) if format == "md" else latex_text(table)


def _problems(format: str, by: Sequence[str]) -> list[Problem]:
    groups = [column.name for column in group_columns("configuration")]
    problems = [unknown("--by", name, groups) for name in by if name not in groups]
    if format not in FORMATS:
        problems.append(unknown("--format", format, FORMATS))
    return problems


def _unknown_sort(sort: str | None, rows: Sequence[Row]) -> list[Problem]:
    columns = tuple(configuration_types(rows))
    if sort is None or sort.removeprefix("-") in columns:
        return []
    return [unknown("--sort", sort.removeprefix("-"), columns)]


def sorted_rows(rows: Sequence[Row], sort: str) -> list[Row]:
    """Return rows sorted by a column, ``-COLUMN`` for descending.

    Lower bounds, of rows in which not all replicates reached the target, come after the known
    values. Empty cells come last.
    """
    name = sort.removeprefix("-")
    full = [row for row in rows if row[name] is not None]
    full.sort(key=lambda row: _rank(row[name]), reverse=sort != name)
    full.sort(key=lambda row: is_censored(row, name))
    return [*full, *(row for row in rows if row[name] is None)]


def _rank(value: Value) -> tuple[float, str]:
    return (0.0, value) if isinstance(value, str) else (float(value or 0), "")


def csv_text(rows: Sequence[Row]) -> str:
    """Return every column in full precision as CSV with a header line; empty means unknown."""
    out = io.StringIO()
    names = configuration_types(rows)
    writer = csv.DictWriter(out, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def json_text(rows: Sequence[Row]) -> str:
    """Return every column in full precision as a list of objects; null means unknown."""
    names = configuration_types(rows)
    objects = [{name: row[name] for name in names} for row in rows]
    return json.dumps(objects, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
