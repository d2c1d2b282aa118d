"""Timeline of one replicate as text: its faults, their proof and impact, and the invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from rayhive.events import FaultFired, InvariantChecked, of_kind
from rayhive.invariants import check_all
from rayhive.metrics.badput import time_spent
from rayhive.metrics.fault_impact import FaultImpact, Rejoin, impacts, rejoins, swarm_rounds
from rayhive.metrics.faults import samples_lost
from rayhive.metrics.folds import counts_text
from rayhive.metrics.group import ratio
from rayhive.metrics.logs import last_timeline
from rayhive.metrics.refusals import refusals
from rayhive.report.event_text import timeline_texts
from rayhive.report.numbers import number_text
from rayhive.timeline import Timeline

_BARS = " ▁▂▃▄▅▆▇█"


def timeline_lines(folder: str | Path, width: int = 100) -> list[str]:
    """Return the timeline of a replicate for a terminal.

    Args:
        folder: Folder of the replicate. Of several attempts, the last finished one is shown.
        width: Characters of the throughput line.

    Raises:
        RayhiveError: The events or the spec cannot be read.
    """
    timeline = last_timeline(folder)
    lines = [_title(timeline), ""]
    if timeline.span is None:
        return [*lines, "It never trained."]
    lines += _events(timeline)
    parts = (_throughput(timeline, width), _faults(timeline), _refused(timeline), _time(timeline))
    for part in parts:
        part_lines = list(part)
        lines += ["", *part_lines] if part_lines else []
    return [*lines, "", *invariant_lines(timeline)]


def _title(timeline: Timeline) -> str:
    spec = timeline.spec
    seconds = "" if timeline.span is None else f" after {timeline.span[1] - timeline.span[0]:.1f} s"
    return (
        f"{spec.scenario}, seed {spec.seed}, {spec.configuration.label}, {spec.swarm.peers} peers: "
        f"{timeline.state}{seconds} ({timeline.stop_reason})"
    )


def _events(timeline: Timeline) -> Iterator[str]:
    began = timeline.span[0] if timeline.span is not None else 0.0
    texts = sorted((moment - began, text) for moment, text in timeline_texts(timeline))
    for seconds, text in texts:
        if seconds >= 0:
            yield f"{seconds:8.2f} s  {text}"


def throughput(timeline: Timeline, windows: int) -> list[float]:
    """Return committed samples per second [1/s] in equal windows of the training.

    The samples of a round are spread evenly over the time since the end of the previous round.
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
    """Yield a bar chart of the samples per second over time, with a mark at each fault."""
    assert timeline.span is not None
    begin, end = timeline.span
    columns = max(10, width - 14)
    rates, marks = throughput(timeline, columns), [" "] * columns
    for fired in of_kind(timeline.events, FaultFired):
        at = int(columns * (fired.t - begin) / (end - begin or 1.0))
        marks[min(max(at, 0), columns - 1)] = "!"
    top = max(rates) or 1.0
    yield "samples/s     " + "".join(_BARS[round(8 * rate / top)] for rate in rates)
    yield f"up to {number_text(round(top, 1)):>7} {''.join(marks)}".rstrip()


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
    recovered = _after(
        "throughput of the live peers recovered", impact.recover_s, impact.observed_s
    )
    stall = ""
    if impact.stall is not None:
        least = "more than " if impact.stall.censored else ""
        stall = f" (longest stall {least}{impact.stall.seconds:.2f} s)"
    targets = ", ".join(impact.targets) or "no peer"
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
    recorded = list(of_kind(timeline.events, InvariantChecked))
    lines = []
    for item in recorded or check_all(timeline.spec, timeline.events):
        checked = f"{item.checked} checked" if item.checked else "nothing to check"
        lines.append(f"{'holds   ' if item.ok else 'VIOLATED'}  {item.name} ({checked})")
        lines += [f"          {text}" for text in item.violations or ()]
    return lines
