"""Fault kinds without effects, for tests of plans that must not depend on the real kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rayhive.faults.in_training import RoundsArgs
from rayhive.faults.kind import FaultKind, Proof
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model


class Where(Model):
    where: str = Field(default="same", pattern="^(same|other)$")


class Notice(Where):
    notice_s: float = Field(default=15.0, ge=0)


class Cores(Model):
    cores: float = Field(default=0.2, gt=0)


class Fake(FaultKind):
    about = "Does nothing."
    group = "process"

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        return {}

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        return Proof(True)


FAKES: dict[str, dict[str, Any]] = {
    "kill": {"effect": "gone", "heals": True, "Args": Where},
    "preempt": {"effect": "gone", "heals": True, "Args": Notice},
    "pause": {"effect": "stopped", "heals": True},
    "join": {"joins": True},
    "leave": {"effect": "gone"},
    "kill_node": {"effect": "gone", "heals": True, "target_type": "node", "needs": ("node",)},
    "straggler": {"heals": True, "needs": ("cpu_quota",), "Args": Cores},
    "rate": {"heals": True, "target_type": "node", "group": "link"},
    "memory_pressure": {"heals": True, "target_type": "node"},
    "partition": {"effect": "cut_off", "heals": True, "target_type": "node", "needs": ("link",)},
    "nan_gradient": {"in_training": True, "needs": ()},
    "sign_flip": {"in_training": True, "needs": (), "Args": RoundsArgs},
}
