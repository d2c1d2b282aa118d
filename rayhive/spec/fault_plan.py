"""Fault plans: what breaks, where and when; the same bytes for the same seed."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rayhive.spec import Model

#: Roles that only the running swarm knows; every other choice is made when the plan is.
DYNAMIC_ROLES = ("leader", "slowest")
#: Training after the last fault where its length was not planned, and the least that chaos plans
#: [s]: the invariant ``one_component`` looks at rounds that begin ten seconds after it.
QUIET_S = 15.0
_TARGET = re.compile(r"(peer|node)-\d+|" + "|".join(DYNAMIC_ROLES))


class At(Model):
    """When a fault fires: exactly one of the two.

    Attributes:
        round: As soon as any peer has finished this round, or, for a fault inside the training,
            in this round.
        seconds: So long after training started [s].
    """

    round: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one(self) -> At:
        if (self.round is None) == (self.seconds is None):
            raise ValueError("exactly one of round and seconds")
        return self

    def __str__(self) -> str:
        return f"round {self.round}" if self.round is not None else f"{self.seconds:g} s"


class PlannedFault(Model):
    """One fault of a plan.

    Attributes:
        id: Unique in the plan: ``f0``, ``f1``, … in the order of the plan.
        kind: A registered kind.
        who: Logical peers (``peer-1``: whichever life of that peer runs), nodes (``node-0``: the
            node of peer 0 when training started), or one role that is known only when it fires.
        at: When.
        heal_after_s: Time from the injection to the heal [s]; None if there is nothing to heal, or
            if the fault lasts to the end.
        args: Parameters of the kind, complete.
    """

    id: str = Field(pattern=r"^f\d+$")
    kind: str
    who: tuple[str, ...] = Field(min_length=1)
    at: At
    heal_after_s: float | None = Field(default=None, ge=0)
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _targets(self) -> PlannedFault:
        for name in self.who:
            if not _TARGET.fullmatch(name):
                raise ValueError(f"{name!r} is neither peer-N, node-N nor a role")
        if len(self.who) > 1 and set(self.who) & set(DYNAMIC_ROLES):
            raise ValueError("a role stands alone")
        return self


class FaultPlan(Model):
    """All that a scenario breaks in one replicate, in the order of firing.

    Attributes:
        scenario: Its name.
        seed: What its choices were drawn from.
        peers: Peers that start together.
        faults: The faults.
        at_most: Most peers that may be down or under a fault at once: a fault that would make it
            more is held back. None for no bound.
    """

    scenario: str = "none"
    seed: int = 0
    peers: int = Field(ge=1)
    faults: tuple[PlannedFault, ...] = ()
    at_most: int | None = Field(default=None, ge=1)

    # plans without a bound keep the hash that they had
    @model_serializer(mode="wrap")
    def _without_an_empty_bound(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = dump(self)
        return {key: value for key, value in found.items() if (key, value) != ("at_most", None)}

    def canonical(self) -> str:
        """Return the plan as JSON that is the same, byte for byte, for the same plan."""
        return json.dumps(
            self.model_dump(mode="json"),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=True,
            allow_nan=False,
        )

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    @property
    def joins(self) -> tuple[int, ...]:
        """Numbers of the peers that the plan brings in addition to those that start together."""
        numbers = {
            int(name.removeprefix("peer-"))
            for fault in self.faults
            for name in fault.who
            if name.startswith("peer-")
        }
        return tuple(sorted(number for number in numbers if number >= self.peers))
