"""Metrics of running replicates and sweeps for Prometheus, through Ray's.

Ray adds ``ray_`` to the names, and serves them at the metrics port of each node.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rayhive.events import (
    Event,
    FaultFired,
    PeerFailed,
    PeerFinished,
    PeerLost,
    Round,
    StateLoaded,
    StateRound,
)
from rayhive.spec.replicate import ReplicateSpec

#: Variable with the port at which an embedded Ray serves its metrics; without it, it has none.
PORT = "RAYHIVE_METRICS_PORT"
#: Interval at which gauges are set again; Ray reports them every 10 s [s].
REPEAT_S = 4.0
#: Labels of the metrics of a replicate.
OF_REPLICATE = ("study", "configuration", "scenario")
#: Counters of a replicate: name -> meaning, and labels besides those of the replicate.
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "rounds": ("Rounds that a peer reported, by outcome", ("peer", "outcome")),
    "samples": ("Samples that a peer put into rounds", ("peer",)),
    "sent_bytes": ("Payload that a peer sent in averagings [bytes]", ("peer",)),
    "received_bytes": ("Payload that a peer received in averagings [bytes]", ("peer",)),
    "state_bytes": ("State that a peer downloaded from other peers [bytes]", ("peer",)),
    "failures": ("Peers that failed or were lost", ("peer",)),
    "faults": ("Faults that were injected", ("kind",)),
}
#: Gauges of a replicate, likewise.
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "samples_per_second": ("Samples of a peer per second of its training", ("peer",)),
    "live_peers": ("Peers that a peer knew to be alive in its last round", ("peer",)),
}
#: Gauges of a sweep, likewise.
OF_SWEEP: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "replicates": ("Replicates of a sweep that have ended, by state", ("state",)),
    "replicates_left": ("Replicates of a sweep that have not ended", ()),
}


class ReplicateMetrics:
    """Metrics of one replicate, updated from its events. Does nothing without Ray.

    Args:
        spec: The replicate.
    """

    def __init__(self, spec: ReplicateSpec) -> None:
        values = (spec.study, spec.label, spec.scenario)
        self._labels = dict(zip(OF_REPLICATE, values, strict=True))
        self._peers: set[str] = set()

    def heard(self, event: Event, samples_per_s: float | None = None) -> None:
        """Take an event of a peer or of the supervisor.

        Args:
            event: The event.
            samples_per_s: Rate of the event's peer, if it is known.
        """
        peer = event.peer or ""
        match event:
            case Round():
                self._peers.add(peer)
                self._add("rounds", 1, peer=peer, outcome=event.outcome)
                self._add("samples", event.samples, peer=peer)
                self._set("samples_per_second", samples_per_s, peer=peer)
                self._set("live_peers", event.live_peers, peer=peer)
            case StateLoaded():
                self._add("state_bytes", event.received_bytes or 0, peer=peer)
            case PeerFailed() | PeerLost():
                self._add("failures", 1, peer=peer)
                self._end(peer)
            case PeerFinished():
                self._end(peer)
            case FaultFired():
                self._add("faults", 1, kind=event.fault_kind)
        if isinstance(event, (Round, StateRound)):
            self._add("sent_bytes", event.sent_bytes or 0, peer=peer)
            self._add("received_bytes", event.received_bytes or 0, peer=peer)

    def end(self) -> None:
        """End the gauges of all peers: the process outlives the replicate."""
        for peer in sorted(self._peers):
            self._end(peer)

    def _end(self, peer: str) -> None:
        """Set the gauges of a peer to 0, for the last time."""
        for name in GAUGES if peer in self._peers else ():
            self._set(name, 0.0, last=True, peer=peer)
        self._peers.discard(peer)

    def _add(self, name: str, value: float, **labels: str) -> None:
        if value > 0 and _connected():
            _metric("Counter", name, *COUNTERS[name]).inc(value, plain_labels(self._labels, labels))

    def _set(self, name: str, value: float | None, *, last: bool = False, **labels: str) -> None:
        if value is not None and _connected():
            gauge = _metric("Gauge", name, *GAUGES[name])
            _GAUGES.set(gauge, value, plain_labels(self._labels, labels), last)


class SweepMetrics:
    """Metrics of a sweep. Does nothing without Ray.

    Args:
        study: Name of the study.
        replicates: Replicates of the sweep.
    """

    def __init__(self, study: str, replicates: int) -> None:
        self._study, self._left = study, replicates
        self._ended: Counter[str] = Counter()

    def ended(self, state: str) -> None:
        """Count a replicate that has ended in a state."""
        self._ended[state] += 1
        self._left -= 1
        if _connected():
            self._set("replicates", self._ended[state], state=state)
            self._set("replicates_left", max(self._left, 0))

    def _set(self, name: str, value: float, **labels: str) -> None:
        about, keys = OF_SWEEP[name]
        gauge = _metric("Gauge", name, about, keys, ("study",))
        _GAUGES.set(gauge, value, plain_labels({"study": self._study}, labels))


@dataclass
class _Gauges:
    """Last values of this process's gauges, which a thread sets again while Ray is connected.

    Ray stops serving a gauge that has not been set for about half a minute.
    """

    _values: dict[tuple[Any, Any], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    def set(self, gauge: Any, value: float, labels: Mapping[str, str], last: bool = False) -> None:
        """Set a gauge for some labels, from now on or for the last time."""
        key = gauge, tuple(labels.items())
        with self._lock:
            gauge.set(value, dict(labels))
            if last:
                self._values.pop(key, None)
                return
            self._values[key] = value
            if self._thread is None:
                self._thread = threading.Thread(target=self._repeat, daemon=True, name="gauges")
                self._thread.start()

    def _repeat(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(REPEAT_S)
            with self._lock:
                if not _connected():
                    self._values, self._thread = {}, None
                    return
                with suppress(Exception):  # Ray was left meanwhile
                    for (gauge, labels), value in self._values.items():
                        gauge.set(value, dict(labels))


_GAUGES = _Gauges()


def plain_labels(*labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels in ASCII, as Ray requires; the names of configurations have other signs."""
    merged = {name: value for each in labels for name, value in each.items()}
    return {
        name: value.replace("≥", ">=").encode("ascii", "replace").decode()
        for name, value in merged.items()
    }


def _connected() -> bool:
    """Return whether this process is connected to a Ray cluster."""
    if "ray" not in sys.modules:
        return False
    import ray

    return bool(ray.is_initialized())


@lru_cache
def _metric(
    kind: str,
    name: str,
    about: str,
    labels: tuple[str, ...],
    common: tuple[str, ...] = OF_REPLICATE,
) -> Any:
    """Return a metric of Ray, created once in a process."""
    from ray.util import metrics

    return getattr(metrics, kind)(f"rayhive_{name}", about, (*common, *labels))
