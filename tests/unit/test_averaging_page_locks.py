"""Locks of the memory that a GPU copies from, with a stand-in for CUDA's functions."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest
import torch

from rayhive.averaging import page_locks
from rayhive.averaging.page_locks import SMALLEST, PageLocks


class Cuda:
    """Notes what is locked: the address and size of each memory.

    Args:
        room: Bytes that can be locked.
    """

    def __init__(self, room: float = float("inf")) -> None:
        self.locked: dict[int, int] = {}
        self.room = room

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if sum(self.locked.values()) + size > self.room:
            return 2
        assert address not in self.locked
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def shared(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size).share_memory_() for size in sizes]  # type: ignore[no-untyped-call]


def test_the_memory_of_large_tensors_is_locked_until_it_is_closed(cuda: Cuda) -> None:
    tensors = shared(SMALLEST, 3, SMALLEST // 4)
    locks = PageLocks([tensors[0], tensors[1], tensors[2].view(2, -1)])
    assert cuda.locked == {
        tensors[0].data_ptr(): 4 * SMALLEST,
        tensors[2].data_ptr(): SMALLEST,
    }
    assert locks.locked_bytes == 5 * SMALLEST
    locks.close()
    locks.close()
    assert cuda.locked == {}


def test_forgotten_locks_end_before_their_memory(cuda: Cuda) -> None:
    tensors = shared(SMALLEST)
    locks = PageLocks(tensors)
    assert cuda.locked
    del locks
    gc.collect()
    assert cuda.locked == {}


def test_a_fork_leaves_the_locks_to_its_parent(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = PageLocks(shared(SMALLEST))
    monkeypatch.setattr(page_locks, "os", SimpleNamespace(getpid=lambda: os.getpid() + 1))
    locks.close()
    assert len(cuda.locked) == 1


def test_memory_that_cannot_be_locked_is_left(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[str] = []

    def next_kernel(*shape: object, device: str) -> torch.Tensor:
        raised.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", next_kernel)
    cuda.room = 6 * SMALLEST
    locks = PageLocks(shared(SMALLEST, SMALLEST, SMALLEST // 4))
    assert locks.locked_bytes == 4 * SMALLEST
    assert raised == ["cuda"], "else the trainer's next kernel raises it"
    locks.close()
    assert cuda.locked == {}
