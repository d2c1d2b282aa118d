"""Progress of a sweep as lines of text, with a display of the running peers on a terminal."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
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
    Tally,
    figure,
    finished_line,
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


class SweepProgress:
    """Prints a line for each replicate and trial.

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

    def close(self) -> None:
        """End the output; lines stay as they are."""

    def began(self, trials: int, replicates: int) -> None:
        """Print the size of the sweep."""
        self.tally.began(trials, replicates)
        self.note(f"{self.tally.config.name}: {trials} trials of {replicates} replicates each")

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Print the replicate and the remaining duration of the sweep."""
        self.tally.started(adopted)
        verb = "goes on" if adopted else "starts"
        left = self.tally.remaining
        self.note(f"{self.tally.position} {replicate_label(spec)} {verb} (left: {left})")

    def replicate_status(self, spec: ReplicateSpec, handle: Handle) -> None:
        """Print nothing."""

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        """Print the outcome and the key figures of a replicate."""
        position = self.tally.position
        seconds = self.tally.finished(row, spec.trial)
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

    It shows a bar, the peers of the running replicate, and the front so far; with one objective,
    the best value.

    Args:
        config: The study.
        console: The terminal.
    """

    def __init__(self, config: SweepConfig, console: Console) -> None:
        super().__init__(config)
        self._console = console
        self._running: ReplicateSpec | None = None
        self._since = 0.0
        self._status: ReplicateStatus | None = None
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
        """Show the peers of the replicate."""
        self.tally.started(adopted)
        self._running, self._status, self._since = spec, None, time.monotonic()

    def replicate_status(self, spec: ReplicateSpec, handle: Handle) -> None:
        """Read the state of the peers; if that fails, the last one stays."""
        with suppress(RayhiveError):
            self._status = handle.status()

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        """Remove the peers, and print the outcome of the replicate above the display."""
        self._running = None
        seconds = self.tally.finished(row, spec.trial)
        self.note(finished_line(self.tally.config, spec, row, seconds, kept))

    def note(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(Text(text))

    def render(self) -> RenderableType:
        """Return the display."""
        parts: list[RenderableType] = [self._bar()]
        if self._running is not None:
            phase = "starting" if self._status is None else self._status.phase
            seconds = time.monotonic() - self._since
            parts += [Text(f"{replicate_label(self._running)}: {phase}, {seconds:.0f} s")]
            parts += [self._peers()]
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

    def _peers(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("peer")
        for _, header, _ in PEER_FIGURES:
            table.add_column(header, justify="right")
        for name, peer in sorted(self._status.peers.items() if self._status else ()):
            shown = {**vars(peer), "samples_per_s": self._rate(peer)}
            cells = [
                "" if shown[key] is None else form.format(shown[key])
                for key, _, form in PEER_FIGURES
            ]
            table.add_row(name, *cells)
        return table

    def _rate(self, peer: PeerStatus) -> float | None:
        """Return the rate that a peer reports, or else its mean since training began [1/s]."""
        status = self._status
        if peer.samples_per_s is not None or status is None:
            return peer.samples_per_s
        if status.phase != "training" or not status.seconds or not peer.samples:
            return None
        return peer.samples / status.seconds

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
