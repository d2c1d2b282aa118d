"""A peer in its fourth round, without processes and without a network."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch

from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.membership.view import Heartbeat
from rayhive.optim.gradient_rounds import GradientRounds
from rayhive.optim.parameter_rounds import ParameterRounds
from rayhive.optim.peer_state import EventReporter, PeerState
from rayhive.optim.state_sync import StateSync
from tests.unit.averaging_fakes import OTHER, PEER, unstarted

ROUND = 3


class Averager:
    """State averager whose steps take no time."""

    client_mode = averaging_in_progress = False
    allow_state_sharing = True
    refused_states: tuple[Any, ...] = ()

    def __init__(self) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([parameter], lr=1.0)
        self.parameter = parameter
        self.local_epoch = self.state_sharing_priority = ROUND
        self.pending_updates: set[Future[None]] = set()
        self.steps = self.downloads = 0
        self.newest = ROUND + 1
        self.control: Any = None

    def step(self, wait_for_delayed_updates: bool) -> None:
        assert wait_for_delayed_updates
        self.steps += 1
        if self.pending_updates:
            self.pending_updates.pop()

    def schedule_step(self, **_: Any) -> Any:
        if self.control is None:
            raise TimeoutError
        return self.control

    def load_state_from_peers(self, **_: Any) -> None:
        self.downloads += 1
        self.local_epoch = max(self.newest, self.local_epoch)  # hivemind refuses an older state


class Peer:
    """The optimizer's collaborators of one peer.

    Args:
        live_peers: Peers of the swarm, this one included.
        on_failure: Gradients to apply after a failure.
        clock: Time between batches [s].
        every: Rounds between two averagings of parameters; None averages them for a reason only.
    """

    def __init__(
        self,
        live_peers: int = 2,
        on_failure: Any = "local",
        clock: Callable[[], float] = time.monotonic,
        every: int | None = 1,
    ) -> None:
        dht: Any = SimpleNamespace(client_mode=False, peer_id=PEER)
        self.tracker = LiveProgressTracker(
            dht, "run", target_batch_size=64, clock=clock, start=False
        )
        self.tracker.jump_to(ROUND)
        self.tracker.take_part(True)
        if live_peers > 1:
            self.hear(round=ROUND, averaged=ROUND)
        self.state_averager = Averager()
        self.grad_averager = unstarted(_gradient_averager(), [(2,)])
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.interrupts = 0
        watchdog: Any = SimpleNamespace(
            check=lambda: None, interrupt=self._interrupt, resume=lambda: None
        )
        self.state = state = PeerState(
            tracker=self.tracker,
            state_averager=self.state_averager,  # type: ignore[arg-type]
            grad_averager=self.grad_averager,
            watchdog=watchdog,
            reporter=EventReporter(lambda kind, fields: self.events.append((kind, fields))),
            averaging_timeout=1.0,
            round_timeout=1.0,
        )
        self.consistency, self.partitions = state.consistency, state.partitions
        self.sync = StateSync(state, load_state_timeout=1.0, attempts=1)
        self.gradient_rounds = GradientRounds(
            peer=state,
            averager=self.grad_averager,
            peer_id=PEER,
            on_failure=on_failure,
            delayed=False,
            offloaded=False,
        )
        self.parameter_rounds = ParameterRounds(state, self.sync, every=every)

    def _interrupt(self) -> None:
        self.interrupts += 1

    def hear(self, **fields: Any) -> None:
        """Receive an announcement of the other peer."""
        own = self.tracker.view
        known = next((p.version for p in own.known()), 0)
        fields = {"takes_part": True, **fields}
        own.receive(Heartbeat(OTHER.to_bytes(), 0.0, version=known + 1, **fields))

    def accumulate(self, samples: int = 32) -> None:
        """Accumulate a gradient of ones."""
        (parameter,) = self.grad_averager.parameters
        parameter.grad = torch.ones(2)
        self.grad_averager.accumulate_grads_(samples)

    def outcomes(self) -> list[str]:
        """Return the outcomes of the reported gradient rounds."""
        return [fields["outcome"] for kind, fields in self.events if kind == "round"]

    def kinds(self) -> list[str]:
        """Return the kinds of the reported events."""
        return [kind for kind, _ in self.events]


def _gradient_averager() -> Any:
    from rayhive.averaging.gradient_averager import RayhiveGradientAverager

    return RayhiveGradientAverager
