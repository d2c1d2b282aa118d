"""Events of a replicate in words, for its timeline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from rayhive import events
from rayhive.metrics.refusals import RefusedTensors, refusals
from rayhive.timeline import Timeline

#: Characters of a proof or a reason that are shown.
SHOWN = 90
#: Reaction of a peer whose gradients could not be averaged.
_CHOICES = {"local": "applies its own gradients in", "skip": "skips"}


def timeline_texts(timeline: Timeline) -> Iterator[tuple[float, str]]:
    """Yield the events of a timeline in words, with their Unix times [s], in any order.

    A refusal, which every member of the group reports, is included once. Refusals of one peer in
    consecutive rounds are one text.
    """
    for event in timeline.events:
        if not isinstance(event, events.Rejected) and (text := event_text(event)) is not None:
            yield event.t, text
    for item, text in _refusal_runs(timeline):
        yield item.t, text


def _refusal_runs(timeline: Timeline) -> Iterator[tuple[RefusedTensors, str]]:
    """Yield the first refusal of each run of consecutive rounds, and the run in words."""
    kinds: dict[tuple[str, str, str], list[RefusedTensors]] = defaultdict(list)
    for item in refusals(timeline.events):
        kinds[item.offender, item.tensors, item.reason].append(item)
    for (offender, tensors, reason), items in kinds.items():
        items.sort(key=lambda item: item.round)
        starts = [n for n, item in enumerate(items) if not n or item.round > items[n - 1].round + 1]
        for start, end in pairwise([*starts, len(items)]):
            run = items[start:end]
            first, last = run[0].round, run[-1].round
            when = f"round {first}" if first == last else f"rounds {first}-{last}"
            yield run[0], f"the {tensors} of {offender} are refused in {when}: {reason}"


def event_text(event: events.Event) -> str | None:
    """Return an event in words; None if timelines leave its kind out."""
    peer = event.peer
    match event:
        case events.FaultFired():
            targets = ", ".join(event.who or ())
            return f"{event.fault} {event.fault_kind} on {targets} fires{_slip(event)}"
        case events.FaultVerified():
            verdict = "verified" if event.ok else "NOT VERIFIED"
            return f"{event.fault} {verdict}: {shortened(event.proof)}"
        case events.FaultHealed():
            done = {key: item for key, item in (event.done or {}).items() if item}
            return f"{event.fault} healed: {shortened(done) or 'nothing left'}"
        case events.FaultFailed():
            return f"{event.fault} FAILED in {event.phase}: {shortened(event.error)}"
        case events.PeerSpawned():
            return f"{peer} started" + (f" by {event.cause}" if event.cause else "")
        case events.PeerLost():
            return f"{peer} lost: {shortened(event.reason)}"
        case events.PeerFailed():
            return f"{peer} failed: {shortened(event.error)}"
        case events.Notice():
            seconds = event.deadline_s or math.inf
            return f"{peer} receives notice" + (f": {seconds:g} s" if seconds < math.inf else "")
        case events.Left():
            return f"{peer} leaves: {event.handed_over} samples handed over, {event.lost} lost"
        case events.Rejected():
            tensors = event.tensors or "gradients"
            return (
                f"{peer} refuses the {tensors} of {event.offender} in round {event.round}: "
                f"{event.reason}"
            )
        case events.FaultActed():
            return f"{peer} corrupts round {event.round}: {shortened(event.what)}"
        case events.StateLoaded():
            return (
                f"{peer} loaded the state of round {event.round_of_state} in {event.seconds:.2f} s"
            )
        case events.SteppedOut():
            return f"{peer} steps out after round {event.round}"
        case events.SteppedIn():
            return (
                f"{peer} returns in round {event.round} after {event.seconds:.1f} s without a batch"
            )
        case events.Fallback():
            reason = shortened(event.reason)
            return f"{peer} {_CHOICES[event.choice]} round {event.round}: {reason}"
    return None


def _slip(event: events.FaultFired) -> str:
    if event.slip_rounds is not None:
        return f", {event.slip_rounds:g} rounds late"
    return "" if event.slip_s is None else f", {event.slip_s:.2f} s late"


def shortened(value: Any) -> str:
    """Return a field's value on one line of at most :data:`SHOWN` characters."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {shortened(item)}" for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
