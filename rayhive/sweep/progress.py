"""Progress of a sweep as lines of text, with a display of the running peers on a terminal."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayhive.cluster.replicate.peer_table import PeerStatus, ReplicateStatus
from rayhive.errors import RayhiveError
from rayhive.spec import SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.replicate_runner import Handle
from rayhive.sweep.tally import (
    Replicate,
    Tally,
    clock,
    figure,
    finished_line,
    key_of,
    objective,
    replicate_label,
    trial_line,
)

if TYPE_CHECKING:
    from rayhive.sweep.trial_book import TrialRecord, Values

#: Figures of a peer: the key in its status, the header, the format.
PEER_FIGURES = (
    ("state", "state", "{}"),
    ("round", "round", "{}"),
    ("samples", "samples", "{}"),
    ("samples_per_s", "samples/s", "{:.0f}"),
    ("loss", "loss", "{:.4g}"),
)
#: Most rows of the front in the display, the latest.
FRONT_ROWS = 8
#: Time between two lines about a replicate that runs [s].
STATUS_EVERY_S = 60.0


class SweepProgress:
    """Prints lines for each replicate and trial, and every minute one for a running replicate.

    Args:
        config: The study.
        out: Stream of the lines; by default the standard error output.
        now: Monotonic clock [s].
    """

    def __init__(
        self,
        config: SweepConfig,
        out: IO[str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally(config, now)
        self._out = out or sys.stderr
        self._told: dict[Replicate, float] = {}

    def close(self) -> None:
        """End the output; lines stay as they are."""

    def began(self, trials: int, replicates: int) -> None:
        """Print the size of the sweep."""
        self.tally.began(trials, replicates)
        beside = f" and {', '.join(names)}" if (names := self.tally.config.baselines) else ""
        self.note(
            f"{self.tally.config.name}: {trials} trials{beside} of {replicates} replicates each"
        )

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Print the replicate and the remaining duration of the sweep."""
        self.tally.started(spec, adopted)
        verb = "goes on" if adopted else "starts"
        left = self.tally.remaining
        self.note(f"{self.tally.started_position} {replicate_label(spec)} {verb} (left: {left})")

    def replicate_status(self, spec: ReplicateSpec, handle: Handle) -> None:
        """Print how far a replicate is, unless a line has told it lately."""
        now = self.tally.now()
        if now - self._told.setdefault(key_of(spec), now) < STATUS_EVERY_S:
            return
        self._told[key_of(spec)] = now
        with suppress(RayhiveError):
            self.note(f"{replicate_label(spec)}: {status_text(handle.status())}")

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        """Print the outcome and the key figures of a replicate."""
        position = self.tally.finished_position
        seconds = self.tally.finished(spec, row)
        self.note(f"{position} {finished_line(self.tally.config, spec, row, seconds, kept)}")

    def trial_finished(self, record: TrialRecord, values: Values, reason: str | None) -> None:
        """Print the values of a trial."""
        self.tally.trial_finished(record, values, reason)
        self.note(trial_line(self.tally, record, values, reason))

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._out, flush=True)


