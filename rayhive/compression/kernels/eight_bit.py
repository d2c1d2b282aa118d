"""hivemind's 8-bit codecs with fewer passes over memory, in hivemind's layout and types.

Buckets and values are found without widening elements to int64. Quantiles come from a sort, which
numpy does with vector instructions. With numba (the extra ``fast``) the loops over all elements are
compiled.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType

import numpy as np
import torch
from hivemind.compression import (
    CompressionInfo,
    Quantile8BitQuantization,
    Uniform8BitQuantization,
    quantization,
)
from hivemind.proto import runtime_pb2

from rayhive.compression.kernels.half import as_float32, decoded, decoded_dtype, encoded

#: Elements handled at once, so that intermediate results stay in the cache.
CHUNK = 2**17
#: Run length of which hivemind takes quantiles.
SORTED = 10**5
#: Distance of the mean from zero, in deviations, from which on float32 sums lose precision.
FAR = 8.0
#: Magnitude below which squares underflow float32, and the factor that is applied then.
SMALL, LARGER = 1e-15, 2.0**64
TINY = torch.finfo(torch.float32).tiny


@cache
def loops() -> ModuleType | None:
    """Return :mod:`rayhive.compression.kernels.eight_bit_numba`, or None without numba.

    The first call compiles for about a second.
    """
    try:
        from rayhive.compression.kernels import eight_bit_numba
    except ImportError:
        return None
    return eight_bit_numba


class _Quantization(quantization.Quantization):
    """Common layout of both codecs: codebook length, codebook, one byte per element."""

    @classmethod
    def compiled(cls) -> _Quantization:
        """Return a codec whose loops are compiled now, not during the first round."""
        loops()
        return cls()

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode a floating-point tensor without changing it."""
        indices, codebook = self.quantize(as_float32(tensor, self))
        length = np.int64(len(codebook)).tobytes()
        buffer = b"".join((length, codebook.data, np.ravel(indices).data))
        return encoded(self, tensor, buffer, tensor.dtype)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode; works with numpy 2.4 as well, unlike hivemind's decoder."""
        buffer = serialized_tensor.buffer
        length = int(np.frombuffer(buffer, count=1, dtype=np.int64)[0])
        codebook = np.frombuffer(buffer, offset=8, count=length, dtype=self.codebook_dtype)
        indices = np.frombuffer(buffer, offset=8 + codebook.nbytes, dtype=self.indices_dtype)
        table = torch.tensor(codebook).to(decoded_dtype(serialized_tensor))
        values = torch.empty(len(indices), dtype=table.dtype)
        compiled = loops()
        # A shorter table is an error, which torch detects.
        if compiled is not None and table.dtype == torch.float32 and length == self.n_bins:
            compiled.look_up(table.numpy(), indices, values.numpy())
        else:
            _look_up(table, indices, values)
        return decoded(values, serialized_tensor)

    def _means(self, values: torch.Tensor, indices: torch.Tensor) -> np.ndarray:
        """Return the mean of each bucket's values, summed in their order as hivemind does."""
        sums = torch.bincount(indices, values, minlength=self.n_bins)
        counts = torch.bincount(indices, minlength=self.n_bins).clamp_(min=1)
        means: np.ndarray = (sums / counts).numpy()
        return means


