"""Bytes of a gradient round, from shapes and a configuration alone.

Pure Python: a sweep can predict, compare and merge configurations without loading torch.

Two sizes must not be confused. The *payload* is one full copy of everything that a round
averages, encoded: every part of every tensor once. The *all-reduce traffic* is what peers put on
the wire for it: in a butterfly all-reduce each part goes from N - 1 peers to the one that reduces
it, and N - 1 answers of the same size come back, so the N peers together send 2(N - 1) payloads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rayhive.compression.codecs.base import Codec
from rayhive.compression.codecs.size_adaptive import SizeAdaptive
from rayhive.compression.powersgd.shapes import (
    Shape,
    compressed_tensors,
    factor_rank,
    matrix_dims,
    option_problems,
    phase_names,
)
from rayhive.errors import ConfigError, Problem
from rayhive.registry import CODECS
from rayhive.spec import Configuration

#: hivemind's ``DEFAULT_PART_SIZE_BYTES``.
PART_SIZE_BYTES = 2**19
#: Bytes of a float32 element.
ELEMENT_BYTES = 4

__all__ = [
    "Payload",
    "Phase",
    "allreduce_bytes",
    "codec_named",
    "compressed_tensors",
    "configuration_key",
    "matrix_dims",
    "payload",
    "tensor_bytes",
    "threshold_range",
]


@dataclass(frozen=True)
class Phase:
    """One all-reduce of a round.

    Attributes:
        name: ``dense``, or PowerSGD's ``P`` or ``Q``, with a number in later iterations; as in
            ``RoundResult.phases``.
        elements: Elements of each tensor that it averages, in order.
        bytes: One encoded copy of them all.
    """

    name: str
    elements: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Payload:
    """What one gradient round averages.

    Attributes:
        dense_bytes: Four bytes for every element of every gradient.
        phases: The all-reduces of the round, in order.
        compressed: Indices of the tensors that PowerSGD factorises.
        exact: Whether the codec's sizes hold for every content.
    """

    dense_bytes: int
    phases: tuple[Phase, ...]
    compressed: tuple[int, ...]
    exact: bool

    @property
    def bytes_per_transfer(self) -> int:
        """One encoded copy of everything that the round averages."""
        return sum(phase.bytes for phase in self.phases)

    @property
    def ratio(self) -> float:
        """Dense bytes over payload bytes: how many times smaller the round became."""
        return self.dense_bytes / self.bytes_per_transfer if self.bytes_per_transfer else math.inf


def payload(
    shapes: Iterable[Shape],
    *,
    codec: str | Codec = "none",
    threshold: int | None = None,
    powersgd_rank: int | None = None,
    min_compression_ratio: float | None = None,
    num_iters_per_step: int = 1,
    start_compressing_after_num_steps: int = 0,
    round_number: int | None = None,
    part_size_bytes: int = PART_SIZE_BYTES,
) -> Payload:
    """Predict the bytes of a gradient round.

    Args:
        shapes: Shape of every gradient, in the order of the parameters.
        codec: A codec or its registered name.
        threshold: Elements from which an adaptive codec changes; None for the others.
        powersgd_rank: Rank of the factors; None averages the gradients themselves.
        min_compression_ratio: Least fraction saved for a matrix to be factorised; None means
            hivemind's 0.5. Without a rank it means nothing.
        num_iters_per_step: Power iterations of a round with factors.
        start_compressing_after_num_steps: Rounds before the first with factors.
        round_number: The round, counted from 1; None is any with factors.
        part_size_bytes: Size at which hivemind cuts tensors into parts, after compression.

    Raises:
        ConfigError: An unknown codec, or a threshold or an option of PowerSGD out of range.
    """
    shapes = [tuple(shape) for shape in shapes]
    chosen = codec if isinstance(codec, Codec) else codec_named(codec)
    if powersgd_rank is not None:
        problems = option_problems(
            powersgd_rank,
            min_compression_ratio,
            num_iters_per_step=num_iters_per_step,
            start_compressing_after_num_steps=start_compressing_after_num_steps,
        )
        if problems:
            raise ConfigError(problems)
        if round_number is not None and round_number <= start_compressing_after_num_steps:
            powersgd_rank = None
    compressed = compressed_tensors(shapes, powersgd_rank, min_compression_ratio)
    phases = tuple(
        Phase(
            name,
            elements,
            sum(tensor_bytes(size, chosen, threshold, part_size_bytes) for size in elements),
        )
        for name, elements in _phases(shapes, powersgd_rank, compressed, num_iters_per_step)
    )
    dense = ELEMENT_BYTES * sum(math.prod(shape) for shape in shapes)
    return Payload(dense, phases, compressed, chosen.exact_size)


def allreduce_bytes(payload_bytes: int, peers: int) -> Fraction:
    """Return what a peer sends in one round, as the mean over the peers of the round [bytes].

    2(N - 1)/N payloads, the cost of a reduce-scatter and an all-gather (Patarasuk and Yuan,
    J. Parallel Distrib. Comput. 69, 2009). It is the mean: a part goes whole to one reducer, so
    with more than two peers those that reduce more send more. Replies are as long as requests.

    Args:
        payload_bytes: ``Payload.bytes_per_transfer``.
        peers: Peers of the round; a lone one sends nothing.

    Raises:
        ValueError: There are no peers.
    """
    if peers < 1:
        raise ValueError(f"a round has at least one peer, not {peers}")
    return Fraction(2 * (peers - 1) * payload_bytes, peers)


def tensor_bytes(
    elements: int,
    codec: Codec,
    threshold: int | None = None,
    part_size_bytes: int = PART_SIZE_BYTES,
) -> int:
    """Return the payload of one tensor, cut into parts as hivemind cuts it [bytes]."""
    part = int(part_size_bytes / (codec.bits(elements, threshold) / 8))
    whole, rest = divmod(elements, part)
    size = whole * codec.part_bytes(part, elements, threshold)
    if rest or not whole:  # a tensor without elements still travels as one part
        size += codec.part_bytes(rest, elements, threshold)
    return size


def _phases(
    shapes: Sequence[Shape], rank: int | None, compressed: tuple[int, ...], iterations: int = 1
) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and tensor sizes of each all-reduce; the last also takes what has no factors."""
    if rank is None:
        return [("dense", tuple(math.prod(shape) for shape in shapes))]
    factors = [(factor_rank(shapes[at], rank), matrix_dims(shapes[at])) for at in compressed]
    p = tuple(ours * rows for ours, (rows, _) in factors)
    q = tuple(ours * columns for ours, (_, columns) in factors)
    factorised = set(compressed)
    rest = tuple(math.prod(s) for i, s in enumerate(shapes) if i not in factorised)
    phases = [(name, p if name.startswith("P") else q) for name in phase_names(iterations)]
    last, sizes = phases.pop()
    return [*phases, (last, sizes + rest)]


