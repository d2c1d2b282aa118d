"""Pairwise gossip: its outer step, its settings, and what replicas may differ by."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from rayhive.membership.announcements import Heartbeat
from rayhive.membership.progress_view import ProgressView
from rayhive.membership.view import MembershipView
from rayhive.optim import gossip
from rayhive.optim.local_rule import LocalStepsRule, local_steps_problems
from rayhive.spec import Configuration, Space, SwarmConfig
from rayhive.spec.rules import check_configuration, check_space
from rayhive.sweep.link_time import round_traffic


def test_an_outer_step_pulls_to_the_pair_and_keeps_own_momentum() -> None:
    """Two steps of two peers by the equations of the paper, with samples 3 and 1."""
    rule = LocalStepsRule(4, 0.5, 0.25, "keep", group_size=2)
    phi = torch.tensor([[10.0, 2.0], [4.0, -2.0]], dtype=torch.float64)
    outer = [torch.nn.Parameter(each.clone()) for each in phi]
    optimizers = [rule.outer_optimizer([each]) for each in outer]
    for parameter, optimizer in zip(outer, optimizers, strict=True):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # as hivemind makes one: it must not decay the parameters
        gossip.begin(optimizer)
    delta, share = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([0.75, 0.25])
    for progress in ([[-1.0, 2.0], [3.0, 0.5]], [[0.5, 0.5], [-2.0, 1.0]]):
        theta = phi + torch.tensor(progress, dtype=torch.float64)
        sent = [gossip.sent([each], 1)[0][0] for each in theta]
        mean = 0.75 * sent[0] + 0.25 * sent[1]
        for parameter, optimizer in zip(outer, optimizers, strict=True):
            parameter.grad = mean.clone()
            optimizer.step()
        means = [(share[:, None] * each).sum(0) for each in (theta - phi, phi)]
        delta = 0.25 * delta + 0.5 * means[0] - 0.5 * (phi - means[1])
        phi = phi + delta
        torch.testing.assert_close(torch.stack([p.detach() for p in outer]), phi)


def test_a_peer_without_samples_weighs_as_one() -> None:
    values, weight = gossip.sent([torch.tensor([2.0])], 0)
    assert values[0].tolist() == [-2.0] and weight == 1
    assert gossip.sent([torch.tensor([2.0])], 7)[1] == 7


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, []),
        ({"inner_state": "reset", "outer_momentum": 0.0}, []),
        ({"group_size": 3}, ["group_size"]),
        ({"group_size": True}, ["group_size"]),
        ({"local_steps": None}, ["group_size"]),
        ({"inner_state": "average", "fragments": 2}, ["fragments", "inner_state"]),
        ({"mixing": 0.5}, ["mixing"]),
        (
            {"average_state_every": 5, "aggregation": "trimmed_mean"},
            ["average_state_every", "aggregation"],
        ),
        ({"error_feedback": True}, ["error_feedback"]),
        ({"delay_state_averaging": True}, ["delay_state_averaging"]),
        ({"extra_tensors": (torch.zeros(1),)}, []),
    ],
)
def test_settings_without_a_meaning_are_refused(options: dict[str, Any], keys: list[str]) -> None:
    given = {"local_steps": 4, "group_size": 2, **options}
    assert [problem.key for problem in local_steps_problems(given)] == keys


@pytest.mark.parametrize(
    ("space", "allowed"),
    [
        ({"group_size": ["all", 2], "local_steps": 4}, None),
        ({"group_size": [2], "local_steps": [None, 4]}, None),
        ({"group_size": 2}, "absent without local_steps"),
        ({"group_size": 3, "local_steps": 4}, "all, or 2 for random pairs"),
        (
            {"group_size": 2, "local_steps": 4, "codec": ["none", "float16"]},
            "all with codec float16",
        ),
        ({"group_size": 2, "local_steps": 4, "powersgd_rank": 2}, "all with powersgd_rank 2"),
        ({"group_size": 2, "local_steps": 4, "delay": "gradients"}, "all with delay gradients"),
        ({"group_size": 2, "local_steps": 4, "fragments": 2}, "all with fragments 2"),
        ({"group_size": 2, "local_steps": 4, "mixing": 0.5}, "all with mixing 0.5"),
        ({"group_size": 2, "local_steps": 4, "state_codec": "float16"}, "all with state_codec"),
        (
            {"group_size": 2, "local_steps": 4, "average_state_every": 3},
            "all with average_state_every 3",
        ),
    ],
)
def test_rules_of_a_study(space: dict[str, Any], allowed: str | None) -> None:
    problems = list(check_space(Space(**space), SwarmConfig(peers=4)))
    found = [problem for problem in problems if problem.key == "space.group_size"]
    assert len(found) == len(problems) == (allowed is not None), problems
    assert allowed is None or found[0].allowed.startswith(allowed)


def test_a_configuration_has_a_name_a_check_and_the_bytes_of_a_pair() -> None:
    pairs, all_peers = (Configuration(local_steps=4, group_size=size) for size in (2, "all"))
    assert pairs.label == all_peers.label.replace(")", ", pairs)")
    swarm = SwarmConfig(peers=8)
    assert not list(check_configuration(pairs, swarm))
    trimmed = SwarmConfig(peers=8, aggregation="trimmed_mean")
    (problem,) = check_configuration(pairs, trimmed)
    assert problem.key == "group_size" and "aggregation trimmed_mean" in problem.allowed
    shapes = ((30, 10), (7,))
    sent = [round_traffic(shapes, (), each, swarm).bytes for each in (pairs, all_peers)]
    assert (
        sent[0] == 4 * 307
    )  # each sends half of the parameters, and the average of the other half
    assert sent[1] == 4 * 307 * 2 * 7 / 8
    assert round_traffic(shapes, ((25,),), pairs, swarm).bytes == 4 * (307 + 25)


def test_rounds_of_other_pairs_are_not_missed() -> None:
    def said(version: int, **fields: Any) -> Heartbeat:
        return Heartbeat(b"other", 0.0, version=version, takes_part=True, **fields)

    view = MembershipView(Heartbeat(b"own", 0.0, takes_part=True, round=1), silence=10.0)
    view.receive(said(1, round=1, averaged=2, met_averaged=2))
    progress = ProgressView(view, 64, threading.Event())
    assert progress.was_met(2)
    progress.several_groups = True
    assert not progress.was_met(2) and not progress.has_missed(2, timeout=5.0)
    view.receive(said(2, round=3, averaged=3))
    assert progress.has_missed(2, timeout=5.0)


def test_no_pair_gets_far_ahead() -> None:
    def said(version: int, name: bytes, **fields: Any) -> Heartbeat:
        return Heartbeat(name, 0.0, version=version, takes_part=True, **fields)

    own = Heartbeat(b"own", 0.0, takes_part=True, round=2, samples=64)
    view = MembershipView(own, silence=10.0)
    progress = ProgressView(view, 64, threading.Event(), several_groups=True)
    assert progress.is_round_due
    view.receive(said(1, b"slow", round=1))
    assert not progress.is_round_due, "the other one still computes its batch of round 2"
    progress.several_groups = False
    assert progress.is_round_due
    progress.several_groups = True
    view.receive(said(2, b"slow", round=1, entered=2))
    assert progress.is_round_due
