"""Exact fingerprints of tensors, at the cost of one read on the tensors' own device.

The bits of a tensor are read as words of at most 32 bits. A row of words is reduced to its product
with fixed random numbers of 64 bits, modulo 2**64 (multilinear hashing: Carter and Wegman, 1979,
"Universal classes of hash functions"). Integer sums do not depend on their order, so all devices
and all numbers of threads find the same sums. Rows that differ have equal sums with a chance of at
most 2**-32, because two words differ by less than 2**32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache

import torch

#: Words of a row.
ROW = 1 << 16
#: Rows that a GPU multiplies at once.
ROWS_GPU = 256
#: Type that reads the bits of elements of a size [bytes] as words.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def fingerprint(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return 8 bytes that are equal for tensors of equal bits, shapes apart.

    Args:
        tensors: Tensors of any shapes, types and devices, in an order that is the same for all.
    """
    found = hashlib.blake2b(digest_size=8)
    short: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        words = _words(tensor)
        whole = len(words) // ROW * ROW
        sums += _row_sums(words[:whole])
        if whole < len(words):
            short.append(words[whole:])
    # all ends together: most tensors of a module are shorter than a row
    for dtype in sorted({words.dtype for words in short}, key=str):
        for device in sorted({words.device for words in short}, key=str):
            ends = [w for w in short if (w.dtype, w.device) == (dtype, device)]
            if ends:
                sums += _row_sums(torch.cat(ends))
    for part in sums:
        found.update(part.cpu().numpy().tobytes())
    return found.digest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as a vector of words."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(WORDS[flat.element_size()])


def _row_sums(words: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the sums of rows, some rows at a time; the last row may be short.

    A processor multiplies one row at a time, in the same memory: new memory for each product would
    take ten times as long.
    """
    factors = _factors(words.device)
    on_cpu = words.device.type == "cpu"
    product = torch.empty(min(ROW, len(words)) if on_cpu else 0, dtype=torch.int64)
    for begin in range(0, len(words), ROW if on_cpu else ROW * ROWS_GPU):
        if on_cpu:
            row = words[begin : begin + ROW]
            yield product[: len(row)].copy_(row).mul_(factors[: len(row)]).sum(0, keepdim=True)
        else:
            rows = words[begin : begin + ROW * ROWS_GPU]
            whole = len(rows) // ROW * ROW
            yield (rows[:whole].view(-1, ROW).to(torch.int64) * factors).sum(1)
            if whole < len(rows):
                rest = rows[whole:].to(torch.int64)
                yield (rest * factors[: len(rest)]).sum(0, keepdim=True)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the numbers by which words are multiplied, the same on all peers."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(-(2**31), 2**31, (2, ROW), generator=generator)
    return (halves[0] * 2**32 + halves[1]).to(device)
