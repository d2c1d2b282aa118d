"""Baseline ``hivemind``: hivemind's own optimizer, as the documented strategy sets it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer

from rayhive.baselines.base import Baseline, Member
from rayhive.spec.replicate import PeerSpec
from rayhive.strategy.dht import meet, start_on_host
from rayhive.strategy.plain_hivemind import PlainHivemindStrategy, WatchedOptimizer


class PlainPeer(Member):
    """One peer of a swarm whose averagers are hivemind's."""

    in_step = False
    schedules_rounds = True

    def __init__(self, spec: PeerSpec, batch_size: int) -> None:
        super().__init__(spec, batch_size)
        self.round_size = spec.swarm.target_batch_size

    def listen(self, known: Sequence[str]) -> list[str]:
        """Start the DHT."""
        self._dht = start_on_host(self.spec.host)
        meet(self._dht, known)
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def strategy(self) -> PlainHivemindStrategy:
        """Return the strategy with the batch sizes and timeouts of the study."""
        swarm = self.spec.swarm
        self._strategy = PlainHivemindStrategy(
            "cuda:0" if self.spec.accelerator == "cuda" else "cpu",
            self._dht,
            self.stopping,
            run_id=self.spec.run_id,
            target_batch_size=swarm.target_batch_size,
            batch_size_per_step=self.batch_size,
            matchmaking_time=swarm.matchmaking_time,
            averaging_timeout=swarm.averaging_timeout,
        )
        return self._strategy

    @property
    def _swarm(self) -> WatchedOptimizer:
        assert self._strategy.swarm is not None
        return self._strategy.swarm

    def rounds(self, trainer: Trainer) -> int:
        """Return hivemind's epoch."""
        return int(self._swarm.local_epoch)

    def loaded_state(self) -> dict[str, Any] | None:
        """Return the fields of the event of a loaded state."""
        return self._swarm.take_loaded()

    def round_fields(self) -> dict[str, Any]:
        """Return outcome, group and time; hivemind counts no bytes."""
        swarm = self._swarm
        fields = {"group_size": swarm.group_size, "waited_s": swarm.waited_s}
        known = {name: value for name, value in fields.items() if value is not None}
        return {"outcome": swarm.outcome, **known}

    def close(self) -> None:
        """Leave the swarm, and end the DHT."""
        self._strategy.leave()
        self._dht.shutdown()


class Hivemind(Baseline):
    """hivemind.Optimizer with the defaults of the documented Lightning strategy.

    Batch sizes, matchmaking time and averaging timeout are those of the study.
    """

    about = "hivemind's own optimizer, as the documented Lightning strategy sets it up."
    member = PlainPeer

    def trains(self, spec: PeerSpec) -> bool:
        """Return True: peers may join at any time."""
        return True
