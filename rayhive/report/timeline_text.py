"""Timeline of one replicate as text: its faults, their proof and impact, and the invariants."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rayhive import events
from rayhive.events import FaultFired, InvariantChecked
from rayhive.invariants import check_all
from rayhive.metrics.fault_impact import FaultImpact, Rejoin, impacts, rejoins, swarm_rounds
from rayhive.metrics.folds import counts_text
from rayhive.metrics.group import ratio
from rayhive.metrics.groups.badput import time_spent
from rayhive.metrics.groups.faults import samples_lost
from rayhive.metrics.groups.refusals import RefusedTensors, refusals
from rayhive.metrics.logs import last_timeline
from rayhive.report.numbers import number_text
from rayhive.timeline import Timeline

_BARS = " ▁▂▃▄▅▆▇█"
#: Characters of the throughput line after its name.
_WIDTH = 86
#: Characters of a proof or a reason that are shown.
SHOWN = 90
#: Delay of a fault from which it is told [s].
ON_TIME_S = 0.05
#: Reaction of a peer whose gradients could not be averaged.
_CHOICES = {"local": "applies its own gradients in", "skip": "skips"}


def timeline_lines(folder: str | Path) -> list[str]:
    """Return the timeline of a replicate for a terminal.

    Args:
        folder: Folder of the replicate. Of several attempts, the last finished one is shown.

    Raises:
        RayhiveError: The events or the spec cannot be read.
    """
    return lines_of(last_timeline(folder))


def lines_of(timeline: Timeline) -> list[str]:
    """Return a timeline for a terminal."""
    lines = [_title(timeline), ""]
    if timeline.span is None:
        return [*lines, "It never trained."]
    lines += _events(timeline)
    parts = (_throughput(timeline), _faults(timeline), _refused(timeline), _time(timeline))
    for part in parts:
        part_lines = list(part)
        lines += ["", *part_lines] if part_lines else []
    return [*lines, "", *invariant_lines(timeline)]


def _title(timeline: Timeline) -> str:
    spec = timeline.spec
    seconds = "" if timeline.span is None else f" after {timeline.span[1] - timeline.span[0]:.1f} s"
    return (
        f"{spec.scenario}, seed {spec.seed}, {spec.label}, {spec.swarm.peers} peers: "
        f"{timeline.state}{seconds} ({timeline.stop_reason})"
    )


def _events(timeline: Timeline) -> Iterator[str]:
    """Yield the events in words, with the seconds since training started.

    A refusal, which every member of the group reports, is included once. Refusals of one peer in
    consecutive rounds are one text.
    """
    texts = [(item.t, text) for item, text in _refusal_runs(timeline)]
    for event in timeline.events:
        if not isinstance(event, events.Rejected) and (text := event_text(event)) is not None:
            texts.append((event.t, text))
    began = timeline.span[0] if timeline.span is not None else 0.0
    for moment, text in sorted(texts):
        if moment >= began:
            yield f"{moment - began:8.2f} s  {text}"


def throughput(timeline: Timeline, windows: int) -> list[float]:
    """Return committed samples per second [1/s] in equal windows of the training.

    The samples of a round are spread evenly over the time since the end of the previous round.
    """
    assert timeline.span is not None
    begin, end = timeline.span
    rounds = swarm_rounds(timeline)
    moments = [begin, *(round_.moment for round_ in rounds)]
    committed = np.cumsum([0.0, *(round_.samples for round_ in rounds)])
    edges = np.linspace(begin, end, windows + 1)
    step = (end - begin) / windows or 1.0
    return [float(rate) for rate in np.diff(np.interp(edges, moments, committed)) / step]


def _throughput(timeline: Timeline) -> Iterator[str]:
    """Yield a bar chart of the samples per second over time, with a mark at each fault."""
    assert timeline.span is not None
    begin, end = timeline.span
    rates, marks = throughput(timeline, _WIDTH), [" "] * _WIDTH
    for fired in timeline.of(FaultFired):
        at = int(_WIDTH * (fired.t - begin) / (end - begin or 1.0))
        marks[min(max(at, 0), _WIDTH - 1)] = "!"
    top = max(rates) or 1.0
    yield "samples/s     " + "".join(_BARS[round(8 * rate / top)] for rate in rates)
    yield f"up to {number_text(round(top, 1)):>7} {''.join(marks)}".rstrip()


# -- events ------------------------------------------------------------------------------------


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
            sender = f" of {event.source}" if event.source else ""
            left = "" if event.deadline_s is None else f": {event.deadline_s:g} s"
            return f"{peer} receives notice{sender}{left}"
        case events.NodeNoticed():
            told = f"{', '.join(event.lives)} to leave" if event.lives else "recorded only"
            return f"real notice of {event.source}: {event.what}; {told}"
        case events.Left():
            return f"{peer} leaves: {event.handed_over} samples handed over, {event.lost} lost"
        case events.Rejected():
            tensors = event.tensors or "gradients"
            refused = f"the {tensors} of {event.offender} in round {event.round}"
            return f"{peer} refuses {refused}: {event.reason}"
        case events.FaultActed():
            return f"{peer} corrupts round {event.round}: {shortened(event.what)}"
        case events.StateLoaded():
            state = f"the state of round {event.round_of_state}"
            return f"{peer} loaded {state} in {event.seconds:.2f} s"
        case events.RolledBack():
            point = f"round {event.round}" if event.round else "the beginning"
            down = f"after {event.seconds:.1f} s: {event.lost} samples lost"
            return f"{peer} goes back to {point} {down}"
        case events.SteppedOut():
            return f"{peer} steps out after round {event.round}"
        case events.SteppedIn():
            idle = f"{event.seconds:.1f} s without a batch"
            return f"{peer} returns in round {event.round} after {idle}"
        case events.Fallback():
            reason = shortened(event.reason)
            return f"{peer} {_CHOICES[event.choice]} round {event.round}: {reason}"
    return None


def _slip(event: events.FaultFired) -> str:
    if event.slip_rounds is not None:
        return f", {event.slip_rounds:g} rounds late"
    if event.slip_s is None or event.slip_s < ON_TIME_S:
        return ""
    return f", {event.slip_s:.2f} s late"


def shortened(value: Any) -> str:
    """Return a field's value on one line of at most :data:`SHOWN` characters."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {shortened(item)}" for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


