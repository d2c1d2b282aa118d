"""hivemind's codecs, right where hivemind's are wrong, and the same on the wire.

Every class keeps its parent's ``compression_type`` and layout, so that a plain hivemind peer
decodes what these encode and the other way round. Where hivemind is right the bytes are equal.
What differs, each point with the test that shows it, stands in ``docs/compression.md``.

A reducer answers with the codec that hivemind's table lists under the sender's type, not with
the sender's object: :func:`install` puts these into that table, in the averager's own process.
"""

from __future__ import annotations

import importlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
    quantization,
    serialization,
)
from hivemind.compression.quantization import average_buckets
from hivemind.proto import runtime_pb2

TINY = torch.finfo(torch.float32).tiny


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bfloat16 tensor as float32, which both 16-bit layouts can name; others as is."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class HalfPrecision(Float16Compression):
    """Half precision that also takes bfloat16 and lets an infinity stay one.

    hivemind clamps an infinity to 65504, so that a gradient that blew up looks like a large one.
    """

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode a floating-point tensor; bfloat16 arrives as float32."""
        values = _widened(tensor)
        infinite = None
        if not math.isfinite(values.detach().sum()):
            infinite = values.detach().cpu().isinf()
            signs = values.detach().cpu().sign()
        message = super().compress(values, info, allow_inplace)
        if infinite is not None:
            half = torch.frombuffer(bytearray(message.buffer), dtype=torch.float16)
            half = half.reshape(infinite.shape)
            half[infinite] = (signs[infinite] * math.inf).half()
            message.buffer = half.numpy().tobytes()
        return message


class ScaledHalfPrecision(ScaledFloat16Compression):
    """Scaled half precision for bfloat16, scalars and deviations far below 1e-7 as well."""

    #: hivemind divides by at least 1.2e-7, which pushes parts of tiny values into subnormals.
    FP32_EPS = TINY

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode a floating-point tensor; what has no last axis to scale over goes as it is."""
        if tensor.ndim == 0:
            return NoCompression().compress(tensor, info, allow_inplace)
        return super().compress(_widened(tensor), info, allow_inplace)


class _Quantization(quantization.Quantization):
    """The layout of both 8-bit codecs: codebook length, codebook, one byte an element."""

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode; unlike hivemind's decoder it also works with numpy 2.4."""
        buffer = serialized_tensor.buffer
        length = int(np.frombuffer(buffer, count=1, dtype=np.int64)[0])
        codebook = np.frombuffer(buffer, offset=8, count=length, dtype=self.codebook_dtype)
        indices = np.frombuffer(buffer, offset=8 + codebook.nbytes, dtype=self.indices_dtype)
        dtype = cast(torch.dtype, getattr(torch, serialized_tensor.dtype))
        values = torch.tensor(codebook).to(dtype)[torch.tensor(indices, dtype=torch.int64)]
        return values.reshape(tuple(serialized_tensor.size)).requires_grad_(
            serialized_tensor.requires_grad
        )

    def _nothing(self, tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return indices and codebook of a tensor without elements."""
        shape = tuple(tensor.shape)
        return np.zeros(shape, self.indices_dtype), np.zeros(self.n_bins, self.codebook_dtype)


class UniformEightBit(_Quantization, Uniform8BitQuantization):
    """Uniform quantisation that is defined for constant, single and empty parts."""

    def quantize(
        self, tensor: torch.Tensor, allow_inplace: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return indices and codebook; never changes ``tensor``.

        A bucket is 6/256 deviations wide. Without a spread there is one bucket, which is exact.
        With NaN or an infinity, or a spread beyond float32, every value decodes to NaN, so that
        a part that blew up cannot pass for a large one.
        """
        values = tensor.detach().float()
        count = values.numel()
        if count == 0:
            return self._nothing(tensor)
        centered = values - values.mean()
        spread = centered.norm() / math.sqrt(max(count - 1, 1))
        width = self.RANGE_IN_SIGMAS * spread / self.n_bins
        middle = self.n_bins // 2
        if not torch.isfinite(width):
            codebook = np.full(self.n_bins, np.nan, self.codebook_dtype)
            return np.full(tuple(values.shape), middle, self.indices_dtype), codebook
        if width < TINY:
            indices = torch.full_like(values, middle, dtype=torch.uint8)
        else:
            # One rounding for product and sum, as in torch's own quantiser, which is deprecated.
            steps = torch.addcmul(torch.tensor(float(middle)), centered, 1.0 / width)
            indices = steps.round_().clamp_(0, self.n_bins - 1).to(torch.uint8)
        lookup = average_buckets(values, indices, self.n_bins)
        return indices.numpy(), np.asarray(lookup, dtype=self.codebook_dtype)


class QuantileEightBit(_Quantization, Quantile8BitQuantization):
    """Quantile quantisation that is defined for empty parts."""

    def quantize(
        self, tensor: torch.Tensor, allow_inplace: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return indices and codebook; never changes ``tensor``."""
        if tensor.numel() == 0:
            return self._nothing(tensor)
        return cast("tuple[np.ndarray, np.ndarray]", super().quantize(tensor, allow_inplace))


class BlockwiseEightBit(BlockwiseQuantization):
    """Blockwise quantisation whose decoder works with numpy 2.4."""

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode with bitsandbytes.

        Raises:
            ImportError: bitsandbytes is not installed.
        """
        functional = importlib.import_module("bitsandbytes.functional")
        buffer = serialized_tensor.buffer
        scales, codes = (int(length) for length in np.frombuffer(buffer, count=2, dtype=np.int64))
        absmax = torch.tensor(np.frombuffer(buffer, np.float32, scales, 16))
        codebook = torch.tensor(np.frombuffer(buffer, np.float32, codes, 16 + absmax.nbytes))
        start = 16 + absmax.nbytes + codebook.nbytes
        indices = torch.tensor(np.frombuffer(buffer, np.uint8, offset=start))
        block = quantization._BLOCKWISE_QUANTIZATION_BLOCKSIZE
        values: torch.Tensor = functional.dequantize_blockwise(
            indices.reshape(tuple(serialized_tensor.size)),
            absmax=absmax,
            code=codebook,
            blocksize=block,
            nested=False,
        )
        dtype = cast(torch.dtype, getattr(torch, serialized_tensor.dtype))
        return values.to(dtype).requires_grad_(serialized_tensor.requires_grad)


def table() -> dict[str, CompressionBase]:
    """Return what :func:`install` replaces in hivemind's table, by the name of the wire type."""
    return {
        "FLOAT16": HalfPrecision(),
        "MEANSTD_16BIT": ScaledHalfPrecision(),
        "UNIFORM_8BIT": UniformEightBit(),
        "QUANTILE_8BIT": QuantileEightBit(),
        "BLOCKWISE_8BIT": BlockwiseEightBit(),
    }


def install() -> None:
    """Answer and decode with these codecs in this process from now on.

    It also gives hivemind's quantiles a thread pool of this process: the one that the module
    made before a fork has no threads after it, and would wait for them for ever.
    """
    known: dict[str, Any] = serialization._BASE_COMPRESSION_TYPES
    known.update(table())
    quantization.EXECUTOR = ThreadPoolExecutor(thread_name_prefix="quantiles")