class UniformEightBit(_Quantization, Uniform8BitQuantization):
    """Uniform quantisation that is defined for constant, single and empty parts.

    hivemind stores the differences of a part from its mean; here mean and deviation come from one
    read. Both differ from hivemind's in the last bits, and so may the bucket of a value on a
    border.
    """

    def quantize(
        self, tensor: torch.Tensor, allow_inplace: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return flat indices and codebook without changing ``tensor``.

        A bucket is 6/256 deviations wide. A constant part has one bucket, which is exact. With NaN
        or an infinity, or a spread beyond float32, every value decodes to NaN, so that a part that
        diverged cannot be taken for a large one.
        """
        values = tensor.detach().float().reshape(-1)
        mean, deviation = _moments(values)
        centre, scale = np.float32(0), 1.0
        if not abs(mean) <= FAR * deviation < math.inf:
            centre = np.float32(mean)
            values = values - float(centre)
            mean, deviation = _moments(values)
        if max(deviation, abs(mean)) < SMALL:
            scale = LARGER
            values = values * scale
            mean, deviation = _moments(values)
        indices, codebook = self._buckets(values, mean, deviation)
        return indices, codebook / np.float32(scale) + centre

    def _buckets(
        self, values: torch.Tensor, mean: float, deviation: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each value's bucket, and each bucket's mean."""
        width = self.RANGE_IN_SIGMAS * deviation / self.n_bins
        indices = np.empty(values.numel(), self.indices_dtype)
        if not TINY <= width < math.inf:
            indices.fill(self.n_bins // 2)
            if not math.isfinite(width):
                return indices, np.full(self.n_bins, np.nan, self.codebook_dtype)
        else:
            # Plus half a bucket, because a cast to integers truncates.
            first = self.n_bins / 2 + 0.5 - mean / width
            compiled = loops()
            if compiled is not None:
                compiled.bucket_indices(values.numpy(), first, 1 / width, indices)
                return indices, compiled.means(values.numpy(), indices)
            _bucket_indices(values, first, 1 / width, indices)
        return indices, self._means(values, torch.from_numpy(indices))


def _bucket_indices(values: torch.Tensor, first: float, factor: float, indices: np.ndarray) -> None:
    """Set the bucket of each value: ``first + factor * value``, truncated to 0 to 255."""
    start_from, steps = torch.tensor(first), torch.empty(min(values.numel(), CHUNK))
    for start in range(0, values.numel(), CHUNK):
        chunk = values[start : start + CHUNK]
        out = torch.add(start_from, chunk, alpha=factor, out=steps[: len(chunk)]).clamp_(0, 255)
        np.copyto(indices[start : start + CHUNK], out.numpy(), casting="unsafe")


def _look_up(table: torch.Tensor, indices: np.ndarray, values: torch.Tensor) -> None:
    """Set values to the entries of a table at the indices."""
    wide = torch.empty(min(len(indices), CHUNK), dtype=torch.int32)
    for start in range(0, len(indices), CHUNK):
        out = values[start : start + CHUNK]
        np.copyto(wide.numpy()[: len(out)], indices[start : start + CHUNK])
        torch.index_select(table, 0, wide[: len(out)], out=out)


def _moments(values: torch.Tensor) -> tuple[float, float]:
    """Return mean and unbiased deviation; the latter is accurate unless far below the mean.

    Neither is finite if a value is not. Both are zero for no values.
    """
    count = values.numel()
    total = squares = 0.0
    for chunk in torch.split(values, CHUNK):
        total += float(chunk.sum())
        squares += float(torch.dot(chunk, chunk))
    mean = total / max(count, 1)
    variance = (squares - count * mean * mean) / max(count - 1, 1)
    return mean, variance if math.isnan(variance) else math.sqrt(max(variance, 0.0))


class QuantileEightBit(_Quantization, Quantile8BitQuantization):
    """Quantile quantisation that is defined for empty parts."""

    def quantize(
        self, tensor: torch.Tensor, allow_inplace: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return flat indices and codebook without changing ``tensor``.

        The borders are quantiles of the quantiles of runs of about 100,000 elements.
        """
        values = tensor.detach().float().reshape(-1)
        if values.numel() == 0:
            return np.zeros(0, self.indices_dtype), np.zeros(self.n_bins, self.codebook_dtype)
        levels = np.linspace(0.0, 1.0, self.n_bins + 1, dtype=np.float32)
        size = quantization.get_chunk_size(values.numel(), SORTED)
        runs = [_quantiles(run.numpy(), levels) for run in torch.split(values, size)]
        borders = _quantiles(np.concatenate(runs), levels)[1:-1]
        indices = _below(values, torch.from_numpy(borders))
        return indices.numpy(), self._means(values, indices)


def _quantiles(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the result of ``np.quantile``, with its interpolation, from a full sort."""
    ordered = np.sort(values)
    if np.isnan(ordered[-1]):
        return np.full_like(levels, np.nan)
    places = (len(ordered) - 1) * levels
    left = np.minimum(places.astype(np.int64), len(ordered) - 1)
    low, high = ordered[left], ordered[np.minimum(left + 1, len(ordered) - 1)]
    part, step = places - left.astype(np.float32), high - low
    return np.where(part < 0.5, low + step * part, high - step * (1 - part))


def _below(values: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """Return the number of the 2^k - 1 rising borders below each value, as uint8.

    Bisects for many values at once, in k steps of one look-up, one comparison and one sum.
    """
    counts = torch.empty(values.numel(), dtype=torch.uint8)
    for run, out in zip(torch.split(values, CHUNK), torch.split(counts, CHUNK), strict=True):
        found = torch.zeros(run.numel(), dtype=torch.int32)
        border, above = torch.empty_like(run), torch.empty_like(found)
        step = (len(borders) + 1) // 2
        while step:
            torch.index_select(borders[step - 1 :], 0, found, out=border)
            torch.lt(border, run, out=above)
            found.add_(above, alpha=step)
            step //= 2
        out.copy_(found)
    return counts
