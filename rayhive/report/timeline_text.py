"""One replicate as a text: what broke, how that is known, how fast it healed, what still holds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rayhive.events import Event
from rayhive.invariants import check_all
from rayhive.metrics.badput import time_spent
from rayhive.metrics.fault_impact import Impact, Rejoin, impacts, rejoins, swarm_rounds
from rayhive.metrics.group import ratio
from rayhive.metrics.lost_samples import samples_lost
from rayhive.metrics.refusals import RefusedTensors, counts_text, refusals
from rayhive.metrics.stats import Time
from rayhive.metrics.timeline import UNCOUNTED, Timeline, read_timelines
from rayhive.report.numbers import number_text

#: Characters of a proof or a reason that are shown.
SHOWN = 90
_BARS = " ▁▂▃▄▅▆▇█"


def timeline_lines(folder: str | Path, width: int = 100) -> list[str]:
    """Return the story of a replicate, for a terminal.

    Args:
        folder: The replicate's folder; of several attempts in it, the last that came to its end.
        width: Characters of the throughput line.

    Raises:
        RayhiveError: The events or the spec cannot be read.
    """
    timeline = last_timeline(folder)
    lines = [_title(timeline), ""]
    if timeline.span is None:
        return [*lines, "It never trained."]
    lines += _story(timeline)
    parts = (_throughput(timeline, width), _faults(timeline), _refused(timeline), _time(timeline))
    for part in parts:
        told = list(part)
        lines += ["", *told] if told else []
    return [*lines, "", *invariant_lines(timeline)]


def last_timeline(folder: str | Path) -> Timeline:
    """Return the last attempt in a replicate's folder that finished, or else the last."""
    return max(
        enumerate(read_timelines(folder)), key=lambda item: (item[1].state not in UNCOUNTED, item)
    )[1]


def _title(timeline: Timeline) -> str:
    spec = timeline.spec
    seconds = "" if timeline.span is None else f" after {timeline.span[1] - timeline.span[0]:.1f} s"
    return (
        f"{spec.scenario}, seed {spec.seed}, {spec.configuration.label}, {spec.swarm.peers} peers: "
        f"{timeline.state}{seconds} ({timeline.stop_reason})"
    )


# -- the story ---------------------------------------------------------------------------------


def event_text(event: Event) -> str | None:
    """Return an event in words if it belongs to the story of what broke, else None."""
    teller = _TELLERS.get(event["kind"])
    return None if teller is None else teller(event)


def _story(timeline: Timeline) -> Iterator[str]:
    began = timeline.span[0] if timeline.span is not None else 0.0
    told = [
        (event["t"] - began, event_text(event))
        for event in timeline.events
        if event["kind"] != "rejected"
    ]
    told += [(item.t - began, text) for item, text in _refusal_runs(timeline)]
    for seconds, text in sorted((s, text) for s, text in told if text is not None and s >= 0):
        yield f"{seconds:8.2f} s  {text}"


def _refusal_runs(timeline: Timeline) -> Iterator[tuple[RefusedTensors, str]]:
    """Yield refusals in words: each once, those of one peer in consecutive rounds together."""
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


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _done(event: Event) -> str:
    """Return what a heal did; that nothing failed need not be said."""
    return _short({key: item for key, item in (event.get("done") or {}).items() if item})


def _slip(event: Event) -> str:
    if event.get("slip_rounds") is not None:
        return f", {event['slip_rounds']} rounds late"
    return "" if event.get("slip_s") is None else f", {event['slip_s']:.2f} s late"


#: What a peer does whose gradients could not be averaged.
_CHOICES = {"local": "applies its own gradients in", "skip": "skips"}

_TELLERS: dict[str, Any] = {
    "fault_fired": lambda e: (
        f"{e['fault']} {e['fault_kind']} on {', '.join(e['who'])} fires{_slip(e)}"
    ),
    "fault_verified": lambda e: (
        f"{e['fault']} {'verified' if e['ok'] else 'NOT VERIFIED'}: {_short(e.get('proof'))}"
    ),
    "fault_healed": lambda e: f"{e['fault']} healed: {_done(e) or 'nothing left'}",
    "fault_failed": lambda e: f"{e['fault']} FAILED in {e['phase']}: {_short(e['error'])}",
    "peer_spawned": lambda e: (
        f"{e['peer']} started" + (f" by {e['cause']}" if e.get("cause") else "")
    ),
    "peer_lost": lambda e: f"{e['peer']} lost: {_short(e.get('reason'))}",
    "peer_failed": lambda e: f"{e['peer']} failed: {_short(e.get('error'))}",
    "notice": lambda e: (
        f"{e['peer']} has notice"
        + (f": {s:g} s" if math.isfinite(s := e.get("deadline_s") or math.inf) else "")
    ),
    "left": lambda e: (
        f"{e['peer']} says goodbye: {e['handed_over']} samples handed over, {e['lost']} lost"
    ),
    "rejected": lambda e: (
        f"{e['peer']} refuses the {e.get('tensors', 'gradients')} of {e['offender']} in round "
        f"{e['round']}: {e['reason']}"
    ),
    "sabotaged": lambda e: f"{e['peer']} spoils round {e['round']}: {_short(e['what'])}",
    "state_loaded": lambda e: (
        f"{e['peer']} loaded the state of round {e['round_of_state']} in {e['seconds']:.2f} s"
    ),
    "stepped_out": lambda e: f"{e['peer']} steps out after round {e['round']}",
    "stepped_in": lambda e: (
        f"{e['peer']} is back in round {e['round']} after {e['seconds']:.1f} s without a batch"
    ),
    "fallback": lambda e: (
        f"{e['peer']} {_CHOICES[e['choice']]} round {e['round']}: {_short(e.get('reason'))}"
    ),
}


