"""Counts and remaining time of a running sweep, and the lines that describe its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

from rayhive.columns import find_column
from rayhive.spec import SweepConfig
from rayhive.spec.pruning import PRUNED, SKIPPED
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.objectives import lacking, missed_charge
from rayhive.timeline import LOST

if TYPE_CHECKING:
    from rayhive.sweep.trial_book import TrialRecord, Values

#: Trial, replicate and scenario: the same for all attempts.
Replicate: TypeAlias = tuple[str, int, str]

#: Columns that the line of a finished replicate shows besides the objectives.
KEY_FIGURES = ("final_loss", "samples_per_s", "round_p50_s", "payload_bytes_per_round")
#: States of a failed replicate whose reason its line tells.
_EXPLAINED = ("failed", "diverged", "invalid")


@dataclass
class Eta:
    """Estimates the remaining duration from the mean duration of the finished replicates.

    Attributes:
        total: All replicates.
        done: Finished replicates.
    """

    total: int = 0
    done: int = 0
    _durations: list[float] = field(default_factory=list)

    def add(self, seconds: float | None) -> None:
        """Count a finished replicate.

        Args:
            seconds: Its duration [s]; None if unknown.
        """
        self.done += 1
        if seconds is not None:
            self._durations.append(seconds)

    def remaining_s(self, running_s: Sequence[float] = (), at_once: int = 1) -> float | None:
        """Return the remaining duration [s]; None before the first replicate is timed.

        Args:
            running_s: Time for which each of the current replicates has been running [s].
            at_once: Replicates that run at the same time.
        """
        left = max(0, self.total - self.done)
        if not left:
            return 0.0
        if not self._durations:
            return None
        mean = fmean(self._durations)
        spent = sum(min(each, mean) for each in running_s)
        return (left * mean - spent) / min(at_once, left)


@dataclass
class Tally:
    """Counts of finished replicates and trials, and the best value of each objective.

    Attributes:
        config: The study.
        now: Monotonic clock [s].
        trials: All trials.
        trials_done: Finished trials.
        best: Objective -> its best value, and the trial that has it.
        front: Values and trial of those that no other trial dominates, in the order in which they
            finished. A trial is left out of both if a replicate keeps it off the front
            (:func:`rayhive.sweep.objectives.lacking`).
    """

    config: SweepConfig
    now: Callable[[], float] = time.monotonic
    eta: Eta = field(default_factory=Eta)
    trials: int = 0
    trials_done: int = 0
    best: dict[str, tuple[float, TrialRecord]] = field(default_factory=dict)
    front: list[tuple[tuple[float, ...], TrialRecord]] = field(default_factory=list)
    _lacking: dict[int, str] = field(default_factory=dict)
    _running: dict[Replicate, float | None] = field(default_factory=dict)
    _at_once: int = 1

    def began(self, trials: int, replicates: int) -> None:
        """Set the number of trials, and of replicates in each."""
        self.trials = trials
        self.eta = Eta((trials + len(self.config.baselines)) * replicates)

    def started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Start timing a replicate; the start of an adopted one is unknown."""
        self._running[key_of(spec)] = None if adopted else self.now()
        self._at_once = max(self._at_once, len(self._running))

    def finished(self, spec: ReplicateSpec, row: Mapping[str, Any]) -> float | None:
        """Count a finished replicate and return its duration [s], if it is known."""
        why = lacking(self.config, dict(row))
        if spec.trial is not None and why is not None:
            self._lacking.setdefault(spec.trial, why)
        if row.get("state") == SKIPPED:
            self.eta.add(None)
            return None
        started = self._running.pop(key_of(spec), None)
        seconds = _seconds(row) if started is None else self.now() - started
        self.eta.add(seconds)
        return seconds

    def trial_finished(
        self, record: TrialRecord, values: Values, reason: str | None = None
    ) -> None:
        """Count a finished trial; if all replicates have its objectives, it may be the best."""
        self.trials_done += 1
        if values is None or reason is not None or self.lacking(record):
            return
        self._join_front(record, tuple(values))
        for (name, direction), value in zip(self.config.objectives.items(), values, strict=True):
            known = self.best.get(name)
            sign = 1 if direction == "minimize" else -1
            if known is None or sign * value < sign * known[0]:
                self.best[name] = (value, record)

    def lacking(self, record: TrialRecord) -> str | None:
        """Return why a replicate keeps a trial off the front; None if none does."""
        return self._lacking.get(record.number)

    def _join_front(self, record: TrialRecord, values: tuple[float, ...]) -> None:
        if not any(self._dominates(other, values) for other, _ in self.front):
            kept = [item for item in self.front if not self._dominates(values, item[0])]
            self.front = [*kept, (values, record)]

    def _dominates(self, a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        signs = [1 if way == "minimize" else -1 for way in self.config.objectives.values()]
        pairs = [(sign * x, sign * y) for sign, x, y in zip(signs, a, b, strict=True)]
        return a != b and all(x <= y for x, y in pairs)

    @property
    def remaining(self) -> str:
        """Estimate of the remaining duration, as text."""
        now = self.now()
        running = [now - since for since in self._running.values() if since is not None]
        return clock(self.eta.remaining_s(running, self._at_once))

    @property
    def started_position(self) -> str:
        """Number of the replicate that was started last, and of all."""
        return self._position(self.eta.done + len(self._running))

    @property
    def finished_position(self) -> str:
        """Number of the replicate that finishes next, and of all."""
        return self._position(self.eta.done + 1)

    def _position(self, number: int) -> str:
        width = len(str(self.eta.total))
        return f"[{min(number, self.eta.total):{width}}/{self.eta.total}]"


def key_of(spec: ReplicateSpec) -> Replicate:
    """Return the key of a replicate among the running ones."""
    return spec.place, spec.replicate, spec.scenario


def replicate_label(spec: ReplicateSpec) -> str:
    """Return the name of a replicate: ``trial 3 float16 r1``, then its scenario and attempt."""
    scenario = "" if spec.scenario == "none" else f" {spec.scenario}"
    attempt = "" if not spec.attempt else f" attempt {spec.attempt + 1}"
    label = f" {spec.label}" if spec.baseline is None else ""
    return f"{spec.title}{label} r{spec.replicate}{scenario}{attempt}"


def finished_line(
    config: SweepConfig,
    spec: ReplicateSpec,
    row: Mapping[str, Any],
    seconds: float | None,
    kept: bool,
) -> str:
    """Return the line of a finished replicate.

    Args:
        config: The study.
        spec: The replicate.
        row: Its row.
        seconds: Its duration [s], if known.
        kept: Whether an earlier driver ran it.
    """
    state = str(row.get("state"))
    took = "" if seconds is None else f" in {clock(seconds)}"
    why = row.get("stop_reason") if state in (*_EXPLAINED, LOST, PRUNED, SKIPPED) else None
    reason = f" ({why})" if why else ""
    names = dict.fromkeys((*KEY_FIGURES, *config.objectives))
    figures = [f"{name} {figure(name, row[name])}" for name in names if row.get(name) is not None]
    kept_mark = " (kept)" if kept and state != SKIPPED else ""
    head = f"{replicate_label(spec)} {state}{took}{reason}{kept_mark}"
    return f"{head}: {', '.join(figures)}" if figures else head


def trial_line(tally: Tally, record: TrialRecord, values: Values, reason: str | None) -> str:
    """Return the line of a finished trial.

    Args:
        tally: The counts, this trial included.
        record: The trial.
        values: Values of its objectives, if it has any.
        reason: Reason of its failure, if it failed.
    """
    head = f"trial {record.number} done, {tally.trials_done} of {tally.trials}"
    failed = f"{head}: failed{f' ({reason})' if reason else ''}"
    if values is None:
        return failed
    pairs = list(zip(tally.config.objectives, values, strict=True))
    if reason is not None:
        return f"{failed}, counts as {', '.join(f'{n} {figure(n, value)}' for n, value in pairs)}"
    shown = ", ".join(f"{name} {objective(tally.config, name, value)}" for name, value in pairs)
    if (why := tally.lacking(record)) and "counts as" not in shown:
        shown = f"a replicate {why}, counts as {shown}"
    if not any(each.number == record.number for _, each in tally.front):
        return f"{head}: {shown}"
    if len(pairs) == 1:
        return f"{head}: {shown}, the best so far"
    others = len(tally.front) - 1
    beside = f" (with {others} other{'s' if others > 1 else ''})" if others else ""
    return f"{head}: {shown}, on the front so far{beside}"


def objective(config: SweepConfig, name: str, value: float) -> str:
    """Return the value of an objective as text; the charge for a missed target is marked."""
    missed = value == missed_charge(name, config.budget)
    return f"missed (counts as {figure(name, value)})" if missed else figure(name, value)


def figure(name: str, value: float) -> str:
    """Return a number with the unit of its column."""
    column = find_column(name)
    unit = "" if column is None else column.unit
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{digits} {unit}" if unit else digits


def clock(seconds: float | None) -> str:
    """Return a duration as text: ``1 h 04 min``, ``3 min 20 s``, ``7 s``."""
    if seconds is None:
        return "unknown"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _seconds(row: Mapping[str, Any]) -> float | None:
    """Return the duration of a replicate from the times in its row [s]."""
    started, ended = row.get("started"), row.get("ended")
    if not isinstance(started, str) or not isinstance(ended, str):
        return None
    began, done = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (started, ended))
    seconds = (done - began).total_seconds()
    return seconds if seconds >= 0 else None  # the clock was set back
