"""Texts of the dry run of a study and of fault plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rayhive.metrics.power import LEVEL, MOST, POWER
from rayhive.registry import FAULTS
from rayhive.report.replicates import ReplicatesNeeded
from rayhive.report.table_notes import count_text
from rayhive.spec import SweepConfig
from rayhive.spec.fault_plan import FaultPlan, PlannedFault
from rayhive.spec.pruning import BY_METRIC
from rayhive.sweep.dry_run import Plan, describe
from rayhive.sweep.tally import clock

#: Columns of the chart of a fault plan.
_WIDTH = 64


def study_plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the size and the longest duration of a study."""
    config = plan.study.config
    space = (
        ""
        if plan.space_size is None
        else f" (the space has {count_text(plan.space_size, 'configuration')})"
    )
    yield f"{config.name}: {config.workload.label} ({plan.study.workload.data} data)"
    names = config.baselines
    baselines = f" and {count_text(len(names), 'baseline')}" if names else ""
    yield (
        f"  {count_text(plan.trials, 'trial')}{space}{baselines} × "
        f"{count_text(len(config.scenarios), 'scenario')} × "
        f"{count_text(config.replicates, 'replicate')} = "
        f"{count_text(plan.replicates, 'replicate')} of {count_text(config.swarm.peers, 'peer')}"
    )
    if names:
        yield f"  baselines: {', '.join(names)}"
    if plan.study.twin_added:
        yield "  the scenario none was added as the twin of the faulted scenarios"
    for scenario in plan.scenarios:
        yield f"  {scenario.name}: {describe(scenario)}"
    counts = {row.rounds for row in plan.configurations if row.rounds is not None}
    ends = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else ""
    rounds = f"{ends} rounds, " if counts else ""
    yield (
        f"  each at most {rounds}{clock(config.budget.seconds_per_replicate)} of training; "
        f"all at most {clock(plan.longest_s)}, plus some seconds for each start"
    )
    yield from _pruner_lines(config)
    yield f"  gradients of one peer, uncompressed: {plan.dense_bytes:,} B"
    if plan.link_s is not None:
        low, high = plan.link_s
        yield (
            "  a replicate's payload needs on the links, by configuration: "
            f"{clock(low)} to {clock(high)}"
        )
        if high > config.budget.seconds_per_replicate:
            yield "  some may not finish their rounds in time"


def _pruner_lines(config: SweepConfig) -> Iterator[str]:
    """Yield which of the replicates the pruner may skip or stop, if the study has one."""
    pruner = config.pruner
    if pruner.name == "none":
        return
    yield (
        f"  pruner {pruner.name}: skips further replicates of a row that cannot be on the "
        "Pareto front"
    )
    if pruner.name in BY_METRIC:
        bound = "the median" if pruner.share == 50 else f"the bound that {pruner.share:g} % miss,"
        yield (
            f"    and stops a replicate, after {count_text(pruner.after, 'evaluation')}, that is "
            f"worse than {bound} of at least {pruner.least} others by more than "
            f"{100 * pruner.margin:g} %"
        )
    if len(config.scenarios) > 1:
        yield "    replicates without faults always run to their end"


def study_plan_rows(plan: Plan) -> list[dict[str, object]]:
    """Return a row for each listed configuration, with its predicted payload."""
    return [
        {
            "configuration": row.configuration.label,
            **row.configuration.model_dump(mode="json"),
            "enqueued": row.enqueued,
            "payload_bytes_per_round_predicted": row.bytes_per_round,
            "gradient_compression_ratio": row.ratio,
            "compressed_tensors": row.compressed,
            "exact": row.exact,
            "state_averaging_every": row.traffic.state_every,
            "state_bytes_per_round_predicted": row.traffic.state_bytes,
            "all_bytes_per_round_predicted": row.traffic.bytes,
            "all_bytes_per_sample_predicted": row.bytes_per_sample,
            "rounds": row.rounds,
            "link_s_per_round": row.traffic.seconds,
        }
        for row in plan.configurations
    ]


