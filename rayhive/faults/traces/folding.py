"""Folding of a trace of many nodes onto the few of a swarm, with compressed time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rayhive.faults.traces.trace import Trace

Scale = Literal["peak", "start"]


@dataclass(frozen=True)
class Level:
    """One instant of a folded trace.

    Attributes:
        t_s: Time in the run [s].
        gone: Number of replicas that go, before any comes.
        come: Number of replicas that come.
        live: Number of live replicas afterwards.
    """

    t_s: float
    gone: int
    come: int
    live: int


def fold(
    trace: Trace,
    replicas: int,
    start_s: float,
    length_s: float,
    compression: float,
    scale: Scale = "peak",
) -> Iterator[Level]:
    """Fold a window of a trace onto replicas.

    L live nodes give ``max(1, round(replicas · L / base))`` live replicas (halves up): the fraction
    of live nodes is kept as far as integers allow, and one replica always lives. At an instant with
    removals and additions, replicas first go down to the number for the nodes that stayed.

    Args:
        trace: The trace.
        replicas: Peers or nodes that start together.
        start_s: Begin of the window [s of the trace].
        length_s: Length of the window [s of the trace]; both ends belong to it.
        compression: Seconds of the trace in one second of the run.
        scale: The ``base``: ``peak`` is the most live nodes in the window, ``start`` the number at
            its begin; with ``start`` the count may exceed ``replicas``.

    Yields:
        Every instant at which the number changes; the first, at 0 s, sets the number for the begin
        of the window.
    """
    end_s = start_s + length_s
    inside = [step for step in trace.steps if start_s < step.t_s <= end_s]
    first = trace.live_at(start_s)
    base = max([first, *(step.live for step in inside)]) if scale == "peak" else first
    if base == 0:
        return

    def replicas_of(live: int) -> int:
        return max(1, (2 * replicas * live + base) // (2 * base))

    live_nodes, live = first, replicas_of(first)
    if live < replicas:
        yield Level(0.0, replicas - live, 0, live)
    for step in inside:
        low = min(live, replicas_of(max(0, live_nodes - step.removed)))
        after = replicas_of(step.live)
        low = min(low, after)
        if low < live or after > low:
            t_s = round((step.t_s - start_s) / compression, 3)
            yield Level(t_s, live - low, after - low, after)
        live_nodes, live = step.live, after