class DisplayProgress(SweepProgress):
    """Display at the bottom of a terminal, with lines of finished replicates and trials above it.

    It shows a bar, the running replicates (of a single one also the peers), and the front so far;
    with one objective, the best value.

    Args:
        config: The study.
        console: The terminal.
    """

    def __init__(self, config: SweepConfig, console: Console) -> None:
        super().__init__(config)
        self._console = console
        self._running: dict[Replicate, _Running] = {}
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=2, transient=True
        )

    def close(self) -> None:
        """Remove the display."""
        self._live.stop()

    def began(self, trials: int, replicates: int) -> None:
        """Show the display from now on."""
        self.tally.began(trials, replicates)
        self._live.start()

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Show the replicate."""
        self.tally.started(spec, adopted)
        self._running[key_of(spec)] = _Running(spec, time.monotonic())

    def replicate_status(self, spec: ReplicateSpec, handle: Handle) -> None:
        """Read the state of the peers; if that fails, the last one stays."""
        with suppress(RayhiveError):
            self._running[key_of(spec)].status = handle.status()

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        """Remove the replicate, and print its outcome above the display."""
        self._running.pop(key_of(spec), None)
        seconds = self.tally.finished(spec, row)
        self.note(finished_line(self.tally.config, spec, row, seconds, kept))

    def note(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(Text(text))

    def render(self) -> RenderableType:
        """Return the display."""
        parts: list[RenderableType] = [self._bar()]
        running = list(self._running.values())
        for each in running:
            phase, seconds = each.phase(len(running) > 1), time.monotonic() - each.since
            parts.append(Text(f"{replicate_label(each.spec)}: {phase}, {seconds:.0f} s"))
        if len(running) == 1:
            parts.append(_peers(running[0].status))
        if len(self.tally.config.objectives) > 1 and self.tally.front:
            parts.append(self._front())
        elif self.tally.best:
            parts.append(self._best())
        return Group(*parts)

    def _bar(self) -> RenderableType:
        tally, eta = self.tally, self.tally.eta
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            Text(tally.config.name, style="bold"),
            ProgressBar(total=max(1, eta.total), completed=eta.done, width=30),
            f"trials {tally.trials_done}/{tally.trials}",
            f"replicates {eta.done}/{eta.total}",
            f"left: {tally.remaining}",
        )
        return grid

    def _front(self) -> RenderableType:
        """Return the trials on the front so far; the best value of each objective is bold."""
        config, front = self.tally.config, self.tally.front
        table = Table(box=None, padding=(0, 2), header_style="dim", title_justify="left")
        table.add_column(f"front so far ({len(front)})")
        for name in config.objectives:
            table.add_column(name, justify="right")
        table.add_column("trial", justify="right")
        for values, record in front[-FRONT_ROWS:]:
            cells = [
                Text(
                    figure(name, value),
                    style="bold green" if value == self.tally.best[name][0] else "",
                )
                for name, value in zip(config.objectives, values, strict=True)
            ]
            table.add_row(record.configuration.label, *cells, str(record.number))
        return table

    def _best(self) -> RenderableType:
        lines = [
            f"best {name}: {objective(self.tally.config, name, value)} (trial {record.number} "
            f"{record.configuration.label})"
            for name, (value, record) in self.tally.best.items()
        ]
        return Text("\n".join(lines), style="green")


@dataclass
class _Running:
    """A running replicate, the time of its start [s], and its last known status."""

    spec: ReplicateSpec
    since: float
    status: ReplicateStatus | None = None

    def phase(self, with_round: bool) -> str:
        """Return its phase, and the last round of any peer while it trains."""
        if self.status is None:
            return "starting"
        in_round = with_round and self.status.phase == "training"
        return f"training, round {_last_round(self.status)}" if in_round else self.status.phase


def status_text(status: ReplicateStatus) -> str:
    """Return how far a replicate is; while it trains, also its last round and live peers."""
    if status.phase != "training" or status.seconds is None:
        return status.phase
    live = sum(peer.state == "training" for peer in status.peers.values())
    most = f" of at most {clock(status.budget_seconds)}" if status.budget_seconds else ""
    return f"training, {clock(status.seconds)}{most}, round {_last_round(status)}, {live} peers"


def _last_round(status: ReplicateStatus) -> int:
    return max((peer.round for peer in status.peers.values()), default=0)


def _peers(status: ReplicateStatus | None) -> RenderableType:
    """Return a table of the peers of a replicate."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("peer")
    for _, header, _ in PEER_FIGURES:
        table.add_column(header, justify="right")
    for name, peer in sorted(status.peers.items() if status else ()):
        shown = {**vars(peer), "samples_per_s": _rate(peer, status)}
        cells = [
            "" if shown[key] is None else form.format(shown[key]) for key, _, form in PEER_FIGURES
        ]
        table.add_row(name, *cells)
    return table


def _rate(peer: PeerStatus, status: ReplicateStatus | None) -> float | None:
    """Return the rate that a peer reports, or else its mean since training began [1/s]."""
    if peer.samples_per_s is not None or status is None:
        return peer.samples_per_s
    if status.phase != "training" or not status.seconds or not peer.samples:
        return None
    return peer.samples / status.seconds


def default_progress(config: SweepConfig, shown: bool = True) -> SweepProgress:
    """Return the progress that suits this process.

    On a terminal that is a display, in a notebook lines in the output of the cell, elsewhere lines
    on the standard error output.

    Args:
        config: The study.
        shown: False to show nothing.
    """
    if shown and sys.stderr.isatty():
        return DisplayProgress(config, Console(stderr=True))
    return SweepProgress(config, out=lines_stream() if shown else io.StringIO())


def lines_stream() -> IO[str]:
    """Return the stream for lines of progress; a notebook marks standard error as a warning."""
    return sys.stdout if "ipykernel" in sys.modules else sys.stderr
