"""Story of a replicate: its faults, recoveries and invariants, as they happen and afterwards."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayhive.columns import Row
from rayhive.events import BarrierReleased, Event, InvariantChecked, load_event
from rayhive.metrics.logs import timeline_of_row
from rayhive.metrics.rows import NO_FAULTS
from rayhive.report.table import bound_text
from rayhive.report.timeline_text import event_text, lines_of
from rayhive.spec.pruning import PRUNED, SKIPPED
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.progress import lines_stream
from rayhive.sweep.tally import figure
from rayhive.timeline import FINISHED

#: States in which nothing went wrong.
_RIGHT = FINISHED | {PRUNED, SKIPPED}
#: Columns in the summary of a replicate, where they have a value.
FIGURES = ("final_loss", "time_to_target_s", "samples_per_s", "round_p50_s")
#: Columns in the summary of a faulted replicate.
FAULTED_FIGURES = (
    "detect_p95_s",
    "stall_p95_s",
    "recover_p95_s",
    "rejoin_p95_s",
    "censored",
    "goodput",
    "participation",
    "retention",
    "retention_normalised",
    "samples_lost",
    "loss_delta",
)


@dataclass(frozen=True)
class Story:
    """Story of one replicate.

    Attributes:
        folder: Folder of the replicate.
        lines: The timeline and the key figures as text.
        wrong: Whether the replicate failed, a fault did not take effect, or an invariant is
            violated. A replicate that the pruner stopped or left out did not fail.
        row: Row of the replicate.
    """

    folder: Path
    lines: tuple[str, ...]
    wrong: bool
    row: Row = field(repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def write_picture(self) -> Path:
        """Write the timeline as an HTML file into the folder, and return its path.

        The file is ``timeline.html``, or ``timeline.attempt-N.html`` for an earlier attempt.

        Raises:
            RayhiveError: The replicate cannot be drawn.
        """
        from rayhive.report.page import write

        timeline = timeline_of_row(self.folder, self.row)
        log = "events.jsonl" if timeline.log is None else timeline.log.name
        picture = self.folder / f"timeline{log.removeprefix('events').removesuffix('.jsonl')}.html"
        picture.write_text(write.timeline_html(timeline), encoding="utf-8")
        return picture


def replicate_story(folder: Path, row: Row, always: bool = False) -> Story | None:
    """Return the story of one replicate.

    Args:
        folder: Its folder.
        row: Its row.
        always: Whether a replicate without planned faults and without problems has a story.

    Raises:
        DamagedError: Its events cannot be read any more.
    """
    timeline = timeline_of_row(folder, row)
    verdicts = timeline.of(InvariantChecked)
    wrong = row["state"] not in _RIGHT or not all(event.ok for event in verdicts)
    if row["scenario"] == NO_FAULTS and not wrong and not always:
        return None
    lines = lines_of(timeline)
    names = FIGURES if row["scenario"] == NO_FAULTS else FAULTED_FIGURES
    found = ((name, _figure(row, name)) for name in names)
    figures = [f"{name} {text}" for name, text in found if text is not None]
    if figures:
        lines += ["", ", ".join(figures)]
    return Story(folder, tuple(lines), wrong, row)


def _figure(row: Row, name: str) -> str | None:
    """Return a figure as text, or the bound that is known of it; None if there is neither."""
    value = row[name]
    if isinstance(value, (int, float)) and not math.isnan(value):
        return figure(name, float(value))
    return bound_text(row, name)


class StoryProgress:
    """Prints faults, recoveries and other events of the story as they happen.

    Args:
        shown: False to print nothing.
    """

    def __init__(self, shown: bool = True) -> None:
        self._out = lines_stream() if shown else io.StringIO()
        self._read = 0
        self._began: float | None = None

    def began(self, trials: int, replicates: int) -> None:
        """Print the number of replicates."""
        self.note(f"{replicates} replicate{'s' if replicates > 1 else ''}")

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Print the scenario, its plan and the size of the swarm."""
        self._read, self._began = 0, None
        what = "the twin, without faults" if spec.plan is None else spec.scenario
        plan = "" if spec.plan is None else f", plan {spec.plan.hash[:16]}"
        seconds = spec.budget.seconds_per_replicate
        self.note(f"{what}{plan}: {spec.swarm.peers} peers, at most {seconds:g} s of training")

    def replicate_status(self, spec: ReplicateSpec, handle: Any) -> None:
        """Print the new events that belong to the story."""
        for event in self._fresh(Path(spec.folder) / "events.jsonl"):
            if isinstance(event, BarrierReleased):
                self._began = event.t
                self.note("training begins")
            elif self._began is not None and (text := event_text(event)) is not None:
                self.note(f"{event.t - self._began:8.2f} s  {text}")

    def _fresh(self, log: Path) -> Iterator[Event]:
        if not log.exists():  # the supervisor writes on another node
            return
        with log.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield load_event(line.decode())

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        """Print the outcome of a replicate."""
        reason = f" ({row['stop_reason']})" if row.get("stop_reason") else ""
        self.note(f"{spec.scenario}: {row['state']}{reason}")

    def trial_finished(self, record: Any, values: Any, reason: str | None) -> None:
        """Print nothing: there is one trial."""

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._out, flush=True)
