"""From a peer's spec to what it trains and how: the one place where axes become flags."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from rayhive.compression.payload import Payload, allreduce_bytes, payload
from rayhive.registry import CODECS
from rayhive.spec import DEFAULT_MIN_COMPRESSION_RATIO, DEFAULT_THRESHOLD, Configuration
from rayhive.spec.replicate import PeerSpec
from rayhive.spec.rules import DELAY_FLAGS
from rayhive.workloads.base import Workload
from rayhive.workloads.loading import load_workload


def workload_and_data(spec: PeerSpec) -> tuple[Workload, int, DataLoader[Any]]:
    """Return what a peer trains, the samples of one of its micro-batches, and these.

    Raises:
        ConfigError: There is no such workload, or no sample for this peer.
    """
    given = spec.workload
    workload = load_workload(given.name, given.import_path, given.args)
    batch_size = spec.swarm.batch_size or workload.default_batch_size
    loader = workload.train_loader(
        peer=spec.data_index, peers=spec.peers, batch_size=batch_size, seed=spec.seed
    )
    return workload, batch_size, loader


def make_trainer(spec: PeerSpec, strategy: Strategy, callback: Callback) -> Trainer:
    """Return a trainer that goes on until ``callback`` ends it, and writes nothing."""
    return Trainer(
        strategy=strategy,
        accelerator=spec.accelerator,
        devices=1,
        max_epochs=-1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def strategy_arguments(spec: PeerSpec, batch_size: int) -> dict[str, Any]:
    """Return the keyword arguments of :class:`HivemindStrategy` that ``spec`` stands for.

    Args:
        spec: The peer.
        batch_size: Samples of one of its micro-batches.
    """
    from rayhive.averaging.averagers import RayhivePowerSGDAverager

    configuration, swarm = spec.configuration, spec.swarm
    arguments: dict[str, Any] = {
        "run_id": spec.run_id,
        "target_batch_size": swarm.target_batch_size,
        "batch_size": batch_size,
        "matchmaking_time": swarm.matchmaking_time,
        "averaging_timeout": swarm.averaging_timeout,
        "straggler_timeout": swarm.straggler_timeout,
        "average_state_every": swarm.average_state_every,
        "state_averaging_compression": CODECS.get(swarm.state_codec)().build(None),
        "tracker_opts": {"silence": swarm.metadata_expiration},
        "outlier_filter": swarm.outlier_filter,
        **DELAY_FLAGS[configuration.delay],
    }
    rate = swarm.rate_of(spec.peer)
    if rate is not None:
        arguments["averager_opts"] = {"bandwidth": rate}
    if swarm.use_local_updates:
        arguments["use_local_updates"] = True
        return arguments
    arguments["aggregation"] = swarm.aggregation
    arguments["grad_compression"] = CODECS.get(configuration.codec)().build(
        _threshold(configuration)
    )
    if configuration.powersgd_rank is not None:
        arguments["grad_averager_factory"] = partial(
            RayhivePowerSGDAverager,
            averager_rank=configuration.powersgd_rank,
            min_compression_ratio=_ratio(configuration),
        )
    return arguments


def _threshold(configuration: Configuration) -> int | None:
    if not CODECS.get(configuration.codec).uses_threshold:
        return None
    return configuration.threshold or DEFAULT_THRESHOLD


def _ratio(configuration: Configuration) -> float:
    ratio = configuration.min_compression_ratio
    return DEFAULT_MIN_COMPRESSION_RATIO if ratio is None else ratio


def predicted_payload(shapes: list[tuple[int, ...]], configuration: Configuration) -> Payload:
    """Return what a gradient round of this configuration sends, from shapes alone."""
    return payload(
        shapes,
        codec=configuration.codec,
        threshold=_threshold(configuration),
        powersgd_rank=configuration.powersgd_rank,
        min_compression_ratio=_ratio(configuration),
    )


def payload_fields(spec: PeerSpec, parameters: list[torch.Tensor]) -> dict[str, Any]:
    """Return the fields of ``peer_ready`` that predict the traffic of a round."""
    shapes = [tuple(parameter.shape) for parameter in parameters]
    if spec.swarm.use_local_updates:
        return {"shapes": shapes, "payload_exact": False}
    predicted = predicted_payload(shapes, spec.configuration)
    return {
        "shapes": shapes,
        "dense_payload_bytes": predicted.dense_bytes,
        "payload_exact": predicted.exact,
        "predicted_payload_bytes_per_round": float(
            allreduce_bytes(predicted.bytes_per_transfer, spec.peers)
        ),
        "compressed_tensors": list(predicted.compressed),
    }
