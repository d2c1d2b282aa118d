"""Memory of tensors that is given back to the operating system while the tensors stay.

A forked process shares the pages of its parent until one of them writes. Parameters, gradients and
statistics are written in every step: the trainer then gets new pages, and the child keeps the old
ones for ever. Tensors that the processes share have pages from the first write until they are given
back. Both read as zeros afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator

import torch

_LIBC = ctypes.CDLL(None)
#: Gives back pages of a file that processes share; Python has no name for it everywhere.
_MADV_REMOVE = getattr(mmap, "MADV_REMOVE", 9)


def drop_inherited(tensors: Iterable[torch.Tensor]) -> None:
    """Give back this process's pages of its parent's tensors, which it never reads.

    Nor does it keep its parent's default type of tensors: averages have 32 bits. Tensors that
    processes share, and those of a GPU, stay as they are.

    Args:
        tensors: Any tensors of the parent.
    """
    torch.set_default_dtype(torch.float32)
    if sys.platform != "linux":
        return
    for tensor in tensors:
        if tensor.device.type == "cpu" and not _is_shared(tensor):
            _advise(tensor, mmap.MADV_DONTNEED)
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)  # what the parent had freed is written to again as well


def empty_shared(tensors: Iterable[torch.Tensor]) -> None:
    """Give back the pages of tensors that processes share; the next write gets new ones.

    Tensors in the memory of one process only stay as they are, and so does the rest of a tensor
    that fills no whole page.
    """
    if sys.platform != "linux":
        return
    for tensor in tensors:
        if tensor.device.type == "cpu" and _is_shared(tensor):
            _advise(tensor, _MADV_REMOVE)


def _advise(tensor: torch.Tensor, advice: int) -> None:
    """Give an advice for the whole pages of a tensor without gaps."""
    if tensor.layout != torch.strided:
        return
    extent = 1 + sum((n - 1) * stride for n, stride in _dims(tensor))
    if extent != tensor.numel():
        return
    begin, end = tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:  # a refusal costs memory only
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _dims(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.stride(), strict=True)


def _is_shared(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]
