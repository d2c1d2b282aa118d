"""Invariant ``log_complete``: the event log is complete and in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rayhive.events import Event
from rayhive.invariants.base import GONE, Invariant, RunLog
from rayhive.spec.replicate import ReplicateSpec

#: Tolerance of the order of events from two threads of a peer [s].
ORDER_S = 0.5
#: Time limit of a heal after it was due [s]; it may have to start a node.
HEAL_S = 60.0
#: Events about a peer from the supervisor, with its clock.
_OF_SUPERVISOR = frozenset({"peer_spawned", "peer_lost"})
#: Events of a peer before it trains, in this order.
_BEGINNING = ("dht_ready", "peer_ready", "training_started")
_TRAINING = frozenset({"round", "transition", "state_round", "weights", "evaluation"})


class LogComplete(Invariant):
    """The log has begin and end of every peer, and proof and heal of every fault.

    * The log begins with ``replicate_started``. Nothing follows ``replicate_finished``.
    * A peer's events are in the order of its clock. ``dht_ready``, ``peer_ready`` and
      ``training_started`` precede the events of training, and no event follows ``peer_lost``. A
      peer that is asked to leave before it trains may omit the first three.
    * Every peer that trained finished, left, failed or was lost.
    * Every fault that fired is planned, fired once, and was verified or failed. It was healed, or
      the heal failed, if the heal was due and the proof done more than :data:`HEAL_S` (60) seconds
      before the end of training.
    * A fault that did not fire has no event but ``fault_failed``.
    """

    about = "The event log is complete and in order."

    def check(self, spec: ReplicateSpec, events: Sequence[Event]) -> list[str]:
        """Return the missing and the misplaced events."""
        log = RunLog(spec, events)
        wrong = list(self._frame(log))
        for name in log.peers:
            self.checked += 1
            wrong += [f"{name}: {text}" for text in _incarnation(log, name)]
        wrong += [f"{fault}: {text}" for fault, text in self._faults(log)]
        return wrong

    def _frame(self, log: RunLog) -> Iterator[str]:
        self.checked += 1
        kinds = [event["kind"] for event in log.events]
        if kinds[:1] != ["replicate_started"] or kinds.count("replicate_started") > 1:
            yield "does not begin with its one replicate_started"
        if "replicate_finished" in kinds[:-1]:
            yield "goes on after replicate_finished"

    def _faults(self, log: RunLog) -> Iterator[tuple[str, str]]:
        said: dict[str, Counter[str]] = {}
        for event in log.events:
            if event["kind"].startswith("fault_"):
                said.setdefault(event["fault"], Counter())[event["kind"]] += 1
        planned = {} if log.spec.plan is None else {f.id: f for f in log.spec.plan.faults}
        fired = {fault.fault: fault.fired for fault in log.faults}
        proved = {e["fault"]: e["t"] for e in log.events if e["kind"] == "fault_verified"}
        for fault, kinds in said.items():
            self.checked += 1
            if fault not in planned:
                yield fault, "is in no plan"
                continue
            failed = kinds["fault_failed"] > 0
            if kinds["fault_fired"] > 1:
                yield fault, f"fired {kinds['fault_fired']} times"
            if not kinds["fault_fired"]:
                if kinds["fault_verified"] or kinds["fault_healed"]:
                    yield fault, "has a proof or a heal and never fired"
                continue
            if not kinds["fault_verified"] and not failed:
                yield fault, "was neither verified nor failed"
            after = planned[fault].heal_after_s
            if after is None or failed or kinds["fault_healed"]:
                continue
            if max(fired[fault] + after, proved.get(fault, 0.0)) + HEAL_S < log.end:
                yield fault, f"was to be healed after {after:g} s and was not"


def _stopped_s(log: RunLog, name: str, since: float, until: float) -> float:
    """Return how long a peer was stopped around an interval [s].

    A thread that is stopped between making an event and sending it sends it that much later.
    """
    stops = (
        (fault.healed or until) - fault.fired
        for fault in log.faults
        if fault.effect == "stopped"
        and name in fault.incarnations
        and fault.fired <= until
        and (fault.healed is None or fault.healed >= since)
    )
    return sum(stops)


def _incarnation(log: RunLog, name: str) -> Iterator[str]:
    events = log.peers[name]
    own = [event for event in events if event["kind"] not in _OF_SUPERVISOR]
    latest, place = 0.0, {kind: number for number, kind in enumerate(_BEGINNING)}
    reached = -1
    for event in own:
        kind = event["kind"]
        if event["t"] + _stopped_s(log, name, event["t"], latest) < latest - ORDER_S:
            yield f"{kind} is {latest - event['t']:.2f} s older than the event before it"
        latest = max(latest, event["t"])
        if kind in place:
            if place[kind] <= reached:
                yield f"{kind} after {_BEGINNING[reached]}"
            reached = max(reached, place[kind])
        elif kind in _TRAINING and reached < len(_BEGINNING) - 1:
            yield f"{kind} before training_started"
            reached = len(_BEGINNING) - 1  # reported once
    if reached == len(_BEGINNING) - 1 and not log.of(name, "peer_ready"):
        yield "training_started without peer_ready"
    kinds = [event["kind"] for event in events]
    if "peer_lost" in kinds[:-1]:
        yield f"{kinds[-1]} after peer_lost"
    # a late peer that has not begun when training ends is dismissed without an event
    if "training_started" in kinds and not {"peer_finished", *GONE} & set(kinds):
        yield "its end is missing"
