"""A peer without company: no other threads, and no announcements."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.membership import progress_tracker
from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.membership.view import Heartbeat
from tests.unit.averaging_fakes import OTHER, PEER

DHT = SimpleNamespace(client_mode=False, peer_id=PEER)


class Loop:
    """Event loop thread that only counts the calls."""

    def __init__(self, *_: Any) -> None:
        self.ended, self.calls = threading.Event(), 0

    def call_soon(self, function: Any) -> None:
        self.calls += 1


def test_nothing_is_announced_until_another_peer_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(progress_tracker, "LoopThread", lambda *_: loop)
    tracker = LiveProgressTracker(DHT, "run", target_batch_size=8, start=False)
    tracker.take_part(True)
    tracker.report_local_progress(0, 8)
    assert tracker.ready_to_update_epoch
    tracker.has_ended("averaged", 1, met=False)
    tracker.update_epoch(1)
    assert loop.calls == 0
    tracker.view.receive(Heartbeat(OTHER.to_bytes(), 1.0, version=1, takes_part=True, round=1))
    assert not tracker.ready_to_update_epoch
    tracker.report_local_progress(1, 8)
    assert loop.calls
    assert tracker.ready_to_update_epoch


def averager() -> tuple[Any, list[threading.Thread]]:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    made = RayhiveStateAverager(
        dht=DHT, prefix="run", optimizer=optimizer, initialize_optimizer=False, start=False
    )
    threads: list[threading.Thread] = []
    optimizer.register_step_pre_hook(lambda *_: threads.append(threading.current_thread()))
    return made, threads


def test_a_step_that_is_waited_for_is_made_in_the_thread_that_asks() -> None:
    made, threads = averager()
    executor = made.step_executor
    made.step(increment_epoch=True, optimizer_step=True)
    assert threads == [threading.current_thread()]
    assert made.local_epoch == 1
    assert made.step_executor is executor
    assert torch.equal(made.main_parameters[0], torch.full((3,), -1.0))


def test_a_joiner_gets_a_copy_under_the_number_of_its_round() -> None:
    made, _ = averager()
    made.get_group_bits = lambda: ""  # its process, which does not run here, is asked for them
    made.custom_gradients = True  # as the optimizer has it: it hands them over itself
    made.step(increment_epoch=True, optimizer_step=True)
    metadata, (tensor, *_), _ = made.get_current_state()
    before = tensor.clone()
    made.main_parameters[0].grad = torch.ones(3)
    # while the next round is begun and its gradients are not there, the state is the last one's
    averaged, asked = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        assert averaged.wait(10)

    begun = {"increment_epoch": True, "optimizer_step": True, "wait_for_trigger": wait}
    stepping = threading.Thread(target=made.step, kwargs=begun)
    stepping.start()
    assert asked.wait(10)
    late, (same, *_), _ = made.get_current_state()
    averaged.set()
    stepping.join(10)
    newest, (other, *_), _ = made.get_current_state()
    assert (metadata["epoch"], late["epoch"], newest["epoch"]) == (1, 1, 2)
    assert torch.equal(tensor, before) and torch.equal(same, before)
    assert torch.equal(other, before - 1)
    made.stale_round = 0
    assert made.get_current_state()[0]["epoch"] == 0
    made.step_executor.shutdown()


def test_a_step_that_may_last_is_made_in_the_background() -> None:
    made, threads = averager()
    made.step(increment_epoch=True, optimizer_step=True, delay_averaging=True)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    made.step_executor.shutdown()
