"""Events of a replicate in words, for its timeline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from rayhive.events import Event
from rayhive.metrics.refusals import RefusedTensors, refusals
from rayhive.metrics.timeline import Timeline

#: Characters of a proof or a reason that are shown.
SHOWN = 90


def event_text(event: Event) -> str | None:
    """Return an event in words; None if timelines leave its kind out."""
    text = _TEXTS.get(event["kind"])
    return None if text is None else text(event)


def timeline_texts(timeline: Timeline) -> Iterator[tuple[float, str]]:
    """Yield the events of a timeline in words, with their Unix times [s], in any order.

    A refusal, which every member of the group reports, is included once. Refusals of one peer in
    consecutive rounds are one text.
    """
    for event in timeline.events:
        if event["kind"] != "rejected" and (text := event_text(event)) is not None:
            yield event["t"], text
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


def shortened(value: Any) -> str:
    """Return a field's value on one line of at most :data:`SHOWN` characters."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {shortened(item)}" for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _done(event: Event) -> str:
    """Return the actions of a heal, without the empty ones."""
    return shortened({key: item for key, item in (event.get("done") or {}).items() if item})


def _slip(event: Event) -> str:
    if event.get("slip_rounds") is not None:
        return f", {event['slip_rounds']} rounds late"
    return "" if event.get("slip_s") is None else f", {event['slip_s']:.2f} s late"


#: Reaction of a peer whose gradients could not be averaged.
_CHOICES = {"local": "applies its own gradients in", "skip": "skips"}

_TEXTS: dict[str, Any] = {
    "fault_fired": lambda e: (
        f"{e['fault']} {e['fault_kind']} on {', '.join(e['who'])} fires{_slip(e)}"
    ),
    "fault_verified": lambda e: (
        f"{e['fault']} {'verified' if e['ok'] else 'NOT VERIFIED'}: {shortened(e.get('proof'))}"
    ),
    "fault_healed": lambda e: f"{e['fault']} healed: {_done(e) or 'nothing left'}",
    "fault_failed": lambda e: f"{e['fault']} FAILED in {e['phase']}: {shortened(e['error'])}",
    "peer_spawned": lambda e: (
        f"{e['peer']} started" + (f" by {e['cause']}" if e.get("cause") else "")
    ),
    "peer_lost": lambda e: f"{e['peer']} lost: {shortened(e.get('reason'))}",
    "peer_failed": lambda e: f"{e['peer']} failed: {shortened(e.get('error'))}",
    "notice": lambda e: (
        f"{e['peer']} receives notice"
        + (f": {s:g} s" if math.isfinite(s := e.get("deadline_s") or math.inf) else "")
    ),
    "left": lambda e: (
        f"{e['peer']} leaves: {e['handed_over']} samples handed over, {e['lost']} lost"
    ),
    "rejected": lambda e: (
        f"{e['peer']} refuses the {e.get('tensors', 'gradients')} of {e['offender']} in round "
        f"{e['round']}: {e['reason']}"
    ),
    "sabotaged": lambda e: f"{e['peer']} corrupts round {e['round']}: {shortened(e['what'])}",
    "state_loaded": lambda e: (
        f"{e['peer']} loaded the state of round {e['round_of_state']} in {e['seconds']:.2f} s"
    ),
    "stepped_out": lambda e: f"{e['peer']} steps out after round {e['round']}",
    "stepped_in": lambda e: (
        f"{e['peer']} returns in round {e['round']} after {e['seconds']:.1f} s without a batch"
    ),
    "fallback": lambda e: (
        f"{e['peer']} {_CHOICES[e['choice']]} round {e['round']}: {shortened(e.get('reason'))}"
    ),
}
