"""Archives of earlier attempts at a replicate, and of damaged files."""

from __future__ import annotations

import re
from pathlib import Path

_LOG = re.compile(r"events(?:\.(?:attempt|damaged)-(\d+))?\.jsonl")


def current_attempt(folder: Path) -> int:
    """Return the number of the current attempt in a replicate's folder."""
    found = [_LOG.fullmatch(item.name) for item in folder.glob("events.*-*.jsonl")]
    return max((int(match[1]) for match in found if match), default=-1) + 1


def archive(folder: Path, as_: str = "attempt") -> None:
    """Rename the files of the current attempt to make room for a further one.

    Args:
        folder: The replicate's folder.
        as_: ``attempt`` for an attempt that stays among the results, ``damaged`` for one that
            cannot be read.
    """
    attempt = current_attempt(folder)
    if not (folder / "events.jsonl").exists():
        return
    # The log is renamed last: until then this attempt is still the current one.
    for name, kind in (("logs", "attempt"), ("events.jsonl", as_)):
        stem, dot, ending = name.partition(".")
        target = folder / f"{stem}.{kind}-{attempt}{dot}{ending}"
        if (folder / name).exists() and not target.exists():
            (folder / name).rename(target)


def set_aside(file: Path) -> Path:
    """Rename a damaged file, so that it is not read again, and return its new path.

    The log of an attempt keeps its number, which the next attempt does not reuse.
    """
    if file.name == "events.jsonl":
        new = file.with_name(f"events.damaged-{current_attempt(file.parent)}.jsonl")
        archive(file.parent, "damaged")
        return new
    match = _LOG.fullmatch(file.name)
    if match is not None:
        new = file.with_name(f"events.damaged-{match[1]}.jsonl")
    else:
        count = len(list(file.parent.glob(f"{file.stem}.damaged-*{file.suffix}")))
        new = file.with_name(f"{file.stem}.damaged-{count}{file.suffix}")
    file.rename(new)
    return new
