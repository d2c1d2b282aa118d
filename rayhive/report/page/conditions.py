"""Conditions under which a run measured, in words: machines, links, and faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rayhive.columns import Row
from rayhive.metrics.rows import NO_FAULTS
from rayhive.report.page.run_data import RunData
from rayhive.report.table_notes import count_text
from rayhive.spec.fault_plan import FaultPlan, PlannedFault

#: Most faults of a plan that are listed one by one.
LISTED = 3


def measured_text(run: RunData) -> str:
    """Return what was measured, and on what: conditions that all replicates share.

    Conditions that differ within the run are those of the single recommendations.
    """
    return "; ".join(filter(None, _parts(run)))


def _parts(run: RunData) -> Iterator[str]:
    rows = run.results.folded
    workload, peers = (_shared(rows, name) for name in ("workload", "peers"))
    swarm = f"{peers} peers" if peers and peers != "1" else "1 peer" if peers else ""
    yield " on ".join(filter(None, (workload, swarm)))
    yield _target(run)
    yield _nodes(run)
    configurations = {row["configuration"] for row in rows if row["baseline"] is None}
    baselines = {row["baseline"] for row in rows if row["baseline"] is not None}
    scenarios = {row["scenario"] for row in rows}
    text = count_text(len(configurations), "configuration")
    if baselines:
        text += f" and {count_text(len(baselines), 'baseline')}"
    if len(scenarios) > 1:
        text += f" under {count_text(len(scenarios), 'scenario')}"
    yield text


def _shared(rows: Iterable[Row], name: str) -> str:
    """Return the value that all rows have; empty if they differ."""
    values = {str(row[name]) for row in rows if row.get(name) is not None}
    return values.pop() if len(values) == 1 else ""


def _target(run: RunData) -> str:
    return "" if run.target is None else f"target: {target_text(run.target)}"


def target_text(target: Mapping[str, object]) -> str:
    """Return a target in words."""
    sign = "at least" if target["mode"] == "max" else "at most"
    return f"{target['metric']} {sign} {target['value']}"


def _nodes(run: RunData) -> str:
    """Return the links that all rows share, and which classes of nodes are preemptible."""
    link = _shared(run.results.folded, "link")
    classes = {
        name: each
        for replicate in run.replicates[:1]
        for name, each in (replicate.spec.swarm.node_classes or {}).items()
    }
    spot = [name for name, each in classes.items() if each.preemptible]
    if not spot:
        return f"links: {link}" if link else ""
    every = "preemptible" if len(classes) == 1 else "all preemptible"
    which = every if len(spot) == len(classes) else f"preemptible: {', '.join(spot)}"
    return f"links: {link} ({which})" if link else f"nodes: {which}"


def scenario_text(run: RunData, row: Row) -> str:
    """Return the planned faults of a row's scenario in words, and the rate of many faults.

    Single faults are listed only where the replicates differ in their targets alone.
    """
    scenario = row["scenario"]
    if scenario == NO_FAULTS:
        return "without faults"
    specs = (each.spec for each in run.replicates if each.spec.scenario == scenario)
    plans = [spec.plan for spec in specs if spec.plan is not None]
    texts = {faults_text(plan) for plan in plans}
    faults = texts.pop() if len(texts) == 1 else _counts(plans)
    many = any(len(plan.faults) > LISTED for plan in plans)
    if many and (rate := faults_per_hour(run, row)):
        faults += f"; {rate:.3g} per peer and hour of training fired"
    return f"scenario {scenario}{f': {faults}' if faults else ''}"


def faults_per_hour(run: RunData, row: Row) -> float | None:
    """Return the faults that fired per peer and hour of training under the conditions of a row.

    Baselines do not count. None if it is not known.
    """
    if row["scenario"] == NO_FAULTS:
        return 0.0
    under = next(rows for rows in run.groups if any(each is row for each in rows))
    swarms = [each for each in under if each["n"] and each["baseline"] is None]
    fired = [each["faults_fired"] for each in swarms]
    seconds = [float(each["peer_seconds"] or 0) * int(each["n"] or 0) for each in swarms]
    if None in fired or not sum(seconds):
        return None
    return 3600 * sum(int(count or 0) for count in fired) / sum(seconds)


def faults_text(plan: FaultPlan) -> str:
    """Return the faults of a plan in words, without their targets; empty without any."""
    if len(plan.faults) <= LISTED:
        return "; ".join(map(_fault_text, plan.faults))
    return _counts([plan])


def _counts(plans: Sequence[FaultPlan]) -> str:
    """Return how many faults of each kind are planned for a replicate; empty without any."""
    listed = []
    for kind in dict.fromkeys(fault.kind for plan in plans for fault in plan.faults):
        numbers = [sum(fault.kind == kind for fault in plan.faults) for plan in plans]
        listed.append((max(numbers), f"{_range_text(numbers)} {kind}"))
    totals = [len(plan.faults) for plan in plans]
    noun = "fault" if totals and max(totals) == 1 else "faults"
    words = ", ".join(text for _, text in sorted(listed, key=lambda each: -each[0]))
    if not words:
        return ""
    heals = [fault.heal_after_s for plan in plans for fault in plan.faults]
    known = [seconds for seconds in heals if seconds is not None]
    healed = f", each healed after {_range_text(known)} s" if len(known) == len(heals) else ""
    return f"{_range_text(totals)} {noun} planned for a replicate ({words}){healed}"


def _range_text(numbers: Sequence[float]) -> str:
    low, high = (f"{value:.3g}" for value in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def _fault_text(fault: PlannedFault) -> str:
    heal = "" if fault.heal_after_s is None else f", healed after {fault.heal_after_s:g} s"
    nodes = all(name.startswith("node-") for name in fault.who)
    targets = count_text(len(fault.who), "node" if nodes else "peer")
    return f"{fault.kind} of {targets} at {fault.at}{heal}"
