"""What an optimizer makes of rounds that did not go as they should, each step by itself."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.optim.grad_averager import GradientAverager

from rayhive.averaging.excluded import ExcludedRoundFailed
from rayhive.averaging.group_formation import NoOtherPeers
from rayhive.errors import ConfigError, PeerError
from rayhive.optim.components import BACKGROUND_WAITS, TOLD_S
from rayhive.optim.optimizer import RayhiveOptimizer
from rayhive.optim.state_sync import StateSync


class Fake(SimpleNamespace):
    """A peer in its fourth round; the test says what is unusual."""

    def __init__(self, **unusual: Any) -> None:
        usual: dict[str, Any] = {
            "local_epoch": 3, "live_peers": 2, "averaging_timeout": 1.0, "average_state_every": 1,
            "_step_timeout": 1.0, "_keeps": False,
            "delay_grad_averaging": False, "delay_optimizer_step": False,
            "_stale": False, "_astray": 0, "_settling": True, "_lost": frozenset(),
            "_average_state_soon": False, "_quiet": False, "_went_on": 0.0,
            "_state_told": threading.Event(),
            "grad_averager": SimpleNamespace(local_samples_accumulated=32),
            "_watch": SimpleNamespace(check=lambda: None),
            "_restore_own_gradients": lambda: None,
            "_state_gather": lambda round_: [round_],
        }  # fmt: skip
        super().__init__(**usual | unusual)
        self.ended: list[tuple[str, int, bool]] = []
        self.outcomes: list[str] = []
        self.tracker = SimpleNamespace(
            has_ended=lambda kind, round_, met, aloud=True: self.ended.append((kind, round_, met))
        )
        self._end_own = lambda record, outcome: self.outcomes.append(outcome)

    @property
    def _counts_for_nothing(self) -> bool:
        return bool(StateSync._counts_for_nothing.fget(self))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("live_peers", "keeps", "samples"), [(1, False, 32), (2, False, 0), (2, True, 32)]
)
def test_a_stale_peer_counts_again_when_nobody_has_newer_parameters(
    live_peers: int, keeps: bool, samples: int
) -> None:
    """One that kept its gradients while it was away counts with these."""
    peer = Fake(_stale=True, live_peers=live_peers, _keeps=keeps)
    assert RayhiveOptimizer._begin_record(peer)["samples"] == samples  # type: ignore[arg-type]


@pytest.mark.parametrize("live_peers", [1, 2])
def test_who_steps_alone_beside_others_wants_their_parameters(live_peers: int) -> None:
    def result(timeout: float) -> Any:
        raise NoOtherPeers

    peer = Fake(live_peers=live_peers)
    control: Any = SimpleNamespace(result=result)
    RayhiveOptimizer._finish_gradient_round(peer, control, {"round": 4})  # type: ignore[arg-type]
    assert peer.outcomes == ["alone"]
    assert peer._astray == (4 if live_peers > 1 else 0)
    assert peer.ended == [("averaged", 4, False)]


@pytest.mark.parametrize("error", [RuntimeError("no network"), ExcludedRoundFailed("no network")])
def test_gradients_that_the_others_refused_are_not_applied_after_a_failure(
    error: Exception,
) -> None:
    def result(timeout: float) -> Any:
        raise error

    events: list[str] = []
    peer: Any = Fake(
        _on_failure="local",
        _emit=lambda kind, **fields: events.append(fields["choice"]),
        _emit_refusals=lambda round_, told, tensors: None,
    )
    peer._fall_back = partial(RayhiveOptimizer._fall_back, peer)
    control: Any = SimpleNamespace(result=result, done=lambda: True)
    record = {"round": 4, "samples": 32, "began": 0.0}
    RayhiveOptimizer._finish_gradient_round(peer, control, record)
    refused = isinstance(error, ExcludedRoundFailed)
    assert peer.outcomes == ["skipped" if refused else "local"]
    assert events == ["skip" if refused else "local"]
    assert record["samples"] == (0 if refused else 32)
    assert peer._astray == 4


def test_an_averager_that_does_not_answer_costs_an_averaging_of_parameters() -> None:
    def schedule_step(**_: Any) -> Any:
        raise TimeoutError

    averager = SimpleNamespace(averaging_in_progress=False, schedule_step=schedule_step)
    peer = Fake(state_averager=averager)
    assert RayhiveOptimizer._state_control(peer, 4) is None  # type: ignore[arg-type]
    assert peer._astray
    assert peer.ended == [("synchronised", 4, False)]


def test_what_runs_in_the_background_is_waited_for_to_its_end() -> None:
    class Averager:
        pending_updates: tuple[str, ...] = ("a round", "its step")
        steps = 0

        def step(self, wait_for_delayed_updates: bool) -> None:
            assert wait_for_delayed_updates
            self.steps += 1
            self.pending_updates = self.pending_updates[1:]

    heard: list[float] = []
    told = SimpleNamespace(wait=heard.append)
    peer = Fake(state_averager=Averager(), _state_told=told)
    RayhiveOptimizer._finish_background(peer)  # type: ignore[arg-type]
    assert peer.state_averager.steps == 2
    assert heard == [TOLD_S], "what came of it is known before the next round begins"
    peer.state_averager.pending_updates = ("for ever",) * 2 * BACKGROUND_WAITS
    with pytest.raises(PeerError, match="does not end"):
        RayhiveOptimizer._finish_background(peer)  # type: ignore[arg-type]


@pytest.mark.parametrize(("failed", "left"), [(4, 0), (5, 5)])
def test_parameters_that_were_averaged_before_a_round_failed_do_not_mend_it(
    failed: int, left: int
) -> None:
    """With delays the averaging of one round ends in the middle of the next."""
    peer = Fake(_astray=failed, _emit_state_round=lambda *_: True)
    control: Any = SimpleNamespace(result=lambda: ())
    RayhiveOptimizer._end_state_round(peer, 4, 0.0, control)  # type: ignore[arg-type]
    assert peer._astray == left and not peer._settling
    assert peer._state_told.is_set()
    assert peer.ended == [("synchronised", 4, True)]


def test_who_waits_for_parameters_goes_on_although_their_report_fails() -> None:
    def fails(*_: Any) -> bool:
        raise OSError

    peer = Fake(_emit_state_round=fails)
    with pytest.raises(OSError):
        RayhiveOptimizer._end_state_round(peer, 4, 0.0, None)  # type: ignore[arg-type]
    assert peer._state_told.is_set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("averager_opts", {"target_group_size": 4}),
        ("grad_averager_factory", partial(GradientAverager, target_group_size=4)),
    ],
)
def test_a_size_of_groups_is_refused_and_not_ignored(name: str, value: Any) -> None:
    options: dict[str, Any] = {"dht": SimpleNamespace(client_mode=False), name: value}
    with pytest.raises(ConfigError, match=f"{name}.target_group_size: 4 is not valid: absent"):
        RayhiveOptimizer(**options)
