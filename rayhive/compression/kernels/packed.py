"""Base of codecs whose messages hivemind cannot decode, because it has no wire type for them.

The numbers of these types are above all of hivemind's. Peers decode them by the table in
:mod:`rayhive.compression.kernels.decoders`; plain hivemind peers cannot take part.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.proto import runtime_pb2
from numpy.typing import NDArray

from rayhive.compression.kernels.half import as_float32, decoded, decoded_dtype, encoded

Bytes = NDArray[np.uint8]
#: Elements handled at once, so that intermediate results stay in the cache; whole blocks.
RUN = 2**17


class PackedCodec(CompressionBase):
    """Codec of flat float32 values, in blocks of equal length and a shorter last one.

    Attributes:
        block: Elements of a block.
        of_gradients: As of the registered codec.
    """

    block: ClassVar[int]
    of_gradients = True

    @abstractmethod
    def size(self, elements: int) -> int:
        """Return the bytes of an encoding."""

    @abstractmethod
    def pack(self, values: torch.Tensor) -> bytes:
        """Encode flat float32 values without changing them."""

    @abstractmethod
    def unpack(self, buffer: bytes, elements: int) -> torch.Tensor:
        """Decode to flat float32 values.

        Raises:
            ValueError: The buffer is no encoding of so many elements.
        """

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode a floating-point tensor without changing it.

        Raises:
            ValueError: It is not a floating-point tensor.
        """
        values = as_float32(tensor, self).reshape(-1)
        return encoded(self, tensor, self.pack(values), tensor.dtype)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode.

        Raises:
            ValueError: The buffer does not fit the shape.
        """
        buffer, elements = serialized_tensor.buffer, math.prod(serialized_tensor.size)
        values = self.unpack(buffer, elements)
        return decoded(values.to(decoded_dtype(serialized_tensor)), serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Return encoded bits per element over 32, for whole blocks."""
        return self.size(self.block) / (4 * self.block)

    def check_size(self, buffer: bytes, expected: int) -> None:
        """Refuse a buffer of another length.

        Raises:
            ValueError: It has another length.
        """
        if len(buffer) != expected:
            name = type(self).__name__
            raise ValueError(f"{name} got {len(buffer)} bytes instead of {expected}")


def by_blocks(
    values: torch.Tensor, block: int, work: Callable[[torch.Tensor, slice, slice], None]
) -> None:
    """Call a function with runs of whole blocks, and with the shorter last block.

    Args:
        values: Flat values.
        block: Elements of a block; a power of 2, at most :data:`RUN`.
        work: Takes a matrix with one block per row, the elements and the blocks that it holds.
    """
    whole = len(values) - len(values) % block
    for start in range(0, whole, RUN):
        stop = min(start + RUN, whole)
        rows = values[start:stop].view(-1, block)
        work(rows, slice(start, stop), slice(start // block, stop // block))
    if whole < len(values):
        last = whole // block
        work(values[whole:].view(1, -1), slice(whole, len(values)), slice(last, last + 1))