# -- impact and cost ---------------------------------------------------------------------------


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
        yield "No faults were planned."


def _refused(timeline: Timeline) -> Iterator[str]:
    found = refusals(timeline.events)
    if found:
        total = counts_text(Counter(item.offender for item in found))
        reasons = counts_text(Counter(item.reason for item in found))
        yield f"refused: {total} ({reasons})"


def _impact(impact: FaultImpact) -> str:
    proof = {True: "verified", False: "NOT VERIFIED", None: "without proof"}[impact.ok]
    continued = _after("survivors went on", impact.detect_s, impact.observed_s)
    recovered = "recovery unknown: too few rounds before the first fault"
    if impact.recovery_known:
        change = "throughput of the live peers recovered"
        recovered = _after(change, impact.recover_s, impact.observed_s)
    stall = ""
    if impact.stall is not None:
        least = "more than " if impact.stall.censored else ""
        stall = f" (longest stall {least}{impact.stall.seconds:.2f} s)"
    targets = ", ".join(sorted(impact.targets)) or "no peer"
    return f"{impact.fault} {impact.kind} ({targets}): {proof}; {continued}{stall}; {recovered}"


def _after(change: str, seconds: float | None, observed_s: float) -> str:
    if seconds is None:
        return f"not seen within {observed_s:.2f} s: {change}"
    return f"{change} after {seconds:.2f} s"


def _rejoin(item: Rejoin, faults: Mapping[str, FaultImpact]) -> str:
    if item.seconds is None:
        return f"{item.peer}: not seen contributing within {item.observed_s:.2f} s of its start"
    cause = faults.get(item.cause or "")
    text = f"{item.peer}: contributing {item.seconds:.2f} s after its start"
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
    """Return one line for each invariant, and one for each violation.

    The verdicts are those in the replicate's ``invariant`` events. Without such events, the
    invariants are checked now.
    """
    recorded = timeline.of(InvariantChecked)
    lines = []
    for item in recorded or check_all(timeline.spec, timeline.events):
        checked = f"{item.checked} checked" if item.checked else "nothing to check"
        lines.append(f"{'holds   ' if item.ok else 'VIOLATED'}  {item.name} ({checked})")
        lines += [f"          {text}" for text in item.violations or ()]
    return lines