def throughput(timeline: Timeline, windows: int) -> list[float]:
    """Return committed samples per second [1/s] in equal windows of the training.

    A round's samples count evenly from the end of the round before to its own.
    """
    assert timeline.span is not None
    begin, end = timeline.span
    step = (end - begin) / windows or 1.0
    rates, before = [0.0] * windows, begin
    for round_ in swarm_rounds(timeline):
        length = round_.moment - before
        for at in range(windows):
            low, high = begin + at * step, begin + (at + 1) * step
            shared = min(high, round_.moment) - max(low, before)
            if shared > 0:
                rates[at] += round_.samples * shared / length / step
        before = round_.moment
    return rates


def _throughput(timeline: Timeline, width: int) -> Iterator[str]:
    """Draw samples per second over time, with a mark where a fault fired."""
    assert timeline.span is not None
    begin, end = timeline.span
    columns = max(10, width - 14)
    rates, marks = throughput(timeline, columns), [" "] * columns
    for fired in timeline.of("fault_fired"):
        at = int(columns * (fired["t"] - begin) / (end - begin or 1.0))
        marks[min(max(at, 0), columns - 1)] = "!"
    top = max(rates) or 1.0
    yield "samples/s     " + "".join(_BARS[round(8 * rate / top)] for rate in rates)
    yield f"up to {number_text(round(top, 1)):>7} {''.join(marks)}".rstrip()


# -- what it cost ------------------------------------------------------------------------------


def _faults(timeline: Timeline) -> Iterator[str]:
    faults = impacts(timeline)
    for impact in faults:
        yield _impact(impact)
    plan = timeline.spec.plan
    fired = {impact.fault for impact in faults}
    for planned in () if plan is None else plan.faults:
        if planned.id not in fired:
            yield f"{planned.id} {planned.kind} ({planned.at}): did not fire"
    by_name = {impact.fault: impact for impact in faults}
    for item in rejoins(timeline):
        yield _rejoin(item, by_name)
    if not faults and not (plan and plan.faults):
        yield "Nothing was to be broken."


def _refused(timeline: Timeline) -> Iterator[str]:
    found = refusals(timeline.events)
    if found:
        total = counts_text(Counter(item.offender for item in found))
        reasons = counts_text(Counter(item.reason for item in found))
        yield f"refused: {total} ({reasons})"


def _impact(impact: Impact) -> str:
    proof = {True: "verified", False: "NOT VERIFIED", None: "without proof"}[impact.ok]
    went_on = _after("survivors went on", impact.detect_s, impact.observed_s)
    recovered = _after(
        "throughput of the live peers recovered", impact.recover_s, impact.observed_s
    )
    stall = "" if impact.stall is None else f" (longest stall {_stall(impact.stall)})"
    who = ", ".join(impact.lives) or "nobody"
    return f"{impact.fault} {impact.kind} ({who}): {proof}; {went_on}{stall}; {recovered}"


def _after(what: str, seconds: float | None, observed_s: float) -> str:
    if seconds is None:
        return f"not seen within {observed_s:.2f} s: {what}"
    return f"{what} after {seconds:.2f} s"


def _stall(stall: Time) -> str:
    return f"{'more than ' if stall.censored else ''}{stall.seconds:.2f} s"


def _rejoin(item: Rejoin, faults: Mapping[str, Impact]) -> str:
    if item.seconds is None:
        return f"{item.life}: not seen contributing within {item.observed_s:.2f} s of its start"
    cause = faults.get(item.cause or "")
    text = f"{item.life}: contributing {item.seconds:.2f} s after its start"
    if cause is None:
        return text
    return f"{text}, {item.spawned + item.seconds - cause.fired:.2f} s after {cause.fault}"


def _time(timeline: Timeline) -> Iterator[str]:
    lost = samples_lost(timeline)
    spent, total = time_spent(timeline)
    committed, computed = timeline.committed(), timeline.computed
    goodput = ratio(committed, computed)
    yield (
        f"committed {number_text(committed)} of {number_text(computed)} samples "
        f"(goodput {'unknown' if goodput is None else f'{100 * goodput:.1f} %'}), "
        f"lost {'unknown' if lost is None else number_text(lost)}"
    )
    classes = sorted(spent.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{name.removeprefix('badput_').removesuffix('_s').replace('_', ' ')} "
        f"{100 * seconds / total:.1f} %"
        for name, seconds in classes
        if total and seconds / total >= 0.0005
    )
    yield f"{total:.1f} s of peers: {shares}"


# -- invariants --------------------------------------------------------------------------------


def invariant_lines(timeline: Timeline) -> list[str]:
    """Return one line an invariant, and one a violation.

    What the replicate's own events say; where they say nothing, the invariants that need only
    events are checked now.
    """
    recorded = [dict(event) for event in timeline.of("invariant")]
    found: Sequence[Mapping[str, Any]] = recorded or [
        {"name": r.name, "ok": r.ok, "checked": r.checked, "violations": r.violations}
        for r in check_all(timeline.spec, timeline.events)
    ]
    lines = []
    for item in found:
        looked = f"{item['checked']} looked at" if item["checked"] else "nothing to look at"
        lines.append(f"{'holds   ' if item['ok'] else 'VIOLATED'}  {item['name']} ({looked})")
        lines += [f"          {text}" for text in item["violations"]]
    return lines
