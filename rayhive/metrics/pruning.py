"""Replicates that learn more slowly than others: the bounds, and the verdict on one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rayhive.events import Pruned
from rayhive.metrics.group import finite
from rayhive.metrics.groups.convergence import evaluation_points, reaches
from rayhive.metrics.stats import percentile
from rayhive.spec.pruning import Bar, EarlyStop, Pruner
from rayhive.timeline import Timeline


@dataclass(frozen=True)
class Curve:
    """Held-out metric of a finished replicate over its committed samples.

    Attributes:
        metric: Metric of the target.
        mode: Whether smaller (``min``) or larger (``max``) values are better.
        points: Committed samples and value, in the order of samples.
    """

    metric: str
    mode: Literal["min", "max"]
    points: tuple[tuple[int, float], ...]

    def at(self, samples: int) -> float | None:
        """Return the last value up to a number of samples; None before the first."""
        before = bisect_right(self.points, samples, key=lambda point: point[0])
        return self.points[before - 1][1] if before else None


def curve_of(timeline: Timeline) -> Curve | None:
    """Return the curve of a replicate; None without a target or without finite evaluations."""
    target = timeline.target
    if target is None:
        return None
    found = {}
    for _, point in evaluation_points(timeline):
        value = finite(point.values.get(target["metric"]))
        if value is not None:
            found[point.samples] = value
    return Curve(target["metric"], target["mode"], tuple(sorted(found.items()))) if found else None


def early_stop(pruner: Pruner, curves: Iterable[Curve]) -> EarlyStop | None:
    """Return the bounds of a replicate that begins now; None if too few others have finished.

    At the samples of each evaluation, the bar is a percentile of the last values of the others up
    to there: the median, or with ``percentile: p`` the value that p % of them are worse than. A
    replicate that ended early, because it reached the target, keeps its last value.

    Args:
        pruner: The rule.
        curves: Finished replicates of other configurations under the same scenario.
    """
    curves = list(curves)
    if len(curves) < pruner.least:
        return None
    metric, mode = curves[0].metric, curves[0].mode
    share = 100 - pruner.share if mode == "min" else pruner.share
    bars = []
    for samples in sorted({samples for curve in curves for samples, _ in curve.points}):
        values = [value for curve in curves if (value := curve.at(samples)) is not None]
        value = percentile(values, share)
        if value is not None and len(values) >= pruner.least:
            bars.append(Bar(samples=samples, value=value, replicates=len(values)))
    return EarlyStop(
        metric=metric,
        mode=mode,
        share=pruner.share,
        margin=pruner.margin,
        after=pruner.after,
        bars=tuple(bars),
    )


def verdict(timeline: Timeline, stop: EarlyStop, peers: Collection[str]) -> Pruned | None:
    """Return why a running replicate is to be stopped; None if it may go on.

    One that has reached its target goes on. An evaluation counts once each of ``peers`` has
    reported it. The replicate is stopped if the best value so far is worse than the last bar up to
    the samples of the latest evaluation, by more than ``margin`` of the bar.

    Args:
        timeline: The replicate so far.
        stop: Its bounds.
        peers: Peers that train.
    """
    points = [
        point
        for events, point in evaluation_points(timeline)
        if not any(event.final for event in events)
        and {event.peer for event in events} >= set(peers)
    ]
    values = [finite(point.values.get(stop.metric)) for point in points]
    found = [value for value in values if value is not None]
    if len(points) <= stop.after or not found or any(reaches(timeline, p) for p in points):
        return None
    samples = points[-1].samples
    bar = _bar(stop.bars, samples)
    if bar is None:
        return None
    sign = 1.0 if stop.mode == "min" else -1.0
    best = min(sign * value for value in found)
    if best <= sign * bar.value + stop.margin * abs(bar.value):
        return None
    return Pruned(
        metric=stop.metric,
        value=sign * best,
        bar=bar.value,
        samples=samples,
        round=points[-1].round,
        replicates=bar.replicates,
        share=stop.share,
        margin=stop.margin,
    )


def _bar(bars: Sequence[Bar], samples: int) -> Bar | None:
    before = bisect_right(bars, samples, key=lambda bar: bar.samples)
    return bars[before - 1] if before else None


def reason(pruned: Pruned) -> str:
    """Return the reason of an early end in words."""
    bound = "median" if pruned.share == 50 else f"bound that {pruned.share:g} % miss,"
    return (
        f"{pruned.metric} {pruned.value:.4g} at {pruned.samples} samples is worse than the {bound} "
        f"{pruned.bar:.4g} of {pruned.replicates} finished replicates, by more than "
        f"{100 * pruned.margin:g} %"
    )
