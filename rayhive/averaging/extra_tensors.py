"""Extra tensors of a module, such as buffers: of any dtype and on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hivemind.averaging.control import StepControl
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.proto import runtime_pb2

from rayhive.averaging.gradient_extras import averageable

#: Types that lossy codecs accept; other tensors of a state are sent as they are.
_COMPRESSIBLE = (torch.float16, torch.float32, torch.float64)


class ExtraTensors:
    """Extra tensors of a state averager, averaged through copies on the host.

    Floating-point tensors are averaged in float32, on any device. Integers and booleans
    (counters, indices, masks) have no useful average: every peer keeps its own, and a joining peer
    downloads them with the state. With an offloaded optimizer, hivemind
    averages extra tensors in place, which fails for integers and on a GPU.

    Args:
        tensors: The extra tensors.
        elsewhere: Those that are averaged elsewhere.

    Attributes:
        averaged: The floating-point ones. Their copies are the last averaged tensors of the
            averager, in this order.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], elsewhere: Sequence[torch.Tensor] = ()
    ) -> None:
        self._tensors = tensors
        others = {id(tensor) for tensor in elsewhere}
        floats = (tensor for tensor in tensors if averageable(tensor))
        self.averaged = [tensor for tensor in floats if id(tensor) not in others]
        self._round: StepControl | None = None

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is an extra tensor that is not averaged here."""
        extra = any(tensor is each for each in self._tensors)
        return extra and not self.averages(tensor)

    def averages(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is an extra tensor that is averaged."""
        return any(tensor is each for each in self.averaged)

    def masks(self) -> frozenset[int]:
        """Return which floating-point tensors have no average; the last one is 1."""
        floats = (
            (at, each)
            for at, each in enumerate(reversed(self._tensors), 1)
            if each.is_floating_point()
        )
        return frozenset(at for at, each in floats if not averageable(each))

    def averaged_infos(self, infos: Sequence[CompressionInfo]) -> tuple[CompressionInfo, ...]:
        """Return the infos of a state without those of tensors that are not averaged here.

        Args:
            infos: One per tensor of the state; those of the extra tensors come last.
        """
        first = len(infos) - len(self._tensors)
        extras = zip(infos[first:], self._tensors, strict=True)
        return (*infos[:first], *(info for info, each in extras if self.averages(each)))

    @torch.no_grad()
    def begin(self, tensors: Sequence[torch.Tensor], round_: StepControl) -> None:
        """Copy the extra tensors for a round that averages the copies.

        Args:
            tensors: The averaged tensors of the averager.
            round_: The round.
        """
        for extra, copy in self._pairs(tensors):
            copy.copy_(extra)
        self._round = round_

    @property
    def round_ended(self) -> bool:
        """Whether the round has ended and :meth:`apply` was not called since."""
        return self._round is not None and self._round.done()

    @torch.no_grad()
    def apply(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy averaged extra tensors back, if their round has succeeded.

        Args:
            tensors: The averaged tensors of the averager.
        """
        round_, self._round = self._round, None
        if round_ is not None and not round_.cancelled() and round_.exception() is None:
            for extra, copy in self._pairs(tensors):
                extra.copy_(copy)

    def _pairs(self, tensors: Sequence[torch.Tensor]) -> Any:
        return zip(self.averaged, tensors[len(tensors) - len(self.averaged) :], strict=True)


class FloatsOnly(CompressionBase):
    """Codec that compresses floating-point tensors and sends others as they are.

    Args:
        codec: Codec of floating-point tensors; lossy codecs refuse others.
    """

    def __init__(self, codec: CompressionBase) -> None:
        self._codec = codec

    @property
    def compression_type(self) -> Any:
        """The wire type of the codec; adaptive codecs have none."""
        return self._codec.compression_type

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode with the codec if it accepts the tensor's type."""
        codec = self._codec if tensor.dtype in _COMPRESSIBLE else NoCompression()
        return codec.compress(tensor, info, allow_inplace)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode with the codec."""
        tensor: torch.Tensor = self._codec.extract(serialized_tensor)
        return tensor

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Return the codec's estimate."""
        return float(self._codec.estimate_compression_ratio(info))
