"""Output formats of the results table, one function each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from rayhive.columns import Row
from rayhive.report.formats.data import csv_text, json_text
from rayhive.report.formats.latex import latex_text
from rayhive.report.formats.markdown import markdown_text
from rayhive.report.formats.table import table_text
from rayhive.report.results import Results

#: Arguments: results, their rows in order, width in characters, and whether bold is possible.
Format: TypeAlias = Callable[[Results, Sequence[Row], int, bool], str]

FORMATS: dict[str, Format] = {
    "table": table_text,
    "md": markdown_text,
    "csv": csv_text,
    "json": json_text,
    "latex": latex_text,
}
