"""Prediction of the bytes of a gradient round from tensor shapes and a configuration.

The module is pure Python: a sweep predicts and compares configurations without loading torch.

There are two sizes. The *payload* is one encoded copy of all tensors that a round averages. The
*all-reduce traffic* is the number of bytes that peers send for it: in a butterfly all-reduce each
part is sent by N - 1 peers to the peer that reduces it, which sends N - 1 replies of the same size.
The N peers together send 2(N - 1) payloads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from rayhive.compression.codecs.base import Codec, made
from rayhive.compression.fragments import split
from rayhive.compression.partition import Price, partition
from rayhive.compression.powersgd.shapes import (
    FACTOR_CODEC,
    Shape,
    compressed_tensors,
    factor_rank,
    matrix_dims,
    option_problems,
    phase_names,
)
from rayhive.compression.shares import Shares, reducer_shares
from rayhive.errors import ConfigError, Problem
from rayhive.spec import AXES, Configuration

#: Bytes of a float32 element.
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Phase:
    """One all-reduce of a round.

    Attributes:
        name: ``dense``, or PowerSGD's ``P`` or ``Q``, with a number in later iterations; as in
            ``RoundResult.phases``.
        elements: Elements of each averaged tensor, in order.
        bytes: Size of one encoded copy of these tensors.
    """

    name: str
    elements: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Payload:
    """Payload of one gradient round.

    Attributes:
        dense_bytes: Four bytes for every element of every tensor.
        phases: The all-reduces of the round, in order.
        compressed: Indices of the tensors that PowerSGD factorises.
        exact: Whether the sizes of the codec are independent of the content.
    """

    dense_bytes: int
    phases: tuple[Phase, ...]
    compressed: tuple[int, ...]
    exact: bool

    @property
    def bytes_per_transfer(self) -> int:
        """Size of one encoded copy of all tensors of the round [bytes]."""
        return sum(phase.bytes for phase in self.phases)

    @property
    def ratio(self) -> float:
        """Dense bytes divided by payload bytes."""
        return self.dense_bytes / self.bytes_per_transfer if self.bytes_per_transfer else math.inf


def payload(
    shapes: Iterable[Shape],
    *,
    codec: str = "none",
    threshold: int | None = None,
    top_k: int | None = None,
    powersgd_rank: int | None = None,
    min_compression_ratio: float | None = None,
    num_iters_per_step: int = 1,
    factor_codec: str = FACTOR_CODEC,
    peers: int = 1,
    rates: Sequence[float | None] | None = None,
    extras: Iterable[Shape] = (),
) -> Payload:
    """Predict the bytes of a gradient round.

    Args:
        shapes: Shape of every gradient, in the order of the parameters.
        codec: Name of a registered codec.
        threshold: Elements from which an adaptive codec uses 8 bits; None for other codecs.
        top_k: Elements that a sparse codec sends of each chunk; None for its default.
        powersgd_rank: Rank of the factors; None averages the gradients themselves.
        min_compression_ratio: Least fraction saved for a matrix to be factorised; None means
            hivemind's 0.5. Without a rank it has no effect.
        num_iters_per_step: Power iterations of the round.
        factor_codec: Codec of factors if ``codec`` is ``none``.
        peers: Number of peers of the group. Tensors are cut where the share of another reducer
            begins, and each piece may cost a codec some bytes.
        rates: Rate of each peer's link, if links are unequal, in any unit and order.
        extras: Shape of every extra tensor, which the last phase averages as it is.

    Raises:
        ConfigError: An unknown codec; a threshold, ``top_k`` or option of PowerSGD out of range.
    """
    shapes = [tuple(shape) for shape in shapes]
    chosen = made(codec, top_k)
    chosen.check_threshold(threshold)
    if powersgd_rank is not None:
        problems = option_problems(
            powersgd_rank,
            min_compression_ratio,
            num_iters_per_step=num_iters_per_step,
            factor_codec=factor_codec,
        )
        if problems:
            raise ConfigError(problems)
    compressed = compressed_tensors(shapes, powersgd_rank, min_compression_ratio)
    shares = reducer_shares([None] * peers if rates is None else rates)
    exact = tuple(math.prod(shape) for shape in extras)
    planned = _phases(shapes, powersgd_rank, compressed, num_iters_per_step)
    along = [()] * (len(planned) - 1) + [exact]  # with the last phase
    phases = []
    for (name, factors, rest), more in zip(planned, along, strict=True):
        if codec == "none":
            size = _phase_bytes(factors, shares, made(factor_codec), None, rest + more)
        else:
            size = _phase_bytes(factors + rest, shares, chosen, threshold, more)
        phases.append(Phase(name, factors + rest + more, size))
    dense = ELEMENT_BYTES * (sum(math.prod(shape) for shape in shapes) + sum(exact))
    return Payload(dense, tuple(phases), compressed, chosen.exact_size)


def configuration_payload(
    shapes: Iterable[Shape],
    configuration: Configuration,
    *,
    peers: int = 1,
    rates: Sequence[float | None] | None = None,
    extras: Iterable[Shape] = (),
) -> Payload:
    """Predict the bytes of a gradient round with a configuration.

    Args:
        shapes: Shape of every gradient, in the order of the parameters.
        configuration: A configuration; defaults are filled in.
        peers: As for :func:`payload`.
        rates: As for :func:`payload`.
        extras: As for :func:`payload`.

    Raises:
        ConfigError: As :func:`payload`.
    """
    given = _payload_arguments(configuration.values)
    return payload(shapes, peers=peers, rates=rates, extras=extras, **given)


def fragment_payloads(
    shapes: Iterable[Shape],
    configuration: Configuration,
    *,
    rates: Sequence[float | None] | None = None,
    extras: Sequence[Shape] = (),
) -> tuple[Payload, ...]:
    """Predict the bytes of the rounds in which each fragment of the gradients is averaged once.

    Args:
        shapes: Shape of every gradient, at least as many as there are fragments.
        configuration: A configuration; without fragments there is one round.
        rates: As for :func:`payload`.
        extras: As for :func:`payload`; every round averages them.

    Raises:
        ConfigError: As :func:`payload`.
    """
    shapes = [tuple(shape) for shape in shapes]
    members = split([math.prod(shape) for shape in shapes], configuration.fragments or 1)
    return tuple(
        configuration_payload(
            [shapes[index] for index in each], configuration, rates=rates, extras=extras
        )
        for each in members
    )


def averaged_sizes(shapes: Iterable[Shape], values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes of all tensors that a round averages [elements].

    Args:
        shapes: Shape of every gradient.
        values: Name -> value of axes that determine sizes: those of PowerSGD.

    Raises:
        ConfigError: As :func:`payload`, or there are no shapes.
    """
    phases = payload(shapes, **_payload_arguments(values)).phases
    sizes = tuple(size for phase in phases for size in phase.elements)
    if not sizes:
        raise ConfigError(Problem("shapes", [], "at least one tensor"))
    return sizes


