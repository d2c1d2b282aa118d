"""Check of the scenarios of a study that has baselines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rayhive.errors import Problem
from rayhive.faults.kind import kind_of
from rayhive.spec import SweepConfig
from rayhive.spec.fault_plan import FaultPlan
from rayhive.spec.study import scenario_label


def check_baselines(
    config: SweepConfig, scenario: str, plans: Iterable[FaultPlan | None]
) -> Iterator[Problem]:
    """Yield a problem if a scenario has faults that only peers of a swarm can suffer."""
    kinds = {fault.kind for plan in plans if plan is not None for fault in plan.faults}
    only = sorted(kind for kind in kinds if kind_of(kind).of_swarm)
    if config.baselines and only:
        allowed = (
            f"absent with scenario {scenario_label(scenario)}, whose faults {', '.join(only)} act "
            "on parts that only peers of a swarm have"
        )
        yield Problem("baselines", ", ".join(config.baselines), allowed)
