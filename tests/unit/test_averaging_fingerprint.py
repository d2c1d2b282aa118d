"""Exact fingerprints: equal for equal bits only."""

from __future__ import annotations

import pytest
import torch

from rayhive.averaging.fingerprint import ROW, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fingerprint_changes_with_every_bit(dtype: torch.dtype) -> None:
    tensors = [torch.arange(6).to(dtype).reshape(2, 3), torch.zeros((), dtype=dtype)]
    before = fingerprint(tensors)
    assert fingerprint([tensor.clone() for tensor in tensors]) == before
    assert fingerprint([tensors[0].flip(1), tensors[1]]) != before
    for at in range(tensors[0].nbytes):
        changed = tensors[0].clone()
        changed.view(torch.uint8).reshape(-1)[at] ^= 1
        assert fingerprint([changed, tensors[1]]) != before


@pytest.mark.parametrize("at", [0, ROW - 1, ROW, 3 * ROW - 1, 3 * ROW, 3 * ROW + 4])
def test_every_row_and_the_end_of_a_long_tensor_count(at: int) -> None:
    long = torch.randn(3 * ROW + 5)
    changed = long.clone()
    changed[at] = -changed[at]
    assert fingerprint([long]) == fingerprint([long.clone()]) != fingerprint([changed])


def test_changes_that_cancel_each_other_are_found() -> None:
    tensor = torch.arange(ROW, dtype=torch.int32)
    changed = tensor.clone()
    changed[3] += 1
    changed[7] -= 1
    assert fingerprint([tensor]) != fingerprint([changed])


def test_the_order_of_tensors_counts() -> None:
    a, b = torch.randn(2 * ROW), torch.randn(2 * ROW)
    short, other = torch.randn(5), torch.randn(7)
    assert fingerprint([a, b]) != fingerprint([b, a])
    assert fingerprint([short, other]) != fingerprint([other, short])


def test_the_number_of_threads_and_the_layout_do_not_count() -> None:
    tensor = torch.randn(300, 500)
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 3):
            torch.set_num_threads(count)
            found |= {fingerprint([tensor]), fingerprint([tensor.t().contiguous().t()])}
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