def _payload_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of :func:`payload` that are axes; a value of None is left out."""
    return {
        axis.payload_argument: values[axis.name]
        for axis in AXES
        if axis.payload_argument is not None and values.get(axis.name) is not None
    }


def allreduce_bytes(payload_bytes: int, peers: int, groups: int = 1) -> Fraction:
    """Return the bytes that a peer sends in one round, as the mean over the peers [bytes].

    The mean is 2(N - 1)/N payloads, the cost of a reduce-scatter and an all-gather (Patarasuk and
    Yuan, J. Parallel Distrib. Comput. 69, 2009). With more than two peers, a peer that reduces more
    sends more, because a part has a single reducer. Replies are as long as requests. A group of g
    peers sends 2(g - 1) payloads, so that all groups of N peers send 2(N - groups).

    Args:
        payload_bytes: ``Payload.bytes_per_transfer``.
        peers: Peers of the round; a single peer sends nothing.
        groups: Groups that they form.

    Raises:
        ValueError: There are no peers.
    """
    if peers < 1:
        raise ValueError(f"a round has at least one peer, not {peers}")
    return Fraction(2 * (peers - groups) * payload_bytes, peers)


def _phase_bytes(
    elements: tuple[int, ...],
    shares: Shares,
    codec: Codec,
    threshold: int | None,
    exact: tuple[int, ...],
) -> int:
    """Return the bytes of all segments of an all-reduce; the codec leaves ``exact`` as it is."""

    def size(segment: int, tensor: int) -> int:
        if tensor >= len(elements):
            return ELEMENT_BYTES * segment
        return codec.part_bytes(segment, elements[tensor], threshold)

    sizes = elements + exact
    blocks = [codec.block] * len(elements) + [1] * len(exact)
    prices = tuple(Price.of(partial(size, tensor=at), block) for at, block in enumerate(blocks))
    parts = (part for reducer in partition(sizes, prices, shares) for part in reducer)
    return sum(size(len(each), each.tensor) for part in parts for each in part)


def _phases(
    shapes: Sequence[Shape], rank: int | None, compressed: tuple[int, ...], iterations: int
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return name, sizes of factors and sizes of other tensors of each all-reduce."""
    if rank is None:
        return [("dense", (), tuple(math.prod(shape) for shape in shapes))]
    factors = [(factor_rank(shapes[at], rank), matrix_dims(shapes[at])) for at in compressed]
    p = tuple(ours * rows for ours, (rows, _) in factors)
    q = tuple(ours * columns for ours, (_, columns) in factors)
    factorised = set(compressed)
    rest = tuple(math.prod(s) for i, s in enumerate(shapes) if i not in factorised)
    *before, last = phase_names(iterations)
    return [*((name, p if name.startswith("P") else q, ()) for name in before), (last, q, rest)]
