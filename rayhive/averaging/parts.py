"""Encoded parts of tensors, with the fields that the receiver needs to decode them.

A part of a tensor without compression is not copied: its bytes are those of the tensor. The
attributes are named like the fields of hivemind's messages, so that both kinds can be read alike.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    deserialize_torch_tensor,
)
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import amap_in_executor

from rayhive.compression.kernels.decoders import DECODERS
from rayhive.membership.links.wire import Buffer

T = TypeVar("T")
R = TypeVar("R")

#: bfloat16 has no equivalent in numpy; integers are never averaged, but sent with a state.
_AS_THEY_ARE = (torch.float32, torch.float64, torch.float16)


class TensorFields(Protocol):
    """Encoded tensor: a :class:`Part`, or hivemind's message."""

    compression: int
    dtype: str
    requires_grad: bool
    chunks: int

    @property
    def buffer(self) -> Any:
        """The encoded elements."""

    @property
    def size(self) -> Any:
        """The shape."""


@dataclass
class Part:
    """One encoded part of a tensor.

    Attributes:
        buffer: The encoded elements; without compression, those of the tensor itself.
        compression: hivemind's number of the codec.
        size: Shape.
        dtype: Name of the type after decoding.
        requires_grad: As of the tensor.
        chunks: Mark of the sender, see :mod:`rayhive.averaging.answers`.
    """

    buffer: Buffer
    compression: int
    size: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    chunks: int = 0

    def to_protobuf(self) -> runtime_pb2.Tensor:
        """Return hivemind's message."""
        return runtime_pb2.Tensor(**{**vars(self), "buffer": bytes(self.buffer)})


@dataclass
class PartMessage:
    """One message of an exchange of parts; the fields are those of hivemind's ``AveragingData``."""

    code: int
    tensor_part: Part | None = None
    group_id: bytes = b""
    weight: float = 0.0

    def to_protobuf(self) -> averaging_pb2.AveragingData:
        """Return hivemind's message."""
        part = None if self.tensor_part is None else self.tensor_part.to_protobuf()
        fields = {**vars(self), "tensor_part": part}
        return averaging_pb2.AveragingData(**fields)


async def as_protobuf(
    messages: AsyncIterator[PartMessage | averaging_pb2.AveragingData],
) -> AsyncIterator[averaging_pb2.AveragingData]:
    """Pass a stream on as hivemind's messages."""
    async for message in messages:
        yield message.to_protobuf() if isinstance(message, PartMessage) else message


async def numbered(messages: AsyncIterable[T]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield messages with their numbers; the threads that decode them run in any order."""
    index = 0
    async for message in messages:
        yield index, message
        index += 1


async def in_threads(
    work: Callable[[T], R], items: AsyncIterator[T], at_once: bool, prefetch: int
) -> AsyncGenerator[R, None]:
    """Apply a codec's work to each item, in threads or at once.

    Args:
        work: Encodes or decodes an item.
        items: The items.
        at_once: Whether the event loop does the work.
        prefetch: Number of items to work on ahead.
    """
    if at_once:
        async for item in items:
            yield work(item)
    else:
        results = amap_in_executor(work, items, max_prefetch=prefetch)
        async with aclosing(results):  # else the items are still being read
            async for result in results:
                yield result


def is_plain(tensor: torch.Tensor, compression: CompressionBase) -> bool:
    """Return whether a tensor is sent from its own memory, without encoding."""
    kept = type(compression) is NoCompression and tensor.dtype in _AS_THEY_ARE
    return kept and tensor.device.type == "cpu" and tensor.is_contiguous()


def encode(
    tensor: torch.Tensor, info: CompressionInfo, compression: CompressionBase, chunks: int
) -> Part:
    """Encode a part of a tensor.

    Args:
        tensor: The part; it must not change while the result is used.
        info: Its description, for the codec.
        compression: The codec.
        chunks: Mark of the sender.
    """
    if is_plain(tensor, compression):
        plain = tensor.detach()
        buffer = plain.numpy().reshape(-1).view("uint8").data
        kind = compression.compression_type
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Part(buffer, kind, tuple(tensor.shape), dtype, tensor.requires_grad, chunks)
    return part_of(compression.compress(tensor, info), chunks)


def part_of(message: runtime_pb2.Tensor, chunks: int = 0) -> Part:
    """Return the part in hivemind's message, with another mark."""
    return Part(
        message.buffer,
        message.compression,
        tuple(message.size),
        message.dtype,
        message.requires_grad,
        chunks,
    )


def decode(part: TensorFields) -> torch.Tensor:
    """Return the tensor of an encoded part; it may use the memory of the part's buffer."""
    buffer = part.buffer
    is_memory = isinstance(buffer, memoryview) and not buffer.readonly
    is_bare = part.compression == NoCompression.compression_type
    if is_memory and is_bare and getattr(torch, part.dtype, None) in _AS_THEY_ARE:
        array = np.frombuffer(buffer, part.dtype)
        values = torch.from_numpy(array if array.flags.aligned else array.copy())
        return values.reshape(tuple(part.size)).requires_grad_(part.requires_grad)
    decoder = DECODERS.get(part.compression)
    if decoder is not None:
        return decoder.extract(part)
    tensor: torch.Tensor = deserialize_torch_tensor(part)
    return tensor
