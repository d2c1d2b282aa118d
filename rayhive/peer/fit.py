"""The fit of one peer: module, strategy and trainer from its spec."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from rayhive.peer.callback import PeerTraining
from rayhive.peer.from_spec import make_trainer, strategy_arguments, workload_and_data
from rayhive.spec.replicate import PeerSpec
from rayhive.strategy.strategy import HivemindStrategy
from rayhive.workloads.base import Workload


class PeerFit:
    """Workload, module and data of one peer, and its fit.

    Args:
        spec: The peer.

    Attributes:
        workload: Its workload.
        module: The module to train.

    Raises:
        ConfigError: There is no such workload, or no sample for this peer.
    """

    def __init__(self, spec: PeerSpec) -> None:
        self.spec = spec
        torch.set_num_threads(spec.swarm.threads_per_peer)
        self.workload: Workload
        self._loader: DataLoader[Any]
        self.workload, self._batch_size, self._loader = workload_and_data(spec)
        self.module: LightningModule = self.workload.module(spec.seed)

    def strategy(self, **network: Any) -> HivemindStrategy:
        """Return the strategy of the spec.

        Args:
            network: Arguments of the strategy that the spec does not hold: a DHT, or addresses,
                and ``on_event``.
        """
        return HivemindStrategy(
            scheduler_fn=self.workload.scheduler_fn(),
            extra_tensors=self.workload.extra_tensors,
            **strategy_arguments(self.spec, self._batch_size),
            **network,
        )

    def trainer(self, strategy: HivemindStrategy, training: PeerTraining) -> Trainer:
        """Return a trainer that ``training`` stops."""
        return make_trainer(self.spec, strategy, training)

    def run(self, trainer: Trainer) -> None:
        """Train with seeded random numbers until the callback stops the trainer."""
        torch.manual_seed(self.spec.seed * 1_000_003 + self.spec.data_index)
        trainer.fit(self.module, self._loader)
