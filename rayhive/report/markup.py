"""Results table in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rayhive.report.table import Cell, TableModel

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "±": r"$\pm$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "★": r"$\star$",
    "†": r"\dag{}",
}


def markdown_text(model: TableModel) -> str:
    """Return one pipe table; the header of each group's first column also names the group."""
    header, group = [], ""
    for column in model.columns:
        title = f"*{column.group}*<br>" if column.group != group else ""
        group = column.group
        header.append(f"{title}`{column.name}`{f' [{column.unit}]' if column.unit else ''}")
    align = [":--" if index < model.keys else "--:" for index in range(len(header))]
    lines = [header, align, *([_markdown_cell(cell) for cell in line] for line in model.rows)]
    table = ["| " + " | ".join(line) + " |" for line in lines] if model.rows else []
    notes = [f"- {_markdown(note)}" for note in model.notes]
    advice = [*map(_markdown, model.advice), ""] if model.advice else []
    return "\n".join([f"**{_markdown(model.title)}**", "", *advice, *table, "", *notes]) + "\n"


def _markdown_cell(cell: Cell) -> str:
    text = _markdown(cell.text)
    return f"**{text}**" if cell.best else text


def _markdown(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\|*_`<" else character for character in text)


def latex_text(model: TableModel) -> str:
    """Return a ``tabular`` with group headers and units, and the notes below it."""
    head = ["% needs \\usepackage{booktabs}", f"% {model.title}"]
    notes = [rf"{_latex(note)}\par" for note in (*model.advice, *model.notes)]
    return "\n".join([*head, *_tabular(model), r"{\footnotesize", *notes, "}"]) + "\n"


def _tabular(model: TableModel) -> list[str]:
    if not model.rows:
        return []
    align = "l" * model.keys + "r" * (len(model.columns) - model.keys)
    spans, rules, start = [], [], 1
    for group, members in groupby(column.group for column in model.columns):
        width = len(list(members))
        spans.append(rf"\multicolumn{{{width}}}{{l}}{{{_latex(group)}}}")
        rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
        start += width
    return [
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        _line(spans),
        " ".join(rules),
        _line(_latex(column.name) for column in model.columns),
        _line(f"[{_latex(column.unit)}]" if column.unit else "" for column in model.columns),
        r"\midrule",
        *(_line(map(_latex_cell, line)) for line in model.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]


def _line(cells: Iterable[str]) -> str:
    line = " & ".join(cells)
    # after the end of a line, TeX reads these as its options
    return ("{}" if line.startswith(("[", "*")) else "") + line + r" \\"


def _latex_cell(cell: Cell) -> str:
    text = _latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.best else text


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
