"""Invariant ``log_complete``: the event log is complete and in order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

from rayhive import events
from rayhive.invariants.base import Invariant
from rayhive.timeline import FINISHED, FaultWindow, Timeline

#: Tolerance of the order of events from two threads of a peer [s].
ORDER_S = 0.5
#: Time limit of a heal after it was due [s]; it may have to start a node.
HEAL_S = 60.0
#: Time after a fault within which a failure of the replicate may cut its proof off [s].
PROOF_S = 60.0
#: Events of a peer before it trains, in this order.
_BEGINNING = (events.DHTReady, events.PeerReady, events.TrainingStarted)
_TRAINING = (events.Round, events.Transition, events.StateRound, events.Weights, events.Evaluation)
_OF_FAULT = (events.FaultFired, events.FaultVerified, events.FaultHealed, events.FaultFailed)


class LogComplete(Invariant):
    """The log has begin and end of every peer, and proof and heal of every fault.

    * The log begins with ``replicate_started``. Nothing follows ``replicate_finished``.
    * A peer's events are in the order of its clock. ``dht_ready``, ``peer_ready`` and
      ``training_started`` precede the events of training, and no event follows ``peer_lost``. A
      peer that is asked to leave before it trains may omit the first three.
    * Every peer that trained finished, left, failed or was lost.
    * Every fault that fired is planned, fired once, and was verified or failed, unless the
      replicate failed, or reached its target, within :data:`PROOF_S` (60) seconds. It
      was healed, or the heal failed, if the heal was due and the proof done more than
      :data:`HEAL_S` (60) seconds before the end of training.
    * A fault that did not fire has no event but ``fault_failed``.
    """

    about = "The event log is complete and in order."

    def check(self, log: Timeline) -> list[str]:
        """Return the missing and the misplaced events."""
        wrong = list(self._frame(log))
        stops: dict[str, list[FaultWindow]] = defaultdict(list)
        for fault in log.faults:
            for name in fault.targets if fault.effect == "stopped" else ():
                stops[name].append(fault)
        for name in log.of_peers:
            self.checked += 1
            wrong += [f"{name}: {text}" for text in _incarnation(log, name, stops.get(name, ()))]
        wrong += [f"{fault}: {text}" for fault, text in self._faults(log)]
        return wrong

    def _frame(self, log: Timeline) -> Iterator[str]:
        self.checked += 1
        begins = [isinstance(event, events.ReplicateStarted) for event in log.events]
        if begins[:1] != [True] or any(begins[1:]):
            yield "does not begin with its one replicate_started"
        if any(events.of_kind(log.events[:-1], events.ReplicateFinished)):
            yield "goes on after replicate_finished"

    def _faults(self, log: Timeline) -> Iterator[tuple[str, str]]:
        seen: dict[str, Counter[type[events.Event]]] = defaultdict(Counter)
        for event in log.events:
            if isinstance(event, _OF_FAULT):
                seen[event.fault][type(event)] += 1
        planned = {} if log.spec.plan is None else {f.id: f for f in log.spec.plan.faults}
        fired = {fault.fault: fault.fired for fault in log.faults}
        proofs = events.of_kind(log.events, events.FaultVerified)
        proved = {event.fault: event.t for event in proofs}
        cuts = any(
            event.state not in FINISHED or event.stop_reason == "target"
            for event in log.of(events.OutcomeFound)
        )
        for fault, counts in seen.items():
            self.checked += 1
            if fault not in planned:
                yield fault, "is in no plan"
                continue
            failed = counts[events.FaultFailed] > 0
            if counts[events.FaultFired] > 1:
                yield fault, f"fired {counts[events.FaultFired]} times"
            if not counts[events.FaultFired]:
                if counts[events.FaultVerified] or counts[events.FaultHealed]:
                    yield fault, "has a proof or a heal and never fired"
                continue
            cut_off = cuts and log.end < fired[fault] + PROOF_S
            if not counts[events.FaultVerified] and not failed and not cut_off:
                yield fault, "was neither verified nor failed"
            after = planned[fault].heal_after_s
            if after is None or failed or counts[events.FaultHealed]:
                continue
            if max(fired[fault] + after, proved.get(fault, 0.0)) + HEAL_S < log.end:
                yield fault, f"was to be healed after {after:g} s and was not"


def _stopped_s(stops: Iterable[FaultWindow], since: float, until: float) -> float:
    """Return how long a peer was stopped by some faults around an interval [s].

    A thread that is stopped between making an event and sending it sends it that much later.
    """
    return sum(
        (fault.healed or until) - fault.fired
        for fault in stops
        if fault.fired <= until and (fault.healed is None or fault.healed >= since)
    )


def _incarnation(log: Timeline, name: str, stops: Collection[FaultWindow]) -> Iterator[str]:
    own = log.of_peers[name]
    latest, reached, last = 0.0, -1, len(_BEGINNING) - 1
    for event in own:
        if isinstance(event, (events.PeerSpawned, events.PeerLost)):
            continue  # from the supervisor, with its clock
        early = event.t < latest - ORDER_S
        if early and event.t + _stopped_s(stops, event.t, latest) < latest - ORDER_S:
            yield f"{event.kind} is {latest - event.t:.2f} s older than the event before it"
        latest = max(latest, event.t)
        if isinstance(event, _BEGINNING):
            stage = _BEGINNING.index(type(event))
            if stage <= reached:
                yield f"{event.kind} after {_BEGINNING[reached].model_fields['kind'].default}"
            reached = max(reached, stage)
        elif isinstance(event, _TRAINING) and reached < last:
            yield f"{event.kind} before training_started"
            reached = last  # reported once
    if reached == last and not log.of(events.PeerReady, name):
        yield "training_started without peer_ready"
    if any(events.of_kind(own[:-1], events.PeerLost)):
        yield f"{own[-1].kind} after peer_lost"
    # A late peer that has not begun when training ends is dismissed without an event.
    if log.of(events.TrainingStarted, name) and log.incarnations[name].end is None:
        yield "its end is missing"
