"""Section "provenance": origin of the numbers, and the commands to run the study again."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayhive.columns import Row, group_columns
from rayhive.errors import without_secrets
from rayhive.metrics.folds import Reduced
from rayhive.metrics.rows import NO_FAULTS, place_of
from rayhive.report.numbers import with_times_signs
from rayhive.report.page.run_data import RunData
from rayhive.report.table_notes import count_text

#: Longest study that is shown in full [characters].
LONGEST = 40_000


@dataclass(frozen=True)
class Provenance:
    """Origin of a run.

    Attributes:
        facts: Name -> text.
        study: Content of ``sweep.yaml``; empty without one.
        commands: Purpose -> command.
    """

    facts: Mapping[str, str]
    study: str
    commands: Mapping[str, str]


def provenance(run: RunData) -> Provenance:
    """Return the origin of a run, from ``provenance.json``, ``sweep.yaml`` and the events."""
    facts = dict(_facts(run))
    study = ""
    if (run.folder / "sweep.yaml").is_file():
        text = (run.folder / "sweep.yaml").read_text("utf-8", errors="replace")
        study = without_secrets(text[:LONGEST]) + ("\n…\n" if len(text) > LONGEST else "")
    return Provenance(facts, study, dict(_commands(run, bool(study))))


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    yield "folder", str(run.folder.resolve())
    session = _session(run.folder)
    revisions = Counter(str(r["git_revision"]) for r in run.results.rows if r["git_revision"])
    if any(row["started"] for row in run.results.folded):
        session.pop("started", None)  # of the last command: the replicates tell of all of them
    for name in ("started", "git_revision", "git_dirty", "link"):
        if session.get(name) is not None and not (name == "git_revision" and len(revisions) > 1):
            value = session[name]
            words = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            yield name.replace("_", " "), words
    for column in group_columns("provenance"):
        values = sorted({str(row[column.name]) for row in run.results.folded if row[column.name]})
        if column.name == "git_revision" and len(revisions) > 1:
            counts = (
                f"{name} ({count_text(n, 'replicate')})" for name, n in revisions.most_common()
            )
            yield "git revisions", ", ".join(counts)
        elif values and column.name not in session:
            rule = column.fold
            text = rule.function(values) if isinstance(rule, Reduced) else " | ".join(values)
            yield column.name.replace("_", " "), with_times_signs(str(text))
    for name in ("versions", "hardware"):
        if isinstance(session.get(name), Mapping):
            items = (f"{key} {value}" for key, value in session[name].items() if value)
            yield name, with_times_signs(", ".join(items))
    yield "replicates", str(len(run.results.rows))


def _session(folder: Path) -> dict[str, Any]:
    """Return the content of ``provenance.json``; empty if it cannot be read."""
    try:
        found = json.loads((folder / "provenance.json").read_text("utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(found) if isinstance(found, Mapping) else {}


def _commands(run: RunData, has_study: bool) -> Iterator[tuple[str, str]]:
    folder = str(run.folder)
    if has_study:
        again = ["rayhive", "sweep", str(run.folder / "sweep.yaml"), "--out", f"{folder}-again"]
        yield "the same study again, in a new folder", shlex.join(again)
        more = ["rayhive", "sweep", str(run.folder / "sweep.yaml"), "--out", folder]
        yield "more replicates in this folder", f"{shlex.join(more)} --set replicates=N"
    yield "the table", shlex.join(["rayhive", "results", folder])
    row = _one(run)
    if row is not None:
        trial = [folder, place_of(row).parts[1], "--replicate", str(row["replicate"])]
        scenario = ["--scenario", str(row["scenario"])]
        faulted = row["scenario"] != NO_FAULTS
        words = "one replicate again" + (", with its faults" if faulted else "")
        yield words, shlex.join(["rayhive", "replay", *trial, *scenario])
    yield "this report", shlex.join(["rayhive", "report", folder])


def _one(run: RunData) -> Row | None:
    """Return a replicate to replay: the first one of the recommended configuration."""
    if not (run.folder / "trials").is_dir():
        return None
    chosen = next((each.row for each in run.recommendations if each.row is not None), None)
    replicates = [] if chosen is None else run.of_row(chosen)
    return replicates[0].row if replicates else next(iter(run.results.rows), None)
