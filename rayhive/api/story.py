"""Story of a replicate: what broke, how it recovered, what still holds; live and afterwards."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rayhive.metrics.rows import NO_FAULTS
from rayhive.sweep.progress import lines_stream

if TYPE_CHECKING:
    from rayhive.events import Event
    from rayhive.spec.replicate import ReplicateSpec
    from rayhive.sweep.driver import Progress

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
            violated.
    """

    folder: Path
    lines: tuple[str, ...]
    wrong: bool

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def write_picture(self) -> Path:
        """Write the timeline as an HTML file into the folder, and return its path.

        Raises:
            RayhiveError: Plotly is missing, or the replicate cannot be drawn.
        """
        from rayhive.report.timeline_picture import write_timeline_picture

        picture = self.folder / "timeline.html"
        write_timeline_picture(self.folder, picture)
        return picture


def replicate_story(
    folder: Path, row: Mapping[str, Any] | None = None, always: bool = False
) -> Story | None:
    """Return the story of one replicate.

    Args:
        folder: Its folder.
        row: Its row; computed from its events if it is not given.
        always: Whether a replicate without planned faults and without problems has a story.
    """
    from rayhive.metrics.logs import last_timeline
    from rayhive.metrics.rows import replicate_row
    from rayhive.metrics.timeline import FINISHED
    from rayhive.report.timeline_text import timeline_lines

    row = replicate_row(folder) if row is None else row
    violated = [event for event in last_timeline(folder).of("invariant") if not event["ok"]]
    wrong = row["state"] not in FINISHED or bool(violated)
    if row["scenario"] == NO_FAULTS and not wrong and not always:
        return None
    lines = list(timeline_lines(folder))
    names = FIGURES if row["scenario"] == NO_FAULTS else FAULTED_FIGURES
    found = ((name, _figure(row, name)) for name in names)
    figures = [f"{name} {text}" for name, text in found if text is not None]
    if figures:
        lines += ["", ", ".join(figures)]
    return Story(folder, tuple(lines), wrong)


def _figure(row: Mapping[str, Any], name: str) -> str | None:
    """Return a figure as text, or the bound that is known of it; None if there is neither."""
    from rayhive.report.table_model import bound_text
    from rayhive.sweep.tally import figure

    value: Any = row.get(name)
    known = isinstance(value, (int, float)) and not math.isnan(value)
    return figure(name, float(value)) if known else bound_text(dict(row), name)


def story_progress(shown: bool | Progress) -> Progress:
    """Return the progress that shows faults and recoveries as they happen.

    Args:
        shown: Whether anything is shown, or an object that shows progress.
    """
    if not isinstance(shown, bool):
        return shown
    return StoryProgress(lines_stream() if shown else io.StringIO())


class StoryProgress:
    """Prints faults, recoveries and other events of the story as they happen.

    Args:
        out: Stream of the lines.
    """

    def __init__(self, out: IO[str]) -> None:
        self._out = out
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
        from rayhive.report.event_text import event_text

        for event in self._fresh(Path(spec.folder) / "events.jsonl"):
            if event["kind"] == "barrier_released":
                self._began = event["t"]
                self.note("training begins")
            elif self._began is not None and (text := event_text(event)) is not None:
                self.note(f"{event['t'] - self._began:8.2f} s  {text}")

    def _fresh(self, log: Path) -> Iterator[Event]:
        from rayhive.events import load_event

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
