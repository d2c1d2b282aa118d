"""Data of a run that the sections of a report share, each replicate read once."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

from rayhive.columns import Row, conditions
from rayhive.errors import DamagedError
from rayhive.events import PeerReady
from rayhive.metrics.aggregate import row_key, rows_by
from rayhive.metrics.groups.convergence import evaluations
from rayhive.metrics.logs import timeline_of_row
from rayhive.metrics.rows import NO_FAULTS
from rayhive.report.labels import condition_text
from rayhive.report.page.round_time import RoundTimes, round_times
from rayhive.report.recommendation import Recommendation, recommendations
from rayhive.report.results import Results, replicate_place
from rayhive.spec.replicate import ReplicateSpec
from rayhive.timeline import FINISHED, Timeline

#: Values of the columns that tell rows of the table apart.
Key: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation of a swarm.

    Attributes:
        clock_s: Training clock [s].
        samples: Committed samples.
        payload: Payload that all peers had sent [bytes]; None if it is not recorded.
        loss: Held-out loss, the mean over the peers.
        metric: Metric of the target; None without a target, or if it is not recorded.
    """

    clock_s: float
    samples: int
    payload: int | None
    loss: float
    metric: float | None


@dataclass(frozen=True)
class Replicate:
    """Data of one replicate for the sections of a report.

    Attributes:
        row: Its row.
        folder: Its folder.
        spec: Its specification.
        curve: Held-out loss at the evaluations.
        times: Where the time of its rounds goes; None if it never trained.
        target: Target of the training, as in ``peer_ready``; None if it is not recorded.
    """

    row: Row
    folder: Path
    spec: ReplicateSpec
    curve: tuple[CurvePoint, ...]
    times: RoundTimes | None
    target: Mapping[str, object] | None


@dataclass(frozen=True)
class RunData:
    """A run, as the sections of its report see it.

    Attributes:
        folder: The run folder, or the folder of one replicate.
        results: Its results.
        replicates: Data of the finished replicates.
    """

    folder: Path
    results: Results
    replicates: tuple[Replicate, ...]

    @cached_property
    def recommendations(self) -> list[Recommendation]:
        """Recommendation for each set of conditions."""
        return recommendations(self.results)

    @cached_property
    def groups(self) -> list[list[Row]]:
        """Rows of the table by the conditions under which they were measured."""
        return rows_by(self.results.folded, conditions())

    @cached_property
    def advice(self) -> list[Recommendation | None]:
        """Recommendation for each of the groups; None for one without a row of the swarm."""
        found = {id(row): each for each in self.recommendations for row in each.rows}
        return [
            next((found[id(row)] for row in rows if id(row) in found), None) for rows in self.groups
        ]

    def of_row(self, row: Row) -> list[Replicate]:
        """Return the finished replicates of a row of the table."""
        return self._by_key.get(key_of(row), [])

    @cached_property
    def _by_key(self) -> dict[Key, list[Replicate]]:
        found: dict[Key, list[Replicate]] = {}
        for replicate in self.replicates:
            found.setdefault(key_of(replicate.row), []).append(replicate)
        return found

    @property
    def target(self) -> Mapping[str, object] | None:
        """Target of the training; None if no replicate has one."""
        return next((each.target for each in self.replicates if each.target is not None), None)

    @property
    def faulted(self) -> bool:
        """Whether a replicate had a scenario with faults."""
        return any(row["scenario"] != NO_FAULTS for row in self.results.rows)

    def condition_text(self, row: Row, without: Sequence[str] = ()) -> str:
        """Return the conditions of a row that differ within the run; empty if none do.

        Args:
            row: A row of the table.
            without: Conditions to leave out.
        """
        return condition_text(row, self.results.folded, without)


def key_of(row: Row) -> Key:
    """Return the values that tell rows of the table apart."""
    return tuple(row.get(name) for name in row_key())


def front_first(rows: Iterable[Row], recommendation: Recommendation | None) -> list[Row]:
    """Return rows with the recommended one first, then the front, then the rest in their order."""
    chosen = None if recommendation is None else recommendation.row
    return sorted(rows, key=lambda row: (row is not chosen, not row["pareto"]))


def read_run(folder: Path, results: Results) -> RunData:
    """Read the events of every finished replicate of a run."""
    found = []
    for row in results.rows:
        if row["state"] in FINISHED:
            place = replicate_place(folder, row)
            try:
                timeline = timeline_of_row(place, row)
            except DamagedError:  # it vanished or was damaged since the results were computed
                continue
            found.append(replicate_data(place, row, timeline))
    return RunData(folder, results, tuple(found))


def replicate_data(place: Path, row: Row, timeline: Timeline) -> Replicate:
    """Return the data of one replicate."""
    ready = timeline.first(PeerReady)
    target = None if ready is None else ready.target
    curve = tuple(_curve(timeline, target))
    return Replicate(row, place, timeline.spec, curve, round_times(timeline), target)


def _curve(timeline: Timeline, target: Mapping[str, object] | None) -> Iterator[CurvePoint]:
    sent = _sent_by_round(timeline)
    name = None if target is None else str(target["metric"])
    for point in evaluations(timeline):
        known = {key: value for key, value in point.values.items() if math.isfinite(value)}
        if "loss" in known:
            payload = _until(sent, point.round)
            metric = None if name is None else known.get(name)
            yield CurvePoint(point.clock_s, point.samples, payload, known["loss"], metric)


def _sent_by_round(timeline: Timeline) -> tuple[list[int], list[int]] | None:
    """Return rounds, and the payload of all peers up to each [bytes]; None if not recorded."""
    sent: dict[int, int] = {}
    for event in timeline.averagings:
        if event.sent_bytes is None and (event.group_size or 1) > 1:
            return None
        sent[event.round] = sent.get(event.round, 0) + (event.sent_bytes or 0)
    rounds = sorted(sent)
    return (rounds, list(accumulate(sent[n] for n in rounds))) if sent else None


def _until(sent: tuple[list[int], list[int]] | None, last: int) -> int | None:
    if sent is None:
        return None
    before = bisect_right(sent[0], last)
    return sent[1][before - 1] if before else 0
