"""Training clocks of peers that joined later, on the training clock of the swarm."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple


def clock_offsets(
    began_together: Iterable[str],
    joined: Iterable[tuple[float, str]],
    points: Mapping[str, Sequence[tuple[float, float]]],
    gone: Callable[[str], float | None],
    began: float,
) -> dict[str, float]:
    """Return for each peer that joined later the swarm's training clock at its start [s].

    That is the largest clock of the peers that train then. A clock stands still during evaluations,
    so between two events of a peer it is at most what the later one shows.

    Args:
        began_together: Peers whose own clock is that of the swarm.
        joined: Unix time of the start of each other peer, and its name.
        points: Unix time and own training clock [s] at the events of each peer, in order.
        gone: Returns when a peer left, failed or was lost [s, Unix time].
        began: When training began [s, Unix time].
    """
    offsets: dict[str, float] = {}
    known: list[_Peer] = []

    def add(name: str, offset: float, start: float) -> None:
        known.append(_Peer(offset, ((start, 0.0), *points.get(name, ())), gone(name)))

    for name in began_together:
        add(name, 0.0, began)
    for started, name in sorted(joined):
        best = (False, 0.0 if known else max(0.0, started - began))
        for other in known:
            clock = _clock_at(started, other.points, other.gone)
            if clock is not None:
                best = max(best, (other.gone is None or other.gone > started, other.offset + clock))
        offsets[name] = best[1]
        add(name, best[1], started)
    return offsets


class _Peer(NamedTuple):
    """A peer whose clock is known: its offset, its points from the start on, and its end."""

    offset: float
    points: Sequence[tuple[float, float]]
    gone: float | None


def _clock_at(
    moment: float, points: Sequence[tuple[float, float]], gone: float | None
) -> float | None:
    """Return a peer's own clock at a Unix time [s]; None before it has begun."""
    after = bisect_right(points, moment, key=lambda point: point[0])
    if not after:
        return None
    then, clock = points[after - 1]
    until = moment if gone is None else min(moment, max(gone, then))
    clock += max(0.0, until - then)
    return clock if after == len(points) else min(clock, points[after][1])
