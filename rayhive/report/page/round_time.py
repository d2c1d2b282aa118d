"""Section "where a round's time goes": phases of a round, and the classes of all wall time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from rayhive.columns import Row, group_columns
from rayhive.events import Round, StateRound, Transition
from rayhive.report.numbers import number_text
from rayhive.timeline import Timeline

if TYPE_CHECKING:
    from rayhive.report.page.run_data import RunData

TOTAL = "peer_seconds"
#: Phase that does not occur in a run whose parameters do not travel.
TRAVEL = "averaging of parameters"
#: Phases of a round in the order of the table, and their meaning.
PHASES = {
    "computing": "gradients of the round's samples",
    "waiting for background work": "results of delayed work that were not ready",
    "forming a group": "until the group of the gradients' all-reduce was formed",
    "all-reduce of gradients": "the all-reduce itself; with delayed gradients in the background",
    TRAVEL: "in rounds in which parameters travel",
    "optimizer and state": "the wait for the optimizer and for state averaging",
    "whole round": "from one transition to the next, without evaluation",
}


@dataclass(frozen=True)
class RoundTimes:
    """Durations of one replicate's rounds, over all peers.

    Attributes:
        phases: Phase -> median [s]; None if it is not recorded.
        steps: Name of a step of the all-reduce -> median [s].
        rounds: Number of rounds that the medians are over.
    """

    phases: Mapping[str, float | None]
    steps: Mapping[str, float]
    rounds: int


def round_times(timeline: Timeline) -> RoundTimes | None:
    """Return the median durations of a replicate; None if it never trained.

    The first round of each peer is left out: it includes the warm-up of code.
    """
    if timeline.span is None:
        return None
    rounds = [event for events in timeline.by_peer(Round).values() for event in events[1:]]
    states = [event for events in timeline.by_peer(StateRound).values() for event in events[1:]]
    steps = [event for events in timeline.by_peer(Transition).values() for event in events[1:]]
    computing = list(_computing(timeline))
    parts: dict[str, float] = {}
    for name, seconds in _steps(rounds).items():
        parts[name] = median(seconds)
    return RoundTimes(
        phases={
            "computing": _median(computing),
            "waiting for background work": _median(event.background_s for event in rounds),
            "forming a group": _median(event.matchmaking_s for event in rounds),
            "all-reduce of gradients": _median(event.averaging_s for event in rounds),
            TRAVEL: _median(event.averaging_s for event in states),
            "optimizer and state": _median(event.update_s for event in steps),
            "whole round": _median(event.seconds for event in steps),
        },
        steps=parts,
        rounds=len(steps),
    )


def _computing(timeline: Timeline) -> Iterator[float]:
    """Yield the time in which each peer computed for each round, without evaluation [s].

    A baseline evaluates between rounds, and a peer of a swarm within them.
    """
    swarm = timeline.spec.baseline is None
    steps = timeline.by_peer(Transition) if swarm else {}
    for peer, rounds in timeline.by_peer(Round).items():
        evaluated = {
            step.round: step.t - before.t - step.seconds
            for before, step in pairwise(steps.get(peer, ()))
        }
        for event in rounds[1:]:
            if event.accumulating_s is not None:
                waited = (event.background_s or 0.0) + max(0.0, evaluated.get(event.round, 0.0))
                yield max(0.0, event.accumulating_s - waited)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _steps(rounds: Iterable[Round]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for event in rounds:
        for phase in event.phases or ():
            if isinstance(phase, Mapping) and isinstance(phase.get("seconds"), (int, float)):
                seconds[str(phase.get("name", "all-reduce"))].append(float(phase["seconds"]))
    return seconds


@dataclass(frozen=True)
class Share:
    """Part of the wall time of all replicas.

    Attributes:
        name: Name of the class in words.
        about: Definition of the class.
        style: Style of its bar.
        percent: Share of the wall time [%]; None if it is not recorded.
        text: The share as text.
    """

    name: str
    about: str
    style: str
    percent: float | None
    text: str


@dataclass(frozen=True)
class TimeRow:
    """Row of the section's tables.

    Attributes:
        label: Configuration and conditions.
        shares: Classes of the wall time.
        phases: Texts of the median durations in the order of :data:`PHASES`.
        steps: Steps of the all-reduce in words; empty if they are not recorded.
        basis: Number of replicates and rounds that the phases are over.
    """

    label: str
    shares: tuple[Share, ...]
    phases: tuple[str, ...]
    steps: str
    basis: str


def time_rows(run: RunData) -> list[TimeRow]:
    """Return the rows of the section, in the order of the results table."""
    rows = [row for row in run.results.folded if row["n"]]
    names = [column.name for column in group_columns("time") if column.name != TOTAL]
    shown = [name for name in names if any(row.get(name) for row in rows)]
    found = []
    for row in rows:
        times = [each.times for each in run.of_row(row) if each.times is not None]
        condition = run.condition_text(row)
        found.append(
            TimeRow(
                label=f"{row['configuration']}{f' · {condition}' if condition else ''}",
                shares=tuple(_shares(row, shown)),
                phases=tuple(_phase_text(times, name) for name in PHASES),
                steps=", ".join(_step_texts(times)),
                basis=f"{len(times)} × {number_text(fmean(t.rounds for t in times))}"
                if times
                else "not recorded",
            )
        )
    return found


def _shares(row: Row, shown: Sequence[str]) -> Iterator[Share]:
    total = row.get(TOTAL)
    columns = {column.name: column for column in group_columns("time")}
    for number, name in enumerate(columns):
        if name in shown:
            value = row.get(name)
            known = isinstance(value, (int, float)) and isinstance(total, (int, float)) and total
            percent = 100 * float(value or 0) / float(total or 1) if known else None
            words = name.removeprefix("badput_").removesuffix("_s").replace("_", " ")
            text = "not recorded" if percent is None else f"{percent:.1f} %"
            yield Share(words, columns[name].about, f"c{(number - 1) % 8}", percent, text)


def _phase_text(times: Sequence[RoundTimes], name: str) -> str:
    known = [value for each in times if (value := each.phases[name]) is not None]
    if not known and name == TRAVEL and times:
        return "none took place"
    return milliseconds(fmean(known)) if known else "not recorded"


def milliseconds(seconds: float) -> str:
    """Return a duration [s] in milliseconds, with three significant digits."""
    value = 1000 * seconds
    return "< 0.01" if 0 < value < 0.01 else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _step_texts(times: Sequence[RoundTimes]) -> Iterator[str]:
    for name in dict.fromkeys(name for each in times for name in each.steps):
        known = [each.steps[name] for each in times if name in each.steps]
        yield f"{name} {milliseconds(fmean(known))}"
