"""Participation: the share of the live peers that took part in a round."""

from __future__ import annotations

from statistics import fmean

from rayhive.events import APPLIED, GROUPED, PeerFinished, Round
from rayhive.metrics.fault_impact import faults_in_effect
from rayhive.metrics.live_capacity import Capacity, Windows, fault_windows
from rayhive.metrics.survivor_progress import AWAY
from rayhive.timeline import Timeline


def participation(timeline: Timeline) -> float | None:
    """Return the share of the live peers that took part in a round, a mean over the rounds.

    A peer took part if its gradients were averaged with another peer's, or if it stepped alone
    and no other peer was live. A peer is live from the start of its training, so that one which
    joins counts before it has met the others, to its loss, departure, failure or end, less the
    time during which a fault had killed, stopped or cut it off. The moment of a round is that of
    its first report. None without rounds.
    """
    capacity = Capacity(timeline, from_start=True)
    windows = fault_windows(timeline, AWAY, faults=faults_in_effect(timeline))
    away = {peer: Windows(found) for peer, found in windows.items()}
    finished = {event.peer: event.t for event in timeline.of(PeerFinished)}
    shares = []
    for events in timeline.by_round(Round).values():
        moment = min(event.t for event in events)
        live = {event.peer for event in events} | {
            name
            for name in capacity.present(moment)
            if moment < finished.get(name, float("inf"))
            and not (name in away and away[name].contain(moment))
        }
        enough = GROUPED if len(live) > 1 else APPLIED
        took_part = {event.peer for event in events if event.outcome in enough}
        shares.append(len(took_part) / len(live))
    return fmean(shares) if shares else None
