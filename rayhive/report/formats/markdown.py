"""Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from rayhive.columns import Column, Row
from rayhive.report.results import Results
from rayhive.report.table_model import Cell, build_table


def markdown_text(results: Results, rows: Sequence[Row], width: int, color: bool) -> str:
    """Return one pipe table; the header of each group's first column also names the group."""
    model = build_table(results, rows)
    groups = [column.group for column in model.columns]
    header = [
        _header(column, new=index == 0 or groups[index - 1] != column.group)
        for index, column in enumerate(model.columns)
    ]
    align = [":--" if index < model.keys else "--:" for index in range(len(header))]
    lines = [header, align, *([_cell(cell) for cell in line] for line in model.rows)]
    table = ["| " + " | ".join(line) + " |" for line in lines] if model.rows else []
    notes = [f"- {_escape(note)}" for note in model.notes]
    return "\n".join([f"**{_escape(model.title)}**", "", *table, "", *notes]) + "\n"


def _header(column: Column, new: bool) -> str:
    group = f"*{column.group}*<br>" if new else ""
    unit = f" [{column.unit}]" if column.unit else ""
    return f"{group}`{column.name}`{unit}"


def _cell(cell: Cell) -> str:
    text = _escape(cell.text)
    return f"**{text}**" if cell.best else text


def _escape(text: str) -> str:
    for character in "\\|*_`<":
        text = text.replace(character, f"\\{character}")
    return text