def threshold_range(
    shapes: Iterable[Shape], rank: int | None = None, min_compression_ratio: float | None = None
) -> tuple[int, int]:
    """Return the range in which an adaptive codec's threshold changes anything [elements].

    Args:
        shapes: Shape of every gradient.
        rank: PowerSGD's rank; the threshold then meets the factors and what is left over.
        min_compression_ratio: As for :func:`payload`.

    Returns:
        ``low``, at and below which every tensor is large, and ``high``, at and above which none
        is; both are tensor sizes of this model, or one more. Between them it depends.

    Raises:
        ConfigError: The rank or the ratio is out of range, or there are no shapes.
    """
    shapes = [tuple(shape) for shape in shapes]
    compressed = compressed_tensors(shapes, rank, min_compression_ratio)
    sizes = [size for _, elements in _phases(shapes, rank, compressed) for size in elements]
    if not sizes:
        raise ConfigError(Problem("shapes", [], "at least one tensor"))
    return max(1, min(sizes)), max(sizes) + 1


def configuration_key(shapes: Iterable[Shape], configuration: Configuration) -> str:
    """Name what a configuration does to gradients of these shapes.

    Configurations with equal keys send the same bytes and compute the same: a threshold counts
    by the tensors that it makes large, a ratio by the tensors that it lets PowerSGD factorise
    (for one rank these sets are nested, so their number names them), a rank that factorises
    nothing not at all.

    Args:
        shapes: Shape of every gradient.
        configuration: Codec, threshold, rank, ratio and delay.

    Raises:
        ConfigError: As :func:`payload`.
    """
    shapes = [tuple(shape) for shape in shapes]
    rank = configuration.powersgd_rank
    compressed = compressed_tensors(shapes, rank, configuration.min_compression_ratio)
    if not compressed:
        rank = None
    sizes = [size for _, elements in _phases(shapes, rank, compressed) for size in elements]
    powersgd = "none" if rank is None else f"rank {rank} on {len(compressed)}"
    codec = _codec_key(codec_named(configuration.codec), configuration.threshold, sizes)
    return f"codec {codec}; powersgd {powersgd}; delay {configuration.delay}"


def _codec_key(codec: Codec, threshold: int | None, sizes: Sequence[int]) -> str:
    """Name a codec by what it does to tensors of these sizes."""
    codec.check_threshold(threshold)
    if threshold is None:
        return codec.name
    large = [size for size in sizes if size >= threshold]
    if isinstance(codec, SizeAdaptive) and len(large) in (0, len(sizes)):
        return codec.large.name if large else codec.small.name
    return f"{codec.name} from {min(large)} elements" if large else f"{codec.name} on nothing"


def codec_named(name: str) -> Codec:
    """Return the registered codec called ``name``.

    Raises:
        ConfigError: No codec has that name.
    """
    found: type[Codec] = CODECS.get(name, "codec")
    return found()
