"""Replicas are compared exactly, and by distance once they have differed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayhive.averaging.tensor_summary import fingerprint
from rayhive.optim.replica_check import DRIFT, WATCHED_ROUNDS, ReplicaCheck


def replica(*values: float, lossy: bool = False) -> Any:
    """Return the check of a peer with one parameter of these values."""
    tensors = [torch.tensor(values, dtype=torch.float64)]
    averager: Any = SimpleNamespace(replicated_tensors=lambda: tensors, lossy=lossy)
    check: Any = ReplicaCheck(averager)
    check.tensors = tensors
    return check


def differ(round_: int, *checks: Any) -> bool:
    """Let peers announce and compare their replicas in a round; return their common result."""
    announced = [check.announcement(round_) for check in checks]
    (result,) = {check.differ(round_, announced) for check in checks}
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_fingerprint_changes_with_every_bit(dtype: torch.dtype) -> None:
    tensors = [torch.arange(6, dtype=dtype).reshape(2, 3), torch.zeros((), dtype=dtype)]
    before = fingerprint(tensors)
    assert fingerprint([tensor.clone() for tensor in tensors]) == before
    assert fingerprint([tensors[0].flip(1), tensors[1]]) != before
    for at in range(tensors[0].nbytes):
        changed = tensors[0].clone()
        changed.view(torch.uint8).reshape(-1)[at] ^= 1
        assert fingerprint([changed, tensors[1]]) != before


def test_equal_replicas_do_not_differ() -> None:
    assert not differ(1, replica(1.0, 2.0), replica(1.0, 2.0), replica(1.0, 2.0))


def test_a_first_difference_counts_whatever_its_size() -> None:
    assert differ(1, replica(1.0, 2.0), replica(1.0, 2.0 + 1e-6))


@pytest.mark.parametrize(
    ("change", "lossy", "expected"),
    [(0.1 * DRIFT, False, False), (10 * DRIFT, False, True), (10 * DRIFT, True, False)],
)
def test_later_differences_count_beyond_the_tolerance(
    change: float, lossy: bool, expected: bool
) -> None:
    left, right = (replica(1.0, value, lossy=lossy) for value in (1.0, 2.0))
    assert differ(1, left, right)
    ours, theirs = (check.tensors[0] for check in (left, right))
    theirs.copy_(ours * (1 + change))
    assert differ(2, left, right) is expected


def test_digests_are_announced_for_some_rounds_after_a_difference() -> None:
    left, right = replica(1.0), replica(2.0)
    assert differ(1, left, right)
    assert left.announcement(1 + WATCHED_ROUNDS)[1] is not None
    assert left.announcement(2 + WATCHED_ROUNDS)[1] is None


def test_a_replica_that_background_work_may_change_is_not_compared() -> None:
    averager: Any = SimpleNamespace(replicated_tensors=lambda: None, lossy=False)
    busy = ReplicaCheck(averager)
    assert busy.announcement(1) is None
    assert not differ(1, replica(1.0), busy)
