"""What was sent, and what came of the rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import ClassVar

from rayhive.events import GROUPED, Event
from rayhive.metrics.group import MetricGroup, Row, ratio
from rayhive.metrics.stats import estimate, percentile
from rayhive.metrics.timeline import Timeline

#: Outcomes of a gradient round or a state averaging of which a peer got nothing.
FAILED = frozenset({"local", "skipped", "failed"})


class Communication(MetricGroup):
    """Columns from the averaging rounds.

    Payload is the content of the tensors as the codec wrote them, without protocol headers. A
    *complete* round is one in which N peers, as many as began, averaged in one group, at the first
    attempt.

    * ``payload_bytes_per_round`` [B]: gradient payload sent per peer and complete round, the sum
      over both / their number. None without a complete round.
    * ``payload_bytes_per_round_predicted`` [B]: the same from shapes and settings alone, 2(N-1)/N
      of what one peer contributes; the mean of what the peers predicted before training.
    * ``state_bytes_per_round`` [B]: payload of state averaging / (peers x rounds), all rounds
      counted, also those without a state averaging.
    * ``wire_bytes_per_round`` [B]: what the nodes' interfaces for peers sent from the barrier to
      the end of training, all of it, headers and heartbeat included / (peers x rounds). None where
      no testbed counts it, or a node was gone in between.
    * ``payload_bytes_per_sample`` [B]: gradient and state payload of all peers / committed
      samples.
    * ``compression_ratio`` [x]: what a peer would send per round if nothing were compressed,
      gradients and state, / (``payload_bytes_per_round`` + ``state_bytes_per_round``). A state
      averaging in a group of g peers counts as 2(g-1)/g of the dense float32 bytes of all that it
      averages: parameters, optimizer statistics and extra tensors. None where nothing was sent.
    * ``gradient_compression_ratio`` [x]: 2(N-1)/N of the dense float32 gradients' bytes /
      ``payload_bytes_per_round``. None where nothing was sent.
    * ``averaging_p50_s``, ``averaging_p95_s`` [s]: percentiles of the time that a gradient
      all-reduce took, of all peers and all rounds with a group together, each peer's first left
      out as in ``round_p50_s``.
    * ``rounds``: distinct rounds that at least one peer applied.
    * ``rounds_failed``: rounds in which the gradient averaging of a peer failed, so that it fell
      back to its own or skipped, or in which its state averaging failed.
    * ``rounds_partial``: rounds in which a peer received only some of the averaged parts, of
      gradients or of state.

    Of a replicate only:

    * ``rounds_complete``: the number of complete rounds.
    * ``payload_matches``: whether the swarm sent exactly what was predicted in every complete
      round. None without a complete round, or where the configuration's size depends on data.
    """

    columns: ClassVar[tuple[str, ...]] = (
        "payload_bytes_per_round",
        "payload_bytes_per_round_predicted",
        "state_bytes_per_round",
        "wire_bytes_per_round",
        "payload_bytes_per_sample",
        "compression_ratio",
        "gradient_compression_ratio",
        "averaging_p50_s",
        "averaging_p95_s",
        "rounds",
        "rounds_failed",
        "rounds_partial",
    )
    replicate_columns: ClassVar[tuple[str, ...]] = ("rounds_complete", "payload_matches")

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        peers = timeline.spec.swarm.peers
        gradients, states = timeline.of("round"), timeline.of("state_round")
        sent = [_sent(events) for events in timeline.complete_rounds.values()]
        measured = ratio(sum(sent), len(sent) * peers)  # one division, of whole numbers: exact
        dense = _allreduced(_mean_told(timeline, "dense_payload_bytes"), peers)
        steps = {(e["peer"], e["round"]) for e in (*gradients, *timeline.of("transition"))}
        averaging = _averaging_seconds(timeline)
        state, dense_state = (ratio(x, len(steps)) for x in (_sent(states), _dense_state(timeline)))
        if timeline.spec.swarm.use_local_updates:
            all_dense, everything = dense_state, state
        else:
            all_dense, everything = _plus(dense, dense_state), _plus(measured, state)
        return {
            "payload_bytes_per_round": measured,
            "payload_bytes_per_round_predicted": _mean_told(
                timeline, "predicted_payload_bytes_per_round"
            ),
            "state_bytes_per_round": state,
            "wire_bytes_per_round": ratio(_on_the_wire(timeline), len(steps)),
            "payload_bytes_per_sample": ratio(
                _sent(gradients) + _sent(states), timeline.committed()
            ),
            "compression_ratio": ratio(all_dense, everything),
            "gradient_compression_ratio": ratio(dense, measured),
            "averaging_p50_s": percentile(averaging, 50),
            "averaging_p95_s": percentile(averaging, 95),
            **_rounds(timeline),
            "payload_matches": _matches(timeline),
        }


def _sent(events: Iterable[Event]) -> int:
    """Sum the payload; a round that came to nothing does not say what it sent."""
    return sum(event.get("sent_bytes") or 0 for event in events)


def _told(timeline: Timeline, field: str) -> list[float]:
    """Return what the peers said of themselves when they were ready."""
    ready = timeline.of("peer_ready")
    return [event[field] for event in ready if event.get(field) is not None]


def _mean_told(timeline: Timeline, field: str) -> float | None:
    found = estimate(_told(timeline, field))
    return None if found is None else found.mean


def _allreduced(payload: float | None, peers: int) -> float | None:
    """Return what each of N peers sends in an all-reduce of so many bytes: 2(N-1)/N of them."""
    return None if payload is None else 2 * (peers - 1) * payload / peers


def _dense_state(timeline: Timeline) -> float | None:
    """Return the bytes of all state averagings if nothing were compressed; None if not known."""
    grouped = [event for event in timeline.of("state_round") if event["outcome"] in GROUPED]
    told = _mean_told(timeline, "dense_state_bytes")
    if told is None:  # a log from before peers told it
        return float(_sent(grouped)) if timeline.spec.swarm.state_codec == "none" else None
    sizes = Counter(event.get("group_size") or 1 for event in grouped)
    # one division a size, of whole numbers where all members report: exact
    return math.fsum(2 * (size - 1) * count * told / size for size, count in sizes.items())


def _plus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _averaging_seconds(timeline: Timeline) -> list[float]:
    seconds: list[float] = []
    for events in timeline.by_peer("round").values():
        grouped = [event for event in events if (event.get("group_size") or 1) > 1]
        seconds += [e["averaging_s"] for e in grouped[1:] if e.get("averaging_s") is not None]
    return seconds


def _rounds(timeline: Timeline) -> Row:
    if timeline.first("training_started") is None:
        return dict.fromkeys(("rounds", "rounds_failed", "rounds_partial", "rounds_complete"))
    events = (*timeline.of("round"), *timeline.of("state_round"))
    return {
        "rounds": len(timeline.rounds),
        "rounds_failed": len({event["round"] for event in events if event["outcome"] in FAILED}),
        "rounds_partial": len({event["round"] for event in events if _partial(event)}),
        "rounds_complete": len(timeline.complete_rounds),
    }


def _partial(event: Event) -> bool:
    if event["outcome"] in FAILED:
        return False  # nothing was averaged: counted there
    fraction = event.get("fraction")
    return event["outcome"] == "partial" or (fraction is not None and fraction < 1)


def _matches(timeline: Timeline) -> bool | None:
    complete = timeline.complete_rounds.values()
    ready = {event["peer"]: event for event in timeline.of("peer_ready")}
    if not complete or not ready or not all(e.get("payload_exact") for e in ready.values()):
        return None
    # a peer's share need not be a whole number, the swarm's sum is one
    return all(_sent(events) == round(_predicted(ready, events)) for events in complete)


def _predicted(ready: Mapping[str, Event], events: Iterable[Event]) -> float:
    told = [ready[event["peer"]] for event in events if event["peer"] in ready]
    return math.fsum(event.get("predicted_payload_bytes_per_round") or 0.0 for event in told)


def _on_the_wire(timeline: Timeline) -> int | None:
    counted = {event["when"]: event["nodes"] for event in timeline.of("link_counted")}
    start, end = counted.get("start"), counted.get("end")
    if not start or end is None or start.keys() != end.keys():  # a node came, or is gone
        return None
    return sum(int(end[node]["tx_bytes"]) - int(start[node]["tx_bytes"]) for node in start)
