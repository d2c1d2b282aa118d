"""Contract of an invariant, and the time that a fault gets to settle."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

from rayhive.events import APART
from rayhive.registry import FAULTS
from rayhive.timeline import FaultWindow, Timeline

#: Time after a fault or a heal in which peers may not have found each other yet [s].
FAULT_S = 10.0


class Invariant(ABC):
    """A property that holds in every replicate, under any faults.

    Attributes:
        about: The property, in one sentence.
        of_swarm: Whether it is one of a swarm of hivemind peers, and not of every training.
        checked: Number of checks so far.
    """

    about: ClassVar[str]
    of_swarm: ClassVar[bool] = False
    checked: int = 0

    @abstractmethod
    def check(self, log: Timeline) -> list[str]:
        """Return the violations in a replicate, one text each, and count the checks."""


def joins(fault: FaultWindow) -> bool:
    """Return whether a fault started its targets."""
    return fault.kind in FAULTS and FAULTS.get(fault.kind).joins


def settled(fault: FaultWindow) -> float:
    """Return the time from which peers should have found each other [s]; inf if they cannot."""
    if fault.healed is None and fault.effect in APART:
        return math.inf
    return max(fault.fired, fault.healed or 0.0) + FAULT_S
