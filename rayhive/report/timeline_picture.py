"""Timeline of one replicate as a picture: loss, throughput and rounds, with the faults shaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rayhive.errors import RayhiveError
from rayhive.events import Event
from rayhive.metrics.fault_impact import impacts, rejoins
from rayhive.metrics.incarnations import Incarnation
from rayhive.metrics.logs import last_timeline
from rayhive.metrics.timeline import Timeline
from rayhive.report.timeline_text import throughput

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
_FAULT, _GREY = "#d62828", "#555555"
#: Heights of the marks' names, different so that those of one fault do not overlap.
_PLACES = {"detected": 0.72, "throughput back": 0.69, "back": 0.66}


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
    _draw_loss(figure, graph, timeline)
    _draw_throughput(figure, graph, timeline)
    _draw_lanes(figure, graph, timeline)
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
    import importlib

    try:
        return importlib.import_module(f"plotly.{module}")
    except ImportError as error:
        raise RayhiveError(
            "pictures need plotly, which the extra `report` installs: pip install 'rayhive[report]'"
        ) from error


# -- data --------------------------------------------------------------------------------------


def loss_points(timeline: Timeline) -> dict[str, list[tuple[float, float]]]:
    """Return points (seconds, loss) of the training batches by round, and of the evaluations."""
    assert timeline.span is not None
    began = timeline.span[0]
    trained = [
        _mean_point(events, began, [e["loss"] for e in events if e.get("loss") is not None])
        for events in timeline.by_round("round").values()
    ]
    held_out = [
        _mean_point(events, began, [e["values"]["loss"] for e in events if "loss" in e["values"]])
        for events in timeline.by_round("evaluation").values()
    ]
    return {
        "training batches": sorted(point for point in trained if point is not None),
        "held out": sorted(point for point in held_out if point is not None),
    }


def _mean_point(
    events: list[Event], began: float, losses: list[float]
) -> tuple[float, float] | None:
    if not losses:
        return None
    return max(event["t"] for event in events) - began, sum(losses) / len(losses)


def lanes(timeline: Timeline) -> list[Bar]:
    """Return the activities of every replica. Gaps are times without a process."""
    return [bar for item in timeline.incarnations.values() for bar in _lane(timeline, item)]


def _lane(timeline: Timeline, incarnation: Incarnation) -> Iterator[Bar]:
    assert timeline.span is not None
    began = timeline.span[0]
    name, replica, spawned = incarnation.name, incarnation.replica, incarnation.spawned
    own = timeline.of_peer(name)
    rounds = {event["round"]: event for event in own if event["kind"] == "round"}
    started = incarnation.ended if incarnation.started is None else incarnation.started
    if spawned is not None and started is not None and started > began:
        begin = max(spawned, began)
        yield Bar(replica, "starting", begin - began, started - begin, f"{name} starts")
    at, clock = incarnation.started, 0.0
    for event in own:
        if event["kind"] != "transition" or at is None:
            continue
        round_ = rounds.get(event["round"])
        paused = max(0.0, event["t"] - at - (event["clock_s"] - clock))
        if paused > 0.01:  # evaluation directly follows the previous transition
            yield Bar(replica, "evaluating", at - began, paused, f"{name} evaluates")
        outcome = "step" if round_ is None else round_["outcome"]
        text = f"{name}, round {event['round']}: {outcome}"
        if round_ is not None:
            text += f", {round_['samples']} samples, group of {round_.get('group_size') or 1}"
        yield Bar(replica, outcome, at + paused - began, event["t"] - at - paused, text)
        at, clock = event["t"], event["clock_s"]


def _draw_loss(figure: Any, graph: Any, timeline: Timeline) -> None:
    styles: Mapping[str, dict[str, Any]] = {
        "training batches": {"mode": "lines", "line": {"color": "#bbbbbb", "width": 1}},
        "held out": {"mode": "lines+markers", "line": {"color": "#264653"}},
    }
    for name, points in loss_points(timeline).items():
        figure.add_trace(
            graph.Scatter(
                x=[x for x, _ in points], y=[y for _, y in points], name=name, **styles[name]
            ),
            row=1,
            col=1,
        )


def _draw_throughput(figure: Any, graph: Any, timeline: Timeline) -> None:
    assert timeline.span is not None
    step = (timeline.span[1] - timeline.span[0]) / WINDOWS
    figure.add_trace(
        graph.Scatter(
            x=[(at + 0.5) * step for at in range(WINDOWS)],
            y=throughput(timeline, WINDOWS),
            name="committed samples/s",
            line={"color": "#1d3557", "shape": "hvh"},
        ),
        row=2,
        col=1,
    )


def _draw_lanes(figure: Any, graph: Any, timeline: Timeline) -> None:
    bars = lanes(timeline)
    for activity, colour in COLOURS.items():
        matching = [bar for bar in bars if bar.activity == activity]
        if matching:
            figure.add_trace(
                graph.Bar(
                    y=[bar.replica for bar in matching],
                    base=[bar.begin for bar in matching],
                    x=[bar.seconds for bar in matching],
                    hovertext=[bar.text for bar in matching],
                    hoverinfo="text",
                    orientation="h",
                    name=activity,
                    marker={"color": colour, "line": {"color": "white", "width": 0.5}},
                ),
                row=3,
                col=1,
            )


def _draw_faults(figure: Any, timeline: Timeline) -> None:
    assert timeline.span is not None
    began, ended = timeline.span
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    for impact in impacts(timeline):
        begin = impact.fired - began
        # a fault without a heal ends when the swarm has recovered from it
        over = None if impact.recover_s is None else impact.fired + impact.recover_s
        end = impact.healed if impact.healed is not None else over
        shapes.append(_window(begin, (ended if end is None else min(end, ended)) - began))
        notes.append(_note(begin, 1.0, f"{impact.fault} {impact.kind}", _FAULT))
        seen = (("detected", impact.detect_s), ("throughput back", impact.recover_s))
        for word, seconds in seen:
            if seconds is not None:
                shapes.append(_line(begin + seconds, "dot" if word == "detected" else "dash"))
                height = _PLACES[word]
                notes.append(_note(begin + seconds, height, f"{impact.fault} {word}", _GREY))
    for item in rejoins(timeline):
        if item.seconds is not None:
            back = item.spawned - began + item.seconds
            shapes.append(_line(back, "dash"))
            notes.append(_note(back, _PLACES["back"], f"{item.peer} back", _GREY))
    figure.update_layout(shapes=shapes, annotations=notes)


def _window(begin: float, end: float) -> dict[str, Any]:
    """Return a shaded interval over all three panels."""
    place = {"xref": "x", "yref": "paper", "x0": begin, "x1": end, "y0": 0, "y1": 1}
    return {
        "type": "rect", **place, "fillcolor": _FAULT, "opacity": 0.12, "line": {"width": 0},
        "layer": "below",
    }  # fmt: skip


def _line(x: float, dash: str) -> dict[str, Any]:
    place = {"xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1}
    return {"type": "line", **place, "line": {"color": _GREY, "width": 1, "dash": dash}}


def _note(x: float, y: float, text: str, colour: str) -> dict[str, Any]:
    """Return a text to the right of a moment ``x`` [s], at a height ``y`` between 0 and 1."""
    return {
        "x": x, "xref": "x", "y": y, "yref": "paper", "text": text, "showarrow": False,
        "xanchor": "left", "yanchor": "top", "font": {"size": 10, "color": colour},
    }  # fmt: skip
