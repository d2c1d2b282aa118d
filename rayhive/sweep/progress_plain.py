"""What a sweep says while it runs: a line when a replicate starts and one when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import IO, Any

from rayhive.columns import BY_NAME
from rayhive.metrics.timeline import LOST
from rayhive.spec import SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.eta import Eta, clock
from rayhive.sweep.objectives import missed_charge
from rayhive.sweep.replicate_runner import Handle
from rayhive.sweep.trial_book import TrialRecord

#: Columns that a finished replicate's line shows besides the objectives.
KEY_FIGURES = ("final_loss", "samples_per_s", "round_p50_s", "payload_bytes_per_round")


class Tally:
    """What every kind of progress counts.

    Args:
        config: The study.
        now: A clock that only goes forward [s].
    """

    def __init__(self, config: SweepConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.eta = Eta(0)
        self.trials_done = 0
        self.trials = 0
        self.best: dict[str, tuple[float, TrialRecord]] = {}
        self._now = now
        self._started: float | None = None

    def began(self, trials: int, replicates: int) -> None:
        """Start counting."""
        self.trials = trials
        self.eta = Eta(trials * replicates)

    def started(self, adopted: bool) -> None:
        """A replicate runs; how long an adopted one has been running is not known."""
        self._started = None if adopted else self._now()

    def finished(self, row: Mapping[str, Any]) -> float | None:
        """Count a finished replicate and return how long it took [s]."""
        seconds = _seconds(row) if self._started is None else self._now() - self._started
        self._started = None
        self.eta.add(seconds)
        return seconds

    def told(
        self, record: TrialRecord, values: Sequence[float] | None, reason: str | None = None
    ) -> None:
        """Count a finished trial and keep the best of each objective; a failed one is never it."""
        self.trials_done += 1
        if values is None or reason is not None:
            return
        for (name, direction), value in zip(self.config.objectives.items(), values, strict=True):
            known = self.best.get(name)
            sign = 1 if direction == "minimize" else -1
            if known is None or sign * value < sign * known[0]:
                self.best[name] = (value, record)

    @property
    def remaining(self) -> str:
        """How long it will still take, in words."""
        running = 0.0 if self._started is None else self._now() - self._started
        return clock(self.eta.remaining_s(running))

    @property
    def position(self) -> str:
        """Which replicate this is, of how many."""
        width = len(str(self.eta.total))
        return f"[{min(self.eta.done + 1, self.eta.total):{width}}/{self.eta.total}]"


class PlainProgress:
    """Prints lines, for logs and pipes.

    Args:
        config: The study.
        out: Where to.
        now: A clock that only goes forward [s].
    """

    def __init__(
        self,
        config: SweepConfig,
        out: IO[str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tally = Tally(config, now)
        self._out = out or sys.stderr

    def began(self, trials: int, replicates: int) -> None:
        """Print what is to be done."""
        self._tally.began(trials, replicates)
        name = self._tally.config.name
        self.note(f"{name}: {trials} trials of {replicates} replicates each")

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Print which replicate starts, and when all will be done."""
        self._tally.started(adopted)
        verb = "goes on" if adopted else "starts"
        left = self._tally.remaining
        self.note(f"{self._tally.position} {replicate_label(spec)} {verb} (left: {left})")

    def replicate_status(self, spec: ReplicateSpec, handle: Handle) -> None:
        """Print nothing: lines are for what starts and ends."""

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        """Print how it ended and what it measured."""
        position = self._tally.position
        seconds = self._tally.finished(row)
        line = finished_line(self._tally.config, spec, row, seconds, kept)
        self.note(f"{position} {line}")

    def trial_finished(
        self, record: TrialRecord, values: Sequence[float] | None, reason: str | None
    ) -> None:
        """Print the trial's values."""
        self._tally.told(record, values, reason)
        self.note(trial_line(self._tally, record, values, reason))

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._out, flush=True)


def replicate_label(spec: ReplicateSpec) -> str:
    """Name a replicate: ``trial 3 float16 r1``, with scenario and attempt where there are any."""
    scenario = "" if spec.scenario == "none" else f" {spec.scenario}"
    attempt = "" if not spec.attempt else f" attempt {spec.attempt + 1}"
    return f"trial {spec.trial} {spec.configuration.label} r{spec.replicate}{scenario}{attempt}"


def finished_line(
    config: SweepConfig,
    spec: ReplicateSpec,
    row: Mapping[str, Any],
    seconds: float | None,
    kept: bool,
) -> str:
    """Describe a finished replicate in one line."""
    state = str(row.get("state"))
    took = "" if seconds is None else f" in {clock(seconds)}"
    reason = (
        f" ({row['stop_reason']})" if state in ("failed", LOST) and row.get("stop_reason") else ""
    )
    names = dict.fromkeys((*KEY_FIGURES, *config.objectives))
    figures = [f"{name} {figure(name, row[name])}" for name in names if row.get(name) is not None]
    kept_mark = " (kept)" if kept else ""
    head = f"{replicate_label(spec)} {state}{took}{reason}{kept_mark}"
    return f"{head}: {', '.join(figures)}" if figures else head


def trial_line(
    tally: Tally, record: TrialRecord, values: Sequence[float] | None, reason: str | None
) -> str:
    """Describe a finished trial in one line."""
    head = f"trial {record.number} done, {tally.trials_done} of {tally.trials}"
    failed = f"{head}: failed{f' ({reason})' if reason else ''}"
    if values is None:
        return failed
    pairs = list(zip(tally.config.objectives, values, strict=True))
    if reason is not None:
        return f"{failed}, counts as {', '.join(f'{n} {figure(n, value)}' for n, value in pairs)}"
    told = ", ".join(f"{name} {objective(tally.config, name, value)}" for name, value in pairs)
    return f"{head}: {told}"


def objective(config: SweepConfig, name: str, value: float) -> str:
    """Print the value of an objective; what stands for a target missed each time says so."""
    missed = value == missed_charge(name, config.budget)
    return f"missed (counts as {figure(name, value)})" if missed else figure(name, value)


def figure(name: str, value: float) -> str:
    """Print a number with the unit of its column."""
    unit = BY_NAME[name].unit
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{digits} {unit}" if unit else digits


def _seconds(row: Mapping[str, Any]) -> float | None:
    """Return how long a replicate took by its own account [s]."""
    started, ended = row.get("started"), row.get("ended")
    if not isinstance(started, str) or not isinstance(ended, str):
        return None
    began, done = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (started, ended))
    return (done - began).total_seconds()
