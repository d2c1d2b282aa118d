"""Extra tensors of a module, such as buffers: of any dtype and on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from hivemind.averaging.control import StepControl
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.proto import runtime_pb2

#: What lossy codecs take; other tensors of a state are sent as they are.
_COMPRESSIBLE = (torch.float16, torch.float32, torch.float64)


class ExtraTensors(TrainingStateAverager):
    """Mixin for state averagers: extra tensors are averaged through copies on the host.

    Floating-point tensors are averaged in float32, wherever they are. Integers and booleans
    (counters, indices, masks) have no useful average: every peer keeps its own, and a joiner takes
    over those of its donor. With an offloaded optimizer, hivemind averages extra tensors in place,
    which fails for integers and on a GPU.
    """

    extra_tensors: Sequence[torch.Tensor] = ()
    #: The round that averages the copies, until its result has been applied.
    _extras_round: StepControl | None = None

    def __init__(self, *, state_compression: CompressionBase | None = None, **kwargs: Any) -> None:
        codec = FloatsOnly(NoCompression() if state_compression is None else state_compression)
        super().__init__(state_compression=codec, **kwargs)

    @property
    def _averaged_extras(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.extra_tensors if tensor.is_floating_point()]

    def _local_tensors(self) -> Iterator[torch.Tensor]:
        own = {id(tensor) for tensor in self.extra_tensors if not tensor.is_floating_point()}
        yield from (tensor for tensor in super()._local_tensors() if id(tensor) not in own)

    def _init_tensor_infos(self) -> Sequence[CompressionInfo]:
        infos = tuple(super()._init_tensor_infos())
        first = len(infos) - len(self.extra_tensors)
        extras = zip(infos[first:], self.extra_tensors, strict=True)
        return (*infos[:first], *(info for info, each in extras if each.is_floating_point()))

    def _make_host_tensor(
        self, source_tensor: torch.Tensor, force_copy: bool = False
    ) -> torch.Tensor:
        force_copy |= any(source_tensor is extra for extra in self.extra_tensors)
        copy: torch.Tensor = super()._make_host_tensor(source_tensor, force_copy)
        return copy

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Do what hivemind's does, and average the copies in the same round as the parameters."""
        if self.reuse_tensors and kwargs.get("averaging_round") and self._averaged_extras:
            super().step(wait_for_delayed_updates=True)
            self._apply_extras()
            if kwargs.get("averaging_control") is None:
                options = kwargs.get("averaging_opts") or {}
                kwargs["averaging_control"] = self.schedule_step(gather=self.local_epoch, **options)
            with torch.no_grad(), self.get_tensors() as tensors:
                for extra, copy in self._pairs(tensors):
                    copy.copy_(extra)
            self._extras_round = kwargs["averaging_control"]
        result = super().step(*args, **kwargs)
        self._apply_extras()
        return result

    def _apply_extras(self) -> None:
        """Copy averaged extra tensors back to the module, if their round has succeeded."""
        control = self._extras_round
        if control is None or not control.done():
            return
        self._extras_round = None
        if not control.cancelled() and control.exception() is None:
            with torch.no_grad(), self.get_tensors() as tensors:
                for extra, copy in self._pairs(tensors):
                    extra.copy_(copy)

    def _pairs(
        self, tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return each averaged extra tensor with its copy: they are the last averaged tensors."""
        extras = self._averaged_extras
        return zip(extras, tensors[len(tensors) - len(extras) :], strict=True)


class FloatsOnly(CompressionBase):
    """Compresses floating-point tensors, and sends others as they are: lossy codecs refuse them.

    Args:
        codec: What compresses floating-point tensors.
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
        """Encode with the codec if it takes the tensor."""
        codec = self._codec if tensor.dtype in _COMPRESSIBLE else NoCompression()
        return codec.compress(tensor, info, allow_inplace)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode with the codec."""
        tensor: torch.Tensor = self._codec.extract(serialized_tensor)
        return tensor

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Return the codec's estimate."""
        return float(self._codec.estimate_compression_ratio(info))
