"""Pages of tensors that a process holds, as the kernel counts them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

#: Bits of a page that is in memory, or swapped out.
_HELD = np.uint64(0b11 << 62)


def whole_pages(tensor: torch.Tensor) -> range:
    """Return the numbers of the pages that a contiguous tensor fills."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    return range(-(-begin // mmap.PAGESIZE), end // mmap.PAGESIZE)


def held(pages: Iterable[range], pid: int | None = None) -> int:
    """Return how many of some pages a process holds; the present process by default."""
    count = 0
    path = Path("/proc") / str(os.getpid() if pid is None else pid) / "pagemap"
    with path.open("rb", buffering=0) as pagemap:
        for each in pages:
            pagemap.seek(each.start * 8)
            entries = np.frombuffer(pagemap.read(len(each) * 8), np.uint64)
            count += int(np.count_nonzero(entries & _HELD))
    return count
