"""Rules of a quorum, in a study and in the arguments of the strategy."""

from __future__ import annotations

from typing import Any

import pytest

from rayhive.spec import Configuration, Space, SwarmConfig
from rayhive.spec.rules import check_configuration, check_space
from rayhive.strategy.arguments import check_options, check_quorum_delays


@pytest.mark.parametrize(
    ("peers", "space", "found"),
    [
        (4, {"min_peers": 3}, {}),
        (4, {"min_peers": [None, 3], "delay": ["none", "optimizer"]}, {}),
        (4, {"min_peers": 4}, {"min_peers": "less than swarm.peers (4), or null"}),
        (4, {"min_peers": 9}, {"min_peers": "less than swarm.peers (4), or null"}),
        (4, {"min_peers": 2}, {"min_peers": "at least 3, more than half"}),
        (8, {"min_peers": {"low": 5, "high": 7}}, {}),
        (4, {"min_peers": [None, 3], "delay": ["none", "gradients"]}, {"min_peers": "null with"}),
        (4, {"min_peers": 3, "local_steps": [None, 4]}, {}),
        (
            4,
            {"min_peers": 3, "local_steps": 4, "group_size": 2},
            {"group_size": "all with min_peers 3: a pair awaits both"},
        ),
        (4, {"grace_s": 2.0}, {"grace_s": "absent without min_peers"}),
        (4, {"min_peers": 3, "grace_s": 90}, {"grace_s": "less than swarm.straggler_timeout"}),
        (4, {"min_peers": 3, "grace_s": -1}, {"grace_s": "at least 0"}),
    ],
)
def test_a_quorum_without_an_effect_of_its_own_is_refused(
    peers: int, space: dict[str, Any], found: dict[str, str]
) -> None:
    problems = list(check_space(Space(**space), SwarmConfig(peers=peers)))
    assert {problem.key for problem in problems} == {f"space.{name}" for name in found}
    for problem in problems:
        assert problem.allowed.startswith(found[problem.key.removeprefix("space.")]) or (
            found[problem.key.removeprefix("space.")] in problem.allowed
        )


def test_a_configuration_is_checked_alike() -> None:
    configuration = Configuration(min_peers=3, delay="gradients")
    (problem,) = check_configuration(configuration, SwarmConfig(peers=4))
    assert problem.key == "min_peers" and "delay gradients" in problem.allowed
    assert Configuration(min_peers=3, grace_s=0.5).label == "none quorum3(0.5 s)"


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, []),
        ({"min_peers": 2}, []),
        ({"min_peers": 3, "grace_s": 0}, []),
        ({"grace_s": 1.0}, ["grace_s"]),
        ({"min_peers": 1}, ["min_peers"]),
        ({"min_peers": True}, ["min_peers"]),
        ({"min_peers": 2, "grace_s": float("nan")}, ["grace_s"]),
        ({"min_peers": 2, "reuse_grad_buffers": True}, ["min_peers"]),
        ({"min_peers": 2, "local_steps": 4}, []),
    ],
)
def test_arguments_of_the_strategy(options: dict[str, Any], keys: list[str]) -> None:
    assert [problem.key for problem in check_options(options)] == keys


def test_gradients_in_the_background_have_no_quorum() -> None:
    (problem,) = check_quorum_delays({"delay_grad_averaging": True}, 2)
    assert problem.key == "min_peers"
    assert not list(check_quorum_delays({"delay_grad_averaging": True}, None))
