"""The contract of baselines, over the registry."""

from __future__ import annotations

import re

import pytest

from rayhive.baselines.base import Baseline, Member
from rayhive.registry import BASELINES
from tests.fixtures.logs import make_spec

BASELINE_KINDS = [pytest.param(name, kind, id=name) for name, kind in BASELINES.items()]


@pytest.mark.parametrize(("name", "kind"), BASELINE_KINDS)
def test_its_name_can_be_a_folder_beside_those_of_trials(name: str, kind: type[Baseline]) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9-]*", name)


@pytest.mark.parametrize(("name", "kind"), BASELINE_KINDS)
def test_it_says_what_it_is_in_one_sentence(name: str, kind: type[Baseline]) -> None:
    assert kind.about.endswith(".") and "\n" not in kind.about
    assert kind.__doc__


@pytest.mark.parametrize(("name", "kind"), BASELINE_KINDS)
def test_some_peer_trains_and_the_shares_of_the_data_are_disjoint(
    name: str, kind: type[Baseline]
) -> None:
    replicate = make_spec(trial=None, baseline=name)
    baseline = kind()
    specs = [replicate.peer_spec(n) for n in range(replicate.swarm.peers)]
    training = [spec for spec in specs if baseline.trains(spec)]
    shares = [baseline.share(spec) for spec in training]
    assert training
    assert len({index for index, _ in shares}) == len(training)
    assert {count for _, count in shares} == {len(training)}


@pytest.mark.parametrize(("name", "kind"), BASELINE_KINDS)
def test_a_round_has_at_least_its_samples_and_less_than_one_more_batch_a_member(
    name: str, kind: type[Baseline]
) -> None:
    replicate = make_spec(trial=None, baseline=name)
    assert replicate.round_size == (512 if name == "local-sgd" else 128)
    baseline = kind()
    specs = [replicate.peer_spec(n) for n in range(replicate.swarm.peers)]
    training = [spec for spec in specs if baseline.trains(spec)]
    for batch_size in (7, 32, 50):
        member: Member = kind.member(training[0], batch_size)
        more = member.round_size - replicate.round_size
        assert 0 <= more < batch_size * len(training)
