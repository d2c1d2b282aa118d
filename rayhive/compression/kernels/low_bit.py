"""Codecs of four, two and one bit per element, with scales for each block.

A block with a value that is not finite decodes to values that are not finite. Magnitudes are means
in float32, so that blocks whose sum exceeds float32 do so as well.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from rayhive.compression.kernels.packed import Bytes, PackedCodec, by_blocks

#: Steps on either side of zero with four bits; a sixteenth code is not used.
STEPS = 7
TINY = torch.finfo(torch.float32).tiny


class _Blocks(PackedCodec):
    """Codec of scales, block by block, followed by the bits of all elements.

    Attributes:
        element_bits: Bits of an element.
        scales: Scales of a block.
    """

    element_bits: ClassVar[int]
    scales: ClassVar[int]

    def size(self, elements: int) -> int:
        """Return the bytes of an encoding."""
        return self._head(elements) + -(-elements * self.element_bits // 8)

    def _head(self, elements: int) -> int:
        """Return the bytes of all scales."""
        return 4 * self.scales * -(-elements // self.block)

    def pack(self, values: torch.Tensor) -> bytes:
        """Encode flat float32 values without changing them."""
        scales = torch.empty(-(-len(values) // self.block), self.scales)
        codes = torch.empty(len(values), dtype=torch.uint8)

        def work(rows: torch.Tensor, elements: slice, blocks: slice) -> None:
            self._encode(rows, scales[blocks], codes[elements].view(rows.shape))

        by_blocks(values, self.block, work)
        return scales.numpy().tobytes() + self._packed(codes.numpy()).tobytes()

    def unpack(self, buffer: bytes, elements: int) -> torch.Tensor:
        """Decode to flat float32 values."""
        self.check_size(buffer, self.size(elements))
        head = self._head(elements)
        table = np.frombuffer(buffer, np.float32, count=head // 4)
        scales = torch.from_numpy(table.reshape(-1, self.scales).copy())
        bits = np.frombuffer(buffer, np.uint8, offset=head)
        codes = torch.from_numpy(self._unpacked(bits, elements))
        values = torch.empty(elements)

        def work(rows: torch.Tensor, places: slice, blocks: slice) -> None:
            self._decode(codes[places].view(rows.shape), scales[blocks], rows)

        by_blocks(values, self.block, work)
        return values

    def _encode(self, rows: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """Set the scales and the codes of blocks, one block per row."""
        raise NotImplementedError

    def _decode(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        """Set the values of blocks."""
        raise NotImplementedError

    def _packed(self, codes: Bytes) -> Bytes:
        """Return the bits of codes; 4 and 8 codes of few bits share a byte."""
        raise NotImplementedError

    def _unpacked(self, bits: Bytes, elements: int) -> Bytes:
        """Return the codes in an array of their own."""
        raise NotImplementedError


class FourBit(_Blocks):
    """Multiples of a seventh of the block's largest magnitude, from -7 to 7."""

    compression_type = 64
    block, element_bits, scales = 128, 4, 1

    def _encode(self, rows: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        largest = rows.abs().amax(1, keepdim=True)
        finite = largest.isfinite()
        if not bool(finite.all()):
            rows = torch.where(finite, rows, 0.0)
        torch.div(largest, STEPS, out=scales)
        factors = torch.where(finite & (scales >= TINY), 1 / scales, 0.0)
        scales.masked_fill_(~finite, torch.nan)
        codes.copy_((rows * factors).round_().add_(STEPS + 1))

    def _decode(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        rows.copy_(codes).sub_(STEPS + 1).mul_(scales)

    def _packed(self, codes: Bytes) -> Bytes:
        pairs = np.zeros(-(-len(codes) // 2), np.uint8)
        pairs[:] = codes[0::2]
        pairs[: len(codes) // 2] |= codes[1::2] << 4
        return pairs

    def _unpacked(self, bits: Bytes, elements: int) -> Bytes:
        codes = np.empty(2 * len(bits), np.uint8)
        codes[0::2], codes[1::2] = bits & 15, bits >> 4
        return codes[:elements]


class TwoBit(_Blocks):
    """Signs, and one of two magnitudes: the mean of the smaller ones, or of the larger ones."""

    compression_type = 65
    block, element_bits, scales = 256, 2, 2

    def _encode(self, rows: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        large = two_magnitudes(rows, scales)
        codes.copy_(large).mul_(2).add_(rows >= 0)

    def _decode(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        torch.where(codes > 1, scales[:, 1:], scales[:, :1], out=rows)
        rows.mul_(signs(codes & 1))

    def _packed(self, codes: Bytes) -> Bytes:
        return np.packbits(np.concatenate([codes & 1, codes >> 1]))

    def _unpacked(self, bits: Bytes, elements: int) -> Bytes:
        planes = np.unpackbits(bits, count=2 * elements).reshape(2, elements)
        codes: Bytes = planes[0] + 2 * planes[1]
        return codes


class OneBit(_Blocks):
    """Signs times the mean magnitude."""

    compression_type = 66
    block, element_bits, scales = 1024, 1, 1

    def _encode(self, rows: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        scales.copy_(rows.abs().mean(1, keepdim=True))
        codes.copy_(rows >= 0)

    def _decode(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        torch.mul(signs(codes), scales, out=rows)

    def _packed(self, codes: Bytes) -> Bytes:
        return np.packbits(codes)

    def _unpacked(self, bits: Bytes, elements: int) -> Bytes:
        return np.unpackbits(bits, count=elements)


def two_magnitudes(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide the magnitudes of each row at their mean, and set the means of both sides.

    Args:
        rows: One block per row, of at least one element.
        scales: The mean of the smaller magnitudes, and of the larger ones; equal if there are
            no larger ones, and 0 for the smaller ones if all are larger.

    Returns:
        Whether each magnitude is one of the larger ones.
    """
    sizes = rows.abs()
    large = sizes > sizes.mean(1, keepdim=True)
    count = large.sum(1)
    lower, upper = (torch.where(side, sizes, 0.0).sum(1) for side in (~large, large))
    # a rounded mean of equal values may be less than all of them
    scales[:, 0] = lower / (sizes.shape[1] - count).clamp(min=1)
    scales[:, 1] = torch.where(count > 0, upper / count.clamp(min=1), scales[:, 0])
    return large


def signs(positive: torch.Tensor) -> torch.Tensor:
    """Return 1 where a uint8 is 1, and -1 where it is 0."""
    return positive.float().mul_(2).sub_(1)
