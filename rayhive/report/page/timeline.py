"""Picture of one replicate: loss, throughput and the replicas' activities, with the faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rayhive.errors import DamagedError
from rayhive.events import FaultFired, InvariantChecked
from rayhive.metrics.fault_impact import FaultImpact, Rejoin, impacts, rejoins
from rayhive.metrics.logs import timeline_of_row
from rayhive.metrics.rows import NO_FAULTS
from rayhive.report.numbers import number_text
from rayhive.report.page.run_data import Replicate, RunData
from rayhive.report.page.svg import Chart, limits
from rayhive.report.timeline_lanes import ACTIVITIES, Bar, lanes, loss_points
from rayhive.report.timeline_text import event_text, throughput
from rayhive.timeline import Timeline

#: Pictures of a report; the other replicates are named.
LARGEST = 12
#: Windows of the throughput curve.
WINDOWS = 160
WIDTH = 900
#: Evaluations up to which each has a dot.
DOTS = 60
#: Faults up to which their names and recoveries are drawn.
MANY = 12
#: Lines of the list of events.
EVENTS = 200
#: Bars from which those of the same activity are joined.
BARS = 1500


@dataclass(frozen=True)
class FaultRow:
    """Fault or rejoining peer in the list below a picture.

    Attributes:
        name: Id of the fault, or name of the peer.
        what: Kind and targets.
        at: Time since training started.
        proof: Whether it was proved to have taken effect.
        went_on: Time until the survivors went on.
        recovered: Time until the throughput of the live peers was back.
    """

    name: str
    what: str
    at: str
    proof: str
    went_on: str
    recovered: str


@dataclass(frozen=True)
class TimelinePicture:
    """Picture of one replicate.

    Attributes:
        title: Configuration, scenario, seed and end.
        charts: Charts with the same horizontal axis.
        activities: Activities that occur -> class of their colour.
        faults: Faults and rejoining peers.
        events: Moments and texts of the timeline.
        more: Number of events that are left out.
        violated: Invariants that are violated.
    """

    title: str
    charts: tuple[Chart, ...]
    activities: dict[str, str]
    faults: tuple[FaultRow, ...]
    events: tuple[tuple[str, str], ...]
    more: int
    violated: tuple[str, ...]


def fault_pictures(run: RunData) -> tuple[list[TimelinePicture], list[str]]:
    """Return a picture for each configuration under faults, and the titles of those left out."""
    chosen = {id(advice.row) for advice in run.recommendations}
    rows = [row for row in run.results.folded if row["scenario"] != NO_FAULTS]
    rows.sort(key=lambda row: id(row) not in chosen)
    found: list[TimelinePicture] = []
    left_out: list[str] = []
    for row in rows:
        for number, replicate in enumerate(run.of_row(row)):
            if number or len(found) >= LARGEST:
                left_out.append(_name(replicate))
            elif (picture := _picture_of(replicate)) is not None:
                found.append(picture)
    return found, left_out


def _name(replicate: Replicate) -> str:
    row = replicate.row
    return f"trial {row['trial']}, replicate {row['replicate']}, {row['scenario']}"


def _picture_of(replicate: Replicate) -> TimelinePicture | None:
    try:
        timeline = timeline_of_row(replicate.folder, replicate.row)
    except DamagedError:
        return None
    return None if timeline.span is None else timeline_charts(timeline)


def timeline_charts(timeline: Timeline) -> TimelinePicture:
    """Return the picture of a replicate that trained."""
    assert timeline.span is not None
    spec, seconds = timeline.spec, timeline.span[1] - timeline.span[0]
    ends = (0.0, max(seconds, 1e-3))
    bars = _joined([bar for bar in lanes(timeline) if bar.begin <= ends[1]])
    charts = [_loss_chart(timeline, ends), _throughput_chart(timeline, ends)]
    charts.append(_lane_chart(timeline, bars, ends))
    found = impacts(timeline)
    for number, chart in enumerate(charts):
        _draw_faults(chart, timeline, found, words=number == 0)
    texts = list(_events(timeline))
    verdicts = timeline.of(InvariantChecked)
    return TimelinePicture(
        f"{spec.scenario}, {spec.label}, seed {spec.seed}: {timeline.state} after "
        f"{number_text(round(seconds, 1))} s",
        tuple(charts),
        {name: f"act-{name}" for name in ACTIVITIES if any(b.activity == name for b in bars)},
        tuple(_fault_rows(timeline, found)),
        tuple(texts[:EVENTS]),
        max(0, len(texts) - EVENTS),
        tuple(dict.fromkeys(str(event.name) for event in verdicts if not event.ok)),
    )


def _loss_chart(timeline: Timeline, ends: tuple[float, float]) -> Chart:
    points = loss_points(timeline)
    values = [loss for line in points.values() for _, loss in line]
    log = bool(values) and min(values) > 0 and max(values) / min(values) > 10
    chart = Chart(
        "Loss",
        "Loss of the training batches and of the held-out data over time, with the faults.",
        x=ends,
        y=limits(values, log=log),
        x_label="",
        y_label="loss",
        log_y=log,
        width=WIDTH,
        height=190,
    )
    for (name, line), style in zip(points.items(), ("c6 thin", "c0"), strict=True):
        chart.line(line, style, name, dots=style != "c0")
        if style == "c0" and len(line) <= DOTS:
            for at in line:
                chart.dot(at, style, f"held out: {number_text(at[1])} at {at[0]:.1f} s", 2.5)
    return chart


def _throughput_chart(timeline: Timeline, ends: tuple[float, float]) -> Chart:
    rates = throughput(timeline, WINDOWS)
    step = ends[1] / WINDOWS
    chart = Chart(
        "Throughput",
        f"Committed samples per second over time, up to {number_text(round(max(rates), 1))}.",
        x=ends,
        y=limits(rates, zero=True),
        x_label="",
        y_label="samples/s",
        width=WIDTH,
        height=170,
    )
    chart.line([((n + 0.5) * step, rate) for n, rate in enumerate(rates)], "c0")
    return chart


def _lane_chart(timeline: Timeline, bars: Sequence[Bar], ends: tuple[float, float]) -> Chart:
    replicas = list(dict.fromkeys(item.replica for item in timeline.incarnations.values()))
    chart = Chart(
        "Replicas",
        f"What each of {len(replicas)} replicas did over time; gaps are times without a process.",
        x=ends,
        y=(0.0, float(max(len(replicas), 1))),
        x_label="seconds since training started",
        y_label="",
        width=WIDTH,
        height=62 + 22 * len(replicas),
        y_ticks=False,
    )
    for number, replica in enumerate(replicas):
        y = len(replicas) - number - 0.5
        chart.row_label(y, replica)
        for bar in bars:
            if bar.replica == replica:
                corners = (bar.begin, y - 0.38), (bar.begin + bar.seconds, y + 0.38)
                chart.box(*corners, f"act-{bar.activity}", bar.text)
    return chart


def _joined(bars: Sequence[Bar]) -> list[Bar]:
    """Return bars of which neighbours with the same activity are joined if there are many."""
    if len(bars) <= BARS:
        return list(bars)
    joined: list[Bar] = []
    for (_, activity), group in groupby(bars, key=lambda bar: (bar.replica, bar.activity)):
        run = list(group)
        seconds = run[-1].begin + run[-1].seconds - run[0].begin
        text = f"{run[0].text} … {run[-1].text}" if len(run) > 1 else run[0].text
        joined.append(replace(run[0], activity=activity, seconds=seconds, text=text))
    return joined


def _draw_faults(
    chart: Chart, timeline: Timeline, found: Sequence[FaultImpact], words: bool
) -> None:
    assert timeline.span is not None
    began, ended = timeline.span
    low, high = chart.y
    for number, impact in enumerate(found):
        begin = impact.fired - began
        # a fault without a heal ends when the swarm has recovered from it
        over = None if impact.recover_s is None else impact.fired + impact.recover_s
        end = impact.healed if impact.healed is not None else over
        until = (ended if end is None else min(end, ended)) - began
        text = f"{impact.fault} {impact.kind}"
        chart.box((begin, low), (until, high), "fault", text)
        chart.segment((begin, low), (begin, high), "faultline", text)
        if len(found) > MANY:
            continue  # more lines would hide the curves
        if words:
            chart.text((begin, high), text, "faultname", 3, 10 + 12 * (number % 3))
        if impact.recover_s is not None:
            x = begin + impact.recover_s
            chart.segment((x, low), (x, high), "back", f"{impact.fault}: throughput back")


def _fault_rows(timeline: Timeline, found: Sequence[FaultImpact]) -> Iterator[FaultRow]:
    assert timeline.span is not None
    who = {event.fault: ", ".join(event.who or ()) for event in timeline.of(FaultFired)}
    proofs = {True: "verified", False: "NOT VERIFIED", None: "not recorded"}
    for impact in found:
        targets = who.get(impact.fault)
        yield FaultRow(
            impact.fault,
            f"{impact.kind}{f' on {targets}' if targets else ''}",
            f"{impact.fired - timeline.span[0]:.1f} s",
            proofs[impact.ok],
            _after(impact.detect_s, impact.observed_s),
            _after(impact.recover_s, impact.observed_s) if impact.recovery_known else "not known",
        )
    for item in rejoins(timeline):
        yield _rejoin_row(item, timeline.span[0])


def _rejoin_row(item: Rejoin, began: float) -> FaultRow:
    contributed = (
        f"no contribution seen within {item.observed_s:.2f} s"
        if item.seconds is None
        else f"contributes after {item.seconds:.2f} s"
    )
    words = f"starts{f' because of {item.cause}' if item.cause else ''}"
    at = f"{item.spawned - began:.1f} s"
    return FaultRow(item.peer, words, at, "", "", contributed)


def _after(seconds: float | None, observed: float) -> str:
    return f"{seconds:.2f} s" if seconds is not None else f"not seen within {observed:.2f} s"


def _events(timeline: Timeline) -> Iterator[tuple[str, str]]:
    assert timeline.span is not None
    texts = [(event.t, event_text(event)) for event in timeline.events]
    for moment, text in sorted((t, text) for t, text in texts if text is not None):
        if moment >= timeline.span[0]:
            yield f"{moment - timeline.span[0]:.2f} s", text
