"""Construction of the averagers of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.state_averager import TrainingStateAverager

from rayhive.averaging.factory import takes_rules, with_our_averager
from rayhive.averaging.gradient_averager import shared_zeros
from rayhive.averaging.quorum import Quorum
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.errors import ConfigError, Problem
from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.spec import Aggregation, OutlierFilterRule


def averager_rules(
    outlier_filter: OutlierFilterRule,
    aggregation: Aggregation,
    error_feedback: bool,
    trusted_network: bool,
    min_peers: int | None,
    grace_s: float,
    extra_tensors: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Return the arguments of a gradient averager that are alike for all peers."""
    rules: dict[str, Any] = {
        "outlier_filter": outlier_filter,
        "aggregation": aggregation,
        "trusted_network": trusted_network,
    }
    if extra_tensors:
        rules["extra_tensors"] = extra_tensors
    if error_feedback:
        rules["error_feedback"] = True
    if min_peers is not None:
        rules["quorum"] = Quorum(min_peers, grace_s)
    return rules


def make_tracker(
    optimizer: hivemind.Optimizer, target_batch_size: int, /, **options: Any
) -> LiveProgressTracker:
    """Return a tracker of the swarm's progress that is not started yet.

    Args:
        optimizer: The optimizer.
        target_batch_size: Samples of a round, over the swarm.
        options: Further options of the tracker.
    """
    return LiveProgressTracker(
        dht=optimizer.dht,
        prefix=optimizer.run_id,
        target_batch_size=target_batch_size,
        client_mode=optimizer.client_mode,
        start=False,  # its thread must not hold a lock during a fork
        **options,
    )


def make_state_averager(
    optimizer: hivemind.Optimizer, rules: Mapping[str, Any], /, **options: Any
) -> RayhiveStateAverager:
    """Return a running averager of the training state.

    Args:
        optimizer: The optimizer.
        rules: Result of :func:`averager_rules`.
        options: Further options of the averager.
    """
    own: dict[str, Any] = {
        "outlier_filter": rules["outlier_filter"],
        "trusted_network": rules["trusted_network"],
        "elsewhere": rules.get("extra_tensors", ()),
        "offload_optimizer": optimizer.offload_optimizer,
        "custom_gradients": optimizer.offload_optimizer,
        "status_loglevel": optimizer.status_loglevel,
    }
    shared = averager_options(optimizer, "state_averager")
    return RayhiveStateAverager(**{**shared, **own, **options})


def make_gradient_averager(
    optimizer: hivemind.Optimizer,
    factory: Callable[..., GradientAverager] | None,
    rules: Mapping[str, Any],
    /,
    **options: Any,
) -> GradientAverager:
    """Return a running gradient averager.

    Args:
        optimizer: The optimizer; its state averager exists already.
        factory: The user's factory; hivemind's own averagers in it are replaced by rayhive's.
        rules: Result of :func:`averager_rules`; a factory of the user's own class gets none.
        options: Further options of the averager.
    """
    factory = with_our_averager(factory)
    own: dict[str, Any] = {}
    if takes_rules(factory):
        own = {**rules, "trainer_tensors": optimizer.state_averager.trainer_tensors}
        if optimizer.offload_optimizer:  # in the type of the offloaded parameters
            own["averaged_grads"] = shared_zeros(optimized_parameters(optimizer.state_averager))
    averager: GradientAverager = factory(
        **{
            **own,
            **averager_options(optimizer, "grad_averager"),
            "parameters": optimizer.state_averager.main_parameters,
            **options,
        }
    )
    if optimizer.offload_optimizer:
        with averager.get_tensors() as gradients:
            parameters = optimized_parameters(optimizer.state_averager)
            for parameter, gradient in zip(parameters, gradients[: len(parameters)], strict=True):
                parameter.grad = gradient
    return averager


def optimized_parameters(averager: TrainingStateAverager) -> list[torch.Tensor]:
    """Return the parameters that the inner optimizer steps, in order."""
    groups = averager.optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def averager_options(optimizer: hivemind.Optimizer, name: str) -> dict[str, Any]:
    """Return the options that both averagers share; ``name`` tells their groups apart."""
    return {
        "dht": optimizer.dht,
        "prefix": f"{optimizer.run_id}_{name}",
        "min_matchmaking_time": optimizer.matchmaking_time,
        "allreduce_timeout": optimizer.allreduce_timeout,
        "shutdown_timeout": optimizer.shutdown_timeout,
        "next_chunk_timeout": optimizer.next_chunk_timeout,
        "client_mode": optimizer.client_mode,
        "auxiliary": optimizer.auxiliary,
        "start": True,
    }


def refuse_group_size(options: Mapping[str, Any]) -> None:
    """Refuse a ``target_group_size`` among an optimizer's arguments.

    Raises:
        ConfigError: There is one.
    """
    if problems := list(group_size_problems(options)):
        raise ConfigError(problems)


def group_size_problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Find a ``target_group_size`` among an optimizer's arguments: groups have no fixed size."""
    factory = options.get("grad_averager_factory")
    for name, given in (
        ("averager_opts", options.get("averager_opts")),
        ("grad_averager_factory", getattr(factory, "keywords", None)),
    ):
        if given and "target_group_size" in given:
            yield Problem(
                f"{name}.target_group_size",
                given["target_group_size"],
                "absent: the group of a round is every peer that takes part",
            )
