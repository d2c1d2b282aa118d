"""The study that a scenario makes when it is run or shown alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rayhive.compression  # noqa: F401 - fills the registry that the checks look names up in
from rayhive.errors import Problem
from rayhive.faults.library import label
from rayhive.faults.scenario import Scenario
from rayhive.spec import SweepConfig, apply_overrides, read_mapping, validate_sweep


def scenario_config(
    scenario: Scenario,
    name_or_path: str,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    peers: int | None = None,
) -> SweepConfig:
    """Return a study of one scenario: its own defaults, under what the user says.

    Args:
        scenario: The scenario.
        name_or_path: How the user named it.
        file: A study whose settings replace the scenario's; its other scenarios, further
            configurations and repetitions are left aside.
        overrides: ``a.b=c`` strings that replace single fields.
        peers: Peers that start together, instead of what either says.

    Raises:
        ConfigError: With every mistake in the file and the overrides.
    """
    problems: list[Problem] = []
    data = scenario.study
    if file is not None:
        given = read_mapping(file, problems)
        given["enqueue"] = list(given.get("enqueue") or [])[:1]
        given["budget"] = {**_mapping(given.get("budget")), "trials": 1}
        data = _merged(data, {**given, "replicates": 1})
    data["scenarios"] = [name_or_path]
    arguments = _mapping(data.get("scenario_args"))
    data["scenario_args"] = {
        name: value for name, value in arguments.items() if name == label(name_or_path)
    }
    apply_overrides(data, overrides, problems)
    if peers is not None:
        data = _merged(data, {"swarm": {"peers": peers}})
    return validate_sweep(data, None if file is None else str(file), problems)


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` with what ``above`` says; budgets and swarms are merged key by key."""
    merged = {**below, **above}
    for key in ("budget", "swarm", "evaluation"):
        if isinstance(below.get(key), Mapping) and isinstance(above.get(key), Mapping):
            merged[key] = {**below[key], **above[key]}
    return merged
