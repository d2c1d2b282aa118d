"""Configuration and peer of ``rayhive train``, from a study."""

from __future__ import annotations

from typing import Any

import pytest

from rayhive.errors import ConfigError
from rayhive.peer.train import peer_spec, single_configuration, train_file
from rayhive.spec import Configuration, SweepConfig, validate_sweep


def study(**fields: Any) -> SweepConfig:
    return validate_sweep({"name": "a.study", "workload": {"name": "digits"}, **fields})


def test_the_first_enqueued_configuration_is_taken() -> None:
    config = study(
        space={"codec": ["none", "float16"]},
        enqueue=[{"codec": "uniform8", "delay": "state"}, {"codec": "none"}],
    )
    assert single_configuration(config) == Configuration(codec="uniform8", delay="state")


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({}, Configuration()),
        ({"codec": "float16"}, Configuration(codec="float16", error_feedback=False)),
        (
            {"codec": ["size_adaptive"], "threshold": 1024},
            Configuration(codec="size_adaptive", threshold=1024, error_feedback=False),
        ),
        (
            {"powersgd_rank": 2, "min_compression_ratio": 0.25, "delay": "gradients"},
            Configuration(powersgd_rank=2, min_compression_ratio=0.25, delay="gradients"),
        ),
    ],
)
def test_without_an_enqueued_one_the_constants_of_the_space_are_taken(
    space: dict[str, Any], expected: Configuration
) -> None:
    assert single_configuration(study(space=space)) == expected


def test_an_axis_with_several_values_is_refused() -> None:
    space = {
        "codec": "size_adaptive",
        "threshold": {"low": 256, "high": 1024},
        "powersgd_rank": [1, 2],
        "delay": ["none", "state"],
    }
    with pytest.raises(ConfigError) as caught:
        single_configuration(study(space=space))
    assert {problem.key for problem in caught.value.problems} == {
        "space.threshold",
        "space.powersgd_rank",
        "space.delay",
    }


def test_every_peer_has_data_of_its_own() -> None:
    config = study(swarm={"peers": 3})
    first = peer_spec(config, first=True)
    assert (first.run_id, first.peer, first.peers) == ("a_study", 0, 3)
    others = {peer_spec(config, first=False).peer for _ in range(8)}
    assert len(others) == 8
    assert min(others) >= 3


def test_a_missing_file_is_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        train_file("nowhere.yaml")
