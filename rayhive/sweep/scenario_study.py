"""The study that runs a single scenario: one configuration, one replicate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayhive.errors import Problem
from rayhive.faults.library import load_scenario
from rayhive.spec import SweepConfig, validate_sweep
from rayhive.spec.study import scenario_label
from rayhive.spec.yaml_data import Overrides, apply_overrides, read_mapping


def scenario_config(
    name: str,
    file: str | Path | None = None,
    overrides: Overrides = (),
    peers: int | None = None,
    seed: int | None = None,
) -> SweepConfig:
    """Return the study of one scenario: the scenario's defaults, then the user's settings.

    Args:
        name: Name of the scenario, or the path of its file.
        file: A study whose settings replace the scenario's. Its other scenarios, further
            configurations and replicates are left out.
        overrides: Values that replace single fields.
        peers: Peers that start together; replaces both settings.
        seed: Seed of the study; replaces both settings.

    Raises:
        ConfigError: With every mistake in the file and the overrides.
    """
    problems: list[Problem] = []
    data = load_scenario(name).study
    if file is not None:
        given = read_mapping(Path(file), problems)
        given["enqueue"] = list(given.get("enqueue") or [])[:1]
        given["budget"] = {**_mapping(given.get("budget")), "trials": 1}
        data = _merged(data, {**given, "replicates": 1})
    data["scenarios"] = [name]
    arguments = _mapping(data.get("scenario_args"))
    data["scenario_args"] = {
        each: value for each, value in arguments.items() if each == scenario_label(name)
    }
    apply_overrides(data, overrides, problems)
    if peers is not None:
        data = _merged(data, {"swarm": {"peers": peers}})
    if seed is not None:
        data["seed"] = seed
    data.setdefault("objectives", {"samples_per_s": "maximize"})
    return validate_sweep(data, None if file is None else str(file), problems)


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` replaced by ``above``; budget, swarm and evaluation merge key by key."""
    merged = {**below, **above}
    for key in ("budget", "swarm", "evaluation"):
        if isinstance(below.get(key), Mapping) and isinstance(above.get(key), Mapping):
            merged[key] = {**below[key], **above[key]}
    return merged
