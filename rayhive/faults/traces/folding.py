"""From a trace of many nodes to the few of a swarm: compressed in time, folded in number."""

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
        t_s: When, in the run [s].
        gone: Slots that go, before any comes.
        come: Slots that come.
        live: Slots that live afterwards.
    """

    t_s: float
    gone: int
    come: int
    live: int


def fold(
    trace: Trace,
    slots: int,
    start_s: float,
    length_s: float,
    compression: float,
    scale: Scale = "peak",
) -> Iterator[Level]:
    """Fold a window of a trace onto slots.

    With L live nodes, ``max(1, round(slots · L / base))`` slots live (halves up): the fraction of
    live nodes is kept as far as whole slots can, and somebody survives. In an instant in which
    nodes go and come, slots go down to what the nodes that stayed stand for, and come after that.

    Args:
        trace: The trace.
        slots: Peers or nodes that start together.
        start_s: Where the window begins [s of the trace].
        length_s: How long it is [s of the trace]; both ends belong to it.
        compression: Seconds of the trace in a second of the run.
        scale: What stands for all slots: the most nodes that lived in the window, or as many as
            lived when it began; then more slots than that may live.

    Yields:
        Every instant at which a slot goes or comes; the first, at 0 s, brings the slots to what
        the beginning of the window stands for.
    """
    end_s = start_s + length_s
    inside = [step for step in trace.steps if start_s < step.t_s <= end_s]
    first = trace.live_at(start_s)
    base = max([first, *(step.live for step in inside)]) if scale == "peak" else first
    if base == 0:
        return

    def slots_of(live: int) -> int:
        return max(1, (2 * slots * live + base) // (2 * base))

    live_nodes, live = first, slots_of(first)
    if live < slots:
        yield Level(0.0, slots - live, 0, live)
    for step in inside:
        low = min(live, slots_of(max(0, live_nodes - step.removed)))
        after = slots_of(step.live)
        low = min(low, after)
        if low < live or after > low:
            t_s = round((step.t_s - start_s) / compression, 3)
            yield Level(t_s, live - low, after - low, after)
        live_nodes, live = step.live, after
