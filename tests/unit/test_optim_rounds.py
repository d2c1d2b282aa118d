"""Rounds of the optimizer that fail, and rounds without company."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as PowerSGD

from rayhive.averaging.group_formation import NoOtherPeers
from rayhive.averaging.round_filter import ExcludedRoundFailed
from rayhive.averaging.round_result import PhaseRecord, RoundResult
from rayhive.errors import ConfigError
from rayhive.events import AveragingReason
from rayhive.membership.view import Reunion
from rayhive.optim import parameter_rounds
from rayhive.optim.gradient_rounds import OwnGradients
from rayhive.optim.optimizer import RayhiveOptimizer
from rayhive.optim.replica_check import Announcement
from tests.unit.averaging_fakes import OTHER, PEER
from tests.unit.optim_fakes import ROUND, Peer

NEXT = ROUND + 1
#: Extra tensors: a statistic, and a counter that each peer keeps.
EXTRAS = (torch.zeros(2), torch.zeros(2, dtype=torch.int64))


def ended(value: Any) -> Any:
    """Return the control of an averaging with this result or error."""
    control: Future[Any] = Future()
    if isinstance(value, BaseException):
        control.set_exception(value)
    else:
        control.set_result(value)
    return control


def finish(peer: Peer, error: Exception) -> Any:
    """Let the gradient round of a peer fail."""
    peer.accumulate()
    round_ = peer.gradient_rounds.open(NEXT, accumulating_s=0.0, background_s=0.0)
    round_.own_gradients = OwnGradients([torch.ones(2)], 1.0)
    peer.gradient_rounds.finish(ended(error), round_)
    return round_


#: An all-reduce in which every part was averaged.
COMPLETE = PhaseRecord(name="dense", seconds=0.1, sent_bytes=8, received_bytes=8, fraction=1.0)


def average(peer: Peer, reason: AveragingReason | None) -> None:
    """Let a peer average its gradients with one that gives a reason to average parameters."""
    peer.accumulate()
    round_ = peer.gradient_rounds.open(NEXT, accumulating_s=0.0, background_s=0.0)
    entries = {PEER: Announcement(NEXT), OTHER: Announcement(NEXT, reason)}
    gathered = {name: entry.packed() for name, entry in entries.items()}
    peer.gradient_rounds.finish(ended(RoundResult(gathered, phases=(COMPLETE,))), round_)
    assert peer.outcomes() == ["averaged"]


@pytest.mark.parametrize(
    ("live_peers", "keeps", "samples"), [(1, False, 32), (2, False, 0), (2, True, 32)]
)
def test_a_stale_peer_counts_if_no_peer_has_newer_parameters_or_it_kept_its_gradients(
    live_peers: int, keeps: bool, samples: int
) -> None:
    peer = Peer(live_peers)
    peer.accumulate()
    peer.consistency.note_jump(behind=True, keeps_gradients=keeps)
    round_ = peer.gradient_rounds.open(NEXT, accumulating_s=0.0, background_s=0.0)
    assert round_.samples == samples


def test_a_stale_peer_does_not_count_while_one_with_newer_parameters_has_a_break() -> None:
    peer = Peer()
    peer.accumulate()
    peer.hear(round=ROUND, averaged=ROUND, takes_part=False, away=True)
    peer.consistency.note_jump(behind=True, keeps_gradients=False)
    assert peer.gradient_rounds.open(NEXT, accumulating_s=0.0, background_s=0.0).samples == 0


@pytest.mark.parametrize("live_peers", [1, 2])
def test_a_step_beside_other_peers_asks_for_parameter_averaging(live_peers: int) -> None:
    peer = Peer(live_peers)
    finish(peer, NoOtherPeers())
    assert peer.outcomes() == ["alone"]
    assert peer.consistency.unsynchronised_since == (NEXT if live_peers > 1 else 0)
    own = peer.tracker.view.own
    assert (own.averaged, own.met_averaged) == (NEXT, 0)


@pytest.mark.parametrize("error", [RuntimeError("no network"), ExcludedRoundFailed("no network")])
def test_refused_gradients_are_not_applied_after_a_failure(error: Exception) -> None:
    peer = Peer()
    round_ = finish(peer, error)
    refused = isinstance(error, ExcludedRoundFailed)
    assert peer.outcomes() == ["skipped" if refused else "local"]
    assert dict(peer.events)["fallback"]["choice"] == ("skip" if refused else "local")
    assert (round_.samples, round_.skipped) == ((0, True) if refused else (32, False))
    assert peer.consistency.unsynchronised_since == NEXT


def test_own_gradients_that_are_not_finite_are_skipped() -> None:
    peer = Peer(live_peers=1)
    (parameter,) = peer.grad_averager.parameters
    parameter.grad = torch.tensor([1.0, torch.nan])
    peer.grad_averager.accumulate_grads_(32)
    round_ = peer.gradient_rounds.open(NEXT, accumulating_s=0.0, background_s=0.0)
    assert peer.gradient_rounds.run(round_) is None
    assert peer.outcomes() == ["skipped"] and round_.samples == 0
    assert dict(peer.events)["rejected"]["reason"] == "not_finite"


def test_an_averager_that_does_not_answer_costs_one_averaging_of_parameters() -> None:
    peer = Peer()
    assert peer.parameter_rounds.begin(NEXT) is None
    assert peer.state.averaging_reason == "failed_round"
    own = peer.tracker.view.own
    assert (own.synchronised, own.met_synchronised) == (NEXT, 0)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("stale", "joined"),
        ("settling", "joined"),
        ("failed", "failed_round"),
        ("apart", "partition"),
    ],
)
def test_a_group_averages_parameters_for_the_reason_that_a_peer_gives(
    cause: str, reason: str
) -> None:
    asking, peer = Peer(), Peer()
    if cause in ("stale", "settling"):
        setattr(asking.consistency, cause, True)
    else:
        asking.consistency.note_failure(ROUND)
    if cause == "apart":
        back = frozenset({OTHER.to_bytes()})
        asking.partitions.note_reunion(Reunion(1, back), ROUND, back)
    assert asking.state.averaging_reason == reason
    peer.state_averager.control = control = Future()
    average(peer, asking.state.averaging_reason)
    assert peer.parameter_rounds.begin(NEXT) is control
    control.set_result(RoundResult({PEER: None, OTHER: None}, phases=(COMPLETE,)))
    event = dict(peer.events)["state_round"]
    assert (event["reason"], event["outcome"]) == (reason, "averaged")


def test_without_a_reason_parameters_are_averaged_by_schedule_only() -> None:
    peer, by_schedule = Peer(every=None), Peer(every=1)
    by_schedule.state_averager.control = control = Future()
    for each in (peer, by_schedule):
        average(each, None)
    assert peer.parameter_rounds.begin(NEXT) is None
    assert by_schedule.parameter_rounds.begin(NEXT) is control
    control.set_exception(RuntimeError("no network"))
    event = dict(by_schedule.events)["state_round"]
    assert (event["reason"], event["outcome"]) == ("period", "failed")
    assert by_schedule.state.averaging_reason == "failed_round"


def test_parameters_that_were_averaged_in_part_are_averaged_again() -> None:
    peer = Peer()
    peer.state_averager.control = control = Future()
    peer.parameter_rounds.begin(NEXT)
    partial_: Any = {**COMPLETE, "fraction": 0.5}
    control.set_result(RoundResult({PEER: None, OTHER: None}, phases=(partial_,)))
    assert dict(peer.events)["state_round"]["outcome"] == "partial"
    assert peer.state.averaging_reason == "failed_round"


@pytest.mark.parametrize(("failed", "left"), [(NEXT, 0), (NEXT + 1, NEXT + 1)])
def test_parameters_averaged_before_a_round_failed_do_not_repair_it(failed: int, left: int) -> None:
    """With delays the averaging of one round ends in the middle of the next."""
    peer = Peer()
    peer.state_averager.control = control = Future()
    peer.consistency.settling = True
    assert peer.parameter_rounds.begin(NEXT) is control
    assert not peer.state.parameters_reported.is_set()
    peer.consistency.note_failure(failed)
    control.set_result({PEER: None, OTHER: None})
    assert peer.consistency.unsynchronised_since == left and not peer.consistency.settling
    assert peer.state.parameters_reported.is_set()
    assert peer.tracker.view.own.met_synchronised == NEXT


def test_a_wait_for_parameters_ends_although_their_report_fails() -> None:
    peer = Peer()
    peer.state_averager.control = control = Future()
    peer.parameter_rounds.begin(NEXT)
    control.set_result(None)  # a result that cannot be read
    assert peer.state.parameters_reported.is_set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("averager_opts", {"target_group_size": 4}),
        ("grad_averager_factory", partial(GradientAverager, target_group_size=4)),
    ],
)
def test_a_group_size_is_refused_and_not_ignored(name: str, value: Any) -> None:
    options: dict[str, Any] = {"dht": SimpleNamespace(client_mode=False), name: value}
    with pytest.raises(ConfigError, match=f"{name}.target_group_size: 4 is not valid: absent"):
        RayhiveOptimizer(**options)


@pytest.mark.parametrize(
    ("every", "options", "period", "along"),
    [
        (4, {"extra_tensors": EXTRAS}, 4, 0),
        ("auto", {}, None, 0),
        ("auto", {"extra_tensors": EXTRAS[1:]}, None, 0),
        ("auto", {"extra_tensors": EXTRAS}, None, 1),
        ("auto", {"extra_tensors": EXTRAS, "aggregation": "trimmed_mean"}, None, 1),
        ("auto", {"extra_tensors": EXTRAS, "grad_averager_factory": PowerSGD}, None, 1),
        ("auto", {"extra_tensors": EXTRAS, "aggregation": "centered_clipping"}, 1, 0),
        ("auto", {"extra_tensors": EXTRAS, "grad_averager_factory": lambda **options: 0}, 1, 0),
    ],
)
def test_auto_averages_extra_tensors_with_gradients_where_it_can(
    every: Any,
    options: dict[str, Any],
    period: int | None,
    along: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(parameter_rounds.logger, "info", said.append)
    given = {"aggregation": "mean", **options}
    found, extras = parameter_rounds.period_of(every, **given, matchmaking_time=5.0)
    assert (found, [id(each) for each in extras]) == (period, [id(EXTRAS[0])] * along)
    assert ["extra tensors" in text for text in said] == ([True] if period == 1 else [])
