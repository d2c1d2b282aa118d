"""Averagers of several peers in one process, each with a DHT and a p2pd, and their rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hivemind
import torch

from rayhive.averaging.round_result import RoundResult
from rayhive.membership.view import Member
from tests.integration.averager_harness import SHAPES

#: Long enough that a group which waits for its window fails the test by its limit.
NEVER = 60.0
#: Limits of an all-reduce that no round of a scenario may wait out.
PATIENT = {"sender_timeout": 200.0, "reducer_timeout": 300.0}


@contextmanager
def swarm(peers: int) -> Iterator[list[hivemind.DHT]]:
    dhts: list[hivemind.DHT] = []
    try:
        for _ in range(peers):
            first = [str(address) for address in dhts[0].get_visible_maddrs()] if dhts else []
            dhts.append(
                hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=first)
            )
        yield dhts
    finally:
        for dht in dhts:
            dht.shutdown()


@contextmanager
def averagers(
    dhts: Sequence[hivemind.DHT], make: Callable[..., Any], **options: Any
) -> Iterator[list[Any]]:
    made: list[Any] = []
    options = {"min_matchmaking_time": NEVER, "target_group_size": len(dhts), **options}
    try:
        for index, dht in enumerate(dhts):
            generator = torch.Generator().manual_seed(index)
            parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
            for parameter in parameters[:-1]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            made.append(make(parameters=parameters, dht=dht, start=True, **options))
        yield made
    finally:
        for averager in made:
            averager.shutdown()


def begin(peers: Sequence[Any], gather: Any = None) -> list[Any]:
    """Let every peer contribute its gradients to a round; return the controls of their steps."""
    controls = []
    for averager in peers:
        averager.accumulate_grads_(batch_size=1)
        controls.append(averager.step(wait=False, timeout=NEVER + 30, gather=gather))
    return controls


def one_round(peers: Sequence[Any], timeout: float = 40.0, gather: Any = None) -> list[RoundResult]:
    """Let every peer contribute its gradients once; return the results."""
    results = [control.result(timeout) for control in begin(peers, gather)]
    for averager in peers:
        averager.notify_used_averaged_gradients()
    return results


def gradients_given(averager: Any) -> list[torch.Tensor]:
    """Return the gradients of an averager's parameters; zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in averager.parameters]


def mean_gradients(peers: Sequence[Any]) -> list[torch.Tensor]:
    columns = zip(*(gradients_given(averager) for averager in peers), strict=True)
    return [torch.stack(gradients).mean(0) for gradients in columns]


def worst_error(averager: Any, expected: Sequence[torch.Tensor]) -> float:
    """Return the L2 error of the averaged gradients over the L2 norm of the true average."""
    with averager.get_tensors() as tensors:
        pairs = list(zip(tensors, expected, strict=True))
    error = sum(float((a - b).square().sum()) for a, b in pairs)
    return (error / sum(float(b.square().sum()) for b in expected)) ** 0.5


def averaged_by(averager: Any) -> list[torch.Tensor]:
    """Return a copy of an averager's tensors."""
    with averager.get_tensors() as tensors:
        return [tensor.clone() for tensor in tensors]


def spread(peers: Sequence[Any]) -> float:
    """Return the largest difference between two peers in any averaged element."""
    columns = zip(*(averaged_by(averager) for averager in peers), strict=True)
    return max(float((a - b).abs().max()) for a, *others in columns for b in others)


def members(group: Sequence[Any]) -> tuple[Member, ...]:
    return tuple(Member(averager.dht.peer_id.to_bytes(), False, 0, 0, 0) for averager in group)


def tell(group: Sequence[Any], present: Sequence[Any]) -> None:
    for averager in group:
        averager.set_members(members(present))
