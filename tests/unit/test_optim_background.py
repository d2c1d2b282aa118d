"""What a peer does in the background is awaited to its end, however long a round lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayhive.averaging.gradient_averager import RayhiveGradientAverager
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.errors import PeerError
from rayhive.optim import background
from rayhive.optim.local_rule import LocalStepsRule
from rayhive.optim.local_steps import LocalSteps
from tests.unit.averaging_fakes import PEER
from tests.unit.optim_fakes import Peer


def test_background_work_is_awaited_to_its_end() -> None:
    peer = Peer()
    averager = peer.state_averager
    averager.pending_updates = {Future(), Future()}
    background.finish(peer.state)
    assert averager.steps == 2
    averager.pending_updates = {Future() for _ in range(2 * background.BACKGROUND_WAITS)}
    with pytest.raises(PeerError, match="does not end"):
        background.finish(peer.state)


def test_background_work_that_does_not_end_is_cancelled_at_shutdown() -> None:
    peer = Peer()
    peer.state_averager.pending_updates = {Future()}
    background.end(peer.state, patience=0.01)
    assert peer.interrupts == 1
    assert peer.state_averager.steps == 0, "no further wait for it"
    done: Future[None] = Future()
    done.set_result(None)
    peer.state_averager.pending_updates = {done}
    background.end(peer.state, patience=0.01)
    assert (peer.interrupts, peer.state_averager.steps) == (1, 1)


def _download(peer: Peer) -> None:
    peer.sync.download()


def _reunite(peer: Peer) -> None:
    peer.sync._join_newest_round()


@pytest.mark.parametrize("change", [_download, _reunite])
def test_a_change_of_the_round_awaits_all_background_work(change: Callable[[Peer], None]) -> None:
    peer = Peer()
    peer.state_averager.pending_updates = {Future() for _ in range(3)}
    change(peer)
    assert not peer.state_averager.pending_updates


@pytest.mark.parametrize("batches", [0, 1])
def test_a_last_round_that_outlasts_its_timeout_reaches_the_module(batches: int) -> None:
    """With delays and local steps: 3 batches enter the round, others come while it runs."""
    parameter = torch.nn.Parameter(torch.tensor([10.0, 10.0]))
    dht: Any = SimpleNamespace(client_mode=False, peer_id=PEER)
    rule = LocalStepsRule(4, 1.0, 0.0, "keep")
    averager = RayhiveStateAverager(
        optimizer=rule.outer_optimizer,
        params=[{"params": [parameter]}],
        dht=dht,
        prefix="test",
        start=False,
        offload_optimizer=True,
        custom_gradients=True,
        allreduce_timeout=0.05,
    )
    gradients = RayhiveGradientAverager([parameter], dht=dht, prefix="test", start=False)
    inner = torch.optim.SGD([parameter], lr=1.0)
    local = LocalSteps(rule, inner, [parameter], gradients, delayed=True)
    averager.on_parameters = local.adopt

    def train(count: int) -> None:
        for _ in range(count):
            parameter.grad = torch.ones(2)
            local.step(8)

    train(3)
    local.take(1)
    gradients.reset_accumulated_grads_()
    late = threading.Event()
    (outer,) = [p for group in averager.optimizer.param_groups for p in group["params"]]

    def hand_over() -> None:
        assert late.wait(30)
        outer.grad = torch.full((2,), 2.0)

    delayed = {"delay_optimizer_step": True, "delay_averaging": True}
    averager.step(increment_epoch=True, optimizer_step=True, wait_for_trigger=hand_over, **delayed)
    train(batches)
    waits: list[int] = []

    def moved() -> float:
        waits.append(1)
        if len(waits) == 4:
            late.set()
        return 0.0

    peer: Any = SimpleNamespace(
        state_averager=averager,
        grad_averager=None,
        watchdog=SimpleNamespace(check=lambda: None),
        moved=moved,
        round_timeout=0.4,
        averaging_timeout=0.05,
        parameters_reported=threading.Event(),
    )
    peer.parameters_reported.set()
    local.show_outer()  # as a validation does
    background.finish(peer)
    assert len(waits) >= 4 and not averager.pending_updates
    assert outer.tolist() == [8.0, 8.0]
    assert parameter.tolist() == [8.0, 8.0], "the module has the parameters of the swarm"
    local.hide_outer()
    assert parameter.tolist() == [8.0 - batches] * 2, "and then its own, with its own progress"
