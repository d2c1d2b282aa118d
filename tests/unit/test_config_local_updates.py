"""Studies of earlier versions, whose ``swarm.use_local_updates`` became axes of local steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from pydantic import ValidationError

from rayhive.errors import ConfigError
from rayhive.spec.loading import validate_sweep
from rayhive.spec.moved import LOCAL_UPDATES
from rayhive.spec.replicate import ReplicateSpec
from tests.fixtures.logs import make_spec

STUDY: dict[str, Any] = {"name": "old", "workload": {"name": "digits"}}


@pytest.mark.parametrize(
    ("swarm", "space", "meant"),
    [
        ({}, {}, {}),
        ({"average_state_every": 4}, {}, {"local_steps": (4,)}),
        ({}, {"average_state_every": ["auto", 2]}, {"local_steps": (1, 2)}),
        ({"state_codec": "float16"}, {}, {"codec": ("float16",)}),
        ({}, {"delay": ["none", "state"]}, {"delay": ("none", "gradients")}),
        ({}, {"outer_lr": [0.7, 1.0]}, {"outer_lr": (0.7, 1.0)}),
    ],
)
def test_the_axes_do_what_local_updates_did(
    swarm: dict[str, Any], space: dict[str, Any], meant: dict[str, Any]
) -> None:
    swarm = {"target_batch_size": 64, "use_local_updates": True, **swarm}
    entry = {name: value[0] if isinstance(value, list) else value for name, value in space.items()}
    old = {**STUDY, "swarm": swarm, "space": space, "enqueue": [entry]}
    with pytest.warns(FutureWarning) as told:
        study = validate_sweep(old)
    assert "space.local_steps: 1, space.outer_lr: 1.0" in str(told[-1].message)
    wanted = {name: (value,) for name, value in LOCAL_UPDATES.items()} | meant
    for name, values in wanted.items():
        assert getattr(study.space, name) == values
        assert getattr(study.enqueue[0], name) == values[0]
    assert study.enqueue[0].average_state_every == "auto"
    assert study.enqueue[0].state_codec == "none"


def test_false_is_read_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        study = validate_sweep({**STUDY, "swarm": {"use_local_updates": False}})
    assert study == validate_sweep(STUDY)


@pytest.mark.parametrize(
    ("value", "space"), [("yes", {}), (1, {}), (True, {"local_steps": 4}), (None, {})]
)
def test_what_has_no_meaning_is_refused(value: Any, space: dict[str, Any]) -> None:
    study = {**STUDY, "swarm": {"use_local_updates": value}, "space": space}
    with pytest.raises(ConfigError) as found:
        validate_sweep(study)
    assert [problem.key for problem in found.value.problems] == ["swarm.use_local_updates"]


def test_only_recorded_replicates_without_local_updates_are_read() -> None:
    recorded = make_spec().model_dump(mode="json")
    old = {**recorded, "swarm": {**recorded["swarm"], "use_local_updates": False}}
    assert ReplicateSpec.model_validate(old) == make_spec()
    old["swarm"]["use_local_updates"] = True  # its rounds had no gradients
    with pytest.raises(ValidationError, match="use_local_updates"):
        ReplicateSpec.model_validate(old)
