"""Tensors of one peer in an all-reduce: cut into parts, encoded, and replaced by their averages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import lru_cache

import torch
from hivemind.averaging.partition import AllreduceException, TensorPartContainer
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.utils import as_aiter

from rayhive.averaging.parts import Part, TensorFields, decode, encode, in_threads, is_plain
from rayhive.compression.partition import Partition, Price, Segment, partition
from rayhive.compression.shares import Shares
from rayhive.membership.links.wire import Buffer

#: Codec of tensors that are sent as they are.
_EXACT = NoCompression()
#: Elements that most codecs encode in less than a millisecond. A part of fewer is encoded and
#: decoded by the event loop: to pass it to a thread and back takes 0.2 ms, and longer where all
#: processors are in use.
FEW = 1 << 17


def codecs_of(
    tensors: Sequence[torch.Tensor], compression: CompressionBase, exact: int
) -> list[CompressionBase]:
    """Return the codec of each tensor: none for the last ``exact`` ones."""
    return [compression] * (len(tensors) - exact) + [_EXACT] * exact


def balanced_partition(
    tensors: Sequence[torch.Tensor],
    infos: Sequence[CompressionInfo],
    compression: CompressionBase,
    shares: Shares,
    exact: int = 0,
) -> Partition:
    """Return the partition by which a group of rayhive's peers averages tensors.

    Args:
        tensors: The tensors.
        infos: Description of each tensor.
        compression: Codec of the group.
        shares: Share of each member of the group.
        exact: Number of the last tensors, which the codec does not encode.
    """
    prices = tuple(
        _price(codec, info, tensor.dtype)
        for codec, info, tensor in zip(
            codecs_of(tensors, compression, exact), infos, tensors, strict=True
        )
    )
    return partition(tuple(tensor.numel() for tensor in tensors), prices, shares)


@lru_cache(maxsize=4096)
def _price(compression: CompressionBase, info: CompressionInfo, dtype: torch.dtype) -> Price:
    """Return the encoded size of segments of a tensor, measured with the codec."""

    def size(elements: int) -> int:
        probe = torch.linspace(-1, 1, elements).to(dtype)
        return len(compression.compress(probe, info).buffer)

    return Price.of(size, getattr(compression, "block", 1))


def partition_of(container: TensorPartContainer) -> Partition:
    """Return the partition of hivemind's container, for groups with members of hivemind."""
    tensor, start = 0, 0
    parts: list[tuple[tuple[Segment], ...]] = []
    for pieces in container._input_parts_by_peer:
        segments = []
        for piece, _ in pieces:
            while start and start == container.local_tensors[tensor].numel():
                tensor, start = tensor + 1, 0
            segments.append((Segment(tensor, start, start + len(piece)),))
            start += len(piece)
            if not container.local_tensors[tensor].numel():  # sent all the same, as one part
                tensor += 1
        parts.append(tuple(segments))
    return tuple(parts)


