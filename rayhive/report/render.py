"""Results table as text, in any of the output formats."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rayhive.columns import BOUNDS, Row, Value, group_columns
from rayhive.errors import ConfigError, Problem, unknown
from rayhive.metrics.aggregate import is_censored
from rayhive.report.differences import all_differences, difference_table, versus_problems
from rayhive.report.markup import latex_text, markdown_text
from rayhive.report.results import Results, configuration_types, load_results
from rayhive.report.table import build_table, key_columns
from rayhive.report.table_notes import damage_note
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
    columns: Sequence[str] = (),
    wide: bool = False,
    versus: str | None = None,
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
        columns: Columns to show, of the data formats, too; by default the objectives and their
            certainty, in data formats all.
        wide: Whether tables show every column that has a value.
        versus: Configuration of a baseline row, or ``first``: show paired differences to it.
        complain: Called with a text for each damaged replicate, for formats without notes.

    Raises:
        ConfigError: The folder is no run folder, or the format or a column is unknown. All
            problems are reported together.
    """
    problems = [*_problems(format, by), *_clashing(columns, wide, versus)]
    try:
        results = source if isinstance(source, Results) else load_results(source)
    except ConfigError as error:
        known = tuple(configuration_types())
        problems += [*_unknown_columns(sort, columns, known), *error.problems]
        raise ConfigError(problems) from None
    known = tuple(configuration_types(results.folded))
    problems += _unknown_columns(sort, columns, known)
    whole = tuple(dict.fromkeys(_column_of(name, known) for name in columns))
    results = replace(results, by=() if problems else tuple(by))
    if versus is not None:
        problems += versus_problems(results, versus, whole)
    if problems:
        raise ConfigError(problems)
    if versus is not None:
        return _differences_text(results, versus, format, whole, console_width, color)
    rows = sorted_rows(results.folded, sort) if sort else list(results.folded)
    if format in ("csv", "json"):
        if complain is not None:
            for text in results.damaged:
                complain(damage_note(text))
        names = _with_bounds(columns, _keys(results, rows), known) if columns else known
        return csv_text(rows, names) if format == "csv" else json_text(rows, names)
    table = build_table(results, rows, whole, wide)
    if format == "table":
        return table_text(table, console_width, color)
    return markdown_text(table) if format == "md" else latex_text(table)


def _differences_text(
    results: Results, versus: str, format: str, columns: Sequence[str], width: int, color: bool
) -> str:
    if format in ("csv", "json"):
        keys = [name for name in _keys(results, results.folded) if name != "baseline"]
        records = [each.record(keys) for each in all_differences(results, versus, columns)]
        names = tuple(records[0]) if records else ()
        return csv_text(records, names) if format == "csv" else json_text(records, names)
    table = difference_table(results, versus, columns)
    if format == "table":
        return table_text(table, width, color)
    return markdown_text(table) if format == "md" else latex_text(table)


def _problems(format: str, by: Sequence[str]) -> list[Problem]:
    groups = [column.name for column in group_columns("configuration")]
    problems = [unknown("--by", name, groups) for name in by if name not in groups]
    if format not in FORMATS:
        problems.append(unknown("--format", format, FORMATS))
    return problems


def _clashing(columns: Sequence[str], wide: bool, versus: str | None) -> Iterator[Problem]:
    """Yield the options that have no effect beside others."""
    if wide and columns:
        allowed = "no columns beside --wide, which shows them all"
        yield Problem("--columns", ",".join(columns), allowed)
    if wide and versus is not None:
        yield Problem("--versus", versus, "no row beside --wide: differences have --columns")


def _unknown_columns(
    sort: str | None, shown: Sequence[str], known: Collection[str]
) -> list[Problem]:
    problems = [unknown("--columns", name, known) for name in shown if name not in known]
    if sort is not None and sort.removeprefix("-") not in known:
        problems.append(unknown("--sort", sort.removeprefix("-"), known))
    return problems


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


def _column_of(name: str, known: Collection[str]) -> str:
    """Return the column that a name is a bound of, or else the name."""
    columns = (name.removesuffix(end) for end in BOUNDS if name.endswith(end))
    return next((column for column in columns if column in known), name)


def _keys(results: Results, rows: Sequence[Row]) -> list[str]:
    """Return the columns that identify a row in a data format."""
    return ["configuration", "scenario", *(each.name for each in key_columns(results, rows))]


def _with_bounds(
    columns: Sequence[str], keys: Sequence[str], known: Collection[str]
) -> tuple[str, ...]:
    """Return the columns of a data format: those of the key, and the chosen ones with bounds."""
    names = list(keys)
    for name in columns:
        names += [name, *(name + end for end in BOUNDS if name + end in known)]
    return tuple(dict.fromkeys(names))


def csv_text(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return columns in full precision as CSV with a header line; empty means unknown."""
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def json_text(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return columns in full precision as a list of objects; null means unknown."""
    objects = [{name: row[name] for name in names} for row in rows]
    return json.dumps(objects, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
