"""Differences between a study and the one that a run folder holds: allowed growth, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayhive.errors import Problem
from rayhive.spec import SweepConfig
from rayhive.spec.fault_plan import FaultPlan
from rayhive.spec.study import BASELINE_SETTINGS, scenario_label
from rayhive.spec.yaml_data import dotted

#: Numbers that may grow when a study is resumed.
MAY_GROW = ("budget.trials", "replicates")
#: Keys that set limits of time and attempts, or add rows, and do not affect other measurements.
MAY_CHANGE = re.compile(r"retries|baselines|twins|timeouts\..+|preemption\.sources")
_RULE = "--out or another name starts a new run"


def differences(before: SweepConfig, now: SweepConfig, run: Path) -> Iterator[Problem]:
    """Yield each difference for which a study cannot be resumed, with the value of the run.

    Trials, replicates, scenarios and baselines may be added; the settings of those that are added
    may be given.

    Args:
        before: The study that the run folder holds, resolved.
        now: The study that is to be resumed, resolved.
        run: The run folder.
    """
    old, new = dict(dotted(before.as_data())), dict(dotted(now.as_data()))
    added = {scenario_label(name) for name in set(now.scenarios) - set(before.scenarios)}
    of_added = tuple(f"scenario_args.{name}" for name in added)
    for setting, baseline in BASELINE_SETTINGS.items():
        if not (run / "trials" / baseline).exists():
            of_added += (setting,)
    for key in sorted(old.keys() | new.keys()):
        was, value = old.get(key), new.get(key)
        if was == value or MAY_CHANGE.fullmatch(key) or _grows(key, was, value):
            continue
        if key in of_added or key.startswith(tuple(f"{name}." for name in of_added)):
            continue
        at_least = "at least " if key in (*MAY_GROW, "scenarios") else ""
        held = f"{at_least}{was!r}, as in the run that {run} holds ({_RULE})"
        yield Problem(key, value, held + _entries(was, value))
    ours, theirs = list(before.swarm.node_classes or ()), list(now.swarm.node_classes or ())
    if ours != theirs and sorted(ours) == sorted(theirs):  # peers follow the order of the classes
        order = f"in the order {', '.join(ours)}, as in the run that {run} holds ({_RULE})"
        yield Problem("swarm.node_classes", ", ".join(theirs), order)


def _grows(key: str, was: Any, now: Any) -> bool:
    if key == "scenarios":
        return set(was) <= set(now)
    return key in MAY_GROW and bool(now > was)


def _entries(was: Any, now: Any) -> str:
    """Return a line for each entry that only one of two lists has; nothing for other values."""
    if not isinstance(was, Sequence) or isinstance(was, str) or not isinstance(now, type(was)):
        return ""
    return _diff([_line(item) for item in was], [_line(item) for item in now])


def _line(item: object) -> str:
    if isinstance(item, Mapping):  # such as a configuration, whose unset values tell nothing
        item = {key: value for key, value in item.items() if value is not None}
    return json.dumps(item, default=str)


def _diff(was: Sequence[str], now: Sequence[str]) -> str:
    gone = [f"\n      - {line}" for line in was if line not in now]
    new = [f"\n      + {line}" for line in now if line not in was]
    return "".join([*gone, *new])


def plan_problem(
    scenario: str, before: FaultPlan | None, now: FaultPlan | None, recorded: Path
) -> Problem | None:
    """Return a problem if a scenario plans other faults than a recorded replicate had.

    Args:
        scenario: Name of the scenario.
        before: The recorded plan.
        now: The plan of the same replicate number.
        recorded: Folder of the recorded replicate.
    """
    if before == now:
        return None
    allowed = (
        f"the same as when {recorded} was recorded, but it now plans other faults: restore its "
        "file, or begin a new run folder"
    )
    return Problem("scenarios", scenario, allowed + _diff(_faults(before), _faults(now)))


def _faults(plan: FaultPlan | None) -> list[str]:
    if plan is None:
        return []
    bound = [] if plan.at_most is None else [f"at most {plan.at_most} peers at once"]
    return [
        *bound,
        *(
            f"{fault.id}: {fault.kind} of {', '.join(fault.who)} at {fault.at}"
            + ("" if fault.heal_after_s is None else f", healed after {fault.heal_after_s:g} s")
            + "".join(f", {name} {value}" for name, value in sorted(fault.args.items()))
            for fault in plan.faults
        ),
    ]