class TensorParts:
    """Parts of one peer's tensors in one all-reduce, in place of hivemind's container.

    An average replaces its part in the tensors as soon as it is there. A part that is not averaged
    stays as it is.

    Args:
        tensors: The tensors, contiguous.
        partition: Parts that each member reduces.
        compression: Codec of the group.
        infos: Description of each tensor.
        exact: Number of the last tensors, which the codec does not encode.
        prefetch: Number of parts to encode ahead.
        alpha: Weight of the average against the present value.
        owed: Tensors to which the errors of this peer's encodings are added, as sums over samples;
            None to drop the errors. See :mod:`rayhive.averaging.error_feedback`.
        weight: Weight of this peer in the averages.

    Attributes:
        total_size: Elements of all tensors.
        averaged_size: Elements that were replaced by averages so far.
        failed_size: Elements that were not averaged.
        num_parts_by_peer: Number of parts that each member reduces.
        at_once: Whether the event loop encodes and decodes the parts, and not a thread.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        partition: Partition,
        *,
        compression: CompressionBase,
        infos: Sequence[CompressionInfo],
        exact: int = 0,
        prefetch: int = 1,
        alpha: float = 1.0,
        owed: Sequence[torch.Tensor] | None = None,
        weight: float = 1.0,
    ) -> None:
        self.local_tensors, self.compression, self.prefetch = tensors, compression, prefetch
        self.total_size = sum(tensor.numel() for tensor in tensors)
        self.averaged_size = self.failed_size = 0
        self.num_parts_by_peer = tuple(len(parts) for parts in partition)
        self._partition, self._infos, self._alpha = partition, infos, alpha
        sizes = (size for peer in range(len(partition)) for size in self.elements(peer))
        self.at_once = type(compression) is NoCompression or all(size <= FEW for size in sizes)
        self._codecs = codecs_of(tensors, compression, exact)
        # Views; copies of tensors that are not contiguous, such as weights in channels_last.
        self._flat = [tensor.detach().reshape(-1) for tensor in tensors]
        self._owed = None if owed is None else [tensor.reshape(-1) for tensor in owed]
        self._owing = owed
        self._weight, self._lock = weight, threading.Lock()
        self._registered = [0] * len(partition)
        self._missing = [tensor.numel() for tensor in tensors]
        self._changed = asyncio.Event()
        self._finished = False

    def elements(self, peer: int) -> tuple[int, ...]:
        """Return the number of elements of each part that a member reduces."""
        return tuple(sum(map(len, part)) for part in self._partition[peer])

    def part(self, peer: int, index: int) -> torch.Tensor:
        """Return the present value of a part, flat; a view if it has one segment."""
        segments = self._partition[peer][index]
        pieces = [self._flat[each.tensor][each.start : each.stop] for each in segments]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def encoded(self, peer: int, index: int, value: torch.Tensor, chunks: int = 0) -> Part:
        """Return the encoding of a value of a part.

        A part of one segment is encoded as hivemind does. Otherwise the result holds the encodings
        of all segments: their bytes, one after the other, and in ``size`` their lengths.

        Args:
            peer: Position of the reducer.
            index: Number of the part.
            value: The value, flat; it must not change while the result is used.
            chunks: Mark of the sender.
        """
        segments = self._partition[peer][index]
        pieces = zip(torch.split(value, [len(each) for each in segments]), segments, strict=True)
        infos, codecs = self._infos, self._codecs
        parts = [encode(p, infos[s.tensor], codecs[s.tensor], chunks) for p, s in pieces]
        if len(parts) == 1:
            return parts[0]
        if is_plain(value, self.compression):  # the segments follow each other in memory already
            buffer: Buffer = encode(value, infos[0], self.compression, chunks).buffer
        else:
            buffer = b"".join(part.buffer for part in parts)
        return Part(
            buffer,
            compression=0,
            size=tuple(len(part.buffer) for part in parts),
            dtype=" ".join(f"{part.compression}:{part.dtype}" for part in parts),
            chunks=chunks,
        )

    def decoded(self, peer: int, index: int, message: TensorFields) -> torch.Tensor:
        """Return the value of a part in a message, flat.

        Raises:
            AllreduceException: The message does not hold this part.
        """
        if index >= len(self._partition[peer]):
            raise AllreduceException(f"got part {index} of {len(self._partition[peer])}")
        segments = self._partition[peer][index]
        if len(segments) == 1 and tuple(message.size) != (len(segments[0]),):
            # before decoding, which makes a tensor of that size
            raise AllreduceException(f"got a part {index} of size {tuple(message.size)}")
        value = decode(message) if len(segments) == 1 else _unbundled(message, segments)
        if value.numel() != sum(map(len, segments)) or not value.is_floating_point():
            raise AllreduceException(f"got {value.numel()} elements for part {index}")
        return value

    def sent(self, peer: int, index: int, chunks: int = 0) -> Part:
        """Return the encoding of a part for its reducer; this peer owes the error."""
        value = self.part(peer, index)
        part = self.encoded(peer, index, value, chunks)
        self.owe(peer, index, part, value, self._weight)
        return part

    @torch.no_grad()
    def owe(
        self, peer: int, index: int, part: TensorFields, value: torch.Tensor, weight: float
    ) -> None:
        """Add the error of an encoding, times a weight, to the owed tensors.

        Parts that are sent from their own memory have no error.
        """
        if self._owed is None or not weight or is_plain(value, self.compression):
            return
        error = (value.float() - self.decoded(peer, index, part).float()).mul_(weight)
        with self._lock:  # in a thread, which may come too late: nothing is owed for a failed part
            if not self._finished and index >= self._registered[peer]:
                for piece, place in self._places(self._owed, peer, index, error):
                    place.add_(piece)

    def _places(
        self, flat: Sequence[torch.Tensor], peer: int, index: int, value: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the pieces of a part's value with their places in flat tensors."""
        segments = self._partition[peer][index]
        pieces = torch.split(value, [len(each) for each in segments])
        for piece, each in zip(pieces, segments, strict=True):
            yield piece, flat[each.tensor][each.start : each.stop]

    async def iterate_input_parts_for(self, peer: int, chunks: int = 0) -> AsyncIterator[Part]:
        """Yield the encoded parts for a reducer; encode in the background."""
        indices = as_aiter(*range(self.num_parts_by_peer[peer]))

        def sent(index: int) -> Part:
            return self.sent(peer, index, chunks)

        async for part in in_threads(sent, indices, self.at_once, self.prefetch):
            yield part

    @torch.no_grad()
    def register_processed_part(self, peer: int, index: int, average: torch.Tensor) -> None:
        """Replace the next part of a reducer by its average.

        Raises:
            ValueError: It is not the next part.
        """
        if index != self._registered[peer]:
            raise ValueError(f"got the average of part {index}, not of {self._registered[peer]}")
        if self._finished:
            return
        for piece, place in self._places(self._flat, peer, index, average):
            if self._alpha == 1.0:
                place.copy_(piece)
            else:
                place.lerp_(piece.to(place.dtype), self._alpha)
        self.averaged_size += average.numel()
        self._done(peer, self._partition[peer][index])

    def register_failed_reducer(self, peer: int) -> None:
        """Keep all parts of a reducer of which there are no averages yet; nothing is owed."""
        for segments in self._partition[peer][self._registered[peer] :]:
            self.failed_size += sum(map(len, segments))
            with self._lock:
                if self._owed is not None:
                    for each in segments:
                        self._owed[each.tensor][each.start : each.stop] = 0.0
                self._done(peer, segments)

    def _done(self, peer: int, segments: Sequence[Segment]) -> None:
        self._registered[peer] += 1
        for each in segments:
            self._missing[each.tensor] -= len(each)
        self._changed.set()

    async def iterate_output_tensors(self) -> AsyncIterator[torch.Tensor]:
        """Yield each tensor once all its parts are averaged or given up.

        Raises:
            AllreduceException: The all-reduce ended before.
        """
        for tensor, flat in enumerate(self._flat):
            while self._missing[tensor]:
                self._changed.clear()
                await self._changed.wait()
                if self._finished:
                    raise AllreduceException("the all-reduce ended before all parts were averaged")
            self._put_back(self.local_tensors[tensor], flat)
            if self._owing is not None and self._owed is not None:
                self._put_back(self._owing[tensor], self._owed[tensor])
            yield flat.view(self.local_tensors[tensor].shape)

    @staticmethod
    @torch.no_grad()
    def _put_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def finalize(self) -> None:
        """End the iteration; averages that come later are ignored."""
        with self._lock:
            self._finished = True
        self._changed.set()


def _unbundled(message: TensorFields, segments: Sequence[Segment]) -> torch.Tensor:
    """Return the decoded segments of a message with several, one after the other.

    Raises:
        AllreduceException: The message has other segments.
    """
    buffer, kinds = memoryview(message.buffer), message.dtype.split()
    if not len(message.size) == len(kinds) == len(segments) or sum(message.size) != len(buffer):
        raise AllreduceException(f"got {len(kinds)} segments instead of {len(segments)}")
    values, start = [], 0
    for length, kind, segment in zip(message.size, kinds, segments, strict=True):
        compression, dtype = kind.split(":")
        piece = Part(buffer[start : start + length], int(compression), (len(segment),), dtype)
        values.append(decode(piece).float())
        start += length
    return torch.cat(values)
