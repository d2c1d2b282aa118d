"""Workload, data, strategy and trainer of a peer, from its spec."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from rayhive.compression.payload import (
    allreduce_bytes,
    configuration_payload,
    fragment_payloads,
)
from rayhive.peer.callback import PeerTraining, TrainingMonitor
from rayhive.spec.axes import DRAW_ORDER
from rayhive.spec.replicate import PeerSpec
from rayhive.strategy.strategy import HivemindStrategy
from rayhive.workloads.loading import workload_of
from rayhive.workloads.plain.user_code import same_random_numbers


class PeerFit:
    """Workload, module and data of one peer, and its fit.

    Args:
        spec: The peer.
        share: Index of its share of the data, and number of shares; by default those of a swarm.

    Attributes:
        workload: Its workload.
        batch_size: Samples in one of its micro-batches.
        module: The module to train.

    Raises:
        ConfigError: There is no such workload, or no sample for this peer.
    """

    def __init__(self, spec: PeerSpec, share: tuple[int, int] | None = None) -> None:
        torch.set_num_threads(spec.swarm.threads_per_peer)
        self._spec = spec
        self.workload = workload_of(spec.workload)
        self.batch_size = spec.swarm.batch_size or self.workload.default_batch_size
        index, shares = share or (spec.data_index, spec.peers)
        self._loader = self.workload.train_loader(
            peer=index, peers=shares, batch_size=self.batch_size, seed=spec.seed
        )
        self.module: LightningModule = self.workload.module(spec.seed)
        for hook in ("configure_model", "setup"):  # what makes layers once more in a fit
            setattr(self.module, hook, _seeded(getattr(self.module, hook), spec.seed))

    def strategy(self, **network: Any) -> HivemindStrategy:
        """Return the strategy of the spec.

        Args:
            network: Arguments of the strategy that the spec does not hold: a DHT, or addresses,
                and ``on_event``.
        """
        return HivemindStrategy(
            scheduler_fn=self.workload.scheduler_fn(),
            extra_tensors=self.workload.extra_tensors,
            **strategy_arguments(self._spec, self.batch_size),
            **network,
        )

    def trainer(self, strategy: HivemindStrategy, monitor: TrainingMonitor) -> Trainer:
        """Return a trainer that runs until the budget is spent or ``monitor`` stops it."""
        return self.make_trainer(strategy, PeerTraining(self._spec, self.workload, monitor))

    def make_trainer(self, strategy: Strategy | str, callback: Callback, **more: Any) -> Trainer:
        """Return a trainer that runs until a callback stops it, and writes no files.

        Args:
            strategy: Its strategy.
            callback: The callback.
            more: Further arguments of the trainer.
        """
        if getattr(strategy, "cluster_environment", None) is None:
            # else Lightning looks for one, and starts MPI where mpi4py is installed
            more["plugins"] = [LightningEnvironment()]
        return Trainer(
            strategy=strategy,
            accelerator=self._spec.accelerator,
            devices=1,
            max_epochs=-1,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            # Evaluations belong to the workload.
            limit_val_batches=0,
            num_sanity_val_steps=0,
            **more,
        )

    def run(self, trainer: Trainer, checkpoint: Path | None = None) -> None:
        """Train with seeded random numbers until the trainer stops.

        Args:
            trainer: The trainer.
            checkpoint: Checkpoint of Lightning to go on from.
        """
        torch.manual_seed((self._spec.seed * 1_000_003 + self._spec.data_index) % 2**63)
        trainer.fit(self.module, self._loader, ckpt_path=checkpoint, weights_only=False)


def _seeded(hook: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """Return a hook that draws the same random numbers on all peers of a replicate."""

    @functools.wraps(hook)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        with same_random_numbers(seed):
            return hook(*args, **kwargs)

    return seeded


def strategy_arguments(spec: PeerSpec, batch_size: int) -> dict[str, Any]:
    """Return the keyword arguments of :class:`HivemindStrategy` for a peer.

    Args:
        spec: The peer.
        batch_size: Samples in one of its micro-batches.
    """
    swarm = spec.swarm
    arguments: dict[str, Any] = {
        "run_id": spec.run_id,
        "target_batch_size": swarm.target_batch_size,
        "batch_size": batch_size,
        "matchmaking_time": swarm.matchmaking_time,
        "averaging_timeout": swarm.averaging_timeout,
        "straggler_timeout": swarm.straggler_timeout,
        "tracker_opts": {"silence": swarm.metadata_expiration},
        "outlier_filter": swarm.outlier_filter,
        "aggregation": swarm.aggregation,
        "trusted_network": swarm.trusted_network,
    }
    rate = swarm.link_rate(spec.peer)
    if rate is not None:
        arguments["averager_opts"] = {"bandwidth": rate}
    values = spec.configuration.values
    for axis in DRAW_ORDER:
        if axis.applies(values):
            axis.apply(arguments, values)
    return arguments


def payload_fields(
    spec: PeerSpec, parameters: list[torch.Tensor], extras: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Return the fields of ``peer_ready`` that predict the traffic of a round of gradients.

    Args:
        spec: The peer.
        parameters: Its parameters.
        extras: Shapes of the extra tensors that enter the round.
    """
    shapes = [list(parameter.shape) for parameter in parameters]
    gradients = [tuple(shape) for shape in shapes]
    rates = [spec.swarm.link_rate(peer) for peer in range(spec.peers)]
    predicted = configuration_payload(gradients, spec.configuration, rates=rates, extras=extras)
    rounds = fragment_payloads(gradients, spec.configuration, rates=rates, extras=extras)
    sent = sum(each.bytes_per_transfer for each in rounds)
    total = allreduce_bytes(sent, spec.peers, spec.configuration.groups(spec.peers))
    return {
        "shapes": shapes,
        "dense_payload_bytes": sum(each.dense_bytes for each in rounds) // len(rounds),
        "payload_exact": predicted.exact and len(rounds) == 1,
        "predicted_payload_bytes_per_round": float(total) / len(rounds),
        "compressed_tensors": list(predicted.compressed),
    }
