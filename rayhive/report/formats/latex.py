"""LaTeX table in the style of booktabs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rayhive.columns import Row
from rayhive.report.results import Results
from rayhive.report.table_model import Cell, TableModel, build_table

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "±": r"$\pm$",
    "≥": r"$\geq$",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "★": r"$\star$",
    "†": r"\dag{}",
}


def latex_text(results: Results, rows: Sequence[Row], width: int, color: bool) -> str:
    """Return a ``tabular`` with group headers and units, and the notes below it."""
    model = build_table(results, rows)
    head = ["% needs \\usepackage{booktabs}", f"% {model.title}"]
    notes = [rf"{_escape(note)}\par" for note in model.notes]
    return "\n".join([*head, *_tabular(model), r"{\footnotesize", *notes, "}"]) + "\n"


def _tabular(model: TableModel) -> list[str]:
    if not model.rows:
        return []
    align = "l" * model.keys + "r" * (len(model.columns) - model.keys)
    spans, rules, start = [], [], 1
    for group, members in groupby(column.group for column in model.columns):
        width = len(list(members))
        spans.append(rf"\multicolumn{{{width}}}{{l}}{{{_escape(group)}}}")
        rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
        start += width
    return [
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        _line(spans),
        " ".join(rules),
        _line(_escape(column.name) for column in model.columns),
        _line(f"[{_escape(column.unit)}]" if column.unit else "" for column in model.columns),
        r"\midrule",
        *(_line(map(_cell, line)) for line in model.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _cell(cell: Cell) -> str:
    text = _escape(cell.text)
    return rf"\textbf{{{text}}}" if cell.best else text


def _escape(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in text)
