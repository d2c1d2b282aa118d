"""Timeline of one replicate as a picture: loss, throughput and rounds, with the faults shaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, TypeVar

from rayhive.errors import RayhiveError
from rayhive.events import Evaluation, Event, Round, Transition
from rayhive.metrics.fault_impact import impacts, rejoins
from rayhive.metrics.logs import last_timeline
from rayhive.report.timeline_text import throughput
from rayhive.timeline import Incarnation, Timeline

E = TypeVar("E", bound=Event)

#: Number of windows in the throughput curve.
WINDOWS = 120
#: Activity of a replica, or outcome of its round, to the colour of the bar.
COLOURS: dict[str, str] = {
    "averaged": "#2a9d8f",
    "partial": "#e9c46a",
    "alone": "#8ab6d6",
    "local": "#f4a261",
    "skipped": "#e76f51",
    "step": "#9aa5ab",
    "starting": "#c8b6e2",
    "evaluating": "#dcdcdc",
}
ACTIVITIES = tuple(COLOURS)
_FAULT, _GREY = "#d62828", "#555555"
_ALL_PANELS = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1}


@dataclass(frozen=True)
class Bar:
    """Interval of a replica's time.

    Attributes:
        replica: Name of the replica.
        activity: Key of :data:`COLOURS`.
        begin: Begin [s since training started].
        seconds: Duration [s].
        text: Text under the mouse pointer.
    """

    replica: str
    activity: str
    begin: float
    seconds: float
    text: str


def write_timeline_picture(folder: str | Path, path: str | Path) -> None:
    """Write the picture of a replicate as one HTML file without external resources.

    Raises:
        RayhiveError: plotly is not installed, the events cannot be read, or the replicate never
            trained.
    """
    Path(path).write_text(timeline_html(last_timeline(folder)), encoding="utf-8")


def timeline_html(timeline: Timeline) -> str:
    """Return the picture of a replicate as one HTML page that includes its scripts.

    Raises:
        RayhiveError: plotly is not installed, or the replicate never trained.
    """
    graph = import_plotly("graph_objects")
    if timeline.span is None:
        raise RayhiveError("no picture: the replicate never trained")
    figure = import_plotly("subplots").make_subplots(
        rows=3, shared_xaxes=True, vertical_spacing=0.04, row_heights=[0.3, 0.3, 0.4]
    )
    figure.add_traces(_loss_traces(graph, timeline), rows=1, cols=1)
    figure.add_trace(_throughput_trace(graph, timeline), row=2, col=1)
    figure.add_traces(_lane_traces(graph, timeline), rows=3, cols=1)
    _draw_faults(figure, timeline)
    spec = timeline.spec
    figure.update_layout(
        title=f"{spec.scenario}, {spec.configuration.label}, seed {spec.seed}: {timeline.state}",
        template="plotly_white",
        barmode="overlay",
        height=760,
        legend={"orientation": "h", "y": -0.08},
    )
    figure.update_yaxes(title_text="loss", row=1, col=1)
    figure.update_yaxes(title_text="samples/s", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(autorange="reversed", row=3, col=1)
    figure.update_xaxes(title_text="seconds since training started", row=3, col=1)
    return str(figure.to_html(full_html=True, include_plotlyjs=True))


def import_plotly(module: str) -> ModuleType:
    """Return a module of plotly.

    Raises:
        RayhiveError: plotly is not installed.
    """
    try:
        return importlib.import_module(f"plotly.{module}")
    except ImportError as error:
        raise RayhiveError(
            "pictures need plotly, which the extra `report` installs: pip install 'rayhive[report]'"
        ) from error


# -- data --------------------------------------------------------------------------------------


def loss_points(timeline: Timeline) -> dict[str, list[tuple[float, float]]]:
    """Return points (seconds, loss) of the training batches by round, and of the evaluations."""
    rounds, evaluations = timeline.by_round(Round), timeline.by_round(Evaluation)
    return {
        "training batches": _means(timeline, rounds, lambda event: event.loss),
        "held out": _means(timeline, evaluations, lambda event: event.values.get("loss")),
    }


def _means(
    timeline: Timeline, rounds: Mapping[int, Sequence[E]], loss: Callable[[E], float | None]
) -> list[tuple[float, float]]:
    """Return the time of the last report [s] and the mean loss of each round."""
    assert timeline.span is not None
    points = []
    for events in rounds.values():
        known = [value for event in events if (value := loss(event)) is not None]
        if known:
            ended = max(event.t for event in events)
            points.append((ended - timeline.span[0], fmean(known)))
    return sorted(points)


def lanes(timeline: Timeline) -> list[Bar]:
    """Return the activities of every replica. Gaps are times without a process."""
    return [bar for item in timeline.incarnations.values() for bar in _lane(timeline, item)]


def _lane(timeline: Timeline, incarnation: Incarnation) -> Iterator[Bar]:
    assert timeline.span is not None
    began = timeline.span[0]
    name, replica, spawned = incarnation.name, incarnation.replica, incarnation.spawned
    rounds = {event.round: event for event in timeline.of(Round, name)}
    started = incarnation.ended if incarnation.started is None else incarnation.started
    if spawned is not None and started is not None and started > began:
        begin = max(spawned, began)
        yield Bar(replica, "starting", begin - began, started - begin, f"{name} starts")
    at, clock = incarnation.started, 0.0
    for event in timeline.of(Transition, name):
        if at is None or event.clock_s is None:
            continue
        round_ = rounds.get(event.round)
        paused = max(0.0, event.t - at - (event.clock_s - clock))
        if paused > 0.01:  # evaluation directly follows the previous transition
            yield Bar(replica, "evaluating", at - began, paused, f"{name} evaluates")
        outcome = "step" if round_ is None else round_.outcome
        text = f"{name}, round {event.round}: {outcome}"
        if round_ is not None:
            text += f", {round_.samples} samples, group of {round_.group_size or 1}"
        yield Bar(replica, outcome, at + paused - began, event.t - at - paused, text)
        at, clock = event.t, event.clock_s


def _loss_traces(graph: Any, timeline: Timeline) -> list[Any]:
    styles: Mapping[str, dict[str, Any]] = {
        "training batches": {"mode": "lines", "line": {"color": "#bbbbbb", "width": 1}},
        "held out": {"mode": "lines+markers", "line": {"color": "#264653"}},
    }
    return [
        graph.Scatter(x=[x for x, _ in points], y=[y for _, y in points], name=name, **styles[name])
        for name, points in loss_points(timeline).items()
    ]


def _throughput_trace(graph: Any, timeline: Timeline) -> Any:
    assert timeline.span is not None
    step = (timeline.span[1] - timeline.span[0]) / WINDOWS
    return graph.Scatter(
        x=[(at + 0.5) * step for at in range(WINDOWS)],
        y=throughput(timeline, WINDOWS),
        name="committed samples/s",
        line={"color": "#1d3557", "shape": "hvh"},
    )


def _lane_traces(graph: Any, timeline: Timeline) -> list[Any]:
    bars = lanes(timeline)
    by_activity = {name: [bar for bar in bars if bar.activity == name] for name in COLOURS}
    return [
        graph.Bar(
            y=[bar.replica for bar in matching],
            base=[bar.begin for bar in matching],
            x=[bar.seconds for bar in matching],
            hovertext=[bar.text for bar in matching],
            hoverinfo="text",
            orientation="h",
            name=activity,
            marker={"color": COLOURS[activity], "line": {"color": "white", "width": 0.5}},
        )
        for activity, matching in by_activity.items()
        if matching
    ]


def _draw_faults(figure: Any, timeline: Timeline) -> None:
    assert timeline.span is not None
    began, ended = timeline.span
    for impact in impacts(timeline):
        begin = impact.fired - began
        # a fault without a heal ends when the swarm has recovered from it
        over = None if impact.recover_s is None else impact.fired + impact.recover_s
        end = impact.healed if impact.healed is not None else over
        until = (ended if end is None else min(end, ended)) - began
        look = {"fillcolor": _FAULT, "opacity": 0.12, "line_width": 0, "layer": "below"}
        figure.add_shape(type="rect", x0=begin, x1=until, **_ALL_PANELS, **look)
        _write(figure, begin, 1.0, f"{impact.fault} {impact.kind}", _FAULT)
        if impact.detect_s is not None:
            _mark(figure, begin + impact.detect_s, 0.72, f"{impact.fault} detected", "dot")
        if impact.recover_s is not None:
            _mark(figure, begin + impact.recover_s, 0.69, f"{impact.fault} throughput back", "dash")
    for item in rejoins(timeline):
        if item.seconds is not None:
            back = item.spawned - began + item.seconds
            _mark(figure, back, 0.66, f"{item.peer} back", "dash")


def _mark(figure: Any, x: float, y: float, text: str, dash: str) -> None:
    """Draw a line over all panels at a moment ``x`` [s], and a text at a height ``y``.

    Texts of different meaning have different heights, so that those of one fault do not overlap.
    """
    line = {"color": _GREY, "width": 1, "dash": dash}
    figure.add_shape(type="line", x0=x, x1=x, line=line, **_ALL_PANELS)
    _write(figure, x, y, text, _GREY)


def _write(figure: Any, x: float, y: float, text: str, colour: str) -> None:
    """Write a text to the right of a moment ``x`` [s], at a height ``y`` between 0 and 1."""
    place = {"xref": "x", "yref": "paper", "xanchor": "left", "yanchor": "top"}
    font = {"size": 10, "color": colour}
    figure.add_annotation(x=x, y=y, text=text, showarrow=False, font=font, **place)
