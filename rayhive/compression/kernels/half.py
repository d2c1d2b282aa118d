"""hivemind's 16-bit codecs with fewer passes over memory, in hivemind's layout and types.

torch converts half precision with vector instructions, which numpy lacks. Overflow is detected in
the result, which is half as long as the input. Each access to a message's buffer copies it, so it
is accessed once.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    ScaledFloat16Compression,
)
from hivemind.proto import runtime_pb2

#: Bits of half precision's infinities; beyond them lie the NaNs of the same sign.
INFINITY, MINUS_INFINITY = 0x7C00, 0xFC00


def as_float32(tensor: torch.Tensor, codec: CompressionBase) -> torch.Tensor:
    """Return a tensor in float32 on the CPU, without a copy if it is there already.

    Raises:
        ValueError: It is not a floating-point tensor.
    """
    if not tensor.is_floating_point():
        raise ValueError(f"{type(codec).__name__} does not support {tensor.dtype} tensors")
    return tensor.detach().cpu().float()


def decoded_dtype(message: runtime_pb2.Tensor) -> torch.dtype:
    """Return the type to which a message decodes."""
    return cast(torch.dtype, getattr(torch, message.dtype))


def encoded(
    codec: CompressionBase, tensor: torch.Tensor, buffer: bytes, dtype: torch.dtype
) -> runtime_pb2.Tensor:
    """Return the message of an encoded tensor, which decodes to ``dtype``."""
    return runtime_pb2.Tensor(
        compression=codec.compression_type,
        buffer=buffer,
        size=tensor.shape,
        dtype=str(dtype).removeprefix("torch."),
        requires_grad=tensor.requires_grad,
    )


def decoded(values: torch.Tensor, message: runtime_pb2.Tensor) -> torch.Tensor:
    """Return decoded values as the tensor that was encoded."""
    return values.reshape(tuple(message.size)).requires_grad_(message.requires_grad)


def _half_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the type to decode to; 16-bit layouts cannot express bfloat16."""
    return torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype


class HalfPrecision(Float16Compression):
    """Half precision that accepts bfloat16 and preserves infinities.

    hivemind clamps an infinity to 65504, so that a gradient that diverged looks like a large one.
    """

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode a floating-point tensor without changing it; bfloat16 decodes to float32."""
        values = as_float32(tensor, self)
        half = values.half()
        bits = half.numpy()
        if (
            bits.view(np.int16).max(initial=0) >= INFINITY
            or bits.view(np.uint16).max(initial=0) >= MINUS_INFINITY
        ):
            clamped = values.clamp(self.FP16_MIN, self.FP16_MAX)
            bits = torch.where(values.isinf(), values, clamped).half().numpy()
        return encoded(self, tensor, bits.tobytes(), _half_dtype(tensor))

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode."""
        half = np.frombuffer(serialized_tensor.buffer, np.float16)
        values = torch.tensor(half, dtype=decoded_dtype(serialized_tensor))
        return decoded(values, serialized_tensor)


class ScaledHalfPrecision(ScaledFloat16Compression):
    """Scaled half precision that accepts bfloat16, scalars and deviations far below 1e-7."""

    #: Smallest divisor. hivemind's, 1.2e-7, moves tiny values into half precision's subnormals.
    #: Below this value squares underflow float32, so that the deviation is unknown.
    FP32_EPS = 1e-17

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode a floating-point tensor; a scalar, which has no axis to scale over, stays as is.

        No value is more than √(elements) deviations from the mean, so that no clamping is needed.
        """
        if tensor.ndim == 0:
            return NoCompression().compress(tensor, info, allow_inplace)
        values = as_float32(tensor, self)
        means = values.mean(dim=-1, keepdim=True)
        scaled = values - means
        deviations = scaled.norm(dim=-1, keepdim=True) / math.sqrt(max(values.shape[-1], 1))
        deviations.clamp_min_(self.FP32_EPS)
        half = scaled.div_(deviations).half()
        buffer = b"".join(field.numpy().tobytes() for field in (half, means, deviations))
        return encoded(self, tensor, buffer, _half_dtype(tensor))

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode."""
        buffer, shape = serialized_tensor.buffer, tuple(serialized_tensor.size)
        rows = (*shape[:-1], 1)
        half = np.frombuffer(buffer, np.float16, count=math.prod(shape))
        scales = np.frombuffer(buffer, np.float32, offset=half.nbytes)
        means, deviations = torch.tensor(scales).reshape(2, *rows)
        values = torch.tensor(half, dtype=decoded_dtype(serialized_tensor)).reshape(shape)
        return decoded(values.mul_(deviations).add_(means), serialized_tensor)
