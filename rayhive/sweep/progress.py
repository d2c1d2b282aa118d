"""Progress of a sweep as lines of text, with a display of the running peers on a terminal."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from rayhive.spec import SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.replicate_runner import Handle
from rayhive.sweep.tally import Tally, finished_line, replicate_label, trial_line

if TYPE_CHECKING:
    from rich.console import Console

    from rayhive.sweep.progress_display import Display
    from rayhive.sweep.trial_book import TrialRecord


class SweepProgress:
    """Prints a line for each replicate and trial.

    Args:
        config: The study.
        out: Stream of the lines; by default the standard error output.
        now: Monotonic clock [s].
        console: Terminal. If it is given, it shows a display of what runs and the lines above it,
            without those of started replicates.
    """

    def __init__(
        self,
        config: SweepConfig,
        out: IO[str] | None = None,
        now: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self.tally = Tally(config, now)
        self._out = out or sys.stderr
        self.display: Display | None = None
        if console is not None:
            from rayhive.sweep.progress_display import Display

            self.display = Display(self.tally, console)

    def close(self) -> None:
        """Remove the display, if there is one."""
        if self.display is not None:
            self.display.stop()

    def began(self, trials: int, replicates: int) -> None:
        """Show the size of the sweep."""
        self.tally.began(trials, replicates)
        if self.display is not None:
            self.display.start()
        else:
            name = self.tally.config.name
            self.note(f"{name}: {trials} trials of {replicates} replicates each")

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Show the replicate and the remaining duration of the sweep."""
        self.tally.started(adopted)
        if self.display is not None:
            self.display.show(spec)
            return
        verb = "goes on" if adopted else "starts"
        left = self.tally.remaining
        self.note(f"{self.tally.position} {replicate_label(spec)} {verb} (left: {left})")

    def replicate_status(self, spec: ReplicateSpec, handle: Handle) -> None:
        """Update the display."""
        if self.display is not None:
            self.display.update(handle)

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        """Print the outcome and the key figures of a replicate."""
        position = "" if self.display is not None else f"{self.tally.position} "
        if self.display is not None:
            self.display.show(None)
        seconds = self.tally.finished(row)
        self.note(f"{position}{finished_line(self.tally.config, spec, row, seconds, kept)}")

    def trial_finished(
        self, record: TrialRecord, values: Sequence[float] | None, reason: str | None
    ) -> None:
        """Print the values of a trial."""
        self.tally.trial_finished(record, values, reason)
        self.note(trial_line(self.tally, record, values, reason))

    def note(self, text: str) -> None:
        """Print a line."""
        if self.display is not None:
            self.display.print(text)
        else:
            print(text, file=self._out, flush=True)


@contextmanager
def default_progress(config: SweepConfig, shown: bool = True) -> Iterator[SweepProgress]:
    """Yield the progress that suits this process.

    On a terminal that is a display, in a notebook lines in the output of the cell, elsewhere lines
    on the standard error output.

    Args:
        config: The study.
        shown: False to show nothing.
    """
    if not shown:
        progress = SweepProgress(config, out=io.StringIO())
    elif sys.stderr.isatty():
        from rich.console import Console

        progress = SweepProgress(config, console=Console(stderr=True))
    else:
        progress = SweepProgress(config, out=lines_stream())
    try:
        yield progress
    finally:
        progress.close()


def lines_stream() -> IO[str]:
    """Return the stream for lines of progress; a notebook marks standard error as a warning."""
    return sys.stdout if "ipykernel" in sys.modules else sys.stderr
