"""Where the time of the peers went."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import groupby, zip_longest
from typing import ClassVar

from rayhive.columns import TIME
from rayhive.metrics.group import MetricGroup, Row
from rayhive.metrics.incarnations import Incarnation
from rayhive.metrics.live_capacity import Window, fault_windows
from rayhive.metrics.round_time import life_time
from rayhive.metrics.timeline import Timeline


class Badput(MetricGroup):
    """Columns of the wall time of all slots, which every second belongs to exactly one of.

    A slot's time runs from the start of training (of one that joins, from when it was first
    spawned) to its end, whether it has a peer or not; ``peer_seconds`` [s] is the sum over the
    slots: wall time x peers. The others add up to it, which is asserted. All in seconds, summed
    over the slots; times in a round are those that its events tell.

    * ``productive_s``: computing gradients that entered a round which was applied (or that were on
      their way into one when training ended), and stepping the optimizer.
    * ``badput_matchmaking_s``: waiting for a group, of gradients and of parameters.
    * ``badput_averaging_s``: the all-reduces that the training thread waited for. With delays, only
      the wait for what was not ready in time.
    * ``badput_state_transfer_s``: loading the state from other peers.
    * ``badput_retry_s``: averaging attempts that came to nothing, and computing what was thrown
      away: by a skipped round, by a state that was loaded, by the death of the peer.
    * ``badput_stalled_s``: stopped by a ``pause``, waiting at the barrier, for the others to end or
      for a group that nobody came to.
    * ``badput_down_s``: no peer in the slot: from its loss, failure or goodbye until the next one
      began to train, less the time that that one spent loading the state.
    * ``evaluation_s``: evaluating on the held-out split and fingerprinting the weights: wall time
      that the training clock leaves out.
    """

    columns: ClassVar[tuple[str, ...]] = tuple(column.name for column in TIME)

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        if timeline.span is None:
            return dict.fromkeys(self.columns)
        spent, total = time_spent(timeline)
        return {"peer_seconds": total, **{name: spent[name] for name in self.columns[1:]}}


def time_spent(timeline: Timeline) -> tuple[dict[str, float], float]:
    """Return the seconds of each class, and those of all slots together.

    Raises:
        AssertionError: They don't add up.
    """
    assert timeline.span is not None
    spent: dict[str, float] = defaultdict(float)
    total, stops = 0.0, fault_windows(timeline, ["stopped"])
    for _, group in groupby(timeline.lives.values(), key=lambda life: life.slot):
        lives = list(group)
        begin, end = _window(timeline, lives[0])
        total += end - begin
        for life, following in zip_longest(lives, lives[1:]):
            until = end if following is None else _when(following, begin, end)
            for name, seconds in life_time(timeline, life, stops, (begin, until)).items():
                spent[name] += seconds
            begin = until
    added = math.fsum(spent.values())
    assert math.isclose(added, total, rel_tol=1e-9, abs_tol=1e-6), f"{added} s of {total} s"
    return spent, total


def _window(timeline: Timeline, first: Incarnation) -> Window:
    assert timeline.span is not None
    begin, end = timeline.span
    late = first.joined(timeline.spec.swarm.peers)
    return (_when(first, begin, end) if late else begin), end


def _when(life: Incarnation, begin: float, end: float) -> float:
    """Return when a life was spawned, or was first known to be there, within bounds."""
    known = (moment for moment in (life.spawned, life.started, life.ended) if moment is not None)
    return min(max(next(known, end), begin), end)
