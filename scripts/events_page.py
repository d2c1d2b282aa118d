"""Write docs/events.md from the event records: ``python scripts/events_page.py``."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rayhive.events import KINDS, VERSION, Event, peer, supervisor, training

PAGE = Path(__file__).parents[1] / "docs" / "events.md"
PLAIN = {int: "integer", float: "number", str: "text", bool: "boolean", Any: "any"}

GROUPS = {
    "Of the supervisor": supervisor,
    "Of the life cycle of a peer": peer,
    "Of the training of a peer": training,
}

HEAD = f"""# Events

Read this page to write your own analysis of a run. Every replicate has an event log,
`trials/N/REPLICATE/events.jsonl`, with one JSON object on each line. Every number that rayhive
prints is computed from these logs.

```python
from rayhive.events import Round, of_kind, read_events

events = read_events("runs/quickstart/trials/0/r0-none/events.jsonl")
losses = [(event.round, event.loss) for event in of_kind(events, Round)]
```

`read_events` checks each line against the record of its kind. A field is an attribute of the
record, and also an entry of a mapping (`event["loss"]`). An optional field that was not stored is
None as an attribute, and missing in the mapping. A peer sends its events to the supervisor, which
writes them in the order of their arrival.

In a line, `v` is the version of the schema, at present {VERSION}; a line without it has version 1.
A log of an older version is read. A log of a newer version is refused; the message names both
versions. A new kind or a new optional field does not change the version, so a reader keeps fields
that it does not know, in `extra`. Numbers that JSON lacks are objects: `{{"float": "nan"}}`.

A field named in **bold** is always stored. Every event has these fields:

"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page."""
    parts = [HEAD, table(Event), "\n"]
    for title, module in GROUPS.items():
        parts.append(f"## {title}\n\n")
        for kind, record in KINDS.items():
            if record.__module__ == module.__name__:
                parts += [f"### {kind}\n\n", f"`{record.__name__}`. {about(record)}\n\n"]
                parts += [table(record), "\n"]
    return "".join(parts).rstrip("\n") + "\n"


def about(record: type[Event]) -> str:
    """Return the text of a docstring above its list of attributes."""
    text = inspect.cleandoc(record.__doc__ or "").partition("\nAttributes:")[0]
    return markdown(" ".join(text.split()))


def table(record: type[Event]) -> str:
    """Return the table of a record's fields; the fields of every event are in their own table."""
    described = dict(attributes(record))
    common = set(Event.model_fields) if record is not Event else {"extra"}
    lines = ["| field | type | meaning |", "|---|---|---|"]
    for name, field in record.model_fields.items():
        if name not in common:
            always = field.is_required() or record is Event
            shown = f"**{name}**" if always else name
            text = markdown(described[name])
            lines.append(f"| {shown} | {type_text(field.annotation)} | {text} |")
    return "\n".join(lines) + "\n"


def attributes(record: type[Event]) -> Iterator[tuple[str, str]]:
    """Yield names and descriptions of the fields, from the docstrings of a record and its bases."""
    for base in reversed(record.__mro__):
        if issubclass(base, Event):
            listed = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2]
            for item in re.split(r"\n(?=    \w)", listed):
                name, _, text = item.strip().partition(": ")
                yield name, " ".join(text.split())


def type_text(annotation: Any) -> str:
    """Return a type in words, without ``None``."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return type_text(next(item for item in inner if item is not type(None)))
    if origin is Annotated:
        return type_text(inner[0])
    if origin is Literal:
        return ", ".join(f"`{item}`" for item in inner)
    if origin is list:
        return f"list of {type_text(inner[0])}"
    if origin is dict:
        return f"mapping to {type_text(inner[1])}"
    return PLAIN[annotation]


def markdown(text: str) -> str:
    """Return a docstring's text with Markdown's marks for code."""
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    main()
