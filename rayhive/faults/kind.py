"""The contract of a fault kind: set up, inject, prove, heal, tear down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rayhive.faults.target import FaultTarget
from rayhive.spec import Model
from rayhive.spec.fault_plan import PlannedFault

Group = Literal["process", "node", "link", "training", "clock"]
#: What a fault does to its targets while it lasts: they train on, are there no more, do nothing,
#: or are out of the others' reach.
Effect = Literal["none", "gone", "stopped", "cut_off"]


class NoArgs(Model):
    """Parameters of a kind that has none."""


@dataclass(frozen=True)
class Proof:
    """Whether a fault took effect, and how that is known.

    Attributes:
        ok: It did.
        what: What was looked at and seen; goes into the ``fault_verified`` event.
    """

    ok: bool
    what: dict[str, Any] = field(default_factory=dict)


class FaultKind(ABC):
    """One kind of fault, for one planned fault.

    The clock calls :meth:`setup` before training starts, :meth:`inject` and :meth:`verify` when
    the fault is due, :meth:`heal` ``heal_after_s`` later (or never), and :meth:`teardown` at the
    end of the replicate, whatever happened before; it has to leave nothing of the fault behind.

    Attributes:
        about: What it does, in one sentence, for ``rayhive scenario list`` and the docs.
        group: What it breaks.
        needs: What the machine must allow: keys of :data:`rayhive.faults.target.CAPABILITIES`.
            Parameters may need more (:meth:`needs_for`).
        targets: Whether it names peers or nodes; a role or a peer given for a node stands for
            the node that the peer is on.
        effect: Whether its targets train while it lasts, and with the others.
        heals: Whether it lasts until healed; then a plan without ``heal_after_s`` lets it last.
        inside: Whether the peer does it by itself, from its spec, in the planned round.
        Args: Its parameters with defaults; unknown ones are refused.
    """

    about: ClassVar[str]
    group: ClassVar[Group]
    needs: ClassVar[tuple[str, ...]] = ("signals",)
    targets: ClassVar[Literal["peer", "node"]] = "peer"
    effect: ClassVar[Effect] = "none"
    heals: ClassVar[bool] = False
    inside: ClassVar[bool] = False
    Args: ClassVar[type[Model]] = NoArgs

    @classmethod
    def needs_for(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        """Return what the machine must allow for parameters as a plan or a scenario gives them."""
        return cls.needs

    def __init__(self, planned: PlannedFault) -> None:
        self.planned = planned
        self.args: Any = self.Args.model_validate(planned.args)

    async def setup(self, swarm: FaultTarget) -> None:
        """Prepare what has to be there before training starts."""
        return

    @abstractmethod
    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Do it.

        Args:
            swarm: The swarm.
            who: The slots or nodes that the plan's ``who`` stands for now.

        Returns:
            What was done; goes into the ``fault_fired`` event.
        """

    @abstractmethod
    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """Prove from outside, within :attr:`patience_s`, that it took effect."""

    @property
    def patience_s(self) -> float:
        """How long any of its steps may take [s]; longer is an error."""
        return 60.0

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Undo it; return what was done, for the ``fault_healed`` event."""
        return {}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Remove what may be left of it; called once, also after errors."""
        return
