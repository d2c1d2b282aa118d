"""hivemind's own optimizer in a Lightning trainer, without rayhive's averagers.

:class:`PlainHivemindStrategy` sets it up as the documented strategy (``lightning-hivemind``) does
by default. It exists as a baseline for comparison; :class:`rayhive.HivemindStrategy` is the one
to train with.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from rayhive.strategy.schedulers import refuse_plateau

#: Interval at which a peer that waits for an averaging looks whether it has to stop [s].
_POLL_S = 0.2
#: hivemind's longest wait for the answer of a group's leader [s].
_REQUEST_S = 3.0


class WatchedOptimizer(hivemind.Optimizer):
    """hivemind's optimizer, with a record of the last round and of the loaded states.

    Args:
        stopping: Returns whether the peer is asked to stop. It then gives up the round for which it
            waits: the other peers may have stopped, and hivemind would wait twice the timeout.
        arguments: Arguments of hivemind's optimizer.

    Attributes:
        outcome: Outcome of the last round, as in a ``round`` event. A round that failed is
            ``skipped``: hivemind then steps with gradients of zero.
        group_size: Peers in the group of the last round; None if there was no group.
        waited_s: Time that the last averaging of gradients took [s].
        loaded: Fields of the ``state_loaded`` event of a state since :meth:`take_loaded`.
    """

    def __init__(self, stopping: Callable[[], bool], **arguments: Any) -> None:
        self._stopping = stopping
        self._reset()
        self.loaded: dict[str, Any] | None = None
        super().__init__(**arguments)

    def _reset(self) -> None:
        self.outcome = "alone"
        self.group_size: int | None = None
        self.waited_s: float | None = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Accumulate a batch, and step if the round is over."""
        self._reset()
        return super().step(*args, **kwargs)

    def _average_gradients_and_load_into_optimizer(self, control: Any) -> None:
        began = time.perf_counter()
        if control is not None and not self._completed(control):
            control.cancel()
            self.average_state_every = sys.maxsize
        super()._average_gradients_and_load_into_optimizer(control)
        self.waited_s = time.perf_counter() - began
        self.outcome = "skipped"
        done = control is not None and control.done() and not control.cancelled()
        if done and control.exception() is None:
            self.outcome, self.group_size = "averaged", len(control.result())

    def _completed(self, control: Any) -> bool:
        """Wait for the end of an averaging; return False if the peer is asked to stop before."""
        done = threading.Event()
        control.add_done_callback(lambda _: done.set())
        while not done.wait(_POLL_S):
            if self._stopping():
                return False
        return True

    def load_state_from_peers(self, **kwargs: Any) -> None:
        """Load the newest state of another peer."""
        began, before = time.perf_counter(), self.local_epoch
        super().load_state_from_peers(**kwargs)
        seconds = time.perf_counter() - began
        self.loaded = {"round_before": before, "round": self.local_epoch, "seconds": seconds}

    def take_loaded(self) -> dict[str, Any] | None:
        """Return the last loaded state, once."""
        loaded, self.loaded = self.loaded, None
        return loaded


def short_requests(matchmaking_time: float) -> dict[str, Any]:
    """Return the arguments with which requests end before the matchmaking, as hivemind recommends.

    Two peers that ask each other otherwise wait for each other until ``averaging_timeout`` (see
    hivemind's ``Matchmaking``).

    Args:
        matchmaking_time: hivemind's time for forming a group [s].
    """
    if matchmaking_time > _REQUEST_S:
        return {}
    options = {"request_timeout": matchmaking_time / 2}
    factory = functools.partial(GradientAverager, **options)
    # hivemind 1.1.12 passes averager_opts to the averager of the state only
    return {"averager_opts": options, "grad_averager_factory": factory}


class PlainHivemindStrategy(SingleDeviceStrategy):
    """Lightning strategy with hivemind's optimizer as the documented strategy sets it up.

    Args:
        device: Device of the module.
        dht: The peer's DHT.
        stopping: Returns whether the peer is asked to stop.
        arguments: Arguments of hivemind's optimizer.
    """

    def __init__(
        self, device: str, dht: hivemind.DHT, stopping: Callable[[], bool], **arguments: Any
    ) -> None:
        super().__init__(device=torch.device(device))
        self._dht, self._stopping, self._arguments = dht, stopping, arguments
        self.swarm: WatchedOptimizer | None = None

    def setup(self, trainer: Trainer) -> None:
        """Replace the optimizer of the module by hivemind's."""
        super().setup(trainer)
        (optimizer,) = self.optimizers
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        refuse_plateau(schedulers)
        for config in self.lr_scheduler_configs:
            config.frequency = sys.maxsize  # hivemind steps it once a round
        self.swarm = WatchedOptimizer(
            self._stopping,
            dht=self._dht,
            optimizer=optimizer,
            scheduler=schedulers[0] if schedulers else None,
            delay_state_averaging=False,
            **short_requests(self._arguments.get("matchmaking_time", 15.0)),
            **self._arguments,
        )
        self.optimizers = [self.swarm]

    def leave(self) -> None:
        """End hivemind's processes; the DHT has to live until then."""
        if self.swarm is not None:
            self.swarm.shutdown()
            self.swarm = None
