"""Replicas are compared exactly, and by distance once they have differed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.averaging.tensor_summary import BUCKETS
from rayhive.events import AveragingReason
from rayhive.optim.replica_check import (
    DRIFT,
    LOSSY_DRIFT,
    WATCHED_ROUNDS,
    Announcement,
    ReplicaCheck,
    asked_reason,
)


class Replica:
    """A peer with one parameter of some values.

    Args:
        values: The values.
        lossy: Whether parameters are averaged with loss.
    """

    def __init__(self, *values: float, lossy: bool = False) -> None:
        self.parameter = torch.tensor(values, dtype=torch.float64)
        self.busy = False
        averager: Any = SimpleNamespace(
            lossy=lossy,
            settled_parameters=lambda: None if self.busy else [self.parameter],
        )
        self.check = ReplicaCheck(averager)

    def announced(self, round_: int) -> Announcement:
        """Return what the group reads of this peer's announcement."""
        return Announcement.read(Announcement(round_, None, *self.check.summary(round_)).packed())


def differ(round_: int, *replicas: Replica) -> bool:
    """Let peers announce and compare their replicas in a round; return their common result."""
    announced = [replica.announced(round_) for replica in replicas]
    (result,) = {replica.check.differ(round_, announced) for replica in replicas}
    return result


def test_equal_replicas_do_not_differ() -> None:
    assert not differ(1, Replica(1.0, 2.0), Replica(1.0, 2.0), Replica(1.0, 2.0))


def test_a_first_difference_counts_whatever_its_size() -> None:
    assert differ(1, Replica(1.0, 2.0), Replica(1.0, 2.0), Replica(1.0, 2.0 + 1e-15))


@pytest.mark.parametrize(
    ("change", "lossy", "expected"),
    [
        (0.5 * DRIFT, False, False),
        (2 * DRIFT, False, True),
        (0.5 * LOSSY_DRIFT, True, False),
        (2 * LOSSY_DRIFT, True, True),
    ],
)
def test_later_differences_count_beyond_the_tolerance(
    change: float, lossy: bool, expected: bool
) -> None:
    left, right = (Replica(1.0, value, lossy=lossy) for value in (1.0, 2.0))
    assert differ(1, left, right)
    right.parameter.copy_(left.parameter * (1 + change))
    assert differ(2, left, right) is expected


def test_a_lasting_difference_is_compared_by_distance_in_every_round() -> None:
    left, right = Replica(1.0), Replica(1.0 + 0.1 * DRIFT)
    assert differ(1, left, right)
    assert not any(differ(round_, left, right) for round_ in range(2, 20))


def test_a_newcomer_that_differs_counts_although_the_others_exchange_digests() -> None:
    left, right = Replica(1.0), Replica(1.0 + 0.1 * DRIFT)
    assert differ(1, left, right) and not differ(2, left, right)
    assert differ(3, left, right, Replica(1.0 + 0.2 * DRIFT))


def test_digests_are_announced_for_some_rounds_after_a_difference() -> None:
    left, right = Replica(1.0), Replica(2.0)
    assert left.announced(1).digest is None
    assert differ(1, left, right)
    assert left.announced(1 + WATCHED_ROUNDS).digest is not None
    assert left.announced(2 + WATCHED_ROUNDS).digest is None


def test_values_that_are_not_finite_are_farther_apart_than_any_tolerance() -> None:
    left, right = Replica(1.0), Replica(2.0)
    assert differ(1, left, right)
    right.parameter.fill_(float("nan"))
    assert differ(2, left, right)


def test_a_replica_that_background_work_may_change_is_not_compared() -> None:
    busy = Replica(1.0)
    busy.busy = True
    assert busy.announced(1).exact is None
    assert not differ(1, Replica(2.0), busy)


@pytest.mark.parametrize("waits", ["pending_updates", "averaging_in_progress"])
def test_parameters_are_not_settled_while_work_goes_on(waits: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    averager: Any = SimpleNamespace(
        optimizer=torch.optim.SGD([parameter], lr=1.0),
        pending_updates=set(),
        averaging_in_progress=False,
    )
    assert RayhiveStateAverager.settled_parameters(averager) == [parameter]
    setattr(averager, waits, {"work"})
    assert RayhiveStateAverager.settled_parameters(averager) is None


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        [1, True],
        [1, "for fun", 3, [1, 2, 3]],
        ["one", ["joined"], "text", [1, 1.0, b"short"]],
        [1, None, None, [1.0, 1, bytes(4 * BUCKETS)]],
    ],
)
def test_an_announcement_without_sense_says_nothing(entry: Any) -> None:
    found = Announcement.read(entry)
    assert (found.reason, found.exact, found.digest) == (None, None, None)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([None, None], None),
        (["joined", None], "joined"),
        (["joined", "failed_round"], "failed_round"),
        (["failed_round", "partition", "joined"], "partition"),
    ],
)
def test_a_group_has_one_reason(asked: list[AveragingReason | None], expected: str | None) -> None:
    announced = [Announcement(1, reason) for reason in asked]
    assert asked_reason(announced) == asked_reason(announced[::-1]) == expected
