"""Settings of a swarm that became axes are still read from studies and specs of version 0.1."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayhive.errors import ConfigError
from rayhive.spec import Configuration, validate_sweep
from rayhive.spec.replicate import ReplicateSpec
from tests.fixtures.logs import make_spec

STUDY: dict[str, Any] = {"name": "old", "workload": {"name": "digits"}}


def test_a_setting_of_an_old_study_holds_for_all_its_configurations() -> None:
    old = {
        **STUDY,
        "swarm": {"average_state_every": 4, "state_codec": "float16", "peers": 3},
        "enqueue": [{"codec": "uniform8"}, {"state_codec": "none"}],
    }
    with pytest.warns(FutureWarning) as caught:
        config = validate_sweep(old)
    assert [str(each.message) for each in caught] == [
        "swarm.average_state_every is now space.average_state_every",
        "swarm.state_codec is now space.state_codec",
    ]
    assert config.swarm.peers == 3
    assert (config.space.average_state_every, config.space.state_codec) == ((4,), ("float16",))
    assert config.enqueue == (
        Configuration(codec="uniform8", average_state_every=4, state_codec="float16"),
        Configuration(average_state_every=4, state_codec="none"),
    )


def test_a_mistake_in_an_old_setting_is_reported_under_its_new_key() -> None:
    with pytest.warns(FutureWarning), pytest.raises(ConfigError) as caught:
        validate_sweep({**STUDY, "swarm": {"average_state_every": 0}})
    assert [problem.key for problem in caught.value.problems] == ["space.average_state_every"]


def test_a_setting_in_both_places_is_refused() -> None:
    both = {**STUDY, "swarm": {"state_codec": "none"}, "space": {"state_codec": "float16"}}
    with pytest.raises(ConfigError) as caught:
        validate_sweep(both)
    assert [problem.key for problem in caught.value.problems] == ["swarm.state_codec"]


def test_the_spec_of_an_old_replicate_keeps_its_settings() -> None:
    old = json.loads(make_spec().model_dump_json())
    for name in ("average_state_every", "state_codec"):
        del old["configuration"][name]
    old["swarm"] |= {"average_state_every": 1, "state_codec": "uniform8"}
    spec = ReplicateSpec.model_validate_json(json.dumps(old))
    assert spec.configuration == Configuration(average_state_every=1, state_codec="uniform8")
    assert spec.configuration.label == "none state-every-1 state-uniform8"
    assert spec.swarm == make_spec().swarm
    assert ReplicateSpec.model_validate(spec.model_dump()) == spec
