"""Badput: the wall time of the peers by class."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import groupby, zip_longest
from typing import ClassVar

from rayhive.columns import Column, Row, in_group
from rayhive.metrics.folds import Mean
from rayhive.metrics.group import MetricGroup
from rayhive.metrics.incarnations import Incarnation
from rayhive.metrics.live_capacity import Window, fault_windows
from rayhive.metrics.round_time import incarnation_time
from rayhive.metrics.timeline import Timeline


def _seconds(name: str, about: str) -> Column:
    return Column(name, about, "s", fold=Mean())


class Badput(MetricGroup):
    """Columns of the replicas' wall time; every second belongs to exactly one class.

    The time of a replica runs from the start of training (if it joined later, from its first
    spawn) to the end of training, including the time in which it has no process. ``peer_seconds``
    [s] is the sum over the replicas: wall time x peers. The other columns add up to it, which is
    asserted. All are in seconds, summed over the replicas. Durations within a round are taken from
    its events.

    * ``productive_s``: computing gradients that entered an applied round (or that were pending
      when training ended), and stepping the optimizer.
    * ``badput_matchmaking_s``: waiting for a group, of gradients and of parameters.
    * ``badput_averaging_s``: all-reduces that the training thread waited for. With delays, only
      the wait for results that were not ready in time.
    * ``badput_state_transfer_s``: loading the state from other peers.
    * ``badput_retry_s``: failed averaging attempts, and computing samples that were lost with a
      skipped round, a loaded state or the death of the peer.
    * ``badput_stalled_s``: stopped by a ``pause``; waiting at the barrier, for other peers to
      finish, or for a group that no other peer joined.
    * ``badput_down_s``: no process for the replica: from the loss, failure or departure of an
      incarnation until the next one began to train, less that one's state transfer.
    * ``evaluation_s``: evaluating on the held-out split and fingerprinting the weights: wall time
      that the training clock leaves out.
    """

    columns: ClassVar[tuple[Column, ...]] = in_group(
        "time",
        _seconds("peer_seconds", "Wall time x peers, the sum of the columns below"),
        _seconds("productive_s", "Computing committed samples"),
        _seconds("badput_matchmaking_s", "Waiting for a group"),
        _seconds("badput_averaging_s", "Waiting for an all-reduce"),
        _seconds("badput_state_transfer_s", "Loading the state from other peers"),
        _seconds("badput_retry_s", "Failed attempts and lost computation"),
        _seconds("badput_stalled_s", "Stopped, or waiting for other peers"),
        _seconds("badput_down_s", "No process for the replica"),
        _seconds("evaluation_s", "Evaluating, outside the training clock"),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        total_name, *classes = self.names("replicate")
        if timeline.span is None:
            return dict.fromkeys((total_name, *classes))
        spent, total = time_spent(timeline)
        return {total_name: total, **{name: spent[name] for name in classes}}


def time_spent(timeline: Timeline) -> tuple[dict[str, float], float]:
    """Return the seconds of each class, and the wall time of all replicas [s].

    Raises:
        AssertionError: The classes do not add up to the wall time.
    """
    assert timeline.span is not None
    spent: dict[str, float] = defaultdict(float)
    total, stops = 0.0, fault_windows(timeline, ["stopped"])
    for _, group in groupby(timeline.incarnations.values(), key=lambda each: each.replica):
        incarnations = list(group)
        begin, end = _window(timeline, incarnations[0])
        total += end - begin
        for item, following in zip_longest(incarnations, incarnations[1:]):
            until = end if following is None else _when(following, begin, end)
            for name, seconds in incarnation_time(timeline, item, stops, (begin, until)).items():
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


def _when(incarnation: Incarnation, begin: float, end: float) -> float:
    """Return the first known Unix time of an incarnation [s], clamped to a window."""
    moments = (incarnation.spawned, incarnation.started, incarnation.ended)
    return min(max(next((at for at in moments if at is not None), end), begin), end)
