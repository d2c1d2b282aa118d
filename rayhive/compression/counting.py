"""A codec that counts what it encodes, for averagers that do not measure themselves."""

from __future__ import annotations

import ctypes
import threading
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.proto import runtime_pb2


class Count(NamedTuple):
    """What a codec encoded.

    Attributes:
        bytes: Payload, as the lengths of the message buffers.
        calls: Parts.
    """

    bytes: int
    calls: int


class CountingCompression(CompressionBase):
    """Delegates to another codec and counts the bytes and calls of its ``compress``.

    hivemind compresses in threads of the averager's process, which is forked from the trainer's.
    The totals only grow, in memory that both share, and only the averager writes them, under a
    lock of its own threads: no lock spans the fork, so killing the averager cannot leave one
    taken. It sees the parts that a peer sends, not a reducer's answers, which come from hivemind's
    table of codecs; a :class:`rayhive.averaging.averager.MeasuredAverager` counts both.

    Args:
        inner: The codec that does the work. Wrap it before the averager starts.
    """

    def __init__(self, inner: CompressionBase) -> None:
        self.inner = inner
        self._totals = RawArray(ctypes.c_int64, 2)
        self._taken = Count(0, 0)
        self._lock = threading.Lock()

    @property
    def compression_type(self) -> Any:
        """The wire type of the inner codec; adaptive codecs have none."""
        return self.inner.compression_type

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode with the inner codec and count the result."""
        message = self.inner.compress(tensor, info, allow_inplace)
        with self._lock:
            self._totals[0] += len(message.buffer)
            self._totals[1] += 1
        return message

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode with the inner codec."""
        tensor: torch.Tensor = self.inner.extract(serialized_tensor)
        return tensor

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Return the inner codec's estimate."""
        return float(self.inner.estimate_compression_ratio(info))

    def take(self) -> Count:
        """Return what was counted since the last call in this process."""
        with self._lock:
            now = Count(self._totals[0], self._totals[1])
            before, self._taken = self._taken, now
        return Count(now.bytes - before.bytes, now.calls - before.calls)
