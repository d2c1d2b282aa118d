"""Fault plans: kind, targets and time of every fault, determined by a seed."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rayhive.spec.model import Model

#: Roles that only the running swarm can resolve; all other targets are chosen in the plan.
DYNAMIC_ROLES = ("leader", "slowest")
#: Training time after the last fault where a plan sets none, and the least that chaos plans [s]:
#: the invariant ``one_component`` checks rounds that begin ten seconds after it.
QUIET_S = 15.0
_TARGET = re.compile(r"(peer|node)-\d+|" + "|".join(DYNAMIC_ROLES))


class At(Model):
    """Time at which a fault fires; exactly one of the two fields is given.

    Attributes:
        round: Round after which it fires, as soon as any peer has finished it; a fault inside the
            training fires in this round.
        seconds: Time since the start of training [s].
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
        who: Targets: replicas (``peer-1``, in its current incarnation), nodes (``node-0``: the node
            of peer 0 at the start of training), or one role that is resolved when it fires.
        at: Time at which it fires.
        heal_after_s: Time from the injection to the heal [s]; None if the fault is not healed.
        args: All parameters of the kind.
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
    """Faults of a scenario in one replicate, in the order of firing.

    Attributes:
        scenario: Name of the scenario.
        seed: Seed of its random choices.
        peers: Number of peers that start together.
        faults: The faults.
        at_most: Largest number of peers that may be down or under a fault at once; a fault that
            would exceed it is delayed. None is no bound.
    """

    scenario: str = "none"
    seed: int = 0
    peers: int = Field(ge=1)
    faults: tuple[PlannedFault, ...] = ()
    at_most: int | None = Field(default=None, ge=1)

    # The hash of a plan without a bound must not depend on the field.
    @model_serializer(mode="wrap")
    def _without_an_empty_bound(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = dump(self)
        return {key: value for key, value in found.items() if (key, value) != ("at_most", None)}

    def in_rounds_of(self, samples: int, *, planned: int) -> FaultPlan:
        """Return the plan for rounds of another size.

        A fault of round r moves to the round in which the r-th planned one would end, so that it
        strikes after as many samples. A fault that acts in several rounds acts in those in which
        they would end.

        Args:
            samples: Samples of a round, over the swarm.
            planned: Samples of a round for which the plan was made.
        """
        if samples == planned:
            return self

        def moved(fault: PlannedFault) -> PlannedFault:
            first = fault.at.round
            if first is None:
                return fault
            at, args = -(-first * planned // samples), dict(fault.args)
            if "rounds" in args:
                last = -(-(first + args["rounds"] - 1) * planned // samples)
                args["rounds"] = last - at + 1
            return fault.model_copy(update={"at": At(round=at), "args": args})

        return self.model_copy(update={"faults": tuple(map(moved, self.faults))})

    def canonical(self) -> str:
        """Return the plan as JSON; equal plans have equal bytes."""
        data = self.model_dump(mode="json")
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    @property
    def joins(self) -> tuple[int, ...]:
        """Numbers of the peers that join after the start."""
        names = (name for fault in self.faults for name in fault.who if name.startswith("peer-"))
        numbers = {int(name.removeprefix("peer-")) for name in names}
        return tuple(sorted(number for number in numbers if number >= self.peers))