def replicates_lines(plan: Plan, needs: Sequence[ReplicatesNeeded]) -> Iterator[str]:
    """Yield how many replicates show a difference, for each objective."""
    config = plan.study.config
    for item in needs:
        if item.spread is None:
            yield f"{item.objective}: {item.source}"
            continue
        wanted, between = (_percent(share) for share in (item.difference, item.spread))
        yield f"{item.objective}: a spread of {between} between replicates ({item.source})"
        yield (
            f"  a difference of {wanted} between two rows takes {_replicates(item.one_pair)}; "
            f"{item.comparisons} comparisons with a baseline take "
            f"{_replicates(item.all_rows)} (Holm)"
        )
        if item.shown is None:
            yield f"  {config.replicates} replicate shows no difference: its spread is not known"
        else:
            yield (
                f"  the {config.replicates} replicates of the study show {_percent(item.shown)} "
                "between two rows"
            )
    yield (
        f"found with a probability of {100 * POWER:.0f} % by Student's t for pairs at "
        f"{100 * LEVEL:.0f} %, which takes values (of times and ratios, logarithms) as normal"
    )


def _percent(share: float) -> str:
    if share > 10:
        return "more than 1,000 %"
    return f"{100 * share:,.0f} %" if share >= 1 else f"{100 * share:.3g} %"


def _replicates(number: int | None) -> str:
    return f"more than {MOST:,} replicates" if number is None else f"{number:,} replicates"


def fault_plan_lines(plan: FaultPlan, seconds: float) -> Iterator[str]:
    """Yield the faults of a plan as lines and as a chart over time.

    Args:
        plan: The plan.
        seconds: Length of a replicate [s].
    """
    yield f"  seed {plan.seed}, {plan.peers} peers, plan {plan.hash[:16]}"
    if not plan.faults:
        yield "  no faults"
        return
    ids = max(len(fault.id) for fault in plan.faults)
    times = max(len(str(fault.at)) for fault in plan.faults)
    for fault in plan.faults:
        heal = "" if fault.heal_after_s is None else f", heals after {fault.heal_after_s:g} s"
        args = "".join(f", {key} {value}" for key, value in fault.args.items())
        targets = ", ".join(fault.who)
        yield f"  {fault.id:{ids}}  {fault.at!s:{times}}  {fault.kind} {targets}{args}{heal}"
    by_round = [fault for fault in plan.faults if fault.at.round is not None]
    by_time = [fault for fault in plan.faults if fault.at.round is None]
    if by_round:
        end = math.ceil(1.25 * max(fault.at.round or 0 for fault in by_round))
        yield ""
        yield from _chart(by_round, plan.peers, end, "rounds")
    if by_time:
        yield ""
        yield from _chart(by_time, plan.peers, seconds, "s")


def _end_s(fault: PlannedFault) -> float | None:
    """Return the time of the heal [s]; infinity if it never heals.

    None for kinds without one, and for a fault that fires by round.
    """
    if fault.at.seconds is None:
        return None
    if fault.heal_after_s is not None:
        return fault.at.seconds + fault.heal_after_s
    return math.inf if FAULTS.get(fault.kind).heals else None


def _chart(faults: list[PlannedFault], peers: int, end: float, unit: str) -> Iterator[str]:
    names = list(dict.fromkeys(name for fault in faults for name in fault.who))
    units = {name.partition("-")[0] for name in names} & {"peer", "node"} or {"peer"}
    shown = [f"{unit}-{n}" for unit in units for n in range(peers)] if peers <= 16 else []
    rows = sorted({*shown, *names}, key=_order)
    width = max(map(len, rows))
    for row in rows:
        cells = ["·"] * _WIDTH
        for fault in faults:
            if row in fault.who:
                begin = _column(fault.at.round or fault.at.seconds or 0.0, end)
                until = _end_s(fault)
                last = begin if until is None else _column(until, end)
                cells[begin : last + 1] = "█" * (last + 1 - begin)
                cells[begin] = "┃" if until is None else "█"
        yield f"  {row:{width}} {''.join(cells)}"
    yield f"  {'':{width}} 0{f'{end:g} {unit}':>{_WIDTH - 1}}"


def _column(value: float, end: float) -> int:
    return int(min(value / end, 1.0) * (_WIDTH - 1)) if end > 0 else 0


def _order(name: str) -> tuple[str, int]:
    kind, _, number = name.partition("-")
    return (kind, int(number)) if number.isdigit() else ("~" + name, 0)
