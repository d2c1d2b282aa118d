"""Settings of the recommended configuration, and how to train with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from rayhive.columns import Row
from rayhive.spec import AXES, Axis


@dataclass(frozen=True)
class Setting:
    """Setting of a configuration.

    Attributes:
        axis: Name of its axis, the key in a study.
        text: Its value, as a study writes it.
        about: Definition of the axis.
    """

    axis: str
    text: str
    about: str


def settings(row: Row) -> Iterator[Setting]:
    """Yield the settings of a row, of the axes that apply to it."""
    for axis in _axes(row):
        value = row[axis.name]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        yield Setting(axis.name, text, axis.column.about)


def enqueue_text(row: Row) -> str:
    """Return the line of a study with which ``rayhive train`` trains the configuration of a row."""
    values = {axis.name: row[axis.name] for axis in _axes(row)}
    listed = yaml.safe_dump([values], default_flow_style=True, sort_keys=False, width=10_000)
    return f"enqueue: {listed.strip()}"


def _axes(row: Row) -> list[Axis]:
    return [axis for axis in AXES if row.get(axis.name) is not None]
