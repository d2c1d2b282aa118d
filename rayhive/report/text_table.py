"""Text table for a terminal, in blocks that fit its width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rayhive.columns import Column
from rayhive.report.brief import COUNTS
from rayhive.report.table import EMPTY, Cell, TableModel

#: Characters of a column name from which it is broken after underscores, and of each line then.
LONG_NAME, NAME_LINE = 16, 14
#: Width at which the key columns are wrapped; other columns never are.
KEY_WIDTH = 30
#: Width at which lists are wrapped.
LIST_WIDTH = 40
#: Widths to which the key columns of a brief table shrink before it is broken into blocks.
NARROW_KEYS = (24, 20, 16, 13, 11)
#: Columns that a brief table leaves out, in this order, where it would not fit with keys of
#: :data:`KEPT_KEYS` characters; the number of replicates only if the title tells it. Replicates
#: without a result are counted in that column then, as in ``1/3``.
OPTIONAL = ("not_separable", "n", "retention", *COUNTS)
KEPT_KEYS = 20


def table_text(model: TableModel, width: int, color: bool) -> str:
    """Return the table in blocks that fit ``width``.

    Every block begins with the key columns. A block with a single further column can be wider than
    ``width``; it is not cut.
    """
    left_out: list[str] = []
    if model.brief:
        model, left_out = _narrowed(model, width)
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    parts = [
        model.title,
        "",
        *(_filled(wrapper, text) for text in model.advice),
        *([""] if model.advice else []),
    ]
    if model.rows:
        for block in _blocks(model, width):
            table = _table(model, block, color, width)
            console = _console(max(width, _width(table)), color)
            with console.capture() as captured:
                console.print(table)
            parts.append("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")
    marked = any(cell.best for line in model.rows for cell in line)
    notes = [*([f"{'Bold:' if color else '*'} {model.best_note}"] if marked else []), *model.notes]
    notes += [f"Left out at this width: {', '.join(left_out)}."] if left_out else []
    parts += (_filled(wrapper, text) for text in notes)
    return "\n".join(parts) + "\n"


def _filled(wrapper: textwrap.TextWrapper, text: str) -> str:
    """Return a wrapped text; a percentage is not torn from its sign."""
    return wrapper.fill(text.replace(" %", "\u00a0%")).replace("\u00a0", " ")


def _narrowed(model: TableModel, width: int) -> tuple[TableModel, list[str]]:
    """Return a brief table without the optional columns that do not fit, and their names."""
    left_out: list[str] = []
    for name in OPTIONAL:
        further = range(model.keys, len(model.columns))
        if _width(_sized_table(model, further, False, KEPT_KEYS)) <= width:
            break
        at = _position(model, name)
        if at is None or (name == "n" and len({line[at] for line in model.rows}) > 1):
            continue
        if name in COUNTS:
            counted = _counted(model, at)
            if counted is None:
                continue
            model = counted
        columns = (*model.columns[:at], *model.columns[at + 1 :])
        rows = tuple((*line[:at], *line[at + 1 :]) for line in model.rows)
        model = replace(model, columns=columns, rows=rows)
        left_out.append(name)
    return model, left_out


def _position(model: TableModel, name: str) -> int | None:
    """Return the position of a column; None if the table lacks it."""
    return next((n for n, column in enumerate(model.columns) if column.name == name), None)


def _counted(model: TableModel, at: int) -> TableModel | None:
    """Return a table whose column ``n`` also counts the replicates of a column: ``1/3``."""
    n = _position(model, "n")
    if n is None:
        return None
    rows = []
    for line in model.rows:
        number, count = line[n].text, line[at].text
        if count not in ("0", EMPTY):
            done, _, total = number.partition("/")
            text = f"{done}/{int(total or done.split()[0]) + int(count)}"
            line = (*line[:n], replace(line[n], text=text), *line[n + 1 :])
        rows.append(line)
    return replace(model, rows=tuple(rows))


def _blocks(model: TableModel, width: int) -> list[list[int]]:
    """Return blocks of columns after the keys; a group is split only if it does not fit alone."""
    blocks: list[list[int]] = [[]]
    indices = range(model.keys, len(model.columns))
    for _, members in groupby(indices, key=lambda index: model.columns[index].group):
        group = list(members)
        if blocks[-1] and not _fits(model, [*blocks[-1], *group], width):
            blocks.append([])
        for index in group:
            if blocks[-1] and not _fits(model, [*blocks[-1], index], width):
                blocks.append([])
            blocks[-1].append(index)
    return blocks


def _fits(model: TableModel, block: Sequence[int], width: int) -> bool:
    return _width(_table(model, block, False, width)) <= width


def _width(table: Table) -> int:
    return _console(100_000, False).measure(table).maximum


def _table(model: TableModel, block: Sequence[int], color: bool, width: int) -> Table:
    """Return one block.

    That of a brief table wraps its keys as far as it takes to fit, and then does without the names
    of the groups, which can be wider than their columns.
    """
    sizes = [(KEY_WIDTH, True)]
    if model.brief:
        sizes += [(keys, groups) for groups in (True, False) for keys in NARROW_KEYS]
    for key_width, groups in sizes:
        table = _sized_table(model, block, color, key_width, groups)
        if _width(table) <= width:
            break
    return table


def _sized_table(
    model: TableModel, block: Sequence[int], color: bool, key_width: int, groups: bool = True
) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style=""
    )
    columns = [*range(model.keys), *block]
    height = max(len(_name_lines(model.columns[index])) for index in columns)
    units = any(model.columns[index].unit for index in columns)
    group = ""
    for index in columns:
        column, is_key = model.columns[index], index < model.keys
        title = column.group if column.group != group else ""
        group = column.group
        names = _name_lines(column)
        lines = [*([title] if groups else []), *[""] * (height - len(names)), *names]
        lines += [f"[{column.unit}]" if column.unit else ""] if units else []
        table.add_column(
            Text("\n".join(lines)),
            justify="right" if _is_number(index, model) else "left",
            no_wrap=not is_key and not _is_list(column),
            overflow="fold",
            max_width=key_width if is_key else LIST_WIDTH if _is_list(column) else None,
        )
    for line in model.rows:
        table.add_row(*(_text(line[index], color) for index in columns))
    return table


def _is_number(index: int, model: TableModel) -> bool:
    column = model.columns[index]
    return index >= model.keys and column.group != "configuration" and not _is_list(column)


def _is_list(column: Column) -> bool:
    """Return whether a column holds texts of any length."""
    return column.group == "export" and column.type == "text"


def _name_lines(column: Column) -> list[str]:
    if len(column.name) <= LONG_NAME:
        return [column.name]
    lines = [""]
    for part in column.name.replace("_", "_ ").split(" "):
        if lines[-1] and len(lines[-1]) + len(part) > NAME_LINE:
            lines.append("")
        lines[-1] += part
    return lines


def _text(cell: Cell, color: bool) -> Text:
    if not cell.best:
        return Text(cell.text)
    return Text(cell.text, style="bold") if color else Text(f"{cell.text} *")


def _console(width: int, color: bool) -> Console:
    return Console(
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        legacy_windows=False,
        emoji=False,
        highlight=False,
    )
