"""The file ``benchmarks/RESULTS.md``: outcomes of scripts, and a table of their claims."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.claims import Verdict, parse_claims, parse_skip

_HEADER = "| script | claim | measured | held |\n|---|---|---|---|\n"


@dataclass(frozen=True)
class Outcome:
    """Outcome of one script.

    Args:
        name: Name of the script without ``.py``.
        output: Its output.
        failure: Reason of its failure; empty if it did not fail.
        seconds: Duration [s].
        load: Mean number of runnable processes in the minute before it.
    """

    name: str
    output: str
    failure: str
    seconds: float
    load: float

    @property
    def claims(self) -> list[Verdict]:
        """Claims in the output."""
        return parse_claims(self.output.splitlines())

    @property
    def skipped(self) -> str | None:
        """Reason why it skipped this machine; None if it measured."""
        return parse_skip(self.output.splitlines())

    @property
    def problem(self) -> str:
        """Reason why it counts as failed; empty if it does not."""
        if not (self.failure or self.claims or self.skipped):
            return "it ended without a claim"
        return self.failure


def _rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, str, str]]:
    for outcome in outcomes:
        for claim in outcome.claims:
            held = "yes" if claim.held else "**no**"
            yield outcome.name, claim.promise, claim.measurement or "–", held
        if outcome.problem:
            yield outcome.name, f"**failed**: {outcome.problem}", "–", "–"
        elif outcome.skipped:
            yield outcome.name, f"skipped: {outcome.skipped}", "–", "–"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the summary as a Markdown table."""
    rows = (
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in _rows(outcomes)
    )
    return _HEADER + "\n".join(rows)


def render(outcomes: Sequence[Outcome], now: datetime.datetime, machine: str) -> str:
    """Return the content of ``RESULTS.md``.

    Args:
        outcomes: Outcomes in the order of the runs.
        now: Start of the first run.
        machine: Description of the machine on one line.
    """
    return "\n".join(
        [
            "# Results of the benchmarks",
            "",
            f"Written by `make bench`. {_text(now)}; {machine}",
            "Sections that say so were run later, by themselves.",
            "",
            table(outcomes),
            "",
            *map(_section, outcomes),
        ]
    )


def updated(text: str, outcomes: Sequence[Outcome], now: datetime.datetime) -> str:
    """Return the content with these outcomes instead of those of the same scripts.

    Args:
        text: Content as returned by :func:`render` or by this function.
        outcomes: Outcomes of scripts that were run by themselves.
        now: Start of their runs.
    """
    head, *old = re.split(r"^(?=## \w+$)", text, flags=re.MULTILINE)
    sections = {section.split("\n")[0].removeprefix("## "): section for section in old}
    sections |= {outcome.name: _section(outcome, now) for outcome in outcomes}
    first, last = head.index(_HEADER) + len(_HEADER), head.rindex("|\n") + 2
    names = {outcome.name for outcome in outcomes}
    kept = [row for row in head[first:last].splitlines() if row.split(" | ")[0][2:] not in names]
    new = table(outcomes).removeprefix(_HEADER).splitlines()
    rows = sorted(kept + new, key=lambda row: row.split(" | ")[0])  # stable: a script's order
    body = "\n".join(section.rstrip("\n") + "\n" for _, section in sorted(sections.items()))
    return head[:first] + "\n".join(rows) + "\n" + head[last:] + body


def _section(outcome: Outcome, now: datetime.datetime | None = None) -> str:
    when = [f"Run by itself: {_text(now)}.\n"] if now else []
    return "\n".join(
        [
            f"## {outcome.name}\n",
            *when,
            f"{outcome.seconds:.0f} s, load {outcome.load:.2f} before it began\n",
            f"```\n{outcome.output.strip()}\n```\n",
        ]
    )


def _text(now: datetime.datetime) -> str:
    return f"{now:%Y-%m-%d %H:%M} {now.tzname()}"
