"""Communication: payload of the averaging rounds, and their outcomes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rayhive.columns import Column, Row, in_group
from rayhive.events import (
    APPLIED,
    GROUPED,
    LinkCounted,
    PeerReady,
    Round,
    StateRound,
    TrainingStarted,
    Transition,
)
from rayhive.metrics.folds import Reduced
from rayhive.metrics.group import (
    MetricGroup,
    averaged,
    maximized_factor,
    minimized,
    minimized_factor,
    ratio,
    total,
)
from rayhive.metrics.live_capacity import initial_trainers
from rayhive.metrics.stats import estimate, percentile
from rayhive.timeline import Timeline

#: Outcomes of a gradient round or a state averaging that gave a peer no average.
FAILED = frozenset({"local", "skipped", "failed"})
#: Columns that are not known of a baseline that counts no bytes and reports no averagings of state.
_OF_PAYLOAD = (
    "payload_bytes_per_round",
    "state_bytes_per_round",
    "payload_bytes_per_sample",
    "compression_ratio",
    "gradient_compression_ratio",
    "rounds_partial",
    "state_rounds",
)


class Communication(MetricGroup):
    """Columns from the averaging rounds.

    Payload is the content of the tensors as the codec wrote them, without protocol headers. A
    *complete* round is one in which N peers, as many as began, averaged in one group, or all of
    them in pairs, at the first attempt.

    * ``payload_bytes_per_round`` [B]: gradient payload sent per peer and complete round, the sum
      over both / their number. None without a complete round.
    * ``payload_bytes_per_round_predicted`` [B]: the same from shapes and settings alone, 2(N-G)/N
      of the contribution of one peer, for G groups of N peers in all; the mean of the peers'
      predictions before training.
    * ``state_bytes_per_round`` [B]: payload of state averaging / (peers x rounds), including
      rounds without a state averaging.
    * ``wire_bytes_per_round`` [B]: bytes sent by the nodes' interfaces for peers from the barrier
      to the end of training, headers and heartbeats included, / (peers x rounds). None if no
      testbed counts them, or the set of nodes changed in between.
    * ``payload_bytes_per_sample`` [B]: gradient and state payload of all peers / committed
      samples.
    * ``compression_ratio`` [×]: uncompressed bytes of gradients and state per peer and round /
      (``payload_bytes_per_round`` + ``state_bytes_per_round``). A state averaging in a group of g
      peers counts 2(g-1)/g of the dense float32 bytes of all that it averages: parameters,
      optimizer statistics and extra tensors. None if nothing was sent.
    * ``gradient_compression_ratio`` [×]: 2(N-G)/N of the dense float32 gradients' bytes /
      ``payload_bytes_per_round``. None if nothing was sent.
    * ``averaging_p50_s``, ``averaging_p95_s`` [s]: percentiles of the duration of a gradient
      all-reduce, over all peers and all rounds with a group, the first of each peer left out as in
      ``round_p50_s``.
    * ``rounds``: distinct rounds that at least one peer applied.
    * ``rounds_failed``: rounds in which the gradient averaging of a peer failed, so that it applied
      its own gradients or skipped the round, or in which its state averaging failed.
    * ``rounds_partial``: rounds in which a peer received only some of the averaged parts, of
      gradients or of state.
    * ``state_rounds``: distinct rounds after which parameters were averaged, at least in part.
    * ``rounds_complete``: number of complete rounds.
    * ``payload_matches``: whether the swarm sent exactly the predicted bytes in every complete
      round. None without a complete round, or if the size depends on the data.
    """

    columns = (
        *in_group(
            "communication",
            minimized(
                "payload_bytes_per_round",
                "Gradient payload sent per peer and round",
                "B",
                exact=True,
            ),
            averaged("payload_bytes_per_round_predicted", "The same from shapes alone", "B"),
            minimized(
                "state_bytes_per_round", "State-averaging payload sent per peer and round", "B"
            ),
            averaged("wire_bytes_per_round", "Bytes on the interface, counted by a testbed", "B"),
            minimized("payload_bytes_per_sample", "All payload per committed sample", "B"),
            maximized_factor(
                "compression_ratio", "All payload without compression / measured", "×"
            ),
            maximized_factor(
                "gradient_compression_ratio", "The same for gradients alone", "×", exact=True
            ),
            minimized_factor("averaging_p50_s", "Median duration of a gradient all-reduce", "s"),
            minimized_factor("averaging_p95_s", "95th percentile of the same", "s"),
            total("rounds", "Committed rounds"),
            total("rounds_failed", "Rounds in which a peer got no average"),
            total("rounds_partial", "Rounds in which some parts were not averaged"),
            total("state_rounds", "Rounds after which parameters were averaged"),
        ),
        total("rounds_complete", "Complete rounds"),
        Column(
            "payload_matches",
            "Whether every complete round sent exactly the predicted payload",
            type="flag",
            fold=Reduced(all),
        ),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        peers = initial_trainers(timeline)
        gradients, states = timeline.of(Round), timeline.of(StateRound)
        ready = timeline.of(PeerReady)
        complete = complete_rounds(timeline)
        sent = [_sent(events) for events in complete]
        measured = ratio(sum(sent), len(sent) * peers)  # exact: one division of whole numbers
        dense = _mean(event.dense_payload_bytes for event in ready)
        if dense is not None:  # of an all-reduce, from the payload of one peer
            dense = 2 * (peers - timeline.spec.configuration.groups(peers)) * dense / peers
        steps = {(event.peer, event.round) for event in gradients}
        steps |= {(event.peer, event.round) for event in timeline.of(Transition)}
        averaging = _averaging_seconds(timeline)
        state, dense_state = (ratio(x, len(steps)) for x in (_sent(states), _dense_state(timeline)))
        unknown = dict.fromkeys(_OF_PAYLOAD) if _uncounted(timeline) else {}
        return {
            "payload_bytes_per_round": measured,
            "payload_bytes_per_round_predicted": _mean(
                event.predicted_payload_bytes_per_round for event in ready
            ),
            "state_bytes_per_round": state,
            "wire_bytes_per_round": ratio(_on_the_wire(timeline), len(steps)),
            "payload_bytes_per_sample": ratio(
                _sent(gradients) + _sent(states), timeline.committed()
            ),
            "compression_ratio": ratio(_plus(dense, dense_state), _plus(measured, state)),
            "gradient_compression_ratio": ratio(dense, measured),
            "averaging_p50_s": percentile(averaging, 50),
            "averaging_p95_s": percentile(averaging, 95),
            **_rounds(timeline, complete),
            "payload_matches": _matches(timeline, complete),
            **unknown,
        }


def _uncounted(timeline: Timeline) -> bool:
    """Return whether a baseline averaged without counting its bytes, as hivemind does."""
    averaged = (event for event in timeline.averagings if event.outcome in GROUPED)
    of_baseline = timeline.spec.baseline is not None
    return of_baseline and any(event.sent_bytes is None for event in averaged)


def complete_rounds(timeline: Timeline) -> list[list[Round]]:
    """Return the gradient rounds that all initial trainers averaged together at the first attempt.

    In pairs each peer is in one of several groups: of two peers, or of three if one is left over.
    Of one peer, which has no groups, the applied rounds count.
    """
    peers = initial_trainers(timeline)
    group = timeline.spec.configuration.group_peers(peers)
    sizes = {group, group + peers % group}

    def is_whole(event: Round) -> bool:
        if peers == 1:
            return event.outcome in APPLIED
        return event.outcome == "averaged" and event.group_size in sizes and not event.retries

    return [
        events
        for events in timeline.by_round(Round).values()
        if len({event.peer for event in events}) == len(events) == peers
        and all(map(is_whole, events))
    ]


def _sent(events: Iterable[Round | StateRound]) -> int:
    """Return the payload [B]; a failed round without ``sent_bytes`` counts 0."""
    return sum(event.sent_bytes or 0 for event in events)


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    found = estimate([value for value in values if value is not None])
    return None if found is None else found.mean


def _dense_state(timeline: Timeline) -> float | None:
    """Return the uncompressed bytes of all state averagings; None if not known."""
    grouped = [event for event in timeline.of(StateRound) if event.outcome in GROUPED]
    dense = _mean(event.dense_state_bytes for event in timeline.of(PeerReady))
    if dense is None:  # a log of an earlier version, without the field
        return float(_sent(grouped)) if timeline.spec.configuration.state_codec == "none" else None
    sizes = Counter(event.group_size or 1 for event in grouped)
    # exact if all members report: one division of whole numbers for each size of group
    return math.fsum(2 * (size - 1) * count * dense / size for size, count in sizes.items())


def _plus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _averaging_seconds(timeline: Timeline) -> list[float]:
    seconds: list[float] = []
    for events in timeline.by_peer(Round).values():
        grouped = [event for event in events if (event.group_size or 1) > 1]
        seconds += [event.averaging_s for event in grouped[1:] if event.averaging_s is not None]
    return seconds


def _rounds(timeline: Timeline, complete: Sequence[Sequence[Round]]) -> Row:
    if timeline.first(TrainingStarted) is None:
        names = ("rounds", "rounds_failed", "rounds_partial", "state_rounds", "rounds_complete")
        return dict.fromkeys(names)
    events = timeline.averagings
    return {
        "rounds": len(timeline.rounds),
        "rounds_failed": len({event.round for event in events if event.outcome in FAILED}),
        "rounds_partial": len({event.round for event in events if _partial(event)}),
        "state_rounds": len({e.round for e in timeline.of(StateRound) if e.outcome in GROUPED}),
        "rounds_complete": len(complete),
    }


def _partial(event: Round | StateRound) -> bool:
    if event.outcome in FAILED:
        return False  # counted in rounds_failed
    return event.outcome == "partial" or (event.fraction is not None and event.fraction < 1)


def _matches(timeline: Timeline, complete: Sequence[Sequence[Round]]) -> bool | None:
    ready = {event.peer: event for event in timeline.of(PeerReady)}
    if not complete or not ready or not all(event.payload_exact for event in ready.values()):
        return None
    # the share of a peer need not be a whole number; the sum over the swarm is one
    return all(_sent(events) == round(_predicted(ready, events)) for events in complete)


def _predicted(ready: Mapping[str | None, PeerReady], events: Iterable[Round]) -> float:
    known = [ready[event.peer] for event in events if event.peer in ready]
    return math.fsum(event.predicted_payload_bytes_per_round or 0.0 for event in known)


def _on_the_wire(timeline: Timeline) -> int | None:
    counted = {event.when: event.nodes for event in timeline.of(LinkCounted)}
    start, end = counted.get("start"), counted.get("end")
    if not start or end is None or start.keys() != end.keys():  # the set of nodes changed
        return None
    return sum(end[node]["tx_bytes"] - start[node]["tx_bytes"] for node in start)
